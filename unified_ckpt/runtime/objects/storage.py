"""A prefix of a bucket as a root, with the names and the calls of a folder.

A folder is a common prefix of keys. An object becomes visible whole. Files of a save are staged:
what is written below the name of a staging folder is uploaded to the keys of the checkpoint, and
becomes visible when the save commits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.staged import DEFAULT_PART_NBYTES, StagedFiles
from unified_ckpt.runtime.objects.store import Buffer, Listing, ObjectStat, ObjectStore
from unified_ckpt.runtime.storage.protocol import ReadRange
from unified_ckpt.runtime.storage.regular_files import open_binary, walk

_READ_NBYTES = 8 << 20  # of a local file at a time


class ObjectStorage(AbstractContextManager["ObjectStorage"]):
    """The keys of a bucket that start with `prefix`. Implements `Storage`.

    `on_request`: called after each request of a save, as a heartbeat.
    """

    fsync = True  # an object is durable once it is stored
    smallest_part_nbytes: int | None = DEFAULT_PART_NBYTES

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix.strip("/")
        self.root = f"{store.url}/{self.prefix}".rstrip("/")
        self.on_request: Callable[[], object] = lambda: None
        self._pins: dict[str, ObjectStat] = {}  # objects as they were at their first read
        self._staged: dict[str, StagedFiles] = {}  # by the name of the staging folder

    def __exit__(self, *error: object) -> None:
        self.close()

    def path(self, name: str) -> str:
        """Return the URL of a name."""
        return f"{self.root}/{name}" if name else self.root

    def key(self, name: str) -> str:
        """Return the key of a name."""
        return f"{self.prefix}/{name}".strip("/")

    def key_prefix(self, name: str) -> str:
        """Return what the keys below a folder start with; "" for a bucket as root."""
        return f"{self.key(name)}/".lstrip("/")

    def list_folder(self, name: str) -> Listing:
        """Return the objects of a folder, by key, and its folders. A listing may lag."""
        return self.store.list(self.key_prefix(name))

    # reads

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Do nothing: `ObjectReader` reads ahead."""

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the object's bytes from `start`. StorageError if it ends before."""
        self.store.get_range(self.key(name), start, into, etag=self._pin(name).etag)

    def read(self, name: str) -> bytes:
        """Return a whole small object. NotFoundError if there is none."""
        return self.read_etag(name)[0]

    def read_etag(self, name: str) -> tuple[bytes, str]:
        """Return a whole small object and its ETag. NotFoundError if there is none."""
        return self.store.get(self.key(name))

    def size(self, name: str) -> int | None:
        """Return the object's length, or None if there is no such object."""
        staged, file = self._staged_file(name)
        if staged is not None:
            return staged.finish()[file].nbytes if file in staged.files else None
        try:
            return self._pin(name).nbytes
        except NotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the entries of the root, sorted."""
        return self.entries("")

    def entries(self, name: str) -> list[str]:
        """Return the entries of a folder, sorted; those of a staging folder are its files."""
        name = name.rstrip("/")
        staged, folder = self._staged_file(name)
        if staged is not None:
            prefix = f"{folder}/" if folder else ""
            below = [file[len(prefix) :] for file in staged.files if file.startswith(prefix)]
            return sorted({file.partition("/")[0] for file in below})
        prefix, listing = self.key_prefix(name), self.list_folder(name)
        keys = [*listing.objects, *(folder.rstrip("/") for folder in listing.folders)]
        return sorted({key[len(prefix) :] for key in keys} - {""})

    def sizes(self, name: str) -> dict[str, int]:
        """Return the length of each object of a folder, without those of its folders."""
        prefix = self.key_prefix(name)
        return {
            key[len(prefix) :]: found.nbytes
            for key, found in self.list_folder(name).objects.items()
            if key != prefix
        }

    def kind(self, name: str) -> str | None:
        """Return "folder", "file", or None for nothing."""
        staged, file = self._staged_file(name)
        if staged is not None:
            if file in staged.files:
                return "file"
            return "folder" if not file or self.entries(name) else None
        if name and self.store.stat(self.key(name)) is not None:
            return "file"
        return "folder" if not name or self.entries(name) else None

    def version_token(self, name: str) -> object:
        """Return a value that changes when an object is replaced; None without an object."""
        staged, file = self._staged_file(name)
        if staged is None:
            found = self.store.stat(self.key(name))
            return None if found is None else found.etag
        return None if file not in staged.files else tuple(staged.files[file].etags.items())

    def free_nbytes(self) -> None:
        """Return None: a bucket has no limit."""

    # writes

    def put(self, name: str, body: bytes) -> None:
        """Store a small object, or stage it."""
        staged, file = self._staged_file(name)
        if staged is not None:
            staged.put(file, body)
        else:
            self.store.put(self.key(name), body)

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Stage the buffers, one after another from byte `start`, in a staging folder."""
        staged, file = self._staged_file(name)
        if staged is None:
            raise StorageError(f"{self.path(name)}: got a write outside of a save; this is a bug")
        staged.write_at(file, start, buffers)

    def remove_file(self, name: str) -> None:
        """Delete an object. NotFoundError without one."""
        if not self.kind(name):
            raise NotFoundError(f"{self.path(name)}: remove: no such object")
        self.store.delete(self.key(name))

    def remove_folder(self, name: str) -> None:
        """Delete all objects of a folder."""
        for key in self.store.list(self.key_prefix(name), recursive=True).objects:
            self.store.delete(key)

    def make_folder(self, name: str) -> None:
        """Do nothing: a folder is a prefix of keys."""

    def start_flush(self, name: str, start: int, nbytes: int) -> None:
        """Do nothing: parts are sent as soon as they are complete."""

    def sync(self, name: str) -> None:
        """Do nothing: an object is durable once it is stored."""

    def sync_written(
        self, on_progress: Callable[[], object] = lambda: None, *, below: str = ""
    ) -> None:
        """Do nothing: `StagedFiles.finish` waits for parts."""

    def sync_tree(self, name: str) -> None:
        """Do nothing: an object is durable once it is stored."""

    def close(self) -> None:
        """Forget which objects were read. Connections belong to the store."""
        self._pins = {}

    # files of a save

    def stage(self, folder: str, name: str, *, label: str = "") -> StagedFiles:
        """Upload what is written below `folder` from now on, to the keys of `name`."""
        prefix, on_request = self.key_prefix(name), self.on_request
        self._staged[folder] = StagedFiles(self.store, prefix, label=label, on_request=on_request)
        return self._staged[folder]

    def staged(self, folder: str) -> StagedFiles:
        """Return the files that are staged below a staging folder."""
        return self._staged[folder]

    def unstage(self, folder: str) -> None:
        """Drop the uploads that this rank has begun for a staging folder."""
        staged = self._staged.pop(folder, None)
        if staged is not None:
            staged.abort()

    @contextmanager
    def local_folder(self, folder: str) -> Iterator[str]:
        """Yield the path of an empty local folder; stage the files that the block writes there."""
        with tempfile.TemporaryDirectory(prefix="unified_ckpt-") as path:
            yield path
            for _, files in walk(path):
                for file in sorted(files):
                    self._stage_file(f"{folder}/{os.path.relpath(file, path)}", file)

    def _stage_file(self, name: str, path: str) -> None:
        start = 0
        with open_binary(path) as file:
            while body := file.read(_READ_NBYTES):
                self.write_at(name, start, [memoryview(body)])
                start += len(body)
        if not start:
            self.put(name, b"")

    def _staged_file(self, name: str) -> tuple[StagedFiles | None, str]:
        """Return the staged files that a name is of, if it is, and the name below them."""
        folder, _, file = name.partition("/")
        return self._staged.get(folder), file

    def _pin(self, name: str) -> ObjectStat:
        """Return an object as it was at the first read. NotFoundError without one."""
        if name not in self._pins:
            found = self.store.stat(self.key(name))
            if found is None:
                raise NotFoundError(f"{self.path(name)}: no such object")
            self._pins[name] = found
        return self._pins[name]

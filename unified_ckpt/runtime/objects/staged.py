"""Files of a save that are uploaded to a bucket, and stay invisible until its commit.

Each file is one multipart upload to its final key. Parts have one size but the last, and may come
from any rank that knows the upload's id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.format import names
from unified_ckpt.runtime.objects.part_writer import PartWriter
from unified_ckpt.runtime.objects.store import MAX_PARTS, Buffer, ObjectStore
from unified_ckpt.runtime.threads import map_in_threads

DEFAULT_PART_NBYTES = 8 << 20
_BEGINS = 32  # uploads that begin at a time


@dataclass(slots=True)
class UploadedFile:
    """What one rank has uploaded of a file: ETags by part number, and the file's end so far."""

    upload_id: str
    nbytes: int = 0
    etags: dict[int, str] = field(default_factory=dict)

    def merge(self, other: UploadedFile) -> None:
        """Add what another rank has uploaded."""
        self.nbytes = max(self.nbytes, other.nbytes)
        self.etags |= other.etags


class StagedFiles:
    """The files that this rank writes of one save. Keys start with `prefix`, which ends in "/".

    `label`: of the save, by which its objects are known.
    `on_request`: called after requests, in the thread that waits for them. `on_begin`: called with
    the ids of all uploads, by file, after some have begun. `manifest`: its bytes, which the commit
    record holds.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        label: str = "",
        on_request: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._prefix, self._label = store, prefix, label
        self._on_request = on_request
        self.on_begin: Callable[[Mapping[str, str]], object] = lambda _: None
        self._parts = PartWriter(self._upload, part_nbytes=DEFAULT_PART_NBYTES)
        self.manifest = b""
        self.files: dict[str, UploadedFile] = {}
        self._begun = set[str]()  # by this rank
        self._lock = threading.Lock()

    @property
    def part_nbytes(self) -> int:
        """The bytes of a part, but of the last one of a file."""
        return self._parts.part_nbytes

    def expect(self, file_sizes: Mapping[str, int], *, part_nbytes: int = 0) -> None:
        """Take the sizes of files before one of them is written; files begun before are whole.

        Parts have `part_nbytes`, and get large enough for the largest file. The last part of an
        expected file is uploaded as soon as it is complete. Several ranks may write a file if each
        writes whole parts.
        """
        sizes = {**self._parts.file_sizes, **file_sizes}
        part_nbytes = part_nbytes or self.part_nbytes
        while max(sizes.values(), default=0) > part_nbytes * MAX_PARTS:
            part_nbytes *= 2
        if part_nbytes != self.part_nbytes:
            self._parts.flush(self._on_request)
            self._parts = PartWriter(self._upload, part_nbytes=part_nbytes)
        self._parts.file_sizes |= sizes

    def begin(self, *files: str) -> dict[str, str]:
        """Begin the uploads of files, unless they have begun; return their ids."""
        new = [file for file in files if file not in self.files]
        if new:
            map_in_threads(self._begin, new, count=_BEGINS, on_wait=self._on_request)
            self.on_begin({file: upload.upload_id for file, upload in self.files.items()})
        return {file: self.files[file].upload_id for file in files}

    def _begin(self, file: str) -> None:
        self.join({file: self._store.begin(self._prefix + file, label=self._label)})
        self._begun.add(file)

    def join(self, upload_ids: Mapping[str, str]) -> None:
        """Write to uploads that another rank has begun."""
        for file, upload_id in upload_ids.items():
            self.files[file] = UploadedFile(upload_id)

    def write_at(
        self, file: str, start: int, buffers: Sequence[Buffer], *, stable: bool = False
    ) -> None:
        """Write the buffers one after another from byte `start`; upload parts that are complete.

        `stable`: the buffers do not change before `finish`, and are not copied.
        """
        if file not in self.files:
            self.begin(file)
        if not start and not any(map(len, buffers)):
            self._upload(file, 0, [])  # an empty file, unless more follows
        self._parts.write_at(file, start, buffers, stable=stable)

    def put(self, file: str, body: bytes) -> None:
        """Stage a whole small file."""
        if file == names.MANIFEST:
            self.manifest = body
            return
        self.begin(file)
        self._upload(file, 0, [memoryview(body)])
        self._on_request()

    def finish(self) -> Mapping[str, UploadedFile]:
        """Return, by file, what this rank has uploaded, once all of it is."""
        self._parts.flush(self._on_request)
        return self.files

    def merge(self, uploads: Mapping[str, UploadedFile]) -> None:
        """Add what another rank has uploaded. Its uploads are this rank's to abort from now on."""
        for file, upload in uploads.items():
            if file in self.files:
                self.files[file].merge(upload)
            else:
                self.files[file] = upload
            self._begun.add(file)

    def release(self) -> None:
        """Leave all uploads to the rank that merges them."""
        self._begun = set()

    def abort(self) -> None:
        """End all requests of this rank, and drop the uploads that it has begun."""
        self._parts.close()
        for file in sorted(self._begun):
            self._store.abort(self._prefix + file, self.files[file].upload_id)
            self._on_request()

    def _upload(self, file: str, number: int, buffers: Sequence[Buffer]) -> None:
        """Upload a part. Threads call this."""
        uploaded, part_nbytes = self.files[file], self._parts.part_nbytes
        etag = self._store.put_part(self._prefix + file, uploaded.upload_id, number + 1, buffers)
        end = number * part_nbytes + sum(map(len, buffers))
        with self._lock:
            uploaded.etags[number + 1] = etag
            uploaded.nbytes = max(uploaded.nbytes, end)

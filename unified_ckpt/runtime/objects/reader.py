"""Reads one checkpoint in a bucket: each object in one version, ranges ahead, metadata once.

A save or a removal beside a reader could let it mix the bytes of two saves. Every request therefore
names the ETag that the manifest names, or that the object had at the first look at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NoReturn

from unified_ckpt.errors import IncompleteError, IntegrityError, NotFoundError
from unified_ckpt.format import names as format_names
from unified_ckpt.format.commit import parse_commit
from unified_ckpt.runtime.objects.known import KnownObjects, Version
from unified_ckpt.runtime.objects.read_ahead import ReadAhead
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import ObjectStore, ReplacedError
from unified_ckpt.runtime.storage.protocol import Buffer, ReadRange

HEAD_NBYTES = 64 << 10  # read at the first look at a file; holds most headers
_MAX_KEPT_NBYTES = 64 << 20  # of a file that was read whole


class ObjectReader:
    """The objects below a prefix of a bucket. Implements `Reader`. Writes nothing.

    NotFoundError if an object is removed or replaced after the first look at it.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store, self.prefix = store, prefix.strip("/")
        self.root = f"{store.url}/{self.prefix}".rstrip("/")
        self.known = KnownObjects()
        self._expected: dict[str, Version] = {}  # by the manifest; not looked at yet
        self._ahead = ReadAhead(self._fetch)

    def pin(self, versions: Mapping[str, Version]) -> None:
        """Expect these versions of files that were not looked at yet."""
        self._expected |= {
            name: version for name, version in versions.items() if name not in self.known.versions
        }

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Read these ranges ahead, in this order; an earlier hint is void."""
        self._ahead.expect(
            item for item in ranges if item.stop > len(self.known.heads.get(item.file, b""))
        )

    def expect_heads(self, names: Collection[str]) -> None:
        """Read the first bytes of files that `pin` names ahead, unless they are known."""
        self._ahead.expect(
            ReadRange(name, 0, min(self._expected[name].nbytes, HEAD_NBYTES))
            for name in names
            if name in self._expected and name not in self.known.versions
        )

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the object's bytes from `start`. StorageError if it ends before."""
        stop = start + len(into)
        nbytes = self._pinned(name).nbytes
        head = self.known.heads.get(name)
        if head is None and stop <= min(HEAD_NBYTES, nbytes):
            head = self.keep(name, min(HEAD_NBYTES, nbytes))
        if head is not None and stop <= len(head):
            into[:] = head[start:stop]
        else:
            self._ahead.read_at(name, start, into)

    def read(self, name: str) -> bytes:
        """Return a whole small object. NotFoundError if there is none."""
        if self.size(name) is None:
            raise NotFoundError(f"{self.root}/{name}: read: no such object")
        nbytes = self.known.versions[name].nbytes
        head = self.known.heads.get(name, memoryview(b""))
        if len(head) == nbytes:
            return bytes(head)
        body = bytearray(nbytes)
        self._ahead.read_at(name, 0, memoryview(body))
        if nbytes <= _MAX_KEPT_NBYTES:
            self.known.heads[name] = memoryview(body)
        return bytes(body)

    def size(self, name: str) -> int | None:
        """Return the object's length, or None if there is none. Equal at each call.

        The first look at a file that the manifest names reads its first bytes.
        """
        if name in self.known.absent:
            return None
        if name in self.known.versions:
            return self.known.versions[name].nbytes
        if name in self._expected and self._expected[name].nbytes:
            return self._read_first(name, self._expected[name])
        found = self.store.stat(self._key(name))
        if found is None:
            self.known.absent.add(name)
            return None
        version = Version(found.etag, found.nbytes)
        if self._expected.get(name, version) != version:
            self._raise_mixed(name, None)
        self.known.versions[name] = version
        return version.nbytes

    def names(self) -> list[str]:
        """Return the entries of the root, sorted. A listing may lag."""
        if self.known.names is None:
            self.known.names = ObjectStorage(self.store, self.prefix).names()
        return self.known.names

    def keep(self, name: str, nbytes: int) -> memoryview:
        """Return the first `nbytes` of a file, and keep these for later reads."""
        head = self.known.heads.get(name)
        if head is None or len(head) < nbytes:
            body = bytearray(nbytes)
            self._ahead.read_at(name, 0, memoryview(body))
            head = self.known.heads[name] = memoryview(body)
        return head[:nbytes]

    def trim(self, name: str, nbytes: int) -> None:
        """Keep only the first `nbytes` of a file."""
        self.known.heads[name] = memoryview(bytes(self.keep(name, nbytes)))

    def check_committed(self) -> None:
        """IncompleteError if a commit of this name is unfinished, and says what finishes it."""
        if self.known.has_no_record:
            return
        parent, _, name = self.prefix.rpartition("/")
        key = f"{parent}/{format_names.commit_name(name)}".lstrip("/")
        try:
            record = parse_commit(self.store.get(key)[0], file=f"{self.store.url}/{key}")
        except NotFoundError:
            record = None
        if record is None:
            self.known.has_no_record = True
            return
        raise IncompleteError(
            f"{self.root}: a commit of save {record.save_id} is unfinished; wait if its job is "
            "running; otherwise save to this name, or run "
            f"`unified-ckpt verify {self.root} --repair`"
        )

    def check_not_replaced(self) -> None:
        """NotFoundError if the manifest is gone, or another one has its name."""
        manifest = self.known.versions.get(format_names.MANIFEST)
        if manifest is not None:
            found = self.store.stat(self._key(format_names.MANIFEST))
            if found is None or found.etag != manifest.etag:
                raise self._replaced()

    def close(self) -> None:
        """Drop what was announced. Connections belong to the store."""
        self._ahead.close()

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}".strip("/")

    def _pinned(self, name: str) -> Version:
        if self.size(name) is None:
            raise NotFoundError(f"{self.root}/{name}: read: no such object")
        return self.known.versions[name]

    def _read_first(self, name: str, version: Version) -> int | None:
        """Read the first bytes of a file that the manifest names, which proves that it exists."""
        try:
            self.keep(name, min(version.nbytes, HEAD_NBYTES))
        except ReplacedError as error:
            self._raise_mixed(name, error)
        except NotFoundError:
            self.known.absent.add(name)
            return None
        self.known.versions[name] = version
        return version.nbytes

    def _fetch(self, name: str, start: int, into: Buffer) -> None:
        """Send one request."""
        version = self.known.versions.get(name) or self._expected[name]
        try:
            self.store.get_range(self._key(name), start, into, etag=version.etag)
        except NotFoundError as error:
            if name in self.known.versions:
                raise self._replaced() from error
            raise

    def _replaced(self) -> NotFoundError:
        return NotFoundError(f"{self.root}: was removed or replaced while it was read; load again")

    def _raise_mixed(self, name: str, cause: Exception | None) -> NoReturn:
        """Raise the error for a file that is another one than the manifest names."""
        self.known.has_no_record = False
        self.check_not_replaced()
        self.check_committed()
        raise IntegrityError(
            f"{self.root}/{name}: got another object than the one of the save, expected ETag "
            f"{self._expected[name].etag}; restore this object, or load another checkpoint"
        ) from cause

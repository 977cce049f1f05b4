"""Files of a save that are uploaded to a bucket, and stay invisible until its commit.

Each file is one multipart upload to its final key. Parts have one size but the last, and may come
from any rank that knows the upload's id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.objects.store import MAX_PARTS, Buffer, ObjectStore

DEFAULT_PART_NBYTES = 8 << 20


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


@dataclass(slots=True)
class _OpenPart:
    """A part whose bytes are not complete: `written` bytes, the last of which ends at `stop`."""

    buffer: bytearray
    written: int = 0
    stop: int = 0


class StagedFiles:
    """The files that this rank writes of one save. Keys start with `prefix`, which ends in "/".

    `on_request`: called after each request. `on_begin`: called with the ids of all uploads, by
    file, after some have begun. `manifest`: its bytes, which the commit record holds.
    """

    def __init__(
        self, store: ObjectStore, prefix: str, *, on_request: Callable[[], object] = lambda: None
    ) -> None:
        self._store, self._prefix, self._on_request = store, prefix, on_request
        self.on_begin: Callable[[Mapping[str, str]], object] = lambda _: None
        self.part_nbytes = DEFAULT_PART_NBYTES
        self.manifest = b""
        self._file_sizes: dict[str, int] = {}  # as far as they are expected
        self.files: dict[str, UploadedFile] = {}
        self._begun = set[str]()  # by this rank
        self._open: dict[tuple[str, int], _OpenPart] = {}

    def expect(self, file_sizes: Mapping[str, int]) -> None:
        """Take the sizes of files before any is written.

        Parts get large enough for the largest file. The last part of an expected file is uploaded
        as soon as it is complete.
        """
        self._file_sizes |= file_sizes
        while max(self._file_sizes.values(), default=0) > self.part_nbytes * MAX_PARTS:
            self.part_nbytes *= 2

    def begin(self, *files: str) -> dict[str, str]:
        """Begin the uploads of files, unless they have begun; return their ids."""
        new = [file for file in files if file not in self.files]
        for file in new:
            self.join({file: self._store.begin(self._prefix + file)})
            self._begun.add(file)
            self._on_request()
        if new:
            self.on_begin({file: upload.upload_id for file, upload in self.files.items()})
        return {file: self.files[file].upload_id for file in files}

    def join(self, upload_ids: Mapping[str, str]) -> None:
        """Write to uploads that another rank has begun."""
        for file, upload_id in upload_ids.items():
            self.files[file] = UploadedFile(upload_id)

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Copy the buffers, one after another from byte `start`; upload parts that are complete."""
        self.begin(file)
        if not start and not any(map(len, buffers)):
            self._upload(file, 0, memoryview(b""))  # an empty file, unless more follows
        for buffer in buffers:
            position = 0
            while position < len(buffer):
                number, offset = divmod(start, self.part_nbytes)
                count = min(self.part_nbytes - offset, len(buffer) - position)
                self._fill(file, number, offset, buffer[position : position + count])
                position, start = position + count, start + count

    def put(self, file: str, body: bytes) -> None:
        """Stage a whole small file."""
        if file == names.MANIFEST:
            self.manifest = body
            return
        self.begin(file)
        self._upload(file, 0, memoryview(body))

    def finish(self) -> Mapping[str, UploadedFile]:
        """Return, by file, what this rank has uploaded, once all of it is."""
        for (file, number), part in sorted(self._open.items()):
            self._upload_open(file, number, part)
        self._open = {}
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
        """Drop the uploads that this rank has begun."""
        for file in sorted(self._begun):
            self._store.abort(self._prefix + file, self.files[file].upload_id)
            self._on_request()

    def _fill(self, file: str, number: int, offset: int, buffer: Buffer) -> None:
        key = file, number
        if key not in self._open:
            self._open[key] = _OpenPart(bytearray(self.part_nbytes))
        part = self._open[key]
        part.buffer[offset : offset + len(buffer)] = buffer
        part.written += len(buffer)
        part.stop = max(part.stop, offset + len(buffer))
        remaining = self._file_sizes.get(file, self.part_nbytes * MAX_PARTS)
        if part.written == min(self.part_nbytes, remaining - number * self.part_nbytes):
            self._upload_open(file, number, self._open.pop(key))

    def _upload_open(self, file: str, number: int, part: _OpenPart) -> None:
        if part.written != part.stop:
            raise StorageError(
                f"{self._store.url}/{self._prefix}{file}: part {number + 1} got {part.written} "
                f"bytes, expected {part.stop}; this is a bug"
            )
        self._upload(file, number, memoryview(part.buffer)[: part.stop])

    def _upload(self, file: str, number: int, body: Buffer) -> None:
        uploaded = self.files[file]
        key = self._prefix + file
        uploaded.etags[number + 1] = self._store.put_part(
            key, uploaded.upload_id, number + 1, [body]
        )
        uploaded.nbytes = max(uploaded.nbytes, number * self.part_nbytes + len(body))
        self._on_request()

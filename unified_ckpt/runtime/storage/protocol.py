"""What sources and the engine need of a root, be it a local folder, a bucket or another URL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, Self

Buffer = memoryview


class ReadRange(NamedTuple):
    """Bytes [start, stop) of a file that will be read. `into`: the memory that will be read into.

    If it is given, it may be filled from the announcement on.
    """

    file: str
    start: int
    stop: int
    into: Buffer | None = None


class Reader(Protocol):
    """What a source needs of a storage. `root`: its location, for messages."""

    root: str

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Hint at the ranges that will be read, in this order.

        An earlier hint is void, and its memory is not written to any more.
        """

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the file's bytes from `start`. StorageError if the file ends before."""

    def read(self, name: str) -> bytes:
        """Return a whole file, which is small. NotFoundError if there is none."""

    def size(self, name: str) -> int | None:
        """Return the file's length, or None if there is no such file.

        StorageError for anything but a regular file; such entries are never opened.
        """

    def names(self) -> list[str]:
        """Return the entries of the root folder, sorted."""

    def close(self) -> None:
        """Close all files."""


class Storage(Reader, Protocol):
    """What the engine and a manager need of a root: a local folder, or a prefix of a bucket.

    Names are relative to the root. `fsync`: whether the storage is durable. `smallest_part_nbytes`:
    a rank writes whole parts of files, of this size or larger; None if it may write any bytes.
    """

    fsync: bool
    smallest_part_nbytes: int | None

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def path(self, name: str) -> str:
        """Return the absolute path, or the URL, of a name."""

    def entries(self, name: str) -> list[str]:
        """Return the entries of a folder, sorted."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the length of each file of a folder, without those of its folders."""

    def kind(self, name: str) -> str | None:
        """Return "folder", "file", "link", or None for nothing. StorageError if unknown."""

    def version_token(self, name: str) -> object:
        """Return a value that changes when a file is written or replaced; None without a file."""

    def free_nbytes(self) -> int | None:
        """Return how many bytes may still be written; None without a limit."""

    def make_folder(self, name: str) -> None:
        """Create a folder. StorageError if it exists."""

    def local_folder(self, folder: str) -> AbstractContextManager[str]:
        """Yield the path of a local folder, whose files are then in the staging folder."""

    def put(self, name: str, body: bytes) -> None:
        """Write a small new file."""

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after another from byte `start`, creating the file if needed."""

    def start_flush(self, name: str, start: int, nbytes: int) -> None:
        """Start making these bytes durable, without waiting."""

    def sync(self, name: str) -> None:
        """Return once a file's bytes or a folder's entries are durable, and close the file."""

    def sync_written(
        self, on_progress: Callable[[], object] = lambda: None, *, below: str = ""
    ) -> None:
        """Sync what was written at or below a name and not synced since."""

    def sync_tree(self, name: str) -> None:
        """Sync a file, or everything in a folder."""

    def remove_file(self, name: str) -> None:
        """Delete a file."""

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all its contents."""

"""The files of a save under construction, as one rank writes to them: alone on a machine, or beside ranks of other machines."""

from __future__ import annotations

from collections.abc import Sequence

from unified_ckpt.runtime.exchange.tcp_exchange import Post
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage


class Files:
    """Positional writes into the files of a folder. All ranks that write to them are on one machine."""

    def __init__(self, storage: LocalStorage, folder: str) -> None:
        self._storage, self._folder = storage, folder

    def write_at(
        self,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        alone: tuple[int, int] | None = None,
    ) -> None:
        """Writes the buffers one after the other from byte `start`. `alone`: bytes of the file around them, all of them this rank's."""
        del alone  # on one machine no border matters
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)

    def resize(self, file: str, nbytes: int) -> None:
        self._storage.resize(f"{self._folder}/{file}", nbytes)

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        self._storage.start_flush(f"{self._folder}/{file}", start, nbytes)

    def flush(self) -> None:
        """Returns once all bytes are where they are to be written from."""


class SharedFiles(Files):
    """The same where ranks of several machines write: each block of a file is written by one machine, see `Volume`."""

    def __init__(self, storage: LocalStorage, folder: str, *, post: Post, save: str) -> None:
        super().__init__(storage, folder)
        self._post, self._save = post, save

    def write_at(
        self,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        alone: tuple[int, int] | None = None,
    ) -> None:
        stop = start + sum(len(buffer) for buffer in buffers)
        for low, high, rank in self._post.volume.cut(
            file, start, stop, alone=alone or (start, stop), rank=self._post.rank
        ):
            piece = _between(buffers, low - start, high - start)
            if rank == self._post.rank:
                super().write_at(file, low, piece)
            else:
                self._post.write(self._save, rank, file, low, piece)

    def flush(self) -> None:
        self._post.flush()


def _between(buffers: Sequence[Buffer], low: int, high: int) -> list[Buffer]:
    """Bytes [low, high) of the buffers laid end to end."""
    found, seen = [], 0
    for buffer in buffers:
        if seen < high and seen + len(buffer) > low:
            found.append(buffer[max(low - seen, 0) : high - seen])
        seen += len(buffer)
    return found

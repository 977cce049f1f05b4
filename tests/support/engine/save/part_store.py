"""Files as parts in memory with one writer each, as uploads to an object store are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass
class Part:
    """Bytes that one rank has given, by their start in the file."""

    writer: int
    pieces: dict[int, bytes] = field(default_factory=dict)


class PartStore:
    """Tensor files that all ranks write; a part takes bytes of one rank, and each byte once."""

    def __init__(self, part_nbytes: int) -> None:
        self._part_nbytes, self._lock = part_nbytes, threading.Lock()
        self._files: dict[str, dict[int, Part]] = {}

    def write(self, file: str, start: int, body: bytes, *, writer: int) -> None:
        with self._lock:
            while body:
                number = start // self._part_nbytes
                count = min((number + 1) * self._part_nbytes - start, len(body))
                part = self._files.setdefault(file, {}).setdefault(number, Part(writer))
                assert part.writer == writer, (file, number, part.writer, writer)
                assert start not in part.pieces, (file, start)
                part.pieces[start] = body[:count]
                start, body = start + count, body[count:]

    def complete(self) -> dict[str, bytes]:
        """Join the parts of every file. Each part must be whole, the last one up to its end."""
        files = {}
        for file, parts in self._files.items():
            joined = b""
            for number in range(len(parts)):
                assert len(joined) == number * self._part_nbytes, (file, number)
                for start, piece in sorted(parts[number].pieces.items()):
                    assert start == len(joined), (file, start, len(joined))
                    joined += piece
            files[file] = joined
        return files


class PartStorage(LocalStorage):
    """A rank's storage: tensor files go to a `PartStore`, all other files to the disk."""

    def __init__(self, root: str, store: PartStore, writer: int) -> None:
        super().__init__(root)
        self._store, self._writer = store, writer

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        folder, _, file = name.rpartition("/")
        if not folder or not file.endswith(".safetensors"):
            super().write_at(name, start, buffers)
            return
        body = b"".join(bytes(buffer) for buffer in buffers)
        self._store.write(file, start, body, writer=self._writer)

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        raise AssertionError(f"{name}: a part cannot be read before all are there")

    def start_flush(self, name: str, start: int, nbytes: int) -> None:
        """Nothing is on the disk."""

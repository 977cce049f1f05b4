"""Bytes from rank to rank over TCP, for saves to a volume that ranks of several machines write to: pieces of tiles, and bytes of blocks
that another machine writes.

How bytes could be lost: a sender goes on before its bytes are in the file, a receiver's error reaches nobody, bytes of a failed save come
late and land in the next one. So a sender waits for word of all it has sent (`flush`) before its rank says that it has written; that word
carries the first error; and bytes are taken only for the save that they name, while it lasts. What was sent into a connection that breaks
is missed by who waits for it, who cannot know why: so a sender asks for word of its pieces of tiles, too (`handed_in`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from unified_ckpt.core.nodes.write_alignment import Volume
from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, FarWindow, Wait, Window
from unified_ckpt.runtime.exchange.tcp import (
    Address,
    Listener,
    connect,
    fill,
    receive_words,
    send_words,
)
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage

Span = tuple[int, int, int, int]  # of a tile: first byte, bytes, bytes to the next, how many


class Post:
    """One rank's way to those on other machines. `volume`: which ranks those are; `find`: where a rank listens."""

    def __init__(
        self,
        volume: Volume,
        find: Callable[[int], Address],
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self.volume, self.rank = volume, rank
        self._find, self._ranks, self._timeout = find, ranks, timeout_seconds
        self._sites: dict[str, tuple[LocalStorage, str]] = {}  # save -> where its files are
        self._windows: dict[str, Window] = {}  # of this rank, by token
        self._lines: dict[tuple[int, str], socket.socket] = {}  # to a rank, for tiles or for writes
        self._writing, self._pasting, self._dialling = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._listener = Listener(self._serve, at_end=lambda: None, timeout_seconds=timeout_seconds)
        self.address = self._listener.address

    def close(self) -> None:
        self.hang_up()
        self._listener.close()
        self._windows.clear()

    # what others may do here

    def open(self, save: str, storage: LocalStorage, folder: str) -> None:
        """From now on others' bytes for this save are written to the files of a folder."""
        with self._writing:
            self._sites[save] = storage, folder

    def shut(self, save: str) -> None:
        """Returns once nothing of this save is written here any more."""
        with self._writing:
            self._sites.pop(save, None)

    def lend(self, window: Window) -> None:
        """Others may fill this rank's window, until it is taken back."""
        with self._pasting:
            self._windows[window.token] = window

    def take_back(self, window: Window) -> None:
        """Returns once nobody fills it any more."""
        with self._pasting:
            self._windows.pop(window.token, None)

    def _serve(self, connection: socket.socket) -> None:
        failure = ""
        while True:
            connection.settimeout(None)  # between two frames a save's whole life may lie
            words, nbytes = receive_words(connection)
            connection.settimeout(self._timeout)
            if words["what"] == "flush":
                send_words(connection, {"error": failure})
                failure = ""
                continue
            held = bytearray(nbytes)
            fill(connection, memoryview(held))
            if not failure:
                failure = (
                    self._paste(words, held)
                    if words["what"] == "tile"
                    else self._write(words, held)
                )

    def _write(self, words: Mapping[str, object], held: bytearray) -> str:
        """The error, if there is one. One at a time, so that `shut` can wait for the last."""
        with self._writing:
            site = self._sites.get(str(words["save"]))
            name = str(words["file"])
            if site is None or "/" in name:
                return f"save {words['save']} is not open here for {name!r}"
            storage, folder = site
            try:
                storage.write_at(f"{folder}/{name}", int(str(words["start"])), [memoryview(held)])
            except Exception as error:  # told to the sender, on whose rank it is raised
                return str(error)
        return ""

    def _paste(self, words: Mapping[str, object], held: bytearray) -> str:
        """Pieces of a tile, once it is free for them, however long this rank takes; the error, if there is one."""
        pause = 0.0
        try:
            while not self._pasted(
                words, held
            ):  # ends when this rank fails, goes on to the next exchange, or takes the window back
                time.sleep(pause)
                pause = min(pause + 20e-6, 1e-3)
        except Exception as error:  # told to the sender, on whose rank it is raised
            return str(error)
        return ""

    def _pasted(self, words: Mapping[str, object], held: bytearray) -> bool:
        """False where the window does not serve the exchange yet, or its slot is not empty. Nobody takes the window away meanwhile."""
        exchange, party, tiles, number = (
            int(str(words[name])) for name in ("exchange", "party", "tiles", "number")
        )
        with self._pasting:
            window = self._windows.get(str(words["window"]))
            if window is None or window.failed() or window.serving() > exchange:
                raise ConnectionAbortedError("no such tile, or not any more")
            if window.serving() < exchange or window.progress() <= number - SLOTS:
                return False
            tile, body, first = (
                window.tile(number),
                torch.from_numpy(np.frombuffer(held, dtype=np.uint8)),
                0,
            )
            spans: list[Span] = words["spans"]  # type: ignore[assignment]
            for span in spans:
                _, nbytes, _, count = span
                _strided(tile, span).copy_(body[first : first + nbytes * count].view(count, nbytes))
                first += nbytes * count
            window.mark(party, tiles)
            return True

    # what this rank has others do

    def write(self, save: str, rank: int, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Has a rank write these bytes to a file of a save. Errors of its storage come with `flush`."""
        words = {"what": "write", "save": save, "file": file, "start": start}
        self._send(rank, "write", words, buffers)

    def flush(self) -> None:
        """Returns once everything sent to be written is. StorageError, naming the rank, where it is not. Ends the connections."""
        try:
            for rank, error in self._answers("write", None):
                raise StorageError(
                    f"{error} (bytes of rank {self._ranks[self.rank]}, sent to rank {self._ranks[rank]})"
                )
        finally:
            self.hang_up()

    def handed_in(self, wait: Wait) -> None:
        """Returns once all pieces of tiles are where they belong. RankError, naming the rank, where they are not."""
        for rank, error in self._answers("tile", wait):
            with self._trouble(rank):
                raise ConnectionAbortedError(error)

    def _answers(self, kind: str, wait: Wait | None) -> Iterator[tuple[int, str]]:
        """Asks every rank that was sent something of a kind, and yields the errors of those that have one. `wait`: for who gets on."""
        lines = {rank: line for (rank, of), line in self._lines.items() if of == kind}
        for rank, line in lines.items():
            with self._trouble(rank):
                send_words(line, {"what": "flush"})
        for rank, line in lines.items():
            if wait is not None:
                wait.until(rank, "the end of its tiles", partial(_has_word, line))
            with self._trouble(rank):
                words, _ = receive_words(line)
            if words["error"]:
                yield rank, str(words["error"])

    def hand_in(
        self, window: FarWindow, *, exchange: int, number: int, tiles: int, spans: Sequence[Span]
    ) -> None:
        """Fills these pieces of a tile in another rank's window as they are in its image here; then says that `tiles` are filled."""
        image = window.tile(number)
        body = [
            np.ascontiguousarray(_strided(image, span).numpy()).data.cast("B") for span in spans
        ]
        words = {
            "what": "tile",
            "window": window.token,
            "exchange": exchange,
            "party": self.rank,
            "number": number,
            "tiles": tiles,
        }
        self._send(window.rank, "tile", {**words, "spans": spans}, body)

    def hang_up(self) -> None:
        """Ends the connections to others; the next bytes make them anew."""
        with self._dialling:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def _send(
        self, rank: int, kind: str, words: Mapping[str, object], buffers: Sequence[Buffer]
    ) -> None:
        with self._trouble(rank):
            line = self._line(rank, kind)
            send_words(line, words, nbytes=sum(len(buffer) for buffer in buffers))
            for buffer in buffers:
                line.sendall(buffer)

    def _line(self, rank: int, kind: str) -> socket.socket:
        """One for tiles, which wait until there is room for them, and one for writes, which must wait for nobody."""
        with self._dialling:
            if (rank, kind) not in self._lines:
                self._lines[rank, kind] = connect(self._find(rank), timeout_seconds=self._timeout)
            return self._lines[rank, kind]

    def _trouble(self, rank: int) -> _Trouble:
        return _Trouble(f"rank {self._ranks[rank]} took no bytes of rank {self._ranks[self.rank]}")


class _Trouble:
    """Says of an OSError inside which rank it is about; that rank, or the one that it waits for, knows why."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, OSError):
            told = RankError(f"{self._text}: {error.strerror or error}")
            told.echo = True
            raise told from error


def _has_word(line: socket.socket) -> bool:
    """Whether there is something to receive, or the other side has hung up."""
    look = select.poll()
    look.register(line, select.POLLIN)
    return bool(look.poll(0))


def _strided(tile: torch.Tensor, span: Span) -> torch.Tensor:
    """The bytes of a span, [count, nbytes]; an alias. ValueError where the tile does not hold them."""
    start, nbytes, step, count = span
    if (
        min(start, nbytes, step, count) < 0
        or start + step * max(count - 1, 0) + nbytes > tile.numel()
    ):
        raise ValueError(f"{span}: does not lie in a tile of {tile.numel()} bytes")
    return tile.as_strided((count, nbytes), (step, 1), tile.storage_offset() + start)

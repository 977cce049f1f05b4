"""TCP between ranks, on a schedule: what `runtime/exchange` uses of `socket` and `select`.

Buffers are small, writes and reads are short, and a connection may break between any two of them.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from tests.support.schedules.scheduler import Scheduler


class Network:
    """All listeners and connections of the ranks.

    `capacity`: bytes that a connection holds in each direction. `breaks_left`: how many connections
    may break. A dead rank's connections end, or, if `silent_deaths`, its host is gone: nobody
    answers.
    """

    def __init__(
        self, scheduler: Scheduler, *, capacity: int, breaks: int = 0, silent_deaths: bool = False
    ) -> None:
        self.scheduler, self.capacity, self.breaks_left = scheduler, capacity, breaks
        self.silent_deaths = silent_deaths
        self.listeners: dict[int, VirtualListener] = {}
        self.sockets: list[VirtualSocket] = []
        self.silent_ranks = set[int]()
        scheduler.on_death.append(self._end_rank)

    def _end_rank(self, rank: int) -> None:
        if self.silent_deaths:
            self.silent_ranks.add(rank)
            return
        for port, listener in list(self.listeners.items()):
            if listener.rank == rank:
                del self.listeners[port]
        for end in self.sockets:
            if end.rank == rank:
                end.reset()

    def rank(self) -> int:
        task = self.scheduler.current()
        assert task is not None, "a socket outside of the schedule"
        return task.rank

    def breaks(self, chance: int = 40) -> bool:
        """Return whether the connection of this operation breaks."""
        if not self.breaks_left or self.scheduler.chooser.draw(chance):
            return False
        self.breaks_left -= 1
        return True


class VirtualSocketModule:
    """The module `socket`: listeners and connections are those of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def create_server(self, *_: object, **__: object) -> Any:
        if self._network.scheduler.current() is None:
            return socket.create_server(*_, **__)  # type: ignore[arg-type]
        return VirtualListener(self._network)

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> Any:
        network = self._network
        if network.scheduler.current() is None:
            return socket.create_connection(address, timeout=timeout)
        network.scheduler.operation(f"connect {address[1]}")
        listener = network.listeners.get(address[1])
        if listener is not None and listener.rank in network.silent_ranks:
            network.scheduler.wait(lambda: False, timeout)
            raise TimeoutError("timed out")
        if listener is None or network.breaks():
            raise ConnectionRefusedError(111, "Connection refused")
        here, there = (
            VirtualSocket(network, network.rank()),
            VirtualSocket(network, listener.rank),
        )
        here.peer, there.peer = there, here
        here.timeout = timeout
        listener.backlog.append(there)
        network.scheduler.version += 1
        return here

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class VirtualListener:
    def __init__(self, network: Network) -> None:
        self._network, self.rank = network, network.rank()
        self.backlog: list[VirtualSocket] = []
        self.port = 10_000 + len(network.sockets) + len(network.listeners)
        while self.port in network.listeners:
            self.port += 1
        self._closed = False
        network.listeners[self.port] = self

    def accept(self) -> tuple[VirtualSocket, object]:
        scheduler = self._network.scheduler
        task = scheduler.current()
        assert task is not None
        task.label = "accepts connections"
        scheduler.wait(lambda: bool(self.backlog) or self._closed)
        if self._closed:
            raise OSError(22, "Invalid argument")
        return self.backlog.pop(0), None

    def getsockname(self) -> tuple[str, int]:
        return "", self.port

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        """Connections that nobody has accepted are reset."""
        if not self._closed:
            self._closed = True
            self._network.listeners.pop(self.port, None)
            for connection in self.backlog:
                connection.reset()
            self._network.scheduler.version += 1


class VirtualSocket:
    """One end of a connection. `received`: bytes on their way to this end, or already there."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self.rank = network, rank
        self.peer: VirtualSocket | None = None
        self.received = bytearray()
        self.is_reset = self.is_closed = self.is_ended = False  # ended: the peer sends no more
        self.timeout: float | None = None
        network.sockets.append(self)

    def reset(self) -> None:
        """Break the connection, at both ends."""
        for end in (self, self.peer):
            if end is not None:
                end.is_reset = True
                end.received.clear()
        self._network.scheduler.version += 1

    def recv_into(self, buffer: memoryview) -> int:
        self._operation("recv")
        if not len(buffer):
            return 0
        self._wait(lambda: bool(self.received) or self.is_ended, "receives")
        if not self.received:
            return 0
        count = min(len(buffer), len(self.received))
        count = 1 + self._network.scheduler.chooser.draw(count)
        buffer[:count] = self.received[:count]
        self._observe(bytes(self.received[:count]))
        del self.received[:count]
        self._network.scheduler.version += 1
        return count

    def sendall(self, data: Any) -> None:
        view, peer, capacity = memoryview(data).cast("B"), self.peer, self._network.capacity
        assert peer is not None
        while len(view):
            self._operation("send")
            self._wait(lambda: peer.is_closed or len(peer.received) < capacity, "sends")
            if peer.is_closed:
                self.reset()
                raise BrokenPipeError(32, "Broken pipe")
            count = min(len(view), capacity - len(peer.received))
            if peer.rank not in self._network.silent_ranks:
                peer.received += view[:count]
            view = view[count:]
            self._network.scheduler.version += 1

    def _operation(self, verb: str) -> None:
        peer = self.peer
        self._network.scheduler.operation(f"{verb} {peer.rank if peer else '?'}")
        if self.is_closed:
            raise OSError(9, "Bad file descriptor")
        if self._network.breaks():
            self.reset()

    def _wait(self, ready: Callable[[], bool], label: str) -> None:
        scheduler = self._network.scheduler
        task = scheduler.current()
        assert task is not None

        def is_over() -> bool:
            return self.is_reset or self.is_closed or ready()

        if not is_over():
            task.label = label
            if not scheduler.wait(is_over, self.timeout):
                raise TimeoutError("timed out")
        if self.is_closed:
            raise OSError(9, "Bad file descriptor")
        if self.is_reset:
            raise ConnectionResetError(104, "Connection reset by peer")

    def _observe(self, value: object) -> None:
        task = self._network.scheduler.current()
        if task is not None:
            task.observe(value)

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return f"rank-{self.rank}", 0

    def getpeername(self) -> tuple[str, int]:
        assert self.peer is not None
        return self.peer.getsockname()

    def shutdown(self, _: int) -> None:
        """In both directions: as far as the peer, and whoever reads this end, can see."""
        if self.is_reset or self.is_closed:
            raise OSError(107, "Transport endpoint is not connected")
        self.is_ended = True
        if self.peer is not None:
            self.peer.is_ended = True
        self._network.scheduler.version += 1

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self.peer is not None:
                self.peer.is_ended = True
            self._network.scheduler.version += 1

    def has_answer(self) -> bool:
        return bool(self.received) or self.is_ended or self.is_reset

    def __enter__(self) -> VirtualSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VirtualSelect:
    """The module `select`."""

    def poll(self) -> Any:
        return _Poller()

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class _Poller:
    def __init__(self) -> None:
        self._sockets: list[VirtualSocket] = []

    def register(self, connection: VirtualSocket, _: int) -> None:
        self._sockets.append(connection)

    def poll(self, _: float) -> list[object]:
        return [each for each in self._sockets if each.has_answer()]

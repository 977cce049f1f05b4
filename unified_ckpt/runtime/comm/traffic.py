"""Counts the bytes that ranks exchange with other nodes, by network address, and how fast they are.

Rates are measured where bytes arrive: a call that sends returns once the kernel has the bytes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import first_items, human_size

MAX_ADDRESSES = 64  # in larger jobs, only the slowest addresses are reported
_SLOWEST_ADDRESSES = 4
_MIN_RATED_NBYTES = 1 << 20  # of a connection: fewer bytes measure the latency
_DIGITS = 6  # of seconds


@dataclass(frozen=True, slots=True)
class AddressTraffic:
    """What the ranks at one address exchanged with other nodes.

    `seconds`: how long bytes were arriving, on the rank where this took longest.
    """

    sent_nbytes: int
    received_nbytes: int
    seconds: float

    @property
    def received_per_second(self) -> float:
        """The bytes received per second, 0 if there are none."""
        return self.received_nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class ConnectionTraffic:
    """What one connection carried from one address to another. `seconds`: as it arrived."""

    sender: str
    receiver: str
    nbytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """The bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """What crossed the network between nodes, in a save or load.

    `nbytes`: received by all ranks. `by_address`: above 64 addresses, only the slowest ones of
    `address_count`. `slowest`: the slowest connection, None if all carried less than 1 MiB.
    """

    nbytes: int
    address_count: int
    by_address: Mapping[str, AddressTraffic]
    slowest: ConnectionTraffic | None

    def __str__(self) -> str:
        addresses = first_items(list(self.by_address), limit=_SLOWEST_ADDRESSES)
        text = f"network: {human_size(self.nbytes)} between {addresses}"
        if self.slowest is None:
            return text
        pair = f"{self.slowest.sender} to {self.slowest.receiver}"
        return f"{text}; slowest {pair}: {human_size(self.slowest.per_second)}/s"


@dataclass(slots=True)
class _Counter:
    """One connection of this rank, used by one thread at a time."""

    host: str
    peer: str
    sent_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return its counts as `Traffic.summary` does. `seconds`: as in `AddressTraffic`."""
        row = [self.sent_nbytes, self.received_nbytes, seconds]
        carried = [self.peer, self.host, self.received_nbytes, round(self.seconds, _DIGITS)]
        is_rated = self.received_nbytes >= _MIN_RATED_NBYTES
        return {"addresses": {self.host: row}, "slowest": carried if is_rated else None}


class Traffic:
    """Counts the traffic of this rank in one save or load. Connections may be of any threads."""

    def __init__(self) -> None:
        self._counters: dict[socket.socket, _Counter] = {}
        self._lock = threading.Lock()
        self._receivers, self._since, self._seconds = 0, 0.0, 0.0

    def count_sent(self, connection: socket.socket, nbytes: int) -> None:
        """Count bytes that are about to be sent."""
        self._counter(connection).sent_nbytes += nbytes

    @contextmanager
    def receiving(self, connection: socket.socket, nbytes: int) -> Iterator[None]:
        """Count bytes that arrive in the block."""
        began = time.monotonic()
        with self._lock:
            if self._receivers == 0:
                self._since = began
            self._receivers += 1
        try:
            yield
        finally:
            now = time.monotonic()
            with self._lock:
                self._receivers -= 1
                if self._receivers == 0:
                    self._seconds += now - self._since
        counter = self._counter(connection)
        counter.received_nbytes += nbytes
        counter.seconds += now - began

    def _counter(self, connection: socket.socket) -> _Counter:
        counter = self._counters.get(connection)
        if counter is None:
            try:
                local, peer = connection.getsockname(), connection.getpeername()
            except OSError:  # it has ended; its next use raises
                return _Counter("", "")
            self._counters[connection] = counter = _Counter(_host(local), _host(peer))
        return counter

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON for `merge_traffic`; {} if there are none."""
        counters, seconds = list(self._counters.values()), round(self._seconds, _DIGITS)
        if not any(counter.sent_nbytes or counter.received_nbytes for counter in counters):
            return {}
        return merge_traffic(counter.summary(seconds) for counter in counters)


def merge_traffic(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one summary of those of several ranks or groups of ranks."""
    rows: dict[str, list[Any]] = {}
    connections = []
    for summary in summaries:
        for address, (sent, received, seconds) in summary.get("addresses", {}).items():
            row = rows.setdefault(address, [0, 0, 0.0])
            rows[address] = [row[0] + sent, row[1] + received, max(row[2], seconds)]
        if summary.get("slowest"):
            connections.append(summary["slowest"])
    if not rows:
        return {}
    slowest = min(connections, key=lambda each: ConnectionTraffic(*each).per_second, default=None)
    return {"addresses": rows, "slowest": slowest}


def report_traffic(summary: Mapping[str, Any]) -> NetworkReport | None:
    """Return the report of a merged summary, None if nothing crossed the network."""
    if not summary:
        return None
    addresses = {
        address: AddressTraffic(*fields) for address, fields in summary["addresses"].items()
    }
    shown = addresses
    if len(addresses) > MAX_ADDRESSES:
        rated = [name for name, traffic in addresses.items() if traffic.received_nbytes]
        slowest = sorted(rated, key=lambda name: addresses[name].received_per_second)
        shown = {name: addresses[name] for name in slowest[:_SLOWEST_ADDRESSES]}
    return NetworkReport(
        sum(traffic.received_nbytes for traffic in addresses.values()),
        len(addresses),
        shown,
        ConnectionTraffic(*summary["slowest"]) if summary["slowest"] else None,
    )


def _host(socket_address: tuple[Any, ...]) -> str:
    """Return the host of a socket's address. A socket for both families maps IPv4 into IPv6."""
    return str(socket_address[0]).removeprefix("::ffff:")

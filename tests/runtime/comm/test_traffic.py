"""Tests of the counts of bytes between nodes."""

from __future__ import annotations

import random
import socket
import time
from typing import Any

import pytest

from unified_ckpt.runtime.comm.traffic import (
    MAX_ADDRESSES,
    AddressTraffic,
    ConnectionTraffic,
    Traffic,
    merge_traffic,
    report_traffic,
)

MIB = 1 << 20


class Connection:
    """A socket that only has addresses."""

    def __init__(self, host: str, peer: str) -> None:
        self._host, self._peer = host, peer

    def getsockname(self) -> tuple[str, int]:
        return self._host, 1

    def getpeername(self) -> tuple[str, int]:
        if not self._peer:
            raise OSError(107, "Transport endpoint is not connected")
        return self._peer, 2


def connection(host: str, peer: str) -> socket.socket:
    return Connection(host, peer)  # type: ignore[return-value]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_of_connections_that_receive_at_once(clock: list[float]) -> None:
    """A rank's time is the union of its receives; a connection's is its own."""
    traffic = Traffic()
    one, two = connection("10.0.0.1", "10.0.0.2"), connection("::ffff:10.0.0.1", "10.0.0.3")
    with traffic.receiving(one, 6 * MIB):
        clock[0] += 1
        with traffic.receiving(two, 2 * MIB):
            clock[0] += 1
        clock[0] += 1
    clock[0] += 50  # nothing is under way
    with traffic.receiving(two, MIB):
        clock[0] += 1
    traffic.count_sent(one, 5)
    network = report_traffic(merge_traffic([traffic.summary()]))
    assert network is not None
    assert network.by_address == {"10.0.0.1": AddressTraffic(5, 9 * MIB, 4.0)}
    assert network.slowest == ConnectionTraffic("10.0.0.3", "10.0.0.1", 3 * MIB, 2.0)
    assert str(network) == (
        "network: 9 MiB between 10.0.0.1; slowest 10.0.0.3 to 10.0.0.1: 1.5 MiB/s"
    )


def test_failed_receive_is_not_counted(clock: list[float]) -> None:
    """It must not look like bytes, nor as if it went on for ever."""
    traffic = Traffic()
    broken, gone = connection("10.0.0.1", "10.0.0.2"), connection("10.0.0.1", "")
    with pytest.raises(ConnectionResetError), traffic.receiving(broken, MIB):
        raise ConnectionResetError
    with traffic.receiving(gone, MIB):  # all bytes came, and then the peer died
        clock[0] += 1
    assert traffic.summary() == {}
    with traffic.receiving(broken, MIB):
        clock[0] += 1
    assert traffic.summary()["addresses"] == {"10.0.0.1": [0, MIB, 2.0]}


def test_nothing_crossed_the_network() -> None:
    assert report_traffic(merge_traffic([{}, Traffic().summary()])) is None


def test_few_bytes_have_no_rate(clock: list[float]) -> None:
    """They measure the latency."""
    traffic = Traffic()
    with traffic.receiving(connection("10.0.0.1", "10.0.0.2"), MIB - 1):
        clock[0] += 1
    network = report_traffic(traffic.summary())
    assert network is not None
    assert network.slowest is None
    assert str(network) == "network: 1 MiB between 10.0.0.1"


def test_large_jobs_report_the_slowest_addresses() -> None:
    """Merged in two levels, in any grouping, the result is that of all ranks at once."""
    count = MAX_ADDRESSES + 1
    summaries: list[dict[str, Any]] = [
        {
            "addresses": {f"10.0.0.{node}": [0, 2 * MIB, (1 + node) / 1000]},
            "slowest": ["10.0.1.1", f"10.0.0.{node}", 2 * MIB, (1 + node) / 1000],
        }
        for node in range(count)
        for _ in range(2)  # ranks
    ]
    summaries.append({"addresses": {"10.0.0.3": [7, 0, 0]}, "slowest": None})  # sends only
    random.Random(3).shuffle(summaries)
    groups = [merge_traffic(summaries[start::5]) for start in range(5)]
    network = report_traffic(merge_traffic([{}, *groups]))
    assert network == report_traffic(merge_traffic(summaries))
    assert network is not None
    assert (network.nbytes, network.address_count) == (count * 4 * MIB, count)
    assert list(network.by_address) == [f"10.0.0.{node}" for node in (64, 63, 62, 61)]
    assert network.slowest == ConnectionTraffic("10.0.1.1", "10.0.0.64", 2 * MIB, 0.065)

"""Tests of the address at which other nodes reach a rank."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.exchange import interfaces, tcp
from unified_ckpt.runtime.exchange.interfaces import listening_host, reachable_host

HOSTS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.1.0.5", "fe80::1"],
    "ib0": ["fe80::2", "fd00::7"],
    "awsnic": ["169.254.7.7", "fe80::3"],
    "down": [],
}


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def hosts_of(interface: str) -> Iterator[str]:
        return iter(HOSTS.get(interface, []))

    monkeypatch.setattr(interfaces, "_all_hosts", hosts_of)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(HOSTS)))


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("names", "local_rank", "host"),
    [
        ("eth0", "0", "10.1.0.5"),
        ("ib0", "3", "fd00::7"),
        ("eth0,ib0", "0", "10.1.0.5"),
        ("eth0,ib0", "1", "fd00::7"),
        (" eth0, ib0,", "2", "10.1.0.5"),
        ("lo", "0", "127.0.0.1"),
    ],
)
def test_named_interfaces_take_turns(
    monkeypatch: pytest.MonkeyPatch, names: str, local_rank: str, host: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")  # is not asked
    assert listening_host() == host


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("eth9", "'eth9' does not exist"),
        ("eth", "'eth' does not exist"),  # a prefix, as NCCL takes it
        ("^lo,docker", r"'\^lo' does not exist"),  # aws-do-eks#51
        ("eth0,eth9", "'eth9' does not exist"),  # on every rank, whosever turn it is
        ("down", "'down' has no address that other nodes reach"),
        ("awsnic", "'awsnic' has no address that other nodes reach"),
    ],
)
def test_unusable_interface_is_an_error(
    monkeypatch: pytest.MonkeyPatch, names: str, problem: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    listed = re.escape("lo (127.0.0.1, ::1), eth0 (10.1.0.5), ib0 (fd00::7)")
    with pytest.raises(StorageError, match=f"^GLOO_SOCKET_IFNAME: interface {problem}.*{listed}$"):
        listening_host()


def test_interfaces_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answers, read as they are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert listening_host() == "127.0.0.1"
    has_ipv6 = Path("/proc/net/if_inet6").exists() and "lo\n" in Path(
        "/proc/net/if_inet6"
    ).read_text(encoding="ascii")
    assert list(interfaces._hosts("lo")) == ["127.0.0.1"] + ["::1"] * has_ipv6
    assert list(interfaces._hosts("no-such")) == []


def test_host_of_the_store_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`init_process_group("tcp://…")` needs no MASTER_ADDR, and another job may have left one."""
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrapped = PrefixStore("a", PrefixStore("b", store))
    monkeypatch.setattr(interfaces, "process_group_store", lambda: wrapped)
    assert listening_host() == "127.0.0.1"


def test_store_without_a_host_leaves_the_hostname(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr(interfaces, "process_group_store", lambda: store)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")  # as Debian maps it
    assert listening_host() == "127.0.0.1"
    assert reachable_host("127.0.0.1") == "127.0.0.1"


def test_host_with_an_address_of_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have IPv6 addresses, and this node none."""
    udp = (socket.SOCK_DGRAM, 17, "")
    rows = [(socket.AF_INET6, *udp, ("::1", 9)), (socket.AF_INET, *udp, ("127.0.0.1", 9))]
    connect = socket.socket.connect

    def without_ipv6(probe: socket.socket, address: tuple[str, int]) -> None:
        if probe.family == socket.AF_INET6:
            raise OSError(101, os.strerror(101))
        connect(probe, address)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
    monkeypatch.setattr(socket.socket, "connect", without_ipv6)
    assert listening_host() == "127.0.0.1"
    rows.pop()
    with pytest.raises(StorageError, match="cannot be reached: Network is unreachable"):
        listening_host()


def test_loopback_address_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's node may resolve its own name to a loopback address (Debian)."""
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert reachable_host("127.0.1.1") == "10.1.2.3"
    assert reachable_host("10.9.9.9") == "10.9.9.9"
    monkeypatch.delenv("MASTER_ADDR")
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(StorageError, match=r"host 'no\..*': cannot be reached"):
        listening_host()


def test_refused_connection_names_the_address() -> None:
    """It is how a wrong network shows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as refused:
        tcp.connect(tcp.Address("127.0.0.1", port, ""), timeout_seconds=5)
    assert refused.value.strerror == "127.0.0.1: Connection refused"

"""Folders served over TCP: access is limited to named files, and nothing is left afterwards."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    NodeState,
    ResourceUsage,
    counting,
    folder_of,
    on_node,
)
from tests.support.harness import run_ranks
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.traffic import Traffic, merge_traffic, report_traffic
from unified_ckpt.runtime.exchange import tcp
from unified_ckpt.runtime.exchange.file_server import FolderServer, Peer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address

BODY = bytes(range(256)) * 40
SECONDS = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FolderServer]:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "served").write_bytes(BODY)
        (tmp_path / folder / "private").write_bytes(b"secret")
    (tmp_path / "outside").write_bytes(b"secret")
    folder_server = FolderServer(
        [(str(tmp_path / "one"), ["served", "gone"]), (str(tmp_path / "two"), [])],
        traffic=Traffic(),
        timeout_seconds=SECONDS,
    )
    yield folder_server
    folder_server.close()


def client(
    server: FolderServer,
    *,
    folder: int = 0,
    token: str | None = None,
    names: tuple[str, ...] = ("served", "gone"),
    traffic: Traffic | None = None,
) -> PeerStorage:
    served = server.address
    address = Address(served.host, served.port, token or served.token)
    return PeerStorage(
        Peer(7, address),
        folder=folder,
        root="/there",
        names=names,
        traffic=traffic or Traffic(),
        timeout_seconds=SECONDS,
    )


def raw(server: FolderServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=SECONDS)


def ask(connection: socket.socket, **request: object) -> tuple[dict[str, object], bytes]:
    """Sends a raw request and returns the answer."""
    message = json.dumps(request).encode()
    connection.sendall(struct.pack("<QQ", len(message), 0) + message)
    try:
        head = connection.recv(16, socket.MSG_WAITALL)
    except ConnectionResetError:
        head = b""
    if len(head) < 16:
        return {"closed": True}, b""
    size, nbytes = struct.unpack("<QQ", head)
    header = json.loads(connection.recv(size, socket.MSG_WAITALL))
    return header, connection.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""


def test_served_file_can_be_read(server: FolderServer) -> None:
    remote = client(server)
    assert remote.read("served") == BODY
    assert remote.size("served") == len(BODY)
    into = bytearray(100)
    remote.read_at("served", 300, memoryview(into))
    assert bytes(into) == BODY[300:400]
    assert remote.names() == ["gone", "served"]
    remote.close()
    assert remote.read("served") == BODY, "it connects again"
    remote.close()


def test_missing_files_and_ranges_are_errors(server: FolderServer) -> None:
    remote = client(server)
    assert remote.size("gone") is None
    assert remote.size("never heard of") is None
    with pytest.raises(NotFoundError, match=r"/there/gone at rank 7: .*no such file"):
        remote.read("gone")
    with pytest.raises(
        StorageError,
        match=r"/there/served at rank 7: .*has 10240 bytes, expected bytes \[10200, 10300\)",
    ):
        remote.read_at("served", 10200, memoryview(bytearray(100)))
    assert remote.read("served") == BODY, "the connection goes on"
    remote.close()


@pytest.mark.parametrize("token", ["0" * 32, "", "\0" * 32])
def test_wrong_token_is_rejected(server: FolderServer, token: str) -> None:
    with raw(server) as connection:
        connection.sendall(token.encode().ljust(32, b"x"))
        assert ask(connection, folder=0, file="served", start=0, nbytes=3) == (
            {"closed": True},
            b"",
        )
    with raw(server) as connection:  # nor is a header that is not JSON
        connection.sendall(server.address.token.encode() + struct.pack("<QQ", 3, 0) + b"{{{")
        assert connection.recv(1) == b""
    remote = client(server, token="f" * 32)  # closes its connection on an error
    with pytest.raises(StorageError, match="/there/served at rank 7: the rank does not answer"):
        remote.read("served")


NAMES = ["private", "../outside", "../one/private", "/etc/hostname", "", ".", "./served"]
NOT_SERVED = "is not a file of this checkpoint"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            ({"folder": 0, "file": name, "nbytes": nbytes}, NOT_SERVED)
            for name in (*NAMES, "served/../private")
            for nbytes in (0, 3)
        ),
        *(({"folder": folder, "file": "served"}, "") for folder in (2, -2, 1, "x")),
        *(
            ({"folder": 0, "file": "served", **span}, "expected bytes")
            for span in ({"start": -1}, {"nbytes": -3}, {"nbytes": 1 << 60})
        ),
        ({"folder": 0, "file": "gone"}, "no such file"),
        ({"file": "served"}, "folder"),
    ],
)
def test_invalid_requests_are_answered_with_errors(
    server: FolderServer, fields: dict[str, object], text: str
) -> None:
    with raw(server) as connection:
        connection.sendall(server.address.token.encode())
        header, body = ask(connection, **{"start": 0, "nbytes": 3, **fields})
        assert text in str(header["error"])
        assert ("size" in header, body) == (False, b"")
        header, _ = ask(connection, folder=0, file="served", start=0, nbytes=0)
        assert header == {"size": len(BODY)}


def test_large_requests_use_bounded_memory(tmp_path: Path) -> None:
    """64 MiB at once: the server holds one chunk of it in memory."""
    nbytes = 64 << 20
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", nbytes)
    sent, received = Traffic(), Traffic()
    served = FolderServer([(str(tmp_path), ["large"])], traffic=sent, timeout_seconds=SECONDS)
    remote = client(served, names=("large",), traffic=received)
    into = memoryview(bytearray(nbytes))
    tracemalloc.start()
    try:
        remote.read_at("large", 0, into)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        remote.close()
        served.close()
    assert peak < 8 << 20
    host = served.address.host
    assert sent.summary()["addresses"] == {host: [nbytes, 0, 0]}
    network = report_traffic(merge_traffic([sent.summary(), received.summary()]))
    assert network is not None
    assert (network.nbytes, list(network.by_address)) == (nbytes, [host])
    assert network.slowest is not None
    assert network.slowest.nbytes == nbytes
    assert 0 < network.slowest.seconds == network.by_address[host].seconds


def test_closed_server_rejects_connections(server: FolderServer) -> None:
    remote = client(server)
    assert remote.size("served") == len(BODY)
    server.close()
    with pytest.raises(StorageError, match="/there/served at rank 7: the rank does not answer"):
        remote.size("served")
    with pytest.raises(StorageError, match="does not answer"):
        client(server).size("served")


def test_idle_client_is_still_served(tmp_path: Path) -> None:
    """A rank may copy from another node for longer than the timeout between two reads."""
    (tmp_path / "served").write_bytes(BODY)
    served = FolderServer([(str(tmp_path), ["served"])], traffic=Traffic(), timeout_seconds=0.2)
    remote = client(served)
    for _ in range(2):
        assert remote.read("served") == BODY
        time.sleep(0.3)
    remote.close()
    served.close()


def test_silent_peer_is_waited_for_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and never answers
        address = Address("127.0.0.1", mute.getsockname()[1], "0" * 32)
        remote = PeerStorage(
            Peer(7, address),
            folder=0,
            root="/there",
            names=["served"],
            traffic=Traffic(),
            timeout_seconds=0.3,
        )
        for _ in range(3):
            with pytest.raises(
                StorageError, match="/there/served at rank 7: the rank does not answer"
            ):
                remote.size("served")
        began = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            remote.size("served")
        assert time.monotonic() - began < 0.25, "it is not waited for again"


def test_frames_are_sent_without_nagle_delay() -> None:
    """With Nagle's algorithm each small read would take 40 ms."""
    accepted: list[int] = []

    def serve(connection: socket.socket) -> None:
        accepted.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        tcp.send_header(connection, {})

    listener = tcp.Listener(
        serve, on_error=pytest.fail, on_closed=lambda: None, timeout_seconds=SECONDS
    )
    with tcp.connect(listener.address, timeout_seconds=SECONDS) as connected:
        assert tcp.receive_header(connected) == ({}, 0)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listener.close()
    assert all(accepted)
    assert len(accepted) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ECONNABORTED])
def test_listener_outlives_failed_connections(
    monkeypatch: pytest.MonkeyPatch, host: str, code: int
) -> None:
    """Later peers would wait in vain until the timeout. IPv6 is how MASTER_ADDR may resolve."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    accept, failures = socket.socket.accept, [code, code]

    def failing(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), os.strerror(code))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)
    listener = tcp.Listener(
        lambda connection: tcp.send_header(connection, {}),
        on_error=pytest.fail,
        on_closed=lambda: None,
        timeout_seconds=SECONDS,
    )
    address = Address(host, listener.address.port, listener.address.token)
    with tcp.connect(address, timeout_seconds=SECONDS) as connected:
        assert tcp.receive_header(connected) == ({}, 0)
    assert not failures
    listener.close()


@pytest.mark.parametrize(
    ("code", "reported"),
    [("EHOSTUNREACH", False), ("ENETDOWN", False), ("ECONNRESET", False), ("ENOBUFS", True)],
)
def test_unreachable_peers_are_not_errors_of_this_rank(code: str, reported: bool) -> None:
    """A node that lost its power is not a lack of this one."""
    errors, served = list[Exception](), threading.Event()

    def serve(_: socket.socket) -> None:
        raise OSError(getattr(errno, code), code)

    listener = tcp.Listener(
        serve, on_error=errors.append, on_closed=served.set, timeout_seconds=SECONDS
    )
    with tcp.connect(listener.address, timeout_seconds=SECONDS) as connected:
        assert connected.recv(1) == b""
    listener.close()
    assert served.wait(SECONDS)
    assert len(errors) == reported


# loads

FULL = torch.arange(700 * 500, dtype=torch.float32).reshape(700, 500)


@pytest.mark.parametrize("damaged", [False, True])
def test_repeated_loads_leave_no_threads_or_files(tmp_path: Path, damaged: bool) -> None:
    NodeState({"w": FULL}, {"w": 0}).save(tmp_path, [0, 1])
    if damaged:
        (file,) = folder_of(tmp_path, 1).glob("model_shards*.safetensors")
        flip(file, -1)
    snapshots: list[ResourceUsage] = []
    keys: list[int] = []

    def act(comm: Comm) -> None:
        target = {"w": torch.zeros_like(FULL)}
        refused = pytest.raises(uc.IntegrityError, match="no node has these bytes intact")
        with on_node(comm, [0, 1]) as checkpointer:
            for number in range(15):
                with refused if damaged else nullcontext():
                    checkpointer.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
                    assert torch.equal(target["w"], FULL)
                if number in (4, 14):
                    with counting(comm):
                        if comm.rank == 0:
                            keys.append(comm._store.num_keys())
                            snapshots.append(ResourceUsage())
                            snapshots[0].no_more()

    run_ranks(2, act)
    assert keys[1] <= keys[0]

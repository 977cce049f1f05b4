"""Folders served over TCP: who may read what, and that nothing is left afterwards."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.refusals import same_error
from tests.support.simulated_nodes import LOAD, SAVE, Held, counting, folder_of, on_node
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange import tcp
from unified_ckpt.runtime.exchange.file_server import FolderServer, PeerStorage
from unified_ckpt.runtime.exchange.tcp import Address, parse_address
from unified_ckpt.testing import run_ranks, try_ranks

BODY = bytes(range(256)) * 40
SECONDS = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FolderServer]:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "served").write_bytes(BODY)
        (tmp_path / folder / "private").write_bytes(b"secret")
    (tmp_path / "outside").write_bytes(b"secret")
    made = FolderServer(
        [(str(tmp_path / "one"), ["served", "gone"]), (str(tmp_path / "two"), [])],
        timeout_seconds=SECONDS,
    )
    yield made
    made.close()


def client(
    server: FolderServer,
    *,
    folder: int = 0,
    token: str | None = None,
    names: tuple[str, ...] = ("served", "gone"),
) -> PeerStorage:
    at = server.address
    address = Address(at.host, at.port, token or at.token)
    return PeerStorage(
        address, folder=folder, root="/there", rank=7, names=names, timeout_seconds=SECONDS
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
    there = client(server)
    assert there.read("served") == BODY
    assert there.size("served") == len(BODY)
    into = bytearray(100)
    there.read_at("served", 300, memoryview(into))
    assert bytes(into) == BODY[300:400]
    assert there.names() == ["gone", "served"]
    there.close()
    assert there.read("served") == BODY, "it connects again"
    there.close()


def test_missing_files_and_ranges_are_errors(server: FolderServer) -> None:
    there = client(server)
    assert there.size("gone") is None
    assert there.size("never heard of") is None
    with pytest.raises(NotFoundError, match=r"/there/gone at rank 7: .*no such file"):
        there.read("gone")
    with pytest.raises(
        StorageError,
        match=r"/there/served at rank 7: .*has 10240 bytes, expected bytes \[10200, 10300\)",
    ):
        there.read_at("served", 10200, memoryview(bytearray(100)))
    assert there.read("served") == BODY, "the connection goes on"
    there.close()


@pytest.mark.parametrize("token", ["0" * 32, "", "\0" * 32])
def test_wrong_token_is_rejected(server: FolderServer, token: str) -> None:
    with raw(server) as connection:
        connection.sendall(token.encode().ljust(32, b"x"))
        assert ask(connection, folder=0, file="served", operation="read") == ({"closed": True}, b"")
    there = client(server, token="f" * 32)  # closes its connection on an error
    with pytest.raises(StorageError, match="/there/served at rank 7: the rank does not answer"):
        there.read("served")


NAMES = [
    "private",
    "../outside",
    "../one/private",
    "/etc/hostname",
    "",
    ".",
    "served/../private",
    "./served",
]


@pytest.mark.parametrize("operation", ["read", "size", "read_at"])
@pytest.mark.parametrize("name", NAMES)
def test_unserved_names_are_rejected(server: FolderServer, name: str, operation: str) -> None:
    with raw(server) as connection:
        connection.sendall(server.address.token.encode())
        header, body = ask(connection, folder=0, file=name, operation=operation, start=0, nbytes=3)
        assert "is not a file of this checkpoint" in str(header["error"])
        assert "size" not in header
        assert body == b""
        assert ask(connection, folder=0, file="served", operation="size")[0] == {"size": len(BODY)}


@pytest.mark.parametrize(
    "fields",
    [
        {"folder": 2, "file": "served", "operation": "read"},
        {"folder": -2, "file": "served", "operation": "read"},
        {"folder": 1, "file": "served", "operation": "read"},
        {"folder": "x", "file": "served", "operation": "read"},
        {"folder": 0, "file": "served", "operation": "read_at", "start": -1, "nbytes": 3},
        {"folder": 0, "file": "served", "operation": "read_at", "start": 0, "nbytes": -3},
        {"folder": 0, "file": "served", "operation": "read_at", "start": 0, "nbytes": 1 << 60},
        {"folder": 0, "file": "served"},
        {"file": "served"},
    ],
)
def test_invalid_requests_are_answered_with_errors(
    server: FolderServer, fields: dict[str, object]
) -> None:
    with raw(server) as connection:
        connection.sendall(server.address.token.encode())
        header, body = ask(connection, **fields)
        assert "error" in header
        assert body == b""
        assert ask(connection, folder=0, file="served", operation="size")[0] == {"size": len(BODY)}


def test_header_that_is_not_json_ends_the_connection(server: FolderServer) -> None:
    with raw(server) as connection:
        connection.sendall(server.address.token.encode() + struct.pack("<QQ", 3, 0) + b"{{{")
        assert connection.recv(1) == b""
    there = client(server)
    assert there.read("served") == BODY
    there.close()


def test_large_requests_use_bounded_memory(tmp_path: Path) -> None:
    """64 MiB at once: the server holds a piece of it."""
    nbytes = 64 << 20
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", nbytes)
    served = FolderServer([(str(tmp_path), ["large"])], timeout_seconds=SECONDS)
    there = PeerStorage(
        served.address, folder=0, root="/there", rank=0, names=["large"], timeout_seconds=SECONDS
    )
    into = memoryview(bytearray(nbytes))
    tracemalloc.start()
    try:
        there.read_at("large", 0, into)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        there.close()
        served.close()
    assert peak < 8 << 20


def test_closed_server_rejects_connections(server: FolderServer) -> None:
    there = client(server)
    assert there.size("served") == len(BODY)
    server.close()
    with pytest.raises(StorageError, match="/there/served at rank 7: the rank does not answer"):
        there.size("served")
    with pytest.raises(StorageError, match="does not answer"):
        client(server).size("served")


def test_silent_peer_is_waited_for_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and never answers
        address = Address("127.0.0.1", mute.getsockname()[1], "0" * 32)
        there = PeerStorage(
            address, folder=0, root="/there", rank=7, names=["served"], timeout_seconds=0.3
        )
        for _ in range(3):
            with pytest.raises(
                StorageError, match="/there/served at rank 7: the rank does not answer"
            ):
                there.size("served")
        began = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            there.size("served")
        assert time.monotonic() - began < 0.25, "it is not waited for again"


def test_frames_are_sent_without_nagle_delay() -> None:
    """With Nagle's algorithm each small read would take 40 ms."""
    accepted: list[int] = []

    def serve(connection: socket.socket) -> None:
        accepted.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        tcp.send_header(connection, {})

    listener = tcp.Listener(serve, on_closed=lambda: None, timeout_seconds=SECONDS)
    with tcp.connect(listener.address, timeout_seconds=SECONDS) as made:
        assert tcp.receive_header(made) == ({}, 0)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listener.close()
    assert all(accepted)
    assert len(accepted) == 1


def test_loopback_address_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's node may resolve its own name to a loopback address (Debian)."""
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert tcp._reachable_host("127.0.1.1") == "10.1.2.3"
    assert tcp._reachable_host("10.9.9.9") == "10.9.9.9"
    monkeypatch.delenv("MASTER_ADDR")
    assert tcp._reachable_host("127.0.0.1") == "127.0.0.1"


def test_address_round_trip() -> None:
    address = Address("10.0.0.1", 4711, "ab" * 16)
    assert parse_address(address.encode()) == address


# loads

FULL = torch.arange(700 * 500, dtype=torch.float32).reshape(700, 500)


def save_halves(root: Path) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            layout = uc.Layout(mesh={"dp": 2}, rules={"w": {"dp": 0}})
            made.save(
                folder_of(root, comm.rank),
                model={"w": FULL.chunk(2)[comm.rank].clone()},
                layout=layout,
                options=SAVE,
            )

    run_ranks(2, act)


def test_repeated_loads_leave_no_threads_or_files(tmp_path: Path) -> None:
    save_halves(tmp_path)
    snapshots: list[Held] = []
    keys: list[int] = []

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            for number in range(30):
                target = {"w": torch.zeros_like(FULL)}
                made.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
                assert torch.equal(target["w"], FULL)
                if number in (4, 29):
                    with counting(comm):
                        if comm.rank == 0:
                            keys.append(comm._store.num_keys())
                            snapshots.append(Held())
                            snapshots[0].no_more()

    run_ranks(2, act)
    assert keys[1] <= keys[0]


def test_failed_load_leaves_no_threads_or_files(tmp_path: Path) -> None:
    save_halves(tmp_path)
    (file,) = folder_of(tmp_path, 1).glob("model_shards*.safetensors")
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            made.load(
                folder_of(tmp_path, comm.rank), model={"w": torch.zeros_like(FULL)}, options=LOAD
            )

    snapshots: list[Held] = []
    for _ in range(6):
        same_error(try_ranks(2, act), uc.IntegrityError, "no node has these bytes intact")
        snapshots.append(Held())
    snapshots[0].no_more()


def dying(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Servers that stop after some answers."""
    answer, count = FolderServer._handle, iter(range(1 << 30))

    def some(self: FolderServer, connection: socket.socket, request: dict[str, object]) -> None:
        if next(count) >= after:
            self.close()
            raise ConnectionResetError("dead")
        answer(self, connection, request)

    monkeypatch.setattr(FolderServer, "_handle", some)


@pytest.mark.parametrize("after", [0, 3, 6])
def test_peer_dies_during_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Every rank raises an error within the timeout."""
    save_halves(tmp_path)
    dying(monkeypatch, after=after)

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            options = uc.LoadOptions(timeout_seconds=3)
            made.load(
                folder_of(tmp_path, comm.rank), model={"w": torch.zeros_like(FULL)}, options=options
            )

    data = try_ranks(2, act, timeout_seconds=30)
    for error in data:
        assert isinstance(error, uc.StorageError | uc.IntegrityError | uc.IncompleteError), error
        with pytest.raises(uc.CheckpointError, match="does not answer"):
            raise error


def test_peer_dies_and_another_copy_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local copy is damaged, one peer is dead, and another peer has a copy."""

    def save(comm: Comm) -> None:
        with on_node(comm, [0, 1, 2]) as made:
            made.save(folder_of(tmp_path, comm.rank), model={"w": FULL.clone()}, options=SAVE)

    run_ranks(3, save)
    for node in (0, 1):
        (file,) = folder_of(tmp_path, node).glob("model*.safetensors")
        body = bytearray(file.read_bytes())
        body[-1] ^= 1
        file.write_bytes(body)
    read_at = PeerStorage.read_at

    def dead(self: PeerStorage, name: str, start: int, into: memoryview) -> None:
        if self._rank == 1:
            raise StorageError("rank 1 is dead")
        read_at(self, name, start, into)

    monkeypatch.setattr(PeerStorage, "read_at", dead)

    def load(comm: Comm) -> uc.LoadReport:
        target = {"w": torch.zeros_like(FULL)}
        with on_node(comm, [0, 1, 2]) as made:
            report = made.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        assert torch.equal(target["w"], FULL)
        return report

    reports = run_ranks(3, load)
    assert [bool(report.notes) for report in reports] == [True, True, False]


def test_rank_that_cannot_serve_fails_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_halves(tmp_path)

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            made.load(
                folder_of(tmp_path, comm.rank),
                model={"w": torch.zeros_like(FULL)},
                options=uc.LoadOptions(timeout_seconds=20),
            )

    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    began = time.monotonic()
    same_error(
        try_ranks(2, act), uc.StorageError, "MASTER_ADDR 'no.such.host.invalid': cannot be reached"
    )
    assert time.monotonic() - began < 15, "at once, not when the time is out"
    shutil.rmtree(tmp_path)

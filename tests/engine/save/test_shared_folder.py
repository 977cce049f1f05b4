"""Ranks of several nodes save to one folder: one node writes each block, and the files equal those
of a single node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.node_cases import FUNCTION_FIXTURE
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    NAME,
    SAVE,
    CloseToOpenStorage,
    NodeState,
    fine,
    on_node,
    states,
)
from tests.support.engine.compressed_cases import compressed_cases
from tests.support.engine.reshard_cases import Case, Recorded, Writes, cases
from tests.support.engine.reshard_cases import save_case as save_alone
from tests.support.engine.save.part_store import PartStorage, PartStore
from tests.support.equality import check_equal
from tests.support.harness import (
    run_ranks,
    try_ranks,
)
from tests.support.lanes import use_lanes
from tests.support.manager.managers import folders, manager_of
from tests.support.refusals import same_error
from unified_ckpt.core.planning import exchange
from unified_ckpt.engine.encode.encoder import PlainEncoder
from unified_ckpt.engine.save.write import tiles
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange import probe_topology
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["states"]  # a fixture
NODES = [0, 0, 1, 1]
SHAPES = {"rows": (500, 90), "columns": (300, 701), "small": (50,), "norm": (4,)}
FULL = {name: torch.arange(float(np.prod(shape))).reshape(shape) for name, shape in SHAPES.items()}
STATE = NodeState(FULL, {"rows": 0, "columns": 1, "small": 0})
LAYOUT = STATE.layout(4)
Storages = Callable[[int, str], LocalStorage]  # by node and folder


def save(
    root: Path,
    step: int,
    *,
    block: int | None = 4096,
    storages: Storages | None = None,
    background: bool = False,
    nodes: Sequence[int] = NODES,
    **options: object,
) -> list[uc.SaveReport | BaseException]:
    def act(comm: Comm) -> uc.SaveReport:
        node = nodes[comm.rank]
        storage = (lambda place: storages(node, place)) if storages is not None else None
        with on_node(comm, nodes, storage=storage) as checkpointer:
            arguments = {
                "model": STATE.local(comm.rank, 4, step=step),
                "layout": LAYOUT,
                "step": step,
                "rank_extra": ("of", comm.rank, "x" * comm.rank),
            }
            chosen = SAVE.model_copy(
                update={"timeout_seconds": 10.0, "write_alignment": block, **options}
            )
            call = checkpointer.save_async if background else checkpointer.save
            outcome = call(root / NAME, options=chosen, **arguments)
            return outcome.result(60) if background else outcome

    return try_ranks(4, act)


def check(root: Path, step: int) -> None:
    """Check digests, tensors and `rank_extra` of the checkpoint."""
    report = uc.verify(root / NAME, deep=True)
    assert report.ok, report.problems
    opened = uc.open(root / NAME)
    for name, full in FULL.items():
        assert torch.equal(opened["model"][name][...], full + step), name
    assert opened.rank_extra[1:3] == [opened.rank_extra[1], opened.rank_extra[2]]
    assert [opened.rank_extra[rank] for rank in range(4)] == [
        ("of", rank, "x" * rank) for rank in range(4)
    ]


def writers(spans: Sequence[tuple[int, int, int]], block: int) -> list[set[int]]:
    """Return the nodes that wrote to each block of a file."""
    nodes: dict[int, set[int]] = {}
    for start, stop, node in spans:
        for number in range(start // block, -(-stop // block)):
            nodes.setdefault(number, set()).add(node)
    return list(nodes.values())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("block", "files"), [(4096, 3), (10_000, 3), (1 << 30, 3), (1 << 30, 6)], ids=str
)
def test_each_block_is_written_and_synced_by_one_node(
    tmp_path: Path, block: int, files: int, background: bool
) -> None:
    """A file that is only resized by a node may be uploaded by it as zeros."""
    writes = Writes()
    reports = fine(
        save(
            tmp_path,
            3,
            block=block if block < 1 << 30 else 0,
            storages=lambda node, place: Recorded(Path(place), writes, node),
            background=background,
            fsync=True,
            max_file_bytes=None if files == 3 else 100_000,
        )
    )
    check(tmp_path, 3)
    shared = {
        file: writers(spans, block)
        for file, spans in writes.spans.items()
        if file.endswith(".safetensors") and not file.startswith("extra")
    }
    assert len(shared) == files, "model, digests and rank_extra"
    for file, nodes_by_block in shared.items():
        assert all(len(nodes) == 1 for nodes in nodes_by_block), file
        assert set().union(*nodes_by_block) <= writes.synced[file], file
    everyone = set().union(
        *(nodes for nodes_by_block in shared.values() for nodes in nodes_by_block)
    )
    assert everyone == {0, 1}, "both nodes write"
    network = reports[0].network
    assert network is not None
    (traffic,) = network.by_address.values()  # all nodes are this machine
    assert traffic.sent_nbytes == traffic.received_nbytes == network.nbytes > 0
    assert [report.network for report in reports[1:]] == [None] * 3


@given(
    cases(max_world=6, max_tensors=3, loads=1, max_nbytes=100_000) | compressed_cases(max_world=6),
    st.data(),
)
@settings(
    max_examples=12,
    derandomize=True,
    suppress_health_check=FUNCTION_FIXTURE,
)
def test_any_ranks_on_any_nodes(tmp_path: Path, case: Case, data: st.DataObject) -> None:
    nodes = data.draw(
        st.lists(st.integers(0, 2), min_size=case.saved.world, max_size=case.saved.world)
    )
    block = data.draw(st.sampled_from([0, 1, 512, 70_000, 1 << 20]))
    tile_nbytes, background = (
        data.draw(st.sampled_from([64 << 10, 16 << 20])),
        data.draw(st.booleans()),
    )
    options = SAVE.model_copy(update={"write_alignment": block, "compression": "O2"})

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            for _ in range(2):
                state = case.state(comm.rank)
                if background:
                    checkpointer.save_async(
                        root / NAME,
                        model=state,
                        options=options.model_copy(update={"if_exists": "replace"}),
                    ).result(60)
                else:
                    checkpointer.save(
                        root / NAME,
                        model=state,
                        options=options.model_copy(update={"if_exists": "replace"}),
                    )

    with TemporaryDirectory(dir=tmp_path) as name, pytest.MonkeyPatch.context() as patch:
        root = Path(name)
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        patch.setattr(PlainEncoder, "chunk_nbytes", 4096)
        use_lanes(patch)
        run_ranks(case.saved.world, act)
        assert uc.verify(root / NAME, deep=True).ok
        (root / "alone").mkdir()
        save_alone(case, root / "alone", compression="O2")
        expected, actual = (
            {file.name: file.read_bytes() for file in folder.iterdir()}
            for folder in (root / "alone" / NAME, root / NAME)
        )
        assert {
            name
            for name in expected.keys() | actual.keys()
            if expected.get(name) != actual.get(name)
        } <= {"unified_checkpoint.json"}


@given(
    cases(max_world=5, max_tensors=3, loads=1, max_nbytes=100_000)
    | compressed_cases(max_world=5, whole_models=True),
    st.sampled_from([4096, 70_000, 1 << 20]),
    st.booleans(),
)
@settings(max_examples=12, derandomize=True, suppress_health_check=FUNCTION_FIXTURE)
def test_parts_have_one_writer_each(
    tmp_path: Path, case: Case, part_nbytes: int, background: bool
) -> None:
    """Every rank is a node of its own: files are the same bytes as on a disk that all share."""
    store, ranks = PartStore(part_nbytes), range(case.saved.world)
    options = SAVE.model_copy(update={"write_alignment": part_nbytes, "compression": "O2"})

    def act(comm: Comm) -> None:
        with on_node(
            comm, ranks, storage=lambda place: PartStorage(place, store, comm.rank)
        ) as checkpointer:
            call = checkpointer.save_async if background else checkpointer.save
            pending = call(root / NAME, model=case.state(comm.rank), options=options)
            if background:
                pending.result(60)

    with TemporaryDirectory(dir=tmp_path) as name:
        root = Path(name)
        run_ranks(case.saved.world, act)
        (root / "alone").mkdir()
        save_alone(case, root / "alone", compression="O2")
        expected = {
            file.name: file.read_bytes()
            for file in (root / "alone" / NAME).glob("*.safetensors")
            if not (root / NAME / file.name).exists()
        }
        assert store.complete() == expected


def test_two_folders_of_two_nodes_each(tmp_path: Path) -> None:
    """Nodes 0 and 1 share a folder, and so do 2 and 3: each folder holds half of the shards."""
    nodes, full = [0, 1, 2, 3], FULL["rows"]
    layout = uc.Layout(mesh={"dp": 4}, rules={"w": {"dp": 0}})

    def act(comm: Comm) -> None:
        folder = tmp_path / f"pair-{comm.rank // 2}" / NAME
        with on_node(comm, nodes) as checkpointer:
            for step in range(3):
                state = {
                    "w": (full + step).chunk(4)[comm.rank].clone(),
                    "b": torch.arange(9.0) + step,
                }
                options = SAVE.model_copy(update={"if_exists": "replace", "write_alignment": 4096})
                if step % 2:
                    checkpointer.save_async(
                        folder, model=state, layout=layout, options=options, step=step
                    ).result(60)
                else:
                    checkpointer.save(
                        folder, model=state, layout=layout, options=options, step=step
                    )
                target = {"w": torch.zeros_like(full), "b": torch.zeros(9)}
                assert checkpointer.load(folder, model=target, options=LOAD).step == step
                assert torch.equal(target["w"], full + step)
                assert torch.equal(target["b"], torch.arange(9.0) + step)

    run_ranks(4, act)
    assert [
        len(list((tmp_path / f"pair-{i}" / NAME).glob("model_shards*.safetensors"))) for i in (0, 1)
    ] == [2, 2]


def test_connections_fail_in_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes 0 and 1 share a folder and cannot connect; node 2 has its own. The next save works."""
    refused: list[int] = []

    def refuse(alignment: object, address: object, **arguments: object) -> PeerTransport:
        if arguments["rank"] == 1 and not refused:
            refused.append(1)
            raise uc.StorageError("no free port")
        return PeerTransport(alignment, address, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(probe_topology, "PeerTransport", refuse)

    def act(comm: Comm) -> None:
        folder = tmp_path / ("pair" if comm.rank < 2 else "single") / NAME
        with on_node(comm, [0, 1, 2]) as checkpointer:
            with pytest.raises(uc.StorageError, match="rank 1: no free port"):
                checkpointer.save(folder, model={"w": FULL["rows"]}, options=SAVE)
            checkpointer.save(folder, model={"w": FULL["rows"]}, options=SAVE)

    run_ranks(3, act)
    assert uc.verify(tmp_path / "pair" / NAME).ok


# failures


@pytest.mark.parametrize("background", [False, True])
def test_rank_fails_during_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Ranks that wait for this rank's part of a tile raise its error before their timeout."""
    real = tiles.tile_spans
    once = iter([True])

    def broken(*args: object, **kwargs: object) -> object:
        if next(once, False):
            raise ValueError("no such piece")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles, "tile_spans", broken)
    same_error(
        save(tmp_path, 1, background=background, timeout_seconds=30.0),
        uc.RankError,
        "ValueError: no such piece",
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("method", "error"), [("_store_tile", uc.RankError), ("_write", uc.StorageError)]
)
def test_bytes_changed_on_the_way_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: type[uc.CheckpointError]
) -> None:
    """The rank that receives a tile computes its digests: they would not show the change."""
    real = getattr(PeerTransport, method)

    def changed(self: PeerTransport, header: object, payload: bytearray) -> object:
        payload[-1] ^= 1
        return real(self, header, payload)

    monkeypatch.setattr(PeerTransport, method, changed)
    same_error(save(tmp_path, 1, timeout_seconds=30.0), error, "bytes changed on the way")
    assert os.listdir(tmp_path) == []


def test_rank_receives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: PeerTransport, *_: object) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(PeerTransport, "_serve", deaf)
    monkeypatch.setattr(collective, "_CAUSE_WAIT_SECONDS", 1.0)
    outcomes = save(tmp_path, 1, timeout_seconds=1.0)
    assert all(isinstance(outcome, uc.RankError) for outcome in outcomes), outcomes
    assert os.listdir(tmp_path) == []


def test_late_bytes_of_an_ended_save_are_refused(tmp_path: Path) -> None:
    """Bytes of a save that has failed or ended are refused."""

    def act(comm: Comm) -> str:
        with on_node(comm, [0, 1]) as checkpointer:
            options = SAVE.model_copy(update={"write_alignment": 4096})
            checkpointer.save(tmp_path / NAME, model={"w": torch.ones(3)}, options=options)
            assert checkpointer.session.topologies is not None
            (connections,) = checkpointer.session.topologies._connections.values()
            transport = connections.transport
            assert isinstance(transport, PeerTransport)
            if comm.rank == 1:
                for n in range(64):  # rank 0 writes some of these files
                    late = [memoryview(b"late")]
                    list(transport.route_write("ab" * 8, f"{n}", 0, late, exclusive_range=None))
                with pytest.raises(
                    uc.StorageError, match="save abababababababab: this rank does not accept bytes"
                ):
                    transport.flush_writes()
            comm.begin_collective("end", cached=False, timeout_seconds=10)
            return "ok"

    assert run_ranks(2, act) == ["ok", "ok"]
    assert uc.verify(tmp_path / NAME, deep=True).ok


def test_probe_files_are_closed_before_others_look(tmp_path: Path) -> None:
    """One shared folder was taken for two, and a save refused."""
    fine(save(tmp_path, 3, storages=lambda node, place: CloseToOpenStorage(place)))
    check(tmp_path, 3)


def test_one_way_visibility_is_refused(tmp_path: Path) -> None:
    """A mirrored folder, for example: treating it as shared would lose one node's bytes."""
    (tmp_path / "other").mkdir()

    class AsymmetricStorage(LocalStorage):
        def size(self, name: str) -> int | None:
            nbytes = super().size(name)
            return nbytes if nbytes is not None else LocalStorage(str(tmp_path)).size(name)

    def storages(node: int, place: str) -> LocalStorage:
        return (
            LocalStorage(str(tmp_path)) if node == 0 else AsymmetricStorage(str(tmp_path / "other"))
        )

    same_error(
        save(tmp_path, 1, storages=storages),
        uc.StorageError,
        "only one side sees the other's files",
    )
    assert sorted(os.listdir(tmp_path)) == ["other"]
    assert os.listdir(tmp_path / "other") == []


@pytest.mark.incident("transformers#27925")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_manager_on_two_nodes_with_one_root(tmp_path: Path, asynchronous: bool) -> None:
    """One rank prunes for all nodes, and all ranks restore the same step."""

    def act(comm: Comm) -> list[str]:
        options = uc.SaveOptions(timeout_seconds=30, fsync=False, write_alignment=4096)
        with manager_of(
            comm,
            tmp_path,
            save_options=options,
            interval_steps=1,
            keep_latest=2,
            asynchronous=asynchronous,
            node=f"m{comm.rank // 2}",
        ) as manager:
            for step in range(1, 6):
                manager.save(step, model=STATE.local(comm.rank, 4, step=step), layout=LAYOUT)
            manager.wait()
            blank = STATE.local(comm.rank, 4).items()
            target = {name: torch.zeros_like(tensor) for name, tensor in blank}
            report = manager.restore(model=target, layout=LAYOUT)
        assert report.step == 5
        check_equal(target, STATE.local(comm.rank, 4, step=5))
        return folders(tmp_path)

    assert run_ranks(4, act) == [["checkpoint-4", "checkpoint-5"]] * 4

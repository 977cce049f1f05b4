"""Folders of several nodes merged into one: bit for bit what one node would have written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.support.damage import DAMAGES, flip
from tests.support.engine.cluster.node_cases import FEW, FUNCTION_FIXTURE, scattered
from tests.support.engine.cluster.simulated_nodes import (
    NAME,
    SAVE,
    SECONDS,
    NodeState,
    Paths,
    fine,
    folder_of,
    gaps,
    on_node,
    once,
    save_case,
    states,
    twice,
)
from tests.support.engine.reshard_cases import (
    Case,
    Recorded,
    Writes,
    check_folder,
    check_written_once,
)
from tests.support.engine.reshard_cases import save_case as save_whole
from tests.support.format.manifests import edit_manifest, manifest_of
from tests.support.harness import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)
from tests.support.limits import peak_of
from tests.support.refusals import same_error
from unified_ckpt.cli.main import main
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.cluster.source import ClusterSource
from unified_ckpt.engine.folder.copy import CopyReport
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.file_server import PeerStorage
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["once", "states", "twice"]  # fixtures

OPTIONS = MergeOptions(max_file_bytes=1 << 30, if_exists="keep", timeout_seconds=SECONDS)
Storages = Callable[[int], LocalStorage]  # by rank


def merge_all(
    target: Path,
    nodes: Sequence[int],
    paths: Mapping[int, Paths],
    *,
    storages: Storages | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
    **options: object,
) -> list[CopyReport | BaseException]:
    """Merge with the folders of each rank's node."""
    target.mkdir(exist_ok=True, parents=True)
    merge_options = MergeOptions(
        **{
            **{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__},
            "on_progress": on_progress,
            **options,
        }
    )

    def act(comm: Comm) -> CopyReport:
        storage = storages(comm.rank) if storages is not None else LocalStorage(str(target))
        local_paths = [str(path) for path in paths[nodes[comm.rank]]]
        topology = Topology.shared_folder(comm.rank, nodes)
        return merge_paths(comm, local_paths, storage, NAME, merge_options, topology=topology)

    return try_ranks(len(nodes), act)


# any arrangement


def digests_of(folder: Path) -> dict[tuple[str, str], Sequence[int] | None]:
    with closing(open_path(str(folder), lock=False)) as opened:
        keys = {(part, name) for part in opened.parts for name in opened.names(part)}
        return dict(opened.block_digests(keys))


def check_merged(case: Case, target: Path) -> None:
    """Check every tensor with the safetensors library, and every digest with a full read."""
    check_folder(case, target / NAME)
    report = uc.verify(target / NAME, deep=True)
    assert report.problems == ()
    assert report.nbytes == sum(array.nbytes for array in case.arrays.values())
    manifest = manifest_of(target / NAME)
    assert manifest["node_group"] is None
    assert manifest["world_size"] == case.saved.world
    assert os.listdir(target) == [NAME]
    assert not any(
        SHARD_SUFFIX in entry or entry == "unified_save_id" for entry in os.listdir(target / NAME)
    )


def check_once(writes: Writes, target: Path, nodes: Sequence[int]) -> None:
    """Check that every byte was written once, those of a tensor file by ranks of one node."""
    check_written_once(writes, target / NAME)
    for path in (target / NAME).glob("*.safetensors"):
        if path.name not in (names.DIGESTS, names.EXTRA, names.RANK_EXTRA):
            assert len({nodes[rank] for _, _, rank in writes.spans[path.name]}) == 1


FILES = st.sampled_from([100_000, 1 << 30])
Drawn = tuple[Case, list[int], list[tuple[list[int], list[int | None]]]]


def check_drawn(root: Path, drawn: Drawn, max_file_bytes: int) -> None:
    case, nodes, loads = drawn
    with TemporaryDirectory(dir=root) as top:
        save_case(case, Path(top), nodes)
        save_whole(case, Path(top))
        numbers = sorted(set(nodes))
        for index, (loading_nodes, locations) in enumerate(loads):
            places = dict(zip(numbers, locations, strict=True))
            folders = {
                node: [folder_of(Path(top), n) for n in numbers if places[n] == node]
                for node in set(loading_nodes)
            }
            nowhere = [Path(top) / "nothing" / NAME]
            target, writes = Path(top) / f"target-{index}", Writes()
            outcomes = merge_all(
                target,
                loading_nodes,
                {node: paths or nowhere for node, paths in folders.items()},
                storages=lambda rank, target=target, writes=writes: Recorded(target, writes, rank),
                max_file_bytes=max_file_bytes,
            )
            present = [number for number in numbers if places[number] is not None]
            if present != numbers and any(gaps(case, nodes, present)):
                kind = uc.IncompleteError if present else uc.NotFoundError
                same_error(outcomes, kind, "no such|no node|missing")
                assert os.listdir(target) == []
                continue
            fine(outcomes)
            check_merged(case, target)
            check_once(writes, target, loading_nodes)
            assert digests_of(target / NAME) == digests_of(Path(top) / NAME), (
                "a save by one node has the same digests"
            )


@given(scattered(**FEW), FILES)
@settings(max_examples=10, derandomize=True, suppress_health_check=FUNCTION_FIXTURE)
def test_any_ranks_on_any_nodes(tmp_path: Path, drawn: Drawn, max_file_bytes: int) -> None:
    check_drawn(tmp_path, drawn, max_file_bytes)


@pytest.mark.long
@given(scattered(max_world=8, max_tensors=5), FILES)
@settings(max_examples=400, suppress_health_check=FUNCTION_FIXTURE)
def test_any_ranks_on_any_nodes_at_length(
    tmp_path: Path, drawn: Drawn, max_file_bytes: int
) -> None:
    check_drawn(tmp_path, drawn, max_file_bytes)


# one state: two nodes of two ranks

NODES = [0, 0, 1, 1]
FULL = {
    "w": torch.arange(1700 * 400, dtype=torch.float32).reshape(
        1700, 400
    ),  # three digest blocks, in rows of all four ranks
    "o": torch.arange(90 * 30.0).reshape(90, 30),  # columns
    "b": torch.arange(5.0),
    "none": torch.zeros(0, 4),
}
STATE = NodeState(FULL, {"w": 0, "o": 1})


def attach(folder: str) -> None:
    (Path(folder) / "tokenizer").mkdir()
    for name, text in (("config.json", "{}"), ("tokenizer/merges.txt", "a b")):
        (Path(folder) / name).write_text(text)


def save(top: Path, *, copies: int = 1, step: int = 3, **arguments: object) -> None:
    """Save; one copy spans both nodes, or each node has a copy with `copies=2`."""
    defaults = {
        "parts": {"bare": {}},
        "extra": {"step": step, "bytes": bytes(9000)},
        "rank_extra": lambda rank: f"rank {rank}",
        "metrics": {"loss": 0.5},
        "attach": attach,
    }
    STATE.save(top, NODES, copies=copies, step=step, **{**defaults, **arguments})


def node_folders(top: Path) -> dict[int, Paths]:
    return {node: [folder_of(top, node)] for node in NODES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`twice`: two nodes with a copy each; `once`: one copy over two nodes."""
    top = tmp_path_factory.mktemp("saved")
    save(top / "twice", copies=2)
    save(top / "once")
    return top


def check_target(target: Path, *, rank_extra: bool = True) -> None:
    """Check that it loads like any other, with all metadata."""
    assert uc.verify(target / NAME, deep=True).problems == ()

    def act(comm: Comm) -> None:
        loaded = {name: torch.full_like(full, -1) for name, full in FULL.items()}
        with on_node(comm, [0] * comm.world) as checkpointer:
            report = checkpointer.load(target / NAME, model=loaded)
        for name, full in FULL.items():
            assert torch.equal(loaded[name], full + 3)
        assert report.rank_extra is None, "whole tensors have no mesh, the save had one"
        assert (report.step, report.extra) == (3, {"step": 3, "bytes": bytes(9000)})

    run_ranks(4, act)
    with uc.open(target / NAME) as source:
        assert list(source.rank_extra) == [f"rank {rank}" for rank in range(4 * rank_extra)]
    assert (target / NAME / "config.json").read_text() == "{}"
    assert (target / NAME / "tokenizer" / "merges.txt").read_text() == "a b"
    manifest = manifest_of(target / NAME)
    assert (manifest["metrics"], manifest["world_size"]) == ({"loss": 0.5}, 4)
    sizes = [dim["size"] for dim in manifest["rank_mesh"]["dims"]]
    assert sizes in ([4], [2, 2]), "the ranks of the save, also with two copies"
    assert set(manifest["parts"]) == {"model", "bare"}


def id_of(folder: Path) -> str:
    return str(manifest_of(folder)["save_id"])


@pytest.mark.parametrize(("kind", "max_file_bytes"), [("once", 1 << 20), ("twice", 1 << 30)])
def test_merged_checkpoint_is_the_same_save(
    saved: Path, tmp_path: Path, kind: str, max_file_bytes: int
) -> None:
    """Its names are those of any checkpoint; merging it changes nothing."""
    folders, root = node_folders(saved / kind), tmp_path / "root"
    reports = fine(merge_all(root, NODES, folders, max_file_bytes=max_file_bytes))
    assert {report.save_id for report in reports} == {id_of(folder_of(saved / kind, 0))}
    assert all(report.notes == () for report in reports)
    assert id_of(root / NAME) == reports[0].save_id
    assert sum(report.nbytes for report in reports) > sum(full.nbytes for full in FULL.values())
    check_target(root)
    files = sorted(path.name for path in (root / NAME).glob("model*.safetensors"))
    count = 1 if kind == "twice" else 3
    assert files == [names.file_name("model", number=i + 1, count=count) for i in range(count)]
    again = fine(merge_all(root, NODES, folders, if_exists="error"))
    assert {report.nbytes for report in again} == {0}, "the target exists"
    paths = {0: [tmp_path / "nothing" / NAME], 1: [root / NAME]}
    fine(merge_all(tmp_path / "second", NODES, paths))
    check_target(tmp_path / "second")
    assert digests_of(tmp_path / "second" / NAME) == digests_of(root / NAME)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_replicas_replace_a_lost_node_and_are_not_merged(tmp_path: Path, lost: int | None) -> None:
    save(tmp_path, options=SAVE.model_copy(update={"node_copies": 2}))
    if lost is not None:
        shutil.rmtree(folder_of(tmp_path, lost))
    fine(merge_all(tmp_path / "root", NODES, node_folders(tmp_path)))
    assert not (tmp_path / "root" / NAME / names.REPLICAS).exists()
    check_target(tmp_path / "root")


def test_node_folders_saved_without_model(tmp_path: Path) -> None:
    """Saved on two nodes without the model: loaded, repaired, merged and exported with it."""
    whole = {
        "w": torch.randn(6, 5).bfloat16(),
        "frozen": torch.randn(4, 3).bfloat16(),
        "count": torch.tensor(3),
    }

    def act(comm: Comm) -> None:
        model = {
            name: tensor.chunk(2)[comm.rank] if tensor.dim() else tensor
            for name, tensor in whole.items()
        }
        update = {"node_copies": 2, "parts": ("master_weights",)}
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.save(
                folder_of(tmp_path, comm.rank),
                model=model,
                master_weights={"w": model["w"].float()},
                layout=uc.Layout({"dp": 2}, {"w": {"dp": 0}, "frozen": {"dp": 0}}),
                options=SAVE.model_copy(update=update),
            )

    run_ranks(2, act)
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    with uc.open(folders[0]) as source:
        assert f"model_without_masters{SHARD_SUFFIX}" in source.parts
    shutil.copytree(folders[1], tmp_path / "copy")
    folders[1].joinpath(f"model_without_masters{SHARD_SUFFIX}.safetensors").unlink()
    report = uc.repair(folders[1], [tmp_path / "copy"])
    assert report.ok, report
    for paths in (folders, folders[:1]):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        uc.load(paths, model=loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())
    uc.convert(folders, tmp_path / "joined")
    uc.convert(tmp_path / "joined", tmp_path / "hf", to="huggingface", model_dtype="bfloat16")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("to", ["unified", "huggingface", "dcp"])
def test_convert_merges_folders_of_several_nodes(once: Path, tmp_path: Path, to: str) -> None:
    """In any order, from Python and on the command line; a missing slice is an error."""
    folders = [folder_of(once, 1), folder_of(once, 0)]
    assert uc.convert(folders, tmp_path / NAME, to=to).format == "unified"
    assert main(["convert", *map(str, folders), str(tmp_path / "again"), "--to", to]) == 0
    for target in (tmp_path / NAME, tmp_path / "again"):
        with uc.open(target) as source:
            for name, full in FULL.items():
                expected = full + 3
                assert torch.equal(source["model"][name][...], expected), name
    if to == "unified":
        assert uc.verify(tmp_path / NAME, deep=True).problems == ()
        with uc.open(tmp_path / NAME) as source:
            assert list(source.rank_extra) == [f"rank {rank}" for rank in range(4)]
            assert source.extra == {"step": 3, "bytes": bytes(9000)}
    if to != "dcp":
        assert {"config.json", "tokenizer"} <= set(os.listdir(tmp_path / NAME))
    assert not any(SHARD_SUFFIX in entry for entry in os.listdir(tmp_path / NAME))
    for paths, kind, match in (
        (folders[:1], uc.IncompleteError, r"no node|missing"),
        ([], uc.NotFoundError, "got no path"),
    ):
        with pytest.raises(kind, match=match):
            uc.convert(paths, tmp_path / "half", to=to)
    assert not (tmp_path / "half").exists()


def test_convert_names_folders_of_other_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two checkpoints are not merged: one is read, and the other is reported."""
    for step in (1, 2):
        uc.save(tmp_path / f"c{step}", model={"w": torch.full((3,), step)}, step=step)
    sources = [tmp_path / "c1", tmp_path / "c2"]

    report = uc.convert(sources, tmp_path / "whole")

    (other,) = {1, 2} - {report.step}
    (left_out,) = report.left_out
    assert re.fullmatch(rf".*/c{other} \(save \w+, step {other}\)", left_out)
    assert left_out in caplog.text


def test_local_bytes_are_read_from_the_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pipeline stages, no byte of a tensor is read over the network."""
    stages = [{f"stage.{rank}": torch.arange(600_000.0) + rank} for rank in (0, 1)]

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.save(folder_of(tmp_path, comm.rank), model=stages[comm.rank], options=SAVE)

    run_ranks(2, act)
    remote: list[int] = []
    real = PeerStorage.read_at

    def read_at(self: PeerStorage, name: str, start: int, into: Buffer) -> None:
        remote.append(len(into))
        real(self, name, start, into)

    monkeypatch.setattr(PeerStorage, "read_at", read_at)
    reports = fine(merge_all(tmp_path / "root", [0, 1], node_folders(tmp_path)))
    assert max(remote, default=0) <= 10_000
    assert all(report.nbytes > 2_400_000 for report in reports)
    with uc.open(tmp_path / "root" / NAME) as opened:
        for name, stage in (stages[0] | stages[1]).items():
            assert torch.equal(opened["model"][name][...], stage)


def test_node_without_the_root_only_sends(once: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    reports = fine(
        merge_all(
            tmp_path / "root",
            NODES,
            node_folders(once),
            storages=lambda rank: LocalStorage(
                str(tmp_path / ("root" if rank < 2 else "elsewhere"))
            ),
        )
    )
    assert [report.nbytes > 0 for report in reports] == [True, True, False, False]
    assert os.listdir(tmp_path / "elsewhere") == []
    check_target(tmp_path / "root")


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_another_save_at_the_target(once: Path, tmp_path: Path, if_exists: str) -> None:
    uc.save(tmp_path / "root" / NAME, model={"w": torch.ones(3)}, step=3)
    before = id_of(tmp_path / "root" / NAME)
    outcomes = merge_all(tmp_path / "root", NODES, node_folders(once), if_exists=if_exists)
    if if_exists == "error":
        same_error(outcomes, uc.StorageError, "holds a committed checkpoint")
    elif if_exists == "keep":
        assert {report.nbytes for report in fine(outcomes)} == {0}
    else:
        check_target(tmp_path / "root")
    assert os.listdir(tmp_path / "root") == [NAME]
    assert (id_of(tmp_path / "root" / NAME) == before) == (if_exists != "replace")


def test_rank_that_sees_another_folder(once: Path, tmp_path: Path) -> None:
    """All ranks of the leader's node write, so all must see its folder."""
    for name in ("root", "other"):
        (tmp_path / name).mkdir()
    outcomes = merge_all(
        tmp_path / "root",
        NODES,
        node_folders(once),
        storages=lambda rank: LocalStorage(str(tmp_path / ("other" if rank == 1 else "root"))),
    )
    same_error(outcomes, uc.StorageError, "rank 1: .*this rank does not see this folder")
    assert os.listdir(tmp_path / "root") == os.listdir(tmp_path / "other") == []


def test_folders_that_cannot_be_merged(once: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "plain" / "model.safetensors")
    outcomes = merge_all(tmp_path / "root", [0, 1], {node: [tmp_path / "plain"] for node in (0, 1)})
    same_error(outcomes, uc.NotFoundError, "got no checkpoint with a manifest, expected the folde")
    edit_manifest(folder_of(once, 1), lambda manifest: manifest.update(digests=None))
    (folder_of(once, 1) / names.DIGESTS).unlink()
    outcomes = merge_all(tmp_path / "root", NODES, node_folders(once))
    same_error(outcomes, uc.IntegrityError, "a folder has no digests of a known algorithm")
    assert os.listdir(tmp_path / "root") == []


# damage


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("file", ["model.safetensors", names.DIGESTS, names.EXTRA])
def test_intact_copy_of_another_node_is_merged(
    twice: Path, tmp_path: Path, file: str, node: int, damage: str
) -> None:
    DAMAGES[damage](folder_of(twice, node) / file)
    fine(merge_all(tmp_path / "root", NODES, node_folders(twice)))
    check_target(tmp_path / "root")


def test_bypassed_damage_is_reported(twice: Path, tmp_path: Path) -> None:
    for node in (0, 1):  # whichever node writes this file reads the damage
        flip(folder_of(twice, node) / "model.safetensors", 0.3 + node / 2)
    reports = fine(merge_all(tmp_path / "root", NODES, node_folders(twice)))
    assert any("has CRC" in note for report in reports for note in report.notes)
    check_target(tmp_path / "root")


def of_another_save(file: Path) -> None:
    """The node has a folder of a newer save."""
    top = file.parents[2]
    save(top / "newer", step=8)
    shutil.rmtree(file.parent)
    shutil.copytree(folder_of(top / "newer", 1), file.parent)


@pytest.mark.parametrize("damage", [*DAMAGES, "of another save"])
def test_damage_without_another_copy_commits_nothing(
    once: Path, tmp_path: Path, damage: str
) -> None:
    file = next(folder_of(once, 1).glob(f"model{SHARD_SUFFIX}*.safetensors"))
    {**DAMAGES, "of another save": of_another_save}[damage](file)
    kind = uc.IntegrityError if damage == "flipped" else uc.IncompleteError
    match = "no node has these bytes|no node has|missing|is incomplete on the nodes present"
    same_error(merge_all(tmp_path / "root", NODES, node_folders(once)), kind, match)
    assert os.listdir(tmp_path / "root") == []


@pytest.mark.parametrize("damage", ["flipped", "missing", "folder"])
def test_rank_extra_that_is_lost_is_left_out(
    once: Path, twice: Path, tmp_path: Path, damage: str
) -> None:
    """Dropped for all ranks rather than some: a failing merge would never complete the root.

    One rank reports what was left out and why.
    """
    if damage == "folder":
        shutil.rmtree(folder_of(twice, 1))
        top, reason = twice, r"no node here has the folder of rank\(s\) 2-3"
        report = uc.convert([folder_of(twice, 0)], tmp_path / "one" / NAME)
        assert "rank_extra of all 4 ranks was left out" in "".join(report.notes)
        assert names.RANK_EXTRA not in os.listdir(tmp_path / "one" / NAME)
    else:
        DAMAGES[damage](folder_of(once, 1) / names.RANK_EXTRA)
        top, reason = once, names.RANK_EXTRA
    reports = fine(merge_all(tmp_path / "root", NODES, node_folders(top)))
    (note,) = [note for report in reports for note in report.notes if "was left out" in note]
    assert re.search(f"rank_extra of all 4 ranks was left out: .*{reason}", note)
    check_target(tmp_path / "root", rank_extra=False)
    assert names.RANK_EXTRA not in os.listdir(tmp_path / "root" / NAME)
    with uc.open(tmp_path / "root" / NAME) as opened:
        assert list(opened.rank_extra) == []


# merges that fail or stop


def intact_checkpoints(root: Path) -> list[str]:
    """Names under the root that count as checkpoints; check that each is intact."""
    committed = sorted(path.name for path in root.iterdir() if path.name.startswith("checkpoint-"))
    for name in committed:
        assert uc.verify(root / name, deep=True).problems == ()
    return committed


def stopped_merge(
    once: Path,
    root: Path,
    fuse: FaultPoint,
    *,
    node: int | None = None,
    seconds: float = 1.0,
    **options: object,
) -> list[CopyReport | BaseException]:
    """A merge of which one node, or all, stop where the fuse is triggered."""

    def storage(rank: int) -> LocalStorage:
        stops = node in (None, NODES[rank])
        return FaultyStorage(str(root), fuse) if stops else LocalStorage(str(root))

    return merge_all(
        root,
        NODES,
        node_folders(once),
        storages=storage,
        timeout_seconds=seconds,
        max_file_bytes=1 << 20,
        **options,
    )


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("exists", [pytest.param(False, marks=pytest.mark.slow), True])
def test_crash_at_every_operation_commits_nothing_bad(
    once: Path, tmp_path: Path, exists: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)

    def crash(operation: int | None, seconds: float = 1.0) -> FaultPoint:
        """Stop at an operation; a merge after that succeeds."""
        root, fuse = tmp_path / f"root-{operation}", FaultPoint(operation)
        root.mkdir()
        if exists:
            uc.save(root / NAME, model={"w": torch.ones(3)}, step=3)
        for outcome in stopped_merge(once, root, fuse, seconds=seconds, if_exists="replace"):
            assert isinstance(outcome, CopyReport | SimulatedCrash | uc.CheckpointError), outcome
        assert intact_checkpoints(root) == [NAME] or not exists
        fine(merge_all(root, NODES, node_folders(once), if_exists="replace"))
        check_target(root)
        shutil.rmtree(root)
        return fuse

    number = len(crash(None, SECONDS).operations)
    assert number > 30
    for operation in {*range(0, number, every), *range(number - 5, number)}:
        assert crash(operation).triggered


@pytest.mark.parametrize("node", [0, 1])
def test_stopped_node_fails_the_others_in_time(
    once: Path, tmp_path: Path, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)
    for operation in (0, 1, 3):
        root, fuse = tmp_path / f"root-{operation}", FaultPoint(operation)
        outcomes = stopped_merge(once, root, fuse, node=node)
        assert fuse.triggered
        for rank, outcome in enumerate(outcomes):
            stopped = isinstance(outcome, SimulatedCrash) and NODES[rank] == node
            assert isinstance(outcome, uc.CheckpointError) or stopped, outcome
        assert intact_checkpoints(root) == []
        assert node == 0 or os.listdir(root) == [], "the leader has removed the staging folder"
        fine(merge_all(root, NODES, node_folders(once)))
        check_target(root)


@pytest.mark.parametrize("node", [0, 1])
def test_full_disk_leaves_nothing(once: Path, tmp_path: Path, node: int) -> None:
    """The disk is full for the ranks of one node after some number of writes."""
    root = tmp_path / "root"
    for number in count():
        outcomes = merge_all(
            root,
            NODES,
            node_folders(once),
            storages=lambda rank, number=number: FullStorage(
                str(root), number if NODES[rank] == node else 1 << 40
            ),
            max_file_bytes=1 << 20,
        )
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):
            break
        same_error(outcomes, uc.StorageError, "No space left on device")
        assert os.listdir(root) == [], number
    assert number >= 2
    check_target(root)


class Short(LocalStorage):
    """A file is shorter on the leader than what the ranks wrote."""

    def size(self, name: str) -> int | None:
        nbytes = super().size(name)
        return nbytes - 1 if nbytes and "model" in name and ".unified-" in name else nbytes


class Little(LocalStorage):
    """There is less space than the merge needs."""

    def free_nbytes(self) -> int:
        return 1000


def cancelled(_: int) -> None:
    raise uc.StorageError("cancelled")


@pytest.mark.parametrize(
    ("storage", "on_progress", "match"),
    [
        (Short, lambda _: None, "this rank sees"),
        (Little, lambda _: pytest.fail("written"), "of free space: got 0.977 KiB, expected "),
        (LocalStorage, cancelled, "cancelled"),
        # The state is not lost: the merge is retried.
        (LocalStorage, lambda _: None, "rank_extra cannot be read"),
    ],
)
def test_error_ends_the_merge_on_all_ranks(
    once: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: Callable[[str], LocalStorage],
    on_progress: Callable[[int], object],
    match: str,
) -> None:
    def unreadable(joint: ClusterSource, rank: int) -> object:
        raise uc.StorageError("rank_extra cannot be read")

    root = tmp_path / "root"
    monkeypatch.setattr(ClusterSource, "rank_extra", unreadable)
    options: dict[str, Any] = {"storages": lambda _: storage(str(root)), "on_progress": on_progress}
    same_error(merge_all(root, NODES, node_folders(once), **options), uc.StorageError, match)
    assert os.listdir(root) == []


_CONVERT = """
*sources, small, target = sys.argv[1:]
uc.convert(small, target + "-small")
before = peak()
uc.convert(sources, target)
print(peak() - before)
"""


@pytest.mark.slow
def test_convert_of_node_folders_has_bounded_memory(tmp_path: Path) -> None:
    """96 MiB on two nodes, each tensor half on one and half on the other."""
    shapes = {f"layer.{number}.w": (2048, 2048) for number in range(6)}
    rules = {name: {"tp": number % 2} for number, name in enumerate(shapes)}
    layout = uc.Layout(mesh={"tp": 2}, rules=rules, shapes=shapes)

    def act(comm: Comm) -> None:
        model = {
            name: torch.full((1024, 2048) if rules[name]["tp"] == 0 else (2048, 1024), 1.0)
            for name in shapes
        }
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.save(folder_of(tmp_path, comm.rank), model=model, layout=layout)

    run_ranks(2, act)
    uc.save(tmp_path / "small", model={"w": torch.ones(4)})
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    assert peak_of(_CONVERT, *folders, tmp_path / "small", tmp_path / "whole") < 32 << 20
    with uc.open(tmp_path / "whole") as opened:
        assert opened["model"]["layer.5.w"].shape == (2048, 2048)
    assert uc.verify(tmp_path / "whole", deep=True).ok

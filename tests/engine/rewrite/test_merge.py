"""Folders of several nodes merged into one: bit for bit what one node would have written."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.node_cases import scattered
from tests.support.refusals import same_error
from tests.support.reshard_cases import Case, Recorded, Writes, check_folder, spans_of
from tests.support.reshard_cases import save_case as save_whole
from tests.support.simulated_nodes import (
    NAME,
    SAVE,
    SECONDS,
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
from unified_ckpt.cli.main import main
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.nodes.source import ClusterSource
from unified_ckpt.engine.rewrite.merge import MergeOptions, MergeReport, merge_paths
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.file_server import PeerStorage
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)

__all__ = ["once", "states", "twice"]  # fixtures

OPTIONS = MergeOptions(
    max_file_bytes=1 << 30, if_exists="keep", fsync=True, timeout_seconds=SECONDS
)
Storages = Callable[[int], LocalStorage]  # by rank


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def numbered(nodes: Sequence[int]) -> list[int]:
    """Node numbers from 0, in the order of their first ranks."""
    order = list(dict.fromkeys(nodes))
    return [order.index(node) for node in nodes]


def merge_all(
    target: Path,
    nodes: Sequence[int],
    paths: Mapping[int, Paths],
    *,
    storages: Storages | None = None,
    beat: Callable[[int], object] = lambda _: None,
    **options: object,
) -> list[MergeReport | BaseException]:
    """Merge with the folders of each rank's node."""
    target.mkdir(exist_ok=True, parents=True)
    merge_options = MergeOptions(
        **{
            **{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__},
            "on_progress": beat,
            **options,
        }
    )

    def act(comm: Comm) -> MergeReport:
        storage = storages(comm.rank) if storages is not None else LocalStorage(str(target))
        local_paths = [str(path) for path in paths[nodes[comm.rank]]]
        return merge_paths(comm, local_paths, storage, NAME, merge_options, nodes=numbered(nodes))

    return try_ranks(len(nodes), act)


# any arrangement


def digests_of(folder: Path) -> dict[tuple[str, str], Sequence[int] | None]:
    opened = open_path(str(folder), lock=False)
    try:
        return dict(
            opened.block_digests(
                {(part, name) for part in opened.parts for name in opened.names(part)}
            )
        )
    finally:
        opened.close()


def check_merged(case: Case, target: Path) -> None:
    """Check every tensor with the safetensors library, and every digest with a full read."""
    check_folder(case, target / NAME)
    report = uc.verify(target / NAME, deep=True)
    assert report.problems == ()
    assert report.nbytes == sum(array.nbytes for array in case.arrays.values())
    manifest = json.loads((target / NAME / names.MANIFEST).read_text())
    assert manifest["node_group"] is None
    assert manifest["world_size"] == case.saved.world
    assert os.listdir(target) == [NAME]
    assert not any(SHARD_SUFFIX in entry or entry == "probe" for entry in os.listdir(target / NAME))


def check_once(writes: Writes, target: Path, nodes: Sequence[int]) -> None:
    """Check that every byte of tensor files was written once, by ranks of one node."""
    for path in (target / NAME).glob("*.safetensors"):
        spans = sorted(writes.spans[path.name])
        assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])], (
            path.name
        )
        assert spans[-1][1] == path.stat().st_size
        if path.name not in (names.DIGESTS, names.EXTRA, names.RANK_EXTRA):
            assert len({nodes[rank] for _, _, rank in spans}) == 1


FILES = st.sampled_from([100_000, 1 << 30])
FUNCTION_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
Drawn = tuple[Case, list[int], list[tuple[list[int], list[int | None]]]]


def check_drawn(root: Path, drawn: Drawn, max_file_bytes: int) -> None:
    case, nodes, loads = drawn
    with TemporaryDirectory(dir=root) as top:
        save_case(case, Path(top), nodes)
        save_whole(case, Path(top))
        numbers = sorted(set(nodes))
        for turn, (_, (own, where)) in enumerate(zip(case.loaded, loads, strict=True)):
            paths: dict[int, Paths] = {}
            for node in set(own):
                held = [
                    folder_of(Path(top), number)
                    for number, at in zip(numbers, where, strict=True)
                    if at == node
                ]
                paths[node] = held or [Path(top) / "nothing" / NAME]
            away = [number for number, at in zip(numbers, where, strict=True) if at is None]
            target, writes = Path(top) / f"target-{turn}", Writes()
            found = merge_all(
                target,
                own,
                paths,
                storages=lambda rank, target=target, writes=writes: Recorded(target, writes, rank),
                max_file_bytes=max_file_bytes,
            )
            missing = (
                [
                    key
                    for keys in gaps(case, nodes, [n for n in numbers if n not in away])
                    for key in keys
                ]
                if away
                else []
            )
            if missing:
                kind = uc.NotFoundError if len(away) == len(numbers) else uc.IncompleteError
                same_error(found, kind, "no such|no node|missing")
                assert os.listdir(target) == []
                continue
            fine(found)
            check_merged(case, target)
            check_once(writes, target, own)
            assert digests_of(target / NAME) == digests_of(Path(top) / NAME), (
                "those of a save by one node"
            )


@given(scattered(max_world=4, max_tensors=3), FILES)
@settings(max_examples=40, derandomize=True, suppress_health_check=FUNCTION_FIXTURE)
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
RULES = {"w": {"dp": 0}, "o": {"dp": 1}}


def save(
    top: Path, *, copies: int = 1, step: int = 3, nodes: Sequence[int] = NODES, **what: object
) -> None:
    """`copies`: each node has a copy of its own, or one copy spans all nodes."""
    world = len(nodes)
    size = world // copies
    shapes = {name: tuple(FULL[name].shape) for name in RULES}

    def act(comm: Comm) -> None:
        mesh = {"rep": copies, "dp": size}
        at = comm.rank % size
        state = {
            name: (full + step).chunk(size, int(name == "o"))[at].clone() if name in RULES else full
            for name, full in FULL.items()
        }
        told = {
            "extra": {"step": step, "bytes": bytes(9000)},
            "rank_extra": f"rank {comm.rank}",
            "metrics": {"loss": 0.5},
            "options": SAVE,
        }
        with on_node(comm, nodes) as made:
            folder = folder_of(top, nodes[comm.rank])
            layout = uc.Layout(mesh=mesh, rules=RULES, shapes=shapes)
            made.save(
                folder,
                model=state,
                layout=layout,
                step=step,
                **{"parts": {"bare": {}}, **told, **what},
            )

    run_ranks(world, act)


def own_folders(top: Path, nodes: Sequence[int] = NODES) -> dict[int, Paths]:
    return {node: [folder_of(top, node)] for node in nodes}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`twice`: two nodes with a copy each; `once`: one copy over two nodes."""
    top = tmp_path_factory.mktemp("saved")

    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "tokenizer").mkdir()
        (Path(folder) / "tokenizer" / "merges.txt").write_text("a b")

    save(top / "twice", copies=2, attach=attach)
    save(top / "once", attach=attach)
    return top


def check_target(target: Path, *, step: int = 3, rank_extra: bool = True) -> None:
    """Check that it loads like any other, with all metadata."""
    assert uc.verify(target / NAME, deep=True).problems == ()

    def act(comm: Comm) -> uc.LoadReport:
        found = {name: torch.full_like(full, -1) for name, full in FULL.items()}
        with on_node(comm, [0] * comm.world) as made:
            report = made.load(target / NAME, model=found)
        assert all(
            torch.equal(found[name], FULL[name] + step if name in RULES else FULL[name])
            for name in FULL
        )
        assert report.rank_extra == (f"rank {comm.rank}" if rank_extra else None)
        return report

    report = run_ranks(4, act)[0]
    assert report.step == step
    assert report.extra == {"step": step, "bytes": bytes(9000)}
    assert (target / NAME / "config.json").read_text() == "{}"
    assert (target / NAME / "tokenizer" / "merges.txt").read_text() == "a b"
    told = json.loads((target / NAME / names.MANIFEST).read_text())
    assert (told["metrics"], told["world_size"]) == ({"loss": 0.5}, 4)
    assert set(told["parts"]) == {"model", "bare"}


def id_of(folder: Path) -> str:
    return str(json.loads((folder / names.MANIFEST).read_text())["save_id"])


@pytest.mark.parametrize("kind", ["once", "twice"])
def test_merged_checkpoint_is_the_same_save(saved: Path, tmp_path: Path, kind: str) -> None:
    found = fine(merge_all(tmp_path / "root", NODES, own_folders(saved / kind)))
    assert {one.save_id for one in found} == {id_of(folder_of(saved / kind, 0))}
    assert all(one.notes == () for one in found)
    assert id_of(tmp_path / "root" / NAME) == found[0].save_id
    assert sum(one.nbytes for one in found) > sum(full.nbytes for full in FULL.values())
    check_target(tmp_path / "root")
    again = fine(merge_all(tmp_path / "root", NODES, own_folders(saved / kind), if_exists="error"))
    assert {one.nbytes for one in again} == {0}, "it is there"


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_replicas_replace_a_lost_node_and_are_not_merged(tmp_path: Path, lost: int | None) -> None:
    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "tokenizer").mkdir()
        (Path(folder) / "tokenizer" / "merges.txt").write_text("a b")

    save(tmp_path, attach=attach, options=SAVE.model_copy(update={"node_copies": 2}))
    if lost is not None:
        shutil.rmtree(folder_of(tmp_path, lost))
    fine(merge_all(tmp_path / "root", NODES, own_folders(tmp_path)))
    assert not (tmp_path / "root" / NAME / names.REPLICAS).exists()
    check_target(tmp_path / "root")


def test_one_process_merges_collected_folders(once: Path, tmp_path: Path) -> None:
    fine(merge_all(tmp_path / "root", [0], {0: [folder_of(once, 1), folder_of(once, 0)]}))
    check_target(tmp_path / "root")


def test_folders_without_the_model_have_all_of_it(tmp_path: Path) -> None:
    """Saved on two nodes without the model: loaded, repaired, merged and exported with it."""
    whole = {
        "w": torch.randn(6, 5).bfloat16(),
        "frozen": torch.randn(4, 3).bfloat16(),
        "count": torch.tensor(3),
    }
    layout, options = (
        uc.Layout({"dp": 2}, {"w": {"dp": 0}, "frozen": {"dp": 0}}),
        SAVE.model_copy(update={"node_copies": 2}),
    )
    half = {"w": slice(3), "frozen": slice(2)}, {"w": slice(3, 6), "frozen": slice(2, 4)}

    def act(comm: Comm) -> None:
        model = {
            name: tensor[half[comm.rank][name]] if name in half[0] else tensor
            for name, tensor in whole.items()
        }
        with on_node(comm, [0, 1]) as made:
            path, masters = folder_of(tmp_path, comm.rank), {"w": model["w"].float()}
            chosen = options.model_copy(update={"parts": ("master_weights",)})
            made.save(path, model=model, master_weights=masters, layout=layout, options=chosen)

    run_ranks(2, act)
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    with uc.open(folders[0]) as source:
        assert f"model_without_masters{SHARD_SUFFIX}" in source.parts
    shutil.copytree(folders[1], tmp_path / "copy")
    folders[1].joinpath(f"model_without_masters{SHARD_SUFFIX}.safetensors").unlink()
    report = uc.repair(folders[1], [tmp_path / "copy"])
    assert report.ok, report
    for paths in (folders, folders[:1]):
        found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        uc.load(paths, model=found)
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    uc.convert(folders, tmp_path / "joined")
    uc.convert(tmp_path / "joined", tmp_path / "hf", to="huggingface", model_dtype="bfloat16")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("to", ["unified", "huggingface", "dcp"])
def test_convert_merges_folders_of_several_nodes(once: Path, tmp_path: Path, to: str) -> None:
    """In any order, from Python and on the command line; a missing slice is an error."""
    folders = [folder_of(once, 1), folder_of(once, 0)]
    assert uc.convert(folders, tmp_path / "new", to=to).format == "unified"
    assert main(["convert", *map(str, folders), str(tmp_path / "again"), "--to", to]) == 0
    for made in (tmp_path / "new", tmp_path / "again"):
        with uc.open(made) as source:
            for name, full in FULL.items():
                assert torch.equal(
                    source["model"][name][...], full + 3 if name in RULES else full
                ), name
    if to == "unified":
        assert uc.verify(tmp_path / "new", deep=True).problems == ()
        with uc.open(tmp_path / "new") as source:
            assert [source.source.rank_extra(rank) for rank in range(4)] == [
                f"rank {rank}" for rank in range(4)
            ]
            assert source.source.metadata().extra == {"step": 3, "bytes": bytes(9000)}
    if to != "dcp":
        assert {"config.json", "tokenizer"} <= set(os.listdir(tmp_path / "new"))
        assert not any(SHARD_SUFFIX in entry for entry in os.listdir(tmp_path / "new"))
    with pytest.raises(uc.IncompleteError, match=r"no node|missing"):
        uc.convert(folders[:1], tmp_path / "half", to=to)
    with pytest.raises(uc.NotFoundError, match="got no path"):
        uc.convert([], tmp_path / "half", to=to)
    assert not (tmp_path / "half").exists()


def test_convert_with_missing_node_drops_rank_extra(twice: Path, tmp_path: Path) -> None:
    """Each node has a copy of every tensor, and the state of its own ranks: half of these would
    be given back in silence.
    """
    report = uc.convert([folder_of(twice, 0)], tmp_path / "new")
    assert re.search(r"rank_extra of all 4 ranks was left out", "".join(report.notes))
    with uc.open(tmp_path / "new") as source:
        assert source.source.metadata().rank_extras == 0


def test_local_bytes_are_read_from_the_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipeline stages: no byte of a tensor is read over the network."""

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            name = f"stage.{comm.rank}"
            made.save(
                folder_of(tmp_path, comm.rank),
                model={name: torch.arange(600_000.0) + comm.rank},
                options=SAVE,
            )

    run_ranks(2, act)
    asked: list[tuple[str, int]] = []
    real = PeerStorage.read_at

    def read_at(self: PeerStorage, name: str, start: int, into: Buffer) -> None:
        asked.append((name, len(into)))
        real(self, name, start, into)

    monkeypatch.setattr(PeerStorage, "read_at", read_at)
    found = fine(merge_all(tmp_path / "root", [0, 1], own_folders(tmp_path, [0, 1])))
    assert sum(nbytes for name, nbytes in asked if nbytes > 10_000) == 0
    assert all(one.nbytes > 2_400_000 for one in found)
    with uc.open(tmp_path / "root" / NAME) as opened:
        assert torch.equal(opened["model"]["stage.1"][:], torch.arange(600_000.0) + 1)


def test_ranks_of_one_node_share_one_file(twice: Path, tmp_path: Path) -> None:
    writes = Writes()
    fine(
        merge_all(
            tmp_path / "root",
            NODES,
            own_folders(twice),
            storages=lambda rank: Recorded(tmp_path / "root", writes, rank),
        )
    )
    check_once(writes, tmp_path / "root", NODES)
    assert {rank for _, _, rank in writes.spans["model.safetensors"]} == {0, 1}


def test_node_that_does_not_see_the_root_only_sends(once: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    found = fine(
        merge_all(
            tmp_path / "root",
            NODES,
            own_folders(once),
            storages=lambda rank: LocalStorage(
                str(tmp_path / ("root" if rank < 2 else "elsewhere"))
            ),
        )
    )
    assert [one.nbytes > 0 for one in found] == [True, True, False, False]
    assert os.listdir(tmp_path / "elsewhere") == []
    check_target(tmp_path / "root")


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_another_save_at_the_target(once: Path, tmp_path: Path, if_exists: str) -> None:
    uc.save(tmp_path / "root" / NAME, model={"w": torch.ones(3)}, step=3)
    before = id_of(tmp_path / "root" / NAME)
    found = merge_all(tmp_path / "root", NODES, own_folders(once), if_exists=if_exists)
    if if_exists == "error":
        same_error(found, uc.StorageError, "holds a committed checkpoint")
    else:
        assert {one.nbytes == 0 for one in fine(found)} == {
            if_exists == "keep"
        } or if_exists == "replace"
    assert os.listdir(tmp_path / "root") == [NAME]
    assert (id_of(tmp_path / "root" / NAME) == before) == (if_exists != "replace")


# damage


def flip(file: Path, *, at: float = 0.9) -> None:
    body = bytearray(file.read_bytes())
    body[int(len(body) * at)] ^= 4
    file.write_bytes(body)


HOW: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "short": lambda file: file.write_bytes(file.read_bytes()[:-9]) and None,
    "missing": Path.unlink,
    "header": lambda file: flip(file, at=20 / file.stat().st_size),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("file", ["model.safetensors", names.DIGESTS, names.EXTRA])
def test_intact_copy_of_another_node_is_merged(
    twice: Path, tmp_path: Path, file: str, node: int, how: str
) -> None:
    HOW[how](folder_of(twice, node) / file)
    fine(merge_all(tmp_path / "root", NODES, own_folders(twice)))
    check_target(tmp_path / "root")


def test_bypassed_damage_is_reported(twice: Path, tmp_path: Path) -> None:
    for node in (0, 1):  # each writes some files: whoever writes this one meets it
        flip(folder_of(twice, node) / "model.safetensors", at=0.3 + node / 2)
    found = fine(merge_all(tmp_path / "root", NODES, own_folders(twice)))
    assert any("has CRC" in note for one in found for note in one.notes)
    check_target(tmp_path / "root")


@pytest.mark.parametrize("how", HOW)
def test_damage_without_another_copy_commits_nothing(once: Path, tmp_path: Path, how: str) -> None:
    file = next(folder_of(once, 1).glob(f"model{SHARD_SUFFIX}*.safetensors"))
    HOW[how](file)
    kind = uc.IntegrityError if how == "flipped" else uc.IncompleteError
    same_error(
        merge_all(tmp_path / "root", NODES, own_folders(once)),
        kind,
        "no node has these bytes|no node has|missing",
    )
    assert os.listdir(tmp_path / "root") == []


def check_without_rank_extra(
    found: Sequence[MergeReport | BaseException], target: Path, why: str
) -> None:
    """Check that all else is merged, and that one rank reports what was left out and why."""
    (note,) = [
        note
        for one in fine(found)
        for note in one.notes
        if "rank_extra of all 4 ranks was left out: " in note
    ]
    assert re.search(why, note)
    check_target(target, rank_extra=False)
    assert names.RANK_EXTRA not in os.listdir(target / NAME)
    with uc.open(target / NAME) as opened:
        assert list(opened.rank_extra) == []


def test_missing_rank_extra_is_reported(twice: Path, tmp_path: Path) -> None:
    """Dropped for all ranks rather than some: a failing merge would never complete the root."""
    shutil.rmtree(folder_of(twice, 1))
    found = merge_all(tmp_path / "root", NODES, own_folders(twice))
    check_without_rank_extra(
        found, tmp_path / "root", r"no node here has the folder of rank\(s\) 2-3"
    )


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_rank_extra_that_is_damaged_or_lost(once: Path, tmp_path: Path, how: str) -> None:
    HOW[how](folder_of(once, 1) / names.RANK_EXTRA)
    found = merge_all(tmp_path / "root", NODES, own_folders(once))
    check_without_rank_extra(found, tmp_path / "root", names.RANK_EXTRA)


def test_a_rank_extra_that_cannot_be_read_now_is_an_error(
    once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is not lost: the merge is retried."""

    def broken(joint: ClusterSource, rank: int) -> object:
        raise uc.StorageError("the disk does not answer")

    monkeypatch.setattr(ClusterSource, "rank_extra", broken)
    same_error(
        merge_all(tmp_path / "root", NODES, own_folders(once)),
        uc.StorageError,
        "the disk does not answer",
    )
    assert os.listdir(tmp_path / "root") == []


def test_part_deleted_on_every_node_stays_deleted(tmp_path: Path) -> None:
    save(tmp_path, copies=2, parts={"ema": {"b": torch.ones(7)}})
    for node in (0, 1):
        for file in folder_of(tmp_path, node).glob("ema*"):
            file.unlink()
    fine(merge_all(tmp_path / "root", NODES, own_folders(tmp_path)))
    assert uc.verify(tmp_path / "root" / NAME, deep=True).problems == ()
    assert set(json.loads((tmp_path / "root" / NAME / names.MANIFEST).read_text())["parts"]) == {
        "model"
    }


def test_a_folder_of_another_save_is_not_mixed_in(once: Path, tmp_path: Path) -> None:
    save(tmp_path / "newer", step=8)
    shutil.rmtree(folder_of(once, 1))
    shutil.copytree(folder_of(tmp_path / "newer", 1), folder_of(once, 1))
    same_error(
        merge_all(tmp_path / "root", NODES, own_folders(once)),
        uc.IncompleteError,
        "is incomplete on the nodes present",
    )
    assert os.listdir(tmp_path / "root") == []


# crashes


def good(root: Path) -> list[str]:
    """Names under the root that count as checkpoints; check that each is intact."""
    found = sorted(path.name for path in root.iterdir() if path.name.startswith("checkpoint-"))
    for name in found:
        assert uc.verify(root / name, deep=True).problems == ()
    return found


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("exists", [False, True])
def test_crash_at_every_operation_commits_nothing_bad(
    once: Path, tmp_path: Path, exists: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)

    def prepared(root: Path) -> Path:
        root.mkdir()
        if exists:
            uc.save(root / NAME, model={"w": torch.ones(3)}, step=3)
        return root

    how = {"if_exists": "replace", "max_file_bytes": 1 << 20}
    root, fuse = prepared(tmp_path / "root"), FaultPoint()
    fine(
        merge_all(
            root,
            NODES,
            own_folders(once),
            storages=lambda _: FaultyStorage(str(root), fuse),
            **how,
        )
    )
    count = len(fuse.operations)
    assert count > 30
    for at in (at for at in range(count) if at % every == 0 or at >= count - 5):
        root = prepared(tmp_path / f"root-{at}")
        fuse = FaultPoint(at)
        found = merge_all(
            root,
            NODES,
            own_folders(once),
            storages=lambda _, root=root, fuse=fuse: FaultyStorage(str(root), fuse),
            timeout_seconds=1.0,
            **how,
        )
        assert fuse.triggered
        assert all(
            isinstance(one, MergeReport | SimulatedCrash | uc.CheckpointError) for one in found
        ), found
        assert good(root) == [NAME] or not exists
        fine(merge_all(root, NODES, own_folders(once), **how))
        check_target(root)
        shutil.rmtree(root)


@pytest.mark.parametrize("node", [0, 1])
def test_stopped_node_fails_the_others_in_time(
    once: Path, tmp_path: Path, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)
    for at in (0, 1, 3):
        root, fuse = tmp_path / f"root-{at}", FaultPoint(at)
        found = merge_all(
            root,
            NODES,
            own_folders(once),
            storages=lambda rank, root=root, fuse=fuse: (
                FaultyStorage(str(root), fuse) if NODES[rank] == node else LocalStorage(str(root))
            ),
            timeout_seconds=1.0,
            max_file_bytes=1 << 20,
        )
        assert fuse.triggered
        assert all(
            isinstance(
                one,
                uc.CheckpointError if NODES[rank] != node else SimulatedCrash | uc.CheckpointError,
            )
            for rank, one in enumerate(found)
        )
        assert good(root) == []
        assert node == 0 or os.listdir(root) == [], "the lead has cleared it away"
        fine(merge_all(root, NODES, own_folders(once)))
        check_target(root)


def test_ordinary_checkpoint_on_one_node(once: Path, tmp_path: Path) -> None:
    """What a merge has made, merged again: nothing is lost in either."""
    fine(merge_all(tmp_path / "first", NODES, own_folders(once)))
    paths = {0: [tmp_path / "nothing" / NAME], 1: [tmp_path / "first" / NAME]}
    fine(merge_all(tmp_path / "root", NODES, paths))
    check_target(tmp_path / "root")
    assert digests_of(tmp_path / "root" / NAME) == digests_of(tmp_path / "first" / NAME)


@pytest.mark.parametrize("node", [0, 1])
def test_a_full_disk_leaves_nothing(once: Path, tmp_path: Path, node: int) -> None:
    """As one node's ranks see it, each counting its own writes."""
    number = 0
    while True:
        found = merge_all(
            tmp_path / "root",
            NODES,
            own_folders(once),
            storages=lambda rank, number=number: (
                FullStorage(str(tmp_path / "root"), number)
                if NODES[rank] == node
                else LocalStorage(str(tmp_path / "root"))
            ),
            max_file_bytes=1 << 20,
        )
        if not any(isinstance(one, BaseException) for one in found):
            break
        same_error(found, uc.StorageError, "No space left on device")
        assert os.listdir(tmp_path / "root") == [], number
        number += 1
    assert number >= 2
    check_target(tmp_path / "root")


def test_lack_of_space_is_detected_before_writing(
    once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: 1000)
    found = merge_all(
        tmp_path / "root", NODES, own_folders(once), beat=lambda _: pytest.fail("written")
    )
    same_error(found, uc.StorageError, "got 1000 bytes of free space, expected ")
    assert os.listdir(tmp_path / "root") == []


def test_error_in_on_progress_ends_the_merge_on_all_ranks(once: Path, tmp_path: Path) -> None:
    calls, lock = [0], threading.Lock()

    def beat(_: int) -> None:
        with lock:
            calls[0] += 1
            if calls[0] == 2:
                raise uc.StorageError("given up")

    same_error(
        merge_all(tmp_path / "root", NODES, own_folders(once), beat=beat),
        uc.StorageError,
        "given up",
    )
    assert os.listdir(tmp_path / "root") == []


def test_file_that_the_leader_sees_shorter_is_not_committed(once: Path, tmp_path: Path) -> None:
    class Short(LocalStorage):
        def size(self, name: str) -> int | None:
            found = super().size(name)
            return (
                found - 1
                if found is not None and "model" in name and ".unified-" in name
                else found
            )

    found = merge_all(
        tmp_path / "root",
        NODES,
        own_folders(once),
        storages=lambda _: Short(str(tmp_path / "root")),
    )
    same_error(found, uc.StorageError, "this rank sees")
    assert os.listdir(tmp_path / "root") == []


def test_names_and_layout_equal_any_checkpoint(once: Path, tmp_path: Path) -> None:
    fine(merge_all(tmp_path / "root", NODES, own_folders(once), max_file_bytes=1 << 20))
    files = sorted(path.name for path in (tmp_path / "root" / NAME).glob("model*.safetensors"))
    assert files == [
        names.file_name("model", number=i + 1, count=len(files)) for i in range(len(files))
    ]
    assert len(files) > 1
    assert {name for file in files for name in spans_of(tmp_path / "root" / NAME / file)} == set(
        FULL
    )

"""Copies on other nodes: as many nodes may be lost as there are further copies, and
everything comes back, bit by bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.node_cases import (
    FEW,
    FUNCTION_FIXTURE,
    LAYOUTS,
    arranged,
    case_of,
    places,
    scattered,
)
from tests.support.node_commits import FULL, REPLACE, faulty, full_at, left, loads, save
from tests.support.refusals import same_error
from tests.support.reshard_cases import Case, global_array
from tests.support.simulated_nodes import (
    LOAD,
    NAME,
    SAVE,
    Paths,
    fine,
    folder_of,
    keys_in_store,
    load_case,
    on_node,
    states,
)
from unified_ckpt.cli.main import main
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.engine.save.node_replicas import check_peer_manifest
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import (
    DrawnLayout,
    FaultPoint,
    HeldTensor,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)

__all__ = ["states"]  # a fixture


def twice(copies: int = 2, **options: object) -> uc.SaveOptions:
    return SAVE.model_copy(update={"node_copies": copies, **options})


def save_each(case: Case, root: Path, nodes: Sequence[int], options: uc.SaveOptions) -> None:
    """Each rank leaves a word of its own, too."""

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as made:
            path = folder_of(root, nodes[comm.rank])
            made.save(
                path,
                model=case.state(comm.rank),
                extra={"big": torch.ones(9)},
                rank_extra=f"of {comm.rank}",
                options=options,
            )

    run_ranks(len(nodes), act)


def lost(root: Path, nodes: Sequence[int], away: Sequence[int]) -> dict[int, Paths]:
    """Where each node looks: those that are away have an empty one in their place."""
    return {
        one: [root / "nothing" / NAME if one in away else folder_of(root, one)]
        for one in set(nodes)
    }


def loads_without(
    case: Case, root: Path, nodes: Sequence[int], away: Sequence[int]
) -> list[uc.LoadReport]:
    """Every rank gets every byte, and its own word back."""
    reports = fine(load_case(case, case.saved, nodes, lost(root, nodes, away)))
    assert [report.rank_extra for report in reports] == [f"of {rank}" for rank in range(len(nodes))]
    assert all(torch.equal(report.extra["big"], torch.ones(9)) for report in reports)
    return reports


def check_losses(layout: str, root: Path, copies: int, size: tuple[int, int]) -> None:
    case, nodes = case_of(layout, *size), places(*size)
    save_each(case, root, nodes, twice(copies))
    for away in combinations(range(size[0]), copies - 1):
        loads_without(case, root, nodes, away)
    for node in range(size[0]):
        assert uc.verify(folder_of(root, node), deep=True).ok
    wanted, there = (
        arranged(layout, 1, 2),
        list(range(copies - 1, size[0])),
    )  # and on one node that has what is left of all
    fine(load_case(case, wanted, [0, 0], {0: [folder_of(root, one) for one in there]}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_node_may_be_lost(tmp_path: Path, layout: str) -> None:
    check_losses(layout, tmp_path, 2, (2, 2))


@pytest.mark.parametrize(
    "layout", ["rows over nodes", pytest.param("stages", marks=pytest.mark.long)]
)
def test_any_two_nodes_may_be_lost(tmp_path: Path, layout: str) -> None:
    check_losses(layout, tmp_path, 3, (4, 1))


@pytest.mark.long
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("size", [(3, 1), (3, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts(tmp_path: Path, layout: str, size: tuple[int, int], copies: int) -> None:
    check_losses(layout, tmp_path, copies, size)


def test_one_loss_too_many_is_reported(tmp_path: Path) -> None:
    """The nodes that are gone are named, not those of which copies are left."""
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    found = load_case(case, case.saved, nodes, lost(tmp_path, nodes, [0, 1]))
    text = str(same_error(found, uc.IncompleteError, "model:big: no node has"))
    assert "folder(s) 0-1 of 3 are on no node present; rank(s) 0-1 of the save wrote them" in text
    shutil.rmtree(folder_of(tmp_path, 1) / names.REPLICAS)
    same_error(
        load_case(case, case.saved, nodes, lost(tmp_path, nodes, [0])),
        uc.IncompleteError,
        "folder.s. 0 of 3",
    )


# which bytes


def copied(root: Path, node: int) -> dict[str, int]:
    """Tensor files among the copies on a node, and their bytes."""
    place = folder_of(root, node) / names.REPLICAS
    return {
        str(path.relative_to(place)): path.stat().st_size
        for path in sorted(place.rglob("*.safetensors"))
        if path.name not in (names.DIGESTS, names.EXTRA, names.RANK_EXTRA)
    }


def test_tensors_on_every_node_are_not_copied(tmp_path: Path) -> None:
    case, nodes = case_of("whole on each node", 3, 2), places(3, 2)
    save_each(case, tmp_path, nodes, twice())
    assert [copied(tmp_path, node) for node in range(3)] == [{}, {}, {}]
    loads_without(case, tmp_path, nodes, [1])  # rank_extra is copied, though


@pytest.mark.parametrize("copies", [2, 3])
def test_shards_are_copied_as_requested(tmp_path: Path, copies: int) -> None:
    """The files of shards, to the byte, and no other."""
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice(copies))
    for node in range(3):
        wanted = {}
        for source in ((node - step) % 3 for step in range(1, copies)):
            there = folder_of(tmp_path, source)
            files = there.glob("*_shards*.safetensors")
            wanted |= {f"{source}/{file.name}": file.stat().st_size for file in files}
            for file in wanted:
                if file.startswith(f"{source}/"):
                    copy = folder_of(tmp_path, node) / names.REPLICAS / file
                    assert copy.read_bytes() == (there / copy.name).read_bytes()
        assert len(wanted) >= 2 * (copies - 1)
        assert copied(tmp_path, node) == wanted


def test_tensor_on_some_nodes(tmp_path: Path) -> None:
    """Of nodes 0 and 2, one gives it to one more; what all have stays where it is."""
    specs = {"some": (0, 2), "all": (0, 1, 2, 3), "one": (3,)}
    held = [
        HeldTensor(TensorDecl("model", fqn, TensorSpec("F32", (40, 50)), Sharding()), ranks)
        for fqn, ranks in specs.items()
    ]
    case = Case(
        {one.decl.key: global_array(one.decl.key, one.decl.spec) for one in held},
        DrawnLayout(4, tuple(held)),
    )
    save_each(case, tmp_path, [0, 1, 2, 3], twice(3))
    given: dict[str, list[int]] = {}
    for node in range(4):
        for place in (folder_of(tmp_path, node) / names.REPLICAS).iterdir():
            index = place / names.index_name("model")
            for fqn in json.loads(index.read_text())["weight_map"] if index.exists() else ():
                given.setdefault(fqn, []).append(node)
    assert len(given["some"]) == 1
    assert set(given["some"]) <= {1, 3}
    assert sorted(given["one"]) == [0, 1]
    for away in combinations(range(4), 2):
        loads_without(case, tmp_path, [0, 1, 2, 3], away)


UNLIKE = [
    [0, 0, 1, 2],
    *(
        pytest.param(one, marks=pytest.mark.long)
        for one in ([0, 0, 0, 1, 2], [0, 1, 2, 0, 1], [2, 1, 1, 0, 2])
    ),
]


@pytest.mark.parametrize("nodes", UNLIKE)
def test_nodes_that_differ(tmp_path: Path, nodes: list[int]) -> None:
    case = case_of("columns over nodes", len(nodes), 1)
    save_each(case, tmp_path, nodes, twice())
    for away in range(3):
        loads_without(case, tmp_path, nodes, [away])


def test_nodes_that_share_a_folder_count_once(tmp_path: Path) -> None:
    """Two racks with a volume each: the copy is on the other one, written by nodes that keep off
    each other's files.
    """
    case, nodes, racks = case_of("rows over nodes", 4, 1), [0, 1, 2, 3], [0, 0, 1, 1]

    def act(comm: Comm, copies: int) -> None:
        with on_node(comm, nodes) as made:
            path = folder_of(tmp_path, racks[comm.rank])
            made.save(
                path,
                model=case.state(comm.rank),
                rank_extra=comm.rank,
                options=twice(copies, write_alignment=0),
            )

    with pytest.raises(
        uc.RankError,
        match="node_copies=3: got 2 nodes with folders of their own, expected 3",
    ):
        run_ranks(4, lambda comm: act(comm, 3))
    run_ranks(4, lambda comm: act(comm, 2))
    for left_over in (0, 1):
        fine(
            load_case(
                case,
                case.saved,
                nodes,
                {one: [folder_of(tmp_path, left_over)] for one in nodes},
            )
        )


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_no_copies_in_a_shared_folder(tmp_path: Path, nodes: list[int]) -> None:
    case = case_of("rows over nodes", 2, 1)

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as made:
            made.save(tmp_path / NAME, model=case.state(comm.rank), options=twice(5))

    run_ranks(2, act)
    assert not (tmp_path / NAME / names.REPLICAS).exists()


def test_different_copy_counts_are_refused(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1, 2]) as made:
            made.save(
                folder_of(tmp_path, comm.rank),
                model={"w": torch.ones(3)},
                options=twice(1 + comm.rank % 2),
            )

    same_error(
        try_ranks(3, act),
        uc.RankError,
        r"rank\(s\) 0, 2: node_copies 1, rank\(s\) 1: node_copies 2; expected the same",
    )


def check_scattered(root: Path, drawn: tuple[Case, list[int], object], copies: int) -> None:
    """Whatever the ranks hold, and wherever they are."""
    case, nodes, _ = drawn
    numbers = sorted(set(nodes))
    if len(numbers) == 1:
        return
    copies = min(copies, len(numbers))
    with TemporaryDirectory(dir=root) as name:
        save_each(case, Path(name), nodes, twice(copies))
        for away in combinations(numbers, copies - 1):
            loads_without(case, Path(name), nodes, away)


@given(scattered(**FEW), st.integers(2, 4))
@settings(max_examples=12, derandomize=True, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
def test_any_ranks_on_any_nodes(
    tmp_path: Path, drawn: tuple[Case, list[int], object], copies: int
) -> None:
    check_scattered(tmp_path, drawn, copies)


@pytest.mark.long
@given(scattered(max_world=6, max_tensors=5), st.integers(2, 4))
@settings(max_examples=200, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
def test_any_ranks_on_any_nodes_many_examples(
    tmp_path: Path, drawn: tuple[Case, list[int], object], copies: int
) -> None:
    check_scattered(tmp_path, drawn, copies)


# damage


def spoil(file: Path, at: int) -> None:
    body = bytearray(file.read_bytes())
    body[at] ^= 1
    file.write_bytes(body)


def test_damaged_original_and_copy(tmp_path: Path) -> None:
    """At different places: each block is read from where it is right. At the same: no byte is
    loaded.
    """
    case, nodes = case_of("rows over nodes", 2, 1), places(2, 1)
    save_each(case, tmp_path, nodes, twice())
    original = folder_of(tmp_path, 1) / "model_shards.safetensors"
    copy = folder_of(tmp_path, 0) / names.REPLICAS / "1" / "model_shards.safetensors"
    spoil(original, -5)
    spoil(copy, len(copy.read_bytes()) // 2)
    reports = loads_without(case, tmp_path, nodes, [])
    assert any("has CRC" in note for report in reports for note in report.notes)
    problems = uc.verify(folder_of(tmp_path, 0), deep=True).problems
    assert len(problems) == 1
    assert problems[0].startswith("replicas/1: model_shards:")
    assert len(uc.verify(folder_of(tmp_path, 1), deep=True).problems) == 1
    spoil(copy, -5)
    for found in load_case(case, case.saved, nodes, lost(tmp_path, nodes, [])):
        assert isinstance(found, uc.IntegrityError)


def test_damaged_manifest_with_intact_copies(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    (folder_of(tmp_path, 2) / names.MANIFEST).write_text("{")
    reports = loads_without(
        case, tmp_path, nodes, [1]
    )  # of which node 2 has a copy, beside that manifest
    assert any("not valid JSON" in note for note in reports[0].notes)


def test_verify_reports_missing_and_strange_copies(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    place = folder_of(tmp_path, 1) / names.REPLICAS
    shutil.rmtree(place / "0")
    (problem,) = uc.verify(folder_of(tmp_path, 1)).problems
    assert problem.startswith("replicas/0: cannot be read:")
    shutil.copytree(folder_of(tmp_path, 2) / names.REPLICAS / "1", place / "0")
    assert (
        "replicas/0: is not node group 0's folder of this save"
        in uc.verify(folder_of(tmp_path, 1)).problems
    )
    reports = loads_without(case, tmp_path, nodes, [])
    assert not any(report.notes for report in reports)


def test_copy_of_another_save_is_ignored(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path / "old", nodes, twice())
    save_each(case, tmp_path / "new", nodes, twice())
    place = folder_of(tmp_path / "new", 1) / names.REPLICAS / "0"
    shutil.rmtree(place)
    shutil.copytree(folder_of(tmp_path / "old", 1) / names.REPLICAS / "0", place)
    same_error(
        load_case(case, case.saved, nodes, lost(tmp_path / "new", nodes, [0])),
        uc.IncompleteError,
        "no node has",
    )


def test_only_the_same_save_and_group_is_copied(tmp_path: Path) -> None:
    save_each(case_of("rows over nodes", 2, 1), tmp_path, places(2, 1), twice())
    folder = open_path(str(folder_of(tmp_path, 1)), lock=False)
    assert folder.manifest is not None
    check_peer_manifest(folder, save_id=folder.manifest.save_id, number=1)
    for save_id, number in ((folder.manifest.save_id, 0), ("other", 1)):
        with pytest.raises(
            uc.IntegrityError, match=f"expected what node group {number} wrote of save {save_id}"
        ):
            check_peer_manifest(folder, save_id=save_id, number=number)
    folder.close()


class Rotten(LocalStorage):
    """A disk that has lost a bit of the shards by the time that the folder is complete."""

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        if name.endswith(names.MANIFEST) and names.REPLICAS not in name:
            for file in Path(self.path(name)).parent.glob("model_shards*.safetensors"):
                spoil(file, -7)
        super().write_at(name, start, buffers)


def test_damaged_block_is_not_copied(tmp_path: Path) -> None:
    """It is the checkpoint's own that is damaged, so there is none."""
    fine(save(tmp_path, 1))
    before = left(tmp_path)
    found = save(
        tmp_path,
        2,
        storages=lambda at, place: (Rotten if at == 1 else LocalStorage)(place),
        options=TWICE,
    )
    same_error(found, uc.IntegrityError, "it is not copied")
    assert left(tmp_path) == before
    assert loads(tmp_path) == 1


# crashes and full disks; two nodes of two ranks

TWICE = REPLACE.model_copy(update={"node_copies": 2})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def survives(root: Path) -> set[int]:
    """The steps that load, from all nodes and from each alone."""
    steps = {loads(root)}
    for node in (0, 1):
        place, kept = folder_of(root, node).parent, root / "kept"
        place.rename(kept)
        steps.add(loads(root))
        shutil.rmtree(place, ignore_errors=True)
        kept.rename(place)
    return steps


EVERY = [20, pytest.param(1, marks=pytest.mark.long)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("fsync", [False, True])
def test_crash_while_copying(tmp_path: Path, every: int, fsync: bool) -> None:
    """The older checkpoint is there on all nodes, and with its copies."""
    start, options = tmp_path / "start", TWICE.model_copy(update={"fsync": fsync})
    fine(save(start, 1, options=options))
    shutil.copytree(start, tmp_path / "through")
    fuse = FaultPoint(None)
    fine(save(tmp_path / "through", 2, storages=faulty([0, 1], fuse), options=options))
    assert survives(tmp_path / "through") == {2}
    steps = [at for at, operation in enumerate(fuse.operations) if names.REPLICAS in operation]
    assert len(steps) > 20
    for at in steps[::every]:
        root, fuse = tmp_path / f"at-{at}", FaultPoint(at)
        shutil.copytree(start, root)
        found = save(root, 2, storages=faulty([1] if at % 2 else [0, 1], fuse), options=options)
        assert all(
            isinstance(one, SimulatedCrash | uc.CheckpointError | uc.SaveReport) for one in found
        ), found
        if not any(isinstance(one, uc.SaveReport) for one in found):
            assert survives(root) <= {1, 2}
        fine(save(root, 3, options=options))
        assert survives(root) == {3}
        shutil.rmtree(root)


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_full_disk_while_copying(tmp_path: Path, node: int, background: bool) -> None:
    """One text for all ranks, nothing left behind, the older checkpoint as it was."""
    fine(save(tmp_path, 1, options=TWICE))
    before, number, failed = left(tmp_path), 0, 0
    while True:
        found = save(
            tmp_path, 2, storages=full_at(number, node), options=TWICE, background=background
        )
        if not any(isinstance(one, BaseException) for one in found):
            break
        error = same_error(found, uc.StorageError, "No space left on device")
        assert left(tmp_path) == before, number
        failed += names.REPLICAS in str(error)
        assert loads(tmp_path) == 1
        number += 1
    assert failed > 5
    assert survives(tmp_path) == {2}


def test_no_space_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine(save(tmp_path, 1))
    before = left(tmp_path)

    class Small(LocalStorage):
        """Room for a folder of its own, and no more."""

        def free_nbytes(self) -> int:
            return super().free_nbytes() if not self.names_copies() else 1000

        def names_copies(self) -> bool:
            return any(
                (Path(self.root) / entry / names.REPLICAS).exists() for entry in self.names()
            )

    found = save(
        tmp_path,
        2,
        storages=lambda at, place: Small(place) if at == 1 else LocalStorage(place),
        options=TWICE,
    )
    same_error(found, uc.StorageError, "got 1000 bytes of free space, expected")
    assert left(tmp_path) == before
    assert loads(tmp_path) == 1


# saves in a row


@pytest.mark.parametrize("background", [False, True])
def test_repeated_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    """Who copies what is asked once; keys do not gather; the copies are of the last save."""
    counts: list[int] = []
    real = save_module.plan_copies

    def counted(*args: object, **kwargs: object) -> object:
        counts.append(1)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(save_module, "plan_copies", counted)

    def act(comm: Comm) -> list[int]:
        keys = []
        with on_node(comm, [0, 0, 1, 1]) as made:
            for turn in range(12):
                place = folder_of(tmp_path, comm.rank // 2)
                state = {"w": (FULL["w"] + turn).chunk(4)[comm.rank].clone(), "b": FULL["b"] + turn}
                what = {
                    "model": state,
                    "layout": LAYOUT_W,
                    "step": turn,
                    "rank_extra": (comm.rank, turn),
                    "options": TWICE,
                }
                if background:
                    made.save_async(place, **what).result(60)
                else:
                    made.save(place, **what)
                if turn in (3, 11):
                    keys.append(keys_in_store(comm))
        return keys

    keys = run_ranks(4, act)[0]
    assert len(counts) == 4, "once for each rank"
    assert keys[1] < keys[0] + 60, f"keys in the store: {keys}"
    shutil.rmtree(folder_of(tmp_path, 0))

    def back(comm: Comm) -> None:
        target = {"w": torch.zeros(500, 90), "b": torch.zeros(5)}
        with on_node(comm, [0, 0, 1, 1]) as made:
            report = made.load(folder_of(tmp_path, comm.rank // 2), model=target, options=LOAD)
        assert (report.step, report.rank_extra) == (11, (comm.rank, 11))
        assert all(torch.equal(target[name], FULL[name] + 11) for name in target)

    run_ranks(4, back)


LAYOUT_W = uc.Layout(mesh={"dp": 4}, rules={"w": {"dp": 0}}, shapes={"w": (500, 90)})


def test_layout_and_copy_count_change(tmp_path: Path) -> None:
    """Orders are those of the state that is saved, also after a save that failed between the plan
    and the orders.
    """

    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, comm.rank)
        with on_node(comm, [0, 1, 2]) as made:
            for step, (keys, copies) in enumerate(
                [("ab", 2), ("b", 2), ("abc", 3), ("abc", 4), ("abc", 3), ("abc", 1), ("abc", 2)]
            ):
                layout = uc.Layout(
                    mesh={"dp": 3},
                    rules={key: {"dp": 0} for key in keys},
                    shapes=dict.fromkeys(keys, (30, 7)),
                )
                state = {key: torch.full((10, 7), float(step + comm.rank)) for key in keys}
                options = twice(copies, if_exists="replace")
                if copies > 3:
                    with pytest.raises(uc.RankError, match="node_copies=4"):
                        made.save(place, model=state, layout=layout, step=step, options=options)
                    continue
                made.save(place, model=state, layout=layout, step=step, options=options)
                kept = sorted(
                    json.loads((place / names.MANIFEST).read_text())["node_group"]["replicas"]
                )
                assert kept == sorted((comm.rank - n) % 3 for n in range(1, copies))
                for number in kept:
                    one = place / names.REPLICAS / str(number)
                    index = json.loads((one / names.index_name("model_shards")).read_text())
                    assert {name[0] for name in index["weight_map"]} == set(keys)
                assert (place / names.REPLICAS).exists() == (copies > 1)

    run_ranks(3, act)


# what goes along


def test_deleted_part_with_its_copies(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    for node in range(3):
        for file in folder_of(tmp_path, node).rglob("optimizer*"):
            file.unlink()
    held = tuple(one for one in case.saved.tensors if one.decl.part == "model")
    fine(load_case(case, DrawnLayout(3, held), nodes, lost(tmp_path, nodes, [])))


def test_command_line_with_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are with the copies; what is in a copy is not shown as the folder's own."""
    save_each(case_of("rows over nodes", 2, 1), tmp_path, places(2, 1), twice(step=1))
    folder = folder_of(tmp_path, 0)
    assert main(["verify", str(folder), "--deep"]) == 0
    assert main(["inspect", str(folder)]) == 0
    assert "of folder(s) 1" in capsys.readouterr().out
    assert main(["list", str(folder.parent), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"][0]["steps"]
    assert told["nbytes"] == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )


class Tied(torch.nn.Module):
    """A slice of one matrix, under two names."""

    def __init__(self, rows: int, value: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((rows, 2), value))
        self.head = self.w


def test_tied_tensors_and_attached_files(tmp_path: Path) -> None:
    """Other names of a tensor are known from the folder of one node, which has the other's in a
    copy.
    """
    layout = uc.Layout(mesh={"dp": 2}, rules={"w": {"dp": 0}})

    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            model = Tied(5, float(comm.rank))
            made.save(
                folder_of(tmp_path, comm.rank),
                model=model,
                layout=layout,
                options=twice(),
                attach=attach,
            )

    run_ranks(2, act)
    for node in (0, 1):
        assert (folder_of(tmp_path, node) / "config.json").exists()
        assert uc.verify(folder_of(tmp_path, node), deep=True).problems == ()
    shutil.rmtree(folder_of(tmp_path, 0))
    target = {"head": torch.zeros(10, 2)}
    run_ranks(1, lambda comm: on_one(comm, folder_of(tmp_path, 1), target))
    assert torch.equal(target["head"], torch.tensor([0.0] * 5 + [1.0] * 5)[:, None].expand(10, 2))


def on_one(comm: Comm, folder: Path, target: dict[str, torch.Tensor]) -> None:
    with on_node(comm, [0]) as made:
        made.load(folder, model=target, options=LOAD)

"""Saved by one world, loaded by another: compared byte by byte with a numpy oracle.

The safetensors library reads the files in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.oracles import local_part, lowest_peak, segment_writers, where
from tests.support.reshard_cases import (
    NAME,
    SECONDS,
    Case,
    Writes,
    bits,
    cases,
    check_folder,
    check_written_once,
    garbage,
    global_array,
    request_of,
    root,
    save_case,
)
from unified_ckpt.core.planning import save_plan
from unified_ckpt.core.planning.slabs import SMALL_NBYTES, choose_grain
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.load.load import LoadReport, LoadRequest, load
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.engine.save.planned_save import SaveCache, SaveCall
from unified_ckpt.engine.save.save import save
from unified_ckpt.format.renames import Renames, Rule
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, LocalTensor
from unified_ckpt.testing import DrawnLayout, HeldTensor, drawn_layouts, run_ranks, try_ranks
from unified_ckpt.views.rename_rules import apply_renames

__all__ = ["root"]  # fixtures

# from numpy to what the engine takes, and back


# one case


def load_into(comm: Comm, folder: Path, state: FlatState, **options: object) -> LoadReport:
    opened, windows = open_folder(LocalStorage(str(folder))), TileBuffers()
    try:
        request = LoadRequest(
            opened, state, opened.metadata(), None, None, set(), True, uc.LoadOptions(**options)
        )
        return load(comm, str(folder), request, windows, timeout_seconds=SECONDS)
    finally:
        windows.close()
        opened.close()


def load_case(case: Case, wanted: DrawnLayout, folder: Path, **options: object) -> list[LoadReport]:
    """Loads, and compares every byte of every rank."""

    def act(comm: Comm) -> LoadReport:
        state = case.target(wanted, comm.rank)
        report = load_into(comm, folder, state, **options)
        for part in state.tensors:
            oracle = local_part(case.arrays[part.decl.key], part.decl.sharding, comm.rank)
            assert bits(part.local) == oracle.tobytes(), (comm.rank, part.decl)
        return report

    return run_ranks(wanted.world, act)


# what must hold of the folder


def check_balance(case: Case, writes: Writes, places: Mapping[Key, tuple[str, int, int]]) -> None:
    """Inside a holder group, the largest load is 1.05 of the lower bound; borders fall on whole
    lines.

    Headers and small tensors are where the plan has put them.
    """
    groups: dict[tuple[int, ...], list[TensorDecl]] = {}
    for one in case.saved.tensors:
        groups.setdefault(one.ranks, []).append(one.decl)
    for ranks, rows in groups.items():
        large = [row for row in rows if row.spec.nbytes >= SMALL_NBYTES]
        loads, movable = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        for file in {places[row.key][0] for row in rows}:
            inside = [places[row.key][1:] for row in large if places[row.key][0] == file]
            for start, stop, rank in writes.spans[file]:
                loads[rank] += stop - start
                movable[rank] += sum(max(min(stop, b) - max(start, a), 0) for a, b in inside)
        fixed = {rank: loads[rank] - movable[rank] for rank in ranks}
        bound = lowest_peak(
            ranks, [demand for row in large for demand in segment_writers(row, ranks)], fixed
        )
        lines = sum(choose_grain(row.spec, row.sharding).slab_nbytes for row in large)
        assert max(loads.values()) <= 1.05 * bound + lines, (loads, bound, lines, rows)


def check_over_read(case: Case, wanted: DrawnLayout, reports: Sequence[LoadReport]) -> None:
    """All thread ranks are on one node: what they read together, over what they want together."""
    union = 0
    for one in wanted.tensors:
        mask = np.zeros(one.decl.spec.shape, dtype=bool)
        for rank in one.ranks:
            for box, _ in one.decl.sharding.boxes(rank, one.decl.spec.shape):
                mask[where(box)] = True
        union += int(mask.sum()) * case.arrays[one.decl.key].itemsize
    assert sum(report.bytes_read for report in reports) <= 1.25 * union


# the property

FILE_NBYTES = st.sampled_from([100_000, 1 << 30])
TILES = st.sampled_from([64 << 10, 64 << 10, 64 << 10, 16 << 20])
VERIFY = st.sampled_from(["read", "read", "off"])


def check_case(
    case: Case, root: Path, *, tile_nbytes: int, max_file_bytes: int, verify: str
) -> None:
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_plan, "TILE_NBYTES", tile_nbytes)
        writes = save_case(case, Path(name), max_file_bytes=max_file_bytes)
        folder = Path(name) / NAME
        places = check_folder(case, folder)
        check_written_once(writes, folder)
        check_balance(case, writes, places)
        for wanted in case.loaded:
            reports = load_case(case, wanted, folder, verify=verify)
            check_over_read(case, wanted, reports)
            if verify != "full":  # which reads blocks again
                assert sum(report.verified_bytes for report in reports) <= sum(
                    report.bytes_read for report in reports
                ) * (verify == "read")


@given(cases(max_world=6, max_tensors=4, loads=3), TILES, FILE_NBYTES, VERIFY)
@settings(max_examples=500)
def test_any_mesh_to_any_mesh(
    root: Path, case: Case, tile_nbytes: int, max_file_bytes: int, verify: str
) -> None:
    check_case(case, root, tile_nbytes=tile_nbytes, max_file_bytes=max_file_bytes, verify=verify)


@pytest.mark.long
@given(cases(max_world=12, max_tensors=6, loads=4), TILES, FILE_NBYTES, VERIFY)
@settings(max_examples=400)
def test_any_mesh_to_any_mesh_at_length(
    root: Path, case: Case, tile_nbytes: int, max_file_bytes: int, verify: str
) -> None:
    check_case(case, root, tile_nbytes=tile_nbytes, max_file_bytes=max_file_bytes, verify=verify)


# read into larger tensors


@st.composite
def grown_cases(draw: st.DrawFn) -> Case:
    """A load into tensors of which some are larger than at the save, along any dims."""
    case = draw(cases(max_world=6, max_tensors=4, loads=1, max_nbytes=200_000))
    more = st.sampled_from([0, 0, 1, 2, 13])
    larger = [
        (one.decl.key, replace(one.decl.spec, shape=tuple(n + draw(more) for n in one.decl.spec.shape)))  # noqa: E501
        for one in case.saved.tensors
    ]  # fmt: skip
    return replace(case, loaded=(draw(drawn_layouts(tensors=larger, max_world=6, complete=False)),))


def corner_of(one: HeldTensor, shape: tuple[int, ...]) -> HeldTensor:
    """What its ranks want of a stored tensor of this shape."""
    row = one.decl
    return HeldTensor(
        replace(
            row,
            spec=replace(row.spec, shape=shape),
            sharding=row.sharding.truncate(row.spec.shape, shape),
        ),
        one.ranks,
    )


@given(grown_cases(), TILES, st.sampled_from(["read", "full", "off"]))
@settings(max_examples=60)
def test_a_pad_rule_fills_the_corner_of_larger_tensors(
    root: Path, case: Case, tile_nbytes: int, verify: str
) -> None:
    """On any mesh; what the checkpoint lacks keeps every bit, no byte of it is read, and what is
    read is verified.
    """
    rules = Renames(rules=(Rule(match=("*",), pad=(0, 1, 2, 3)),))
    (wanted,) = case.loaded
    oracles = {}
    for one in wanted.tensors:
        array = case.arrays[one.decl.key]
        oracles[one.decl.key] = garbage(one.decl.spec, array.dtype).reshape(one.decl.spec.shape)
        oracles[one.decl.key][tuple(map(slice, array.shape))] = array

    def act(comm: Comm) -> LoadReport:
        view, windows, state = (
            apply_renames(open_folder(LocalStorage(str(folder))), rules),
            TileBuffers(),
            case.target(wanted, comm.rank),
        )
        try:
            request = LoadRequest(
                view, state, view.metadata(), None, None, set(), True, uc.LoadOptions(verify=verify)
            )
            report = load(comm, NAME, request, windows, timeout_seconds=SECONDS)
        finally:
            windows.close()
            view.close()
        for part in state.tensors:
            assert (
                bits(part.local)
                == local_part(oracles[part.decl.key], part.decl.sharding, comm.rank).tobytes()
            ), (comm.rank, part.decl)
        return report

    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_plan, "TILE_NBYTES", tile_nbytes)
        save_case(case, Path(name))
        folder = Path(name) / NAME
        reports = run_ranks(wanted.world, act)
    check_over_read(
        case,
        replace(
            wanted,
            tensors=tuple(
                corner_of(one, case.arrays[one.decl.key].shape) for one in wanted.tensors
            ),
        ),
        reports,
    )
    grown = {
        f"{part}:{fqn}"
        for (part, fqn), array in oracles.items()
        if array.shape != case.arrays[part, fqn].shape
    }
    assert all(
        bool(report.notes) == bool(grown) and all(name in report.notes[0] for name in grown)
        for report in reports
    )


# single cases


def arranged(mesh: Sequence[int], **rules: tuple[TensorSpec, tuple[ShardDim, ...]]) -> DrawnLayout:
    """Tensors of the model, on all ranks of a row-major mesh."""
    world = int(np.prod(mesh))
    return DrawnLayout(
        world,
        tuple(
            HeldTensor(TensorDecl("model", fqn, spec, Sharding(cuts)), tuple(range(world)))
            for fqn, (spec, cuts) in rules.items()
        ),
    )


def case_of(saved: DrawnLayout, *loaded: DrawnLayout) -> Case:
    return Case(
        {one.decl.key: global_array(one.decl.key, one.decl.spec) for one in saved.tensors},
        saved,
        loaded,
    )


SPEC = TensorSpec("BF16", (64, 8192))  # 1 MiB


@pytest.mark.parametrize("dtype", sorted(set(TORCH_DTYPES) - {"F4"}))
def test_every_dtype_by_rows_and_columns(root: Path, dtype: str) -> None:
    spec, small = TensorSpec(dtype, (7, 40_000)), TensorSpec(dtype, ())
    by_column = arranged([2, 2], large=(spec, (ShardDim(1, 4, 1),)), small=(small, ()))
    by_row = arranged([3], large=(spec, (ShardDim(0, 3, 1),)), small=(small, ()))
    by_both = arranged(
        [2, 2], large=(spec, (ShardDim(0, 2, 2), ShardDim(1, 2, 1))), small=(small, ())
    )
    check_case(
        case_of(by_column, by_row, by_both),
        root,
        tile_nbytes=64 << 10,
        max_file_bytes=1 << 30,
        verify="full",
    )


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_memory_that_is_not_contiguous(root: Path, dtype: str) -> None:
    cuts = () if dtype == "F4" else (ShardDim(0, 2, 1),)
    sizes = {"large": (40_000, 7), "small": (3, 5), "one": (1,)}
    rules = {
        fqn: (TensorSpec(dtype, shape), cuts if shape[0] > 1 else ())
        for fqn, shape in sizes.items()
    }
    case = replace(
        case_of(arranged([2], **rules), arranged([1], **rules)),
        turned=frozenset(("model", fqn) for fqn in rules),
    )
    check_case(case, root, tile_nbytes=64 << 10, max_file_bytes=1 << 30, verify="full")


def test_one_element_of_another_tensor(root: Path) -> None:
    """torch calls it contiguous, whatever its stride is."""
    row = TensorDecl("model", "one", TensorSpec("F32", (1,)), Sharding())
    states = [
        FlatState(tensors=[LocalTensor(row, torch.arange(6.0)[4::2][:1])], requested={"model"})
        for _ in range(2)
    ]
    with TemporaryDirectory(dir=root) as name:
        assert save_states(Path(name), [states]) == [None, None]
        target = LocalTensor(row, torch.zeros(6)[::2][:1])
        run_ranks(
            1,
            lambda comm: load_into(
                comm, Path(name) / "turn-0", FlatState(tensors=[target], requested={"model"})
            ),
        )
    assert target.local.item() == 4


def test_tiles_take_turns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "TILE_NBYTES", 64 << 10)
    case = case_of(
        arranged([4], w=(SPEC, (ShardDim(1, 4, 1),))), arranged([2], w=(SPEC, (ShardDim(1, 2, 1),)))
    )
    plans = []

    def act(comm: Comm) -> None:
        kept = SaveCache()
        save(
            SaveCall(
                comm,
                LocalStorage(str(root)),
                "tiles",
                request_of(case.state(comm.rank)),
                kept,
                SECONDS,
            )
        )
        plans.append(kept.plan)

    run_ranks(4, act)
    for plan in plans:
        assert plan is not None
        tiles = plan.groups[0].rank_io.io_tiles
        assert len(tiles) >= 4
        assert {tile.members for tile in tiles} == {(0, 1, 2, 3)}
    load_case(case, case.loaded[0], root / "tiles")


LAYOUTS: dict[str, tuple[list[int], tuple[ShardDim, ...]]] = {
    "one": ([1], ()),
    "replicas": ([3], ()),
    "rows": ([4], (ShardDim(0, 4, 1),)),
    "columns": ([4], (ShardDim(1, 4, 1),)),
    "replicas of columns": ([2, 2], (ShardDim(1, 2, 1),)),
    "rows and columns": ([2, 2], (ShardDim(0, 2, 2), ShardDim(1, 2, 1))),
    "rows, strided": ([2, 3], (ShardDim(0, 3, 1), ShardDim(0, 2, 3))),
    "columns twice": ([2, 2], (ShardDim(1, 2, 2), ShardDim(1, 2, 1))),
    "fused rows": ([4], (ShardDim(0, 4, 1, 3),)),
    "fused columns": ([4], (ShardDim(1, 4, 1, (2048, 6144)),)),
}


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_pair_of_layouts(root: Path, saved: str) -> None:
    """Exchanges of several tiles on both sides."""
    uneven = TensorSpec("U8", (301, 8192))
    arrangements = {
        name: arranged(mesh, even=(SPEC, cuts), uneven=(uneven, cuts))
        for name, (mesh, cuts) in LAYOUTS.items()
    }
    case = case_of(arrangements[saved], *arrangements.values())
    check_case(case, root, tile_nbytes=64 << 10, max_file_bytes=1 << 30, verify="read")


def test_ranks_may_load_one_tensor_by_different_rules(root: Path) -> None:
    case = case_of(arranged([2], w=(SPEC, (ShardDim(0, 2, 1),))))
    save_case(case, root)
    rules = [Sharding(), Sharding((ShardDim(0, 3, 1),)), Sharding((ShardDim(1, 3, 1),))]
    wanted = DrawnLayout(
        3,
        tuple(
            HeldTensor(TensorDecl("model", "w", SPEC, rule), (rank,))
            for rank, rule in enumerate(rules)
        ),
    )
    load_case(case, wanted, root / NAME)


def test_each_byte_is_read_and_verified_once_in_a_full_load(root: Path) -> None:
    case = case_of(
        arranged([2, 2], w=(SPEC, (ShardDim(1, 2, 1),))),
        arranged([4], w=(SPEC, ())),
        arranged([2, 2], w=(SPEC, (ShardDim(1, 4, 1),))),
    )
    with TemporaryDirectory(dir=root) as name:
        save_case(case, Path(name))
        for wanted in case.loaded:
            reports = load_case(case, wanted, Path(name) / NAME)
            assert sum(report.bytes_read for report in reports) == SPEC.nbytes
            assert sum(report.verified_bytes for report in reports) == SPEC.nbytes


# replicas


def states_of(case: Case, *spoilt: int) -> list[FlatState]:
    """The ranks' states, one byte changed on some ranks."""
    states = [case.state(rank) for rank in range(case.saved.world)]
    for rank in spoilt:
        states[rank].tensors[-1].local.view(torch.uint8)[0, -1] ^= 1
    return states


def save_states(
    root: Path, states: Sequence[Sequence[FlatState]], **options: object
) -> list[object]:
    """Saves one after the other by the same ranks; what each rank raised, or None."""
    root.mkdir(exist_ok=True)

    def act(comm: Comm) -> None:
        kept = SaveCache()
        for number, turn in enumerate(states):
            request = request_of(turn[comm.rank], **options)
            save(SaveCall(comm, LocalStorage(str(root)), f"turn-{number}", request, kept, SECONDS))

    return list(try_ranks(len(states[0]), act))


TWO = {"a": (SPEC, (ShardDim(1, 2, 1),)), "b": (SPEC, (ShardDim(0, 2, 1),))}


def test_replicas_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    case = case_of(arranged([3, 2], **TWO))
    for found in save_states(tmp_path, [states_of(case, 5)]):
        assert isinstance(found, uc.LayoutError)
        with pytest.raises(
            uc.LayoutError,
            match=r"replicas hold different bytes \(1\):\n  model:b: rank\(s\) 1, 3 differ from "
            r"rank\(s\) 5\n",
        ):
            raise found
    assert list(tmp_path.iterdir()) == []


def test_every_replica_that_differs_is_named(tmp_path: Path) -> None:
    case = case_of(arranged([4], whole=(SPEC, ())))
    states = states_of(case, 1, 3)
    states[3].tensors[0].local.view(torch.uint8)[1, 1] ^= 1
    for found in save_states(tmp_path, [states]):
        assert isinstance(found, uc.LayoutError)
        with pytest.raises(
            uc.LayoutError,
            match=r"model:whole: rank\(s\) 0, 2 differ from rank\(s\) 1 differ from rank\(s\) 3",
        ):
            raise found


def test_drift_after_the_first_save_is_caught_when_asked_for(tmp_path: Path) -> None:
    case = case_of(arranged([2, 2], **TWO))
    turns = [states_of(case), states_of(case, 2)]
    assert save_states(tmp_path / "first", turns) == [None] * 4
    for found in save_states(tmp_path / "always", turns, check_replicas="always"):
        assert isinstance(found, uc.LayoutError)
        with pytest.raises(uc.LayoutError, match=r"model:b: rank\(s\) 0 differ from rank\(s\) 2"):
            raise found
    assert (
        save_states(tmp_path / "never", [states_of(case, 2)], check_replicas="never") == [None] * 4
    )


# the second save of a layout


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rank of each call of the planner."""
    calls: list[int] = []
    plan = save_module.make_plan

    def counted(meeting: Collective, *rest: object, **more: object) -> object:
        calls.append(meeting.rank)
        return plan(meeting, *rest, **more)

    monkeypatch.setattr(save_module, "make_plan", counted)
    return calls


def test_the_second_save_of_a_layout_plans_nothing(
    tmp_path: Path, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks exchange nothing about tensors: 2 tensors need the same keys as 40."""
    met: list[Collective] = []  # of rank 1
    meet = Comm.begin_collective

    def counted(comm: Comm, *what: object, **how: object) -> Collective:
        meeting = meet(comm, *what, **how)
        if comm.rank == 1:
            met.append(meeting)
        return meeting

    monkeypatch.setattr(Comm, "begin_collective", counted)
    for tensors in (2, 40):
        case = case_of(
            arranged([2, 2], **{f"t{n}": (SPEC, (ShardDim(n % 2, 2, 1),)) for n in range(tensors)})
        )
        assert (
            save_states(tmp_path / str(tensors), [states_of(case)] * 3, max_file_bytes=1 << 22)
            == [None] * 4
        )
        assert all(uc.verify(tmp_path / str(tensors) / f"turn-{n}", deep=True).ok for n in range(3))
    assert sorted(planned) == [0, 0, 1, 1, 2, 2, 3, 3]
    last_to_come = {"begin", "outcome", "n/busy"}  # is chance, and says when a step is done
    said = [
        {key.partition("/")[2] for key in meeting.keys if "/done/" not in key} - last_to_come
        for meeting in met
    ]
    assert said[1] == said[2] == said[4] == said[5] < said[0] | {"n/cached"}


def test_a_layout_that_changes_on_one_rank_is_planned_anew_on_all(
    tmp_path: Path, planned: list[int]
) -> None:
    case = case_of(arranged([2, 2], **TWO))
    turned = states_of(case)
    part = turned[3].tensors[0]
    turned[3].tensors[0] = LocalTensor(part.decl, part.local.t().contiguous().t())
    assert save_states(tmp_path, [states_of(case), turned, turned]) == [None] * 4
    assert sorted(planned) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_save_that_fails_does_not_spoil_the_plan(tmp_path: Path, planned: list[int]) -> None:
    case = case_of(arranged([2], **TWO))

    def act(comm: Comm) -> None:
        kept, storage = SaveCache(), LocalStorage(str(tmp_path))
        for name in ("a", "a", "b"):
            request = request_of(case.state(comm.rank))
            if (tmp_path / name).exists():
                with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
                    save(SaveCall(comm, storage, name, request, kept, SECONDS))
            else:
                save(SaveCall(comm, storage, name, request, kept, SECONDS))

    run_ranks(2, act)
    assert sorted(planned) == [0, 1]
    assert uc.verify(tmp_path / "b", deep=True).ok

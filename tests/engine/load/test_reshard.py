"""Saved by one world, loaded by another: compared byte by byte with a numpy oracle.

The safetensors library reads the files in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.reshard_cases import (
    NAME,
    SECONDS,
    Case,
    Kept,
    Writes,
    bits,
    cases,
    check_folder,
    check_written_once,
    garbage,
    global_array,
    one_node,
    request_of,
    root,
    save_call,
    save_case,
)
from tests.support.harness import DrawnLayout, DrawnTensor, drawn_layouts, run_ranks, try_ranks
from tests.support.oracles import local_part, lowest_peak, segment_writers, where
from tests.support.refusals import same_error
from unified_ckpt.core.planning import exchange
from unified_ckpt.core.planning.slabs import SMALL_NBYTES, choose_granularity
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.engine.load.load import LoadReport, LoadRequest, load
from unified_ckpt.engine.load.placement import place_metadata
from unified_ckpt.engine.save import scope
from unified_ckpt.engine.save.save import save
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format.renames import Renames, Rule
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.placements import make_resolver
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, LocalTensor
from unified_ckpt.views.rename_rules import apply_renames

__all__ = ["root"]  # fixtures

# one case


def load_into(
    comm: Comm, folder: Path, state: FlatState, *, rules: Renames | None = None, **options: object
) -> LoadReport:
    opened: Source = open_folder(LocalStorage(str(folder)))
    opened, windows = opened if rules is None else apply_renames(opened, rules), TileBuffers()
    try:
        load_options = uc.LoadOptions(**options)
        placed = place_metadata(comm, opened, state, make_resolver(comm, None), load_options)
        request = LoadRequest(opened, state, placed, None, None, set(), True, load_options)
        return load(
            comm, str(folder), request, windows, topology=one_node(comm), timeout_seconds=SECONDS
        )
    finally:
        windows.close()
        opened.close()


def load_case(
    case: Case,
    layout: DrawnLayout,
    folder: Path,
    arrays: Mapping[Key, np.ndarray] | None = None,
    **options: Any,
) -> list[LoadReport]:
    """Load, and compare every byte of every rank. `arrays`: those of the case, if not given."""

    def act(comm: Comm) -> LoadReport:
        state = case.target(layout, comm.rank)
        report = load_into(comm, folder, state, **options)
        for part in state.tensors:
            array = (arrays or case.arrays)[part.decl.key]
            oracle = local_part(array, part.decl.sharding, comm.rank)
            assert bits(part.local) == oracle.tobytes(), (comm.rank, part.decl)
        return report

    return run_ranks(layout.world, act)


# properties of the folder


def check_balance(case: Case, writes: Writes, places: Mapping[Key, tuple[str, int, int]]) -> None:
    """Check that the largest load in a holder group is at most 1.05 of the lower bound.

    Borders fall on whole lines; those between replicas, of tensors of one sharding, on whole
    tensors. Headers and small tensors are fixed by the plan.
    """
    groups: dict[tuple[int, ...], list[TensorDecl]] = {}
    for tensor in case.saved.tensors:
        groups.setdefault(tensor.ranks, []).append(tensor.decl)
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
        lines = sum(choose_granularity(row.spec, row.sharding).slab_nbytes for row in large)
        replicated: dict[Sharding, int] = {}  # the largest tensor
        for row in large:
            if len(ranks) > prod(shard_dim.size for shard_dim in row.sharding.shard_dims):
                largest = max(replicated.get(row.sharding, 0), row.spec.nbytes)
                replicated[row.sharding] = largest
        lines += sum(replicated.values())
        assert max(loads.values()) <= 1.05 * bound + lines, (loads, bound, lines, rows)


def check_over_read(case: Case, layout: DrawnLayout, reports: Sequence[LoadReport]) -> None:
    """Check the bytes that all ranks read against the bytes that they need; all are on one node."""
    union = 0
    for tensor in layout.tensors:
        mask = np.zeros(tensor.decl.spec.shape, dtype=bool)
        for rank in tensor.ranks:
            for box, _ in tensor.decl.sharding.boxes(rank, tensor.decl.spec.shape):
                mask[where(box)] = True
        union += int(mask.sum()) * case.arrays[tensor.decl.key].itemsize
    assert sum(report.bytes_read for report in reports) <= 1.25 * union


# the property

FILE_NBYTES = st.sampled_from([100_000, 1 << 30])
TILES = st.sampled_from([64 << 10, 64 << 10, 64 << 10, 16 << 20])
VERIFY = st.sampled_from(["read", "read", "off"])


def check_case(
    case: Case, root: Path, *, tile_nbytes: int, max_file_bytes: int, verify: str
) -> None:
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        writes = save_case(case, Path(name), max_file_bytes=max_file_bytes)
        folder = Path(name) / NAME
        places = check_folder(case, folder)
        check_written_once(writes, folder)
        check_balance(case, writes, places)
        for layout in case.loaded:
            reports = load_case(case, layout, folder, verify=verify)
            check_over_read(case, layout, reports)
            if verify != "full":  # "full" reads blocks again
                assert sum(report.verified_bytes for report in reports) <= sum(
                    report.bytes_read for report in reports
                ) * (verify == "read")


@pytest.mark.incident("DeepSpeed#2898")
@given(cases(max_world=6, max_tensors=4, loads=3), TILES, FILE_NBYTES, VERIFY)
@settings(max_examples=15)
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
        (key, replace(spec, shape=tuple(n + draw(more) for n in spec.shape)))
        for key, spec in ((tensor.decl.key, tensor.decl.spec) for tensor in case.saved.tensors)
    ]
    return replace(case, loaded=(draw(drawn_layouts(tensors=larger, max_world=6, complete=False)),))


def corner_of(tensor: DrawnTensor, shape: tuple[int, ...]) -> DrawnTensor:
    """The part that its ranks load of a stored tensor of this shape."""
    row = tensor.decl
    return DrawnTensor(
        row._replace(
            spec=replace(row.spec, shape=shape),
            sharding=row.sharding.truncate(row.spec.shape, shape),
        ),
        tensor.ranks,
    )


@given(grown_cases(), TILES, st.sampled_from(["read", "full", "off"]))
@settings(max_examples=20)
def test_pad_rule_for_larger_tensors(root: Path, case: Case, tile_nbytes: int, verify: str) -> None:
    """Loads the stored corner on any mesh, and verifies what it reads.

    The rest of the target keeps every bit, and no byte is read for it.
    """
    rules = Renames(rules=(Rule(match=("*",), pad=(0, 1, 2, 3)),))
    (layout,) = case.loaded
    oracles, corners = {}, []
    for tensor in layout.tensors:
        key, array = tensor.decl.key, case.arrays[tensor.decl.key]
        shape = tensor.decl.spec.shape
        oracles[key] = garbage(tensor.decl.spec, array.dtype).reshape(shape)
        oracles[key][tuple(map(slice, array.shape))] = array
        corners.append(corner_of(tensor, array.shape))
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        save_case(case, Path(name))
        reports = load_case(case, layout, Path(name) / NAME, oracles, rules=rules, verify=verify)
    check_over_read(case, replace(layout, tensors=tuple(corners)), reports)
    grown = {
        ":".join(key) for key, array in oracles.items() if array.shape != case.arrays[key].shape
    }
    for report in reports:
        assert bool(report.notes) == bool(grown)
        assert all(name in report.notes[0] for name in grown)


# single cases


def arranged(mesh: Sequence[int], **rules: tuple[TensorSpec, tuple[ShardDim, ...]]) -> DrawnLayout:
    """Tensors of the model, on all ranks of a row-major mesh."""
    world = int(np.prod(mesh))
    return DrawnLayout(
        world,
        tuple(
            DrawnTensor(TensorDecl("model", fqn, spec, Sharding(cuts)), tuple(range(world)))
            for fqn, (spec, cuts) in rules.items()
        ),
    )


def case_of(saved: DrawnLayout, *loaded: DrawnLayout) -> Case:
    return Case(
        {
            tensor.decl.key: global_array(tensor.decl.key, tensor.decl.spec)
            for tensor in saved.tensors
        },
        saved,
        loaded,
    )


SPEC = TensorSpec("BF16", (64, 8192))  # 1 MiB


@pytest.mark.incident("pytorch#192485")
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
def test_non_contiguous_memory(root: Path, dtype: str) -> None:
    cuts = () if dtype == "F4" else (ShardDim(0, 2, 1),)
    sizes = {"large": (40_000, 7), "small": (3, 5), "one": (1,)}
    rules = {
        fqn: (TensorSpec(dtype, shape), cuts if shape[0] > 1 else ())
        for fqn, shape in sizes.items()
    }
    case = replace(
        case_of(arranged([2], **rules), arranged([1], **rules)),
        column_major=frozenset(("model", fqn) for fqn in rules),
    )
    check_case(case, root, tile_nbytes=64 << 10, max_file_bytes=1 << 30, verify="full")


def test_strided_single_element(root: Path) -> None:
    """torch calls a tensor of one element contiguous, whatever its stride is."""
    row = TensorDecl("model", "one", TensorSpec("F32", (1,)), Sharding())
    states = [
        FlatState(
            tensors=[LocalTensor(row, torch.arange(6.0)[4::2][:1])], requested_parts={"model"}
        )
        for _ in range(2)
    ]
    with TemporaryDirectory(dir=root) as name:
        assert save_states(Path(name), [states]) == [None, None]
        target = LocalTensor(row, torch.zeros(6)[::2][:1])
        run_ranks(
            1,
            lambda comm: load_into(
                comm, Path(name) / "save-0", FlatState(tensors=[target], requested_parts={"model"})
            ),
        )
    assert target.local.item() == 4


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


@pytest.mark.incident("ROCm-Megatron-LM#63")
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_pair_of_layouts(root: Path, saved: str) -> None:
    """Exchanges of several tiles on both sides."""
    even, uneven = TensorSpec("BF16", (32, 8192)), TensorSpec("U8", (151, 8192))
    arrangements = {
        name: arranged(mesh, even=(even, cuts), uneven=(uneven, cuts))
        for name, (mesh, cuts) in LAYOUTS.items()
    }
    case = case_of(arrangements[saved], *arrangements.values())
    check_case(case, root, tile_nbytes=64 << 10, max_file_bytes=1 << 30, verify="read")


def test_ranks_load_one_tensor_by_different_rules(root: Path) -> None:
    case = case_of(arranged([2], w=(SPEC, (ShardDim(0, 2, 1),))))
    save_case(case, root)
    rules = [Sharding(), Sharding((ShardDim(0, 3, 1),)), Sharding((ShardDim(1, 3, 1),))]
    layout = DrawnLayout(
        3,
        tuple(
            DrawnTensor(TensorDecl("model", "w", SPEC, rule), (rank,))
            for rank, rule in enumerate(rules)
        ),
    )
    load_case(case, layout, root / NAME)


def test_full_load_reads_each_byte_once(root: Path) -> None:
    case = case_of(
        arranged([2, 2], w=(SPEC, (ShardDim(1, 2, 1),))),
        arranged([4], w=(SPEC, ())),
        arranged([2, 2], w=(SPEC, (ShardDim(1, 4, 1),))),
    )
    with TemporaryDirectory(dir=root) as name:
        save_case(case, Path(name))
        for layout in case.loaded:
            reports = load_case(case, layout, Path(name) / NAME)
            assert sum(report.bytes_read for report in reports) == SPEC.nbytes
            assert sum(report.verified_bytes for report in reports) == SPEC.nbytes


# replicas


def states_of(case: Case, spoilt: Mapping[int, int] | None = None) -> list[FlatState]:
    """The ranks' states; on some ranks this byte of the last tensor is changed."""
    states = [case.state(rank) for rank in range(case.saved.world)]
    for rank, index in (spoilt or {}).items():
        states[rank].tensors[-1].local.view(torch.uint8)[0, index] ^= 1
    return states


def save_states(
    root: Path, states: Sequence[Sequence[FlatState]], **options: object
) -> list[object]:
    """Save several times by the same ranks; return what each rank raised, or None."""
    root.mkdir(exist_ok=True)

    def act(comm: Comm) -> None:
        cache = Kept()
        for number, rank_states in enumerate(states):
            request = request_of(rank_states[comm.rank], **options)
            save(save_call(comm, LocalStorage(str(root)), f"save-{number}", request, cache))

    return list(try_ranks(len(states[0]), act))


TWO = {"a": (SPEC, (ShardDim(1, 2, 1),)), "b": (SPEC, (ShardDim(0, 2, 1),))}


REPLICAS: list[tuple[DrawnLayout, dict[int, int], str]] = [
    (
        arranged([3, 2], **TWO),
        {5: -1},
        r"hold different bytes \(1\):\n  model:b: rank\(s\) 1, 3 differ from rank\(s\) 5\n",
    ),
    (
        arranged([4], whole=(SPEC, ())),
        {1: -1, 3: 0},
        r"model:whole: rank\(s\) 0, 2 differ from rank\(s\) 1 differ from rank\(s\) 3",
    ),
]


@pytest.mark.parametrize(("layout", "spoilt", "match"), REPLICAS)
def test_differing_replicas_are_named_on_every_rank(
    tmp_path: Path, layout: DrawnLayout, spoilt: dict[int, int], match: str
) -> None:
    same_error(save_states(tmp_path, [states_of(case_of(layout), spoilt)]), uc.LayoutError, match)
    assert list(tmp_path.iterdir()) == []


def test_check_replicas_always_detects_later_drift(tmp_path: Path) -> None:
    case = case_of(arranged([2, 2], **TWO))
    drifted = states_of(case, {2: -1})
    states = [states_of(case), drifted]
    assert save_states(tmp_path / "first", states) == [None] * 4
    assert save_states(tmp_path / "never", [drifted], check_replicas="never") == [None] * 4
    same_error(
        save_states(tmp_path / "always", states, check_replicas="always"),
        uc.LayoutError,
        r"model:b: rank\(s\) 0 differ from rank\(s\) 2",
    )


# the second save of a layout


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rank of each call of the planner."""
    calls: list[int] = []
    plan = scope.make_plan

    def counted(collective: Collective, *rest: object, **more: object) -> object:
        calls.append(collective.rank)
        return plan(collective, *rest, **more)

    monkeypatch.setattr(scope, "make_plan", counted)
    return calls


@pytest.mark.incident("pytorch#149785")
def test_second_save_of_a_layout_plans_nothing(
    tmp_path: Path, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks exchange nothing about tensors: 8 tensors need the same keys as 40."""
    collectives: list[Collective] = []  # of rank 1
    begin = Comm.begin_collective

    def counted(comm: Comm, *arguments: object, **keywords: object) -> Collective:
        collective = begin(comm, *arguments, **keywords)
        if comm.rank == 1:
            collectives.append(collective)
        return collective

    monkeypatch.setattr(Comm, "begin_collective", counted)
    for tensors in (8, 40):
        case = case_of(
            arranged([2, 2], **{f"t{n}": (SPEC, (ShardDim(n % 2, 2, 1),)) for n in range(tensors)})
        )
        assert (
            save_states(tmp_path / str(tensors), [states_of(case)] * 3, max_file_bytes=1 << 22)
            == [None] * 4
        )
        assert all(uc.verify(tmp_path / str(tensors) / f"save-{n}", deep=True).ok for n in range(3))
    assert sorted(planned) == [0, 0, 1, 1, 2, 2, 3, 3]
    key_sets = [  # without those that any rank may be the first to set
        {
            key.partition("/")[2]
            for key in collective.keys
            if "/n/" not in key and "/state-body/" not in key
        }
        - {"arrivals-closed", "done"}
        for collective in collectives
    ]
    assert key_sets[1] == key_sets[2] == key_sets[4] == key_sets[5] < key_sets[0]


def test_layout_change_on_one_rank_replans_all(tmp_path: Path, planned: list[int]) -> None:
    case = case_of(arranged([2, 2], **TWO))
    transposed = states_of(case)
    part = transposed[3].tensors[0]
    transposed[3].tensors[0] = LocalTensor(part.decl, part.local.t().contiguous().t())
    assert save_states(tmp_path, [states_of(case), transposed, transposed]) == [None] * 4
    assert sorted(planned) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_failed_save_keeps_the_cached_plan(tmp_path: Path, planned: list[int]) -> None:
    case = case_of(arranged([2], **TWO))

    def act(comm: Comm) -> None:
        cache, storage = Kept(), LocalStorage(str(tmp_path))
        for name in ("a", "a", "b"):
            request = request_of(case.state(comm.rank))
            if (tmp_path / name).exists():
                with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
                    save(save_call(comm, storage, name, request, cache))
            else:
                save(save_call(comm, storage, name, request, cache))

    run_ranks(2, act)
    assert sorted(planned) == [0, 1]
    assert uc.verify(tmp_path / "b", deep=True).ok

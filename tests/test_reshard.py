"""Saved by one world, loaded by another: thread ranks against a numpy oracle, byte by byte, and the safetensors library in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Array, filled, part_of, where
from safetensors import safe_open

import unified_ckpt as uc
from unified_ckpt.core import plan_save
from unified_ckpt.core.lines import SMALL_NBYTES, manner, segments
from unified_ckpt.core.sharding import Cut, Sharding, TensorSpec
from unified_ckpt.core.tables import Key, Row
from unified_ckpt.engine import save as save_module
from unified_ckpt.engine.checkpoint import open_folder
from unified_ckpt.engine.load import LoadReport, LoadRequest, load
from unified_ckpt.engine.save import Kept, SaveRequest, save
from unified_ckpt.runtime.comm import Comm
from unified_ckpt.runtime.state import State
from unified_ckpt.runtime.storage import Buffer, LocalStorage
from unified_ckpt.runtime.tensors import TORCH_DTYPES, Part
from unified_ckpt.runtime.windows import Windows
from unified_ckpt.testing import Arrangement, Held, arrangements, run_ranks, specs, try_ranks

SECONDS = 60.0
NAME = "checkpoint-1"
GARBAGE = 0xA5


# from numpy to what the engine takes, and back


def global_array(key: Key, spec: TensorSpec) -> Array:
    """Random bits, the same for one name; a bool has two values only."""
    array = filled(spec, seed=sum(map(ord, "".join(key))))
    return array & 1 if spec.dtype == "BOOL" else array


def tensor_of(array: Array, dtype: str, *, turned: bool) -> torch.Tensor:
    """The array's bits as a tensor; `turned`: its memory is column-major."""
    dense = np.array(array, order="F" if turned else "C")
    return torch.from_numpy(dense).view(TORCH_DTYPES[dtype])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Case:
    """`turned`: which of the ranks' parts are not contiguous in memory."""

    arrays: Mapping[Key, Array]
    saved: Arrangement
    loaded: Arrangement
    turned: frozenset[Key] = frozenset()

    def spec(self, key: Key) -> TensorSpec:
        return next(one.row.spec for one in self.saved.held if one.row.key == key)

    def part(self, row: Row, array: Array) -> Part:
        return Part(row, tensor_of(array, row.spec.dtype, turned=row.key in self.turned))

    def state(self, rank: int) -> State:
        parts = [self.part(row, part_of(self.arrays[row.key], row.sharding, rank)) for row in self.saved.rows(rank)]
        return State(parts=parts, asked={part for part, _ in self.arrays})

    def target(self, rank: int) -> State:
        parts = []
        for row in self.loaded.rows(rank):
            shape = row.sharding.local_shape(rank, row.spec.shape)
            array = np.frombuffer(bytes([GARBAGE]) * (row.spec.nbytes + 8), dtype=self.arrays[row.key].dtype)
            parts.append(self.part(row, np.resize(array, shape)))
        return State(parts=parts, asked={part for part, _ in self.arrays})


@st.composite
def cases(draw: st.DrawFn, *, max_world: int, max_tensors: int = 4) -> Case:
    names = draw(st.lists(st.sampled_from(["model", "model", "optimizer", "ema"]), min_size=1, max_size=max_tensors))
    tensors = [((part, f"t{number}/exp_avg" if part == "optimizer" else f"t{number}"), draw(specs(max_nbytes=300_000))) for number, part in enumerate(names)]
    saved = draw(arrangements(tensors=tensors, max_world=max_world, complete=True))
    loaded = draw(arrangements(tensors=tensors, max_world=draw(st.sampled_from([1, max_world])), complete=False))
    turned = frozenset(key for key, _ in tensors if draw(st.integers(0, 4)) == 0)
    return Case({key: global_array(key, spec) for key, spec in tensors}, saved, loaded, turned)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


# one case


@dataclass
class Writes:
    """What all ranks wrote: file -> (start, stop, rank)."""

    spans: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Recorded(LocalStorage):
    def __init__(self, root: Path, writes: Writes, rank: int) -> None:
        super().__init__(str(root))
        self._writes, self._rank = writes, rank

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        with self._writes.lock:
            span = (start, start + sum(len(b) for b in buffers), self._rank)
            self._writes.spans.setdefault(name.rpartition("/")[2], []).append(span)
        super().write_at(name, start, buffers)


def request_of(state: State, **options: object) -> SaveRequest:
    return SaveRequest(state, None, None, None, set(), {}, 7, None, uc.SaveOptions(fsync=False, **options))


def save_case(case: Case, root: Path, **options: object) -> Writes:
    writes = Writes()

    def act(comm: Comm) -> None:
        kept = Kept(Windows())
        save(comm, Recorded(root, writes, comm.rank), NAME, request_of(case.state(comm.rank), **options), kept, timeout_seconds=SECONDS)
        kept.windows.close()

    run_ranks(case.saved.world, act)
    return writes


def load_into(comm: Comm, folder: Path, state: State, **options: object) -> LoadReport:
    opened, windows = open_folder(LocalStorage(str(folder))), Windows()
    try:
        request = LoadRequest(opened, state, opened.said(), None, None, set(), True, uc.LoadOptions(**options))
        return load(comm, str(folder), request, windows, timeout_seconds=SECONDS)
    finally:
        windows.close()
        opened.close()


def load_case(case: Case, folder: Path, **options: object) -> list[LoadReport]:
    """Loads, and compares every byte of every rank."""

    def act(comm: Comm) -> LoadReport:
        state = case.target(comm.rank)
        report = load_into(comm, folder, state, **options)
        for part in state.parts:
            wanted = tensor_of(part_of(case.arrays[part.row.key], part.row.sharding, comm.rank), part.row.spec.dtype, turned=False)
            assert bits(part.local) == bits(wanted), (comm.rank, part.row)
        return report

    return run_ranks(case.loaded.world, act)


# what must hold of the folder


def check_folder(case: Case, folder: Path) -> dict[Key, tuple[str, int, int]]:
    """Each tensor is whole in the file that its part's index names. Returns where: file, first byte, end."""
    places: dict[Key, tuple[str, int, int]] = {}
    for part in {part for part, _ in case.arrays}:
        weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"]
        assert weight_map.keys() == {fqn for one, fqn in case.arrays if one == part}
        for file in set(weight_map.values()):
            with safe_open(folder / file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                assert set(opened.keys()) == {fqn for fqn, at in weight_map.items() if at == file}
                for fqn in opened.keys():  # noqa: SIM118  # not a mapping
                    found = opened.get_tensor(fqn)
                    spec = case.spec((part, fqn))
                    assert (found.dtype, tuple(found.shape)) == (TORCH_DTYPES[spec.dtype], spec.shape)
                    assert bits(found) == case.arrays[part, fqn].tobytes()
            places.update({(part, fqn): (file, *span) for fqn, span in spans_of(folder / file).items()})
    return places


def spans_of(file: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        first = 8 + int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(first - 8))
    return {fqn: (first + low, first + high) for fqn, entry in header.items() if fqn[:2] != "__" for low, high in [entry["data_offsets"]]}


def check_written_once(writes: Writes, folder: Path) -> None:
    """The writes of all ranks tile every file; the probe is the one file that is gone."""
    assert {path.name for path in folder.iterdir()} == set(writes.spans) - {"probe"}
    for path in folder.iterdir():
        spans = sorted(writes.spans[path.name])
        assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])], (path.name, spans)
        assert spans[-1][1] == path.stat().st_size


def movers(row: Row, rank_set: Sequence[int]) -> Iterator[tuple[frozenset[int], int]]:
    """(ranks that may write a segment, its bytes) of one large tensor."""
    how = manner(row.spec, row.sharding)
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in rank_set:
        position = how.outer.position(rank)
        assert position is not None
        places.setdefault(how.outer.coordinates(position), []).append(rank)
    for coordinates, ranks in places.items():
        yield frozenset(ranks), sum(s.stop - s.start for s in segments(row.spec, how.outer, coordinates))


def lowest_peak(ranks: Sequence[int], demands: Sequence[tuple[frozenset[int], int]], fixed: Mapping[int, int]) -> float:
    """The least largest load of any division: of a set of ranks, the mean of what nobody else can take, for the worst set."""
    return max(
        (sum(n for who, n in demands if who <= set(some)) + sum(fixed[r] for r in some)) / len(some)
        for size in range(1, len(ranks) + 1)
        for some in combinations(ranks, size)
    )


def check_balance(case: Case, writes: Writes, places: Mapping[Key, tuple[str, int, int]]) -> None:
    """Inside a holder group, the largest load is 1.05 of the lower bound; borders fall on whole lines.

    Headers and small tensors are where the plan has put them.
    """
    groups: dict[tuple[int, ...], list[Row]] = {}
    for one in case.saved.held:
        groups.setdefault(one.ranks, []).append(one.row)
    for ranks, rows in groups.items():
        large = [row for row in rows if row.spec.nbytes >= SMALL_NBYTES]
        loads, movable = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        for file in {places[row.key][0] for row in rows}:
            inside = [places[row.key][1:] for row in large if places[row.key][0] == file]
            for start, stop, rank in writes.spans[file]:
                loads[rank] += stop - start
                movable[rank] += sum(max(min(stop, b) - max(start, a), 0) for a, b in inside)
        fixed = {rank: loads[rank] - movable[rank] for rank in ranks}
        bound = lowest_peak(ranks, [demand for row in large for demand in movers(row, ranks)], fixed)
        lines = sum(manner(row.spec, row.sharding).line_nbytes for row in large)
        assert max(loads.values()) <= 1.05 * bound + lines, (loads, bound, lines, rows)


# the property


def check_case(case: Case, root: Path, *, tile_nbytes: int, max_file_bytes: int) -> None:
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_save, "TILE_NBYTES", tile_nbytes)
        writes = save_case(case, Path(name), max_file_bytes=max_file_bytes)
        folder = Path(name) / NAME
        places = check_folder(case, folder)
        check_written_once(writes, folder)
        check_balance(case, writes, places)
        reports = load_case(case, folder)
        check_over_read(case, reports)


def check_over_read(case: Case, reports: Sequence[LoadReport]) -> None:
    """All thread ranks are on one machine: what they read together over what they want together."""
    wanted = 0
    for one in case.loaded.held:
        mask = np.zeros(one.row.spec.shape, dtype=bool)
        for rank in one.ranks:
            for box, _ in one.row.sharding.boxes(rank, one.row.spec.shape):
                mask[where(box)] = True
        wanted += int(mask.sum()) * case.arrays[one.row.key].itemsize
    assert sum(report.bytes_read for report in reports) <= 1.25 * wanted


FILE_NBYTES = st.sampled_from([100_000, 1 << 30])
TILES = st.sampled_from([4096, 65536, 16 << 20])


@given(cases(max_world=6), TILES, FILE_NBYTES)
@settings(max_examples=1000)
def test_any_mesh_to_any_mesh(root: Path, case: Case, tile_nbytes: int, max_file_bytes: int) -> None:
    check_case(case, root, tile_nbytes=tile_nbytes, max_file_bytes=max_file_bytes)

"""Draws a state with a layout to save and layouts to load, and checks the folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open

import unified_ckpt as uc
from tests.support.harness import DrawnLayout, drawn_layouts, run_ranks, specs
from tests.support.oracles import Array, filled, local_part
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.save_scope import join_scope
from unified_ckpt.engine.save.call import Buffers, SaveCall
from unified_ckpt.engine.save.layout.layout_plan import LayoutCache
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.save import save
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.connections import Connections
from unified_ckpt.runtime.exchange.transport import SHARED_MEMORY
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, LocalTensor

# the slowest case takes 14 s on an idle machine: runs of one byte, read one by one
SECONDS = 90.0
NAME = "checkpoint-1"
GARBAGE = 0xA5
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def global_array(key: Key, spec: TensorSpec) -> Array:
    """Random bits, equal for equal names; a bool has two values only."""
    array = filled(spec, seed=sum(map(ord, "".join(key))))
    return array & 1 if spec.dtype == "BOOL" else array


def garbage(spec: TensorSpec, dtype: np.dtype[np.generic]) -> Array:
    """A target's elements before a load."""
    return np.frombuffer(bytearray([GARBAGE]) * spec.nbytes, dtype=dtype)


def tensor_of(array: Array, dtype: str, *, column_major: bool) -> torch.Tensor:
    """The array's bits as a tensor, column-major in memory on request."""
    dense = np.array(array, order="F" if column_major else "C")
    return torch.from_numpy(dense).view(TORCH_DTYPES[dtype])


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order."""
    return tensor.view(INTS[tensor.element_size()]).numpy().tobytes()


@dataclass(frozen=True)
class Case:
    """One save and the loads from it. `column_major`: the tensors whose parts are not contiguous in
    memory.
    """

    arrays: Mapping[Key, Array]
    saved: DrawnLayout
    loaded: tuple[DrawnLayout, ...] = ()
    column_major: frozenset[Key] = frozenset()

    def spec(self, key: Key) -> TensorSpec:
        return next(tensor.decl.spec for tensor in self.saved.tensors if tensor.decl.key == key)

    def part(self, row: TensorDecl, array: Array) -> LocalTensor:
        return LocalTensor(
            row, tensor_of(array, row.spec.dtype, column_major=row.key in self.column_major)
        )

    def state(self, rank: int) -> FlatState:
        parts = [
            self.part(row, local_part(self.arrays[row.key], row.sharding, rank))
            for row in self.saved.decls(rank)
        ]
        return FlatState(tensors=parts, requested_parts={part for part, _ in self.arrays})

    def target(self, layout: DrawnLayout, rank: int) -> FlatState:
        parts = []
        for row in layout.decls(rank):
            shape = row.sharding.local_shape(rank, row.spec.shape)
            array = garbage(row.spec, self.arrays[row.key].dtype)
            parts.append(self.part(row, array[: np.prod(shape, dtype=int)].reshape(shape)))
        return FlatState(tensors=parts, requested_parts={part for part, _ in self.arrays})


@st.composite
def cases(
    draw: st.DrawFn, *, max_world: int, max_tensors: int, loads: int, max_nbytes: int = 800_000
) -> Case:
    names = draw(
        st.lists(
            st.sampled_from(["model", "model", "optimizer", "ema"]),
            min_size=1,
            max_size=max_tensors,
        )
    )
    keys = [
        (part, f"t{number}/exp_avg" if part == "optimizer" else f"t{number}")
        for number, part in enumerate(names)
    ]
    tensors = [(key, draw(specs(max_nbytes=max_nbytes))) for key in keys]
    saved = draw(drawn_layouts(tensors=tensors, max_world=max_world, complete=True))
    worlds = [1, *[max_world] * (loads - 1)]
    loaded = tuple(
        draw(drawn_layouts(tensors=tensors, max_world=most, complete=False)) for most in worlds
    )
    column_major = frozenset(key for key, _ in tensors if draw(st.integers(0, 4)) == 0)
    return Case(
        {key: global_array(key, spec) for key, spec in tensors}, saved, loaded, column_major
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


@dataclass
class Writes:
    """Records the writes of all ranks, file -> (start, stop, rank), and their syncs."""

    spans: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    synced: dict[str, set[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Recorded(LocalStorage):
    def __init__(self, root: Path, writes: Writes, rank: int) -> None:
        super().__init__(str(root))
        self._writes, self._rank = writes, rank

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        self._add(name, start, start + sum(len(b) for b in buffers))
        super().write_at(name, start, buffers)

    def resize(self, name: str, nbytes: int) -> None:
        self._add(name, 0, nbytes)
        super().resize(name, nbytes)

    def _add(self, name: str, start: int, stop: int) -> None:
        with self._writes.lock:
            spans = self._writes.spans.setdefault(name.rpartition("/")[2], [])
            spans.append((start, stop, self._rank))

    def sync(self, name: str) -> None:
        with self._writes.lock:
            self._writes.synced.setdefault(name.rpartition("/")[2], set()).add(self._rank)
        super().sync(name)


def request_of(state: FlatState, **options: object) -> SaveRequest:
    return SaveRequest(
        state, None, None, None, set(), {}, 7, {}, None, uc.SaveOptions(fsync=False, **options)
    )


def one_node(comm: Comm) -> Topology:
    """All ranks on one node, with one folder."""
    return Topology.shared_folder(comm.rank, [0] * comm.world)


@dataclass(slots=True)
class Kept:
    """What one save leaves for the next."""

    layouts: LayoutCache = field(default_factory=LayoutCache)
    buffers: Buffers = field(default_factory=Buffers)


def save_call(
    comm: Comm, storage: LocalStorage, name: str, request: SaveRequest, kept: Kept
) -> SaveCall:
    """A call of save by ranks of one node."""
    connections = Connections(one_node(comm), comm, SHARED_MEMORY)
    layouts, buffers = kept.layouts, kept.buffers
    return SaveCall(
        comm, storage, name, request, layouts, buffers, SECONDS, connections, join_scope
    )


def save_case(case: Case, root: Path, **options: object) -> Writes:
    writes = Writes()

    def act(comm: Comm) -> None:
        cache = Kept()
        save(
            save_call(
                comm,
                Recorded(root, writes, comm.rank),
                NAME,
                request_of(case.state(comm.rank), **options),
                cache,
            )
        )
        cache.buffers.close()

    run_ranks(case.saved.world, act)
    return writes


def check_folder(case: Case, folder: Path) -> dict[Key, tuple[str, int, int]]:
    """Check that the file named by the index holds each tensor whole. Return file, first byte and
    end.
    """
    places: dict[Key, tuple[str, int, int]] = {}
    for part in {part for part, _ in case.arrays}:
        weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())[
            "weight_map"
        ]
        assert weight_map.keys() == {fqn for array_part, fqn in case.arrays if array_part == part}
        for file in set(weight_map.values()):
            with safe_open(folder / file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                assert set(opened.keys()) == {
                    fqn for fqn, tensor_file in weight_map.items() if tensor_file == file
                }
                for fqn in opened.keys():  # noqa: SIM118  # not a mapping
                    stored = opened.get_tensor(fqn)
                    spec = case.spec((part, fqn))
                    assert (stored.dtype, tuple(stored.shape)) == (
                        TORCH_DTYPES[spec.dtype],
                        spec.shape,
                    )
                    assert bits(stored) == case.arrays[part, fqn].tobytes()
            places.update(
                {(part, fqn): (file, *span) for fqn, span in spans_of(folder / file).items()}
            )
    return places


def spans_of(file: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        first = 8 + int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(first - 8))
    return {
        fqn: (first + low, first + high)
        for fqn, entry in header.items()
        if fqn[:2] != "__"
        for low, high in [entry["data_offsets"]]
    }


def check_written_once(writes: Writes, folder: Path) -> None:
    """Check that the writes of all ranks tile every file. Only the probe file may be gone."""
    assert {path.name for path in folder.iterdir()} == set(writes.spans) - {"unified_save_id"}
    for path in folder.iterdir():
        spans = sorted(writes.spans[path.name])
        assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])], (
            path.name,
            spans,
        )
        assert spans[-1][1] == path.stat().st_size

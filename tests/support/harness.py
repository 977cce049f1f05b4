"""Runs ranks as threads, lets storage fail and draws layouts. It has no expected values."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from unified_ckpt.checkpointer import Checkpointer
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.core.text import format_ranks
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.probe_topology import Topologies
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.session import Session

_Result = TypeVar("_Result")

# ranks


def try_ranks(
    world: int, function: Callable[[Comm], _Result], *, timeout_seconds: float = 120.0
) -> list[_Result | BaseException]:
    """Call `function` on `world` ranks, which are threads over one store.

    Returns what each rank returned or raised. TimeoutError with the stacks of ranks that hang.
    """
    store, ranks = HashStore(), range(world)
    results: list[_Result | BaseException] = [AssertionError("did not end")] * world

    def run_rank(rank: int) -> None:
        try:
            results[rank] = function(Comm(store, rank=rank, ranks=ranks))
        except BaseException as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in ranks
    ]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hung:
        frames = sys._current_frames()
        stacks = []
        for rank in hung:
            stack = traceback.format_stack(frames.get(threads[rank].ident or 0))
            stacks.append(f"rank {rank}:\n{''.join(stack)}")
        text = "\n".join(stacks)
        raise TimeoutError(
            f"rank(s) {format_ranks(hung)} did not end within {timeout_seconds:g} s; "
            f"they are at\n{text}"
        )
    return results


def run_ranks(
    world: int, function: Callable[[Comm], _Result], *, timeout_seconds: float = 120.0
) -> list[_Result]:
    """Call `function` on `world` ranks and return their results.

    Raises an ExceptionGroup of all errors, or the error itself if all ranks raise the same.
    """
    results: list[_Result] = []
    errors: dict[int, BaseException] = {}
    for rank, result in enumerate(try_ranks(world, function, timeout_seconds=timeout_seconds)):
        if isinstance(result, BaseException):
            errors[rank] = result
        else:
            results.append(result)
    if len(errors) == world and len({(type(error), str(error)) for error in errors.values()}) == 1:
        raise errors[0]
    for rank, error in errors.items():
        error.add_note(f"raised on rank {rank} of {world}")
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {world} ranks failed", list(errors.values()))
    return results


def make_checkpointer(comm: Comm, *, node: str | None = None) -> Checkpointer:
    """Return a Checkpointer over the ranks of `comm` until it is closed.

    Its tensors must be plain, because DTensors know only the ranks of torch.
    """
    checkpointer = Checkpointer(node=node)
    set_comm(checkpointer.session, comm)
    return checkpointer


def set_comm(session: Session, comm: Comm) -> None:
    """Give a session the ranks of `comm` until it is closed."""
    session.topologies = Topologies(comm, session.node)


# storage


class SimulatedCrash(BaseException):
    """The storage stopped, as if the process were killed. No Exception: nothing may handle it."""


class FaultPoint:
    """Counts changing operations of all storages that share it, and stops them at `crash_index`.

    `operations` lists what was called, including the fatal operation. Later operations fail too.
    """

    def __init__(self, crash_index: int | None = None) -> None:
        self.operations: list[str] = []
        self._crash_index, self._lock = crash_index, threading.Lock()
        self.triggered = False

    def check(self) -> None:
        """Raise SimulatedCrash once the crash has happened."""
        if self.triggered:
            raise SimulatedCrash(f"stopped at operation {self._crash_index}")

    def trigger(self, operation: str) -> bool:
        """Count an operation; True if it is the fatal one, which the storage may do in part."""
        with self._lock:
            self.check()
            self.triggered = len(self.operations) == self._crash_index
            self.operations.append(operation)
            return self.triggered


class FaultyStorage(LocalStorage):
    """A storage that crashes at an operation and stays stopped.

    Half of the fatal operation is done if it can be: a write, the removal of a folder.
    """

    def __init__(self, root: str, fault_point: FaultPoint) -> None:
        super().__init__(root)
        self.fault_point = fault_point

    @override
    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        if self.fault_point.trigger(f"write_at {name}"):
            super().write_at(name, start, [buffer[: len(buffer) // 2] for buffer in buffers[:1]])
        self.fault_point.check()
        super().write_at(name, start, buffers)

    @override
    def remove_folder(self, name: str) -> None:
        if self.fault_point.trigger(f"remove_folder {name}"):
            entries = super().entries(name)
            for entry in entries[: len(entries) // 2]:
                os.unlink(self.path(f"{name}/{entry}"))
        self.fault_point.check()
        super().remove_folder(name)


def _stopping(name: str, *, changes: bool) -> Callable[..., object]:
    """Return a method of LocalStorage that counts calls, if it `changes` files, and may crash."""
    method = getattr(LocalStorage, name)

    def call(storage: FaultyStorage, *arguments: object, **options: object) -> object:
        if changes:
            names = [argument for argument in arguments if isinstance(argument, str)]
            storage.fault_point.trigger(" ".join([name.strip("_"), *names]))
        storage.fault_point.check()
        return method(storage, *arguments, **options)

    return call


_CHANGING = "make_folder resize _fsync _rename _exchange _replace remove_file remove_empty"
for _name in _CHANGING.split():
    setattr(FaultyStorage, _name, _stopping(_name, changes=True))
for _name in ("read_at", "read", "size", "entries", "kind"):
    setattr(FaultyStorage, _name, _stopping(_name, changes=False))


class FullStorage(LocalStorage):
    """A full disk: writes fail from number `first_failing_write` on, counted from 0."""

    def __init__(self, root: str, first_failing_write: int) -> None:
        super().__init__(root)
        self._writes_left = first_failing_write

    @override
    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        def fail() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._writes_left -= 1
        if self._writes_left < 0:
            self._call(f"write at byte {start}", name, fail)
        super().write_at(name, start, buffers)


# drawn states


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """One tensor and the ranks that hold it, ascending."""

    decl: TensorDecl
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnLayout:
    """The tensors that each of `world` ranks holds."""

    world: int
    tensors: tuple[DrawnTensor, ...]

    def decls(self, rank: int) -> list[TensorDecl]:
        """Return the declarations of a rank, sorted by key."""
        return sorted(
            (tensor.decl for tensor in self.tensors if rank in tensor.ranks),
            key=lambda decl: decl.key,
        )


def meshes(*, max_world: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw meshes of up to three dims, which may have size 1; small ones as often as large."""
    sizes = range(1, max_world + 1)
    all_meshes = [
        mesh
        for count in (1, 2, 3)
        for mesh in product(sizes, repeat=count)
        if prod(mesh) <= max_world and mesh.count(1) < max(count, 2)
    ]
    return st.sampled_from(all_meshes)


@st.composite
def specs(draw: st.DrawFn, *, max_nbytes: int) -> TensorSpec:
    """Draw specs of every dtype that safetensors and torch share.

    Shapes are 0-d, empty, odd and small, and some have 64 KiB or more.
    """
    dtype = draw(st.sampled_from(sorted(TORCH_DTYPES)))
    if draw(st.integers(0, 2)) == 0:
        min_ndim = 1 if dtype == "F4" else 0  # F4 is packed along a dim
        return TensorSpec(
            dtype,
            tuple(
                draw(
                    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 16]), min_size=min_ndim, max_size=3)
                )
            ),
        )
    other_dims = draw(
        st.lists(
            st.sampled_from([1, 2, 3, 5, 8, 12, 40, 100]),
            min_size=draw(st.sampled_from([0, 1, 2])),
            max_size=2,
        )
    )
    count = draw(st.integers(SMALL_NBYTES, max_nbytes)) // itemsize(dtype)
    return TensorSpec(
        dtype, tuple(draw(st.permutations([*other_dims, -(-count // prod(other_dims))])))
    )


@st.composite
def shardings(
    draw: st.DrawFn, *, shape: tuple[int, ...], mesh: Sequence[int], ranks: tuple[int, ...]
) -> Sharding:
    """Draw shardings over a row-major mesh; `ranks` as in `Sharding`.

    Dims are sharded once or several times, evenly or not, in sections, or padded.
    """
    shard_dims = tuple(_shard_dims(draw, shape, mesh))
    return Sharding(shard_dims, ranks if shard_dims else ())


def _shard_dims(draw: st.DrawFn, shape: tuple[int, ...], mesh: Sequence[int]) -> Iterator[ShardDim]:
    sharded_dims = set[int]()
    for mesh_dim in draw(st.permutations(range(len(mesh)))):
        size, stride = mesh[mesh_dim], prod(mesh[mesh_dim + 1 :])
        if size == 1 or not shape or draw(st.integers(0, 3)) == 0:
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["plain", "plain", "plain", "count", "lengths", "padded"]))
        if kind == "count":
            yield ShardDim(dim, size, stride, draw(st.integers(2, 4)))
        elif kind == "lengths" and dim not in sharded_dims:
            first_length = draw(st.integers(0, shape[dim]))
            yield ShardDim(dim, size, stride, (first_length, shape[dim] - first_length))
        elif kind == "padded" and dim not in sharded_dims:
            yield ShardDim(dim, size, stride, 1, -(-shape[dim] // size) + draw(st.integers(0, 3)))
        else:
            yield ShardDim(dim, size, stride)
        sharded_dims.add(dim)


@st.composite
def drawn_layouts(
    draw: st.DrawFn, *, tensors: Sequence[tuple[Key, TensorSpec]], max_world: int, complete: bool
) -> DrawnLayout:
    """Draw which ranks hold each tensor, and how.

    A tensor is on all ranks, on some coordinates of mesh dims that do not shard it (pipeline
    stages, experts), or on a mesh of its own. F4 is held whole. Unless `complete`, some tensors are
    on arbitrary ranks, as a load may want them.
    """
    mesh = draw(meshes(max_world=max_world))
    world = prod(mesh)
    drawn = []
    for (part, fqn), spec in tensors:
        kind = draw(st.sampled_from(["all", "all", "permuted", "some", "some", "own mesh"]))
        tensor_mesh, members = mesh, tuple(range(world))
        if kind == "own mesh":
            tensor_mesh = draw(meshes(max_world=world))
        if kind in ("permuted", "own mesh"):
            members = tuple(draw(st.permutations(range(world)))[: prod(tensor_mesh)])
        listed_ranks = members if kind in ("permuted", "own mesh") else ()
        sharding = (
            Sharding()
            if spec.dtype == "F4"
            else draw(shardings(shape=spec.shape, mesh=tensor_mesh, ranks=listed_ranks))
        )
        if kind == "some":
            members = _stage_ranks(draw, sharding, mesh)
        if not complete and draw(st.integers(0, 5)) == 0:
            members = tuple(draw(st.sets(st.sampled_from(members), min_size=1)))
        drawn.append(DrawnTensor(TensorDecl(part, fqn, spec, sharding), tuple(sorted(members))))
    return DrawnLayout(world, tuple(drawn))


def _stage_ranks(draw: st.DrawFn, sharding: Sharding, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at some coordinates of a mesh dim that shards nothing."""
    free_dims = [
        mesh_dim
        for mesh_dim in range(len(mesh))
        if prod(mesh[mesh_dim + 1 :]) not in {shard_dim.stride for shard_dim in sharding.shard_dims}
        and mesh[mesh_dim] > 1
    ]
    if not free_dims:
        return tuple(range(prod(mesh)))
    mesh_dim = draw(st.sampled_from(free_dims))
    coordinates = draw(st.sets(st.integers(0, mesh[mesh_dim] - 1), min_size=1))
    return tuple(
        rank
        for rank in range(prod(mesh))
        if rank // prod(mesh[mesh_dim + 1 :]) % mesh[mesh_dim] in coordinates
    )

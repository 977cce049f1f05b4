"""What the cluster machine does: models, and sessions of ranks that save and load, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.machines.cluster_model import DTYPES, LEVELS, TRAINED, Files, Split, Tensor

SECONDS = 20.0  # of a collective; a deadlock fails
NAMES = ("checkpoint-1", "checkpoint-2")
OWN = ("node-0", "node-1", "node-2")
SHARED, BACKUP = "shared", "backup"
MANIFEST = "unified_checkpoint.json"
EQUAL = (0, 0, 0, 0)
VALUES = (EQUAL, (0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 0, 1), (1, 0, 1, 2), (0, 0, 1, 1))


@dataclass(frozen=True)
class Save:
    name: int
    shared: bool
    seed: int
    if_exists: str = "error"
    background: bool = False
    copies: int = 1
    step: int = 1
    compression: str = "none"
    values: tuple[int, ...] = EQUAL  # of each rank, in `extra`
    full_disk: tuple[int, int] | None = None  # rank, writes until its disk is full
    mistake: str = ""  # of the last rank


@dataclass(frozen=True)
class Load:
    name: int
    shared: bool
    verify: str = "read"
    turn: int = 0  # which node has which folders


@dataclass(frozen=True)
class Session:
    """One process group: the node of each rank, and the calls that they make with one Checkpointer.

    `splits`: how the ranks of the mesh hold each parameter.
    """

    nodes: tuple[int, ...]
    mesh: tuple[int, int]
    splits: tuple[Split, ...]
    calls: tuple[Save | Load, ...]


@dataclass(frozen=True)
class Saved:
    """A committed save, which lies in `groups` folders. `serial`: stored in its `extra`. `mesh`:
    its sizes of tensor and data parallelism.
    """

    serial: int
    seed: int
    step: int
    world: int
    groups: int
    copies: int
    compression: str = "none"
    mesh: tuple[int, int] = (1, 1)
    values: tuple[int, ...] = EQUAL

    def value(self, rank: int, mesh: tuple[int, int]) -> tuple[int, bool]:
        """What a rank of a mesh gets of values that may differ, and whether it is in its place.

        On another mesh, it is that of the data coordinate or, where it has none, of the lowest
        rank.
        """
        same_data = range(rank % mesh[1], self.world, mesh[1]) if mesh[1] == self.mesh[1] else ()
        saved = [rank] if mesh == self.mesh else same_data or range(self.world)
        held = {self.values[number] for number in saved}
        return (held.pop(), True) if len(held) == 1 else (self.values[0], False)

    def rank_extra(self, rank: int, mesh: tuple[int, int]) -> list[int] | None:
        """What a rank of a mesh gets: each rank of the save stored another value."""
        if mesh == self.mesh:
            return [rank, self.serial]
        if (1, mesh[1]) == self.mesh:  # one saved rank for each data coordinate
            return [rank % mesh[1], self.serial]
        return None


@dataclass(frozen=True)
class Folder:
    """A folder of a committed save, and its files at the commit."""

    saved: Saved
    group: int
    files: Files


SCALE = Tensor("model", "scale", "F32", (2,))  # on every rank
OF_ROWS = Tensor("optimizer", "rows/scale", "F32", ())  # on every rank, of what is cut
ROWS = Tensor("model", "rows", "F32", (8, 12))  # cut over every mesh dim
SHAPES = [(), (0, 3), (1,), (5,), (3, 4), (7, 2), (4, 6), (2, 3, 5)]
WIDE = [(6, 64), (3, 2, 130), (130,)]  # of parameters with masters and moments
LARGE = [(700, 400), (30, 9000)]  # more than one digest block, or tiles
MISTAKES = ("shape", "dtype", "step", "option", "extra", "name", "missing", "bytes", "call", "meta")
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, 4)]


@st.composite
def models(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Parameters, some with optimizer state and an average."""
    tensors = [SCALE, ROWS, OF_ROWS]
    for number in range(draw(st.integers(0, 3))):
        shape = draw(st.sampled_from(SHAPES if draw(st.integers(0, 5)) else LARGE))
        name = f"layers.{number}.w"
        tensors.append(Tensor("model", name, draw(st.sampled_from(sorted(DTYPES))), shape))
        if draw(st.booleans()):
            tensors.append(Tensor("optimizer", f"{name}/exp_avg", "F32", shape))
        if draw(st.booleans()):
            tensors.append(Tensor("ema", name, draw(st.sampled_from(["F32", "BF16"])), shape))
    if draw(st.booleans()):
        shape, name = draw(st.sampled_from(WIDE)), f"layers.0.{TRAINED}"
        tensors.append(Tensor("model", name, "BF16", shape))
        tensors.append(Tensor("master_weights", name, "F32", shape))
        tensors += [Tensor("optimizer", f"{name}/{state}", "F32", shape) for state in LEVELS]
    return tuple(tensors)


SPLITS = st.builds(
    Split,
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=2, unique_by=lambda cut: cut[0]
    ).map(tuple),
    st.sampled_from([None, None, None, 0, 1]),
)
SAVES = st.builds(
    Save,
    name=st.integers(0, 1),
    shared=st.booleans(),
    seed=st.integers(0, 5),
    if_exists=st.sampled_from(["error", "keep", "keep_complete", "replace", "replace"]),
    background=st.booleans(),
    copies=st.sampled_from([1, 2, 2, 3]),
    step=st.integers(1, 2),
    compression=st.sampled_from(["none", "lossless", "O1", "O2"]),
    values=st.sampled_from(VALUES),
)
LOADS = st.builds(
    Load,
    name=st.integers(0, 1),
    shared=st.booleans(),
    verify=st.sampled_from(["read", "read", "full"]),
    turn=st.integers(0, 2),
)


@st.composite
def sessions(draw: st.DrawFn, calls: st.SearchStrategy[Any], most: int = 3) -> Session:
    mesh = draw(st.sampled_from(MESHES))
    world = mesh[0] * mesh[1]
    nodes = tuple(draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)))
    cuts = tuple(draw(st.lists(SPLITS, min_size=3, max_size=3)))
    return Session(nodes, mesh, cuts, tuple(draw(st.lists(calls, min_size=1, max_size=most))))

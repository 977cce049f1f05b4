"""Drawn layouts over simulated nodes, and the tensors that each node holds."""

from __future__ import annotations

from math import prod

from hypothesis import HealthCheck, assume
from hypothesis import strategies as st

from tests.support.engine.reshard_cases import Case, cases, global_array
from tests.support.harness import DrawnLayout, DrawnTensor
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

SPECS = {
    "big": TensorSpec("F32", (160, 1690)),  # two digest blocks
    "odd": TensorSpec("BF16", (13, 7)),
    "wide": TensorSpec("F32", (3, 9000)),
    "line": TensorSpec("I64", (11,)),
    "empty": TensorSpec("F32", (0, 4)),
    "zero": TensorSpec("F32", ()),
    "flag": TensorSpec("BOOL", (5, 3)),
}
KEYS = [
    ("model", "big"),
    ("optimizer", "big/exp_avg"),
    *(("model", name) for name in SPECS if name != "big"),
    ("optimizer", "odd/exp_avg"),
]


def spec_of(fqn: str) -> TensorSpec:
    return SPECS[fqn.partition("/")[0]]


def cuts_of(layout: str, spec: TensorSpec, nodes: int, ranks: int) -> tuple[ShardDim, ...]:
    """Shard dims of a tensor on a mesh (nodes, ranks), row-major."""
    world, last = nodes * ranks, len(spec.shape) - 1
    if not spec.shape or 0 in spec.shape:
        return ()
    if layout == "whole on each node":
        return (ShardDim(0, ranks, 1),)
    if layout == "rows over nodes":
        return (ShardDim(0, world, 1),)
    if layout == "columns over nodes":
        return (ShardDim(last, world, 1),)
    if layout == "rows over nodes, columns inside":
        return (
            (ShardDim(0, nodes, ranks), ShardDim(last, ranks, 1))
            if last
            else (ShardDim(0, nodes, ranks),)
        )
    if (
        layout == "columns over nodes, rows inside, interleaved"
    ):  # TP over nodes, FSDP over the TP shards
        return (ShardDim(last, nodes, ranks), ShardDim(last, ranks, 1, 2))
    if layout == "padded":
        return (ShardDim(0, world, 1, 1, -(-spec.shape[0] // world) + 1),)
    raise AssertionError(layout)


LAYOUTS = [
    "whole on each node",
    "rows over nodes",
    "columns over nodes",
    "rows over nodes, columns inside",
    "columns over nodes, rows inside, interleaved",
    "padded",
    "stages",
]


def arranged(layout: str, nodes: int, ranks: int) -> DrawnLayout:
    world, tensors = nodes * ranks, []
    for number, (part, fqn) in enumerate(KEYS):
        spec = spec_of(fqn)
        if layout == "stages":  # each tensor on one node, cut over its ranks
            stage = number % nodes
            members = tuple(range(stage * ranks, (stage + 1) * ranks))
            cuts = (
                (ShardDim(0, ranks, 1),) if spec.shape and 0 not in spec.shape and ranks > 1 else ()
            )
            tensors.append(
                DrawnTensor(
                    TensorDecl(part, fqn, spec, Sharding(cuts, members if cuts else ())), members
                )
            )
            continue
        cuts = tuple(cut for cut in cuts_of(layout, spec, nodes, ranks) if cut.size > 1)
        tensors.append(
            DrawnTensor(TensorDecl(part, fqn, spec, Sharding(cuts)), tuple(range(world)))
        )
    return DrawnLayout(world, tuple(tensors))


def case_of(layout: str, nodes: int, ranks: int) -> Case:
    saved = arranged(layout, nodes, ranks)
    return Case(
        {
            tensor.decl.key: global_array(tensor.decl.key, tensor.decl.spec)
            for tensor in saved.tensors
        },
        saved,
    )


def places(nodes: int, ranks: int) -> list[int]:
    return [rank // ranks for rank in range(nodes * ranks)]


def run_count(layout: DrawnLayout) -> int:
    """The number of rows of all ranks' boxes: a load reads a row of a cut tensor by itself."""
    return sum(
        prod(box.shape[:-1])
        for tensor in layout.tensors
        for rank in tensor.ranks
        for box, _ in tensor.decl.sharding.boxes(rank, tensor.decl.spec.shape)
    )


@st.composite
def scattered(
    draw: st.DrawFn,
    *,
    max_world: int,
    max_tensors: int,
    max_nbytes: int = 800_000,
    max_runs: int | None = None,
) -> tuple[Case, list[int], list[tuple[list[int], list[int | None]]]]:
    """Draw a case; the node of each rank at the save; for each load, the node of each rank and the
    folder of each node, None where it is away.
    """
    case = draw(cases(max_world=max_world, max_tensors=max_tensors, loads=2, max_nbytes=max_nbytes))
    layouts = (case.saved, *case.loaded)
    assume(max_runs is None or max(map(run_count, layouts)) <= max_runs)
    most = draw(st.integers(1, 4))
    nodes = draw(
        st.lists(st.integers(0, most - 1), min_size=case.saved.world, max_size=case.saved.world)
    )
    loads = []
    for layout in case.loaded:
        nodes_of_ranks = draw(
            st.lists(st.integers(0, 3), min_size=layout.world, max_size=layout.world)
        )
        where = [
            draw(st.sampled_from([*sorted(set(nodes_of_ranks)) * 2, None])) for _ in set(nodes)
        ]
        loads.append((nodes_of_ranks, where))
    return case, nodes, loads


# By default the same small cases each time: scattered elements are read one by one, 60 µs each.
FEW = {"max_world": 4, "max_tensors": 2, "max_nbytes": 100_000, "max_runs": 2000}
FUNCTION_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

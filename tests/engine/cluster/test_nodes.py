"""Nodes without a shared folder: any nodes load a save while one copy of each slice is left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.cluster.node_cases import (
    FEW,
    FUNCTION_FIXTURE,
    LAYOUTS,
    arranged,
    case_of,
    places,
    scattered,
)
from tests.support.engine.cluster.simulated_nodes import (
    NAME,
    SAVE,
    Paths,
    fine,
    folder_of,
    gaps,
    load_case,
    on_node,
    save_case,
    states,
)
from tests.support.engine.reshard_cases import Case
from tests.support.harness import DrawnLayout, run_ranks
from tests.support.refusals import same_error
from unified_ckpt.core.planning import exchange
from unified_ckpt.core.text import format_ranks
from unified_ckpt.runtime.comm.comm import Comm

__all__ = ["states"]  # a fixture


def assign_folders(
    root: Path, folders: Sequence[int], nodes: int, *, shift: int = 0
) -> dict[int, Paths]:
    """Assign folders round-robin to the nodes of a load; a node may have an empty path."""
    paths: dict[int, Paths] = {}
    for node in range(nodes):
        local = [
            folder_of(root, folder)
            for i, folder in enumerate(folders)
            if (i + shift) % nodes == node
        ]
        paths[node] = local or [root / "nothing" / NAME]
    return paths


def check_pair(root: Path, layout: str, saved: tuple[int, int], loaded: tuple[int, int]) -> None:
    """Load with renumbered folders, with an empty node, and without each single folder."""
    case, nodes = case_of(layout, *saved), places(*saved)
    target, target_nodes = arranged(layout, *loaded), places(*loaded)
    folders = list(range(saved[0]))
    for shift in (0, 1):
        fine(
            load_case(
                case, target, target_nodes, assign_folders(root, folders, loaded[0], shift=shift)
            )
        )
    more = (loaded[0] + 1, loaded[1])
    fine(
        load_case(
            case,
            arranged(layout, *more),
            places(*more),
            assign_folders(root, folders, loaded[0]) | {loaded[0]: [root / NAME]},
        )
    )
    for away in folders if len(folders) > 1 else []:
        check_load(
            case,
            nodes,
            target,
            target_nodes,
            assign_folders(root, [f for f in folders if f != away], loaded[0]),
            away=[away],
        )


def check_load(
    case: Case,
    nodes: Sequence[int],
    target: DrawnLayout,
    target_nodes: Sequence[int],
    paths: dict[int, Paths],
    *,
    away: Sequence[int],
) -> bool:
    """Load without the folders `away`; return whether the others suffice.

    If not, every rank names the missing slices and the ranks that wrote them.
    """
    parts, unknown = gaps(case, nodes, sorted(set(nodes) - set(away)))
    outcomes = load_case(case, target, target_nodes, paths)
    if not parts and not unknown:
        fine(outcomes)
        return True
    if len(away) == len(set(nodes)):
        same_error(outcomes, uc.NotFoundError, "no such folder")
        return False
    text = str(same_error(outcomes, uc.IncompleteError, "is incomplete on the nodes present"))
    for part, fqn in parts[:10]:
        assert f"{part}:{fqn}: no node has [" in text
    for part in {part for part, _ in unknown}:
        assert (
            f"{part}: missing {sum(unknown_part == part for unknown_part, _ in unknown)} of "
            in text
        )
    wrote = format_ranks(rank for rank, node in enumerate(nodes) if node in away)
    assert f"are on no node present; rank(s) {wrote} of the save wrote them; add the nodes" in text
    return False


SIZES = [*product([1, 2, 3, 4], [1, 2])]
PAIRS = [((2, 2), (3, 1)), ((3, 1), (2, 2))]
DEFAULT = ("rows over nodes, columns inside", "padded")


@pytest.mark.incident("DeepSpeed#2319")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in LAYOUTS],
)
def test_save_by_some_nodes_and_load_by_others(tmp_path: Path, layout: str) -> None:
    for saved, loaded in PAIRS:
        root = tmp_path / f"{saved}"
        if not root.exists():
            save_case(case_of(layout, *saved), root, places(*saved))
        check_pair(root, layout, saved, loaded)


@pytest.mark.long
@pytest.mark.parametrize("saved", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_and_load_any_number_of_nodes(
    tmp_path: Path, layout: str, saved: tuple[int, int]
) -> None:
    save_case(case_of(layout, *saved), tmp_path, places(*saved))
    for loaded in SIZES:
        check_pair(tmp_path, layout, saved, loaded)


def test_replicas_are_stored_whole_and_rows_as_shards(tmp_path: Path) -> None:
    """A complete copy is stored under the tensor's name, shards under names with a range."""
    save_case(case_of("whole on each node", 2, 2), tmp_path / "whole", places(2, 2))
    save_case(case_of("rows over nodes", 2, 2), tmp_path / "rows", places(2, 2))
    for node in (0, 1):
        with (
            uc.open(folder_of(tmp_path / "whole", node)) as whole,
            uc.open(folder_of(tmp_path / "rows", node)) as rows,
        ):
            assert sorted(whole.parts) == ["model", "optimizer"]
            assert sorted(rows.parts) == [
                "model",
                "model_shards",
                "optimizer",
                "optimizer_shards",
            ]
            assert sorted(rows["model"]) == ["empty", "zero"]
            assert {name for name in rows["model_shards"] if name.startswith("big")} == {
                f"big@{low}:{low + 40}/160,0:1690/1690" for low in (80 * node, 80 * node + 40)
            }
        assert uc.verify(folder_of(tmp_path / "rows", node), deep=True).ok


def test_replica_of_which_a_node_has_a_part(tmp_path: Path) -> None:
    """The node of ranks 0 to 2 has one whole copy, and half of the next."""
    nodes, layout = [0, 0, 0, 1], uc.Layout({"dp": 2, "tp": 2}, {"w": {"tp": 0}})
    full = torch.arange(40_000.0).reshape(200, 200)

    def act(comm: Comm) -> None:
        local = full.chunk(2)[comm.rank % 2].clone()
        with on_node(comm, nodes) as checkpointer:
            path = folder_of(tmp_path, nodes[comm.rank])
            checkpointer.save(path, model={"w": local}, layout=layout)
            loaded = torch.zeros_like(local)
            checkpointer.load(path, model={"w": loaded}, layout=layout)
        assert torch.equal(loaded, local)

    run_ranks(4, act)
    shard = "w@100:200/200,0:200/200"
    for node, (part, name) in enumerate([("model", "w"), ("model_shards", shard)]):
        with uc.open(folder_of(tmp_path, node)) as opened:
            assert list(opened[part]) == [name]
            assert torch.equal(opened[part][name][...], full if node == 0 else full[100:])


# any arrangement


def check_scattered(
    root: Path,
    drawn: tuple[Case, list[int], list[tuple[list[int], list[int | None]]]],
    tile_nbytes: int,
    max_file_bytes: int,
) -> None:
    case, nodes, loads = drawn
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        save_case(
            case,
            Path(name),
            nodes,
            options=SAVE.model_copy(update={"max_file_bytes": max_file_bytes}),
        )
        numbers = sorted(set(nodes))
        for target, (target_nodes, where) in zip(case.loaded, loads, strict=True):
            paths: dict[int, Paths] = {}
            for node in set(target_nodes):
                folders = [
                    folder_of(Path(name), number)
                    for number, new_node in zip(numbers, where, strict=True)
                    if new_node == node
                ]
                paths[node] = folders or [Path(name) / "nothing" / NAME]
            away = [
                number for number, new_node in zip(numbers, where, strict=True) if new_node is None
            ]
            if len(numbers) == 1 and not away and len(set(target_nodes)) == 1:
                continue  # one folder of one node: see test_reshard.py
            check_load(case, nodes, target, target_nodes, paths, away=away)


TILES = st.sampled_from([64 << 10, 64 << 10, 16 << 20])
FILES = st.sampled_from([100_000, 1 << 30])


@given(scattered(**FEW), TILES, FILES)
@settings(max_examples=10, derandomize=True, suppress_health_check=FUNCTION_FIXTURE)
def test_any_ranks_on_any_nodes(
    tmp_path: Path,
    drawn: tuple[Case, list[int], list[tuple[list[int], list[int | None]]]],
    tile_nbytes: int,
    max_file_bytes: int,
) -> None:
    check_scattered(tmp_path, drawn, tile_nbytes, max_file_bytes)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@given(scattered(max_world=8, max_tensors=5), TILES, FILES)
@settings(max_examples=500, suppress_health_check=FUNCTION_FIXTURE)
def test_any_ranks_on_any_nodes_many_examples(
    tmp_path: Path,
    part: int,
    drawn: tuple[Case, list[int], list[tuple[list[int], list[int | None]]]],
    tile_nbytes: int,
    max_file_bytes: int,
) -> None:
    check_scattered(tmp_path, drawn, tile_nbytes, max_file_bytes)

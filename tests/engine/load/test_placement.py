"""`rank_extra` on another mesh: ranks that read the same data get equal values, or none do.

Meshes are those of Layouts without rules, as ranks are threads; the DTensor cases are in
`test_reshard.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import SAVE, folder_of, on_node
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.runtime.comm.comm import Comm

DATA = {"dp", "dp_shard", "fsdp"}
Mesh = dict[str, int]


@dataclass
class Position:
    """A position in the data, as of a data loader."""

    state: Any = "fresh"

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


@dataclass
class Combining(Position):
    """Loads the positions of any number of data coordinates."""

    arguments: list[Any] = field(default_factory=list)

    def load_from_ranks(self, saved: Sequence[Any], *, rank: int, world: int) -> None:
        self.arguments = [list(saved), rank, world]


def data_rank(rank: int, mesh: Mesh, data: set[str] = DATA) -> int:
    """The data coordinate of a rank of a row-major mesh, counted digit by digit."""
    digits = []
    for size in reversed(mesh.values()):
        rank, digit = divmod(rank, size)
        digits.insert(0, digit)
    result = 0
    for (name, size), digit in zip(mesh.items(), digits, strict=True):
        result = result * size + digit if name in data else result
    return result


def world_of(mesh: Mesh | int) -> int:
    if isinstance(mesh, int):
        return mesh
    world = 1
    for size in mesh.values():
        world *= size
    return world


def layout(mesh: Mesh | int) -> uc.Layout | None:
    return None if isinstance(mesh, int) else uc.Layout(mesh, rules={})


def save(
    path: Path,
    mesh: Mesh | int,
    rank_extra: Callable[[int], Any],
    extra: Callable[[int], Any] = lambda _: None,
) -> None:
    def act(comm: Comm) -> None:
        make_checkpointer(comm).save(
            path,
            model={"w": torch.arange(4.0)},
            extra=extra(comm.rank),
            rank_extra=rank_extra(comm.rank),
            layout=layout(mesh),
        )

    run_ranks(world_of(mesh), act)


def load(
    path: Path, mesh: Mesh | int, rank_extra: Callable[[int], Any] = lambda _: None, **more: Any
) -> list[uc.LoadReport]:
    def act(comm: Comm) -> uc.LoadReport:
        return make_checkpointer(comm).load(
            path,
            model={"w": torch.zeros(4)},
            rank_extra=rank_extra(comm.rank),
            layout=layout(mesh),
            **more,
        )

    return run_ranks(world_of(mesh), act)


PLACED: dict[str, tuple[Mesh, Mesh]] = {
    "unchanged": ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}),
    "a dim of one rank": ({"dp": 4}, {"dp": 4, "tp": 1}),
    "another order": ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}),
    "without tp": ({"dp": 2, "tp": 2}, {"dp": 2}),
    "with tp": ({"dp": 2}, {"dp": 2, "tp": 2}),
    "pp for tp": ({"dp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}),
    "two data dims": ({"dp": 4}, {"dp": 2, "dp_shard": 2}),
    "three dims": ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2}),
    "one rank": ({"tp": 2}, {"dp": 1}),
}


@pytest.mark.incident("VeOmni#853")
@pytest.mark.parametrize("case", PLACED)
def test_values_follow_data_coordinates(tmp_path: Path, case: str) -> None:
    saved, current = PLACED[case]
    save(
        tmp_path / "c",
        saved,
        lambda rank: {"loader": Position(data_rank(rank, saved)), "step": data_rank(rank, saved)},
        lambda rank: {"shared": 7, "scheduler": Position({"rate": data_rank(rank, saved)})},
    )
    positions = [Position() for _ in range(world_of(current))]
    reports = load(tmp_path / "c", current, lambda rank: {"loader": positions[rank]})
    expected = [data_rank(rank, current) for rank in range(world_of(current))]
    assert [position.state for position in positions] == expected
    assert [report.rank_extra["step"] for report in reports] == expected
    assert [report.extra["scheduler"]["rate"] for report in reports] == expected
    assert {report.extra["shared"] for report in reports} == {7}
    assert {(report.kept, report.notes) for report in reports} == {((), ())}
    count = len(set(expected))
    assert [report.data_coordinate for report in reports] == [(each, count) for each in expected]


KEPT: dict[str, tuple[Mesh | int, Mesh | int, str]] = {
    "less data": ({"dp": 4}, {"dp": 2, "tp": 2}, r"reads 2 instead of 4 shares of data"),
    "more data": ({"dp": 2, "tp": 2}, {"dp": 4}, r"mesh \(dp 2, tp 2\), loaded by mesh \(dp 4\)"),
    "an unknown dim": ({"dp": 4}, {"x": 4}, r"unknown which .* LoadOptions\(data_dims=...\)"),
    "another unknown dim": ({"x": 4}, {"dp": 2, "tp": 2}, r"saved by mesh \(x 4\)"),
    "no mesh any more": ({"dp": 4}, 4, r"or pass model= or layout= in the same load"),
    "no mesh before": (4, {"dp": 4}, r"saved by 4 rank\(s\), loaded by mesh \(dp 4\)"),
    "fewer ranks without a mesh": (4, {"dp": 2}, r"saved by 4 rank\(s\)"),
}


@pytest.mark.incident("torchtitan#811")
@pytest.mark.parametrize("case", KEPT)
def test_what_has_no_place_is_kept_and_named(tmp_path: Path, case: str) -> None:
    saved, current, text = KEPT[case]
    save(
        tmp_path / "c",
        saved,
        lambda rank: {"loader": Position(rank), "step": 7},
        lambda rank: {"rate": rank + 5},
    )
    positions = [Position() for _ in range(world_of(current))]
    reports = load(tmp_path / "c", current, lambda rank: {"loader": positions[rank]})
    assert {position.state for position in positions} == {"fresh"}
    for report in reports:
        assert (report.rank_extra, report.kept) == (None, ("rank_extra.loader",))
        assert report.extra == {"rate": 5}
        kept, differing, values = report.notes
        assert kept.startswith("rank_extra.loader: left unchanged: saved by ")
        assert differing.startswith("extra.rate: differed between the ranks of the save: saved by ")
        assert values.startswith("rank_extra is not restored: saved by ")
        for note in (kept, differing, values):
            assert re.search(text, note)


@pytest.mark.incident("Megatron-LM#7413")
def test_different_values_of_peers_are_kept_on_all_ranks(tmp_path: Path) -> None:
    """The peers of data rank 0 agree and could be placed; then only these would read on."""
    saved = {"dp": 2, "tp": 2}
    save(
        tmp_path / "c",
        saved,
        lambda rank: {"loader": Position(rank if rank > 1 else 0), "equal": Position(rank // 2)},
    )
    objects = [{"loader": Position(), "equal": Position()} for _ in range(2)]
    reports = load(tmp_path / "c", {"dp": 2}, lambda rank: objects[rank])
    assert [item["loader"].state for item in objects] == ["fresh", "fresh"]
    assert [item["equal"].state for item in objects] == [0, 1]
    for rank, report in enumerate(reports):
        assert report.kept == ("rank_extra.loader",)
        assert report.rank_extra == {"loader": None, "equal": rank}
        (note,) = report.notes
        assert "ranks that read the same data saved different values" in note


def test_values_that_only_some_peers_stored(tmp_path: Path) -> None:
    """Only the first rank of each tensor-parallel group has a loader."""
    saved = {"dp": 2, "tp": 2}
    save(tmp_path / "c", saved, lambda rank: None if rank % 2 else {"loader": Position(rank)})
    positions = [Position() for _ in range(4)]
    reports = load(tmp_path / "c", {"tp": 2, "pp": 1, "dp": 2, "cp": 1}, lambda _: None)
    assert [report.rank_extra for report in reports] == [{"loader": 0}, {"loader": 2}, None, None]
    load(
        tmp_path / "c",
        {"dp": 2},
        lambda rank: {"loader": positions[rank]},
    )
    assert [position.state for position in positions] == [0, 2, "fresh", "fresh"]


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        ({"dp": 4, "tp": 2}, {"dp": 2, "tp": 2}),
        ({"tp": 2, "dp": 2}, {"dp": 3}),
        ({"dp": 2}, {"dp": 4, "pp": 2}),
    ],
)
def test_objects_that_combine_states(tmp_path: Path, saved: Mesh, current: Mesh) -> None:
    """They get one state of each data coordinate, and their own coordinate."""
    save(tmp_path / "c", saved, lambda rank: {"loader": Combining(10 + data_rank(rank, saved))})
    objects = [Combining() for _ in range(world_of(current))]
    reports = load(tmp_path / "c", current, lambda rank: {"loader": objects[rank]})
    counts = [
        len({data_rank(rank, mesh) for rank in range(world_of(mesh))}) for mesh in (saved, current)
    ]
    for rank, item in enumerate(objects):
        states = [10 + coordinate for coordinate in range(counts[0])]
        assert item.arguments == [states, data_rank(rank, current), counts[1]]
        assert reports[rank].kept == ()


def test_state_that_no_rank_of_a_coordinate_stored(tmp_path: Path) -> None:
    """Whoever combines the states reads it, and learns of which coordinate it lacks."""
    save(
        tmp_path / "c",
        {"dp": 3},
        lambda rank: {"loader": Combining(rank)} if rank != 1 else {"other": 1},
    )
    text = r"rank_extra\.loader: .*no state for data coordinate 1 of 3: rank\(s\) 1 stored none"
    with pytest.raises(uc.CheckpointError, match=text):
        load(tmp_path / "c", {"dp": 1}, lambda _: {"loader": Combining()})


def test_states_that_cannot_be_combined(tmp_path: Path) -> None:
    """Peers of one coordinate stored different states: all ranks know before a tensor changes."""
    save(tmp_path / "c", {"dp": 3, "tp": 2}, lambda rank: {"loader": Combining(max(rank, 3))})
    objects = [Combining() for _ in range(2)]
    reports = load(tmp_path / "c", {"dp": 2}, lambda rank: {"loader": objects[rank]})
    assert [item.arguments for item in objects] == [[], []]
    assert {report.kept for report in reports} == {("rank_extra.loader",)}


def test_values_that_differ_between_peers_are_unplaced(tmp_path: Path) -> None:
    """Of the ranks that read the same data, 0 and 1 stored equal values, 2 and 3 did not."""
    save(tmp_path / "c", {"dp": 2, "tp": 2}, lambda _: None, lambda rank: {"rate": max(rank, 1)})
    for rank, report in enumerate(load(tmp_path / "c", {"dp": 2})):
        assert report.extra == {"rate": 1}
        notes = [note for note in report.notes if note.startswith("extra.rate: differed")]
        assert len(notes) == rank


def test_param_groups_of_each_rank_return_to_it(tmp_path: Path) -> None:
    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = torch.nn.ParameterDict({name: torch.ones(2) for name in "abc"})
        groups = [{"params": [module["a"], module["b"]]}, {"params": [module["c"]], "lr": 9.0}]
        return module, torch.optim.SGD(groups, lr=1.0)

    def act(comm: Comm) -> list[float]:
        checkpointer, mesh = make_checkpointer(comm), layout({"dp": 2})
        module, optimizer = job()
        optimizer.param_groups[0]["lr"] = 0.5 + comm.rank
        checkpointer.save(tmp_path / "c", model=module, optimizer=optimizer, layout=mesh)
        module, optimizer = job()
        checkpointer.load(tmp_path / "c", model=module, optimizer=optimizer, layout=mesh)
        return [group["lr"] for group in optimizer.param_groups]

    assert run_ranks(2, act) == [[0.5, 9.0], [1.5, 9.0]]


@pytest.mark.parametrize("value", ["list", "dict", "number"])
def test_tensors_in_state_of_a_shard_need_its_layout(tmp_path: Path, value: str) -> None:
    """Values have no layout, so that a load by other ranks refuses those with tensors."""

    def act(comm: Comm) -> Any:
        mesh = uc.Layout({"tp": comm.world}, {"w": {"tp": 0}})
        module = torch.nn.ParameterDict({"w": torch.ones(8 // comm.world)})
        optimizer = torch.optim.SGD(module.values(), lr=1.0)
        past = {"list": [torch.full((2,), comm.rank)], "number": comm.rank}
        past["dict"] = {"a": torch.full((2,), comm.rank)}
        if comm.world == 4:
            optimizer.state[module["w"]]["past"] = past[value]
        call = make_checkpointer(comm).save if comm.world == 4 else make_checkpointer(comm).load
        call(tmp_path / "c", model=module, optimizer=optimizer, layout=mesh)
        return optimizer.state[module["w"]].get("past")

    run_ranks(4, act)
    if value == "number":
        assert run_ranks(2, act) == [0, 0]
    else:
        with pytest.raises(uc.MismatchError, match="w/past: each rank of the save held other"):
            run_ranks(2, act)


@pytest.mark.incident("Megatron-LM#6858")
def test_random_states_of_peers_stay_equal(tmp_path: Path) -> None:
    """A data coordinate that existed gets its state, a new one keeps its seed."""

    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    save(tmp_path / "c", {"dp": 2}, lambda rank: {"g": generator(rank)})
    for current in ({"dp": 4, "tp": 2}, {"tp": 2, "dp": 4}, {"dp": 2, "tp": 2}):
        expected = [data_rank(rank, current) for rank in range(world_of(current))]
        targets = [generator(100 + each) for each in expected]
        reports = load(tmp_path / "c", current, lambda rank, made=targets: {"g": made[rank]})
        seeds = [target.initial_seed() for target in targets]
        assert seeds == [each if each < 2 else 100 + each for each in expected]
        kept = ("rank_extra.g",) if current["dp"] == 4 else ()
        assert {report.kept for report in reports} == {kept}


def test_random_states_of_the_process(tmp_path: Path) -> None:
    """One by one, as threads share them: `uc.RandomStates` follows the rule of generators."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        save(tmp_path / "c", {"tp": 2}, lambda _: {"random": uc.RandomStates()})
        expected = float(torch.rand(()))
        for current in ({"dp": 2, "tp": 2}, {"dp": 1, "pp": 2}):
            for rank in range(world_of(current)):
                torch.manual_seed(9)
                fresh = float(torch.rand(()))
                torch.manual_seed(9)
                load(
                    tmp_path / "c",
                    current,
                    lambda each, rank=rank: {
                        "random": uc.RandomStates() if each == rank else Position()
                    },
                )
                is_new = data_rank(rank, current) > 0
                assert float(torch.rand(())) == (fresh if is_new else expected)


def test_override_of_data_dims(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": 2, "y": 2}, lambda rank: {"loader": Position(rank % 2)})
    positions = [Position() for _ in range(2)]
    options = uc.LoadOptions(data_dims=("y", "dp"))
    reports = load(
        tmp_path / "c", {"dp": 2}, lambda rank: {"loader": positions[rank]}, options=options
    )
    assert [position.state for position in positions] == [0, 1]
    assert {report.kept for report in reports} == {()}


def test_load_without_tensors_takes_the_mesh_of_a_layout(tmp_path: Path) -> None:
    """The mesh of a load is that of its tensors. Without any, a Layout without rules has it."""
    saved = {"dp": 2, "tp": 2}
    save(tmp_path / "c", saved, lambda rank: rank // 2)

    def act(comm: Comm, mesh: Mesh | None) -> uc.LoadReport:
        given = None if mesh is None else layout(mesh)
        return make_checkpointer(comm).load(tmp_path / "c", layout=given)

    reports = run_ranks(4, lambda comm: act(comm, None))
    for report in reports:
        assert report.rank_extra is None
        assert "or pass model= or layout= in the same load, for its mesh" in report.notes[0]
    for mesh, expected in ((saved, [0, 0, 1, 1]), ({"tp": 2, "dp": 2}, [0, 1, 0, 1])):
        reports = run_ranks(4, lambda comm, mesh=mesh: act(comm, mesh))
        assert [report.rank_extra for report in reports] == expected


def test_mesh_of_node_groups_survives_a_merge_and_a_conversion(tmp_path: Path) -> None:
    """Every folder of a save records it, as any of them may be the one that is read."""
    saved, nodes = {"tp": 2, "dp": 2}, [0, 0, 1, 1]

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            checkpointer.save(
                folder_of(tmp_path, nodes[comm.rank]),
                model={"w": torch.arange(4.0)},
                rank_extra=comm.rank % 2,
                layout=layout(saved),
                options=SAVE,
            )

    run_ranks(4, act)
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    merged, converted = tmp_path / "merged", tmp_path / "converted"
    uc.convert(folders, merged)
    uc.convert(merged, converted)
    current = {"dp": 2, "tp": 2}
    for path in (folders[::-1], merged, converted):
        assert [report.rank_extra for report in load(path, current)] == [0, 0, 1, 1]


def test_unchanged_mesh_reads_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another mesh, a rank reads the entries of its peers only."""
    saved = {"dp": 2, "tp": 2}
    save(tmp_path / "c", saved, lambda rank: {"loader": Position(rank // 2)})
    read: list[int] = []
    original = Folder.rank_extra
    monkeypatch.setattr(
        Folder, "rank_extra", lambda self, rank: (read.append(rank), original(self, rank))[1]
    )
    for current, expected in (
        (saved, [0, 1, 2, 3]),
        ({"tp": 2, "dp": 2}, [0, 1, 2, 3]),
        ({"dp": 2}, [0, 1, 2, 3]),
        ({"dp": 2, "pp": 3}, sorted([0, 1, 2, 3] * 3)),
    ):
        read.clear()
        load(tmp_path / "c", current, lambda _: {"loader": Position()})
        assert sorted(read) == expected


def test_data_dims_must_be_the_same_on_all_ranks(tmp_path: Path) -> None:
    save(tmp_path / "c", {"dp": 2}, lambda rank: rank)

    def act(comm: Comm) -> None:
        options = uc.LoadOptions(data_dims=("dp",) if comm.rank else None)
        make_checkpointer(comm).load(tmp_path / "c", model={"w": torch.zeros(4)}, options=options)

    with pytest.raises(uc.LayoutError, match="data_dims is not the same on all ranks"):
        run_ranks(2, act)

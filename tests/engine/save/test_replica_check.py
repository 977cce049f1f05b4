"""Replicas that differ: at the first save of a layout, later, and of what no layout makes right."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.engine.cluster.simulated_nodes import on_node
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.manager.managers import manager_of
from tests.support.refusals import same_error
from unified_ckpt.engine.save import replica_check
from unified_ckpt.format.events import SaveEvent, parse_events
from unified_ckpt.runtime.comm.comm import Comm

WORLD = 3
LAYOUT = uc.Layout({"tp": WORLD}, {"w": {"tp": 0}})
QUICK = uc.SaveOptions(fsync=False, timeout_seconds=30.0)
WAYS = ("save", "async", "lazy", "nodes", "nodes async")
Change = Callable[["Job", int], object]  # of the job of a rank


class Job:
    """What a rank trains: `w` is sharded, everything else is replicated."""

    def __init__(self) -> None:
        self.model = nn.Module()
        for name, shape in {"w": (4, 8), "norm": (16,), "big": (200, 100)}.items():
            self.model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.model.register_buffer("mean", torch.zeros(()))
        self.model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.state: Any = {name: {} for name in ("w", "norm", "big")}
        self.state["w"] = {"scale": torch.zeros(()), "codes": torch.zeros(4, 8)}
        self.state["norm"] = {"exp_avg": torch.zeros(16)}
        self.optimizer.state.update({getattr(self.model, n): s for n, s in self.state.items()})
        self.ema = {"norm": torch.zeros(16), "big": torch.zeros(200, 100)}

    def save(
        self, checkpointer: uc.Checkpointer, path: Path, way: str, options: uc.SaveOptions
    ) -> uc.SaveReport:
        arguments: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "parts": {"ema": self.ema},
            "layout": LAYOUT,
            "options": options,
        }
        if way in ("save", "nodes"):
            return checkpointer.save(path, **arguments)
        pending = checkpointer.save_async(path, **arguments, lazy=way == "lazy")
        if way != "lazy":
            self.train()
        return pending.result()

    @torch.no_grad()
    def train(self) -> None:
        """Change all tensors alike, as training does while a save is written."""
        for tensor in (*self.model.state_dict().values(), *self.ema.values()):
            tensor.add_(1)
        for state in self.state.values():
            for tensor in state.values():
                tensor.add_(1)


def part_of(job: Job, name: str) -> torch.Tensor:
    part, _, fqn = name.partition(":")
    if part == "optimizer":
        param, _, state = fqn.partition("/")
        return job.state[param][state]
    return job.model.state_dict()[fqn] if part == "model" else job.ema[fqn]


@torch.no_grad()
def drift(name: str) -> Change:
    """Ranks 1 and 2 move away from rank 0."""
    return lambda job, rank: part_of(job, name).reshape(-1)[:1].add_(rank * (rank + 1) // 2)


def save_often(
    root: Path, changes: Sequence[Sequence[Change]], way: str = "save", **options: Any
) -> list[list[uc.SaveReport | uc.CheckpointError]]:
    """Save once for each of `changes`, which come first; return the results by save and rank."""
    nodes = [0, 0, 1] if way.startswith("nodes") else [0] * WORLD

    def act(comm: Comm) -> list[uc.SaveReport | uc.CheckpointError]:
        job, results = Job(), list[uc.SaveReport | uc.CheckpointError]()
        with on_node(comm, nodes) as checkpointer:
            for number, of_save in enumerate(changes, 1):
                with torch.no_grad():
                    for change in of_save:
                        change(job, comm.rank)
                path = root / f"node-{nodes[comm.rank]}" / f"c{number}"
                try:
                    asked = QUICK.model_copy(update=options)
                    results.append(job.save(checkpointer, path, way, asked))
                except uc.CheckpointError as error:
                    results.append(error)
        return results

    for node in set(nodes):
        (root / f"node-{node}").mkdir(parents=True, exist_ok=True)
    return [list(of_save) for of_save in zip(*run_ranks(WORLD, act), strict=True)]


def differing(reports: Sequence[object]) -> list[str]:
    """Return the names of the tensors that all ranks report."""
    names = []
    for report in reports:
        assert isinstance(report, uc.SaveReport), report
        names.append([difference.tensor for difference in report.replica_differences])
    assert names == [names[0]] * len(names)
    return names[0]


def manifest(folder: Path) -> Any:
    return json.loads((folder / "unified_checkpoint.json").read_text())


REPLICATED = ["model:norm", "model:mean", "model:count", "optimizer:norm/exp_avg", "model:big"]
ALWAYS_EQUAL = ["optimizer:w/scale", "ema:norm", "ema:big"]


@pytest.mark.incident("flashoptim#3")
@pytest.mark.parametrize("way", WAYS)
def test_difference_that_no_layout_makes_right_is_an_error(tmp_path: Path, way: str) -> None:
    """Whichever save finds it; equal zeros at the first save prove nothing."""

    def mend(job: Job, rank: int) -> None:
        for name in ALWAYS_EQUAL:
            part_of(job, name).zero_()

    changes = [[mend, drift(name)] for name in ALWAYS_EQUAL]
    results = save_often(tmp_path, [[], [], *changes, [mend]], way)
    for name, errors in zip(ALWAYS_EQUAL, results[2:], strict=False):
        text = (
            rf"^rank 0: replicas hold different bytes \(1\):\n  {name}: rank\(s\) 0 differ from "
            r"rank\(s\) 1 differ from rank\(s\) 2\n  expected equal bytes: .*Declare"
        )
        same_error(errors, uc.LayoutError, text)
    assert [differing(results[number]) for number in (0, 1, -1)] == [[], [], []]
    folders = {path.name for node in tmp_path.iterdir() for path in node.iterdir()}
    assert folders == {"c1", "c2", "c6"}


@pytest.mark.parametrize("way", WAYS)
def test_later_difference_is_recorded(
    tmp_path: Path,
    way: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The save is kept: report, manifest, `inspect` and one warning name tensors and distances.

    A save compares large tensors less often, and knows no distance of theirs.
    """
    results = save_often(tmp_path, [[], [drift(name) for name in REPLICATED], [], []], way)
    found = [sorted(differing(reports)) for reports in results]
    small = [name for name in sorted(REPLICATED) if name != "model:big"]
    assert found == [[], sorted(REPLICATED), small, sorted(REPLICATED)]
    report = results[1][0]
    assert isinstance(report, uc.SaveReport)
    for difference in report.replica_differences:
        assert (difference.ranks, difference.copies) == ([[0], [1], [2]], 3)
        is_large = difference.tensor == "model:big"
        assert difference.max_difference == (None if is_large else 3.0)
    for folder in tmp_path.glob("*/c2"):
        records = [difference.model_dump() for difference in report.replica_differences]
        assert manifest(folder)["replica_differences"] == records
        assert uc.verify(folder, deep=True).ok
        text = " ".join(run_verb(capsys, "inspect", folder).split())
        assert (
            f"differed between ranks: {', '.join(record['tensor'] for record in records)}" in text
        )
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    text = (
        "model:norm: rank(s) 0 differ from rank(s) 1 differ from rank(s) 2; largest difference: 3"
    )
    assert text in warnings[0]


def test_first_save_of_a_layout_refuses_differences(tmp_path: Path) -> None:
    """Until one has succeeded, and in the background too."""
    for way in WAYS:
        results = save_often(
            tmp_path / way, [[drift("model:norm")], [], [drift("model:norm")]], way
        )
        for reports in results:
            same_error(reports, uc.LayoutError, r"model:norm: rank\(s\) 0 differ from")


def test_large_replicas_are_compared_at_saves_1_2_4_8(tmp_path: Path) -> None:
    results = save_often(tmp_path, [[], [drift("model:big")], *[[] for _ in range(7)]])
    assert [number for number, reports in enumerate(results, 1) if differing(reports)] == [2, 4, 8]


@pytest.mark.parametrize("name", ["model:norm", "model:big", "ema:big"])
def test_check_replicas_always_and_never(tmp_path: Path, name: str) -> None:
    changes: list[list[Change]] = [[], [], [drift(name)]]
    results = save_often(tmp_path / "always", changes, check_replicas="always")
    assert [differing(reports) for reports in results[:2]] == [[], []]
    same_error(results[2], uc.LayoutError, rf"{name}: rank\(s\) 0 differ from")
    results = save_often(tmp_path / "never", [[drift(name)], []], check_replicas="never")
    assert [differing(reports) for reports in results] == [[], []]


@pytest.mark.parametrize("kept_nbytes", [0, 1 << 20])
def test_many_differences_are_named_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_nbytes: int
) -> None:
    """The first by name, whichever rank has them; distances only of what is kept and is sent."""
    monkeypatch.setattr(replica_check, "_MAX_NAMED", 3)
    monkeypatch.setattr(replica_check, "_VALUES_NBYTES", 20)
    monkeypatch.setattr(replica_check, "KEPT_NBYTES", kept_nbytes)
    model = {f"n{number}": torch.zeros(2) for number in range(9)} | {"o": torch.zeros(99)}

    def act(comm: Comm) -> list[Any]:
        own = {name: tensor.clone() for name, tensor in model.items()}
        with on_node(comm, [0] * WORLD) as checkpointer:
            checkpointer.save(tmp_path / "c1", model=own, options=QUICK)
            for name in {1: ("n5", "n6", "n7", "n8", "o"), 2: ("n8", "n6", "n2")}.get(
                comm.rank, ()
            ):
                own[name][1] = comm.rank if name != "n6" else torch.nan
            report = checkpointer.save(tmp_path / "c2", model=own, options=QUICK)
        return [difference.model_dump() for difference in report.replica_differences]

    names = ["model:n2", "model:n5", "model:n6"]
    copies = [[[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]]]
    distances = [2.0, 1.0, None] if kept_nbytes else [None] * 3
    records = [
        {"tensor": name, "ranks": ranks, "copies": 2, "max_difference": distance}
        for name, ranks, distance in zip(names, copies, distances, strict=True)
    ]
    assert run_ranks(WORLD, act) == [records] * WORLD


DTYPES = [
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int8,
    torch.complex64,
]


@dataclass(frozen=True)
class Form:
    """How a rank holds a tensor of two rows in memory."""

    name: str
    make: Callable[[torch.Tensor], torch.Tensor]


FORMS = [
    Form("row-major", lambda tensor: tensor.contiguous()),
    Form("column-major", lambda tensor: tensor.t().contiguous().t()),
    Form("every second", lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2]),
]


@pytest.mark.parametrize("shape", [(2, 3), (2, 30_000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_are_compared_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Whatever their dtype and strides are; each rank has its own strides."""
    nbytes = dtype.itemsize * shape[0] * shape[1]
    whole = (torch.arange(nbytes) % 2).to(torch.uint8).view(dtype).reshape(shape)

    def act(comm: Comm) -> None:
        model = {"w": FORMS[comm.rank].make(whole), "z": torch.ones(3)}
        with on_node(comm, [0] * WORLD) as checkpointer:
            checkpointer.save(tmp_path / "c1", model=model, options=QUICK)
            if comm.rank == 2:
                model["w"] = model["w"].clone()
                model["w"].view(torch.uint8)[1, -1] ^= 1
            options = QUICK.model_copy(update={"check_replicas": "always"})
            checkpointer.save(tmp_path / "c2", model=model, options=options)

    text = r"\(1\):\n  model:w: rank\(s\) 0-1 differ from rank\(s\) 2\n"
    same_error(list(try_ranks(WORLD, act)), uc.LayoutError, text)
    assert [path.name for path in tmp_path.iterdir()] == ["c1"]


def test_manager_records_differences_as_events(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        norm = torch.zeros(4)
        with manager_of(comm, tmp_path) as manager:
            for step in (1, 2):
                norm += comm.rank * (step - 1)
                manager.save(step, model={"norm": norm}, force=True)

    run_ranks(2, act)
    lines = (tmp_path / "unified_events.jsonl").read_bytes().splitlines()
    events = [event for event in parse_events(lines) if isinstance(event, SaveEvent)]
    assert [len(event.replica_differences) for event in events] == [0, 1]
    assert events[1].replica_differences[0].tensor == "model:norm"
    assert events[1].replica_differences[0].max_difference == 1.0


def test_tensors_that_ranks_hold_in_other_dtypes(tmp_path: Path) -> None:
    """The ranks order them by the sizes of elements in memory, and compare them by name."""

    def act(comm: Comm) -> None:
        model = {name: torch.full((4,), 1.5) for name in ("a", "b", "c")}
        if comm.rank == 1:
            model["a"] = model["a"].bfloat16()
        options = QUICK.model_copy(update={"model_dtype": "bfloat16"})
        make_checkpointer(comm).save(tmp_path / "c", model=model, options=options)

    text = r"replicas hold different bytes \(1\):\n  model:a: rank\(s\) 0 differ from rank\(s\) 1"
    same_error(try_ranks(2, act), uc.LayoutError, text)

"""A save under random options, a check of its files, and a load on another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.harness import make_checkpointer, try_ranks
from tests.support.options.oracle import (
    Stored,
    check_folder,
    differences,
    loaded,
    refusals_of_save,
    stored_by_save,
    viewed,
)
from tests.support.options.states import (
    FLOATS,
    MESHES,
    Cut,
    Tensors,
    WholeState,
    draw_cut,
    draw_state,
)
from tests.support.options.strategies import Surroundings, valid_options
from unified_ckpt.runtime.comm.comm import Comm

PARTS = ("model", "master_weights", "optimizer", "ema")
NAME = "checkpoint-1"


def surroundings(folder: Path) -> Surroundings:
    return Surroundings(str(folder), str(folder / "base"), PARTS)


def agreed_error(outcomes: list[Any]) -> uc.CheckpointError | None:
    """Return the error that all ranks raise, or None if none does."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return None
    for error in errors:
        if not isinstance(error, uc.CheckpointError):
            raise error
    assert len(errors) == len(outcomes), f"only some ranks failed: {outcomes}"
    assert len({(type(error), str(error)) for error in errors}) == 1, f"they differ: {errors}"
    return errors[0]


@dataclass(frozen=True)
class Case:
    """A drawn state, its layout and the nodes of its ranks; None: one folder for all."""

    random: Random
    folder: Path
    state: WholeState
    cut: Cut
    nodes: tuple[int, ...] | None

    def path(self, rank: int, name: str = NAME) -> Path:
        where = "shared" if self.nodes is None else f"node-{self.nodes[rank]}"
        return self.folder / where / name

    def on_ranks(self, world: int, act: Callable[[uc.Checkpointer, Comm], Any]) -> list[Any]:
        """Call on ranks that are threads; return what each returned or raised."""

        def call(comm: Comm) -> Any:
            node = None if self.nodes is None else f"node {self.nodes[comm.rank]}"
            with make_checkpointer(comm, node=node) as checkpointer:
                return act(checkpointer, comm)

        return try_ranks(world, call)

    def save(self, options: uc.SaveOptions, way: str = "save") -> list[Any]:
        def act(checkpointer: uc.Checkpointer, comm: Comm) -> uc.SaveReport:
            arguments = self.cut.arguments(self.state.parts, comm.rank)
            if self.state.has_rank_extra:
                arguments["rank_extra"] = {"rank": comm.rank}
            extra = {"rank": comm.rank} if self.state.differs else self.state.extra
            arguments |= {"extra": extra, "step": 7, "options": options}
            path = self.path(comm.rank)
            if way == "save":
                return checkpointer.save(path, **arguments)
            return checkpointer.save_async(path, **arguments).result()

        return self.on_ranks(self.cut.world, act)


def draw_case(random: Random, folder: Path) -> Case:
    state = draw_state(random)
    cut = draw_cut(random, state.parts["model"])
    nodes = None
    if cut.world > 1 and random.random() < 0.25:
        nodes = tuple(sorted(random.randrange(2) for _ in range(cut.world)))
        nodes = nodes if len(set(nodes)) == 2 else (0, *[1] * (cut.world - 1))
    return Case(random, folder, state, cut, nodes)


def tree(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_save(case: Case, share: float) -> str:
    """Save under random options, over what was there; check the folder; load it."""
    random, state = case.random, case.state
    around = surroundings(case.folder)
    before = random.choice((None, None, "same", "incomplete"))
    if before is not None:
        first = case.save(uc.SaveOptions(fsync=False))
        assert agreed_error(first) is None, first
        if before == "incomplete":
            for rank in range(case.cut.world):
                (case.path(rank) / "unified_checkpoint.json").unlink(missing_ok=True)
    options = valid_options(uc.SaveOptions, random, around, share=share)
    way = random.choice(("save", "save", "async"))  # a lazy copy waits for an optimizer's step
    files = tree(case.folder)
    expected = expected_refusals(case, options, before)
    outcomes = case.save(options, way)
    error = agreed_error(outcomes)
    if error is not None:
        assert expected, f"refused: {error}"
        assert any(text in str(error) for text in expected), (expected, error)
        assert tree(case.folder) == files, "a refused save changed files"
        return "save refused"
    assert not expected, f"expected an error with {expected!r}"
    reports: list[uc.SaveReport] = outcomes
    stored = stored_by_save(state, options)
    if reports[0].existed:
        assert options.if_exists in ("keep", "keep_complete"), options.if_exists
        assert before == "same"
        stored = stored_by_save(state, uc.SaveOptions())
    check_saved(case, stored, options, existed=reports[0].existed)
    return load_saved(case, stored, share)


def expected_refusals(case: Case, options: uc.SaveOptions, before: str | None) -> list[str]:
    """Return words of the documented errors of a save; any of them may be raised."""
    has_extra = case.state.extra is not None or case.state.has_rank_extra
    refusals = refusals_of_save(case.state, options, has_extra=has_extra)
    if before == "same" and options.if_exists == "error":
        refusals.append("holds a committed checkpoint")
    if case.state.differs and case.cut.world > 1 and options.check_replicas == "always":
        refusals.append("ranks hold different values")
    nodes = len(set(case.nodes or (0,)))
    if nodes > 1 and options.node_copies > nodes:
        refusals.append("use more nodes or fewer copies")
    return refusals


def check_saved(case: Case, stored: Stored, options: uc.SaveOptions, *, existed: bool) -> None:
    """Check every folder of a save: digests, the files themselves, and that nothing else stays."""
    for path in {case.path(rank) for rank in range(case.cut.world)}:
        problems = uc.verify(path, deep=True).problems
        assert not problems, problems
        hidden = [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")]
        assert not hidden, hidden
        if case.nodes is None:
            check_folder(path, stored, None if existed else options.max_file_bytes)


def load_saved(case: Case, stored: Stored, share: float) -> str:
    """Load what was saved on another layout, under random options, and compare every element."""
    random, around = case.random, surroundings(case.folder)
    options = valid_options(uc.LoadOptions, random, around, share=share)
    view = viewed(stored, options.source)
    targets = draw_targets(random, view)
    whole = {
        name.partition("/")[0]: tensor
        for part in ("optimizer", "ema", "master_weights", "model")
        for name, tensor in targets.get(part, {}).items()
        if not name.endswith("/step")
    }
    is_same = random.random() < 0.3 and whole.keys() == case.state.parts["model"].keys()
    meshes = MESHES if case.nodes is None else (dict(case.cut.mesh),)
    cut = case.cut if is_same else draw_cut(random, whole, meshes)
    strict = random.random() < 0.8
    right = loaded(view, targets, options, strict=strict)

    def act(checkpointer: uc.Checkpointer, comm: Comm) -> tuple[uc.LoadReport, dict[str, Any]]:
        arguments = cut.arguments(targets, comm.rank)
        results[comm.rank] = arguments
        path = case.path(comm.rank)
        return checkpointer.load(path, options=options, strict=strict, **arguments)

    results: dict[int, dict[str, Any]] = {}
    reports = case.on_ranks(cut.world, act)
    error = agreed_error(reports)
    if error is not None:
        assert right.refusals, f"not loaded: {error}"
        assert any(text in str(error) for text in right.refusals), (right.refusals, error)
    else:
        assert not right.refusals, f"expected a refusal: {right.refusals}"
    for rank, arguments in results.items():
        local = cut.arguments(right.values, rank)
        for part in right.values:
            actual, expected = part_of(arguments, part), part_of(local, part)
            wrong = list(differences(view, part, expected, actual))
            assert not wrong, f"rank {rank}: {wrong}"
    if error is not None:
        return "load refused"
    for rank, report in enumerate(reports):
        assert report.step == 7
        extra = {"rank": rank} if case.state.differs else case.state.extra
        if not case.state.differs or (cut is case.cut and not options.data_dims):
            assert same(report.extra, extra), report.extra
    return "loaded"


def part_of(arguments: Mapping[str, Any], part: str) -> Tensors:
    return arguments["parts"][part] if part == "ema" else arguments[part]


def draw_targets(random: Random, stored: Stored) -> dict[str, Tensors]:
    """Draw targets: some of the stored parts, perhaps one that is not stored, in any dtype."""
    names = {part: set(tensors) for part, tensors in stored.parts.items()}
    weights = names.pop("model_without_masters", set()) | names.get("master_weights", set())
    names["model"] = names.get("model", set()) | weights
    if random.random() < 0.3:
        names.setdefault("master_weights", set(names["model"]))
    chosen = random.sample(sorted(names), random.randint(1, len(names)))
    targets: dict[str, Tensors] = {}
    for part in sorted(chosen):
        dtype = FLOATS[random.choice(sorted(FLOATS))] if random.random() < 0.3 else None
        for name in sorted(names[part]):
            whole = next(
                stored.parts[each][name]
                for each in (part, "model", "model_without_masters", "master_weights")
                if name in stored.parts.get(each, ())
            )
            to = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            targets.setdefault(part, {})[name] = torch.full_like(whole, 113, dtype=to)
    return targets

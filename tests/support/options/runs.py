"""Runs of a manager under random options. The oracle says which steps are saved, which stay, and
what the next run restores.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.harness import set_comm, try_ranks
from tests.support.options.strategies import Surroundings, valid_options
from unified_ckpt.runtime.comm.comm import Comm

STEPS = 6


@dataclass
class Run:
    """What ranks did. `barrier`: keeps them in step, as the collectives of training do. `asked`:
    steps that the manager saved, by rank; `states`: of each step.
    """

    options: uc.ManagerOptions
    save_options: uc.SaveOptions
    losses: Mapping[int, float]
    raises: bool
    finishes: bool
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    asked: dict[int, set[int]] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return self.save_options.stores("optimizer")


class Job:
    """A model and an optimizer that train on numbers of the step."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)  # threads share the global one
        self.model = nn.Linear(2, 40)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((1, 2), float(step + 1))).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        named = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            named |= {f"{number}/{key}": value.clone() for key, value in state.items()}
        return named

    def arguments(self, *, full: bool) -> dict[str, Any]:
        return {"model": self.model} | ({"optimizer": self.optimizer} if full else {})


def draw_run(random: Random, around: Surroundings, share: float) -> Run:
    options = valid_options(uc.ManagerOptions, random, around, share=share)
    save_options = valid_options(uc.SaveOptions, random, around, share=share)
    replaced: dict[str, Any] = {"parts": None, "omit": random.choice(((), (), ("optimizer",)))}
    if "optimizer" in replaced["omit"] and save_options.compression != "none":
        replaced["omit"] = ()
    if save_options.compression in ("O1", "O2"):
        replaced["compression"] = "lossless"  # a run compares bits
    options = options.model_copy(update={"margin_steps": max(options.margin_steps, 2)})
    if save_options.if_exists == "error":
        replaced["if_exists"] = "replace"
    losses = {step: random.choice((0.5, 1.0, 2.0)) for step in range(STEPS)}
    save_options = save_options.model_copy(update=replaced)
    raises = options.enabled and options.save_on_exception and random.random() < 0.5
    return Run(options, save_options, losses, raises, random.random() < 0.7)


def due(options: uc.ManagerOptions, step: int) -> bool:
    """Whether a step is saved by its number alone, by the words of `ManagerOptions`."""
    intervals = options.interval_steps, options.local_interval_steps
    return options.enabled and (
        any(interval and step > 0 and step % interval == 0 for interval in intervals)
        or step in options.steps
        or (options.on_start and step == 0)
    )


def train(run: Run, comm: Comm, root: Path) -> None:
    """Train and save on one rank."""
    job, saved = Job(1), run.asked.setdefault(comm.rank, set())
    manager = uc.CheckpointManager(root, options=run.options, save_options=run.save_options)
    set_comm(manager.run.session, comm)
    with manager:
        manager.restore(**job.arguments(full=run.full))
        for step in range(STEPS):
            run.barrier.wait(timeout=20)
            job.train(step)
            run.states[step] = job.state()
            metrics = {"loss": run.losses[step]}
            if manager.save(step, metrics=metrics, **job.arguments(full=True)) is not None:
                saved.add(step)
        if run.raises:
            raise ValueError("ends the run")
        if run.finishes and manager.finish(STEPS - 1, metrics=metrics, **job.arguments(full=True)):
            saved.add(STEPS - 1)
        manager.wait()


def has_rules(run: Run) -> bool:
    options = run.options
    limits = options.keep_latest, options.keep_every_steps, options.keep_every_seconds
    of_models = options.keep_latest_model_only, options.keep_every_steps_model_only
    return any(limits) or options.keep_best is not None or any(of_models)


def kept(run: Run, steps: list[int]) -> set[int]:
    """The steps that stay of those saved, after each save, by the words of `ManagerOptions`."""
    options, full = run.options, run.full
    latest, every = options.keep_latest, options.keep_every_steps
    if not full:
        latest = options.keep_latest_model_only or latest
        every = options.keep_every_steps_model_only or every
    rules = latest, every, options.keep_every_seconds, options.keep_best
    stays = set[int]()
    for saved in steps:
        stays.add(saved)
        if rules == (None, None, None, None):
            continue
        ordered, retained = sorted(stays), {saved}
        if latest:
            retained |= set(ordered[-latest:])
        if every:
            retained |= {step for step in ordered if step % every == 0}
        if options.keep_every_seconds:
            retained.add(ordered[0])  # later ones are created within seconds
        if options.best_metric == "loss":
            sign = 1 if options.best_mode == "min" else -1
            by_loss = sorted(ordered, key=lambda step: (sign * run.losses[step], -step))
            retained |= set(by_loss[: options.keep_best or 1])
        stays &= retained
    return stays


def steps_below(folder: Path) -> set[int]:
    """The steps of the manifests in a folder's folders."""
    manifests = folder.glob("*/unified_checkpoint.json")
    return {json.loads(manifest.read_text())["step"] for manifest in manifests}


def run_manager(random: Random, folder: Path, around: Surroundings, share: float) -> str:
    """Train and save; check what was saved, what stays, and what a new run restores."""
    run, root = draw_run(random, around, share), folder / "root"
    options = run.options
    # With `save_on_exception`, optimizers of one process wait for each other's saves.
    world = 1 if options.save_on_exception else random.choice((1, 1, 2))
    run.barrier = threading.Barrier(world)
    base = Job(7)
    base.train(0)
    if options.load_parameters_path or options.load_full_state_path:
        uc.save(around.checkpoint, step=50, **base.arguments(full=True))
    starts_elsewhere = options.load_source is not None and (
        options.load_source.rename or options.load_source.layers
    )
    outcomes = try_ranks(world, lambda comm: train(run, comm, root), timeout_seconds=30)
    lacks_limit = options.trash_directory and not has_rules(run)
    for outcome in outcomes:
        if isinstance(outcome, uc.CheckpointError) and starts_elsewhere:
            return "start refused"
        if lacks_limit and "no effect without a limit of checkpoints" in str(outcome):
            return "run refused"
        if isinstance(outcome, BaseException) and not (run.raises and "ends" in str(outcome)):
            raise outcome
    check_run(run, root, folder)
    return "run" if options.enabled else "run disabled"


def check_run(run: Run, root: Path, folder: Path) -> None:
    options = run.options
    assert len(set(map(frozenset, run.asked.values()))) == 1, run.asked
    saved = set(run.asked[0])
    must = {step for step in range(STEPS) if due(options, step)}
    ends = options.enabled and (run.raises or (run.finishes and options.on_completion))
    if ends:
        must.add(STEPS - 1)
        saved.add(STEPS - 1)
    if options.in_flight == "wait" or not options.asynchronous:
        assert must <= saved, f"due: {must}, saved: {saved}"
    if not options.continuous and (options.interval_seconds or 1e6) >= 1e6:
        assert saved <= must, f"due: {must}, saved: {saved}"
    present = steps_below(root)
    hidden = [path for path in root.glob(".*") if path.name.startswith(".unified")]
    assert not hidden, hidden
    for path in root.glob("*/unified_checkpoint.json"):
        assert not uc.verify(path.parent, deep=True).problems
        assert path.parent.name.startswith(options.step_prefix)
    if options.local_directory is None:
        stays = kept(run, sorted(saved))
        is_exact = options.keep_every_seconds in (None, 1e9)
        assert (present == stays) if is_exact else (present >= stays), (present, stays, saved)
        if options.trash_directory is not None:
            trash = steps_below(root / options.trash_directory)
            assert trash | present == saved, (trash, present, saved)
    restore(run, root, saved)


def restore(run: Run, root: Path, saved: set[int]) -> None:
    """Check that a new run restores the last step, bit for bit."""
    job = Job(3)
    if not saved:
        return
    with uc.CheckpointManager(root, options=run.options) as manager:
        report = manager.restore(**job.arguments(full=run.full))
    assert report is not None
    last = max(saved)
    assert report.step == last, f"restored {report.step}, expected {last} of {saved}"
    right = run.states[last]
    actual = job.state()
    wrong = [name for name in right if run.full or "/" not in name]
    wrong = [name for name in wrong if not same(actual[name], right[name])]
    assert not wrong, wrong

"""Round trips: every save, under any options, either fails before the first byte or resumes
unharmed.

State could be lost with a part that no rank stores, a tensor without a master, a master that no
target loads, or another kind of optimizer. `verdict_of_save` and `verdict_of_load` are the rules,
written without the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.refusals import error_of
from tests.support.training_jobs import (
    OTHER_STATE,
    PRECISIONS,
    SAME_STATE,
    TRAITS,
    USUAL,
    WRAPPERS,
    Job,
    JobSpec,
    differences,
)

Pick = Callable[[Sequence[Any]], Any]  # chooses one of a sequence
Shard = Callable[[nn.Module], nn.Module]
WAYS = ("save", "async", "lazy", "manager", "manager async")
PARTS = ("model", "master_weights", "optimizer", "ema")
PADDLE: dict[str, tuple[str, ...]] = {  # what each leaves out
    "async_save": (),
    "skip_save_model_weight": ("model",),
    "remove_master_weight": ("master_weights",),
    "enable_all_options": ("model",),
    "skip_save_model_weight async_save": ("model",),
}
MAXTEXT: tuple[dict[str, object], ...] = (
    {"async_checkpointing": False},
    {"checkpoint_storage_target_data_file_size_bytes": 64},
)


@dataclass(frozen=True)
class Case:
    """One save and load. `parts`: the parts to store; `omit`: the parts to leave out; `options`:
    where that choice comes from; `values`: how values in `extra` differ between ranks.
    """

    spec: JobSpec
    steps: int
    way: str
    target: str  # "fresh", "warmed", "same state" or the name of another optimizer
    parts: tuple[str, ...] | None
    omit: tuple[str, ...]
    options: uc.SaveOptions = field(compare=False)
    values: str = "equal"


VALUES: dict[str, tuple[Callable[[int], int], ...]] = {  # by rank, in each of a job's saves
    "equal": (lambda _: 0,),
    "differ": (lambda rank: rank,),
    "differ later": (lambda _: 0, lambda rank: rank),
}
NAMES = (*PARTS, "modle")
CHOICES = (*(chosen for size in range(4) for chosen in combinations(NAMES, size)), *[None] * 8)


def draw_case(pick: Pick) -> Case:
    """Draw a job, a way to save it, and a target."""
    spec = JobSpec(pick(PRECISIONS), frozenset(trait for trait in TRAITS if pick((False, True))))
    kind = None if spec.precision == "master_dict" else USUAL.get(spec.precision, "AdamW")
    others = (
        (*(["same state"] if kind in SAME_STATE else []), *OTHER_STATE[kind])
        if kind is not None
        else ("AdamW",)
    )
    ways = (
        tuple(way for way in WAYS if way != "lazy") if kind is None or kind in WRAPPERS else WAYS
    )  # a lazy copy waits for the step of an Optimizer
    parts: tuple[str, ...] | None = None
    omit: tuple[str, ...] = ()
    options = uc.SaveOptions(
        fsync=False, model_dtype="bfloat16" if spec.precision == "model_dtype" else None
    )
    source = pick(("parts", "parts", "omit", "paddle", "maxtext"))
    if source == "paddle":
        config = pick(sorted(PADDLE))
        omit, options = PADDLE[config], uc.from_paddle(config, save=options).save
    elif source == "maxtext":
        options = uc.from_maxtext(pick(MAXTEXT), save=options).save
    elif source == "omit":
        omit = pick(CHOICES) or ()
        options = options.model_copy(update={"omit": omit})
    else:
        parts = pick(CHOICES)
        options = options.model_copy(update={"parts": parts})
    options = options.model_copy(update={"compression": pick(("none", "lossless"))})
    target = pick(("fresh", "warmed", *others))
    steps, way, values = pick((0, 1, 2)), pick(ways), pick(sorted(VALUES))
    return Case(spec, steps, way, target, parts, omit, options, values)


def stored_parts(case: Case, job: Job) -> set[str]:
    """The job's parts that the options choose, by the caller's names."""
    parts = {"model", "optimizer"} | ({"ema"} if job.ema else set())
    parts |= {"master_weights"} if job.masters() or case.spec.precision == "model_dtype" else set()
    return (parts if case.parts is None else parts & set(case.parts)) - set(case.omit)


def verdict_of_save(case: Case, job: Job, saver: Shard) -> str:
    """ "error", "success", or "either" where the rules leave it open."""
    stored = stored_parts(case, job)
    if case.spec.precision == "averaged" and saver is not unsharded and "optimizer" in stored:
        return "error"  # shards that its `state_dict` has by position
    if set(case.omit) - {"model", "master_weights", "optimizer", *(["ema"] if job.ema else [])}:
        return "error"
    if not stored:
        return "error"
    if case.parts is not None and set(case.parts) - stored:
        known = {"master_weights"}  # a job may have no state yet, or never
        return "error" if set(case.parts) - stored - known or "model" not in stored else "either"
    if "model" not in stored:
        return "success" if "master_weights" in stored else "error"
    return "success"


def verdict_of_load(case: Case, job: Job, loader: Shard) -> str:
    """ "error", "success", "rounded" (masters are the model's values), "either": an error, or
    success or rounded as the case asks.
    """
    stored = stored_parts(case, job)
    has_state = job.has_optimizer_state() or bool(job.masters())
    if job.ema and "ema" not in stored:
        return "error"
    if case.spec.precision == "averaged" and loader is not unsharded and "optimizer" in stored:
        return "error"  # as at the save
    if "optimizer" not in stored and job.has_optimizer_state():
        return "error"
    if "optimizer" not in stored:
        return "either"
    if case.target not in ("fresh", "warmed", "same state"):
        return "error" if has_state else "either"
    if "master_weights" not in stored and case.spec.precision == "model_dtype":
        return "either rounded"
    if "master_weights" not in stored and job.masters():
        return "rounded"
    return "success"


def verdict_of_layout(case: Case, saver: Shard, loader: Shard) -> str:
    """ "error", "unknown" (the next step may raise) or "" for a fresh optimizer whose state is not
    laid out like its parameters. Which layout that is, the checkpoint knows if the saving job had
    such parameters.
    """
    layouts = saver is not unsharded, loader is not unsharded
    if case.target != "fresh":
        return ""
    if case.spec.precision == "sharded_state" and dist.is_initialized():
        return {(False, False): "error", (True, False): "unknown"}.get(layouts, "")
    if case.spec.precision == "local_state":
        return "unknown" if layouts == (False, True) else ""
    return ""


class Holder:
    """An object in `extra` with a number and a tensor in its state."""

    def __init__(self, value: int) -> None:
        self.number, self.codes = value, torch.tensor([7, value])

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "codes": self.codes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number, self.codes = state["number"], state["codes"]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def extra_of(value: int) -> dict[str, Any]:
    """What a rank passes as `extra`."""
    return {"holder": Holder(value), "rates": {"lr": value, "codes": torch.tensor([value])}}


def save(case: Case, job: Job, root: Path) -> None:
    """Save steps from `case.steps` on in the case's way, once for each of `case.values`."""
    states = [job.targets() | {"extra": extra_of(value(rank()))} for value in VALUES[case.values]]
    if case.way.startswith("manager"):
        options = uc.ManagerOptions(
            interval_steps=1,
            on_preemption=False,
            asynchronous=case.way.endswith("async"),
            retries=0,
        )
        with uc.CheckpointManager(root, options=options, save_options=case.options) as manager:
            for step, state in enumerate(states, case.steps):
                manager.save(step, force=True, **state)
            manager.wait()
        return
    with uc.Checkpointer(root, options=case.options) as checkpointer:
        for step, state in enumerate(states, case.steps):
            if case.way == "save":
                checkpointer.save(f"checkpoint-{step}", step=step, **state)
            else:
                checkpointer.save_async(
                    f"checkpoint-{step}", step=step, lazy=case.way == "lazy", **state
                ).result()


def load(case: Case, targets: dict[str, Any], root: Path) -> uc.LoadReport:
    if case.way.startswith("manager"):
        with uc.CheckpointManager(
            root, options=uc.ManagerOptions(interval_steps=1, on_preemption=False)
        ) as manager:
            report = manager.restore(**targets)
            assert report is not None
            return report
    step = case.steps + len(VALUES[case.values]) - 1
    return uc.load(root / f"checkpoint-{step}", **targets)


def target_of(case: Case, shard: Shard) -> Job:
    """The job to load into: every value differs from the saved ones."""
    kind: str | None = case.target
    usual = USUAL.get(case.spec.precision, "AdamW")
    if case.target in ("fresh", "warmed"):
        kind = None
    elif case.target == "same state":
        kind = SAME_STATE[usual]
    job = Job(case.spec, seed=2, optimizer=kind, shard=shard)
    if case.target == "warmed":
        job.train(range(50, 52))
    return job


def unsharded(model: nn.Module) -> nn.Module:
    """Return the model unchanged."""
    return model


def check(case: Case, root: Path, *, saver: Shard = unsharded, loader: Shard = unsharded) -> None:
    """The property. `saver`, `loader`: how the two jobs shard their models; with several ranks,
    every rank calls.
    """
    job = Job(case.spec, seed=1, shard=saver)
    job.train(range(case.steps))
    at_save, verdict = job.state(), verdict_of_save(case, job, saver)
    refusal = error_of(lambda: save(case, job, root))
    if refusal is not None:
        assert verdict != "success", f"refused: {refusal}"
        left = set(os.listdir(root)) - {"unified_events.jsonl"}  # where a manager says why
        assert not left, f"a refused save left {left}"
        assert not differences(job.state(), at_save)
        return
    assert verdict != "error", "committed what cannot be resumed from"
    verdict, target = verdict_of_load(case, job, loader), target_of(case, loader)
    if (
        verdict != "error"
        and case.target == "fresh"
        and (job.has_optimizer_state() or job.masters())
    ):
        verdict = verdict_of_layout(case, saver, loader) or verdict
    before, extra = target.state(), extra_of(-1)
    reports: list[uc.LoadReport] = []
    refusal = error_of(
        lambda: reports.append(load(case, target.targets() | {"extra": extra}, root))
    )
    if refusal is not None:
        assert verdict in ("error", "either", "either rounded"), f"not loaded: {refusal}"
        assert not differences(target.state(), before), "an error after the first byte"
        assert extra["holder"].number == -1, "an object in extra has changed"
        check_model(case, job, root, at_save, loader)
        return
    assert verdict != "error", "a load that cannot be right succeeded"
    has_own_mesh = case.spec.precision == "sharded_state" and job.has_optimizer_state()
    same_layout = saver is loader and not (has_own_mesh and loader is unsharded)
    check_values(case, extra["holder"], reports[0], same_layout=same_layout)
    if verdict.endswith("rounded"):
        job.round_masters()
    if verdict == "unknown" or case.target not in ("fresh", "warmed", "same state"):
        return  # an optimizer of another kind, from a checkpoint without any state
    job.train(range(case.steps, case.steps + 3))
    target.train(range(case.steps, case.steps + 3))
    assert not differences(target.state(), job.state())


def check_values(case: Case, holder: Holder, report: uc.LoadReport, *, same_layout: bool) -> None:
    """Check that each rank has its own values in the layout of the save; in another, those of the
    lowest rank, and a note. The mesh of optimizer state alone is unknown before the load.
    """
    right = extra_of(VALUES[case.values][-1](rank() if same_layout else 0))
    state = right.pop("holder").state_dict()
    assert same(holder.state_dict(), state), (holder.number, report.notes)
    assert same(report.extra, right | {"holder": state})
    differ = dist.is_initialized() and case.values != "equal" and not same_layout
    assert any("differed between the ranks" in note for note in report.notes) == differ


def check_model(case: Case, job: Job, root: Path, at_save: Mapping[str, Any], shard: Shard) -> None:
    """Check that the model alone loads bit for bit, however it is stored, when the rest cannot be
    resumed.
    """
    stored = stored_parts(case, job)
    if case.spec.precision == "model_dtype" and "master_weights" not in stored:
        return
    target = Job(case.spec, seed=2, shard=shard)
    load(
        case,
        {"model": target.model} | ({"parts": {"ema": target.ema}} if "ema" in stored else {}),
        root,
    )
    model = {name: value for name, value in at_save.items() if name.startswith("model:")}
    lost = differences(
        {name: value for name, value in target.state().items() if name in model}, model
    )
    assert not lost

"""What a trainer resumes of a run beside tensors, from a checkpoint of any format.

Each framework stores step, schedule and position in the data under its own names. `RunState` has
them under one name each. A schedule continues with its state if a torch scheduler of the same kind
saved it, else it is advanced to the step.

How a wrong learning rate could be used: a state of another kind of schedule is loaded, its count is
not of optimizer steps (samples in Megatron, one per process in Accelerate), or the optimizer's
groups keep rates of another schedule.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from unified_ckpt.api import open as open_source
from unified_ckpt.core.text import step_text
from unified_ckpt.engine.load.report import LoadReport, resume_text
from unified_ckpt.engine.source.protocol import with_indexes
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.step_names import STEP_NAME_PATTERNS
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.options import SourceOptions

_LOG = logging.getLogger("unified_ckpt")
_SCHEDULER_NAMES = ("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict")
_STEP_NAMES = ("step", "global_step", "global_steps", "iteration")
_SAMPLES_NAMES = ("consumed_samples", "consumed_train_samples", "global_samples")
_EPOCH_NAMES = ("epoch", "current_epoch")
# Where values about the run are: at the top, of the Trainer and PaddleNLP, of torchtitan.
_PROGRESS_PATHS = ((), ("trainer_state",), ("train_state",))
# Samples also: of Megatron, of nanotron.
_SAMPLES_PATHS = (*_PROGRESS_PATHS, ("args",), ("metadata", "metas"))
_COUNTS = {"last_epoch": 0, "last_batch_iteration": 1}  # name -> steps that it does not count
_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_PADDLE_SCALER = {  # keys of Paddle's GradScaler -> those of torch's
    "scale": "scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
    "incr_count": "_growth_tracker",
}
_RANDOM_KEYS = {"python", "numpy", "torch"}  # of `RandomStates`
_MAX_DEPTH = 3  # of a scheduler's state in `extra`
# Keys that versions of torch add or drop, and that say nothing of the kind of schedule.
_VOLATILE_KEYS = {
    "verbose",
    "_last_lr",
    "_step_count",
    "_is_initial",
    "_get_lr_called_within_step",
}
# Entries of torch's schedulers with one value per param group.
PER_GROUP_KEYS = frozenset(
    {
        "base_lrs",
        "_last_lr",
        "lr_lambdas",
        "min_lrs",
        "max_lrs",
        "base_momentums",
        "max_momentums",
    }
)


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds of a run beside tensors.

    `title`: of its format. `step`: optimizer steps, of the checkpoint or its name. `samples`:
    consumed over all epochs, if it counts them. `scheduler`: the state of a learning rate
    scheduler, as it is stored. `scaler`: of torch's GradScaler. `groups`: the saved param groups,
    with parameter names under "names". `rank_extras`: how many ranks stored values of their own.
    """

    path: str
    title: str
    format: str
    parts: frozenset[str]
    step: int | None = None
    epoch: float | None = None
    samples: int | None = None
    scheduler: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    rank_extras: int = 0
    has_random_states: bool = False

    @property
    def schedule_steps(self) -> int | None:
        """How often the saved schedule was stepped, in its own unit; None if it has no count."""
        return _schedule_steps(self.scheduler)


def read_run_state(path: str, options: SourceOptions | None = None) -> RunState:
    """Read the run state of a checkpoint in any format. Reads no tensor but a step count.

    Raises the errors of `uc.open`.
    """
    with open_source(path, options=options) as view:
        source = with_indexes(view.source)
        metadata = source.metadata()
        extra = metadata.extra if isinstance(metadata.extra, Mapping) else {}
        # SGD without momentum has no tensors; our own folders list the part all the same.
        has_groups = bool(metadata.groups) and metadata.save_id is None
        parts = frozenset({*source.parts, *([OPTIMIZER] if has_groups else [])})
        step = metadata.step
        if step is None:
            step = _first_int(extra, _PROGRESS_PATHS, _STEP_NAMES)
        if step is None and view.format != "accelerate":  # it numbers saves, not steps
            step = _step_in_name(path)
        if step is None:
            step = _optimizer_step(SourceView(source))
        state = RunState(
            path,
            format_title(view.format.removesuffix("-legacy")),
            view.format,
            parts,
            step=step,
            epoch=_first_number(extra, _PROGRESS_PATHS, _EPOCH_NAMES),
            samples=_first_int(extra, _SAMPLES_PATHS, _SAMPLES_NAMES),
            groups=view.source.metadata().groups,
            rank_extras=metadata.rank_extras,
            has_random_states=bool(metadata.rank_extras)
            and select_random_states(source.rank_extra(0)) is not None,
        )
        return with_extra(state, extra)


def with_extra(state: RunState, extra: Any) -> RunState:
    """Return the state with the values of this rank, which a load returns."""
    extra = extra if isinstance(extra, Mapping) else {}
    scaler = _scaler(extra.get("scaler"))
    return replace(state, extra=extra, scheduler=_saved_schedule(extra), scaler=scaler)


def select_random_states(entry: Any) -> Mapping[str, Any] | None:
    """Return the state of `RandomStates` in a rank's values: they themselves, or one of them."""
    if not isinstance(entry, Mapping):
        return None
    if entry.keys() >= _RANDOM_KEYS:
        return entry
    return next((state for value in entry.values() if (state := select_random_states(value))), None)


def _first_number(
    extra: Mapping[str, Any], paths: Sequence[Sequence[str]], names: Sequence[str]
) -> float | None:
    for path in paths:
        values: Any = extra
        for key in path:
            values = values.get(key) if isinstance(values, Mapping) else None
        if isinstance(values, Mapping):
            numbers = (_plain(values[name]) for name in names if name in values)
            number: float | None = next(filter(_is_number, numbers), None)
            if number is not None:
                return number
    return None


def _first_int(
    extra: Mapping[str, Any], paths: Sequence[Sequence[str]], names: Sequence[str]
) -> int | None:
    number = _first_number(extra, paths, names)
    return int(number) if number is not None and number == int(number) else None


def _plain(value: Any) -> Any:
    """Return the number of a tensor or an array with one element, others as they are."""
    return value.item() if getattr(value, "shape", None) == () else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _step_in_name(path: str) -> int | None:
    name = os.path.split(path.rstrip("/"))[1]
    numbers = (pattern.number(name) for pattern in STEP_NAME_PATTERNS)
    return next((number for number in numbers if number is not None), None)


def _optimizer_step(view: SourceView) -> int | None:
    """Return the step count of an optimizer that stores one, as Adam does."""
    if OPTIMIZER not in view:
        return None
    counts = (name for name in view[OPTIMIZER] if name.rpartition("/")[2] == "step")
    name = next(counts, None)
    if name is None:
        return None
    return int(view[OPTIMIZER][name][...].max().item())


# ---- the schedule


def _saved_schedule(extra: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schedule under a usual name, else the only one in `extra`."""
    for name in _SCHEDULER_NAMES:
        value = extra.get(name)
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if isinstance(value, Mapping) and _schedule_steps(value) is not None:
            return value
    schedules = list(_iter_schedules(extra, _MAX_DEPTH))
    return schedules[0] if len(schedules) == 1 else None


def _iter_schedules(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping) and _schedule_steps(value) is not None:
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_schedules(item, depth - 1)


def _schedule_steps(saved: Mapping[str, Any] | None) -> int | None:
    """Return how often a saved schedule was stepped, None if it has no count."""
    if not saved:
        return None
    for name, missing in _COUNTS.items():
        count = _plain(saved.get(name))
        if _is_number(count):
            return int(count) + missing
    schedulers = saved.get("_schedulers")  # ChainedScheduler counts nothing itself
    return _schedule_steps(schedulers[0]) if schedulers else None


def resume_schedule(scheduler: Any, state: RunState, *, steps: int | None) -> str:
    """Resume a torch scheduler whose optimizer is loaded, and return what was done: "loaded",
    "advanced to step N", "stays at step N" or "begins anew".

    `steps`: how often the run so far would have stepped it; None if the saved one was stepped like
    this one. A schedule that was advanced also sets the rates of the param groups.
    """
    saved, count = state.scheduler, state.schedule_steps
    is_skipping = state.scaler is not None  # an overflow skips the step of the schedule
    is_counted = count is not None and (
        steps is None or abs(count - steps) <= 1 or (is_skipping and 0 <= count <= steps)
    )
    is_loadable = saved is not None and _is_compatible(saved, scheduler.state_dict())
    if saved is not None and is_loadable and (is_counted or _requires_metrics(scheduler)):
        scheduler.load_state_dict(saved)
        if any("lr" not in group["options"] for group in state.groups) or not state.groups:
            _set_rates(scheduler)
        return "loaded"
    target = count if is_counted else steps
    if target is None or _requires_metrics(scheduler):
        return "begins anew"
    if not _advance(scheduler, target):
        return f"stays at step {_schedule_steps(scheduler.state_dict())}"
    return f"advanced to step {target}"


def _is_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a scheduler of the same kind saved the state, for as many param groups."""
    if saved.keys() - _VOLATILE_KEYS != current.keys() - _VOLATILE_KEYS:
        return False
    for key in PER_GROUP_KEYS & saved.keys() & current.keys():
        lists = [value for value in (saved[key], current[key]) if isinstance(value, list | tuple)]
        if len({len(values) for values in lists}) > 1:
            return False
    nested = saved.get("_schedulers", []), current.get("_schedulers", [])
    return len(nested[0]) == len(nested[1]) and all(map(_is_compatible, *nested))


def _requires_metrics(scheduler: Any) -> bool:
    """Whether each step takes a metric, as in ReduceLROnPlateau, so that none can be repeated."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def _advance(scheduler: Any, steps: int) -> bool:
    """Advance a scheduler as if it had been stepped `steps` times. Returns False if it is beyond.

    LambdaLR computes each rate from the count; others from the last rate.
    """
    _set_rates(scheduler)
    current = _schedule_steps(scheduler.state_dict()) or 0
    if isinstance(scheduler, LambdaLR) and current != steps:
        scheduler.last_epoch, scheduler._step_count, current = steps - 1, steps, steps - 1
    with warnings.catch_warnings():  # the optimizer has made no step in this process
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(current, steps):
            scheduler.step()
    return current <= steps


def _set_rates(scheduler: Any) -> None:
    """Set the rates of the param groups to the last ones of the schedule."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _scaler(saved: Any) -> Mapping[str, Any] | None:
    """Return the state of a GradScaler of torch or Paddle as torch's, None for others."""
    if not isinstance(saved, Mapping):
        return None
    if saved.keys() >= _PADDLE_SCALER.keys():
        saved = {
            name: _first_element(saved[paddle_name]) for paddle_name, name in _PADDLE_SCALER.items()
        }
    return saved if saved.keys() >= _SCALER_KEYS else None


def _first_element(value: Any) -> Any:
    return value.reshape(-1)[0].item() if hasattr(value, "reshape") else value


def resume_scaler(scaler: Any, state: RunState) -> str:
    """Resume a GradScaler and return what became of it, for the log; "" without one."""
    if scaler is None:
        return ""
    if state.scaler is None:
        return "begins anew"
    scaler.load_state_dict(dict(state.scaler))
    return "loaded"


# ---- what is logged


def log_resumed_state(
    state: RunState, report: LoadReport, outcomes: Mapping[str, str], *, rank: int
) -> None:
    """Log on rank 0 what a run resumed, in one line; a warning if the run begins anew in any of it.

    `outcomes`: what became of each value beside tensors, such as {"schedule": "loaded"}; "" for one
    that the run does not have.
    """
    if rank != 0:
        return
    epoch = f", epoch {state.epoch:.4g}" if state.epoch is not None else ""
    text = resume_text(f"{state.path} ({state.title})", f"{step_text(state.step)}{epoch}", report)
    values = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome]
    begins_anew = any("anew" in outcome for outcome in outcomes.values())
    level = logging.WARNING if begins_anew else logging.INFO
    _LOG.log(level, "%s", "; ".join([text, ", ".join(sorted(state.parts)), *values]))

"""Loads checkpoints without Accelerate's state: of another engine, another trainer, or a loop of
the user's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.integrations.accelerate import folders
from unified_ckpt.integrations.accelerate import state as states
from unified_ckpt.integrations.attribute_names import AttributeNames, read_attribute_names
from unified_ckpt.integrations.random_states import random_states_outcome, saved_random_states
from unified_ckpt.integrations.run_state import (
    RunState,
    log_resumed_state,
    read_run_state,
    resume_scaler,
    resume_schedule,
    with_extra,
)
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.torch_state.rng import RandomStates
from unified_ckpt.session import Session


def load_foreign(
    accelerator: Any,
    session: Session,
    folder: str,
    *,
    strict: bool,
    options: LoadOptions,
) -> LoadReport:
    """Load models and optimizers, and resume schedulers and random states as far as the checkpoint
    has them. Collective. Raises MismatchError, before anything is changed, unless `strict` is
    False.

    Data loaders and registered objects begin anew. Load hooks are not run: the checkpoint has none
    of their files.
    """
    comm, timeout = session.comm, options.timeout_seconds
    collective = comm.begin_collective("load_state", timeout_seconds=timeout)
    prepared, names = states.prepared_objects(accelerator), AttributeNames()
    with collective.step("run-state"):
        state = read_run_state(folder, options.source)
        model = prepared.model
        if model is not None:
            unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
            names = read_attribute_names(collective, unwrapped, folder, options.source)
            model = names.target(unwrapped, strict=strict, label=folder) if str(names) else model
        if strict and prepared.optimizers and OPTIMIZER not in state.parts:
            current = ", ".join(type(item).__qualname__ for item in prepared.optimizers)
            difference = f"optimizers: checkpoint has none, accelerator has {current}"
            raise states.mismatch_error(folder, [difference])
    targets = prepared.targets(model, strict=strict, options=options)
    report = session.load(folder, targets, restores_values=True)
    collective = comm.begin_collective("load_state", timeout_seconds=timeout)
    with collective.step("install"):
        state = with_extra(state, report.extra)  # of this rank
        outcomes = {
            "model": str(names),
            **_restore_objects(accelerator, state),
            "random states": random_states_outcome(state, report),
        }
        random_states = saved_random_states(state, report, options.source)
        if random_states is not None:
            RandomStates().load_state_dict(random_states)
        folders.advance_iteration(accelerator, folder, number=state.step or 0)
    log_resumed_state(state, report, outcomes, rank=collective.rank)
    return replace(report, step=state.step)


def _restore_objects(accelerator: Any, state: RunState) -> dict[str, str]:
    """Restore what is not a tensor. Returns what became of each kind of object, "" for none."""
    schedules = [
        resume_schedule(item.scheduler, state, steps=_schedule_steps(accelerator, item, state))
        for item in accelerator._schedulers
    ]
    classes = ", ".join(type(item).__qualname__ for item in accelerator._custom_objects)
    return {
        "schedule": ", ".join(schedules),
        "scaler": resume_scaler(accelerator.scaler, state),
        "data": "begins anew" if accelerator._dataloaders else "",
        classes: "begin anew" if classes else "",
        "load hooks": "not run" if accelerator._load_model_state_pre_hook else "",
    }


def _schedule_steps(accelerator: Any, scheduler: Any, state: RunState) -> int | None:
    """Return how often Accelerate steps a scheduler up to the step: once for each process, unless
    a batch is split among them.
    """
    if state.step is None or not scheduler.step_with_optimizer or scheduler.split_batches:
        return state.step
    return state.step * int(accelerator.num_processes)

"""One folder of an accelerator's state: the arguments of a save, and a load."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.load.report import LoadReport, log_resume
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.integrations.accelerate import folders, hooks
from unified_ckpt.integrations.accelerate import state as states
from unified_ckpt.integrations.accelerate.dataloaders import follow_loops, loader_states
from unified_ckpt.integrations.accelerate.foreign import load_foreign
from unified_ckpt.integrations.checkpoint_folders import is_unified
from unified_ckpt.options import LoadOptions, SourceOptions
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.rng import RandomStates
from unified_ckpt.session import Session

_LOG = logging.getLogger("unified_ckpt")


def save_arguments(
    collective: Collective,
    accelerator: Any,
    folder: str | os.PathLike[str],
    attach: Callable[[str], object] | None = None,
) -> StateArguments:
    """Run the save hooks and return the arguments of a save to this folder. Collective."""
    with collective.step("state"):
        arguments = state_arguments(accelerator)
    files = hooks.run_save_hooks(collective, accelerator, os.fspath(folder))
    return {**arguments, "attach": hooks.make_attach(accelerator, files, attach)}


def state_arguments(accelerator: Any) -> StateArguments:
    """Return the state of an accelerator as arguments of a save, without `attach`."""
    prepared, save = states.prepared_objects(accelerator), partial(states.saved_model, accelerator)
    return {
        "model": None if prepared.model is None else save(prepared.model),
        "optimizer": prepared.optimizers or None,
        "parts": {name: save(module) for name, module in prepared.parts.items()},
        "extra": states.collect_extra(accelerator, prepared.unnamed),
        "rank_extra": {**RandomStates().state_dict(), "dataloaders": loader_states(accelerator)},
    }


def load_folder(
    accelerator: Any,
    session: Session,
    folder: str,
    *,
    strict: bool,
    options: LoadOptions,
) -> LoadReport:
    """Restore everything from a checkpoint. Collective. Raises MismatchError, before anything is
    changed, unless it fits.
    """
    follow_loops(accelerator)
    comm, timeout = session.comm, options.timeout_seconds
    collective = comm.begin_collective("load_state", timeout_seconds=timeout)
    summary = _read_summary(collective, accelerator, folder, options.source)
    if summary is None:
        return load_foreign(accelerator, session, folder, strict=strict, options=options)
    _check_summary(collective, accelerator, folder, summary, strict=strict)
    with collective.step("hooks"):
        hooks.run_load_hooks(accelerator, folder)
    prepared = states.prepared_objects(accelerator)
    report = session.load(folder, prepared.targets(prepared.model, strict=strict, options=options))
    collective = comm.begin_collective("load_state", timeout_seconds=timeout)
    with collective.step("install"):
        states.restore_objects(accelerator, folder, report)
        folders.advance_iteration(accelerator, folder)
    log_resume(folder, report, rank=comm.rank)
    return report


def _read_summary(
    collective: Collective, accelerator: Any, path: str, options: SourceOptions
) -> dict[str, Any] | None:
    """Return what the checkpoint says it has of an accelerator, None if another engine or trainer
    wrote it. Collective; ranks that see the folder inform the others.
    """
    with collective.step("open"):
        if accelerator.is_local_main_process:
            summary, is_foreign = None, folders.is_foreign(path, options)
            if is_unified(path):
                with open_source(path) as source:
                    summary = states.accelerate_extra(source.extra).get(states.SUMMARY)
                is_foreign = summary is None
            if is_foreign or summary is not None:
                collective.set_once("summary", json.dumps(summary, sort_keys=True))
    with collective.step("summary"):
        if not collective.has("summary"):
            folders.check_path(path)
        saved: dict[str, Any] | None = json.loads(collective.get("summary"))
    return saved


def _check_summary(
    collective: Collective, accelerator: Any, path: str, saved: dict[str, Any], *, strict: bool
) -> None:
    """Compare the checkpoint with the accelerator."""
    with collective.step("check"):
        current = states.summarize(accelerator, states.prepared_objects(accelerator).unnamed)
        mismatches, unused = states.compare_summaries(current, saved)
        if strict and mismatches:
            raise states.mismatch_error(path, [*mismatches, *unused])
    if collective.rank == 0 and (mismatches or unused):
        _LOG.warning(
            "load_state of %s skips what does not fit: %s",
            path,
            "; ".join([*mismatches, *unused]),
        )

"""Resumes from a checkpoint without Lightning's state: of another engine, another trainer, or a
loop of the user's own.

Lightning restores its loops from their state in a checkpoint. Here that is made from the step: the
loops stand after the last batch of that step, and skip the batches of its epoch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.errors import MismatchError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.integrations.attribute_names import read_attribute_names
from unified_ckpt.integrations.lightning.position import PositionTracker
from unified_ckpt.integrations.lightning.state_dicts import LazyStateDict
from unified_ckpt.integrations.random_states import random_states_outcome, saved_random_states
from unified_ckpt.integrations.run_state import (
    log_resumed_state,
    read_run_state,
    resume_schedule,
    with_extra,
)
from unified_ckpt.manager.run import Run
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.torch_state.rng import RandomStates


class ForeignCheckpoint:
    """A checkpoint without Lightning's state, for one call of a Trainer. All ranks make the same
    calls, in the order of the methods. `names`: how its names and the module's differ.
    """

    def __init__(self, trainer: Any, run: Run, path: str, options: LoadOptions) -> None:
        """Read what it holds beside tensors. Collective."""
        self._trainer, self._path, self._run = trainer, path, run
        self._options = options.model_copy(update={"parts": None})
        self._ignores_masters = options.parts is not None and MASTER not in options.parts
        self._random_states: Mapping[str, Any] | None = None
        timeout = options.timeout_seconds
        collective = run.session.comm.begin_collective("ckpt_path", timeout_seconds=timeout)
        with collective.step("run-state"):
            self._state = read_run_state(path, options.source)
            module = trainer.strategy.lightning_module
            self.names = read_attribute_names(collective, module, path, options.source)

    def state_dict(self, *, layout: Layout, fits: bool) -> dict[str, Any]:
        """Return the checkpoint as Lightning expects it. Collective.

        `layout`: the mesh of the ranks. `fits`: training continues, else only weights are used.
        Raises MismatchError without optimizer state.
        """
        state, trainer = self._state, self._trainer
        package = type(trainer).__module__.partition(".trainer")[0]
        checkpoint: dict[str, Any] = {
            "epoch": int(state.epoch or 0),
            "global_step": state.step or 0,
            "pytorch-lightning_version": importlib.import_module(package).__version__,
            "state_dict": LazyStateDict(
                self._path,
                MODEL,
                options=self._options.source,
                rename=self.names.name_in_module,
            ),
        }
        if not fits:
            return checkpoint
        if OPTIMIZER not in state.parts:
            raise MismatchError(
                f"ckpt_path {self._path}: got no optimizer, expected a full checkpoint; "
                "call uc.load(path, model=module) and fit without ckpt_path"
            )
        report = self._run.session.load(self._path, {"layout": layout, "options": self._options})
        self._report = report
        self._state = state = with_extra(state, report.extra)  # of this rank
        self._random_states = saved_random_states(state, report, self._options.source)
        precision = trainer.precision_plugin
        if state.scaler is not None and getattr(precision, "scaler", None) is not None:
            checkpoint[type(precision).__qualname__] = dict(state.scaler)
        loops = self._loops_at(state.step or 0, checkpoint["epoch"], 0)
        return {
            **checkpoint,
            "loops": {"fit_loop": loops},
            "lr_schedulers": [],
            "optimizer_states": [],
        }

    def load_optimizer(self, checkpoint: dict[str, Any], tracker: PositionTracker) -> None:
        """Load the optimizer, and resume loops, schedulers and the position in the data at the
        step. Collective.
        """
        trainer, loop, state = self._trainer, self._trainer.fit_loop, self._state
        optimizers = list(trainer.strategy.optimizers)
        if optimizers:
            arguments: LoadArguments = {
                "model": self.names.target(trainer.strategy.lightning_module),
                "optimizer": optimizers,
                "options": self._options.model_copy(update={"parts": (OPTIMIZER,)}),
            }
            report = self._run.session.load(self._path, arguments)
            self._check_masters(optimizers, MASTER in report.sources)
        loop.setup_data()
        epoch, batches = self._position(loop.max_batches)
        step = (state.step or 0) * max(len(optimizers), 1)  # Lightning counts those of each
        checkpoint["global_step"], checkpoint["epoch"] = step, epoch
        checkpoint["loops"]["fit_loop"] = self._loops_at(step, epoch, batches)
        trainer._checkpoint_connector.restore_loops()
        schedules = [
            self._resume_schedule(config, epoch) for config in trainer.lr_scheduler_configs
        ]
        if loop._combined_loader is not None:
            rng = self._random_states or RandomStates().state_dict()
            tracker.resume_at(rng, epoch=epoch, batches=batches)
        data = f"skips {batches} batches of" if batches else "begins"
        outcomes = {
            "model": str(self.names),
            "schedule": ", ".join(schedules),
            "random states": random_states_outcome(state, self._report),
            "data": f"{data} epoch {epoch}" if loop.max_batches < math.inf else "begins anew",
            "callbacks": "begin anew",
        }
        log_resumed_state(state, self._report, outcomes, rank=trainer.global_rank)

    def _check_masters(self, optimizers: list[torch.optim.Optimizer], are_loaded: bool) -> None:
        """Raise MismatchError if a module of lower precision lost the master weights. Weights and
        optimizer are loaded one after the other, so the engine does not see it.
        """
        if are_loaded or MASTER not in self._state.parts or self._ignores_masters:
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
        if any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
            raise MismatchError(
                f"ckpt_path {self._path}: got master weights, which are more precise than the "
                "module; use a float32 module with mixed precision, or leave them out with "
                'LoadOptions(parts=("model", "optimizer"))'
            )

    def begin_epoch(self) -> None:
        """Let the first epoch begin like any other if its first batch comes next. A Trainer with
        `max_steps` would take it for one that was interrupted.
        """
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if not epoch_loop.batch_progress.current.ready:
            epoch_loop.restarting = False

    def _resume_schedule(self, config: Any, epoch: int) -> str:
        passed = epoch if config.interval == "epoch" else self._state.step
        if not self._trainer.lightning_module.automatic_optimization:
            passed = None  # the module steps it itself
        steps = None if passed is None else passed // config.frequency
        return resume_schedule(config.scheduler, self._state, steps=steps)

    def _position(self, batches_per_epoch: float) -> tuple[int, int]:
        """Return the epoch of the next batch, and the batches before it in that epoch.

        The step decides, unless the saved epoch shows that epochs had another length.
        """
        step, epoch = self._state.step or 0, self._state.epoch
        if not 0 < batches_per_epoch < math.inf:
            return int(epoch or 0), 0
        accumulated = self._trainer.accumulate_grad_batches
        steps_per_epoch = math.ceil(batches_per_epoch / accumulated)
        if epoch is None or abs(step / steps_per_epoch - epoch) <= 1:
            return step // steps_per_epoch, step % steps_per_epoch * accumulated
        steps = round((epoch - int(epoch)) * steps_per_epoch)
        return int(epoch) + steps // steps_per_epoch, steps % steps_per_epoch * accumulated

    def _loops_at(self, step: int, epoch: int, batches: int) -> dict[str, Any]:
        """Return the state of the fit loop after `batches` of an epoch."""
        loop = self._trainer.fit_loop
        loops: dict[str, Any] = loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step
        per_epoch = int(loop.max_batches) if loop.max_batches < math.inf else 0
        total = epoch * per_epoch + batches or step * self._trainer.accumulate_grad_batches
        optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        _count(loops["epoch_loop.batch_progress"], total, batches)
        _count(loops["epoch_loop.scheduler_progress"], step, 0)
        _count(optimizer["step"], step, 0)
        _count(optimizer["zero_grad"], step, 0)
        _count(loops["epoch_loop.manual_optimization.optim_step_progress"], step, 0)
        _count(loops["epoch_progress"], epoch, epoch)
        if batches:  # the epoch has begun
            for count in ("total", "current"):
                loops["epoch_progress"][count] |= {"ready": epoch + 1, "started": epoch + 1}
        return loops


def _count(progress: Mapping[str, Any], total: int, current: int) -> None:
    """Set what was counted in all, and in the current epoch."""
    for count, number in (("total", total), ("current", current)):
        progress[count].update(dict.fromkeys(progress[count], number))

"""Unified checkpoints for Hugging Face's Trainer: `Trainer(...,
callbacks=[UnifiedCheckpointCallback()])`.

The Trainer runs its own save. Weights, optimizer and random states go to the engine instead, and
its small files (config, tokenizer, trainer_state.json, ...) are attached to the same folder, which
gets its name in one step.

How state could be lost: the Trainer writes next to the folder and dies (nothing has the name of a
checkpoint yet); it rotates before the new checkpoint exists (here after the commit); a resume loads
an incomplete folder (only committed ones count).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from unified_ckpt.runtime.packages import missing_package

try:
    import accelerate  # noqa: F401  # the Trainer needs it
    from torch import nn
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing_package(__package__, error, extra="transformers") from error

from unified_ckpt.errors import CheckpointError
from unified_ckpt.integrations.run_options import with_bucket_root
from unified_ckpt.integrations.transformers.save_log import SaveLog
from unified_ckpt.integrations.transformers.trainer import PatchedTrainer
from unified_ckpt.manager.events.run_events import CommitHook, FailureHook, RunHooks
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    combine_options,
    with_root,
)


class UnifiedCheckpointCallback(TrainerCallback):
    """Makes a Trainer save and resume unified checkpoints: pass it in `callbacks=[...]`.

    Supports one process, DDP, FSDP2 and models sharded at load. Each resumes the checkpoints of the
    others, on any number of processes. `train(resume_from_checkpoint=True)` loads the latest
    committed step. Checkpoints of the stock Trainer can be resumed too. With another number of
    processes, random states are derived from the saved seed and the rank.

    A model with adapters (PEFT) is stored as `adapter_model.safetensors` and what else training
    changes, without the other base weights.

    `root`: the URL of a prefix in a bucket, such as "s3://bucket/run", for the checkpoints. The
    output folder stays local and gets none. `RunOptions.root` is the same setting.

    `save_options`, `load_options`: how to save and load.

    `save_only_model`: overrides the Trainer's argument; None leaves it to the Trainer. The Trainer
    accepts a model that is sharded at load only with `save_only_model=True`; False here then saves
    the optimizer too.

    `manager_options`: adds a `CheckpointManager`: retries, a local directory, more rules of
    retention, and a stop of all ranks at one saved step after a signal. The Trainer's arguments
    decide when to save and how many to keep. Without it the first error ends training. It may also
    be the result of `from_paddle` or `from_maxtext`.

    `async_save`: writes in a thread, while training continues. The last save waits for its commit.
    It is the same setting as `ManagerOptions.asynchronous`.

    `log_saves`: adds `checkpoint/step`, `checkpoint/bytes` and the seconds of the last save to the
    Trainer's next log entry. Off by default, because `trainer_state.json` contains the log and
    times differ between equal runs.

    Raises CheckpointError for manager options that contradict the Trainer's arguments. Raises
    LayoutError for adapters on a model sharded at load, pipeline stages, DeepSpeed and
    DataParallel.
    """

    def __init__(
        self,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        manager_options: ManagerOptions | RunOptions | None = None,
        save_only_model: bool | None = None,
        async_save: bool | None = None,
        log_saves: bool = False,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        self._async_save, self._log_saves, self._root = async_save, log_saves, root
        self._run = combine_options(manager_options, save=save_options, load=load_options)
        self._has_manager_options = manager_options is not None
        self._save_only_model = save_only_model
        self._hooks = RunHooks()
        self._parts: Callable[[nn.Module], Mapping[str, Any]] | None = None
        self._patched: PatchedTrainer | None = None

    @property
    def checkpoints(self) -> CheckpointManager:
        """The manager of the current run, else of the last one; it is closed after the run.

        `checkpoints.should_stop`: the run was stopped before its end.
        """
        return self._attached().checkpoints

    def on_commit(self, hook: CommitHook) -> CommitHook:
        """Call `hook(report)` on rank 0 after every commit of the runs that begin from now on, as
        `CheckpointManager.on_commit` does. Returns `hook`.
        """
        return self._hooks.on_commit(hook)

    def on_failure(self, hook: FailureHook) -> FailureHook:
        """Call `hook(failure)` after every failed attempt to save of the runs that begin from now
        on, as `CheckpointManager.on_failure` does. Returns `hook`.
        """
        return self._hooks.on_failure(hook)

    def add_parts(self, parts: Callable[[nn.Module], Mapping[str, Any]]) -> None:
        """Store what `parts(model)` returns beside the model, such as an average of its weights.

        It returns the argument `parts` of `uc.save`. It is called for each save, and at a resume,
        which fills the tensors in place. `save_only_model` leaves them out.
        """
        self._parts = parts
        if self._patched is not None:
            self._patched.parts = parts

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Attach to the Trainer under construction."""
        trainer = _trainer_under_construction()
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check that the callback has a Trainer."""
        self._attached()

    def _attached(self) -> PatchedTrainer:
        if self._patched is None:
            raise CheckpointError(
                "UnifiedCheckpointCallback: got no Trainer; call callback.attach(trainer)"
            )
        return self._patched

    def attach(self, trainer: Trainer) -> None:
        """Attach the callback to a Trainer. Calling it again does nothing. Raises CheckpointError
        if another callback is attached.
        """
        if self._patched is None or self._patched.trainer is not trainer:
            if isinstance(getattr(trainer.train, "__self__", None), PatchedTrainer):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: the Trainer already has one, "
                    "or is a UnifiedCheckpointMixin; use one"
                )
            options, url = with_bucket_root(self._run, self._root)
            self._patched = PatchedTrainer(
                trainer,
                options if url is not None else with_root(options, str(trainer.args.output_dir)),
                self._hooks,
                has_manager_options=self._has_manager_options,
                save_only_model=self._save_only_model,
                async_save=self._async_save,
            )
            self._patched.parts = self._parts
            if self._log_saves:
                self._patched.save_log = SaveLog(trainer)


class UnifiedCheckpointMixin:
    """The callback as a base class: `class MyTrainer(UnifiedCheckpointMixin, Trainer)`, with the
    mixin first.

    The constructor also takes the options of the callback.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(UnifiedCheckpointMixin):
            raise TypeError(
                f"{cls.__name__}: got UnifiedCheckpointMixin after Trainer; "
                f"write class {cls.__name__}(UnifiedCheckpointMixin, …)"
            )

    def __init__(
        self,
        *args: Any,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        manager_options: ManagerOptions | RunOptions | None = None,
        save_only_model: bool | None = None,
        async_save: bool | None = None,
        log_saves: bool = False,
        root: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self, Trainer):
            raise TypeError(
                f"{type(self).__name__}: got UnifiedCheckpointMixin without Trainer; "
                "inherit from Trainer too"
            )
        UnifiedCheckpointCallback(
            save_options=save_options,
            load_options=load_options,
            manager_options=manager_options,
            save_only_model=save_only_model,
            async_save=async_save,
            log_saves=log_saves,
            root=root,
        ).attach(self)


def _trainer_under_construction() -> Trainer | None:
    """Return the Trainer whose `__init__` is on the call stack, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None

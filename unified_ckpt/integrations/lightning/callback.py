"""Unified checkpoints for PyTorch Lightning: `Trainer(callbacks=[UnifiedCheckpointCallback()])`.

Lightning decides when to save, under which name, and what to remove. The strategy's methods for
saving and loading are replaced, so that each `.ckpt` is a unified folder that all ranks write
together.

How state could be lost: ModelCheckpoint removes the older checkpoint before the newer one exists
(here a save returns after its commit); its `last.ckpt` dangles for a moment, or is overwritten in
place (links are replaced atomically, folders exchanged after the commit); a save is killed (an
unfinished folder never has the name of a checkpoint); a hook or a strategy silently omits optimizer
state.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from unified_ckpt.runtime.packages import missing_package

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as error:
        raise missing_package(__package__, error, extra="lightning") from error

from unified_ckpt.api import open as open_source
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.integrations.lightning.paths import check_path, last_in_bucket
from unified_ckpt.integrations.lightning.run import options_of_run
from unified_ckpt.integrations.lightning.state_dicts import LazyStateDict
from unified_ckpt.integrations.lightning.strategy import PatchedStrategy
from unified_ckpt.integrations.run_options import with_bucket_root
from unified_ckpt.manager.events.run_events import CommitHook, FailureHook, RunHooks
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    combine_options,
)
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import absolute_path


class UnifiedCheckpointCallback(Callback):
    """Makes a Trainer save and resume unified checkpoints, with its ModelCheckpoints unchanged.

    Supports one device, DDP, and ModelParallelStrategy (FSDP2, tensor parallel, both), with
    `lightning` and `pytorch_lightning`. Any number of processes and any mesh may resume.
    Checkpoints of stock Lightning are resumed by stock Lightning. Those of other engines, and of
    loops of your own, continue at their step.

    `save_options`, `load_options`: how to save and load.

    `root`: the URL of a prefix in a bucket, such as "s3://bucket/run", for the checkpoints. A
    ModelCheckpoint names them as before, and its folder stays local. `ckpt_path="last"` is then the
    newest checkpoint below the root. `RunOptions.root` is the same setting.

    `manager_options`: adds a `CheckpointManager` to `fit`: retries, background saves, a local
    directory on one node, and a stop of all ranks after the same batch after a signal. Lightning's
    callbacks decide when to save and what to keep. It may also be the result of `from_paddle` or
    `from_maxtext`, without a local root.

    `async_save`: the same setting as `ManagerOptions.asynchronous`.

    Raises CheckpointError for manager options that contradict Lightning, and LayoutError for other
    strategies.
    """

    def __init__(
        self,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        manager_options: ManagerOptions | RunOptions | None = None,
        async_save: bool | None = None,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        run = combine_options(manager_options, save=save_options, load=load_options)
        run, url = with_bucket_root(run, root)
        if run.root is not None and url is None:
            raise FormatError(f"root: got {run.root}, expected none; ModelCheckpoint has dirpath")
        if url is not None:
            _find_last_in_buckets()
        manager = None if manager_options is None else run.manager
        self._options = replace(run, manager=options_of_run(manager, async_save=async_save))
        self._records_events = manager_options is not None
        self._hooks = RunHooks()
        self._patched: PatchedStrategy | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._options.root is not None:  # in a process that was spawned
            with_bucket_root(self._options, None)
            _find_last_in_buckets()

    @property
    def checkpoints(self) -> CheckpointManager:
        """The manager of the current run, else of the last one; it is closed after the run.

        `checkpoints.should_stop`: the run was stopped before its end.
        """
        if self._patched is None:
            raise CheckpointError("UnifiedCheckpointCallback: got no run; call trainer.fit first")
        return self._patched.trainer_run.checkpoints

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

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Patch the strategy of the Trainer, once."""
        if self._patched is None or self._patched.strategy is not trainer.strategy:
            owner = getattr(trainer.strategy.save_checkpoint, "__self__", None)
            if isinstance(owner, PatchedStrategy):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: got two in this Trainer, expected one; remove one"
                )
            self._patched = PatchedStrategy(
                trainer, self._options, self._hooks, records_events=self._records_events
            )
        self._patched.begin(stage)

    def on_sanity_check_start(self, *_: Any) -> None:
        """Take the signals from Lightning, which stops each rank elsewhere."""
        self._attached().run.stop_signals.take()

    def on_train_start(self, *_: Any) -> None:
        """Take the signals from Lightning. What the run resumes from is known by now."""
        attached = self._attached()
        attached.run.stop_signals.take()
        attached.trainer_run.warn_fresh_start()
        if attached.foreign is not None:
            attached.foreign.begin_epoch()

    def on_train_batch_start(self, *_: Any) -> None:
        """End a run that was stopped and saved, as Lightning does after SIGTERM."""
        if self._attached().trainer_run.stopped:
            raise SystemExit(0)

    def on_train_batch_end(self, *_: Any) -> None:
        """Save if the run is to stop, and record the state for a save after an exception."""
        if self._attached().trainer_run.after_batch():
            self._attached().record()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """End the run without the other ranks."""
        if self._patched is not None:
            self._patched.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Wait for the save in flight, and release buffers after a run."""
        if self._patched is not None:
            self._patched.close()

    def last_checkpoint(self) -> str:
        """Return the URL of the newest checkpoint below the root, "" for none or a local folder."""
        return last_in_bucket(self._options.root) if self._options.root is not None else ""

    def _attached(self) -> PatchedStrategy:
        if self._patched is None:
            raise AssertionError("hooks are called after setup")
        return self._patched


def _find_last_in_buckets() -> None:
    """Let `ckpt_path="last"` find the newest checkpoint of a callback's root in a bucket.

    Lightning looks for it before it calls any hook, so its own method is wrapped, once.
    """
    name = f"{_package(Callback)}.trainer.connectors.checkpoint_connector"
    connector = importlib.import_module(name)._CheckpointConnector
    select_path = connector._parse_ckpt_path
    if hasattr(select_path, "__wrapped__"):
        return

    @functools.wraps(select_path)
    def select_last(self: Any, state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
        if ckpt_path == "last":
            callbacks = self.trainer.callbacks
            ours = [item for item in callbacks if isinstance(item, UnifiedCheckpointCallback)]
            ckpt_path = next(filter(None, (item.last_checkpoint() for item in ours)), ckpt_path)
        return select_path(self, state_fn, ckpt_path, **options)

    connector._parse_ckpt_path = select_last


def load_from_checkpoint(
    cls: type[Any],
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device | None = None,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    **arguments: Any,
) -> Any:
    """Load a module, or a LightningDataModule, from a unified folder, unsharded.

    Replaces `LightningModule.load_from_checkpoint`, which opens only files. `map_location`: the
    device of the module, the CPU by default. `hparams_file`: a YAML or CSV file that replaces the
    saved hyperparameters. `arguments` override or extend them. Raises NotFoundError or FormatError,
    saying what is there, if the path is not a unified folder.
    """
    path = absolute_path(os.fspath(path))
    kind = "unified" if is_bucket_url(path) else check_path(path)
    if kind == "native":
        raise CheckpointError(
            f"{path}: got a checkpoint of stock Lightning; use {cls.__name__}.load_from_checkpoint"
        )
    if kind == "foreign":
        raise FormatError(f"{path}: got no state of Lightning; create the module and use uc.load")
    saving = importlib.import_module(f"{_package(cls)}.core.saving")
    with open_source(path) as source:
        checkpoint: dict[str, Any] = dict(_lightning_extra(source.extra, path))
    checkpoint["state_dict"] = LazyStateDict(path, "model").copy()
    if hparams_file is not None:
        is_csv = str(hparams_file).endswith(".csv")
        read = saving.load_hparams_from_tags_csv if is_csv else saving.load_hparams_from_yaml
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = read(hparams_file)
    hyperparameters = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hyperparameters.update(arguments)
    if hasattr(cls, "load_state_dict") and hasattr(cls, "training_step"):
        module = saving._load_state(cls, checkpoint, strict=strict, **arguments)
        return module.to("cpu" if map_location is None else map_location)
    return saving._load_state(cls, checkpoint, **arguments)


def _lightning_extra(extra: Any, path: str) -> Mapping[str, Any]:
    lightning_extra = extra.get("lightning") if isinstance(extra, Mapping) else None
    if not isinstance(lightning_extra, Mapping):
        raise CheckpointError(
            f"{path}: got a unified checkpoint without Lightning's state; "
            "use uc.load for its tensors"
        )
    return lightning_extra


def _package(cls: type[Any]) -> str:
    """Return which of the two Lightning packages this class is from."""
    names = [base.__module__ for base in cls.__mro__]
    if any(name.startswith("lightning.pytorch.") for name in names):
        return "lightning.pytorch"
    return "pytorch_lightning"

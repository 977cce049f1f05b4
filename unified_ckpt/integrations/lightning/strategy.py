"""A Trainer's strategy whose methods for saving, loading and removing are replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from unified_ckpt.api import open as open_source
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.rank_mesh import DDP_DIM
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.load.report import log_resume
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.errors import (
    FormatError,
    MismatchError,
    StorageError,
)
from unified_ckpt.format.names import MODEL, OPTIMIZER, WEIGHTS
from unified_ckpt.integrations.lightning.foreign import ForeignCheckpoint
from unified_ckpt.integrations.lightning.paths import check_path, latest_requeue
from unified_ckpt.integrations.lightning.position import PositionTracker, own_method
from unified_ckpt.integrations.lightning.run import LightningRun
from unified_ckpt.integrations.lightning.state_dicts import (
    LazyStateDict,
    apply_edits,
    callback_states,
    check_values,
    extract_parts,
    model_part,
    remove_copies,
)
from unified_ckpt.integrations.lightning.supported import check_callbacks, check_supported
from unified_ckpt.integrations.run_options import LOCAL_TIER
from unified_ckpt.manager.events.run_events import RunHooks
from unified_ckpt.manager.rules.metrics import finite_metrics
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.options import RunOptions, with_default_if_exists
from unified_ckpt.runtime.storage.paths import absolute_path, is_url
from unified_ckpt.runtime.storage.regular_files import exists
from unified_ckpt.runtime.torch_state.modules import clean_name, flatten_model, load_methods
from unified_ckpt.runtime.torch_state.optimizers import flatten_optimizer

_TRUE_PRECISION = ("HalfPrecision", "DoublePrecision")  # 16-true, bf16-true, 64-true


class PatchedStrategy:
    """Replaces the checkpoint methods of a strategy with its own methods of the same names.

    It can be copied and pickled with the Trainer, and then belongs to the copy.
    """

    def __init__(
        self,
        trainer: Any,
        options: RunOptions,
        hooks: RunHooks,
        *,
        records_events: bool,
    ) -> None:
        self.trainer, self.strategy, self._load_options = trainer, trainer.strategy, options.load
        check_supported(self.strategy)
        # As in Lightning, which rewrites last.ckpt. The older one stays until the commit.
        save_options = with_default_if_exists(options.save, if_exists="replace")
        self._options, self._hooks = replace(options, save=save_options), hooks
        self._records_events = records_events
        self._trainer_run: LightningRun | None = None
        self._position = PositionTracker(trainer)
        self._path = ""  # of a checkpoint that Lightning itself does not load
        self.foreign: ForeignCheckpoint | None = None  # without Lightning's state
        self._saved_optimizers: list[str] | None = None  # optimizer classes in that folder
        self._offered_state: dict[str, Any] = {}  # the state dict before hooks edit it
        for name in (
            "save_checkpoint",
            "load_checkpoint",
            "remove_checkpoint",
            "load_model_state_dict",
            "load_optimizer_state_dict",
            "lightning_module_state_dict",
            "optimizer_state",
        ):
            setattr(self.strategy, name, getattr(self, name))

    def __getstate__(self) -> dict[str, Any]:
        # a run has threads and locks
        return {**vars(self), "_trainer_run": None, "_offered_state": {}}

    @property
    def trainer_run(self) -> LightningRun:
        """The current call of the Trainer, else the last one."""
        if self._trainer_run is None:
            self._trainer_run = self._open_run(self._options)
        return self._trainer_run

    @property
    def run(self) -> Run:
        """The checkpoints of that call."""
        return self.trainer_run.run

    def _open_run(self, options: RunOptions) -> LightningRun:
        trainer_run = LightningRun(self.trainer, options, records_events=self._records_events)
        trainer_run.run.events.hooks.extend(self._hooks)
        return trainer_run

    def begin(self, stage: str) -> None:
        """Prepare a run. Raises StorageError if checkpoints cannot be written to the directory."""
        # Lightning would reuse the checkpoint of a failed resume
        self.trainer._checkpoint_connector._loaded_checkpoint = {}
        self.foreign = None
        if stage == "fit":
            self._position.reset()
            for callback in self.trainer.checkpoint_callbacks:
                directory = str(getattr(callback, "dirpath", None) or self.trainer.default_root_dir)
                if is_url(directory):
                    raise StorageError(
                        f"{directory}: got a URL, expected a local folder; set a local dirpath, "
                        "and UnifiedCheckpointCallback(root=...) for a bucket"
                    )
            if self._options.root is not None:
                check_callbacks(self.trainer.checkpoint_callbacks)
        options = self._options
        if stage != "fit":
            others = {"on_preemption": False, **dict.fromkeys(LOCAL_TIER)}
            options = replace(options, manager=options.manager.model_copy(update=others))
        self._trainer_run = self._open_run(options)
        for callback in self.trainer.checkpoint_callbacks if stage == "fit" else ():
            if hasattr(callback, "_link_checkpoint"):
                callback._link_checkpoint = self._link_checkpoint

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """Replace the method of ModelCheckpoint(save_last="link")."""
        if trainer.is_global_zero:
            self.trainer_run.link(filepath, linkpath)
        trainer.strategy.barrier()

    def close(self, error: BaseException | None = None) -> None:
        """End the run. `error`: it ends the run on this rank."""
        if self._trainer_run is not None:
            self._trainer_run.close(error)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's own state dict: nothing is gathered or copied."""
        state: dict[str, Any] = self.strategy.lightning_module.state_dict()
        self._offered_state = dict(state)
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's own state dict, for hooks to inspect. The save reads the optimizer
        itself.
        """
        state: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return state

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save a unified folder. All ranks call it."""
        if storage_options is not None:
            raise StorageError(
                "save_checkpoint: got storage_options, expected None; "
                "CheckpointIO plugins are not used"
            )
        path = self.trainer_run.stored_path(absolute_path(os.fspath(filepath)))
        if not self.trainer_run.is_local(path):  # metrics in file names may differ between ranks
            path = self.strategy.broadcast(path)
        metrics = finite_metrics(self.trainer.callback_metrics)
        arguments = self._state_arguments(checkpoint)
        state = self._step_state(lambda: arguments, path, metrics)
        try:
            self.trainer_run.save(state, path)
        except FormatError as error:
            if "hyper_parameters" in str(error):
                error.add_note("exclude arguments with save_hyperparameters(ignore=[...])")
            raise
        self._offered_state = {}

    def record(self) -> None:
        """Record the state after a batch for a save after an exception."""
        if self.run.on_exception.enabled:
            path = self.trainer_run.stored_path(absolute_path(self.trainer_run.stopped_path()))
            connector = self.trainer._checkpoint_connector

            def prepare() -> StateArguments:
                return self._state_arguments(connector.dump_checkpoint(weights_only=False))

            state = self._step_state(prepare, path, None)
            self.run.record(state.step, state)
            self._offered_state = {}

    def _state_arguments(self, checkpoint: Mapping[str, Any]) -> StateArguments:
        """Return the arguments of a save of a checkpoint as Lightning gathers it."""
        rank = self.trainer.global_rank
        lightning_state = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        has_optimizer = "optimizer_states" in checkpoint
        optimizers = list(self.strategy.optimizers) if has_optimizer else []
        module = self.strategy.lightning_module
        flat = flatten_model(module)
        parts = extract_parts(lightning_state, rank=rank)
        remove_copies(lightning_state, self._offered_state, rank=rank)
        check_values(lightning_state)
        if "callbacks" in lightning_state:
            lightning_state["callbacks"] = callback_states(
                lightning_state["callbacks"], self.trainer.callbacks, rank=rank
            )
        extra = {
            "lightning": lightning_state,
            "optimizers": list(map(_optimizer_class, optimizers)) if has_optimizer else None,
            "replicas": self._position.num_replicas(),
        }
        return {
            "model": model_part(module, checkpoint["state_dict"], self._offered_state, rank=rank),
            # without edits by hooks
            "optimizer": flatten_optimizer(optimizers, flat.param_names(), flat.slices)
            if optimizers
            else None,
            "parts": parts or None,
            "extra": extra,
            "rank_extra": self._position.state_dict() if has_optimizer else None,
        }

    def _step_state(
        self,
        prepare: Callable[[], StateArguments],
        path: str,
        metrics: Mapping[str, float] | None,
    ) -> StepState:
        # Callbacks and requeues choose names with these suffixes; any other name is the caller's.
        callbacks = self.trainer.checkpoint_callbacks
        suffixes = filter(None, (getattr(item, "FILE_EXTENSION", "") for item in callbacks))
        managed = ManagedPath(path) if path.endswith((".ckpt", *suffixes)) else path
        step, options = self.trainer.global_step, self._options.save
        return StepState(step, prepare, metrics, options, path=managed)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint that Lightning drops. All ranks call it."""
        path = absolute_path(os.fspath(filepath))
        self.trainer_run.remove(self.trainer_run.stored_path(path))

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint as a lazy state dict; stock files are loaded by Lightning."""
        path, kind = self._resolve_path(checkpoint_path)
        self._path, self.foreign = "" if kind == "native" else path, None
        if kind == "native":
            load = own_method(self.strategy, "load_checkpoint")
            return dict(load(path, weights_only=weights_only))
        if kind == "foreign":
            return self._load_foreign(path)
        with open_source(path) as source:
            extra = source.extra if isinstance(source.extra, Mapping) else {}
            if "lightning" not in extra:
                return self._load_foreign(path)
            lightning_state = extra["lightning"]
            self._saved_optimizers = extra["optimizers"]
            if self._is_fitting():
                if self._saved_optimizers is None:
                    raise MismatchError(
                        f"ckpt_path {path}: got no optimizer (save_weights_only), "
                        "expected a full checkpoint; pass one, "
                        "or call uc.load(path, model=module) and fit without ckpt_path"
                    )
                # of this rank, which another node's folder may hold
                report = self.run.session.load(path, {"layout": self._mesh()})
                log_resume(path, report, rank=self.trainer.global_rank)
                own, lightning_state = report.rank_extra, report.extra["lightning"]
            # hooks pair it with the module's tensors by position
            order = [clean_name(name, ()) for name in self.strategy.lightning_module.state_dict()]
            checkpoint: dict[str, Any] = {
                **lightning_state,
                "state_dict": LazyStateDict(path, MODEL, order=order),
            }
            if self._is_fitting():
                saved = source.rank_extra or ()
                self._position.prepare_resume(checkpoint, own, saved, extra["replicas"])
            checkpoint.update(
                {
                    part: LazyStateDict(path, part)
                    for part in source.parts
                    if part not in (*WEIGHTS, OPTIMIZER)
                }
            )
        if self._saved_optimizers is not None:
            checkpoint["optimizer_states"] = []  # Lightning only checks that the key exists
        return checkpoint

    def _load_foreign(self, path: str) -> dict[str, Any]:
        self.foreign = ForeignCheckpoint(self.trainer, self.run, path, self._load_options)
        return self.foreign.state_dict(layout=self._mesh(), fits=self._is_fitting())

    def _mesh(self) -> Layout:
        """Return the mesh of all ranks as a Layout, for a load without tensors."""
        mesh = getattr(self.strategy, "device_mesh", None)
        if mesh is None:  # all ranks read different data
            return Layout({DDP_DIM: self.trainer.world_size}, rules={})
        return Layout(dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), rules={})

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Load the model, with edits that hooks made to the state dict."""
        if not self._path:
            own_method(self.strategy, "load_model_state_dict")(checkpoint, strict=strict)
            return
        state_dict = checkpoint["state_dict"]
        target: Any = self.strategy.lightning_module
        # A module's load_state_dict casts, too: hooks may save another dtype.
        options = self._load_options.model_copy(update={"parts": (MODEL,), "cast": True})
        precision = self.trainer.precision_plugin
        if type(precision).__name__ in _TRUE_PRECISION:
            # Lightning converts the module after the load, which would round float64 to float32.
            target = precision.convert_module(target)
        if not isinstance(state_dict, LazyStateDict) or state_dict.changed:
            if load_methods(target, flatten_model(target), ()):  # takes the edited tensors itself
                edited = {**checkpoint, "state_dict": state_dict.copy()}
                own_method(self.strategy, "load_model_state_dict")(edited, strict=strict)
                return
            target, strict = apply_edits(target, state_dict, strict=strict), False
        elif self.foreign is not None:
            target = self.foreign.names.target(target, strict=strict, label=self._path)
        report = self.run.session.load(
            self._path, {"model": target, "strict": strict, "options": options}
        )
        missing = report.missing if isinstance(target, dict) else ()
        if report.wrong or missing:  # strict concerns only names
            raise MismatchError(
                "\n  ".join(
                    [f"{self._path}: checkpoint and module differ:", *report.wrong, *missing]
                ),
                wrong=report.wrong,
            )
        if self._is_fitting() and not self.strategy.lightning_restore_optimizer:
            self.load_optimizer_state_dict(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Load the optimizers' state."""
        if not self._path:
            own_method(self.strategy, "load_optimizer_state_dict")(checkpoint)
            return
        if self.foreign is not None:
            self.foreign.load_optimizer(checkpoint, self._position)
            return
        optimizers = list(self.strategy.optimizers)
        current = list(map(_optimizer_class, optimizers))
        if current != self._saved_optimizers:
            saved = ", ".join(self._saved_optimizers or ()) or "none"
            raise MismatchError(
                f"ckpt_path {self._path}: got the state of {saved}, "
                f"expected {', '.join(current) or 'none'} of configure_optimizers; use the "
                "same, or call uc.load(path, model=module) and fit without ckpt_path"
            )
        if optimizers:
            options = self._load_options.model_copy(update={"parts": (OPTIMIZER,)})
            module = self.strategy.lightning_module
            self.run.session.load(
                self._path, {"model": module, "optimizer": optimizers, "options": options}
            )

    def _resolve_path(self, checkpoint_path: str | os.PathLike[str]) -> tuple[str, str]:
        """Return the path on this node, and who wrote it as rank 0 sees it. Collective."""
        comm, timeout = self.run.session.comm, self._load_options.timeout_seconds
        collective = comm.begin_collective("ckpt_path", timeout_seconds=timeout)
        with collective.step("path"):
            path = absolute_path(os.fspath(checkpoint_path))
            if not is_url(path) and not exists(path):
                path = self.trainer_run.stored_path(path)
            path = latest_requeue(path) if collective.rank == 0 and not is_url(path) else path
            path = str(collective.broadcast_json("path", path))
        path = self.trainer_run.newest(path) if self._is_fitting() else path
        collective = comm.begin_collective("ckpt_path", timeout_seconds=timeout)
        with collective.step("format"):
            knows = collective.rank == 0 and not is_url(path)
            kind = check_path(path, self._load_options.source) if knows else "unified"
            return path, str(collective.broadcast_json("kind", kind))

    def _is_fitting(self) -> bool:
        return str(getattr(self.trainer.state.fn, "value", "")) == "fit"


def _optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"

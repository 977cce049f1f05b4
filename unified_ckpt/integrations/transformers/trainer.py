"""A Trainer whose methods for saving and loading are replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import trainer as hf_trainer

from unified_ckpt.api import Checkpointer
from unified_ckpt.api import open as open_source
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.errors import MismatchError
from unified_ckpt.integrations.checkpoint_folders import is_unified, keep_latest
from unified_ckpt.integrations.transformers.adapters import (
    adapter_parts,
    has_adapters,
    link_adapters,
    parameter_names,
    with_single_file,
    write_configs,
)
from unified_ckpt.integrations.transformers.compatibility import (
    can_load,
    check_has_optimizer,
    check_optimizer,
    check_supported,
    explain_model_mismatch,
    needs_hub_names,
    optimizer_class,
    warn_overrides,
)
from unified_ckpt.integrations.transformers.hub_names import open_model_names
from unified_ckpt.integrations.transformers.position import PositionTracker
from unified_ckpt.integrations.transformers.resume import (
    PREFIX,
    check_path,
    latest_checkpoint,
    sorted_steps,
)
from unified_ckpt.integrations.transformers.scheduler import regroup_state
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.options import LoadOptions, SaveOptions, with_default_if_exists
from unified_ckpt.runtime.storage.storage import LocalStorage, writable_path
from unified_ckpt.runtime.torch_state.optimizers import unwrap_optimizer
from unified_ckpt.runtime.torch_state.rng import RandomStates

# folder of the Trainer's small files until they are attached
_SMALL_FILES_PREFIX = ".trainer-files-"


class PatchedTrainer:
    """Replaces the checkpoint methods of a Trainer with its own methods of the same names."""

    def __init__(
        self,
        trainer: Any,
        save_options: SaveOptions,
        load_options: LoadOptions,
        *,
        save_only_model: bool | None,
        async_save: bool,
    ) -> None:
        check_supported(trainer, async_save)
        warn_overrides(type(trainer))
        writable_path(trainer.args.output_dir)
        self.trainer, self._load_options, self._async_save = trainer, load_options, async_save
        self._save_only_model = save_only_model
        self._small_files: str | None = None  # folder of the save in flight
        # As in the stock Trainer: a run that went back saves its steps again.
        self._save_options = with_default_if_exists(save_options, if_exists="replace")
        self._checkpointer = Checkpointer()
        # arguments of a rotation that waits for a push
        self._deferred_rotation: tuple[str, int, int | None] | None = None
        self._report: LoadReport | None = None  # of the last load of optimizer state
        self._position = PositionTracker(trainer)
        self._originals: dict[str, Callable[..., Any]] = {}
        for name in (
            "train",
            "_finalize_training",
            "_save_checkpoint",
            "_save_optimizer_and_scheduler",
            "_save_scaler",
            "_save_rng_state",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_load_scaler",
            "_load_rng_state",
            "_load_best_model",
        ):
            self._originals[name] = getattr(trainer, name)
            setattr(trainer, name, getattr(self, name))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the Trainer's small files to a folder of their own, then the whole checkpoint."""
        trainer, state = self.trainer, self.trainer.state
        check_supported(trainer, self._async_save)
        self.wait()
        run_folder = trainer._get_output_dir(trial=trial)
        path = os.path.join(run_folder, f"{PREFIX}{state.global_step}")
        self._small_files = os.path.join(run_folder, f"{_SMALL_FILES_PREFIX}{state.global_step}")
        best_path = os.path.join(run_folder, f"{PREFIX}{state.best_global_step}")
        if state.best_global_step and os.path.isdir(best_path):
            state.best_model_checkpoint = best_path
        small_folder = os.path.join(self._small_files, f"{PREFIX}{state.global_step}")
        try:
            self._save_small_files(model, trial)
            if best_path == path:  # the Trainer set the path of its small files
                state.best_model_checkpoint = best_path
                if trainer.args.should_save:
                    state.save_to_json(os.path.join(small_folder, hf_trainer.TRAINER_STATE_NAME))
            arguments = self._save_arguments(small_folder)
            steps = (state.global_step, state.best_global_step)
            if self._async_save:
                self._checkpointer.save_async(
                    ManagedPath(path),
                    **arguments,
                    after_commit=lambda _: self._rotate(run_folder, *steps),
                )
                return
            self._checkpointer.save(ManagedPath(path), **arguments)
        except BaseException:
            self._remove_small_files()
            raise
        self._remove_small_files()
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(path)
        self._rotate(run_folder, *steps)

    def _save_small_files(self, model: torch.nn.Module, trial: Any) -> None:
        """Run the Trainer's own save so that it writes only small files, to a folder of their own,
        and pushes nothing.
        """
        folder, trainer = self._small_files, self.trainer
        patches = {
            "_get_output_dir": lambda **_: folder,
            "_push_from_checkpoint": lambda _: None,
            "save_model": self._save_configs,
        }
        with contextlib.ExitStack() as stack:
            for name, value in patches.items():
                stack.enter_context(_patched(trainer, name, value))
            self._originals["_save_checkpoint"](model, trial)

    def _save_arguments(self, small_folder: str) -> dict[str, Any]:
        """Return the arguments of a save, except the path. `small_folder`: the folder of the small
        files.
        """
        trainer = self.trainer
        only_model = (
            trainer.args.save_only_model if self._save_only_model is None else self._save_only_model
        )
        model = trainer.accelerator.unwrap_model(trainer.model)
        options = self._save_options
        wrapped = model
        if has_adapters(model):
            options = with_single_file(options)
        elif isinstance(trainer.model_wrapped, DistributedDataParallel):
            wrapped = trainer.model_wrapped  # DDP knows which rank's buffers count
        return {
            **_model_arguments(wrapped),
            "optimizer": None if only_model else trainer.optimizer,
            "step": trainer.state.global_step,
            "extra": None if only_model else self._collect_extra(),
            "rank_extra": None if only_model else RandomStates().state_dict(),
            "attach": lambda folder: _attach(model, small_folder, folder),
            "options": options,
        }

    def wait(self) -> None:
        """Block until no save is in flight. Raises its error."""
        try:
            self._checkpointer.wait()
        finally:
            self._remove_small_files()

    def _remove_small_files(self) -> None:
        folder, self._small_files = self._small_files, None
        if folder is not None and self.trainer.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)

    def _save_configs(self, output_dir: str, _internal_call: bool = False) -> None:
        """Replace `save_model` within a checkpoint: write what it writes, except the weights."""
        trainer = self.trainer
        if not trainer.args.should_save:
            return
        os.makedirs(output_dir, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if has_adapters(model):
            write_configs(model, output_dir)
        elif hasattr(model, "config"):  # as in save_pretrained
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        configs: list[Any] = [
            getattr(model, "config", None),
            getattr(model, "generation_config", None),
        ]
        model_dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
        dtype = self._save_options.model_dtype or model_dtype
        for config in configs if not has_adapters(model) else ():
            if hasattr(config, "save_pretrained"):
                # from_pretrained uses this dtype, so it must be that of the stored weights.
                with (
                    _patched(config, "dtype", dtype)
                    if dtype and hasattr(config, "dtype")
                    else contextlib.nullcontext()
                ):
                    config.save_pretrained(output_dir)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
        torch.save(trainer.args, os.path.join(output_dir, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: the checkpoint holds it."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the checkpoint holds it."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the checkpoint holds it."""

    def _collect_extra(self) -> dict[str, Any]:
        trainer = self.trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        scheduler = trainer.lr_scheduler
        return {
            "optimizer": optimizer_class(unwrap_optimizer(trainer.optimizer)),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "data": self._position.state(),
        }

    def _rotate(self, run_folder: str, saved_step: int, best_step: int | None) -> None:
        """Keep `save_total_limit` checkpoints, the latest and the best among them."""
        args, pushed = self.trainer.args, getattr(self.trainer, "push_in_progress", None)
        if not args.should_save or args.save_total_limit is None:
            return
        self._deferred_rotation = None
        if pushed is not None and not pushed.is_done():
            # never remove a checkpoint during its upload
            self._deferred_rotation = (run_folder, saved_step, best_step)
            return
        limit = max(args.save_total_limit, 1)
        steps = [
            record.step
            for record in scan(LocalStorage(run_folder), PREFIX).complete
            if record.step is not None
        ]
        latest = sorted(steps)[-limit:]
        best_is_older = best_step in steps and best_step not in latest
        keep_latest(
            run_folder,
            PREFIX,
            limit - best_is_older,
            protected={saved_step, *([best_step] if best_step else [])},
        )

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the latest committed step if `resume_from_checkpoint` is True."""
        check_supported(self.trainer, self._async_save)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = latest_checkpoint(
                self._checkpointer,
                self.trainer.args.output_dir,
                timeout_seconds=self._load_options.timeout_seconds,
            )
        elif isinstance(resume_from_checkpoint, str):
            check_path(resume_from_checkpoint)
        checkpoint = (
            resume_from_checkpoint
            if isinstance(resume_from_checkpoint, str) and is_unified(resume_from_checkpoint)
            else None
        )
        if checkpoint is not None:
            check_has_optimizer(checkpoint)
        self._position.resume_from(checkpoint)
        result = self._originals["train"](resume_from_checkpoint, *args, **kwargs)
        self.wait()
        if self._deferred_rotation is not None:
            self._rotate(*self._deferred_rotation)
        return result

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own method, which removes all but the best checkpoint."""
        self.wait()
        with _patched(hf_trainer, "sort_checkpoints", sorted_steps):
            return self._originals["_finalize_training"](*args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if is_unified(resume_from_checkpoint):
            self._load_model(resume_from_checkpoint)
            return
        unwrapped = self.trainer.accelerator.unwrap_model(self.trainer.model)
        loadable = can_load(resume_from_checkpoint, self.trainer)
        if loadable:
            check_has_optimizer(resume_from_checkpoint)
        if needs_hub_names(resume_from_checkpoint, unwrapped):
            with open_model_names(resume_from_checkpoint, model=unwrapped) as source:
                self._checkpointer.load(source, model=unwrapped, options=self._load_options)
        elif loadable:
            self._load_model(resume_from_checkpoint)
        else:
            self._originals["_load_from_checkpoint"](resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.trainer.state.best_model_checkpoint
        if best is None or not is_unified(best):
            self._originals["_load_best_model"]()
            return
        self._load_model(best)

    def _load_model(self, path: str) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        try:
            self._checkpointer.load(path, **_model_arguments(model), options=self._load_options)
        except MismatchError as error:
            raise explain_model_mismatch(error, path, model) from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not can_load(checkpoint, self.trainer):
            self._originals["_load_optimizer_and_scheduler"](checkpoint)
            return
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        optimizer, weights = unwrap_optimizer(trainer.optimizer), _model_arguments(model)
        check_optimizer(checkpoint, optimizer)
        # the model is loaded; it provides names
        options = self._load_options.model_copy(update={"parts": ("optimizer",)})
        self._report = self._checkpointer.load(
            checkpoint, **weights, optimizer=optimizer, options=options
        )
        saved = (self._report.extra or {}).get("scheduler")
        if saved is not None and trainer.lr_scheduler is not None:
            with open_source(checkpoint) as source:
                groups = source.source.metadata().groups
            if groups:  # otherwise the groups match one by one
                saved = regroup_state(saved, optimizer, parameter_names(model), groups)
            trainer.lr_scheduler.load_state_dict(saved)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not can_load(checkpoint, self.trainer):
            self._originals["_load_scaler"](checkpoint)
            return
        saved = ((self._report.extra if self._report is not None else None) or {}).get("scaler")
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        if saved is not None and scaler is not None:
            scaler.load_state_dict(saved)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not can_load(checkpoint, self.trainer):
            self._originals["_load_rng_state"](checkpoint)
            return
        if self._report is None:
            return
        if self._report.rank_extra is not None:
            RandomStates().load_state_dict(self._report.rank_extra)
            return
        args = self.trainer.args
        with open_source(checkpoint) as source:
            RandomStates().load_from_ranks(
                source.rank_extra, rank=args.process_index, world=args.world_size
            )


def _model_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """Return the model arguments of a save or load: only the adapters, if the model has any."""
    return {"parts": adapter_parts(model)} if has_adapters(model) else {"model": model}


def _attach(model: torch.nn.Module, small_folder: str, folder: str) -> None:
    shutil.copytree(small_folder, folder, dirs_exist_ok=True)
    if has_adapters(model):
        link_adapters(model, folder)


@contextlib.contextmanager
def _patched(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of one object temporarily."""
    previous = vars(owner).get(name, sys)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if previous is sys else setattr(owner, name, previous)

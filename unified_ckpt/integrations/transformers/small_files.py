"""The Trainer's small files of a checkpoint: config, tokenizer, trainer_state.json, arguments.

The Trainer's own save writes them to a folder of their own. They are attached to the checkpoint
before its commit. A rank that cannot write them runs the save to its end all the same, because the
other ranks wait for it there; then the save fails on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer
from transformers import trainer as hf_trainer
from transformers.trainer_callback import ExportableState

from unified_ckpt.errors import StorageError
from unified_ckpt.integrations.checkpoint_folders import is_checkpoint_folder
from unified_ckpt.integrations.transformers.adapters import (
    has_adapters,
    link_adapters,
    write_configs,
)
from unified_ckpt.integrations.transformers.resume import PREFIX
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.storage.regular_files import list_folder

_LOG = logging.getLogger("unified_ckpt")
_FOLDER_PREFIX = ".trainer-files-"
_SAVED_SUFFIX = "-saved"  # of the folder that an overridden `_save` writes to
_WEIGHTS_FILE = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)


class SmallFiles:
    """The files of one save of a Trainer at a time.

    `save`: the Trainer's own `_save_checkpoint`. `checkpoint_path`: returns the path of a step of
    the current run. `model_dtype`: the dtype in which weights are stored, None for the model's.
    """

    def __init__(
        self,
        trainer: Any,
        save: Callable[..., Any],
        checkpoint_path: Callable[[int], str],
        *,
        model_dtype: str | None,
    ) -> None:
        self._trainer, self._save, self._model_dtype = trainer, save, model_dtype
        self._checkpoint_path = checkpoint_path
        self._folder: str | None = None
        self._error: Exception | None = None  # of this rank, of the current attempt

    def write(
        self, collective: Collective, model: torch.nn.Module, trial: Any
    ) -> Callable[[str], None]:
        """Write the files, and return the function that copies them into a checkpoint. Collective.

        Raises StorageError, on all ranks, if one cannot write them.
        """
        trainer, state = self._trainer, self._trainer.state
        self.remove()
        run_folder = trainer._get_output_dir(trial=trial)
        self._folder = os.path.join(run_folder, f"{_FOLDER_PREFIX}{state.global_step}")
        folder = os.path.join(self._folder, f"{PREFIX}{state.global_step}")
        best_path = self._checkpoint_path(state.best_global_step or 0)
        if state.best_global_step and is_checkpoint_folder(best_path):
            state.best_model_checkpoint = best_path
        with collective.step("trainer-files"):
            try:
                self._run_save(model, trial)
                if state.best_global_step == state.global_step:
                    # The Trainer has set the path of the small files.
                    state.best_model_checkpoint = best_path
                    if trainer.args.should_save:
                        state.save_to_json(os.path.join(folder, hf_trainer.TRAINER_STATE_NAME))
                if self._error is not None:
                    raise self._error
            except Exception as error:
                if not _is_storage_failure(error):
                    raise
                raise StorageError(
                    f"{folder}: cannot write the Trainer's files: {error}"
                ) from error
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        return lambda target: _attach(unwrapped, folder, target)

    def capture(self) -> Callable[[str], None]:
        """Return the function that writes the files of the current step into a checkpoint later, on
        one rank.

        The Trainer's own save is not run: other ranks may not take part in it.
        """
        trainer, state = self._trainer, _exported_state(self._trainer)
        if state.best_global_step:
            best_path = self._checkpoint_path(state.best_global_step)
            if state.best_global_step == state.global_step or is_checkpoint_folder(best_path):
                state.best_model_checkpoint = best_path
        model = trainer.accelerator.unwrap_model(trainer.model)

        def attach(target: str) -> None:
            self._write_configs(target)
            state.save_to_json(os.path.join(target, hf_trainer.TRAINER_STATE_NAME))
            if has_adapters(model):
                link_adapters(model, target)

        return attach

    def remove(self) -> None:
        """Remove the files of the last save, which has ended."""
        folder, self._folder, self._error = self._folder, None, None
        if folder is not None and self._trainer.args.should_save:
            for path in (folder, f"{folder}{_SAVED_SUFFIX}"):
                shutil.rmtree(path, ignore_errors=True)

    def _run_save(self, model: torch.nn.Module, trial: Any) -> None:
        """Run the Trainer's own save so that it writes only small files, to a folder of their own,
        and pushes nothing.
        """
        folder, trainer = self._folder, self._trainer
        patches = {
            "_get_output_dir": lambda **_: folder,
            "_push_from_checkpoint": lambda _: None,
            "save_model": self._save_configs,
        }
        with contextlib.ExitStack() as stack:
            for name, value in patches.items():
                stack.enter_context(patched(trainer, name, value))
            self._save(model, trial)

    def _save_configs(self, output_dir: str, _internal_call: bool = False) -> None:
        """Replace `save_model` within a checkpoint: write what it writes, except the weights. An
        error is kept: other ranks wait for this one later in the save.
        """
        if self._trainer.args.should_save:
            save = self._run_override if runs_override(self._trainer) else self._write_configs
            try:
                save(output_dir)
            except Exception as error:
                self._error = error

    def _run_override(self, output_dir: str) -> None:
        """Run a subclass's `_save`, which may write more files, so that it writes no weights.

        It gets a folder in that of the run, because it may read files beside its folder.
        """
        trainer, saved = self._trainer, f"{self._folder}{_SAVED_SUFFIX}"
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_pretrained = getattr(model, "save_pretrained", None)

        def save_configs(folder: Any, *args: Any, **kwargs: Any) -> None:
            if os.path.abspath(folder) == os.path.abspath(saved):
                self._write_model_configs(saved)
            elif save_pretrained is not None:
                save_pretrained(folder, *args, **kwargs)

        os.makedirs(saved, exist_ok=True)
        with patched(model, "save_pretrained", save_configs):
            trainer._save(saved)
        for name in filter(_WEIGHTS_FILE.fullmatch, list_folder(saved)):
            os.remove(os.path.join(saved, name))
            _LOG.warning(
                "%s._save: its %s is left out: the engine writes the weights",
                type(trainer).__name__,
                name,
            )
        shutil.copytree(saved, output_dir, dirs_exist_ok=True)

    def _write_configs(self, output_dir: str) -> None:
        trainer = self._trainer
        os.makedirs(output_dir, exist_ok=True)
        self._write_model_configs(output_dir)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
        arguments = io.BytesIO()  # torch.save raises no OSError for a full disk
        torch.save(trainer.args, arguments)
        with open(os.path.join(output_dir, "training_args.bin"), "wb") as file:
            file.write(arguments.getvalue())

    def _write_model_configs(self, output_dir: str) -> None:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        configs: list[Any] = [
            getattr(model, name, None) for name in ("config", "generation_config")
        ]
        if has_adapters(model):
            write_configs(model, output_dir)
            configs = []
        elif hasattr(configs[0], "save_pretrained"):  # as there
            configs[0].architectures = [type(model).__name__.removeprefix("FSDP")]
        dtype = self._model_dtype or str(getattr(model, "dtype", "")).removeprefix("torch.")
        for config in configs:
            if hasattr(config, "save_pretrained"):
                # from_pretrained uses this dtype, so it must be that of the stored weights.
                has_dtype = dtype and hasattr(config, "dtype")
                with patched(config, "dtype", dtype) if has_dtype else contextlib.nullcontext():
                    config.save_pretrained(output_dir)


def runs_override(trainer: Any) -> bool:
    """Whether a save runs the `_save` of a subclass for its files. If the model is sharded, it
    would gather the weights or meet shards of them.
    """
    is_sharded = trainer.is_fsdp_enabled or getattr(
        trainer, "is_distributed_loading_by_transformers", False
    )
    return type(trainer)._save is not Trainer._save and not is_sharded


def _exported_state(trainer: Any) -> Any:
    """Return a copy of the Trainer's state, with that of its callbacks."""
    callbacks = stateful_callbacks(trainer)
    state = replace(
        trainer.state, log_history=list(trainer.state.log_history), stateful_callbacks=callbacks
    )
    state.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return state


def stateful_callbacks(trainer: Any) -> list[Any]:
    """Return what a Trainer stores the state of, for a `TrainerState`."""
    callbacks = (*trainer.callback_handler.callbacks, trainer.control)
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def _is_storage_failure(error: Exception) -> bool:
    """Whether the storage failed. The tokenizers library raises a bare Exception, and torch.save a
    RuntimeError.
    """
    texts = {Exception: ("os error",), RuntimeError: ("iostream error", "PytorchStreamWriter")}
    return isinstance(error, OSError) or any(
        text in str(error) for text in texts.get(type(error), ())
    )


def _attach(model: torch.nn.Module, small_folder: str, folder: str) -> None:
    shutil.copytree(small_folder, folder, dirs_exist_ok=True)
    if has_adapters(model):
        link_adapters(model, folder)


@contextlib.contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of one object temporarily."""
    previous = vars(owner).get(name, sys)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if previous is sys else setattr(owner, name, previous)

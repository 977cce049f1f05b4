"""Files next to the state: the configuration of a transformers model, and files of hooks registered
with Accelerate.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.tensor import DTensor

from unified_ckpt.engine.folder.manifest import read_manifest_at
from unified_ckpt.foreign.export.side_files import copy_names
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.torch_state.shards.flat_parameters import is_flattened

_HOOK_FILES_PREFIX = ".accelerate-files-"  # folder of the hooks' files until they are attached


def run_save_hooks(collective: Collective, accelerator: Any, path: str) -> str | None:
    """Run the save hooks and return the folder with their files, None if there are no hooks.
    Collective.

    Hooks get copies of the lists, so weights that they remove are saved all the same. Under FSDP
    and TP the list of weights is empty, because no process has whole weights. Of a save in a
    bucket, the files are in the project's folder, else in the working directory.
    """
    if not accelerator._save_model_state_pre_hook:
        return None
    parent, name = os.path.split(path)
    if is_bucket_url(path):
        parent = os.path.abspath(os.path.expanduser(accelerator.project_dir or ""))
    folder = os.path.join(parent, _HOOK_FILES_PREFIX + name)
    with collective.step("hook-files"):
        if collective.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted save
            os.makedirs(folder)
    with collective.step("hooks"):
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(list(accelerator._models), _state_dicts(accelerator), folder)
    return folder


def run_load_hooks(accelerator: Any, path: str) -> None:
    """Run the load hooks, with the folder of a checkpoint, or with copies of its attached files."""
    hooks = list(accelerator._load_model_state_pre_hook.values())
    with ExitStack() as stack:
        folder = path
        if hooks and is_bucket_url(path):
            folder = stack.enter_context(TemporaryDirectory(prefix="unified_ckpt-"))
            copy_names(path, read_manifest_at(path), folder, whole=True)
        for hook in hooks:  # a model that one removes from its list is filled all the same
            hook(list(accelerator._models), folder)


def _state_dicts(accelerator: Any) -> list[dict[str, Any]]:
    parameters = (p for model in accelerator._models for p in model.parameters())
    if any(isinstance(p, DTensor) or is_flattened(p) for p in parameters):
        return []
    return [model.state_dict() for model in accelerator._models]


def make_attach(
    accelerator: Any, files: str | None, attach: Callable[[str], object] | None
) -> Callable[[str], None]:
    """Return the function that copies all these files into a checkpoint folder. It runs on one
    rank.
    """
    model = (
        accelerator.unwrap_model(accelerator._models[0], keep_torch_compile=False)
        if accelerator._models
        else None
    )
    configs = _configs(model)

    def attach_all(folder: str) -> None:
        for config in configs:
            config.save_pretrained(folder)
        if files is not None:
            shutil.copytree(files, folder, dirs_exist_ok=True)
            shutil.rmtree(files)
        if attach is not None:
            attach(folder)

    return attach_all


def _configs(model: Any) -> list[Any]:
    """Copy the configurations now, because a background save writes them later.

    Empty for a model with adapters, whose tensors have other names than the model's.
    """
    if hasattr(model, "peft_config"):
        return []
    config, generation = (
        copy.deepcopy(getattr(model, name, None)) for name in ("config", "generation_config")
    )
    if config is None or not hasattr(config, "save_pretrained"):
        return []
    if getattr(config, "architectures", None) is None:
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # added by fully_shard
    return [config, generation] if hasattr(generation, "save_pretrained") else [config]

"""The files beside the state: a transformers model's configuration, and what the hooks registered
with Accelerate write and read.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from unified_ckpt.runtime.comm.collective import Collective

_HOOK_FILES_PREFIX = (
    ".accelerate-files-"  # begins a folder that holds the hooks' files until they are attached
)


def run_save_hooks(collective: Collective, accelerator: Any, path: str) -> str | None:
    """Collective. The folder with what the hooks have written, None where there are none.

    They get lists of their own: the weights that they take out are in the checkpoint all the same.
    Under FSDP2 and TP, whose weights no process has whole, there are none in the list.
    """
    if not accelerator._save_model_state_pre_hook:
        return None
    parent, name = os.path.split(path)
    folder = os.path.join(parent, _HOOK_FILES_PREFIX + name)
    with collective.step("hook-files"):
        if collective.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a save that was interrupted
            os.makedirs(folder)
    with collective.step("hooks"):
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(list(accelerator._models), _state_dicts(accelerator), folder)
    return folder


def _state_dicts(accelerator: Any) -> list[dict[str, Any]]:
    if any(isinstance(p, DTensor) for model in accelerator._models for p in model.parameters()):
        return []
    return [model.state_dict() for model in accelerator._models]


def run_load_hooks(accelerator: Any, path: str) -> None:
    """Before the models are filled, as Accelerate does. Models that a hook takes out of its list
    are filled all the same.
    """
    for hook in list(accelerator._load_model_state_pre_hook.values()):
        hook(list(accelerator._models), path)


def make_attach(
    accelerator: Any, files: str | None, attach: Callable[[str], object] | None
) -> Callable[[str], None]:
    """What puts all files into the folder of a checkpoint, on one rank."""
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
    """As they are now: a save in the background writes them later. None for a model with adapters,
    whose names are not the model's.
    """
    if hasattr(model, "peft_config"):
        return []
    config, generation = (
        copy.deepcopy(getattr(model, name, None)) for name in ("config", "generation_config")
    )
    if config is None or not hasattr(config, "save_pretrained"):
        return []
    if getattr(config, "architectures", None) is None:
        config.architectures = [
            type(model).__name__.removeprefix("FSDP")
        ]  # which fully_shard puts before it
    return [config, generation] if hasattr(generation, "save_pretrained") else [config]

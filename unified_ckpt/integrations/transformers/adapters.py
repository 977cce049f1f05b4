"""Stores PEFT adapters as parts of a checkpoint: each with the names and the file that PEFT
expects, without base weights.

How state could be lost: a trained parameter is in no adapter file (a layer made trainable by hand,
the encoder of a prompt method); two names of an adapter share one tensor, and PEFT needs both; the
base changes, see `base_state`. All of these are stored next to the adapters.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from unified_ckpt.errors import LayoutError
from unified_ckpt.foreign.huggingface.adapters import ADAPTER_PART, DEFAULT_ADAPTER, adapter_part
from unified_ckpt.format.names import file_name
from unified_ckpt.integrations.transformers.base_state import base_state_names, uncompiled
from unified_ckpt.runtime.torch_state.modules import flatten_model

TRAINABLE_PART = "trainable"  # part of tensors outside adapters that training changes


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has PEFT adapters, as a PeftModel or through `add_adapter`."""
    return bool(getattr(model, "peft_config", None))


def adapter_parts(
    model: nn.Module, base_names: Collection[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint by part, each adapter with PEFT's names. They share the
    model's memory where possible.

    `base_names`: tensors of the base that are in `TRAINABLE_PART` beside trainable parameters; None
    for `base_state_names`. Tensors that PEFT computes for its file (a prompt's embedding) have no
    memory in the model; their inputs are in `TRAINABLE_PART`.
    """
    from peft import get_peft_model_state_dict

    model = uncompiled(model)
    base_names = base_state_names(model) if base_names is None else base_names
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    # as in transformers' save_pretrained
    prefix = "" if _is_peft_model(model) else "base_model.model."
    parts: dict[str, dict[str, Tensor]] = {}
    for adapter in _configs(model):
        part = adapter_part(adapter)
        if part in parts:
            raise LayoutError(
                f"adapter {adapter!r}: got the part name {part} of another adapter; "
                "choose names that differ in letters"
            )
        adapter_state: Mapping[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=adapter
        )
        parts[part] = _without_shared_memory(
            {prefix + name: tensor for name, tensor in adapter_state.items()}
        )
    stored_ids = {id(tensor) for part in parts.values() for tensor in part.values()}
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    trained = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad or name.startswith("prompt_encoder.") or name in base_names
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in base_names}
    trainable = {n: t for n, t in {**trained, **buffers}.items() if id(t) not in stored_ids}
    return {**parts, **({TRAINABLE_PART: trainable} if trainable else {})}


def parameter_names(model: nn.Module, base_names: Collection[str] | None = None) -> dict[int, str]:
    """Return id of a parameter -> its name for optimizer state in a checkpoint. `base_names`: as in
    `adapter_parts`.
    """
    if not has_adapters(model):
        flat = flatten_model(model)
        names = flat.param_names()  # of a flat parameter of FSDP1: its first one's
        return names | {key: names[id(first.elements)] for key, (first, *_) in flat.slices.items()}
    return {
        id(tensor): f"{part}.{name}"
        for part, tensors in adapter_parts(model, base_names).items()
        for name, tensor in tensors.items()
    }


def write_configs(model: nn.Module, folder: str) -> None:
    """Write `adapter_config.json` and the model card, as PEFT does."""
    model = uncompiled(model)
    if _is_peft_model(model):
        model.create_or_update_model_card(folder)  # type: ignore[operator]
    for adapter, config in _configs(model).items():
        config = copy.deepcopy(config)
        base_model = model.get_base_model() if _is_peft_model(model) else model  # type: ignore[operator]
        config.inference_mode = True
        config.base_model_name_or_path = (
            config.base_model_name_or_path or getattr(base_model, "name_or_path", None) or None
        )
        auto_mapping = None
        if config.task_type is None:
            auto_mapping = {
                "base_model_class": type(base_model).__name__,
                "parent_library": type(base_model).__module__,
            }
        config.save_pretrained(_adapter_folder(folder, adapter), auto_mapping_dict=auto_mapping)


def has_linked_adapters(model: nn.Module) -> bool:
    """Whether a checkpoint of the model needs `link_adapters`."""
    return has_adapters(model) and set(_configs(uncompiled(model))) != {DEFAULT_ADAPTER}


def link_adapters(model: nn.Module, folder: str) -> None:
    """Give adapters other than the default one the file names that PEFT expects. Call it after the
    parts are written.
    """
    for adapter in _configs(uncompiled(model)):
        if adapter == DEFAULT_ADAPTER:
            continue
        file = file_name(adapter_part(adapter), number=1, count=1)
        link = os.path.join(_adapter_folder(folder, adapter), f"{ADAPTER_PART}.safetensors")
        try:
            os.symlink(os.path.join(os.pardir, file), link)
        except OSError:  # the file system has no links
            shutil.copyfile(os.path.join(folder, file), link)


def _adapter_folder(folder: str, adapter: str) -> str:
    return folder if adapter == DEFAULT_ADAPTER else os.path.join(folder, adapter)


def _configs(model: nn.Module) -> dict[str, Any]:
    configs: dict[str, Any] = dict(model.peft_config)  # type: ignore[arg-type]
    return configs


def _is_peft_model(model: nn.Module) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory: PEFT needs every name in the file. The first of each stays
    the model's own.
    """
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        unshared[name] = tensor if id(tensor) not in seen else tensor.detach().clone()
        seen.add(id(tensor))
    return unshared

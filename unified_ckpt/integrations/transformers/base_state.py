"""Which tensors of a base model belong to the checkpoints of its adapters: those that training, or
the creation of an adapter, changes.

How state could be lost: forward passes update buffers (running statistics, router balance,
codebooks); a head is trained, and frozen before the save; a frozen parameter is written in place;
an adapter is initialized with a part of the base, which it takes out of the base.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unified_ckpt.errors import LayoutError
from unified_ckpt.foreign.huggingface.adapters import changes_base
from unified_ckpt.format.digests import crc
from unified_ckpt.runtime.torch_state.tensors import as_bytes, local_tensor

# Buffers of all layers together. Beyond it they are weights of a quantized base, as in GPTQ: only
# those that have changed are stored.
_SMALL_BUFFERS_NBYTES = 64 << 20


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def base_state_names(model: nn.Module) -> set[str]:
    """Return the names of the base's tensors that every checkpoint has: persistent buffers, unless
    they are large, and weights that the initialization of an adapter has changed.

    Raises LayoutError for changed weights that are quantized.
    """
    buffers = _persistent_buffers(model)
    return changed_weights(model).keys() | (set() if _are_large(buffers) else buffers.keys())


def changed_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the base weights that PEFT changed when it created an adapter, by name, such as the
    residual of PiSSA. Raises LayoutError if they are quantized.
    """
    from peft.tuners.lora import LoraLayer

    configs: Mapping[str, Any] = model.peft_config  # type: ignore[assignment]
    initializations = {
        adapter: str(config.init_lora_weights)
        for adapter, config in configs.items()
        if changes_base(getattr(config, "init_lora_weights", None))
    }
    if not initializations:
        return {}
    weights = {
        id(getattr(layer.get_base_layer(), "weight", None)): initializations[adapter]
        for layer in uncompiled(model).modules()
        if isinstance(layer, LoraLayer)
        for adapter in initializations.keys() & layer.r.keys()
    }
    changed = {name: param for name, param in _parameters(model).items() if id(param) in weights}
    for name, parameter in changed.items():
        if not parameter.is_floating_point():
            raise LayoutError(
                f"init_lora_weights={weights[id(parameter)]!r}: changed {name}, which is "
                f"{parameter.dtype}, expected a floating-point base; change the base before it is "
                "quantized"
            )
    return changed


class BaseChanges:
    """Follows what a run changes in the base of an adapted model.

    Parameters are compared by torch's counts of changes in place, which `.data` evades, and large
    buffers by digests. `start` is called when training begins, `stop` when it ends.
    """

    def __init__(self) -> None:
        self._names = set[str]()
        self._versions: dict[str, int] = {}
        self._digests: dict[str, int] = {}  # of large buffers, when they were first seen

    def start(self, model: nn.Module) -> None:
        """Remember the base as it is. DistributedDataParallel writes to it before."""
        self._versions = {name: param._version for name, param in _parameters(model).items()}
        buffers = _persistent_buffers(model)
        for name, buffer in buffers.items() if _are_large(buffers) else ():
            self._digests.setdefault(name, _digest(buffer))

    def stop(self, model: nn.Module) -> None:
        """Remember what has changed since `start`."""
        self._names |= self._written(_parameters(model))
        self._versions = {}

    def loaded(self, names: Collection[str]) -> None:
        """Add names of tensors that came from a checkpoint: they differ from the base's."""
        self._names |= {*names}

    def names(self, model: nn.Module, optimizer: Any, *, compares_buffers: bool = True) -> set[str]:
        """Return the names of tensors that a checkpoint needs beside trainable parameters.

        `optimizer`: its parameters count even if they are frozen now. Unless `compares_buffers`,
        which reads them, large buffers count as changed.
        """
        parameters, buffers = _parameters(model), _persistent_buffers(model)
        groups = getattr(optimizer, "param_groups", ())
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        names = {name for name, parameter in parameters.items() if id(parameter) in trained}
        compares_buffers = compares_buffers and _are_large(buffers)
        names |= {
            name
            for name, buffer in buffers.items()
            if not compares_buffers or self._digests.get(name) != _digest(buffer)
        }
        return names | changed_weights(model).keys() | self._names | self._written(parameters)

    def _written(self, parameters: Mapping[str, Tensor]) -> set[str]:
        versions = self._versions
        return {
            name
            for name, parameter in parameters.items()
            if versions.get(name, parameter._version) != parameter._version
        }


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(uncompiled(model).named_parameters())


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` has, by name."""
    return {
        name: buffer
        for prefix, module in uncompiled(model).named_modules()
        for name, buffer in module.named_buffers(prefix, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


def _are_large(buffers: Mapping[str, Tensor]) -> bool:
    return sum(buffer.nbytes for buffer in buffers.values()) > _SMALL_BUFFERS_NBYTES


def _digest(buffer: Tensor) -> int:
    with torch.no_grad():
        return crc(as_bytes(local_tensor(buffer).cpu().contiguous()))

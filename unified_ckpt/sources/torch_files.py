"""What `torch.save` wrote: one file of a state dict, alone or in a training script's dict; Hugging Face's `pytorch_model*.bin`.

Read are the model's tensors, mapped where they lie; what else the file has that is plain values is `extra`. Optimizer state is not read:
it is keyed by position, and nothing in the file says of which parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.geometry import whole
from unified_ckpt.core.tables import Key, listed
from unified_ckpt.engine.source import Said
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.format import index
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.state import MODEL
from unified_ckpt.sources.assembled import Assembled, Assembly, Fragment, assembly
from unified_ckpt.sources.marks import BIN, BIN_INDEX
from unified_ckpt.sources.pickles import load_torch

_MODELS = ("model", "state_dict", "model_state_dict", "module", "net")  # where scripts put the model, likeliest first
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
_STEPS = ("step", "global_step", "iteration")


def open_torch_file(path: str, _options: SourceOptions) -> Assembled:
    """A file of `torch.save`. FormatError for one that is damaged, asks for classes, or holds no model's state dict."""
    told = load_torch(path)
    if not isinstance(told, Mapping):
        raise FormatError(f"{path}: holds a {type(told).__name__}; needed a state dict, or a dict that has one")
    place = next((name for name in _MODELS if _is_state(told.get(name))), None)
    weights = told[place] if place is not None else told
    if not _is_state(weights):
        raise FormatError(f"{path}: holds no state dict: its keys are {', '.join(sorted(map(str, told))[:10])}; needed one of {_MODELS}")
    rest = {key: value for key, value in told.items() if key != place and key not in _OPTIMIZERS} if place is not None else {}
    step = next((rest[name] for name in _STEPS if isinstance(rest.get(name), int)), None)
    tensors, aliases = _tensors(path, weights)
    return Assembled(path, tensors, format="torch", said=Said(step=step, extra=rest or None), aliases={MODEL: aliases})


def open_bin_folder(root: str, _options: SourceOptions) -> Assembled:
    """A folder of Hugging Face's with `pytorch_model.bin`, or with an index of several. IncompleteError naming what is missing."""
    names = set(os.listdir(root))
    weight_map: Mapping[str, str] = {}
    files = [BIN]
    if BIN_INDEX in names:
        with open(os.path.join(root, BIN_INDEX), "rb") as opened:
            weight_map = index.parse_index(opened.read(), file=os.path.join(root, BIN_INDEX)).weight_map
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if file not in names]
        if missing:
            raise IncompleteError(listed(f"{root}: files are missing", missing))
    tensors: dict[Key, Assembly] = {}
    aliases: dict[str, str] = {}
    for file in files:
        path = os.path.join(root, file)
        told = load_torch(path)
        if not _is_state(told):
            raise FormatError(f"{path}: holds no state dict; needed tensors by name")
        found, more = _tensors(path, told)
        tensors |= found
        aliases |= more
    lost = sorted(name for name in weight_map if (MODEL, name) not in tensors and name not in aliases)
    if lost:
        raise IncompleteError(listed(f"{root}: tensors that {BIN_INDEX} names are in no file", lost))
    return Assembled(root, tensors, format="huggingface-bin", said=Said(), aliases={MODEL: aliases})


def _is_state(told: Any) -> bool:
    """Whether it is tensors by name; some frameworks put a few plain values among them."""
    return isinstance(told, Mapping) and bool(told) and any(isinstance(value, torch.Tensor) for value in told.values())


def _tensors(path: str, state: Mapping[Any, Any]) -> tuple[dict[Key, Assembly], dict[str, str]]:
    """The tensors of a state dict, and other names of those that are one piece of memory."""
    tensors: dict[Key, Assembly] = {}
    first: dict[object, str] = {}
    aliases = {}
    for name, tensor in _named(path, state):
        seen = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name, name)
        if seen != name:
            aliases[name] = seen
            continue
        try:
            tensors[MODEL, name] = assembly(tensor.dtype, tensor.shape, [Fragment(whole(tensor.shape), partial(_same, tensor), path)])
        except CheckpointError as error:
            raise type(error)(f"{path}: {name}: {error}") from error
    return tensors, aliases


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _named(path: str, state: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise FormatError(f"{path}: {name}: is a {value.layout} tensor; needed a dense one")
            yield str(name).removeprefix("module."), value.detach()  # DistributedDataParallel's prefix

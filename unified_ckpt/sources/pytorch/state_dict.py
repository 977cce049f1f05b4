"""What `torch.save` wrote: one file of a state dict, alone or in a training script's dict; Hugging Face's `pytorch_model*.bin`.

Read are the model's tensors, mapped where they lie; what else the file has that is plain values is `extra`. Optimizer state is by position:
of which parameter is said by the optimizer to be filled, or by the order of the model's tensors where that leaves no doubt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.by_position import Order
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.format import index
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL
from unified_ckpt.runtime.torch_state.modules import is_extra_state, unwrapped
from unified_ckpt.sources.detect.names import BIN, BIN_INDEX
from unified_ckpt.sources.pytorch.optimizer_names import (
    WRAPPER,
    Found,
    Group,
    by_position,
    is_optimizer,
    parse_groups,
    unread,
)
from unified_ckpt.sources.pytorch.parameter_order import order_of
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import HOLDERS, plain
from unified_ckpt.views.shards import Assembled, Assembly, whole_tensor

_MODELS = (
    "model",
    "state_dict",
    "model_state_dict",
    "module",
    "net",
)  # where scripts put the model, likeliest first
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim", "optimizers")
_LIGHTNING = "pytorch-lightning_version"
_STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # of norms: buffers, among the parameters of a state dict
_STEPS = ("step", "global_step", "iteration")


@dataclass(frozen=True, slots=True)
class State:
    """What a state dict holds. `aliases`: other names of tensors that are one piece of memory; `modules`: extra state, by the name that it
    has there; `values`: what is neither."""

    tensors: dict[Key, Assembly]
    aliases: dict[str, str]
    modules: dict[str, Any]
    values: dict[str, Any]


def open_torch_file(path: str, options: SourceOptions) -> Source:
    """A file of `torch.save`, Lightning's too. FormatError for one that is damaged, asks for classes, or holds no model's state dict."""
    told = load_torch(path, stubs=HOLDERS)
    if not isinstance(told, Mapping):
        raise FormatError(
            f"{path}: holds a {type(told).__name__}; needed a state dict, or a dict that has one"
        )
    place = _model_place(path, told)
    weights = told[place] if place is not None else told
    if not _is_state(weights):
        raise FormatError(
            f"{path}: holds no state dict: its keys are {', '.join(sorted(map(str, told))[:10])}; needed one of {_MODELS}"
        )
    groups = (
        {key: _groups(path, told[key]) for key in _optimizer_keys(told)}
        if place is not None
        else {}
    )
    rest = (
        {key: value for key, value in told.items() if key not in (place, MASTER, *groups)}
        if place is not None
        else {}
    )
    step = next((rest[name] for name in _STEPS if isinstance(rest.get(name), int)), None)
    model = read_state(path, weights)
    tensors = model.tensors
    aliases: dict[str, Mapping[str, str]] = {MODEL: model.aliases}
    if place is not None and _is_state(told.get(MASTER)):
        masters = read_state(path, told[MASTER], part=MASTER)
        tensors |= masters.tensors
        aliases[MASTER] = masters.aliases
    rest |= {place: model.values} if place is not None and model.values else model.values
    found = Found(
        path,
        "lightning" if _LIGHTNING in told else "torch",
        tensors,
        aliases=aliases,
        said=Said(step=step, extra=plain(rest) or None, modules=plain(model.modules)),
        unnamed=[group for those in groups.values() for group in those],
    )
    own = {"the order of the file's tensors": partial(_stored_order, tensors)}
    if options.config is not None:
        own[f"the model of {options.config}"] = partial(
            order_of, options.config, len(found.unnamed)
        )
    return by_position(found, options, own=own)


def _model_place(path: str, told: Mapping[Any, Any]) -> str | None:
    """Where the model is, None where the file is its state dict. FormatError where two could be it: Lightning's has its own name."""
    found = [name for name in _MODELS if _is_state(told.get(name))]
    if _LIGHTNING in told and "state_dict" in found:
        return "state_dict"
    if len(found) > 1:
        raise FormatError(
            listed(
                f"{path}: has several state dicts that may be the model; needed a file with one of them",
                found,
            )
        )
    return found[0] if found else None


def _optimizer_keys(told: Mapping[Any, Any]) -> list[Any]:
    """Where optimizers are: under a name that scripts have for them, else the only one under any name. Of several under others, as of a
    generator and a critic, none is the model's: they stay what they are, plain values."""
    usual = [key for key in _OPTIMIZERS if _has_optimizers(told.get(key))]
    others = [key for key, value in told.items() if _has_optimizers(value)]
    return usual or (others if len(others) == 1 else [])


def _has_optimizers(told: Any) -> bool:
    """Whether it is an optimizer's state dict, or a list of those."""
    return is_optimizer(told) or (
        isinstance(told, list) and bool(told) and all(map(is_optimizer, told))
    )


def _groups(path: str, told: Any) -> list[Group]:
    return [
        group
        for one in (told if isinstance(told, list) else [told])
        for group in parse_groups(path, one)
    ]


def _stored_order(tensors: Mapping[Key, Assembly]) -> Order:
    """One group of what a state dict has: a module's `parameters()` come in its order, and its buffers between them."""
    return [
        [
            (name, one.spec.shape)
            for (part, name), one in tensors.items()
            if part == MODEL and name.rpartition(".")[2] not in _STATISTICS
        ]
    ]


def open_bin_folder(root: str, _options: SourceOptions) -> Assembled:
    """A folder of Hugging Face's with `pytorch_model.bin`, or with an index of several. IncompleteError naming what is missing."""
    found = read_bins(root)
    said = Said(extra=found.values or None, modules=found.modules)
    return Assembled(
        root, found.tensors, format="huggingface-bin", said=said, aliases={MODEL: found.aliases}
    )


def read_bins(root: str) -> State:
    """What the files of such a folder hold together. Same errors."""
    names = set(os.listdir(root))
    weight_map: Mapping[str, str] = {}
    files = [BIN]
    if BIN_INDEX in names:
        with open_file(os.path.join(root, BIN_INDEX)) as opened:
            weight_map = index.parse_index(
                opened.read(), file=os.path.join(root, BIN_INDEX)
            ).weight_map
        if index.is_left_over(weight_map, single=BIN, there=names, where=root):
            weight_map = {}
    if weight_map:
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if file not in names]
        if missing:
            raise IncompleteError(listed(f"{root}: files are missing", missing))
    every = State({}, {}, {}, {})
    for file in files:
        path = os.path.join(root, file)
        found = read_state(path, load_torch(path))
        stale = sorted(
            name
            for part, name in found.tensors
            if weight_map.get(name, file) != file or (part, name) in every.tensors
        )
        if stale:
            raise FormatError(listed(f"{path}: has tensors that are another file's", stale))
        every = State(
            every.tensors | found.tensors,
            every.aliases | found.aliases,
            every.modules | found.modules,
            every.values | found.values,
        )
    known = {name for _, name in every.tensors} | every.aliases.keys() | every.modules.keys()
    lost = sorted(weight_map.keys() - known)
    if lost:
        raise IncompleteError(
            listed(f"{root}: tensors that {BIN_INDEX} names are in no file", lost)
        )
    return every


def _is_state(told: Any) -> bool:
    """Whether it is tensors by name; some frameworks put a few plain values among them."""
    return (
        isinstance(told, Mapping)
        and bool(told)
        and any(isinstance(value, torch.Tensor) for value in told.values())
    )


def read_state(path: str, state: Any, *, part: str = MODEL, apart: bool = False) -> State:
    """What a state dict holds, its tensors under this part. `apart`: each name is a tensor of its own, whatever memory it has."""
    if not _is_state(state):
        raise FormatError(f"{path}: holds no state dict; needed tensors by name")
    bare = _bare_names(state)
    modules = {bare[name]: value for name, value in state.items() if is_extra_state(str(name))}
    state = {name: value for name, value in state.items() if not is_extra_state(str(name))}
    nested = sorted(str(name) for name, value in state.items() if _holds_tensors(value))
    if nested:
        raise FormatError(
            listed(
                f"{path}: beside tensors by name it has others deeper, which would be left out",
                nested,
            )
        )
    tensors: dict[Key, Assembly] = {}
    seen_names: set[str] = set()
    first: dict[object, str] = {}
    aliases = {}
    for name, tensor in _named(path, state, bare):
        if name in seen_names:
            raise FormatError(
                f"{path}: {name}: two of its tensors are called so without what wrappers add; needed names that differ"
            )
        seen_names.add(name)
        memory = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        seen = first.setdefault(memory if tensor.numel() and not apart else name, name)
        if seen != name:
            aliases[name] = seen
            continue
        try:
            tensors[part, name] = whole_tensor(tensor, path)
        except CheckpointError as error:
            raise type(error)(f"{path}: {name}: {error}") from error
    values = {
        str(name): value for name, value in state.items() if not isinstance(value, torch.Tensor)
    }
    return State(tensors, aliases, modules, values)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(one, torch.Tensor) or _holds_tensors(one) for one in value.values())
    return isinstance(value, list | tuple) and any(
        isinstance(one, torch.Tensor) or _holds_tensors(one) for one in value
    )


def _named(
    path: str, state: Mapping[Any, Any], bare: Mapping[Any, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if kind := unread(value):
                raise FormatError(
                    f"{path}: {name}: is {kind}; needed a dense one with all its values"
                )
            yield bare[name], value.detach()


def _bare_names(state: Mapping[Any, Any]) -> dict[Any, str]:
    """The names of tensors and of extra state -> these without what wrappers add. `module.` is DistributedDataParallel's where all have it:
    else it is a submodule that is called so."""
    names = {
        raw: unwrapped(str(raw))
        for raw, value in state.items()
        if isinstance(value, torch.Tensor) or is_extra_state(str(raw))
    }
    wrapped = all(name.startswith(WRAPPER) for name in names.values())
    return {raw: name.removeprefix(WRAPPER) for raw, name in names.items()} if wrapped else names

"""Converts between Lightning's state dicts and the parts of a checkpoint: names, lazy reads, and
edits by hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.stateful_objects import stateful_objects
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import FormatError, MismatchError
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format.codec import path_text
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS, check_part_name
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.modules import (
    clean_name,
    flatten_model,
    is_parameter_or_dtensor,
    without_buffers,
)
from unified_ckpt.views.model import with_model

_PART_NBYTES = 1 << 20  # smaller dicts of tensors stay in `extra`
# Callbacks whose state on rank 0 is that of the run: it broadcasts when to stop, and removes files.
_OF_RANK_0 = {"Timer", "ModelCheckpoint"}


class LazyStateDict(MutableMapping[str, torch.Tensor]):
    """The tensors of one part of a checkpoint as a state dict. A tensor is read, whole, when it is
    accessed.

    Hooks may remove, insert and rename tensors. `stored`: name here -> name in the checkpoint, of
    untouched tensors. `replaced`: tensors that hooks inserted.

    `order`: names that come first, in their order. `options`: how to read the checkpoint.
    `rename`: returns the name here of a stored name.
    """

    def __init__(
        self,
        path: str,
        part: str,
        *,
        order: Iterable[str] = (),
        options: SourceOptions = SourceOptions(),  # noqa: B008  # frozen
        rename: Callable[[str], str] = str,
    ) -> None:
        self._path, self._part, self._options = path, part, options
        with closing(_open(path, options)) as source:
            names = dict.fromkeys([*source.names(part), *source.aliases(part)])
        stored = {rename(name): name for name in names}
        first = {name: stored[name] for name in order if name in stored}
        self.stored = first | stored
        self.replaced: dict[str, torch.Tensor] = {}
        self._initial = dict(self.stored)

    @property
    def changed(self) -> bool:
        """Whether a hook changed anything."""
        return bool(self.replaced) or self.stored != self._initial

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.replaced:
            return self.replaced[name]
        stored = self.stored[name]
        with SourceView(_open(self._path, self._options)) as source:
            return source[self._part][stored][...]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.stored.pop(name, None)
        self.replaced[name] = tensor

    def __delitem__(self, name: str) -> None:
        if name in self.replaced:
            del self.replaced[name]
        else:
            del self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.stored, *self.replaced])

    def __len__(self) -> int:
        return len(self.stored) + len(self.replaced)

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a plain dict with all tensors read."""
        with SourceView(_open(self._path, self._options)) as source:
            return {
                **{name: source[self._part][stored][...] for name, stored in self.stored.items()},
                **self.replaced,
            }


def _open(path: str, options: SourceOptions) -> Source:
    return with_model(open_source(path, options))


def model_part(
    module: torch.nn.Module, state_dict: Mapping[str, Any], offered: Mapping[str, Any], *, rank: int
) -> Any:
    """Return what a rank saves as the model: the module itself if no hook changed `offered`, its
    state dict.

    Plain tensors that are not parameters are saved by rank 0 only, as in stock Lightning: running
    statistics differ between ranks.
    """
    flat = flatten_model(module)
    if state_dict.keys() == offered.keys() and all(
        state_dict[name] is tensor for name, tensor in offered.items()
    ):
        return module if rank == 0 else without_buffers(module)
    tensors = {}
    for raw, value in state_dict.items():
        name = clean_name(raw, ())
        parameter = flat.tensors.get(flat.aliases.get(name, name))
        tensors[name] = parameter if parameter is not None and value is offered.get(raw) else value
    return {
        name: tensor
        for name, tensor in tensors.items()
        if rank == 0 or is_parameter_or_dtensor(tensor)
    }


def extract_parts(checkpoint: dict[str, Any], *, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Remove dicts of tensors that hooks added, if large or sharded, from the checkpoint, and
    return them as parts.
    """
    parts = {}
    for key, value in list(checkpoint.items()):
        if _is_part(key, value):
            parts[key] = {
                name: tensor
                for name, tensor in checkpoint.pop(key).items()
                if rank == 0 or is_parameter_or_dtensor(tensor)
            }
    return parts


def check_values(checkpoint: Mapping[str, Any]) -> None:
    """Raise FormatError for an object with a `state_dict`: a load would return its state, where
    stock Lightning returns the object.
    """
    for key, value in checkpoint.items():
        for named in stateful_objects(value, str(key)):
            kind = type(named.target).__name__
            remedy = (
                "exclude it with save_hyperparameters(ignore=[...]), "
                "and pass it to load_from_checkpoint"
                if str(key).endswith("hyper_parameters")
                else "add what its state_dict() returns, and load that in on_load_checkpoint"
            )
            raise FormatError(f"{path_text(named.path)}: got a {kind}, expected values; {remedy}")


def remove_copies(checkpoint: dict[str, Any], offered: Mapping[str, Any], *, rank: int) -> None:
    """Remove copies of the model's state that hooks added, on ranks other than 0.

    `WeightAveraging` adds one. Buffers differ between ranks, and those of rank 0 are stored.
    `offered`: as in `model_part`.
    """
    for key, value in list(checkpoint.items()):
        if rank and isinstance(value, Mapping) and value and value.keys() <= offered.keys():
            del checkpoint[key]


def callback_states(
    states: Mapping[str, Any], callbacks: Sequence[Any], *, rank: int
) -> dict[str, Any]:
    """Return what a rank saves of the states of callbacks, by key.

    Each is compared between ranks as a whole: two ranks' `best_k_models` are no dict of all keys.
    """
    of_rank_0 = {
        callback.state_key
        for callback in callbacks
        if not _OF_RANK_0.isdisjoint(base.__name__ for base in type(callback).__mro__)
    }
    return {
        key: OrderedDict(state) if type(state) is dict else state
        for key, state in states.items()
        if rank == 0 or key not in of_rank_0
    }


def apply_edits(
    module: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool
) -> dict[str, torch.Tensor]:
    """Copy tensors that hooks inserted into the module. Returns what remains to be read: stored
    name -> target.

    Raises MismatchError, before anything is copied, if names or shapes differ; names only if
    `strict`.
    """
    flat = flatten_model(module)
    stored = state_dict.stored if isinstance(state_dict, LazyStateDict) else {}
    edits = {name: state_dict[name] for name in state_dict if name not in stored}
    targets = {
        **flat.tensors,
        **{alias: flat.tensors[name] for alias, name in flat.aliases.items()},
    }
    filled = {flat.aliases.get(name, name) for name in state_dict}
    missing = sorted(flat.tensors.keys() - filled) if strict else []
    unexpected = sorted(state_dict.keys() - targets.keys()) if strict else []
    wrong = [
        f"{name}: state_dict has shape {tuple(edits[name].shape)}, "
        f"the module {tuple(targets[name].shape)}"
        for name in edits.keys() & targets
        if edits[name].shape != targets[name].shape
    ]
    if missing or unexpected or wrong:
        lines = [
            *wrong,
            *(f"{name}: is not in state_dict" for name in missing),
            *(f"{name}: is in state_dict, but not in the module" for name in unexpected),
        ]
        raise MismatchError(
            "after on_load_checkpoint, state_dict and module differ:\n  " + "\n  ".join(lines),
            missing=missing,
            unexpected=unexpected,
            wrong=wrong,
        )
    with torch.no_grad():
        for name in edits.keys() & targets:
            _copy_into(targets[name], edits[name])
    return {
        stored_name: targets[name]
        for name, stored_name in stored.items()
        if name in flat.tensors or (name in targets and flat.aliases[name] not in state_dict)
    }


def _copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        full = value.to(target.device, target.dtype)
        replicated = DTensor.from_local(
            full, target.device_mesh, [Replicate()] * target.device_mesh.ndim, run_check=False
        )
        # each rank slices locally: nothing is sent
        value = replicated.redistribute(target.device_mesh, target.placements)
    target.copy_(value)


def _is_part(key: str, value: object) -> bool:
    if (
        not isinstance(value, Mapping)
        or not value
        or key in (MODEL, MASTER, OPTIMIZER, WITHOUT_MASTERS)
    ):
        return False
    if not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    ):
        return False
    try:
        check_part_name(key)
    except FormatError:
        return False
    return (
        any(isinstance(item, DTensor) for item in value.values())
        or sum(item.nbytes for item in value.values()) >= _PART_NBYTES
    )

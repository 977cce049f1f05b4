"""What a load fills: the leaves of a state dict, with what a checkpoint stores for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.dcp.arguments import Origin
from unified_ckpt.dcp.leaves import Leaf, leaves
from unified_ckpt.dcp.new_state import new_state_dict
from unified_ckpt.dcp.stored import Absent, StoredState
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, MismatchError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.comm.comm import default_device_type
from unified_ckpt.runtime.torch_state.rng import GeneratorState, is_generator
from unified_ckpt.runtime.torch_state.shards.carriers import named_shards

_LEFT_OUT = (
    "optimizer state is not loaded: the checkpoint has it, and the state dict's is empty; "
    "take a step with a learning rate of 0 before the state dict is created"
)


class Targets:
    """The leaves of a state dict to be filled, and the values that a checkpoint has for them.

    `state_dict`: the caller's, with the states of objects in place of them. `warning`: what is
    stored and not loaded, although the state dict has a place for it, or "".
    """

    def __init__(self, state_dict: Mapping[Any, Any], origin: Origin) -> None:
        self._given, self._origin = state_dict, origin
        self.state_dict: dict[Any, Any] = {}
        self.warning = ""
        self._stored: StoredState | None = None
        self._values: list[tuple[Leaf, Any]] = []

    def arguments(self, source: Source) -> LoadArguments:
        """Return the tensors to load, as arguments of a load; collect the values.

        MismatchError lists the keys that the source lacks, and values that do not fit.
        """
        # As in DCP, all ranks call these in one order, whatever that of their keys is.
        given = new_state_dict(source, self._origin.keys) if self._origin.is_new else self._given
        for key in sorted(given, key=str):
            value = given[key]
            self.state_dict[key] = value.state_dict() if isinstance(value, Stateful) else value
        stored = self._stored = StoredState(source, self.state_dict)
        if stored.leaves_optimizer_out():
            self.warning = _LEFT_OUT
        tensors, others = list[tuple[Key, Leaf]](), list[Leaf]()
        for leaf in map(_allocated, leaves(self.state_dict, flattens=self._origin.flattens)):
            stored_key = stored.tensor_key(leaf) if leaf.is_tensor else None
            if stored_key is not None:
                tensors.append((stored_key, leaf))
            else:
                others.append(leaf)
        found = list(zip(others, stored.fitting_values(others, _fits), strict=True))
        if not self._origin.is_partial:
            missing = [leaf.name for leaf, value in found if value is Absent.VALUE]
            _raise_missing(missing)
        self._values = [(leaf, value) for leaf, value in found if value is not Absent.VALUE]
        raise_if_any(
            MismatchError,
            "checkpoint and state dict differ, expected equal shapes",
            [text for leaf, value in self._values if (text := _difference(leaf, value))],
        )
        return _load_arguments(tensors)

    def install(self, report: LoadReport) -> None:
        """Set the values: those of this rank, where ranks had different ones."""
        values, metadata = self._values, report.metadata
        if self._stored is not None and metadata is not None and metadata.rank_values is not None:
            of_rank = self._stored.values([leaf for leaf, _ in values], metadata)
            values = [
                (leaf, shared if value is Absent.VALUE else value)
                for (leaf, shared), value in zip(values, of_rank, strict=True)
            ]
        for leaf, value in values:
            if leaf.is_tensor and isinstance(value, torch.Tensor):
                _copy(leaf, value)
            elif isinstance(leaf.value, Stateful):  # inside of a dict
                leaf.value.load_state_dict(value)
            elif is_generator(leaf.value):
                GeneratorState(leaf.value).load_state_dict(value)
            else:
                leaf.container[leaf.key] = value


def _allocated(leaf: Leaf) -> Leaf:
    """Return a leaf with memory, as DCP allocates it for tensors on the meta device."""
    tensor = leaf.value
    if not leaf.is_tensor or named_shards(leaf.name, tensor) is not None or not tensor.is_meta:
        return leaf
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
        shape, stride = tensor.size(), tensor.stride()
        allocated: torch.Tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, shape=shape, stride=stride
        )
    else:
        allocated = torch.empty_like(tensor, device=default_device_type())
    leaf.container[leaf.key] = allocated
    return replace(leaf, value=allocated)


def _raise_missing(missing: list[str]) -> None:
    """Raise MismatchError for keys that the checkpoint lacks, with the text of DCP."""
    if missing:
        keys = ", ".join(missing[:20]) + ", ..." * (len(missing) > 20)
        raise MismatchError(
            f"Missing key in checkpoint state_dict: {keys}; remove it from the state dict, or pass "
            "planner=DefaultLoadPlanner(allow_partial_load=True)",
            missing=missing,
        )


def _difference(leaf: Leaf, value: Any) -> str:
    """Return how the shapes of a tensor and of its stored value differ, or ""."""
    if not leaf.is_tensor or not isinstance(value, torch.Tensor):
        return ""
    shards = named_shards(leaf.name, leaf.value)
    shape = tuple(leaf.value.shape) if shards is None else shards[0].global_shape
    if shape == tuple(value.shape):
        return ""
    return f"{leaf.name}: checkpoint has shape {tuple(value.shape)}, state dict has {shape}"


def _fits(leaf: Leaf, value: Any) -> bool:
    return value is not Absent.VALUE and not _difference(leaf, value)


def _load_arguments(tensors: Iterable[tuple[Key, Leaf]]) -> LoadArguments:
    """Return tensors by stored part and name. FormatError for two that would read one."""
    parts: dict[str, dict[str, Any]] = {}
    for (part, name), leaf in tensors:
        of_part = parts.setdefault(part, {})
        if of_part.setdefault(name, leaf.value) is not leaf.value:
            raise FormatError(
                f"{leaf.name}: reads {part}:{name} of the checkpoint, as another key does; load "
                "them in two calls"
            )
    arguments = LoadArguments()
    if MODEL in parts:
        arguments["model"] = parts.pop(MODEL)
    if OPTIMIZER in parts:
        arguments["optimizer"] = parts.pop(OPTIMIZER)
    if MASTER in parts:
        arguments["master_weights"] = parts.pop(MASTER)
    if parts:
        arguments["parts"] = parts
    return arguments


@torch.no_grad()
def _copy(leaf: Leaf, value: torch.Tensor) -> None:
    """Copy a stored value into a tensor, or what this rank holds of it."""
    target, shards = leaf.value, named_shards(leaf.name, leaf.value)
    if shards is not None:
        for box, view in chain.from_iterable(each.views() for each in shards):
            view.copy_(value[box.slices])
        return
    if isinstance(target, DTensor):
        mesh, device = target.device_mesh, target.to_local().device
        replicated = [Replicate()] * mesh.ndim
        whole = DTensor.from_local(value.to(device), mesh, replicated, run_check=False)
        value, target = whole.redistribute(mesh, target.placements).to_local(), target.to_local()
    target.copy_(value)

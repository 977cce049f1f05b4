"""Builds the state dict that a checkpoint stores, for a load without a state dict to fill."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.dcp.leaves import KeyPath, flat_key, leaves
from unified_ckpt.dcp.sections import GROUPS, PARAMS, STATE, TENSORS
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.value_paths import DCP_RECORD
from unified_ckpt.foreign.dcp.keys import StoredObjects
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import torch_dtype


def new_state_dict(source: Source, keys: Collection[str] | None) -> dict[str, Any]:
    """Return the stored state dict with tensors of the stored shapes, whose values are to be read.

    `keys`: flat keys, or those of dicts around them; None for all.
    """
    state_dict: dict[str, Any] = {}
    for path, value in _values(source):
        outer_keys = accumulate(map(str, path), lambda key, step: f"{key}.{step}")
        if keys is None or not set(keys).isdisjoint(outer_keys):
            _insert(state_dict, path, value)
    return state_dict


def _values(source: Source) -> Iterator[tuple[KeyPath, Any]]:
    """Yield paths and values in the state dict; None for values that are read later."""
    metadata = source.metadata()
    tensors = {
        key: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for key, spec in source.all_specs().items()
    }
    if isinstance(metadata.extra, StoredObjects):
        stored = {name: tensor for (_, name), tensor in tensors.items()}
        for key, path in metadata.extra.paths.items():
            yield path, stored.get(key)
        return
    extra = dict(metadata.extra) if isinstance(metadata.extra, dict) else {}
    record = extra.pop(DCP_RECORD, {MODEL: [MODEL], OPTIMIZER: [OPTIMIZER]})
    yield from ((leaf.path, leaf.value) for leaf in leaves(extra))
    model = tuple(record.get(MODEL, ()))
    yield from (((*model, name), value) for name, value in metadata.modules.items())
    yield from _optimizer_values(tensors, metadata, record)
    paths = {key: tuple(path) for key, path in record.get("paths", {}).items()}
    for (part, name), tensor in tensors.items():
        if part in (OPTIMIZER, MASTER):
            continue
        prefix = model if part == MODEL else () if part == TENSORS else (part,)
        names = [name, *(a for a, stored in source.aliases(part).items() if stored == name)]
        for path in ((*prefix, each) for each in names):
            yield paths.get(flat_key(path), path), tensor.clone() if len(names) > 1 else tensor


def _optimizer_values(
    tensors: Mapping[Key, torch.Tensor], metadata: SourceMetadata, record: Mapping[str, Any]
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the state and options of the optimizer, in the form in which they were saved."""
    prefix, is_flat = tuple(record.get(OPTIMIZER, ())), record.get("flat", False)
    states: dict[tuple[str, str], Any] = {}
    for fqn, values in metadata.scalars.items():
        states |= {(fqn, key): value for key, value in values.items()}
    master_keys = {n: group.get("masters") for group in metadata.groups for n in group["names"]}
    for (part, name), tensor in tensors.items():
        if part == OPTIMIZER:
            fqn, _, key = name.rpartition("/")
            states[fqn, key] = tensor
        elif part == MASTER and (master_key := master_keys.get(name)):
            states[name, master_key] = tensor
    for (fqn, key), value in states.items():
        yield (*prefix, *([f"{STATE}.{fqn}.{key}"] if is_flat else [STATE, fqn, key])), value
    if is_flat:
        for group in metadata.groups:
            for fqn in group["names"]:
                for key, value in group["options"].items():
                    yield (*prefix, f"{GROUPS}.{fqn}.{key}"), value
    elif metadata.groups:
        groups = [{**group["options"], PARAMS: list(group["names"])} for group in metadata.groups]
        yield (*prefix, GROUPS), groups


def _insert(tree: Any, path: KeyPath, value: Any) -> None:
    """Set a value at a path in dicts and lists, which are created for keys and positions."""
    for i, step in enumerate(path):
        if isinstance(step, int):
            tree.extend([None] * (step + 1 - len(tree)))
        if i + 1 == len(path):
            tree[step] = value
        elif (tree[step] if isinstance(step, int) else tree.get(step)) is None:
            tree[step] = [] if isinstance(path[i + 1], int) else {}
        tree = tree[step]

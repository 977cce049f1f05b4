"""Opens Orbax checkpoints as Sources: pytrees of JAX, above all those of MaxText.

The tree gives each array its part. `params` is the model, the state of optax's Adam is the
optimizer, `step` is the step. Other arrays become parts named after their key; scalars and strings
become `extra`. MaxText tensors are shown with Hugging Face names and layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.json import read_json
from unified_ckpt.foreign.files.parsing import set_nested
from unified_ckpt.foreign.orbax.arrays import StoredArray, chunk_boxes, open_arrays
from unified_ckpt.foreign.orbax.folders import OrbaxStep, OrbaxTree, read_tree, resolve_step
from unified_ckpt.foreign.orbax.maxtext import (
    UNKNOWN_MODEL,
    infer_model_type,
    is_maxtext,
    resolve_config,
    to_huggingface,
)
from unified_ckpt.foreign.orbax.tree import LeafRoles, Path, classify_leaves
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor, single_shard

_LOG = logging.getLogger("unified_ckpt")


def open_orbax(root: str, options: SourceOptions) -> ShardedSource:
    """Open an item, a step, or the latest complete step of a root.

    If MaxText's model is unknown, its own names are shown with a warning, or FormatError is raised
    if Hugging Face names are required. Raises FormatError if the checkpoint is damaged,
    IncompleteError naming what is missing or unfinished.
    """
    step = resolve_step(root)
    trees = {item: read_tree(folder) for item, folder in step.items.items()}
    arrays, strings = _open_leaves(trees)
    roles = classify_leaves({path: array.shape for path, array in arrays.items()})
    stored = {key: arrays[path] for path, key in roles.tensors.items()}
    weights = {name: array.shape for (part, name), array in stored.items() if part == MODEL}
    tensors: dict[Key, ShardedTensor] = {}
    aliases: dict[str, str] = {}
    names = {name: [name] for name in weights}
    if options.names == "huggingface" and not is_maxtext(weights):
        raise FormatError(
            f"{step.path}: has no MaxText names, the only ones with Hugging Face names; pass "
            "names='own' or 'auto'"
        )
    native_names = options.names == "own" or not is_maxtext(weights)
    if (
        not native_names
        and options.names == "auto"
        and options.config is None
        and infer_model_type(weights) is None
    ):
        _LOG.warning("%s: %s; using MaxText's own names", step.path, UNKNOWN_MODEL)
        native_names = True
    if not native_names:
        tensors, aliases, names = to_huggingface(
            stored, resolve_config(options.config, weights, label=step.path), label=step.path
        )
        stored = {key: array for key, array in stored.items() if key[0] not in (MODEL, OPTIMIZER)}
    tensors |= {key: _as_stored(array) for key, array in stored.items()}
    for count, owners in roles.step_counts.items():
        step_count = _step_count(arrays[count])
        tensors |= {
            (OPTIMIZER, f"{hf_name}/step"): step_count
            for native_name in owners
            for hf_name in names[native_name]
        }
    metadata = _metadata(step, trees, arrays, strings, roles)
    return ShardedSource(
        step.path,
        tensors,
        format="orbax",
        metadata=metadata,
        aliases={MODEL: aliases},
        extras=SourceExtras(rank_extra=partial(_iterator_state, step)),
    )


def _open_leaves(
    trees: Mapping[str, OrbaxTree],
) -> tuple[dict[Path, StoredArray], dict[Path, str]]:
    """Open the leaves of all items; if there are several, paths start with the item's name."""
    arrays: dict[Path, StoredArray] = {}
    strings: dict[Path, str] = {}
    for item, tree in trees.items():
        by_name = open_arrays(
            tree.root, tree.arrays.values(), zarr3=tree.zarr3, zeros_omitted=tree.zeros_omitted
        )
        prefix = (item,) if len(trees) > 1 else ()
        arrays |= {(*prefix, *path): by_name[name] for path, name in tree.arrays.items()}
        strings |= {(*prefix, *path): text for path, text in tree.strings.items()}
    return arrays, strings


def _as_stored(array: StoredArray) -> ShardedTensor:
    """Return an array without any transform."""
    shards = [
        TensorShard(box, partial(array.read, box), array.label, cache=True)
        for box in chunk_boxes(
            array.shape,
            array.chunk,
            array.dtype.itemsize,
            axes=range(len(array.shape)),
            nbytes=array.read_nbytes,
        )
    ]
    with error_prefix(array.label):
        return sharded_tensor(array.dtype, array.shape, shards)


def _step_count(array: StoredArray) -> ShardedTensor:
    """Return Adam's count as torch's AdamW stores it."""
    return single_shard(
        torch.float32, (), lambda: array.read(full_box(())).to(torch.float32), array.label
    )


def _metadata(
    step: OrbaxStep,
    trees: Mapping[str, OrbaxTree],
    arrays: Mapping[Path, StoredArray],
    strings: Mapping[Path, str],
    roles: LeafRoles,
) -> SourceMetadata:
    number = (
        int(arrays[roles.step].read(full_box(())).item()) if roles.step is not None else step.number
    )
    extra: dict[Any, Any] = {}
    for path in roles.scalars:
        set_nested(extra, path, arrays[path].read(full_box(())).item())
    for path, text in strings.items():
        set_nested(extra, path, text)
    for item, file in step.json_items.items():
        set_nested(extra, (item,), read_json(file))
    custom = {item: tree.custom for item, tree in trees.items() if tree.custom}
    custom |= step.metadata.get("custom_metadata") or {}
    if custom:
        set_nested(extra, ("custom_metadata",), custom)
    return SourceMetadata(
        step=number,
        extra=extra or None,
        rank_extras=len(step.iterator_states),
        left_out=step.left_out,
    )


def _iterator_state(step: OrbaxStep, rank: int) -> Any:
    """Return the state of a rank's MaxText data iterator."""
    if rank >= len(step.iterator_states):
        return None
    return {"iter": read_json(step.iterator_states[rank])}

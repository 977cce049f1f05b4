"""Presents a model with Hugging Face names under MaxText's names and shapes.

Reads nothing early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.orbax.arrays import chunk_boxes
from unified_ckpt.foreign.orbax.maxtext_names import TensorLink, parse_sizes, tensor_links
from unified_ckpt.foreign.orbax.maxtext_transforms import (
    MOMENT_POWERS,
    hf_box,
    split_axes,
    stacked_box,
    to_maxtext,
    transform_for,
)
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.materialize import read_tensor
from unified_ckpt.views.shard_assembler import CACHE_NBYTES
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import (
    ShardedTensor,
    TensorShard,
    sharded_tensor,
    single_shard,
    whole_tensor,
)

_STATES = (*MOMENT_POWERS, "step")


def maxtext_view(
    source: Source, config: Mapping[str, Any], *, stacked: bool = True
) -> ShardedSource:
    """Return the source in MaxText's layout, with layers stacked or not.

    `config` is the model's Hugging Face configuration. Names are those below MaxText's `params`;
    names of optimizer state add the state after a slash. `step` exists once for each of MaxText's
    tensors. Only the model, its master weights and the optimizer are in the view. Closing the view
    closes the source.

    IncompleteError for tensors that the source lacks, FormatError for tensors that MaxText has no
    name for, or of other shapes.
    """
    sizes = parse_sizes(config, label=source.format)
    links_by_tensor: dict[str, list[TensorLink]] = {}
    for link in tensor_links(sizes, stacked=stacked):
        links_by_tensor.setdefault(link.maxtext_name, []).append(link)
    _check_tensors(source, [link for links in links_by_tensor.values() for link in links])
    tensors: dict[Key, ShardedTensor] = {}
    parts = {MODEL, MASTER, OPTIMIZER}
    for part in [part_name for part_name in source.parts if part_name in parts]:
        specs = source.specs(part, source.names(part))
        for maxtext_name, links in links_by_tensor.items():
            for state in _STATES if part == OPTIMIZER else (None,):
                links_by_name = {_state_name(link.hf_name, state): link for link in links}
                present = [name for name in links_by_name if name in specs]
                if present:
                    key = part, _state_name(maxtext_name, state)
                    tensors[key] = _maxtext_tensor(
                        source, part, {name: links_by_name[name] for name in present}, specs, state
                    )
    metadata = source.metadata()
    for maxtext_name, count in _step_counts(metadata, links_by_tensor).items():
        if (OPTIMIZER, f"{maxtext_name}/step") in tensors:
            raise FormatError(
                f"MaxText: {maxtext_name} merges parameters whose step is a tensor for some and a "
                "number for others; expected one kind"
            )
        tensors[OPTIMIZER, f"{maxtext_name}/step"] = whole_tensor(torch.tensor(count), OPTIMIZER)
    maxtext_name_of = {
        link.hf_name: maxtext_name
        for maxtext_name, links in links_by_tensor.items()
        for link in links
    }
    groups = [
        {
            **group,
            "names": list(
                dict.fromkeys(
                    maxtext_name_of[name] for name in group["names"] if name in maxtext_name_of
                )
            ),
        }
        for group in metadata.groups
    ]
    return ShardedSource(
        "MaxText",
        tensors,
        format="maxtext",
        metadata=replace(metadata, groups=groups, scalars={}),
        extras=SourceExtras(close=source.close),
    )


def _step_counts(
    metadata: SourceMetadata, links_by_tensor: Mapping[str, Sequence[TensorLink]]
) -> dict[str, float]:
    """Return steps that are numbers, by MaxText's name.

    FormatError for other non-tensor state, and if steps differ.
    """
    hf_names = {link.hf_name for links in links_by_tensor.values() for link in links}
    raise_if_any(
        FormatError,
        "MaxText: has no name for",
        [
            f"{OPTIMIZER}:{name}/{key}"
            for name, state in metadata.scalars.items()
            for key, value in state.items()
            if name not in hf_names or key != "step" or not isinstance(value, int | float)
        ],
    )
    counts: dict[str, float] = {}
    for maxtext_name, links in links_by_tensor.items():
        steps = {
            float(metadata.scalars[link.hf_name]["step"])
            for link in links
            if metadata.scalars.get(link.hf_name)
        }
        if len(steps) > 1:
            raise FormatError(
                f"MaxText: {maxtext_name} merges parameters with steps {sorted(steps)}, expected "
                "one step"
            )
        if steps:
            counts[maxtext_name] = steps.pop()
    return counts


def _state_name(name: str, state: str | None) -> str:
    return name if state is None else f"{name}/{state}"


def _check_tensors(source: Source, all_links: Iterable[TensorLink]) -> None:
    """Check that every tensor of the model exists with its shape, and that there are no others."""
    shapes = {link.hf_name: link.transform.hf_shape for link in all_links}
    specs = source.specs(MODEL, source.names(MODEL))
    missing = [f"{name} {shape}" for name, shape in shapes.items() if name not in specs]
    shape_pairs = {
        name: (specs[name].shape, shape) for name, shape in shapes.items() if name in specs
    }
    mismatched = [
        f"{name}: got shape {stored_shape}, expected {expected_shape}"
        for name, (stored_shape, expected_shape) in shape_pairs.items()
        if stored_shape != expected_shape
    ]
    known_names = {
        MODEL: set(shapes),
        MASTER: set(shapes),
        OPTIMIZER: {f"{name}/{state}" for name in shapes for state in _STATES},
    }
    unsupported = [
        f"{part}:{name}"
        for part, names in known_names.items()
        for name in sorted(set(source.names(part)) - names)
    ]
    raise_if_any(IncompleteError, "MaxText: the checkpoint lacks tensors of the model", missing)
    raise_if_any(FormatError, "MaxText: shapes differ from the configuration", mismatched)
    raise_if_any(FormatError, "MaxText: has no name for", unsupported)


def _maxtext_tensor(
    source: Source,
    part: str,
    links_by_name: Mapping[str, TensorLink],
    specs: Mapping[str, TensorSpec],
    state: str | None,
) -> ShardedTensor:
    """Return one of MaxText's tensors, made of the source's tensors in `links_by_name`."""
    dtypes = {specs[name].dtype for name in links_by_name}
    if len(dtypes) > 1:
        raise FormatError(
            f"{part}:{next(iter(links_by_name))}: got stacked tensors of dtypes "
            f"{', '.join(sorted(dtypes))}, expected one dtype"
        )
    dtype = torch_dtype(dtypes.pop())
    if state == "step":
        return single_shard(
            dtype, (), partial(_common_step, source, part, list(links_by_name)), part
        )
    # a row of MaxText's tensor spans all layers, whose shards should stay cached together
    nbytes = CACHE_NBYTES // 2 // len(links_by_name)
    shards = []
    for name, link in links_by_name.items():
        read = partial(read_tensor, source, (part, name))
        transform = transform_for(link.transform, state)
        for box in chunk_boxes(
            transform.maxtext_shape,
            transform.maxtext_shape,
            dtype.itemsize,
            axes=split_axes(transform)[::-1],
            nbytes=nbytes,
        ):
            load = partial(_load_box, read, link, state, box)
            shards.append(
                TensorShard(stacked_box(box, link.indices), load, f"{part}:{name}", cache=True)
            )
    with error_prefix(f"{part}:{next(iter(links_by_name))}"):
        return sharded_tensor(dtype, next(iter(links_by_name.values())).shape, shards)


def _load_box(
    read: Callable[[Box], torch.Tensor], link: TensorLink, state: str | None, maxtext_box: Box
) -> torch.Tensor:
    transform = transform_for(link.transform, state)
    tensor = read(hf_box(transform, maxtext_box))
    transformed = to_maxtext(tensor, transform, maxtext_box.shape)
    return transformed.reshape(stacked_box(maxtext_box, link.indices).shape)


def _common_step(source: Source, part: str, names: Sequence[str]) -> torch.Tensor:
    """Return the single step count that MaxText stores. FormatError if the source's differ."""
    steps = torch.stack([read_tensor(source, (part, name), full_box(())) for name in names])
    if not bool((steps == steps[0]).all()):
        raise FormatError(
            f"{part}: {names[0]} and others of one MaxText tensor have steps "
            f"{sorted(set(steps.tolist()))}, expected one step"
        )
    return steps[0]

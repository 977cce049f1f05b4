"""A model under Hugging Face's names as MaxText has it: its names and shapes, layers stacked or not. No byte moves before it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.orbax.arrays import cells
from unified_ckpt.sources.orbax.maxtext_names import Link, links, sizes_of
from unified_ckpt.sources.orbax.maxtext_transforms import (
    MOMENTS,
    axes_of,
    box_of_ours,
    spread,
    to_theirs,
    turn_of,
)
from unified_ckpt.views.shards import (
    KEPT_NBYTES,
    Assembled,
    Assembly,
    Fragment,
    assembly,
    whole_tensor,
)

_MASTER = "master_weights"
_STATES = (*MOMENTS, "step")


def maxtext_view(source: Source, config: Mapping[str, Any], *, stacked: bool = True) -> Assembled:
    """`config`: the model's Hugging Face configuration. Names are MaxText's below `params`, those of moments have the state after a slash,
    as everywhere here; `step` stands once for each of MaxText's tensors. Closing the view closes the source.

    IncompleteError for tensors that the model has and the source lacks, FormatError for those that MaxText has no name for, or of other
    shapes. Parts other than the model, its master weights and the optimizer are not in the view.
    """
    sizes = sizes_of(config, where=source.format)
    of: dict[str, list[Link]] = {}
    for link in links(sizes, stacked=stacked):
        of.setdefault(link.theirs, []).append(link)
    _check(source, [link for found in of.values() for link in found])
    tensors: dict[Key, Assembly] = {}
    for part in [one for one in (MODEL, _MASTER, OPTIMIZER) if one in source.parts]:
        specs = source.specs(part, source.names(part))
        for theirs, found in of.items():
            for state in _STATES if part == OPTIMIZER else (None,):
                named = {_named(link.ours, state): link for link in found}
                there = [name for name in named if name in specs]
                if there:
                    key = part, _named(theirs, state)
                    tensors[key] = _joined(
                        source, part, {name: named[name] for name in there}, specs, state
                    )
    said = source.said()
    for theirs, count in _counts(said, of).items():
        if (OPTIMIZER, f"{theirs}/step") in tensors:
            raise FormatError(
                f"MaxText: {theirs} is made of parameters of which some have a tensor for step, others a number; needed one kind"
            )
        tensors[OPTIMIZER, f"{theirs}/step"] = whole_tensor(torch.tensor(count), OPTIMIZER)
    theirs_of = {link.ours: theirs for theirs, found in of.items() for link in found}
    return Assembled(
        "MaxText", tensors, format="maxtext", said=_said(said, theirs_of), close=source.close
    )


def _counts(said: Said, of: Mapping[str, Sequence[Link]]) -> dict[str, float]:
    """Steps that are numbers and no tensors, by MaxText's name. FormatError for other state that is no tensor, and where steps differ."""
    ours = {link.ours for found in of.values() for link in found}
    other = [
        f"{OPTIMIZER}:{name}/{key}"
        for name, state in said.scalars.items()
        for key, value in state.items()
        if name not in ours or key != "step" or not isinstance(value, int | float)
    ]
    if other:
        raise FormatError(listed("MaxText: has no name for", other))
    counts: dict[str, float] = {}
    for theirs, found in of.items():
        steps = {
            float(said.scalars[link.ours]["step"]) for link in found if said.scalars.get(link.ours)
        }
        if len(steps) > 1:
            raise FormatError(
                f"MaxText: {theirs} is made of parameters that have steps {sorted(steps)}; needed one"
            )
        if steps:
            counts[theirs] = steps.pop()
    return counts


def _named(name: str, state: str | None) -> str:
    return name if state is None else f"{name}/{state}"


def _check(source: Source, wanted: Iterable[Link]) -> None:
    """Every tensor of the model is there with its shape, and no part has one that is not of the model."""
    shapes = {link.ours: link.turn.ours for link in wanted}
    specs = source.specs(MODEL, source.names(MODEL))
    lost = [f"{name} {shape}" for name, shape in shapes.items() if name not in specs]
    found = {name: (specs[name].shape, shape) for name, shape in shapes.items() if name in specs}
    wrong = [
        f"{name} has shape {theirs}, needed {ours}"
        for name, (theirs, ours) in found.items()
        if theirs != ours
    ]
    known = {
        MODEL: set(shapes),
        _MASTER: set(shapes),
        OPTIMIZER: {f"{name}/{state}" for name in shapes for state in _STATES},
    }
    other = [
        f"{part}:{name}"
        for part, names in known.items()
        for name in sorted(set(source.names(part)) - names)
    ]
    if lost:
        raise IncompleteError(
            listed("MaxText: the model has tensors that the checkpoint lacks", lost)
        )
    if wrong:
        raise FormatError(
            listed("MaxText: tensors have other shapes than the configuration says", wrong)
        )
    if other:
        raise FormatError(listed("MaxText: has no name for", other))


def _joined(
    source: Source,
    part: str,
    named: Mapping[str, Link],
    specs: Mapping[str, TensorSpec],
    state: str | None,
) -> Assembly:
    """One of MaxText's tensors of ours, by name."""
    dtypes = {specs[name].dtype for name in named}
    if len(dtypes) > 1:
        raise FormatError(
            f"{part}:{next(iter(named))}: tensors that are stacked have dtypes {', '.join(sorted(dtypes))}; needed one"
        )
    dtype = TORCH_DTYPES[dtypes.pop()]
    if state == "step":
        return assembly(
            dtype, (), [Fragment(whole(()), partial(_step, source, part, list(named), dtype), part)]
        )
    nbytes = (
        KEPT_NBYTES // 2 // len(named)
    )  # a row of MaxText's tensor has parts of all layers: these are kept together
    found = []
    for name, link in named.items():
        turn = turn_of(link.turn, state)
        for piece in cells(
            turn.theirs, turn.theirs, dtype.itemsize, axes=axes_of(turn)[::-1], nbytes=nbytes
        ):
            load = partial(_load, source, part, name, link, state, piece, dtype)
            found.append(Fragment(spread(piece, link.at), load, f"{part}:{name}", keep=True))
    try:
        return assembly(dtype, next(iter(named.values())).shape, found)
    except CheckpointError as error:
        raise type(error)(f"{part}:{next(iter(named))}: {error}") from error


def _load(
    source: Source,
    part: str,
    name: str,
    link: Link,
    state: str | None,
    piece: Box,
    dtype: torch.dtype,
) -> torch.Tensor:
    turn = turn_of(link.turn, state)
    box = box_of_ours(turn, piece)
    return to_theirs(_read(source, part, name, box, dtype), turn, piece.shape).reshape(
        spread(piece, link.at).shape
    )


def _read(source: Source, part: str, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(source.read(part, name, box)), dtype=dtype).reshape(box.shape)


def _step(source: Source, part: str, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """MaxText has one count. FormatError where ours differ."""
    found = torch.stack([_read(source, part, name, whole(()), dtype) for name in names])
    if not bool((found == found[0]).all()):
        raise FormatError(
            f"{part}: {names[0]} and others of one of MaxText's tensors have steps {sorted(set(found.tolist()))}; needed one"
        )
    return found[0]


def _said(said: Said, theirs_of: Mapping[str, str]) -> Said:
    """Param groups by MaxText's names."""
    groups = [
        {
            **group,
            "names": list(
                dict.fromkeys(theirs_of[name] for name in group["names"] if name in theirs_of)
            ),
        }
        for group in said.groups
    ]
    return replace(said, groups=groups, scalars={})

"""Orbax: pytrees of JAX, MaxText's checkpoints above all, read through tensorstore, without JAX.

The tree says what is what: `params` is the model, what optax's Adam keeps is the optimizer, `step` the step, other arrays are parts of
the name that they stand under, scalars and text are `extra`. MaxText's tensors get Hugging Face's names and forms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import read_json
from unified_ckpt.sources.orbax.arrays import Array, cells, open_arrays
from unified_ckpt.sources.orbax.folders import Step, find_step, read_tree
from unified_ckpt.sources.orbax.maxtext import UNKNOWN, config_of, huggingface, is_known, is_maxtext
from unified_ckpt.sources.orbax.tree import Path, Places, places
from unified_ckpt.views.shards import Assembled, Assembly, Fragment, assembly

_LOG = logging.getLogger("unified_ckpt")


def open_orbax(root: str, options: SourceOptions) -> Assembled:
    """An item, a step, or the newest complete step of a root. FormatError where it is damaged; IncompleteError naming what is missing
    or was not finished.

    Where it is not known which of MaxText's models it is, its own names, with a warning; FormatError where Hugging Face's are asked for.
    """
    step = find_step(root)
    arrays, strings = _leaves(step)
    placed = places({path: one.shape for path, one in arrays.items()})
    held = {key: arrays[path] for path, key in placed.tensors.items()}
    weights = {name: one.shape for (part, name), one in held.items() if part == MODEL}
    tensors: dict[Key, Assembly] = {}
    aliases: dict[str, str] = {}
    names = {name: [name] for name in weights}
    if options.names == "huggingface" and not is_maxtext(weights):
        raise FormatError(
            f"{step.path}: is not of MaxText, whose names alone are known; needed names='own', or 'auto'"
        )
    own = options.names == "own" or not is_maxtext(weights)
    if not own and options.names == "auto" and options.config is None and not is_known(weights):
        _LOG.warning("%s: %s; its own names are shown", step.path, UNKNOWN)
        own = True
    if not own:
        tensors, aliases, names = huggingface(
            held, config_of(options.config, weights, where=step.path), where=step.path
        )
        held = {key: one for key, one in held.items() if key[0] not in (MODEL, OPTIMIZER)}
    tensors |= {key: _own(one) for key, one in held.items()}
    for count, owners in placed.counts.items():
        counted = _count(arrays[count])
        tensors |= {
            (OPTIMIZER, f"{ours}/step"): counted for theirs in owners for ours in names[theirs]
        }
    said = _said(step, arrays, strings, placed)
    return Assembled(
        step.path,
        tensors,
        format="orbax",
        said=said,
        aliases={MODEL: aliases},
        rank_extra=partial(_position, step),
    )


def _leaves(step: Step) -> tuple[dict[Path, Array], dict[Path, str]]:
    """Of all items, below the item's name where there are several."""
    arrays: dict[Path, Array] = {}
    strings: dict[Path, str] = {}
    for item, folder in step.items.items():
        tree = read_tree(folder)
        found = open_arrays(folder, tree.arrays.values(), zarr3=tree.zarr3, filled=tree.filled)
        prefix = (item,) if len(step.items) > 1 else ()
        arrays |= {(*prefix, *path): found[name] for path, name in tree.arrays.items()}
        strings |= {(*prefix, *path): text for path, text in tree.strings.items()}
    return arrays, strings


def _own(array: Array) -> Assembly:
    """As it is stored."""
    found = [
        Fragment(box, partial(array.read, box.offsets, box.shape), array.where, keep=True)
        for box in cells(
            array.shape,
            array.chunk,
            array.dtype.itemsize,
            axes=range(len(array.shape)),
            nbytes=array.piece_nbytes,
        )
    ]
    try:
        return assembly(array.dtype, array.shape, found)
    except CheckpointError as error:
        raise type(error)(f"{array.where}: {error}") from error


def _count(array: Array) -> Assembly:
    """Adam's count, as torch's AdamW keeps it."""
    return assembly(
        torch.float32,
        (),
        [Fragment(whole(()), lambda: array.read((), ()).to(torch.float32), array.where)],
    )


def _said(
    step: Step, arrays: Mapping[Path, Array], strings: Mapping[Path, str], placed: Places
) -> Said:
    number = (
        int(arrays[placed.step].read((), ()).item()) if placed.step is not None else step.number
    )
    extra: dict[Any, Any] = {}
    for path in placed.values:
        _put(extra, path, arrays[path].read((), ()).item())
    for path, text in strings.items():
        _put(extra, path, text)
    for item, file in step.plain.items():
        _put(extra, (item,), read_json(file))
    if step.told.get("custom_metadata"):
        _put(extra, ("custom_metadata",), step.told["custom_metadata"])
    return Said(step=number, extra=extra or None, rank_extras=len(step.positions))


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for one in path[:-1]:
        tree = tree.setdefault(one, {})
    tree[path[-1]] = value


def _position(step: Step, rank: int) -> Any:
    """Of MaxText's data iterator."""
    return {"iter": read_json(step.positions[rank])} if rank < len(step.positions) else None

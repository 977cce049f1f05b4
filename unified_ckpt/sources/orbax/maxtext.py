"""MaxText's tensors under Hugging Face's names: all that the model has are there, of the right shape, and none is left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import read_config
from unified_ckpt.sources.orbax.arrays import Array, cells
from unified_ckpt.sources.orbax.maxtext_names import LAYER_AXIS, Link, links, sizes_of
from unified_ckpt.sources.orbax.maxtext_transforms import (
    axes_of,
    box_of_ours,
    spread,
    to_ours,
    turn_of,
)
from unified_ckpt.views.shards import KEPT_NBYTES, Assembly, Fragment, assembly

UNKNOWN = (
    "is MaxText's, and its names are those of several models, which differ in the order and the scale of queries; needed the model's "
    "config.json (SourceOptions.config, --config), or its own names (SourceOptions.names, --names own)"
)
EMBEDDING = "token_embedder.embedding"
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_STACKED = re.compile(r"decoder\.layers\.")


def is_maxtext(names: Iterable[str]) -> bool:
    """Whether a model's own names are MaxText's decoder."""
    found = set(names)
    return EMBEDDING in found and any(name.startswith("decoder.") for name in found)


def is_known(shapes: Iterable[str]) -> bool:
    """Whether MaxText's names say which model it is."""
    return _kind(shapes) is not None


def config_of(
    path: str | None, shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> dict[str, Any]:
    """The model's configuration: of a file or a folder that has it, or from the names and shapes where those say which model it is.
    FormatError where they do not."""
    if path is not None:
        return read_config(path)
    kind = _kind(shapes)
    if kind is None:
        raise FormatError(f"{where}: {UNKNOWN}")
    return _config(kind, shapes)


def _kind(shapes: Iterable[str]) -> str | None:
    """Llama, Mistral and Qwen have the same names, and other rules."""
    last = {name.split(".")[-2] for name in shapes if "." in name}
    if any(".MoeBlock_0." in name for name in shapes):
        return "mixtral"
    if "post_ffw_norm" in last:
        return "gemma3_text" if "query_norm" in last else None
    return "gemma" if "pre_ffw_norm" in last else None


def _config(kind: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What shapes say. Padding of the vocabulary cannot be told from it."""

    def one(end: str) -> tuple[bool, tuple[int, ...]]:
        name = next((name for name in sorted(shapes) if name.endswith(end)), "")
        return bool(_STACKED.match(name)), shapes.get(name, ())

    up = "MoeBlock_0.wi_0" if kind == "mixtral" else "mlp.wi_0.kernel"
    queries = {
        name: shape
        for name, shape in shapes.items()
        if name.endswith("self_attention.query.kernel")
    }
    layers = sum(
        shape[LAYER_AXIS] if _STACKED.match(name) else 1
        for name, shape in queries.items()
        if len(shape) > LAYER_AXIS
    )
    query, key = one("self_attention.query.kernel")[1], one("self_attention.key.kernel")[1]
    if len(query) < 3 or len(key) < 3 or len(shapes[EMBEDDING]) != 2:
        raise FormatError(
            f"query and key have shapes {query} and {key}, {EMBEDDING} {shapes[EMBEDDING]}; needed heads and a vocabulary"
        )
    return {
        "model_type": kind,
        "vocab_size": shapes[EMBEDDING][0],
        "hidden_size": shapes[EMBEDDING][1],
        "num_hidden_layers": layers,
        "num_attention_heads": query[-2],
        "num_key_value_heads": key[-2],
        "head_dim": query[-1],
        "intermediate_size": (one(up)[1] or (0,))[-1],
        "num_local_experts": (one(up)[1] or (0,))[0],
        "tie_word_embeddings": "decoder.logits_dense.kernel" not in shapes,
    }


def huggingface(
    arrays: Mapping[Key, Array], config: Mapping[str, Any], *, where: str
) -> tuple[dict[Key, Assembly], dict[str, str], dict[str, list[str]]]:
    """The model and its moments under Hugging Face's names; aliases; for each of MaxText's weights, ours.

    `arrays`: by part and MaxText's own name. IncompleteError for tensors that the model has and the checkpoint lacks, FormatError for
    other shapes and for tensors that the model has not.
    """
    sizes = sizes_of(config, where=where)
    weights = {name: one for (part, name), one in arrays.items() if part == MODEL}
    wanted = links(sizes, stacked=any(_STACKED.match(name) for name in weights))
    _check(weights, wanted, where=f"{where}: as {sizes.kind}")
    tensors: dict[Key, Assembly] = {}
    of: dict[str, list[Link]] = {}
    for link in wanted:
        of.setdefault(link.theirs, []).append(link)
    for key, array in arrays.items():
        theirs, _, state = key[1].partition("/")
        if key[0] not in (MODEL, OPTIMIZER):
            continue
        for link in of[theirs]:
            tensors[key[0], f"{link.ours}/{state}" if state else link.ours] = _assembly(
                array, link, state or None
            )
    return (
        tensors,
        dict(_TIED) if sizes.tied else {},
        {theirs: [link.ours for link in found] for theirs, found in of.items()},
    )


def _check(weights: Mapping[str, Array], wanted: Iterable[Link], *, where: str) -> None:
    shapes = {link.theirs: (link.shape, link.turn) for link in wanted}
    lost = [f"{name} {shape}" for name, (shape, _) in shapes.items() if name not in weights]
    wrong = []
    for name, (shape, turn) in shapes.items():
        if name in weights:
            found = weights[name].shape
            axis = (
                len(turn.inputs) if not turn.plain else 0
            )  # that of the vocabulary, where it may be padded
            padded = turn.padded and len(found) == len(shape) and found[axis] >= shape[axis]
            if found != shape and not (
                padded and found == (*shape[:axis], found[axis], *shape[axis + 1 :])
            ):
                wrong.append(f"{name} has shape {found}, needed {shape}")
    other = sorted(set(weights) - set(shapes))
    if wrong:
        raise FormatError(
            listed(f"{where}: tensors have other shapes than the configuration says", wrong)
        )
    if lost:
        raise IncompleteError(
            listed(f"{where}: the model has tensors that the checkpoint lacks", lost)
        )
    if other:
        raise FormatError(
            listed(
                f"{where}: the checkpoint has tensors that the model has not; needed another config.json, or its own names",
                other,
            )
        )


def _assembly(array: Array, link: Link, state: str | None) -> Assembly:
    turn = turn_of(link.turn, state)
    chunk = [size for axis, size in enumerate(array.chunk) if axis not in link.at]
    nbytes = prod(turn.ours) * array.dtype.itemsize
    axes = (
        axes_of(turn) if nbytes <= KEPT_NBYTES else axes_of(turn)[:1]
    )  # else pieces are whole rows: not all of a row's would be kept
    found = [
        Fragment(
            box_of_ours(turn, piece),
            partial(_load, array, link, state, piece),
            array.where,
            keep=True,
        )
        for piece in cells(
            turn.theirs, chunk, array.dtype.itemsize, axes=axes, nbytes=array.piece_nbytes
        )
    ]
    try:
        return assembly(array.dtype, turn.ours, found)
    except CheckpointError as error:
        raise type(error)(f"{array.where}: {error}") from error


def _load(array: Array, link: Link, state: str | None, piece: Box) -> torch.Tensor:
    box = spread(piece, link.at)
    return to_ours(
        array.read(box.offsets, box.shape).reshape(piece.shape), turn_of(link.turn, state)
    )

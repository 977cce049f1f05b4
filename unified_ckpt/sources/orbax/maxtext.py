"""MaxText's tensors under Hugging Face's names: all that the model has are there, of the right
shape, and none is left over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import read_config
from unified_ckpt.sources.orbax.arrays import StoredArray, chunk_boxes
from unified_ckpt.sources.orbax.maxtext_names import (
    LAYER_AXIS,
    TensorLink,
    parse_sizes,
    tensor_links,
)
from unified_ckpt.sources.orbax.maxtext_transforms import (
    hf_box,
    split_axes,
    stacked_box,
    to_hf,
    transform_for,
)
from unified_ckpt.views.shards import CACHE_NBYTES, ShardedTensor, TensorShard, sharded_tensor

UNKNOWN_MODEL = (
    "is MaxText's, and its names are those of several models, which differ in the order and the scale of queries; needed the model's "
    "config.json (SourceOptions.config, --config), or its own names (SourceOptions.names, --names own)"
)
EMBEDDING = "token_embedder.embedding"
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_STACKED = re.compile(r"decoder\.layers\.")


def is_maxtext(names: Iterable[str]) -> bool:
    """Whether a model's own names are MaxText's decoder."""
    unique_names = set(names)
    return EMBEDDING in unique_names and any(name.startswith("decoder.") for name in unique_names)


def is_model_known(shapes: Iterable[str]) -> bool:
    """Whether MaxText's names say which model it is."""
    return _model_type(shapes) is not None


def resolve_config(
    path: str | None, shapes: Mapping[str, tuple[int, ...]], *, label: str
) -> dict[str, Any]:
    """The model's configuration: of a file or a folder that has it, or from the names and shapes
    where those say which model it is. FormatError where they do not.
    """
    if path is not None:
        return read_config(path)
    model_type = _model_type(shapes)
    if model_type is None:
        raise FormatError(f"{label}: {UNKNOWN_MODEL}")
    return _infer_config(model_type, shapes)


def _model_type(shapes: Iterable[str]) -> str | None:
    """Llama, Mistral and Qwen have the same names, and other rules."""
    leaf_names = {name.split(".")[-2] for name in shapes if "." in name}
    if any(".MoeBlock_0." in name for name in shapes):
        return "mixtral"
    if "post_ffw_norm" in leaf_names:
        return "gemma3_text" if "query_norm" in leaf_names else None
    return "gemma" if "pre_ffw_norm" in leaf_names else None


def _infer_config(model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What shapes say. Padding of the vocabulary cannot be told from it."""

    def lookup_shape(suffix: str) -> tuple[bool, tuple[int, ...]]:
        name = next((name for name in sorted(shapes) if name.endswith(suffix)), "")
        return bool(_STACKED.match(name)), shapes.get(name, ())

    up_suffix = "MoeBlock_0.wi_0" if model_type == "mixtral" else "mlp.wi_0.kernel"
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
    query, key = (
        lookup_shape("self_attention.query.kernel")[1],
        lookup_shape("self_attention.key.kernel")[1],
    )
    if len(query) < 3 or len(key) < 3 or len(shapes[EMBEDDING]) != 2:
        raise FormatError(
            f"query and key have shapes {query} and {key}, {EMBEDDING} {shapes[EMBEDDING]}; needed heads and a vocabulary"
        )
    return {
        "model_type": model_type,
        "vocab_size": shapes[EMBEDDING][0],
        "hidden_size": shapes[EMBEDDING][1],
        "num_hidden_layers": layers,
        "num_attention_heads": query[-2],
        "num_key_value_heads": key[-2],
        "head_dim": query[-1],
        "intermediate_size": (lookup_shape(up_suffix)[1] or (0,))[-1],
        "num_local_experts": (lookup_shape(up_suffix)[1] or (0,))[0],
        "tie_word_embeddings": "decoder.logits_dense.kernel" not in shapes,
    }


def to_huggingface(
    arrays: Mapping[Key, StoredArray], config: Mapping[str, Any], *, label: str
) -> tuple[dict[Key, ShardedTensor], dict[str, str], dict[str, list[str]]]:
    """The model and its moments under Hugging Face's names; aliases; for each of MaxText's weights,
    ours.

    `arrays`: by part and MaxText's own name. IncompleteError for tensors that the model has and the
    checkpoint lacks, FormatError for other shapes and for tensors that the model has not.
    """
    sizes = parse_sizes(config, label=label)
    weights = {name: stored for (part, name), stored in arrays.items() if part == MODEL}
    required = tensor_links(sizes, stacked=any(_STACKED.match(name) for name in weights))
    _check_shapes(weights, required, label=f"{label}: as {sizes.model_type}")
    tensors: dict[Key, ShardedTensor] = {}
    links_by_name: dict[str, list[TensorLink]] = {}
    for link in required:
        links_by_name.setdefault(link.maxtext_name, []).append(link)
    for key, array in arrays.items():
        maxtext_name, _, state = key[1].partition("/")
        if key[0] not in (MODEL, OPTIMIZER):
            continue
        for link in links_by_name[maxtext_name]:
            tensors[key[0], f"{link.hf_name}/{state}" if state else link.hf_name] = _tensor_shards(
                array, link, state or None
            )
    return (
        tensors,
        dict(_TIED) if sizes.tied else {},
        {
            maxtext_name: [link.hf_name for link in linked]
            for maxtext_name, linked in links_by_name.items()
        },
    )


def _check_shapes(
    weights: Mapping[str, StoredArray], required: Iterable[TensorLink], *, label: str
) -> None:
    shapes = {link.maxtext_name: (link.shape, link.transform) for link in required}
    missing = [f"{name} {shape}" for name, (shape, _) in shapes.items() if name not in weights]
    mismatched = []
    for name, (shape, transform) in shapes.items():
        if name in weights:
            actual = weights[name].shape
            axis = (
                len(transform.inputs) if not transform.keeps_layout else 0
            )  # that of the vocabulary, where it may be padded
            padded = transform.padded and len(actual) == len(shape) and actual[axis] >= shape[axis]
            if actual != shape and not (
                padded and actual == (*shape[:axis], actual[axis], *shape[axis + 1 :])
            ):
                mismatched.append(f"{name} has shape {actual}, needed {shape}")
    unexpected = sorted(set(weights) - set(shapes))
    if mismatched:
        raise FormatError(
            format_list(
                f"{label}: tensors have other shapes than the configuration says", mismatched
            )
        )
    if missing:
        raise IncompleteError(
            format_list(f"{label}: the model has tensors that the checkpoint lacks", missing)
        )
    if unexpected:
        raise FormatError(
            format_list(
                f"{label}: the checkpoint has tensors that the model has not; needed another config.json, or its own names",
                unexpected,
            )
        )


def _tensor_shards(array: StoredArray, link: TensorLink, state: str | None) -> ShardedTensor:
    transform = transform_for(link.transform, state)
    chunk = [size for axis, size in enumerate(array.chunk) if axis not in link.indices]
    nbytes = prod(transform.hf_shape) * array.dtype.itemsize
    axes = (
        split_axes(transform) if nbytes <= CACHE_NBYTES else split_axes(transform)[:1]
    )  # else pieces are whole rows: not all of a row's would be kept
    shards = [
        TensorShard(
            hf_box(transform, piece),
            partial(_load_piece, array, link, state, piece),
            array.label,
            cache=True,
        )
        for piece in chunk_boxes(
            transform.maxtext_shape,
            chunk,
            array.dtype.itemsize,
            axes=axes,
            nbytes=array.read_nbytes,
        )
    ]
    try:
        return sharded_tensor(array.dtype, transform.hf_shape, shards)
    except CheckpointError as error:
        raise type(error)(f"{array.label}: {error}") from error


def _load_piece(
    array: StoredArray, link: TensorLink, state: str | None, piece: Box
) -> torch.Tensor:
    box = stacked_box(piece, link.indices)
    return to_hf(
        array.read(box.offsets, box.shape).reshape(piece.shape),
        transform_for(link.transform, state),
    )

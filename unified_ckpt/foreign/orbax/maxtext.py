"""Shows MaxText tensors under Hugging Face names.

All tensors of the model must be there with the right shapes, and no others.
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
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.files.json import read_config
from unified_ckpt.foreign.orbax.arrays import StoredArray, chunk_boxes
from unified_ckpt.foreign.orbax.maxtext_names import (
    LAYER_AXIS,
    TensorLink,
    parse_sizes,
    tensor_links,
)
from unified_ckpt.foreign.orbax.maxtext_transforms import (
    hf_box,
    split_axes,
    stacked_box,
    to_hf,
    transform_for,
)
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.views.shard_assembler import CACHE_NBYTES
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

UNKNOWN_MODEL = (
    "its MaxText names are those of several models, whose queries differ in order and scale; pass "
    "the model's config.json with SourceOptions(config=...), or use MaxText's own names with "
    "SourceOptions(names='own')"
)
EMBEDDING = "token_embedder.embedding"
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_STACKED = re.compile(r"decoder\.layers\.")


def is_maxtext(names: Iterable[str]) -> bool:
    """Return whether a model's tensor names are those of MaxText's decoder."""
    unique_names = set(names)
    return EMBEDDING in unique_names and any(name.startswith("decoder.") for name in unique_names)


def resolve_config(
    path: str | None, shapes: Mapping[str, tuple[int, ...]], *, label: str
) -> dict[str, Any]:
    """Return the model's config: from `path`, or inferred from names and shapes.

    Raises FormatError if those do not identify the model.
    """
    if path is not None:
        return read_config(path)
    model_type = infer_model_type(shapes)
    if model_type is None:
        raise FormatError(f"{label}: {UNKNOWN_MODEL}")
    return _infer_config(model_type, shapes)


def infer_model_type(shapes: Iterable[str]) -> str | None:
    """Return the model type, or None: Llama, Mistral and Qwen share names but not rules."""
    leaf_names = {name.split(".")[-2] for name in shapes if "." in name}
    if any(".MoeBlock_0." in name for name in shapes):
        return "mixtral"
    if "post_ffw_norm" in leaf_names:
        return "gemma3_text" if "query_norm" in leaf_names else None
    return "gemma" if "pre_ffw_norm" in leaf_names else None


def _infer_config(model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Infer a config from shapes. It cannot know whether the vocabulary is padded."""

    def lookup_shape(suffix: str) -> tuple[int, ...]:
        name = next((name for name in sorted(shapes) if name.endswith(suffix)), "")
        return shapes.get(name, ())

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
    query = lookup_shape("self_attention.query.kernel")
    key = lookup_shape("self_attention.key.kernel")
    if len(query) < 3 or len(key) < 3 or len(shapes[EMBEDDING]) != 2:
        raise FormatError(
            f"got query {query}, key {key} and {EMBEDDING} {shapes[EMBEDDING]}, expected query and "
            "key with heads, and a vocabulary"
        )
    up_shape = lookup_shape("MoeBlock_0.wi_0" if model_type == "mixtral" else "mlp.wi_0.kernel")
    return {
        "model_type": model_type,
        "vocab_size": shapes[EMBEDDING][0],
        "hidden_size": shapes[EMBEDDING][1],
        "num_hidden_layers": layers,
        "num_attention_heads": query[-2],
        "num_key_value_heads": key[-2],
        "head_dim": query[-1],
        "intermediate_size": (up_shape or (0,))[-1],
        "num_local_experts": (up_shape or (0,))[0],
        "tie_word_embeddings": "decoder.logits_dense.kernel" not in shapes,
    }


def to_huggingface(
    arrays: Mapping[Key, StoredArray], config: Mapping[str, Any], *, label: str
) -> tuple[dict[Key, ShardedTensor], dict[str, str], dict[str, list[str]]]:
    """Return the model and its moments under Hugging Face names, its aliases, and a map of names.

    The map gives the Hugging Face names of each MaxText weight. `arrays` are keyed by part and
    MaxText name. Raises IncompleteError for tensors that the checkpoint lacks, FormatError for
    wrong shapes and for tensors that the model lacks.
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
            name = f"{link.hf_name}/{state}" if state else link.hf_name
            tensors[key[0], name] = _sharded_tensor(array, link, state or None)
    hf_names = {
        maxtext_name: [link.hf_name for link in linked]
        for maxtext_name, linked in links_by_name.items()
    }
    return tensors, dict(_TIED) if sizes.tied else {}, hf_names


def _check_shapes(
    weights: Mapping[str, StoredArray], required: Iterable[TensorLink], *, label: str
) -> None:
    shapes = {link.maxtext_name: (link.shape, link.transform) for link in required}
    missing = [f"{name} {shape}" for name, (shape, _) in shapes.items() if name not in weights]
    mismatched = []
    for name, (shape, transform) in shapes.items():
        if name in weights:
            actual = weights[name].shape
            vocab_axis = 0 if transform.preserves_layout else len(transform.inputs)
            padded = list(shape)
            if transform.padded and len(actual) == len(shape):
                padded[vocab_axis] = max(actual[vocab_axis], shape[vocab_axis])
            if actual != tuple(padded):
                mismatched.append(f"{name} has shape {actual}, expected {shape}")
    unexpected = sorted(set(weights) - set(shapes))
    raise_if_any(FormatError, f"{label}: tensor shapes do not match the configuration", mismatched)
    raise_if_any(
        IncompleteError, f"{label}: tensors of the model are missing in the checkpoint", missing
    )
    raise_if_any(
        FormatError,
        (
            f"{label}: the checkpoint has tensors that the model lacks; pass another "
            "config.json, or use MaxText's own names"
        ),
        unexpected,
    )


def _sharded_tensor(array: StoredArray, link: TensorLink, state: str | None) -> ShardedTensor:
    transform = transform_for(link.transform, state)
    chunk = [size for axis, size in enumerate(array.chunk) if axis not in link.indices]
    nbytes = prod(transform.hf_shape) * array.dtype.itemsize
    axes = split_axes(transform)
    if nbytes > CACHE_NBYTES:  # cut whole rows: the cache would not hold all pieces of a row
        axes = axes[:1]
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
    with error_prefix(array.label):
        return sharded_tensor(array.dtype, transform.hf_shape, shards)


def _load_piece(
    array: StoredArray, link: TensorLink, state: str | None, piece: Box
) -> torch.Tensor:
    box = stacked_box(piece, link.indices)
    return to_hf(
        array.read(box).reshape(piece.shape),
        transform_for(link.transform, state),
    )

"""Megatron's tensors under the names that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import config_path, read_config
from unified_ckpt.sources.megatron.files import Arguments
from unified_ckpt.sources.megatron.names import (
    EMBEDDING,
    OUTPUT,
    Kind,
    ModelDims,
    StoredRange,
    identity,
    optimizer_slices,
    to_hf_tensors,
    unstack,
)
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive
from unified_ckpt.views.shards import ShardedSource, ShardedTensor


def renamed_source(
    folder: str,
    make_source: Callable[..., ShardedSource],
    metadata: SourceMetadata,
    tensors: Mapping[Key, ShardedTensor],
    args: Arguments,
    options: SourceOptions,
    *,
    rank_extra: Callable[[int], Any],
) -> Source:
    """The tensors as a Source. `make_source`: the Assembled, but for what is said. `said.groups`
    names stored tensors.

    FormatError where Hugging Face's names are asked for, and are not known.
    """
    derived_by_stored: dict[
        str, dict[str, RangesTensor]
    ] = {}  # stored tensor -> what is cut from it
    try:
        try:
            dims = _model_dims(args, options)
            derived_by_stored = _derive_all(
                tensors, lambda name, stored_range: to_hf_tensors(name, stored_range, dims)
            )
        except FormatError:
            if options.names == "huggingface":
                raise
            derived_by_stored = {}
        if not derived_by_stored or options.names == "own":
            derived_by_stored = _derive_all(
                tensors, lambda name, stored_range: {name: identity(stored_range)}
            )
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from error
    derived = {
        name: stored_range
        for outputs_of_stored in derived_by_stored.values()
        for name, stored_range in outputs_of_stored.items()
    }
    states = {name.rpartition("/")[2] for part, name in tensors if part == OPTIMIZER}
    if OUTPUT not in derived_by_stored and EMBEDDING in derived_by_stored and OUTPUT not in derived:
        (tied,) = derived_by_stored[EMBEDDING].values()  # not stored: so that its alias has a name
        derived[OUTPUT if EMBEDDING in derived else "lm_head.weight"] = RangesTensor(
            tied.shape, (ElementRange(OUTPUT, 0, tied.ranges[0].count),)
        )
    outputs = dict(derived)
    for state in states:
        outputs |= optimizer_slices(derived, state)
    groups = [
        {
            **group,
            "names": [
                name for stored in group["names"] for name in derived_by_stored.get(stored, ())
            ],
        }
        for group in metadata.groups
    ]
    source = make_source(metadata=replace(metadata, groups=groups), rank_extra=rank_extra)
    return derive(source, outputs, parts=(MODEL, MASTER, OPTIMIZER), refused=source.refused)


def _derive_all(
    tensors: Mapping[Key, ShardedTensor],
    transform: Callable[[str, StoredRange], dict[str, RangesTensor]],
) -> dict[str, dict[str, RangesTensor]]:
    derived_by_stored: dict[str, dict[str, RangesTensor]] = {}
    stored_names: dict[str, str] = {}
    for part, stored in tensors:
        if part != MODEL:
            continue
        for name, stored_range in unstack(stored, tensors[part, stored].spec.shape):
            for output, derived in transform(name, stored_range).items():
                if stored_names.setdefault(output, stored) != stored:
                    raise FormatError(
                        f"{output}: is made from {stored_names[output]} and from {stored}; needed one of them"
                    )
                derived_by_stored.setdefault(stored, {})[output] = derived
    return derived_by_stored


# ---- the model's dimensions


_MODEL_KINDS: dict[str, Kind] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
}


def _model_dims(args: Arguments, options: SourceOptions) -> ModelDims:
    """From Hugging Face's config where it is given, else from Megatron's arguments. FormatError
    where the model is none that is known.
    """
    if options.config is not None:
        return _dims_from_config(options.config)
    if not args.values:
        raise FormatError(
            "has no arguments of Megatron's; needed Hugging Face's config.json for its names of tensors"
        )
    unsupported = [
        f"{name}={args.values.get(name)!r}"
        for name, accepted in _LLAMA_ARGUMENTS.items()
        if args.values.get(name, accepted[0]) not in accepted
    ]
    if unsupported:
        raise FormatError(
            f"has {', '.join(unsupported)}: is no model like Llama; Hugging Face's names of its tensors are not known"
        )
    heads = args.get_int("num_attention_heads")
    groups = (
        args.get_int("num_query_groups", heads) if args.get_bool("group_query_attention") else heads
    )
    head_dim = args.get_int("kv_channels", args.get_int("hidden_size") // heads)
    kind: Kind = "llama"
    if args.experts:
        shared = args.values.get("moe_shared_expert_intermediate_size")
        kind = (
            "qwen2_moe" if shared else "qwen3_moe" if args.get_bool("qk_layernorm") else "mixtral"
        )
    return ModelDims(kind, heads, groups, head_dim, None)


_LLAMA_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_interleaved": (False, None),
    "apply_layernorm_1p": (False, None),
    "multi_latent_attention": (False, None),
    "attention_output_gate": (False, None),
}


def _dims_from_config(path: str) -> ModelDims:
    config, path = read_config(path), config_path(path)
    try:
        kind = _MODEL_KINDS[config["model_type"]]
        heads = int(config["num_attention_heads"])
        groups = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return ModelDims(kind, heads, groups, head_dim, int(config["vocab_size"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: is no config of {', '.join(_MODEL_KINDS)}: {error!r}"
        ) from error

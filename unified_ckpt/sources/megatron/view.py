"""Presents Megatron's tensors under the requested names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
) -> Source:
    """Return a Source of the tensors under the requested names.

    `make_source`: builds the Source from its metadata. `metadata.groups` has stored names.
    FormatError if Hugging Face names are requested for an unknown model.
    """
    derived_by_stored: dict[str, dict[str, RangesTensor]] = {}
    try:
        try:
            dims = _model_dims(args, options)
            derived_by_stored = _derive_all(
                tensors, lambda name, stored: to_hf_tensors(name, stored, dims)
            )
        except FormatError:
            if options.names == "huggingface":
                raise
            derived_by_stored = {}
        if not derived_by_stored or options.names == "own":
            derived_by_stored = _derive_all(tensors, lambda name, stored: {name: identity(stored)})
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from error
    derived = {
        name: tensor for by_name in derived_by_stored.values() for name, tensor in by_name.items()
    }
    states = {name.rpartition("/")[2] for part, name in tensors if part == OPTIMIZER}
    if OUTPUT not in derived_by_stored and EMBEDDING in derived_by_stored and OUTPUT not in derived:
        # The tied output layer is not stored, but its alias needs a name.
        (tied,) = derived_by_stored[EMBEDDING].values()
        derived[OUTPUT if EMBEDDING in derived else "lm_head.weight"] = RangesTensor(
            tied.shape, (ElementRange(OUTPUT, 0, tied.ranges[0].count),)
        )
    outputs = dict(derived)
    for state in states:
        outputs |= optimizer_slices(derived, state)
    groups = []
    for group in metadata.groups:
        names = [name for stored in group["names"] for name in derived_by_stored.get(stored, ())]
        groups.append({**group, "names": names})
    source = make_source(metadata=replace(metadata, groups=groups))
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
                        f"{output}: got it from {stored_names[output]} and from {stored}, "
                        "expected one of them"
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
    """Return the model's dimensions, from Hugging Face's config or from Megatron's arguments.

    FormatError if the model is unknown.
    """
    if options.config is not None:
        return _dims_from_config(options.config)
    if not args.values:
        raise FormatError(
            "got no Megatron arguments, expected them or a Hugging Face config.json for Hugging "
            "Face names; pass SourceOptions(config=...)"
        )
    unsupported = [
        f"{name}={args.values.get(name)!r}"
        for name, accepted in _LLAMA_ARGUMENTS.items()
        if args.values.get(name, accepted[0]) not in accepted
    ]
    if unsupported:
        raise FormatError(
            f"got {', '.join(unsupported)}, expected a model like Llama for Hugging Face names"
        )
    heads = args.get_int("num_attention_heads")
    grouped = args.get_bool("group_query_attention")
    groups = args.get_int("num_query_groups", heads) if grouped else heads
    head_dim = args.get_int("kv_channels", args.get_int("hidden_size") // heads)
    kind: Kind = "llama"
    if args.experts:
        shared = args.values.get("moe_shared_expert_intermediate_size")
        without_shared: Kind = "qwen3_moe" if args.get_bool("qk_layernorm") else "mixtral"
        kind = "qwen2_moe" if shared else without_shared
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
            f"{path}: expected a config of {', '.join(_MODEL_KINDS)}: {error!r}"
        ) from error

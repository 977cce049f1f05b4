"""Presents Megatron's tensors under the requested names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.json import config_path, read_config
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.megatron.arguments import Arguments
from unified_ckpt.foreign.megatron.names import (
    EMBEDDING,
    OUTPUT,
    SHARED_GATE,
    Kind,
    ModelDims,
    StoredRange,
    identity,
    optimizer_slices,
    to_hf_tensors,
    unstack,
)
from unified_ckpt.foreign.megatron.optimizer_states import other_optimizer_values
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.derived import ElementRange, RangesTensor, derive
from unified_ckpt.views.renamed_metadata import renamed_groups
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor

_NON_EXTRA_KEYS = (
    "args",
    "model",
    "optimizer",
    "rng_state",
    "checkpoint_version",
)


@dataclass(frozen=True, slots=True)
class MegatronContent:
    """The content of a folder, of either layout.

    `common`: the state that is not of one rank. `rng_state` returns a rank's random state; None if
    none was saved. `refusal`: why no optimizer is read; empty if it is. `left_out`: names that are
    not read.
    """

    folder: str
    format: str
    tensors: Mapping[Key, ShardedTensor]
    common: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    rng_state: Callable[[int], Any] | None
    refusal: str
    left_out: Sequence[str]


def build_source(content: MegatronContent, args: Arguments, options: SourceOptions) -> Source:
    """Return the content as a Source under the requested names.

    FormatError if Hugging Face names are requested for an unknown model.
    """
    tensors, iteration = content.tensors, content.common.get("iteration")
    extra = {
        key: to_plain(value)
        for key, value in content.common.items()
        if key.rstrip("0123456789") not in _NON_EXTRA_KEYS
    }
    if args.values:
        extra["args"] = to_plain(args.values)
    if optimizer_values := other_optimizer_values(content.common.get("optimizer")):
        extra["optimizer"] = optimizer_values
    refusal = f"{content.refusal}; load only the model"
    extras = SourceExtras({OPTIMIZER: refusal} if content.refusal else {})
    has_rng = content.rng_state is not None
    if content.rng_state is not None:
        extras = replace(extras, rank_extra=content.rng_state)
    metadata = SourceMetadata(
        step=iteration if isinstance(iteration, int) else None,
        extra=extra or None,
        groups=content.groups,
        rank_extras=args.world_size if has_rng else 0,
        left_out=[*content.left_out, *(["rng_state"] if has_rng and not args.world_size else [])],
    )
    aliases = {} if (MODEL, OUTPUT) in tensors else {OUTPUT: EMBEDDING}
    source = ShardedSource(
        content.folder,
        tensors,
        format=content.format,
        metadata=metadata,
        aliases={MODEL: aliases, MASTER: aliases},
        extras=extras,
    )
    return _renamed_source(content.folder, source, args, options)


def _renamed_source(
    folder: str, source: ShardedSource, args: Arguments, options: SourceOptions
) -> Source:
    tensors, metadata = source.tensors, source.metadata()
    derived_by_stored: dict[str, dict[str, RangesTensor]] = {}
    with error_prefix(folder):
        try:
            dims = _model_dims(args, options)
            if dims.kind == "qwen2_moe" and not any(
                part == MODEL and name.endswith(SHARED_GATE) for part, name in tensors
            ):  # Qwen2-MoE multiplies shared experts by it
                raise FormatError(
                    f"got shared experts without {SHARED_GATE}, expected it for Hugging Face names"
                )
            derived_by_stored = _derive_all(
                tensors, lambda name, stored: to_hf_tensors(name, stored, dims)
            )
        except FormatError:
            if options.names == "huggingface":
                raise
            derived_by_stored = {}
        if not derived_by_stored or options.names == "own":
            derived_by_stored = _derive_all(tensors, lambda name, stored: {name: identity(stored)})
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
    groups = renamed_groups(metadata.groups, lambda stored: [*derived_by_stored.get(stored, ())])
    return derive(
        source,
        outputs,
        parts=(MODEL, MASTER, OPTIMIZER),
        refused=source.refused,
        metadata=replace(metadata, groups=groups),
    )


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
    with parsing(path, f"a config of {', '.join(_MODEL_KINDS)}"):
        kind = _MODEL_KINDS[config["model_type"]]
        heads = int(config["num_attention_heads"])
        groups = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return ModelDims(kind, heads, groups, head_dim, int(config["vocab_size"]))

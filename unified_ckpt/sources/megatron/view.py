"""Megatron's tensors under the names that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import config_file, read_config
from unified_ckpt.sources.megatron.files import Arguments
from unified_ckpt.sources.megatron.names import (
    EMBEDDING,
    OUTPUT,
    Dims,
    Kind,
    Stored,
    apart,
    hub_tensors,
    of_state,
    own_tensor,
)
from unified_ckpt.views.derived import Made, Piece, recut
from unified_ckpt.views.shards import Assembled, Assembly


def named(
    folder: str,
    make: Callable[..., Assembled],
    said: Said,
    tensors: Mapping[Key, Assembly],
    args: Arguments,
    options: SourceOptions,
    *,
    rank_extra: Callable[[int], Any],
) -> Source:
    """The tensors as a Source. `make`: the Assembled, but for what is said. `said.groups` names stored tensors.

    FormatError where Hugging Face's names are asked for, and are not known.
    """
    made: dict[str, dict[str, Made]] = {}  # stored tensor -> what is cut from it
    try:
        try:
            dims = _dims(args, options)
            made = _made(tensors, lambda name, one: hub_tensors(name, one, dims))
        except FormatError:
            if options.names == "huggingface":
                raise
            made = {}
        if not made or options.names == "own":
            made = _made(tensors, lambda name, one: {name: own_tensor(one)})
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from error
    cuts = {name: one for found in made.values() for name, one in found.items()}
    kinds = {name.rpartition("/")[2] for part, name in tensors if part == OPTIMIZER}
    if OUTPUT not in made and EMBEDDING in made and OUTPUT not in cuts:
        (tied,) = made[EMBEDDING].values()  # not stored: so that its alias has a name
        cuts[OUTPUT if EMBEDDING in cuts else "lm_head.weight"] = Made(
            tied.shape, (Piece(OUTPUT, 0, tied.pieces[0].count),)
        )
    every = dict(cuts)
    for kind in kinds:
        every |= of_state(cuts, kind)
    groups = [
        {**group, "names": [name for stored in group["names"] for name in made.get(stored, ())]}
        for group in said.groups
    ]
    source = make(said=replace(said, groups=groups), rank_extra=rank_extra)
    return recut(source, every, parts=(MODEL, MASTER, OPTIMIZER), refused=source.refused)


def _made(
    tensors: Mapping[Key, Assembly], cut: Callable[[str, Stored], dict[str, Made]]
) -> dict[str, dict[str, Made]]:
    found: dict[str, dict[str, Made]] = {}
    names: dict[str, str] = {}
    for part, stored in tensors:
        if part != MODEL:
            continue
        for own, one in apart(stored, tensors[part, stored].spec.shape):
            for name, made in cut(own, one).items():
                if names.setdefault(name, stored) != stored:
                    raise FormatError(
                        f"{name}: is made from {names[name]} and from {stored}; needed one of them"
                    )
                found.setdefault(stored, {})[name] = made
    return found


# ---- the model's dimensions


_KINDS: dict[str, Kind] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
}


def _dims(args: Arguments, options: SourceOptions) -> Dims:
    """From Hugging Face's config where it is given, else from Megatron's arguments. FormatError where the model is none that is known."""
    if options.config is not None:
        return _of_config(options.config)
    if not args.told:
        raise FormatError(
            "has no arguments of Megatron's; needed Hugging Face's config.json for its names of tensors"
        )
    wrong = [
        f"{name}={args.told.get(name)!r}"
        for name, wanted in _LIKE_LLAMA.items()
        if args.told.get(name, wanted[0]) not in wanted
    ]
    if wrong:
        raise FormatError(
            f"has {', '.join(wrong)}: is no model like Llama; Hugging Face's names of its tensors are not known"
        )
    heads = args.number("num_attention_heads")
    groups = args.number("num_query_groups", heads) if args.flag("group_query_attention") else heads
    head_dim = args.number("kv_channels", args.number("hidden_size") // heads)
    kind: Kind = "llama"
    if args.experts:
        shared = args.told.get("moe_shared_expert_intermediate_size")
        kind = "qwen2_moe" if shared else "qwen3_moe" if args.flag("qk_layernorm") else "mixtral"
    return Dims(kind, heads, groups, head_dim, None)


_LIKE_LLAMA: dict[str, tuple[object, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_interleaved": (False, None),
    "apply_layernorm_1p": (False, None),
    "multi_latent_attention": (False, None),
    "attention_output_gate": (False, None),
}


def _of_config(path: str) -> Dims:
    told, path = read_config(path), config_file(path)
    try:
        kind = _KINDS[told["model_type"]]
        heads = int(told["num_attention_heads"])
        groups = int(told.get("num_key_value_heads") or heads)
        head_dim = int(told.get("head_dim") or int(told["hidden_size"]) // heads)
        return Dims(kind, heads, groups, head_dim, int(told["vocab_size"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: is no config of {', '.join(_KINDS)}: {error!r}") from error

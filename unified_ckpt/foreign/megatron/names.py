"""The tensors of Megatron's GPT models: how ranks split each one, and its Hugging Face name. Pure.

Knows models like Llama: Llama, Mistral, Qwen2, Qwen3; with experts Mixtral, Qwen2-MoE,
Qwen3-MoE. Each tensor has one Megatron name here: that of `GPTModel`, with separate experts
numbered over all ranks, and with norms where they are fused into linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from unified_ckpt.errors import FormatError
from unified_ckpt.views.derived import ElementRange, RangesTensor

Kind = Literal["llama", "mixtral", "qwen2_moe", "qwen3_moe"]
Split = Literal["whole", "rows", "columns", "gated"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SHARED_GATE = "mlp.shared_experts.gate_weight"
BUFFER_SUFFIXES = ("expert_bias", "local_tokens_per_expert")  # tensors without optimizer state

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_OUTER_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    SHARED_GATE: "mlp.shared_expert_gate.weight",
}
_GATED_MODULES = {"mlp.linear_fc1": "mlp", "mlp.shared_experts.linear_fc1": "mlp.shared_expert"}
_QKV_MODULE = "self_attention.linear_qkv"
_TP_SPLITS: dict[str, Split] = {
    EMBEDDING: "rows",
    OUTPUT: "rows",
    "linear_qkv.weight": "rows",
    "linear_qkv.bias": "rows",
    "linear_fc1.weight": "gated",
    "linear_fc1.bias": "gated",
    "linear_proj.weight": "columns",
    "linear_fc2.weight": "columns",
}
_REPLICATED = re.compile(
    r"(embedding\.position_embeddings\.weight"
    r"|.*(layernorm\.(weight|bias)|layer_norm_(weight|bias)|linear_(proj|fc2)\.bias"
    r"|router\.(weight|bias|expert_bias)|shared_experts\.gate_weight))$"
)
_LEGACY_NAMES = {  # patterns of Megatron-LM's older names -> Megatron-Core's
    r"language_model\.": "",
    r"encoder\.": "decoder.",
    r"\.attention\.": ".self_attention.",
    r"\.query_key_value\.": ".linear_qkv.",
    r"self_attention\.dense\.": "self_attention.linear_proj.",
    r"\.dense_h_to_4h\.": ".linear_fc1.",
    r"\.dense_4h_to_h\.": ".linear_fc2.",
    r"\.input_norm\.": ".input_layernorm.",
    r"\.post_attention_(?:layer)?norm\.": ".pre_mlp_layernorm.",
    r"\.final_norm\.": ".final_layernorm.",
    r"word_embeddings_for_head\.": "output_layer.",
}


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions of a model.

    `vocab`: rows of the embedding without padding; None for all rows.
    """

    kind: Kind
    heads: int
    groups: int
    head_dim: int
    vocab: int | None


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A tensor as a row-major range of a stored one: all of it, a layer, or an expert."""

    name: str
    start: int
    shape: tuple[int, ...]

    def rows(self, low: int, high: int) -> ElementRange:
        """Return rows [low, high)."""
        row_numel = prod(self.shape[1:])
        return ElementRange(self.name, self.start + low * row_numel, (high - low) * row_numel)


def tp_split(name: str, *, gated: bool) -> Split | None:
    """Return how tensor-parallel ranks split a tensor; None if unknown.

    `gated`: the MLP has gates.
    """
    suffix = name if name in _TP_SPLITS else ".".join(name.split(".")[-2:])
    split = _TP_SPLITS.get(suffix)
    if split is not None:
        return "rows" if split == "gated" and not gated else split
    return "whole" if _REPLICATED.match(name) else None


def to_core_name(name: str) -> str:
    """Return Megatron-Core's name of a tensor that may have its older Megatron-LM name."""
    if not name.startswith(("language_model.", "word_embeddings_for_head.")):
        return name
    for pattern, replacement in _LEGACY_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def is_expert(name: str) -> bool:
    """Return whether the tensor belongs to experts, which may be spread over ranks."""
    return ".mlp.experts." in name


def parse_expert(name: str) -> tuple[str, int] | None:
    """Return an expert's tensor name with `{}` for the number, and that; None for other tensors."""
    match = re.fullmatch(r"(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)", name)
    return (f"{match[1]}{{}}{match[3]}", int(match[2])) if match else None


def unstack(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredRange]]:
    """Yield each layer and expert of a tensor, which may stack them as torch_dist does, by name."""
    stacked = re.match(r"decoder\.layers\.(?!\d+\.)(.+)", name)
    if stacked is not None:
        if not shape:
            raise FormatError(f"{name}: got a 0-d tensor, expected a dim of layers")
        size = prod(shape[1:])
        layers = [
            (f"decoder.layers.{n}.{stacked[1]}", StoredRange(name, n * size, shape[1:]))
            for n in range(shape[0])
        ]
    else:
        layers = [(name, StoredRange(name, 0, shape))]
    for layer_name, stored in layers:
        if ".mlp.experts.experts." not in layer_name:
            yield layer_name, stored
            continue
        size = prod(stored.shape[1:])
        for n in range(stored.shape[0]):
            expert_name = layer_name.replace(
                ".mlp.experts.experts.", f".mlp.experts.local_experts.{n}."
            )
            yield expert_name, StoredRange(name, stored.start + n * size, stored.shape[1:])


def to_hf_tensors(name: str, stored: StoredRange, dims: ModelDims) -> dict[str, RangesTensor]:
    """Return a tensor under its Hugging Face names.

    FormatError if no known model has the tensor, or if its shape does not fit the model.
    """
    if name in _OUTER_NAMES:
        if name == "decoder.final_layernorm.weight":
            return {_OUTER_NAMES[name]: _derive_rows(stored, 0, stored.shape[0])}
        rows = stored.shape[0] if dims.vocab is None else dims.vocab
        if rows > stored.shape[0]:
            raise FormatError(
                f"{name}: got {stored.shape[0]} rows, expected at least {rows} for the vocabulary"
            )
        return {_OUTER_NAMES[name]: _derive_rows(stored, 0, rows)}
    layer = _LAYER.fullmatch(name)
    if layer is None:
        raise FormatError(f"{name}: its Hugging Face name is unknown")
    tensors = _layer_tensors(layer[2], stored, dims)
    return {f"model.layers.{layer[1]}.{hf_name}": derived for hf_name, derived in tensors.items()}


def _layer_tensors(name: str, stored: StoredRange, dims: ModelDims) -> dict[str, RangesTensor]:
    module, _, kind = name.rpartition(".")
    if name in _LAYER_NAMES:
        hf_name = _LAYER_NAMES[name]
        if name == "mlp.router.weight" and dims.kind == "mixtral":
            hf_name = "block_sparse_moe.gate.weight"
        return {hf_name: identity(stored)}
    if module == _QKV_MODULE and kind in ("weight", "bias"):
        return {
            f"self_attn.{hf_name}_proj.{kind}": derived
            for hf_name, derived in _split_qkv(name, stored, dims).items()
        }
    if module in _GATED_MODULES and kind in ("weight", "bias"):
        gate, up = _split_gated(name, stored)
        return {
            f"{_GATED_MODULES[module]}.gate_proj.{kind}": gate,
            f"{_GATED_MODULES[module]}.up_proj.{kind}": up,
        }
    expert = _EXPERT.fullmatch(name)
    if expert is not None and expert[2] in ("linear_fc1.weight", "linear_fc2.weight"):
        mixtral = dims.kind == "mixtral"
        prefix = f"{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert[1]}"
        if expert[2] == "linear_fc2.weight":
            return {f"{prefix}.{'w2' if mixtral else 'down_proj'}.weight": identity(stored)}
        gate, up = _split_gated(name, stored)
        return {
            f"{prefix}.{'w1' if mixtral else 'gate_proj'}.weight": gate,
            f"{prefix}.{'w3' if mixtral else 'up_proj'}.weight": up,
        }
    raise FormatError(f"{name}: its Hugging Face name is unknown")


def _split_qkv(name: str, stored: StoredRange, dims: ModelDims) -> dict[str, RangesTensor]:
    """Split fused QKV, whose rows are [groups, query heads per group + key + value, head_dim]."""
    heads_per_group = dims.heads // dims.groups
    rows = dims.groups * (heads_per_group + 2) * dims.head_dim
    if stored.shape[0] != rows:
        raise FormatError(
            f"{name}: got {stored.shape[0]} rows, expected {rows} for {dims.heads} heads "
            f"of {dims.head_dim} in {dims.groups} groups"
        )
    derived = {}
    # (projection, its first head in a group, its heads per group)
    q, k, v = ("q", 0, heads_per_group), ("k", heads_per_group, 1), ("v", heads_per_group + 1, 1)
    for projection, head, count in (q, k, v):
        numel = count * dims.head_dim
        starts = [
            (group * (heads_per_group + 2) + head) * dims.head_dim for group in range(dims.groups)
        ]
        ranges = tuple(stored.rows(start, start + numel) for start in starts)
        derived[projection] = RangesTensor((dims.groups * numel, *stored.shape[1:]), ranges)
    return derived


def _split_gated(name: str, stored: StoredRange) -> tuple[RangesTensor, RangesTensor]:
    if stored.shape[0] % 2:
        raise FormatError(f"{name}: got {stored.shape[0]} rows, expected an even number (gate, up)")
    half = stored.shape[0] // 2
    return _derive_rows(stored, 0, half), _derive_rows(stored, half, 2 * half)


def _derive_rows(stored: StoredRange, low: int, high: int) -> RangesTensor:
    return RangesTensor((high - low, *stored.shape[1:]), (stored.rows(low, high),))


def identity(stored: StoredRange) -> RangesTensor:
    """Return the whole stored range, unchanged."""
    elements = ElementRange(stored.name, stored.start, prod(stored.shape))
    return RangesTensor(stored.shape, (elements,))


def optimizer_slices(derived: Mapping[str, RangesTensor], state: str) -> dict[str, RangesTensor]:
    """Return optimizer state of derived tensors, as "name/exp_avg"; `step` has one element."""
    if state == "step":
        return {
            f"{name}/step": RangesTensor((), (ElementRange(f"{tensor.ranges[0].name}/step", 0, 1),))
            for name, tensor in derived.items()
        }
    return {
        f"{name}/{state}": RangesTensor(
            tensor.shape,
            tuple(
                ElementRange(f"{elements.name}/{state}", elements.first, elements.count)
                for elements in tensor.ranges
            ),
        )
        for name, tensor in derived.items()
    }

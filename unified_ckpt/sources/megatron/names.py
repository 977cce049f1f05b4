"""The tensors of Megatron's GPT models: what of each a rank holds, and what they are called by Hugging Face. Pure.

Known are models like Llama: Llama, Mistral, Qwen2, Qwen3, and with experts Mixtral, Qwen2-MoE, Qwen3-MoE. One name of Megatron's is used
for each tensor here, that of `GPTModel` with the experts apart and numbered over all ranks and the norms where they were fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from unified_ckpt.errors import FormatError
from unified_ckpt.views.derived import Made, Piece

Kind = Literal["llama", "mixtral", "qwen2_moe", "qwen3_moe"]
Split = Literal["whole", "rows", "columns", "gated"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
NO_PARAMETERS = ("expert_bias", "local_tokens_per_expert")  # ends of names of what no optimizer has

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_ENDS = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYERS = {
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
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_GATED = {"mlp.linear_fc1": "mlp", "mlp.shared_experts.linear_fc1": "mlp.shared_expert"}
_QKV = "self_attention.linear_qkv"
_SPLITS: dict[str, Split] = {
    EMBEDDING: "rows",
    OUTPUT: "rows",
    "linear_qkv.weight": "rows",
    "linear_qkv.bias": "rows",
    "linear_fc1.weight": "gated",
    "linear_fc1.bias": "gated",
    "linear_proj.weight": "columns",
    "linear_fc2.weight": "columns",
}
_WHOLE = re.compile(
    r"(embedding\.position_embeddings\.weight|.*(layernorm\.(weight|bias)|layer_norm_(weight|bias)|linear_(proj|fc2)\.bias"
    r"|router\.(weight|bias|expert_bias)|shared_experts\.gate_weight))$"
)


_OLD = {  # of before Megatron-Core's models
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
class Dims:
    """Of a model. `vocab`: rows of the embedding that are words, None for all; the others pad it."""

    kind: Kind
    heads: int
    groups: int
    head_dim: int
    vocab: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as elements of a stored one, row-major: the whole of it, or a layer or an expert of it."""

    name: str
    first: int
    shape: tuple[int, ...]

    def rows(self, low: int, high: int) -> Piece:
        row = prod(self.shape[1:])
        return Piece(self.name, self.first + low * row, (high - low) * row)


def split_of(name: str, *, gated: bool) -> Split | None:
    """How tensor-parallel ranks share a tensor, None where that is not known. `gated`: the model's MLP has gates."""
    ends = name if name in _SPLITS else ".".join(name.split(".")[-2:])
    found = _SPLITS.get(ends)
    if found is not None:
        return "rows" if found == "gated" and not gated else found
    return "whole" if _WHOLE.match(name) else None


def core_name(name: str) -> str:
    """Megatron-Core's name of a tensor, where it may have that of the models before."""
    if not name.startswith(("language_model.", "word_embeddings_for_head.")):
        return name
    for old, new in _OLD.items():
        name = re.sub(old, new, name)
    return name


def is_expert(name: str) -> bool:
    """Whether it belongs to experts that may be spread over ranks."""
    return ".mlp.experts." in name


class OfExpert(NamedTuple):
    """A tensor of an expert. `of_all`: its name, with braces for the number."""

    of_all: str
    number: int


def expert_of(name: str) -> OfExpert | None:
    found = re.fullmatch(r"(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)", name)
    return OfExpert(f"{found[1]}{{}}{found[3]}", int(found[2])) if found else None


def apart(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Stored]]:
    """A tensor that may hold many layers, or many experts, as torch_dist has them: each of them, with its own name."""
    stacked = re.match(r"decoder\.layers\.(?!\d+\.)(.+)", name)
    if stacked is not None:
        if not shape:
            raise FormatError(f"{name}: has no dim of layers")
        size = prod(shape[1:])
        layers = [
            (f"decoder.layers.{n}.{stacked[1]}", Stored(name, n * size, shape[1:]))
            for n in range(shape[0])
        ]
    else:
        layers = [(name, Stored(name, 0, shape))]
    for layer, one in layers:
        if ".mlp.experts.experts." not in layer:
            yield layer, one
            continue
        size = prod(one.shape[1:])
        for n in range(one.shape[0]):
            own = layer.replace(".mlp.experts.experts.", f".mlp.experts.local_experts.{n}.")
            yield own, Stored(name, one.first + n * size, one.shape[1:])


def hub_tensors(name: str, one: Stored, dims: Dims) -> dict[str, Made]:
    """A tensor with Hugging Face's names. FormatError for one that no known model has, or of another shape than the model's."""
    if name in _ENDS:
        if name == "decoder.final_layernorm.weight":
            return {_ENDS[name]: _cut(one, 0, one.shape[0])}
        rows = one.shape[0] if dims.vocab is None else dims.vocab
        if rows > one.shape[0]:
            raise FormatError(f"{name}: has {one.shape[0]} rows; the vocabulary needs {rows}")
        return {_ENDS[name]: _cut(one, 0, rows)}
    layer = _LAYER.fullmatch(name)
    if layer is None:
        raise FormatError(f"{name}: has no name of Hugging Face's that is known")
    found = _of_layer(layer[2], one, dims)
    return {f"model.layers.{layer[1]}.{theirs}": made for theirs, made in found.items()}


def _of_layer(name: str, one: Stored, dims: Dims) -> dict[str, Made]:
    module, _, kind = name.rpartition(".")
    if name in _LAYERS:
        theirs = _LAYERS[name]
        if name == "mlp.router.weight" and dims.kind == "mixtral":
            theirs = "block_sparse_moe.gate.weight"
        return {theirs: _whole(one)}
    if module == _QKV and kind in ("weight", "bias"):
        return {
            f"self_attn.{theirs}_proj.{kind}": made
            for theirs, made in _qkv(name, one, dims).items()
        }
    if module in _GATED and kind in ("weight", "bias"):
        gate, up = _halves(name, one)
        return {f"{_GATED[module]}.gate_proj.{kind}": gate, f"{_GATED[module]}.up_proj.{kind}": up}
    expert = _EXPERT.fullmatch(name)
    if expert is not None and expert[2] in ("linear_fc1.weight", "linear_fc2.weight"):
        mixtral = dims.kind == "mixtral"
        place = f"{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert[1]}"
        if expert[2] == "linear_fc2.weight":
            return {f"{place}.{'w2' if mixtral else 'down_proj'}.weight": _whole(one)}
        gate, up = _halves(name, one)
        return {
            f"{place}.{'w1' if mixtral else 'gate_proj'}.weight": gate,
            f"{place}.{'w3' if mixtral else 'up_proj'}.weight": up,
        }
    raise FormatError(f"{name}: has no name of Hugging Face's that is known")


def _qkv(name: str, one: Stored, dims: Dims) -> dict[str, Made]:
    """[groups, query heads of one group + key + value, head_dim, ...], apart."""
    of_group = dims.heads // dims.groups
    rows = dims.groups * (of_group + 2) * dims.head_dim
    if one.shape[0] != rows:
        raise FormatError(
            f"{name}: has {one.shape[0]} rows; needed {rows}, for {dims.heads} heads of {dims.head_dim} in {dims.groups} groups"
        )
    made = {}
    for theirs, first, count in (("q", 0, of_group), ("k", of_group, 1), ("v", of_group + 1, 1)):
        starts = [(group * (of_group + 2) + first) * dims.head_dim for group in range(dims.groups)]
        pieces = tuple(one.rows(start, start + count * dims.head_dim) for start in starts)
        made[theirs] = Made((dims.groups * count * dims.head_dim, *one.shape[1:]), pieces)
    return made


def _halves(name: str, one: Stored) -> tuple[Made, Made]:
    if one.shape[0] % 2:
        raise FormatError(f"{name}: has {one.shape[0]} rows; needed gates and as many more")
    half = one.shape[0] // 2
    return _cut(one, 0, half), _cut(one, half, 2 * half)


def _cut(one: Stored, low: int, high: int) -> Made:
    return Made((high - low, *one.shape[1:]), (one.rows(low, high),))


def _whole(one: Stored) -> Made:
    return Made(one.shape, (Piece(one.name, one.first, prod(one.shape)),))


def own_tensor(one: Stored) -> Made:
    """A tensor under Megatron's own name."""
    return _whole(one)


def of_state(made: Mapping[str, Made], state: str) -> dict[str, Made]:
    """Optimizer state of tensors that are cut so: "name/exp_avg". `step` is one element for all of a tensor."""
    if state == "step":
        return {
            f"{name}/step": Made((), (Piece(f"{one.pieces[0].stored}/step", 0, 1),))
            for name, one in made.items()
        }
    return {
        f"{name}/{state}": Made(
            one.shape, tuple(Piece(f"{p.stored}/{state}", p.first, p.count) for p in one.pieces)
        )
        for name, one in made.items()
    }

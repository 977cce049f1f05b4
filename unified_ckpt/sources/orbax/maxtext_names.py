"""MaxText's tensors of the models that we know, against Hugging Face's: names, shapes, and what is done to the elements. Pure tables.

Linear weights are [in, out] in MaxText, heads apart; stacked layers are on axis 1, experts on axis 0. Source of the rules: MaxText's
converters and models (param_mapping.py, attentions.py), checked by what the models compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from unified_ckpt.errors import FormatError

LAYER_AXIS = 1  # MaxText's param_scan_axis
_LOCAL_GLOBAL = ("_local", "_global")  # Gemma 2: two layers are one of MaxText
_PATTERN = 6  # Gemma 3: as many layers are one of MaxText, where they are stacked


@dataclass(frozen=True, slots=True)
class Turn:
    """What one tensor of Hugging Face's is in MaxText. `inputs`, `outputs`: MaxText's dims, the latter after the former; ours is
    [prod(outputs), prod(inputs)], or [prod(outputs)] without inputs; `plain`: ours is [*inputs, *outputs].

    `interleaved`: the halves of the last dim are one after another in ours, element by element in MaxText's, as rotary embeddings have
    them. Ours = MaxText's x `times` / `over` + `plus`. `padded`: MaxText's first output, or input if plain, may be longer.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    plain: bool = False
    interleaved: bool = False
    times: float = 1.0
    over: float = 1.0
    plus: float = 0.0
    padded: bool = False

    @property
    def theirs(self) -> tuple[int, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def ours(self) -> tuple[int, ...]:
        if self.plain:
            return self.theirs
        return (prod(self.outputs), prod(self.inputs)) if self.inputs else (prod(self.outputs),)


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor of ours, and the slice of MaxText's that it is: `at`, index by axis, the other axes are the turn's. `shape`: of the
    whole of MaxText's tensor."""

    ours: str
    theirs: str
    at: Mapping[int, int]
    shape: tuple[int, ...]
    turn: Turn


@dataclass(frozen=True, slots=True)
class _Family:
    """How a kind of model differs. `norms`: MaxText's name -> ours. `query`: MaxText's weights have the scale of the attention in them;
    `embedding`: that of the embedding. `norm`: what is added to MaxText's."""

    norms: Mapping[str, str]
    query: bool = False
    norm: float = 0.0
    embedding: bool = False
    bias: bool = False
    head_norms: bool = False
    experts: tuple[str, str, Mapping[str, str]] | None = (
        None  # theirs, ours, and the names of both of a weight
    )


_LLAMA = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
_GEMMA = {"pre_self_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
_GEMMA2 = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = ("MoeBlock_0", "block_sparse_moe", {"wi_0": "w1", "wi_1": "w3", "wo": "w2"})
_QWEN_MOE = ("moe_block", "mlp", {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"})
_FAMILIES = {
    "llama": _Family(_LLAMA, query=True),
    "mistral": _Family(_LLAMA, query=True),
    "mixtral": _Family(_LLAMA, query=True, experts=_MIXTRAL),
    "qwen2": _Family(_LLAMA, bias=True),
    "qwen3": _Family(_LLAMA, head_norms=True),
    "qwen3_moe": _Family(_LLAMA, head_norms=True, experts=_QWEN_MOE),
    "gemma": _Family(_GEMMA, query=True, norm=-1.0, embedding=True),
    "gemma2": _Family(_GEMMA2, query=True, norm=-1.0, embedding=True),
    "gemma3_text": _Family(_GEMMA2, norm=-1.0, embedding=True, head_norms=True),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model. `query`: its square root is the scale of the attention. `interleaved`: see `Turn`."""

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    experts: int
    vocab: int
    tied: bool
    interleaved: bool
    query: float


def sizes_of(config: Mapping[str, Any], *, where: str) -> Sizes:
    """From a Hugging Face configuration. FormatError for a model whose names are not known, or a field that is missing."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise FormatError(
            f"{where}: model_type {kind!r} has no names of MaxText's here; known are {', '.join(_FAMILIES)}"
        )
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        moe = _FAMILIES[kind].experts is not None
        if kind == "gemma2" and int(config["num_hidden_layers"]) % 2:
            raise ValueError(
                f"num_hidden_layers is {config['num_hidden_layers']}; needed an even count"
            )
        return Sizes(
            kind=kind,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=head,
            mlp=int(
                config.get("moe_intermediate_size") or config["intermediate_size"]
                if moe
                else config["intermediate_size"]
            ),
            experts=int(config.get("num_local_experts") or config["num_experts"]) if moe else 0,
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
            interleaved=kind == "llama" and _rope(config) == "llama3",
            query=float(config.get("query_pre_attn_scalar") or head),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: is no configuration of {kind}: {error!r}") from error


def _rope(config: Mapping[str, Any]) -> str:
    """Llama 3.1's order of a head's elements in MaxText is that of its own rotary embedding; all others' is as in Hugging Face."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(told.get("rope_type") or told.get("type") or "default")


def links(sizes: Sizes, *, stacked: bool) -> list[Link]:
    """All tensors of the model, MaxText's own names below `params`. A tied `lm_head.weight` is not one of them."""
    family = _FAMILIES[sizes.kind]
    scale = _bfloat16(sqrt(sizes.hidden)) if sizes.kind == "gemma3_text" else sqrt(sizes.hidden)
    embedding = Turn(
        (sizes.vocab,),
        (sizes.hidden,),
        plain=True,
        over=scale if family.embedding else 1.0,
        padded=True,
    )
    norm = Turn((), (sizes.hidden,), plus=family.norm)
    found = [
        Link(
            "model.embed_tokens.weight", "token_embedder.embedding", {}, embedding.theirs, embedding
        ),
        Link("model.norm.weight", "decoder.decoder_norm.scale", {}, norm.theirs, norm),
    ]
    if not sizes.tied:
        head = Turn((sizes.hidden,), (sizes.vocab,), padded=True)
        found.append(Link("lm_head.weight", "decoder.logits_dense.kernel", {}, head.theirs, head))
    for theirs, ours, turn in _layer(sizes, family):
        for layer in range(sizes.layers):
            prefix, suffix, at, count = _spot(sizes, layer, stacked=stacked)
            found.extend(
                _linked(
                    f"model.layers.{layer}.{ours}",
                    f"{prefix}.{_suffixed(theirs, suffix)}",
                    at,
                    count,
                    turn,
                    sizes,
                )
            )
    return found


def _linked(
    ours: str, theirs: str, at: int | None, count: int, turn: Turn, sizes: Sizes
) -> Iterator[Link]:
    """`ours` with "{}" is of every expert."""
    if "{}" not in ours:
        shape = (
            turn.theirs
            if at is None
            else (*turn.theirs[:LAYER_AXIS], count, *turn.theirs[LAYER_AXIS:])
        )
        yield Link(ours, theirs, {} if at is None else {LAYER_AXIS: at}, shape, turn)
        return
    for expert in range(sizes.experts):
        shape = (sizes.experts, *(() if at is None else (count,)), *turn.theirs)
        yield Link(
            ours.format(expert),
            theirs,
            {0: expert, **({} if at is None else {LAYER_AXIS: at})},
            shape,
            turn,
        )


def _spot(sizes: Sizes, layer: int, *, stacked: bool) -> tuple[str, str, int | None, int]:
    """Where a layer is: the prefix and suffix of its names, its index where it is stacked, and of how many."""
    if sizes.kind == "gemma2":  # an even count: `sizes_of`
        suffix, pairs = _LOCAL_GLOBAL[layer % 2], sizes.layers // 2
        return (
            ("decoder.layers", suffix, layer // 2, pairs)
            if stacked
            else (f"decoder.layers_{layer // 2}", suffix, None, 0)
        )
    if sizes.kind == "gemma3_text" and stacked:
        blocks = sizes.layers // _PATTERN
        if layer < blocks * _PATTERN:
            return f"decoder.layers.layers_{layer % _PATTERN}", "", layer // _PATTERN, blocks
        return f"decoder.layers_remainder.layers_{layer % _PATTERN}", "", None, 0
    return (
        ("decoder.layers", "", layer, sizes.layers)
        if stacked
        else (f"decoder.layers_{layer}", "", None, 0)
    )


def _suffixed(theirs: str, suffix: str) -> str:
    first, _, rest = theirs.partition(".")
    return f"{first}{suffix}.{rest}"


def _layer(sizes: Sizes, family: _Family) -> Iterator[tuple[str, str, Turn]]:
    """Of one layer: MaxText's name, ours, the turn."""
    hidden, mlp, head = (sizes.hidden,), (sizes.mlp,), sizes.head
    query = sqrt(sizes.query) if family.query else 1.0
    for theirs, ours in family.norms.items():
        yield f"{theirs}.scale", f"{ours}.weight", Turn((), hidden, plus=family.norm)
    turns = {
        ("query", "q"): Turn(
            hidden, (sizes.heads, head), interleaved=sizes.interleaved, times=query
        ),
        ("key", "k"): Turn(hidden, (sizes.kv_heads, head), interleaved=sizes.interleaved),
        ("value", "v"): Turn(hidden, (sizes.kv_heads, head)),
    }
    for (theirs, ours), turn in turns.items():
        yield f"self_attention.{theirs}.kernel", f"self_attn.{ours}_proj.weight", turn
        if family.bias:
            yield (
                f"self_attention.{theirs}.bias",
                f"self_attn.{ours}_proj.bias",
                Turn((), turn.outputs),
            )
        if family.head_norms and theirs != "value":
            yield (
                f"self_attention.{theirs}_norm.scale",
                f"self_attn.{ours}_norm.weight",
                Turn((), (head,), plus=family.norm),
            )
    yield "self_attention.out.kernel", "self_attn.o_proj.weight", Turn((sizes.heads, head), hidden)
    if family.experts is None:
        for theirs, ours in (("wi_0", "gate_proj"), ("wi_1", "up_proj")):
            yield f"mlp.{theirs}.kernel", f"mlp.{ours}.weight", Turn(hidden, mlp)
        yield "mlp.wo.kernel", "mlp.down_proj.weight", Turn(mlp, hidden)
        return
    block, inner, names = family.experts
    yield f"{block}.gate.kernel", f"{inner}.gate.weight", Turn(hidden, (sizes.experts,))
    for theirs, ours in names.items():
        yield (
            f"{block}.{theirs}",
            f"{inner}.experts.{{}}.{ours}.weight",
            Turn(mlp, hidden) if theirs == "wo" else Turn(hidden, mlp),
        )


def _bfloat16(value: float) -> float:
    """Rounded to nearest, ties to even."""
    import struct

    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])

"""Maps MaxText tensors of known models to Hugging Face's: names, shapes, transforms. Pure.

MaxText's linear weights are [in, out] with heads as dims of their own. Stacked layers are on
axis 1, experts on axis 0. The rules follow MaxText's converters and models (param_mapping.py,
attentions.py), and are tested against what the models compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch

from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.files.parsing import parsing

LAYER_AXIS = 1  # MaxText's param_scan_axis
_LOCAL_GLOBAL = ("_local", "_global")  # Gemma 2: one MaxText layer has two layers
_GEMMA3_PATTERN = 6  # Gemma 3: one stacked MaxText layer has this many layers


@dataclass(frozen=True, slots=True)
class Transform:
    """How a Hugging Face tensor is stored in MaxText.

    MaxText's dims are `inputs` followed by `outputs`. Hugging Face's shape is [prod(outputs),
    prod(inputs)], or [prod(outputs)] without inputs, or [*inputs, *outputs] if `preserves_layout`.

    `interleaved`: the halves of the last dim follow each other in Hugging Face, and alternate
    element by element in MaxText, as its rotary embedding needs them. Hugging Face value = MaxText
    value * `multiplier` / `divisor` + `addend`. `padded`: MaxText's first output dim, or first
    input dim if `preserves_layout`, may be longer.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    preserves_layout: bool = False
    interleaved: bool = False
    multiplier: float = 1.0
    divisor: float = 1.0
    addend: float = 0.0
    padded: bool = False

    @property
    def maxtext_shape(self) -> tuple[int, ...]:
        """Return the shape in MaxText, without layer and expert axes."""
        return (*self.inputs, *self.outputs)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Return the shape in Hugging Face."""
        if self.preserves_layout:
            return self.maxtext_shape
        return (prod(self.outputs), prod(self.inputs)) if self.inputs else (prod(self.outputs),)


@dataclass(frozen=True, slots=True)
class TensorLink:
    """A Hugging Face tensor and the slice of a MaxText tensor that stores it.

    `indices` maps axes of the MaxText tensor to an index; the other axes are those of `transform`.
    `shape` is that of the whole MaxText tensor.
    """

    hf_name: str
    maxtext_name: str
    indices: Mapping[int, int]
    shape: tuple[int, ...]
    transform: Transform


@dataclass(frozen=True, slots=True)
class _Family:
    """How model types differ. `norms` maps MaxText's names to Hugging Face's.

    `scales_queries`, `scales_embedding`: MaxText's weights include the scale of the attention, or
    of the embedding. `norm_addend` is added to MaxText's norm weights.
    """

    norms: Mapping[str, str]
    scales_queries: bool = False
    norm_addend: float = 0.0
    scales_embedding: bool = False
    bias: bool = False
    head_norms: bool = False
    # MaxText's block, Hugging Face's block, MaxText's weight names -> Hugging Face's
    experts: tuple[str, str, Mapping[str, str]] | None = None


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
    "llama": _Family(_LLAMA, scales_queries=True),
    "mistral": _Family(_LLAMA, scales_queries=True),
    "mixtral": _Family(_LLAMA, scales_queries=True, experts=_MIXTRAL),
    "qwen2": _Family(_LLAMA, bias=True),
    "qwen3": _Family(_LLAMA, head_norms=True),
    "qwen3_moe": _Family(_LLAMA, head_norms=True, experts=_QWEN_MOE),
    "gemma": _Family(_GEMMA, scales_queries=True, norm_addend=-1.0, scales_embedding=True),
    "gemma2": _Family(_GEMMA2, scales_queries=True, norm_addend=-1.0, scales_embedding=True),
    "gemma3_text": _Family(_GEMMA2, norm_addend=-1.0, scales_embedding=True, head_norms=True),
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one model. The attention scale is the square root of `query_scalar`.

    `interleaved` is that of `Transform`, for queries and keys.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int
    vocab: int
    tied: bool
    interleaved: bool
    query_scalar: float


def parse_sizes(config: Mapping[str, Any], *, label: str) -> ModelSizes:
    """Read the sizes from a Hugging Face config.

    Raises FormatError for a model type without a name map, or a missing field.
    """
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise FormatError(
            f"{label}: got model_type {model_type!r} of a MaxText checkpoint, expected one of "
            f"{', '.join(_FAMILIES)}"
        )
    with parsing(label, f"a valid {model_type} configuration"):
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        has_experts = _FAMILIES[model_type].experts is not None
        if model_type == "gemma2" and int(config["num_hidden_layers"]) % 2:
            raise ValueError(f"odd num_hidden_layers {config['num_hidden_layers']}")
        mlp, experts = None, 0
        if has_experts:
            mlp = config.get("moe_intermediate_size")
            experts = config.get("num_local_experts") or config["num_experts"]
        # Of the types of rotary embedding, only Llama 3.1's reorders elements in MaxText.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type")
        return ModelSizes(
            model_type=model_type,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            mlp=int(mlp or config["intermediate_size"]),
            experts=int(experts),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", model_type.startswith("gemma"))),
            interleaved=model_type == "llama" and rope_type == "llama3",
            query_scalar=float(config.get("query_pre_attn_scalar") or head_dim),
        )


def tensor_links(sizes: ModelSizes, *, stacked: bool) -> list[TensorLink]:
    """Return the links of all tensors of a model, except a tied `lm_head.weight`.

    MaxText's names are those below `params`.
    """
    family = _FAMILIES[sizes.model_type]
    embedding_scale = sqrt(sizes.hidden)
    if sizes.model_type == "gemma3_text":
        embedding_scale = float(torch.tensor(embedding_scale, dtype=torch.bfloat16, device="cpu"))
    embedding = Transform(
        (sizes.vocab,),
        (sizes.hidden,),
        preserves_layout=True,
        divisor=embedding_scale if family.scales_embedding else 1.0,
        padded=True,
    )
    norm = Transform((), (sizes.hidden,), addend=family.norm_addend)
    tensors = [
        TensorLink(
            "model.embed_tokens.weight",
            "token_embedder.embedding",
            {},
            embedding.maxtext_shape,
            embedding,
        ),
        TensorLink("model.norm.weight", "decoder.decoder_norm.scale", {}, norm.maxtext_shape, norm),
    ]
    if not sizes.tied:
        lm_head = Transform((sizes.hidden,), (sizes.vocab,), padded=True)
        tensors.append(
            TensorLink(
                "lm_head.weight", "decoder.logits_dense.kernel", {}, lm_head.maxtext_shape, lm_head
            )
        )
    for maxtext_name, hf_name, transform in _layer_tensors(sizes, family):
        block, _, weight = maxtext_name.partition(".")
        for layer in range(sizes.layers):
            prefix, suffix, layer_index, layer_count = _layer_slot(sizes, layer, stacked=stacked)
            tensors.extend(
                _layer_links(
                    f"model.layers.{layer}.{hf_name}",
                    f"{prefix}.{block}{suffix}.{weight}",
                    layer_index,
                    layer_count,
                    transform,
                    sizes,
                )
            )
    return tensors


def _layer_links(
    hf_name: str,
    maxtext_name: str,
    layer_index: int | None,
    layer_count: int,
    transform: Transform,
    sizes: ModelSizes,
) -> Iterator[TensorLink]:
    """Yield the links of one layer's tensor; an `hf_name` with "{}" has one link per expert."""
    layer_axis = {} if layer_index is None else {LAYER_AXIS: layer_index}
    stack_dims = () if layer_index is None else (layer_count,)
    if "{}" not in hf_name:
        dims = list(transform.maxtext_shape)
        dims[LAYER_AXIS:LAYER_AXIS] = stack_dims
        yield TensorLink(hf_name, maxtext_name, layer_axis, tuple(dims), transform)
        return
    shape = (sizes.experts, *stack_dims, *transform.maxtext_shape)
    for expert in range(sizes.experts):
        indices = {0: expert, **layer_axis}
        yield TensorLink(hf_name.format(expert), maxtext_name, indices, shape, transform)


def _layer_slot(
    sizes: ModelSizes, layer: int, *, stacked: bool
) -> tuple[str, str, int | None, int]:
    """Return where a layer is stored: name prefix and suffix, index in a stack, stack size."""
    if sizes.model_type == "gemma2":  # the count is even: `parse_sizes` checks it
        suffix, pairs = _LOCAL_GLOBAL[layer % 2], sizes.layers // 2
        if stacked:
            return "decoder.layers", suffix, layer // 2, pairs
        return f"decoder.layers_{layer // 2}", suffix, None, 0
    if sizes.model_type == "gemma3_text" and stacked:
        blocks = sizes.layers // _GEMMA3_PATTERN
        if layer < blocks * _GEMMA3_PATTERN:
            prefix = f"decoder.layers.layers_{layer % _GEMMA3_PATTERN}"
            return prefix, "", layer // _GEMMA3_PATTERN, blocks
        return f"decoder.layers_remainder.layers_{layer % _GEMMA3_PATTERN}", "", None, 0
    return (
        ("decoder.layers", "", layer, sizes.layers)
        if stacked
        else (f"decoder.layers_{layer}", "", None, 0)
    )


def _layer_tensors(sizes: ModelSizes, family: _Family) -> Iterator[tuple[str, str, Transform]]:
    """Yield MaxText's name, Hugging Face's name and the transform of each tensor of a layer."""
    hidden, mlp, head_dim = (sizes.hidden,), (sizes.mlp,), sizes.head_dim
    query_scale = sqrt(sizes.query_scalar) if family.scales_queries else 1.0
    for maxtext_name, hf_name in family.norms.items():
        yield (
            f"{maxtext_name}.scale",
            f"{hf_name}.weight",
            Transform((), hidden, addend=family.norm_addend),
        )
    transforms = {
        ("query", "q"): Transform(
            hidden, (sizes.heads, head_dim), interleaved=sizes.interleaved, multiplier=query_scale
        ),
        ("key", "k"): Transform(hidden, (sizes.kv_heads, head_dim), interleaved=sizes.interleaved),
        ("value", "v"): Transform(hidden, (sizes.kv_heads, head_dim)),
    }
    for (maxtext_name, hf_name), transform in transforms.items():
        yield f"self_attention.{maxtext_name}.kernel", f"self_attn.{hf_name}_proj.weight", transform
        if family.bias:
            yield (
                f"self_attention.{maxtext_name}.bias",
                f"self_attn.{hf_name}_proj.bias",
                Transform((), transform.outputs),
            )
        if family.head_norms and maxtext_name != "value":
            yield (
                f"self_attention.{maxtext_name}_norm.scale",
                f"self_attn.{hf_name}_norm.weight",
                Transform((), (head_dim,), addend=family.norm_addend),
            )
    yield (
        "self_attention.out.kernel",
        "self_attn.o_proj.weight",
        Transform((sizes.heads, head_dim), hidden),
    )
    if family.experts is None:
        for maxtext_name, hf_name in (("wi_0", "gate_proj"), ("wi_1", "up_proj")):
            yield f"mlp.{maxtext_name}.kernel", f"mlp.{hf_name}.weight", Transform(hidden, mlp)
        yield "mlp.wo.kernel", "mlp.down_proj.weight", Transform(mlp, hidden)
        return
    maxtext_block, hf_block, names = family.experts
    yield (
        f"{maxtext_block}.gate.kernel",
        f"{hf_block}.gate.weight",
        Transform(hidden, (sizes.experts,)),
    )
    for maxtext_name, hf_name in names.items():
        yield (
            f"{maxtext_block}.{maxtext_name}",
            f"{hf_block}.experts.{{}}.{hf_name}.weight",
            Transform(mlp, hidden) if maxtext_name == "wo" else Transform(hidden, mlp),
        )

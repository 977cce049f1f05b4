"""Maps Paddle's parameter names and layouts to torch's, from names and the config.

Shapes are no evidence. Paddle stores linear weights as [in, out], torch as [out, in]. A square
weight looks the same either way, so a 2-D weight of an unknown layer is rejected. If the config
has sizes, every weight must match them. Only lm_head's layout differs between versions, and its
shape shows it unless the vocabulary has the hidden size.

Source: PaddleNLP's models (`llama/modeling.py` and those derived from it) and PaddleFormers'.
Fused QKV stores, for each group of heads, its queries, its key, its value; fused gate_up stores
all gates, then all ups, on each tensor-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unified_ckpt.core.recipes import Recipe, concat, permute, slice_dim
from unified_ckpt.errors import FormatError

# Models with Hugging Face's names after the first component, `base_model_prefix`: "model" in
# PaddleFormers, the model's type in PaddleNLP.
_HF_NAMED_MODELS = frozenset(
    {"llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma"}
)

PADDLEFORMERS_VERSION = "paddleformers_version"
_HF_PREFIX = "model."
_QKV = "qkv_proj"
_GATE_UPS = frozenset({"gate_up_fused_proj", "up_gate_proj"})  # PaddleNLP, PaddleFormers
# Linear layers by the dim that tensor-parallel ranks split: out, in, or none.
_COLUMN = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        _QKV,
        "gate_proj",
        "up_proj",
        *_GATE_UPS,
        "w1",
        "w3",
        "q_b_proj",
        "kv_b_proj",
    }
)
_ROW = frozenset({"o_proj", "down_proj", "w2", "out_proj"})
_PLAIN = frozenset({"gate", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "score"})
_EMBEDDINGS = frozenset({"embed_tokens", "word_embeddings"})
_HEAD = "lm_head"
_LORA = ("lora_A", "lora_B")

Layer = Literal["column", "row", "plain", "embedding", "head"]
_LAYER_NAMES: Mapping[Layer, frozenset[str]] = {
    "column": _COLUMN,
    "row": _ROW,
    "plain": _PLAIN,
    "embedding": _EMBEDDINGS,
    "head": frozenset({_HEAD}),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a model's config.json that names and shapes depend on.

    `tied`: lm_head is the embedding; None if the config does not say. `vocab_first`: lm_head is
    [vocab, hidden] in Paddle's layout, else [hidden, vocab]; None if unknown. `is_formers`:
    PaddleFormers 1.0 or later wrote the config.
    """

    model_type: str | None = None
    tied: bool | None = None
    vocab_first: bool | None = None
    is_formers: bool = False
    dtype: str | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    layers: int | None = None

    @property
    def has_hf_names(self) -> bool:
        """Return whether names are Hugging Face's except for their first component."""
        return self.model_type in _HF_NAMED_MODELS


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json of PaddleNLP, PaddleFormers or Hugging Face.

    `vocab_first` is that of the config alone; `resolve_head` compares it with the tensors.
    """

    def size(name: str) -> int | None:
        value = config.get(name)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_size else None

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    head_dim = size("head_dim")
    if head_dim is None and heads and hidden and hidden % heads == 0:
        head_dim = hidden // heads
    tied, model_type = config.get("tie_word_embeddings"), config.get("model_type")
    tied = tied if isinstance(tied, bool) else None
    dtype = config.get("dtype") or config.get("torch_dtype")
    version = re.match(r"([0-9]{1,9})\.", str(config.get(PADDLEFORMERS_VERSION)))
    is_formers = version is not None and int(version[1]) >= 1
    return ModelConfig(
        model_type=model_type if isinstance(model_type, str) else None,
        tied=tied,
        vocab_first=is_formers or tied,
        is_formers=is_formers,
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        layers=size("num_hidden_layers"),
    )


def layer_kind(name: str, *, static_name: str | None = None) -> Layer | None:
    """Return the kind of layer that a parameter belongs to, or None if it is unknown.

    `static_name` contains the class of the layer. Raises
    FormatError if the two names contradict each other.
    """
    leaf = _leaf(name)
    by_name = next((kind for kind, names in _LAYER_NAMES.items() if leaf in names), None)
    by_class: Layer | None = None  # `linear_3.w_0` is always "plain"
    if static_name and "embedding" in static_name:
        by_class = "embedding"
    elif static_name and "linear" in static_name:
        by_class = "plain"
    if by_name is None or by_class is None or by_name == "head":
        return by_name or by_class
    if (by_name == "embedding") != (by_class == "embedding"):
        raise FormatError(
            f"{name}: its name is that of a layer of kind {by_name}, but its static "
            f"name is {static_name}"
        )
    return by_name


def _leaf(name: str) -> str:
    """Return the layer's name: "q_proj" for "llama.layers.0.self_attn.q_proj.weight"."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else ""


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter."""
    return name.rpartition(".")[2] in _LORA


def resolve_head(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Infer `vocab_first` from the model's tensors, and `tied` if only a tie explains it.

    `shapes` are those in Paddle's layout. The sizes are the embedding's, else the config's. If they
    are equal, the versions decide: PaddleFormers 1.0 and later, which names tensors `model.…`,
    stores [vocab, hidden]. PaddleNLP, which names them after the model, stores [hidden, vocab]
    unless tied.
    """
    head = next(
        (
            shape
            for name, shape in shapes.items()
            if is_head(name) and len(shape) == 2 and not is_adapter(name)
        ),
        None,
    )
    if head is None:
        return model
    sizes = next(
        (
            shape
            for name, shape in shapes.items()
            if _leaf(name) in _EMBEDDINGS and len(shape) == 2 and not is_adapter(name)
        ),
        (model.vocab, model.hidden),
    )
    has_hf_prefix = any(name.startswith(_HF_PREFIX) for name in shapes)
    by_shape = {
        vocab_first
        for vocab_first, expected in ((True, sizes), (False, sizes[::-1]))
        if all(size in (None, actual) for size, actual in zip(expected, head, strict=True))
    }
    by_version: set[bool | None] = {True} if model.is_formers or has_hf_prefix else set()
    if not has_hf_prefix and any(name.startswith(f"{model.model_type}.") for name in shapes):
        by_version.add(model.tied)
    evidence = by_shape if len(by_shape) == 1 else by_version or {model.tied}
    vocab_first = next(iter(evidence)) if len(evidence) == 1 else None
    # PaddleNLP stores [vocab, hidden] for ties only
    tied = True if vocab_first and by_version == {None} else model.tied
    return replace(model, vocab_first=vocab_first, tied=tied)


def is_head(name: str) -> bool:
    """Return whether a parameter belongs to lm_head."""
    return _leaf(name) == _HEAD


def split_axis(name: str, dims: int, layer: Layer | None, *, vocab_first: bool) -> int | None:
    """Return the axis, in Paddle's layout, that tensor-parallel ranks split; None for replicas."""
    if layer == "head":
        layer = "embedding" if vocab_first else "column"
    suffix = name.rpartition(".")[2]
    if suffix in _LORA:
        return {("column", "lora_B"): 1, ("row", "lora_A"): 0}.get((layer or "", suffix))
    if layer == "column":
        return dims - 1
    return 0 if layer in ("row", "embedding") and dims == 2 else None


def is_transposed(
    name: str, shape: tuple[int, ...], layer: Layer | None, *, vocab_first: bool | None
) -> bool:
    """Return whether torch stores the parameter transposed.

    Raises FormatError for weights of two or more dims for which this is unknown.
    """
    if len(shape) < 2:
        if layer is not None and name.endswith(".weight"):
            raise FormatError(f"{name}: got shape {shape}, expected 2 dims, as of a linear layer")
        return False
    if is_adapter(name) and len(shape) == 2:
        return True
    if layer == "head" and vocab_first is None:
        raise FormatError(
            f"{name}: its layout depends on tie_word_embeddings and {PADDLEFORMERS_VERSION}; pass "
            "a config.json that has them with SourceOptions(config=...)"
        )
    if layer is None or len(shape) > 2:
        raise FormatError(
            f"{name}: got shape {shape} of an unknown layer, so its layout is unknown; expected "
            "names of Llama, Qwen2, Mixtral or Gemma in PaddleNLP, or of a Paddle layer"
        )
    return not (layer == "embedding" or (layer == "head" and vocab_first))


def check_shape(name: str, shape: tuple[int, ...], model: ModelConfig) -> None:
    """Raise FormatError if a shape, in Paddle's layout, does not match the config."""
    expected = expected_shape(name, len(shape), model)
    if any(size not in (None, actual) for size, actual in zip(expected, shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in expected)
        raise FormatError(
            f"{name}: got shape {list(shape)}, expected [{sizes}] by config.json (Paddle's layout)"
        )


def expected_shape(name: str, dims: int, model: ModelConfig) -> tuple[int | None, ...]:
    """Return a parameter's shape, in Paddle's layout, from the config; None for unknown dims."""
    if dims not in (1, 2) or is_adapter(name) or not model.has_hf_names:
        return (None,) * dims
    leaf, hidden, head_dim = _leaf(name), model.hidden, model.head_dim
    queries = model.heads * head_dim if model.heads and head_dim else None
    keys = model.kv_heads * head_dim if model.kv_heads and head_dim else None
    inner = model.intermediate if ".mlp." in name and "expert" not in name else None
    sizes_by_layer: dict[str, tuple[int | None, int | None]] = {
        "embed_tokens": (model.vocab, hidden),
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        _QKV: (hidden, queries + 2 * keys if queries and keys else None),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        **dict.fromkeys(_GATE_UPS, (hidden, 2 * inner if inner else None)),
        "down_proj": (inner, hidden),
        _HEAD: (model.vocab, hidden) if model.vocab_first else (hidden, model.vocab),
    }
    sizes = sizes_by_layer.get(leaf, (None, None))
    return sizes if dims == 2 else (sizes[1] if name.endswith(".bias") else None,)


def torch_name(name: str, model: ModelConfig) -> str:
    """Return the Hugging Face name of a known model, PEFT's of an adapter, else the same name."""
    if not model.has_hf_names:
        return name
    prefix = f"{model.model_type}."
    hf_name = _HF_PREFIX + name.removeprefix(prefix) if name.startswith(prefix) else name
    return f"base_model.model.{hf_name}.weight" if is_adapter(name) else hf_name


def paddle_name(name: str, model: ModelConfig) -> str:
    """Return PaddleNLP's name, the inverse of `torch_name`."""
    if ".lora_" in name:
        name = name.removeprefix("base_model.model.").removesuffix(".weight")
    if name.startswith(_HF_PREFIX) and model.has_hf_names:
        return name.replace(_HF_PREFIX, f"{model.model_type}.", 1)
    return name


def fused_count(name: str) -> int:
    """Return how many tensors a tensor-parallel rank stores one after the other in its slice."""
    return 2 if _leaf(name) in _GATE_UPS else 1


def target_tensors(
    name: str,
    tensor: Recipe,
    model: ModelConfig,
    *,
    transposed: bool,
    rename: bool,
    tp_degree: int = 1,
) -> dict[str, Recipe]:
    """Return the torch tensors that a Paddle tensor holds, by name: itself, or those that it fuses.

    `rename`: use Hugging Face names. `tp_degree`: how many ranks' slices the last dim joins as they
    are, each with its own gates and ups.
    """
    target_name = torch_name(name, model) if rename else name
    leaf, tensors = _leaf(name), {target_name: tensor}
    if rename and leaf in (_QKV, *_GATE_UPS):
        size = tensor.shape[-1]
        ranges = (
            _qkv_ranges(name, size, model)
            if leaf == _QKV
            else _gate_up_ranges(name, size, tp_degree)
        )
        tensors = {
            target_name.replace(f".{leaf}.", f".{target_leaf}."): concat(
                [slice_dim(tensor, -1, start, stop) for start, stop in leaf_ranges], -1
            )
            for target_leaf, leaf_ranges in ranges.items()
        }
    return {
        target: permute(recipe, (1, 0)) if transposed else recipe
        for target, recipe in tensors.items()
    }


def _gate_up_ranges(name: str, size: int, tp_degree: int) -> dict[str, list[tuple[int, int]]]:
    if size % (2 * tp_degree):
        raise FormatError(
            f"{name}: got {size} outputs, expected gates and ups on {tp_degree} tensor-parallel "
            f"ranks, a multiple of {2 * tp_degree}"
        )
    width = size // (2 * tp_degree)
    bounds = [(start, start + width) for start in range(0, size, width)]
    return {"gate_proj": bounds[::2], "up_proj": bounds[1::2]}


def _qkv_ranges(name: str, size: int, model: ModelConfig) -> dict[str, list[tuple[int, int]]]:
    heads, groups, head_dim = model.heads, model.kv_heads, model.head_dim
    if (
        not heads
        or not groups
        or not head_dim
        or heads % groups
        or size != (heads + 2 * groups) * head_dim
    ):
        raise FormatError(
            f"{name}: got {size} outputs, expected those of config.json's heads and head_dim"
        )
    queries = heads // groups * head_dim
    ranges: dict[str, list[tuple[int, int]]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for start in range(0, size, queries + 2 * head_dim):
        ranges["q_proj"].append((start, start + queries))
        ranges["k_proj"].append((start + queries, start + queries + head_dim))
        ranges["v_proj"].append((start + queries + head_dim, start + queries + 2 * head_dim))
    return ranges

"""How PaddleNLP names and lays out parameters, and how torch does: told from names and the model's
config, never from shapes.

Paddle has a linear layer's weight as [in, out], torch as [out, in]. A square one looks the same
either way, so a weight of two dims whose layer is not known here is refused. Where the config says
sizes, every weight must have them.

Source: PaddleNLP's models (`llama/modeling.py` and those made after it); fused QKV holds, for each
group of heads, its queries, its key, its value; fused gate_up all gates, then all ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.errors import FormatError

# Models whose parameters have Hugging Face's names after the first word, which is PaddleNLP's
# `base_model_prefix`.
_HF_NAMED_MODELS = frozenset(
    {"llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma"}
)

QKV, GATE_UP = "qkv_proj", "gate_up_fused_proj"
# Linear layers by how tensor parallel ranks split them: out, in, or not at all. lm_head and
# embeddings are told apart below.
_COLUMN = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        QKV,
        "gate_proj",
        "up_proj",
        GATE_UP,
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

Layer = Literal["column", "row", "plain", "embedding", "head", "vector"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says of a model. `tied`: whether lm_head is the embedding; None where it
    does not say.
    """

    model_type: str | None = None
    tied: bool | None = None
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
        """Whether its names are Hugging Face's but for the first word."""
        return self.model_type in _HF_NAMED_MODELS


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor of torch's, from one of Paddle's: `boxes` are pairs, in torch's and in Paddle's, of
    one shape, or, `transposed`, of reversed shapes.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]
    transposed: bool


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """From a parsed config.json, PaddleNLP's or Hugging Face's."""

    def size(name: str) -> int | None:
        value = config.get(name)
        return (
            value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
        )

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    head_dim = size("head_dim") or (
        hidden // heads if heads and hidden and hidden % heads == 0 else None
    )
    tied, model_type, dtype = (
        config.get(name) for name in ("tie_word_embeddings", "model_type", "dtype")
    )
    dtype = dtype or config.get("torch_dtype")
    return ModelConfig(
        model_type=model_type if isinstance(model_type, str) else None,
        tied=tied if isinstance(tied, bool) else None,
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        layers=size("num_hidden_layers"),
    )


def layer_kind(name: str, *, internal_name: str | None = None) -> Layer | None:
    """What kind of layer a parameter belongs to. `internal_name`: Paddle's own name of it, which
    has the class of its layer. None where unknown.

    FormatError where the two names contradict each other.
    """
    leaf = _leaf(name)
    by_name: Layer | None = None
    for kind, names in (
        ("column", _COLUMN),
        ("row", _ROW),
        ("plain", _PLAIN),
        ("embedding", _EMBEDDINGS),
    ):
        if leaf in names:
            by_name = kind  # type: ignore[assignment]  # one of the literals above
    if leaf == _HEAD:
        by_name = "head"
    by_class = _layer_kind_by_class(internal_name) if internal_name else None
    if (
        by_name
        and by_class
        and (by_name == "embedding") != (by_class == "embedding")
        and by_name != "head"
    ):
        raise FormatError(
            f"{name}: is called a layer of kind {by_name}, and {internal_name} by Paddle"
        )
    return by_name or by_class


def _layer_kind_by_class(internal_name: str) -> Layer | None:
    """`linear_3.w_0` -> "plain": Paddle names a parameter by the kind of its layer, of parallel
    ones too.
    """
    return (
        "embedding"
        if "embedding" in internal_name
        else "plain"
        if "linear" in internal_name
        else None
    )


def _leaf(name: str) -> str:
    """The layer's own name: "q_proj" of "llama.layers.0.self_attn.q_proj.weight", and of its
    adapter's "….q_proj.lora_A".
    """
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else ""


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in _LORA


def resolve_tie(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The model, and whether it is tied where the config does not say and the hidden size is one of
    lm_head's two, not both.
    """
    head = next(
        (shape for name, shape in shapes.items() if is_head(name) and len(shape) == 2), None
    )
    if model.tied is not None or head is None or model.hidden not in head or head[0] == head[1]:
        return model
    return replace(model, tied=head[1] == model.hidden)


def is_head(name: str) -> bool:
    return _leaf(name) == _HEAD


def split_axis(name: str, dims: int, layer: Layer | None, *, tied: bool) -> int | None:
    """The axis, in Paddle's orientation, that tensor parallel ranks have parts of; None where each
    has the whole.
    """
    if layer == "head":
        layer = "embedding" if tied else "column"
    suffix = name.rpartition(".")[2]
    if suffix in _LORA:
        return {("column", "lora_B"): 1, ("row", "lora_A"): 0}.get((layer or "", suffix))
    if layer == "column":
        return dims - 1
    return 0 if layer in ("row", "embedding") and dims == 2 else None


def is_transposed(
    name: str, shape: tuple[int, ...], layer: Layer | None, *, tied: bool | None
) -> bool:
    """Whether torch has it transposed. FormatError for a weight of two or more dims of which that
    is not known.
    """
    if len(shape) < 2:
        return False
    if is_adapter(name) and len(shape) == 2:
        return True
    if layer == "head" and tied is None:
        raise FormatError(
            f"{name}: whether it is [hidden, vocab] hangs on tie_word_embeddings; needed a config.json that says so (SourceOptions.config)"
        )
    if layer is None or layer == "vector" or len(shape) > 2:
        raise FormatError(
            f"{name}: has shape {shape}, and by its name it is not known whether it is a linear layer's [in, out]; "
            "needed names like those of Llama, Qwen2, Mixtral or Gemma in PaddleNLP, or of a layer of Paddle's"
        )
    return not (layer == "embedding" or (layer == "head" and tied is True))


def check_shape(name: str, shape: tuple[int, ...], model: ModelConfig) -> None:
    """FormatError where a parameter has other sizes than the config says, in Paddle's orientation."""
    expected = expected_shape(name, len(shape), model)
    if any(
        expected_size is not None and expected_size != actual_size
        for expected_size, actual_size in zip(expected, shape, strict=True)
    ):
        raise FormatError(
            f"{name}: has shape {shape}; in Paddle's orientation config.json needs {tuple('any' if expected_dim is None else expected_dim for expected_dim in expected)}"
        )


def expected_shape(name: str, dims: int, model: ModelConfig) -> tuple[int | None, ...]:
    """What the config says of a parameter's sizes in Paddle's orientation; None where it says
    nothing.
    """
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
        QKV: (hidden, queries + 2 * keys if queries and keys else None),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        GATE_UP: (hidden, 2 * inner if inner else None),
        "down_proj": (inner, hidden),
        _HEAD: (model.vocab, hidden) if model.tied else (hidden, model.vocab),
    }
    sizes = sizes_by_layer.get(leaf, (None, None))
    return sizes if dims == 2 else (sizes[1] if name.endswith(".bias") else None,)


def torch_name(name: str, model: ModelConfig) -> str:
    """Hugging Face's name where the model is known, PEFT's of an adapter; else the name as it is."""
    if not model.has_hf_names:
        return name
    hf_name = (
        "model." + name.removeprefix(f"{model.model_type}.")
        if name.startswith(f"{model.model_type}.")
        else name
    )
    return f"base_model.model.{hf_name}.weight" if is_adapter(name) else hf_name


def paddle_name(name: str, model: ModelConfig) -> str:
    """The inverse of `torch_name`."""
    native_name = (
        name.removeprefix("base_model.model.").removesuffix(".weight") if ".lora_" in name else name
    )
    return (
        native_name.replace("model.", f"{model.model_type}.", 1)
        if native_name.startswith("model.") and model.has_hf_names
        else native_name
    )


def target_tensors(
    name: str, shape: tuple[int, ...], model: ModelConfig, *, transposed: bool, rename: bool
) -> list[TargetTensor]:
    """The tensors of torch's that one of Paddle's holds: itself, or what it fuses. `rename`: into
    Hugging Face's names.
    """
    target_name = torch_name(name, model) if rename else name
    leaf = _leaf(name)
    if not rename or leaf not in (QKV, GATE_UP):
        return [
            TargetTensor(
                target_name,
                shape[::-1] if transposed else shape,
                ((full_box(shape[::-1] if transposed else shape), full_box(shape)),),
                transposed,
            )
        ]
    rows = _qkv_ranges(name, shape[-1], model) if leaf == QKV else _gate_up_ranges(name, shape[-1])
    targets = []
    for target_leaf, ranges in rows.items():  # ranges of Paddle's last axis, which is torch's first
        total = sum(stop - start for start, stop in ranges)
        boxes, offset = [], 0
        for start, stop in ranges:
            target_box = Box((offset, *(0,) * (len(shape) - 1)), (stop - start, *shape[:-1]))
            boxes.append(
                (target_box, Box((*(0,) * (len(shape) - 1), start), (*shape[:-1], stop - start)))
            )
            offset += stop - start
        targets.append(
            TargetTensor(
                target_name.replace(f".{leaf}.", f".{target_leaf}."),
                (total, *shape[:-1]),
                tuple(boxes),
                transposed,
            )
        )
    return targets


def _gate_up_ranges(name: str, size: int) -> dict[str, list[tuple[int, int]]]:
    if size % 2:
        raise FormatError(f"{name}: has {size} outputs; needed gates and ups, as many of each")
    return {"gate_proj": [(0, size // 2)], "up_proj": [(size // 2, size)]}


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
            f"{name}: has {size} outputs; needed a config.json whose heads and head_dim make up as many"
        )
    queries = heads // groups * head_dim
    ranges: dict[str, list[tuple[int, int]]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for start in range(0, size, queries + 2 * head_dim):
        ranges["q_proj"].append((start, start + queries))
        ranges["k_proj"].append((start + queries, start + queries + head_dim))
        ranges["v_proj"].append((start + queries + head_dim, start + queries + 2 * head_dim))
    return ranges

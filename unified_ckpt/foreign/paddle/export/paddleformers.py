"""A source as PaddleFormers 1.2 stores it: which models, tensors and master weights it needs.

How a resumed training could be wrong: PaddleFormers only warns of a tensor that a checkpoint lacks,
and continues from random weights, from zero moments, or from master weights that do not belong to
the model. So names must be exactly those of its model class, and what it needs is derived here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.weights_check import master_names
from unified_ckpt.engine.source.protocol import Source, read_box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.export.plan import check_parts, half_names
from unified_ckpt.foreign.paddle.master_check import HALF_DTYPES
from unified_ckpt.foreign.paddle.names import PADDLEFORMERS_VERSION, ModelConfig
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import from_bytes, torch_dtype
from unified_ckpt.views.derived import DerivedSource, Expr, ExternalTensor, Renamed, unchanged_parts

_VERSION = "1.2.0"
# Of PaddleNLP, and of transformers 5
_REPLACED_FIELDS = ("tensor_parallel_degree", "paddlenlp_version", "dtype")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEAR = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def as_paddleformers(
    source: Source, model: ModelConfig, *, parts: Collection[str], whole_masters: bool
) -> Source:
    """Return the source with all tensors that PaddleFormers looks for, each under all its names.

    A tensor in half precision gets a master weight, its own value if the source has none; without
    half precision there are no master weights. `whole_masters`: tensors in float32 have one too, if
    any has. FormatError for other models, parts and names than `parts` and those of the model.
    """
    _check_supported(source, model, parts)
    names = source.names(MODEL)
    aliases = {MODEL: dict(source.aliases(MODEL))}
    if model.tied and _HEAD not in {*names, *aliases[MODEL]}:
        aliases[MODEL][_HEAD] = aliases[MODEL].get(_EMBEDDING, _EMBEDDING)
    _check_names({*names, *aliases[MODEL]}, model)
    kept = [part for part in source.parts if part != MASTER]
    exprs = unchanged_parts(source, kept)
    halves, masters = half_names(source), master_names(source, names)
    if halves:
        specs = source.specs(MODEL, names)
        exprs[MASTER] = {
            name: _master(source, name, specs[name].dtype, masters.get(name))
            for name in names
            if name in halves or whole_masters
        }
    ties = list(_ties(aliases[MODEL]))
    for part in exprs.keys() - {MODEL}:
        aliases[part] = _tied_names(exprs[part], ties, with_state=part == OPTIMIZER)
    return DerivedSource(source, exprs, aliases=aliases)


def _check_supported(source: Source, model: ModelConfig, parts: Collection[str]) -> None:
    if model.model_type != "llama":
        raise FormatError(
            f"got model_type {model.model_type!r}, expected llama; PaddleFormers fuses or renames "
            "the weights of other models. Export with --to huggingface, which it loads with "
            "load_from_hf"
        )
    check_parts(source, parts)


def _check_names(names: Collection[str], model: ModelConfig) -> None:
    """Raise FormatError unless these are the names of PaddleFormers' Llama."""
    if not model.layers:
        raise FormatError("got a config.json without num_hidden_layers, expected the number")
    expected = {_EMBEDDING, _HEAD, "model.norm.weight"}
    optional = set[str]()
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        expected |= {f"{prefix}.{norm}.weight" for norm in _NORMS}
        for block, linears in _LINEAR.items():
            expected |= {f"{prefix}.{block}.{linear}.weight" for linear in linears}
            optional |= {f"{prefix}.{block}.{linear}.bias" for linear in linears}
    raise_if_any(
        FormatError,
        "got a Llama that lacks these tensors; PaddleFormers would continue from random values",
        sorted(expected - set(names)),
    )
    raise_if_any(
        FormatError,
        "PaddleFormers' Llama has no place for these; leave them out, or rename them",
        sorted(set(names) - expected - optional),
    )


def _master(source: Source, name: str, dtype: str, master: str | None) -> Expr:
    """Return the master weight of a tensor: the stored one, else its own value in float32."""
    if master is not None:
        return Renamed((MASTER, master))
    if dtype == "F32":
        return Renamed((MODEL, name))
    shape = source.specs(MODEL, [name])[name].shape
    load = partial(_as_float32, source, (MODEL, name), torch_dtype(dtype))
    return ExternalTensor(External("F32", shape, load))


def _as_float32(source: Source, key: Key, dtype: torch.dtype, box: Box) -> torch.Tensor:
    return from_bytes(read_box(source, key, box), dtype, box.shape).float()


def _ties(aliases: dict[str, str]) -> Iterator[set[str]]:
    """Yield the names of each tied tensor."""
    for stored in set(aliases.values()):
        yield {stored, *(alias for alias, name in aliases.items() if name == stored)}


def _tied_names(
    names: Collection[str], ties: Collection[set[str]], *, with_state: bool
) -> dict[str, str]:
    """Return the names that tied tensors of a part lack, each with a stored name."""
    aliases = dict[str, str]()
    for name in names:
        owner, slash, state = name.rpartition("/") if with_state else (name, "", "")
        for tie in ties:
            if owner in tie:
                aliases |= {f"{other}{slash}{state}": name for other in tie}
    return {alias: name for alias, name in aliases.items() if alias not in names}


def paddleformers_config(config: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the config.json: the stored dtype, and the version whose layout this is."""
    dtypes = {spec.dtype for spec in source.specs(MODEL, source.names(MODEL)).values()}
    half = next((dtype for dtype in HALF_DTYPES if dtype in dtypes), "F32")
    return {
        "tie_word_embeddings": False,  # as in transformers; PaddleFormers would tie
        **{key: value for key, value in config.items() if key not in _REPLACED_FIELDS},
        PADDLEFORMERS_VERSION: _VERSION,
        "torch_dtype": str(torch_dtype(half)).removeprefix("torch."),
    }

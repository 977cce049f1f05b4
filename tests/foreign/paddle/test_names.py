"""Paddle's layouts follow from names, versions and lm_head's shape, or are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.names import (
    ModelConfig,
    is_transposed,
    layer_kind,
    parse_config,
    resolve_head,
    target_tensors,
)
from unified_ckpt.foreign.paddle.slices import load

VOCAB, HIDDEN = 40, 16
HEAD = "lm_head.weight"
FORMERS: dict[str, Any] = {"paddleformers_version": "1.2.0", "model_type": "llama"}
NLP: dict[str, Any] = {"paddlenlp_version": None, "model_type": "llama"}
EARLY: dict[str, Any] = {"paddleformers_version": "0.4.1", "model_type": "llama"}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN}


def resolve(
    config: dict[str, Any], prefix: str, head: tuple[int, int], embedding: tuple[int, int] | None
) -> ModelConfig:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.norm.weight": (HIDDEN,), HEAD: head}
    if embedding is not None:
        shapes[f"{prefix}.embed_tokens.weight"] = embedding
    return resolve_head(parse_config(config), shapes)


@pytest.mark.parametrize("config", [{}, FORMERS | UNTIED, NLP | UNTIED, EARLY, NLP | TIED])
@pytest.mark.parametrize("prefix", ["model", "llama", "network"])
def test_unequal_sizes_show_the_heads_layout(config: dict[str, Any], prefix: str) -> None:
    """Whatever the versions: a shape that is not square has one layout only."""
    embedding = (VOCAB, HIDDEN)
    assert resolve(config, prefix, (VOCAB, HIDDEN), embedding).vocab_first
    assert resolve(config, prefix, (HIDDEN, VOCAB), embedding).vocab_first is False
    assert resolve(config | SIZES, prefix, (VOCAB, HIDDEN), None).vocab_first
    only_hidden = config | {"hidden_size": HIDDEN}
    assert resolve(only_hidden, prefix, (HIDDEN, VOCAB), None).vocab_first is False


@pytest.mark.parametrize(
    ("config", "prefix", "expected"),
    [
        (FORMERS | UNTIED, "model", True),
        (FORMERS, "network", True),
        ({}, "model", True),
        (EARLY | UNTIED, "model", True),  # all but Llama, since PaddleFormers 0.3
        (EARLY | UNTIED, "llama", False),
        (NLP | UNTIED, "llama", False),
        (NLP | TIED, "llama", True),
        (UNTIED, "network", False),
        (TIED, "network", True),
        (NLP, "llama", None),
        ({}, "network", None),
        (FORMERS | UNTIED, "llama", None),  # no version of PaddleFormers writes both
    ],
)
def test_versions_decide_square_heads(
    config: dict[str, Any], prefix: str, expected: bool | None
) -> None:
    shape = (HIDDEN, HIDDEN)
    model = resolve(config, prefix, shape, shape)
    assert model.vocab_first is expected
    if expected is None:
        with pytest.raises(FormatError, match=r"depends on tie_word_embeddings and paddleformers"):
            is_transposed(HEAD, shape, layer_kind(HEAD), vocab_first=expected)
    else:
        transposed = is_transposed(HEAD, shape, layer_kind(HEAD), vocab_first=expected)
        assert transposed is not expected


@pytest.mark.parametrize("name", [HEAD, "model.layers.0.self_attn.q_proj.weight"])
def test_flat_weights_of_layers_are_rejected(name: str) -> None:
    """A sharded optimizer writes them, and its master weights may stand for the model's."""
    with pytest.raises(FormatError, match=r"got shape \(256,\), expected 2 dims"):
        is_transposed(name, (256,), layer_kind(name), vocab_first=True)
    bias = name.replace("weight", "bias")
    assert not is_transposed(bias, (256,), layer_kind(bias), vocab_first=True)


def test_only_paddlenlp_infers_ties_from_the_head() -> None:
    embedding = (VOCAB, HIDDEN)
    assert resolve(NLP, "llama", embedding, embedding).tied
    assert resolve(NLP | UNTIED, "llama", embedding, embedding).tied is False
    assert resolve(FORMERS, "model", embedding, embedding).tied is None
    assert resolve({}, "model", embedding, embedding).tied is None


@pytest.mark.parametrize("leaf", ["up_gate_proj", "gate_up_fused_proj"])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_fused_gates_and_ups_are_those_of_each_rank(leaf: str, degree: int) -> None:
    gates, ups = torch.randn(4, 6), torch.randn(4, 6)
    halves = zip(gates.chunk(degree, 1), ups.chunk(degree, 1), strict=True)
    fused = torch.cat([half for rank_halves in halves for half in rank_halves], 1)
    tensor = External("F32", (4, 12), lambda box: fused[box.slices])
    targets = target_tensors(
        f"model.layers.0.mlp.{leaf}.weight",
        tensor,
        parse_config(FORMERS),
        transposed=True,
        rename=True,
        tp_degree=degree,
    )
    for target, expected in (("gate_proj", gates), ("up_proj", ups)):
        recipe = targets.pop(f"model.layers.0.mlp.{target}.weight")
        assert torch.equal(load(recipe, full_box(recipe.shape)), expected.T)
    assert not targets
    with pytest.raises(FormatError, match=r"got 12 outputs, expected gates and ups on 4"):
        target_tensors(
            f"model.layers.0.mlp.{leaf}.weight",
            tensor,
            parse_config(FORMERS),
            transposed=True,
            rename=True,
            tp_degree=4,
        )

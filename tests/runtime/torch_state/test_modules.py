from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as Ddp
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.torch_training import Counting, process_group
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.modules import flatten_model, resolve_alias_chains


def compiled(module: nn.Module) -> nn.Module:
    # the default backend takes seconds to import
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def test_several_modules_and_dicts_are_one_model() -> None:
    assert flatten_model(None).tensors == {}
    tensors = {"b": torch.ones(2), "a": torch.ones(3)}
    assert flatten_model(tensors).tensors == tensors
    shared = nn.Linear(2, 2)
    assert flatten_model(tensors).extra_owners is None
    flat = flatten_model(
        [nn.ModuleDict({"0": shared}), nn.ModuleDict({"0": shared, "1": nn.Linear(2, 2)})]
    )
    assert list(flat.tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert flat.aliases == {}


def with_version() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda _, state, *__: state.__setitem__("version", 3))
    return module


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            {"w": torch.ones(1), "lr": 0.1},
            r"^model\['lr'\]: got a float, expected a torch.Tensor$",
        ),
        (
            [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"0": nn.Linear(2, 2)})],
            r"^0.weight: two modules of the model use this name for different tensors",
        ),
        (
            [torch.ones(2)],
            r"^model: got a Tensor, expected an nn.Module, a list of them, or a dict of tensors$",
        ),
        (
            with_version(),
            r"^version: got a int in the module's state, expected a tensor; store other "
            r"values with get_extra_state$",
        ),
    ],
)
def test_unsupported_models_are_refused(model: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        flatten_model(model)


# wrappers


@pytest.mark.incident("torchtitan#961")
def test_wrapper_prefixes_are_removed() -> None:
    plain = list(flatten_model(nn.Sequential(Block(), Block())).tensors)
    parallel = nn.DataParallel
    for wrapped in (
        nn.Sequential(checkpoint_wrapper(Block()), Block()),
        nn.Sequential(compiled(Block()), Block()),
        parallel(nn.Sequential(Block(), Block())),
        compiled(parallel(nn.Sequential(Block(), checkpoint_wrapper(Block())))),
        parallel(compiled(nn.Sequential(Block(), Block()))),
        nn.Sequential(Block(), parallel(Block())),
        parallel(nn.Sequential(Block(), parallel(Block()))),
    ):
        assert list(flatten_model(wrapped).tensors) == plain
    parent = nn.Module()
    parent.module = nn.Linear(2, 2)  # a child of the name that wrappers use
    for model in (parent, parallel(parent)):
        assert list(flatten_model(model).tensors) == ["module.weight", "module.bias"]


def test_ddp_prefixes_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with process_group():
        both = [Ddp(model), compiled(Ddp(model)), Ddp(compiled(model))]
    for wrapped in both:
        assert list(flatten_model(wrapped).tensors) == ["0.weight", "0.bias"]


# tied weights


def test_tied_weight_is_stored_under_its_first_name() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    shared = module["embed"].weight
    for head in (shared, nn.Parameter(shared.data)):  # another parameter of the same memory
        module["head"].weight = head
        flat = flatten_model(module)
        assert list(flat.tensors) == ["embed.weight"]
        assert flat.aliases == {"head.weight": "embed.weight"}


def test_other_tensors_are_not_tied() -> None:
    """Neither those of equal values, nor different views of one memory."""
    memory, meta = torch.arange(12.0), {"device": "meta"}
    views = {
        "all": memory,
        "rows": memory.view(3, 4),
        "columns": memory.view(4, 3).t(),
        "start": memory[:6],
        "end": memory[6:],
        "bits": memory.view(torch.int32),
        "equal": torch.arange(12.0),
        **{f"empty {n}": torch.empty(0) for n in range(2)},
        **{f"empty rows {n}": torch.empty(0, 3) for n in range(2)},
        **{f"meta {n}": torch.ones(2, **meta) for n in range(2)},
    }
    flat = flatten_model(views)
    assert (flat.aliases, list(flat.tensors)) == ({}, list(views))


def tiny(*, tied: bool) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=tied))  # type: ignore[arg-type]


def test_stage_stores_a_tied_weight_under_its_first_name() -> None:
    last = tiny(tied=True)
    last.lm_head.weight = nn.Parameter(last.lm_head.weight.detach().clone())
    del last.model.embed_tokens
    flat = flatten_model(last)
    assert flat.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert flat.tensors["model.embed_tokens.weight"] is last.lm_head.weight
    assert "lm_head.weight" not in flat.tensors
    untied = tiny(tied=False)
    del untied.model.embed_tokens
    assert "lm_head.weight" in flatten_model(untied).tensors


class Stage(nn.ModuleDict):
    """A pipeline stage that lacks the first of its tied weights, like T5's decoder."""

    config = SimpleNamespace(tie_word_embeddings=True)
    _tied_weights_keys = dict.fromkeys(("decoder.weight", "head.weight"), "shared.weight")


def test_aliases_name_stored_tensors() -> None:
    """Also those of a weight that is renamed, in its own and in another chunk."""
    decoder, head = (nn.Linear(3, 4, bias=False) for _ in range(2))
    head.weight = decoder.weight
    shared = {"head.weight": "shared.weight", "decoder.weight": "shared.weight"}
    for model in (
        Stage({"decoder": decoder, "head": head}),
        [Stage({"decoder": decoder}), Stage({"head": head})],
        [Stage({"decoder": decoder}), nn.ModuleDict({"head": head})],
    ):
        flat = flatten_model(model)
        assert list(flat.tensors) == ["shared.weight"]
        assert flat.aliases == shared


def test_aliases_of_ranks_that_name_each_other() -> None:
    assert resolve_alias_chains({"a": "b", "b": "c"}) == {"a": "c", "b": "c"}
    assert resolve_alias_chains({"a": "b", "b": "a", "c": "a"}) == {"c": "a"}


# extra state


def test_extra_state_is_separate() -> None:
    module = nn.Sequential(Counting(2, 2), nn.Sequential(compiled(Counting(2, 2))))
    flat = flatten_model(module)
    assert flat.extra_state == {"0._extra_state": {"count": 0}, "1.0._extra_state": {"count": 0}}
    assert list(flatten_model(Counting(2, 2)).extra_owners) == ["_extra_state"]
    assert list(flat.tensors) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert flat.extra_owners["0._extra_state"] is module[0]
    assert set(flat.extra_owners) >= set(flat.extra_state)
    for name, owner in flat.extra_owners.items():
        owner.set_extra_state({"count": len(name)})
    assert {k: v["count"] for k, v in flatten_model(module).extra_state.items()} == {
        k: len(k) for k in flat.extra_state
    }

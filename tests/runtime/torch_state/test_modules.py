from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as Ddp
from transformers import LlamaConfig, LlamaForCausalLM

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.modules import clean_name, flatten_model


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
        out: torch.Tensor = self.norm(self.first(x))
        return out


NAMES = [
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


def test_parameters_and_buffers_by_name() -> None:
    module = Block()
    flat = flatten_model(module)
    assert list(flat.tensors) == NAMES
    assert flat.tensors["first.weight"] is module.first.weight
    assert flat.param_names()[id(module.first.weight)] == "first.weight"
    assert (flat.aliases, flat.extra_state, flat.extra_owners) == ({}, {}, {})


def test_flatten_none_and_dicts() -> None:
    assert flatten_model(None).tensors == {}
    tensors = {"b": torch.ones(2), "a": torch.ones(3)}
    assert flatten_model(tensors).tensors == tensors
    with pytest.raises(LayoutError, match=r"^model\['lr'\]: got a float, expected a torch.Tensor$"):
        flatten_model({"w": torch.ones(1), "lr": 0.1})  # type: ignore[dict-item]


def test_several_modules_are_one_model() -> None:
    stages = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})]
    assert list(flatten_model(stages).tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_duplicate_name_is_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=r"^0.weight: two modules of the model use this name for different tensors",
    ):
        flatten_model(
            [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"0": nn.Linear(2, 2)})]
        )


def test_shared_tensor_is_stored_once() -> None:
    shared = nn.Linear(2, 2)
    flat = flatten_model(
        [nn.ModuleDict({"0": shared}), nn.ModuleDict({"0": shared, "1": nn.Linear(2, 2)})]
    )
    assert list(flat.tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert flat.aliases == {}


def test_unsupported_model_types_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=r"^model: got a Tensor, expected an nn.Module, a list of them, or a dict of tensors$",
    ):
        flatten_model([torch.ones(2)])  # type: ignore[list-item]


# wrappers


@pytest.mark.parametrize(
    ("raw", "wrapped", "clean"),
    [
        ("a.b", [], "a.b"),
        ("_orig_mod.a.b", [], "a.b"),
        ("a._checkpoint_wrapped_module.b._orig_mod.c", [], "a.b.c"),
        ("module.a", ["module."], "a"),
        ("module.a", [], "module.a"),
        ("module.sub.module.a", ["module.sub.module.", "module."], "sub.a"),
        ("_orig_mod.module.a", ["_orig_mod.module."], "a"),
        ("module.module.a", ["module."], "module.a"),
    ],
)
def test_clean_name(raw: str, wrapped: list[str], clean: str) -> None:
    assert clean_name(raw, wrapped) == clean


def test_wrapper_prefixes_are_removed() -> None:
    plain = list(flatten_model(nn.Sequential(Block(), Block())).tensors)
    assert list(flatten_model(nn.Sequential(checkpoint_wrapper(Block()), Block())).tensors) == plain
    assert list(flatten_model(nn.Sequential(compiled(Block()), Block())).tensors) == plain
    assert list(flatten_model(nn.DataParallel(nn.Sequential(Block(), Block()))).tensors) == plain
    assert (
        list(
            flatten_model(
                compiled(nn.DataParallel(nn.Sequential(Block(), checkpoint_wrapper(Block()))))
            ).tensors
        )
        == plain
    )
    assert (
        list(flatten_model(nn.DataParallel(compiled(nn.Sequential(Block(), Block())))).tensors)
        == plain
    )


def test_inner_wrapper_prefixes_are_removed() -> None:
    plain = list(flatten_model(nn.Sequential(Block(), Block())).tensors)
    assert list(flatten_model(nn.Sequential(Block(), nn.DataParallel(Block()))).tensors) == plain
    assert (
        list(
            flatten_model(nn.DataParallel(nn.Sequential(Block(), nn.DataParallel(Block())))).tensors
        )
        == plain
    )


def test_child_named_module_keeps_its_name() -> None:
    parent = nn.Module()
    parent.module = nn.Linear(2, 2)
    assert list(flatten_model(parent).tensors) == ["module.weight", "module.bias"]
    assert list(flatten_model(nn.DataParallel(parent)).tensors) == ["module.weight", "module.bias"]


def test_ddp_prefixes_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        both = [Ddp(model), compiled(Ddp(model)), Ddp(compiled(model))]
    finally:
        dist.destroy_process_group()
    assert [list(flatten_model(wrapped).tensors) for wrapped in both] == [
        ["0.weight", "0.bias"]
    ] * 3


def test_flat_parameters_of_fsdp1_are_refused() -> None:
    module = nn.Module()
    module.register_parameter("_flat_param", nn.Parameter(torch.ones(3)))
    with pytest.raises(
        LayoutError,
        match=r"_flat_param: is a flat parameter of FSDP1; use fully_shard \(FSDP2\)",
    ):
        flatten_model(module)


# tied weights


def test_tied_weight_is_stored_under_its_first_name() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    flat = flatten_model(module)
    assert list(flat.tensors) == ["embed.weight"]
    assert flat.aliases == {"head.weight": "embed.weight"}


def test_parameters_that_share_memory_are_tied() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    module["head"].weight = nn.Parameter(module["embed"].weight.data)
    assert flatten_model(module).aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.arange(6.0)[:3], torch.arange(6.0)[:3]),
        (torch.empty(0), torch.empty(0)),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
    ],
    ids=["equal values", "empty", "empty rows", "meta"],
)
def test_equal_tensors_are_not_tied(first: torch.Tensor, second: torch.Tensor) -> None:
    assert list(flatten_model({"a": first, "b": second}).tensors) == ["a", "b"]


def test_different_views_of_one_memory_are_not_tied() -> None:
    memory = torch.arange(12.0)
    views = {
        "all": memory,
        "rows": memory.view(3, 4),
        "columns": memory.view(4, 3).t(),
        "start": memory[:6],
        "end": memory[6:],
        "bits": memory.view(torch.int32),
    }
    assert flatten_model(views).aliases == {}


def tiny(*, tied: bool) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=tied))  # type: ignore[arg-type]


def test_tied_embeddings_of_transformers() -> None:
    flat = flatten_model(tiny(tied=True))
    assert flat.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in flat.tensors
    flat = flatten_model(tiny(tied=False))
    assert flat.aliases == {}
    assert "lm_head.weight" in flat.tensors


def test_stage_stores_a_tied_weight_under_its_first_name() -> None:
    last = tiny(tied=True)
    last.lm_head.weight = nn.Parameter(last.lm_head.weight.detach().clone())
    del last.model.embed_tokens
    flat = flatten_model(last)
    assert flat.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert flat.tensors["model.embed_tokens.weight"] is last.lm_head.weight
    assert "lm_head.weight" not in flat.tensors


def test_stage_of_an_untied_model_keeps_its_names() -> None:
    last = tiny(tied=False)
    del last.model.embed_tokens
    assert "lm_head.weight" in flatten_model(last).tensors


# extra state


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 7

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_is_separate() -> None:
    module = nn.Sequential(Counting(), nn.Sequential(compiled(Counting())))
    flat = flatten_model(module)
    assert flat.extra_state == {"0._extra_state": {"calls": 7}, "1.0._extra_state": {"calls": 7}}
    assert list(flat.tensors) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert flat.extra_owners["0._extra_state"] is module[0]
    assert set(flat.extra_owners) >= set(flat.extra_state)
    for name, owner in flat.extra_owners.items():
        owner.set_extra_state({"calls": len(name)})
    assert {k: v["calls"] for k, v in flatten_model(module).extra_state.items()} == {
        k: len(k) for k in flat.extra_state
    }


def test_extra_state_of_the_model_itself() -> None:
    flat = flatten_model(Counting())
    assert flat.extra_state == {"_extra_state": {"calls": 7}}
    assert list(flat.extra_owners) == ["_extra_state"]


def test_state_that_is_not_a_tensor_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.__setitem__("version", 3)
    )
    with pytest.raises(
        LayoutError,
        match=r"^version: got a int in the module's state, expected a tensor; store other "
        r"values with get_extra_state$",
    ):
        flatten_model(module)


def test_flatten_changes_nothing() -> None:
    module = tiny(tied=True)
    before = copy.deepcopy(module.state_dict())
    flatten_model(module)
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[fqn], before[fqn]) for fqn in before)

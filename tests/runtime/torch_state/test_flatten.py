from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from unified_ckpt.core.sharding.layouts import Layout, Strided
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.flatten import FlatState, flatten_state
from unified_ckpt.runtime.torch_state.placements import ShardingResolver
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

TP = Sharding((ShardDim(0, 2, 1),))


def model(decls: int = 4) -> nn.Module:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.randn(decls, 3)))
    module.register_parameter("b", nn.Parameter(torch.randn(3)))
    module.register_buffer("count", torch.tensor(7))
    return module


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def layout(shape: tuple[int, ...] | None = None) -> Layout:
    return Layout(
        mesh={"tp": 2}, rules={"w": {"tp": 0}}, shapes={} if shape is None else {"w": shape}
    )


def flatten(rank: int = 0, rules: Layout | None = None, **state: Any) -> FlatState:
    arguments = {
        "model": None,
        "optimizer": None,
        "master_weights": None,
        "extra_parts": None,
        "model_dtype": None,
        **state,
    }
    return flatten_state(ShardingResolver(rank, range(2), rules), **arguments)


def by_key(by_part: list[LocalTensor]) -> Mapping[tuple[str, str], LocalTensor]:
    flat = {tensor.decl.key: tensor for tensor in by_part}
    assert len(flat) == len(by_part)
    return flat


def test_state_of_a_padded_parameter_loses_padding() -> None:
    for rank, decls in enumerate((8, 2)):
        module = model(8)
        flat = by_key(
            flatten(rank, layout((10, 3)), model=module, optimizer=stepped(module)).tensors
        )
        for key in (("model", "w"), ("optimizer", "w/exp_avg"), ("optimizer", "w/exp_avg_sq")):
            assert flat[key].decl.spec.shape == (10, 3)
            assert tuple(flat[key].local.shape) == (decls, 3)


def test_one_element_without_its_parameter_follows_a_shape() -> None:
    """A slice of one element is no step count, where the Layout declares the whole tensor."""
    state = {"w/exp_avg": torch.ones(1, 1), "w/step": torch.tensor(3.0), "b/step": torch.ones(1)}
    for rank in range(2):
        flat = by_key(flatten(rank, layout((2, 1)), optimizer=state, model=None).tensors)
        assert flat["optimizer", "w/exp_avg"].decl.spec.shape == (2, 1)
        assert flat["optimizer", "w/exp_avg"].decl.sharding == TP
        for key in ("w/step", "b/step"):
            assert not flat["optimizer", key].decl.sharding.shard_dims


def test_sharded_state_of_another_shape_is_refused() -> None:
    module = model()
    optimizer = stepped(module)
    optimizer.state[module.get_parameter("w")]["row_var"] = torch.ones(4, 1)
    with pytest.raises(
        LayoutError,
        match=r"w/row_var: got state of shape \(4, 1\) for a sharded parameter, expected its "
        r"local shape \(4, 3\)",
    ):
        flatten(0, layout(), model=module, optimizer=optimizer)
    assert ("optimizer", "w/row_var") in by_key(
        flatten(0, None, model=module, optimizer=optimizer).tensors
    ), "fine where nothing is cut"


def test_model_dtype_adds_masters_of_rounded_tensors() -> None:
    module = model()
    module.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
    module.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
    flat = by_key(flatten(model=module, model_dtype="bfloat16").tensors)
    assert {fqn: p.decl.spec.dtype for (tensor, fqn), p in flat.items() if tensor == "model"} == {
        "w": "BF16",
        "b": "BF16",
        "count": "I64",
        "short": "BF16",
        "small": "F8_E4M3",
    }
    assert {
        fqn: p.decl.spec.dtype for (tensor, fqn), p in flat.items() if tensor == "master_weights"
    } == {"w": "F32", "b": "F32"}
    assert flat["model", "w"].casts
    assert flat["model", "w"].local.data_ptr() == flat["master_weights", "w"].local.data_ptr(), (
        "cast on the way, not before"
    )


def test_each_name_of_a_tied_weight_may_have_its_layout_rule() -> None:
    """A rule for an alias counts as matched, and so does a shape."""
    weight = torch.randn(2, 3)
    tied = {"embed": weight, "head": weight}

    def rules(head: int, rows: int = 4) -> Layout:
        rules: dict[str, dict[str, int | Strided]] = {"embed": {"tp": 0}, "head": {"tp": head}}
        shapes = {"embed": (4, 3), "head": (rows, 3)}
        return Layout(mesh={"tp": 2}, rules=rules, shapes=shapes)

    placer = ShardingResolver(0, range(2), rules(0))
    state = flatten_state(
        placer, model=tied, optimizer=None, master_weights=None, extra_parts=None, model_dtype=None
    )
    assert by_key(state.tensors)["model", "embed"].decl.spec.shape == (4, 3)
    names = {"embed", "head"}
    assert placer.matched_patterns == {f"{k}[{n!r}]" for k in ("rules", "shapes") for n in names}
    with pytest.raises(LayoutError, match=r"^head: Layout shapes declare \(3, 3\) for this alias"):
        flatten(0, rules(0, rows=3), model=tied)
    with pytest.raises(
        LayoutError,
        match=r"^head: Layout rule 'head' matches this alias of embed, which has 'embed'",
    ):
        flatten(0, rules(1), model=tied)


@pytest.mark.incident("miles-credit#414")
def test_extra_parts_and_their_optimizer_follow_the_layout() -> None:
    """A Layout is of names, whatever the part."""
    module, critic = model(), model()
    both = torch.optim.AdamW([*module.parameters(), *critic.parameters()])
    for p in (*module.parameters(), *critic.parameters()):
        p.grad = torch.ones_like(p)
    both.step()
    parts = {"critic": critic, "ema": {"w": torch.ones(4, 3)}}
    state = flatten(1, layout(), model=module, extra_parts=parts, optimizer=both)
    flat = by_key(state.tensors)
    assert state.requested_parts == {"model", "optimizer", "critic", "ema"}
    assert state.optimizer.groups[0]["names"] == ["w", "b", "critic.w", "critic.b"]
    for key in (("ema", "w"), ("critic", "w"), ("optimizer", "critic.w/exp_avg")):
        assert (flat[key].decl.sharding, flat[key].decl.spec.shape) == (TP, (8, 3))
    assert flat["optimizer", "critic.b/exp_avg"].decl.spec.shape == (3,)

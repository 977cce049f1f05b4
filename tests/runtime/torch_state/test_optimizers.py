from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from tests.support.optimizer_cases import MAKERS, model, same, states, step
from tests.support.optimizers import FusedAdam
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.runtime.torch_state.modules import flatten_model
from unified_ckpt.runtime.torch_state.optimizer_rules import state_rule
from unified_ckpt.runtime.torch_state.optimizer_target import (
    OptimizerTarget,
    match_groups,
    prepare_optimizer,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    FlatOptimizer,
    as_optimizers,
    collect_masters,
    flatten_optimizer,
)
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES

Saved = dict[str, tuple[str, tuple[int, ...]]]


def named(module: nn.Module) -> dict[int, str]:
    return flatten_model(module).param_names()


def on_disk(flat: FlatOptimizer) -> tuple[Saved, FlatOptimizer]:
    """The saved state, and a copy that shares no memory with the optimizer."""
    return {
        key: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for key, t in flat.tensors.items()
    }, copy.deepcopy(flat)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {fqn: tuple(p.shape) for fqn, p in module.named_parameters()}


def load(
    module: nn.Module,
    optimizers: list[Optimizer],
    saved: Saved,
    values: FlatOptimizer,
    *,
    options: bool = True,
) -> OptimizerTarget:
    names = named(module)
    target = prepare_optimizer(
        optimizers, names, saved, shapes=shapes_of(module), saved_shapes={}, loads_state=True
    )
    for key, tensor in target.tensors.items():
        tensor.copy_(values.tensors[key])
    groups = match_groups(optimizers, names, values.groups) if options else None
    target.install(scalars=values.scalars, groups=groups)
    return target


@pytest.mark.parametrize("kind", MAKERS)
def test_training_continues_bitwise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model()
    trained = MAKERS[kind](list(first.parameters()))
    for number in range(3):
        step(first, trained, number)
    saved, values = on_disk(flatten_optimizer(trained, named(first)))
    second = copy.deepcopy(first)
    fresh = MAKERS[kind](list(second.parameters()))
    with monkeypatch.context() as patch:
        patch.setattr(type(fresh), "step", lambda *_: pytest.fail("the optimizer was stepped"))
        load(second, [fresh], saved, values)
    assert same(states(second, fresh), states(first, trained))
    for number in range(3, 5):
        step(first, trained, number)
        step(second, fresh, number)
        for (fqn, own_optimizer), torch_optimizer in zip(
            second.named_parameters(), first.parameters(), strict=True
        ):
            assert torch.equal(own_optimizer, torch_optimizer), fqn
    assert same(states(second, fresh), states(first, trained))


@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum", "Adagrad", "Adafactor", "LBFGS"])
def test_existing_state_is_replaced(kind: str) -> None:
    first, second = model(), model()
    trained, other = MAKERS[kind](list(first.parameters())), MAKERS[kind](list(second.parameters()))
    step(first, trained, 0)
    saved, values = on_disk(flatten_optimizer(trained, named(first)))
    for number in range(4):
        step(second, other, 7 + number)
    load(second, [other], saved, values)
    assert same(states(second, other), states(first, trained))


def test_tensors_that_fit_are_filled_in_place() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    step(module, optimizer, 0)
    saved, values = on_disk(flatten_optimizer(optimizer, named(module)))
    before = {
        fqn: {k: t.data_ptr() for k, t in optimizer.state[p].items()}
        for fqn, p in module.named_parameters()
    }
    load(module, [optimizer], saved, values)
    assert {
        fqn: {k: t.data_ptr() for k, t in optimizer.state[p].items()}
        for fqn, p in module.named_parameters()
    } == before


def test_optimizer_is_unchanged_before_install() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    saved: Saved = {"matrix/exp_avg": ("F32", (5, 3)), "matrix/step": ("F32", ())}
    target = prepare_optimizer(
        [optimizer],
        named(module),
        saved,
        shapes=shapes_of(module),
        saved_shapes={},
        loads_state=True,
    )
    assert set(target.tensors) == set(saved)
    assert len(optimizer.state) == 0
    assert target.param_names() == {"matrix", "vector", "one", "scalar"}


def test_missing_state_is_cleared() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    step(module, optimizer, 0)
    saved, values = on_disk(flatten_optimizer(optimizer, named(module)))
    for number in range(2):
        step(module, optimizer, number)
    part = {
        key: what
        for key, what in saved.items()
        if key.startswith("matrix/") and not key.endswith("_sq")
    }
    load(module, [optimizer], part, values)
    assert set(optimizer.state) == {dict(module.named_parameters())["matrix"]}
    assert set(optimizer.state[dict(module.named_parameters())["matrix"]]) == {"step", "exp_avg"}


class Unknown(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_state_has_the_dtype_that_the_next_step_reads() -> None:
    module = model().to(torch.bfloat16)
    saved: Saved = {"matrix/exp_avg": ("F32", (5, 3)), "matrix/step": ("F32", ())}
    for optimizer, dtype in (
        (torch.optim.AdamW(module.parameters()), torch.bfloat16),
        (FusedAdam(module.parameters()), torch.float32),
        (Unknown(module.parameters()), torch.float32),
    ):
        target = prepare_optimizer(
            [optimizer],
            named(module),
            saved,
            shapes=shapes_of(module),
            saved_shapes={},
            loads_state=True,
        )
        assert [tensor.dtype for tensor in target.tensors.values()] == [dtype, torch.float32], type(
            optimizer
        )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_rules_match_real_steps(kind: str, dtype: torch.dtype) -> None:
    module = model().to(dtype)
    optimizer = MAKERS[kind](list(module.parameters()))
    if kind == "LBFGS" and dtype == torch.bfloat16:
        pytest.skip("its line search is in float32")
    for number in range(2):
        step(module, optimizer, number)
    states_of = [
        (param, optimizer.state[param]) for param in module.parameters() if param in optimizer.state
    ]
    for param, state in states_of:
        rule = state_rule(optimizer, param, optimizer.param_groups[0])
        assert rule is not None
        assert rule.required <= state.keys() <= rule.required | rule.optional
        assert not [
            name
            for name, value in state.items()
            if torch.is_tensor(value) and rule.dtype(name, param) not in (None, value.dtype)
        ]


def test_unknown_optimizer_gets_the_saved_dtype() -> None:
    module = model()
    optimizer = Unknown(module.parameters())
    saved: Saved = {
        "matrix/exp_avg": ("BF16", (5, 3)),
        "matrix/step": ("I64", ()),
        "vector/exp_avg": ("F64", (4,)),
    }
    target = prepare_optimizer(
        [optimizer],
        named(module),
        saved,
        shapes=shapes_of(module),
        saved_shapes={},
        loads_state=True,
    )
    assert {key: t.dtype for key, t in target.tensors.items()} == {
        "matrix/exp_avg": torch.bfloat16,
        "matrix/step": torch.int64,
        "vector/exp_avg": torch.float64,
    }


def test_existing_state_of_another_shape_is_replaced() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    step(module, optimizer, 0)
    matrix = dict(module.named_parameters())["matrix"]
    saved: Saved = {"matrix/exp_avg": ("F32", (3, 5)), "matrix/exp_avg_sq": ("F32", (5, 1))}
    target = prepare_optimizer(
        [optimizer],
        named(module),
        saved,
        shapes=shapes_of(module),
        saved_shapes={},
        loads_state=True,
    )
    for key, tensor in target.tensors.items():
        assert tensor.data_ptr() != optimizer.state[matrix][key.rpartition("/")[2]].data_ptr()
        assert tensor.shape == saved[key][1]


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_counters_are_on_the_device_torch_uses(fused: bool, device: str) -> None:
    """The meta device stands for an accelerator."""
    module = model().to("meta")
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    optimizer.param_groups[0]["fused"] = fused
    states = {"step": (), "exp_avg": None}
    saved: Saved = {
        f"{fqn}/{key}": ("F32", shapes_of(module)[fqn] if s is None else s)
        for fqn in shapes_of(module)
        for key, s in states.items()
    }
    target = prepare_optimizer(
        [optimizer],
        named(module),
        saved,
        shapes=shapes_of(module),
        saved_shapes={},
        loads_state=True,
    )
    for key, tensor in target.tensors.items():
        assert tensor.device.type == (device if key.endswith("/step") else "meta"), key


def test_new_state_is_contiguous_without_gradient() -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.ones(3, 5).t()))
    optimizer = torch.optim.AdamW(module.parameters())
    target = prepare_optimizer(
        [optimizer],
        named(module),
        {"w/exp_avg": ("F32", (5, 3))},
        shapes={"w": (5, 3)},
        saved_shapes={},
        loads_state=True,
    )
    assert target.tensors["w/exp_avg"].is_contiguous()
    assert not target.tensors["w/exp_avg"].requires_grad


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_state_of_a_dtensor_is_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    module = nn.Module()
    module.register_parameter(
        "w", nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(1)]))
    )
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    saved: Saved = {"w/exp_avg": ("F32", (4, 3)), "w/step": ("F32", ())}
    target = prepare_optimizer(
        [optimizer], named(module), saved, shapes={"w": (4, 3)}, saved_shapes={}, loads_state=True
    )
    moment = target.tensors["w/exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(1),)
    assert moment.device_mesh == mesh
    assert type(target.tensors["w/step"]) is torch.Tensor
    assert (
        prepare_optimizer(
            [optimizer], named(module), {}, shapes={}, saved_shapes={}, loads_state=True
        ).tensors
        == {}
    )


# masters


class WithMasters(torch.optim.SGD):
    """Keeps fp32 copies in its state, as apex does."""

    def keep(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master_param"] = p.detach().float().clone()


def test_masters_are_separate_and_survive_a_load() -> None:
    module = model().to(torch.bfloat16)
    optimizer = WithMasters(list(module.parameters()), lr=0.1, momentum=0.9)
    step(module, optimizer, 0)
    optimizer.keep()
    flat = flatten_optimizer(optimizer, named(module))
    assert set(flat.masters) == {"matrix", "vector", "one", "scalar"}
    assert set(flat.tensors) == {f"{fqn}/momentum_buffer" for fqn in flat.masters}
    saved, values = on_disk(flat)
    masters = {p: optimizer.state[p]["master_param"] for p in module.parameters()}
    target = load(module, [optimizer], saved, values)
    assert collect_masters([optimizer], named(module)) == {
        fqn: masters[p] for fqn, p in module.named_parameters()
    }
    assert all(optimizer.state[p]["master_param"] is masters[p] for p in module.parameters())
    target.tensors.clear()
    target.install(scalars={}, groups=None)
    assert all(set(optimizer.state[p]) == {"master_param"} for p in module.parameters())


# flattening


def test_state_by_name() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    step(module, optimizer, 0)
    flat = flatten_optimizer(optimizer, named(module))
    assert set(flat.tensors) == {
        f"{fqn}/{key}" for fqn in shapes_of(module) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert (
        flat.tensors["matrix/exp_avg"]
        is optimizer.state[dict(module.named_parameters())["matrix"]]["exp_avg"]
    )
    (group,) = flat.groups
    assert group["names"] == ["matrix", "vector", "one", "scalar"]
    assert group["options"] == {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def test_values_that_are_not_tensors_are_scalars() -> None:
    module = model()
    optimizer = MAKERS["LBFGS"](list(module.parameters()))
    step(module, optimizer, 0)
    flat = flatten_optimizer(optimizer, named(module))
    assert isinstance(flat.scalars["matrix"]["old_dirs"], list)
    assert (
        flat.scalars["matrix"]["n_iter"]
        == optimizer.state[dict(module.named_parameters())["matrix"]]["n_iter"]
    )
    assert "matrix/d" in flat.tensors


def test_several_optimizers_are_one_state() -> None:
    module = model()
    parameters = dict(module.named_parameters())
    both = [
        torch.optim.AdamW([parameters["matrix"]]),
        torch.optim.SGD([p for n, p in parameters.items() if n != "matrix"], momentum=0.9),
    ]
    for optimizer in both:
        step(module, optimizer, 0)
    flat = flatten_optimizer(both, named(module))
    assert [g["names"] for g in flat.groups] == [["matrix"], ["vector", "one", "scalar"]]
    assert {"matrix/exp_avg", "vector/momentum_buffer"} <= set(flat.tensors)
    assert as_optimizers(both) == both
    assert as_optimizers(both[0]) == both[:1]
    assert as_optimizers(None) == as_optimizers({}) == []


def test_param_names_are_not_hyperparameters() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.named_parameters())
    assert "param_names" not in flatten_optimizer(optimizer, named(module)).groups[0]["options"]


def test_flatten_optimizer_dicts() -> None:
    tensors = {"w/exp_avg": torch.ones(2), "a/b/step": torch.ones(())}
    assert flatten_optimizer(tensors, {}).tensors == tensors
    for wrong in ({"w": torch.ones(1)}, {"w/": torch.ones(1)}, {"/m": torch.ones(1)}, {"w/m": 3.0}):
        with pytest.raises(
            LayoutError,
            match=r"optimizer.*: got .*, expected (names such as 'fqn/state'|a torch.Tensor)",
        ):
            flatten_optimizer(wrong, {})  # type: ignore[arg-type]


def test_unknown_parameter_is_refused() -> None:
    module = model()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(7, 2))], lr=0.1)
    text = (
        r"optimizer group 0: has a parameter of shape \(7, 2\) that is not in `model`; pass "
        r"the optimizer's model"
    )
    with pytest.raises(LayoutError, match=text):
        flatten_optimizer(optimizer, named(module))
    with pytest.raises(LayoutError, match=text):
        prepare_optimizer(
            [optimizer], named(module), {}, shapes={}, saved_shapes={}, loads_state=True
        )


@pytest.mark.parametrize("key", ["a/b", "", 3])
def test_invalid_state_keys_are_refused(key: object) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[next(module.parameters())][key] = torch.ones(1)
    with pytest.raises(
        LayoutError, match=r"matrix: got the key .* in optimizer state, expected a name without '/'"
    ):
        flatten_optimizer(optimizer, named(module))


@pytest.mark.usefixtures("alone")
def test_dtensors_inside_lists_are_refused() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inside = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    optimizer.state[next(module.parameters())]["history"] = [torch.ones(1), {"a": inside}]
    with pytest.raises(
        LayoutError,
        match=r"matrix/history\[1\].*: got a DTensor inside of a list or dict of optimizer "
        r"state, which is not supported",
    ):
        flatten_optimizer(optimizer, named(module))


# hyperparameters


def grouped(module: nn.Module, *groups: tuple[dict[str, Any], list[str]]) -> Optimizer:
    parameters = dict(module.named_parameters())
    return torch.optim.AdamW(
        [{"params": [parameters[n] for n in names], **options} for options, names in groups], lr=1.0
    )


def test_groups_match_by_name() -> None:
    module = model()
    saved = flatten_optimizer(
        grouped(module, ({"lr": 0.1}, ["matrix"]), ({"lr": 0.2}, ["vector", "one", "scalar"])),
        named(module),
    ).groups
    current = grouped(module, ({}, ["scalar", "vector"]), ({}, ["one"]), ({}, ["matrix"]))
    matched = match_groups([current], named(module), saved)
    assert [options["lr"] for options in matched] == [0.2, 0.2, 0.1]
    OptimizerTarget([current], named(module), loads_state=True).install(scalars={}, groups=matched)
    assert [group["lr"] for group in current.param_groups] == [0.2, 0.2, 0.1]
    assert [len(group["params"]) for group in current.param_groups] == [2, 1, 1]


def test_training_continues_with_reordered_groups() -> None:
    first = model()
    trained = grouped(
        first,
        ({"lr": 0.1}, ["matrix", "scalar"]),
        ({"lr": 0.2, "weight_decay": 0.5}, ["vector", "one"]),
    )
    for number in range(3):
        step(first, trained, number)
    saved, values = on_disk(flatten_optimizer(trained, named(first)))
    second = copy.deepcopy(first)
    other = grouped(second, ({}, ["one"]), ({}, ["scalar", "matrix"]), ({}, ["vector"]))
    load(second, [other], saved, values)
    step(first, trained, 3)
    step(second, other, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_current_hyperparameters_can_be_kept() -> None:
    module = model()
    optimizer = grouped(module, ({"lr": 0.1}, ["matrix", "vector", "one", "scalar"]))
    saved, values = on_disk(flatten_optimizer(optimizer, named(module)))
    optimizer.param_groups[0]["lr"] = 0.7
    load(module, [optimizer], saved, values, options=False)
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_groups_joining_different_options_are_a_mismatch() -> None:
    module = model()
    saved = flatten_optimizer(
        grouped(module, ({"lr": 0.1}, ["matrix"]), ({"lr": 0.2}, ["vector", "one", "scalar"])),
        named(module),
    ).groups
    current = grouped(module, ({}, ["matrix", "vector", "one", "scalar"]))
    with pytest.raises(
        MismatchError,
        match=r"matrix: its param group joins parameters whose saved hyperparameters differ",
    ):
        match_groups([current], named(module), saved)


def test_groups_joining_equal_options_are_accepted() -> None:
    module = model()
    options = {"lr": torch.tensor(0.1), "foreach": False}
    apart = grouped(
        module, (options, ["matrix"]), (copy.deepcopy(options), ["vector", "one", "scalar"])
    )
    joined = grouped(module, ({}, ["vector", "matrix", "one", "scalar"]))
    (matched,) = match_groups(
        [joined], named(module), flatten_optimizer(apart, named(module)).groups
    )
    assert matched["lr"] == torch.tensor(0.1)


def test_new_groups_keep_their_hyperparameters() -> None:
    module = model()
    saved = flatten_optimizer(grouped(module, ({"lr": 0.1}, ["matrix"])), named(module)).groups
    current = grouped(module, ({"lr": 0.3}, ["vector"]), ({}, ["one", "matrix"]))
    matched = match_groups([current], named(module), saved)
    OptimizerTarget([current], named(module), loads_state=True).install(scalars={}, groups=matched)
    assert [group["lr"] for group in current.param_groups] == [0.3, 0.1]


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25)])
def test_tensor_learning_rate_is_filled_in_place(value: object) -> None:
    module = model()
    optimizer = grouped(module, ({"lr": torch.tensor(0.1), "foreach": False}, ["matrix"]))
    before = optimizer.param_groups[0]["lr"]
    OptimizerTarget([optimizer], named(module), loads_state=True).install(
        scalars={}, groups=[{"lr": value}]
    )
    assert optimizer.param_groups[0]["lr"] is before, "a captured graph reads this very tensor"
    assert before == 0.25


def test_loaded_options_are_copied() -> None:
    module = model()
    saved = [{"names": ["matrix", "vector"], "options": {"lr": torch.tensor(0.1), "marks": [1]}}]
    current = grouped(module, ({}, ["matrix"]), ({}, ["vector"]))
    matched = match_groups([current], named(module), saved)
    OptimizerTarget([current], named(module), loads_state=True).install(scalars={}, groups=matched)
    first, second = current.param_groups
    first["lr"].fill_(5)
    assert second["lr"] == torch.tensor(0.1), (
        "groups that were one must not share one learning rate tensor"
    )

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from tests.support.runtime.torch_state.optimizer_cases import MAKERS, model, step
from tests.support.runtime.torch_state.optimizers import FusedAdam, Halves, Nested
from tests.support.torch_training import process_group
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.runtime.torch_state.modules import flatten_model
from unified_ckpt.runtime.torch_state.optimizer_rules import SavedGroups, match_groups, state_rule
from unified_ckpt.runtime.torch_state.optimizer_target import (
    OptimizerTarget,
    SavedOptimizer,
    prepare_optimizer,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    flatten_optimizer,
)
from unified_ckpt.runtime.torch_state.tensor_subclasses import (
    flatten_subclasses,
    join_subclasses,
)

Saved = dict[str, tuple[str, tuple[int, ...]]]


def named(module: nn.Module) -> dict[int, str]:
    return flatten_model(module).param_names()


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {fqn: tuple(p.shape) for fqn, p in module.named_parameters()}


def prepare(
    module: nn.Module, optimizer: Optimizer, saved: Saved, groups: Sequence[dict[str, Any]] = ()
) -> OptimizerTarget:
    checkpoint = SavedOptimizer(saved, {}, SavedGroups(groups))
    shapes = shapes_of(module)
    return prepare_optimizer(
        [optimizer], named(module), checkpoint, shapes=shapes, loads_state=True
    )


def test_memory_of_the_same_shape_is_filled_in_place() -> None:
    module = model()
    optimizer = MAKERS["AdamW"](list(module.parameters()))
    step(module, optimizer, 0)
    current = flatten_optimizer(optimizer, named(module), {}).tensors
    before = {key: tensor.data_ptr() for key, tensor in current.items()}
    saved: Saved = {key: ("F32", tuple(tensor.shape)) for key, tensor in current.items()}
    target = prepare(module, optimizer, saved)
    assert {key: tensor.data_ptr() for key, tensor in target.tensors.items()} == before
    larger: Saved = {key: (dtype, (9, *shape)) for key, (dtype, shape) in saved.items()}
    for key, tensor in prepare(module, optimizer, larger).tensors.items():
        assert tensor.data_ptr() != before[key]
        assert tensor.shape == larger[key][1]


class Unknown(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "saved", "expected"),
    [
        (torch.optim.AdamW, ("F32", "F32"), (torch.bfloat16, torch.float32)),
        (FusedAdam, ("F32", "F32"), (torch.float32, torch.float32)),
        (Unknown, ("F64", "I64"), (torch.float64, torch.int64)),  # as saved
    ],
)
def test_state_has_the_dtype_that_the_next_step_reads(
    make: type[Optimizer], saved: tuple[str, str], expected: tuple[torch.dtype, torch.dtype]
) -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16).t()))
    optimizer = make(module.parameters())
    target = prepare(module, optimizer, {"w/exp_avg": (saved[0], (5, 3)), "w/step": (saved[1], ())})
    assert tuple(tensor.dtype for tensor in target.tensors.values()) == expected
    assert target.tensors["w/exp_avg"].stride() == module.get_parameter("w").stride()
    assert not target.tensors["w/exp_avg"].requires_grad
    assert (target.param_names(), len(optimizer.state)) == ({"w"}, 0), "unchanged until `install`"


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_state_rules_match_real_steps(
    kind: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    module = model().to(dtype)
    optimizer = MAKERS[kind](list(module.parameters()))
    if kind == "LBFGS" and dtype == torch.bfloat16:
        pytest.skip("its line search is in float32")
    if grad_dtype != dtype:
        module = with_grad_dtype(module, grad_dtype)
    try:
        for number in range(2):
            step(module, optimizer, number)
    except RuntimeError as error:
        if grad_dtype == dtype:
            raise
        pytest.skip(f"needs gradients of the parameter's dtype: {error}")
    states_of = [
        (param, optimizer.state[param]) for param in module.parameters() if param in optimizer.state
    ]
    for param, state in states_of:
        rule = state_rule(optimizer, param, optimizer.param_groups[0])
        assert rule.required <= state.keys() <= rule.required | rule.optional
        assert not [
            name
            for name, value in state.items()
            if torch.is_tensor(value) and rule.dtype(name, param) not in (None, value.dtype)
        ]


def with_grad_dtype(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module whose gradients have this dtype; None for any."""
    for param in module.parameters():
        param.grad_dtype = dtype
    return module


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
    for key, tensor in prepare(module, optimizer, saved).tensors.items():
        assert tensor.device.type == (device if key.endswith("/step") else "meta"), key


def test_tensors_in_lists_are_on_the_parameters_device() -> None:
    """LBFGS has lists of tensors, which a load reads into host memory."""
    module = model().to("meta")
    optimizer = MAKERS["LBFGS"](list(module.parameters()))
    target = prepare(module, optimizer, {})
    old = {"old_dirs": [torch.ones(2)], "t": 1.0, "more": {"ro": (torch.ones(1), None)}}
    target.install(scalars={"matrix": old}, groups=None)
    state = optimizer.state[next(module.parameters())]
    assert state["t"] == 1.0
    assert {state["old_dirs"][0].device.type, state["more"]["ro"][0].device.type} == {"meta"}


@pytest.fixture
def alone() -> Iterator[None]:
    with process_group():
        yield


@pytest.mark.incident("pytorch#126950")
@pytest.mark.usefixtures("alone")
def test_state_of_a_dtensor_is_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    module = nn.Module()
    module.register_parameter(
        "w", nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(1)]))
    )
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    target = prepare(module, optimizer, {"w/exp_avg": ("F32", (4, 3)), "w/step": ("F32", ())})
    moment = target.tensors["w/exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(1),)
    assert moment.device_mesh == mesh
    assert type(target.tensors["w/step"]) is torch.Tensor
    assert prepare(module, optimizer, {}).tensors == {}


@pytest.mark.incident("TransformerEngine#2795")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "saved_class", "recorded", "live", "expected"),
    [
        (Unknown, "old.Unknown", "Tensor", None, torch.Tensor),
        (Unknown, "old.Unknown", "Tensor", DTensor, DTensor),
        (Unknown, "old.Unknown", "DTensor", None, DTensor),
        (Unknown, "old.Unknown", None, torch.Tensor, torch.Tensor),
        (Unknown, "old.Unknown", None, None, DTensor),
        (Unknown, "old.Other", "Tensor", None, DTensor),
        (torch.optim.AdamW, "torch.optim.adamw.AdamW", "Tensor", None, DTensor),
    ],
)
def test_state_has_the_type_that_the_class_gives_it(
    make: Any, saved_class: str, recorded: str | None, live: type | None, expected: type
) -> None:
    """The state of another parameter decides, then what the checkpoint records of this class."""
    mesh = init_device_mesh("cpu", (1,))
    module = nn.Module()
    for name in ("w", "other"):
        whole = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(whole))
    optimizer = make(module.parameters(), foreach=False)
    if live is not None:
        other = module.get_parameter("other").detach()
        optimizer.state[module.get_parameter("other")]["exp_avg"] = (
            other if live is DTensor else other.to_local()
        )
    types = {} if recorded is None else {"exp_avg": recorded}
    groups = [{"names": ["w", "other"], "optimizer": saved_class, "state_types": types}]
    target = prepare(module, optimizer, {"w/exp_avg": ("F32", (4, 3))}, groups)
    assert type(target.tensors["w/exp_avg"]) is expected
    optimizer.state[module.get_parameter("w")]["exp_avg"] = target.tensors["w/exp_avg"]
    optimizer.state.pop(module.get_parameter("other"), None)
    (group,) = flatten_optimizer(optimizer, named(module), {}).groups
    assert group["state_types"] == ({} if expected is DTensor else {"exp_avg": "Tensor"})


@pytest.mark.incident("PaddleNLP#9095")
@pytest.mark.usefixtures("alone")
def test_dtensor_state_of_plain_parameter_needs_its_mesh() -> None:
    module = nn.Linear(3, 4, bias=False)
    sharded = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    optimizer = Unknown(module.parameters())
    optimizer.state[module.weight]["exp_avg"] = sharded
    groups = flatten_optimizer(optimizer, named(module), {}).groups
    assert groups[0]["state_types"] == {"exp_avg": "DTensor"}
    saved: Saved = {"weight/exp_avg": ("F32", (4, 3))}
    assert prepare(module, optimizer, saved, groups).tensors["weight/exp_avg"] is sharded
    with pytest.raises(
        MismatchError,
        match=r"weight/exp_avg: got no state to fill, expected a DTensor on the mesh that "
        r".*Unknown uses for this plain parameter; step the optimizer once before the load",
    ):
        prepare(module, Unknown(module.parameters()), saved, groups)


# flattening


@pytest.mark.usefixtures("alone")
def test_tensor_subclasses_in_dtensors_are_refused() -> None:
    """The blocks of a quantized shard belong to its sharding."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    module = nn.Module()
    module.register_parameter(
        "w", nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    )
    optimizer = torch.optim.SGD(module.parameters())
    state = DTensor.from_local(Halves.of(torch.ones(4, 3)), mesh, [Shard(0)], run_check=False)
    optimizer.state[module.w] = {"momentum": state}
    with pytest.raises(LayoutError, match=r"w/momentum: got a DTensor of Halves in optimizer stat"):
        flatten_optimizer(optimizer, named(module), {})


def test_nested_tensor_subclasses_are_joined() -> None:
    whole = torch.randn(4, 3)
    nested = Nested(Halves.of(whole))
    flat = flatten_subclasses({"m": nested, "step": 3})
    assert {key for key, value in flat.items() if isinstance(value, torch.Tensor)} == {
        "m.inner.high",
        "m.inner.low",
    }
    joined = join_subclasses(flat)
    assert joined.keys() == {"m", "step"}
    assert torch.equal(joined["m"].inner.whole(), whole)


def test_tensor_subclass_that_is_not_imported() -> None:
    """A checkpoint chooses the name: nothing is imported by it."""
    flat = flatten_subclasses({"m": Halves.of(torch.ones(2))})
    for name in ("absent.Halves", "os.path", "torch.Tensor", "unified_ckpt.errors.LayoutError"):
        flat["m.__tensor_unflatten__"]["class"] = name
        with pytest.raises(MismatchError, match=f"m: the checkpoint has a {name}, which is not im"):
            join_subclasses(flat)


@pytest.mark.parametrize("key", ["a/b", "", 3])
def test_invalid_state_keys_are_refused(key: object) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[next(module.parameters())][key] = torch.ones(1)
    with pytest.raises(
        LayoutError, match=r"matrix: got the key .* in optimizer state, expected a name without '/'"
    ):
        flatten_optimizer(optimizer, named(module), {})


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
        flatten_optimizer(optimizer, named(module), {})


# hyperparameters


def grouped(module: nn.Module, *groups: tuple[dict[str, Any], list[str]]) -> Optimizer:
    parameters = dict(module.named_parameters())
    return torch.optim.AdamW(
        [{"params": [parameters[n] for n in names], **options} for options, names in groups], lr=1.0
    )


def test_new_groups_keep_their_hyperparameters() -> None:
    module = model()
    saved = flatten_optimizer(grouped(module, ({"lr": 0.1}, ["matrix"])), named(module), {}).groups
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

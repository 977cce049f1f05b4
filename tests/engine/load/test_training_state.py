"""Optimizers saved and loaded into fresh objects: the next steps equal an uninterrupted run."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

import unified_ckpt as uc
from tests.support.engine.calls import calls_of
from tests.support.equality import same
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.runtime.torch_state.optimizer_cases import MAKERS, model, states, step
from tests.support.runtime.torch_state.optimizers import (
    Averaged,
    Composite,
    Counting,
    FusedAdam,
    Grouped,
    Halved,
    Lookahead,
)
from tests.support.torch_training import process_group
from unified_ckpt.runtime.comm.comm import Comm

Job = tuple[nn.Module, Optimizer]
CURRENT = uc.LoadOptions(hyperparameters="current")

# optimizers that keep their state in unusual ways


class Lazy(torch.optim.SGD):
    """An optimizer of an unknown class that creates masters at its first step, like FusedAdam."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state[param].setdefault(
                    "master_weight", param.detach().float().clone()
                )
                master.sub_(param.grad.float(), alpha=group["lr"])
                param.data.copy_(master)
        return loss


class Apart(torch.optim.SGD):
    """Keeps masters beside the groups from the start, like apex's FusedAdam.

    See apex/optimizers/fused_adam.py in NVIDIA/apex.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.param_groups_master = [
            {"params": [param.detach().clone().float() for param in group["params"]]}
            for group in self.param_groups
        ]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group, apart in zip(self.param_groups, self.param_groups_master, strict=True):
            for param, master in zip(group["params"], apart["params"], strict=True):
                master.sub_(param.grad.float(), alpha=group["lr"])
                param.data.copy_(master)
        return loss


class Wrapped(torch.optim.Optimizer):
    """Shares state and groups with the optimizer that it steps, like Accelerate's wrapper."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)
    zero_grad = property(lambda self: self.optimizer.zero_grad)
    state_dict = property(lambda self: self.optimizer.state_dict)
    load_state_dict = property(lambda self: self.optimizer.load_state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Momentum(torch.optim.Optimizer):
    """An optimizer of an unknown class, with an unusual name for its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            average.lerp_(param.grad, 0.1)
            param.data.sub_(average, alpha=self.param_groups[0]["lr"])
        return loss


class Shared(torch.optim.Optimizer):
    """Keeps a count in its state that belongs to no parameter, like MADGRAD.

    See madgrad/madgrad.py in facebookresearch/madgrad.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss, state = closure(), cast("dict[Any, Any]", self.state)
        state.setdefault("k", torch.tensor([0]))
        history = state.setdefault("history", {"steps": []})
        state["k"] += 1
        history["steps"].append(loss.item())
        for param in self.param_groups[0]["params"]:
            total = self.state[param].setdefault("total", torch.zeros_like(param))
            total.add_(param.grad, alpha=state["k"].item() ** 0.5)
            param.data.sub_(total, alpha=self.param_groups[0]["lr"])
        return loss


MASTERED: dict[str, Callable[[Any], Optimizer]] = {
    "FusedAdam": lambda ps: FusedAdam(ps, lr=0.01, weight_decay=0.1, master_weights=True),
    "bf16 moments": lambda ps: FusedAdam(
        ps,
        lr=0.01,
        master_weights=True,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    ),
    "remainders": lambda ps: FusedAdam(
        ps, lr=0.01, master_weights=True, store_param_remainders=True
    ),
    "unknown class": lambda ps: Lazy(ps, lr=0.01),
    "beside the groups": Apart,
}
PLAIN: dict[str, Callable[[Any], Optimizer]] = {
    **MAKERS,
    "FusedAdam without masters": lambda ps: FusedAdam(ps, lr=0.1),
    "wrapped SGD": lambda ps: Wrapped(torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    "wrapped AdamW": lambda ps: Wrapped(torch.optim.AdamW(ps, lr=0.1)),
    "Momentum": Momentum,
    "Shared": Shared,
    "state of another optimizer": lambda ps: Lookahead(torch.optim.AdamW(ps, lr=0.1)),
    "state beside another optimizer": lambda ps: Averaged(torch.optim.AdamW(ps, lr=0.1)),
    "wrapper of a wrapper": lambda ps: Wrapped(Averaged(Lookahead(torch.optim.SGD(ps, lr=0.1)))),
    "two optimizers": cast("Any", Composite),
    "count beside the state": Counting,
    "tensor subclass": Halved,
}


def mixed(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Parameters in half precision, and one in fp32."""
    module = model().to(dtype)
    module.vector.data = module.vector.data.float()
    return module


def trained(kind: str, numbers: range = range(3)) -> Job:
    module = (
        model()
        if kind in PLAIN
        else mixed(torch.float16 if kind == "beside the groups" else torch.bfloat16)
    )
    optimizer = (PLAIN | MASTERED)[kind](list(module.parameters()))
    for number in numbers:
        step(module, optimizer, number)
    return module, optimizer


@contextmanager
def no_step(optimizer: Optimizer) -> Iterator[None]:
    """Fail if the block steps the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        stepped = functools.wraps(type(optimizer).step)(
            lambda *_: pytest.fail("the optimizer was stepped")
        )
        patch.setattr(type(optimizer), "step", stepped)
        yield


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def check_next_steps(saved: Job, loaded: Job) -> None:
    """Three further steps of both jobs are bitwise equal."""
    for number in range(3, 6):
        step(*saved, number)
        step(*loaded, number)
    assert same(loaded[0].state_dict(), saved[0].state_dict())
    assert same(states(*loaded), states(*saved))


# training resumes


@pytest.mark.incident("KempnerForge#115")
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("warmed", [False, True])
def test_resumed_training_is_bitwise_equal(tmp_path: Path, kind: str, warmed: bool) -> None:
    job, other = trained(kind), trained(kind, range(50, 52) if warmed else range(0))
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1], step=3)
    with uc.open(tmp_path / "c") as opened:
        assert opened.extra is None, "state that is not tensors, like that of LBFGS, is not shown"
    with no_step(other[1]):
        uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert same(states(*other), states(*job))
    check_next_steps(job, other)
    assert same(hyperparameters(other[1]), hyperparameters(job[1]))


def test_shared_state_reaches_optimizers_without_its_holder(tmp_path: Path) -> None:
    """The first parameter holds it, and may belong to another optimizer or pipeline stage later."""
    module, optimizer = trained("Shared")
    other = torch.optim.SGD(model().parameters())
    uc.save(
        tmp_path / "c",
        model=module,
        optimizer=[optimizer, other],
        parts={"other": other_model(other)},
    )
    names = dict(model().named_parameters())
    for chosen in (["matrix", "vector"], ["one", "scalar"], ["scalar", "matrix"]):
        target = model()
        rest = [name for name in names if name not in chosen]
        first, second = (Shared([target.get_parameter(n) for n in ns]) for ns in (chosen, rest))
        plain = torch.optim.SGD(model().parameters())
        uc.load(
            tmp_path / "c",
            model=target,
            optimizer=[first, second, plain],
            parts={"other": other_model(plain)},
        )
        for loaded in (first, second):
            state: dict[Any, Any] = loaded.state
            assert same(state["k"], torch.tensor([3]))
            assert len(state["history"]["steps"]) == 3
        assert not plain.state


def other_model(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {f"p{number}": param for number, param in enumerate(optimizer.param_groups[0]["params"])}


def test_entries_of_a_state_dict_hook_reach_load_hooks(tmp_path: Path) -> None:
    """As in torch: only the job that adds an entry knows where it belongs."""
    module = model()
    hooked = torch.optim.SGD(module.parameters())
    hooked.register_state_dict_post_hook(lambda _, state: {**state, "hooked": 1})
    restored = list[object]()
    hooked.register_load_state_dict_pre_hook(lambda _, state: restored.append(state["hooked"]))
    uc.save(tmp_path / "c", model=module, optimizer=hooked)
    uc.load(tmp_path / "c", model=module, optimizer=hooked)
    assert restored == [1]


def test_entries_are_examined_once(tmp_path: Path) -> None:
    """A class that overrides `state_dict` without further entries is asked at the first save."""

    class Asked(torch.optim.SGD):
        calls = 0

        def state_dict(self) -> Any:
            self.calls += 1
            return super().state_dict()

    module = model()
    optimizer = Asked(module.parameters(), lr=0.1, momentum=0.9)
    step(module, optimizer, 0)
    for number in range(3):
        uc.save(tmp_path / str(number), model=module, optimizer=optimizer)
    assert optimizer.calls == 1


def averaged(order: int = 1, kind: Any = Averaged) -> Job:
    module = model()
    optimizer = kind(torch.optim.SGD(list(module.parameters())[::order], lr=0.1, momentum=0.9))
    step(module, optimizer, 0)
    return module, optimizer


@pytest.mark.parametrize(
    ("saved", "target", "match"),
    [
        (averaged, lambda: averaged(-1), r"slow, count of .*Averaged in another order of param"),
        (
            lambda: averaged(kind=Lookahead),
            averaged,
            r"the checkpoint lacks slow, count of .*Averaged",
        ),
    ],
)
def test_entries_that_cannot_be_restored(
    tmp_path: Path, saved: Callable[[], Job], target: Callable[[], Job], match: str
) -> None:
    """Entries by position would belong to other parameters; others would keep old values."""
    job, other = saved(), target()
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1])
    before = copy.deepcopy(other[1].state_dict()["slow"])
    with pytest.raises(uc.MismatchError, match=match):
        uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert same(other[1].state_dict()["slow"], before)
    uc.load(tmp_path / "c", model=other[0], optimizer=other[1], strict=False)
    assert same(other[1].state_dict()["slow"], before)


def test_entries_without_an_owner_are_noted(tmp_path: Path) -> None:
    job, other = averaged(), averaged(kind=Lookahead)
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1])
    report = uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert any("slow, count of" in note and "is not loaded" in note for note in report.notes)


@pytest.mark.parametrize("warmed", [False, True])
def test_sparse_adam_counts_in_python(tmp_path: Path, warmed: bool) -> None:
    """Its step computes with an int; a float32 tensor in its place gives other numbers."""

    def job(steps: int) -> Job:
        torch.manual_seed(0)
        module = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        for _ in range(steps):
            advance(module, optimizer)
        return module, optimizer

    def advance(module: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.tensor([1, 4])).square().sum().backward()
        optimizer.step()

    saved, loaded = job(3), job(7 if warmed else 0)
    uc.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    uc.load(tmp_path / "c", model=loaded[0], optimizer=loaded[1])
    for _ in range(3):
        assert same(states(*loaded), states(*saved))
        advance(*saved)
        advance(*loaded)
    assert same(loaded[0].state_dict(), saved[0].state_dict())


@pytest.mark.parametrize("kind", MASTERED)
@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("masters", ["nothing", "the optimizer", "its parts", "current"])
def test_masters_made_at_the_first_step_are_loaded(
    tmp_path: Path, kind: str, warmed: bool, masters: str
) -> None:
    """The step count of a param group is state, whichever hyperparameters are chosen."""
    job, other = trained(kind), trained(kind, range(7, 9) if warmed else range(0))
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1])
    explicit = masters == "the optimizer" and kind not in ("remainders", "beside the groups")
    options = {
        "its parts": uc.LoadOptions(parts=("model", "optimizer")),
        "current": CURRENT,
    }.get(masters)
    with no_step(other[1]):
        report = uc.load(
            tmp_path / "c",
            model=other[0],
            optimizer=other[1],
            options=options,
            **({"master_weights": other[1]} if explicit else {}),
        )
    assert report.unused == ()
    check_next_steps(job, other)
    assert same(*(getattr(optimizer, "param_groups_master", None) for _, optimizer in (job, other)))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch lets no optimizer be capturable on the CPU"
)
@pytest.mark.parametrize(
    "flags", [{"capturable": True}, {"fused": True}, {"fused": True, "capturable": True}]
)
def test_resumed_training_is_bitwise_equal_on_device(
    tmp_path: Path, flags: dict[str, bool]
) -> None:
    job, other = (
        (net, torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1, device="cuda"), **flags))
        for net in (model().cuda(), model().cuda())
    )
    for number in range(3):
        step(*job, number)
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1])
    with no_step(other[1]):
        uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert same(states(*other), states(*job))
    check_next_steps(job, other)


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_state_has_the_strides_of_its_parameter(tmp_path: Path, flags: dict[str, bool]) -> None:
    """Of a transposed one too. A fused step of the CPU takes equal strides for granted."""

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Conv2d(3, 4, (2, 5)).to(memory_format=torch.channels_last)
        net.transposed = torch.nn.Parameter(torch.randn(7, 5).t())
        return net, torch.optim.AdamW(net.parameters(), **flags)

    def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            torch.manual_seed(seed)
            for param in net.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()

    saved, loaded = job(), job()
    steps(*saved)
    uc.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    uc.load(tmp_path / "c", model=loaded[0], optimizer=loaded[1])
    steps(*saved)
    steps(*loaded)
    for name, param in saved[0].named_parameters():
        other = loaded[0].get_parameter(name)
        assert torch.equal(other, param), name
        assert loaded[1].state[other]["exp_avg"].stride() == param.stride()


def test_state_is_named_after_its_parameter(tmp_path: Path) -> None:
    """In the file, in the groups, and in a dict of tensors that is loaded."""
    module, optimizer = trained("AdamW amsgrad")
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    expected = {
        f"{fqn}/{name}": optimizer.state[param][name]
        for fqn, param in module.named_parameters()
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    }
    assert same(load_file(tmp_path / "c" / "optimizer.safetensors"), expected)
    manifest = json.loads((tmp_path / "c" / "unified_checkpoint.json").read_text())
    assert [group["names"] for group in manifest["optimizer"]["groups"]] == [
        [fqn for fqn, _ in module.named_parameters()]
    ]
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    uc.load(tmp_path / "c", optimizer=target)
    assert same(target, expected)


def test_optimizers_of_two_parts_with_equal_names(tmp_path: Path) -> None:
    jobs = [trained("AdamW amsgrad"), trained("AdamW amsgrad", range(2))]
    others = [trained("AdamW amsgrad", range(0)) for _ in jobs]
    (generator, critic), optimizers = zip(*jobs, strict=True)
    uc.save(
        tmp_path / "c",
        parts={"generator": generator, "critic": critic},
        optimizer=list(optimizers),
    )
    uc.load(
        tmp_path / "c",
        parts={"generator": others[0][0], "critic": others[1][0]},
        optimizer=[optimizer for _, optimizer in others],
    )
    assert all(same(states(*other), states(*job)) for other, job in zip(others, jobs, strict=True))
    with pytest.raises(uc.LayoutError, match="has a parameter of shape"):
        uc.save(tmp_path / "d", parts={"generator": generator}, optimizer=list(optimizers))


def test_implementation_options_are_not_restored(tmp_path: Path) -> None:
    """A job without `capturable` resumes from a checkpoint with it, and the reverse.

    The state is restored; options that choose an implementation stay those of the job.
    """
    module, optimizer = trained("AdamW fused")
    optimizer.param_groups[0]["capturable"] = True
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.7, foreach=False)
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    group = fresh.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"], group["capturable"]) == (
        0.1,
        None,
        False,
        False,
    )
    step(other, fresh, 3)


def test_additional_optimizer_state_is_loaded(tmp_path: Path) -> None:
    """The class is the same, so its step can read the additional state."""
    job, other = trained("SGD momentum"), trained("SGD momentum", range(0))
    for param in job[0].parameters():
        job[1].state[param]["history"] = torch.ones(2)
    uc.save(tmp_path / "c", model=job[0], optimizer=job[1])
    uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert same(states(*other), states(*job))


# groups, and parameters without state


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def grouped(
    module: Two, *, first_lr: float, second_lr: float, swapped: bool = False
) -> torch.optim.AdamW:
    groups = [
        {"params": list(module.first.parameters()), "lr": first_lr, "weight_decay": 0.5},
        {"params": list(module.second.parameters()), "lr": second_lr, "tag": "head"},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups)


def stepped(module: Two, optimizer: Optimizer, *, layers: tuple[str, ...] = ()) -> None:
    """A step that gives a gradient to these layers, or to all that are not frozen."""
    optimizer.zero_grad()
    params = [
        param
        for name, param in module.named_parameters()
        if param.requires_grad and (not layers or name.split(".")[0] in layers)
    ]
    torch.stack([(param**2).sum() for param in params]).sum().backward()
    optimizer.step()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Two, Optimizer]:
    """A job of two groups, saved after a step."""
    module = Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    return module, optimizer


@pytest.mark.incident("pytorch#113673")
def test_groups_are_matched_by_name_and_not_by_position(
    tmp_path: Path, two: tuple[Two, Optimizer]
) -> None:
    other = Two()
    nn.init.zeros_(other.frozen.weight)
    fresh = grouped(other, first_lr=7, second_lr=8, swapped=True)
    uc.load(tmp_path / "c", model=other, optimizer=fresh, options=CURRENT)
    assert [group["lr"] for group in fresh.param_groups] == [8, 7]
    assert same(states(other, fresh), states(*two))
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    second, first = fresh.param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["tag"]) == (
        0.1,
        0.5,
        0.2,
        "head",
    )
    stepped(*two)
    stepped(other, fresh)
    assert same(other.state_dict(), two[0].state_dict()), "also the frozen parameters"
    assert other.frozen.weight not in fresh.state
    assert not any("frozen" in n for n in load_file(tmp_path / "c" / "optimizer.safetensors"))


@pytest.mark.parametrize("value", [torch.ones(3), np.arange(3), [torch.ones(3)]], ids=type)
def test_options_with_several_elements(tmp_path: Path, value: Any) -> None:
    """Groups are compared at the save, and at a load into one group."""
    module = Two()
    groups = [
        {"params": list(layer.parameters()), "mask": copy.deepcopy(value)}
        for layer in (module.first, module.second)
    ]
    saved = torch.optim.SGD(groups, lr=0.1)
    stepped(module, saved)
    uc.save(tmp_path / "c", model=module, optimizer=saved)
    other = Two()
    joined = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=9)
    uc.load(tmp_path / "c", model=other, optimizer=joined)
    assert joined.param_groups[0]["lr"] == 0.1
    assert str(joined.param_groups[0]["mask"]) == str(value)
    groups[1]["mask"] = [] if isinstance(value, list) else value + 1
    uc.save(tmp_path / "d", model=module, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(uc.MismatchError, match="joins parameters whose saved hyperparameters"):
        uc.load(tmp_path / "d", model=other, optimizer=joined)


@pytest.mark.parametrize(
    "kind",
    ["one each", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "FusedAdam"))],
)
def test_cost_grows_with_the_groups(tmp_path: Path, kind: str) -> None:
    """Four times as many param groups, or optimizers, cost about four times as many calls."""

    def job(count: int) -> tuple[dict[str, nn.Parameter], Any]:
        params = {f"w{i}": nn.Parameter(torch.zeros(1).bfloat16()) for i in range(count)}
        groups = [{"params": [param]} for param in params.values()]
        if kind == "one each":
            return params, [torch.optim.SGD([group], momentum=0.9) for group in groups]
        if kind == "torch":
            return params, torch.optim.SGD(groups, momentum=0.9)
        return params, FusedAdam(groups, master_weights=True)

    calls = []
    for count in (100, 400):
        (params, optimizer), (other, fresh) = job(count), job(count)
        for param in params.values():
            param.grad = torch.ones_like(param)
        for single in optimizer if isinstance(optimizer, list) else [optimizer]:
            single.step()
        path, target = tmp_path / str(count), {"model": other, "optimizer": fresh}
        saved = {"model": params, "optimizer": optimizer}
        calls.append(
            (
                calls_of(functools.partial(uc.save, path, **saved)),
                calls_of(functools.partial(uc.load, path, **target)),
            )
        )
    for few, many in zip(*calls, strict=True):
        assert many < 5 * few, calls


def test_group_that_joins_saved_groups(tmp_path: Path, two: tuple[Two, Optimizer]) -> None:
    other = Two()
    before = copy.deepcopy(other.state_dict())
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=9)
    with pytest.raises(
        uc.MismatchError,
        match=r"first\.weight: its param group joins parameters .* "
        r'differ.*hyperparameters="current"',
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert same(other.state_dict(), before)
    assert fresh.param_groups[0]["lr"] == 9
    uc.load(tmp_path / "c", model=other, optimizer=fresh, options=CURRENT)
    assert same(states(other, fresh), states(*two))


@pytest.mark.incident("prime-rl#2800")
@pytest.mark.parametrize("layers", [(), ("first",)])
def test_absent_parameter_state_is_restored(tmp_path: Path, layers: tuple[str, ...]) -> None:
    """Saved before the first step, or after one that did not reach a layer."""
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    if layers:
        stepped(module, optimizer, layers=layers)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    warmed = grouped(other, first_lr=7, second_lr=8)
    stepped(other, warmed)
    uc.load(tmp_path / "c", model=other, optimizer=warmed)
    assert same(states(other, warmed), states(module, optimizer))
    assert [group["lr"] for group in warmed.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("saved", "loaded", "match"),
    [
        ("first", "first second", r"second\.bias: is not in (.|\n)*second\.weight: is not in the"),
        ("first second", "first", r"second\.weight/exp_avg: is in the checkpoint, requested by no"),
    ],
)
def test_layer_that_one_optimizer_lacks(
    tmp_path: Path, saved: str, loaded: str, match: str
) -> None:
    jobs = []
    for layers in (saved, loaded):
        module = Two()
        params = [p for layer in layers.split() for p in getattr(module, layer).parameters()]
        jobs.append((module, torch.optim.AdamW(params)))
    (module, optimizer), (other, fresh) = jobs
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    with pytest.raises(uc.MismatchError, match=rf"optimizer:{match}"):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh, strict=False)
    assert {name.partition("/")[0] for name in report.missing + report.unexpected} == {
        "optimizer:second.bias",
        "optimizer:second.weight",
    }
    assert bool(report.missing) == (saved == "first") != bool(report.unexpected)
    assert same(fresh.state[other.first.weight], optimizer.state[module.first.weight])


# forms of state


@pytest.mark.incident("nanotron#68")
def test_tied_parameters_have_one_state(tmp_path: Path) -> None:
    """It is loaded into tied parameters, and into each of two that are not."""

    def embedding(*, tied: bool) -> Job:
        torch.manual_seed(2)
        net = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
        if tied:
            net["head"].weight = net["embed"].weight
        return net, torch.optim.AdamW(net.parameters())

    module, optimizer = embedding(tied=True)
    (module["head"].weight ** 2).sum().backward()
    optimizer.step()
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    stored = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in stored} == {"embed.weight"}
    for tied in (True, False):
        other, fresh = embedding(tied=tied)
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
        for param in other.parameters():
            assert same(fresh.state[param], optimizer.state[module["embed"].weight])


def test_ranks_that_store_tied_tensors_under_either_name(tmp_path: Path) -> None:
    """The manifest once refused an alias of an alias, after all bytes were written."""
    names = ["ab", "ba"]

    def act(comm: Comm) -> None:
        shared = torch.ones(3)
        model = {**dict.fromkeys(names[comm.rank], shared), "c": torch.ones(2)}
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(tmp_path / "c", model=model)

    run_ranks(2, act)
    target = {name: torch.zeros(3) for name in "ab"} | {"c": torch.zeros(2)}
    uc.load(tmp_path / "c", model=target)
    assert all(tensor.all() for tensor in target.values())


def half_precision(**state: Callable[[torch.Size], torch.Tensor]) -> Job:
    """A bf16 layer whose optimizer has these states of each parameter."""
    module = nn.Linear(40, 30).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters())
    for param in module.parameters() if state else ():
        optimizer.state[param] = {name: make(param.shape) for name, make in state.items()}
    return module, optimizer


def test_moments_of_another_dtype_require_cast(tmp_path: Path) -> None:
    """fp32 moments of a bf16 parameter are loaded into an optimizer without moments.

    torch's `step` would raise on them; torch's `load_state_dict` casts them.
    """
    module, optimizer = half_precision(
        step=lambda _: torch.tensor(4.0), exp_avg=torch.randn, exp_avg_sq=torch.rand
    )
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other, fresh = half_precision()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        uc.MismatchError,
        match=r"bias/exp_avg: checkpoint has dtype F32, target has BF16; pass "
        r"LoadOptions\(cast=True",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert same(other.state_dict(), before)
    assert not fresh.state
    moments = optimizer.state[module.weight]["exp_avg"]
    for target, options, expected in (
        (fresh, uc.LoadOptions(cast=True), moments.bfloat16()),
        (FusedAdam(other.parameters()), None, moments),
    ):
        uc.load(tmp_path / "c", model=other, optimizer=target, options=options)
        assert same(target.state[other.weight]["exp_avg"], expected)
        step(other, target, 0)


@pytest.mark.incident("pytorch#191918")
@pytest.mark.parametrize("kind", ["SGD momentum", "SGD decayed", "Rprop", "Adafactor"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_gradients_of_another_dtype(tmp_path: Path, kind: str, dtype: str, grad_dtype: str) -> None:
    """Their state is not rounded, and the next steps equal those of an uninterrupted run."""

    def job(*steps: int, any_dtype: bool = False) -> Job:
        module = model().to(getattr(torch, dtype))
        for param in module.parameters():
            param.grad_dtype = None if any_dtype else getattr(torch, grad_dtype)
        optimizer = MAKERS[kind](list(module.parameters()))
        run(module, optimizer, *steps)
        return module, optimizer

    def run(module: nn.Module, optimizer: Optimizer, *steps: int) -> None:
        for number in steps:
            generator = torch.Generator().manual_seed(number)
            for param in module.parameters():
                noise = torch.randn(param.shape, generator=generator)
                param.grad = noise.to(getattr(torch, grad_dtype))
            optimizer.step()

    saved = job(1)
    uc.save(tmp_path / "c", model=saved[0], optimizer=saved[1])
    run(*saved, 2)
    for any_dtype in (False, True):
        fresh = job(any_dtype=any_dtype)
        uc.load(tmp_path / "c", model=fresh[0], optimizer=fresh[1])
        run(*fresh, 2)
        assert same(fresh[0].state_dict(), saved[0].state_dict())
        assert same(states(*fresh), states(*saved))


@pytest.mark.parametrize("key", ["master_param", "master_weights"])
def test_masters_in_optimizer_state(tmp_path: Path, key: str) -> None:
    state = {"exp_avg": torch.rand, "exp_avg_sq": torch.rand, "step": torch.zeros, key: torch.randn}
    (module, optimizer), (other, fresh) = half_precision(**state), half_precision(**state)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer, master_weights=optimizer)
    stored = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert {name.partition("/")[2] for name in stored} == {"exp_avg", "exp_avg_sq", "step"}
    masters = load_file(tmp_path / "c" / "master_weights.safetensors")
    assert same(masters["weight"], optimizer.state[module.weight][key])
    memory = fresh.state[other.weight][key].data_ptr()
    uc.load(tmp_path / "c", model=other, optimizer=fresh, master_weights=fresh)
    assert same(other.state_dict(), module.state_dict())
    assert same(states(other, fresh), states(module, optimizer))
    assert fresh.state[other.weight][key].data_ptr() == memory


@pytest.mark.parametrize("holder", ["the optimizer", "another", "of a list"])
def test_masters_of_the_saved_step_are_loaded(tmp_path: Path, holder: str) -> None:
    """Masters in an optimizer's state are saved and loaded with it.

    Otherwise the next step would overwrite the model with masters of the loading job.
    """

    def job() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The masters by name, and the arguments of a save or load."""
        module = nn.Linear(40, 30).bfloat16()
        masters = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
        by_param = [torch.optim.SGD([param], momentum=0.9) for param in module.parameters()]
        whole, another = (torch.optim.SGD(module.parameters(), momentum=0.9) for _ in range(2))
        holders = {"the optimizer": [whole], "another": [another], "of a list": by_param}[holder]
        for owner in holders:
            for name, param in module.named_parameters():
                if any(param is own for own in owner.param_groups[0]["params"]):
                    owner.state[param] = {"master_param": masters[name]}
        arguments = {"model": module, "optimizer": by_param if holder == "of a list" else whole}
        more = {"master_weights": another} if holder == "another" else {}
        return masters, arguments | more

    (saved, arguments), (loaded, targets) = job(), job()
    uc.save(tmp_path / "c", **arguments)
    assert same(load_file(tmp_path / "c" / "master_weights.safetensors"), saved)
    uc.load(tmp_path / "c", **targets)
    assert same(loaded, saved)
    uc.save(tmp_path / "d", **arguments, options=uc.SaveOptions(parts=("model", "optimizer")))
    with uc.open(tmp_path / "d") as opened:
        assert "master_weights" not in opened.parts


def test_part_that_is_a_module_of_the_model(tmp_path: Path) -> None:
    """Optimizer state belongs to the model, even if a part holds the same parameters."""
    net = nn.ModuleDict({"ema": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 0)
    uc.save(
        tmp_path / "c",
        model=net,
        optimizer=optimizer,
        parts={"ema": net["ema"]},
        options=uc.SaveOptions(parts=("model", "optimizer")),
    )
    assert uc.load(tmp_path / "c", model=net, optimizer=optimizer).unused == ()


def test_masters_without_target_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (module, optimizer), other = trained("FusedAdam", range(1)), mixed()
    plain = FusedAdam(other.parameters(), lr=0.01)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        uc.MismatchError,
        match=r"master_weights: matrix, one, scalar: .* pass master_weights=, .* float32 "
        r".*parts=\(",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=plain)
    assert same(other.state_dict(), before)
    assert not plain.state
    options = uc.LoadOptions(parts=("model", "optimizer"))
    report = uc.load(tmp_path / "c", model=other, optimizer=plain, options=options)
    assert report.unused == ("master_weights",)
    assert "no rank loaded master_weights from the checkpoint" not in caplog.text  # chosen
    masters = {
        name: torch.empty(param.shape)
        for name, param in other.named_parameters()
        if name != "vector"
    }
    uc.load(tmp_path / "c", model=other, optimizer=plain, master_weights=masters)
    assert torch.equal(masters["matrix"], optimizer.state[module.matrix]["master_param"])
    full, adamw = trained("AdamW", range(0))
    report = uc.load(tmp_path / "c", model=full, optimizer=adamw)
    assert report.unused == ()
    assert torch.equal(full.matrix, masters["matrix"])
    step(full, adamw, 1)


# state of other classes

SAME_STATE = ("AdamW", "FusedAdam without masters", "Adam")


@pytest.mark.parametrize("first", SAME_STATE)
@pytest.mark.parametrize("then", [*SAME_STATE, "AdamW fused"])
@pytest.mark.parametrize("warmed", [False, True])
def test_classes_with_equal_state(tmp_path: Path, first: str, then: str, warmed: bool) -> None:
    """Moments and step count are loaded, wherever the class keeps them. As in torch's
    `load_state_dict`, the class decides how weights decay.
    """
    (module, optimizer), (other, target) = trained(first), trained(then, range(5, 5 + warmed))
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    with no_step(target):
        uc.load(tmp_path / "c", model=other, optimizer=target)
    (group,) = target.param_groups
    for loaded, saved in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(target.state[loaded]["exp_avg"], optimizer.state[saved]["exp_avg"])
        count = target.state[loaded].get("step", group.get("step"))
        assert (int(count), torch.is_tensor(count)) == (3, then != "FusedAdam without masters")
    assert group.get("decoupled_weight_decay") or not then.startswith("AdamW")
    assert group["weight_decay"] == optimizer.param_groups[0]["weight_decay"]
    step(other, target, 3)


OTHERS = {
    "momentum is not Adam's": (
        "AdamW",
        "SGD momentum",
        {},
        r"the checkpoint has exp_avg, exp_avg_sq, step of torch.optim.adamw.AdamW; ",
    ),
    "Adam's is not momentum": (
        "SGD momentum",
        "AdamW",
        {},
        r"momentum_buffer of torch.optim.sgd.SGD; torch.optim.adamw.AdamW reads",
    ),
    "wrapped": (
        "wrapped SGD",
        "wrapped AdamW",
        {},
        r"momentum_buffer of torch.optim.sgd.SGD; torch.optim.adamw.AdamW reads",
    ),
    "no state at all": (
        "SGD",
        "AdamW",
        {},
        r"is torch.optim.sgd.SGD, without amsgrad, betas, .* of torch.optim.adamw.AdamW",
    ),
    "sums": (
        "AdamW",
        "Adagrad",
        {},
        r"of torch.optim.adamw.AdamW; torch.optim.adagrad.Adagrad reads step, sum; load into",
    ),
    "amsgrad": (
        "AdamW",
        "AdamW amsgrad",
        {"hyperparameters": "current"},
        r"AdamW reads exp_avg, exp_avg_sq, max_exp_avg_sq, step",
    ),
    "unknown": (
        "AdamW",
        "Momentum",
        {},
        r"AdamW; (the state of .*Momentum is unknown before its first step|.*Momentum reads avera)",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("warmed", [False, True])
def test_state_of_another_class_is_refused(
    tmp_path: Path, case: str, warmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, then, chosen, text = OTHERS[case]
    (module, optimizer), (other, target) = trained(first), trained(then, range(2 * warmed))
    options = uc.LoadOptions(**chosen)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    state = copy.deepcopy(states(other, target))
    before = copy.deepcopy(other.state_dict()), hyperparameters(target)
    with pytest.raises(uc.MismatchError, match=text):
        uc.load(tmp_path / "c", model=other, optimizer=target, options=options)
    assert same((other.state_dict(), hyperparameters(target)), before)
    assert same(states(other, target), state)
    report = uc.load(tmp_path / "c", model=other, optimizer=target, strict=False, options=options)
    assert same(other.state_dict(), module.state_dict())
    assert same(states(other, target), state)
    assert report.wrong
    assert "strict=False, which left these unchanged" in caplog.text
    step(other, target, 9)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([torch.tensor(3.0), torch.tensor(3.0)], None),
        ([3, 3], None),
        ([3, torch.tensor(4.0)], "a is at step 3, b at step 4; .*FusedAdam has one step count per"),
        ([None, None], "optimizer:a: the checkpoint has no step count, which .*FusedAdam reads"),
    ],
)
def test_steps_of_parameters_become_the_step_of_their_group(
    tmp_path: Path, steps: Sequence[Any], problem: str | None
) -> None:
    saved, target = (torch.nn.ParameterDict({n: torch.ones(2) for n in "ab"}) for _ in range(2))
    adam = torch.optim.AdamW(saved.values())
    for parameter, count in zip(saved.values(), steps, strict=True):
        moments = {name: torch.ones(2) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = moments if count is None else {**moments, "step": count}
    uc.save(tmp_path / "c", model=saved, optimizer=adam)
    fused = FusedAdam(target.values())
    with pytest.raises(uc.MismatchError, match=problem) if problem else nullcontext():
        uc.load(tmp_path / "c", model=target, optimizer=fused)
    assert fused.param_groups[0].get("step") == (None if problem else 3)


def test_class_without_state_needs_only_its_options(tmp_path: Path) -> None:
    saved, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    uc.save(tmp_path / "c", model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.5))
    plain = torch.optim.Optimizer(target.parameters(), {"lr": 0.1})
    uc.load(tmp_path / "c", model=target, optimizer=plain)
    assert plain.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("first", "then"),
    [("SGD", "SGD momentum"), ("SGD momentum", "SGD fused"), ("AdamW amsgrad", "AdamW")],
)
def test_class_with_other_options_loads_its_state(tmp_path: Path, first: str, then: str) -> None:
    (module, optimizer), (other, target) = trained(first), trained(then, range(0))
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    uc.load(tmp_path / "c", model=other, optimizer=target, options=CURRENT)
    step(other, target, 3)


@pytest.mark.parametrize("saved", [["matrix"], []])
def test_parameter_without_saved_state_is_unchanged(tmp_path: Path, saved: list[str]) -> None:
    """With strict=False. The saved optimizer has some of the parameters, or there is none."""
    (module, _), (other, target) = trained("AdamW"), trained("AdamW")
    optimizer = torch.optim.AdamW([getattr(module, name) for name in saved]) if saved else None
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    before = copy.deepcopy(states(other, target))
    uc.load(tmp_path / "c", model=other, optimizer=target, strict=False)
    after = states(other, target)
    kept = {name for name in before if name.partition("/")[0] not in saved}
    assert kept
    assert same({name: after.get(name) for name in kept}, {name: before[name] for name in kept})


def test_parameter_of_another_shape_is_unchanged(tmp_path: Path) -> None:
    """After the vocabulary grew, strict=False also leaves the parameter's state unchanged."""
    module, other = nn.Linear(4, 3), nn.Linear(4, 5)
    optimizer, warmed, fresh = (
        torch.optim.AdamW(net.parameters()) for net in (module, other, other)
    )
    step(module, optimizer, 0)
    step(other, warmed, 0)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    for target in (warmed, fresh):
        before = copy.deepcopy(states(other, target))
        with pytest.raises(
            uc.MismatchError,
            match=r"optimizer:bias/exp_avg: checkpoint has shape \(3,\), target has \(5,\)",
        ):
            uc.load(tmp_path / "c", model=other, optimizer=target)
        uc.load(tmp_path / "c", model=other, optimizer=target, strict=False)
        assert same(states(other, target), before)
        step(other, target, 1)


# refusals


def masters_twice(*, warmed: bool) -> dict[str, Any]:
    module, optimizer = trained("FusedAdam", range(7, 7 + warmed))
    masters = {name: param.detach().float() for name, param in module.named_parameters()}
    return {"model": module, "optimizer": optimizer, "master_weights": masters}


def scaled(dtype: torch.dtype) -> dict[str, Any]:
    module = model()
    return {"model": module, "optimizer": FusedAdam(module.parameters(), exp_avg_dtype=dtype)}


def shared_parameter() -> dict[str, Any]:
    module, optimizer = trained("AdamW")
    return {
        "model": module,
        "optimizer": [optimizer, torch.optim.AdamW([next(module.parameters())])],
    }


def masters_of_plain_optimizer() -> dict[str, Any]:
    module, optimizer = trained("SGD")
    return {"model": module, "master_weights": optimizer}


class Mastered(Optimizer):
    """Steps float32 copies of its parameters with another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        own = self.param_groups[0]["params"]
        self.copies = [param.detach().clone().requires_grad_() for param in own]
        self.inner = torch.optim.SGD(self.copies, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param, master in zip(self.param_groups[0]["params"], self.copies, strict=True):
            master.grad = param.grad
        self.inner.step()
        return loss

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Keyed(torch.optim.SGD):
    """Has parameters as keys inside its state, as a class of pytorch_optimizer has."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["scales"] = dict.fromkeys(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def stepped_once(make: Callable[[Any], Any]) -> dict[str, Any]:
    module = model()
    optimizer = make(module.parameters())
    step(module, optimizer, 0)
    return {"model": module, "optimizer": optimizer}


REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: masters_twice(warmed=True), r"master_weights.*; omit master_weights="),
    (shared_parameter, r"belongs to two optimizers, but a checkpoint stores its state once"),
    (lambda: {"optimizer": trained("AdamW")[1]}, r"optimizer.*parameter"),
    (masters_of_plain_optimizer, r"got an optimizer without master weights in its state"),
    (lambda: {"model": model(), "optimizer": "adam"}, r"optimizer: got a str, expected optimizers"),
    (lambda: scaled(torch.float16), r"FusedAdam: keeps the scales of exp_avg outside of its state"),
    (lambda: scaled(torch.uint8), r"outside of its state; use float32 or bfloat16"),
    (
        lambda: stepped_once(lambda ps: Grouped(torch.optim.SGD(ps))),
        r"Grouped: got param groups of its own beside .*\(SGD\); pass these as a list",
    ),
    (
        lambda: stepped_once(Mastered),
        r"Mastered: its state_dict\(\) has state\.0\.momentum_buffer, which its `state` lacks",
    ),
    (lambda: stepped_once(Keyed), r"Keyed\.state\['scales'\]: got a parameter as a key"),
    (
        lambda: {"model": nn.Sequential(nn.LazyLinear(3))},
        r"^0\.weight: has no shape yet; run the model's first forward pass",
    ),
]


def test_refused_optimizer_can_be_stored_as_one_value(tmp_path: Path) -> None:
    """As the errors propose."""
    saved, other = stepped_once(Mastered), stepped_once(Mastered)
    step(saved["model"], saved["optimizer"], 1)
    extra = {"optimizer": saved["optimizer"]}
    uc.save(tmp_path / "c", model=saved["model"], extra=extra)
    uc.load(tmp_path / "c", model=other["model"], extra={"optimizer": other["optimizer"]})
    assert same(other["optimizer"].state_dict(), saved["optimizer"].state_dict())


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_arguments_that_cannot_be_saved(
    tmp_path: Path, make: Callable[[], dict[str, Any]], match: str
) -> None:
    with process_group(), pytest.raises(uc.LayoutError, match=match):
        uc.save(tmp_path / "c", **make())
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        REFUSED[0],
        (lambda: masters_twice(warmed=False), REFUSED[0][1]),
        REFUSED[1],
        (
            lambda: {"model": model(), "optimizer": torch.optim.SGD(model().parameters())},
            r"optimizer group 0: has a parameter of shape \(5, 3\) that is not in `model`",
        ),
        (REFUSED[2][0], r"optimizer: its parameters have no names without their model; pass `mo"),
    ],
)
def test_arguments_that_cannot_be_loaded(
    tmp_path: Path, make: Callable[[], dict[str, Any]], match: str
) -> None:
    module, optimizer = trained("AdamW")
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    arguments = make()
    before = copy.deepcopy(arguments.get("model", module).state_dict())
    with pytest.raises(uc.LayoutError, match=match):
        uc.load(tmp_path / "c", **arguments)
    assert same(arguments.get("model", module).state_dict(), before)

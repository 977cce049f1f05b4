"""Optimizers saved and loaded into fresh objects: the next steps equal an uninterrupted run."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

import unified_ckpt as uc
from tests.support.optimizer_cases import MAKERS, model, same, states, step
from tests.support.optimizers import FusedAdam


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, Optimizer]:
    module = model()
    optimizer = MAKERS[kind](list(module.parameters()))
    for number in range(steps):
        step(module, optimizer, number)
    return module, optimizer


def load_quietly(
    path: Path, module: nn.Module, optimizer: Optimizer, **more: object
) -> uc.LoadReport:
    """A load during which a step is an error."""
    with pytest.MonkeyPatch.context() as patch:
        stepped = functools.wraps(type(optimizer).step)(
            lambda *_: pytest.fail("the optimizer was stepped")
        )
        patch.setattr(type(optimizer), "step", stepped)
        return uc.load(path, model=module, optimizer=optimizer, **more)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("stale", [False, True])
def test_training_goes_on_bit_by_bit(tmp_path: Path, kind: str, stale: bool) -> None:
    module, optimizer = trained(kind)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer, step=3)
    other = model()
    fresh = MAKERS[kind](list(other.parameters()))
    for number in range(2 * stale):
        step(other, fresh, 50 + number)
    load_quietly(tmp_path / "c", other, fresh)
    assert same(states(other, fresh), states(module, optimizer))
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, fresh, number)
    for (name, ours), theirs in zip(other.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert same(states(other, fresh), states(module, optimizer))
    assert same(fresh.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])


def test_state_is_named_after_its_parameter(tmp_path: Path) -> None:
    module, optimizer = trained("AdamW amsgrad")
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    found = load_file(tmp_path / "c" / "optimizer.safetensors")
    names = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}
    assert set(found) == {f"{fqn}/{name}" for fqn, _ in module.named_parameters() for name in names}
    for fqn, param in module.named_parameters():
        for name in names:
            assert torch.equal(found[f"{fqn}/{name}"], optimizer.state[param][name])
    groups = json.loads((tmp_path / "c" / "unified_checkpoint.json").read_text())["optimizer"][
        "groups"
    ]
    assert [group["names"] for group in groups] == [[fqn for fqn, _ in module.named_parameters()]]


def test_optimizers_of_further_parts_that_name_their_parameters_alike(tmp_path: Path) -> None:
    (one, first), (two, second) = trained("AdamW amsgrad"), trained("AdamW amsgrad", steps=2)
    uc.save(tmp_path / "c", parts={"generator": one, "critic": two}, optimizer=[first, second])
    found = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert {name.partition(".")[0] for name in found} == {"generator", "critic"}
    others = [model(), model()]
    fresh = [MAKERS["AdamW amsgrad"](list(other.parameters())) for other in others]
    uc.load(tmp_path / "c", parts={"generator": others[0], "critic": others[1]}, optimizer=fresh)
    assert same(states(others[0], fresh[0]), states(one, first))
    assert same(states(others[1], fresh[1]), states(two, second))
    with pytest.raises(uc.LayoutError, match="has a parameter of shape"):
        uc.save(tmp_path / "d", parts={"generator": one}, optimizer=[first, second])


def test_state_that_is_no_tensor_goes_to_extra(tmp_path: Path) -> None:
    """LBFGS keeps its history in lists."""
    module, optimizer = trained("LBFGS")
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    assert (tmp_path / "c" / "extra.safetensors").exists()
    assert uc.open(tmp_path / "c").extra is None


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch lets no optimizer be capturable on the CPU"
)
@pytest.mark.parametrize(
    "how",
    [{"capturable": True}, {"fused": True}, {"fused": True, "capturable": True}, {"foreach": True}],
)
def test_training_goes_on_bit_by_bit_on_a_device(tmp_path: Path, how: dict[str, bool]) -> None:
    module, other = model().cuda(), model().cuda()
    optimizer, fresh = (
        torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1, device="cuda"), **how)
        for m in (module, other)
    )
    for number in range(3):
        step(module, optimizer, number)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    load_quietly(tmp_path / "c", other, fresh)
    assert same(states(other, fresh), states(module, optimizer))
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, fresh, number)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_how_an_optimizer_runs_stays_as_it_is(tmp_path: Path) -> None:
    """A checkpoint of a capturable optimizer goes on in one that is not, and the reverse: state is
    the same, options are the job's.
    """
    module, optimizer = trained("AdamW fused")
    optimizer.param_groups[0]["capturable"] = True
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.7, foreach=False)
    load_quietly(tmp_path / "c", other, fresh)
    group = fresh.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"], group["capturable"]) == (
        0.1,
        None,
        False,
        False,
    )
    step(other, fresh, 3)


# groups


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
        {"params": list(module.second.parameters()), "lr": second_lr, "tag": "mine"},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups)


def stepped(module: Two, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    sum((p**2).sum() for p in module.parameters() if p.requires_grad).backward()
    optimizer.step()


def test_groups_are_matched_by_name_and_not_by_position(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    fresh = grouped(other, first_lr=7, second_lr=8, swapped=True)
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    second, first = fresh.param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["tag"]) == (
        0.1,
        0.5,
        0.2,
        "mine",
    )
    stepped(module, optimizer)
    stepped(other, fresh)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_hyperparameters_of_the_job_are_kept_on_demand(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    fresh = grouped(other, first_lr=7, second_lr=8)
    uc.load(
        tmp_path / "c",
        model=other,
        optimizer=fresh,
        options=uc.LoadOptions(hyperparameters="current"),
    )
    assert [group["lr"] for group in fresh.param_groups] == [7, 8]
    assert torch.equal(
        fresh.state[other.first.weight]["exp_avg"], optimizer.state[module.first.weight]["exp_avg"]
    )


def test_groups_that_join_separate_groups(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=9)
    with pytest.raises(
        uc.MismatchError,
        match=r"first\.weight: its param group joins parameters .* "
        r'differ.*hyperparameters="current"',
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert fresh.param_groups[0]["lr"] == 9
    uc.load(
        tmp_path / "c",
        model=other,
        optimizer=fresh,
        options=uc.LoadOptions(hyperparameters="current"),
    )


# parameters without state


def test_frozen_parameters_are_in_the_model_only(tmp_path: Path) -> None:
    module, other = Two(), Two()
    nn.init.zeros_(other.frozen.weight)
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    assert not any(
        name.startswith("frozen") for name in load_file(tmp_path / "c" / "optimizer.safetensors")
    )
    fresh = grouped(other, first_lr=0.1, second_lr=0.2)
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert torch.equal(other.frozen.weight, module.frozen.weight)
    assert other.frozen.weight not in fresh.state


def test_a_parameter_without_state_is_a_fact_to_restore(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    module.first(torch.ones(4)).sum().backward()  # nothing reaches `second`
    optimizer.step()
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    fresh = grouped(other, first_lr=0.1, second_lr=0.2)
    stepped(other, fresh)
    assert other.second.weight in fresh.state
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert not fresh.state.get(other.second.weight)
    assert set(fresh.state[other.first.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    module, other = Two(), Two()
    uc.save(tmp_path / "c", model=module, optimizer=grouped(module, first_lr=0.1, second_lr=0.2))
    fresh = grouped(other, first_lr=7, second_lr=8)
    stepped(other, fresh)
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert not any(fresh.state.values())
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


def test_a_parameter_that_the_saved_optimizer_did_not_have(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = torch.optim.AdamW(module.first.parameters())
    stepped_grads = [p.fill_(0.5) for p in (torch.empty_like(p) for p in module.first.parameters())]
    for param, grad in zip(module.first.parameters(), stepped_grads, strict=True):
        param.grad = grad
    optimizer.step()
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    fresh = torch.optim.AdamW([*other.first.parameters(), *other.second.parameters()])
    with pytest.raises(
        uc.MismatchError,
        match=r"(?s)optimizer:second\.bias: is not in the "
        r"checkpoint.*optimizer:second\.weight: is not",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh, strict=False)
    assert report.missing == ("optimizer:second.bias", "optimizer:second.weight")
    assert torch.equal(
        fresh.state[other.first.weight]["exp_avg"], optimizer.state[module.first.weight]["exp_avg"]
    )


def test_state_that_no_target_needs(tmp_path: Path) -> None:
    module, other = Two(), Two()
    optimizer = grouped(module, first_lr=0.1, second_lr=0.2)
    stepped(module, optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    fresh = torch.optim.AdamW(other.first.parameters())
    with pytest.raises(
        uc.MismatchError,
        match=r"optimizer:second\.weight/exp_avg: is in the checkpoint, requested by no rank",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh, strict=False)
    assert {name.rpartition("/")[0] for name in report.unexpected} == {
        "optimizer:second.bias",
        "optimizer:second.weight",
    }


# forms of state


def test_tied_parameters_have_one_state(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

    module, other = Tied(), Tied()
    optimizer, fresh = (torch.optim.AdamW(one.parameters()) for one in (module, other))
    (module.head.weight**2).sum().backward()
    optimizer.step()
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    assert {
        name.rpartition("/")[0] for name in load_file(tmp_path / "c" / "optimizer.safetensors")
    } == {"embed.weight"}
    load_quietly(tmp_path / "c", other, fresh)
    assert torch.equal(
        fresh.state[other.head.weight]["exp_avg"], optimizer.state[module.embed.weight]["exp_avg"]
    )
    untied = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    apart = torch.optim.AdamW(untied.parameters())
    load_quietly(tmp_path / "c", untied, apart)
    for param in untied.parameters():
        assert torch.equal(
            apart.state[param]["exp_avg"], optimizer.state[module.embed.weight]["exp_avg"]
        )


def test_moments_that_the_next_step_cannot_read(tmp_path: Path) -> None:
    """fp32 moments of a bf16 parameter, into an optimizer that has none yet: torch's step raises,
    torch's load_state_dict casts.
    """
    module = nn.Linear(40, 30).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters())
    for param in module.parameters():
        optimizer.state[param] = {
            "step": torch.tensor(4.0),
            "exp_avg": torch.randn(param.shape),
            "exp_avg_sq": torch.rand(param.shape),
        }
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = nn.Linear(40, 30).bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        uc.MismatchError,
        match=r"bias/exp_avg: checkpoint has dtype F32, target has BF16; pass "
        r"LoadOptions\(cast=True",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert same(other.state_dict(), before)
    assert not fresh.state
    uc.load(tmp_path / "c", model=other, optimizer=fresh, options=uc.LoadOptions(cast=True))
    assert torch.equal(
        fresh.state[other.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"].bfloat16()
    )
    step(other, fresh, 0)
    fused = FusedAdam(other.parameters())
    uc.load(tmp_path / "c", model=other, optimizer=fused)
    assert torch.equal(
        fused.state[other.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"]
    )
    step(other, fused, 0)


@pytest.mark.parametrize("key", ["master_param", "master_weights"])
def test_masters_that_an_optimizer_holds(tmp_path: Path, key: str) -> None:
    module, other = nn.Linear(40, 30).bfloat16(), nn.Linear(40, 30).bfloat16()
    optimizer, fresh = (torch.optim.SGD(one.parameters(), momentum=0.9) for one in (module, other))
    for one, of in ((optimizer, module), (fresh, other)):
        for param in of.parameters():
            one.state[param] = {
                "momentum_buffer": torch.rand(param.shape),
                key: torch.randn(param.shape),
            }
    uc.save(tmp_path / "c", model=module, optimizer=optimizer, master_weights=optimizer)
    assert set(load_file(tmp_path / "c" / "optimizer.safetensors")) == {
        "weight/momentum_buffer",
        "bias/momentum_buffer",
    }
    assert torch.equal(
        load_file(tmp_path / "c" / "master_weights.safetensors")["weight"],
        optimizer.state[module.weight][key],
    )
    memory = fresh.state[other.weight][key].data_ptr()
    load_quietly(tmp_path / "c", other, fresh, master_weights=fresh)
    for ours, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert same(dict(fresh.state[ours]), dict(optimizer.state[theirs]))
    assert fresh.state[other.weight][key].data_ptr() == memory
    with pytest.raises(
        uc.LayoutError,
        match=r"master_weights: got an optimizer without master weights in its state",
    ):
        uc.save(tmp_path / "d", model=module, master_weights=torch.optim.SGD(module.parameters()))


def master(holders: list[Optimizer], param: torch.Tensor) -> torch.Tensor:
    return next(one.state[param]["master_param"] for one in holders if param in one.state)


@pytest.mark.parametrize("holder", ["the optimizer", "another", "of a list"])
def test_masters_are_never_those_of_another_step(tmp_path: Path, holder: str) -> None:
    """They were left out without a word where nothing was said of them: the next step put those of
    the job that loads over the model.
    """
    jobs = []
    for _ in range(2):
        module = nn.Linear(40, 30).bfloat16()
        first, second = (
            torch.optim.SGD([param], momentum=0.9) for param in (module.weight, module.bias)
        )
        whole = torch.optim.SGD(module.parameters(), momentum=0.9)
        holders = {
            "the optimizer": [whole],
            "another": [torch.optim.SGD(module.parameters())],
            "of a list": [first, second],
        }[holder]
        for one in holders:
            for param in one.param_groups[0]["params"]:
                one.state[param] = {"master_param": torch.randn(param.shape)}
        what = {"model": module, "optimizer": [first, second] if holder == "of a list" else whole}
        jobs.append(
            (
                module,
                holders,
                what | ({"master_weights": holders[0]} if holder == "another" else {}),
            )
        )
    (module, holders, what), (other, others, more) = jobs
    uc.save(tmp_path / "c", **what)
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(
            opened["master_weights"]["weight"][...], holders[0].state[module.weight]["master_param"]
        )
    uc.load(tmp_path / "c", **more)
    for theirs, ours in zip(module.parameters(), other.parameters(), strict=True):
        of = [
            next(one.state[param]["master_param"] for one in where if param in one.state)
            for where, param in ((holders, theirs), (others, ours))
        ]
        assert torch.equal(*of)
    uc.save(tmp_path / "d", **what, options=uc.SaveOptions(parts=("model", "optimizer")))
    with uc.open(tmp_path / "d") as opened:
        assert "master_weights" not in opened.parts


# masters that are made at the first step, and state of other classes


class Lazy(torch.optim.SGD):
    """A class that no rule knows: makes masters at its first step, like FusedAdam."""

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


MASTERED: dict[str, Callable[[Any], Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1, master_weights=True),
    "bf16 moments": lambda params: FusedAdam(
        params,
        lr=0.01,
        master_weights=True,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    ),
    "remainders": lambda params: FusedAdam(
        params, lr=0.01, master_weights=True, store_param_remainders=True
    ),
    "unknown class": lambda params: Lazy(params, lr=0.01),
}


def mixed() -> nn.Module:
    """bf16 parameters, and one in fp32."""
    module = model().to(torch.bfloat16)
    module.vector.data = module.vector.data.float()
    return module


@pytest.mark.parametrize("kind", MASTERED)
@pytest.mark.parametrize("state", ["fresh", "warmed"])
@pytest.mark.parametrize("given", ["nothing", "the optimizer", "its parts"])
def test_masters_made_at_the_first_step_are_loaded(
    tmp_path: Path, kind: str, state: str, given: str
) -> None:
    module, other = mixed(), mixed()
    optimizer, target = MASTERED[kind](module.parameters()), MASTERED[kind](other.parameters())
    for number in range(3):
        step(module, optimizer, number)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    for number in range(2 if state == "warmed" else 0):
        step(other, target, 7 + number)
    more = {"master_weights": target} if given == "the optimizer" and kind != "remainders" else {}
    parts = ("model", "optimizer") if given == "its parts" else None
    report = load_quietly(
        tmp_path / "c", other, target, **more, options=uc.LoadOptions(parts=parts)
    )
    assert report.unused == ()
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, target, number)
    assert same(other.state_dict(), module.state_dict())
    assert same(states(other, target), states(module, optimizer))
    assert same(target.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("state", ["fresh", "warmed"])
def test_masters_given_besides_those_of_the_optimizer(tmp_path: Path, state: str) -> None:
    """Only one of two masters could be stored or filled, and the next step would go on from the
    other.
    """
    module, other = mixed(), mixed()
    optimizer, target = (
        FusedAdam(one.parameters(), master_weights=True) for one in (module, other)
    )
    step(module, optimizer, 0)
    masters = {name: param.detach().float() for name, param in module.named_parameters()}
    with pytest.raises(uc.LayoutError, match=r"master_weights.*; omit master_weights="):
        uc.save(tmp_path / "c", model=module, optimizer=optimizer, master_weights=masters)
    assert not (tmp_path / "c").exists()
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    if state == "warmed":
        step(other, target, 7)
    before = states(other, target)
    with pytest.raises(uc.LayoutError, match=r"master_weights.*; omit master_weights="):
        uc.load(tmp_path / "c", model=other, optimizer=target, master_weights=masters)
    assert same(states(other, target), before)


class Wrapped(torch.optim.Optimizer):
    """Has the state and the groups of the optimizer that it steps, as Accelerate's has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Momentum(torch.optim.Optimizer):
    """An optimizer that no table knows, with a name of its own for its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if not self.state[param]:
                self.state[param]["average"] = torch.zeros_like(param)
            self.state[param]["average"].lerp_(param.grad, 0.1)
            param.data.sub_(self.state[param]["average"], alpha=self.param_groups[0]["lr"])
        return None


def test_a_wrapped_optimizer_is_the_one_that_it_steps(tmp_path: Path) -> None:
    """A wrapper has no class that a rule could know; the state is its optimizer's."""
    module, other = model(), model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    step(module, optimizer, 0)
    uc.save(tmp_path / "c", model=module, optimizer=Wrapped(optimizer))
    with pytest.raises(
        uc.MismatchError,
        match=r"momentum_buffer of torch.optim.sgd.SGD; torch.optim.adamw.AdamW reads",
    ):
        uc.load(
            tmp_path / "c", model=other, optimizer=Wrapped(torch.optim.AdamW(other.parameters()))
        )
    target = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    uc.load(tmp_path / "c", model=other, optimizer=Wrapped(target))
    assert same(states(other, target), states(module, optimizer))


def test_a_class_whose_state_is_not_known_before_its_first_step(tmp_path: Path) -> None:
    module, other = model(), model()
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 0)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    before = states(other, Momentum(other.parameters()))
    with pytest.raises(
        uc.MismatchError,
        match=r"AdamW; the state of .*Momentum is unknown before its first step",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=Momentum(other.parameters()))
    assert same(states(other, Momentum(other.parameters())), before)


@pytest.mark.parametrize("stale", [False, True])
def test_adamw_stays_adamw_from_a_checkpoint_of_adam(tmp_path: Path, stale: bool) -> None:
    """As in torch's `load_state_dict`: how weights decay is of the class."""
    module, other = model(), model()
    optimizer, target = (
        torch.optim.Adam(module.parameters(), weight_decay=0.1),
        torch.optim.AdamW(other.parameters()),
    )
    step(module, optimizer, 0)
    if stale:
        step(other, target, 5)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    uc.load(tmp_path / "c", model=other, optimizer=target)
    assert (
        target.param_groups[0]["decoupled_weight_decay"],
        target.param_groups[0]["weight_decay"],
    ) == (True, 0.1)


def test_a_part_may_be_a_module_of_the_model(tmp_path: Path) -> None:
    """Optimizer state of the model's own parameters does not go by a part that holds them too."""
    net = nn.ModuleDict({"ema": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(net.parameters())
    net["ema"](torch.ones(2)).sum().backward()
    optimizer.step()
    options = uc.SaveOptions(parts=("model", "optimizer"))
    uc.save(
        tmp_path / "c", model=net, optimizer=optimizer, parts={"ema": net["ema"]}, options=options
    )
    assert uc.load(tmp_path / "c", model=net, optimizer=optimizer).unused == ()


class Apart(torch.optim.SGD):
    """Keeps masters as apex's FusedAdam does (NVIDIA/apex, apex/optimizers/fused_adam.py): beside
    the groups, from the start.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        groups = self.param_groups
        self.param_groups_master = [
            {"params": [param.detach().clone().float() for param in group["params"]]}
            for group in groups
        ]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group, apart in zip(self.param_groups, self.param_groups_master, strict=True):
            for param, master in zip(group["params"], apart["params"], strict=True):
                master.sub_(param.grad.float(), alpha=group["lr"])
                param.data.copy_(master)
        return loss


def test_masters_beside_the_groups_are_stored_and_loaded(tmp_path: Path) -> None:
    module, other = model().half(), model().half()
    for one in (module, other):
        one.vector.data = one.vector.data.float()
    optimizer, target = Apart(module.parameters()), Apart(other.parameters())
    for number in range(3):
        step(module, optimizer, number)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    load_quietly(tmp_path / "c", other, target)
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, target, number)
    assert same(other.state_dict(), module.state_dict())
    assert same(target.param_groups_master, optimizer.param_groups_master)


@pytest.mark.parametrize("hyperparameters", ["checkpoint", "current"])
def test_a_step_count_of_a_group_is_state(tmp_path: Path, hyperparameters: Any) -> None:
    module, other = mixed(), mixed()
    optimizer, target = (
        MASTERED["FusedAdam"](module.parameters()),
        MASTERED["FusedAdam"](other.parameters()),
    )
    step(module, optimizer, 0)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    load_quietly(
        tmp_path / "c", other, target, options=uc.LoadOptions(hyperparameters=hyperparameters)
    )
    step(module, optimizer, 1)
    step(other, target, 1)
    assert same(other.state_dict(), module.state_dict())


def test_masters_without_a_place_are_refused_before_a_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, other = mixed(), mixed()
    optimizer, plain = (
        MASTERED["FusedAdam"](module.parameters()),
        FusedAdam(other.parameters(), lr=0.01),
    )
    step(module, optimizer, 0)
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
    report = uc.load(
        tmp_path / "c",
        model=other,
        optimizer=plain,
        options=uc.LoadOptions(parts=("model", "optimizer")),
    )
    assert report.unused == ("master_weights",)
    assert "no rank loaded master_weights from the checkpoint" not in caplog.text  # chosen
    masters = {
        name: torch.empty(param.shape)
        for name, param in other.named_parameters()
        if name != "vector"
    }
    assert (
        uc.load(tmp_path / "c", model=other, optimizer=plain, master_weights=masters).unused == ()
    )
    assert torch.equal(masters["matrix"], optimizer.state[module.matrix]["master_param"])
    full = model()
    assert (
        uc.load(tmp_path / "c", model=full, optimizer=torch.optim.AdamW(full.parameters())).unused
        == ()
    )
    assert torch.equal(full.matrix, optimizer.state[module.matrix]["master_param"])
    step(full, torch.optim.AdamW(full.parameters()), 1)


@pytest.mark.parametrize("first", ["AdamW", "FusedAdam", "Adam"])
@pytest.mark.parametrize("then", ["AdamW", "FusedAdam", "Adam", "AdamW fused"])
def test_classes_with_the_same_state_go_on(tmp_path: Path, first: str, then: str) -> None:
    """Moments and step count arrive, wherever the class keeps them."""
    makers = MAKERS | {"FusedAdam": lambda ps: FusedAdam(ps, lr=0.1)}
    module, other = model(), model()
    optimizer, target = (
        makers[first](list(module.parameters())),
        makers[then](list(other.parameters())),
    )
    for number in range(3):
        step(module, optimizer, number)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    load_quietly(tmp_path / "c", other, target)
    for ours, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(target.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        count = target.state[ours].get("step", target.param_groups[0].get("step"))
        assert int(count) == 3
        assert torch.is_tensor(count) == (then != "FusedAdam")
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
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("warmed", [False, True])
def test_state_of_another_class_is_refused(
    tmp_path: Path, case: str, warmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, then, options, text = OTHERS[case]
    module, optimizer = trained(first)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = model()
    target = MAKERS[then](list(other.parameters()))
    for number in range(2 * warmed):
        step(other, target, number)
    before = copy.deepcopy(
        (other.state_dict(), states(other, target), target.param_groups[0]["lr"])
    )
    with pytest.raises(uc.MismatchError, match=text):
        uc.load(tmp_path / "c", model=other, optimizer=target, options=uc.LoadOptions(**options))
    assert same((other.state_dict(), states(other, target), target.param_groups[0]["lr"]), before)
    report = uc.load(
        tmp_path / "c",
        model=other,
        optimizer=target,
        strict=False,
        options=uc.LoadOptions(**options),
    )
    assert same(other.state_dict(), module.state_dict())
    assert same(states(other, target), before[1])
    assert report.wrong
    assert "strict=False, which left these unchanged" in caplog.text
    step(other, target, 9)


@pytest.mark.parametrize(
    ("first", "then"),
    [("SGD", "SGD momentum"), ("SGD momentum", "SGD fused"), ("AdamW amsgrad", "AdamW")],
)
def test_a_class_reads_its_own_state_under_other_options(
    tmp_path: Path, first: str, then: str
) -> None:
    module, optimizer = trained(first)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = model()
    target = MAKERS[then](list(other.parameters()))
    load_quietly(tmp_path / "c", other, target, options=uc.LoadOptions(hyperparameters="current"))
    step(other, target, 3)


def test_a_parameter_of_another_shape_keeps_its_state(tmp_path: Path) -> None:
    """A larger vocabulary with strict=False: the state of the rows that were there does not fit
    either.
    """
    module, other = nn.Linear(4, 3), nn.Linear(4, 5)
    optimizer, target = (
        torch.optim.AdamW(module.parameters()),
        torch.optim.AdamW(other.parameters()),
    )
    step(module, optimizer, 0)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    step(other, target, 0)
    before = copy.deepcopy(states(other, target))
    with pytest.raises(
        uc.MismatchError,
        match=r"optimizer:bias/exp_avg: checkpoint has shape \(3,\), target has \(5,\)",
    ):
        uc.load(tmp_path / "c", model=other, optimizer=target)
    uc.load(tmp_path / "c", model=other, optimizer=target, strict=False)
    assert same(states(other, target), before)
    step(other, target, 1)
    fresh = torch.optim.AdamW(other.parameters())
    uc.load(tmp_path / "c", model=other, optimizer=fresh, strict=False)
    assert not fresh.state
    step(other, fresh, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_scales_outside_the_state_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    module = model()
    optimizer = FusedAdam(module.parameters(), exp_avg_dtype=dtype)
    with pytest.raises(
        uc.LayoutError,
        match="FusedAdam: keeps the scales of exp_avg outside of its state; use float32 or "
        "bfloat16",
    ):
        uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    assert not (tmp_path / "c").exists()


def test_optimizers_whose_state_would_be_lost_are_refused(tmp_path: Path) -> None:
    module = model()
    one, two = (
        torch.optim.AdamW(module.parameters()),
        torch.optim.AdamW([next(module.parameters())]),
    )
    with pytest.raises(
        uc.LayoutError, match=r"belongs to two optimizers, but a checkpoint stores its state once"
    ):
        uc.save(tmp_path / "c", model=module, optimizer=[one, two])
    uc.save(tmp_path / "c", model=module, optimizer=one)
    with pytest.raises(
        uc.LayoutError, match=r"belongs to two optimizers, but a checkpoint stores its state once"
    ):
        uc.load(tmp_path / "c", model=module, optimizer=[one, two])
    with pytest.raises(uc.LayoutError, match=r"optimizer: got a str, expected optimizers"):
        uc.save(tmp_path / "d", model=module, optimizer="adam")


def test_an_optimizer_that_shards_its_own_state_is_refused(tmp_path: Path) -> None:
    """It was saved as one without any state, and reported as good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    module = model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.AdamW)
        with pytest.raises(
            uc.LayoutError, match=r"ZeroRedundancyOptimizer: distributes its state itself"
        ):
            uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "c").exists()


def test_a_model_before_its_first_forward_pass_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        uc.LayoutError, match=r"^0\.weight: has no shape yet; run the model's first forward pass"
    ):
        uc.save(tmp_path / "c", model=nn.Sequential(nn.LazyLinear(3)))


def test_optimizer_state_as_a_dict(tmp_path: Path) -> None:
    module, optimizer = trained("AdamW")
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    target = {
        f"{fqn}/{name}": torch.zeros_like(t)
        for fqn, p in module.named_parameters()
        for name, t in optimizer.state[p].items()
    }
    uc.load(tmp_path / "c", optimizer=target)
    for fqn, param in module.named_parameters():
        assert all(
            torch.equal(target[f"{fqn}/{name}"], tensor)
            for name, tensor in optimizer.state[param].items()
        )


def test_an_optimizer_needs_its_model(tmp_path: Path) -> None:
    module, optimizer = trained("AdamW")
    with pytest.raises(uc.LayoutError, match=r"optimizer.*parameter"):
        uc.save(tmp_path / "c", optimizer=optimizer)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    with pytest.raises(
        uc.LayoutError,
        match=r"optimizer: its parameters have no names without their model; pass `model` too",
    ):
        uc.load(tmp_path / "c", optimizer=optimizer)


def test_state_that_a_job_adds_itself_is_loaded(tmp_path: Path) -> None:
    """The class is the same, so its step reads what it read when it was saved."""
    module, optimizer = trained("SGD momentum")
    for param in module.parameters():
        optimizer.state[param]["history"] = torch.ones(2)
    uc.save(tmp_path / "c", model=module, optimizer=optimizer)
    other = model()
    fresh = MAKERS["SGD momentum"](list(other.parameters()))
    load_quietly(tmp_path / "c", other, fresh)
    assert same(states(other, fresh), states(module, optimizer))

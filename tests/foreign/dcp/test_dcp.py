"""DCP folders match `dcp.load`, jobs resume from them, damaged and hostile ones are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import unified_ckpt as uc
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.source_cases import Hostile
from tests.support.torch_training import train
from unified_ckpt.foreign.dcp.source import key_for_path

Net = tuple[nn.Module, torch.optim.Optimizer]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.2, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups)


def sum_loss(model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    x = torch.randn(4, 6, generator=draw)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "step": 3, "extra": {"seen": (1, 2)}}


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return {"model": get_model_state_dict(model), "optim": state}


class AppState(Stateful):
    """The stateful wrapper of PyTorch's DCP recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.model, self.optimizer, self.name = model, optimizer, name

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, self.name: state, "step": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state[self.name],
        )


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"app": AppState(model, optimizer, "optim")}


def wrapped_with_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "train_state": AppState(model, optimizer, "optimizer"),
        "extra": {"seen": (1, 2)},
        "step": 5,
    }


def bare(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Save like torchtitan: the model's tensors without a key."""
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return {
        **get_model_state_dict(model),
        "optimizer": state,
        "train_state": {"step": torch.tensor(3)},
    }


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Save names as they are in a compiled model, which `get_state_dict` would shorten."""
    state = nested(model, optimizer)
    optim = state["optimizer"]
    for group in optim["param_groups"]:
        group["params"] = [f"_orig_mod.{name}" for name in group["params"]]
    optim["state"] = {f"_orig_mod.{name}": value for name, value in optim["state"].items()}
    weights = {f"_orig_mod.{name}": tensor for name, tensor in state["model"].items()}
    return state | {"model": weights}


@pytest.mark.parametrize("form", [nested, flat, bare, compiled, wrapped, wrapped_with_step])
def test_resumed_job_matches_uninterrupted_job(
    tmp_path: Path, form: Callable[..., dict[str, Any]]
) -> None:
    model, optimizer = net(0)
    train(model, optimizer, sum_loss, 0, 3)
    save_dcp(form(model, optimizer), tmp_path / "c")
    expected = train(model, optimizer, sum_loss, 3, 3)
    other, fresh = net(1)
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert train(other, fresh, sum_loss, 3, 3) == expected
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    if form not in (flat, bare):
        assert report.step == (5 if form is wrapped_with_step else 3)
    if form in (nested, compiled, wrapped_with_step):
        assert report.extra["extra"] == {"seen": (1, 2)}
    uc.save(tmp_path / "ours", model=other, optimizer=fresh, step=6)  # the next save is unified
    assert uc.verify(tmp_path / "ours", deep=True).ok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_dcp(nested(*net(0)), tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.incident("pytorch#189308")
def test_hostile_object_is_refused_and_not_executed(tmp_path: Path) -> None:
    save_dcp(
        {"model": {"w": torch.ones(2)}, "extra": {"x": Hostile(tmp_path / "mark")}}, tmp_path / "c"
    )
    with pytest.raises(
        uc.FormatError,
        match=r"extra.x: asks for classes that are not loaded from files(.|\n)*system",
    ):
        uc.open(tmp_path / "c")
    assert not (tmp_path / "mark").exists()


def doubled(levels: int) -> Any:
    """Return a value of which each level contains the previous one twice."""
    tree: Any = ["x"]
    for _ in range(levels):
        tree = [tree, tree]
    return tree


def in_a_path(metadata: Any) -> None:
    metadata.planner_data["model.0.weight"] = ("model", doubled(40))


def in_a_file_name(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = doubled(40)


def in_a_transform(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = doubled(40)


def in_a_size(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks[0].sizes = doubled(40)


@pytest.mark.parametrize("place", [in_a_path, in_a_file_name, in_a_transform, in_a_size])
def test_exponential_metadata_is_refused(folder: Path, place: Callable[[Any], None]) -> None:
    """Once took more than 40 s, with growing memory."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    place(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        uc.FormatError,
        match=r"\.metadata: expected metadata of "
        r"torch.distributed.checkpoint|transform_descriptors",
    ) as caught:
        uc.open(folder)
    assert len(str(caught.value)) < 1000


PLACES: list[tuple[tuple[str | int, ...], bool, tuple[str, str] | None]] = [
    (("model", "a.weight"), False, ("model", "a.weight")),
    (("a.weight",), False, ("model", "a.weight")),
    (("optimizer", "state", "a.weight", "exp_avg"), False, ("optimizer", "a.weight/exp_avg")),
    (("optim", "state.a.weight.exp_avg"), False, ("optimizer", "a.weight/exp_avg")),
    (("optimizer", "param_groups", 0, "lr"), True, None),
    (("optimizer", "state", "a.weight", "GG", 0), False, None),
    (("optim", "state.a.weight.GG", 0), False, None),
    (("ema", "a.weight"), False, ("ema", "a.weight")),
    (("step",), True, None),
]


@pytest.mark.parametrize(("path", "scalar", "place"), PLACES)
def test_key_for_path(
    path: tuple[str | int, ...], scalar: bool, place: tuple[str, str] | None
) -> None:
    assert key_for_path(path, scalar=scalar) == place


class Counting(nn.Linear):
    """A module with extra state."""

    count: Any = 0

    def get_extra_state(self) -> Any:
        return {
            "count": self.count,
            "scale": {"amax": torch.arange(3.0)},
            "history": [torch.ones(1), torch.zeros(1)],
        }

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert torch.equal(state["scale"]["amax"], torch.arange(3.0))
        assert [tensor.item() for tensor in state["history"]] == [1.0, 0.0]


@pytest.mark.parametrize("under", [("model",), ()])
def test_module_extra_state_is_restored(tmp_path: Path, under: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
    model[1].count = 4
    save_dcp({"model": model.state_dict()} if under else model.state_dict(), tmp_path / "c")
    uc.convert(tmp_path / "c", tmp_path / "ours")
    for path in (tmp_path / "c", tmp_path / "ours"):
        other = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
        report = uc.load(path, model=other)
        assert other[1].count == 4
        assert report.extra is None


def test_lists_stay_lists(tmp_path: Path) -> None:
    schedulers, seen = [{"last_epoch": 3}, {"last_epoch": 4}], [{"a": torch.ones(2)}, {"b": 5}]
    state = {"model": {"w": torch.ones(2)}, "schedulers": schedulers, "deep": {"seen": seen}}
    save_dcp(state, tmp_path / "c")
    with uc.open(tmp_path / "c") as opened:
        assert str(opened.extra) == str({"schedulers": schedulers, "deep": {"seen": seen}})
        assert opened.parts == ("model",)


class Average:
    """Has tensors and other values in its state, as averages of weights and data loaders do."""

    def __init__(self, decay: float, fill: float) -> None:
        self.decay, self.weights = decay, {"0.weight": torch.full((2, 3), fill)}

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def objects(milestones: list[int], *average: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones),
        ],
        [2],
    )
    return {"average": Average(*average), "random": uc.RandomStates(), "scheduler": scheduler}


def test_objects_get_their_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, their tensors were a part, and other values were all that they got."""
    model, saved = nn.Linear(3, 2), objects([3, 3, 5], 0.9, 2.0)
    torch.manual_seed(7)
    save_dcp({"model": model, **saved}, tmp_path / "c")
    drawn = torch.rand(3)
    uc.convert(tmp_path / "c", tmp_path / "ours")
    for path in (tmp_path / "c", tmp_path / "ours"):
        loaded = objects([4], 0.5, 0.0)
        uc.load(path, model=nn.Linear(3, 2), extra=loaded)
        assert torch.equal(torch.rand(3), drawn)
        assert str(loaded["average"].state_dict()) == str(saved["average"].state_dict())
        assert loaded["scheduler"].state_dict() == saved["scheduler"].state_dict()
        (_, multi_step) = loaded["scheduler"]._schedulers
        assert sorted(multi_step.milestones.elements()) == [3, 3, 5]
    monkeypatch.setattr("unified_ckpt.foreign.dcp.source._MAX_OBJECT_NBYTES", 0)
    other = nn.Linear(3, 2)
    before, average = other.weight.clone(), Average(0.5, 0.0)
    with pytest.raises(uc.MismatchError, match=r"extra.average: .* as the part average"):
        uc.load(tmp_path / "c", model=other, extra={"average": average})
    assert torch.equal(other.weight, before)
    uc.load(tmp_path / "c", model=other, parts={"average": {"weights.0.weight": before}})
    assert torch.equal(before, saved["average"].weights["0.weight"])


class Preconditioned(torch.optim.SGD):
    """Keeps lists and dicts of tensors in its state, like SOAP and Shampoo."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            last = state["GG"][0] if state else torch.zeros(2)
            state["GG"], state["inner"] = [last + param.sum().detach(), []], {"n": {0: len(state)}}
        return super().step(closure)


def test_containers_in_optimizer_state_are_restored(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Preconditioned(model.parameters(), lr=torch.tensor(0.1))
    train(model, optimizer, lambda net, draw: net(torch.randn(4, 3, generator=draw)).sum(), 0, 2)
    weights, state = get_state_dict(model, optimizer)
    state["param_groups"][0]["bounds"] = [torch.tensor(1.0), 2.0]
    save_dcp({"model": weights, "optimizer": state}, tmp_path / "c")
    uc.convert(tmp_path / "c", tmp_path / "ours")
    uc.convert(tmp_path / "ours", tmp_path / "again", to="dcp")
    for path in (tmp_path / "c", tmp_path / "ours", tmp_path / "again"):
        other = nn.Linear(3, 2)
        fresh = Preconditioned(other.parameters(), lr=0.5)
        uc.load(path, model=other, optimizer=fresh)
        assert str(fresh.param_groups[0]["bounds"]) == "[tensor(1.), 2.0]"
        for param, stored in zip(other.parameters(), model.parameters(), strict=True):
            actual, expected = fresh.state[param], optimizer.state[stored]
            assert torch.equal(actual["GG"][0], expected["GG"][0])
            assert actual["GG"][1:] == [[]]
            assert list(actual["inner"]["n"].values()) == [2]


def test_scalar_parameter_of_unnamed_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.logit_scale = nn.Parameter(torch.tensor(2.5))
    save_dcp({**model.state_dict(), "step": torch.tensor(3)}, tmp_path / "c")
    other = nn.Sequential(nn.Linear(2, 2))
    other.logit_scale = nn.Parameter(torch.tensor(0.0))
    report = uc.load(tmp_path / "c", model=other)
    assert other.logit_scale == 2.5
    assert report.extra == {"step": torch.tensor(3)}


def test_indexed_optimizer_is_refused_and_model_is_read(tmp_path: Path) -> None:
    """Names in a `ParameterList` are numbers too, and may differ from positions."""
    model = nn.ParameterList([nn.Parameter(torch.full((3,), float(number))) for number in range(3)])
    optimizer = torch.optim.AdamW([model[2], model[0], model[1]])
    sum(number * param.sum() for number, param in enumerate(model)).backward()  # type: ignore[union-attr]
    optimizer.step()
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    other = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(3)])
    with pytest.raises(
        uc.FormatError, match=r"optimizer: got optimizer state by position(.*)get_state_dict"
    ):
        uc.load(tmp_path / "c", model=other, optimizer=torch.optim.AdamW(other.parameters()))
    with pytest.raises(uc.FormatError, match=r"optimizer: got optimizer state by position"):
        uc.convert(tmp_path / "c", tmp_path / "ours")
    uc.load(tmp_path / "c", model=other)
    assert torch.equal(other[2], model[2])
    uc.convert(tmp_path / "c", tmp_path / "ours", parts=("model",))

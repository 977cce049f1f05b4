"""DCP folders match `dcp.load`, jobs resume from them, damaged and hostile ones are refused."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from unified_ckpt.cli.main import main
from unified_ckpt.sources.pytorch.dcp import key_for_path

Net = tuple[nn.Module, torch.optim.Optimizer]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.2, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Saving without distributed", which is meant
        dcp.save(state, checkpoint_id=str(path), no_dist=True)


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "step": 3, "extra": {"seen": (1, 2)}}


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return {"model": get_model_state_dict(model), "optim": state}


class AppState(Stateful):
    """As in PyTorch's recipe for torch.distributed.checkpoint."""

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
    """As in torchtitan: the model's tensors without a key."""
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return {
        **get_model_state_dict(model),
        "optimizer": state,
        "train_state": {"step": torch.tensor(3)},
    }


@pytest.mark.parametrize("form", [nested, flat, bare, wrapped, wrapped_with_step])
def test_resumed_job_matches_uninterrupted_job(
    tmp_path: Path, form: Callable[..., dict[str, Any]]
) -> None:
    model, optimizer = net(0)
    train(model, optimizer, 0, 3)
    save(form(model, optimizer), tmp_path / "c")
    expected = train(model, optimizer, 3, 3)
    other, fresh = net(1)
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert train(other, fresh, 3, 3) == expected
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    if form not in (flat, bare):
        assert report.step == (5 if form is wrapped_with_step else 3)
    if form in (nested, wrapped_with_step):
        assert report.extra["extra"] == {"seen": (1, 2)}
    uc.save(tmp_path / "ours", model=other, optimizer=fresh, step=6)  # the next save is unified
    assert uc.verify(tmp_path / "ours", deep=True).ok


def test_open_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = net(0)
    train(model, optimizer, 0, 1)
    save(nested(model, optimizer), tmp_path / "c")
    with uc.open(tmp_path / "c") as source:
        assert source.format == "dcp"
        assert source.parts == ("model", "optimizer")
        assert torch.equal(
            source["model"]["0.weight"][1:3, 2:5], model.state_dict()["0.weight"][1:3, 2:5]
        )
        assert source["optimizer"]["0.weight/step"][...] == 1
    assert main(["inspect", str(tmp_path / "c")]) == 0
    output = capsys.readouterr().out
    assert "torch.distributed.checkpoint" in output
    assert "F32 [5, 6]" in output


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "half": torch.arange(7).to(torch.bfloat16),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "bool": torch.tensor([True, False]),
        "small": torch.arange(5).to(torch.float8_e4m3fn),
    }
    save({"model": dict(tensors)}, tmp_path / "c")
    with uc.open(tmp_path / "c") as source:
        for name, tensor in tensors.items():
            actual = source["model"][name][...]
            assert actual.dtype == tensor.dtype
            assert actual.shape == tensor.shape
            assert torch.equal(actual.float(), tensor.float())


def test_other_model_is_a_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = net(0)
    train(model, optimizer, 0, 1)
    save(nested(model, optimizer), tmp_path / "c")
    other = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(uc.MismatchError, match=r"1.weight: is not in the checkpoint"):
        uc.load(tmp_path / "c", model=other)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(nested(*net(0)), tmp_path / "c")
    return tmp_path / "c"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def test_missing_file_is_named_with_its_entries(folder: Path) -> None:
    shards(folder)[0].unlink()
    with pytest.raises(uc.IncompleteError, match=r"__0_\d.distcp: is missing(.|\n)*model"):
        uc.load(folder, model=net(1)[0])


def test_truncated_file_is_named(folder: Path) -> None:
    path = shards(folder)[-1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(uc.IncompleteError, match="is truncated"):
        uc.load(folder, model=net(1)[0])


def test_damaged_archive_is_named(folder: Path) -> None:
    for path in shards(folder):
        body = path.read_bytes()
        path.write_bytes(b"\0" * len(body))
    with pytest.raises(uc.FormatError, match=r"distcp"):
        uc.load(folder, model=net(1)[0])


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_hostile_metadata_is_refused_and_not_executed(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Hostile(tmp_path / "mark")}))
    with pytest.raises(uc.FormatError, match=r"posix\.system"):
        uc.open(folder)
    assert not (tmp_path / "mark").exists()


def test_hostile_object_is_refused_and_not_executed(tmp_path: Path) -> None:
    save(
        {"model": {"w": torch.ones(2)}, "extra": {"x": Hostile(tmp_path / "mark")}}, tmp_path / "c"
    )
    with pytest.raises(
        uc.FormatError,
        match=r"extra.x: asks for classes that are not loaded from files(.|\n)*system",
    ):
        uc.open(tmp_path / "c")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("cut", [0, 1, 40, 400])
def test_damaged_metadata_is_named(folder: Path, cut: int) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(uc.FormatError, match=r"\.metadata"):
        uc.open(folder)


def doubled(levels: int) -> Any:
    """Each level contains the previous one twice."""
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
    """Bug: more than 40 s, with growing memory."""
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

    seen: Any = 0

    def get_extra_state(self) -> Any:
        return {
            "seen": self.seen,
            "scale": {"amax": torch.arange(3.0)},
            "history": [torch.ones(1), torch.zeros(1)],
        }

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]
        assert torch.equal(state["scale"]["amax"], torch.arange(3.0))
        assert [tensor.item() for tensor in state["history"]] == [1.0, 0.0]


@pytest.mark.parametrize("under", [("model",), ()])
def test_module_extra_state_is_restored(tmp_path: Path, under: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
    model[1].seen = 4
    save({"model": model.state_dict()} if under else model.state_dict(), tmp_path / "c")
    uc.convert(tmp_path / "c", tmp_path / "ours")
    for path in (tmp_path / "c", tmp_path / "ours"):
        other = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))
        report = uc.load(path, model=other)
        assert other[1].seen == 4
        assert report.extra is None


def test_scalar_parameter_of_unnamed_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.logit_scale = nn.Parameter(torch.tensor(2.5))
    save({**model.state_dict(), "step": torch.tensor(3)}, tmp_path / "c")
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
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
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

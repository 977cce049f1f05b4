"""`LoadOptions.parts`: other parts are neither read nor changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.runtime.torch_state.optimizers import FusedAdam
from unified_ckpt.runtime.comm.comm import Comm


class Net(torch.nn.Linear):
    def __init__(self, note: str) -> None:
        super().__init__(8, 8)
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def trained_net(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(f"of {seed}")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (seed + 1))
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net, optimizer = trained_net(0)
    options = uc.SaveOptions(fsync=False)
    uc.save(tmp_path / "c", model=net, optimizer=optimizer, parts={"ema": net}, options=options)
    return tmp_path / "c"


def state_of(net: Net, optimizer: torch.optim.Optimizer, ema: Net) -> dict[str, Any]:
    """A copy of each part."""
    return copy.deepcopy(
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": ema.state_dict(),
        }
    )


@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
def test_one_part_alone(folder: Path, part: str) -> None:
    """Also of an optimizer, whose names are those of the model."""
    saved, job = trained_net(0), (*trained_net(1), Net("ema"))
    before, right = state_of(*job), state_of(*saved, saved[0])
    net, optimizer, ema = job
    report = uc.load(
        folder,
        model=net,
        optimizer=optimizer,
        parts={"ema": ema},
        options=uc.LoadOptions(parts=(part,)),
    )
    assert same(state_of(*job), before | {part: right[part]})
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    weights = sum(param.nbytes for param in net.parameters())
    assert report.bytes_read == (moments if part == "optimizer" else weights)
    assert report.missing == report.unexpected == ()


def test_part_without_target_is_an_error(folder: Path) -> None:
    net, optimizer = trained_net(1)
    with pytest.raises(
        uc.LayoutError,
        match="'optimzer' has no target in this load; expected some of model, optimizer",
    ):
        uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("optimzer",)))


class Scheduler:
    def state_dict(self) -> dict[str, int]:
        return {"step": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"step": 3}


@pytest.mark.incident("verl#7953")
def test_unused_parts_and_objects_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else reveals that the job forgot a scheduler or an average."""
    caplog.set_level("INFO")
    net, optimizer = trained_net(0)
    every: dict[str, Any] = {
        "model": net,
        "optimizer": optimizer,
        "parts": {"ema": net},
        "extra": {"plan": [Scheduler()], "note": "plain"},
        "rank_extra": {"loader": Scheduler()},
    }
    uc.save(tmp_path / "c", **every)
    uc.convert(tmp_path / "c", tmp_path / "d")
    objects = ("ema", "extra:plan[0]", "rank_extra:loader")
    model_only = uc.LoadOptions(parts=("model",))
    cases: list[tuple[str, dict[str, Any], tuple[str, ...], list[str]]] = [
        ("c", {"model": net, "optimizer": optimizer}, objects, ["WARNING"]),
        ("d", {"model": net, "optimizer": optimizer}, objects, ["WARNING"]),
        ("c", {"model": net}, ("ema", "optimizer", *objects[1:]), ["INFO"]),
        ("c", every, (), []),
        ("c", every | {"options": model_only}, ("ema", "optimizer"), ["INFO"]),
    ]
    for name, arguments, unused, levels in cases:
        caplog.clear()
        assert uc.load(tmp_path / name, **arguments).unused == unused
        records = [entry for entry in caplog.records if "no rank loaded" in entry.message]
        assert [entry.levelname for entry in records] == levels
        assert all(f"no rank loaded {', '.join(unused)} from" in e.message for e in records)


def test_non_strict_load_warns_of_unchanged_targets(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = {f"w{number}": torch.zeros(2) for number in range(100)}
    report = uc.load(folder, model=target | {"weight": torch.zeros(9, 8)}, strict=False)
    assert len(report.missing) == 100
    (record,) = [entry for entry in caplog.records if entry.levelname == "WARNING"]
    assert "strict=False, which left these unchanged (102)" in record.message
    assert "model:weight: checkpoint has shape (8, 8), target has (9, 8)" in record.message
    assert len(record.message.splitlines()) < 30


@pytest.mark.parametrize("shared", [True, False])
def test_masters_and_objects_are_joined_over_ranks(tmp_path: Path, shared: bool) -> None:
    """Each rank loads the model and some masters; one rank loads the scheduler.

    Whatever any rank loaded is not reported as unused.
    """
    names = ("a", "b")
    model = {name: torch.ones(4, dtype=torch.bfloat16) for name in names}
    masters = {name: torch.full((4,), 1.001) for name in names}
    moments = {f"{name}/exp_avg": torch.ones(4) for name in names}
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=moments,
        master_weights=masters,
        parts={"ema": model},
        extra={"plan": Scheduler(), "other": Scheduler()},
    )

    def act(comm: Comm) -> tuple[str, ...] | str:
        name = "a" if comm.rank == 0 or not shared else "b"
        local_masters = {name: torch.zeros(4)}
        try:
            report = make_checkpointer(comm).load(
                tmp_path / "c",
                model={name: torch.zeros(4, dtype=torch.bfloat16) for name in names},
                optimizer={key: torch.zeros(4) for key in moments},
                master_weights=local_masters,
                extra={"plan": Scheduler()} if comm.rank == 1 else None,
            )
        except uc.MismatchError as error:
            return str(error)
        assert torch.equal(local_masters[name], masters[name])
        return report.unused

    first, second = run_ranks(2, act)
    assert first == second
    if shared:
        assert first == ("ema", "extra:other")
    else:
        assert "master_weights: b: the checkpoint's master weights are more precise" in first


# extra state of modules


def net(seed: int = 1) -> Net:
    return trained_net(seed)[0]


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in net(seed).named_parameters()}


def shared(seed: int = 1) -> torch.nn.Module:
    module = net(seed)
    return torch.nn.ModuleDict({"a": module, "b": module})


def plain() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


def hub_folder(path: Path) -> None:
    path.mkdir()
    save_file(tensors(0), path / "model.safetensors")


def converted(path: Path) -> None:
    hub_folder(path.with_name("hub"))
    uc.convert(path.with_name("hub"), path)


def net_with_ema(path: Path) -> None:
    uc.save(path, model=net(0), parts={"ema": net(0)})


STATE = "modules:_extra_state"
# how the checkpoint is made, the part that is loaded, its target, and what the report names where
EXTRA_STATES: dict[str, tuple[Callable[[Path], None], str, Callable[[], Any], str, str]] = {
    "not saved": (lambda path: uc.save(path, model=tensors()), "model", net, "missing", STATE),
    "no owner": (net_with_ema, "model", plain, "unexpected", STATE),
    "no owner in a part": (net_with_ema, "ema", plain, "unexpected", "modules:ema._extra_state"),
    "dict of tensors": (net_with_ema, "model", tensors, "unused", STATE),
    "part not requested": (net_with_ema, "ema", net, "unused", "model"),
    "Hugging Face": (hub_folder, "model", net, "notes", "_extra_state"),
    "converted": (converted, "model", net, "notes", "_extra_state"),
    "shared module": (lambda path: uc.save(path, model=shared(0)), "model", shared, "", STATE),
}


@pytest.mark.parametrize("case", EXTRA_STATES)
def test_extra_state_of_modules_without_counterpart(tmp_path: Path, case: str) -> None:
    """It follows the rule of tensors; only a format that cannot have it is no error."""
    make, part, target_of, field, name = EXTRA_STATES[case]
    make(tmp_path / "c")
    target = target_of()
    arguments = {"model": target} if part == "model" else {"parts": {part: target}}
    before = copy.deepcopy(target)
    is_error = field in ("missing", "unexpected")
    if is_error:
        with pytest.raises(uc.MismatchError, match=name) as error:
            uc.load(tmp_path / "c", **arguments)
        assert getattr(error.value, field) == (name,)
        assert same(target.state_dict(), before.state_dict())
    report = uc.load(tmp_path / "c", **arguments, strict=not is_error)
    for kind in ("missing", "unexpected", "unused", "notes"):
        assert any(name in text for text in getattr(report, kind)) == (kind == field), kind


def test_state_stays_of_a_parameter_that_was_not_saved(tmp_path: Path) -> None:
    def job(names: str, value: float) -> tuple[torch.nn.ParameterDict, FusedAdam]:
        tensors = {name: torch.full((3,), value).bfloat16() for name in names}
        model = torch.nn.ParameterDict(tensors)
        optimizer = FusedAdam(model.values(), master_weights=True)
        optimizer.param_groups[0]["step"] = 4
        for parameter in model.values():
            optimizer.initialize_state(parameter, False)
            optimizer.state[parameter]["exp_avg"].fill_(value)
        return model, optimizer

    (model, optimizer), (other, target) = job("a", 1.0), job("ab", 2.0)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer)
    report = uc.load(tmp_path / "c", model=other, optimizer=target, strict=False)
    assert "master_weights:b" in report.missing
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = target.state[other[name]]
        for tensor in (other[name], state["exp_avg"], state["master_param"]):
            assert tensor.tolist() == [value] * 3, name


def test_masters_stay_if_their_model_does(tmp_path: Path) -> None:
    """Else the next step would overwrite the model from the checkpoint's."""

    def job() -> tuple[torch.nn.Module, FusedAdam, dict[str, torch.Tensor]]:
        model = torch.nn.Linear(4, 3).bfloat16()
        optimizer = FusedAdam(model.parameters(), master_weights=True)
        for parameter in model.parameters():
            optimizer.initialize_state(parameter, False)
        return model, optimizer, {"w": torch.randn(3)}

    (model, optimizer, ema), (other, target, other_ema) = job(), job()
    uc.save(tmp_path / "c", model=model, optimizer=optimizer, parts={"ema": ema})
    masters = {
        parameter: state["master_param"].clone() for parameter, state in target.state.items()
    }
    options = uc.LoadOptions(parts=("ema",))
    uc.load(
        tmp_path / "c", model=other, optimizer=target, parts={"ema": other_ema}, options=options
    )
    assert torch.equal(other_ema["w"], ema["w"])
    for parameter, master in masters.items():
        assert torch.equal(target.state[parameter]["master_param"], master)

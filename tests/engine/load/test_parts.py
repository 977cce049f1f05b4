"""`LoadOptions.parts`: other parts are neither read nor changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, run_ranks


class Net(torch.nn.Linear):
    def __init__(self, note: str) -> None:
        super().__init__(8, 8)
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def made(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(f"of {seed}")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * (seed + 1))
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net, optimizer = made(0)
    uc.save(
        tmp_path / "c",
        model=net,
        optimizer=optimizer,
        parts={"ema": net},
        options=uc.SaveOptions(fsync=False),
    )
    return tmp_path / "c"


def test_optimizer_alone_with_names_of_the_model(folder: Path) -> None:
    (saved, saved_optimizer), (net, optimizer) = made(0), made(1)
    before = net.weight.detach().clone()
    report = uc.load(
        folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("optimizer",))
    )
    assert torch.equal(net.weight, before)
    assert net.note == "of 1"
    assert torch.equal(
        optimizer.state[net.weight]["exp_avg"], saved_optimizer.state[saved.weight]["exp_avg"]
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert report.bytes_read == sum(
        value.nbytes for state in optimizer.state.values() for value in state.values()
    )
    assert report.missing == report.unexpected == ()


def test_the_model_alone_leaves_the_optimizer(folder: Path) -> None:
    (saved, _), (net, optimizer) = made(0), made(1)
    moment = optimizer.state[net.weight]["exp_avg"].clone()
    uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("model",)))
    assert torch.equal(net.weight, saved.weight)
    assert net.note == "of 0"
    assert torch.equal(optimizer.state[net.weight]["exp_avg"], moment)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_extra_part_alone(folder: Path) -> None:
    (saved, _), (net, _), ema = made(0), made(1), Net("ema")
    before = net.weight.detach().clone()
    uc.load(folder, model=net, parts={"ema": ema}, options=uc.LoadOptions(parts=("ema",)))
    assert torch.equal(ema.weight, saved.weight)
    assert torch.equal(net.weight, before)


def test_a_part_without_a_target_is_an_error_not_an_empty_load(folder: Path) -> None:
    net, optimizer = made(1)
    with pytest.raises(
        uc.LayoutError,
        match="'optimzer' has no target in this load; expected some of model, optimizer",
    ):
        uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("optimzer",)))


class Scheduler:
    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": 3}


def test_unused_parts_and_objects_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A forgotten scheduler or average leaves no other trace."""
    caplog.set_level("INFO")
    net, optimizer = made(0)
    objects = {"plan": [Scheduler()], "note": "plain"}
    uc.save(
        tmp_path / "c",
        model=net,
        optimizer=optimizer,
        parts={"ema": net},
        extra=objects,
        rank_extra={"loader": Scheduler()},
    )
    every = ("ema", "extra:plan[0]", "rank_extra:loader")
    report = uc.load(tmp_path / "c", model=net, optimizer=optimizer)
    assert (report.unused, report.extra["note"]) == (every, "plain")
    (record,) = [one for one in caplog.records if "no rank loaded" in one.message]
    assert (record.levelname, f"no rank loaded {', '.join(every)} from" in record.message) == (
        "WARNING",
        True,
    )
    caplog.clear()
    assert uc.load(tmp_path / "c", model=net).unused == ("ema", "optimizer", *every[1:])
    assert [one.levelname for one in caplog.records if "no rank loaded" in one.message] == ["INFO"]
    more: dict[str, Any] = {
        "parts": {"ema": net},
        "extra": objects,
        "rank_extra": {"loader": Scheduler()},
    }
    assert uc.load(tmp_path / "c", model=net, optimizer=optimizer, **more).unused == ()
    chosen = uc.LoadOptions(parts=("model",))
    assert uc.load(
        tmp_path / "c", model=net, optimizer=optimizer, **more, options=chosen
    ).unused == ("ema", "optimizer")
    uc.convert(tmp_path / "c", tmp_path / "d")
    assert uc.load(tmp_path / "d", model=net, optimizer=optimizer).unused == every


def test_load_that_is_not_strict_warns_of_what_is_unchanged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"w{number}" for number in range(100)]
    target = {"weight": torch.zeros(9, 8), **{name: torch.zeros(2) for name in names}}
    report = uc.load(folder, model=target, strict=False)
    assert len(report.missing) == 100
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "strict=False, which left these unchanged (102)" in record.message
    assert "model:weight: checkpoint has shape (8, 8), target has (9, 8)" in record.message
    assert len(record.message.splitlines()) < 30


@pytest.mark.parametrize("shared", [True, False])
def test_masters_and_objects_are_joined_over_ranks(tmp_path: Path, shared: bool) -> None:
    """Each rank has the whole model and some of the masters, and only one a scheduler: what any
    rank took is taken.
    """
    names = ("a", "b")
    model = {name: torch.ones(4, dtype=torch.bfloat16) for name in names}
    masters = {name: torch.full((4,), 1.001) for name in names}
    moments = {f"{name}/exp_avg": torch.ones(4) for name in names}
    objects = {"plan": Scheduler(), "other": Scheduler()}
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=moments,
        master_weights=masters,
        parts={"ema": model},
        extra=objects,
    )

    def act(comm: Comm) -> tuple[str, ...] | str:
        own = {"a" if comm.rank == 0 or not shared else "b": torch.zeros(4)}
        try:
            report = make_checkpointer(comm).load(
                tmp_path / "c",
                model={name: torch.zeros(4, dtype=torch.bfloat16) for name in names},
                optimizer={key: torch.zeros(4) for key in moments},
                master_weights=own,
                extra={"plan": Scheduler()} if comm.rank == 1 else None,
            )
        except uc.MismatchError as error:
            return str(error)
        assert torch.equal(next(iter(own.values())), masters["a"])
        return report.unused

    one, two = run_ranks(2, act)
    assert one == two
    if shared:
        assert one == ("ema", "extra:other")
    else:
        assert "master_weights: b: the checkpoint's master weights are more precise" in one

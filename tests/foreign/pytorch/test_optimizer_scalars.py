"""Non-tensor optimizer state, such as an int `step`, survives in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers.optimization import Adafactor

import unified_ckpt as uc
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.nanotrons import LAYERS
from tests.support.foreign.nanotrons import write as write_nanotron


def state(step: Any) -> dict[str, Any]:
    groups = [{"params": ["w"], "lr": 0.1}]
    return {"state": {"w": {"step": step, "exp_avg": torch.ones(3)}}, "param_groups": groups}


def nested(root: Path) -> None:
    save_dcp({"model": {"w": torch.ones(3)}, "optimizer": state(5)}, root)


def flat(root: Path) -> None:
    save_dcp(
        {
            "model": {"w": torch.ones(3)},
            "optim": {
                "state.w.exp_avg": torch.ones(3),
                "state.w.step": 5,
                "param_groups.w.lr": 0.1,
            },
        },
        root,
    )


def lightning(root: Path) -> None:
    save_dcp({"state_dict": {"w": torch.ones(3)}, "optimizer_0": state(5)}, root)
    torch.save({"global_step": 5, "pytorch-lightning_version": "2"}, root / "meta.pt")


def accelerate(root: Path) -> None:
    save_dcp({"model": {"w": torch.ones(3)}}, root / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": state(5)}, root / "optimizer_0")


def ranks(root: Path) -> None:
    root.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(3)}, root / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(state(5), root / f"optimizer_0_rank{rank}.bin")


@pytest.mark.parametrize("write", [nested, flat, lightning, accelerate, ranks])
def test_int_step_is_kept(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Once, the state was read and the optimizer's next step raised KeyError 'step'."""
    write(tmp_path / "c")
    uc.convert(tmp_path / "c", tmp_path / "ours")
    for path in (tmp_path / "c", tmp_path / "ours"):
        with uc.open(path) as source:
            assert source.source.metadata().scalars == {"w": {"step": 5}}
            assert set(source["optimizer"]) == {"w/exp_avg"}
            assert "optimizer" not in (source.extra or {})


def changed_steps(root: Path, step: Callable[[int], int]) -> None:
    for number, path in enumerate(sorted(root.glob("20/optimizer/*.pt"))):
        content = torch.load(path)
        for entry in content["state"].values():
            entry["step"] = step(number)
        torch.save(content, path)


def test_nanotron_int_step_is_kept(tmp_path: Path) -> None:
    write_nanotron(tmp_path)
    changed_steps(tmp_path, lambda _: 20)
    with uc.open(tmp_path) as source:
        assert source.source.metadata().scalars == {name: {"step": 20} for name in LAYERS}


def test_differing_ranks_are_refused(tmp_path: Path) -> None:
    ranks(tmp_path / "c")
    torch.save(state(6), tmp_path / "c" / "optimizer_0_rank1.bin")
    with pytest.raises(
        uc.FormatError,
        match=r"optimizer_0_rank1.bin: w: step: got 6, expected",
    ):
        uc.open(tmp_path / "c")
    write_nanotron(tmp_path / "n")
    changed_steps(tmp_path / "n", lambda number: 20 + number % 2)
    with pytest.raises(uc.FormatError, match=r"step: got 21, expected"):
        uc.open(tmp_path / "n")


def test_optimizer_with_int_step_resumes(tmp_path: Path) -> None:
    def create() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 8)
        return model, Adafactor(
            model.parameters(), lr=1e-2, scale_parameter=False, relative_step=False
        )  # type: ignore[no-untyped-call]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = create()
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    save_dcp({"model": weights, "optimizer": state}, tmp_path / "c")
    train(model, optimizer)
    other, fresh = create()
    uc.load(tmp_path / "c", model=other, optimizer=fresh)
    train(other, fresh)
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(other.parameters(), model.parameters(), strict=True)
    )

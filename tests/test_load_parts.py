"""`LoadOptions.parts`: what is not asked for is not read and stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc


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
    uc.save(tmp_path / "c", model=net, optimizer=optimizer, parts={"ema": net}, options=uc.SaveOptions(fsync=False))
    return tmp_path / "c"


def test_the_optimizer_alone_while_the_model_tells_its_names(folder: Path) -> None:
    (saved, saved_optimizer), (net, optimizer) = made(0), made(1)
    before = net.weight.detach().clone()
    report = uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("optimizer",)))
    assert torch.equal(net.weight, before)
    assert net.note == "of 1"
    assert torch.equal(optimizer.state[net.weight]["exp_avg"], saved_optimizer.state[saved.weight]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert report.bytes_read == sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert report.missing == report.unexpected == ()


def test_the_model_alone_leaves_the_optimizer(folder: Path) -> None:
    (saved, _), (net, optimizer) = made(0), made(1)
    moment = optimizer.state[net.weight]["exp_avg"].clone()
    uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("model",)))
    assert torch.equal(net.weight, saved.weight)
    assert net.note == "of 0"
    assert torch.equal(optimizer.state[net.weight]["exp_avg"], moment)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_further_part_alone(folder: Path) -> None:
    (saved, _), (net, _), ema = made(0), made(1), Net("ema")
    before = net.weight.detach().clone()
    uc.load(folder, model=net, parts={"ema": ema}, options=uc.LoadOptions(parts=("ema",)))
    assert torch.equal(ema.weight, saved.weight)
    assert torch.equal(net.weight, before)


def test_a_part_without_a_target_is_an_error_not_an_empty_load(folder: Path) -> None:
    net, optimizer = made(1)
    with pytest.raises(uc.LayoutError, match="'optimzer' has no target in this load; needed some of model, optimizer"):
        uc.load(folder, model=net, optimizer=optimizer, options=uc.LoadOptions(parts=("optimzer",)))

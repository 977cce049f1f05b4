"""Public reports about loads that succeed and are wrong, or fail without a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unified_ckpt as uc
from tests.support.torch_training import train_step

UNSYNCED = uc.SaveOptions(fsync=False)


@pytest.mark.incident("pytorch#148252")
def test_names_that_only_the_checkpoint_has(tmp_path: Path) -> None:
    """DCP ignores them; a renamed layer starts from its initialization."""
    saved = {"block.w": torch.ones(2), "head.w": torch.ones(2)}
    uc.save(tmp_path / "c", model=saved, options=UNSYNCED)
    target = {"block.w": torch.zeros(2)}
    with pytest.raises(uc.MismatchError) as raised:
        uc.load(tmp_path / "c", model=target)
    assert raised.value.unexpected == ("model:head.w",)
    assert not target["block.w"].any()
    assert uc.load(tmp_path / "c", model=target, strict=False).unexpected == ("model:head.w",)
    assert target["block.w"].all()


@pytest.mark.incident("pytorch#126881")
def test_object_that_has_no_state_yet(tmp_path: Path) -> None:
    """State of an object that is created lazily is not in the target's dict, and was not loaded."""

    class Lazy:
        def __init__(self) -> None:
            self.data: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.data)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.data = state

    saved, other = Lazy(), Lazy()
    saved.data = {"data": {"a": "b", "rows": torch.arange(3)}}
    model = {"w": torch.ones(1)}
    uc.save(tmp_path / "c", model=model, extra={"loader": saved}, options=UNSYNCED)
    uc.load(tmp_path / "c", model=model, extra={"loader": other})
    assert other.data["data"]["a"] == "b"
    assert torch.equal(other.data["data"]["rows"], torch.arange(3))


@pytest.mark.incident("pytorch#76331")
def test_bytes_that_a_slice_reads(tmp_path: Path) -> None:
    """Each rank of another layout read every saved shard as a whole."""
    whole = torch.arange(1_000_000.0).reshape(1000, 1000)
    uc.save(tmp_path / "c", model={"w": whole}, options=UNSYNCED)
    with uc.open(tmp_path / "c") as opened:
        rows = opened["model"]["w"][250:500]
    assert torch.equal(rows, whole[250:500])
    target = {"w": torch.zeros(1000, 1000)}
    assert uc.load(tmp_path / "c", model=target).bytes_read == whole.nbytes


@pytest.mark.incident("Lightning#11741")
def test_optimizer_state_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    """MADGRAD counts its steps beside the parameters; a resume with it ended by an error."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state.setdefault("k", torch.tensor([0], dtype=torch.long))
            self.state["k"] += 1
            return super().step(closure)

    def build() -> tuple[nn.Linear, Counting]:
        model = nn.Linear(2, 1)
        return model, Counting(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build()
    for _ in range(3):
        train_step(optimizer)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=UNSYNCED)
    other = build()
    uc.load(tmp_path / "c", model=other[0], optimizer=other[1])
    assert other[1].state["k"] == 3


@pytest.mark.incident("OpenTau#185")
def test_masters_that_a_wrapper_does_not_save(tmp_path: Path) -> None:
    """`state_dict()` has the moments of the float32 copies, but not the copies: each resume rounded
    them to bfloat16.
    """

    class Masters(torch.optim.Optimizer):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters(), {})
            self.copies = {
                name: param.detach().float().requires_grad_()
                for name, param in module.named_parameters()
            }
            self.inner = torch.optim.AdamW(self.copies.values(), lr=0.01)

        def step(self, closure: Any = None) -> None:
            params = self.param_groups[0]["params"]
            for param, copy_ in zip(params, self.copies.values(), strict=True):
                copy_.grad = param.grad.float()
            self.inner.step()
            with torch.no_grad():
                for param, copy_ in zip(params, self.copies.values(), strict=True):
                    param.copy_(copy_)

        def state_dict(self) -> Any:
            return self.inner.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.inner.load_state_dict(state_dict)

    def state_of(model: nn.Module, optimizer: Masters) -> dict[str, Any]:
        masters = {name: copy_.detach() for name, copy_ in optimizer.copies.items()}
        return {"model": model, "master_weights": masters, "extra": {"optimizer": optimizer}}

    model, other = nn.Linear(4, 2).bfloat16(), nn.Linear(4, 2).bfloat16()
    optimizer, resumed = Masters(model), Masters(other)
    train_step(optimizer)
    with pytest.raises(uc.LayoutError, match=r"its state_dict\(\) has .*which its `state` lacks"):
        uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=UNSYNCED)
    uc.save(tmp_path / "c", **state_of(model, optimizer), options=UNSYNCED)
    uc.load(tmp_path / "c", **state_of(other, resumed))
    for name, master in optimizer.copies.items():
        assert torch.equal(resumed.copies[name], master)
        assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.incident("pytorch#192202")
def test_state_of_parameters_that_are_frozen_now(tmp_path: Path) -> None:
    """The moments of a layer that is frozen for a while are dropped by the load."""

    def build() -> tuple[nn.Linear, torch.optim.AdamW]:
        model = nn.Linear(4, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (other, resumed) = build(), build()
    train_step(optimizer)
    model.weight.requires_grad_(False)
    other.weight.requires_grad_(False)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=UNSYNCED)
    uc.load(tmp_path / "c", model=other, optimizer=resumed)
    moment = resumed.state[other.weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"])

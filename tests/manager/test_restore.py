"""Selection of a restore point: required parts, substitutes, and warnings for skipped steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.managers import (
    check_state,
    flip_last_byte,
    manager_of,
    save_steps,
    state,
    warnings_of,
)
from tests.support.optimizers import FusedAdam
from unified_ckpt.manager.option_aliases import from_paddle
from unified_ckpt.manager.restore import required_parts


def weights(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 4), value, dtype=torch.bfloat16)},
        "master_weights": {"w": torch.full((4, 4), float(value))},
        "optimizer": {"w/exp_avg": torch.full((4, 4), -float(value))},
    }


def test_restore_of_a_run_that_saves_only_master_weights(
    tmp_path: Path,
) -> None:
    named = from_paddle("async_save skip_save_model_weight master_weight_compatible")
    with manager_of(None, tmp_path, save_options=named.save, interval_steps=10) as manager:
        manager.save(10, **weights(10))
        manager.finish(20, **weights(20))
    found = weights(0)
    with manager_of(None, tmp_path) as manager:
        assert manager.steps()[-1].parts == ("master_weights", "optimizer")
        assert manager.restore(**found).step == 20  # type: ignore[union-attr]
        del found["master_weights"]
        with pytest.raises(
            uc.MismatchError,
            match="master_weights: w: the checkpoint's master weights are more precise",
        ):
            manager.restore(**found)
        without = uc.LoadOptions(parts=("model", "optimizer"))
        assert manager.restore(**found, options=without).step == 20  # type: ignore[union-attr]
    assert torch.equal(found["model"]["w"], weights(20)["model"]["w"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saving_no_model_without_masters_is_refused(tmp_path: Path, asynchronous: bool) -> None:
    """At once, not after some failures in a row: trying again does not help."""
    named = from_paddle(f"skip_save_model_weight {'async_save' if asynchronous else ''}")
    with manager_of(
        None, tmp_path, save_options=named.save, interval_steps=10, asynchronous=asynchronous
    ) as manager:
        with pytest.raises(
            uc.FormatError, match="leaves out the model, and this state has no master weights"
        ):
            manager.save(10, model=weights(10)["model"], optimizer={"w/exp_avg": torch.zeros(4, 4)})
        manager.save(20, **weights(20))
    assert os.listdir(tmp_path) == ["checkpoint-20"]


def test_parts_left_out_by_load_options_are_not_required(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    save_steps(tmp_path, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        found = state(0)
        assert manager.restore(options=uc.LoadOptions(parts=("model",)), **found).step == 20  # type: ignore[union-attr]
        check_state({"model": found["model"]}, 20)
        assert manager.restore(options=uc.LoadOptions(parts=("optimizer",)), **found).step == 10  # type: ignore[union-attr]


def test_not_strict_loads_the_latest_step_with_some_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20, full=False)
    flip_last_byte(tmp_path / "checkpoint-20")
    found = state(0)
    with manager_of(None, tmp_path) as manager:
        report = manager.restore(strict=False, **found)
        assert report is not None
        assert (report.step, report.missing) == (10, ("optimizer:w/exp_avg",))
        check_state({"model": found["model"]}, 10)
        assert (
            f"{tmp_path}/checkpoint-10 is loaded without optimizer (strict=False): no step has "
            f"all parts" in caplog.text
        )
        save_steps(tmp_path, 5)
        assert manager.restore(strict=False, **found).step == 5  # type: ignore[union-attr]


def test_complete_steps_without_a_required_part_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        with pytest.raises(
            uc.IncompleteError,
            match=r"none of its steps can be loaded \(2\):\n  checkpoint-20: it has no "
            r"optimizer; leave",
        ):
            manager.restore(**state(0))
        assert manager.restore(allow_fresh=True, **state(0)) is None
        (text,) = warnings_of(caplog)
        assert "checkpoint-10: it has no optimizer" in text
        save_steps(tmp_path, 5)
        caplog.clear()
        with caplog.at_level(logging.INFO, "unified_ckpt"):
            assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]
    assert warnings_of(caplog) == []
    assert "checkpoint-20 is skipped: it has no optimizer" in caplog.text


def test_required_parts() -> None:
    either, optimizer, ema = (
        frozenset({"model", "master_weights"}),
        frozenset({"optimizer"}),
        frozenset({"ema"}),
    )
    plain = uc.LoadOptions()
    assert required_parts({}, plain) == []
    assert required_parts({"model": {}, "extra": {}, "optimizer": None}, plain) == [either]
    assert required_parts({"master_weights": {}, "model": {}, "optimizer": {}}, plain) == [
        either,
        optimizer,
    ]
    assert required_parts({"model": {}, "optimizer": {}, "parts": {"ema": {}}}, plain) == [
        ema,
        either,
        optimizer,
    ]
    assert required_parts(
        {"model": {}, "optimizer": {}, "parts": {"ema": {}}},
        uc.LoadOptions(parts=("ema", "optimizer")),
    ) == [ema, optimizer]


@pytest.mark.parametrize("stored", ["masters", "model"])
@pytest.mark.parametrize("holder", ["optimizer", "dict", "lazy"])
def test_load_parameters_path_fills_masters(tmp_path: Path, stored: str, holder: str) -> None:
    """Masters that stayed at random values: the next step overwrote the weights with them."""
    model, masters = torch.nn.Linear(4, 3).bfloat16(), torch.nn.Linear(4, 3)
    masters.load_state_dict(
        {name: tensor.float() + 1e-4 for name, tensor in model.state_dict().items()}
    )
    more = {"master_weights": masters.state_dict()} if stored == "masters" else {}
    uc.save(tmp_path / "weights", model=model, **more)
    other = torch.nn.Linear(4, 3).bfloat16()
    optimizer = FusedAdam(other.parameters(), master_weights=holder != "dict")
    targets: dict[str, Any] = {"model": other, "optimizer": optimizer}
    if holder == "dict":
        targets["master_weights"] = {
            name: torch.zeros(tensor.shape) for name, tensor in other.state_dict().items()
        }
    if holder == "optimizer":
        for parameter in other.parameters():
            optimizer.initialize_state(parameter, False)
    with manager_of(
        None, tmp_path / "run", load_parameters_path=str(tmp_path / "weights")
    ) as manager:
        report = manager.restore(**targets)
    assert report is not None
    assert torch.equal(other.weight, model.weight)
    if holder == "lazy":
        assert not optimizer.state
        return
    found = (
        targets["master_weights"]["weight"]
        if holder == "dict"
        else optimizer.state[other.weight]["master_param"]
    )
    assert torch.equal(found, masters.weight if stored == "masters" else model.weight.float())


def test_load_parameters_path_fills_further_parts(tmp_path: Path) -> None:
    """Adapters and averages: nothing was read, and the restore reported success."""
    saved, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    uc.save(tmp_path / "weights", parts={"adapter_model": saved})
    with manager_of(
        None, tmp_path / "run", load_parameters_path=str(tmp_path / "weights")
    ) as manager:
        report = manager.restore(
            parts={"adapter_model": other}, optimizer=torch.optim.AdamW(other.parameters())
        )
        assert report is not None
        assert report.bytes_read > 0
        assert torch.equal(other.weight, saved.weight)
        with pytest.raises(uc.MismatchError, match=r"ema:weight: is not in the checkpoint"):
            manager.restore(parts={"ema": other})
        with pytest.raises(
            uc.LayoutError,
            match="got no model and no parts to fill, expected one of them; pass `model`",
        ):
            manager.restore(optimizer={"w/exp_avg": torch.zeros(2)})
        low = torch.nn.Linear(4, 3).bfloat16()
        optimizer = FusedAdam(low.parameters(), master_weights=True)
        for parameter in low.parameters():
            optimizer.initialize_state(parameter, False)
        manager.restore(
            parts={"adapter_model": low}, optimizer=optimizer, options=uc.LoadOptions(cast=True)
        )
        assert torch.equal(optimizer.state[low.weight]["master_param"], saved.weight)

"""Which step a run starts from: what it must have, what stands in for what, and what is said of those that are passed over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from managing import check_state, flip, manager_of, put, state, warnings_of

import unified_ckpt as uc
from unified_ckpt.manager.foreign import from_paddle
from unified_ckpt.manager.origin import needs


def weights(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 4), value, dtype=torch.bfloat16)},
        "master_weights": {"w": torch.full((4, 4), float(value))},
        "optimizer": {"w/exp_avg": torch.full((4, 4), -float(value))},
    }


def test_a_run_that_saves_master_weights_in_place_of_the_model_is_found_again(tmp_path: Path) -> None:
    named = from_paddle("async_save skip_save_model_weight master_weight_compatible")
    with manager_of(None, tmp_path, save_options=named.save, interval_steps=10) as manager:
        manager.save(10, **weights(10))
        manager.finish(20, **weights(20))
    found = weights(0)
    with manager_of(None, tmp_path) as manager:
        assert manager.steps()[-1].parts == ("master_weights", "optimizer")
        assert manager.restore(**found).step == 20  # type: ignore[union-attr]
        del found["master_weights"]
        with pytest.raises(uc.MismatchError, match="master_weights: w: the checkpoint's are more precise"):
            manager.restore(**found)
        without = uc.LoadOptions(parts=("model", "optimizer"))
        assert manager.restore(**found, options=without).step == 20  # type: ignore[union-attr]
    assert torch.equal(found["model"]["w"], weights(20)["model"]["w"])


def test_parts_that_the_options_leave_out_are_not_asked_for(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        found = state(0)
        assert manager.restore(options=uc.LoadOptions(parts=("model",)), **found).step == 20  # type: ignore[union-attr]
        check_state({"model": found["model"]}, 20)
        assert manager.restore(options=uc.LoadOptions(parts=("optimizer",)), **found).step == 10  # type: ignore[union-attr]


def test_not_strict_takes_what_there_is_where_no_step_has_it_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 10, 20, full=False)
    flip(tmp_path / "checkpoint-20")
    found = state(0)
    with manager_of(None, tmp_path) as manager:
        report = manager.restore(strict=False, **found)
        assert report is not None
        assert (report.step, report.missing) == (10, ("optimizer:w/exp_avg",))
        check_state({"model": found["model"]}, 10)
        assert f"{tmp_path}/checkpoint-10 is taken for want of a better one (strict=False): it has no optimizer" in caplog.text
        put(tmp_path, 5)
        assert manager.restore(strict=False, **found).step == 5  # type: ignore[union-attr]


def test_whole_steps_that_lack_a_part_are_no_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 10, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        with pytest.raises(
            uc.IncompleteError, match=r"has steps, and none can be used \(2\):\n  checkpoint-20: it has no optimizer; leave"
        ):
            manager.restore(**state(0))
        assert manager.restore(allow_fresh=True, **state(0)) is None
        (text,) = warnings_of(caplog)
        assert "checkpoint-10: it has no optimizer" in text
        put(tmp_path, 5)
        caplog.clear()
        with caplog.at_level(logging.INFO, "unified_ckpt"):
            assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]
    assert warnings_of(caplog) == []
    assert "checkpoint-20 is passed over: it has no optimizer" in caplog.text


def test_what_targets_need() -> None:
    either, optimizer, ema = frozenset({"model", "master_weights"}), frozenset({"optimizer"}), frozenset({"ema"})
    plain = uc.LoadOptions()
    assert needs({}, plain) == []
    assert needs({"model": {}, "extra": {}, "optimizer": None}, plain) == [either]
    assert needs({"master_weights": {}, "model": {}, "optimizer": {}}, plain) == [either, optimizer]
    assert needs({"model": {}, "optimizer": {}, "parts": {"ema": {}}}, plain) == [ema, either, optimizer]
    assert needs({"model": {}, "optimizer": {}, "parts": {"ema": {}}}, uc.LoadOptions(parts=("ema", "optimizer"))) == [ema, optimizer]

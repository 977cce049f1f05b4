"""An optimizer without state, as FSDP1 returns it before the first step, gets none by DCP's rules.

A warning names what is not loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from unified_ckpt import dcp

MOMENT = {"w": {"exp_avg": torch.ones(2)}}


def optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("module", [dcp, torch_dcp])
@pytest.mark.parametrize(
    ("stored", "target", "is_named"), [(MOMENT, {}, True), (MOMENT, MOMENT, False), ({}, {}, False)]
)
def test_stored_state_that_is_not_loaded_is_named(
    module: Any,
    stored: dict[str, Any],
    target: dict[str, Any],
    is_named: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module.save(optimizer(stored), checkpoint_id=tmp_path)
    caplog.set_level(logging.WARNING, "unified_ckpt")
    caplog.clear()
    loaded = optimizer(target)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["optimizer"]["state"] == target
    assert ("optimizer state is not loaded" in caplog.text) == is_named

"""The file by which programs recognize a finished checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import unified_ckpt as uc
from unified_ckpt import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("older", ["nothing", "torch", "ours"])
def test_marker_is_in_every_checkpoint_of_dcp(tmp_path: Path, older: str) -> None:
    """Torch's reader raises, also where an older checkpoint of its own was in the folder."""
    if older != "nothing":
        module = torch_dcp if older == "torch" else dcp
        module.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "step", no_dist=True)
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step").result(60)
    assert b"unified_ckpt" in (tmp_path / "step" / ".metadata").read_bytes()
    assert uc.verify(tmp_path / "step", deep=True).ok
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "step")
    assert loaded["w"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointException):
        torch_dcp.load(loaded, checkpoint_id=tmp_path / "step", no_dist=True)

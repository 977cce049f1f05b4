"""A view on real ranks: a larger vocabulary under FSDP2 and TP."""

from __future__ import annotations

from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

pytestmark = pytest.mark.integration


def test_fsdp_and_tp_resume_with_a_larger_vocabulary(tmp_path: Path) -> None:
    """FSDP2 and TP both shard the dim that grows."""
    torchrun(4, "worker_grow.py", tmp_path, timeout_seconds=180)
    assert uc.verify(tmp_path / "masters" / "d", deep=True).problems == ()

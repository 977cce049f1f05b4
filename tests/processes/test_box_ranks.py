"""Tensors with boxes of their own; `worker_boxes.py` loads them, and checks what ranks hold."""

from __future__ import annotations

from pathlib import Path

import unified_ckpt as uc


def test_tensors_with_boxes_of_their_own(two_ranks: Path) -> None:
    assert uc.verify(two_ranks / "boxes" / "whole", deep=True).ok
    assert not (two_ranks / "boxes" / "refused").exists()

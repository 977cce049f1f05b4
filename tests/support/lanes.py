"""Lets small saves run several lanes."""

from __future__ import annotations

import os

import pytest

from unified_ckpt.core.planning import lanes


def use_lanes(monkeypatch: pytest.MonkeyPatch, *, cores: int = 8, min_nbytes: int = 1) -> None:
    """Give each node so many cores, and lanes as few bytes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(lanes, "MIN_LANE_NBYTES", min_nbytes)

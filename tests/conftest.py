"""Settings for every test: hypothesis without deadlines (machines are shared), and nothing left behind in the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

_PROCS = Path(__file__).parent / "procs"


def pytest_itemcollected(item: pytest.Item) -> None:
    """With `-n`: one process takes a file's tests, for they share what is costly to make; and all that start torchrun, one at a time."""
    item.add_marker(pytest.mark.xdist_group("procs" if _PROCS in item.path.parents else item.path.name))

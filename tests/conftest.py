"""Settings for every test: hypothesis without deadlines (nodes are shared), and who runs which
tests where several processes do.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-node", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-node")


@pytest.hookimpl(optionalhook=True)  # without `-n` there is nobody who asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process takes a file's tests, for they share what is costly to make; and one takes all
    that start torchrun, one at a time.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "processes" if "processes/" in file else file

    return Scheduler(config, log)

"""What of a caller's metrics is stored: finite numbers. One that has diverged is no reason to end a
training, nor to lose its last save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import SupportsFloat

_LOG = logging.getLogger("unified_ckpt")


def finite_metrics(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Those that are finite numbers. Pure."""
    numbers = {str(name): _finite_float(value) for name, value in (metrics or {}).items()}
    return {name: value for name, value in numbers.items() if value is not None}


class Metrics:
    """Of one manager. Tells of each name once that its value is not stored, on rank 0, whose values
    count. `best`: a name to be passed.
    """

    def __init__(self, *, best_metric: str | None = None) -> None:
        self._warned: set[str] = set()
        self._best_metric = best_metric

    def storable(
        self, metrics: Mapping[str, SupportsFloat] | None, *, step: int, rank: int
    ) -> dict[str, float]:
        accepted = finite_metrics(metrics)
        if (
            self._best_metric is not None
            and self._best_metric not in (metrics or {})
            and self._best_metric not in self._warned
            and rank == 0
        ):
            self._warned.add(self._best_metric)
            text = "step %d is saved without the metric %r, which best_metric names; pass metrics={%r: …} to save. This is said once"
            _LOG.warning(text, step, self._best_metric, self._best_metric)
        for name, value in (metrics or {}).items():
            if rank == 0 and str(name) not in accepted and str(name) not in self._warned:
                self._warned.add(str(name))
                text = "step %d is saved without the metric %r, which is %r; needed a finite number. This is said once"
                _LOG.warning(text, step, name, value)
        return accepted


def _finite_float(value: SupportsFloat) -> float | None:
    try:
        number = float(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ):  # a tensor with several elements raises the third
        return None
    return number if math.isfinite(number) else None

"""Decides which metrics of a caller are stored: finite numbers only.

A diverged metric neither ends a training run nor costs its last save.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import SupportsFloat

from unified_ckpt.engine.save.request import finite_float, metric_items

_LOG = logging.getLogger("unified_ckpt")


def finite_metrics(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Return the metrics that are finite numbers. Pure. FormatError for anything but a mapping."""
    numbers = {str(name): finite_float(value) for name, value in metric_items(metrics)}
    return {name: value for name, value in numbers.items() if value is not None}


class Metrics:
    """The metrics of one manager. `best_metric`: a name that every save should pass.

    Rank 0, whose values count, warns once per name that is not stored.
    """

    def __init__(self, *, best_metric: str | None = None) -> None:
        self._warned: set[str] = set()
        self._best_metric = best_metric

    def storable(
        self, metrics: Mapping[str, SupportsFloat] | None, *, step: int, rank: int
    ) -> dict[str, float]:
        """Return the finite metrics, and log the others."""
        accepted = finite_metrics(metrics)
        problems = {
            str(name): f": got {value!r}, expected a finite number"
            for name, value in (metrics or {}).items()
            if str(name) not in accepted
        }
        best = self._best_metric
        if best is not None and best not in (metrics or {}):
            problems[best] = f" of best_metric; pass metrics={{{best!r}: …}} to save"
        for name, problem in problems.items() if rank == 0 else ():
            if name not in self._warned:
                self._warned.add(name)
                text = "step %d is saved without the metric %r%s. This is logged once"
                _LOG.warning(text, step, name, problem)
        return accepted

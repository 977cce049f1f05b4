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
        if (
            self._best_metric is not None
            and self._best_metric not in (metrics or {})
            and self._best_metric not in self._warned
            and rank == 0
        ):
            self._warned.add(self._best_metric)
            text = (
                "step %d is saved without the metric %r of best_metric; "
                "pass metrics={%r: …} to save. This is logged once"
            )
            _LOG.warning(text, step, self._best_metric, self._best_metric)
        for name, value in (metrics or {}).items():
            if rank == 0 and str(name) not in accepted and str(name) not in self._warned:
                self._warned.add(str(name))
                text = (
                    "step %d is saved without the metric %r: got %r, expected a finite number. "
                    "This is logged once"
                )
                _LOG.warning(text, step, name, value)
        return accepted

"""Loggers of saves: hooks for `CheckpointManager.on_commit` and `on_failure`.

Rank 0 calls a hook in the thread of the save. So a logger uses only thread-safe calls of its
library, and does not disturb the log of the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.events.run_events import SaveFailure
from unified_ckpt.runtime.packages import missing_package

__all__ = ["PrometheusTextLogger", "TensorBoardLogger", "WandbLogger"]

# Name -> the attribute of SaveReport, and what it is.
_TABLE = {
    "checkpoint/step": ("step", "Step of the last checkpoint"),
    "checkpoint/bytes": ("nbytes", "Tensor bytes of the last checkpoint"),
    "checkpoint/seconds": ("seconds", "From the call of the last save to its commit"),
    "checkpoint/blocked_seconds": ("blocked_seconds", "Part in which training waited"),
    "checkpoint/background_seconds": ("background_seconds", "Part in which training went on"),
    "checkpoint/failed_attempts": ("failed_attempts", "Failed attempts to save of this process"),
}
_STEP = "checkpoint/step"
_FAILED = "checkpoint/failed_attempts"
METRICS: Mapping[str, str] = MappingProxyType({name: text for name, (_, text) in _TABLE.items()})
"""The name of each number, and what it is. `checkpoint/bytes/<part>` are the bytes of each part."""
PREFIX = "checkpoint/"
_PART_BYTES = "checkpoint/bytes/"


def metrics_of(report: SaveReport | SaveFailure) -> dict[str, float]:
    """Return the numbers of a save by name; of a failed attempt, the count of these."""
    if isinstance(report, SaveFailure):
        return {_FAILED: report.failed_attempts}
    numbers = {name: getattr(report, attribute) for name, (attribute, _) in _TABLE.items()}
    return numbers | {f"{_PART_BYTES}{part}": nbytes for part, nbytes in report.parts.items()}


class TensorBoardLogger:
    """Writes scalars to TensorBoard, each at the step that was saved.

    `writer`: a `SummaryWriter` of `torch.utils.tensorboard`. Close it after the manager.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, report: SaveReport | SaveFailure) -> None:
        """Log a commit or a failed attempt."""
        for name, value in metrics_of(report).items():
            if name != _STEP:
                self._writer.add_scalar(name, value, report.step)


class WandbLogger:
    """Adds the numbers of saves to a run of Weights & Biases, with `checkpoint/step` as the x-axis.

    `run`: the result of `wandb.init`. The numbers are logged with your next `run.log`, so its steps
    stay in order. Of several commits in between, the last one is logged.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(_STEP, hidden=True)
        for name in (*METRICS, f"{_PART_BYTES}*"):
            if name not in (_STEP, _FAILED):
                run.define_metric(name, step_metric=_STEP)

    def __call__(self, report: SaveReport | SaveFailure) -> None:
        """Log a commit or a failed attempt."""
        # A row of its own would take a step, and W&B drops what training then logs at that step.
        self._run.log(metrics_of(report), commit=False)


class PrometheusTextLogger:
    """Writes a text file for the textfile collector of Prometheus' node_exporter.

    `path`: a file in the collector's directory, ending with `.prom`. It is replaced at each commit
    and failed attempt.
    `labels`: labels of every metric, different for each run on a node. `part` is reserved.

    Requires the extra `prometheus`. The metrics of the last commit are `checkpoint_step`,
    `checkpoint_bytes`,
    `checkpoint_part_bytes{part="model"}` for each part,
    `checkpoint_seconds`, `checkpoint_blocked_seconds`, `checkpoint_background_seconds` and
    `checkpoint_commit_timestamp_seconds`. The counters `checkpoint_commits_total` and
    `checkpoint_failed_attempts_total` begin at 0 in each process.

    Raises CheckpointError for another ending and for a label `part`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise missing_package("PrometheusTextLogger", error, extra="prometheus") from error
        self._path, labels = os.path.abspath(path), labels or {}
        if not self._path.endswith(".prom"):
            raise CheckpointError(
                f"{self._path}: expected a name that ends with .prom; "
                "node_exporter reads no other files"
            )
        if "part" in labels:
            raise CheckpointError("labels: got part, which checkpoint_part_bytes has; rename it")
        self._registry = prometheus_client.CollectorRegistry()
        self._write = prometheus_client.write_to_textfile

        def metric(kind: Any, name: str, text: str) -> Any:
            created = kind(name, text, list(labels), registry=self._registry)
            return created.labels(**labels) if labels else created

        gauge, counter = prometheus_client.Gauge, prometheus_client.Counter
        names, text = [*labels, "part"], "Tensor bytes of each part of the last checkpoint"
        self._part_bytes = gauge("checkpoint_part_bytes", text, names, registry=self._registry)
        self._labels = labels
        self._gauges = {
            name: metric(gauge, name.replace("/", "_"), text)
            for name, text in METRICS.items()
            if name != _FAILED
        }
        self._committed_at = metric(
            gauge, "checkpoint_commit_timestamp_seconds", "Unix time of the last commit"
        )
        self._commits = metric(counter, "checkpoint_commits", "Commits of this process")
        self._failed = metric(counter, _FAILED.replace("/", "_"), METRICS[_FAILED])
        self._failed_before = 0  # of the manager; another one begins at 0

    def __call__(self, report: SaveReport | SaveFailure) -> None:
        """Log a commit or a failed attempt."""
        before = self._failed_before if self._failed_before <= report.failed_attempts else 0
        self._failed.inc(report.failed_attempts - before)
        self._failed_before = report.failed_attempts
        if isinstance(report, SaveReport):
            numbers = metrics_of(report)
            for name, gauge in self._gauges.items():
                gauge.set(numbers[name])
            self._part_bytes.clear()
            for part, nbytes in report.parts.items():
                self._part_bytes.labels(**self._labels, part=part).set(nbytes)
            self._committed_at.set_to_current_time()
            self._commits.inc()
        self._write(self._path, self._registry)

"""Loggers of a run's saves, with the real libraries: what a reader of their files gets."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import unified_ckpt as uc
from tests.support.manager.managers import manager_of, state
from unified_ckpt.integrations.loggers import (
    METRICS,
    PrometheusTextLogger,
    TensorBoardLogger,
    WandbLogger,
    metrics_of,
)

PARTS = {"checkpoint/bytes/model", "checkpoint/bytes/optimizer"}
NAMES = set(METRICS) | PARTS
FAILED = "checkpoint/failed_attempts"


def run(
    root: Path,
    hook: Callable[[Any], object],
    *,
    steps: int = 3,
    before_save: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> list[uc.SaveReport]:
    """Save steps with the hook; return the reports of all commits. One attempt of step 2 fails."""
    reports: list[uc.SaveReport] = []

    def attach(_: str) -> None:
        raise OSError(28, "No space left on device")

    with manager_of(None, root, interval_steps=1, retries=0, **options) as manager:
        manager.on_commit(hook)
        manager.on_failure(hook)
        manager.on_commit(reports.append)
        for step in range(1, steps + 1):
            before_save(step)
            if step == 2:
                manager.save(step, **state(step), attach=attach)
            manager.save(step, **state(step), force=True)
            manager.wait()
    assert [report.step for report in reports] == list(range(1, steps + 1))
    return reports


def test_blocked_and_background_time_are_apart(tmp_path: Path) -> None:
    parts = {"model": 900, "ema": 80}
    report = uc.SaveReport("run", 3, "id", 980, 2.0, blocked_seconds=0.5, parts=parts)
    assert metrics_of(report) == {
        "checkpoint/step": 3,
        "checkpoint/bytes": 980,
        "checkpoint/seconds": 2.0,
        "checkpoint/blocked_seconds": 0.5,
        "checkpoint/background_seconds": 1.5,
        FAILED: 0,
        "checkpoint/bytes/model": 900,
        "checkpoint/bytes/ema": 80,
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensorboard_has_a_scalar_at_each_step(tmp_path: Path, asynchronous: bool) -> None:
    with SummaryWriter(str(tmp_path / "log")) as writer:
        reports = run(tmp_path / "run", TensorBoardLogger(writer), asynchronous=asynchronous)
    log = EventAccumulator(str(tmp_path / "log"))
    log.Reload()
    assert set(log.Tags()["scalars"]) == NAMES - {"checkpoint/step"}
    for name in NAMES - {"checkpoint/step"}:
        scalars = [(scalar.step, scalar.value) for scalar in log.Scalars(name)]
        expected = [(report.step, pytest.approx(metrics_of(report)[name])) for report in reports]
        if name == FAILED:
            expected.insert(1, (2, 1.0))
        assert scalars == expected


def read_prometheus(path: Path) -> dict[str, tuple[dict[str, str], float]]:
    """Return the samples by name, or by name and part, with their other labels."""
    return {
        f"{sample.name}/{sample.labels.pop('part', '')}".strip("/"): (sample.labels, sample.value)
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("labels", [{}, {"run": 'a "b"\nc'}])
def test_prometheus_text_is_of_the_last_commit(tmp_path: Path, labels: dict[str, str]) -> None:
    path, before = tmp_path / "text" / "run.prom", time.time()
    path.parent.mkdir()
    report = run(tmp_path / "run", PrometheusTextLogger(path, labels=labels))[-1]
    samples = read_prometheus(path)
    numbers = metrics_of(report)
    expected = {name.replace("/", "_"): numbers[name] for name in numbers.keys() - PARTS}
    expected["checkpoint_part_bytes/model"] = 500
    expected["checkpoint_part_bytes/optimizer"] = 480
    expected["checkpoint_commits_total"] = 3
    assert expected.pop("checkpoint_failed_attempts") == 1
    expected["checkpoint_failed_attempts_total"] = 1
    committed_labels, committed_at = samples.pop("checkpoint_commit_timestamp_seconds")
    assert samples == {name: (labels, value) for name, value in expected.items()}
    assert before <= committed_at <= time.time()
    assert committed_labels == labels
    assert os.listdir(path.parent) == ["run.prom"]


def test_prometheus_text_is_whole_at_any_moment(tmp_path: Path) -> None:
    path, ended = tmp_path / "run.prom", threading.Event()
    seen: list[float] = []

    def read() -> None:
        while not ended.is_set():
            if path.exists():
                samples = read_prometheus(path)
                seen.append(samples["checkpoint_step"][1] - samples["checkpoint_commits_total"][1])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        logger = PrometheusTextLogger(path)
        for step in range(1, 200):
            logger(uc.SaveReport("run", step, "id", 1, 1.0))
    finally:
        ended.set()
        reader.join()
    assert set(seen) == {0.0}


def test_prometheus_has_only_the_parts_of_the_last_commit(tmp_path: Path) -> None:
    logger = PrometheusTextLogger(tmp_path / "run.prom")
    for parts in ({"model": 3, "optimizer": 6}, {"model": 4}):
        logger(uc.SaveReport("run", 1, "id", sum(parts.values()), 1.0, parts=parts))
    samples = read_prometheus(tmp_path / "run.prom")
    assert samples["checkpoint_part_bytes/model"][1] == 4
    assert "checkpoint_part_bytes/optimizer" not in samples
    with pytest.raises(uc.CheckpointError, match="labels: got part"):
        PrometheusTextLogger(tmp_path / "run.prom", labels={"part": "model"})


def test_prometheus_counts_failed_attempts_of_all_managers(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    logger = PrometheusTextLogger(path)
    for failed_attempts in (1, 2, 1, 2, 3):  # of two managers
        logger(uc.SaveFailure("run", 1, 1, "full", 1.0, False, failed_attempts))
    samples = read_prometheus(path)
    assert samples["checkpoint_failed_attempts_total"][1] == 5
    assert samples["checkpoint_commits_total"][1] == 0


def test_prometheus_refuses_a_file_that_is_not_collected(tmp_path: Path) -> None:
    with pytest.raises(
        uc.CheckpointError, match=r"run\.txt: expected a name that ends with \.prom"
    ):
        PrometheusTextLogger(tmp_path / "run.txt")


def test_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install 'prometheus-client>="):
        PrometheusTextLogger(tmp_path / "run.prom")


def test_logger_that_cannot_write_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "run", PrometheusTextLogger(tmp_path / "missing" / "run.prom"))
    assert caplog.text.count("its on_commit hook failed") == 3


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run, whose file is a log of LevelDB with a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, block = path.read_bytes(), 7, b"", 32768
    while at + 7 <= len(data):
        if (room := block - at % block) < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record


@pytest.mark.slow
@pytest.mark.parametrize("explicit_steps", [False, True])
def test_wandb_rows_keep_the_steps_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explicit_steps: bool
) -> None:
    """Training logs twice at each of its steps; a save commits in between."""
    import wandb  # takes a second

    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    wandb_run = wandb.init(dir=tmp_path, project="test", settings=settings)

    def log(values: dict[str, float], step: int, *, commit: bool) -> None:
        wandb_run.log(values, **({"step": 10 * step} if explicit_steps else {"commit": commit}))

    def train(step: int) -> None:
        if step > 1:
            log({"after": step - 1}, step - 1, commit=True)
        log({"before": step}, step, commit=False)

    reports = run(tmp_path / "run", WandbLogger(wandb_run), before_save=train, asynchronous=True)
    log({"after": 3}, 3, commit=True)
    wandb_run.finish()
    wandb.teardown()  # its process has now written everything
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(path))
    rows = [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records
        if r.HasField("history")
    ]
    own = [
        {name: v for name, v in row.items() if not name.startswith("_") or name == "_step"}
        for row in rows
    ]
    assert own == [
        {
            "before": step,
            "after": step,
            "_step": 10 * step if explicit_steps else step - 1,
            **metrics_of(report),
        }
        for step, report in enumerate(reports, 1)
    ]
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in records
        if r.HasField("metric")
    }
    names = {*METRICS, "checkpoint/bytes/*"} - {FAILED}
    step = "checkpoint/step"
    assert axes == {name: "" if name == step else step for name in names}

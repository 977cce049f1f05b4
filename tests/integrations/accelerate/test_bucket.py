"""Checkpoints of an accelerator in a bucket: the project stays local, `load_state` looks there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.integrations.accelerates import Job, same
from tests.support.objects.buckets import URL, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.integrations.accelerate import after_step, attach, load_state, save_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated"
)  # torchdata 0.11 calls it
ROOT = f"{URL}/run"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    with registered_bucket() as bucket:
        yield bucket


def names_in(bucket: MemoryBucket) -> set[str]:
    names = {key.split("/")[1] for key in bucket.bodies() if key.startswith("run/")}
    return {name for name in names if name.startswith("checkpoint")}


def test_explicit_urls_resume_bitwise(bucket: MemoryBucket, straight: Job) -> None:
    job = Job()
    job.run(1)
    report = save_state(job.accelerator, f"{ROOT}/one", step=6)
    assert report.path == f"{ROOT}/one"
    resumed = Job(seed=7)
    assert load_state(resumed.accelerator, f"{ROOT}/one").step == 6
    resumed.epoch = 1
    resumed.run(3)
    assert resumed.losses == straight.losses[len(job.losses) :]
    assert same(resumed, straight)
    assert "config.json" in folder_bodies(bucket, "run/one")
    with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
        save_state(job.accelerator, f"{ROOT}/one")
    with pytest.raises(uc.NotFoundError, match="got nothing, expected a checkpoint folder"):
        load_state(job.accelerator, f"{ROOT}/none")


@pytest.mark.parametrize("managed", [False, True])
def test_automatic_names_are_in_the_bucket(
    bucket: MemoryBucket, tmp_path: Path, managed: bool
) -> None:
    """Also if the project's folder is gone; numbers continue after those in the bucket."""

    def attached(seed: int = 0) -> Job:
        job = Job(seed=seed, project=tmp_path, total_limit=2)
        options = uc.ManagerOptions(asynchronous=False) if managed else None
        attach(job.accelerator, manager_options=options, root=ROOT)
        return job

    job = attached()
    for epochs in (1, 2, 3):
        job.run(epochs)
        job.accelerator.save_state()
    assert names_in(bucket) == {"checkpoint_1", "checkpoint_2"}
    assert not (tmp_path / "checkpoints").exists()
    job.accelerator.end_training()
    shutil.rmtree(tmp_path, ignore_errors=True)
    resumed = attached(seed=7)
    resumed.accelerator.load_state()
    assert same(resumed, job)
    assert resumed.accelerator.project_configuration.iteration == 3
    resumed.accelerator.save_state()
    assert names_in(bucket) == {"checkpoint_2", "checkpoint_3"}
    resumed.accelerator.load_state(f"{ROOT}/checkpoint_2")
    assert resumed.accelerator.project_configuration.iteration == 4
    resumed.accelerator.end_training()


def test_intervals_and_tiers_of_run_options(bucket: MemoryBucket, tmp_path: Path) -> None:
    job = Job(project=tmp_path)
    options = uc.ManagerOptions(
        asynchronous=False,
        interval_steps=4,
        local_interval_steps=2,
        local_directory=str(tmp_path / "local"),
    )
    with attach(job.accelerator, manager_options=uc.RunOptions(options, root=ROOT)) as checkpoints:
        assert checkpoints.root == ROOT

        def step() -> bool:
            after_step(job.accelerator)
            return False

        job.run(3, after_step=step)
    assert names_in(bucket) == {"checkpoint_1", "checkpoint_3"}, "every other local one"
    assert "checkpoint_3" in os.listdir(tmp_path / "local")


def test_hooks_write_and_read_local_files(bucket: MemoryBucket, tmp_path: Path) -> None:
    """A save hook writes into the project; a load hook gets copies of what was attached."""
    job, read = Job(project=tmp_path), list[str]()
    attach(job.accelerator, root=ROOT)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert Path(folder).parent == tmp_path
        Path(folder, "of_a_hook.txt").write_text("written")

    def load(models: list[Any], folder: str) -> None:
        read.append(Path(folder, "of_a_hook.txt").read_text())

    job.accelerator.register_save_state_pre_hook(save)
    job.accelerator.register_load_state_pre_hook(load)
    job.accelerator.save_state()
    assert folder_bodies(bucket, "run/checkpoint_0")["of_a_hook.txt"] == b"written"
    job.accelerator.load_state()
    assert read == ["written"]
    assert [name for name in os.listdir(tmp_path) if "files" in name] == []


def test_local_root_is_refused(bucket: MemoryBucket, tmp_path: Path) -> None:
    with pytest.raises(uc.FormatError, match="expected the URL of a bucket, such as s3://bucket"):
        attach(Job(project=tmp_path).accelerator, root=tmp_path / "other")

"""A root in a bucket: the output folder stays local, and a resume looks into the bucket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.integrations.trainer_arguments import BEST
from tests.support.integrations.trainers import At, StopAt, check_same, entries, terminate
from tests.support.integrations.trainers import trainer as native_trainer
from tests.support.objects.buckets import URL, folder_bodies, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

ROOT = f"{URL}/run"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    with registered_bucket() as bucket:
        yield bucket


def trainer(
    out: Path, *callbacks: Any, root: str | None = ROOT, options: Any = None, **values: Any
) -> tuple[Any, UnifiedCheckpointCallback]:
    ours = UnifiedCheckpointCallback(root=root, manager_options=options)
    return native_trainer(out, ours, *callbacks, native=True, **values), ours


def names_in(bucket: MemoryBucket) -> set[str]:
    names = {key.split("/")[1] for key in bucket.bodies() if key.startswith("run/")}
    return {name for name in names if name.startswith("checkpoint-")}


def test_resume_from_an_empty_output_folder_is_bitwise(
    bucket: MemoryBucket, tmp_path: Path
) -> None:
    straight, _ = trainer(tmp_path / "straight", root=f"{URL}/straight")
    straight.train()
    stopped, callback = trainer(tmp_path / "run", StopAt(3))
    stopped.train()
    assert callback.checkpoints.root == ROOT
    assert names_in(bucket) == {"checkpoint-2"}
    assert not any(name.startswith("checkpoint") for name in entries(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    resumed, _ = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    assert names_in(bucket) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    named, _ = trainer(tmp_path / "named")
    named.train(resume_from_checkpoint=f"{ROOT}/checkpoint-4")
    check_same(named, straight)
    assert bucket.open_uploads() == []


@pytest.mark.integration
def test_small_files_are_in_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    """As on a disk; the converted folder is what `from_pretrained` opens."""
    on_disk, _ = trainer(tmp_path / "disk", root=None)
    on_disk.train()
    run, _ = trainer(tmp_path / "run")
    run.train()
    expected = {path.name for path in (tmp_path / "disk" / "checkpoint-6").iterdir()}
    uploaded = folder_bodies(bucket, "run/checkpoint-6")
    assert set(uploaded) == expected
    same = {"model.safetensors", "model.safetensors.index.json", "config.json"}
    same |= {"optimizer.safetensors", "optimizer.safetensors.index.json", "digests.safetensors"}
    for name in same:
        assert uploaded[name] == (tmp_path / "disk" / "checkpoint-6" / name).read_bytes(), name
    uc.convert(f"{ROOT}/checkpoint-6", tmp_path / "converted")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    check_equal(opened.state_dict(), run.model.state_dict())


def test_root_of_run_options(bucket: MemoryBucket, tmp_path: Path) -> None:
    options = uc.RunOptions(manager=uc.ManagerOptions(), root=ROOT)
    run, _ = trainer(tmp_path / "run", root=None, options=options, max_steps=2)
    run.train()
    assert names_in(bucket) == {"checkpoint-2"}
    with pytest.raises(uc.FormatError, match=r"root: got s3://bucket/other, expected s3://bucket/"):
        trainer(tmp_path / "run", root=f"{URL}/other", options=options)
    with pytest.raises(uc.FormatError, match=r"root: got .*elsewhere, expected the URL of a buck"):
        trainer(tmp_path / "run", root=str(tmp_path / "elsewhere"))


@pytest.mark.integration
def test_limit_and_best_model(bucket: MemoryBucket, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **BEST,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    on_disk, _ = trainer(tmp_path / "disk", root=None, **settings)
    on_disk.train()
    run, _ = trainer(tmp_path / "run", **settings)
    run.train()
    best = run.state.best_global_step
    assert best == on_disk.state.best_global_step
    assert run.state.best_model_checkpoint == f"{ROOT}/checkpoint-{best}"
    check_equal(run.model.state_dict(), on_disk.model.state_dict())
    assert names_in(bucket) == {f"checkpoint-{step}" for step in {best, 6}}


def test_signal_and_exception_save_to_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    options = uc.ManagerOptions(
        notice_seconds=0.001,
        save_on_exception=True,
        local_directory=str(tmp_path / "local"),
        local_interval_steps=1,
    )
    stopped, callback = trainer(tmp_path / "run", At(3, terminate), options=options)
    stopped.train()
    assert callback.checkpoints.should_stop
    assert names_in(bucket) == {"checkpoint-2", "checkpoint-3"}

    def fail() -> None:
        raise ValueError("raised by the test")

    resumed, _ = trainer(tmp_path / "run", At(5, fail, method="on_step_begin"), options=options)
    with pytest.raises(ValueError, match="raised by the test"):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-5" in names_in(bucket)


def test_nothing_to_resume_is_an_error_as_on_a_disk(bucket: MemoryBucket, tmp_path: Path) -> None:
    """Whatever the output folder holds."""
    on_disk, _ = trainer(tmp_path / "run", root=None, max_steps=2)
    on_disk.train()
    run, _ = trainer(tmp_path / "run")
    with pytest.raises(uc.NotFoundError, match="run: got no checkpoint, expected one to resume"):
        run.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checkpoint-9", "got nothing, expected a checkpoint folder"),
        ("", "got a run's folder, expected a checkpoint; the latest is checkpoint-2"),
    ],
)
def test_url_that_is_no_checkpoint_is_explained(
    bucket: MemoryBucket, tmp_path: Path, name: str, words: str
) -> None:
    run, _ = trainer(tmp_path / "run", max_steps=2)
    run.train()
    resumed, _ = trainer(tmp_path / "run")
    with pytest.raises(uc.NotFoundError, match=words):
        resumed.train(resume_from_checkpoint=f"{ROOT}/{name}".rstrip("/"))


def test_push_and_trash_are_refused(bucket: MemoryBucket, tmp_path: Path) -> None:
    run, _ = trainer(tmp_path / "run")
    run.args.push_to_hub = True
    with pytest.raises(uc.LayoutError, match=r"push_to_hub and a root in a bucket.*hub_strategy"):
        run.train()
    options = uc.ManagerOptions(keep_latest=1, trash_directory="trash")
    run, _ = trainer(tmp_path / "run", options=options)
    with pytest.raises(uc.OptionError, match=r"trash_directory.*a bucket cannot rename"):
        run.train()
    assert bucket.bodies() == {}

"""A root in a bucket: Lightning's folders stay local, and `ckpt_path` looks into the bucket."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.integrations.lightnings import WARNINGS, Net, check_same, fit
from tests.support.objects.buckets import URL, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback, load_from_checkpoint

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
ROOT = f"{URL}/run"
EVERY = {"every_n_train_steps": 1, "save_top_k": -1}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    with registered_bucket() as bucket:
        yield bucket


def trainer(
    out: Path, *callbacks: Any, options: Any = None, root: str | None = ROOT, **arguments: Any
) -> pl.Trainer:
    """A Trainer with a ModelCheckpoint in `out`, of which `checkpoints` are arguments."""
    settings = {"dirpath": str(out), "filename": "{step}", **arguments.pop("checkpoints", EVERY)}
    ours = UnifiedCheckpointCallback(root=root, manager_options=options)
    return pl.Trainer(
        default_root_dir=str(out),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(**settings), ours, *callbacks],
        **{"max_epochs": 2, **arguments},
    )


def train(out: Path, *, ckpt_path: Any = None, seed: int = 0, **arguments: Any) -> Net:
    torch.manual_seed(seed)
    module = Net()
    trainer(out, **arguments).fit(module, ckpt_path=ckpt_path)
    return module


def names_in(bucket: MemoryBucket) -> list[str]:
    names = {key.split("/")[1] for key in bucket.bodies() if key.startswith("run/")}
    return sorted(name for name in names if name.endswith(".ckpt"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Net:
    """A run of two epochs on a disk."""
    return fit(tmp_path_factory.mktemp("whole"), checkpoints=EVERY)


@pytest.mark.incident("Lightning#18261")
def test_last_is_in_the_bucket(bucket: MemoryBucket, tmp_path: Path, whole: Net) -> None:
    """Also if the local folder is gone; the resumed run equals an uninterrupted one."""
    first = train(tmp_path / "run", ckpt_path="last", max_steps=3)
    assert len(first.losses) == 3, "nothing to resume is a fresh start, as on a disk"
    assert names_in(bucket) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert not (tmp_path / "run").exists()
    resumed = train(tmp_path / "run", ckpt_path="last", seed=5)
    assert len(resumed.losses) == 5
    check_same(resumed, whole)
    named = train(tmp_path / "named", ckpt_path=f"{ROOT}/step=6.ckpt", seed=5)
    assert len(named.losses) == 2
    check_same(named, whole)


def test_last_of_a_callback_that_was_pickled(bucket: MemoryBucket, tmp_path: Path) -> None:
    """As a spawned process gets it; a listing that lags shows nothing."""
    train(tmp_path / "run", max_steps=2)
    bucket.list_delay_seconds = 3600
    callback = pickle.loads(pickle.dumps(UnifiedCheckpointCallback(root=ROOT)))
    assert callback.last_checkpoint() == f"{ROOT}/step=2.ckpt"
    assert UnifiedCheckpointCallback().last_checkpoint() == ""


def test_best_is_kept_tested_and_loaded(bucket: MemoryBucket, tmp_path: Path) -> None:
    """Others are removed, also if no listing shows them yet."""
    bucket.list_delay_seconds = 3600
    settings = {"monitor": "loss", "save_top_k": 1, "every_n_train_steps": 1, "save_last": True}
    module, run = Net(), trainer(tmp_path, checkpoints=settings)
    run.fit(module)
    best = Path(run.checkpoint_callback.best_model_path).name  # type: ignore[union-attr]
    assert names_in(bucket) == sorted({best, "last.ckpt"})
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run.test(module, ckpt_path="best")
    with uc.open(f"{ROOT}/{best}") as source:
        stored = {name: source["model"][name][...] for name in source["model"]}
    check_equal({name: module.state_dict()[name] for name in stored}, stored)
    loaded = load_from_checkpoint(Net, f"{ROOT}/last.ckpt")
    check_equal(loaded.state_dict(), weights)


def test_signal_and_local_tier(bucket: MemoryBucket, tmp_path: Path, whole: Net) -> None:
    """A local save that is newer than the last one in the bucket is resumed."""

    class Terminate(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    options = uc.ManagerOptions(
        notice_seconds=0.001,
        asynchronous=False,
        local_directory=str(tmp_path / "local"),
        local_interval_steps=1,
    )
    settings = {"every_n_train_steps": 2, "save_top_k": -1}
    torch.manual_seed(0)
    run = trainer(tmp_path / "run", Terminate(), options=options, checkpoints=settings)
    with pytest.raises(SystemExit):
        run.fit(Net())
    assert "last-stopped.ckpt" in names_in(bucket)
    resumed = train(tmp_path / "run", ckpt_path="last", seed=5, options=options)
    check_same(resumed, whole)
    again = train(tmp_path / "again", ckpt_path=f"{ROOT}/step=2.ckpt", seed=5, options=options)
    assert len(again.losses) == 6, "an older checkpoint that is named is what is loaded"
    check_same(again, whole)


@pytest.mark.incident("Lightning#18865")
def test_links_are_refused(bucket: MemoryBucket, tmp_path: Path) -> None:
    run = trainer(tmp_path, checkpoints={**EVERY, "save_last": "link"})
    with pytest.raises(uc.CheckpointError, match=r"save_last='link'.*no links; use save_last=True"):
        run.fit(Net())
    assert bucket.bodies() == {}


def test_two_folders_and_local_roots_are_refused(bucket: MemoryBucket, tmp_path: Path) -> None:
    run = trainer(tmp_path, ModelCheckpoint(dirpath=str(tmp_path / "other"), every_n_epochs=2))
    with pytest.raises(uc.CheckpointError, match="got 2 folders with a root in a bucket"):
        run.fit(Net())
    with pytest.raises(uc.FormatError, match="expected the URL of a bucket"):
        UnifiedCheckpointCallback(root=tmp_path)
    with pytest.raises(uc.FormatError, match="expected none; ModelCheckpoint has dirpath"):
        UnifiedCheckpointCallback(manager_options=uc.RunOptions(root=str(tmp_path)))


def test_missing_url_is_an_error(bucket: MemoryBucket, tmp_path: Path) -> None:
    with pytest.raises(uc.NotFoundError, match=r"none\.ckpt"):
        train(tmp_path, ckpt_path=f"{ROOT}/none.ckpt")

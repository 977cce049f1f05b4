"""The life of a staging folder: begun, prepared, and committed, withdrawn or aborted."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.harness import try_ranks
from unified_ckpt.engine.folder.finalize import finalize_files
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.plan.save_plan import StagedTensors
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm, single_process
from unified_ckpt.runtime.storage.storage import LocalStorage

FILE = "model.safetensors"


def begin(root: Path) -> Transaction:
    collective = single_process().begin_collective("save", timeout_seconds=20)
    target = PublishTarget("step", "replace")
    return Transaction(collective, LocalStorage(str(root)), target)


@pytest.mark.parametrize("exchange", [True, False])
def test_published_folder_is_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """A process that is interrupted between the phases leaves both checkpoints on the disk."""
    if not exchange:
        monkeypatch.setattr(LocalStorage, "_exchange", lambda *_: False)
    uc.save(tmp_path / "step", model={}, step=1)
    with (
        suppress(KeyboardInterrupt),
        begin(tmp_path) as transaction,
    ):
        assert transaction.begin(lambda: None) is None
        transaction.storage.put(f"{transaction.folder}/{FILE}", b"w")
        transaction.publisher.publish()
        raise KeyboardInterrupt
    folders = sorted(tmp_path.iterdir())
    assert [(folder / names.MANIFEST).exists() for folder in folders] == [True, False]
    assert (tmp_path / "step" / FILE).read_bytes() == b"w"


@pytest.mark.parametrize("name", [FILE, names.index_name("model"), names.MANIFEST])
def test_attach_may_not_write_files_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    tensors = StagedTensors({"model": {"w": FILE}}, {"model": {}}, {"model": 1})

    def attach(folder: str) -> None:
        Path(folder, name).write_text("mine")

    def finalize() -> None:
        with begin(tmp_path) as transaction:
            transaction.begin(lambda: None)
            transaction.storage.put(f"{transaction.folder}/{FILE}", b"w")
            finalize_files(transaction, tensors, attach=attach)

    with pytest.raises(uc.StorageError, match=f"`attach` changed {name}, a file of the checkpoint"):
        finalize()
    assert os.listdir(tmp_path) == []


def test_error_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    """Also between the steps, where no other rank would see it."""

    def act(comm: Comm) -> None:
        target = PublishTarget("step", "replace")
        collective = comm.begin_collective("save", timeout_seconds=60)
        with Transaction(collective, LocalStorage(str(tmp_path)), target) as transaction:
            transaction.begin(lambda: None)
            if comm.rank == 1:
                raise uc.StorageError("the disk is gone")
            collective.get("never")

    for outcome in try_ranks(2, act, timeout_seconds=60):
        assert isinstance(outcome, uc.StorageError)
        assert "the disk is gone" in str(outcome)
    assert os.listdir(tmp_path) == []


def test_user_files_are_synced_where_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(tmp_path) as transaction:
        transaction.begin(lambda: None)
        (tmp_path / transaction.folder / "logs").mkdir()
        (tmp_path / "step" / "logs").mkdir(parents=True)
        (tmp_path / "step" / "logs" / "mine").write_bytes(b"during the save")
        transaction.publisher.publish()
        synced = set()
        monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))
        transaction.clean_up()
    moved = tmp_path / "step" / "logs" / "mine"
    assert moved.read_bytes() == b"during the save"
    assert {str(moved), str(moved.parent)} <= synced

"""A latest step that is damaged, unreadable or removed meanwhile: the previous step is restored."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.managers import check_state, manager_of, save_steps, state, steps_in, warnings_of
from unified_ckpt.manager import restore
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import locks
from unified_ckpt.testing import run_ranks


def restored(root: Path, **options: Any) -> int | None:
    found = state(0)
    with manager_of(None, root, **options) as manager:
        report = manager.restore(**found)
    if report is None:
        return None
    check_state(found, report.step or 0)
    return report.step


def garble(file: Path) -> None:
    body = file.read_bytes()
    file.write_bytes(bytes(len(body)))


@pytest.mark.parametrize(
    "file", ["digests.safetensors", "extra.safetensors", "rank_extra.safetensors"]
)
def test_zeroed_small_file_falls_back(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(
        tmp_path, 1, 2, extra={"seen": torch.arange(9)}, rank_extra={"seed": torch.arange(9)}
    )
    garble(tmp_path / "checkpoint-2" / file)
    assert not uc.verify(tmp_path / "checkpoint-2").ok
    assert uc.verify(tmp_path / "checkpoint-1").ok

    def act(comm: Comm) -> int | None:
        with manager_of(comm, tmp_path) as manager:
            report = manager.restore(**state(0))
            return report.step if report is not None else None

    assert run_ranks(2, act) == [1, 1]
    (warned,) = warnings_of(caplog)
    assert "checkpoint-2 is skipped" in warned
    assert file in warned


def test_garbage_in_rank_extra_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2, rank_extra={"seed": torch.arange(9)})
    file = tmp_path / "checkpoint-2" / "rank_extra.safetensors"
    body = file.read_bytes()
    file.write_bytes(body[:-40] + bytes(40))
    assert restored(tmp_path) == 1
    assert len(warnings_of(caplog)) == 1


def test_bad_sector_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    preadv, bad = os.preadv, (tmp_path / "checkpoint-2" / "optimizer.safetensors").stat()

    def fail(fd: int, buffers: Any, start: int, *rest: int) -> int:
        if os.path.samestat(os.fstat(fd), bad) and start + sum(map(len, buffers)) == bad.st_size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, start, *rest)

    monkeypatch.setattr(os, "preadv", fail)

    def act(comm: Comm) -> int | None:
        with manager_of(comm, tmp_path) as manager:
            report = manager.restore(**state(0))
            return report.step if report is not None else None

    assert run_ranks(2, act) == [1, 1]
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.StorageError, match="Input/output error"),
    ):
        manager.restore(2, **state(0))


def test_unlistable_folder_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)

    def refused(call: Any) -> Any:
        def act(path: Any = ".") -> Any:
            if str(path).endswith("checkpoint-2"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path)

        return act

    monkeypatch.setattr(os, "scandir", refused(os.scandir))
    monkeypatch.setattr(os, "listdir", refused(os.listdir))
    assert restored(tmp_path) == 1
    assert [
        text
        for text in warnings_of(caplog)
        if "checkpoint-2 is skipped: it cannot be read: Permission denied" in text
    ]


@pytest.mark.parametrize(
    ("module", "call"),
    [(restore, "diagnose"), (locks, "_lock")],
    ids=["before it is opened", "before it is locked"],
)
def test_step_removed_during_selection_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    save_steps(tmp_path, 1, 2)
    first, going = getattr(module, call), tmp_path / "checkpoint-2"

    def act(*values: Any) -> Any:
        found = first(*values)
        if going.exists() and (call == "_lock" or values[0] == str(going)):
            shutil.rmtree(going)
        return found

    monkeypatch.setattr(module, call, act)
    assert restored(tmp_path) == 1
    assert steps_in(tmp_path) == [1]


def test_copy_with_damaged_digests_is_not_loaded(
    tmp_path: Path,
) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    with manager_of(
        None, root, interval_steps=1, local_directory=str(local), local_interval_steps=1
    ) as manager:
        manager.save(1, **state(1))
    assert (local / "checkpoint-1").is_dir()
    garble(local / "checkpoint-1" / "digests.safetensors")
    found = state(0)
    with manager_of(
        None, root, interval_steps=1, local_directory=str(local), local_interval_steps=1
    ) as manager:
        assert manager.restore(1, **found).step == 1  # type: ignore[union-attr]
    check_state(found, 1)


def test_newer_link_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path / "run", 1, 2)
    shutil.move(tmp_path / "run" / "checkpoint-2", tmp_path / "big")
    (tmp_path / "run" / "checkpoint-2").symlink_to(tmp_path / "big")
    assert restored(tmp_path / "run") == 1
    (warned,) = warnings_of(caplog)
    assert f"checkpoint-2 is skipped: it is a link to {tmp_path / 'big'}, not a folder" in warned
    with (
        manager_of(None, tmp_path / "run") as manager,
        pytest.raises(uc.NotFoundError, match="checkpoint-2: is incomplete: it is a link"),
    ):
        manager.restore(2, **state(0))
    with manager_of(None, tmp_path / "run", interval_steps=1, keep_latest=1) as manager:
        manager.save(3, **state(3))
    assert uc.verify(tmp_path / "big", deep=True).ok, "what a link leads to is not removed"


def test_newer_backup_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / f"checkpoint-{step}").rename(
            tmp_path / f".replaced-abc-checkpoint-{step}"
        )  # as a crash leaves it
    assert restored(tmp_path) == 2
    (warned,) = warnings_of(caplog)
    assert (
        ".replaced-abc-checkpoint-3 is skipped: an interrupted replacement left the only copy"
        in warned
    )
    assert "rename it back to checkpoint-3" in warned
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.NotFoundError, match=r"checkpoint-3: does not exist: .*rename it back"),
    ):
        manager.restore(3, **state(0))

"""A copied checkpoint: no interruption or damage leads to a bad commit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.managers import check_state, delete_file, flip_last_byte, state
from unified_ckpt.engine.folder.copy import CopyResult, copy_checkpoint
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.locks import exclusive_lock
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import FaultPoint, FaultyStorage, FullStorage, SimulatedCrash

NAME = "checkpoint-3"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One with all kinds of files: several of a part, extra state with blobs, a folder, an empty
    file and a link of the trainer's.
    """

    def attach(folder: str) -> None:
        path = Path(folder)
        (path / "config.json").write_text("{}")
        (path / "empty.txt").write_bytes(b"")
        (path / "tokenizer" / "deep").mkdir(parents=True)
        (path / "tokenizer" / "deep" / "merges.txt").write_text("a b")
        (path / "large.bin").write_bytes(os.urandom(3 << 20))
        (path / "linked.json").symlink_to("config.json")
        (path / "nowhere").symlink_to("absent")

    wide = {
        "wide": torch.randn(700, 1000),
        "tall": torch.randn(1000, 300),
        "none": torch.zeros(0, 4),
    }
    uc.save(
        tmp_path / "local" / NAME,
        **{**state(3), "model": {**state(3)["model"], **wide}},
        step=3,
        extra={"seen": bytes(5000)},
        rank_extra={"rng": b"x" * 100},
        attach=attach,
        options=uc.SaveOptions(max_file_bytes=1 << 20),
    )
    (tmp_path / "root").mkdir()
    return tmp_path / "local" / NAME


def copy(
    source: Path,
    storage: LocalStorage,
    *,
    if_exists: str = "keep",
    beat: Callable[[int], object] = lambda _: None,
) -> CopyResult:
    return copy_checkpoint(
        str(source), storage, NAME, if_exists=if_exists, fsync=True, on_progress=beat
    )


def there(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "root"))


def body(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def committed(root: Path) -> list[Path]:
    """All under the root that may be taken for a checkpoint: whole, every one."""
    found = [path for path in root.iterdir() if path.name.startswith("checkpoint-")]
    for path in found:
        assert uc.verify(path, deep=True).problems == ()
    return found


def test_a_copy_is_the_same_save_byte_for_byte(source: Path, tmp_path: Path) -> None:
    moved: list[int] = []
    done = copy(source, there(tmp_path), beat=moved.append)
    assert body(tmp_path / "root" / NAME) == body(source)
    assert len(body(source)) > 12
    assert done.save_id == json.loads((source / "unified_checkpoint.json").read_text())["save_id"]
    assert done.nbytes == sum(moved)
    assert max(moved) <= 1 << 20, "bounded memory"
    assert uc.verify(tmp_path / "root" / NAME, deep=True).ok
    assert os.listdir(tmp_path / "root") == [NAME]


def test_the_same_save_is_not_copied_twice(source: Path, tmp_path: Path) -> None:
    copy(source, there(tmp_path))
    fuse = FaultPoint()
    assert copy(source, FaultyStorage(str(tmp_path / "root"), fuse), if_exists="error").nbytes == 0
    assert fuse.operations == []


@pytest.mark.parametrize("if_exists", ["keep", "replace", "error"])
def test_another_save_of_the_name(source: Path, tmp_path: Path, if_exists: str) -> None:
    uc.save(tmp_path / "root" / NAME, **state(9), step=3)
    before = body(tmp_path / "root" / NAME)
    if if_exists == "error":
        with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
            copy(source, there(tmp_path), if_exists=if_exists)
    else:
        done = copy(source, there(tmp_path), if_exists=if_exists)
        assert (done.nbytes == 0) == (if_exists == "keep")
    assert body(tmp_path / "root" / NAME) == (body(source) if if_exists == "replace" else before)
    assert os.listdir(tmp_path / "root") == [NAME]


def test_files_of_an_unfinished_repair_are_not_copied(source: Path, tmp_path: Path) -> None:
    """Only files in the folder itself are a repair's."""
    right = body(source)
    (source / f"{names.REPAIR_TMP}model.safetensors-0badf00d").write_bytes(b"half of it")
    for folder in (source / f"{names.REPAIR_TMP}mine", source / "tokenizer"):
        folder.mkdir(exist_ok=True)
        (folder / f"{names.REPAIR_TMP}mine").write_text("mine")
        right[str((folder / f"{names.REPAIR_TMP}mine").relative_to(source))] = b"mine"
    copy(source, there(tmp_path))
    assert body(tmp_path / "root" / NAME) == right


def test_folder_at_the_target_of_a_copy_is_renamed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "root" / NAME).mkdir()
    (tmp_path / "root" / NAME / "mine.txt").write_text("mine")
    copy(source, there(tmp_path))
    assert uc.verify(tmp_path / "root" / NAME, deep=True).ok
    assert (tmp_path / "root" / f"{NAME}-before-1" / "mine.txt").read_text() == "mine"


def test_damaged_file_is_never_committed(source: Path, tmp_path: Path) -> None:
    proved = [
        name
        for name in body(source)
        if name.endswith((".safetensors", ".index.json")) or name == "unified_checkpoint.json"
    ]
    assert len(proved) > 9
    for name in proved:
        whole = (source / name).read_bytes()
        for at in {0, 9, len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[at] ^= 4
            (source / name).write_bytes(damaged)
            if name.endswith(".json") and same_json(damaged, whole):
                continue
            with pytest.raises(uc.CheckpointError):
                copy(source, there(tmp_path))
            assert os.listdir(tmp_path / "root") == [], f"{name} at byte {at}"
        (source / name).write_bytes(whole[:-1])
        if not name.endswith(".json"):
            with pytest.raises(uc.IntegrityError):
                copy(source, there(tmp_path))
        (source / name).write_bytes(whole)
    copy(source, there(tmp_path))
    assert len(committed(tmp_path / "root")) == 1


def same_json(damaged: bytes, whole: bytes) -> bool:
    """Whether it is a byte that nothing is proved by: white space, the hint `total_size`, words for
    people.
    """
    try:
        found, right = json.loads(damaged), json.loads(whole)
    except ValueError:
        return False
    if "weight_map" in right:
        return bool(found.get("weight_map") == right["weight_map"])
    told = ("save_id", "created", "seconds", "versions", "world_size")
    return {k: v for k, v in found.items() if k not in told} == {
        k: v for k, v in right.items() if k not in told
    }


def test_flipped_bit_is_reported_with_its_block(source: Path, tmp_path: Path) -> None:
    flip_last_byte(source, "optimizer.safetensors")
    with pytest.raises(
        uc.IntegrityError,
        match=r"optimizer.safetensors: block 0 of optimizer:w/exp_avg has CRC .* it is not copied",
    ):
        copy(source, there(tmp_path))


def test_a_part_that_was_deleted_stays_away(source: Path, tmp_path: Path) -> None:
    delete_file(source)
    (source / "optimizer.safetensors.index.json").unlink()
    copy(source, there(tmp_path))
    assert not (tmp_path / "root" / NAME / "optimizer.safetensors").exists()
    assert uc.verify(tmp_path / "root" / NAME, deep=True).ok


def test_a_file_that_is_missing(source: Path, tmp_path: Path) -> None:
    delete_file(source)
    with pytest.raises(uc.CheckpointError, match="optimizer"):
        copy(source, there(tmp_path))
    assert os.listdir(tmp_path / "root") == []


def test_stop_at_every_operation_commits_nothing_bad(source: Path, tmp_path: Path) -> None:
    fuse = FaultPoint()
    copy(source, FaultyStorage(str(tmp_path / "root"), fuse))
    count = len(fuse.operations)
    assert count > 40
    for at in range(count):
        root = tmp_path / f"root-{at}"
        root.mkdir()
        with pytest.raises(SimulatedCrash):
            copy(source, FaultyStorage(str(root), FaultPoint(at)))
        assert len(committed(root)) <= (at == count - 1), (
            "the rename comes last, but for the folder's fsync"
        )
        for left in root.glob(".unified-*"):
            if not (left / "unified_checkpoint.json").exists():
                with pytest.raises(uc.CheckpointError, match=r"unfinished|no checkpoint"):
                    uc.verify(left)
        copy(source, LocalStorage(str(root)))
        assert body(root / NAME) == body(source)


def test_stopped_while_it_replaces_one_of_both_is_there(source: Path, tmp_path: Path) -> None:
    def prepared(root: Path) -> Path:
        root.mkdir(exist_ok=True)
        uc.save(root / NAME, **state(9), step=3)
        return root

    fuse = FaultPoint()
    copy(source, FaultyStorage(str(prepared(tmp_path / "root")), fuse), if_exists="replace")
    for at in range(len(fuse.operations) - 8, len(fuse.operations)):
        root = prepared(tmp_path / f"root-{at}")
        with pytest.raises(SimulatedCrash):
            copy(source, FaultyStorage(str(root), FaultPoint(at)), if_exists="replace")
        assert committed(root) == [root / NAME]


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    for at in range(0, 20, 3):
        with pytest.raises(uc.StorageError, match="No space left"):
            copy(source, FullStorage(str(tmp_path / "root"), at))
        assert os.listdir(tmp_path / "root") == []


def test_too_little_space_is_an_error_before_a_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: 1000)
    with pytest.raises(uc.StorageError, match="got 1000 bytes of free space, expected "):
        copy(source, there(tmp_path), beat=lambda _: pytest.fail("copied"))
    assert os.listdir(tmp_path / "root") == []


def test_source_cannot_be_removed_while_it_is_copied(source: Path, tmp_path: Path) -> None:
    alone: list[bool] = []

    def beat(_: int) -> None:
        with exclusive_lock(str(source)) as mine:
            alone.append(mine)

    copy(source, there(tmp_path), beat=beat)
    assert set(alone) == {False}
    with exclusive_lock(str(source)) as mine:
        assert mine


def test_error_of_the_progress_callback_ends_the_copy(source: Path, tmp_path: Path) -> None:
    def beat(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        copy(source, there(tmp_path), beat=beat)
    assert os.listdir(tmp_path / "root") == []


def test_missing_or_invalid_checkpoint_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(uc.NotFoundError):
        copy(tmp_path / "none", there(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(uc.CheckpointError):
        copy(tmp_path / "some", there(tmp_path))
    assert os.listdir(tmp_path / "root") == []


def test_the_copy_is_loaded_like_the_original(tmp_path: Path) -> None:
    uc.save(tmp_path / "local" / NAME, **state(3), step=3)
    (tmp_path / "root").mkdir()
    copy(tmp_path / "local" / NAME, there(tmp_path))
    found = state(0)
    assert uc.load(tmp_path / "root" / NAME, **found).step == 3
    check_state(found, 3)

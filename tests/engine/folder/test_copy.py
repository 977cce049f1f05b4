"""Copies of a checkpoint: neither an interruption nor damage leads to a bad commit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import folder_of, on_node
from tests.support.format.manifests import edit_manifest
from tests.support.harness import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    run_ranks,
)
from tests.support.manager.managers import delete_file, state
from unified_ckpt.engine.folder import copy as copy_module
from unified_ckpt.engine.folder import verified_file
from unified_ckpt.engine.folder.copy import CopyReport, copy_checkpoint
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.locks import exclusive_lock
from unified_ckpt.runtime.storage.storage import LocalStorage

NAME = "checkpoint-3"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Save a checkpoint with split parts, blobs, a subfolder, an empty file and links."""

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
    on_progress: Callable[[int], object] = lambda _: None,
) -> CopyReport:
    return copy_checkpoint(str(source), storage, NAME, if_exists=if_exists, on_progress=on_progress)


def root_storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "root"))


def body(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def committed(root: Path) -> list[Path]:
    """Return the committed checkpoints under the root, after verifying each."""
    folders = [path for path in root.iterdir() if path.name.startswith("checkpoint-")]
    for path in folders:
        assert uc.verify(path, deep=True).problems == ()
    return folders


def test_copy_is_byte_identical(source: Path, tmp_path: Path) -> None:
    moved: list[int] = []
    done = copy(source, root_storage(tmp_path), on_progress=moved.append)
    assert body(tmp_path / "root" / NAME) == body(source)
    assert len(body(source)) > 12
    assert done.save_id == json.loads((source / "unified_checkpoint.json").read_text())["save_id"]
    assert done.nbytes == sum(moved)
    assert max(moved) <= 1 << 20, "bounded memory"
    assert uc.verify(tmp_path / "root" / NAME, deep=True).ok
    assert os.listdir(tmp_path / "root") == [NAME]
    fuse = FaultPoint()  # the same save again: nothing is done
    assert copy(source, FaultyStorage(str(tmp_path / "root"), fuse), if_exists="error").nbytes == 0
    assert fuse.operations == []


def test_copy_skips_unfinished_repair_files(source: Path, tmp_path: Path) -> None:
    """Only files directly in the folder are skipped; subfolders may use the same names."""
    right = body(source)
    (source / f"{names.REPAIR_TMP}model.safetensors-0badf00d").write_bytes(b"half of it")
    for folder in (source / f"{names.REPAIR_TMP}mine", source / "tokenizer"):
        folder.mkdir(exist_ok=True)
        (folder / f"{names.REPAIR_TMP}mine").write_text("mine")
        right[str((folder / f"{names.REPAIR_TMP}mine").relative_to(source))] = b"mine"
    copy(source, root_storage(tmp_path))
    assert body(tmp_path / "root" / NAME) == right


def test_copy_of_damaged_file_is_not_committed(source: Path, tmp_path: Path) -> None:
    proved = [
        name
        for name in body(source)
        if name.endswith((".safetensors", ".index.json")) or name == "unified_checkpoint.json"
    ]
    assert len(proved) > 9
    for name in proved:
        whole = (source / name).read_bytes()
        for offset in {0, 9, len(whole) // 2, len(whole) - 1}:
            damaged = bytearray(whole)
            damaged[offset] ^= 4
            (source / name).write_bytes(damaged)
            if name.endswith(".json") and same_json(damaged, whole):
                continue
            with pytest.raises(uc.CheckpointError):
                copy(source, root_storage(tmp_path))
            assert os.listdir(tmp_path / "root") == [], f"{name} at byte {offset}"
        (source / name).write_bytes(whole[:-1])
        if not name.endswith(".json"):
            with pytest.raises(uc.IntegrityError):
                copy(source, root_storage(tmp_path))
        (source / name).write_bytes(whole)
    copy(source, root_storage(tmp_path))
    assert len(committed(tmp_path / "root")) == 1


def same_json(damaged: bytes, whole: bytes) -> bool:
    """Return whether the damage is in white space or in a field that no digest covers."""
    try:
        actual, expected = json.loads(damaged), json.loads(whole)
    except ValueError:
        return False
    if "weight_map" in expected:
        return bool(actual.get("weight_map") == expected["weight_map"])
    unchecked_keys = ("save_id", "created", "seconds", "versions", "world_size")
    return {k: v for k, v in actual.items() if k not in unchecked_keys} == {
        k: v for k, v in expected.items() if k not in unchecked_keys
    }


def test_flipped_bit_is_reported_with_its_block(source: Path, tmp_path: Path) -> None:
    flip(source / "optimizer.safetensors", -1)
    with pytest.raises(
        uc.IntegrityError,
        match=r"optimizer.safetensors: block 0 of optimizer:w/exp_avg has CRC .* it is not copied",
    ):
        copy(source, root_storage(tmp_path))


def test_copy_without_a_deleted_part(source: Path, tmp_path: Path) -> None:
    delete_file(source)
    with pytest.raises(uc.CheckpointError, match="optimizer"):  # its index is there
        copy(source, root_storage(tmp_path))
    assert os.listdir(tmp_path / "root") == []
    (source / "optimizer.safetensors.index.json").unlink()
    copy(source, root_storage(tmp_path))
    assert not (tmp_path / "root" / NAME / "optimizer.safetensors").exists()
    assert uc.verify(tmp_path / "root" / NAME, deep=True).ok


@pytest.mark.parametrize("replaces", [False, True])
def test_copy_stopped_at_every_operation(source: Path, tmp_path: Path, replaces: bool) -> None:
    """The old or the new checkpoint has the name; a staging folder without manifest is refused."""
    start, fuse = tmp_path / "start", FaultPoint()
    start.mkdir()
    if replaces:
        uc.save(start / NAME, **state(9), step=3)
    through = shutil.copytree(start, tmp_path / "through")
    copy(source, FaultyStorage(str(through), fuse), if_exists="replace")
    count = len(fuse.operations)
    assert count > 40
    for fault_index in range(count - 8 if replaces else 0, count):
        root = shutil.copytree(start, tmp_path / f"root-{fault_index}")
        with pytest.raises(SimulatedCrash):
            copy(source, FaultyStorage(str(root), FaultPoint(fault_index)), if_exists="replace")
        # without an old one, only the fsync of the folder follows the rename
        assert len(committed(root)) == (replaces or fault_index == count - 1)
        for left in root.glob(".unified-*"):
            if not (left / names.MANIFEST).exists():
                with pytest.raises(uc.CheckpointError, match=r"unfinished|no checkpoint"):
                    uc.verify(left)
        copy(source, LocalStorage(str(root)), if_exists="replace")
        assert body(root / NAME) == body(source)


def fail(_: int) -> None:
    raise ZeroDivisionError


class Cramped(LocalStorage):
    def free_nbytes(self) -> int:
        return 1000


@pytest.mark.parametrize(
    ("make_storage", "on_progress", "kind", "match"),
    [
        *(
            (lambda root, n=n: FullStorage(root, n), lambda _: None, uc.StorageError, "No space")
            for n in range(0, 20, 3)
        ),
        (Cramped, fail, uc.StorageError, "of free space: got 0.977 KiB, expected "),
        (LocalStorage, fail, ZeroDivisionError, "^$"),
    ],
)
def test_copy_that_fails_leaves_nothing(
    source: Path,
    tmp_path: Path,
    make_storage: Callable[[str], LocalStorage],
    on_progress: Callable[[int], object],
    kind: type[Exception],
    match: str,
) -> None:
    with pytest.raises(kind, match=match):
        copy(source, make_storage(str(tmp_path / "root")), on_progress=on_progress)
    assert os.listdir(tmp_path / "root") == []


def test_copy_locks_the_source(source: Path, tmp_path: Path) -> None:
    acquired_while_copying: list[bool] = []

    def record_lock(_: int) -> None:
        with exclusive_lock(str(source)) as acquired:
            acquired_while_copying.append(acquired)

    copy(source, root_storage(tmp_path), on_progress=record_lock)
    assert set(acquired_while_copying) == {False}
    with exclusive_lock(str(source)) as acquired:
        assert acquired


def test_copy_flushes_large_files_in_pieces(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the sync at the end would wait for the disk alone."""
    monkeypatch.setattr(verified_file, "_FLUSH_NBYTES", 1 << 20)
    flushed: list[tuple[str, int, int]] = []
    storage = root_storage(tmp_path)
    monkeypatch.setattr(storage, "start_flush", lambda *piece: flushed.append(piece))
    copy(source, storage)
    file = max(source.glob("model-*"), key=lambda path: path.stat().st_size)
    pieces = [(start, nbytes) for path, start, nbytes in flushed if path.endswith(file.name)]
    ends = [start + nbytes for start, nbytes in pieces]
    assert len(pieces) == 2
    assert [start for start, _ in pieces] == [0, *ends[:-1]]
    assert file.stat().st_size - ends[-1] < 1 << 20


def test_copy_of_a_checkpoint_replaced_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_and_edit(*arguments: Any, **options: Any) -> Folder:
        folder = open_path(*arguments, **options)
        edit_manifest(source, lambda manifest: manifest.update(step=4))
        return folder

    monkeypatch.setattr(copy_module, "open_path", open_and_edit)
    with pytest.raises(uc.IntegrityError, match="changed while it was opened; copy again"):
        copy(source, root_storage(tmp_path))
    assert os.listdir(tmp_path / "root") == []


def test_copy_without_digests_is_refused(source: Path, tmp_path: Path) -> None:
    edit_manifest(source, lambda manifest: manifest.update(digests=None))
    (source / names.DIGESTS).unlink()
    with pytest.raises(uc.IntegrityError, match="lacks digests, expected one for each block"):
        copy(source, root_storage(tmp_path))
    assert os.listdir(tmp_path / "root") == []


def test_copy_of_a_folder_of_one_node_is_refused(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.save(folder_of(tmp_path, comm.rank), **state(3))

    run_ranks(2, save)
    (tmp_path / "root").mkdir()
    with pytest.raises(uc.IncompleteError, match="holds one of 2 node groups, expected a folder"):
        copy(folder_of(tmp_path, 1), root_storage(tmp_path))
    assert os.listdir(tmp_path / "root") == []


def test_copy_of_missing_or_invalid_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(uc.NotFoundError):
        copy(tmp_path / "none", root_storage(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(uc.CheckpointError):
        copy(tmp_path / "some", root_storage(tmp_path))
    assert os.listdir(tmp_path / "root") == []

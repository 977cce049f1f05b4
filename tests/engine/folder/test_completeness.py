"""Which parts of a checkpoint are complete on disk, judged by names, sizes and headers."""

from __future__ import annotations

from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.manager.managers import state
from unified_ckpt.engine.folder.completeness import header_mismatch, is_complete
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.runtime.storage.storage import LocalStorage

INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path: Path) -> Folder:
    uc.save(tmp_path / "a", **state(1), options=uc.SaveOptions(fsync=False))
    return open_folder(LocalStorage(str(tmp_path / "a")))


@pytest.mark.parametrize("damaged", ["model.safetensors", INDEX])
def test_changed_header_or_index_is_named(tmp_path: Path, saved: Folder, damaged: str) -> None:
    """A part that was deleted with its index is no mismatch."""
    storage, manifest = LocalStorage(str(tmp_path)), saved.require_manifest()
    assert header_mismatch(storage, "a", manifest) == ""
    for path in (tmp_path / "a").glob("optimizer*"):
        path.unlink()
    assert header_mismatch(storage, "a", manifest) == ""
    assert is_complete(storage, "a", manifest, ["model"])
    assert not is_complete(storage, "a", manifest, ["model", "optimizer"])
    flip(tmp_path / "a" / damaged, 20)
    assert header_mismatch(storage, "a", manifest).startswith(f"{damaged}: ")


def test_checkpoint_without_any_part_is_incomplete(tmp_path: Path, saved: Folder) -> None:
    for path in (tmp_path / "a").glob("*[rl].safetensors*"):
        path.unlink()
    assert not is_complete(LocalStorage(str(tmp_path)), "a", saved.require_manifest(), [])

"""One folder as a Source, without and with a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.storage import LocalStorage

TENSORS = {"w": torch.arange(3.0)}


def test_folder_without_a_manifest(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    folder = open_folder(LocalStorage(str(tmp_path)))
    with pytest.raises(uc.FormatError, match="has no manifest, expected a unified checkpoint"):
        folder.require_manifest()


def test_folder_without_values_of_ranks(tmp_path: Path) -> None:
    uc.save(tmp_path / "a", model=TENSORS)
    folder = open_folder(LocalStorage(str(tmp_path / "a")))
    assert folder.rank_extra(0) is None
    assert folder.rank_values(0) == ()


def test_headers_are_read_when_they_are_needed(tmp_path: Path) -> None:
    uc.save(tmp_path / "a", model=TENSORS)
    folder, read = open_folder(LocalStorage(str(tmp_path / "a"))), bytearray(12)
    for _ in range(2):
        folder.read_into(("model", "w"), 0, memoryview(read))
        assert torch.equal(torch.frombuffer(read, dtype=torch.float32), TENSORS["w"])
        folder.drop_headers()


@pytest.mark.parametrize("file", [names.DIGESTS, names.RANK_EXTRA])
def test_file_of_no_part_is_refused(tmp_path: Path, file: str) -> None:
    uc.save(tmp_path / "a", model=TENSORS, rank_extra=1)
    with pytest.raises(uc.FormatError, match=f"{file}: holds no tensors of a part"):
        uc.load(tmp_path / "a" / file, model={"w": torch.zeros(3)})

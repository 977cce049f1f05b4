"""A good checkpoint, and readers of its files for tests of repair."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc

NAME = "checkpoint-7"


def put(folder: Path, *, seed: int = 0) -> Path:
    """Write a model of three files (one of two digest blocks), an optimizer, extra state with
    bytes, and files of a trainer.
    """
    draw = torch.Generator().manual_seed(seed)
    model = {
        "wide": torch.randn(700, 500, generator=draw),
        "b": torch.randn(70_000, generator=draw),
        "none": torch.zeros(0, 3),
    }
    uc.save(
        folder,
        model=model,
        optimizer={"b/exp_avg": torch.randn(70_000, generator=draw), "b/step": torch.tensor(7.0)},
        step=7,
        extra={"seen": bytes(range(256)) * 20},
        rank_extra={"rng": torch.randn(500, generator=draw)},
        attach=lambda folder: Path(folder, "config.json").write_text("{}"),
        options=uc.SaveOptions(max_file_bytes=1 << 18, fsync=False),
    )
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return put(tmp_path_factory.mktemp("good") / NAME)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run" / NAME))


def body(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path, part: str) -> list[Path]:
    return sorted(folder.glob(f"{part}*.safetensors"))

"""Native sharded checkpoints are read bitwise; damaged ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

pytestmark = pytest.mark.slow
FOLDERS = {
    "sharded": ("sharded", "accelerate"),
    "full": ("full", "accelerate"),
    "ranks": ("ranks", "accelerate"),
    "hfdcp": ("hfdcp", "huggingface-shards"),
    "lightning": ("lightning.ckpt", "lightning-sharded"),
    "trainer": ("run/checkpoint-2", "trainer"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native")
    torchrun(2, "worker_native.py", path, timeout_seconds=240)
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_every_form_matches_memory(root: Path, name: str) -> None:
    folder, kind = FOLDERS[name]
    needed = torch.load(root / f"{name}.pt")
    with uc.open(root / folder) as source:
        assert source.format == kind
        tensors = {key: view[...] for part in source.parts for key, view in source[part].items()}
        assert tensors.keys() == needed.keys()
        assert all(
            torch.equal(tensors[key], tensor) and tensors[key].dtype == tensor.dtype
            for key, tensor in needed.items()
        )
        named = [name for group in source.source.metadata().groups for name in group["names"]]
        assert sorted(named) == sorted({key.rpartition("/")[0] for key in needed if "/" in key})


def test_random_states_and_plain_values(root: Path) -> None:
    with uc.open(root / "sharded") as source:
        assert source.extra["scheduler"]["_step_count"] == 3
        assert [state["torch"].dtype for state in source.rank_extra] == [torch.uint8] * 2
        rng_state = torch.load(root / "sharded" / "random_states_1.pkl", weights_only=False)
        assert torch.equal(source.rank_extra[1]["torch"], rng_state["torch_manual_seed"])
        assert source.rank_extra[1]["python"] == rng_state["random_state"]
    with uc.open(root / "lightning.ckpt") as source:
        assert source.step == 2
        assert source.extra["hyper_parameters"]["lr"] == 0.01
        assert source.source.metadata().groups[0]["options"]["betas"] == (0.9, 0.999)


MISSING = [
    ("sharded", "pytorch_model_fsdp_0/__1_0.distcp", r"__1_0.distcp: is missing"),
    ("sharded", "optimizer_0/.metadata", r"optimizer_0: no .metadata"),
    ("full", "pytorch_model_fsdp.bin", r"no weights found"),
    ("ranks", "pytorch_model_fsdp_0_rank1.bin", r"got files of 1 ranks, expected 2"),
    ("ranks", "optimizer_0_rank0.bin", r"files are missing .*\n  optimizer_0_rank0.bin"),
    ("hfdcp", "shard-00001-model-00001-of-00002.safetensors", r"no shard has box \(0, 0\)"),
    ("hfdcp", "shard-00002-model-00002-of-00002.safetensors", r"target differ"),
    ("lightning.ckpt", "__0_0.distcp", r"__0_0.distcp: is missing"),
    ("sharded", "random_states_0.pkl", r"files are missing .*\n  random_states_0.pkl"),
]


@pytest.mark.parametrize(("folder", "file", "text"), MISSING)
def test_missing_file_is_named(
    root: Path, tmp_path: Path, folder: str, file: str, text: str
) -> None:
    shutil.copytree(root / folder, tmp_path / folder)
    os.remove(tmp_path / folder / file)
    model = {
        name: torch.zeros_like(value)
        for name, value in torch.load(root / f"{folder.removesuffix('.ckpt')}.pt").items()
        if "/" not in name
    }
    with pytest.raises((uc.IncompleteError, uc.MismatchError), match=text):
        uc.load(tmp_path / folder, model=model)
    assert not any(tensor.any() for tensor in model.values())


def test_shards_without_offsets_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "hfdcp", tmp_path / "c")
    path = tmp_path / "c" / "shard-00002-model-00001-of-00002.safetensors"
    _edit_header(path, lambda metadata: metadata.pop("DCP_SHARDING_INFO"))
    with pytest.raises(uc.FormatError, match="no DCP_SHARDING_INFO"):
        uc.open(tmp_path / "c")
    _edit_header(path, lambda metadata: metadata.update(DCP_SHARDING_INFO='{"embed.weight": 3}'))
    with pytest.raises(
        uc.FormatError, match=r"expected DCP_SHARDING_INFO of torch\.distributed\.checkpoint"
    ):
        uc.open(tmp_path / "c")
    _edit_header(
        path,
        lambda metadata: metadata.update(
            DCP_SHARDING_INFO='{"embed.weight": {"saved_offsets": [40, 0]}}'
        ),
    )
    with pytest.raises((uc.FormatError, uc.IncompleteError), match=r"overlap|nothing holds"):
        uc.open(tmp_path / "c")


def _edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + nbytes])
    change(header["__metadata__"])
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + body[8 + nbytes :])

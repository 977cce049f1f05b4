"""Buffers that differ between replicas: DistributedDataParallel's own rule says whose count, so a
save does not refuse them.
"""

from __future__ import annotations

from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun


def test_batch_norm_under_ddp_is_saved_as_rank_0_has_it(tmp_path: Path) -> None:
    torchrun(2, "worker_ddp.py", tmp_path, timeout_seconds=120)
    expected = torch.load(tmp_path / "rank0.pt")
    with uc.open(tmp_path / "plain") as source:
        found = {name: tensor[...] for name, tensor in source["model"].items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with uc.open(tmp_path / "masters") as source:
        assert torch.equal(
            source["master_weights"]["1.running_mean"][...], expected["1.running_mean"]
        )
        assert torch.equal(
            source["model"]["1.running_mean"][...], expected["1.running_mean"].bfloat16()
        )
    with uc.open(tmp_path / "without") as source:
        found = {name: tensor[...] for name, tensor in source["model_without_masters"].items()}
        assert source.parts == ("master_weights", "model_without_masters", "optimizer")
    assert found.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

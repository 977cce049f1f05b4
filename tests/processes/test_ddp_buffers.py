"""Buffers that differ between replicas: DistributedDataParallel broadcasts rank 0's, so a save does
not refuse them.
"""

from __future__ import annotations

from pathlib import Path

import torch

import unified_ckpt as uc


def test_batch_norm_statistics_are_those_of_rank_0(two_ranks: Path) -> None:
    root = two_ranks / "ddp"
    expected = torch.load(root / "rank0.pt")
    with uc.open(root / "plain") as source:
        stored = {name: tensor[...] for name, tensor in source["model"].items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    with uc.open(root / "masters") as source:
        assert torch.equal(
            source["master_weights"]["1.running_mean"][...], expected["1.running_mean"]
        )
        assert torch.equal(
            source["model"]["1.running_mean"][...], expected["1.running_mean"].bfloat16()
        )
    with uc.open(root / "without") as source:
        stored = {name: tensor[...] for name, tensor in source["model_without_masters"].items()}
        assert source.parts == ("master_weights", "model_without_masters", "optimizer")
    assert stored.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())

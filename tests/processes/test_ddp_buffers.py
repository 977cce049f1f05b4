"""What differs between ranks: DistributedDataParallel broadcasts rank 0's buffers, so a save does
not refuse them. It refuses plain scales of FSDP2's shards, and records buffers without the wrapper.
"""

from __future__ import annotations

import json
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


def test_replicas_that_differ_later_are_recorded_or_refused(two_ranks: Path) -> None:
    root = two_ranks / "ddp"
    with uc.open(root / "unwrapped-2") as source:
        assert "1.running_mean" in source["model"]
    manifest = json.loads((root / "unwrapped-2" / "unified_checkpoint.json").read_text())
    (record,) = manifest["replica_differences"]
    assert (record["tensor"], record["ranks"]) == ("model:1.running_mean", [[0], [1]])
    assert not (root / "scales-2").exists()
    with uc.open(root / "scales-3") as source:
        assert source["optimizer"]["weight/scale"][...].tolist() == [1.0, 2.0]

"""torchrun script: loads a checkpoint of MaxText into a model under FSDP2. ROOT/config is the
model's folder, ROOT/c the checkpoint.

ROOT/moments.safetensors has what the optimizer must hold then, whole.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unified_ckpt as uc
from tests.support.processes.worker import started
from unified_ckpt.options import LoadOptions, SourceOptions


def main() -> None:
    root = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(root / "config")
    )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = LoadOptions(source=SourceOptions(config=str(root / "config")))
    report = uc.load(root / "c", model=model, optimizer=optimizer, options=options)
    assert report.step == 7
    state, moments = (
        load_file(root / "config" / "model.safetensors"),
        load_file(root / "moments.safetensors"),
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(cast("DTensor", parameter).full_tensor(), state[name]), name
        held = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[key].full_tensor(), moments[f"{name}/{key}"]), f"{name}/{key}"
        assert held["step"] == 7

    # Without a file: an error on every rank, the same, and no hang.
    dist.barrier()
    largest = max((root / "c").rglob("d/*"), key=lambda path: (path.stat().st_size, path.name))
    dist.barrier()
    if dist.get_rank() == 0:
        largest.rename(root / "aside")
    dist.barrier()
    with pytest.raises(uc.IncompleteError, match=rf"{largest.name} is missing"):
        uc.load(root / "c", model=model, optimizer=optimizer, options=options)


if __name__ == "__main__":
    with started():
        main()

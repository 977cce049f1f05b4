"""torchrun script: resumes a Llama under FSDP2 from ROOT/job, and converts it on all ranks.

ROOT/job has four Megatron-LM files. ROOT/hub.pt has the expected global tensors: {"param",
"exp_avg", "exp_avg_sq"} by Hugging Face name.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unified_ckpt as uc
from tests.support.processes.worker import started


def build(root: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(root / "hub"))
    fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    )
    groups = [
        {"params": [param for param in model.parameters() if (param.dim() == 1) == norms]}
        for norms in (False, True)
    ]
    return model, torch.optim.AdamW(groups)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    root = Path(sys.argv[1])
    expected = torch.load(root / "hub.pt")
    model, optimizer = build(root)
    report = uc.load(root / "job", model=model, optimizer=optimizer)
    assert report.step == 7
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), expected["param"][name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[parameter][key]), expected[key][name]), (
                f"{name}/{key}"
            )
    done = uc.convert(root / "job", root / "new")
    assert done.compared == len(expected["param"])
    again, fresh = build(root)
    uc.load(root / "new", model=again, optimizer=fresh)
    assert all(
        torch.equal(whole(param.detach()), expected["param"][name])
        for name, param in again.named_parameters()
    )

    # Another order of the optimizer's state, then a rank's folder less: the same error on every
    # rank, and no hang.
    dist.barrier()
    if dist.get_rank() == 0:
        path = root / "job" / "iter_0000007" / "mp_rank_01_000"
        turned = torch.load(path / "distrib_optim.pt")
        ((_, flat),) = turned[0].items()
        flat["param"] = flat["param"].roll(64)
        torch.save(turned, path / "distrib_optim.pt")
    dist.barrier()
    with pytest.raises(uc.CheckpointError, match=r"does not round to the model's tensor"):
        uc.load(root / "job", model=model, optimizer=optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root / "job" / "iter_0000007" / "mp_rank_01_000")
    dist.barrier()
    before = [whole(param.detach()).clone() for param in again.parameters()]
    with pytest.raises(uc.IncompleteError, match=r"mp_rank_01_000"):
        uc.load(root / "job", model=again, optimizer=fresh)
    assert all(
        torch.equal(whole(param.detach()), previous)
        for param, previous in zip(again.parameters(), before, strict=True)
    )


if __name__ == "__main__":
    with started():
        main()

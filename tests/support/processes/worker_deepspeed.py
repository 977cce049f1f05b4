"""torchrun script: DeepSpeed trains and saves in each of its ways; from what it saved, plain
PyTorch goes on beside it.

ROOT/<case> is DeepSpeed's folder, ROOT/<case>.pt all that its live engine holds, whole:
{"part:name": tensor}, and the losses that followed; steps 0 and 6, and 3 without frozen parameters,
are saved as well, and not named by `latest`. Tensors of the engine are found by where its
parameters lie in its flat buffers, not by any list of names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.distributed.fsdp import fully_shard

import unified_ckpt as uc
from tests.support.processes.worker import started

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: (
    None
)  # a kernel that would be compiled first, for minutes; gloo does as well

BF16 = {"bf16": {"enabled": True}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[
    int, dict[str, tuple[int, dict[str, Any], dict[str, Any]]]
] = {  # by world: name -> stage, options of ZeRO, others
    2: {
        "1": (1, {}, {}),
        "1-robin": (1, {"round_robin_gradients": True}, BF16),
        "2": (2, {}, BF16),
        "2-robin": (2, {"round_robin_gradients": True}, {}),
        "2-elastic": (2, {"elastic_checkpoint": True}, BF16),
        "2-aligned": (2, {"parameter_alignment": True}, BF16),
        "2-unzipped": (2, {}, BF16 | {"checkpoint": {"checkpoint_serialization": False}}),
        "2-half": (2, {}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        "bf16-optimizer": (1, {}, BF16 | FP32_GRADS),
        "3": (3, {"sub_group_size": 40}, BF16),
        "3-whole": (3, {}, {}),
    },
    3: {
        "2": (2, {}, BF16),
        "2-robin": (2, {"round_robin_gradients": True}, BF16),
        "bf16-optimizer": (1, {}, BF16 | FP32_GRADS),
        "3": (3, {"sub_group_size": 20}, BF16),
    },
}
RESUMED = ("1", "2-robin", "bf16-optimizer", "3", "3-whole")
CONVERTED = ("2", "3", "2-robin")  # also converted by DeepSpeed's converter


class Net(nn.Module):
    """Has tied and frozen weights, a buffer, sizes that no number of ranks divides, and a parameter
    of one element.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.down(torch.tanh(self.up(self.embed(tokens)))))
        return self.head(self.norm(hidden) * self.gain) * self.scale[0].to(hidden.dtype)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in named if param.dim() > 1], "weight_decay": 0.1},
        {
            "params": [param for name, param in named if param.dim() == 1 and name != "gain"],
            "weight_decay": 0.0,
        },
        {
            "params": [param for name, param in named if name == "gain"],
            "weight_decay": 0.0,
            "lr": 0.003,
        },
    ]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 11, (4, 6), generator=draw)
    return nn.functional.cross_entropy(
        model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten()
    )


def train(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def flat_groups(engine: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """For stages 1 and 2: each group's low-precision buffer, and its flat fp32 weights and states,
    gathered from all ranks.
    """
    optimizer = engine.optimizer
    bf16 = type(optimizer).__name__ == "BF16_Optimizer"
    flats = optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat
    masters = (
        optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    )
    for flat, master in zip(flats, masters, strict=True):
        local_parts = {"fp32": master.detach()} | {
            key: state for key, state in optimizer.optimizer.state[master].items() if state.dim()
        }
        yield flat, {key: gathered(state) for key, state in local_parts.items()}


def gathered(local: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """State of the live engine: fp32 weights and moments of trained parameters, and all model
    tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    trained = [
        (name, param) for name, param in engine.module.named_parameters() if param.requires_grad
    ]
    if engine.zero_optimization_stage() == 3:
        for name, param in trained:
            tensors[f"master_weights:{name}"] = safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer:{name}/{key}"] = safe_get_full_optimizer_state(
                    param, key
                ).clone()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            model_tensors = {
                name: param.detach().clone() for name, param in engine.module.named_parameters()
            }
    else:
        for flat, whole in flat_groups(engine):
            for name, param in trained:
                offset = (param.data_ptr() - flat.data_ptr()) // param.element_size()
                if offset >= 0 and offset + param.numel() <= flat.numel():
                    for key, value in whole.items():
                        part = (
                            "master_weights:" + name if key == "fp32" else f"optimizer:{name}/{key}"
                        )
                        tensors[part] = (
                            value[offset : offset + param.numel()].view(param.shape).clone()
                        )
        model_tensors = {
            name: param.detach().clone() for name, param in engine.module.named_parameters()
        }
    model_tensors |= {name: param.clone() for name, param in engine.module.named_buffers()}
    assert len(tensors) == 3 * len(trained)
    return tensors | {f"model:{name}": param for name, param in model_tensors.items()}


def sharded_losses(folder: Path, first: int, count: int) -> list[float]:
    """Continue under FSDP2 in fp32, whatever the training dtype was."""
    model = build()
    fully_shard(model)
    optimizer = torch.optim.AdamW(grouped(model))
    assert uc.load(folder, model=model, optimizer=optimizer).step == first
    losses = []
    for step in range(first, first + count):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(root: Path, name: str, stage: int, zero: dict[str, Any], more: dict[str, Any]) -> None:
    model = build()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the default clips at 1
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **more,
    }
    optimizer = torch.optim.AdamW(grouped(model), lr=0.01)
    scheduler = (
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5) if name == "2" else None
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
    )
    if name in CONVERTED:
        engine.save_checkpoint(str(root / name), tag="fresh", save_latest=False)
    train(engine, 0, 3)
    engine.save_checkpoint(str(root / name), client_state={"mine": {"seen": (1, 2)}})
    if name in CONVERTED:
        engine.save_checkpoint(
            str(root / name), tag="unfrozen", save_latest=False, exclude_frozen_parameters=True
        )
    expected: dict[str, Any] = whole_state(engine)
    expected["optimizer's class"] = type(engine.optimizer).__name__
    expected["losses"] = train(engine, 3, 3)
    engine.save_checkpoint(str(root / name), save_latest=False)
    engine.destroy()
    if dist.get_rank() == 0:
        torch.save(expected, root / f"{name}.pt")
        if name in CONVERTED and dist.get_world_size() == 2:
            convert(root / name, root / f"{name}-universal")
    dist.barrier()
    if dist.get_world_size() == 2 and name in RESUMED:
        dtype = torch.bfloat16 if more else torch.float32
        near = (
            expected["losses"]
            if dtype == torch.float32
            else pytest.approx(expected["losses"], rel=0.01)
        )
        assert sharded_losses(root / name, 3, 3) == near


def convert(source: Path, target: Path) -> None:
    sys.argv = [
        "ds_to_universal",
        "--input_folder",
        str(source / "global_step3"),
        "--output_folder",
        str(target),
    ]
    sys.argv += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def without_zero(root: Path) -> None:
    """Stage 0 with the caller's optimizer: one file, with its state by position."""
    model = build()
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(grouped(model), lr=0.01), config=settings
    )
    train(engine, 0, 1)
    engine.save_checkpoint(str(root / "0"))
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), root / "0.pt")
    engine.destroy()


def refused(root: Path) -> None:
    """Every rank raises the same error, and none waits for another."""
    with pytest.raises(uc.IntegrityError, match=r"fp32 weights(.|\n)*target .* unusable"):
        sharded_losses(root / "2-robin-universal", 3, 1)
    file = root / "2" / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if dist.get_rank() == 0:
        file.rename(root / "aside")
    dist.barrier()
    with pytest.raises(uc.IncompleteError, match=r"bf16_zero_pp_rank_1_mp_rank_00"):
        sharded_losses(root / "2", 3, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "aside").rename(file)


def main() -> None:
    root = Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: (
        True
    )  # torch computes with it on the CPU; DeepSpeed refuses
    for name, (stage, zero, more) in CASES[dist.get_world_size()].items():
        run(root, name, stage, zero, more)
    if dist.get_world_size() == 2:
        refused(root)
        without_zero(root)


if __name__ == "__main__":
    with started():
        main()

"""Ranks of Hugging Face's Trainer with a sharded model and the callback: the cases named, one after another, in folders of a root.

A layout is `accelerate` (FSDP2 through TrainingArguments), `plain`, or the sizes of a DistributedConfig: `tp=2,fsdp=2`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from worker import started

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_trainer import STEPS, Sequences, StopAt, losses, model

import unified_ckpt as uc
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
BATCH = 8  # over all ranks, in every layout
Tensors = dict[str, torch.Tensor]


def main() -> None:
    root, cases = Path(sys.argv[1]), sys.argv[2:]
    with started():
        if RANK == 0 and not (root / "start").exists():
            model().save_pretrained(root / "start")
        meet()
        for case in cases:
            name, layout, *more = case.split(":")
            CASES[name](root, layout, *more)


# cases


def same(root: Path, layout: str) -> None:
    """Stopped and resumed is uninterrupted, bit for bit; each checkpoint opens in stock transformers as it is written."""
    straight = trainer(root / f"straight-{layout}", layout, Opens())
    straight.train()
    needed = contents(straight.model, straight.optimizer)
    if RANK == 0:
        torch.save(losses(straight), root / f"losses-{layout}.pt")
    trainer(root / layout, layout, StopAt(4)).train()
    keep(root / layout, root / f"{layout}-stopped")
    resumed = trainer(root / layout, layout, AsStored(root / layout / "checkpoint-4"))
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    check_equal(contents(resumed.model, resumed.optimizer), needed)


def into(root: Path, layout: str, stopped: str) -> None:
    """A run that another layout has stopped is resumed: state bit for bit, losses nearly."""
    run = root / f"{stopped}-{layout}-{WORLD}"
    keep(root / f"{stopped}-stopped", run)
    resumed = trainer(run, layout, AsStored(run / "checkpoint-4"), Opens())
    resumed.train(resume_from_checkpoint=True)
    straight = torch.load(root / f"losses-{stopped}.pt")
    found = losses(resumed)
    assert found[:4] == straight[:4], "the log goes on where it was"
    assert len(found) == STEPS
    assert all(abs(a - b) < 0.02 * b for a, b in zip(found, straight, strict=True)), (found, straight)


CASES = {"same": same, "into": into}


# what they are made of


def trainer(out: Path, layout: str, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    sizes = {f"{name}_size": int(size) for name, size in (one.split("=") for one in layout.split(",") if "=" in one)}
    config = DistributedConfig(**sizes) if sizes else None
    shards: dict[str, Any] = {}
    if layout == "accelerate":
        shards = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    data_parallel = config.dp_size if config is not None else WORLD
    told = TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "seed": 1, "save_only_model": bool(sizes),
            "per_device_train_batch_size": BATCH // data_parallel, **shards, **arguments,
        },
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        accelerator_config={"use_configured_state": accelerated()},
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    start = out.parent / "start"
    found = LlamaForCausalLM.from_pretrained(start, distributed_config=config) if config else LlamaForCausalLM.from_pretrained(start)
    ours = UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False), save_only_model=False if sizes else None)
    return Trainer(model=found, args=told, train_dataset=Sequences(), eval_dataset=Sequences(), callbacks=[ours, *callbacks])


def accelerated() -> bool:
    """Accelerate has FSDP and TP for ranks with an accelerator of their own. It takes a state that is configured already, so these CPU
    ranks say that they are such. What it remembers of the last case goes first.
    """
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
    return True


def contents(model: torch.nn.Module, optimizer: Any) -> Tensors:
    """The whole tensors of model and optimizer, on every rank."""
    inner = getattr(model, "module", model)
    names = {id(parameter): name for name, parameter in inner.named_parameters()}
    found = {name: whole(tensor) for name, tensor in inner.state_dict().items()}
    for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items():
        found.update({f"{names[id(parameter)]}/{key}": whole(value) for key, value in state.items()})
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_equal(found: Tensors, needed: Tensors) -> None:
    assert found.keys() == needed.keys(), found.keys() ^ needed.keys()
    different = [name for name, tensor in needed.items() if not torch.equal(found[name], tensor)]
    assert not different, different


def stored(folder: Path) -> Tensors:
    """What the files hold, as the safetensors package reads them."""
    names = [name for name in os.listdir(folder) if name.startswith(("model", "optimizer")) and name.endswith(".safetensors")]
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def keep(run: Path, copy: Path) -> None:
    meet()
    if RANK == 0:
        shutil.copytree(run, copy)
    meet()


def meet() -> None:
    if WORLD > 1:
        dist.barrier()


class AsStored(TrainerCallback):
    """When training begins, model and optimizer are those of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._needed = stored(folder)

    def on_train_begin(self, *_: Any, model: torch.nn.Module, optimizer: Any, **__: Any) -> None:
        check_equal(contents(model, optimizer), self._needed)


class Opens(TrainerCallback):
    """After each save stock transformers opens the folder, and finds this model in it."""

    def on_save(self, args: Any, state: Any, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        needed = {name: whole(tensor) for name, tensor in getattr(model, "module", model).state_dict().items()}
        if RANK == 0:
            found = LlamaForCausalLM.from_pretrained(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            check_equal(found.state_dict(), needed)


if __name__ == "__main__":
    main()

"""Loads checkpoints with Paddle's own code; runs where paddlepaddle and paddleformers install.

`resume FORMAT STEP OUT`: PaddleFormers' Trainer resumes a Llama, up to the first step of training.
`load FOLDER OUT`: `paddle.distributed` loads a group folder in both of its ways.

OUT is the start of the names of .npz files, one per process, with tensors as float32. Names are
those of FlexCheckpoint. A sharded tensor has `|START:STOP|SHAPE` after its name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddleformers.trainer import Trainer, TrainingArguments
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM


class ResumedError(Exception):
    """The first step of training begins; Paddle has no kernels for it on CPUs."""


class Resuming(Trainer):
    def training_step(self, *_: Any, **__: Any) -> None:
        raise ResumedError


class Tokens(paddle.io.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, _: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.arange(8), "labels": np.arange(8)}


def initialize() -> None:
    """Make one process, or those of a launcher, work without an accelerator."""
    tensor_fusion_helper.alignment["unknown"] = 256
    paddle.Tensor.cuda = lambda self, *_, **__: self
    if "PADDLE_TRAINERS_NUM" not in os.environ:
        strategy = fleet.DistributedStrategy()
        degrees = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree")
        strategy.hybrid_configs = dict.fromkeys(degrees, 1)
        fleet.init(is_collective=True, strategy=strategy)


def resume(checkpoint_format: str, step: str, out: str) -> dict[str, np.ndarray]:
    config = json.loads((Path(step) / "config.json").read_text())
    dtype, with_optimizer = config["torch_dtype"], (Path(step) / "scheduler.pdparams").exists()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    fields = (*sizes, "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    initialize()
    paddle.seed(1)
    paddle.set_default_dtype(dtype)
    model = LlamaForCausalLM(LlamaConfig(**{field: config[field] for field in fields}, dtype=dtype))
    paddle.set_default_dtype("float32")
    is_half = dtype == "bfloat16"
    arguments = TrainingArguments(
        output_dir=f"{out}-run",
        device="cpu",
        bf16=is_half,
        fp16_opt_level="O2" if is_half else "O1",
        amp_master_grad=is_half,
        max_steps=5,
        per_device_train_batch_size=1,
        save_checkpoint_format=checkpoint_format,
        load_checkpoint_format=checkpoint_format,
        ignore_load_lr_and_optim=not with_optimizer,
        save_strategy="no",
        report_to=[],
    )
    trainer = Resuming(model=model, args=arguments, train_dataset=Tokens())
    try:
        trainer.train(resume_from_checkpoint=step)
    except ResumedError:
        tensors = {name: values(tensor) for name, tensor in model.state_dict().items()}
    weights = model.sharded_state_dict()
    for name, shard in trainer.optimizer.sharded_state_dict(weights).items():
        shape = "x".join(map(str, shard.global_shape))
        where = ""
        if shard.is_flattened:
            where = f"|{shard.flattened_range.start}:{shard.flattened_range.stop}|{shape}"
        tensors[name + where] = values(shard.local_tensor)
    tensors["step"] = np.float32(trainer.state.global_step)
    rate = trainer.lr_scheduler.state_dict()
    tensors["scheduler"] = np.float32([rate["last_epoch"], rate["last_lr"]])
    return tensors


def load(folder: str) -> dict[str, np.ndarray]:
    merged = dist.load_merged_state_dict(folder)
    targets = {
        name: paddle.full(tensor.shape, 7, dtype=tensor.dtype) for name, tensor in merged.items()
    }
    dist.load_state_dict(targets, folder)
    for name, tensor in merged.items():
        if not np.array_equal(values(targets[name]), values(tensor)):
            raise ValueError(f"{name}: load_state_dict differs from load_merged_state_dict")
    return {name: values(tensor) for name, tensor in targets.items()}


def values(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    loaded = resume(*arguments) if mode == "resume" else load(arguments[0])
    np.savez(f"{arguments[-1]}.{dist.get_rank()}.npz", **loaded)

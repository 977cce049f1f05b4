"""One rank of the demo's training job: a small Llama on real text, in the given layout.

Started by `demo.py`, under torchrun or as a single process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc

BATCH, TOKENS = 16, 64  # of the whole job: each step has the same batch in every layout
LEARNING_RATE, WARMUP_STEPS, DECAY_STEPS = 6e-3, 4, 64


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What this rank trains. `mesh` has dims dp and tp; None in a single process.

    `tokenizer` is set on the rank that writes the log and attaches files, None on the others.
    """

    model: LlamaForCausalLM
    optimizer: torch.optim.AdamW
    scheduler: LambdaLR
    mesh: DeviceMesh | None
    tokenizer: Any


def draw_batch(corpus: Tensor, step: int) -> Tensor:
    """Return the tokens of a step, [batch, tokens].

    They are drawn from the step number, so that the data order needs no state.
    """
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(corpus) - TOKENS, (BATCH, 1), generator=draw)
    return corpus[starts + torch.arange(TOKENS)].long()


def build_job(dp: int, tp: int) -> TrainingJob:
    """Build the model, optimizer and scheduler; the initial weights are equal in every layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config)
    mesh = None
    if dp * tp > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        colwise = {f"self_attn.{name}_proj" for name in "qkv"} | {"mlp.gate_proj", "mlp.up_proj"}
        plan: dict[str, Any] = {
            f"model.layers.*.{name}": ColwiseParallel() for name in sorted(colwise)
        }
        plan |= {
            f"model.layers.*.{name}": RowwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        parallelize_module(model, mesh["tp"], plan)
        if dp > 1:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    scheduler = LambdaLR(
        optimizer,
        lambda scheduler_step: (
            min(1.0, (scheduler_step + 1) / WARMUP_STEPS)
            * max(0.1, 1 - scheduler_step / DECAY_STEPS)
        ),
    )
    return TrainingJob(
        model,
        optimizer,
        scheduler,
        mesh,
        byte_tokenizer() if mesh is None or dist.get_rank() == 0 else None,
    )


def byte_tokenizer() -> Any:
    """Return a tokenizer whose token i is byte i: GPT-2's printable stand-ins, and no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=fast)


def train_step(job: TrainingJob, tokens: Tensor) -> float:
    """Train on this global batch. Return its mean loss before the update."""
    if job.mesh is not None:
        tokens = tokens.chunk(job.mesh["dp"].size())[job.mesh.get_local_rank("dp")]
    loss = job.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.scheduler.step()
    mean = loss.detach()
    if job.mesh is not None:
        dist.all_reduce(mean, group=job.mesh.get_group("dp"))
        mean /= job.mesh["dp"].size()
    return float(mean)


def save(
    job: TrainingJob, manager: uc.CheckpointManager, step: int, loss: float
) -> dict[str, Any] | None:
    """Save a checkpoint if it is due, with config and tokenizer attached. Return a log entry."""

    def attach(staging: str) -> None:
        job.model.config.save_pretrained(staging)
        job.tokenizer.save_pretrained(staging)

    extra = {"scheduler": job.scheduler}
    report = manager.save(
        step,
        metrics={"loss": loss},
        model=job.model,
        optimizer=job.optimizer,
        extra=extra,
        attach=attach,
    )
    if not isinstance(report, uc.SaveReport):
        return None
    return {
        "event": "saved",
        "step": step,
        "path": report.path,
        "nbytes": report.nbytes,
        "seconds": report.seconds,
    }


def main() -> None:
    """Train this rank until step `--until`, and log every step and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path, help="where checkpoint-<step> folders go")
    parser.add_argument("log", type=Path, help="one JSON line per step or save")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--dp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="0: never")
    parser.add_argument("--resume", type=int, metavar="STEP", default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = torch.frombuffer(bytearray(arguments.corpus.read_bytes()), dtype=torch.uint8)
    job = build_job(arguments.dp, arguments.tp)
    options = uc.ManagerOptions(
        interval_steps=arguments.save_every or None, asynchronous=False, on_preemption=False
    )
    with (
        arguments.log.open("a", buffering=1) as log,
        uc.CheckpointManager(arguments.root, options=options) as manager,
    ):

        def record(entry: dict[str, Any]) -> None:
            if job.tokenizer is not None:
                log.write(json.dumps(entry) + "\n")

        log.write(json.dumps({"event": "started", "pid": os.getpid()}) + "\n")
        if arguments.resume:
            extra = {"scheduler": job.scheduler}
            manager.restore(arguments.resume, model=job.model, optimizer=job.optimizer, extra=extra)
        for step in range(arguments.resume + 1, arguments.until + 1):
            started = time.perf_counter()
            loss = train_step(job, draw_batch(corpus, step))
            record(
                {
                    "event": "step",
                    "step": step,
                    "loss": loss,
                    "seconds": time.perf_counter() - started,
                }
            )
            if arguments.save_every and (saved := save(job, manager, step, loss)) is not None:
                record(saved)
        if job.mesh is None:
            tokens = draw_batch(corpus, arguments.until + 1)
            with torch.no_grad():
                loss = float(job.model(input_ids=tokens, labels=tokens).loss)
            record({"event": "probe", "step": arguments.until + 1, "loss": loss})
    if job.mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

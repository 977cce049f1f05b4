"""torchrun script: the Trainer resumes what others saved, under DDP and FSDP2.

`formats`: from folders that this script writes; losses equal those of the uninterrupted run.
`deepspeed`: from ROOT/run/checkpoint-3, which `worker_deepspeed_trainer.py` wrote. Every rank gets
the same error for a damaged folder.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import unified_ckpt as uc
from tests.support.integrations.trainers import STEPS, At, losses, model, trainer
from tests.support.processes.worker import started
from tests.support.torch_training import whole

STEP = 3
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
KINDS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": FSDP}


def net() -> LlamaForCausalLM:
    llama = model()
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return llama


def save_formats(run: Trainer, root: Path) -> None:
    optimizer = run.optimizer.optimizer
    extra = {"scheduler": run.lr_scheduler}
    uc.save(root / "unified", model=run.model, optimizer=optimizer, step=STEP, extra=extra)
    model_state, optimizer_state = get_state_dict(run.model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "train_state": {"step": STEP}}
    dcp.save(state, checkpoint_id=str(root / "step-3"))


def check_formats(root: Path) -> None:
    straight: dict[str, list[float]] = {}
    runs: dict[str, Trainer] = {}
    for kind, arguments in KINDS.items():

        def save(kind: str = kind) -> None:
            save_formats(runs[kind], root / kind)

        runs[kind] = trainer(
            root / kind / "whole", At(STEP, save), native=True, net=net(), save_steps=9, **arguments
        )
        runs[kind].train()
        straight[kind] = losses(runs[kind])
    for kind, arguments in KINDS.items():
        for path in (root / kind / "unified", root / kind / "step-3", root / "fsdp2" / "unified"):
            resumed = trainer(root / "resumed", net=net(), save_steps=9, **arguments)
            resumed.train(resume_from_checkpoint=str(path))
            if path.parent.name == kind:
                assert losses(resumed) == straight[kind][STEP:], (kind, path)
            else:
                assert losses(resumed) == pytest.approx(straight[kind][STEP:], rel=1e-5)
            assert resumed.state.global_step == STEPS
    if dist.get_rank() == 0:
        shutil.rmtree(root / "resumed")
        shutil.copytree(root / "fsdp2" / "step-3", root / "resumed" / "step-3")
    dist.barrier()
    resumed = trainer(root / "resumed", net=net(), save_steps=9, **FSDP)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == straight["fsdp2"][STEP:]
    check_error(
        root / "fsdp2" / "step-3", lambda path: min(path.glob("*.distcp")).unlink(), net, "distcp"
    )
    if dist.get_rank() == 0:
        shutil.rmtree(root / "resumed")


def check_error(
    path: Path,
    damage: Callable[[Path], object],
    new_model: Callable[[], LlamaForCausalLM],
    match: str,
) -> None:
    """Damage a folder. Check that every rank raises, and that no model has changed."""
    if dist.get_rank() == 0:
        damage(path)
    dist.barrier()
    for arguments in KINDS.values():
        resumed = trainer(path.parent / "out", net=new_model(), save_steps=9, **arguments)
        before = {name: whole(t).clone() for name, t in resumed.model.state_dict().items()}
        with pytest.raises(uc.CheckpointError, match=match):
            resumed.train(resume_from_checkpoint=str(path))
        after = resumed.model.state_dict()
        assert all(torch.equal(whole(after[name]), tensor) for name, tensor in before.items())


def small() -> LlamaForCausalLM:
    """The model of `worker_deepspeed_trainer.py`."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 30}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, tie_word_embeddings=True))


def check_deepspeed(root: Path) -> None:
    folder = root / "run" / "checkpoint-3"
    with uc.open(folder) as source:
        expected = {name: view[...] for name, view in source["master_weights"].items()}
    runs: dict[str, Trainer] = {}
    for kind, arguments in KINDS.items():
        for path in (folder, folder / "global_step3"):

            def check(kind: str = kind) -> None:
                weights = runs[kind].model.state_dict()
                for name, tensor in expected.items():
                    assert torch.equal(whole(weights[name]), tensor), name

            at_start = At(3, check, method="on_train_begin")
            resumed = runs[kind] = trainer(
                root / "resumed",
                at_start,
                net=small(),
                learning_rate=0.01,
                save_steps=9,
                max_steps=6,
                **arguments,
            )
            resumed.train_dataset = [
                {key: value % 32 for key, value in sample.items()}
                for sample in resumed.train_dataset
            ]
            resumed.train(resume_from_checkpoint=str(path))
            assert (resumed.state.global_step, resumed.lr_scheduler.last_epoch) == (6, 6)
            rates = [e["learning_rate"] for e in resumed.state.log_history if "loss" in e]
            if path != folder:  # the run's own schedule; the Trainer stored that of a shorter run
                assert rates == pytest.approx([0.005, 0.01 / 3, 0.01 / 6])
    missing = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    copy = root / "copy" / "global_step3"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "global_step3", copy)
    dist.barrier()
    check_error(copy, lambda path: (path / missing).unlink(), small, "rank_1|optim_states")
    if dist.get_rank() == 0:
        shutil.rmtree(root / "resumed")
        shutil.rmtree(root / "copy")


def main() -> None:
    root = Path(sys.argv[1])
    (check_deepspeed if sys.argv[2] == "deepspeed" else check_formats)(root)


if __name__ == "__main__":
    with started():
        main()

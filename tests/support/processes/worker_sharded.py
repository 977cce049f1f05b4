"""Ranks of Hugging Face's Trainer with a sharded model and the callback. Runs the named cases in
turn, in folders of a root.

A layout is `accelerate` (FSDP2 through TrainingArguments), `fsdp1`, `plain`, or the sizes of a
DistributedConfig: `tp=2,fsdp=2`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.foreign.expert_models import mixtral
from tests.support.integrations.trainers import SEQUENCES, STEPS, StopAt, losses, model
from tests.support.processes.worker import started
from tests.support.torch_training import whole_state
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback, open_model_names

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
BATCH = 8  # over all ranks, in every layout
Tensors = dict[str, torch.Tensor]


def main() -> None:
    root, cases = Path(sys.argv[1]), sys.argv[2:]
    with started():
        if RANK == 0 and not (root / "start").exists():
            model().save_pretrained(root / "start")
            mixtral().save_pretrained(root / "start-mixtral")
        meet()
        for case in cases:
            name, layout, *more = case.split(":")
            CASES[name](root, layout, *more)


# cases


def same(root: Path, layout: str, net: str = "llama", *more: str) -> None:
    """A stopped and resumed run equals the uninterrupted one, bit for bit. Each checkpoint opens in
    transformers as it is.
    """
    arguments = {"gradient_accumulation_steps": 2} if "accumulate" in more else {}
    name = "-".join([layout, *([] if net == "llama" else [net]), *more])
    straight = trainer(root / f"straight-{name}", layout, Opens(), net=net, **arguments)
    straight.train()
    needed = whole_state(straight.model, straight.optimizer)
    if RANK == 0:
        torch.save(losses(straight), root / f"losses-{name}.pt")
    trainer(root / name, layout, StopAt(4), net=net, **arguments).train()
    copy_run(root / name, root / f"{name}-stopped")
    resumed = trainer(
        root / name, layout, ExpectStored(root / name / "checkpoint-4"), net=net, **arguments
    )
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    check_equal(whole_state(resumed.model, resumed.optimizer), needed)


def into(root: Path, layout: str, stopped: str, net: str = "llama", *, peft: bool = False) -> None:
    """Resume a run that another layout stopped: equal state bit for bit, losses nearly equal."""
    run = root / f"{stopped}-{layout}-{WORLD}"
    copy_run(root / f"{stopped}-stopped", run)
    checks = () if peft else (ExpectStored(run / "checkpoint-4"), Opens())
    resumed = trainer(run, layout, *checks, net=net, peft=peft)
    resumed.train(resume_from_checkpoint=True)
    check_near(losses(resumed), torch.load(root / f"losses-{stopped}.pt"))


def best(root: Path, layout: str) -> None:
    """The best checkpoint stays and is loaded at the end. Of the others only the latest stays."""
    arguments = {
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    best_trainer = trainer(root / f"best-{layout}", layout, **arguments)
    best_trainer.train()
    folder = Path(best_trainer.state.best_model_checkpoint)
    assert folder.name == "checkpoint-2", "the loss falls, and the highest is called the best"
    steps = sorted(path.name for path in folder.parent.glob("checkpoint-*"))
    assert steps == ["checkpoint-2", "checkpoint-6"]
    check_equal(
        whole_state(best_trainer.model),
        {name: tensor for name, tensor in stored(folder).items() if "/" not in name},
    )


def alone(root: Path, layout: str) -> None:
    """A checkpoint without its optimizer opens in transformers. A run continues at its step."""
    run = root / f"alone-{layout}"
    trainer(run, layout, Opens(), only_model=True).train()
    assert not any("optimizer" in name for name in os.listdir(run / "checkpoint-6"))
    resumed = trainer(run, layout)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == resumed.state.max_steps
    check_equal(whole_state(resumed.model), stored(run / "checkpoint-6"))


def errors(root: Path, layout: str, stopped: str) -> None:
    """Each error names the actual content on every rank; nothing hangs or is loaded. The same
    Trainer then trains.
    """
    run = root / f"errors-{layout}"
    copy_run(root / f"{stopped}-stopped", run)
    same_trainer, folder = trainer(run, layout), run / "checkpoint-4"
    refused(
        same_trainer,
        str(run),
        uc.NotFoundError,
        "got a run's folder, expected a checkpoint; the latest is checkpoint-4",
    )
    refused(same_trainer, str(folder / "config.json"), uc.NotFoundError, "got a file")
    refused(same_trainer, str(run / "nothing"), uc.NotFoundError, "got nothing")
    meet()
    if RANK == 0:
        (run / "checkpoint-2" / "unified_checkpoint.json").unlink()
        (run / "checkpoint-2" / "trainer_state.json").unlink()
        shutil.copytree(root / "start", run / "native")
        shutil.copy(folder / "trainer_state.json", run / "native")
    meet()
    refused(
        same_trainer, str(run / "checkpoint-2"), uc.NotFoundError, "it is unfinished or damaged"
    )
    without_optimizer = trainer(root / f"weights-{layout}", layout)
    without_optimizer.train(resume_from_checkpoint=str(run / "native"))
    assert without_optimizer.state.global_step == without_optimizer.state.max_steps
    refused(
        trainer(run, layout, optim="sgd"),
        str(folder),
        uc.MismatchError,
        "expected torch.SGD",
        read=True,
    )
    refused(
        trainer(run, layout, net="mixtral"),
        str(folder),
        uc.MismatchError,
        "got a checkpoint of another model: architectures is",
    )
    resumed = trainer(run, layout)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == STEPS


def native(root: Path, layout: str) -> None:
    """The callback resumes a sharded checkpoint of the Trainer's own; later saves are ours."""
    straight = trainer(root / "straight-stock", layout, native=True)
    straight.train()
    trainer(root / "native", layout, StopAt(4), native=True).train()
    resumed = trainer(root / "native", layout)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    assert uc.verify(root / "native" / "checkpoint-6", deep=True).ok


def native_stop(root: Path, layout: str) -> None:
    """Stop a run that the Trainer saves natively. Store its state in memory, and the losses of an
    uninterrupted run.
    """
    straight = trainer(root / f"stock-straight-{layout}", layout, native=True)
    straight.train()
    stopped = trainer(root / f"stock-{layout}", layout, StopAt(4), native=True)
    stopped.train()
    in_memory = whole_state(stopped.model, stopped.optimizer)
    if RANK == 0:
        torch.save((in_memory, losses(straight)), root / f"stock-{layout}.pt")
    meet()


def native_into(root: Path, layout: str, stopped: str) -> None:
    """Resume it in a layout that the Trainer cannot load it into: state bit for bit, losses nearly
    equal, the next save ours.
    """
    run = root / f"stock-{stopped}-{layout}"
    copy_run(root / f"stock-{stopped}", run)
    in_memory, straight = torch.load(root / f"stock-{stopped}.pt")
    resumed = trainer(run, layout, ExpectState(in_memory), only_model=False)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    check_near(losses(resumed), straight)
    assert uc.verify(run / "checkpoint-6", deep=True).ok


def hub(root: Path, layout: str) -> None:
    """Load a folder with hub names into a sharded model with stacked experts."""
    hub_trainer = trainer(
        root / "hub", layout, net="mixtral", native=True, max_steps=1, save_strategy="no"
    )
    hub_trainer.train()
    with open_model_names(root / "start-mixtral", model=hub_trainer.model) as source:
        assert "model.layers.0.mlp.experts.gate_up_proj" in source["model"]
        report = uc.load(source, model=hub_trainer.model)
    assert report.missing == report.unexpected == ()
    check_equal(
        whole_state(hub_trainer.model),
        AutoModelForCausalLM.from_pretrained(root / "start-mixtral").state_dict(),
    )


def refusals(root: Path, layout: str) -> None:
    """Adapters with FSDP1 or on tensor-parallel models, and pipeline stages are refused by name,
    with a remedy.
    """
    del layout
    flattened = trainer(root / "refused", "fsdp1", native=True, peft=True)
    with pytest.raises(uc.LayoutError, match=r"got adapters \(PEFT\) and FSDP1.*'version': 2"):
        UnifiedCheckpointCallback().attach(flattened)
    adapted = trainer(root / "refused", "tp=2", native=True, peft=True)
    with pytest.raises(uc.LayoutError, match="got adapters \\(PEFT\\) on a model sharded at load"):
        UnifiedCheckpointCallback().attach(adapted)
    staged = trainer(root / "refused", "pp=2", native=True)
    with pytest.raises(uc.LayoutError, match="pipeline stages"):
        UnifiedCheckpointCallback().attach(staged)


def adapters(root: Path, layout: str) -> None:
    """Adapters on a model sharded by FSDP2: stored under PEFT's names, stopped and resumed bit for
    bit.
    """
    straight = trainer(root / f"straight-lora-{layout}", layout, peft=True)
    straight.train()
    if RANK == 0:
        torch.save(losses(straight), root / f"losses-lora-{layout}.pt")
    trainer(root / f"lora-{layout}", layout, StopAt(4), peft=True).train()
    copy_run(root / f"lora-{layout}", root / f"lora-{layout}-stopped")
    resumed = trainer(root / f"lora-{layout}", layout, peft=True)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    check_equal(
        whole_state(resumed.model, resumed.optimizer),
        whole_state(straight.model, straight.optimizer),
    )
    folder, needed = root / f"lora-{layout}" / "checkpoint-6", whole_state(resumed.model)
    base_files = [name for name in os.listdir(folder) if name.startswith(("model", "trainable"))]
    assert base_files == [], "nothing of the base"
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(root / "start"), folder)
    check_equal(opened.state_dict(), needed)


def adapters_into(root: Path, layout: str, stopped: str) -> None:
    """Resume adapters that another layout saved: losses nearly equal."""
    into(root, layout, f"lora-{stopped}", peft=True)


CASES = {
    case.__name__: case
    for case in (
        same,
        into,
        best,
        alone,
        errors,
        native,
        native_stop,
        native_into,
        hub,
        adapters,
        adapters_into,
        refusals,
    )
}


def refused(
    refusing: Trainer, where: str | bool, kind: type[Exception], text: str, *, read: bool = False
) -> None:
    """Check that `train` raises this error. `read`: after the weights were loaded, and before the
    first step.
    """
    before = whole_state(refusing.model)
    with pytest.raises(kind, match=re.escape(text)):
        refusing.train(resume_from_checkpoint=where)
    assert refusing.state.global_step in (0, 4)
    if not read:
        check_equal(whole_state(refusing.model), before)


# helpers


def check_near(actual: list[float], straight: list[float]) -> None:
    """Check the losses of a run that was resumed at step 4 in another layout."""
    assert actual[:4] == straight[:4], "the log goes on where it was"
    assert len(actual) == STEPS
    near = [abs(a - b) < 0.02 * b for a, b in zip(actual, straight, strict=True)]
    assert all(near), (actual, straight)


def trainer(
    out: Path,
    layout: str,
    *callbacks: TrainerCallback,
    net: str = "llama",
    native: bool = False,
    only_model: bool = False,
    peft: bool = False,
    **arguments: Any,
) -> Trainer:
    sizes = {
        f"{name}_size": int(size)
        for name, size in (item.split("=") for item in layout.split(",") if "=" in item)
    }
    config = DistributedConfig(**sizes) if sizes else None
    shards: dict[str, Any] = {}
    if layout in ("accelerate", "fsdp1"):
        shards = {
            "fsdp": "full_shard auto_wrap" if layout == "fsdp1" else True,
            "fsdp_config": {
                "cpu_ram_efficient_loading": False,
                "sync_module_states": False,
                "version": 1 if layout == "fsdp1" else 2,
                "transformer_layer_cls_to_wrap": [f"{net.title()}DecoderLayer"],
            },
        }
    data_parallel = config.dp_size if config is not None else WORLD
    training_arguments = TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": STEPS,
            "save_steps": 2,
            "logging_steps": 1,
            "seed": 1,
            "save_only_model": only_model or bool(sizes),
            "per_device_train_batch_size": BATCH // data_parallel,
            **shards,
            **arguments,
        },
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        accelerator_config={"use_configured_state": accelerated()},
        ddp_find_unused_parameters=False,
    )
    start = out.parent / ("start" if net == "llama" else f"start-{net}")
    network = AutoModelForCausalLM.from_pretrained(
        start, **({"distributed_config": config} if config else {})
    )
    if peft:
        torch.manual_seed(2)
        network = get_peft_model(
            network, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    ours = (
        []
        if native
        else [
            UnifiedCheckpointCallback(
                save_options=uc.SaveOptions(fsync=False), save_only_model=only_model
            )
        ]
    )
    return Trainer(
        model=network,
        args=training_arguments,
        train_dataset=SEQUENCES,
        eval_dataset=SEQUENCES,
        callbacks=[*ours, *callbacks],
    )


def accelerated() -> bool:
    """Accelerate supports FSDP and TP only for ranks with an accelerator each. It accepts a state
    configured beforehand, so these CPU ranks claim to be such. State of the last case is cleared
    first.
    """
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    state = PartialState(cpu=True, backend="gloo")
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
    return True


def stored(folder: Path) -> Tensors:
    """Tensors of the folder's files, read by the safetensors package."""
    names = [
        name
        for name in os.listdir(folder)
        if name.startswith(("model", "optimizer")) and name.endswith(".safetensors")
    ]
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def copy_run(run: Path, copy: Path) -> None:
    meet()
    if RANK == 0:
        shutil.copytree(run, copy)
    meet()


def meet() -> None:
    if WORLD > 1:
        dist.barrier()


class ExpectState(TrainerCallback):
    """Checks model and optimizer when training begins."""

    def __init__(self, needed: Tensors) -> None:
        self._needed = needed

    def on_train_begin(self, *_: Any, model: torch.nn.Module, optimizer: Any, **__: Any) -> None:
        check_equal(whole_state(model, optimizer), self._needed)


class ExpectStored(ExpectState):
    """Checks that model and optimizer are those of a checkpoint when training begins."""

    def __init__(self, folder: Path) -> None:
        super().__init__(stored(folder))


class Opens(TrainerCallback):
    """Checks after each save that transformers opens the folder with this model."""

    def on_save(self, args: Any, state: Any, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        needed = whole_state(model)
        if RANK == 0:
            opened = AutoModelForCausalLM.from_pretrained(
                Path(args.output_dir) / f"checkpoint-{state.global_step}"
            )
            check_equal(opened.state_dict(), needed)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads may abort the exit

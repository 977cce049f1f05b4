"""Ranks of Hugging Face's Trainer with a sharded model and the callback: the cases named, one after
another, in folders of a root.

A layout is `accelerate` (FSDP2 through TrainingArguments), `plain`, or the sizes of a
DistributedConfig: `tp=2,fsdp=2`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
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
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

import unified_ckpt as uc
from tests.support.expert_models import mixtral
from tests.support.processes.worker import started
from tests.support.trainers import STEPS, Sequences, StopAt, losses, model
from unified_ckpt.engine.folder import commit
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
    """Stopped and resumed is uninterrupted, bit for bit; each checkpoint opens in stock
    transformers as it is written.
    """
    arguments = {"gradient_accumulation_steps": 2} if "accumulate" in more else {}
    name = "-".join([layout, *([] if net == "llama" else [net]), *more])
    straight = trainer(root / f"straight-{name}", layout, Opens(), net=net, **arguments)
    straight.train()
    needed = contents(straight.model, straight.optimizer)
    if RANK == 0:
        torch.save(losses(straight), root / f"losses-{name}.pt")
    trainer(root / name, layout, StopAt(4), net=net, **arguments).train()
    keep(root / name, root / f"{name}-stopped")
    resumed = trainer(
        root / name, layout, AsStored(root / name / "checkpoint-4"), net=net, **arguments
    )
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    check_equal(contents(resumed.model, resumed.optimizer), needed)


def into(root: Path, layout: str, stopped: str, net: str = "llama") -> None:
    """A run that another layout has stopped is resumed: state bit for bit, losses nearly."""
    run = root / f"{stopped}-{layout}-{WORLD}"
    keep(root / f"{stopped}-stopped", run)
    resumed = trainer(run, layout, AsStored(run / "checkpoint-4"), Opens(), net=net)
    resumed.train(resume_from_checkpoint=True)
    straight, found = torch.load(root / f"losses-{stopped}.pt"), losses(resumed)
    assert found[:4] == straight[:4], "the log goes on where it was"
    assert len(found) == STEPS
    assert all(abs(a - b) < 0.02 * b for a, b in zip(found, straight, strict=True)), (
        found,
        straight,
    )


def best(root: Path, layout: str) -> None:
    """The best checkpoint is kept and loaded at the end; the others but the newest are removed."""
    told = {
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    made = trainer(root / f"best-{layout}", layout, **told)
    made.train()
    folder = Path(made.state.best_model_checkpoint)
    assert folder.name == "checkpoint-2", "the loss falls, and the highest is called the best"
    assert sorted(os.listdir(folder.parent)) == ["checkpoint-2", "checkpoint-6"]
    check_equal(
        weights(made.model),
        {name: tensor for name, tensor in stored(folder).items() if "/" not in name},
    )


def alone(root: Path, layout: str) -> None:
    """A checkpoint without its optimizer opens everywhere, and a resume from it is refused on every
    rank.
    """
    run = root / f"alone-{layout}"
    made = trainer(run, layout, Opens(), only_model=True)
    made.train()
    assert not any("optimizer" in name for name in os.listdir(run / "checkpoint-6"))
    refused(trainer(run, layout), True, uc.MismatchError, "got only model")


def errors(root: Path, layout: str, stopped: str) -> None:
    """Each says on every rank what is there; nothing hangs, nothing is loaded. Then the same
    Trainer trains.
    """
    run = root / f"errors-{layout}"
    keep(root / f"{stopped}-stopped", run)
    made, folder = trainer(run, layout), run / "checkpoint-4"
    refused(
        made,
        str(run),
        uc.NotFoundError,
        "got a run's folder, expected a checkpoint; the latest is checkpoint-4",
    )
    refused(made, str(folder / "config.json"), uc.NotFoundError, "got a file")
    refused(made, str(run / "nothing"), uc.NotFoundError, "got nothing")
    meet()
    if RANK == 0:
        (run / "checkpoint-2" / "unified_checkpoint.json").unlink()
        (run / "checkpoint-2" / "trainer_state.json").unlink()
        shutil.copytree(root / "start", run / "stock")
        shutil.copy(folder / "trainer_state.json", run / "stock")
    meet()
    refused(made, str(run / "checkpoint-2"), uc.NotFoundError, "it is unfinished or damaged")
    refused(trainer(run, layout), str(run / "stock"), uc.MismatchError, "got only model")
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


def stock(root: Path, layout: str) -> None:
    """A sharded checkpoint of the stock Trainer is resumed by it, and the next ones are ours."""
    straight = trainer(root / "straight-stock", layout, stock=True)
    straight.train()
    trainer(root / "stock", layout, StopAt(4), stock=True).train()
    resumed = trainer(root / "stock", layout)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    assert uc.verify(root / "stock" / "checkpoint-6", deep=True).ok


def stock_stop(root: Path, layout: str) -> None:
    """A run of the stock Trainer that was stopped; what it had in memory, and the losses of one
    that was not.
    """
    straight = trainer(root / f"stock-straight-{layout}", layout, stock=True)
    straight.train()
    stopped = trainer(root / f"stock-{layout}", layout, StopAt(4), stock=True)
    stopped.train()
    held = contents(stopped.model, stopped.optimizer)
    if RANK == 0:
        torch.save((held, losses(straight)), root / f"stock-{layout}.pt")
    meet()


def stock_into(root: Path, layout: str, stopped: str) -> None:
    """It is resumed in a layout that the stock Trainer cannot load it into: state bit for bit,
    losses nearly, the next save ours.
    """
    run = root / f"stock-{stopped}-{layout}"
    keep(root / f"stock-{stopped}", run)
    held, straight = torch.load(root / f"stock-{stopped}.pt")
    resumed = trainer(run, layout, AsHeld(held), only_model=False)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    found = losses(resumed)
    assert found[:4] == straight[:4], "the log goes on where it was"
    assert len(found) == STEPS
    assert all(abs(a - b) < 0.02 * b for a, b in zip(found, straight, strict=True)), (
        found,
        straight,
    )
    assert uc.verify(run / "checkpoint-6", deep=True).ok


def hub(root: Path, layout: str) -> None:
    """A folder in the hub's names is loaded into a sharded model whose experts are stacked."""
    made = trainer(root / "hub", layout, net="mixtral", stock=True, max_steps=1, save_strategy="no")
    made.train()
    with open_model_names(root / "start-mixtral", model=made.model) as source:
        assert "model.layers.0.mlp.experts.gate_up_proj" in source["model"]
        report = uc.load(source, model=made.model)
    assert report.missing == report.unexpected == ()
    check_equal(
        weights(made.model),
        AutoModelForCausalLM.from_pretrained(root / "start-mixtral").state_dict(),
    )


def refusals(root: Path, layout: str) -> None:
    """FSDP1, adapters on tensor-parallel models and pipeline stages are refused by name, with the
    way out.
    """
    del layout
    made = trainer(root / "refused", "accelerate", stock=True)
    made.accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(
        uc.LayoutError,
        match=r"got FSDP1, which flattens parameters; use fsdp_config=\{'version': 2\}",
    ):
        UnifiedCheckpointCallback().attach(made)
    adapted = trainer(root / "refused", "tp=2", stock=True, peft=True)
    with pytest.raises(uc.LayoutError, match="got adapters \\(PEFT\\) on a model sharded at load"):
        UnifiedCheckpointCallback().attach(adapted)
    staged = trainer(root / "refused", "pp=2", stock=True)
    with pytest.raises(uc.LayoutError, match="pipeline stages"):
        UnifiedCheckpointCallback().attach(staged)


def adapters(root: Path, layout: str) -> None:
    """Adapters on a model that FSDP2 shards: stored as PEFT knows them, stopped and resumed bit for
    bit.
    """
    straight = trainer(root / f"straight-lora-{layout}", layout, peft=True)
    straight.train()
    if RANK == 0:
        torch.save(losses(straight), root / f"losses-lora-{layout}.pt")
    trainer(root / f"lora-{layout}", layout, StopAt(4), peft=True).train()
    keep(root / f"lora-{layout}", root / f"lora-{layout}-stopped")
    resumed = trainer(root / f"lora-{layout}", layout, peft=True)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight), (losses(resumed), losses(straight))
    check_equal(
        contents(resumed.model, resumed.optimizer), contents(straight.model, straight.optimizer)
    )
    folder, needed = root / f"lora-{layout}" / "checkpoint-6", weights(resumed.model)
    assert not any(name.startswith("model") for name in os.listdir(folder)), "nothing of the base"
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(root / "start"), folder)
    check_equal(opened.state_dict(), needed)


def adapters_into(root: Path, layout: str, stopped: str) -> None:
    """Adapters that another layout has saved: losses go on nearly as there."""
    run = root / f"lora-{stopped}-{layout}-{WORLD}"
    keep(root / f"lora-{stopped}-stopped", run)
    resumed = trainer(run, layout, peft=True)
    resumed.train(resume_from_checkpoint=True)
    straight, found = torch.load(root / f"losses-lora-{stopped}.pt"), losses(resumed)
    assert found[:4] == straight[:4], "the log goes on where it was"
    assert all(abs(a - b) < 0.02 * b for a, b in zip(found, straight, strict=True)), (
        found,
        straight,
    )


def killed(root: Path, layout: str) -> None:
    """The second save ends this rank, once all is written and before it has its name."""
    made = trainer(root / f"killed-{layout}", layout)
    publish = commit.publish

    def die(*arguments: Any, **more: Any) -> Any:
        if made.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(*arguments, **more)

    commit.publish = die
    made.train()


def after(root: Path, layout: str) -> None:
    """What `killed` has left is resumed, and ends as the run that `same` did not interrupt."""
    run = root / f"killed-{layout}"
    resumed = trainer(run, layout, AsStored(run / "checkpoint-2"))
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == torch.load(root / f"losses-{layout}.pt")
    check_equal(stored(run / "checkpoint-6"), stored(root / f"straight-{layout}" / "checkpoint-6"))


CASES = {
    case.__name__: case
    for case in (
        same,
        into,
        best,
        alone,
        errors,
        stock,
        stock_stop,
        stock_into,
        hub,
        adapters,
        adapters_into,
        refusals,
        killed,
        after,
    )
}


def refused(
    made: Trainer, where: str | bool, kind: type[Exception], text: str, *, read: bool = False
) -> None:
    """`read`: the error comes after the weights were loaded, and before the first step."""
    before = weights(made.model)
    with pytest.raises(kind, match=re.escape(text)):
        made.train(resume_from_checkpoint=where)
    assert made.state.global_step in (0, 4)
    if not read:
        check_equal(weights(made.model), before)


# what they are made of


def trainer(
    out: Path,
    layout: str,
    *callbacks: TrainerCallback,
    net: str = "llama",
    stock: bool = False,
    only_model: bool = False,
    peft: bool = False,
    **arguments: Any,
) -> Trainer:
    sizes = {
        f"{name}_size": int(size)
        for name, size in (one.split("=") for one in layout.split(",") if "=" in one)
    }
    config = DistributedConfig(**sizes) if sizes else None
    shards: dict[str, Any] = {}
    if layout == "accelerate":
        shards = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": [f"{net.title()}DecoderLayer"],
            },
        }
    data_parallel = config.dp_size if config is not None else WORLD
    told = TrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "seed": 1, "save_only_model": only_model or bool(sizes),  # noqa: E501
            "per_device_train_batch_size": BATCH // data_parallel, **shards, **arguments,
        },
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        accelerator_config={"use_configured_state": accelerated()},
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    start = out.parent / ("start" if net == "llama" else f"start-{net}")
    found = AutoModelForCausalLM.from_pretrained(
        start, **({"distributed_config": config} if config else {})
    )
    if peft:
        torch.manual_seed(2)
        found = get_peft_model(
            found, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    ours = (
        []
        if stock
        else [
            UnifiedCheckpointCallback(
                save_options=uc.SaveOptions(fsync=False), save_only_model=only_model
            )
        ]
    )
    return Trainer(
        model=found,
        args=told,
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=[*ours, *callbacks],
    )


def accelerated() -> bool:
    """Accelerate has FSDP and TP for ranks with an accelerator of their own. It takes a state that
    is configured already, so these CPU ranks say that they are such. What it remembers of the last
    case goes first.
    """
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
    return True


def contents(model: torch.nn.Module, optimizer: Any) -> Tensors:
    """The whole tensors of model and optimizer, on every rank."""
    names = {
        id(parameter): name
        for name, parameter in getattr(model, "module", model).named_parameters()
    }
    found = weights(model)
    for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items():
        found.update(
            {f"{names[id(parameter)]}/{key}": whole(value) for key, value in state.items()}
        )
    return found


def weights(model: torch.nn.Module) -> Tensors:
    return {
        name: whole(tensor) for name, tensor in getattr(model, "module", model).state_dict().items()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_equal(found: Tensors, needed: Tensors) -> None:
    assert found.keys() == needed.keys(), found.keys() ^ needed.keys()
    different = [name for name, tensor in needed.items() if not torch.equal(found[name], tensor)]
    assert not different, different


def stored(folder: Path) -> Tensors:
    """What the files hold, as the safetensors package reads them."""
    names = [
        name
        for name in os.listdir(folder)
        if name.startswith(("model", "optimizer")) and name.endswith(".safetensors")
    ]
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def keep(run: Path, copy: Path) -> None:
    meet()
    if RANK == 0:
        shutil.copytree(run, copy)
    meet()


def meet() -> None:
    if WORLD > 1:
        dist.barrier()


class AsHeld(TrainerCallback):
    """When training begins, model and optimizer are these."""

    def __init__(self, needed: Tensors) -> None:
        self._needed = needed

    def on_train_begin(self, *_: Any, model: torch.nn.Module, optimizer: Any, **__: Any) -> None:
        check_equal(contents(model, optimizer), self._needed)


class AsStored(AsHeld):
    """When training begins, model and optimizer are those of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(stored(folder))


class Opens(TrainerCallback):
    """After each save stock transformers opens the folder, and finds this model in it."""

    def on_save(self, args: Any, state: Any, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        needed = weights(model)
        if RANK == 0:
            found = AutoModelForCausalLM.from_pretrained(
                Path(args.output_dir) / f"checkpoint-{state.global_step}"
            )
            check_equal(found.state_dict(), needed)


if __name__ == "__main__":
    main()

"""Checkpoints for the conformance suite, written by their own frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import unified_ckpt as uc
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.source_cases import LAZY_NBYTES, Case, Key
from tests.support.integrations import lightnings, trainers

QUICK = uc.SaveOptions(fsync=False)
Tensors = Mapping[str, torch.Tensor]
NO_CHECKPOINT = "holds no checkpoint: expected"


def drawn(*, float8: bool = True) -> dict[str, torch.Tensor]:
    """Many dtypes, 0-d, empty, odd; one tensor of several digest blocks."""
    torch.manual_seed(0)
    small = {"small": torch.randn(4, 4).to(torch.float8_e4m3fn)} if float8 else {}
    return {
        "wide": torch.randn(1030, 300),
        "cube": torch.randn(3, 5, 7, dtype=torch.float64),
        "turned": torch.randn(3, 4).t(),
        "half": torch.randn(7, 16).to(torch.bfloat16),
        "ids": torch.arange(20).reshape(5, 4),
        "odd": torch.arange(13, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        **small,
    }


STATE = {"wide/exp_avg": torch.randn(1030, 300), "wide/step": torch.tensor(3.0)}
OPTIMIZER = {
    "state": {"wide": {name.partition("/")[2]: tensor for name, tensor in STATE.items()}},
    "param_groups": [{"params": ["wide"], "lr": 0.1}],
    "calls": 417,  # a few classes of optimizers have more than state and groups
}
TIED = {"model": {"tied": "half"}}


def with_tie(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {**tensors, "tied": tensors["half"]}


def keyed(**parts: Tensors) -> dict[Key, torch.Tensor]:
    return {
        (part, name): tensor for part, tensors in parts.items() for name, tensor in tensors.items()
    }


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


# ---- PyTorch and Hugging Face


def unified(root: Path, **options: Any) -> Case:
    tensors = drawn()
    uc.save(
        root / "c",
        model=with_tie(tensors),
        optimizer=STATE,
        parts={"ema": {"wide": tensors["wide"]}},
        step=3,
        extra={"bytes": bytes(range(256)) * 20, "lr": 0.1},
        rank_extra={"rng": torch.randn(500)},
        options=QUICK.model_copy(update=options),
    )
    expected = keyed(model=tensors, optimizer=STATE, ema={"wide": tensors["wide"]})
    return Case(root / "c", expected, aliases=TIED, digests="all", located=True)


def sharded(
    folder: Path, write: Callable[[dict[str, torch.Tensor], Path], object], file: str
) -> Tensors:
    """Two files and their index, as transformers writes them."""
    folder.mkdir()
    tensors, weight_map = drawn(), {}
    second = sorted(tensors.keys() - {"wide", "ids"})
    for number, names in enumerate((["wide", "ids"], second), 1):
        path = folder / file.replace(".", f"-0000{number}-of-00002.")
        write({name: tensors[name].contiguous() for name in names}, path)
        weight_map |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{file}.index.json").write_text(json.dumps(index))
    return tensors


def huggingface(root: Path) -> Case:
    tensors = sharded(root / "hf", save_file, "model.safetensors")
    return Case(root / "hf", keyed(model=tensors), format="huggingface", located=True)


def bin_file(root: Path) -> Case:
    torch.save(drawn(), root / "pytorch_model.bin")
    return Case(root, keyed(model=drawn()), format="huggingface-bin")


def bin_folder(root: Path) -> Case:
    tensors = sharded(root / "hf", torch.save, "pytorch_model.bin")
    names = {"*.index.json": NO_CHECKPOINT}
    return Case(root / "hf", keyed(model=tensors), format="huggingface-bin", words_by_file=names)


# As training scripts save them: the model, and what is beside it.
FORMS: dict[str, Callable[[Tensors], dict[str, Any]]] = {
    "bare": dict,
    "model": lambda tensors: {"model": tensors, "optimizer": OPTIMIZER, "epoch": 3},
    "compiled": lambda tensors: {"model": {f"_orig_mod.{n}": t for n, t in tensors.items()}},
    "ddp": lambda tensors: {"model_state_dict": {f"module.{n}": t for n, t in tensors.items()}},
    "lightning": lambda tensors: {
        "state_dict": tensors,
        "optimizer_states": [OPTIMIZER],
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
    },
}


def torch_file(root: Path, *, form: str, zipped: bool) -> Case:
    tensors = drawn(float8=zipped)  # torch cannot read float8 in its older format
    content = FORMS[form](with_tie(tensors))
    torch.save(content, root / "last.pt", _use_new_zipfile_serialization=zipped)
    has_optimizer = form in ("model", "lightning")
    expected = keyed(model=tensors, **({"optimizer": STATE} if has_optimizer else {}))
    name = "lightning" if form == "lightning" else "torch"
    # torch reads its older format whole
    lazy_nbytes = LAZY_NBYTES if zipped else 2 * (root / "last.pt").stat().st_size
    return Case(root / "last.pt", expected, format=name, aliases=TIED, lazy_nbytes=lazy_nbytes)


def dcp_folder(root: Path) -> Case:
    tensors = drawn()
    save_dcp({"model": tensors, "optimizer": OPTIMIZER, "step": 3}, root / "c")
    names = {"*.metadata": NO_CHECKPOINT}
    expected = keyed(model=tensors, optimizer=STATE)
    return Case(root / "c", expected, format="dcp", words_by_file=names)


def lightning(root: Path) -> Case:
    fitted = lightnings.fit(root, native=True, checkpoints={"save_last": True}, max_epochs=1)
    content = torch.load(root / "last.ckpt", weights_only=False)
    names = [name for name, _ in fitted.named_parameters()]
    (optimizer,) = content["optimizer_states"]
    state = {
        f"{names[number]}/{key}": value
        for number, values in optimizer["state"].items()
        for key, value in values.items()
    }
    expected = keyed(model=content["state_dict"], optimizer=state)
    extra = {key: content[key] for key in ("lr_schedulers", "hyper_parameters")}
    extra["hyper_parameters"] = dict(extra["hyper_parameters"])
    metadata = {"step": 4, "extra": extra}
    return Case(root / "last.ckpt", expected, format="lightning", metadata=metadata)


def lightning_sharded(root: Path) -> Case:
    tensors = drawn()
    save_dcp({"state_dict": tensors, "optimizer_0": OPTIMIZER}, root / "c")
    torch.save({"global_step": 5, "pytorch-lightning_version": "2"}, root / "c" / "meta.pt")
    return Case(
        root / "c",
        keyed(model=tensors, optimizer=STATE),
        format="lightning-sharded",
        words_by_file={"*.metadata": NO_CHECKPOINT},
        optional=("*/meta.pt",),  # without it, the folder is one of DCP
    )


def trainer(root: Path) -> Case:
    trained = trainers.trainer(root, native=True, max_steps=2, weight_decay=0.1)
    trained.train()
    state = optimizer_tensors(trained.model, trained.optimizer.optimizer)
    expected = keyed(model=trained.model.state_dict(), optimizer=state)
    return Case(root / "checkpoint-2", expected, format="trainer", optional=("*/optimizer.pt",))


def accelerate(root: Path) -> Case:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 200))
    module.append(nn.Linear(200, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    module, wrapped = accelerator.prepare(module, optimizer)
    module(torch.randn(8, 300)).square().sum().backward()
    wrapped.step()
    accelerator.save_state(str(root / "c"), safe_serialization=False)
    expected = keyed(model=module.state_dict(), optimizer=optimizer_tensors(module, optimizer))
    order = (tuple(name for name, _ in module.named_parameters()),)
    return Case(
        root / "c",
        expected,
        uc.SourceOptions(optimizer_order=order),
        format="accelerate",
        optional=("*/optimizer.bin",),
    )


def accelerate_fsdp(root: Path, *, by_rank: bool) -> Case:
    """Folders of DCP, or a file of each rank."""
    tensors, folder = drawn(), root / "c"
    folder.mkdir()
    if by_rank:
        for rank in range(2):
            torch.save({**tensors, "version": 417}, folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
            torch.save(OPTIMIZER, folder / f"optimizer_0_rank{rank}.bin")
    else:
        save_dcp({"model": tensors}, folder / "pytorch_model_fsdp_0")
        save_dcp({"optimizer": OPTIMIZER}, folder / "optimizer_0")
    return Case(
        folder,
        keyed(model=tensors, optimizer=STATE),
        format="accelerate",
        lazy_nbytes=3 << 19,  # replicas of optimizer state are compared
    )


def peft(root: Path, *, pickled: bool) -> Case:
    """Two adapters; older versions of PEFT pickle them."""
    adapted = get_peft_model(trainers.model(), LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.add_adapter("of-users", LoraConfig(r=2, target_modules=["o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(str(root / "c"))
    expected = {}
    for part, folder in (
        ("adapter_model", root / "c"),
        ("adapter_model_of_users", root / "c" / "of-users"),
    ):
        tensors = load_file(folder / "adapter_model.safetensors")
        expected |= keyed(**{part: {name: tensor.clone() for name, tensor in tensors.items()}})
        if pickled:
            (folder / "adapter_model.safetensors").unlink()
            torch.save(tensors, folder / "adapter_model.bin")
    optional = ("*/of-users/adapter_config.json",)
    return Case(root / "c", expected, format="peft", optional=optional)


PYTORCH: dict[str, Callable[[Path], Case]] = {
    "unified": unified,
    "unified, several files": partial(unified, max_file_bytes=1 << 20),
    "huggingface": huggingface,
    "bin": bin_file,
    "bin, several files": bin_folder,
    **{f"torch, {form}": partial(torch_file, form=form, zipped=True) for form in FORMS},
    **{
        f"torch, {form}, not zipped": partial(torch_file, form=form, zipped=False) for form in FORMS
    },
    "dcp": dcp_folder,
    "peft": partial(peft, pickled=False),
    "peft, pickled": partial(peft, pickled=True),
    "lightning": lightning,
    "lightning, sharded": lightning_sharded,
    "trainer": trainer,
    "accelerate": accelerate,
    "accelerate, folders": partial(accelerate_fsdp, by_rank=False),
    "accelerate, files of ranks": partial(accelerate_fsdp, by_rank=True),
}

"""What an Accelerator holds, as arguments of a save and a load, and what of it a checkpoint lacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType

from unified_ckpt.api import open as open_source
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.integrations.accelerate.dataloaders import load_loader_states, loader_states
from unified_ckpt.integrations.accelerate.folders import is_committed
from unified_ckpt.runtime.torch_state.rng import RandomStates

_LOG = logging.getLogger("unified_ckpt")
KEY = "accelerate"  # in `extra`, and in it:
HOLDS = "holds"  # what there is, for the check before a load

_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed holds the state; needed FSDP2, FullyShardedDataParallelPlugin(fsdp_version=2)",
    DistributedType.MEGATRON_LM: "Megatron-LM holds the state; needed FSDP2 and ParallelismConfig(tp_size=...)",
    DistributedType.XLA: "XLA tensors have no memory to read; needed a CPU, CUDA or other device of torch's own",
}


def refuse(accelerator: Any) -> None:
    """LayoutError for what this version does not save."""
    kind = accelerator.distributed_type
    why = _REFUSED.get(kind, "")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        why = "FSDP1 flattens parameters; needed FSDP2, FullyShardedDataParallelPlugin(fsdp_version=2)"
    if why:
        raise LayoutError(f"Accelerate: {why}")


@dataclass(frozen=True, slots=True)
class Held:
    """An accelerator's models and optimizers. `parts`: models after the first, and modules registered for checkpointing."""

    model: torch.nn.Module | None
    parts: dict[str, torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


def held(accelerator: Any) -> Held:
    models = list(accelerator._models)
    parts = {f"model_{i}": model for i, model in enumerate(models) if i}
    parts |= {
        f"custom_{i}": one
        for i, one in enumerate(accelerator._custom_objects)
        if isinstance(one, torch.nn.Module)
    }
    return Held(
        models[0] if models else None,
        parts,
        [optimizer.optimizer for optimizer in accelerator._optimizers],
    )


def holds(accelerator: Any) -> dict[str, Any]:
    """What there is, by kind: the classes of what counts by its class, else how many."""
    return {
        "models": len(accelerator._models),
        "optimizers": [type(one.optimizer).__qualname__ for one in accelerator._optimizers],
        "schedulers": [type(one.scheduler).__qualname__ for one in accelerator._schedulers],
        "custom objects": [type(one).__qualname__ for one in accelerator._custom_objects],
        "dataloaders": len(accelerator._dataloaders),
        "scaler": accelerator.scaler is not None,
    }


def extra_of(accelerator: Any) -> dict[str, Any]:
    """What is the same for all ranks."""
    if not accelerator.sync_gradients:
        _LOG.warning(
            "save_state: gradients are being accumulated, and are not saved; needed a save after a step of the optimizer"
        )
    custom = [
        None if isinstance(one, torch.nn.Module) else one.state_dict()
        for one in accelerator._custom_objects
    ]
    return {
        KEY: {
            HOLDS: holds(accelerator),
            "step": accelerator.step,
            "schedulers": [one.state_dict() for one in accelerator._schedulers],
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "custom": custom,
        }
    }


def rank_extra_of(accelerator: Any) -> dict[str, Any]:
    """What is this rank's own."""
    return {**RandomStates().state_dict(), "dataloaders": loader_states(accelerator)}


def compare(here: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """In sentences, what the accelerator has and the checkpoint lacks or has otherwise; and what only the checkpoint has."""
    wrong: list[str] = []
    surplus: list[str] = []
    for kind in ("models", "dataloaders"):
        if saved.get(kind, 0) != here[kind]:
            target = wrong if saved.get(kind, 0) < here[kind] else surplus
            target.append(
                f"{kind}: checkpoint has {saved.get(kind, 0)}, accelerator has {here[kind]}"
            )
    for kind in ("optimizers", "schedulers", "custom objects"):
        there = saved.get(kind, [])
        if there == here[kind]:
            continue
        only_more = kind != "custom objects" and here[kind] == there[: len(here[kind])]
        (surplus if only_more else wrong).append(
            f"{kind}: checkpoint has {_listed(there)}, accelerator has {_listed(here[kind])}"
        )
    if here["scaler"] and not saved.get("scaler", False):
        wrong.append("scaler: checkpoint has none, accelerator has one")
    return wrong, surplus


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def differ(path: str, sentences: Sequence[str]) -> MismatchError:
    lines = "\n  ".join(sentences)
    return MismatchError(
        f"{path}: checkpoint and accelerator differ\n  {lines}\n  pass strict=False to load what fits",
        wrong=sentences,
    )


@dataclass(frozen=True, slots=True)
class Own:
    """What is this rank's: random states, and the dataloaders' states; those of rank 0 where another number of ranks saved."""

    random: Mapping[str, Any]
    dataloaders: Sequence[Mapping[str, Any]]
    same_ranks: bool


def own_of(accelerator: Any, path: str, rank_extra: Any) -> Own:
    """`rank_extra`: as the load gave it back, None where another number of ranks saved. Sets the random states in that case."""
    if rank_extra is not None:
        return (
            Own(rank_extra, rank_extra.get("dataloaders", ()), same_ranks=True)
            if "torch" in rank_extra
            else Own({}, (), same_ranks=True)
        )
    if not is_committed(path):
        _LOG.warning(
            "%s: is not on this machine; random states and dataloaders stay as they are", path
        )
        return Own({}, (), same_ranks=False)
    with open_source(path) as source:
        saved = source.rank_extra
        if not saved or "torch" not in saved[0]:
            return Own({}, (), same_ranks=False)
        RandomStates().load_from_ranks(
            saved, rank=accelerator.process_index, world=accelerator.num_processes
        )
        return Own(RandomStates().state_dict(), saved[0].get("dataloaders", ()), same_ranks=False)


def install(accelerator: Any, told: Mapping[str, Any], own: Own) -> None:
    """Puts back what is not tensors. `told`: what is the same for all ranks."""
    for scheduler, state in zip(accelerator._schedulers, told.get("schedulers", ()), strict=False):
        scheduler.load_state_dict(state)
    if accelerator.scaler is not None and told.get("scaler"):
        accelerator.scaler.load_state_dict(told["scaler"])
    for one, state in zip(accelerator._custom_objects, told.get("custom", ()), strict=False):
        if state is not None:
            one.load_state_dict(state)
    accelerator.step = told.get("step", accelerator.step)

    def random() -> None:
        if own.random:
            RandomStates().load_state_dict(own.random)

    load_loader_states(accelerator, own.dataloaders, same_ranks=own.same_ranks, random=random)

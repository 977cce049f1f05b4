"""Maps an Accelerator's objects to the arguments of a save and a load, and compares them with a
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.integrations.accelerate.dataloaders import load_loader_states
from unified_ckpt.integrations.checkpoint_folders import is_unified
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.torch_state.modules import ModelArgument, without_buffers
from unified_ckpt.runtime.torch_state.optimizers import as_optimizers
from unified_ckpt.runtime.torch_state.rng import RandomStates
from unified_ckpt.runtime.torch_state.shards.flat_parameters import is_flattened

_LOG = logging.getLogger("unified_ckpt")
KEY = "accelerate"  # key in `extra`
SUMMARY = "summary"  # key in it: compared before a load
UNNAMED = "optimizers"  # key in it: optimizers stored as one value, by number

_UNSUPPORTED = {
    DistributedType.DEEPSPEED: "got DeepSpeed; "
    "use FSDP2, FullyShardedDataParallelPlugin(fsdp_version=2)",
    DistributedType.MEGATRON_LM: "got Megatron-LM; use FSDP2 and ParallelismConfig(tp_size=...)",
    DistributedType.XLA: "got XLA, whose tensors have no readable memory; "
    "use a CPU, CUDA or other native device",
}


def check_supported(accelerator: Any) -> None:
    """Raise LayoutError for a distributed type, or an optimizer, that cannot be saved."""
    kind = accelerator.distributed_type
    reason = _UNSUPPORTED.get(kind)
    if reason is not None:
        raise LayoutError(f"Accelerate: {reason}")
    as_optimizers(list(accelerator._optimizers))  # raises what is known before the first step


@dataclass(frozen=True, slots=True)
class PreparedObjects:
    """An accelerator's models and optimizers. `parts`: models after the first, and registered
    modules. `unnamed`: optimizers with parameters of no prepared model, by their numbers; each is
    stored as one value.
    """

    model: torch.nn.Module | None
    parts: dict[str, torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    unnamed: dict[int, torch.optim.Optimizer]

    def targets(
        self, model: torch.nn.Module | None, *, strict: bool, options: LoadOptions
    ) -> LoadArguments:
        """Return the arguments of a load. `model`: the model, or a part of it."""
        return {
            "model": model,
            "optimizer": self.optimizers or None,
            "parts": self.parts,
            "strict": strict,
            "options": options,
        }


def prepared_objects(accelerator: Any) -> PreparedObjects:
    """Return the models and optimizers that the accelerator has prepared or registered."""
    models = list(accelerator._models)
    parts = {f"model_{i}": model for i, model in enumerate(models) if i}
    parts |= {
        f"custom_{i}": custom
        for i, custom in enumerate(accelerator._custom_objects)
        if isinstance(custom, torch.nn.Module)
    }
    model = models[0] if models else None
    modules = [model, *parts.values()] if model is not None else [*parts.values()]
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    unnamed = {
        number: optimizer
        for number, optimizer in enumerate(optimizers)
        if not _has_names(optimizer, ids)
    }
    named = [item for number, item in enumerate(optimizers) if number not in unnamed]
    return PreparedObjects(model, parts, named, unnamed)


def _has_names(optimizer: torch.optim.Optimizer, ids: Collection[int]) -> bool:
    """Whether state can be stored by the names of the parameters with these ids. Sharded state has
    no other form.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_known = all(id(param) in ids for param in params)
    return is_known or any(isinstance(param, DTensor) or is_flattened(param) for param in params)


def saved_model(accelerator: Any, model: torch.nn.Module) -> ModelArgument:
    """Return what this rank saves of a model. DistributedDataParallel broadcasts rank 0's buffers
    before each forward pass, so rank 0 saves them.
    """
    handler, parallelism = accelerator.ddp_handler, accelerator.parallelism_config
    is_ddp = accelerator.distributed_type.startswith("MULTI_") and not (
        parallelism and parallelism.tp_enabled
    )
    broadcasts = is_ddp and (handler is None or handler.broadcast_buffers)
    return without_buffers(model) if broadcasts and accelerator.process_index else model


def summarize(accelerator: Any, unnamed: Mapping[int, torch.optim.Optimizer]) -> dict[str, Any]:
    """Describe what the accelerator has, by kind: class names where the class matters, else
    counts. `unnamed`: see `PreparedObjects`.
    """
    return {
        "models": len(accelerator._models),
        "optimizers": [type(item.optimizer).__qualname__ for item in accelerator._optimizers],
        "optimizers of other models": [
            f"{number} ({type(item).__qualname__})" for number, item in unnamed.items()
        ],
        "schedulers": [type(item.scheduler).__qualname__ for item in accelerator._schedulers],
        "custom objects": [type(item).__qualname__ for item in accelerator._custom_objects],
        "dataloaders": len(accelerator._dataloaders),
        "scaler": accelerator.scaler is not None,
    }


def collect_extra(accelerator: Any, unnamed: Mapping[int, torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the state that all ranks share. `unnamed`: see `PreparedObjects`."""
    if not accelerator.sync_gradients:
        _LOG.warning(
            "save_state: accumulated gradients are not saved; save after an optimizer step"
        )
    if unnamed and accelerator.is_main_process:
        _LOG.warning(
            "save_state: optimizer %s has parameters of no prepared model, so that its state is "
            "stored as one value; prepare the model whose parameters it steps",
            ", ".join(map(str, unnamed)),
        )
    custom = [
        None if isinstance(item, torch.nn.Module) else item.state_dict()
        for item in accelerator._custom_objects
    ]
    return {
        KEY: {
            SUMMARY: summarize(accelerator, unnamed),
            "step": accelerator.step,
            "schedulers": [item.state_dict() for item in accelerator._schedulers],
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "custom": custom,
            UNNAMED: {str(number): item.state_dict() for number, item in unnamed.items()},
        }
    }


def accelerate_extra(extra: Any) -> dict[str, Any]:
    """Return what `collect_extra` stored in a checkpoint, empty if another engine wrote it."""
    stored: dict[str, Any] = extra.get(KEY, {}) if isinstance(extra, dict) else {}
    return stored


def compare_summaries(
    current: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return two lists of sentences: what the checkpoint lacks or has differently, and what only
    the checkpoint has.
    """
    mismatches: list[str] = []
    unused: list[str] = []
    for kind in ("models", "dataloaders"):
        if saved[kind] != current[kind]:
            target = mismatches if saved[kind] < current[kind] else unused
            target.append(f"{kind}: checkpoint has {saved[kind]}, accelerator has {current[kind]}")
    for kind in ("optimizers", "optimizers of other models", "schedulers", "custom objects"):
        saved_names = saved[kind]
        if saved_names == current[kind]:
            continue
        is_prefix = kind != "custom objects" and current[kind] == saved_names[: len(current[kind])]
        (unused if is_prefix else mismatches).append(
            f"{kind}: checkpoint has {_listed(saved_names)}, "
            f"accelerator has {_listed(current[kind])}"
        )
    if current["scaler"] and not saved["scaler"]:
        mismatches.append("scaler: checkpoint has none, accelerator has one")
    return mismatches, unused


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def mismatch_error(path: str, differences: Sequence[str]) -> MismatchError:
    """Return the MismatchError that lists these differences."""
    lines = "\n  ".join(differences)
    return MismatchError(
        f"{path}: checkpoint and accelerator differ\n  {lines}\n"
        "  pass strict=False to load what fits",
        wrong=differences,
    )


def _convert_rank_state(path: str, data_coordinate: tuple[int, int]) -> Mapping[str, Any]:
    """Return the state of this rank from a checkpoint that has none for its place in the mesh.

    The random states are derived, equal ones for ranks that read the same data; the data loaders'
    states are those of rank 0.
    """
    if not is_unified(path):
        _LOG.warning("%s: not on this node; random states and data loaders are not restored", path)
        return {}
    with open_source(path) as source:
        saved = source.rank_extra  # read on access
        if not saved:
            return {}
        RandomStates().load_from_ranks(saved, rank=data_coordinate[0], world=data_coordinate[1])
        return {**saved[0], **RandomStates().state_dict()}


def restore_objects(accelerator: Any, path: str, report: LoadReport) -> None:
    """Restore everything but tensors, from the report of a load of the tensors."""
    extra, rank_extra = accelerate_extra(report.extra), report.rank_extra
    rank_state = rank_extra
    if rank_extra is None:
        rank_state = _convert_rank_state(path, report.data_coordinate)
    saved_classes = extra[SUMMARY]
    objects = [
        *zip(
            [item.scheduler for item in accelerator._schedulers],
            extra["schedulers"],
            saved_classes["schedulers"],
            strict=False,
        ),
        *zip(
            accelerator._custom_objects,
            extra["custom"],
            saved_classes["custom objects"],
            strict=False,
        ),
    ]
    for item, state, saved_class in objects:
        # With `strict=False` the classes may differ. Torch's schedulers accept any state.
        if state is not None and type(item).__qualname__ == saved_class:
            item.load_state_dict(state)
    for number, optimizer in prepared_objects(accelerator).unnamed.items():
        if (state := extra[UNNAMED].get(str(number))) is not None:
            optimizer.load_state_dict(state)
    if accelerator.scaler is not None and extra["scaler"]:
        accelerator.scaler.load_state_dict(extra["scaler"])
    accelerator.step = extra["step"]

    def restore_rng() -> None:
        if rank_state:
            RandomStates().load_state_dict(rank_state)

    load_loader_states(
        accelerator,
        rank_state.get("dataloaders", ()),
        same_ranks=rank_extra is not None,
        restore_rng=restore_rng,
    )

"""Checks whether a Trainer can be saved, and whether it can use a checkpoint: format, model and
optimizer. Explains mistakes of users.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.foreign.files.json import read_config
from unified_ckpt.foreign.files.listing import list_path
from unified_ckpt.foreign.formats import match_format
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE
from unified_ckpt.format.names import MASTER, OPTIMIZER
from unified_ckpt.integrations.checkpoint_folders import is_unified
from unified_ckpt.integrations.run_state import RunState
from unified_ckpt.integrations.transformers.adapters import has_adapters, has_linked_adapters
from unified_ckpt.integrations.transformers.hub_names import hub_tensors
from unified_ckpt.integrations.transformers.small_files import patched, runs_override
from unified_ckpt.runtime.comm.error_spread import mark, spread_of
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.runtime.torch_state.optimizers import as_optimizers

_LOG = logging.getLogger("unified_ckpt")
_FRESH_OPTIMIZER_HINT = (
    "to continue from its weights with a fresh optimizer, "
    "create the model with from_pretrained({path}) and do not resume"
)
_STRICT_HINT = "\n  pass strict=False to skip them"
_MAX_LISTED = 5  # differing settings in one error
# settings that do not change tensors
_IGNORED_SETTINGS = {
    "transformers_version",
    "use_cache",
    "dtype",
}


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Return the library and class name of an optimizer."""
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def check_optimizer(state: RunState, optimizer: torch.optim.Optimizer) -> None:
    """Raise MismatchError if the saved optimizer state is of another class. A load would misuse or
    ignore it.
    """
    saved, current = state.extra.get("optimizer"), optimizer_class(optimizer)
    if isinstance(saved, str) and saved != current:
        raise MismatchError(
            f"resume_from_checkpoint {state.path}: got state of {saved}, "
            f"expected {current}; use the same `optim`; "
            + _FRESH_OPTIMIZER_HINT.format(path=repr(state.path))
        )


def explain_model_mismatch(
    error: MismatchError, path: str, model: torch.nn.Module
) -> MismatchError:
    """Add the settings that differ between the two configurations to the error, unless only the
    optimizer or master weights do.
    """
    names = [*error.missing, *error.unexpected, *error.wrong]
    if all(name.startswith(f"{OPTIMIZER}:") for name in names):
        problems = str(error).removesuffix(_STRICT_HINT)
        return _explained(
            error,
            f"resume_from_checkpoint {path}: got other optimizer state; use the same `optim`\n"
            f"{problems}",
        )
    if all(name.startswith(f"{MASTER}:") for name in names):
        return _explained(
            error,
            f"resume_from_checkpoint {path}: got master weights, which are more precise than the "
            "model; use a float32 model with mixed precision, or leave them out with "
            'LoadOptions(parts=("model", "optimizer"))',
        )
    saved, current = {}, {}
    if isinstance(model, PreTrainedModel) and is_file(os.path.join(path, "config.json")):
        saved = read_config(path)
        current = json.loads(model.config.to_json_string(use_diff=False)) | {
            "architectures": [type(model).__name__.removeprefix("FSDP")]
        }
    keys = sorted((saved.keys() & current.keys()) - _IGNORED_SETTINGS)
    differences = [
        f"{key} is {saved[key]!r} in the checkpoint, {current[key]!r} in the model"
        for key in keys
        if saved[key] != current[key]
    ]
    detail = f": {'; '.join(differences[:_MAX_LISTED])}" if differences else ""
    mismatches = str(error).removesuffix(_STRICT_HINT)
    return _explained(error, f"{path}: got a checkpoint of another model{detail}\n{mismatches}")


def _explained(error: MismatchError, text: str) -> MismatchError:
    explained = MismatchError(
        text, missing=error.missing, unexpected=error.unexpected, wrong=error.wrong
    )
    mark(explained, spread_of(error))
    return explained


def is_stock(path: str, trainer: Any) -> bool:
    """Whether the stock Trainer wrote this checkpoint and loads it into this layout. The engine
    loads all others.
    """
    entries = () if is_bucket_url(path) else list_folder(path)
    if is_unified(path) or TRAINER_STATE not in entries:
        return False
    detected = match_format(list_path(path))
    has_deepspeed = any(name.startswith("global_step") for name in entries)
    if has_deepspeed or (detected is not None and detected.name != "trainer"):
        return False
    is_fsdp = any(name.startswith("pytorch_model_fsdp") for name in entries)
    if is_fsdp or trainer.is_fsdp_enabled:  # before the model is sharded
        return is_fsdp and bool(trainer.is_fsdp_enabled)
    return not any(
        isinstance(parameter, DTensor)
        for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters()
    )


def are_stock_weights(path: str, trainer: Any) -> bool:
    """Whether the stock Trainer loads the weights at this path into this model, or says why not."""
    if is_unified(path) or needs_hub_names(path, trainer.accelerator.unwrap_model(trainer.model)):
        return False
    if is_bucket_url(path):
        return False
    return TRAINER_STATE not in list_folder(path) or is_stock(path, trainer)


def needs_hub_names(path: str, model: torch.nn.Module) -> bool:
    """Whether the folder has hub names and the model has other names in memory.

    The stock Trainer leaves such tensors at random values when it resumes.
    """
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return False
    return any(
        is_file(os.path.join(path, name)) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    ) and bool(hub_tensors(model))


def warn_overrides(trainer: Any) -> None:
    """Log methods of a subclass that write weights, if no checkpoint calls them."""
    for name in ("save_model",) if runs_override(trainer) else ("save_model", "_save"):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            _LOG.warning(
                "%s.%s is not called for checkpoints: the engine writes the weights",
                type(trainer).__name__,
                name,
            )


def replace_own_method(trainer: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method of the Trainer itself, and return it. An override of a subclass still runs:
    its `super()` reaches `method`, which runs after it if it does not call `super()`.
    """
    own, override = getattr(Trainer, name), getattr(trainer, name)

    def run_override(*args: Any, **kwargs: Any) -> Any:
        is_reached = False

        def call_from_super(_: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_reached
            is_reached = True
            return method(*args, **kwargs)

        with patched(Trainer, name, call_from_super):
            result = override(*args, **kwargs)
        return result if is_reached else method(*args, **kwargs)

    setattr(trainer, name, method if getattr(type(trainer), name) is own else run_override)
    return MethodType(own, trainer)


def check_supported(trainer: Any, async_save: bool, *, in_bucket: bool) -> None:
    """Raise LayoutError for a Trainer that cannot be saved. `in_bucket`: where the root is."""
    args, model = trainer.args, trainer.model
    # transformers before 5.18 shards no model at load
    is_sharded_at_load = getattr(trainer, "is_distributed_loading_by_transformers", False)
    problems = {
        "got DeepSpeed; use FSDP2": trainer.is_deepspeed_enabled,
        "got adapters (PEFT) and FSDP1; use fsdp_config={'version': 2}": (
            has_adapters(model)
            and trainer.is_fsdp_enabled
            and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1
        ),
        "got adapters (PEFT) on a model sharded at load; use FSDP2 through Accelerate": (
            has_adapters(model) and is_sharded_at_load
        ),
        "got pipeline stages, which transformers only runs forward; use pp_size=1": (
            getattr(model, "_pp_stage", None) is not None
        ),
        "got DataParallel; use torchrun": args.n_gpu > 1,
        "got push_to_hub, which would upload an unfinished checkpoint; use async_save=False": (
            args.push_to_hub and async_save
        ),
        "got push_to_hub and a root in a bucket, but it uploads files of a local checkpoint; use "
        "hub_strategy='end'": (
            args.push_to_hub and in_bucket and args.hub_strategy != HubStrategy.END
        ),
        "got adapters beside the default one, which need links that a bucket lacks; use one "
        "adapter, or a local root": in_bucket and has_linked_adapters(model),
        "got enable_jit_checkpoint, which stops each process at another step; use one process": (
            args.enable_jit_checkpoint and args.world_size > 1
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise LayoutError(f"UnifiedCheckpointCallback: {problem}")
    as_optimizers(trainer.optimizer)  # raises what is known of it before the first step

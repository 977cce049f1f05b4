"""Checks whether a Trainer can use a checkpoint: its format, its model, its optimizer. Explains
mistakes of users.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from unified_ckpt.api import open as open_source
from unified_ckpt.errors import FormatError, MismatchError
from unified_ckpt.integrations.transformers.hub_names import hub_tensors
from unified_ckpt.integrations.transformers.resume import is_unified
from unified_ckpt.runtime.comm.error_spread import mark, spread_of
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.sources.files.json import read_config

_FRESH_OPTIMIZER_HINT = (
    "to continue from its weights with a fresh optimizer, "
    "create the model with from_pretrained({path}) and do not resume"
)
_DEEPSPEED = ("latest", "zero_to_fp32.py")
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


def check_has_optimizer(path: str) -> None:
    """Raise MismatchError if a checkpoint has no optimizer state."""
    with open_source(path) as source:
        if OPTIMIZER not in source.parts:
            raise MismatchError(
                f"resume_from_checkpoint {path}: got only {', '.join(source.parts)} "
                "(save_only_model, or deleted since), "
                f"expected an optimizer; {_FRESH_OPTIMIZER_HINT.format(path=repr(path))}"
            )


def check_optimizer(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise MismatchError if the saved optimizer state is of another class. A load would misuse or
    ignore it.
    """
    with open_source(path) as source:
        saved = (source.extra or {}).get("optimizer")
    current = optimizer_class(optimizer)
    if saved not in (None, current):
        raise MismatchError(
            f"resume_from_checkpoint {path}: got state of {saved}, "
            f"expected {current}; use the same `optim`; "
            + _FRESH_OPTIMIZER_HINT.format(path=repr(path))
        )


def explain_model_mismatch(
    error: MismatchError, path: str, model: torch.nn.Module
) -> MismatchError:
    """Add the settings that differ between the two configurations to the error."""
    saved, current = {}, {}
    if isinstance(model, PreTrainedModel) and os.path.isfile(os.path.join(path, "config.json")):
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
    mismatches = str(error).removesuffix("\n  pass strict=False to skip them")
    text = f"{path}: got a checkpoint of another model{detail}\n{mismatches}"
    explained = MismatchError(
        text, missing=error.missing, unexpected=error.unexpected, wrong=error.wrong
    )
    mark(explained, spread_of(error))
    return explained


def can_load(path: str, trainer: Any) -> bool:
    """Whether the engine loads this checkpoint: a unified one, or a Trainer's that the Trainer
    cannot load into this layout.

    Raises FormatError for a DeepSpeed checkpoint.
    """
    if is_unified(path):
        return True
    entries = os.listdir(path)
    if any(name in _DEEPSPEED or name.startswith("global_step") for name in entries):
        raise FormatError(
            f"resume_from_checkpoint {path}: got a DeepSpeed checkpoint, "
            "expected one of this callback or of the stock Trainer"
        )
    if any(name.startswith("pytorch_model_fsdp") for name in entries):
        return not trainer.is_fsdp_enabled
    return any(
        isinstance(parameter, DTensor)
        for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters()
    )


def needs_hub_names(path: str, model: torch.nn.Module) -> bool:
    """Whether the folder has hub names and the model has other names in memory.

    The stock Trainer leaves such tensors at random values when it resumes.
    """
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return False
    return any(
        os.path.isfile(os.path.join(path, name))
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    ) and bool(hub_tensors(model))

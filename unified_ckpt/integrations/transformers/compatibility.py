"""What a checkpoint is, beside the Trainer that is to go on from it: whose format, which model,
which optimizer. Errors that users make.
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

_FRESH_OPTIMIZER_HINT = "to train on from its weights with a fresh optimizer, make the model with from_pretrained({path}) and do not resume"
_DEEPSPEED = ("latest", "zero_to_fp32.py")
_MAX_LISTED = 5  # settings that differ, in one error
_IGNORED_SETTINGS = {
    "transformers_version",
    "use_cache",
    "dtype",
}  # of a configuration: do not change the tensors


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Whose state it has: the library and the class."""
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def check_has_optimizer(path: str) -> None:
    """MismatchError where a checkpoint has no optimizer state to go on with."""
    with open_source(path) as source:
        if OPTIMIZER not in source.parts:
            raise MismatchError(
                f"resume_from_checkpoint {path}: holds {', '.join(source.parts)} and no optimizer (save_only_model, or deleted since); "
                f"needed a full checkpoint; {_FRESH_OPTIMIZER_HINT.format(path=repr(path))}"
            )


def check_optimizer(path: str, optimizer: torch.optim.Optimizer) -> None:
    """MismatchError where the saved optimizer state is another class's, which a load would take for
    its own, or leave unused.
    """
    with open_source(path) as source:
        saved = (source.extra or {}).get("optimizer")
    current = optimizer_class(optimizer)
    if saved not in (None, current):
        raise MismatchError(
            f"resume_from_checkpoint {path}: its optimizer is {saved}, the Trainer's is {current}; needed the same `optim`; "
            + _FRESH_OPTIMIZER_HINT.format(path=repr(path))
        )


def explain_model_mismatch(
    error: MismatchError, path: str, model: torch.nn.Module
) -> MismatchError:
    """The error with what differs between the configurations, which is what the user has to change."""
    saved, current = {}, {}
    if isinstance(model, PreTrainedModel) and os.path.isfile(os.path.join(path, "config.json")):
        saved = read_config(path)
        current = json.loads(model.config.to_json_string(use_diff=False)) | {
            "architectures": [type(model).__name__.removeprefix("FSDP")]
        }
    keys = sorted((saved.keys() & current.keys()) - _IGNORED_SETTINGS)
    differences = [
        f"{key} is {saved[key]!r} there, {current[key]!r} here"
        for key in keys
        if saved[key] != current[key]
    ]
    detail = f": {'; '.join(differences[:_MAX_LISTED])}" if differences else ""
    text = f"{path}: is not of the Trainer's model{detail}\n{str(error).removesuffix(chr(10) + '  pass strict=False to skip them')}"
    explained = MismatchError(
        text, missing=error.missing, unexpected=error.unexpected, wrong=error.wrong
    )
    mark(explained, spread_of(error))
    return explained


def can_load(path: str, trainer: Any) -> bool:
    """Whether the engine reads a checkpoint: ours, and the stock Trainer's of another layout, which
    that cannot load into this model.

    FormatError for DeepSpeed's.
    """
    if is_unified(path):
        return True
    entries = os.listdir(path)
    if any(name in _DEEPSPEED or name.startswith("global_step") for name in entries):
        raise FormatError(
            f"resume_from_checkpoint {path}: is DeepSpeed's; needed a checkpoint of this callback or of the stock Trainer"
        )
    if any(name.startswith("pytorch_model_fsdp") for name in entries):
        return not trainer.is_fsdp_enabled
    return any(
        isinstance(parameter, DTensor)
        for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters()
    )


def needs_hub_names(path: str, model: torch.nn.Module) -> bool:
    """Whether a folder of weights is in the hub's names, and the model has others in memory: the
    stock Trainer leaves such tensors at random values when it resumes.
    """
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return False
    return any(
        os.path.isfile(os.path.join(path, name))
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    ) and bool(hub_tensors(model))

"""DeepSpeed's universal checkpoints: a folder for each parameter under `zero/`, with its fp32 weights and each state in a file.

Source of the layout: `deepspeed/checkpoint/ds_to_universal.py`. A file has a tensor, or a dict with it under "param"; of stage 3 it is
flattened, and may be padded at its end. The converter that writes these is wrong under round-robin gradients, without an error: the
comparison with the model's weights finds that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod

import torch

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.sources.deepspeed.layout import Span, in_parts
from unified_ckpt.sources.deepspeed.model import ModelFile
from unified_ckpt.sources.deepspeed.optimizer_files import (
    FP32,
    STUBS,
    Owners,
    as_number,
    check_whole,
    owners_of,
)
from unified_ckpt.sources.deepspeed.parameters import Trained
from unified_ckpt.sources.restricted_pickle.load import load_torch

UNIVERSAL = "zero"
_STATE = "optimizer_state.pt"


def universal_parameters(folder: str, model: ModelFile) -> tuple[dict[str, Trained], Owners]:
    """The parameters of the optimizer, and the param groups. IncompleteError naming parameters whose files are missing."""
    names = [name for group in model.groups for name in group]
    missing = [
        name for name in names if not os.path.isfile(os.path.join(folder, name, f"{FP32}.pt"))
    ]
    if missing:
        raise IncompleteError(listed(f"{folder}: {FP32}.pt is missing of", missing))
    owners, scalars = _said(os.path.join(folder, _STATE), len(model.groups))
    trained = {
        name: _trained(os.path.join(folder, name), shape, scalars.get(number, {}))
        for number, group in enumerate(model.groups)
        for name, shape in group.items()
    }
    _check_alike(folder, trained)
    return trained, owners


def _said(path: str, count: int) -> tuple[Owners, dict[int, dict[str, torch.Tensor]]]:
    """The param groups, and, of stage 3, the numbers of each flat group, which are in no parameter's folder."""
    check_whole([path])
    told = load_torch(path, stubs=STUBS)
    try:
        states = told.get("optimizer_state_dict", {}).get("state", {})
        scalars = {
            number: {
                key: as_number(path, key, one)
                for key, one in state.items()
                if not isinstance(one, torch.Tensor) or not one.dim()
            }
            for number, state in states.items()
        }
        return owners_of(path, told.get("param_groups", ()), count), scalars
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path}: is not what DeepSpeed's converter writes: {type(error).__name__}: {error}"
        ) from error


def _trained(folder: str, shape: tuple[int, ...], scalars: Mapping[str, torch.Tensor]) -> Trained:
    files = {
        name.removesuffix(".pt"): os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if name.endswith(".pt")
    }
    told = {key: _tensor(path, key) for key, path in files.items()}
    numbers = {key: one for key, one in told.items() if key == "step" or (not one.dim() and shape)}
    flats = {key: _flat(files[key], one, shape) for key, one in told.items() if key not in numbers}

    def load(span: Span, key: str) -> torch.Tensor:
        return flats[key][span.first : span.first + span.numel]

    spans = tuple(in_parts(prod(shape), world=1, group=0, start=0))
    states = {key: one.dtype for key, one in flats.items() if key != FP32}
    return Trained(
        shape, flats[FP32].dtype, spans, load, lambda _: files[FP32], states, {**scalars, **numbers}
    )


def _tensor(path: str, key: str) -> torch.Tensor:
    told = load_torch(path, stubs=STUBS)
    return as_number(
        path, key, told["param"] if isinstance(told, Mapping) and "param" in told else told
    )


def _flat(path: str, one: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    numel = prod(shape)
    if tuple(one.shape) != shape and not (one.dim() == 1 and one.numel() >= numel):
        raise FormatError(f"{path}: has shape {tuple(one.shape)}; needed {shape}")
    return one.reshape(-1)[:numel]


def _check_alike(folder: str, trained: Mapping[str, Trained]) -> None:
    """IncompleteError where a parameter lacks a state that others have: DeepSpeed makes the same for all."""
    needed = {key for one in trained.values() for key in (*one.states, *one.scalars)}
    lost = [
        f"{name}/{key}"
        for name, one in trained.items()
        for key in sorted(needed - {*one.states, *one.scalars})
    ]
    if lost:
        raise IncompleteError(listed(f"{folder}: optimizer states are missing", lost))

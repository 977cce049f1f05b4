"""DeepSpeed: a folder that `save_checkpoint` wrote, of ZeRO 1, 2, 3 or BF16_Optimizer, with fp32 weights and the optimizer's state.

Read: the step that `latest` names, or the step's folder itself; what the Trainer and Lightning write is such a folder. The names are the
module's. Not read: models cut by tensor or pipeline parallelism, or with experts spread over ranks.

How wrong bytes could be read: a rank's file is missing, or left from another save; the order of the parameters is not the flat groups'.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError, NotFoundError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.mapped_pages import Pages
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.sources.deepspeed.hf_weights import weights_beside
from unified_ckpt.sources.deepspeed.layout import Layout, chained, scattered
from unified_ckpt.sources.deepspeed.model import MODEL_FILE, FrozenParts, ModelFile, read_model_file
from unified_ckpt.sources.deepspeed.optimizer_files import (
    FP32,
    Owners,
    Ranks,
    Shard,
    check_whole,
    read_shard,
)
from unified_ckpt.sources.deepspeed.parameters import Trained, trained_tensors
from unified_ckpt.sources.deepspeed.universal import UNIVERSAL, universal_parameters
from unified_ckpt.sources.detect.names import DEEPSPEED_LATEST, DEEPSPEED_MODEL
from unified_ckpt.views.shards import Assembled, Assembly, whole_tensor

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SPREAD = re.compile(r"layer_\d+-model.*|.*expert_\d+.*|expp_rank_.*|.*mp_rank_(?!00)\d+_.*")


def open_deepspeed(root: str, _options: SourceOptions) -> Assembled:
    """FormatError for a folder that is damaged or of a kind that is not read, IncompleteError naming files that are missing or cut."""
    folder = step_folder(root)
    try:
        return _open(root, folder)
    except CheckpointError as error:
        raise error if folder in str(error) else type(error)(f"{folder}: {error}") from error


def _open(root: str, folder: str) -> Assembled:
    entries = frozenset(os.listdir(folder))
    spread = sorted(name for name in entries if _SPREAD.fullmatch(name))
    if spread:
        raise FormatError(
            listed(
                "is of a model cut by tensor or pipeline parallelism, or with experts, which is not read",
                spread,
            )
        )
    model = read_model_file(_model_path(folder, entries))
    close, world = _nothing, model.world
    trained: Mapping[str, Trained] = {}
    owners: Owners = ()
    extra = dict(model.extra)
    if UNIVERSAL in entries:
        trained, owners = universal_parameters(os.path.join(folder, UNIVERSAL), model)
    elif model.groups:
        first, paths = _optimizer_files(folder, entries)
        layout = _layout(model, first)
        ranks = Ranks(first, paths, layout)
        trained = {
            name: _trained(model, first, layout, ranks, name)
            for group in model.groups
            for name in group
        }
        owners, close, world = first.owners, ranks.close, first.world
        extra |= {"loss_scaler": first.loss_scaler} if first.loss_scaler is not None else {}
    tensors, pages = dict[Key, Assembly](), Pages()
    beside = weights_beside(root) if model.is_cut and root != folder else {}
    for name, one in trained.items():
        held, where = _held(model, beside, name, one.shape)
        tensors |= trained_tensors(
            name, one, held, dtype=model.held[name].dtype, where=where, pages=pages
        )
    tensors |= _others(model, trained, world)
    said = Said(
        step=model.step, extra=extra or None, modules=model.modules, groups=_groups(model, owners)
    )
    return Assembled(
        root, tensors, format="deepspeed", said=said, aliases={MODEL: model.aliases}, close=close
    )


def _nothing() -> None:
    """Nothing is open."""


# ---- files


def step_folder(root: str) -> str:
    """The folder of one step: the one that `latest` names, or `root` itself. IncompleteError where it is not there."""
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: there is no such folder")
    entries = frozenset(os.listdir(root))
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in entries):
        return root
    marks = [name for name in DEEPSPEED_LATEST if name in entries]
    if not marks:
        raise FormatError(
            f"{root}: has neither {DEEPSPEED_LATEST[0]} nor files of a model's states; needed a folder of DeepSpeed's"
        )
    tags = [_tag(root, mark) for mark in marks]
    # The step's own folder may be gone once it has been made universal.
    converted = [tag for tag in tags[1:] if tag.startswith(f"{tags[0]}_")]
    tag = next(
        (tag for tag in (tags[0], *converted) if os.path.isdir(os.path.join(root, tag))), None
    )
    if tag is None:
        raise IncompleteError(
            f"{root}/{marks[0]}: names {tags[0]!r}, and there is no such folder; give the folder of a step that is there"
        )
    return os.path.normpath(os.path.join(root, tag))


def _tag(root: str, mark: str) -> str:
    """The folder that `latest` or `latest_universal` names. FormatError where it lies elsewhere."""
    with open_file(os.path.join(root, mark)) as file:
        tag = file.read().decode(errors="replace").strip()
    if not tag or not os.path.normpath(os.path.join(root, tag)).startswith(os.path.join(root, "")):
        raise FormatError(f"{root}/{mark}: names {tag!r}; needed a folder in {root}")
    return tag


def _model_path(folder: str, entries: frozenset[str]) -> str:
    """Rank 0's; under stage 3 the others have one each."""
    names = [name for name in (MODEL_FILE, f"zero_pp_rank_0_{MODEL_FILE}") if name in entries]
    if len(names) > 1:
        raise FormatError(listed("has files of two saves", names))
    cut = any(name.startswith("zero_pp_rank_") and name.endswith(MODEL_FILE) for name in entries)
    path = os.path.join(folder, f"zero_pp_rank_0_{MODEL_FILE}" if cut else MODEL_FILE)
    check_whole([path])
    return path


def _optimizer_files(folder: str, entries: frozenset[str]) -> tuple[Shard, list[str]]:
    """Rank 0's, read, and the paths of all. IncompleteError naming those that are missing."""
    found: dict[int, list[str]] = {}
    for name in sorted(entries):
        if match := _OPTIMIZER.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    double = [name for names in found.values() if len(names) > 1 for name in names]
    if double:
        raise FormatError(listed("has files of two saves", double))
    if 0 not in found:
        raise IncompleteError(
            "rank 0's file of the optimizer, zero_pp_rank_0_mp_rank_00_optim_states.pt, is missing"
        )
    first = read_shard(os.path.join(folder, found[0][0]))
    named = [
        found.get(rank, [found[0][0].replace("rank_0", f"rank_{rank}", 1)])[0]
        for rank in range(first.world)
    ]
    more = sorted(set(found) - set(range(first.world)))
    if more:
        raise FormatError(
            f"has files of ranks {more}, and {first.path} is of {first.world} ranks; needed files of one save"
        )
    paths = [os.path.join(folder, name) for name in named]
    check_whole(paths)
    return first, paths


# ---- tensors


def _held(
    model: ModelFile,
    beside: Mapping[str, tuple[torch.Tensor, str]],
    name: str,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor | None, str]:
    """The model's own weights of a trained parameter, and their file. FormatError where those beside the folder are of another shape."""
    if not model.lacks(name):
        return model.held[name], model.path
    if name not in beside:
        return None, model.path
    found, where = beside[name]
    if tuple(found.shape) != shape:
        raise FormatError(
            f"{where}: {name}: has shape {tuple(found.shape)}; {model.path} says {shape}"
        )
    return (found, where) if found.dtype == model.held[name].dtype else (None, model.path)


def _layout(model: ModelFile, first: Shard) -> Layout:
    groups = [{name: prod(shape) for name, shape in group.items()} for group in model.groups]
    partitions = [
        flats[FP32].numel() + padding
        for flats, padding in zip(first.flats, first.paddings, strict=True)
    ]
    try:
        if first.stage == 3:
            return scattered(groups, partitions, world=first.world)
        gaps = first.gaps if first.gaps is not None else [(0,) * len(group) for group in groups]
        return chained(groups, gaps, partitions, world=first.world)
    except FormatError as error:
        raise FormatError(f"{first.path}: {error}") from error


def _trained(model: ModelFile, first: Shard, layout: Layout, ranks: Ranks, name: str) -> Trained:
    number = next(number for number, group in enumerate(model.groups) if name in group)
    flats = first.flats[number]
    states = {key: one.dtype for key, one in flats.items() if key != FP32}
    shape, spans = model.groups[number][name], layout.spans[name]
    return Trained(
        shape, flats[FP32].dtype, spans, ranks.elements, ranks.where, states, first.scalars[number]
    )


def _groups(model: ModelFile, owners: Owners) -> list[dict[str, Any]]:
    return [
        {"names": [name for one in numbers for name in model.groups[one]], "options": options}
        for options, numbers in owners
    ]


def _others(model: ModelFile, trained: Mapping[str, Trained], world: int) -> dict[Key, Assembly]:
    """Buffers, and parameters without an optimizer. IncompleteError for one whose elements are nowhere."""
    rest = [name for name in model.held if name not in trained and name not in model.aliases]
    frozen = [name for name in rest if model.lacks(name)]
    lost = [name for name in frozen if name not in model.parts]
    if lost:
        raise IncompleteError(listed(f"{model.path}: has no elements of", lost))
    parts = FrozenParts(model, world) if frozen else None
    found = {
        (MODEL, name): whole_tensor(model.held[name], model.path)
        for name in rest
        if name not in frozen
    }
    return found | {(MODEL, name): parts.tensor(name) for name in frozen if parts is not None}

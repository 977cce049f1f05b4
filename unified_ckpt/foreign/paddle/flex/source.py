"""Opens FlexCheckpoint folders as Sources: a step of PaddleFormers, or one group folder.

A group folder that is opened alone has the part of its name. Any other has the parts of its nested
state dict, or is the model.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from dataclasses import replace

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.paddle.contents import (
    FolderContents,
    build_source,
    read_model_config,
)
from unified_ckpt.foreign.paddle.detect import PICKLED_TRAINER_STATE
from unified_ckpt.foreign.paddle.flex.detect import (
    EMA,
    PART_FOLDERS,
    group_folders,
    has_metadata,
)
from unified_ckpt.foreign.paddle.flex.groups import Group, read_group
from unified_ckpt.foreign.paddle.flex.layouts import transposed_tensors
from unified_ckpt.foreign.paddle.flex.names import NamedTensors, name_tensors
from unified_ckpt.foreign.paddle.names import ModelConfig, is_head, resolve_head
from unified_ckpt.foreign.paddle.tensors import PaddleTensors
from unified_ckpt.format import names
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import list_folder
from unified_ckpt.views.sharded_source import ShardedSource

_LOG = logging.getLogger("unified_ckpt")
_STEP_NAME = re.compile(r"checkpoint-([0-9]{1,18})")
# Objects of Paddle's C++ code, and a class with all arguments of the trainer.
_UNREAD = re.compile(r"rng_state_[0-9]+\.pth|training_args\.bin")
_INDEXES = frozenset(names.index_name(part) for part in (MODEL, OPTIMIZER, MASTER))
_SIGNAL = re.compile(r"saved_signal_[0-9]+")


def open_flex(root: str, options: SourceOptions) -> ShardedSource:
    """Open a step or a group folder.

    Raises FormatError, or IncompleteError naming what is missing.
    """
    return read_flex(root, options, compare_masters=True)


def read_flex(root: str, options: SourceOptions, *, compare_masters: bool) -> ShardedSource:
    """Do what `open_flex` does. `compare_masters`: with the model; an export has the source's."""
    entries = frozenset(list_folder(root))
    _, model = read_model_config(root, options)
    if entries & _INDEXES and options.format is None:
        raise FormatError(
            f"{root}: has a Unified Checkpoint and a FlexCheckpoint, which are of two saves; set "
            "SourceOptions(format='paddle') or 'paddle-flex' to read one"
        )
    groups, left_out = _read_groups(root, entries)
    named = name_tensors(groups)
    refused = {OPTIMIZER: named.refusal, MASTER: named.refusal} if named.unassigned else {}
    state, model = _in_torch_layout(
        root,
        named,
        model,
        is_model=any(map(_is_of_model, groups)),
        keep_unknown=options.names == "own",
    )
    contents = FolderContents(
        "paddle-flex",
        entries,
        replace(state, compare_masters=compare_masters),
        refused=refused,
        left_out=[*left_out, *sorted(filter(_UNREAD.fullmatch, entries))],
        step=_step_in_name(root),
    )
    return build_source(root, contents, model, options)


def _is_of_model(part_and_group: tuple[str | None, Group]) -> bool:
    """Return whether a group is a trainer's, or a state dict of a model without Paddle's names."""
    part, group = part_and_group
    nested = (path for path in group.paths.values() if len(path) > 1)
    return part is not None or (
        not group.static_names and any(first == MODEL for first, *_ in nested)
    )


def _read_groups(
    root: str, entries: Collection[str]
) -> tuple[list[tuple[str | None, Group]], list[str]]:
    """Return the groups with their parts, and the names of what is not read.

    IncompleteError for a step of the trainer without one of the parts that it always writes.
    """
    folders = group_folders(root, entries)
    if not folders:
        part = PART_FOLDERS.get(os.path.split(os.path.abspath(root))[1])
        group = read_group(root)
        return [(part, group)], list(group.left_out)
    left_out: list[str] = []
    if EMA in folders and not has_metadata(list_folder(folders[EMA])):
        left_out.append(os.path.split(folders.pop(EMA))[1])  # of older versions: by rank
    folder_names = {part: name for name, part in PART_FOLDERS.items()}
    if PICKLED_TRAINER_STATE in entries or any(map(_SIGNAL.fullmatch, entries)):
        expected = {MODEL, *((OPTIMIZER, MASTER) if folders.keys() & {OPTIMIZER, MASTER} else ())}
        missing = sorted(folder_names[part] for part in expected - folders.keys())
        if missing:
            raise IncompleteError(f"{root}: got no {', '.join(missing)}, which a step always has")
    groups: list[tuple[str | None, Group]] = []
    for part, folder in folders.items():
        group = read_group(folder)
        groups.append((part, group))
        left_out += [f"{folder_names[part]}/{name}" for name in group.left_out]
    return groups, left_out


def _in_torch_layout(
    root: str, named: NamedTensors, model: ModelConfig, *, is_model: bool, keep_unknown: bool
) -> tuple[PaddleTensors, ModelConfig]:
    """Return the tensors with the decision which are transposed, and the model's head and tie."""
    has_optimizer = not named.unassigned
    state = PaddleTensors(
        named.model,
        named.masters if has_optimizer else {},
        named.optimizer if has_optimizer else {},
        named.static_names,
        others=named.others,
        tp_degrees=named.tp_degrees,
        equal_steps=True,
    )
    shapes = {name: tensor.shape for name, tensor in state.parameters().items()}
    is_tied = any(
        is_head(name) and "embedding" in named.static_names.get(name, "") for name in shapes
    )
    if is_tied and model.tied is None:
        model = replace(model, tied=True)
    model = resolve_head(model, shapes)
    transposed, unknown = transposed_tensors(
        root,
        shapes,
        named.static_names,
        model,
        is_model=is_model,
        keep_unknown=keep_unknown,
    )
    if unknown:
        title = f"{root}: these tensors of unknown layers are read in Paddle's layout"
        _LOG.warning("%s", format_list(title, unknown))
    return replace(state, transposed=transposed), model


def _step_in_name(root: str) -> int | None:
    match = _STEP_NAME.fullmatch(os.path.split(os.path.abspath(root))[1])
    return int(match[1]) if match is not None else None

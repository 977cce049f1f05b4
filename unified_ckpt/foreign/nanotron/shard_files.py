"""Reads nanotron's safetensors files: one per tensor and rank, with the slices in its header."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box, full_box, is_inside
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.runtime.storage.regular_files import walk

_MODEL_FILE = re.compile(
    r"model_(?P<name>.+?)(?:_pp-rank-(\d+)-of-\d+_tp-rank-(\d+)-of-(\d+)(?:_exp-rank-(\d+)-of-\d+)?)?\.safetensors"
)
BoxPair = tuple[Box, Box]  # (local box, global box) of the same elements


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file with the part of a tensor that ranks (pp, tp, exp) hold.

    `ranks`: None if every rank has the whole tensor. `box_pairs`: cover all elements of the part.
    """

    file: TensorFile
    ranks: tuple[int, int, int] | None
    global_shape: tuple[int, ...]
    box_pairs: tuple[BoxPair, ...]


def list_shard_files(root: str) -> dict[str, list[ShardFile]]:
    """Return every tensor's files by name: the path of its folder plus the end of its file name."""
    top = os.path.join(root, "model")
    shard_files: dict[str, list[ShardFile]] = {}
    for folder, paths in sorted(walk(top)):
        for path in sorted(paths):
            match = _MODEL_FILE.fullmatch(os.path.split(path)[1])
            if match is not None:
                prefix = os.path.relpath(folder, top).replace(os.sep, ".")
                name = f"{prefix}.{match['name']}".removeprefix("..")
                shard_file = _read_shard_file(path, match)
                shard_files.setdefault(name, []).append(shard_file)
    if not shard_files:
        raise IncompleteError(f"{top}: no tensor found")
    for tensor_files in shard_files.values():
        _check_order(tensor_files)
    return shard_files


def _check_order(shard_files: list[ShardFile]) -> None:
    """Raise FormatError if files of tensor-parallel ranks were swapped.

    A higher rank must have higher elements of each slice. The model would be read correctly from
    swapped files, because headers give the slices; optimizer files have only their names.
    """
    previous: dict[tuple[int, int], tuple[int, tuple[int, ...], str]] = {}
    for shard_file in shard_files:
        if shard_file.ranks is None:
            continue
        pp, tp, exp = shard_file.ranks
        offsets, path = shard_file.box_pairs[0][1].offsets, shard_file.file.path
        if (pp, exp) in previous:
            other_tp, other_offsets, other_path = previous[pp, exp]
            if (other_tp < tp) != (other_offsets < offsets) and other_offsets != offsets:
                raise FormatError(
                    f"{path}: got elements out of order with {other_path}: files were swapped; "
                    "restore their names"
                )
        previous[pp, exp] = tp, offsets, path


def _read_shard_file(path: str, match: re.Match[str]) -> ShardFile:
    file = open_tensor_file(path)
    if "data" not in file.entries:
        raise FormatError(f"{path}: got tensors {', '.join(sorted(file.entries))}, expected `data`")
    shape = file.entries["data"].shape
    if match[2] is None:
        return ShardFile(file, None, shape, ((full_box(shape), full_box(shape)),))
    with parsing(path, "valid slices in its header"):
        slices = str(file.metadata["local_global_slices_pairs"])
        sizes = re.sub(r"np\.int\d+", "", str(file.metadata["unsharded_shape"]))
        global_shape = tuple(map(int, re.findall(r"\d+", sizes)))
        box_pairs = tuple(
            (_parse_box(local_text, shape), _parse_box(global_text, global_shape))
            for local_text, global_text in (pair.split("#") for pair in slices.split(";"))
        )
    if any(
        local_box.shape != global_box.shape
        or not is_inside(local_box, shape)
        or not is_inside(global_box, global_shape)
        for local_box, global_box in box_pairs
    ):
        raise FormatError(
            f"{path}: got slices {slices} in its header, expected local slices within {shape} "
            f"and global slices within {global_shape}"
        )
    ranks = int(match[2]), int(match[3]), int(match[5] or 0)
    return ShardFile(file, ranks, global_shape, box_pairs)


def _parse_box(text: str, shape: tuple[int, ...]) -> Box:
    """Parse `start,stop,step|...`, one entry per dim, None as in a slice. ValueError if invalid."""
    slices = [
        [None if bound == "None" else int(bound) for bound in dim.split(",")]
        for dim in text.split("|")
    ]
    if len(slices) != len(shape) or any(step not in (None, 1) for _, _, step in slices):
        raise ValueError(text)
    ranges = [
        slice(start, stop).indices(size)
        for (start, stop, _), size in zip(slices, shape, strict=True)
    ]
    return Box(tuple(low for low, _, _ in ranges), tuple(high - low for low, high, _ in ranges))


def load_box(load: Any, box: Box) -> torch.Tensor:
    """Return a box of what `load` returns."""
    tensor: torch.Tensor = load()[box.slices]
    return tensor

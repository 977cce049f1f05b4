"""Reads a group folder: its metadata, checked against its data files, as tensors by flat key.

How state could be lost: a data file is missing, or the metadata is of an earlier save into the same
folder, which Paddle does not replace. So each tensor must be covered exactly once, each piece must
be in its file with its dtype and size, and no file may have state that the metadata lacks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from unified_ckpt.core.recipes import Recipe
from unified_ckpt.core.sharding.boxes import Box, range_to_boxes, shift
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError, error_prefix
from unified_ckpt.foreign.paddle.flex.detect import (
    DATA_FILE,
    LOCK_SUFFIX,
    METADATA_FILE,
    has_metadata,
)
from unified_ckpt.foreign.paddle.flex.files import DataFile, StoredArray, open_data_file
from unified_ckpt.foreign.paddle.flex.metadata import (
    GroupMetadata,
    KeyPath,
    Piece,
    TensorRecord,
    read_metadata,
)
from unified_ckpt.foreign.paddle.slices import join_boxes
from unified_ckpt.runtime.storage.regular_files import list_folder

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of a group folder by flat key, in Paddle's layout.

    `paths`: of keys in the nested state dict. `static_names`: by key; empty
    with safetensors. `tp_degrees`: into how many ranges of the last dim ranks split a tensor.
    `left_out`: names of what is not read.
    """

    folder: str
    tensors: Mapping[str, Recipe]
    paths: Mapping[str, KeyPath]
    static_names: Mapping[str, str]
    tp_degrees: Mapping[str, int]
    left_out: Sequence[str]


def read_group(folder: str) -> Group:
    """Read a group folder.

    Raises IncompleteError naming missing files and tensors, FormatError if metadata and data files
    are damaged or of different saves, NotFoundError if there are none.
    """
    entries = frozenset(list_folder(folder))
    unique_id, metadata_file = _current_id(folder, entries)
    metadata = read_metadata(os.path.join(folder, metadata_file), unique_id)
    names = [entry for entry in sorted(entries) if _id_of(DATA_FILE, entry) == unique_id]
    sources = _choose_files(folder, metadata, names)
    files = {name: open_data_file(os.path.join(folder, name)) for name in names}
    left_out = [
        *_unlisted_keys(folder, metadata, files),
        *(key for key in metadata.paths if key not in metadata.tensors),  # without elements
        *(
            entry
            for entry in sorted(entries)
            if _id_of(DATA_FILE, entry) not in (None, unique_id)
            or _id_of(METADATA_FILE, entry) not in (None, unique_id)
        ),
    ]
    problems: list[str] = []
    tensors: dict[str, Recipe] = {}
    for key, record in metadata.tensors.items():
        boxes: list[tuple[Box, Recipe]] = []
        for piece, name in zip(record.pieces, sources[key], strict=True):
            array = files[name].arrays.get(key)
            problem = _mismatch(array, piece, record)
            if problem:
                problems.append(f"{key}: {problem} in {name}")
            elif array is not None:
                boxes += _piece_boxes(array, piece, record.dtype)
        if not problems:
            with error_prefix(f"{folder}: {key}"):
                tensors[key] = join_boxes(record.dtype, record.shape, boxes)
    if problems:
        _raise_other_save(folder, metadata_file, problems)
    return Group(
        folder,
        tensors,
        metadata.paths,
        {key: name for file in files.values() for key, name in file.static_names.items()},
        {key: _tp_degree(record) for key, record in metadata.tensors.items()},
        left_out,
    )


def _id_of(pattern: re.Pattern[str], entry: str) -> int | None:
    match = pattern.fullmatch(entry)
    return int(match[1]) if match is not None else None


def _current_id(folder: str, entries: Collection[str]) -> tuple[int, str]:
    """Return the highest id with data files, as Paddle does, and its metadata file.

    A part without tensors may have no data file.
    """
    metadata_files = {
        unique_id: entry
        for entry in sorted(entries)
        if (unique_id := _id_of(METADATA_FILE, entry)) is not None
    }
    ids = {unique_id for entry in entries if (unique_id := _id_of(DATA_FILE, entry)) is not None}
    unique_id = max(ids or metadata_files, default=0)
    if not ids and not has_metadata(entries):
        raise NotFoundError(
            f"{folder}: got no <id>.metadata and no data files, expected a FlexCheckpoint"
        )
    if unique_id not in metadata_files:
        lock = f"{unique_id}.metadata{LOCK_SUFFIX}"
        reason = f"; {lock} shows an interrupted save" if lock in entries else ""
        raise IncompleteError(
            f"{folder}: {unique_id}.metadata is missing, which lists the tensors{reason}; pass the "
            "folder of another step"
        )
    return unique_id, metadata_files[unique_id]


def _choose_files(
    folder: str, metadata: GroupMetadata, names: Collection[str]
) -> dict[str, list[str]]:
    """Return the file to read each piece from, by key: a replica's if the first is missing."""
    present, missing, replaced = set(names), dict[str, None](), dict[str, None]()
    chosen: dict[str, list[str]] = {}
    for key, record in metadata.tensors.items():
        chosen[key] = []
        for piece in record.pieces:
            file = next((name for name in piece.files if name in present), None)
            if file is None:
                missing[piece.files[0]] = None
            elif file != piece.files[0]:
                replaced[piece.files[0]] = None
            chosen[key].append(file or piece.files[0])
    raise_if_any(IncompleteError, f"{folder}: data files are missing", sorted(missing))
    if replaced:
        _LOG.warning("%s: %s are missing; reading replicas", folder, ", ".join(sorted(replaced)))
    return chosen


def _unlisted_keys(
    folder: str, metadata: GroupMetadata, files: Mapping[str, DataFile]
) -> list[str]:
    """Return the keys that files have and the metadata lacks.

    FormatError if that shows another save: the metadata has them in other files, or nothing of that
    file, or keys with the same last component. Paddle's zero-cost checkpoints have more keys.
    """
    listed: dict[str, set[str]] = {name: set() for name in files}
    for key, record in metadata.tensors.items():
        for piece in record.pieces:
            for name in piece.files:
                if name in listed:
                    listed[name].add(key)
    endings = {key.rpartition(".")[2] for key in metadata.tensors}
    unlisted: dict[str, None] = {}
    problems: list[str] = []
    for name, file in files.items():
        for key in file.arrays.keys() - listed[name]:
            if not listed[name] or key.rpartition(".")[2] in endings:
                problems.append(f"{key}: is in {name}, which the metadata does not say")
            unlisted[key] = None
    if problems:
        _raise_other_save(folder, "the metadata", sorted(problems))
    return sorted(unlisted)


def _raise_other_save(folder: str, metadata_file: str, problems: Sequence[str]) -> NoReturn:
    title = (
        f"{folder}: {metadata_file} does not describe the data files, expected files of one save; "
        "Paddle keeps the metadata of an earlier save into the same folder"
    )
    raise FormatError(format_list(title, problems))


def _mismatch(array: StoredArray | None, piece: Piece, record: TensorRecord) -> str:
    """Return how a stored array differs from its piece; empty if it does not."""
    if array is None:
        return "got no array"
    shape = piece.box.shape if piece.flat_range is None else (piece.numel,)
    if array.shape != shape or not array.holds(record.dtype):
        return f"got {array.dtype} {array.shape}, expected {record.dtype} {shape}"
    return ""


def _piece_boxes(array: StoredArray, piece: Piece, dtype: str) -> Iterator[tuple[Box, Recipe]]:
    """Yield the boxes of the global tensor that a piece holds."""
    if piece.flat_range is None:
        yield piece.box, array.tensor(dtype, 0, piece.box.shape)
        return
    first = 0
    for box in range_to_boxes(piece.box.shape, *piece.flat_range):
        yield shift(box, piece.box.offsets), array.tensor(dtype, first, box.shape)
        first += box.numel


def _tp_degree(record: TensorRecord) -> int:
    return len({piece.box.offsets[-1:] for piece in record.pieces})

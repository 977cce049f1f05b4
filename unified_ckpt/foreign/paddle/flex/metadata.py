"""Reads `<id>.metadata` of FlexCheckpoint without importing the classes that it names.

How wrong bytes could be read: the file is damaged, or names other files than those of its save.
So every value is checked here; whether the pieces cover the tensors is checked with the data files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from unified_ckpt.core.sharding.boxes import Box, is_inside
from unified_ckpt.core.sharding.dtypes import TORCH_NAMES
from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.paddle.flex.detect import DATA_FILE
from unified_ckpt.foreign.restricted_pickle.limits import expect_type, to_ints
from unified_ckpt.foreign.restricted_pickle.load import load_pickle
from unified_ckpt.foreign.restricted_pickle.placeholders import (
    FieldsPlaceholder,
    Placeholder,
    placeholder_class,
)

_MODULES = (  # of Paddle 3.3, and of 3.0
    "paddle.distributed.flex_checkpoint.dcp.metadata",
    "paddle.distributed.checkpoint.metadata",
)
_CLASSES = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
_DTYPES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}  # Paddle's are torch's
_MAX_DIMS = 64

KeyPath = tuple[str, ...]


class Piece(NamedTuple):
    """Elements of a tensor that one rank stored as an array.

    `box`: in the global tensor. `flat_range`: which of its row-major elements; None for all.
    `files`: that store the piece, replicas last.
    """

    box: Box
    flat_range: tuple[int, int] | None
    files: Sequence[str]

    @property
    def numel(self) -> int:
        """Number of elements."""
        if self.flat_range is not None:
            return self.flat_range[1] - self.flat_range[0]
        return self.box.numel


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of a group: its dtype in safetensors, its global shape, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A metadata file. `paths`: of flat keys in the nested state dict that was saved."""

    tensors: Mapping[str, TensorRecord]
    paths: Mapping[str, KeyPath]


_Place = tuple[tuple[int, ...], tuple[int, int] | None]  # offsets and flat range


@dataclass(slots=True)
class _Entry:
    """A piece and its files by replica number, the first choice under 0."""

    box: Box
    flat_range: tuple[int, int] | None
    files: dict[int, str]


def read_metadata(path: str, unique_id: int) -> GroupMetadata:
    """Read a metadata file. FormatError if it is damaged, or not that of `unique_id`."""
    classes: dict[str, Any] = {
        f"{module}.{name}": placeholder_class(name, base=FieldsPlaceholder)
        for module in _MODULES
        for name in _CLASSES
    }
    classes |= {f"{core}.multiarray.scalar": _scalar for core in ("numpy.core", "numpy._core")}
    classes["numpy.dtype"] = placeholder_class("dtype")
    metadata = load_pickle(path, classes)
    with error_prefix(path), parsing("its content", "metadata of FlexCheckpoint"):
        fields = _fields(metadata, "Metadata")
        listed = expect_type(fields["state_dict_metadata"], dict)
        entries: dict[str, dict[_Place, _Entry]] = {}
        specs: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, pieces in listed.items():
            name = expect_type(key, str)
            with error_prefix(name):
                entries[name], specs[name] = _parse_tensor(expect_type(pieces, list))
        for index, file in expect_type(fields["storage_metadata"], dict).items():
            _add_file(entries, _fields(index, "LocalTensorIndex"), file, unique_id)
        tensors = {
            name: TensorRecord(*specs[name], _pieces(name, list(by_place.values())))
            for name, by_place in entries.items()
        }
        paths = {
            expect_type(key, str): tuple(expect_type(part, str) for part in key_path)
            for key, key_path in expect_type(fields.get("flat_mapping") or {}, dict).items()
        }
    return GroupMetadata(tensors, paths)


def _parse_tensor(
    pieces: Sequence[Any],
) -> tuple[dict[_Place, _Entry], tuple[str, tuple[int, ...]]]:
    """Return a tensor's pieces by place, still without files, and its dtype and shape."""
    by_place: dict[_Place, _Entry] = {}
    dtypes, shapes = set[str](), set[tuple[int, ...]]()
    for piece in pieces:
        fields = _fields(piece, "LocalTensorMetadata")
        box = Box(to_ints(fields["global_offset"]), to_ints(fields["local_shape"]))
        flat_range = _flat_range(fields)
        _check_piece(box, flat_range)
        dtypes.add(expect_type(fields["dtype"], str))
        if fields.get("global_shape") is not None:
            shapes.add(to_ints(fields["global_shape"]))
        place = box.offsets, flat_range
        if by_place.setdefault(place, _Entry(box, flat_range, {})).box != box:
            raise FormatError(
                f"has two pieces at offset {box.offsets}, of shapes {by_place[place].box.shape} "
                f"and {box.shape}"
            )
    if not by_place or len(dtypes) != 1 or len(shapes) > 1:
        raise FormatError(
            f"got {len(by_place)} pieces of dtypes {sorted(dtypes)} and global shapes "
            f"{sorted(shapes)}, expected pieces of one dtype and shape"
        )
    dtype = dtypes.pop()
    if dtype not in _DTYPES:
        raise FormatError(f"got dtype {dtype!r}, expected one of {', '.join(sorted(_DTYPES))}")
    boxes = [entry.box for entry in by_place.values()]
    if len({len(box.shape) for box in boxes}) > 1:
        raise FormatError("got pieces with different numbers of dims")
    # Paddle 3.0 does not store the global shape: the farthest corner of the pieces has it.
    corners = zip(
        *(map(sum, zip(box.offsets, box.shape, strict=True)) for box in boxes), strict=True
    )
    shape = shapes.pop() if shapes else tuple(map(max, corners))
    for box in boxes:
        if not is_inside(box, shape):
            raise FormatError(
                f"got a piece at {box.offsets} of shape {box.shape}, expected a box within the "
                f"global shape {shape}"
            )
    return by_place, (_DTYPES[dtype], shape)


def _check_piece(box: Box, flat_range: tuple[int, int] | None) -> None:
    dims = len(box.shape)
    if dims != len(box.offsets) or dims > _MAX_DIMS or min((*box.offsets, *box.shape, 0)) < 0:
        raise FormatError(
            f"got a piece at {box.offsets[:_MAX_DIMS]} of shape {box.shape[:_MAX_DIMS]}, expected "
            f"equal numbers of dims, at most {_MAX_DIMS}, and no negative sizes"
        )
    if flat_range is not None and not 0 <= flat_range[0] <= flat_range[1] <= prod(box.shape):
        raise FormatError(
            f"got the flattened range {flat_range}, expected a range within the {prod(box.shape)} "
            f"elements of shape {box.shape}"
        )


def _flat_range(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the range of a flattened piece; None for a box."""
    if not expect_type(fields.get("is_flattened", False), bool):
        return None
    start, stop = to_ints(fields["flattened_range"])
    return start, stop


def _add_file(
    entries: Mapping[str, dict[_Place, _Entry]],
    index: Mapping[str, Any],
    file: Any,
    unique_id: int,
) -> None:
    """Add the file of one index. FormatError if no piece matches, or it is of another save."""
    name, file_name = expect_type(index["tensor_key"], str), expect_type(file, str)
    match = DATA_FILE.fullmatch(file_name)
    if match is None or int(match[1]) != unique_id:
        raise FormatError(
            f"{name}: got the file {file_name!r}, expected a data file of id {unique_id} in the "
            "folder"
        )
    offsets = to_ints(index["global_offset"])
    entry = entries.get(name, {}).get((offsets, _flat_range(index)))
    shape = index.get("local_shape")
    if entry is None or (shape is not None and to_ints(shape) != entry.box.shape):
        raise FormatError(
            f"{name}: got {file_name} for a piece at {offsets}, expected one of the listed pieces"
        )
    replica = index.get("replica_id")
    number = to_ints([replica])[0] if replica is not None else 0
    if entry.files.setdefault(number, file_name) != file_name:
        raise FormatError(
            f"{name}: got {entry.files[number]} and {file_name} for one piece, expected one file"
        )


def _pieces(name: str, entries: Sequence[_Entry]) -> list[Piece]:
    for entry in entries:
        if not entry.files:
            raise FormatError(
                f"{name}: got no file for the piece at {entry.box.offsets}, expected one"
            )
    return [
        Piece(entry.box, entry.flat_range, [file for _, file in sorted(entry.files.items())])
        for entry in entries
    ]


def _fields(value: Any, class_name: str) -> dict[str, Any]:
    """Return the fields of a placeholder. TypeError for an object of another class."""
    if type(value).__name__ != class_name:
        raise TypeError(f"got {type(value).__name__}, expected {class_name}")
    return expect_type(value, FieldsPlaceholder).__dict__


def _scalar(dtype: Any, raw: Any) -> int:
    """Stands in for numpy's scalars: sharded optimizers write int64 in flattened ranges."""
    kind = expect_type(expect_type(dtype, Placeholder).args[0], str)
    byte_order = dtype.state[1] if dtype.state else "|"
    if kind[:1] not in ("i", "u") or byte_order not in ("<", "|", "="):
        raise FormatError(f"got a scalar of dtype {kind!r}, expected a little-endian integer")
    return int.from_bytes(expect_type(raw, bytes), "little", signed=kind[0] == "i")

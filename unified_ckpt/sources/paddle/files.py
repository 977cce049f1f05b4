"""Opens safetensors files of a PaddleNLP folder; their tensors alias mapped files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.format.header import Entry, header_nbytes, parse_header
from unified_ckpt.format.index import parse_index
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.files.json import read_json
from unified_ckpt.sources.paddle.quantized_moments import MAX_SCALES, MIN_SCALES, SCALES
from unified_ckpt.sources.paddle.slices import StoredTensor, narrow
from unified_ckpt.sources.restricted_pickle.archive import MappedFile

BFLOAT16_AS_UINT16 = "U16"  # numpy lacks bfloat16; Paddle has no uint16 parameters
_FIRST_READ = 64 << 10


def read_optional_json(root: str, name: str) -> Any:
    """Parse a JSON file, or return None if there is none. Raises FormatError if it is damaged."""
    path = os.path.join(root, name)
    return read_json(path) if os.path.isfile(path) else None


def open_indexed(
    root: str, index_file: str, *, absent: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """Open the tensors that an index names, and the scales of quantized ones.

    `absent` are suffixes of names that may be missing. Raises IncompleteError naming missing files
    and tensors, FormatError for tensors that the index does not name.
    """
    path = os.path.join(root, index_file)
    with open_binary(path) as file:
        weight_map = parse_index(file.read(), file=path).weight_map
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not os.path.isfile(os.path.join(root, file))]
    if missing:
        raise IncompleteError(format_list(f"{root}: files of {index_file} are missing", missing))
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        file_tensors = open_tensors(os.path.join(root, name))
        unexpected = [
            tensor_name
            for tensor_name in file_tensors
            if weight_map.get(tensor_name) != name
            and not tensor_name.endswith((SCALES, MIN_SCALES, MAX_SCALES))
        ]
        if unexpected:
            path = os.path.join(root, name)
            raise FormatError(
                format_list(f"{path}: {index_file} does not have these tensors here", unexpected)
            )
        tensors |= file_tensors
    missing_tensors = sorted(
        name for name in weight_map if name not in tensors and not name.endswith(tuple(absent))
    )
    if missing_tensors:
        raise IncompleteError(
            format_list(f"{root}: tensors of {index_file} are in no file", missing_tensors)
        )
    return tensors


def open_tensors(path: str) -> dict[str, StoredTensor]:
    """Open the tensors of one file.

    Raises FormatError if it is damaged, IntegrityError if it is truncated.
    """
    mapped = cache(partial(MappedFile, path))  # one mapping for all tensors, on first use
    return {
        name: _stored_tensor(path, name, entry, mapped)
        for name, entry in _read_header(path).items()
    }


def _read_header(path: str) -> Mapping[str, Entry]:
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = file.read(_FIRST_READ)
        needed = header_nbytes(header_bytes, file_size=size, file=path)
        header_bytes += file.read(max(0, needed - len(header_bytes)))
        return parse_header(header_bytes, file_size=size, file=path)


def _stored_tensor(
    path: str, name: str, entry: Entry, mapped: Callable[[], MappedFile]
) -> StoredTensor:
    dtype = torch.bfloat16 if entry.dtype == BFLOAT16_AS_UINT16 else TORCH_DTYPES.get(entry.dtype)
    if dtype is None or prod(entry.shape) * itemsize(entry.dtype) != entry.stop - entry.start:
        raise FormatError(f"{path}: {name}: dtype {entry.dtype} is not one that Paddle writes")
    return StoredTensor(
        dtype,
        entry.shape,
        path,
        partial(map_box, mapped, entry.start, dtype, entry.shape),
        start=entry.start,
    )


def map_box(
    mapped: Callable[[], MappedFile],
    start: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    box: Box,
) -> torch.Tensor:
    """Return a box of the row-major tensor at byte `start`, as an alias of the mapped file."""
    count = prod(shape)
    if count == 0:
        return narrow(torch.empty(shape, dtype=dtype, device="cpu"), box)
    memory = mapped().bytes(start, count * dtype.itemsize)
    return narrow(torch.frombuffer(memory, dtype=dtype).view(shape), box)

"""The safetensors files of a PaddleNLP folder: their indices and headers, and their tensors as views of the mapped files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.format.header import Entry, header_nbytes, parse_header
from unified_ckpt.format.index import parse_index
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.files.json import read_json
from unified_ckpt.sources.paddle.quantized_moments import HIGHEST, LOWEST, SCALES
from unified_ckpt.sources.paddle.slices import Held, narrowed
from unified_ckpt.sources.restricted_pickle.archive import Mapped

BF16 = "U16"  # Paddle gives numpy a bfloat16 as uint16, and has no parameters of that type
_FIRST_READ = 64 << 10


def json_at(root: str, name: str) -> Any:
    """None where there is no such file. FormatError where it does not parse."""
    path = os.path.join(root, name)
    return read_json(path) if os.path.isfile(path) else None


def indexed(root: str, index_file: str, *, absent: Collection[str] = ()) -> dict[str, Held]:
    """The tensors that an index names, and the scales of compressed ones. `absent`: endings of names that no file needs to have.

    IncompleteError naming files and tensors that are missing; FormatError for tensors that the index does not name.
    """
    path = os.path.join(root, index_file)
    with open_file(path) as file:
        weight_map = parse_index(file.read(), file=path).weight_map
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not os.path.isfile(os.path.join(root, file))]
    if missing:
        raise IncompleteError(listed(f"{root}: files that {index_file} names are missing", missing))
    held: dict[str, Held] = {}
    for name in files:
        found = held_in(os.path.join(root, name))
        strangers = [
            one
            for one in found
            if weight_map.get(one) != name and not one.endswith((SCALES, LOWEST, HIGHEST))
        ]
        if strangers:
            raise FormatError(
                listed(
                    f"{os.path.join(root, name)}: has tensors that {index_file} has not there",
                    strangers,
                )
            )
        held |= found
    lost = sorted(
        name for name in weight_map if name not in held and not name.endswith(tuple(absent))
    )
    if lost:
        raise IncompleteError(
            listed(f"{root}: tensors that {index_file} names are in no file", lost)
        )
    return held


def held_in(path: str) -> dict[str, Held]:
    """The tensors of one file. FormatError, or IntegrityError where it is cut short."""
    mapped = cache(partial(Mapped, path))  # when it is first read from
    return {name: _held(path, name, entry, mapped) for name, entry in _header(path).items()}


def _header(path: str) -> Mapping[str, Entry]:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_FIRST_READ)
        needed = header_nbytes(head, file_size=size, file=path)
        return parse_header(head + file.read(max(0, needed - len(head))), file_size=size, file=path)


def _held(path: str, name: str, entry: Entry, mapped: Callable[[], Mapped]) -> Held:
    dtype = torch.bfloat16 if entry.dtype == BF16 else TORCH_DTYPES.get(entry.dtype)
    if dtype is None or prod(entry.shape) * itemsize(entry.dtype) != entry.stop - entry.start:
        raise FormatError(f"{path}: {name}: has dtype {entry.dtype}, which Paddle does not write")
    return Held(
        dtype,
        entry.shape,
        path,
        partial(view, mapped, entry.start, dtype, entry.shape),
        start=entry.start,
    )


def view(
    mapped: Callable[[], Mapped], start: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box
) -> torch.Tensor:
    """A box of a tensor that lies row-major from byte `start` of a file; an alias of the mapped file."""
    count = prod(shape)
    if count == 0:
        return narrowed(torch.empty(shape, dtype=dtype, device="cpu"), box)
    memory = mapped().bytes(start, count * dtype.itemsize)
    return narrowed(torch.frombuffer(memory, dtype=dtype).view(shape), box)

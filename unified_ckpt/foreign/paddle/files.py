"""Opens safetensors files of a PaddleNLP folder; their tensors alias mapped files."""

from __future__ import annotations

import os
from collections.abc import Collection
from math import prod

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.foreign.paddle.quantized_moments import MAX_SCALES, MIN_SCALES, SCALES
from unified_ckpt.foreign.paddle.slices import mapped_tensor
from unified_ckpt.format.header import Entry
from unified_ckpt.format.index import parse_index
from unified_ckpt.runtime.storage.regular_files import is_file, open_binary
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

BFLOAT16_AS_UINT16 = "U16"  # numpy lacks bfloat16; Paddle has no uint16 parameters


def open_indexed(
    root: str, index_file: str, *, absent: Collection[str] = ()
) -> dict[str, External]:
    """Open the tensors that an index names, and the scales of quantized ones.

    `absent` are suffixes of names that may be missing. Raises IncompleteError naming missing files
    and tensors, FormatError for tensors that the index does not name.
    """
    path = os.path.join(root, index_file)
    with open_binary(path) as file:
        weight_map = parse_index(file.read(), file=path)
    files = sorted(set(weight_map.values()))
    raise_if_any(
        IncompleteError,
        f"{root}: files of {index_file} are missing",
        [file for file in files if not is_file(os.path.join(root, file))],
    )
    tensors: dict[str, External] = {}
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
    raise_if_any(
        IncompleteError,
        f"{root}: tensors of {index_file} are in no file",
        sorted(
            name for name in weight_map if name not in tensors and not name.endswith(tuple(absent))
        ),
    )
    return tensors


def open_tensors(path: str) -> dict[str, External]:
    """Open the tensors of one file.

    Raises FormatError if it is damaged, IntegrityError if it is truncated.
    """
    file = open_tensor_file(path)
    return {name: _stored_tensor(file, name, entry) for name, entry in file.entries.items()}


def _stored_tensor(file: TensorFile, name: str, entry: Entry) -> External:
    dtype = torch.bfloat16 if entry.dtype == BFLOAT16_AS_UINT16 else TORCH_DTYPES.get(entry.dtype)
    if dtype is None or prod(entry.shape) * itemsize(entry.dtype) != entry.stop - entry.start:
        raise FormatError(f"{file.path}: {name}: dtype {entry.dtype} is not one that Paddle writes")
    return mapped_tensor(file.mapped, entry.start, dtype, entry.shape)

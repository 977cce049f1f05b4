"""Opens data files of FlexCheckpoint: pickled dicts of numpy arrays, or safetensors.

No data is read: of long arrays in a pickle, only their place in the file is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from unified_ckpt.core.recipes import External, Recipe, permute
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.files.safetensors import open_tensor_file
from unified_ckpt.foreign.paddle.lazy_pickles import (
    STATIC_NAMES,
    FileBytes,
    LazyArray,
    dict_entry,
    load_array_dict,
)
from unified_ckpt.foreign.paddle.slices import mapped_tensor
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, from_bytes, torch_dtype

# numpy lacks some dtypes: their bits are stored as integers.
_STORED_AS: Mapping[str, frozenset[str]] = {
    "BF16": frozenset({"BF16", "U16"}),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2"), frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8"})),
}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a data file, of a dtype in safetensors.

    It starts at byte `start` of the file, or is in `memory` if that is None. `fortran_order`: its
    elements are stored column-major.
    """

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int | None
    memory: bytes = b""
    fortran_order: bool = False

    def holds(self, dtype: str) -> bool:
        """Return whether its elements have a dtype, perhaps as integers of the same bits."""
        return self.dtype in _STORED_AS.get(dtype, {dtype})

    def tensor(self, dtype: str, first: int, shape: tuple[int, ...]) -> Recipe:
        """Return the elements from `first` on, in row-major order, as a tensor.

        An array of several dims in Fortran order is returned whole.
        """
        reverse = self.fortran_order and len(self.shape) > 1
        stored_shape, target = shape[::-1] if reverse else shape, torch_dtype(dtype)
        skipped_nbytes = first * target.itemsize
        if self.start is not None:
            start = self.start + skipped_nbytes
            tensor: Recipe = mapped_tensor(self.file, start, target, stored_shape)
        else:
            nbytes = prod(shape) * target.itemsize
            memory = self.memory[skipped_nbytes : skipped_nbytes + nbytes]
            load = partial(_load_box, memory, target, stored_shape)
            tensor = External(dtype, stored_shape, load, file=self.file.path)
        return permute(tensor, range(len(shape))[::-1]) if reverse else tensor


def _load_box(memory: bytes, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    return from_bytes(bytearray(memory), dtype, shape)[box.slices]


@dataclass(frozen=True, slots=True)
class DataFile:
    """The arrays of a data file by key. `static_names`: by key."""

    path: str
    arrays: Mapping[str, StoredArray]
    static_names: Mapping[str, str] = field(default_factory=dict)


def open_data_file(path: str) -> DataFile:
    """Open one data file.

    Raises FormatError if it is damaged or names classes, IncompleteError or IntegrityError if it is
    truncated.
    """
    if path.endswith(".safetensors"):
        file = open_tensor_file(path)
        return DataFile(
            path,
            {
                key: StoredArray(file.mapped, entry.dtype, entry.shape, entry.start)
                for key, entry in file.entries.items()
            },
        )
    content = load_array_dict(path)
    names = dict_entry(path, content, STATIC_NAMES)
    content.pop(STATIC_NAMES, None)
    mapped = MappedFile(path)
    return DataFile(
        path,
        {str(key): _stored_array(path, str(key), value, mapped) for key, value in content.items()},
        {str(key): str(name) for key, name in names.items()},
    )


def _stored_array(path: str, key: str, value: object, mapped: MappedFile) -> StoredArray:
    if not isinstance(value, LazyArray):
        raise FormatError(f"{path}: {key}: got {type(value).__name__}, expected a numpy array")
    dtype, raw = DTYPE_NAMES[value.dtype], value.raw
    if isinstance(raw, bytes):
        return StoredArray(mapped, dtype, value.shape, None, raw, value.fortran_order)
    if isinstance(raw, FileBytes) and not raw.text:
        start = raw.start
        return StoredArray(mapped, dtype, value.shape, start, fortran_order=value.fortran_order)
    raise FormatError(f"{path}: {key}: got bytes as text, expected pickle protocol 3 or later")

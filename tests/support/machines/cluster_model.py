"""The oracle of the cluster machine: what a save holds, in numpy; imports nothing from the package.

A tensor is an array of bytes of shape (*shape, itemsize), so that every dtype is cut alike.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

Bytes = np.ndarray  # of uint8
Files = dict[str, bytes]  # relative path -> contents

DTYPES: Mapping[str, tuple[torch.dtype, int]] = {
    "F32": (torch.float32, 4),
    "BF16": (torch.bfloat16, 2),
    "F16": (torch.float16, 2),
    "F64": (torch.float64, 8),
    "I64": (torch.int64, 8),
    "U8": (torch.uint8, 1),
    "BOOL": (torch.bool, 1),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "C64": (torch.complex64, 8),
}


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. `splits`: (mesh dim, tensor dim), in the order in which they nest. `stage`:
    only ranks at this coordinate of mesh dim 0 hold it; None for all.
    """

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """How ranks hold a parameter."""

    splits: tuple[tuple[int, int], ...] = ()
    stage: int | None = None


TRAINED = "trained"  # in the name of a parameter with masters and moments
LEVELS = {"exp_avg": [0, 2.0**-9, -(2.0**-9)], "exp_avg_sq": [0, 2.0**-20, 2.0**-6]}


@lru_cache(maxsize=64)
def global_array(tensor: Tensor, seed: int) -> Bytes:
    """Bytes that depend on the tensor and the seed. Few are 0xA5, the sentinel of targets.

    Every compression gives them back: moments have the values that any number of bits holds.
    """
    if TRAINED in tensor.name and tensor.part == "model":
        master = global_array(Tensor("master_weights", tensor.name, "F32", tensor.shape), seed)
        rounded = as_torch(master, "F32").to(torch.bfloat16).view(torch.uint8).numpy()
        return rounded.reshape(*tensor.shape, 2)
    if TRAINED in tensor.name and tensor.part == "optimizer":
        generator = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        levels = np.array(LEVELS[tensor.name.rpartition("/")[2]], np.float32)
        values = generator.choice(levels, tensor.shape)
        values.reshape(-1)[:: 70 + seed] = [np.inf, np.nan][seed % 2]
        return values.view(np.uint8).reshape(*tensor.shape, 4)
    itemsize = DTYPES[tensor.dtype][1]
    generator = np.random.default_rng([seed, zlib.crc32(f"{tensor.part}:{tensor.name}".encode())])
    high = 2 if tensor.dtype == "BOOL" else 0xA5
    array = generator.integers(0, high, (*tensor.shape, itemsize), dtype=np.uint8)
    array.flags.writeable = False
    return array


def local_array(whole: Bytes, split: Split, mesh: Sequence[int], rank: int) -> Bytes | None:
    """What a rank holds of a tensor, as `torch.chunk` cuts it; None if it holds nothing."""
    coordinates = np.unravel_index(rank, tuple(mesh))
    if split.stage is not None and coordinates[0] != split.stage % mesh[0]:
        return None
    for mesh_dim, dim in split.splits:
        if split.stage is not None and mesh_dim == 0:
            continue
        length = whole.shape[dim]
        size = -(-length // mesh[mesh_dim])
        low = min(int(coordinates[mesh_dim]) * size, length)
        whole = np.take(whole, range(low, min(low + size, length)), axis=dim)
    return whole


def as_torch(array: Bytes, dtype: str) -> torch.Tensor:
    """Return a tensor of its own memory."""
    kind = DTYPES[dtype][0]
    if array.size == 0:
        return torch.empty(array.shape[:-1], dtype=kind)
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).copy())
    return flat.view(kind).reshape(array.shape[:-1])


def as_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sentinel(array: Bytes, dtype: str) -> torch.Tensor:
    """A target of a load: bytes that no save holds."""
    return as_torch(np.full_like(array, 1 if dtype == "BOOL" else 0xA5), dtype)


def read_files(folder: Path) -> Files:
    """Every file below a folder but the events of a run, by its relative path."""
    files, start = {}, len(os.path.join(folder, ""))
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if name != "unified_events.jsonl" and os.path.isfile(path):
                with open(path, "rb") as file:
                    files[path[start:]] = file.read()
    return dict(sorted(files.items()))

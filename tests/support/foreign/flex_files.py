"""Writes FlexCheckpoint group folders as Paddle does, without Paddle; changes their metadata."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
OLD_MODULE = "paddle.distributed.checkpoint.metadata"  # of Paddle 3.0
STATIC_NAMES = "StructuredToParameterName@@"
_NEW_FIELDS = ("global_shape", "is_flattened", "flattened_range", "replica_id", "local_shape")


@dataclass(frozen=True)
class LocalTensorMetadata:
    """One piece of a tensor."""

    global_offset: Any
    local_shape: Any
    dtype: Any
    global_shape: Any = None
    is_flattened: Any = False
    flattened_range: Any = None


@dataclass(frozen=True)
class LocalTensorIndex:
    """The key of a piece's file."""

    tensor_key: Any
    global_offset: Any
    is_flattened: Any = False
    flattened_range: Any = None
    replica_id: Any = None
    local_shape: Any = None


@dataclass
class Metadata:
    """The content of a metadata file."""

    state_dict_metadata: Any = field(default_factory=dict)
    storage_metadata: Any = field(default_factory=dict)
    flat_mapping: Any = field(default_factory=dict)


_CLASSES = {cls.__name__: cls for cls in (Metadata, LocalTensorMetadata, LocalTensorIndex)}


@contextmanager
def _paddle_module(name: str) -> Iterator[None]:
    parts = name.split(".")
    modules = {
        ".".join(parts[:n]): ModuleType(".".join(parts[:n])) for n in range(1, len(parts) + 1)
    }
    own_module = Metadata.__module__
    vars(modules[name]).update(_CLASSES)
    with mock.patch.dict(sys.modules, modules):
        for cls in _CLASSES.values():
            cls.__module__ = name
        try:
            yield
        finally:
            for cls in _CLASSES.values():
                cls.__module__ = own_module


def dump(value: Any, path: Path, *, module: str = MODULE) -> None:
    """Write metadata; of the old module, without the fields that it lacked."""
    if module == OLD_MODULE:
        pieces = [piece for entry in value.state_dict_metadata.values() for piece in entry]
        for record in pieces:
            for name in _NEW_FIELDS[:3]:
                vars(record).pop(name)
        value.storage_metadata = dict(value.storage_metadata)
        for record in list(value.storage_metadata):
            for name in _NEW_FIELDS[1:]:
                vars(record).pop(name)
    with _paddle_module(module):
        path.write_bytes(pickle.dumps(value, protocol=4))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _CLASSES[name] if module.startswith("paddle") else super().find_class(module, name)


def load(path: Path) -> Metadata:
    """Read metadata to change."""
    with path.open("rb") as file:
        return _Unpickler(file).load()


@dataclass(frozen=True)
class Part:
    """A piece to write: elements of a box, all or a flattened range, by some ranks."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_range: tuple[int, int] | None
    ranks: Sequence[int]

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return what a rank stores of a global array."""
        box = array[tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))]
        return box if self.flat_range is None else box.reshape(-1)[slice(*self.flat_range)]


def write_group(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, Sequence[Part]],
    *,
    unique_id: int = 0,
    world: int = 3,
) -> Metadata:
    """Write a group folder, with replicas where a part has several ranks."""
    metadata = Metadata()
    contents: list[dict[str, Any]] = [{STATIC_NAMES: {}} for _ in range(world)]
    for key, array in arrays.items():
        metadata.flat_mapping[key] = (key,)
        for part in parts[key]:
            common = {
                "is_flattened": part.flat_range is not None,
                "flattened_range": part.flat_range,
            }
            dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
            metadata.state_dict_metadata.setdefault(key, []).append(
                LocalTensorMetadata(part.offset, part.shape, dtype, array.shape, **common)
            )
            for number, rank in enumerate(part.ranks):
                replica = number if len(part.ranks) > 1 else None
                index = LocalTensorIndex(
                    key, part.offset, **common, replica_id=replica, local_shape=part.shape
                )
                metadata.storage_metadata[index] = f"{rank}_{unique_id}.distcp"
                contents[rank][key] = np.array(part.of(array), order="C")
    os.makedirs(folder, exist_ok=True)
    dump(metadata, folder / f"{unique_id}.metadata")
    for rank, content in enumerate(contents):
        (folder / f"{rank}_{unique_id}.distcp").write_bytes(pickle.dumps(content, protocol=4))
    return metadata


def drawn_parts(draw: random.Random, shape: tuple[int, ...], world: int) -> list[Part]:
    """Cut a tensor into boxes at random, and some of these into flattened ranges.

    A rank stores at most one part of a tensor, as in Paddle.
    """
    boxes = [((0,) * len(shape), shape)]
    ranks = draw.sample(range(world), world)
    while len(boxes) < draw.randint(1, world):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        dims = [dim for dim, n in enumerate(size) if n > 1]
        if not dims:
            boxes.append((offset, size))
            break
        dim = draw.choice(dims)
        cut = draw.randint(1, size[dim] - 1)
        for start, stop in ((0, cut), (cut, size[dim])):
            boxes.append(
                (
                    (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                    (*size[:dim], stop - start, *size[dim + 1 :]),
                )
            )
    spare = world - len(boxes)
    parts: list[Part] = []
    for offset, size in boxes:
        count = prod(size)
        if spare and count > 1 and draw.random() < 0.5:
            cut, spare = draw.randint(1, count - 1), spare - 1
            ranges = [(0, cut), (cut, count)]
        else:
            ranges = [draw.choice([None, (0, count)])]
        parts += [Part(offset, size, flat_range, [ranks.pop()]) for flat_range in ranges]
    if ranks and draw.random() < 0.5:
        first = parts[0]
        parts[0] = Part(first.offset, first.shape, first.flat_range, [*first.ranks, *ranks])
    return parts

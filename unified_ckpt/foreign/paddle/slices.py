"""Joins tensors in Paddle's layout, whole or split by tensor-parallel ranks, as recipes.

How wrong bytes could be read: slices are joined along the wrong axis, or replicas of one tensor
differ. Slices must therefore have the shapes of one tensor, and replicas are compared when they
are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import NoReturn, cast

import torch

from unified_ckpt.core.recipes import (
    Concatenated,
    External,
    Recipe,
    concat,
    leaves,
    slice_dim,
    split_by_operand,
)
from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, relative_to, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.foreign.paddle.names import fused_count
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.tensors import (
    DTYPE_NAMES,
    as_int_bits,
    from_bytes,
    torch_dtype,
)
from unified_ckpt.views.materialize import in_chunks, materialize
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor


def mapped_tensor(
    mapped: MappedFile, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> External:
    """Return the tensor that lies row-major in a file, from byte `start`.

    Boxes are read instead of mapped: columns of a mapped tensor would fault in all pages.
    """

    folder, name = os.path.split(mapped.path)

    def read_box(box: Box) -> torch.Tensor:
        item = dtype.itemsize
        buffer = bytearray(box.numel * item)
        view = memoryview(buffer)
        with LocalStorage(folder) as storage:
            for first, local, count in runs(
                box, shape, local=full_box(box.shape), local_shape=box.shape
            ):
                part = view[local * item : (local + count) * item]
                storage.read_at(name, start + first * item, part)
        return from_bytes(buffer, dtype, box.shape)

    def map_tensor() -> torch.Tensor:
        return from_bytes(mapped.bytes(start, prod(shape) * dtype.itemsize), dtype, shape)

    return External(DTYPE_NAMES[dtype], shape, read_box, file=mapped.path, mapped=map_tensor)


def files_of(recipe: Recipe) -> list[str]:
    """Return the files that a tensor is read from."""
    return list(dict.fromkeys(cast("External", leaf).file for leaf in leaves(recipe)))


def dtype_of(recipe: Recipe) -> str:
    """Return the dtype, which all tensors of a recipe share."""
    return cast("External", next(leaves(recipe))).dtype


def load(recipe: Recipe, box: Box) -> torch.Tensor:
    """Return a non-empty box of a tensor."""
    return materialize(recipe, box, _read_stored, torch_dtype(dtype_of(recipe)))


def _read_stored(key: Key, _: Box) -> NoReturn:
    raise KeyError(key)  # recipes of Paddle's tensors have none of a Source


def concat_ranks(name: str, by_rank: Mapping[int, Sequence[Recipe]], axis: int | None) -> Recipe:
    """Join a parameter's tensors by tensor-parallel rank, each with its replicas.

    `axis`: along which its ranks have slices; None if all are replicas.
    """
    slices = [compare_replicas(name, replicas) for _, replicas in sorted(by_rank.items())]
    if len(slices) == 1 or axis is None:
        return compare_replicas(name, slices)
    sections = fused_count(name)
    shapes = {(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in slices}
    if (
        len(shapes) > 1
        or len(set(map(dtype_of, slices))) > 1
        or any(tensor.shape[axis] % sections for tensor in slices)
    ):
        shapes_text = ", ".join(f"{tensor.shape} in {files_of(tensor)[0]}" for tensor in slices)
        raise FormatError(f"{name}: slices do not join along axis {axis}: got {shapes_text}")
    return concat(
        [
            slice_dim(
                tensor,
                axis,
                section * tensor.shape[axis] // sections,
                (section + 1) * tensor.shape[axis] // sections,
            )
            for section in range(sections)
            for tensor in slices
        ],
        axis,
    )


def compare_replicas(name: str, replicas: Sequence[Recipe]) -> Recipe:
    """Return a tensor that compares its replicas whenever it is read."""
    first = replicas[0]
    dtype, file = dtype_of(first), files_of(first)[0]
    for other in replicas[1:]:
        if (other.shape, dtype_of(other)) != (first.shape, dtype):
            raise FormatError(
                f"{name}: got {dtype} {first.shape} in {file}, but {dtype_of(other)} "
                f"{other.shape} in {files_of(other)[0]}"
            )
    load_compared = partial(_load_compared, name, tuple(replicas))
    return External(dtype, first.shape, load_compared, file=file) if len(replicas) > 1 else first


def _load_compared(name: str, replicas: Sequence[Recipe], box: Box) -> torch.Tensor:
    values = load(replicas[0], box)
    for other in replicas[1:]:
        if not torch.equal(as_int_bits(values), as_int_bits(load(other, box))):
            raise IntegrityError(
                f"{name}: values in {files_of(other)[0]} differ from those in "
                f"{files_of(replicas[0])[0]}, expected replicas of one tensor"
            )
    return values


def join_boxes(dtype: str, shape: tuple[int, ...], boxes: Sequence[tuple[Box, Recipe]]) -> Recipe:
    """Join boxes that cover a tensor exactly once. Same errors as `sharded_tensor`."""
    shards = [
        TensorShard(box, partial(load, recipe, full_box(recipe.shape)), files_of(recipe)[0])
        for box, recipe in boxes
    ]
    sharded_tensor(dtype, shape, shards)
    if len(boxes) == 1:
        return boxes[0][1]
    file = shards[0].file if shards else ""
    return External(dtype, shape, partial(_load_joined, dtype, tuple(boxes)), file=file)


def _load_joined(dtype: str, boxes: Sequence[tuple[Box, Recipe]], requested: Box) -> torch.Tensor:
    result = torch.empty(requested.shape, dtype=torch_dtype(dtype), device="cpu")
    for box, recipe in boxes:
        common = intersect(box, requested)
        if common is not None:
            target = as_int_bits(result)[relative_to(common, requested.offsets).slices]
            target.copy_(as_int_bits(load(recipe, relative_to(common, box.offsets))))
    return result


def as_sharded(name: str, recipe: Recipe) -> ShardedTensor:
    """Return a tensor: as its slices if these lie plainly in files, else computed in chunks."""
    box = full_box(recipe.shape)
    slices: list[tuple[Recipe, Box]] = [(recipe, box)]
    if isinstance(recipe, Concatenated):
        slices = [(operand, place) for operand, _, place in split_by_operand(recipe, box)]
    shards = [
        TensorShard(place, tensor.mapped, tensor.file)
        for tensor, place in slices
        if isinstance(tensor, External) and tensor.mapped is not None
    ]
    if len(shards) < len(slices):
        return in_chunks(_read_stored, name, recipe, dtype_of(recipe))
    return sharded_tensor(dtype_of(recipe), recipe.shape, shards)

"""The storage behind a derived source: virtual files of stored runs, or of materialized chunks.

How wrong bytes could be read: nested views use the same virtual file name (each view has a prefix
of its own); a stored block is damaged (blocks that are read in one run are compared with their
digests, since materialized tensors have none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod

import torch

from unified_ckpt.core.recipes import External, Recipe, Stored, chunk_boxes, leaves
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.box_digests import check_blocks, has_whole_blocks
from unified_ckpt.engine.source.protocol import Catalog, Location, read_box_into
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.storage.storage import Buffer, Reader
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, as_int_bits
from unified_ckpt.views.materialize import Read, materialize
from unified_ckpt.views.shards import ShardCache, ShardStorage, TensorShard, sharded_tensor

CHUNK_NBYTES = 32 << 20  # long enough that the runs it is read in are long too

BlockDigests = Mapping[Key, Sequence[int] | None]


def unique_prefix(storage: Reader) -> str:
    """Return the prefix of a view's virtual files on this storage."""
    return f"{storage.prefix}@" if isinstance(storage, DerivedStorage) else "@"


def chunk_storage(
    inner: Catalog, digests: BlockDigests, recipes: Mapping[Key, tuple[Recipe, TensorSpec]]
) -> ShardStorage:
    """Return a storage of tensors that must be materialized, in chunks that are cached for a while.

    `digests` are those of the stored tensors.
    """
    tensors = {}
    for key, (recipe, spec) in recipes.items():
        dtype = TORCH_DTYPES[spec.dtype]
        read = partial(
            _read_stored,
            inner,
            digests,
            spec.dtype,
            {leaf.key: leaf.shape for leaf in leaves(recipe) if isinstance(leaf, Stored)},
        )
        tensor_name = ":".join(key)
        # an external tensor is loaded whole each time
        has_external = any(isinstance(leaf, External) for leaf in leaves(recipe))
        chunk_numel = prod(recipe.shape) if has_external else CHUNK_NBYTES // itemsize(spec.dtype)
        boxes = chunk_boxes(recipe.shape, max(chunk_numel, 1))
        tensors[key] = sharded_tensor(
            dtype,
            recipe.shape,
            [
                TensorShard(
                    box,
                    partial(_materialize_chunk, recipe, box, read, dtype, tensor_name),
                    tensor_name,
                    cache=True,
                )
                for box in boxes
            ],
        )
    return ShardStorage(inner.storage.root, tensors, ShardCache())


def _materialize_chunk(
    recipe: Recipe, box: Box, read: Read, dtype: torch.dtype, tensor_name: str
) -> torch.Tensor:
    if not box.numel:
        return torch.empty(box.shape, dtype=dtype, device="cpu")
    try:
        chunk = materialize(recipe, box, read, dtype)
    except FormatError as error:
        raise FormatError(f"{tensor_name}: {error}") from error
    # do not retain memory that the chunk does not use
    is_view_of_larger = chunk.untyped_storage().nbytes() > chunk.nbytes
    return (
        as_int_bits(chunk).clone(memory_format=torch.contiguous_format).view(dtype)
        if is_view_of_larger
        else chunk
    )


def _read_stored(
    inner: Catalog,
    digests: BlockDigests,
    dtype: str,
    shapes: Mapping[Key, tuple[int, ...]],
    key: Key,
    box: Box,
) -> torch.Tensor:
    """Read a box of a stored tensor.

    IntegrityError if whole blocks of it do not match their digests.
    """
    tensor = torch.empty(box.shape, dtype=TORCH_DTYPES[dtype], device="cpu")
    spec = TensorSpec(dtype, shapes[key])
    read_box_into(inner.storage, inner.locations[key], spec, box, as_bytes(tensor))
    block_crcs = digests.get(key)
    if block_crcs is not None and has_whole_blocks(spec, box):
        check_blocks(key, spec, box, as_bytes(tensor), block_crcs)
    return tensor


class DerivedStorage:
    """A storage with virtual files: ranges of other files, or materialized tensors.

    The names of virtual files start with `prefix`. `ranges` holds, by file, the (nbytes, location)
    that it consists of, in order.
    """

    def __init__(
        self,
        inner: Reader,
        prefix: str,
        ranges: Mapping[str, Sequence[tuple[int, Location]]],
        materialized: ShardStorage,
    ) -> None:
        self._inner = inner
        self.prefix = prefix
        self._ranges = ranges
        self._materialized = materialized
        self.root = inner.root
        self._starts = {
            file: [0, *accumulate(nbytes for nbytes, _ in file_ranges)]
            for file, file_ranges in ranges.items()
        }

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Read any byte range of a file."""
        if name not in self._ranges:
            storage, file = self._owner(name)
            storage.read_at(file, start, into)
            return
        view = memoryview(into)
        stop = start + view.nbytes
        for begin, (nbytes, location) in zip(self._starts[name], self._ranges[name], strict=False):
            low, high = max(start, begin), min(stop, begin + nbytes)
            if low < high:
                self._inner.read_at(
                    location.file, location.start + low - begin, view[low - start : high - start]
                )

    def read(self, name: str) -> bytes:
        """Return a whole file of the original storage."""
        return self._inner.read(name)

    def size(self, name: str) -> int | None:
        """Return the size of a file."""
        if name in self._ranges:
            return self._starts[name][-1]
        storage, file = self._owner(name)
        return storage.size(file)

    def names(self) -> list[str]:
        """Return the files of the original storage."""
        return self._inner.names()

    def close(self) -> None:
        """Close the original storage."""
        self._inner.close()

    def _owner(self, name: str) -> tuple[Reader, str]:
        """Return the storage that has the file, and its name there.

        A nested view has a shorter prefix.
        """
        is_materialized = name.startswith(self.prefix)
        return (
            (self._materialized, name.removeprefix(self.prefix))
            if is_materialized
            else (self._inner, name)
        )

"""Bytes of a view's tensors: runs of bytes of stored ones, one after another, or made a panel at a time and kept for a while.

How wrong bytes could be read: two views on each other call their files alike (each has a mark of its own); a block of what is stored is
damaged, and the blocks of what is made are others (those that are read in one run are compared with their digests).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod

import torch

from unified_ckpt.core.recipes import Given, Recipe, Stored, leaves, panels
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.box_digests import check_blocks, has_whole_blocks
from unified_ckpt.engine.source.protocol import Catalog, Location, fill_box
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.storage.storage import Buffer, Reader
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, same_bits
from unified_ckpt.views.materialize import Read, make
from unified_ckpt.views.shards import Fragment, Fragments, Kept, assembly

PANEL_NBYTES = (
    32 << 20
)  # of a tensor that is made: so long that the runs that it is read in are long too

Proofs = Mapping[Key, Sequence[int] | None]


def mark_over(storage: Reader) -> str:
    """What the names of a view's own files begin with, on this storage."""
    return f"{storage.mark}@" if isinstance(storage, Woven) else "@"


def panels_of(
    inner: Catalog, proofs: Proofs, made: Mapping[Key, tuple[Recipe, TensorSpec]]
) -> Fragments:
    """A storage of the tensors that have to be made, each in panels that are read at once and kept for a while. `proofs`: digests of the
    stored ones."""
    tensors = {}
    for key, (recipe, spec) in made.items():
        dtype = TORCH_DTYPES[spec.dtype]
        read = partial(
            _read_stored,
            inner,
            proofs,
            spec.dtype,
            {one.key: one.shape for one in leaves(recipe) if isinstance(one, Stored)},
        )
        where = ":".join(key)
        loads = any(isinstance(one, Given) for one in leaves(recipe))  # whole each time
        limit = prod(recipe.shape) if loads else PANEL_NBYTES // itemsize(spec.dtype)
        boxes = panels(recipe.shape, max(limit, 1))
        tensors[key] = assembly(
            dtype,
            recipe.shape,
            [
                Fragment(box, partial(_panel, recipe, box, read, dtype, where), where, keep=True)
                for box in boxes
            ],
        )
    return Fragments(inner.storage.root, tensors, Kept())


def _panel(recipe: Recipe, box: Box, read: Read, dtype: torch.dtype, where: str) -> torch.Tensor:
    if not box.numel:
        return torch.empty(box.shape, dtype=dtype, device="cpu")
    try:
        found = make(recipe, box, read, dtype)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    spare = found.untyped_storage().nbytes() > found.nbytes  # of what is cut off nothing is kept
    return (
        same_bits(found).clone(memory_format=torch.contiguous_format).view(dtype)
        if spare
        else found
    )


def _read_stored(
    inner: Catalog,
    proofs: Proofs,
    dtype: str,
    shapes: Mapping[Key, tuple[int, ...]],
    key: Key,
    box: Box,
) -> torch.Tensor:
    """IntegrityError where a block that is read in one run is not what its digest says: the blocks of what is made are others."""
    found, spec = (
        torch.empty(box.shape, dtype=TORCH_DTYPES[dtype], device="cpu"),
        TensorSpec(dtype, shapes[key]),
    )
    fill_box(inner.storage, inner.locations[key], spec, box, as_bytes(found))
    known = proofs.get(key)
    if known is not None and has_whole_blocks(spec, box):
        check_blocks(key, spec, box, as_bytes(found), known)
    return found


class Woven:
    """A storage with files of its own, called by a mark and what they are: runs of bytes of others, one after another, or made.

    `spans`: by file, (bytes, where they are).
    """

    def __init__(
        self,
        inner: Reader,
        mark: str,
        spans: Mapping[str, Sequence[tuple[int, Location]]],
        made: Fragments,
    ) -> None:
        self._inner, self.mark, self._spans, self._made, self.root = (
            inner,
            mark,
            spans,
            made,
            inner.root,
        )
        self._starts = {
            file: [0, *accumulate(nbytes for nbytes, _ in of)] for file, of in spans.items()
        }

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        if name not in self._spans:
            storage, file = self._place(name)
            storage.read_at(file, start, into)
            return
        view = memoryview(into)
        stop = start + view.nbytes
        for begin, (nbytes, location) in zip(self._starts[name], self._spans[name], strict=False):
            low, high = max(start, begin), min(stop, begin + nbytes)
            if low < high:
                self._inner.read_at(
                    location.file, location.start + low - begin, view[low - start : high - start]
                )

    def read(self, name: str) -> bytes:
        return self._inner.read(name)

    def size(self, name: str) -> int | None:
        if name in self._spans:
            return self._starts[name][-1]
        storage, file = self._place(name)
        return storage.size(file)

    def names(self) -> list[str]:
        return self._inner.names()

    def close(self) -> None:
        self._inner.close()

    def _place(self, name: str) -> tuple[Reader, str]:
        """Whose file it is, and what that calls it. A view under this one has a shorter mark."""
        own = name.startswith(self.mark)
        return (self._made, name.removeprefix(self.mark)) if own else (self._inner, name)

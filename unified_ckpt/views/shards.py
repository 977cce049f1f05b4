"""Tensors that are put together from fragments of other formats, as a Source. No fragment is loaded before it is read.

How wrong bytes could be read: a fragment is missing, or two claim one place; a fragment's file changed; a dtype differs. So every tensor is
shown to be covered exactly once when it is made, and every fragment is looked at when it is loaded.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from unified_ckpt.core.nodes.node_groups import uncovered
from unified_ckpt.core.sharding.boxes import Box, boxes_between, inside, intersect, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Catalog, Location, Said, read_box
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.runtime.storage.mapped_pages import Pages, copy
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, TORCH_DTYPES

KEPT_NBYTES = 256 << 20  # of fragments that cost to load; one larger is kept alone


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box of a tensor. `load` gives its elements, of the box's shape and the tensor's dtype; an alias of a mapped file is best.

    `where`: for people, the file that it is in. `keep`: loading it costs (it decompresses, or casts): what was loaded last is kept for
    the next read of it, in bounded memory.
    """

    box: Box
    load: Callable[[], torch.Tensor]
    where: str
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor and its fragments. `grid`: the shape that their boxes are counted in, which has the tensor's elements in the same order:
    its own shape, or (numel,) for flat ranges, or a dim in two."""

    spec: TensorSpec
    fragments: Sequence[Fragment]
    grid: tuple[int, ...]


def assembly(
    dtype: torch.dtype,
    shape: Sequence[int],
    fragments: Sequence[Fragment],
    *,
    grid: Sequence[int] | None = None,
) -> Assembly:
    """FormatError where a box lies outside, two share an element, or `grid` has not as many elements; IncompleteError for a gap."""
    if dtype not in DTYPE_NAMES:
        raise FormatError(f"dtype {dtype} has no name in safetensors")
    spec, counted = (
        TensorSpec(DTYPE_NAMES[dtype], tuple(shape)),
        tuple(shape if grid is None else grid),
    )
    if prod(counted) != prod(spec.shape):
        raise FormatError(
            f"its fragments make up shape {counted}; needed the elements of {spec.shape}"
        )
    for one in fragments:
        if not inside(one.box, counted):
            raise FormatError(
                f"{one.where}: has box {one.box.offsets} + {one.box.shape} of a tensor of shape {counted}"
            )
    gap = next(uncovered(counted, [one.box for one in fragments]), None)
    if gap is not None:
        raise IncompleteError(f"nothing holds box {gap.offsets} + {gap.shape} of shape {counted}")
    if sum(one.box.numel for one in fragments) != prod(counted):
        raise FormatError(
            f"its fragments overlap: they have {sum(one.box.numel for one in fragments)} elements of {prod(counted)}"
        )
    return Assembly(spec, tuple(fragments), counted)


def whole_tensor(tensor: torch.Tensor, where: str) -> Assembly:
    """Of a tensor in memory, or in a mapped file."""
    return assembly(
        tensor.dtype, tensor.shape, [Fragment(whole(tuple(tensor.shape)), tensor.detach, where)]
    )


class Assembled:
    """`tensors`: by part and name. `format`: what the folder is, for people. `close` is called once.

    `refused`: parts that are there and not read, and why: a FormatError for who asks for one of their names, and for nobody else.
    """

    def __init__(
        self,
        root: str,
        tensors: Mapping[Key, Assembly],
        *,
        format: str,  # noqa: A002  # the protocol's word
        said: Said,
        aliases: Mapping[str, Mapping[str, str]] | None = None,
        refused: Mapping[str, str] | None = None,
        rank_extra: Callable[[int], Any] = lambda _: None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._root, self._tensors, self._format, self._said = root, tensors, format, said
        self._aliases, self._rank_extra, self._close = aliases or {}, rank_extra, close
        self._refused = refused or {}
        self._kept = Kept()
        self._storage = Fragments(root, tensors, self._kept)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in tensors:
            self._names.setdefault(part, {})[name] = None

    @property
    def tensors(self) -> Mapping[Key, Assembly]:
        """For a source that is put together from several."""
        return self._tensors

    @property
    def format(self) -> str:
        return self._format

    @property
    def refused(self) -> Collection[str]:
        return self._refused.keys()

    @property
    def parts(self) -> Sequence[str]:
        return sorted({*self._names, *self._refused})

    def names(self, part: str) -> Collection[str]:
        if part in self._refused:
            raise FormatError(f"{self._root}: {part}: {self._refused[part]}")
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._aliases.get(part, {})

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        absent = [f"{part}:{name}" for name in names if (part, name) not in self._tensors]
        if absent:
            raise NotFoundError(listed(f"{self._root}: does not have", absent))
        return {name: self._tensors[part, name].spec for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        spec = self.specs(part, [name])[name]
        return read_box(self._storage, Location(file_of(part, name), 0), spec, box)

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        locations = {key: Location(file_of(*key), 0) for key in wanted}
        near = {
            key: self._tensors[key].fragments[0].where
            for key in wanted
            if self._tensors[key].fragments
        }
        return Catalog(self._storage, locations, near=near)

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        return dict.fromkeys(wanted)

    def said(self) -> Said:
        return self._said

    def rank_extra(self, rank: int) -> Any:
        return self._rank_extra(rank)

    def close(self) -> None:
        self._kept.clear()
        self._close()


class Kept:
    """What the fragments loaded last gave, for readers on many threads. Each loads at most once at a time."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[int, tuple[Fragment, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        self.pages = Pages()

    def load(self, fragment: Fragment) -> torch.Tensor:
        with self._lock:
            if id(fragment) in self._loaded:
                self._loaded.move_to_end(id(fragment))
            else:
                found = fragment.load()
                self._loaded[id(fragment)] = fragment, found
                while (
                    len(self._loaded) > 1
                    and sum(one.nbytes for _, one in self._loaded.values()) > KEPT_NBYTES
                ):
                    self._loaded.popitem(last=False)
            return self._loaded[id(fragment)][1]

    def clear(self) -> None:
        with self._lock:
            self._loaded.clear()


def file_of(part: str, name: str) -> str:
    return f"{part}:{name}"


class Fragments:
    """A storage with a file for each tensor: its elements, row-major."""

    def __init__(self, root: str, tensors: Mapping[Key, Assembly], kept: Kept) -> None:
        """The file of a tensor is called as `file_of` says."""
        self.root, self._kept = root, kept
        self._of = {file_of(*key): one for key, one in tensors.items()}
        self._rows: dict[str, _Rows] = {}  # of those that were read

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Any byte range: elements that it begins or ends within are put together beside it."""
        one, view = self._of[name], memoryview(into).cast("B")
        item = itemsize(one.spec.dtype)
        first, stop = start // item, -(-(start + len(view)) // item)
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = _Rows(one.fragments)
        if start % item or (start + len(view)) % item:
            held = bytearray((stop - first) * item)
            _fill(one, first, stop, memoryview(held), name, rows, self._kept)
            view[:] = memoryview(held)[start - first * item :][: len(view)]
        else:
            _fill(one, first, stop, view, name, rows, self._kept)

    def read(self, name: str) -> bytes:
        found = bytearray(self.size(name) or 0)
        self.read_at(name, 0, memoryview(found))
        return bytes(found)

    def size(self, name: str) -> int | None:
        return self._of[name].spec.nbytes if name in self._of else None

    def names(self) -> list[str]:
        return sorted(self._of)

    def close(self) -> None:
        """Holds nothing."""


class _Rows:
    """Which fragments may hold some rows of the grid: a tensor may have thousands, one for each rank that saved it."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        spans = sorted((*_row_span(one.box), number) for number, one in enumerate(fragments))
        self._starts, self._numbers = (
            [start for start, _, _ in spans],
            [number for _, _, number in spans],
        )
        self._longest = max((stop - start for start, stop, _ in spans), default=0)

    def near(self, block: Box) -> list[int]:
        """Numbers of fragments; those of all that share an element with the block, and maybe others."""
        start, stop = _row_span(block)
        return self._numbers[
            bisect_right(self._starts, start - self._longest) : bisect_left(self._starts, stop)
        ]


def _row_span(box: Box) -> tuple[int, int]:
    return (box.offsets[0], box.offsets[0] + box.shape[0]) if box.shape else (0, 1)


def _fill(
    one: Assembly, first: int, stop: int, view: memoryview, name: str, rows: _Rows, kept: Kept
) -> None:
    """Elements [first, stop) of a tensor, row-major, into `view`."""
    if first >= stop:
        return
    dtype = TORCH_DTYPES[one.spec.dtype]
    flat, at = torch.frombuffer(view, dtype=dtype), 0  # [stop - first]
    for block in boxes_between(one.grid, first, stop):
        held = flat[at : at + block.numel].view(block.shape)
        at += block.numel
        for number in rows.near(block):
            fragment = one.fragments[number]
            common = intersect(block, fragment.box)
            if common is not None:
                found = _loaded(fragment, dtype, name, kept)[_slices(common, fragment.box)]
                copy(held[_slices(common, block)], found)
                if not fragment.keep:  # what is kept is no mapped file of ours: it may be a caller's, who has changed it
                    kept.pages.read(found)


def _loaded(fragment: Fragment, dtype: torch.dtype, name: str, kept: Kept) -> torch.Tensor:
    found = kept.load(fragment) if fragment.keep else fragment.load()
    if tuple(found.shape) != fragment.box.shape or found.dtype != dtype:
        has = f"has shape {tuple(found.shape)} and {found.dtype}"
        raise FormatError(
            f"{fragment.where}: a fragment of {name} {has}; needed {fragment.box.shape} and {dtype}"
        )
    return found


def _slices(box: Box, of: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - begin, low - begin + count)
        for low, begin, count in zip(box.offsets, of.offsets, box.shape, strict=True)
    )

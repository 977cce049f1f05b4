"""A source's tensors under other names, cut up, turned and joined, as a Source. No byte moves
before it is read.

What stays in order keeps its place in the files, and its digests where blocks are the same; what
does not is made a panel at a time, in bounded memory.

How wrong bytes could be read: pieces differ in dtype, or have other shapes than was thought. So
dtypes and shapes of all pieces are looked at before the first byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from unified_ckpt.core.recipes import (
    External,
    Recipe,
    Run,
    Stored,
    concat,
    leaves,
    merged_runs,
    reshape,
    slice_dim,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Catalog, Location, Source, SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, as_contiguous
from unified_ckpt.views.derived_storage import DerivedStorage, chunk_storage, unique_prefix
from unified_ckpt.views.materialize import materialize
from unified_ckpt.views.shards import tensor_file

_MAX_RUNS = 4096  # of a tensor that is read run by run


class Expr(Protocol):
    """How a tensor is made, before the shapes of what it is made of are known. Equal formulas make
    equal tensors.
    """

    @property
    def stored(self) -> Collection[Key]: ...

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """`shapes`: of all that is `stored`. FormatError where they do not fit."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A stored tensor as it is."""

    key: Key

    @property
    def stored(self) -> Collection[Key]:
        return [self.key]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        return Stored(self.key, shapes[self.key])


@dataclass(frozen=True, slots=True)
class ElementRange:
    """`count` elements of a stored tensor, row-major, from `first`."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RangesTensor:
    """A tensor by its shape, and the pieces that are its elements one after another."""

    shape: tuple[int, ...]
    ranges: tuple[ElementRange, ...]

    def in_part(self, part: str) -> Expr:
        return _RangesExpr(part, self)


@dataclass(frozen=True, slots=True)
class _RangesExpr:
    part: str
    tensor: RangesTensor

    @property
    def stored(self) -> Collection[Key]:
        return [(self.part, element_range.name) for element_range in self.tensor.ranges]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        recipes = []
        for element_range in self.tensor.ranges:
            shape = shapes[self.part, element_range.name]
            if element_range.first + element_range.count > prod(shape):
                raise FormatError(
                    f"{element_range.name} has {prod(shape)} elements; needed {element_range.first + element_range.count}"
                )
            recipes.append(
                slice_dim(
                    reshape(Stored((self.part, element_range.name), shape), (-1,)),
                    0,
                    element_range.first,
                    element_range.first + element_range.count,
                )
            )
        return reshape(concat(recipes, 0), self.tensor.shape)


def derive(
    source: Source,
    tensors: Mapping[str, RangesTensor],
    *,
    parts: Collection[str],
    unchanged: Collection[str] = (),
    refused: Collection[str] = (),
) -> DerivedSource:
    """`tensors`: the view's tensors by name, the same in each of `parts`. `unchanged`: parts that
    the view has as they are; others are not in it. `refused`: parts whose names the source does not
    tell, and nor does the view.

    A tensor of which not all is stored has no name in the view. A stored tensor that no made one is
    cut from keeps its name.
    """
    exprs: dict[str, dict[str, Expr]] = {}
    for part in [part for part in source.parts if part in parts and part not in refused]:
        stored = set(source.names(part))
        available = {
            name: tensor
            for name, tensor in tensors.items()
            if all(element_range.name in stored for element_range in tensor.ranges)
        }
        used = {
            element_range.name for tensor in available.values() for element_range in tensor.ranges
        }
        exprs[part] = {name: tensor.in_part(part) for name, tensor in available.items()} | {
            name: Renamed((part, name)) for name in sorted(stored - used)
        }
    new_names = {
        tensor.ranges[0].name: name
        for name, tensor in tensors.items()
        if len(tensor.ranges) == 1 and tensor.ranges[0].first == 0
    }
    aliases = {
        part: {new_names.get(a, a): new_names.get(b, b) for a, b in source.aliases(part).items()}
        for part in exprs
    }
    for part in [part for part in source.parts if part in unchanged]:
        exprs[part] = {name: Renamed((part, name)) for name in source.names(part)}
        aliases[part] = dict(source.aliases(part))
    return DerivedSource(source, exprs, aliases=aliases, refused=refused)


class DerivedSource:
    """`made`: every tensor of the view, by part and name. `said`: in the view's names, where that
    matters.
    """

    def __init__(
        self,
        source: Source,
        exprs: Mapping[str, Mapping[str, Expr]],
        *,
        aliases: Mapping[str, Mapping[str, str]],
        metadata: SourceMetadata | None = None,
        refused: Collection[str] = (),
    ) -> None:
        self._source, self._exprs, self._aliases, self._metadata, self._refused = (
            source,
            exprs,
            aliases,
            metadata,
            refused,
        )
        self._resolved: dict[Key, tuple[Recipe, TensorSpec]] = {}

    @property
    def format(self) -> str:
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        return sorted({*self._exprs, *self._refused})

    def names(self, part: str) -> Collection[str]:
        if part in self._refused:
            return self._source.names(part)  # which says why
        return self._exprs.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._aliases.get(part, {})

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        resolved = self._recipes([(part, name) for name in names])
        return {name: resolved[part, name][1] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        recipe, spec = self._recipes([(part, name)])[part, name]
        if not box.numel:
            return b""
        try:
            return bytes(
                as_bytes(
                    as_contiguous(materialize(recipe, box, self._read, TORCH_DTYPES[spec.dtype]))
                )
            )
        except FormatError as error:
            raise FormatError(f"{part}:{name}: {error}") from error

    def catalog(self, keys: Collection[Key]) -> Catalog:
        resolved = self._recipes(keys)
        stored_shapes = {
            leaf.key: leaf.shape
            for recipe, _ in resolved.values()
            for leaf in leaves(recipe)
            if isinstance(leaf, Stored)
        }
        inner = self._source.catalog(stored_shapes.keys())
        prefix = unique_prefix(inner.storage)
        locations, spans, materialized = {}, {}, {}
        for key, (recipe, spec) in resolved.items():
            element_runs, element_nbytes = merged_runs(recipe), itemsize(spec.dtype)
            if element_runs is None or len(element_runs) > _MAX_RUNS:
                materialized[key] = recipe, spec
                locations[key] = Location(prefix + tensor_file(*key), 0)
                continue
            pieces_locations = [
                (
                    element_run.count * element_nbytes,
                    _shift(inner.locations[element_run.stored], element_run.first * element_nbytes),
                )
                for element_run in element_runs
            ]
            locations[key] = (
                pieces_locations[0][1]
                if len(pieces_locations) == 1
                else Location(prefix + tensor_file(*key), 0)
            )
            if len(pieces_locations) > 1:
                spans[prefix + tensor_file(*key)] = pieces_locations
        leaf_keys = {
            stored_leaf.key
            for recipe, _ in materialized.values()
            for stored_leaf in leaves(recipe)
            if isinstance(stored_leaf, Stored)
        }
        digests = (
            self._source.block_digests(leaf_keys) if inner.verification_log is None else {}
        )  # else the storage compares
        return Catalog(
            DerivedStorage(
                inner.storage, prefix, spans, chunk_storage(inner, digests, materialized)
            ),
            locations,
            inner.verification_log,
        )

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Of tensors whose blocks are all blocks that are stored."""
        blocks = {
            key: _stored_blocks(recipe, spec) for key, (recipe, spec) in self._recipes(keys).items()
        }
        stored = self._source.block_digests(
            {
                element_run.stored
                for block_runs in blocks.values()
                for element_run, _, _ in block_runs or ()
            }
        )
        result: dict[Key, Sequence[int] | None] = dict.fromkeys(keys)
        for key, block_runs in blocks.items():
            crc_ranges = [
                (stored[element_run.stored], first, stop)
                for element_run, first, stop in block_runs or ()
            ]
            if crc_ranges and all(crcs is not None for crcs, _, _ in crc_ranges):
                result[key] = tuple(
                    crc for crcs, first, stop in crc_ranges for crc in (crcs or ())[first:stop]
                )
        return result

    def metadata(self) -> SourceMetadata:
        return self._metadata or self._source.metadata()

    def rank_extra(self, rank: int) -> Any:
        return self._source.rank_extra(rank)

    def close(self) -> None:
        self._source.close()

    def _recipes(self, keys: Collection[Key]) -> dict[Key, tuple[Recipe, TensorSpec]]:
        """Checked, and with what they make."""
        missing = sorted(name for part, name in keys if name not in self.names(part))
        if missing:
            raise NotFoundError(
                f"{next(part for part, name in keys if name == missing[0])}:{missing[0]}: is not in the checkpoint"
            )
        unresolved = {
            (part, name): self._exprs[part][name]
            for part, name in keys
            if (part, name) not in self._resolved
        }
        names_by_part: dict[str, set[str]] = {}
        for expr in unresolved.values():
            for part, name in expr.stored:
                names_by_part.setdefault(part, set()).add(name)
        specs = {
            (part, name): spec
            for part, names in names_by_part.items()
            for name, spec in self._source.specs(part, names).items()
        }
        for key, expr in unresolved.items():
            try:
                self._resolved[key] = _resolve(expr, specs)
            except CheckpointError as error:
                raise type(error)(f"{':'.join(key)}: {error}") from error
        return {key: self._resolved[key] for key in keys}

    def _read(self, key: Key, box: Box) -> torch.Tensor:
        dtype = TORCH_DTYPES[self._source.specs(key[0], [key[1]])[key[1]].dtype]
        return (
            torch.frombuffer(bytearray(self._source.read(*key, box)), dtype=torch.uint8)
            .view(dtype)
            .view(box.shape)
        )


def _resolve(expr: Expr, specs: Mapping[Key, TensorSpec]) -> tuple[Recipe, TensorSpec]:
    recipe = expr.recipe({key: specs[key].shape for key in expr.stored})
    dtypes = {
        leaf.dtype if isinstance(leaf, External) else specs[leaf.key].dtype
        for leaf in leaves(recipe)
    }
    if len(dtypes) > 1:
        raise FormatError(f"its pieces have dtypes {', '.join(sorted(dtypes))}; needed one")
    spec = TensorSpec(dtypes.pop(), recipe.shape)
    if spec.dtype == "F4" and merged_runs(recipe) is None:
        raise FormatError(
            "its pieces have dtype F4, two elements in a byte; needed a tensor that is cut at rows and joined, no more"
        )
    return recipe, spec


def _shift(location: Location, nbytes: int) -> Location:
    return Location(location.file, location.start + nbytes)


def _stored_blocks(recipe: Recipe, spec: TensorSpec) -> list[tuple[Run, int, int]] | None:
    """The half-open range of stored blocks that each piece is; None where one is no whole blocks."""
    element_runs, element_nbytes, start, block_runs = (
        merged_runs(recipe),
        itemsize(spec.dtype),
        0,
        [],
    )
    sizes = {
        leaf.key: prod(leaf.shape) * element_nbytes
        for leaf in leaves(recipe)
        if isinstance(leaf, Stored)
    }
    for element_run in element_runs or ():
        first, stop = (
            element_run.first * element_nbytes,
            (element_run.first + element_run.count) * element_nbytes,
        )
        start += stop - first
        at_end = stop == sizes[element_run.stored] and start == spec.nbytes
        if first % BLOCK_NBYTES or (stop % BLOCK_NBYTES and not at_end):
            return None
        block_runs.append((element_run, first // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)))
    return block_runs if element_runs is not None else None

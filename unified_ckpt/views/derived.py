"""A Source whose tensors are expressions over another's: renamed, split, permuted, concatenated.

Nothing is read before it is asked for. Tensors that keep their element order keep their location in
the files, and their digests if their blocks are the same. Others are materialized chunk by chunk,
in bounded memory.

How wrong bytes could be read: operands differ in dtype, or have unexpected shapes. So dtypes and
shapes of all operands are checked before the first byte is read.
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

_MAX_RUNS = 4096  # a tensor of more runs is materialized


class Expr(Protocol):
    """How a tensor is made, before the shapes of its operands are known.

    Equal expressions are equal tensors.
    """

    @property
    def stored(self) -> Collection[Key]:
        """Keys of the operands."""

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the recipe for operands of these shapes. FormatError if they do not fit."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A stored tensor, unchanged."""

    key: Key

    @property
    def stored(self) -> Collection[Key]:
        """Key of the tensor."""
        return [self.key]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the stored tensor."""
        return Stored(self.key, shapes[self.key])


@dataclass(frozen=True, slots=True)
class ElementRange:
    """`count` elements of a stored tensor, in row-major order, from element `first`."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RangesTensor:
    """A tensor of this shape whose elements are the ranges, one after another."""

    shape: tuple[int, ...]
    ranges: tuple[ElementRange, ...]

    def in_part(self, part: str) -> Expr:
        """Return the expression that makes this tensor from tensors of `part`."""
        return _RangesExpr(part, self)


@dataclass(frozen=True, slots=True)
class _RangesExpr:
    part: str
    tensor: RangesTensor

    @property
    def stored(self) -> Collection[Key]:
        """Keys of the tensors that have the ranges."""
        return [(self.part, element_range.name) for element_range in self.tensor.ranges]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the concatenated ranges. FormatError if a tensor is too short."""
        recipes = []
        for element_range in self.tensor.ranges:
            shape = shapes[self.part, element_range.name]
            if element_range.first + element_range.count > prod(shape):
                raise FormatError(
                    f"{element_range.name}: got {prod(shape)} elements, expected at least "
                    f"{element_range.first + element_range.count}"
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
    """Return a source with these tensors, by name, in each of `parts`.

    `unchanged` parts are passed through; other parts are left out. Asking for the names of a
    `refused` part raises the error of the original source. A tensor whose operands are not all
    stored is left out; a stored tensor that no expression uses keeps its name.
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
    """A Source whose tensors are expressions over another source, by part and name.

    `metadata` replaces that of the original source if names in it change.
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
        self._source = source
        self._exprs = exprs
        self._aliases = aliases
        self._metadata = metadata
        self._refused = refused
        self._resolved: dict[Key, tuple[Recipe, TensorSpec]] = {}

    @property
    def format(self) -> str:
        """Name of the original source's format."""
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        """Names of all parts, those that cannot be read included."""
        return sorted({*self._exprs, *self._refused})

    def names(self, part: str) -> Collection[str]:
        """Return the tensor names of a part."""
        if part in self._refused:
            return self._source.names(part)  # raises the reason
        return self._exprs.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return the names of tied tensors in a part, each with the name of the tensor."""
        return self._aliases.get(part, {})

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of these tensors."""
        resolved = self._recipes([(part, name) for name in names])
        return {name: resolved[part, name][1] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        """Return the row-major bytes of a box."""
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
        """Return storage and locations.

        Tensors that are not a few stored runs get virtual files.
        """
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
            # with a log, the storage verifies
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
        digests = self._source.block_digests(leaf_keys) if inner.verification_log is None else {}
        return Catalog(
            DerivedStorage(
                inner.storage, prefix, spans, chunk_storage(inner, digests, materialized)
            ),
            locations,
            inner.verification_log,
        )

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return digests of tensors whose blocks are all stored blocks, and None for others."""
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
        """Return everything beside tensors, under the new names."""
        return self._metadata or self._source.metadata()

    def rank_extra(self, rank: int) -> Any:
        """Return the state that this rank saved for itself."""
        return self._source.rank_extra(rank)

    def close(self) -> None:
        """Close the original source."""
        self._source.close()

    def _recipes(self, keys: Collection[Key]) -> dict[Key, tuple[Recipe, TensorSpec]]:
        """Return recipes and specs of these tensors, checked and cached."""
        missing = sorted(name for part, name in keys if name not in self.names(part))
        if missing:
            raise NotFoundError(
                f"{next(part for part, name in keys if name == missing[0])}:{missing[0]}: does not "
                "exist in the checkpoint"
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
        raise FormatError(f"got operands of dtypes {', '.join(sorted(dtypes))}, expected one dtype")
    spec = TensorSpec(dtypes.pop(), recipe.shape)
    if spec.dtype == "F4" and merged_runs(recipe) is None:
        raise FormatError(
            "dtype F4 has two elements in a byte; expected only splits along dim 0 and "
            "concatenation"
        )
    return recipe, spec


def _shift(location: Location, nbytes: int) -> Location:
    return Location(location.file, location.start + nbytes)


def _stored_blocks(recipe: Recipe, spec: TensorSpec) -> list[tuple[Run, int, int]] | None:
    """Return the range of stored blocks of each run, or None if a run is not whole blocks."""
    element_runs = merged_runs(recipe)
    element_nbytes = itemsize(spec.dtype)
    start = 0
    block_runs = []
    sizes = {
        leaf.key: prod(leaf.shape) * element_nbytes
        for leaf in leaves(recipe)
        if isinstance(leaf, Stored)
    }
    for element_run in element_runs or ():
        first = element_run.first * element_nbytes
        stop = (element_run.first + element_run.count) * element_nbytes
        start += stop - first
        at_end = stop == sizes[element_run.stored] and start == spec.nbytes
        if first % BLOCK_NBYTES or (stop % BLOCK_NBYTES and not at_end):
            return None
        block_runs.append((element_run, first // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)))
    return block_runs if element_runs is not None else None

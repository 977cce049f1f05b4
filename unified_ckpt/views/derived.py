"""A Source whose tensors are expressions over another's: renamed, split, permuted, concatenated.

Nothing is read before it is asked for. Tensors that keep their element order keep their location in
the files, and their digests if their blocks are the same. Others are materialized chunk by chunk,
in bounded memory.

How wrong bytes could be read: operands differ in dtype, or have unexpected shapes. So dtypes and
shapes of all operands are checked before the first byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

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
    transpose,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import (
    Location,
    Locations,
    Source,
    SourceMetadata,
    WrappedSource,
)
from unified_ckpt.errors import FormatError, NotFoundError, error_prefix
from unified_ckpt.format.codec import Path
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.format.names import MODEL
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.views.materialize import in_chunks, read_tensor
from unified_ckpt.views.shard_assembler import ShardAssembler
from unified_ckpt.views.shards import ShardedTensor

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
    """A stored tensor under another name, transposed if it is a matrix that asks for it."""

    key: Key
    transposed: bool = False

    @property
    def stored(self) -> Collection[Key]:
        """Key of the tensor."""
        return [self.key]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the stored tensor, transposed if asked for."""
        stored = Stored(self.key, shapes[self.key])
        return transpose(stored, 0, 1) if self.transposed else stored


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor that is not stored."""

    external: External

    @property
    def stored(self) -> Collection[Key]:
        """No stored tensor."""
        return ()

    def recipe(self, _: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the tensor."""
        return self.external


@dataclass(frozen=True, slots=True)
class ElementRange:
    """`count` elements of a stored tensor, in row-major order, from element `first`."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RangesTensor:
    """A tensor of this shape whose elements are the ranges of tensors of `part`, one by one."""

    shape: tuple[int, ...]
    ranges: tuple[ElementRange, ...]
    part: str = MODEL

    @property
    def stored(self) -> Collection[Key]:
        """Keys of the tensors that have the ranges."""
        return [(self.part, element_range.name) for element_range in self.ranges]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        """Return the concatenated ranges. FormatError if a tensor is too short."""
        recipes = []
        for element_range in self.ranges:
            key, stop = (self.part, element_range.name), element_range.first + element_range.count
            if stop > prod(shapes[key]):
                raise FormatError(
                    f"{element_range.name}: got {prod(shapes[key])} elements, expected at least "
                    f"{stop}"
                )
            flat = reshape(Stored(key, shapes[key]), (-1,))
            recipes.append(slice_dim(flat, 0, element_range.first, stop))
        return reshape(concat(recipes, 0), self.shape)


def unchanged_parts(source: Source, parts: Collection[str]) -> dict[str, dict[str, Expr]]:
    """Return all tensors of these parts, as they are stored."""
    return {part: {name: Renamed((part, name)) for name in source.names(part)} for part in parts}


def derive(
    source: Source,
    tensors: Mapping[str, RangesTensor],
    *,
    parts: Collection[str],
    refused: Collection[str] = (),
    metadata: SourceMetadata | None = None,
) -> DerivedSource:
    """Return a source with these tensors, by name, in each of `parts`.

    Parts that are not in `parts` are left out. Asking for the names of a `refused` part raises the
    error of the original source. A tensor whose operands are not all stored is left out; a stored
    tensor that no expression uses keeps its name. `metadata`: as of `WrappedSource`.
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
        exprs[part] = {name: replace(tensor, part=part) for name, tensor in available.items()} | {
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
    return DerivedSource(source, exprs, aliases=aliases, metadata=metadata, refused=refused)


class DerivedSource(WrappedSource):
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
        new_paths: Callable[[Path], Sequence[Path]] = lambda path: [path],
    ) -> None:
        super().__init__(source, metadata, new_paths)
        self._exprs, self._aliases, self._refused = exprs, aliases, refused
        self._resolved: dict[Key, tuple[Recipe, TensorSpec]] = {}
        self._runs: dict[Key, Sequence[Run] | None] = {}
        self._materialized: dict[Key, ShardedTensor] = {}
        self._assembler = ShardAssembler(self._materialized)

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

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's bytes from byte `start`."""
        if key not in self._resolved:
            self._recipes([key])
        recipe, spec = self._resolved[key]
        element_runs = self._stored_runs(key)
        if element_runs is None:
            if key not in self._materialized:
                read = partial(read_tensor, self._source)
                self._materialized[key] = in_chunks(read, ":".join(key), recipe, spec.dtype)
            self._assembler.read_into(key, start, buffer)
            return
        element_nbytes, run_start, stop = itemsize(spec.dtype), 0, start + len(buffer)
        for element_run in element_runs:
            run_stop = run_start + element_run.count * element_nbytes
            low, high = max(start, run_start), min(stop, run_stop)
            if low < high:
                self._source.read_into(
                    element_run.stored,
                    element_run.first * element_nbytes + low - run_start,
                    buffer[low - start : high - start],
                )
            run_start = run_stop

    def locations(self, keys: Collection[Key]) -> Locations | None:
        """Return where tensors that are one run of a stored tensor lie plainly in files."""
        resolved = self._recipes(keys)
        single_runs = {
            key: (runs[0], itemsize(resolved[key][1].dtype))
            for key in keys
            if (runs := self._stored_runs(key)) is not None and len(runs) == 1
        }
        stored = self._source.locations({run.stored for run, _ in single_runs.values()})
        if stored is None:
            return None
        return Locations(
            stored.storage,
            {
                key: Location(location.file, location.start + run.first * element_nbytes)
                for key, (run, element_nbytes) in single_runs.items()
                if (location := stored.by_key.get(run.stored)) is not None
            },
        )

    def _stored_runs(self, key: Key) -> Sequence[Run] | None:
        """Return the stored runs that a tensor consists of, or None if it is materialized."""
        if key not in self._runs:
            element_runs = merged_runs(self._recipes([key])[key][0])
            is_long = element_runs is not None and len(element_runs) > _MAX_RUNS
            self._runs[key] = None if is_long else element_runs
        return self._runs[key]

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

    def keys_with_digests(self, keys: Collection[Key]) -> set[Key]:
        """Return the tensors that consist of stored tensors whose stored bytes have digests."""
        operands = {
            key: [leaf.key if isinstance(leaf, Stored) else None for leaf in leaves(recipe)]
            for key, (recipe, _) in self._recipes(keys).items()
        }
        stored = {key for keys in operands.values() for key in keys if key is not None}
        with_digests = self._source.keys_with_digests(stored)
        return {key for key, needed in operands.items() if with_digests.issuperset(needed)}

    def close(self) -> None:
        """Drop cached chunks and close the original source."""
        self._assembler.clear()
        super().close()

    def _recipes(self, keys: Collection[Key]) -> dict[Key, tuple[Recipe, TensorSpec]]:
        """Return recipes and specs of these tensors, checked and cached."""
        missing = min((key for key in keys if key[1] not in self.names(key[0])), default=None)
        if missing is not None:
            raise NotFoundError(f"{':'.join(missing)}: does not exist in the checkpoint")
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
            with error_prefix(f"{':'.join(key)}"):
                self._resolved[key] = _resolve(expr, specs)
        return {key: self._resolved[key] for key in keys}


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

"""A source's tensors under other names, cut up, turned and joined, as a Source. No byte moves before it is read.

What stays in order keeps its place in the files, and its digests where blocks are the same; what does not is made a panel at a time, in
bounded memory.

How wrong bytes could be read: pieces differ in dtype, or have other shapes than was thought. So dtypes and shapes of all pieces are looked
at before the first byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from unified_ckpt.core.recipes import (
    Given,
    Recipe,
    Run,
    Stored,
    cut,
    joined,
    leaves,
    reshaped,
    runs_of,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Catalog, Location, Said, Source
from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, dense
from unified_ckpt.views.derived_storage import Woven, mark_over, panels_of
from unified_ckpt.views.materialize import make
from unified_ckpt.views.shards import file_of

_MAX_PIECES = 4096  # of a tensor that is read run by run


class Formula(Protocol):
    """How a tensor is made, before the shapes of what it is made of are known. Equal formulas make equal tensors."""

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
class Piece:
    """`count` elements of a stored tensor, row-major, from `first`."""

    stored: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor by its shape, and the pieces that are its elements one after another."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def of(self, part: str) -> Formula:
        return _Pieces(part, self)


@dataclass(frozen=True, slots=True)
class _Pieces:
    part: str
    made: Made

    @property
    def stored(self) -> Collection[Key]:
        return [(self.part, piece.stored) for piece in self.made.pieces]

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:
        found = []
        for piece in self.made.pieces:
            shape = shapes[self.part, piece.stored]
            if piece.first + piece.count > prod(shape):
                raise FormatError(
                    f"{piece.stored} has {prod(shape)} elements; needed {piece.first + piece.count}"
                )
            found.append(
                cut(
                    reshaped(Stored((self.part, piece.stored), shape), (-1,)),
                    0,
                    piece.first,
                    piece.first + piece.count,
                )
            )
        return reshaped(joined(found, 0), self.made.shape)


def recut(
    source: Source,
    made: Mapping[str, Made],
    *,
    parts: Collection[str],
    unchanged: Collection[str] = (),
    refused: Collection[str] = (),
) -> Recut:
    """`made`: the view's tensors by name, the same in each of `parts`. `unchanged`: parts that the view has as they are; others are not in
    it. `refused`: parts whose names the source does not tell, and nor does the view.

    A tensor of which not all is stored has no name in the view. A stored tensor that no made one is cut from keeps its name.
    """
    found: dict[str, dict[str, Formula]] = {}
    for part in [part for part in source.parts if part in parts and part not in refused]:
        stored = set(source.names(part))
        there = {
            name: one
            for name, one in made.items()
            if all(piece.stored in stored for piece in one.pieces)
        }
        used = {piece.stored for one in there.values() for piece in one.pieces}
        found[part] = {name: one.of(part) for name, one in there.items()} | {
            name: Renamed((part, name)) for name in sorted(stored - used)
        }
    renamed = {
        one.pieces[0].stored: name
        for name, one in made.items()
        if len(one.pieces) == 1 and one.pieces[0].first == 0
    }
    aliases = {
        part: {renamed.get(a, a): renamed.get(b, b) for a, b in source.aliases(part).items()}
        for part in found
    }
    for part in [part for part in source.parts if part in unchanged]:
        found[part] = {name: Renamed((part, name)) for name in source.names(part)}
        aliases[part] = dict(source.aliases(part))
    return Recut(source, found, aliases=aliases, refused=refused)


class Recut:
    """`made`: every tensor of the view, by part and name. `said`: in the view's names, where that matters."""

    def __init__(
        self,
        source: Source,
        made: Mapping[str, Mapping[str, Formula]],
        *,
        aliases: Mapping[str, Mapping[str, str]],
        said: Said | None = None,
        refused: Collection[str] = (),
    ) -> None:
        self._source, self._made, self._aliases, self._said, self._refused = (
            source,
            made,
            aliases,
            said,
            refused,
        )
        self._known: dict[Key, tuple[Recipe, TensorSpec]] = {}

    @property
    def format(self) -> str:
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        return sorted({*self._made, *self._refused})

    def names(self, part: str) -> Collection[str]:
        if part in self._refused:
            return self._source.names(part)  # which says why
        return self._made.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._aliases.get(part, {})

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        found = self._recipes([(part, name) for name in names])
        return {name: found[part, name][1] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        recipe, spec = self._recipes([(part, name)])[part, name]
        if not box.numel:
            return b""
        try:
            return bytes(as_bytes(dense(make(recipe, box, self._read, TORCH_DTYPES[spec.dtype]))))
        except FormatError as error:
            raise FormatError(f"{part}:{name}: {error}") from error

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        found = self._recipes(wanted)
        stored = {
            leaf.key: leaf.shape
            for recipe, _ in found.values()
            for leaf in leaves(recipe)
            if isinstance(leaf, Stored)
        }
        inner = self._source.catalog(stored.keys())
        mark = mark_over(inner.storage)
        locations, spans, made = {}, {}, {}
        for key, (recipe, spec) in found.items():
            pieces, item = runs_of(recipe), itemsize(spec.dtype)
            if pieces is None or len(pieces) > _MAX_PIECES:
                made[key] = recipe, spec
                locations[key] = Location(mark + file_of(*key), 0)
                continue
            places = [
                (piece.count * item, _moved(inner.locations[piece.stored], piece.first * item))
                for piece in pieces
            ]
            locations[key] = places[0][1] if len(places) == 1 else Location(mark + file_of(*key), 0)
            if len(places) > 1:
                spans[mark + file_of(*key)] = places
        leaf_keys = {
            one.key
            for recipe, _ in made.values()
            for one in leaves(recipe)
            if isinstance(one, Stored)
        }
        proofs = (
            self._source.block_digests(leaf_keys) if inner.ledger is None else {}
        )  # else the storage compares
        return Catalog(
            Woven(inner.storage, mark, spans, panels_of(inner, proofs, made)),
            locations,
            inner.ledger,
        )

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Of tensors whose blocks are all blocks that are stored."""
        blocks = {
            key: _blocks(recipe, spec) for key, (recipe, spec) in self._recipes(wanted).items()
        }
        stored = self._source.block_digests(
            {piece.stored for pieces in blocks.values() for piece, _, _ in pieces or ()}
        )
        found: dict[Key, Sequence[int] | None] = dict.fromkeys(wanted)
        for key, pieces in blocks.items():
            digests = [(stored[piece.stored], first, stop) for piece, first, stop in pieces or ()]
            if digests and all(known is not None for known, _, _ in digests):
                found[key] = tuple(
                    one for known, first, stop in digests for one in (known or ())[first:stop]
                )
        return found

    def said(self) -> Said:
        return self._said or self._source.said()

    def rank_extra(self, rank: int) -> Any:
        return self._source.rank_extra(rank)

    def close(self) -> None:
        self._source.close()

    def _recipes(self, wanted: Collection[Key]) -> dict[Key, tuple[Recipe, TensorSpec]]:
        """Checked, and with what they make."""
        absent = sorted(name for part, name in wanted if name not in self.names(part))
        if absent:
            raise NotFoundError(
                f"{next(part for part, name in wanted if name == absent[0])}:{absent[0]}: is not in the checkpoint"
            )
        fresh = {
            (part, name): self._made[part][name]
            for part, name in wanted
            if (part, name) not in self._known
        }
        needed: dict[str, set[str]] = {}
        for formula in fresh.values():
            for part, name in formula.stored:
                needed.setdefault(part, set()).add(name)
        specs = {
            (part, name): spec
            for part, names in needed.items()
            for name, spec in self._source.specs(part, names).items()
        }
        for key, formula in fresh.items():
            try:
                self._known[key] = _checked(formula, specs)
            except CheckpointError as error:
                raise type(error)(f"{':'.join(key)}: {error}") from error
        return {key: self._known[key] for key in wanted}

    def _read(self, key: Key, box: Box) -> torch.Tensor:
        dtype = TORCH_DTYPES[self._source.specs(key[0], [key[1]])[key[1]].dtype]
        return (
            torch.frombuffer(bytearray(self._source.read(*key, box)), dtype=torch.uint8)
            .view(dtype)
            .view(box.shape)
        )


def _checked(formula: Formula, specs: Mapping[Key, TensorSpec]) -> tuple[Recipe, TensorSpec]:
    recipe = formula.recipe({key: specs[key].shape for key in formula.stored})
    dtypes = {
        one.dtype if isinstance(one, Given) else specs[one.key].dtype for one in leaves(recipe)
    }
    if len(dtypes) > 1:
        raise FormatError(f"its pieces have dtypes {', '.join(sorted(dtypes))}; needed one")
    spec = TensorSpec(dtypes.pop(), recipe.shape)
    if spec.dtype == "F4" and runs_of(recipe) is None:
        raise FormatError(
            "its pieces have dtype F4, two elements in a byte; needed a tensor that is cut at rows and joined, no more"
        )
    return recipe, spec


def _moved(location: Location, nbytes: int) -> Location:
    return Location(location.file, location.start + nbytes)


def _blocks(recipe: Recipe, spec: TensorSpec) -> list[tuple[Run, int, int]] | None:
    """The half-open range of stored blocks that each piece is; None where one is no whole blocks."""
    pieces, item, start, found = runs_of(recipe), itemsize(spec.dtype), 0, []
    sizes = {one.key: prod(one.shape) * item for one in leaves(recipe) if isinstance(one, Stored)}
    for piece in pieces or ():
        first, stop = piece.first * item, (piece.first + piece.count) * item
        start += stop - first
        at_end = stop == sizes[piece.stored] and start == spec.nbytes
        if first % BLOCK_NBYTES or (stop % BLOCK_NBYTES and not at_end):
            return None
        found.append((piece, first // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)))
    return found if pieces is not None else None

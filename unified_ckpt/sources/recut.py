"""A source's tensors cut up and joined anew, as a Source: other names, experts apart or stacked. No byte moves before it is read.

How wrong bytes could be read: a piece is missing, or pieces differ in dtype. So a tensor that is not wholly there has no name in the view,
and its pieces keep theirs, which a load reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from unified_ckpt.core.dtypes import itemsize
from unified_ckpt.core.geometry import Box
from unified_ckpt.core.sharding import TensorSpec
from unified_ckpt.engine.source import Catalog, Location, Said, Source, read_box
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.storage import Buffer, Reader

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` elements of a stored tensor, row-major, from `first`."""

    stored: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the view: its shape, and the pieces that are its elements one after another."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Recut:
    """`made`: the view's tensors by name, the same in each of `parts`. A stored tensor that no made one is cut from keeps its name.

    Parts that are not named are not in the view.
    """

    def __init__(self, source: Source, made: Mapping[str, Made], *, parts: Collection[str]) -> None:
        self._source, self._made, self._parts = source, made, frozenset(parts)
        self._names: dict[str, dict[str, Made | None]] = {}  # None: as it is stored

    @property
    def format(self) -> str:
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        return [part for part in self._source.parts if part in self._parts]

    def names(self, part: str) -> Collection[str]:
        if part not in self.parts:
            return ()
        if part not in self._names:
            stored = set(self._source.names(part))
            found = {name: made for name, made in self._made.items() if all(piece.stored in stored for piece in made.pieces)}
            used = {piece.stored for made in found.values() for piece in made.pieces}
            self._names[part] = {**found, **dict.fromkeys(sorted(stored - used))}
        return self._names[part].keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        renamed = self._renamed
        return {renamed.get(alias, alias): renamed.get(name, name) for alias, name in self._source.aliases(part).items()}

    @cached_property
    def _renamed(self) -> dict[str, str]:
        """Stored name -> the view's, of tensors that are in one piece."""
        return {made.pieces[0].stored: name for name, made in self._made.items() if len(made.pieces) == 1 and made.pieces[0].first == 0}

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        made = self._made_of(part, names)
        stored = self._source.specs(part, {piece.stored for one in made.values() for piece in one.pieces})
        found = {}
        for name, one in made.items():
            dtypes = {stored[piece.stored].dtype for piece in one.pieces}
            if len(dtypes) > 1:
                raise FormatError(f"{part}:{name}: its pieces have dtypes {', '.join(sorted(dtypes))}; needed one")
            for piece in one.pieces:
                there = prod(stored[piece.stored].shape)
                if piece.first + piece.count > there:
                    raise FormatError(f"{part}:{piece.stored}: has {there} elements; needed {piece.first + piece.count} to make {name}")
            found[name] = TensorSpec(dtypes.pop(), one.shape)
        return found

    def read(self, part: str, name: str, box: Box) -> bytes:
        catalog = self.catalog([(part, name)])
        return read_box(catalog.storage, catalog.locations[part, name], self.specs(part, [name])[name], box)

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        made = {(part, name): one for part, names in _by_part(wanted).items() for name, one in self._made_of(part, names).items()}
        specs = {(part, name): one for part, names in _by_part(wanted).items() for name, one in self.specs(part, names).items()}
        inner = self._source.catalog({(part, piece.stored) for (part, _), one in made.items() for piece in one.pieces})
        spans: dict[str, list[tuple[int, Location]]] = {}
        locations = {}
        for key, one in made.items():
            part, item = key[0], itemsize(specs[key].dtype)
            starts = [inner.locations[part, piece.stored] for piece in one.pieces]
            found = [
                (piece.count * item, Location(at.file, at.start + piece.first * item)) for piece, at in zip(one.pieces, starts, strict=True)
            ]
            locations[key] = found[0][1] if len(found) == 1 else Location(":".join(key), 0)
            if len(found) > 1:
                spans[":".join(key)] = found
        return Catalog(_Joined(inner.storage, spans), locations, inner.ledger)

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Those of tensors that are stored whole, under whatever name; blocks of the others are cut elsewhere."""
        kept: dict[Key, Key] = {}
        for part, names in _by_part(wanted).items():
            made = self._made_of(part, names)
            stored = self._source.specs(part, {one.pieces[0].stored for one in made.values()})
            for name, one in made.items():
                if len(one.pieces) == 1 and one.pieces[0].count == prod(stored[one.pieces[0].stored].shape):
                    kept[part, name] = part, one.pieces[0].stored
        found = self._source.block_digests(set(kept.values()))
        return {key: found[kept[key]] if key in kept else None for key in wanted}

    def said(self) -> Said:
        return self._source.said()

    def rank_extra(self, rank: int) -> Any:
        return self._source.rank_extra(rank)

    def close(self) -> None:
        self._source.close()

    def _made_of(self, part: str, names: Collection[str]) -> dict[str, Made]:
        absent = sorted(set(names) - set(self.names(part)))
        if absent:
            raise NotFoundError(f"{part}:{absent[0]}: is not in the checkpoint")
        made = {name: self._names[part][name] for name in names}
        kept = self._source.specs(part, {name for name, one in made.items() if one is None})
        return {name: one or Made(kept[name].shape, (Piece(name, 0, prod(kept[name].shape)),)) for name, one in made.items()}


def _by_part(wanted: Collection[Key]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part, name in wanted:
        found.setdefault(part, []).append(name)
    return found


class _Joined:
    """A storage in which some files are runs of bytes of others. `spans`: by file, (bytes, where they are), one after another."""

    def __init__(self, inner: Reader, spans: Mapping[str, Sequence[tuple[int, Location]]]) -> None:
        self._inner, self._spans, self.root = inner, spans, inner.root
        self._starts = {file: [0, *accumulate(nbytes for nbytes, _ in of)] for file, of in spans.items()}

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        if name not in self._spans:
            self._inner.read_at(name, start, into)
            return
        view = memoryview(into)
        stop = start + view.nbytes
        for begin, (nbytes, location) in zip(self._starts[name], self._spans[name], strict=False):
            low, high = max(start, begin), min(stop, begin + nbytes)
            if low < high:
                self._inner.read_at(location.file, location.start + low - begin, view[low - start : high - start])

    def read(self, name: str) -> bytes:
        return self._inner.read(name)

    def size(self, name: str) -> int | None:
        return self._starts[name][-1] if name in self._spans else self._inner.size(name)

    def names(self) -> list[str]:
        return self._inner.names()

    def close(self) -> None:
        self._inner.close()

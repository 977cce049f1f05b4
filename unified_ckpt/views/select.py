"""Some parts of a source, the model in another dtype if asked for, as a Source. No byte moves before it is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed
from unified_ckpt.engine.rewrite.weights_check import masters_of
from unified_ckpt.engine.source.protocol import Catalog, Location, Said, Source, read_box
from unified_ckpt.errors import NotFoundError
from unified_ckpt.runtime.storage.storage import Buffer, Reader
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES


class Chosen:
    """`parts`: only these, None for all; NotFoundError for one that the source lacks. `model_dtype`, as safetensors names it: of the
    model's floating-point tensors, which are cast from the master weights where there are any."""

    def __init__(
        self, source: Source, *, parts: Collection[str] | None, model_dtype: str | None
    ) -> None:
        stray = sorted(set(parts or ()) - set(source.parts))
        if stray:
            raise NotFoundError(
                listed(f"the source has the parts {', '.join(source.parts)}, and lacks", stray)
            )
        self._source, self._dtype = source, model_dtype
        self._parts = [part for part in source.parts if parts is None or part in parts]

    @property
    def format(self) -> str:
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        return self._parts

    def names(self, part: str) -> Collection[str]:
        return self._source.names(part) if part in self._parts else ()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._source.aliases(part) if part in self._parts else {}

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return {
            name: self._given(part, spec) for name, spec in self._source.specs(part, names).items()
        }

    def read(self, part: str, name: str, box: Box) -> bytes:
        catalog = self.catalog([(part, name)])
        return read_box(
            catalog.storage, catalog.locations[part, name], self.specs(part, [name])[name], box
        )

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        casts = self._casts(wanted)
        inner = self._source.catalog({casts[key].stored if key in casts else key for key in wanted})
        casting = {
            ":".join(key): (inner.locations[cast.stored], cast) for key, cast in casts.items()
        }
        locations = {
            key: Location(":".join(key), 0) if key in casts else inner.locations[key]
            for key in wanted
        }
        return Catalog(_Casting(inner.storage, casting), locations, inner.ledger, inner.near)

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        casts = self._casts(wanted)
        return {
            **self._source.block_digests([key for key in wanted if key not in casts]),
            **dict.fromkeys(casts),
        }

    def said(self) -> Said:
        return self._source.said()

    def rank_extra(self, rank: int) -> Any:
        return self._source.rank_extra(rank)

    def close(self) -> None:
        self._source.close()

    def _given(self, part: str, spec: TensorSpec) -> TensorSpec:
        """A tensor as this view has it."""
        if part != MODEL or self._dtype is None or not TORCH_DTYPES[spec.dtype].is_floating_point:
            return spec
        return TensorSpec(self._dtype, spec.shape)

    def _casts(self, wanted: Collection[Key]) -> dict[Key, _Cast]:
        """Of the tensors that are cast, from what."""
        names = [name for part, name in wanted if part == MODEL]
        if not names or self._dtype is None:
            return {}
        masters = masters_of(self._source, names)
        precise = self._source.specs(MASTER, list(set(masters.values())))
        found = {}
        for name, spec in self._source.specs(MODEL, names).items():
            given = self._given(MODEL, spec)
            if given == spec:
                continue
            master = masters.get(name)
            if master is not None and precise[master].shape == spec.shape:
                found[MODEL, name] = _Cast((MASTER, master), precise[master].dtype, given.dtype)
            else:
                found[MODEL, name] = _Cast((MODEL, name), spec.dtype, given.dtype)
        return found


@dataclass(frozen=True, slots=True)
class _Cast:
    """From which stored tensor, its dtype there, and here."""

    stored: Key
    there: str
    here: str


class _Casting:
    """A storage in which some files are tensors of another, cast."""

    def __init__(self, inner: Reader, casts: Mapping[str, tuple[Location, _Cast]]) -> None:
        self._inner, self._casts, self.root = inner, casts, inner.root

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        view = memoryview(into).cast("B")
        if name not in self._casts:
            self._inner.read_at(name, start, into)
            return
        at, cast = self._casts[name]
        item, theirs = itemsize(cast.here), itemsize(cast.there)
        first, stop = start // item, -(-(start + len(view)) // item)
        held = bytearray((stop - first) * theirs)
        if not held:
            return
        self._inner.read_at(at.file, at.start + first * theirs, memoryview(held))
        found = (
            torch.frombuffer(held, dtype=torch.uint8)
            .view(TORCH_DTYPES[cast.there])
            .to(TORCH_DTYPES[cast.here])
        )
        low = start - first * item
        torch.frombuffer(view, dtype=torch.uint8).copy_(
            found.view(torch.uint8)[low : low + len(view)]
        )

    def read(self, name: str) -> bytes:
        return self._inner.read(name)

    def size(self, name: str) -> int | None:
        return self._inner.size(name)

    def names(self) -> list[str]:
        return self._inner.names()

    def close(self) -> None:
        self._inner.close()

"""Whether a source's two copies of the weights agree: master weights, cast down, are the model bit for bit.

A merge of fragments in the wrong order gives tensors of the right shapes and the wrong values: this is what shows it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from unified_ckpt.core.dtypes import itemsize
from unified_ckpt.core.tables import Key, listed
from unified_ckpt.engine.source import Source
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.state import MASTER, MODEL
from unified_ckpt.runtime.tensors import TORCH_DTYPES

UNLIKE = "master weights, cast to the model's dtype, are not the model; nothing is written"
_CHUNK_NBYTES = 4 << 20


@dataclass(slots=True)
class Compared:
    """Of one tensor: elements compared, those that differ, and the largest difference of two numbers."""

    elements: int = 0
    differ: int = 0
    max_abs: float = 0.0


def masters_of(source: Source, names: Collection[str]) -> dict[str, str]:
    """For those of these model's tensors that have a master: its stored name. Of tied tensors the two parts may store different names."""
    masters, tied = set(source.names(MASTER)), source.aliases(MASTER)
    called: dict[str, list[str]] = {}
    for alias, stored in source.aliases(MODEL).items():
        called.setdefault(stored, []).append(alias)
    found = {}
    for name in names:
        stored_as = [one if one in masters else tied.get(one) for one in [name, *called.get(name, ())]]
        master = next((one for one in stored_as if one in masters), None)
        if master is not None:
            found[name] = master
    return found


class Witness:
    """Compares master weights with the model, range by range, as they pass by. `pairs`: how many tensors have two copies."""

    def __init__(self, source: Source) -> None:
        self._names = {master: name for name, master in masters_of(source, source.names(MODEL)).items()}
        self._master, model = source.specs(MASTER, list(self._names)), source.specs(MODEL, list(self._names.values()))
        self._model = {master: model[name] for master, name in self._names.items()}
        self._catalog = source.catalog({(MODEL, name) for name in self._names.values()})
        self.found: dict[str, Compared] = {}

    @property
    def pairs(self) -> int:
        return len(self._master)

    def itemsize(self, name: str) -> int:
        return itemsize(self._master[name].dtype)

    def expected(self) -> dict[str, int]:
        """Elements to be compared of each tensor, by all ranks together."""
        return {name: spec.nbytes // itemsize(spec.dtype) for name, spec in self._master.items()}

    def unlike(self) -> list[str]:
        """Tensors whose copies cannot be compared: their shapes differ."""
        return [
            f"{name}: shape {spec.shape} in {MASTER}, {self._model[name].shape} in {MODEL}"
            for name, spec in self._master.items()
            if spec.shape != self._model[name].shape
        ]

    def problems(self) -> list[str]:
        """What differs of what was looked at, in sentences."""
        expected = self.expected()
        return self.unlike() + [
            f"{name}: {one.differ} of {expected[name]} elements differ, by {one.max_abs:.6g} at most"
            for name, one in sorted(self.found.items())
            if one.differ
        ]

    def look(self, key: Key, start: int, held: memoryview) -> None:
        """Bytes of a tensor from byte `start`: whole elements."""
        part, name = key
        if part != MASTER or name not in self._master:
            return
        dtype, theirs = TORCH_DTYPES[self._master[name].dtype], self._model[name]
        ours = torch.frombuffer(held, dtype=torch.uint8).view(dtype)
        at = self._catalog.locations[MODEL, self._names[name]]
        first = start // dtype.itemsize * itemsize(theirs.dtype)
        other = bytearray(ours.numel() * itemsize(theirs.dtype))
        self._catalog.storage.read_at(at.file, at.start + first, memoryview(other))
        model = torch.frombuffer(other, dtype=torch.uint8).view(TORCH_DTYPES[theirs.dtype])
        one = self.found.setdefault(name, Compared())
        one.elements += ours.numel()
        cast = ours.to(model.dtype)
        if torch.equal(cast.view(torch.uint8), model.view(torch.uint8)):
            return
        differ = (cast != model) & ~(cast.isnan() & model.isnan())
        one.differ += int(differ.sum())
        apart = (ours.double() - model.double()).abs()[differ]
        one.max_abs = max(one.max_abs, float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0)


def compare_copies(source: Source, where: str) -> int:
    """How many tensors have two copies, which are the same. IntegrityError naming those that differ. Reads all of both, some at a time."""
    witness = Witness(source)
    if not witness.unlike():
        catalog = source.catalog({(MASTER, name) for name in witness.expected()})
        for name, count in witness.expected().items():
            at, item = catalog.locations[MASTER, name], witness.itemsize(name)
            for low in range(0, count * item, _CHUNK_NBYTES):
                held = memoryview(bytearray(min(_CHUNK_NBYTES, count * item - low)))
                catalog.storage.read_at(at.file, at.start + low, held)
                witness.look((MASTER, name), low, held)
    if witness.problems():
        raise IntegrityError(listed(f"{where}: {UNLIKE}", witness.problems()))
    return witness.pairs

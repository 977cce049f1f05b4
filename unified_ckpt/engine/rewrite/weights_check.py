"""Whether a source's two copies of the weights agree: master weights, cast down, are the model bit for bit.

A merge of fragments in the wrong order gives tensors of the right shapes and the wrong values: this is what shows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import IntegrityError
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

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
        stored_as = [
            one if one in masters else tied.get(one) for one in [name, *called.get(name, ())]
        ]
        master = next((one for one in stored_as if one in masters), None)
        if master is not None:
            found[name] = master
    return found


class Witness:
    """Compares master weights with the model, range by range, as they pass by."""

    def __init__(self, source: Source) -> None:
        self._names = {
            master: name for name, master in masters_of(source, source.names(MODEL)).items()
        }
        self._master, model = (
            source.specs(MASTER, list(self._names)),
            source.specs(MODEL, list(self._names.values())),
        )
        self._model = {master: model[name] for master, name in self._names.items()}
        self._catalog = source.catalog({(MODEL, name) for name in self._names.values()})
        self._found: dict[str, Compared] = {}

    def itemsize(self, name: str) -> int:
        return itemsize(self._master[name].dtype)

    def expected(self) -> dict[str, int]:
        """Elements to be compared of each tensor whose copies have one shape, by all ranks together."""
        alike = {
            name: spec
            for name, spec in self._master.items()
            if spec.shape == self._model[name].shape
        }
        return {name: spec.nbytes // itemsize(spec.dtype) for name, spec in alike.items()}

    def tell(self) -> bytes:
        """What was found, for `hear`."""
        return json.dumps({name: astuple(one) for name, one in self._found.items()}).encode()

    def hear(self, told: Iterable[bytes]) -> None:
        """Takes what all ranks found, this one too, for what was found here."""
        self._found = {}
        for name, (elements, differ, max_abs) in (
            item for one in told for item in json.loads(one).items()
        ):
            mine = self._found.setdefault(name, Compared())
            mine.elements += elements
            mine.differ += differ
            mine.max_abs = max(mine.max_abs, max_abs)

    def check(self, where: str) -> int:
        """How many tensors have two copies. IntegrityError naming those that differ, or were not looked at in full."""
        wrong = [
            f"{name}: shape {spec.shape} in {MASTER}, {self._model[name].shape} in {MODEL}"
            for name, spec in self._master.items()
            if spec.shape != self._model[name].shape
        ]
        for name, count in self.expected().items():
            found = self._found.get(name, Compared())
            if found.differ:
                wrong.append(
                    f"{name}: {found.differ} of {count} elements differ, by {found.max_abs:.6g} at most"
                )
            if found.elements != count:
                wrong.append(
                    f"{name}: {found.elements} elements were compared; needed {count}; this is a bug"
                )
        if wrong:
            raise IntegrityError(listed(f"{where}: {UNLIKE}", wrong))
        return len(self._master)

    def look(self, key: Key, start: int, held: memoryview) -> None:
        """Bytes of a tensor from byte `start`: whole elements."""
        part, name = key
        if (
            part != MASTER
            or name not in self._master
            or self._master[name].shape != self._model[name].shape
        ):
            return
        dtype, theirs = TORCH_DTYPES[self._master[name].dtype], self._model[name]
        ours = torch.frombuffer(held, dtype=torch.uint8).view(dtype)
        at = self._catalog.locations[MODEL, self._names[name]]
        first = start // dtype.itemsize * itemsize(theirs.dtype)
        other = bytearray(ours.numel() * itemsize(theirs.dtype))
        self._catalog.storage.read_at(at.file, at.start + first, memoryview(other))
        model = torch.frombuffer(other, dtype=torch.uint8).view(TORCH_DTYPES[theirs.dtype])
        one = self._found.setdefault(name, Compared())
        one.elements += ours.numel()
        cast = ours.to(model.dtype)
        if torch.equal(cast.view(torch.uint8), model.view(torch.uint8)):
            return
        differ = (cast != model) & ~(cast.isnan() & model.isnan())
        one.differ += int(differ.sum())
        apart = (ours.double() - model.double()).abs()[differ]
        one.max_abs = max(
            one.max_abs, float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0
        )


def compare_copies(source: Source, where: str) -> int:
    """How many tensors have two copies, which are the same. IntegrityError naming those that differ. Reads all of both, some at a time."""
    witness = Witness(source)
    catalog = source.catalog({(MASTER, name) for name in witness.expected()})
    for name, count in witness.expected().items():
        at, item = catalog.locations[MASTER, name], witness.itemsize(name)
        for low in range(0, count * item, _CHUNK_NBYTES):
            held = memoryview(bytearray(min(_CHUNK_NBYTES, count * item - low)))
            catalog.storage.read_at(at.file, at.start + low, held)
            witness.look((MASTER, name), low, held)
    return witness.check(where)

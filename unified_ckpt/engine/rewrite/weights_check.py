"""Checks that master weights, cast to the model's dtype, equal the model bit for bit.

Slices merged in the wrong order give tensors of the right shapes with wrong values; this check
detects them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import Source, read_chunks
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

MISMATCH = "master weights, cast to the model's dtype, differ from the model; nothing was written"
_CHUNK_NBYTES = 4 << 20


@dataclass(slots=True)
class Comparison:
    """Result for one tensor: elements compared and differing, and the largest difference."""

    elements: int = 0
    differ: int = 0
    max_abs: float = 0.0


def master_names(source: Source, names: Collection[str]) -> dict[str, str]:
    """Return the stored name of the master of each of these model tensors that has one.

    The two parts may store a tied tensor under different names.
    """
    stored_masters, tied = set(source.names(MASTER)), source.aliases(MASTER)
    aliases_of = group_by_value(source.aliases(MODEL).items())
    master_of = {}
    for name in names:
        candidates = [
            candidate if candidate in stored_masters else tied.get(candidate)
            for candidate in [name, *aliases_of.get(name, ())]
        ]
        master = next((candidate for candidate in candidates if candidate in stored_masters), None)
        if master is not None:
            master_of[name] = master
    return master_of


class MasterCheck:
    """Compares master weights with the model, range by range, as they pass through a rewrite.

    `compared`: tensors that `update` ignores from now on. Without `enabled`, it compares nothing.
    """

    def __init__(self, source: Source, *, enabled: bool = True) -> None:
        self.compared: Collection[Key] = ()
        names = source.names(MODEL) if enabled else ()
        self._model_names = {master: name for name, master in master_names(source, names).items()}
        self._master_specs = source.specs(MASTER, list(self._model_names))
        model_specs = source.specs(MODEL, list(self._model_names.values()))
        self._model_specs = {
            master: model_specs[name] for master, name in self._model_names.items()
        }
        self._source = source
        self._comparisons: dict[str, Comparison] = {}

    def itemsize(self, name: str) -> int:
        """Return the bytes of one element of a master."""
        return itemsize(self._master_specs[name].dtype)

    def element_counts(self) -> dict[str, int]:
        """Return the elements to compare, over all ranks, of each tensor whose shapes are equal."""
        same_shape = {
            name: spec
            for name, spec in self._master_specs.items()
            if spec.shape == self._model_specs[name].shape
        }
        return {name: spec.nbytes // itemsize(spec.dtype) for name, spec in same_shape.items()}

    def summary(self) -> dict[str, tuple[Any, ...]]:
        """Return this rank's comparisons for `merge`. They can be sent as JSON."""
        return {name: astuple(comparison) for name, comparison in self._comparisons.items()}

    def merge(self, summaries: Iterable[Mapping[str, Sequence[Any]]]) -> None:
        """Replace this rank's comparisons with the sum over all ranks, this one included."""
        self._comparisons = {}
        for name, (elements, differ, max_abs) in (
            entry for summary in summaries for entry in summary.items()
        ):
            comparison = self._comparisons.setdefault(name, Comparison())
            comparison.elements += elements
            comparison.differ += differ
            comparison.max_abs = max(comparison.max_abs, max_abs)

    def check(self, path: str) -> int:
        """Return the number of tensors compared.

        IntegrityError naming tensors that differ or were not compared in full.
        """
        problems = [
            f"{name}: shape {spec.shape} in {MASTER}, {self._model_specs[name].shape} in {MODEL}"
            for name, spec in self._master_specs.items()
            if spec.shape != self._model_specs[name].shape
        ]
        for name, count in self.element_counts().items():
            comparison = self._comparisons.get(name, Comparison())
            if comparison.differ:
                problems.append(
                    f"{name}: {comparison.differ} of {count} elements differ, by up to "
                    f"{comparison.max_abs:.6g}"
                )
            if comparison.elements != count:
                problems.append(
                    f"{name}: compared {comparison.elements} elements, expected {count}; this is a "
                    "bug"
                )
        raise_if_any(IntegrityError, f"{path}: {MISMATCH}", problems)
        return len(self._master_specs)

    def update(self, key: Key, start: int, data: memoryview) -> None:
        """Compare bytes of a tensor, whole elements from byte `start`, with the model's."""
        part, name = key
        if (
            part != MASTER
            or key in self.compared
            or name not in self._master_specs
            or self._master_specs[name].shape != self._model_specs[name].shape
        ):
            return
        dtype, model_spec = torch_dtype(self._master_specs[name].dtype), self._model_specs[name]
        master = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
        model_offset = start // dtype.itemsize * itemsize(model_spec.dtype)
        model_bytes = bytearray(master.numel() * itemsize(model_spec.dtype))
        model_key = MODEL, self._model_names[name]
        self._source.read_into(model_key, model_offset, memoryview(model_bytes))
        model = torch.frombuffer(model_bytes, dtype=torch.uint8).view(torch_dtype(model_spec.dtype))
        comparison = self._comparisons.setdefault(name, Comparison())
        comparison.elements += master.numel()
        rounded = master.to(model.dtype)
        if torch.equal(rounded.view(torch.uint8), model.view(torch.uint8)):
            return
        differ = (rounded != model) & ~(rounded.isnan() & model.isnan())
        comparison.differ += int(differ.sum())
        differences = (master.double() - model.double()).abs()[differ]
        comparison.max_abs = max(
            comparison.max_abs,
            float(differences.nan_to_num(nan=torch.inf).max()) if differences.numel() else 0.0,
        )


def compare_masters(source: Source, path: str) -> int:
    """Compare all masters with the model and return their number. Reads both in bounded memory.

    IntegrityError naming tensors that differ.
    """
    master_check = MasterCheck(source)
    for name, count in master_check.element_counts().items():
        key, offset, nbytes = (MASTER, name), 0, count * master_check.itemsize(name)
        for chunk in read_chunks(source, key, nbytes, chunk_nbytes=_CHUNK_NBYTES):
            master_check.update(key, offset, chunk)
            offset += len(chunk)
    return master_check.check(path)

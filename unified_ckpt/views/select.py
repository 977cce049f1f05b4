"""Selects parts of a source, and casts the model if asked to, as a Source. Reads nothing early."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.rewrite.weights_check import master_names
from unified_ckpt.engine.source.protocol import Catalog, Location, Source, SourceMetadata, read_box
from unified_ckpt.errors import NotFoundError
from unified_ckpt.runtime.storage.storage import Buffer, Reader
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES


class SelectedSource:
    """A source with only `parts` (None for all), whose model is in `model_dtype`.

    `model_dtype` is a safetensors name. It applies to the model's floating-point tensors, which are
    cast from the master weights where those exist. NotFoundError for a part that the source lacks.
    """

    def __init__(
        self, source: Source, *, parts: Collection[str] | None, model_dtype: str | None
    ) -> None:
        missing = sorted(set(parts or ()) - set(source.parts))
        if missing:
            raise NotFoundError(
                format_list(f"the source has parts {', '.join(source.parts)}; it lacks", missing)
            )
        self._source, self._model_dtype = source, model_dtype
        self._parts = [part for part in source.parts if parts is None or part in parts]

    @property
    def format(self) -> str:
        """Name of the original source's format."""
        return self._source.format

    @property
    def parts(self) -> Sequence[str]:
        """Names of the selected parts."""
        return self._parts

    def names(self, part: str) -> Collection[str]:
        """Return the tensor names of a part."""
        return self._source.names(part) if part in self._parts else ()

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return the names of tied tensors in a part, each with the stored name."""
        return self._source.aliases(part) if part in self._parts else {}

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of these tensors, after the cast."""
        return {
            name: self._output_spec(part, spec)
            for name, spec in self._source.specs(part, names).items()
        }

    def read(self, part: str, name: str, box: Box) -> bytes:
        """Return the row-major bytes of a box, after the cast."""
        catalog = self.catalog([(part, name)])
        return read_box(
            catalog.storage, catalog.locations[part, name], self.specs(part, [name])[name], box
        )

    def catalog(self, keys: Collection[Key]) -> Catalog:
        """Return storage and locations. Tensors that are cast get virtual files."""
        casts = self._casts(keys)
        inner = self._source.catalog({casts[key].stored if key in casts else key for key in keys})
        casting = {
            ":".join(key): (inner.locations[cast.stored], cast) for key, cast in casts.items()
        }
        locations = {
            key: Location(":".join(key), 0) if key in casts else inner.locations[key]
            for key in keys
        }
        return Catalog(
            _Casting(inner.storage, casting), locations, inner.verification_log, inner.locality
        )

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the stored digests of tensors that are not cast."""
        casts = self._casts(keys)
        return {
            **self._source.block_digests([key for key in keys if key not in casts]),
            **dict.fromkeys(casts),
        }

    def metadata(self) -> SourceMetadata:
        """Return everything beside tensors."""
        return self._source.metadata()

    def rank_extra(self, rank: int) -> Any:
        """Return the state that this rank saved for itself."""
        return self._source.rank_extra(rank)

    def close(self) -> None:
        """Close the original source."""
        self._source.close()

    def _output_spec(self, part: str, spec: TensorSpec) -> TensorSpec:
        """The tensor's spec after the cast."""
        if (
            part != MODEL
            or self._model_dtype is None
            or not TORCH_DTYPES[spec.dtype].is_floating_point
        ):
            return spec
        return TensorSpec(self._model_dtype, spec.shape)

    def _casts(self, keys: Collection[Key]) -> dict[Key, _Cast]:
        """The casts of those tensors that need one."""
        names = [name for part, name in keys if part == MODEL]
        if not names or self._model_dtype is None:
            return {}
        masters = master_names(self._source, names)
        master_specs = self._source.specs(MASTER, list(set(masters.values())))
        casts = {}
        for name, spec in self._source.specs(MODEL, names).items():
            output_spec = self._output_spec(MODEL, spec)
            if output_spec == spec:
                continue
            master = masters.get(name)
            if master is not None and master_specs[master].shape == spec.shape:
                casts[MODEL, name] = _Cast(
                    (MASTER, master), master_specs[master].dtype, output_spec.dtype
                )
            else:
                casts[MODEL, name] = _Cast((MODEL, name), spec.dtype, output_spec.dtype)
        return casts


@dataclass(frozen=True, slots=True)
class _Cast:
    """A cast of a stored tensor: its key, its stored dtype, and the new dtype."""

    stored: Key
    stored_dtype: str
    dtype: str


class _Casting:
    """A storage in which some virtual files are casts of stored tensors."""

    def __init__(self, inner: Reader, casts: Mapping[str, tuple[Location, _Cast]]) -> None:
        self._inner, self._casts, self.root = inner, casts, inner.root

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Read any byte range of a file."""
        view = memoryview(into).cast("B")
        if name not in self._casts:
            self._inner.read_at(name, start, into)
            return
        location, cast = self._casts[name]
        element_nbytes, stored_nbytes = itemsize(cast.dtype), itemsize(cast.stored_dtype)
        first, stop = start // element_nbytes, -(-(start + len(view)) // element_nbytes)
        stored_bytes = bytearray((stop - first) * stored_nbytes)
        if not stored_bytes:
            return
        self._inner.read_at(
            location.file, location.start + first * stored_nbytes, memoryview(stored_bytes)
        )
        cast_tensor = (
            torch.frombuffer(stored_bytes, dtype=torch.uint8)
            .view(TORCH_DTYPES[cast.stored_dtype])
            .to(TORCH_DTYPES[cast.dtype])
        )
        skip_nbytes = start - first * element_nbytes
        torch.frombuffer(view, dtype=torch.uint8).copy_(
            cast_tensor.view(torch.uint8)[skip_nbytes : skip_nbytes + len(view)]
        )

    def read(self, name: str) -> bytes:
        """Return a whole file of the original storage."""
        return self._inner.read(name)

    def size(self, name: str) -> int | None:
        """Return the size of a file of the original storage."""
        return self._inner.size(name)

    def names(self) -> list[str]:
        """Return the files of the original storage."""
        return self._inner.names()

    def close(self) -> None:
        """Close the original storage."""
        self._inner.close()

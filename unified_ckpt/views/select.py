"""Selects parts of a source, and casts the model if asked to, as a Source. Reads nothing early."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.weights_check import master_names
from unified_ckpt.engine.source.protocol import (
    Locations,
    Source,
    WrappedSource,
)
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES
from unified_ckpt.runtime.torch_state.tensors import torch_dtype


class SelectedSource(WrappedSource):
    """A source with only `parts` (None for all), whose model is in `model_dtype`.

    `model_dtype` is a safetensors name. It applies to the model's floating-point tensors, which are
    cast from the master weights where those exist. NotFoundError for a part that the source lacks,
    FormatError for a cast of 8-bit floats.
    """

    def __init__(
        self, source: Source, *, parts: Collection[str] | None, model_dtype: str | None
    ) -> None:
        raise_if_any(
            NotFoundError,
            f"the source has parts {', '.join(source.parts)}; it lacks",
            sorted(set(parts or ()) - set(source.parts)),
        )
        super().__init__(source)
        self._model_dtype = model_dtype
        self._parts = [part for part in source.parts if parts is None or part in parts]
        raise_if_any(
            FormatError,
            "dtype: got quantized tensors, whose scales a cast would ignore; "
            "convert without a dtype, or dequantize the model first",
            sorted(
                f"{key[1]} {cast.stored_dtype}"
                for key, cast in self._casts.items()
                if torch_dtype(cast.stored_dtype) not in CASTABLE_DTYPES
            ),
        )

    @property
    def parts(self) -> Sequence[str]:
        """The selected parts."""
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

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's bytes from byte `start`, after the cast."""
        cast = self._casts.get(key)
        if cast is None:
            self._source.read_into(key, start, buffer)
            return
        element_nbytes, stored_nbytes = itemsize(cast.dtype), itemsize(cast.stored_dtype)
        first, stop = start // element_nbytes, -(-(start + len(buffer)) // element_nbytes)
        stored_bytes = bytearray((stop - first) * stored_nbytes)
        if not stored_bytes:
            return
        self._source.read_into(cast.stored, first * stored_nbytes, memoryview(stored_bytes))
        cast_tensor = (
            torch.frombuffer(stored_bytes, dtype=torch.uint8)
            .view(torch_dtype(cast.stored_dtype))
            .to(torch_dtype(cast.dtype))
        )
        skip_nbytes = start - first * element_nbytes
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(
            cast_tensor.view(torch.uint8)[skip_nbytes : skip_nbytes + len(buffer)]
        )

    def locations(self, keys: Collection[Key]) -> Locations | None:
        """Return where tensors that are not cast lie plainly in files."""
        return self._source.locations(self._unchanged(keys))

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the stored digests of tensors that are not cast."""
        return {**dict.fromkeys(keys), **self._source.block_digests(self._unchanged(keys))}

    def keys_with_digests(self, keys: Collection[Key]) -> set[Key]:
        """Return tensors whose stored bytes, before the cast, have digests."""
        casts = self._casts
        origins = {key: casts[key].stored if key in casts else key for key in keys}
        with_digests = self._source.keys_with_digests(set(origins.values()))
        return {key for key, origin in origins.items() if origin in with_digests}

    def _unchanged(self, keys: Collection[Key]) -> list[Key]:
        return [key for key in keys if key not in self._casts]

    def _output_spec(self, part: str, spec: TensorSpec) -> TensorSpec:
        """The tensor's spec after the cast."""
        if (
            part != MODEL
            or self._model_dtype is None
            or not torch_dtype(spec.dtype).is_floating_point
        ):
            return spec
        return TensorSpec(self._model_dtype, spec.shape)

    @cached_property
    def _casts(self) -> dict[Key, _Cast]:
        """The casts of those tensors that need one."""
        names = self.names(MODEL)
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

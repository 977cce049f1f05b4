"""A Source whose tensors are encoded while they are read, as a compressed checkpoint stores them.

Wrong bytes could come from elements that an encoding cannot hold. `find_outliers` looks at every
element before the first is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, WrappedSource
from unified_ckpt.engine.source.whole_blocks import WholeBlocks
from unified_ckpt.format.encoded_tensors import (
    Bits,
    Bytes,
    Encoding,
    MasterEncoding,
    RowRun,
    aligned_runs,
    encoding_records,
    stored_elements,
)
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.format.names import MODEL
from unified_ckpt.format.outliers import Elements, encode_outliers
from unified_ckpt.runtime.storage.protocol import Buffer

# called with a key, a byte offset in the tensor, and the bytes there
OnBytes = Callable[[Key, int, memoryview], object]


def find_outliers(
    source: Source, key: Key, encoding: Encoding, on_bytes: OnBytes
) -> Iterator[Elements]:
    """Yield the elements of a tensor that the encoding cannot hold, a few MiB at a time.

    `on_bytes(key, start, data)` sees all bytes of the tensor.
    """
    shape, blocks = source.specs(key[0], [key[1]])[key[1]].shape, WholeBlocks(source)
    for run in aligned_runs(0, prod(shape), shape):
        rows = _read_rows(blocks, key, run)
        on_bytes(key, 4 * run.start, rows.reshape(-1).view(np.uint8).data)
        if isinstance(encoding, MasterEncoding):
            low, high = 2 * run.start, 2 * (run.start + rows.size)
            model = blocks.read((MODEL, key[1]), low, high).view(np.uint16)
            indices = encoding.outliers(rows, model.reshape(rows.shape))
        else:
            indices = encoding.outliers(rows)
        yield (indices + run.start).astype(np.int64), rows.reshape(-1)[indices]


def _read_rows(blocks: WholeBlocks, key: Key, run: RowRun) -> Bits:
    body = blocks.read(key, 4 * run.start, 4 * (run.start + run.count * run.width))
    return body.view(np.uint32).reshape(run.count, run.width)


class EncodedSource(WrappedSource):
    """The stored tensors of a compressed checkpoint with the tensors of `source`.

    `encodings`: of those that are encoded. `outliers`: what they cannot hold, by part and name;
    only the rank that writes the outliers files needs it.
    """

    def __init__(
        self,
        source: Source,
        encodings: Mapping[Key, Encoding],
        outliers: Mapping[str, Mapping[str, Elements]],
    ) -> None:
        super().__init__(source)
        self._encodings, self._outliers = encodings, outliers
        self._blocks = WholeBlocks(source)
        self._specs = source.all_specs()
        self._origins: dict[Key, tuple[Key, int]] = {}  # of stored tensors that are encoded
        self._stored: dict[str, dict[str, TensorSpec]] = {part: {} for part in source.parts}
        for key, spec in self._specs.items():
            part, name = key
            stored = {name: spec}
            if key in encodings:
                stored = encodings[key].stored_specs(name, spec.shape)
                self._origins |= {(part, n): (key, i) for i, n in enumerate(stored)}
            self._stored[part] |= stored
        self._recent: tuple[Key, dict[tuple[int, int], Bytes]] = ("", ""), {}

    def names(self, part: str) -> Collection[str]:
        """Return the stored tensors of a part; scales follow their codes."""
        return self._stored.get(part, {}).keys()

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some stored tensors."""
        return {name: self._stored[part][name] for name in names}

    def encodings(self) -> Mapping[str, Mapping[str, EncodingRecord]]:
        """Return how tensors are encoded, by part and state."""
        return encoding_records(self._encodings, self._specs)

    def outliers(self, part: str) -> bytes | None:
        """Return a part's outliers file, if it has one."""
        found = self._outliers.get(part)
        return encode_outliers(found) if found else None

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the digests of tensors that are not encoded."""
        plain = self._source.block_digests([key for key in keys if key not in self._origins])
        return {key: plain.get(key) for key in keys}

    def keys_with_digests(self, keys: Collection[Key]) -> set[Key]:
        """Return the stored tensors whose origin has digests."""
        origins = {key: self._origins.get(key, (key, 0))[0] for key in keys}
        with_digests = self._source.keys_with_digests(set(origins.values()))
        return {key for key, origin in origins.items() if origin in with_digests}

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a stored tensor's bytes from byte `start`, encoded now."""
        if key not in self._origins:
            self._source.read_into(key, start, buffer)
            return
        origin, index = self._origins[key]
        encoding, shape = self._encodings[origin], self._specs[origin].shape
        target = np.frombuffer(buffer, np.uint8)
        stop = start + len(target)
        for run in aligned_runs(*stored_elements(encoding, index, shape[-1], start, stop), shape):
            encoded = self._encode(origin, encoding, run, index)
            first = run.stored_ranges(encoding)[index][0]
            low, high = max(start, first), min(stop, first + len(encoded))
            target[low - start : high - start] = encoded[low - first : high - first]

    def _encode(self, key: Key, encoding: Encoding, run: RowRun, index: int) -> Bytes:
        """Return the bytes of a run in one stored tensor.

        Keeps the others, which are small and read next, and the last codes.
        """
        recent_key, kept = self._recent
        if recent_key != key:
            self._recent = key, (kept := {})
        encoded = kept.get((run.start, index))
        if encoded is None:
            rows = _read_rows(self._blocks, key, run)
            for old in [old for old in kept if old[1] == 0]:
                kept.pop(old, None)
            stored = [body.reshape(-1) for body in encoding.encode(rows)]
            kept.update({(run.start, i): body for i, body in enumerate(stored)})
            encoded = stored[index]
        return encoded

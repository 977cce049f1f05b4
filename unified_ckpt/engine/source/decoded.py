"""A Source of encoded tensors, decoded: each is float32 again, of its own shape.

Wrong values could come from damaged bytes or from encoded tensors that do not fit together. The
Source below verifies what it reads, and is asked for whole digest blocks only. Specs, scales and
outliers are checked before a value is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.engine.source.protocol import KeyRange, Locations, Source, WrappedSource
from unified_ckpt.engine.source.whole_blocks import KeptBlocks, WholeBlocks
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.format.encoded_tensors import (
    Bits,
    Bytes,
    Encoding,
    MomentEncoding,
    RowRun,
    decoded_specs,
    encoding_named,
    is_scale,
    row_runs,
    scale_name,
)
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.format.names import MODEL, outliers_name
from unified_ckpt.format.outliers import Elements, parse_outliers
from unified_ckpt.runtime.storage.protocol import Buffer, ReadRange

_SCALES_NBYTES = 4 << 20  # of one check
# Decoded, of which each stored tensor is read ahead in turn: 6 MiB, as whole blocks 8 MiB at most,
# in one request, since reads alternate between the stored tensors.
_AHEAD_NBYTES = 12 << 20

Encoded = tuple[Encoding, TensorSpec]  # an encoding, and the spec of the decoded tensor


def decode_source(source: Source, *, label: str) -> Source:
    """Return a source with all tensors decoded. `label`: names the checkpoint in errors."""
    return DecodedSource(source, label) if source.encodings() else source


def stored_source(source: Source) -> Source:
    """Return the source of the stored bytes: what a `DecodedSource` decodes, or the source."""
    return source.stored if isinstance(source, DecodedSource) else source


class DecodedSource(WrappedSource):
    """The tensors of `stored`, decoded. FormatError for an encoding that is unknown."""

    _keeps_names = True

    def __init__(self, stored: Source, label: str) -> None:
        super().__init__(stored)
        self.stored, self._label = stored, label
        self._records = stored.encodings()
        self._names: dict[str, Collection[str]] = {}
        self._encoded: dict[Key, Encoded | None] = {}  # of tensors asked for so far
        self._outliers: dict[str, Mapping[str, Elements]] = {}
        self._blocks = WholeBlocks(stored)

    def names(self, part: str) -> Collection[str]:
        """Return the tensors of a part, without scales."""
        if part not in self._names:
            names, states = self._source.names(part), self._part_records(part)
            self._names[part] = dict.fromkeys(
                name for name in names if not states or not is_scale(part, name, states)
            )
        return self._names[part]

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return decoded specs. FormatError or IncompleteError for what cannot be decoded."""
        records = self._part_records(part)
        if not records:
            return self._source.specs(part, names)
        stored_names = self._source.names(part)
        scales = [scale for name in names if (scale := scale_name(name)) in stored_names]
        stored = self._source.specs(part, dict.fromkeys([*names, *scales]))
        decoded = decoded_specs(part, records, stored, file=self._label)
        needing = [name for name, (encoding, _) in decoded.items() if encoding.needs_model]
        self._check_models(part, {name: decoded[name][1].shape for name in needing})
        self._encoded.update({(part, name): decoded.get(name) for name in names})
        return {name: decoded[name][1] if name in decoded else stored[name] for name in names}

    def encoded(self, key: Key) -> Encoded | None:
        """Return the encoding and the decoded spec of a tensor, None if it is stored plain."""
        if key not in self._encoded:
            self.specs(key[0], [key[1]])
        return self._encoded.get(key)

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Decode bytes of a tensor from byte `start`, a few MiB at a time."""
        encoded = self.encoded(key) if self._part_records(key[0]) else None
        if encoded is None:
            self._source.read_into(key, start, buffer)
            return
        encoding, spec = encoded
        target, length = np.frombuffer(buffer, np.uint8), spec.shape[-1]
        stop = start + len(target)
        for run in row_runs(start // 4, -(-stop // 4), length):
            decoded = self._decode(key, encoding, run).view(np.uint8)
            first = run.start * 4
            low, high = max(start, first), min(stop, first + len(decoded))
            target[low - start : high - start] = decoded[low - first : high - first]

    def _decode(self, key: Key, encoding: Encoding, run: RowRun) -> Bits:
        """Return the flat elements of a run of rows."""
        part, name = key
        stored_names = encoding.stored_specs(name, (run.length,))
        stored = [
            self._blocks.read((part, stored_name), low, high).reshape(run.count, -1)
            for stored_name, (low, high) in zip(
                stored_names, run.stored_ranges(encoding), strict=True
            )
        ]
        if isinstance(encoding, MomentEncoding):
            self._check_scales(key, encoding, stored[1])
            bits = encoding.decode(stored, run.width).reshape(-1)
        else:
            (low, high), *_ = run.stored_ranges(encoding)  # the model has as many bytes
            model = self._blocks.read((MODEL, name), low, high).view(np.uint16)
            bits = encoding.decode(stored, run.width, model.reshape(run.count, -1)).reshape(-1)
        elements = self._part_outliers(part).get(name)
        if elements is not None:
            indices, values = elements
            low, high = np.searchsorted(indices, [run.start, run.start + len(bits)])
            bits[indices[low:high] - run.start] = values[low:high]
        return bits

    def locations(self, keys: Collection[Key]) -> Locations | None:
        """Return where tensors that are stored plain lie in files."""
        return self._source.locations(self._plain(keys))

    def file_ranges(self, reads: Iterable[KeyRange]) -> Iterator[ReadRange]:
        """Yield what decoding these bytes reads: of each stored tensor in turn, in whole blocks."""
        kept = KeptBlocks()
        for key, start, stop in reads:
            encoded = self.encoded(key) if self._part_records(key[0]) else None
            if encoded is None:
                yield from self._source.file_ranges([(key, start, stop)])
            else:
                stored = self._stored_ranges((key, start, stop), encoded, kept)
                yield from self._source.file_ranges(stored)

    def _stored_ranges(
        self, read: KeyRange, encoded: Encoded, kept: KeptBlocks
    ) -> Iterator[KeyRange]:
        (key, start, stop), (encoding, spec) = read, encoded
        for low in range(start, stop, _AHEAD_NBYTES):
            high = min(low + _AHEAD_NBYTES, stop)
            runs = list(row_runs(low // 4, -(-high // 4), spec.shape[-1]))
            firsts, lasts = (run.stored_ranges(encoding) for run in (runs[0], runs[-1]))
            spans = [(first, last) for (first, _), (_, last) in zip(firsts, lasts, strict=True)]
            # The model has as many bytes as the only stored tensor beside it.
            for stored_key, span in zip(self._stored_keys(key), spans * 2, strict=False):
                first, last = self._blocks.unkept(stored_key, *span, kept)
                if first < last:
                    yield stored_key, first, last

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the digests of tensors that are stored plain."""
        plain = self._source.block_digests(self._plain(keys))
        return {key: plain.get(key) for key in keys}

    def keys_with_digests(self, keys: Collection[Key]) -> set[Key]:
        """Return the tensors of which all that is stored has digests."""
        stored_by_key = {key: self._stored_keys(key) for key in keys}
        stored = {stored for stored_keys in stored_by_key.values() for stored in stored_keys}
        with_digests = self._source.keys_with_digests(stored)
        return {key for key, stored in stored_by_key.items() if with_digests.issuperset(stored)}

    def _stored_keys(self, key: Key) -> list[Key]:
        """Return the stored tensors that a tensor is decoded from."""
        part, name = key
        encoded = self.encoded(key) if self._part_records(part) else None
        if encoded is None:
            return [key]
        encoding, spec = encoded
        stored_keys = [(part, stored) for stored in encoding.stored_specs(name, spec.shape)]
        return [*stored_keys, (MODEL, name)] if encoding.needs_model else stored_keys

    def check_values(self, parts: Collection[str], *, share: int, shares: int) -> None:
        """Check the outliers of these parts, and the scales of every `shares`-th tensor."""
        for part in sorted(set(parts).intersection(self._records)):
            names = sorted(self.names(part))
            self.specs(part, names)
            self._part_outliers(part)
            for name in names[share::shares]:
                encoding, spec = self.encoded((part, name)) or (None, None)
                if isinstance(encoding, MomentEncoding) and spec is not None:
                    key = part, scale_name(name)
                    nbytes = encoding.stored_specs(name, spec.shape)[key[1]].nbytes
                    for low in range(0, nbytes, _SCALES_NBYTES):
                        scales = self._blocks.read(key, low, min(low + _SCALES_NBYTES, nbytes))
                        self._check_scales((part, name), encoding, scales)

    def _check_scales(self, key: Key, encoding: MomentEncoding, scales: Bytes) -> None:
        if not encoding.has_valid_scales(scales):
            raise FormatError(
                f"{self._label}: {':'.join(key)}: got scales that are NaN, infinite, negative or "
                f"not in order, expected those of the encoding {encoding.name}"
            )

    def _check_models(self, part: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """IncompleteError or FormatError unless each tensor has a model tensor to decode it."""
        if not shapes:
            return
        models = self._source.names(MODEL) if MODEL in self._source.parts else ()
        missing = sorted(name for name in shapes if name not in models)
        if missing:
            raise IncompleteError(
                f"{self._label}: {part}:{missing[0]}: is stored beside {MODEL}:{missing[0]}, "
                f"which is missing ({len(missing)} such tensors); restore the part {MODEL}"
            )
        for name, spec in self._source.specs(MODEL, shapes.keys()).items():
            if spec != spec_of("BF16", shapes[name]):
                raise FormatError(
                    f"{self._label}: {part}:{name}: got {spec.dtype} {list(spec.shape)} in "
                    f"{MODEL}, expected BF16 {list(shapes[name])} to decode it"
                )

    def _plain(self, keys: Collection[Key]) -> list[Key]:
        for part, names in group_by_value((name, part) for part, name in keys).items():
            self.specs(part, names)
        return [key for key in keys if self._encoded.get(key) is None]

    def _part_records(self, part: str) -> Mapping[str, EncodingRecord]:
        records = self._records.get(part, {})
        for record in records.values():
            encoding_named(record.name, file=self._label)
        return records

    def _part_outliers(self, part: str) -> Mapping[str, Elements]:
        if part not in self._outliers:
            body, shapes = self._source.outliers(part), {}
            if body is not None:
                specs = self.specs(part, self.names(part))
                encoded = (name for name in specs if self._encoded[part, name] is not None)
                shapes = {name: specs[name].shape for name in encoded}
            file = f"{self._label}/{outliers_name(part)}"
            others = self._source.is_node_folder
            self._outliers[part] = (
                {} if body is None else parse_outliers(body, shapes, file=file, others=others)
            )
        return self._outliers[part]

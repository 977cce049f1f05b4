"""One checkpoint folder as a Source: unified, or a plain Hugging Face model folder.

Manifest, indexes and headers are read once, on first use.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.intervals import coalesce
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import memory_shape
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.core.text import first_items, format_list
from unified_ckpt.engine.folder.entries_index import check_entries_index, read_entry
from unified_ckpt.engine.folder.repair_hint import files_hint
from unified_ckpt.engine.folder.stored_files import (
    check_size,
    read_file,
    read_header,
    read_range,
)
from unified_ckpt.engine.source.protocol import (
    Location,
    Locations,
    ReadPolicy,
    Source,
    SourceMetadata,
    VerificationLog,
)
from unified_ckpt.engine.source.value_paths import RankValues, decode_rank_values
from unified_ckpt.engine.source.verified_read import VerifiedTensor, has_whole_block
from unified_ckpt.errors import (
    FormatError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
)
from unified_ckpt.format import codec, header
from unified_ckpt.format import names as format_names
from unified_ckpt.format.codec import Path
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import Manifest, OptimizerRecord
from unified_ckpt.format.manifest_fields import DigestFile, EncodingRecord, EntriesFile
from unified_ckpt.runtime.objects.reader import ObjectReader
from unified_ckpt.runtime.storage.protocol import Buffer, Reader
from unified_ckpt.runtime.storage.storage import LocalStorage

_DIGEST_GAP_NBYTES = 64 << 10  # reading a gap this small is cheaper than another request


class Folder(Source):
    """A folder of whole tensors in safetensors files.

    `manifest` is None for a Hugging Face folder, which has weights only. `path`: of the folder, or
    of the only one of its files that is opened. `resources` are released
    by `close`.
    """

    def __init__(
        self,
        storage: Reader,
        manifest: Manifest | None,
        weight_maps: Mapping[str, Mapping[str, str]],
        policy: ReadPolicy | None = None,
        *,
        path: str = "",
    ) -> None:
        self.storage, self.manifest = storage, manifest
        self.path = path or storage.root
        self.format = "unified" if manifest is not None else "huggingface"
        self.is_node_folder = manifest is not None and manifest.node_group is not None
        self._policy, self.verification = policy or ReadPolicy(), VerificationLog()
        self._weight_maps = weight_maps
        self._headers: dict[str, dict[str, Entry]] = {}
        self._tensors_by_file: dict[str, dict[str, list[str]]] = {}
        self._checked_tables: set[str] = set()
        self._block_digests: dict[Key, Sequence[int] | None] = {}  # of tensors read so far
        self.resources = ExitStack()  # released by `close`

    def require_manifest(self) -> Manifest:
        """Return the manifest. FormatError for a Hugging Face folder."""
        if self.manifest is None:
            raise FormatError(
                f"{self.storage.root}: has no manifest, expected a unified checkpoint"
            )
        return self.manifest

    @property
    def parts(self) -> Sequence[str]:
        """The parts in the folder, sorted."""
        return sorted(self._weight_maps)

    def names(self, part: str) -> Collection[str]:
        """Return the stored tensors of a part."""
        return self._weight_maps.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors."""
        if self.manifest is None or part not in self.manifest.parts:
            return {}
        return self.manifest.parts[part].aliases

    def file_of(self, part: str, name: str) -> str:
        """Return the file that holds a tensor."""
        return self._weight_maps[part][name]

    def tensors_by_file(self, part: str) -> Mapping[str, Collection[str]]:
        """Return the tensors of each file of a part, as its index says."""
        if part not in self._tensors_by_file:
            self._tensors_by_file[part] = group_by_value(self._weight_maps.get(part, {}).items())
        return self._tensors_by_file[part]

    def header(self, file: str) -> Mapping[str, Entry]:
        """Return the entries of a file's header. Raises the same errors as `check_files`."""
        self.check_files([file])
        return self._headers[file]

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors. Raises the same errors as `check_files`."""
        self.check_files({self._weight_maps[part][name] for name in names})
        specs = {}
        for name in names:
            entry = self._entry(part, name)
            specs[name] = spec_of(entry.dtype, memory_shape(entry.dtype, entry.shape))
        return specs

    def locations(self, keys: Collection[Key]) -> Locations:
        """Return where some tensors lie. Raises the same errors as `check_files`."""
        self.check_files({self._weight_maps[part][name] for part, name in keys})
        return Locations(
            self.storage,
            {(p, n): Location(self._weight_maps[p][n], self._entry(p, n).start) for p, n in keys},
        )

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` with a tensor's bytes from byte `start`, and verify its blocks."""
        file, entry = self.file_of(*key), self._entry(*key)
        nbytes, verify = entry.stop - entry.start, self._policy.verify
        saved = None
        if verify == "full" or (
            verify == "read" and has_whole_block(start, start + len(buffer), nbytes)
        ):
            if key not in self._block_digests:
                self._block_digests |= self.block_digests([key])
            saved = self._block_digests[key]

        def read_at(offset: int, body: Buffer) -> None:
            self.storage.read_at(file, entry.start + offset, body)

        if saved is None:
            read_at(start, buffer)
            return
        path = f"{self.storage.root}/{file}"
        VerifiedTensor(key, nbytes, saved, path, read_at, self.verification).read_into(
            start, buffer, whole_blocks=verify == "full"
        )

    def check_files(self, files: Collection[str]) -> None:
        """Check that files are complete and that headers match the manifest and the index.

        Raises IncompleteError naming files and tensors, and IntegrityError or FormatError for a
        file that was changed.
        """
        unread = [file for file in sorted(files) if file not in self._headers]
        if len(unread) > 1:
            self.expect_headers(unread)
        sizes = {file: self.storage.size(file) for file in unread}
        missing = [file for file, size in sizes.items() if size is None]
        if missing:
            check_not_replaced(self.storage)
            raise IncompleteError(
                format_list(
                    f"{self.storage.root}: files are missing",
                    [self._describe_missing(file) for file in sorted(missing)],
                )
                + f"\n  {files_hint(self.storage, has_manifest=self.manifest is not None)}"
            )
        for file in unread:
            self._headers[file] = self._read_header(file, sizes[file] or 0)

    def expect_headers(self, files: Collection[str]) -> None:
        """Hint that `check_files` will check these files next, in this order."""
        if isinstance(self.storage, ObjectReader):
            self.storage.expect_heads(files)

    def encodings(self) -> Mapping[str, Mapping[str, EncodingRecord]]:
        """Return how some tensors are encoded, by part and state."""
        parts = self.manifest.parts if self.manifest is not None else {}
        return {
            part: parts[part].encodings
            for part in self.parts
            if part in parts and parts[part].encodings
        }

    def outliers(self, part: str) -> bytes | None:
        """Return the content of a part's outliers file, if it has one."""
        record = self.manifest.parts[part].exceptions if self.manifest is not None else None
        return None if record is None else read_file(self.storage, record.file, record)

    def digest_record(self) -> DigestFile | None:
        """Return the manifest's record of digests, or None. FormatError for an unknown kind.

        Unknown digests must not count as none.
        """
        record = self.manifest.digests if self.manifest is not None else None
        if record is not None:
            record.check_supported(self.storage.root)
        return record

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return the digests of some tensors' blocks, or None for each if the folder has none."""
        record = self.digest_record()
        if record is None:
            return dict.fromkeys(keys)
        if record.file not in self._headers:
            self._headers[record.file] = self._read_entries(record.file, record.nbytes)
        entries: dict[Key, Entry] = {}
        for part, name in keys:
            entry = self._headers[record.file].get(f"{part}:{name}")
            if entry is None:
                raise IntegrityError(
                    f"{self.storage.root}/{record.file}: has no digests of {part}:{name}, "
                    "expected those of every tensor"
                )
            entries[part, name] = entry
        digests_by_key: dict[Key, Sequence[int] | None] = {}
        for start, stop, range_keys in coalesce(
            {key: (entry.start, entry.stop) for key, entry in entries.items()},
            gap=_DIGEST_GAP_NBYTES,
        ):
            body = read_range(self.storage, record.file, start, stop)
            for key in range_keys:
                entry = entries[key]
                digests_by_key[key] = struct.unpack_from(
                    f"<{(entry.stop - entry.start) // 8}Q", body, entry.start - start
                )
        return digests_by_key

    def metadata(self) -> SourceMetadata:
        """Return what the manifest and its extra file hold besides tensors."""
        manifest = self.manifest
        if manifest is None:
            return SourceMetadata()
        blobs = self._extra_blobs()
        record = manifest.optimizer or OptimizerRecord(groups=[])
        group_options = (
            self._decode_dict(group.options, blobs, f"param_groups_{i}")
            for i, group in enumerate(record.groups)
        )
        groups = [
            {**dict(group), "options": options}
            for group, options in zip(record.groups, group_options, strict=True)
        ]
        scalars = self._decode_dict(record.scalars, blobs, "optimizer")
        for name, state in scalars.items():
            if not isinstance(state, dict):
                raise FormatError(
                    f"{self.storage.root}/{format_names.MANIFEST}: optimizer: the state of {name} "
                    f"is a {type(state).__name__}, expected a dict"
                )
        return SourceMetadata(
            save_id=manifest.save_id,
            step=manifest.step,
            extra=codec.decode(manifest.extra, blobs, path="extra"),
            modules=self._decode_dict(manifest.modules, blobs, "modules"),
            stores_modules=manifest.modules is not None or manifest.converted_from is None,
            groups=groups,
            scalars=scalars,
            rank_extras=manifest.rank_extra.world_size if manifest.rank_extra else 0,
            rank_values=RankValues.from_record(manifest.rank_values),
            metrics=manifest.metrics,
            has_digests=manifest.digests is not None,
            omitted_parts=manifest.omitted_parts,
            objects=manifest.objects,
            rank_mesh=manifest.rank_mesh.mesh() if manifest.rank_mesh else None,
            shardings=manifest.shardings,
        )

    def _decode_dict(self, tree: Any, blobs: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Decode a dict with string keys; FormatError for anything else. None is an empty dict."""
        decoded = codec.decode(tree, blobs, path=path)
        if decoded is not None and not (
            isinstance(decoded, dict) and all(isinstance(name, str) for name in decoded)
        ):
            raise FormatError(
                f"{self.storage.root}/{format_names.MANIFEST}: {path} is not a dict with string "
                "keys"
            )
        return decoded or {}

    def _extra_blobs(self) -> Mapping[str, Any]:
        record = self.manifest.extra_file if self.manifest is not None else None
        if record is None:
            return {}
        body = read_file(self.storage, record.file, record)
        entries = header.parse_header(body, file_size=len(body), file=record.file)
        return {name: memoryview(body)[entry.start : entry.stop] for name, entry in entries.items()}

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of one saving rank. Reads that entry only."""
        record = self.manifest.rank_extra if self.manifest is not None else None
        if record is None:
            return None
        body = read_entry(self.storage, record.file, self.entries(record), rank)
        return codec.unpack(body, "rank_extra") if body else None

    def rank_values(self, entry: int) -> Sequence[tuple[Path, Any]]:
        """Return the values of an entry of the rank-values file. Reads that entry only."""
        record = self.manifest.rank_values if self.manifest is not None else None
        if record is None:
            return ()
        location = f"{self.storage.root}/{record.file}: entry {entry}"
        body = read_entry(self.storage, record.file, self.entries(record), entry)
        return decode_rank_values(codec.unpack(body, "rank_values"), location)

    def entries(self, record: EntriesFile) -> Mapping[str, Entry]:
        """Return the header of the rank-extra or the rank-values file, after checking its index."""
        if record.file not in self._headers:
            self._headers[record.file] = self._read_entries(
                record.file, record.nbytes, record.header_crc
            )
        entries = self._headers[record.file]
        if not {"crcs", "offsets", "blobs"} <= entries.keys():
            raise FormatError(
                f"{self.storage.root}/{record.file}: holds {', '.join(entries)}, expected "
                "crcs, offsets and blobs"
            )
        if record.file not in self._checked_tables:
            check_entries_index(self.storage, record, entries)
            self._checked_tables.add(record.file)
        return entries

    def drop_headers(self) -> None:
        """Free the parsed headers, most of this object's memory. They are read again on demand."""
        self._headers, self._block_digests = {}, {}

    def close(self) -> None:
        """Close the storage and release `resources`."""
        self.storage.close()
        self.resources.close()

    def _entry(self, part: str, name: str) -> Entry:
        file = self._weight_maps[part][name]
        if file not in self._headers:
            self.check_files([file])
        entry = self._headers[file].get(name)
        if entry is None:
            raise IntegrityError(
                f"{self.storage.root}/{file}: has no tensor {name!r}, but the index of "
                f"{part} lists it there"
            )
        return entry

    def _describe_missing(self, file: str) -> str:
        tensors = [
            f"{part}:{name}"
            for part in self._weight_maps
            for name in sorted(self.tensors_by_file(part).get(file, ()))
        ]
        return f"{file} with {len(tensors)} tensor(s): {first_items(tensors, 3)}"

    def _read_header(self, file: str, size: int) -> dict[str, Entry]:
        if self.manifest is None:
            return self._read_entries(file, size)
        part = next(
            name for name, part_record in self.manifest.parts.items() if file in part_record.files
        )
        record = self.manifest.parts[part].files[file]
        entries = self._read_entries(file, record.nbytes, record.header_crc)
        differ = sorted(entries.keys() ^ set(self.tensors_by_file(part)[file]))
        if differ:
            which = "its header" if differ[0] in entries else f"the index of {part}"
            raise IntegrityError(
                f"{self.storage.root}/{file}: only {which} lists {differ[0]!r}, expected "
                "the same tensors in both"
            )
        return entries

    def _read_entries(self, file: str, nbytes: int, crc: str | None = None) -> dict[str, Entry]:
        if self.manifest is not None:
            check_size(self.storage, file, nbytes)
        head = read_header(self.storage, file, nbytes, crc)
        return header.parse_header(head, file_size=nbytes, file=f"{self.storage.root}/{file}")


def check_not_replaced(storage: Reader) -> None:
    """NotFoundError if the folder is gone, or another one has its name."""
    if isinstance(storage, LocalStorage) and storage.directory.was_replaced():
        raise NotFoundError(
            f"{storage.root}: was removed or replaced while it was read; load again"
        )
    if isinstance(storage, ObjectReader):
        storage.check_not_replaced()

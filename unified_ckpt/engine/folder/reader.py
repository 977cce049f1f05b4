"""Read a unified folder, or a plain Hugging Face model folder, as a Source.

Manifest, indexes and headers are read once, on first use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.byte_ranges import coalesce
from unified_ckpt.core.sharding.dtypes import itemsize, memory_shape
from unified_ckpt.core.sharding.shardings import TensorSpec, spec_of
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.commit import check_not_run_folder
from unified_ckpt.engine.folder.part_index import read_index
from unified_ckpt.engine.folder.rank_table import check_table, read_uint64s
from unified_ckpt.engine.source.box_digests import check_blocks, has_whole_blocks
from unified_ckpt.engine.source.protocol import Catalog, Location, SourceMetadata, read_box_into
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
)
from unified_ckpt.format import codec, digests, header, index, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import (
    DigestFile,
    Manifest,
    OptimizerRecord,
    RankExtraFile,
    parse_manifest,
)
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader, absolute_path, open_reader

_MODEL = "model"
_DIGEST_GAP_NBYTES = 64 << 10  # reading a gap this small is cheaper than another request


class Folder:
    """A folder of whole tensors in safetensors files.

    `manifest` is None for a Hugging Face folder, which has weights only. `resources` are released
    by `close`.
    """

    def __init__(
        self,
        storage: Reader,
        manifest: Manifest | None,
        weight_maps: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.storage, self.manifest = storage, manifest
        self._weight_maps = weight_maps
        self._headers: dict[str, dict[str, Entry]] = {}
        self._tensors_by_file: dict[str, dict[str, set[str]]] = {}
        self._checked_tables: set[str] = set()
        self.resources = ExitStack()  # released by `close`

    @property
    def format(self) -> str:
        """The format's name: "unified" or "huggingface"."""
        return "unified" if self.manifest is not None else "huggingface"

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
            names_by_file: dict[str, set[str]] = {}
            for name, file in self._weight_maps.get(part, {}).items():
                names_by_file.setdefault(file, set()).add(name)
            self._tensors_by_file[part] = names_by_file
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

    def catalog(self, keys: Collection[tuple[str, str]]) -> Catalog:
        """Return where some tensors lie. Raises the same errors as `check_files`."""
        self.check_files({self._weight_maps[part][name] for part, name in keys})
        return Catalog(
            self.storage,
            {(p, n): Location(self._weight_maps[p][n], self._entry(p, n).start) for p, n in keys},
        )

    def read(self, part: str, name: str, box: Box) -> bytes:
        """Return a box of a tensor. Blocks that are read completely are verified."""
        file, spec = self._weight_maps[part][name], self.specs(part, [name])[name]
        buffer = bytearray(box.numel * itemsize(spec.dtype))
        location, key = Location(file, self._entry(part, name).start), (part, name)
        read_box_into(self.storage, location, spec, box, memoryview(buffer))
        saved_digests = self.block_digests([key])[key] if has_whole_blocks(spec, box) else None
        if saved_digests is not None:
            check_blocks(key, spec, box, memoryview(buffer), saved_digests, location=f", in {file}")
        return bytes(buffer)

    def check_files(self, files: Collection[str]) -> None:
        """Check that files are complete and that headers match the manifest and the index.

        Raises IncompleteError naming files and tensors, and IntegrityError or FormatError for a
        file that was changed.
        """
        sizes = {file: self.storage.size(file) for file in files if file not in self._headers}
        missing = [file for file, size in sizes.items() if size is None]
        if missing:
            _check_not_replaced(self.storage)
            raise IncompleteError(
                format_list(
                    f"{self.storage.root}: files are missing",
                    [self._describe_missing(file) for file in sorted(missing)],
                )
            )
        for file, size in sorted(sizes.items()):
            self._headers[file] = self._read_header(file, size or 0)

    def digest_record(self) -> DigestFile | None:
        """Return the manifest's record of digests, or None. FormatError for an unknown kind.

        Unknown digests must not count as none.
        """
        record = self.manifest.digests if self.manifest is not None else None
        if record is not None:
            record.check_supported(self.storage.root)
        return record

    def block_digests(
        self, keys: Collection[tuple[str, str]]
    ) -> Mapping[tuple[str, str], Sequence[int] | None]:
        """Return the digests of some tensors' blocks, or None for each if the folder has none."""
        record = self.digest_record()
        if record is None:
            return dict.fromkeys(keys)
        if record.file not in self._headers:
            self._headers[record.file] = self._parse_header(
                record.file, self._checked_size(record.file, record.nbytes)
            )
        entries: dict[tuple[str, str], Entry] = {}
        for part, name in keys:
            entry = self._headers[record.file].get(f"{part}:{name}")
            if entry is None:
                raise IntegrityError(
                    f"{self.storage.root}/{record.file}: has no digests of {part}:{name}, "
                    "expected those of every tensor"
                )
            entries[part, name] = entry
        digests_by_key: dict[tuple[str, str], Sequence[int] | None] = {}
        for start, stop, range_keys in coalesce(
            {key: (entry.start, entry.stop) for key, entry in entries.items()},
            gap=_DIGEST_GAP_NBYTES,
        ):
            buffer = bytearray(stop - start)
            self.storage.read_at(record.file, start, memoryview(buffer))
            for key in range_keys:
                entry = entries[key]
                digests_by_key[key] = struct.unpack_from(
                    f"<{(entry.stop - entry.start) // 8}Q", buffer, entry.start - start
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
                    f"{self.storage.root}/{names.MANIFEST}: optimizer: the state of {name} "
                    f"is a {type(state).__name__}, expected a dict"
                )
        return SourceMetadata(
            save_id=manifest.save_id,
            step=manifest.step,
            extra=codec.decode(manifest.extra, blobs, path="extra"),
            modules=self._decode_dict(manifest.modules, blobs, "modules"),
            groups=groups,
            scalars=scalars,
            rank_extras=manifest.rank_extra.world_size if manifest.rank_extra else 0,
            metrics=manifest.metrics,
            has_digests=manifest.digests is not None,
            omitted_parts=manifest.omitted_parts,
            objects=manifest.objects,
        )

    def _decode_dict(self, tree: Any, blobs: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Decode a dict with string keys; FormatError for anything else. None is an empty dict."""
        decoded = codec.decode(tree, blobs, path=path)
        if decoded is not None and not (
            isinstance(decoded, dict) and all(isinstance(name, str) for name in decoded)
        ):
            raise FormatError(
                f"{self.storage.root}/{names.MANIFEST}: {path} is not a dict with string keys"
            )
        return decoded or {}

    def _extra_blobs(self) -> Mapping[str, Any]:
        record = self.manifest.extra_file if self.manifest is not None else None
        if record is None:
            return {}
        self._checked_size(record.file, record.nbytes)
        body = self.storage.read(record.file)
        if f"{digests.crc(body):016x}" != record.crc:
            raise IntegrityError(
                f"{self.storage.root}/{record.file}: is not the file that was written; "
                f"expected CRC {record.crc}"
            )
        entries = header.parse_header(body, file_size=len(body), file=record.file)
        return {name: memoryview(body)[entry.start : entry.stop] for name, entry in entries.items()}

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of one saving rank. Reads that entry only."""
        record = self.manifest.rank_extra if self.manifest is not None else None
        if record is None:
            return None
        if not 0 <= rank < record.world_size:
            raise IndexError(f"rank_extra[{rank}]: the checkpoint has {record.world_size} entries")
        entries = self._rank_extra_entries(record)
        location = f"{self.storage.root}/{record.file}"
        (crc,) = read_uint64s(self.storage, record.file, entries["crcs"], rank, 1)
        low, high = read_uint64s(self.storage, record.file, entries["offsets"], rank, 2)
        blobs = entries["blobs"]
        if not low <= high <= blobs.stop - blobs.start:
            raise IntegrityError(
                f"{location}: entry {rank} is bytes [{low}, {high}), expected a range "
                "within its blobs"
            )
        buffer = bytearray(high - low)
        self.storage.read_at(record.file, blobs.start + low, memoryview(buffer))
        if digests.crc(buffer) != crc:
            raise IntegrityError(
                f"{location}: entry {rank} has CRC {digests.crc(buffer):016x}, expected {crc:016x}"
            )
        return codec.unpack(bytes(buffer), "rank_extra") if buffer else None

    def check_rank_extra(self) -> None:
        """Check size, header and table of the rank-extra file."""
        if self.manifest is not None and self.manifest.rank_extra is not None:
            self._rank_extra_entries(self.manifest.rank_extra)

    def _rank_extra_entries(self, record: RankExtraFile) -> Mapping[str, Entry]:
        if record.file not in self._headers:
            size = self._checked_size(record.file, record.nbytes)
            self._headers[record.file] = self._parse_header(
                record.file, size, crc=record.header_crc
            )
        entries = self._headers[record.file]
        if not {"crcs", "offsets", "blobs"} <= entries.keys():
            raise FormatError(
                f"{self.storage.root}/{record.file}: holds {', '.join(entries)}, expected "
                "crcs, offsets and blobs"
            )
        if record.file not in self._checked_tables:
            check_table(self.storage, record, entries)
            self._checked_tables.add(record.file)
        return entries

    def drop_headers(self) -> None:
        """Free the parsed headers, most of this object's memory. They are read again on demand."""
        self._headers = {}

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
        more = " …" if len(tensors) > 3 else ""
        return f"{file} with {len(tensors)} tensor(s): {', '.join(tensors[:3])}{more}"

    def _read_header(self, file: str, size: int) -> dict[str, Entry]:
        if self.manifest is None:
            return self._parse_header(file, size)
        part = next(
            name for name, part_record in self.manifest.parts.items() if file in part_record.files
        )
        record = self.manifest.parts[part].files[file]
        entries = self._parse_header(
            file, self._checked_size(file, record.nbytes), crc=record.header_crc
        )
        differ = sorted(entries.keys() ^ self.tensors_by_file(part)[file])
        if differ:
            which = "its header" if differ[0] in entries else f"the index of {part}"
            raise IntegrityError(
                f"{self.storage.root}/{file}: only {which} lists {differ[0]!r}, expected "
                "the same tensors in both"
            )
        return entries

    def _checked_size(self, file: str, expected: int) -> int:
        size = self.storage.size(file)
        if size is None:
            raise IncompleteError(f"{self.storage.root}/{file}: is missing")
        if size != expected:
            raise IntegrityError(
                f"{self.storage.root}/{file}: has {size} bytes; the manifest says {expected}"
            )
        return size

    def _parse_header(self, file: str, size: int, *, crc: str | None = None) -> dict[str, Entry]:
        location = f"{self.storage.root}/{file}"
        prefix = bytearray(min(header.PREFIX_NBYTES, size))
        self.storage.read_at(file, 0, memoryview(prefix))
        head = bytearray(header.header_nbytes(bytes(prefix), file_size=size, file=location))
        self.storage.read_at(file, 0, memoryview(head))
        if crc is not None and f"{digests.crc(head):016x}" != crc:
            raise IntegrityError(
                f"{location}: its header has CRC {digests.crc(head):016x}; the manifest says "
                f"{crc}: it belongs to another file"
            )
        return header.parse_header(bytes(head), file_size=size, file=location)


def open_path(path: str, *, lock: bool) -> Folder:
    """Open the checkpoint at a local path or an fsspec URL.

    A folder that is replaced later is still read from the old one. `lock`: prevent its removal
    until it is closed; one rank of a job is enough. NotFoundError describes what was found instead.
    """
    storage = open_reader(absolute_path(path))
    if isinstance(storage, LocalStorage):
        kind = storage.kind("")
        if kind is None:
            parent, name = os.path.split(storage.root)
            raise NotFoundError(
                f"{storage.root}: there is no such folder{_backup_hint(LocalStorage(parent), name)}"
            )
        if kind == "file":
            raise NotFoundError(f"{storage.root}: is a file, expected a checkpoint folder")
    with ExitStack() as resources:
        resources.callback(storage.close)
        if isinstance(storage, LocalStorage):
            storage.open_handle()
            resources.callback(storage.directory.close)
            if lock:
                resources.enter_context(shared_lock(storage.root, directory=storage.directory))
        folder = open_folder(storage)
        if folder.manifest is None:
            # A removal deletes the manifest first; what is left looks like plain weights.
            _check_not_replaced(storage)
        folder.resources = resources.pop_all()
    return folder


def open_folder(storage: Reader) -> Folder:
    """Open the checkpoint in a folder.

    Raises NotFoundError if there is none, FormatError if the save is unfinished.
    """
    if storage.size(names.MANIFEST) is not None:
        manifest = parse_manifest(
            storage.read(names.MANIFEST), file=f"{storage.root}/{names.MANIFEST}"
        )
        weight_maps = {
            part: read_index(storage, part, record) for part, record in manifest.parts.items()
        }
        existing = {
            part: weight_map for part, weight_map in weight_maps.items() if weight_map is not None
        }
        return Folder(storage, manifest, existing)
    file_names = storage.names()
    folder_name = storage.root.rstrip("/").rsplit("/", 1)[-1]
    if names.is_staging(folder_name) or names.DIGESTS in file_names or names.MARKER in file_names:
        raise FormatError(
            f"{storage.root}: is an unfinished save: it has no {names.MANIFEST}, expected a "
            "committed checkpoint"
        )
    single = names.file_name(_MODEL, number=1, count=1)
    if names.index_name(_MODEL) in file_names:
        parsed = index.parse_index(
            storage.read(names.index_name(_MODEL)),
            file=f"{storage.root}/{names.index_name(_MODEL)}",
        )
        if not index.is_stale(
            parsed.weight_map, single=single, file_names=file_names, folder=storage.root
        ):
            return _open_indexed(storage, parsed.weight_map, file_names)
    if single in file_names:
        folder = Folder(storage, None, {})
        folder.check_files([single])
        return Folder(storage, None, {_MODEL: dict.fromkeys(folder._headers[single], single)})
    check_not_run_folder(storage)
    raise NotFoundError(
        f"{storage.root}: holds no checkpoint: expected {names.MANIFEST}, "
        f"{names.index_name(_MODEL)} or {single}"
    )


def _open_indexed(
    storage: Reader, weight_map: Mapping[str, str], file_names: Collection[str]
) -> Folder:
    """Open a Hugging Face folder of several files.

    Tensors that a file holds and the index lacks are included, as transformers does. Raises
    FormatError for a tensor that the index assigns to another file.
    """
    all_names = dict(weight_map)
    folder = Folder(storage, None, {_MODEL: all_names})
    for file in sorted(set(weight_map.values()) & set(file_names)):
        stale = sorted(
            name for name in folder.header(file) if all_names.setdefault(name, file) != file
        )
        if stale:
            raise FormatError(
                format_list(
                    f"{storage.root}/{file}: has tensors that the index assigns to other files",
                    stale,
                )
            )
    return folder


def _check_not_replaced(storage: Reader) -> None:
    if isinstance(storage, LocalStorage) and storage.directory.was_replaced():
        raise NotFoundError(
            f"{storage.root}: was removed or replaced while it was read; load again"
        )


def _backup_hint(parent: LocalStorage, name: str) -> str:
    """Return a hint for an error: the path where an interrupted replacement left the checkpoint."""
    try:
        backups = [entry for entry in parent.names() if names.is_replaced(entry, name)]
    except CheckpointError:
        return ""
    return (
        f"; an interrupted replacement left a copy at {parent.path(backups[0])}: rename it back"
        if backups
        else ""
    )

"""What a damaged folder must contain, proved by its manifest: headers, digests, auxiliary files.

The manifest is the folder's own, or a copy's by the rules of `resolve_manifest`. Everything else is
whatever bytes have the CRC that the manifest records, wherever they are. Writes nothing.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, base_key, parse_shard_name
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    MismatchError,
    NotFoundError,
)
from unified_ckpt.format import digests, header, index, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import (
    DigestFile,
    FileRecord,
    Manifest,
    NamedFile,
    has_valid_crc,
    parse_manifest,
)
from unified_ckpt.format.reconstruct import reconstruct
from unified_ckpt.runtime.storage.storage import Reader

_SAVE_ID = re.compile(rb'"save_id": "([A-Za-z0-9_]{1,64})"')
_READ_NBYTES = 1 << 16  # granularity in which unreadable bytes are zeroed

Spec = tuple[str, tuple[int, ...]]  # dtype and shape, as in a header


@dataclass(frozen=True, slots=True)
class FolderCopy:
    """A folder that may have bytes of the save.

    `manifest` is None if it has no valid one; `problem` says why. `body` is the manifest's bytes,
    if readable.
    """

    storage: Reader
    body: bytes | None
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedManifest:
    """The save's manifest and its bytes. `proven`: the folder is known to be this save's."""

    manifest: Manifest
    body: bytes
    proven: bool


@dataclass(frozen=True, slots=True)
class Header:
    """A part file's header, as bytes and as entries."""

    body: bytes
    entries: Mapping[str, Entry]


@dataclass(slots=True)
class Expected:
    """What is proved about the folder. What no copy has intact is left out.

    `block_crcs` has CRCs by part and name. `auxiliary_files` have one CRC of all their bytes; the
    parts' indexes are among them.
    """

    manifest: Manifest
    parts: list[str]
    headers: dict[str, Header] = field(default_factory=dict)
    auxiliary_files: dict[str, bytes] = field(default_factory=dict)
    block_crcs: dict[Key, Sequence[int]] = field(default_factory=dict)


def inspect_copy(storage: Reader) -> FolderCopy:
    """Read a folder's manifest.

    FormatError for an undamaged manifest of another version, NotFoundError without a folder.
    """
    file = f"{storage.root}/{names.MANIFEST}"
    try:
        body = storage.read(names.MANIFEST)
    except NotFoundError:
        storage.names()
        return FolderCopy(storage, None, None, f"{file}: is missing")
    except CheckpointError as error:
        return FolderCopy(storage, None, None, str(error))
    try:
        return FolderCopy(storage, body, parse_manifest(body, file=file))
    except (FormatError, IntegrityError) as error:
        if has_valid_crc(body):
            raise
        return FolderCopy(storage, body, None, str(error))


def resolve_manifest(target: FolderCopy, sources: Sequence[FolderCopy]) -> ResolvedManifest:
    """Return the target's own valid manifest, or else the copy's that the target's files prove.

    MismatchError for a source of another save; IntegrityError if manifests of one save differ, or
    nothing proves the target's save; IncompleteError if there is no manifest.
    """
    if target.manifest is not None and target.body is not None:
        for source in sources:
            _check_same(target, target.manifest, source)
        return ResolvedManifest(target.manifest, target.body, proven=True)
    save_id_match = _SAVE_ID.search(target.body or b"")
    candidates = [
        (other.storage.root, other.manifest, other.body)
        for other in sources
        if other.manifest is not None and other.body is not None
    ]
    ids = {manifest.save_id for _, manifest, _ in candidates} | (
        {save_id_match[1].decode()} if save_id_match else set()
    )
    if len(ids) > 1:
        listing = ", ".join(
            f"{root} of save {manifest.save_id}" for root, manifest, _ in candidates
        )
        claim_text = (
            f", and the rest of its manifest is of save {save_id_match[1].decode()}"
            if save_id_match
            else ""
        )
        raise MismatchError(f"{target.problem}; {listing}{claim_text}; give copies of one save")
    if not candidates:
        problems = "".join(f"; {other.problem}" for other in sources)
        raise IncompleteError(
            f"{target.problem}{problems}; give a copy of this folder with its manifest: nothing "
            "else can prove its bytes"
        )
    matches = [
        (fit, manifest, body)
        for _, manifest, body in candidates
        if (fit := _manifest_fits(target.storage, manifest)) is not False
    ]
    distinct = {json.dumps(json.loads(body), sort_keys=True) for _, _, body in matches}
    if len(distinct) != 1:
        listing = (
            "two manifests that match its files"
            if distinct
            else f"none that matches its files in {len(candidates)} folder(s)"
        )
        raise IntegrityError(
            f"{target.problem}; found {listing}; give a copy of this very folder, and its "
            "digests.safetensors or rank_extra to "
            "prove that; nothing was changed"
        )
    fit, manifest, body = matches[0]
    return ResolvedManifest(manifest, body, proven=fit is True)


def _check_same(target: FolderCopy, manifest: Manifest, source: FolderCopy) -> None:
    source_manifest = source.manifest
    if source_manifest is None or source.body is None or target.body is None:
        return
    location = (
        f"{source.storage.root}: holds save {source_manifest.save_id} (step {source_manifest.step})"
    )
    if source_manifest.save_id != manifest.save_id:
        raise MismatchError(
            f"{location}; {target.storage.root} is of save {manifest.save_id} (step "
            f"{manifest.step}); give a copy of the same save"
        )
    if same_files(source_manifest, manifest):
        target_fields, source_fields = json.loads(target.body), json.loads(source.body)
        differing = sorted(
            name
            for name in (target_fields.keys() | source_fields.keys()) - {"crc"}
            if target_fields.get(name) != source_fields.get(name)
        )
        if differing:
            raise IntegrityError(
                f"{location}, as {target.storage.root} does, and their manifests differ in "
                f"{', '.join(differing)}; "
                f"leave this copy out, or remove the {names.MANIFEST} that is damaged"
            )


def same_files(first: Manifest, second: Manifest) -> bool:
    """Whether two folders of one save have the same files."""
    return (first.node_group and first.node_group.number) == (
        second.node_group and second.node_group.number
    )


def _manifest_fits(storage: Reader, manifest: Manifest) -> bool | None:
    """Whether a folder without a manifest is this one's: True, False, or None if unknown.

    Nodes may have the same tensors; then only their ranks' own state tells folders apart.
    """
    matches = {
        record.file: matches_record(storage, record) for record in manifest.auxiliary_files()
    }
    has_rank_extra = manifest.rank_extra is not None and matches[manifest.rank_extra.file] is True
    if False in matches.values() or (
        manifest.node_group is not None and manifest.node_group.count > 1 and not has_rank_extra
    ):
        return False
    return True if manifest.digests is not None and matches[manifest.digests.file] else None


def matches_record(storage: Reader, record: NamedFile | DigestFile) -> bool | None:
    """Whether the file is intact; None if it does not exist."""
    size = file_nbytes(storage, record.file)
    if size != record.nbytes:
        return None if size is None else False
    body = read_or_zeros(storage, record.file, record.nbytes)
    return None if body is None else f"{digests.crc(body):016x}" == record.crc


def read_or_zeros(storage: Reader, file: str, nbytes: int, *, start: int = 0) -> bytes | None:
    """Return bytes of a file from `start`, zeros where unreadable, or None without a file."""
    data = bytearray(nbytes)
    try:
        storage.read_at(file, start, memoryview(data))
        return bytes(data)
    except NotFoundError:
        return None
    except CheckpointError:
        pass  # read in pieces instead
    try:
        size = storage.size(file)
    except CheckpointError:
        return None
    if size is None:
        return None
    for low in range(start, start + nbytes, _READ_NBYTES):
        high = max(min(low + _READ_NBYTES, size, start + nbytes), low)
        view = memoryview(data)[low - start : high - start]
        try:
            storage.read_at(file, low, view)
        except CheckpointError:
            view[:] = bytes(len(view))
    return bytes(data[: max(min(size - start, nbytes), 0)]).ljust(nbytes, b"\0")


def collect_expected(manifest: Manifest, target: Reader, sources: Sequence[FolderCopy]) -> Expected:
    """Collect what the manifest proves, from any of the folders.

    A part of which the target has neither index nor files was deleted.
    """
    same_file_storages = [
        target,
        *(
            source.storage
            for source in sources
            if source.manifest is None or same_files(source.manifest, manifest)
        ),
    ]
    all_storages = [target, *(source.storage for source in sources)]
    expected = Expected(
        manifest,
        [
            part
            for part, part_record in manifest.parts.items()
            if _part_exists(target, part, part_record.files)
        ],
    )
    for auxiliary in manifest.auxiliary_files():
        body = reconstruct(
            _read_copies(all_storages, auxiliary.file, auxiliary.nbytes), int(auxiliary.crc, 16)
        )
        if body is not None:
            expected.auxiliary_files[auxiliary.file] = body
    records = [
        (part, file, record)
        for part in expected.parts
        for file, record in manifest.parts[part].files.items()
    ]
    for _, file, record in records:
        _add_header(expected, file, record, _header_candidates(same_file_storages, file, record))
        for storage in same_file_storages:
            storage.close()  # one file is open at a time
    if len(expected.headers) < len(records):
        specs = dict(_global_specs(expected, sources))
        for part, file, record in records:
            if file not in expected.headers:
                _add_header(
                    expected, file, record, _rebuilt_headers(same_file_storages, part, file, specs)
                )
    for part in expected.parts:
        _add_index(expected, part, same_file_storages)
    if manifest.digests is not None and manifest.digests.file in expected.auxiliary_files:
        expected.block_crcs = parse_digests(
            expected.auxiliary_files[manifest.digests.file], manifest.digests
        )
    return expected


def _read_copies(readers: Sequence[Reader], file: str, nbytes: int) -> list[bytes]:
    """Return the folders' copies of a small file. Allocates nothing if none is long enough."""
    if max((file_nbytes(reader, file) or 0 for reader in readers), default=0) < nbytes:
        return []
    return [body for reader in readers if (body := read_or_zeros(reader, file, nbytes)) is not None]


def file_nbytes(storage: Reader, file: str) -> int | None:
    """Return the file's size, or None if it is missing or unreadable."""
    try:
        return storage.size(file)
    except CheckpointError:
        return None


def _part_exists(storage: Reader, part: str, files: Mapping[str, object]) -> bool:
    return (
        any(file_nbytes(storage, name) is not None for name in (names.index_name(part), *files))
        if files
        else False
    )


def _add_header(expected: Expected, file: str, record: FileRecord, bodies: Iterator[bytes]) -> None:
    for body in bodies:
        if f"{digests.crc(body):016x}" == record.header_crc:
            expected.headers[file] = Header(
                body, header.parse_header(body, file_size=record.nbytes, file=file)
            )
            return


def _add_index(expected: Expected, part: str, storages: Sequence[Reader]) -> None:
    """Add the part's index: a copy, or one rebuilt from the headers if all are known."""
    record, files = expected.manifest.parts[part], expected.manifest.parts[part].files
    if record.index is None:
        return
    name = names.index_name(part)
    bodies = _read_copies(storages, name, record.index.nbytes)
    if files.keys() <= expected.headers.keys():
        weight_map = {fqn: file for file in files for fqn in expected.headers[file].entries}
        bodies.append(index.encode_index(total_size=record.total_nbytes, weight_map=weight_map))
    body = reconstruct(bodies, int(record.index.crc, 16))
    if body is not None:
        expected.auxiliary_files[name] = body


def _header_candidates(
    storages: Sequence[Reader], file: str, record: FileRecord
) -> Iterator[bytes]:
    """Yield possible headers: for each claimed length, one combined from several copies."""
    lengths = set[int]()
    for storage in storages:
        prefix = read_or_zeros(storage, file, header.PREFIX_NBYTES)
        try:
            lengths |= (
                {header.header_nbytes(prefix, file_size=record.nbytes, file=file)}
                if prefix is not None
                else set()
            )
        except FormatError:
            continue
    for length in lengths:
        bodies = [
            body
            for storage in storages
            if (body := read_or_zeros(storage, file, length)) is not None
        ]
        combined = reconstruct(bodies, int(record.header_crc, 16))
        if combined is not None:
            yield combined


def _rebuilt_headers(
    storages: Sequence[Reader], part: str, file: str, specs: Mapping[Key, Spec]
) -> Iterator[bytes]:
    """Yield headers rebuilt from an index's names and other folders' specs."""
    for storage in storages:
        try:
            weight_map = index.parse_index(
                storage.read(names.index_name(part)), file=file
            ).weight_map
            items = [
                (name, *_stored_spec(part, name, specs))
                for name, located_file in weight_map.items()
                if located_file == file
            ]
            yield header.encode_header(header.file_order(items))[0]
        except (CheckpointError, KeyError):
            continue


def _stored_spec(part: str, name: str, specs: Mapping[Key, Spec]) -> Spec:
    parsed = parse_shard_name(name) if part.endswith(SHARD_SUFFIX) else None
    dtype, shape = specs[base_key((part, name))]
    return (dtype, shape) if parsed is None else (dtype, parsed[1].shape)


def _global_specs(expected: Expected, sources: Sequence[FolderCopy]) -> Iterator[tuple[Key, Spec]]:
    """Yield dtype and shape of whole tensors, from this folder's headers and the others'."""
    for part in expected.parts:
        for file in expected.manifest.parts[part].files:
            if file in expected.headers:
                yield from _specs_in(part, expected.headers[file].entries)
    for source in sources:
        for part, part_record in (
            source.manifest.parts.items() if source.manifest is not None else ()
        ):
            for file, record in part_record.files.items():
                for body in _header_candidates([source.storage], file, record):
                    yield from _specs_in(
                        part, header.parse_header(body, file_size=record.nbytes, file=file)
                    )


def _specs_in(part: str, entries: Mapping[str, Entry]) -> Iterator[tuple[Key, Spec]]:
    for name, entry in entries.items():
        parsed = parse_shard_name(name) if part.endswith(SHARD_SUFFIX) else None
        yield base_key((part, name)), (entry.dtype, entry.shape if parsed is None else parsed[2])


def parse_digests(body: bytes, record: DigestFile) -> dict[Key, Sequence[int]]:
    """Return block CRCs by part and name; empty if the algorithm is unknown."""
    if not record.is_supported:
        return {}
    crcs: dict[Key, Sequence[int]] = {}
    for name, entry in header.parse_header(body, file_size=len(body), file=record.file).items():
        part, _, fqn = name.partition(":")
        crcs[part, fqn] = struct.unpack_from(
            f"<{(entry.stop - entry.start) // 8}Q", body, entry.start
        )
    return crcs

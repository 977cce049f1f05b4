"""What a damaged folder has to hold, proved: its manifest, and by that its headers, its digests and the files that have one CRC.

The manifest is the root of the proof: it is taken as it is, or from a copy, by the rules of `settle`. All else is whatever bytes have the
CRC that the manifest says, wherever they come from. Reads; writes nothing.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.nodes.node_groups import FRAGMENTS, origin, parse_fragment
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
    is_other_version,
    parse_manifest,
)
from unified_ckpt.format.reconstruct import mosaic
from unified_ckpt.runtime.storage.storage import Reader

_SAVE_ID = re.compile(rb'"save_id": "([A-Za-z0-9_]{1,64})"')
_READ_NBYTES = (
    1 << 16
)  # of a damaged disk at a time: what cannot be read is lost in pieces of this size

Spec = tuple[str, tuple[int, ...]]  # dtype and shape, as a header has them


@dataclass(frozen=True, slots=True)
class Copy:
    """A folder that may have bytes of the save. `manifest`: None where it has no valid one, and `why`; `body`: its bytes, if it can be
    read."""

    storage: Reader
    body: bytes | None
    manifest: Manifest | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """The manifest of the save, and its bytes. `sure`: whether the folder is known to be that save's, and not only not to be another's."""

    manifest: Manifest
    body: bytes
    sure: bool


@dataclass(frozen=True, slots=True)
class Head:
    """A part file's header: its bytes, and what it says."""

    body: bytes
    entries: Mapping[str, Entry]


@dataclass(slots=True)
class Truth:
    """What is proved of the folder. What no copy has right is left out. `blocks`: CRCs by part and name. `singles`: files
    with one CRC of all their bytes, the parts' indexes among them."""

    manifest: Manifest
    parts: list[str]
    heads: dict[str, Head] = field(default_factory=dict)
    singles: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[Key, Sequence[int]] = field(default_factory=dict)


def look(storage: Reader) -> Copy:
    """FormatError for a manifest of another major version, NotFoundError where there is no folder."""
    file = f"{storage.root}/{names.MANIFEST}"
    try:
        body = storage.read(names.MANIFEST)
    except NotFoundError:
        storage.names()
        return Copy(storage, None, None, f"{file}: is missing")
    except CheckpointError as error:
        return Copy(storage, None, None, str(error))
    try:
        return Copy(storage, body, parse_manifest(body, file=file))
    except (FormatError, IntegrityError) as error:
        if is_other_version(body):
            raise
        return Copy(storage, body, None, str(error))


def settle(target: Copy, sources: Sequence[Copy]) -> Settled:
    """The manifest by which the target is mended: its own, where it has a valid one; else a copy's that the target's files prove.

    MismatchError for a source of another save; IntegrityError where manifests of one save differ, or nothing proves whose save the target
    is; IncompleteError where nobody has a manifest.
    """
    if target.manifest is not None and target.body is not None:
        for source in sources:
            _check_same(target, target.manifest, source)
        return Settled(target.manifest, target.body, sure=True)
    claim = _SAVE_ID.search(target.body or b"")
    told = [
        (one.storage.root, one.manifest, one.body)
        for one in sources
        if one.manifest is not None and one.body is not None
    ]
    ids = {manifest.save_id for _, manifest, _ in told} | ({claim[1].decode()} if claim else set())
    if len(ids) > 1:
        found = ", ".join(f"{root} of save {manifest.save_id}" for root, manifest, _ in told)
        of = f", and what is left of its manifest is of save {claim[1].decode()}" if claim else ""
        raise MismatchError(f"{target.why}; {found}{of}; needed copies of one save")
    if not told:
        asked = "".join(f"; {one.why}" for one in sources)
        raise IncompleteError(
            f"{target.why}{asked}; needed a copy of this folder that has its manifest: nothing else can prove a byte of it"
        )
    fits = [
        (verdict, manifest, body)
        for _, manifest, body in told
        if (verdict := _fits(target.storage, manifest)) is not False
    ]
    distinct = {json.dumps(json.loads(body), sort_keys=True) for _, _, body in fits}
    if len(distinct) != 1:
        found = (
            "two manifests that its files fit"
            if distinct
            else f"none that its files fit among those of {len(told)} folder(s)"
        )
        raise IntegrityError(
            f"{target.why}; found {found}; needed the manifest of a copy of this very folder, and its digests.safetensors or rank_extra to "
            "prove that; nothing was changed"
        )
    verdict, manifest, body = fits[0]
    return Settled(manifest, body, sure=verdict is True)


def _check_same(target: Copy, manifest: Manifest, source: Copy) -> None:
    other = source.manifest
    if other is None or source.body is None or target.body is None:
        return
    where = f"{source.storage.root}: holds save {other.save_id} (step {other.step})"
    if other.save_id != manifest.save_id:
        raise MismatchError(
            f"{where}; {target.storage.root} is of save {manifest.save_id} (step {manifest.step}); needed a copy of the same save"
        )
    if same_cut(other, manifest):
        mine, theirs = json.loads(target.body), json.loads(source.body)
        differ = sorted(
            name
            for name in (mine.keys() | theirs.keys()) - {"crc"}
            if mine.get(name) != theirs.get(name)
        )
        if differ:
            raise IntegrityError(
                f"{where}, as {target.storage.root} does, and their manifests differ in {', '.join(differ)}; needed the same ones: "
                f"leave this copy out, or remove the {names.MANIFEST} that is damaged"
            )


def same_cut(one: Manifest, other: Manifest) -> bool:
    """Whether two folders of one save hold the same files."""
    return (one.island and one.island.number) == (other.island and other.island.number)


def _fits(storage: Reader, manifest: Manifest) -> bool | None:
    """Whether a folder without a manifest is this one's: True where its digests are, False where a small file is not, None if they do not
    tell.

    Machines may hold the same tensors; then only what their ranks left tells their folders apart.
    """
    states = {record.file: state_of(storage, record) for record in manifest.singles()}
    mine = manifest.rank_extra is not None and states[manifest.rank_extra.file] is True
    if False in states.values() or (
        manifest.island is not None and manifest.island.count > 1 and not mine
    ):
        return False
    return True if manifest.digests is not None and states[manifest.digests.file] else None


def state_of(storage: Reader, record: NamedFile | DigestFile) -> bool | None:
    """Whether the file is right; None where there is none."""
    size = file_nbytes(storage, record.file)
    if size != record.nbytes:
        return None if size is None else False
    body = lenient(storage, record.file, record.nbytes)
    return None if body is None else f"{digests.crc(body):016x}" == record.crc


def lenient(storage: Reader, file: str, nbytes: int, *, start: int = 0) -> bytes | None:
    """Bytes of a file from `start`; zeros where they cannot be read. None where there is no file."""
    found = bytearray(nbytes)
    try:
        storage.read_at(file, start, memoryview(found))
        return bytes(found)
    except NotFoundError:
        return None
    except CheckpointError:
        pass  # in pieces, then
    try:
        size = storage.size(file)
    except CheckpointError:
        return None
    if size is None:
        return None
    for low in range(start, start + nbytes, _READ_NBYTES):
        high = max(min(low + _READ_NBYTES, size, start + nbytes), low)
        into = memoryview(found)[low - start : high - start]
        try:
            storage.read_at(file, low, into)
        except CheckpointError:
            into[:] = bytes(len(into))
    return bytes(found[: max(min(size - start, nbytes), 0)]).ljust(nbytes, b"\0")


def prove(manifest: Manifest, target: Reader, sources: Sequence[Copy]) -> Truth:
    """Finds what the manifest proves, in any of the folders. A part of which the target has neither index nor files was deleted."""
    alike = [
        target,
        *(
            one.storage
            for one in sources
            if one.manifest is None or same_cut(one.manifest, manifest)
        ),
    ]
    everybody = [target, *(one.storage for one in sources)]
    truth = Truth(
        manifest, [part for part, of in manifest.parts.items() if _is_there(target, part, of.files)]
    )
    for single in manifest.singles():
        right = mosaic(_copies(everybody, single.file, single.nbytes), int(single.crc, 16))
        if right is not None:
            truth.singles[single.file] = right
    records = [
        (part, file, record)
        for part in truth.parts
        for file, record in manifest.parts[part].files.items()
    ]
    for _, file, record in records:
        _keep_head(truth, file, record, _heads(alike, file, record))
        for storage in alike:
            storage.close()  # one file is open at a time
    if len(truth.heads) < len(records):
        specs = dict(_specs(truth, sources))
        for part, file, record in records:
            if file not in truth.heads:
                _keep_head(truth, file, record, _made_heads(alike, part, file, specs))
    for part in truth.parts:
        _keep_index(truth, part, alike)
    if manifest.digests is not None and manifest.digests.file in truth.singles:
        truth.blocks = parse_digests(truth.singles[manifest.digests.file], manifest.digests)
    return truth


def _copies(storages: Sequence[Reader], file: str, nbytes: int) -> list[bytes]:
    """What the folders have of a small file. Where none has as many bytes no memory is taken: the number itself may be wrong."""
    if max((file_nbytes(storage, file) or 0 for storage in storages), default=0) < nbytes:
        return []
    return [body for storage in storages if (body := lenient(storage, file, nbytes)) is not None]


def file_nbytes(storage: Reader, file: str) -> int | None:
    """None also for a file that the disk does not give."""
    try:
        return storage.size(file)
    except CheckpointError:
        return None


def _is_there(storage: Reader, part: str, files: Mapping[str, object]) -> bool:
    return (
        any(file_nbytes(storage, name) is not None for name in (names.index_name(part), *files))
        if files
        else False
    )


def _keep_head(truth: Truth, file: str, record: FileRecord, bodies: Iterator[bytes]) -> None:
    for body in bodies:
        if f"{digests.crc(body):016x}" == record.header_crc:
            truth.heads[file] = Head(
                body, header.parse_header(body, file_size=record.nbytes, file=file)
            )
            return


def _keep_index(truth: Truth, part: str, storages: Sequence[Reader]) -> None:
    """The part's index: a copy of it, or made anew from the headers where all are known."""
    record, files = truth.manifest.parts[part], truth.manifest.parts[part].files
    if record.index is None:
        return
    name = names.index_name(part)
    bodies = _copies(storages, name, record.index.nbytes)
    if files.keys() <= truth.heads.keys():
        weight_map = {fqn: file for file in files for fqn in truth.heads[file].entries}
        bodies.append(index.encode_index(total_size=record.total_nbytes, weight_map=weight_map))
    right = mosaic(bodies, int(record.index.crc, 16))
    if right is not None:
        truth.singles[name] = right


def _heads(storages: Sequence[Reader], file: str, record: FileRecord) -> Iterator[bytes]:
    """What may be the file's header: of each length that a copy claims, one that several copies make between them."""
    lengths = set[int]()
    for storage in storages:
        first = lenient(storage, file, header.PREFIX_NBYTES)
        try:
            lengths |= (
                {header.header_nbytes(first, file_size=record.nbytes, file=file)}
                if first is not None
                else set()
            )
        except FormatError:
            continue
    for length in lengths:
        bodies = [
            body for storage in storages if (body := lenient(storage, file, length)) is not None
        ]
        right = mosaic(bodies, int(record.header_crc, 16))
        if right is not None:
            yield right


def _made_heads(
    storages: Sequence[Reader], part: str, file: str, specs: Mapping[Key, Spec]
) -> Iterator[bytes]:
    """The header as the writer makes it, from the names that an index says and what other folders say of the tensors."""
    for storage in storages:
        try:
            weight_map = index.parse_index(
                storage.read(names.index_name(part)), file=file
            ).weight_map
            items = [
                (name, *_spec(part, name, specs)) for name, at in weight_map.items() if at == file
            ]
            yield header.encode_header(header.file_order(items))[0]
        except (CheckpointError, KeyError):
            continue


def _spec(part: str, name: str, specs: Mapping[Key, Spec]) -> Spec:
    parsed = parse_fragment(name) if part.endswith(FRAGMENTS) else None
    dtype, shape = specs[origin((part, name))]
    return (dtype, shape) if parsed is None else (dtype, parsed[1].shape)


def _specs(truth: Truth, sources: Sequence[Copy]) -> Iterator[tuple[Key, Spec]]:
    """Dtype and shape of whole tensors, as this folder's headers and those of others say."""
    for part in truth.parts:
        for file in truth.manifest.parts[part].files:
            if file in truth.heads:
                yield from _specs_of(part, truth.heads[file].entries)
    for source in sources:
        for part, of in source.manifest.parts.items() if source.manifest is not None else ():
            for file, record in of.files.items():
                for body in _heads([source.storage], file, record):
                    yield from _specs_of(
                        part, header.parse_header(body, file_size=record.nbytes, file=file)
                    )


def _specs_of(part: str, entries: Mapping[str, Entry]) -> Iterator[tuple[Key, Spec]]:
    for name, entry in entries.items():
        parsed = parse_fragment(name) if part.endswith(FRAGMENTS) else None
        yield origin((part, name)), (entry.dtype, entry.shape if parsed is None else parsed[2])


def parse_digests(body: bytes, record: DigestFile) -> dict[Key, Sequence[int]]:
    """CRCs of blocks by part and name; none where they are of another kind than ours."""
    if not record.is_known:
        return {}
    found: dict[Key, Sequence[int]] = {}
    for name, entry in header.parse_header(body, file_size=len(body), file=record.file).items():
        part, _, fqn = name.partition(":")
        found[part, fqn] = struct.unpack_from(
            f"<{(entry.stop - entry.start) // 8}Q", body, entry.start
        )
    return found

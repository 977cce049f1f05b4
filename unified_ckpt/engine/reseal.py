"""What a merged checkpoint holds beside tensors, said anew: extra state, each rank's own, attached files, digests, indexes, the manifest.

Runs on the one rank that leads. All of it comes from the folders of the save that is merged: nothing is made up.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence

from unified_ckpt.core.tables import Key, short
from unified_ckpt.engine import commit, extras
from unified_ckpt.engine.joint import Joint
from unified_ckpt.engine.transfer import Copy
from unified_ckpt.errors import IncompleteError, IntegrityError
from unified_ckpt.format import codec, digests, header, index, names
from unified_ckpt.format.manifest import FORMAT_VERSION, DigestFile, FileRecord, Manifest, Part, RankExtraFile
from unified_ckpt.runtime.storage import Buffer, LocalStorage

Beat = Callable[[int], object]  # called with the bytes of each range that was written; what it raises ends the merge

_FLUSH_NBYTES = 32 << 20  # of a file, after which the kernel is asked to begin writing them to the disk


class Output:
    """All positional writes of a rank into the folder under construction."""

    def __init__(self, storage: LocalStorage, folder: str, *, fsync: bool, beat: Beat) -> None:
        self._storage, self._folder, self._fsync, self.beat = storage, folder, fsync, beat
        self._written: dict[str, tuple[int, int]] = {}  # file -> how far it was written, how far flushed
        self.nbytes = 0

    def write_at(self, file: str, start: int, buffers: Sequence[Buffer]) -> None:
        """The buffers one after the other from byte `start`; they may change when it returns."""
        nbytes = sum(len(one) for one in buffers)
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)
        self.nbytes += nbytes
        stop, flushed = start + nbytes, self._written.get(file, (0, start))[1]
        if stop - flushed >= _FLUSH_NBYTES:
            self._storage.start_flush(f"{self._folder}/{file}", flushed, stop - flushed)
            flushed = stop
        self._written[file] = stop, flushed
        self.beat(nbytes)

    def flush(self) -> None:
        """Returns once all that was written is on the disk."""
        for file in self._written:
            if self._fsync:
                self._storage.sync(f"{self._folder}/{file}")
            self.beat(0)
        self._written.clear()


def world_of(manifest: Manifest) -> int:
    """The ranks of the whole save."""
    return manifest.island.world_size if manifest.island is not None else manifest.world_size


def reseal(
    joint: Joint,
    storage: LocalStorage,
    folder: str,
    output: Output,
    *,
    weight_maps: Mapping[str, Mapping[str, str]],
    records: Mapping[str, Mapping[str, FileRecord]],
    blocks: Mapping[Key, array[int]],
    fsync: bool,
) -> Manifest:
    """Writes all but tensors and the manifest, which it returns. `weight_maps`, `records`: by part; `blocks`: digests of each tensor."""
    manifests = joint.manifests
    first, said = manifests[0], joint.said()
    ours = {names.MANIFEST, commit.PROBE, names.DIGESTS, names.EXTRA, names.RANK_EXTRA, names.REPLICAS}
    ours |= {file for one in manifests for file in (*one.files(), *map(names.index_name, one.parts))}
    ours |= {file for part, files in records.items() for file in (*files, names.index_name(part))}
    # What `attach` added: it was called for each folder, with the same result.
    Copy(joint.here[0], storage, folder, fsync=fsync, beat=output.beat).others("", ours)
    parts = {
        part: Part(
            files=dict(records.get(part, {})),
            total_nbytes=sum(spec.nbytes for spec in joint.specs(part, joint.names(part)).values()),
            aliases=dict(joint.aliases(part)),
        )
        for part in sorted({*joint.parts, *_empty_parts(manifests)})
    }
    told = extras.Told(
        modules=dict(said.modules),
        groups=[dict(group) for group in said.groups],
        scalars={fqn: dict(state) for fqn, state in said.scalars.items()},
        has_optimizer=first.optimizer is not None,
    )
    extra = extras.write_extra(storage, folder, said.extra, told)
    if fsync and extra.file is not None:
        storage.sync(f"{folder}/{extra.file.file}")
    spoken = any(one.rank_extra is not None for one in manifests)
    rank_extra = _write_rank_extra(joint, output, world=world_of(first)) if spoken else None
    proof = _write_digests(blocks, output)
    for part, weight_map in weight_maps.items():
        body = index.encode_index(total_size=parts[part].total_nbytes, weight_map=weight_map)
        output.write_at(names.index_name(part), 0, [memoryview(body)])
    output.flush()
    of_files = {"format_version": FORMAT_VERSION, "parts": parts, "digests": proof, "extra_file": extra.file, "rank_extra": rank_extra}
    of_words = {"optimizer": extra.optimizer, "modules": extra.modules, "extra": extra.extra}
    return first.model_copy(update={**of_files, **of_words, "world_size": world_of(first), "island": None})


def _empty_parts(manifests: Sequence[Manifest]) -> set[str]:
    """Parts that were asked for and have no tensor anywhere. One that was deleted from all folders is none of them."""
    named = {part for one in manifests for part, record in one.parts.items() if not record.files}
    return {part for part in named if not any(one.island is not None and part in one.island.totals for one in manifests)}


def _write_rank_extra(joint: Joint, output: Output, *, world: int) -> RankExtraFile | None:
    """Each rank's value at its place in one file. Reads each twice, to hold one at a time.

    None, with a word of it, where that of any rank is lost: some ranks would go on from their own state, and others from none.
    """
    sizes: list[tuple[int, int]] = []
    try:
        _check_all_here(joint, world=world)
        for rank in range(world):
            packed = _packed(joint, rank)
            sizes.append((len(packed), digests.crc(packed)))
            output.beat(0)
    except (IncompleteError, IntegrityError) as error:
        joint.storage.ledger.damage.append(f"merged without rank_extra, that of all {world} ranks: {error}")
        return None
    total = sum(nbytes for nbytes, _ in sizes)
    if not total:
        return None
    words = [("crcs", "U64", (world,)), ("offsets", "U64", (world + 1,)), ("blobs", "U8", (total,))]
    head, _ = header.encode_header(words)
    offsets = [0]
    for nbytes, _ in sizes:
        offsets.append(offsets[-1] + nbytes)
    front = head + struct.pack(f"<{world + len(offsets)}Q", *(crc for _, crc in sizes), *offsets)
    output.write_at(names.RANK_EXTRA, 0, [memoryview(front)])
    for rank in range(world):
        if sizes[rank][0]:
            output.write_at(names.RANK_EXTRA, len(front) + offsets[rank], [memoryview(_packed(joint, rank))])
    crc, nbytes = digests.combine_stream([(digests.crc(front), len(front)), *((crc, nbytes) for nbytes, crc in sizes)])
    return RankExtraFile(file=names.RANK_EXTRA, nbytes=nbytes, header_crc=f"{digests.crc(head):016x}", crc=f"{crc:016x}", world_size=world)


def _check_all_here(joint: Joint, *, world: int) -> None:
    here = {rank for one in joint.manifests for rank in (one.island.ranks if one.island else range(one.world_size))}
    away = sorted(set(range(world)) - here)
    if away:
        raise IncompleteError(f"that of rank(s) {short(away)} is in a folder that is on no machine here")


def _packed(joint: Joint, rank: int) -> bytes:
    found = joint.rank_extra(rank)
    return b"" if found is None else codec.pack(found, "rank_extra")


def _write_digests(blocks: Mapping[Key, array[int]], output: Output) -> DigestFile:
    head, _ = header.encode_header([(f"{part}:{name}", "U64", (len(crcs),)) for (part, name), crcs in blocks.items()])
    views = [memoryview(head), *(memoryview(struct.pack(f"<{len(crcs)}Q", *crcs)) for crcs in blocks.values())]
    output.write_at(names.DIGESTS, 0, views)
    crc, nbytes = digests.combine_stream((digests.crc(view), len(view)) for view in views)
    return DigestFile(file=names.DIGESTS, algorithm=digests.ALGORITHM, block_nbytes=digests.BLOCK_NBYTES, nbytes=nbytes, crc=f"{crc:016x}")

"""The folders that several machines wrote of one save, merged into one checkpoint in a place that they share, as a commit of its own.

Each file of the target is written by the ranks of one machine, the one on whose disk most of it lies; what lies elsewhere comes over TCP.
Every block is compared with its digest as it is read, and what is written is digested anew.

How data could be lost or be wrong:
- a piece is missing or damaged: it is read from another machine that has it; where none has, nothing is committed;
- a byte is written twice or never: shares are a pure function that every rank computes for all ranks (`core/plan_merge.py`), and the lead
  counts the digests of every block before the manifest is written;
- a machine writes to a folder of its own that only looks the same: who does not see the lead's probe file writes nothing;
- a file is not whole when the manifest says so: each rank syncs what it wrote, then tells; the lead looks at all sizes;
- a crash or a full disk: the target has its name only after all of that, by one rename; what was there stays until then;
- something that is said beside tensors goes missing with a folder: extra state and words of optimizers are in every folder; where the
  `rank_extra` of any rank is lost or damaged, the target has none of any rank, and `Merged.notes` says so.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unified_ckpt.core.dtypes import unpacked
from unified_ckpt.core.plan_merge import MergedFile, plan_merge, share
from unified_ckpt.core.tables import Key
from unified_ckpt.engine import commit
from unified_ckpt.engine.gather import gather, open_folders
from unified_ckpt.engine.joint import Joint
from unified_ckpt.engine.reseal import Beat, Output, reseal
from unified_ckpt.engine.seal import write_manifest
from unified_ckpt.errors import IntegrityError, NotFoundError, StorageError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.comm import Comm, Meeting
from unified_ckpt.runtime.probe import first_ranks
from unified_ckpt.runtime.storage import LocalStorage

_CHUNK_NBYTES = 4 << 20  # read, digested and written at a time: a whole number of digest blocks


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge. `if_exists`: for another save of the target's name; the same save is left as it is."""

    max_file_bytes: int
    if_exists: str
    fsync: bool
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Merged:
    """`nbytes`: written by this rank; 0 everywhere where the name holds a checkpoint already, which stays: `save_id` is then that one's.
    `notes`: damage that was read around, and what was left out, in sentences."""

    save_id: str
    nbytes: int
    notes: tuple[str, ...]


def merge_paths(
    comm: Comm, paths: Sequence[str], storage: LocalStorage, name: str, options: MergeOptions, *, machines: Sequence[int], beat: Beat
) -> Merged:
    """Collective. `merge` of the folders `paths` of each machine; a machine may have none. Nobody who asks removes them meanwhile."""
    what = f"merge of {', '.join(paths)}"
    with ExitStack() as owned:
        opened = open_folders(paths, owned, hold=comm.rank in first_ranks(machines))
        found = gather(comm, what, paths, opened, machines, owned, timeout_seconds=options.timeout_seconds)
        if not isinstance(found, Joint):
            raise NotFoundError(f"{what}: holds no checkpoint with a manifest; needed the folders of one save")
        return merge(comm, found, storage, name, options, machines=machines, beat=beat)


def merge(
    comm: Comm, joint: Joint, storage: LocalStorage, name: str, options: MergeOptions, *, machines: Sequence[int], beat: Beat
) -> Merged:
    """Collective. Writes the save to `name` under the storage's root, in a few MiB of memory a rank, or raises one error on all ranks.

    The same save id, step, extra state and words, with whole tensors only. `machines`: the machine of each rank; those that do not see
    the root write nothing. IncompleteError or IntegrityError where no undamaged copy is left, StorageError where the target cannot be
    written. What was at `name` is as it was after any error, and nothing is left beside it.
    """
    meeting = comm.meet(f"merge to {storage.path(name)}", same=False, timeout_seconds=options.timeout_seconds)
    with storage:
        lead, held = _survey(meeting, joint, machines)
        told = _begin(meeting, joint, storage, name, options, lead=lead)
        if "folder" not in told:
            return Merged(told["id"], 0, ())
        construction = commit.Construction(name, told["folder"], told["id"])
        try:
            writers = _who_sees(meeting, storage, construction, machines, lead=lead)
            with meeting.phase("plan"):
                if meeting.rank == lead:
                    files = plan_merge(_sizes(joint), held, writers=writers, max_file_bytes=options.max_file_bytes)
                    body = json.dumps([[file.part, file.number, file.count, file.keys, file.machine] for file in files])
                    meeting.put("files", zlib.compress(body.encode(), 1))
            work = _Work(meeting, joint, storage, construction, options, lead, tuple(machines), _planned(meeting), _sizes(joint))
            nbytes = _build(work, beat)
        except BaseException as error:
            commit.abandon_together(meeting, storage, construction, error, lead=lead)
            raise
    return Merged(joint.save_id, nbytes, tuple(joint.storage.ledger.damage))


def _sizes(joint: Joint) -> dict[Key, int]:
    return {(part, name): spec.nbytes for part in joint.parts for name, spec in joint.specs(part, joint.names(part)).items()}


def _survey(meeting: Meeting, joint: Joint, machines: Sequence[int]) -> tuple[int, dict[Key, dict[int, int]]]:
    """Collective. The rank that leads, the first of the machine that has the first folder; on it what lies on which machine."""
    keys, firsts = sorted(_sizes(joint)), first_ranks(machines)
    with meeting.phase("survey"):
        if meeting.rank in firsts:
            numbers = [one.manifest.island.number if one.manifest and one.manifest.island else 0 for one in joint.here]
            meeting.put(f"first/{meeting.rank}", str(min(numbers, default=-1)).encode())
            own = [(i, nbytes) for i, key in enumerate(keys) if (nbytes := joint.nbytes_here(*key))]
            meeting.put(f"here/{meeting.rank}", zlib.compress(json.dumps(own).encode(), 1))
        if meeting.rank == 0:
            first = {rank: int(meeting.get(f"first/{rank}")) for rank in firsts}
            meeting.put("lead", str(min((n, rank) for rank, n in first.items() if n >= 0)[1]).encode())
    lead = int(meeting.get("lead"))
    if meeting.rank != lead:
        return lead, {}
    held: dict[Key, dict[int, int]] = {}
    for rank in firsts:
        for i, nbytes in json.loads(zlib.decompress(meeting.get(f"here/{rank}"))):
            held.setdefault(keys[i], {})[machines[rank]] = nbytes
    return lead, held


def _begin(meeting: Meeting, joint: Joint, storage: LocalStorage, name: str, options: MergeOptions, *, lead: int) -> dict[str, str]:
    """Collective. The folder under construction and its id; the id alone of the checkpoint that stays."""
    with meeting.phase("begin"):
        if meeting.rank == lead:
            _check_proofs(joint)
            there = commit.committed(storage, name) if storage.kind(name) == "folder" else None
            if there is None or there.save_id != joint.save_id:
                there = commit.check_target(storage, name, if_exists=options.if_exists)
            said = {"id": there.save_id} if there is not None else {}
            if there is None:
                begun = commit.begin(storage, name, save_id=None)  # an id of its own: a merge that was cut off may lie there
                said = {"id": begun.save_id, "folder": begun.folder}
            meeting.put("begun", json.dumps(said).encode())
    told: dict[str, str] = json.loads(meeting.get("begun"))
    return told


def _check_proofs(joint: Joint) -> None:
    """IntegrityError where a folder has no digests to prove its bytes by."""
    for one in joint.manifests:
        if one.digests is None or one.digests.algorithm != digests.ALGORITHM or one.digests.block_nbytes != digests.BLOCK_NBYTES:
            raise IntegrityError(f"save {one.save_id}: a folder has no digests that this version knows; needed those of every block")


def _who_sees(
    meeting: Meeting, storage: LocalStorage, construction: commit.Construction, machines: Sequence[int], *, lead: int
) -> list[int]:
    """Collective. On the lead: the machines all of whose ranks see the folder under construction."""
    with meeting.phase("see"):
        try:
            commit.see(storage, construction)
            sees = b"1"
        except StorageError:
            if machines[meeting.rank] == machines[lead]:
                raise
            sees = b"0"
        told = meeting.collect("sees", sees, at=lead, ranks=range(meeting.world))
    blind = {machines[rank] for rank, one in enumerate(told) if one == b"0"}
    return sorted(set(machines) - blind)


@dataclass(frozen=True, slots=True)
class _Work:
    """A merge that all ranks have begun."""

    meeting: Meeting
    joint: Joint
    storage: LocalStorage
    construction: commit.Construction
    options: MergeOptions
    lead: int
    machines: tuple[int, ...]
    files: Sequence[MergedFile]
    sizes: Mapping[Key, int]

    def shares(self, rank: int) -> Iterator[tuple[MergedFile, Key, int, int]]:
        """What a rank writes: bytes [start, stop) of tensors."""
        peers = [other for other, machine in enumerate(self.machines) if machine == self.machines[rank]]
        place = {"machine": self.machines[rank], "index": peers.index(rank), "count": len(peers)}
        for span in share(self.files, self.sizes, block_nbytes=digests.BLOCK_NBYTES, **place):
            yield self.files[span.file], span.key, span.start, span.stop

    def head(self, file: MergedFile) -> tuple[bytes, dict[str, Entry]]:
        specs = self.joint.specs(file.part, [name for _, name in file.keys])
        return header.encode_header(header.file_order((n, spec.dtype, unpacked(spec.dtype, spec.shape)) for n, spec in specs.items()))


def _planned(meeting: Meeting) -> list[MergedFile]:
    told = json.loads(zlib.decompress(meeting.get("files")))
    return [MergedFile(part, number, count, tuple((p, n) for p, n in keys), machine) for part, number, count, keys, machine in told]


def _name(file: MergedFile) -> str:
    return names.file_name(file.part, number=file.number, count=file.count)


def _build(work: _Work, beat: Beat) -> int:
    """Collective. Fills the folder and publishes it; returns the bytes that this rank wrote."""
    meeting, storage, construction, fsync = work.meeting, work.storage, work.construction, work.options.fsync

    def beaten(nbytes: int) -> None:
        meeting.beat()
        beat(nbytes)

    output = Output(storage, construction.folder, fsync=fsync, beat=beaten)
    with meeting.phase("room"):
        if meeting.rank == work.lead:
            commit.check_room(storage, construction, sum(work.sizes.values()))
    with meeting.phase("write"):
        crcs = _write_tensors(work, output)
        told = meeting.collect("digests", b"." + struct.pack(f"<{len(crcs)}Q", *crcs), at=work.lead, ranks=range(meeting.world))
    with meeting.phase("complete"):
        if meeting.rank == work.lead:
            _complete(work, output, told)
    with meeting.phase("publish"):
        if meeting.rank == work.lead:
            aside = commit.publish(storage, construction, fsync=fsync, if_exists=work.options.if_exists)
            if aside is not None:
                commit.discard(storage, aside, fsync=fsync)
    return output.nbytes


def _write_tensors(work: _Work, output: Output) -> list[int]:
    """This rank's share; the digests of its blocks, in the order of the share."""
    meeting, machine = work.meeting, work.machines[work.meeting.rank]
    heads = {_name(file): work.head(file) for file in work.files if file.machine == machine}
    if meeting.rank in first_ranks(work.machines):
        for name, (head, _) in heads.items():
            output.write_at(name, 0, [memoryview(head)])
    memory, crcs = memoryview(bytearray(_CHUNK_NBYTES)), []
    catalog = work.joint.catalog([key for file in work.files for key in file.keys])
    for file, key, start, stop in work.shares(meeting.rank):
        name, at = _name(file), catalog.locations[key]
        first = heads[name][1][key[1]].start
        for low in range(start, stop, _CHUNK_NBYTES):
            held = memory[: min(_CHUNK_NBYTES, stop - low)]
            catalog.storage.read_at(at.file, at.start + low, held)
            crcs += [piece.crc for piece in digests.pieces(held, start=low)]
            output.write_at(name, first + low, [held])
    output.flush()
    return crcs


def _complete(work: _Work, output: Output, told: Sequence[bytes]) -> None:
    """The lead only: what is not tensors, the proof, and the manifest."""
    joint, storage, folder, fsync = work.joint, work.storage, work.construction.folder, work.options.fsync
    blocks = _blocks(work, told)
    weight_maps: dict[str, dict[str, str]] = {}
    records: dict[str, dict[str, FileRecord]] = {}
    for file in work.files:
        head, entries = work.head(file)
        nbytes = max((entry.stop for entry in entries.values()), default=len(head))
        records.setdefault(file.part, {})[_name(file)] = FileRecord(nbytes=nbytes, header_crc=f"{digests.crc(head):016x}")
        weight_maps.setdefault(file.part, {}).update({name: _name(file) for _, name in file.keys})
    manifest = reseal(joint, storage, folder, output, weight_maps=weight_maps, records=records, blocks=blocks, fsync=fsync)
    for name, record in ((name, record) for files in records.values() for name, record in files.items()):
        size = storage.size(f"{folder}/{name}")
        if size != record.nbytes:
            raise StorageError(f"{storage.path(folder)}/{name}: has {size} bytes as this rank sees it; {record.nbytes} were written")
    storage.remove_file(f"{folder}/{commit.PROBE}")
    write_manifest(storage, folder, manifest, fsync=fsync)


def _blocks(work: _Work, told: Sequence[bytes]) -> dict[Key, array[int]]:
    """The digests of every block of every tensor, as the ranks tell them of their shares. IntegrityError for one too many or too few."""
    sizes = work.sizes
    found = {key: array("Q") for key in sorted(sizes)}
    spans = []
    for rank, packed in enumerate(told):
        crcs, position = array("Q", packed[1:]), 0
        for _, key, start, stop in work.shares(rank):
            count = digests.block_count(stop - start)
            spans.append((key, start, crcs[position : position + count]))
            position += count
        if position != len(crcs):
            raise IntegrityError(f"rank {rank} tells {len(crcs)} digests; needed {position}; this is a bug")
    for key, start, crcs in sorted(spans, key=lambda span: span[:2]):
        if start != len(found[key]) * digests.BLOCK_NBYTES:
            raise IntegrityError(f"{key[0]}:{key[1]}: is written up to block {len(found[key])}, then from byte {start}; this is a bug")
        found[key].extend(crcs)
    for key, crcs in found.items():
        if len(crcs) != digests.block_count(sizes[key]):
            raise IntegrityError(f"{key[0]}:{key[1]}: has {len(crcs)} digests; needed {digests.block_count(sizes[key])}; this is a bug")
    return found

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
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clean_up
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.nodes.discover import gather, open_folders
from unified_ckpt.engine.nodes.source import Joint
from unified_ckpt.engine.rewrite.metadata import reseal
from unified_ckpt.engine.rewrite.tensors import (
    Beat,
    Output,
    Rewrite,
    Written,
    check_room,
    check_sizes,
    plan_files,
    sizes_of,
    who_sees,
    write_tensors,
)
from unified_ckpt.errors import IntegrityError, NotFoundError
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage


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
    `notes`: damage that was read around, and what was left out, in sentences. `other`: what stays is another save."""

    save_id: str
    nbytes: int
    notes: tuple[str, ...]
    other: bool = False


def merge_paths(
    comm: Comm,
    paths: Sequence[str],
    storage: LocalStorage,
    name: str,
    options: MergeOptions,
    *,
    machines: Sequence[int],
    beat: Beat,
) -> Merged:
    """Collective. `merge` of the folders `paths` of each machine; a machine may have none. Nobody who asks removes them meanwhile."""
    what = f"merge of {', '.join(paths)}"
    with ExitStack() as owned:
        opened = open_folders(paths, owned, hold=comm.rank in first_ranks(machines))
        found = gather(
            comm, what, paths, opened, machines, owned, timeout_seconds=options.timeout_seconds
        )
        if not isinstance(found, Joint):
            raise NotFoundError(
                f"{what}: holds no checkpoint with a manifest; needed the folders of one save"
            )
        return merge(comm, found, storage, name, options, machines=machines, beat=beat)


def merge(
    comm: Comm,
    joint: Joint,
    storage: LocalStorage,
    name: str,
    options: MergeOptions,
    *,
    machines: Sequence[int],
    beat: Beat,
) -> Merged:
    """Collective. Writes the save to `name` under the storage's root, in a few MiB of memory a rank, or raises one error on all ranks.

    The same save id, step, extra state and words, with whole tensors only. `machines`: the machine of each rank; those that do not see
    the root write nothing. IncompleteError or IntegrityError where no undamaged copy is left, StorageError where the target cannot be
    written. What was at `name` is as it was after any error, and nothing is left beside it.
    """
    meeting = comm.meet(
        f"merge to {storage.path(name)}", same=False, timeout_seconds=options.timeout_seconds
    )
    with storage, meeting.telling():
        lead, held = _survey(meeting, joint, machines)
        target = commit.Target(
            name, options.if_exists, joint.parts, step_name=True
        )  # only a manager merges
        construction, told = commit.begin_together(
            meeting, storage, target, partial(_stays, joint, storage, target), lead=lead
        )
        if construction is None:
            return Merged(told["id"], 0, (), other=told["id"] != joint.save_id)
        try:
            writers, sizes = (
                who_sees(meeting, storage, construction, machines, lead=lead),
                sizes_of(joint),
            )
            files = plan_files(
                meeting,
                sizes,
                held,
                writers=writers,
                max_file_bytes=options.max_file_bytes,
                lead=lead,
            )
            work = Rewrite(
                meeting, joint, storage, construction, lead, tuple(machines), files, sizes
            )
            nbytes = _build(work, joint, target, options, beat)
        except BaseException as error:
            commit.abandon_together(meeting, storage, construction, error, lead=lead)
            raise
    return Merged(joint.save_id, nbytes, tuple(joint.storage.ledger.damage))


def _survey(
    meeting: Meeting, joint: Joint, machines: Sequence[int]
) -> tuple[int, dict[Key, dict[int, int]]]:
    """Collective. The rank that leads, the first of the machine that has the first folder; on it what lies on which machine."""
    keys, firsts = sorted(sizes_of(joint)), first_ranks(machines)
    with meeting.phase("survey"):
        if meeting.rank in firsts:
            numbers = [
                one.manifest.island.number if one.manifest and one.manifest.island else 0
                for one in joint.here
            ]
            meeting.put(f"first/{meeting.rank}", str(min(numbers, default=-1)).encode())
            own = [(i, nbytes) for i, key in enumerate(keys) if (nbytes := joint.nbytes_here(*key))]
            meeting.put(f"here/{meeting.rank}", zlib.compress(json.dumps(own).encode(), 1))
        if meeting.rank == 0:
            first = {rank: int(meeting.get(f"first/{rank}")) for rank in firsts}
            meeting.put(
                "lead", str(min((n, rank) for rank, n in first.items() if n >= 0)[1]).encode()
            )
    lead = int(meeting.get("lead"))
    if meeting.rank != lead:
        return lead, {}
    held: dict[Key, dict[int, int]] = {}
    for rank in firsts:
        for i, nbytes in json.loads(zlib.decompress(meeting.get(f"here/{rank}"))):
            held.setdefault(keys[i], {})[machines[rank]] = nbytes
    return lead, held


def _stays(joint: Joint, storage: LocalStorage, target: commit.Target) -> Manifest | None:
    """The lead only: the checkpoint that is there and stays, this save's own too."""
    _check_proofs(joint)
    return commit.check_copy_target(storage, target, save_id=joint.save_id)


def _check_proofs(joint: Joint) -> None:
    """IntegrityError where a folder has no digests to prove its bytes by."""
    for one in joint.manifests:
        if one.digests is None or not one.digests.is_known:
            raise IntegrityError(
                f"save {one.save_id}: a folder has no digests that this version knows; needed those of every block"
            )


def _build(
    work: Rewrite, joint: Joint, target: commit.Target, options: MergeOptions, beat: Beat
) -> int:
    """Collective. Fills the folder and publishes it; returns the bytes that this rank wrote."""
    meeting, storage, construction, fsync = (
        work.meeting,
        work.storage,
        work.construction,
        options.fsync,
    )

    def beaten(nbytes: int) -> None:
        meeting.beat()
        beat(nbytes)

    output = Output(storage, construction.folder, fsync=fsync, beat=beaten)
    with meeting.phase("room"):
        if meeting.rank == work.lead:
            check_room(work)
    with meeting.phase("write"):
        written = write_tensors(work, output)
    with meeting.phase("complete"):
        if written is not None:
            _complete(work, joint, output, written, fsync=fsync)
    with meeting.phase("publish"):
        if meeting.rank == work.lead:
            published = commit.publish(storage, construction, target, fsync=fsync)
            clean_up(storage, published, fsync=fsync)
    return output.nbytes


def _complete(
    work: Rewrite, joint: Joint, output: Output, written: Written, *, fsync: bool
) -> None:
    """The lead only: what is not tensors, the proof, and the manifest."""
    storage, folder = work.storage, work.construction.folder
    manifest = reseal(joint, storage, folder, output, written, fsync=fsync)
    check_sizes(storage, folder, written.records)
    storage.remove_file(f"{folder}/{commit.PROBE}")
    write_manifest(storage, folder, manifest, fsync=fsync)

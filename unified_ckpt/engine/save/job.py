"""From a job to a checkpoint: begin a folder, write, make durable, publish; or leave everything as it was.

A `Job` is a save that all ranks have come to, planned and checked. Its bytes come from the tensors, or from a snapshot of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.nodes.node_groups import FRAGMENTS, Island
from unified_ckpt.engine.folder import backup, commit
from unified_ckpt.engine.folder import extra_state as folder_extra_state
from unified_ckpt.engine.folder.manifest import write_manifest
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save import extra_state, finalize
from unified_ckpt.engine.save.node_local import Gate, Rules, Totals, telling
from unified_ckpt.engine.save.node_replicas import Orders, take_copies
from unified_ckpt.engine.save.probe_topology import Land
from unified_ckpt.engine.save.request import SaveRequest, StoredParts
from unified_ckpt.engine.save.snapshot import Buffers, Snapshot
from unified_ckpt.engine.save.write import sync_parts, write_parts
from unified_ckpt.errors import CheckpointError, RankError, StorageError
from unified_ckpt.format import codec, names
from unified_ckpt.format.manifest import DigestFile, IslandRecord, Manifest, RankExtraFile
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.exchange.shared_files import Files, SharedFiles
from unified_ckpt.runtime.exchange.tcp_exchange import Post
from unified_ckpt.runtime.exchange.windows import Windows
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import Part

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. `nbytes`: tensor bytes of the folder at `path`; `seconds`: on this rank, from call to commit. `existed`: nothing was
    saved, for the checkpoint that was there stays, see `SaveOptions.if_exists`: `step` and `id` are of that one."""

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float
    existed: bool = False


@dataclass(slots=True)
class Kept:
    """What one save leaves for the next of the same ranks. `slowest`: in words, on rank 0."""

    windows: Windows = field(default_factory=Windows)
    load_windows: Windows = field(
        default_factory=Windows
    )  # apart: a load is of all ranks, a save may be of an island's
    buffers: Buffers = field(default_factory=Buffers)
    plan: SavePlan | None = None
    parts: StoredParts = field(default_factory=StoredParts)  # of the plan
    land: Land | None = None
    rules: Rules | None = None  # of an island
    totals: Totals = field(default_factory=dict)  # of all islands
    orders: Orders | None = None  # of an island
    slowest: str = ""

    def move_to(self, land: Land | None) -> None:
        """Before a save: what was kept for other ranks means nothing to these, who also count their exchanges from another start."""
        if self.land is not land:
            self.windows.close()
            self.windows, self.land, self.plan, self.rules, self.orders = (
                Windows(),
                land,
                None,
                None,
                None,
            )

    def close(self) -> None:
        self.windows.close()
        self.load_windows.close()
        self.buffers.close()


@dataclass(frozen=True, slots=True)
class Job:
    """A save that all ranks have come to, planned and checked: what is left is to write it. `held`: by group of the plan. `told`: what is
    not tensors, for all ranks that hold the same ones; None where it is still to be put in words. `gate`: where the ranks of this save
    are one island of several. `post`: where they are on several machines."""

    meeting: Meeting
    storage: LocalStorage
    name: str
    request: SaveRequest
    plan: SavePlan
    held: Sequence[Sequence[Part]]
    words: extra_state.Words
    started: float
    told: bytes | None = None
    gate: Gate | None = None
    post: Post | None = None
    present: frozenset[str] = frozenset()  # of `commit.check_way`, on the rank that publishes

    def target(self) -> commit.Target:
        """The name of the checkpoint, and what may be in its way, on the rank that publishes it."""
        return commit.Target(
            self.name, self.request.options.if_exists, self.names(), self.request.step_name
        )

    def names(self) -> set[str]:
        """The parts of this save, on the rank that knows them all."""
        return {
            part.removesuffix(FRAGMENTS)
            for part in (*self.request.asked(), *(self.plan.book.records if self.plan.book else ()))
        }

    def beat(self) -> None:
        """A sign of life, also for those of other islands, who wait at the gate."""
        self.meeting.beat()
        if self.gate is not None:
            self.gate.meeting.beat()

    def files(self, construction: commit.Construction) -> Files:
        """The files under construction, as this rank writes to them."""
        if self.post is None:
            return Files(self.storage, construction.folder)
        return SharedFiles(
            self.storage, construction.folder, post=self.post, save=construction.save_id
        )


def finish(job: Job, kept: Kept, snapshot: Snapshot | None) -> SaveReport:
    """Collective. From a job to a checkpoint; the bytes come from the snapshot where there is one."""
    with telling(job.gate):
        return _finish(job, kept, snapshot)


def _finish(job: Job, kept: Kept, snapshot: Snapshot | None) -> SaveReport:
    meeting, storage, request = job.meeting, job.storage, job.request
    with storage:
        construction, stays = _begin(job)
        if construction is None:
            return SaveReport(
                storage.path(job.name),
                stays["step"],
                stays["id"],
                0,
                time.monotonic() - job.started,
                existed=True,
            )
        try:
            _build(job, construction, kept, snapshot)
        except BaseException as error:
            _abandon(job, construction, error)
            raise
        finally:
            if job.post is not None:
                job.post.shut(construction.save_id)
    seconds, nbytes = time.monotonic() - job.started, job.plan.nbytes
    if meeting.rank == 0:
        path, gb = storage.path(job.name), nbytes / 1e9
        _LOG.info(
            "saved %s: %.3f GB in %.2f s, %.2f GB/s; %s",
            path,
            gb,
            seconds,
            gb / max(seconds, 1e-9),
            kept.slowest,
        )
    return SaveReport(storage.path(job.name), request.step, construction.save_id, nbytes, seconds)


def _begin(job: Job) -> tuple[commit.Construction | None, dict[str, Any]]:
    """Collective. The folder under construction, seen by every rank; or what is said of the checkpoint that stays."""
    meeting, storage, name = job.meeting, job.storage, job.name
    said: dict[str, Any] = {"name": name}
    construction = None
    try:
        with meeting.phase("begin"):
            if meeting.rank == 0:
                stays = _stays(job)
                if stays is None:
                    construction = commit.begin(
                        storage,
                        name,
                        save_id=job.gate.save_id if job.gate else None,
                        present=job.present,
                    )
                    said |= {"folder": construction.folder, "id": construction.save_id}
                else:
                    said |= {"id": stays.save_id, "step": stays.step}
                meeting.put("begun", json.dumps(said).encode())
        with meeting.phase("see"):
            told = json.loads(meeting.get("begun", of=0))
            if "folder" in told:
                construction = construction or commit.Construction(
                    told["name"], told["folder"], told["id"]
                )
            if told["name"] != name:
                raise RankError(
                    f"rank {meeting.rank} saves with name {name!r}, rank 0 with {told['name']!r}; needed the same"
                )
            if construction is not None:
                commit.see(storage, construction)
                if job.post is not None:
                    job.post.open(construction.save_id, storage, construction.folder)
                if job.plan.book is not None:
                    commit.check_room(
                        storage,
                        construction,
                        job.plan.book.nbytes,
                        text_nbytes=job.plan.book.index_nbytes,
                    )
    except BaseException as error:
        _abandon(job, construction, error)
        raise
    return construction, told


def _stays(job: Job) -> Manifest | None:
    """Rank 0 of each island: the checkpoint that is there and stays. One that is not on every island is none."""
    target = job.target()
    if job.gate is None:
        return commit.check_target(job.storage, target)
    lenient = target if target.if_exists == "keep_complete" else replace(target, if_exists="keep")
    found = commit.check_target(job.storage, lenient)
    ids = job.gate.share("there", found.save_id.encode() if found else b"")
    if found is not None and set(ids) == {found.save_id.encode()}:
        return commit.check_target(job.storage, target)
    if found is not None and target.if_exists == "error":
        what = f"{job.storage.path(job.name)}: holds a folder of save {found.save_id}, which is not on every machine"
        raise StorageError(f'{what}; needed a free name, or if_exists="replace"')
    return None


def _build(
    job: Job, construction: commit.Construction, kept: Kept, snapshot: Snapshot | None
) -> None:
    """Collective. Fills the folder and publishes it."""
    meeting, storage, plan, request, folder = (
        job.meeting,
        job.storage,
        job.plan,
        job.request,
        construction.folder,
    )
    files = job.files(construction)
    with meeting.phase("write"):
        found = write_parts(
            meeting,
            plan,
            job.held,
            files,
            kept.windows,
            snapshot,
            post=job.post,
            fsync=request.options.fsync,
            beat=job.beat,
        )
        digest_file = finalize.write_digests(meeting, files, plan.groups, found, plan.book)
        rank_extra = extra_state.write_rank_extra(meeting, files, job.words.rank_extra)
        told = job.told if job.told is not None else tell(job)
        speakers = (
            plan.book.speakers if plan.book is not None else (meeting.rank,) if plan.speaks else ()
        )
        said = meeting.collect("told", told, at=0, ranks=speakers)
        files.flush()
    with meeting.phase("sync"):
        if request.options.fsync:
            sync_parts(meeting, storage, folder, plan, shared=job.post is not None, beat=job.beat)
        times = meeting.collect(
            "seconds",
            f"{time.monotonic() - job.started:.3f}".encode(),
            at=0,
            ranks=range(meeting.world),
        )
        if times:
            slowest = max(range(meeting.world), key=lambda rank: float(times[rank]))
            kept.slowest = f"rank {slowest} was slowest: {float(times[slowest]):.2f} s"
    with meeting.phase("complete"):
        if plan.book is not None:
            _complete(job, construction, kept, said, digest_file, rank_extra, since=job.started)
    if job.gate is None:
        with meeting.phase("publish"):
            if plan.book is not None:
                published = _publish(job, construction)
                backup.clean_up(storage, published, fsync=request.options.fsync)
    else:
        if kept.orders is not None:
            take_copies(
                job.gate, meeting, storage, construction, kept.orders, fsync=request.options.fsync
            )
        _publish_together(job, job.gate, construction)


def _publish_together(job: Job, gate: Gate, construction: commit.Construction) -> None:
    """Collective over all islands: each gives its folder the name once all have theirs complete, and takes it back where one cannot."""
    published: backup.Published | None = None
    try:
        gate.wait("written")
        with job.meeting.phase("publish"):
            if job.plan.book is not None:
                published = _publish(job, construction)
        gate.wait("committed")
    except BaseException as error:
        if published is not None and isinstance(error, CheckpointError):
            backup.withdraw(job.storage, published)
        raise
    with gate.together("cleaned"):
        if published is not None:
            backup.clean_up(job.storage, published, fsync=job.request.options.fsync)


def tell(job: Job) -> bytes:
    """What this rank says of what is not tensors, for all ranks that hold the same ones."""
    request = job.request
    return (
        extra_state.tell(request.state, with_optimizer=request.stores(OPTIMIZER))
        if job.plan.speaks
        else b"."
    )


def _record(island: Island | None, kept: Kept) -> IslandRecord | None:
    if island is None:
        return None
    copies = list(kept.orders.files) if kept.orders is not None else []
    ranks, world, totals = list(island.ranks), island.world, dict(kept.totals)
    return IslandRecord(
        number=island.number,
        count=island.count,
        ranks=ranks,
        world_size=world,
        totals=totals,
        copies=copies,
    )


def _complete(
    job: Job,
    construction: commit.Construction,
    kept: Kept,
    said: Sequence[bytes],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    *,
    since: float,
) -> None:
    """Rank 0 only: what the caller attaches, the small files, the manifest: all that a checkpoint needs but its name."""
    storage, request, plan, folder, fsync = (
        job.storage,
        job.request,
        job.plan,
        construction.folder,
        job.request.options.fsync,
    )
    if plan.book is None:
        raise AssertionError("rank 0 has a book")
    if job.gate is not None:  # each island's folder says what is said of the whole
        said = [
            one
            for told in job.gate.share("told", codec.pack(list(said), "told"))
            for one in codec.unpack(told, "told")
        ]
    together = extra_state.put_together(said)
    extra = folder_extra_state.write_extra(storage, folder, job.words.extra, together)
    before = {name: storage.stamp(f"{folder}/{name}") for name in storage.entries(folder)}
    if request.attach is not None:
        request.attach(storage.path(folder))
        ours = {*before, names.MANIFEST, *(names.index_name(part) for part in plan.book.records)}
        for name in sorted(ours):
            found = storage.stamp(f"{folder}/{name}")
            if found != before.get(name):
                raise StorageError(
                    f"{storage.path(folder)}: `attach` changed {name}, which is the checkpoint's own; needed another name"
                )
    indexes = finalize.write_indexes(storage, folder, plan.book)
    if fsync:
        for name in sorted(
            set(storage.entries(folder))
            - {f for records in plan.book.records.values() for f in records}
            - {commit.PROBE}
        ):
            storage.sync_tree(f"{folder}/{name}")
    storage.remove_file(f"{folder}/{commit.PROBE}")
    manifest = finalize.make_manifest(
        save_id=construction.save_id,
        step=request.step,
        seconds=time.monotonic() - since,
        metrics=request.metrics,
        world_size=job.meeting.world,
        mesh=request.mesh,
        asked=sorted({*request.asked(), *plan.book.records}),
        omitted=request.agreed.omitted,
        book=plan.book,
        indexes=indexes,
        told=together,
        extra=extra,
        objects=job.words.objects,
        digest_file=digest_file,
        rank_extra=rank_extra,
        island=_record(job.gate.island if job.gate else None, kept),
    )
    write_manifest(storage, folder, manifest, fsync=fsync)


def _publish(job: Job, construction: commit.Construction) -> backup.Published:
    """Rank 0 only: the rename."""
    target = job.target()
    if job.gate is not None and target.if_exists in ("keep", "keep_complete"):
        target = replace(
            target, if_exists="replace"
        )  # what is there is not whole on every island, as they have agreed
    return commit.publish(job.storage, construction, target, fsync=job.request.options.fsync)


def _abandon(job: Job, construction: commit.Construction | None, error: BaseException) -> None:
    """Rank 0 clears away what a failed save left, once nobody writes to it. None where this rank knows of nothing yet."""
    if job.post is not None and construction is not None:
        job.post.hang_up()
        job.post.shut(construction.save_id)
    commit.abandon_together(job.meeting, job.storage, construction, error, lead=0)

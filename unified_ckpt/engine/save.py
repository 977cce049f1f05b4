"""A save, from state to checkpoint, as one script: arrive, plan, compare replicas, write, make durable, publish."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.layout import Layout
from unified_ckpt.engine import commit, extras, seal
from unified_ckpt.engine.plan import SavePlan, fingerprint, make_plan
from unified_ckpt.engine.replicas import check_replicas
from unified_ckpt.engine.write import Digested, Writer, write_extents, write_headers, write_tiles
from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.comm import Comm, Meeting
from unified_ckpt.runtime.probe import check_one_machine
from unified_ckpt.runtime.staging import Wait, giving_up
from unified_ckpt.runtime.state import State
from unified_ckpt.runtime.storage import LocalStorage
from unified_ckpt.runtime.tensors import Part
from unified_ckpt.runtime.windows import Windows

_LOG = logging.getLogger("unified_ckpt")
_STOP_SECONDS = 10.0  # for the other ranks to stop writing before a failed save is cleared away
_MAX_GROUPS = 1 << 20


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. `nbytes`: tensor bytes of the whole checkpoint; `seconds`: on this rank, from call to commit."""

    path: str
    step: int | None
    id: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a rank wants saved. `matched`: the Layout rules that applied here; `mesh`: for people."""

    state: State
    extra: Any
    rank_extra: Any
    layout: Layout | None
    matched: set[str]
    mesh: Mapping[str, object]
    step: int | None
    metrics: Mapping[str, float]
    attach: Callable[[str], object] | None
    options: SaveOptions

    def parts(self) -> list[Part]:
        """The chosen parts, in the order of tables."""
        chosen = self.options.parts
        kept = [p for p in self.state.parts if chosen is None or p.row.part in chosen]
        return sorted(kept, key=lambda part: part.row.key)

    def asked(self) -> list[str]:
        chosen = self.options.parts
        return sorted(name for name in self.state.asked if chosen is None or name in chosen)


@dataclass(slots=True)
class Kept:
    """What one save leaves for the next of the same ranks. `slowest`: in words, on rank 0."""

    windows: Windows
    plan: SavePlan | None = None
    slowest: str = ""


def save(
    comm: Comm, storage: LocalStorage, name: str, request: SaveRequest | Exception, kept: Kept, *, timeout_seconds: float
) -> SaveReport:
    """Collective. Writes the checkpoint `name` under the storage's root, or raises the same error on every rank.

    `request` may be the error that this rank met while it made one: every rank raises it then.
    """
    started = time.monotonic()
    mark, same = "", False
    if isinstance(request, SaveRequest):
        mark = fingerprint(request.parts(), rank=comm.rank, world=comm.world, max_file_bytes=request.options.max_file_bytes)
        same = kept.plan is not None and kept.plan.fingerprint == mark
    meeting = comm.meet(f"save to {storage.path(name)}", same=same, timeout_seconds=timeout_seconds)
    with storage:
        with meeting.phase("state"):
            if isinstance(request, Exception):
                raise request
            extras.check_extra(request.extra if comm.rank == 0 else None, request.rank_extra)
        construction, stays = _begin(meeting, storage, name, request.options)
        if construction is None:
            return SaveReport(storage.path(name), stays["step"], stays["id"], 0, time.monotonic() - started)
        try:
            nbytes = _build(meeting, storage, construction, request, kept, mark)
        except BaseException as error:
            _abandon(meeting, storage, construction, error)
            raise
    seconds = time.monotonic() - started
    if comm.rank == 0:
        speed = nbytes / 1e9 / max(seconds, 1e-9)
        _LOG.info("saved %s: %.3f GB in %.2f s, %.2f GB/s; %s", storage.path(name), nbytes / 1e9, seconds, speed, kept.slowest)
    return SaveReport(storage.path(name), request.step, construction.save_id, nbytes, seconds)


def _begin(meeting: Meeting, storage: LocalStorage, name: str, options: SaveOptions) -> tuple[commit.Construction | None, dict[str, Any]]:
    """Collective. The folder under construction, seen by every rank; or what is said of the checkpoint that stays."""
    said: dict[str, Any] = {"options": options.model_dump(mode="json"), "name": name}
    with meeting.phase("begin"):
        if meeting.rank == 0:
            stays = commit.check_target(storage, name, if_exists=options.if_exists)
            if stays is None:
                begun = commit.begin(storage, name)
                said |= {"folder": begun.folder, "id": begun.save_id}
            else:
                said |= {"id": stays.save_id, "step": stays.step}
            meeting.put("begun", json.dumps(said).encode())
    told = json.loads(meeting.get("begun"))
    construction = commit.Construction(told["name"], told["folder"], told["id"]) if "folder" in told else None
    try:
        with meeting.phase("see"):
            for key in ("name", "options"):
                if told[key] != json.loads(json.dumps(said[key])):
                    raise RankError(f"rank {meeting.rank} saves with {key} {said[key]!r}, rank 0 with {told[key]!r}; needed the same")
            if construction is not None:
                commit.see(storage, construction)
    except BaseException as error:
        if construction is not None:
            _abandon(meeting, storage, construction, error)
        raise
    return construction, told


def _build(meeting: Meeting, storage: LocalStorage, construction: commit.Construction, request: SaveRequest, kept: Kept, mark: str) -> int:
    """Collective. Fills the folder and publishes it; returns the tensor bytes of the checkpoint."""
    options, folder, parts, started = request.options, construction.folder, request.parts(), time.monotonic()
    if not meeting.all_same or kept.plan is None:
        kept.plan = None
        with meeting.phase("plan"):
            check_one_machine(meeting)
            bound = options.max_file_bytes
            kept.plan = make_plan(meeting, parts, layout=request.layout, matched=request.matched, max_file_bytes=bound, mark=mark)
    plan = kept.plan
    by_key = {part.row.key: part for part in parts}
    held = [[by_key[row.key] for row in group.rows] for group in plan.groups]
    with meeting.phase("check"):
        if options.check_replicas == "always" or (options.check_replicas == "first" and not plan.replicas_checked):
            check_replicas(meeting, plan.groups, held)
        if plan.book is not None:
            commit.check_room(storage, construction, plan.book.nbytes)
    plan.replicas_checked = options.check_replicas != "never" or plan.replicas_checked
    with meeting.phase("write"):
        found = _write_parts(meeting, storage, folder, plan, held, kept.windows, durable=options.fsync)
        digest_file = seal.write_digests(meeting, storage, folder, plan.groups, found, plan.book)
        rank_extra = extras.write_rank_extra(meeting, storage, folder, request.rank_extra)
        speakers = plan.book.speakers if plan.book is not None else (meeting.rank,) if plan.speaks else ()
        said = meeting.collect("told", extras.tell(request.state) if plan.speaks else b"", at=0, ranks=speakers)
    with meeting.phase("sync"):
        if options.fsync:
            _sync_parts(storage, folder, plan, rank=meeting.rank)
        times = meeting.collect("seconds", f"{time.monotonic() - started:.3f}".encode(), at=0, ranks=range(meeting.world))
        if times:
            slowest = max(range(meeting.world), key=lambda rank: float(times[rank]))
            kept.slowest = f"rank {slowest} was slowest: {float(times[slowest]):.2f} s"
    with meeting.phase("publish"):
        if plan.book is not None:
            told = extras.put_together(said)
            manifest = seal.make_manifest(
                save_id=construction.save_id,
                step=request.step,
                seconds=time.monotonic() - started,
                metrics=request.metrics,
                world_size=meeting.world,
                mesh=request.mesh,
                asked=sorted({*request.asked(), *plan.book.records}),
                book=plan.book,
                told=told,
                extra=extras.write_extra(storage, folder, request.extra, told),
                digest_file=digest_file,
                rank_extra=rank_extra,
            )
            _publish(storage, construction, request, plan, manifest)
    return plan.nbytes


def _write_parts(
    meeting: Meeting,
    storage: LocalStorage,
    folder: str,
    plan: SavePlan,
    held: Sequence[Sequence[Part]],
    windows: Windows,
    *,
    durable: bool,
) -> list[Digested]:
    """What this rank writes of every group: first what others wait for."""
    opened = windows.ready(
        meeting,
        tile_nbytes=max((group.tile_nbytes for group in plan.groups if group.moves.mine), default=0),
        partners={rank for group in plan.groups for rank in group.moves.partners(meeting.rank)},
    )
    wait = Wait(timeout_seconds=meeting.timeout_seconds, windows=opened)
    writer = Writer(storage, folder, durable=durable, ranks=meeting.world)
    found: list[Digested] = []
    try:
        with giving_up(opened.get(meeting.rank)):
            for group, parts in zip(plan.groups, held, strict=True):
                number = meeting.number * _MAX_GROUPS + group.index + 1
                write_headers(group, writer, storage, folder, rank=meeting.rank)
                digested = write_tiles(group, parts, writer, opened, wait, rank=meeting.rank, exchange=number)
                found.append(digested + write_extents(group, parts, writer, rank=meeting.rank))
            writer.drain()
    finally:
        writer.close()
    return found


def _sync_parts(storage: LocalStorage, folder: str, plan: SavePlan, *, rank: int) -> None:
    """Each file is synced once, the work spread over its group."""
    for group in plan.groups:
        for i, file in enumerate(group.files):
            if group.holders[i % len(group.holders)] == rank:
                storage.sync(f"{folder}/{file.name}")


def _publish(storage: LocalStorage, construction: commit.Construction, request: SaveRequest, plan: SavePlan, manifest: Manifest) -> None:
    """Rank 0 only: what the caller attaches, the small files, the manifest, the rename."""
    folder, fsync = construction.folder, request.options.fsync
    if plan.book is None:
        raise AssertionError("rank 0 has a book")
    before = {name: storage.stamp(f"{folder}/{name}") for name in storage.entries(folder)}
    if request.attach is not None:
        request.attach(storage.path(folder))
        ours = {*before, names.MANIFEST, *(names.index_name(part) for part in plan.book.records)}
        for name in sorted(ours):
            found = storage.stamp(f"{folder}/{name}")
            if found != before.get(name):
                raise StorageError(f"{storage.path(folder)}: `attach` changed {name}, which is the checkpoint's own; needed another name")
    seal.write_indexes(storage, folder, plan.book)
    if fsync:
        for name in sorted(set(storage.entries(folder)) - {f for records in plan.book.records.values() for f in records} - {commit.PROBE}):
            storage.sync_tree(f"{folder}/{name}")
    storage.remove_file(f"{folder}/{commit.PROBE}")
    seal.write_manifest(storage, folder, manifest, fsync=fsync)
    commit.publish(storage, construction, fsync=fsync, if_exists=request.options.if_exists)


def _abandon(meeting: Meeting, storage: LocalStorage, construction: commit.Construction, error: BaseException) -> None:
    """Rank 0 clears away what a failed save left, once the others have stopped writing to it."""
    meeting.put(f"stopped/{meeting.rank}", b"1")
    if meeting.rank != 0:
        return
    if getattr(error, "agreed", False):
        meeting.wait([f"stopped/{rank}" for rank in range(meeting.world)], seconds=_STOP_SECONDS, heedless=True)
    commit.abandon(storage, construction)

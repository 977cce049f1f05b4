"""A load, from a source into state of any shape: arrive, match, prove that the bytes are there, plan, read, verify, install.

How a load could do harm: it writes into the target and then fails; it takes bytes that are not the ones that were saved; it leaves a
tensor as it was and says nothing. So all names, shapes, files and headers are checked on every rank before the first byte is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.load_plan import plan_reads
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.engine.load.differences import (
    Verdict,
    compare,
    is_resumed,
    raise_differences,
    warn_differences,
)
from unified_ckpt.engine.load.match import Differences, Match, match_all, unknown_parameters
from unified_ckpt.engine.load.optimizer_check import misfits
from unified_ckpt.engine.load.read import (
    Beating,
    Fetched,
    ReadGroup,
    Targets,
    read_extents,
    read_tiles,
)
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.share_reads import overlap, share_reads
from unified_ckpt.engine.load.tied_tensors import compare_tied
from unified_ckpt.engine.load.verify import saved_digests, verify_read
from unified_ckpt.engine.nodes.storage import JointStorage
from unified_ckpt.engine.plan.holders import announce, memberships, publish_by_machine
from unified_ckpt.engine.source.protocol import Catalog
from unified_ckpt.engine.source.stateful import look_up
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.shared_memory import Wait, giving_up
from unified_ckpt.runtime.exchange.windows import Windows, exchange_number
from unified_ckpt.runtime.gc_pause import paused
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.optimizer_target import match_groups

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. `missing`, `unexpected`: names as "part:fqn"; `wrong`: sentences on shapes and dtypes; all empty when
    strict, and skipped when not. `bytes_read`, `verified_bytes`: by this rank.

    `rank_extra`: this rank's, where the world has as many ranks as at the save, else None. `sources`: part -> the stored parts that
    fed it. `notes`: what else to know, in sentences. `kept`: paths of objects in `rank_extra` that are as they were, on some rank, for
    another number of ranks saved their state; `missing` has the paths of those for which the checkpoint has none. `unused`: parts ("ema")
    and states of objects ("extra:scheduler") that the checkpoint holds and no rank took; the same on every rank.
    """

    step: int | None
    extra: Any
    rank_extra: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    bytes_read: int
    verified_bytes: int
    sources: Mapping[str, tuple[str, ...]]
    seconds: float
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def load(
    comm: Comm,
    what: str,
    request: LoadRequest | Exception,
    windows: Windows,
    *,
    timeout_seconds: float,
    machines: Sequence[int] | None = None,
) -> LoadReport:
    """Collective. Fills the targets in place, or raises the same error on every rank before the first byte is written.

    `machines`: the machine of each rank, None where they are on one: ranks of one machine read for each other. `request` may be the
    error that this rank met while it made one. An IntegrityError in mid-load leaves the target unusable and says so.
    """
    started = time.monotonic()
    meeting = comm.meet(f"load of {what}", same=False, timeout_seconds=timeout_seconds)
    with meeting.telling():
        return _load(meeting, comm, what, request, windows, machines or [0] * comm.world, started)


def _load(
    meeting: Meeting,
    comm: Comm,
    what: str,
    request: LoadRequest | Exception,
    windows: Windows,
    machines: Sequence[int],
    started: float,
) -> LoadReport:
    with paused, meeting.phase("target"):
        if isinstance(request, Exception):
            raise request
        matches, differences = match_all(
            request.state.parts,
            request.source,
            aliases=request.state.aliases,
            cast=request.options.cast,
            pads=request.said.pads,
            rank=comm.rank,
        )
        matches = _check_tied(request, matches, differences, rank=comm.rank)
        if request.optimizer is not None and request.optimizer.wanted:
            differences.missing += unknown_parameters(
                set(request.optimizer.names_held()),
                request.source,
                request.said,
                request.state.aliases,
            )
        catalog = request.source.catalog({(match.part, match.name) for match in matches})
        verify = (
            request.options.verify if catalog.ledger is None else "off"
        )  # else the storage compares
        if isinstance(catalog.storage, JointStorage) and request.options.verify == "off":
            catalog.storage.trust()
        proofs = saved_digests(request.source, matches) if request.options.verify != "off" else {}
        filling = look_up(
            request.extra,
            request.rank_extra,
            request.source,
            request.said,
            catalog.ledger,
            rank=comm.rank,
            world=comm.world,
        )
        differences.missing += filling.missing
        groups_options = _hyperparameters(request)
        matches = _check_optimizer(request, matches, differences)
    by_row = {match.target.row: match for match in matches}
    with paused, meeting.phase("match"):
        verdict = compare(meeting, request, differences, filling)
    raise_differences(request, verdict)
    if meeting.rank == 0:
        warn_differences(what, verdict)
    with paused, meeting.phase("plan"):
        groups = _plan(meeting, request, by_row, catalog, machines)
    try:
        with meeting.phase("read"):
            fetched = _read(meeting, groups, by_row, catalog, windows, verify=verify != "off")
            with paused:
                verified = verify_read(
                    meeting, groups, fetched, by_row, proofs, catalog, how=verify
                )
    except CheckpointError as error:
        spoilt = type(error)(
            f"{error}; the target holds a mix of old and new bytes and is unusable"
        )
        spoilt.agreed = error.agreed
        raise spoilt from error
    with paused, meeting.phase("install"):
        _install(request, groups_options)
        filling.fill(rank=comm.rank, world=comm.world)
    if catalog.ledger is not None:
        verified += catalog.ledger.verified_nbytes
    damage = catalog.ledger.damage if catalog.ledger is not None else ()
    return _report(
        request,
        comm,
        fetched,
        verified,
        damage,
        differences,
        verdict,
        started,
        what,
        filling.rank_extra,
    )


def _plan(
    meeting: Meeting,
    request: LoadRequest,
    by_row: Mapping[Row, Match],
    catalog: Catalog,
    machines: Sequence[int],
) -> list[ReadGroup]:
    """Collective. What this rank reads of each group of tensors that the same ranks of a machine want."""
    rows = list(by_row)
    with meeting.phase("census"):
        table, census = announce(meeting, rows)
        if census is not None:
            if max(machines) > 0:
                meeting.put("overlap", f"{overlap(census, machines):.3f}".encode())
            publish_by_machine(meeting, census, machines)
    if max(machines) > 0:
        share_reads(catalog, request.options.share_reads, float(meeting.get("overlap")))
    found = []
    members, _ = memberships(meeting, table, rows, of=f"{machines[meeting.rank]}/")
    for member in members:
        bound = request.options.max_over_read
        reads = plan_reads(
            member.rows, holders=member.holders, max_over_read=bound, rank=meeting.rank
        )
        locations = tuple(
            catalog.locations[by_row[row].part, by_row[row].name] for row in member.rows
        )
        found.append(ReadGroup(member.index, member.holders, member.rows, locations, reads))
    return found


def _read(
    meeting: Meeting,
    groups: Sequence[ReadGroup],
    by_row: Mapping[Row, Match],
    catalog: Catalog,
    windows: Windows,
    *,
    verify: bool,
) -> list[Fetched]:
    opened = windows.ready(
        meeting,
        tile_nbytes=max(
            (group.reads.tile_nbytes for group in groups if group.reads.moves.mine), default=0
        ),
        partners={rank for group in groups for rank in group.reads.moves.partners(meeting.rank)},
    )
    wait = Wait(
        timeout_seconds=meeting.timeout_seconds,
        windows=opened,
        heed=meeting.heed,
        signs=meeting.signs,
    )
    storage = Beating(catalog.storage, meeting.beat)
    fetched = []
    with giving_up(opened.get(meeting.rank)):
        for group in groups:
            targets = Targets(
                [by_row[row].target for row in group.rows], group.reads.moves, rank=meeting.rank
            )
            into = Fetched()
            number = exchange_number(meeting, group.index)
            read_tiles(
                group,
                targets,
                storage,
                opened,
                wait,
                verify=verify,
                rank=meeting.rank,
                exchange=number,
                into=into,
            )
            read_extents(
                group,
                targets,
                storage,
                verify=verify,
                rank=meeting.rank,
                ranks=meeting.world,
                into=into,
            )
            fetched.append(into)
    return fetched


def _check_tied(
    request: LoadRequest, matches: Sequence[Match], differences: Differences, *, rank: int
) -> list[Match]:
    """Adds to the differences what the target ties and the checkpoint has as two that differ; returns the other matches."""
    digests = request.options.verify != "off"
    differing, equal = compare_tied(
        matches, differences.tied, request.source, rank=rank, digests=digests
    )
    differences.wrong += differing.values()
    if equal:
        more = f", and {len(equal) - 3} more" if len(equal) > 3 else ""
        differences.notes.append(
            f"tied in the target, and stored as tensors that are equal: {', '.join(equal[:3])}{more}"
        )
    return [
        match
        for match in matches
        if (match.target.row.part.partition("@")[0], match.target.row.fqn) not in differing
    ]


def _check_optimizer(
    request: LoadRequest, matches: Sequence[Match], differences: Differences
) -> list[Match]:
    """Adds to the differences what the optimizer's next step could not go on from; returns the matches that are to be read.

    An optimizer's state of one parameter is loaded whole or left as it is.
    """
    target = request.optimizer
    if target is None:
        return list(matches)
    if target.wanted:
        current = request.options.hyperparameters == "current"
        differences.wrong += misfits(
            target, request.source, request.said, request.state.aliases, current=current
        )
    keys = {(match.target.row.part.partition("@")[0], match.target.row.fqn) for match in matches}
    for key in (part.row.key for part in request.state.parts if part.row.key not in keys):
        fqn = (
            key[1]
            if key[0] == MASTER
            else key[1].rpartition("/")[0]
            if key[0] == OPTIMIZER
            else None
        )
        target.left.update([fqn] if fqn is not None else [])
    return [
        one
        for one in matches
        if one.part != OPTIMIZER or one.target.row.fqn.rpartition("/")[0] not in target.left
    ]


def _hyperparameters(request: LoadRequest) -> Sequence[Mapping[str, Any]] | None:
    """The options for each param group of the target, None to leave them."""
    if (
        request.optimizer is None
        or not request.optimizer.wanted
        or request.options.hyperparameters == "current"
        or not request.said.groups
    ):
        return None
    return match_groups(request.optimizer.optimizers, request.optimizer.names, request.said.groups)


def _install(request: LoadRequest, groups: Sequence[Mapping[str, Any]] | None) -> None:
    """What is not tensors: optimizer state and hyperparameters, modules' own extra state."""
    if request.optimizer is not None:
        names = request.optimizer.names_held()
        request.optimizer.install(
            scalars={n: s for n, s in request.said.scalars.items() if n in names}, groups=groups
        )
    for name, module in request.state.model.extra_owners.items():
        if MODEL in request.state.asked and name in request.said.modules:
            module.set_extra_state(request.said.modules[name])


def _report(
    request: LoadRequest,
    comm: Comm,
    fetched: Sequence[Fetched],
    verified: int,
    damage: Sequence[str],
    own: Differences,
    verdict: Verdict,
    started: float,
    what: str,
    rank_extra: Any,
) -> LoadReport:
    saved_by = request.said.rank_extras
    notes = [
        *damage,
        *_kept_note(verdict.kept, saved_by, comm),
        *_padded_note(verdict.padded),
        *_unproved_note(request, fetched),
        *own.notes,
    ]
    if saved_by not in (0, comm.world):
        notes.append(
            f"rank_extra is not given back: {saved_by} ranks saved, {comm.world} load; `uc.open(path).rank_extra` has all of it"
        )
    nbytes, seconds = sum(f.nbytes for f in fetched), time.monotonic() - started
    if comm.rank == 0:
        speed = nbytes / 1e9 / max(seconds, 1e-9)
        _LOG.info(
            "loaded %s: rank 0 read %.3f GB in %.2f s, %.2f GB/s%s",
            what,
            nbytes / 1e9,
            seconds,
            speed,
            "; ".join(["", *notes]),
        )
        if verdict.unused:  # a chosen part, or weights alone, is what the caller wanted; else a scheduler may be forgotten
            level = logging.WARNING if is_resumed(request) else logging.INFO
            _LOG.log(
                level,
                "%s: nothing took %s, which the checkpoint holds",
                what,
                ", ".join(verdict.unused),
            )
    return LoadReport(
        step=request.said.step,
        extra=request.said.extra,
        rank_extra=rank_extra,
        missing=tuple(verdict.missing),
        unexpected=tuple(verdict.unexpected),
        wrong=tuple(verdict.wrong),
        bytes_read=nbytes,
        verified_bytes=verified,
        sources={part: tuple(sorted(parts)) for part, parts in sorted(own.sources.items())},
        seconds=seconds,
        notes=tuple(notes),
        kept=tuple(verdict.kept),
        unused=tuple(verdict.unused),
    )


def _unproved_note(request: LoadRequest, fetched: Sequence[Fetched]) -> list[str]:
    """Where there was nothing to compare. Formats of others have no digests: of those it is told where more than the default was asked."""
    how, ours = request.options.verify, request.source.format == "unified"
    if (
        request.said.has_digests
        or how == "off"
        or not (ours or how == "full")
        or not any(one.nbytes for one in fetched)
    ):
        return []
    return [
        f'verify="{how}": the checkpoint has no digests; sizes and headers are all that was compared'
    ]


def _padded_note(padded: Sequence[str]) -> list[str]:
    """The sentence on tensors of which the checkpoint has a part."""
    return (
        [f"padded, and the target keeps what the checkpoint lacks: {', '.join(padded)}"]
        if padded
        else []
    )


def _kept_note(kept: Sequence[str], saved_by: int, comm: Comm) -> list[str]:
    """The sentence on objects that keep what they are, which rank 0 also warns of."""
    if not kept:
        return []
    why = (
        f"saved by {saved_by} rank(s), loaded by {comm.world}"
        if saved_by != comm.world
        else "saved on a machine that is not here"
    )
    remedy = "a load_from_ranks of theirs, or by hand from `uc.open(path).rank_extra`; for a place in the data uc.ElasticSampler in `extra`"
    note = f"{', '.join(kept)}: left as they are: {why}; needed {remedy}"
    if comm.rank == 0:
        _LOG.warning("%s", note)
    return [note]

"""A load, from a source into state of any shape: arrive, match, prove that the bytes are there,
plan, read, verify, install.

How a load could do harm: it writes into the target and then fails; it takes bytes that are not the
ones that were saved; it leaves a tensor as it was and says nothing. So all names, shapes, files and
headers are checked on every rank before the first byte is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.load_plan import plan_reads
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.load.differences import (
    Mismatches,
    collect_mismatches,
    is_resumed,
    raise_mismatches,
    warn_mismatches,
)
from unified_ckpt.engine.load.match import (
    Differences,
    Match,
    match_targets,
    parameters_without_state,
)
from unified_ckpt.engine.load.optimizer_check import state_mismatches
from unified_ckpt.engine.load.read import (
    Destinations,
    HeartbeatReader,
    ReadGroup,
    ReadStats,
    read_extents,
    read_tiles,
)
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.share_reads import configure_shared_reads, read_redundancy
from unified_ckpt.engine.load.tied_tensors import compare_tied
from unified_ckpt.engine.load.verify import read_saved_digests, verify_read
from unified_ckpt.engine.nodes.storage import ShardedStorage
from unified_ckpt.engine.plan.holders import (
    gather_declarations,
    publish_groups_by_node,
    read_memberships,
)
from unified_ckpt.engine.source.protocol import Catalog
from unified_ckpt.engine.source.stateful import plan_restore
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_spread import mark, spread_of
from unified_ckpt.runtime.exchange.shared_memory import PeerWait, marking_failed
from unified_ckpt.runtime.exchange.windows import TileBuffers, exchange_number
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.optimizer_target import match_groups

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. `missing`, `unexpected`: names as "part:fqn"; `wrong`: sentences on shapes
    and dtypes; all empty when strict, and skipped when not. `bytes_read`, `verified_bytes`: by this
    rank.

    `rank_extra`: this rank's, where the world has as many ranks as at the save, else None.
    `sources`: part -> the stored parts that fed it. `notes`: what else to know, in sentences.
    `kept`: paths of objects in `rank_extra` that are as they were, on some rank, for another number
    of ranks saved their state; `missing` has the paths of those for which the checkpoint has none.
    `unused`: parts ("ema") and states of objects ("extra:scheduler") that the checkpoint holds and
    no rank took; the same on every rank.
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
    label: str,
    request: LoadRequest | Exception,
    windows: TileBuffers,
    *,
    timeout_seconds: float,
    nodes: Sequence[int] | None = None,
) -> LoadReport:
    """Collective. Fills the targets in place, or raises the same error on every rank before the
    first byte is written.

    `nodes`: the machine of each rank, None where they are on one: ranks of one machine read for
    each other. `request` may be the error that this rank met while it made one. An IntegrityError
    in mid-load leaves the target unusable and says so.
    """
    started = time.monotonic()
    collective = comm.begin_collective(
        f"load of {label}", cached=False, timeout_seconds=timeout_seconds
    )
    with collective.propagating_errors():
        return _load(collective, comm, label, request, windows, nodes or [0] * comm.world, started)


def _load(
    collective: Collective,
    comm: Comm,
    label: str,
    request: LoadRequest | Exception,
    windows: TileBuffers,
    nodes: Sequence[int],
    started: float,
) -> LoadReport:
    with gc_paused, collective.step("target"):
        if isinstance(request, Exception):
            raise request
        matches, differences = match_targets(
            request.state.tensors,
            request.source,
            aliases=request.state.aliases,
            cast=request.options.cast,
            pads=request.metadata.pads,
            rank=comm.rank,
        )
        matches = _check_tied(request, matches, differences, rank=comm.rank)
        if request.optimizer is not None and request.optimizer.loads_state:
            differences.missing += parameters_without_state(
                set(request.optimizer.param_names()),
                request.source,
                request.metadata,
                request.state.aliases,
            )
        catalog = request.source.catalog({(match.part, match.name) for match in matches})
        verify = (
            request.options.verify if catalog.verification_log is None else "off"
        )  # else the storage compares
        if isinstance(catalog.storage, ShardedStorage) and request.options.verify == "off":
            catalog.storage.skip_verify()
        digests_by_key = (
            read_saved_digests(request.source, matches) if request.options.verify != "off" else {}
        )
        stateful = plan_restore(
            request.extra,
            request.rank_extra,
            request.source,
            request.metadata,
            catalog.verification_log,
            rank=comm.rank,
            world=comm.world,
        )
        differences.missing += stateful.missing
        group_options = _saved_group_options(request)
        matches = _check_optimizer(request, matches, differences)
    by_decl = {match.target.decl: match for match in matches}
    with gc_paused, collective.step("match"):
        mismatches = collect_mismatches(collective, request, differences, stateful)
    raise_mismatches(request, mismatches)
    if collective.rank == 0:
        warn_mismatches(label, mismatches)
    with gc_paused, collective.step("plan"):
        read_groups = _plan_reads(collective, request, by_decl, catalog, nodes)
    try:
        with collective.step("read"):
            read_stats = _read(
                collective, read_groups, by_decl, catalog, windows, verify=verify != "off"
            )
            with gc_paused:
                verified_nbytes = verify_read(
                    collective,
                    read_groups,
                    read_stats,
                    by_decl,
                    digests_by_key,
                    catalog,
                    mode=verify,
                )
    except CheckpointError as error:
        failure = type(error)(
            f"{error}; the target holds a mix of old and new bytes and is unusable"
        )
        mark(failure, spread_of(error))
        raise failure from error
    with gc_paused, collective.step("install"):
        _install(request, group_options)
        stateful.apply(rank=comm.rank, world=comm.world)
    if catalog.verification_log is not None:
        verified_nbytes += catalog.verification_log.verified_nbytes
    damage = catalog.verification_log.damage if catalog.verification_log is not None else ()
    return _report(
        request,
        comm,
        read_stats,
        verified_nbytes,
        damage,
        differences,
        mismatches,
        started,
        label,
        stateful.rank_extra,
    )


def _plan_reads(
    collective: Collective,
    request: LoadRequest,
    by_decl: Mapping[TensorDecl, Match],
    catalog: Catalog,
    nodes: Sequence[int],
) -> list[ReadGroup]:
    """Collective. What this rank reads of each group of tensors that the same ranks of a machine
    want.
    """
    decls = list(by_decl)
    with collective.step("census"):
        table, holders = gather_declarations(collective, decls)
        if holders is not None:
            if max(nodes) > 0:
                collective.put("overlap", f"{read_redundancy(holders, nodes):.3f}".encode())
            publish_groups_by_node(collective, holders, nodes)
    if max(nodes) > 0:
        configure_shared_reads(
            catalog, request.options.share_reads, float(collective.get("overlap"))
        )
    read_groups = []
    members, _ = read_memberships(collective, table, decls, prefix=f"{nodes[collective.rank]}/")
    for member in members:
        max_over_read = request.options.max_over_read
        reads = plan_reads(
            member.decls, holders=member.holders, max_over_read=max_over_read, rank=collective.rank
        )
        locations = tuple(
            catalog.locations[by_decl[decl].part, by_decl[decl].name] for decl in member.decls
        )
        read_groups.append(ReadGroup(member.index, member.holders, member.decls, locations, reads))
    return read_groups


def _read(
    collective: Collective,
    groups: Sequence[ReadGroup],
    by_decl: Mapping[TensorDecl, Match],
    catalog: Catalog,
    tile_buffers: TileBuffers,
    *,
    verify: bool,
) -> list[ReadStats]:
    open_buffers = tile_buffers.prepare(
        collective,
        tile_nbytes=max(
            (group.reads.tile_nbytes for group in groups if group.reads.rank_io.io_tiles), default=0
        ),
        partners={
            rank for group in groups for rank in group.reads.rank_io.partners(collective.rank)
        },
    )
    wait = PeerWait(
        timeout_seconds=collective.timeout_seconds,
        tile_buffers=open_buffers,
        raise_if_failed=collective.raise_if_failed,
        progress=collective.progress,
    )
    storage = HeartbeatReader(catalog.storage, collective.heartbeat)
    read_stats = []
    with marking_failed(open_buffers.get(collective.rank)):
        for group in groups:
            destinations = Destinations(
                [by_decl[decl].target for decl in group.decls],
                group.reads.rank_io,
                rank=collective.rank,
            )
            stats = ReadStats()
            exchange = exchange_number(collective, group.index)
            read_tiles(
                group,
                destinations,
                storage,
                open_buffers,
                wait,
                verify=verify,
                rank=collective.rank,
                exchange=exchange,
                stats=stats,
            )
            read_extents(
                group,
                destinations,
                storage,
                verify=verify,
                rank=collective.rank,
                world=collective.world,
                stats=stats,
            )
            read_stats.append(stats)
    return read_stats


def _check_tied(
    request: LoadRequest, matches: Sequence[Match], differences: Differences, *, rank: int
) -> list[Match]:
    """Adds to the differences what the target ties and the checkpoint has as two that differ;
    returns the other matches.
    """
    digests = request.options.verify != "off"
    differing, equal = compare_tied(
        matches, differences.tied, request.source, rank=rank, use_digests=digests
    )
    differences.wrong += differing.values()
    if equal:
        suffix = f", and {len(equal) - 3} more" if len(equal) > 3 else ""
        differences.notes.append(
            f"tied in the target, and stored as tensors that are equal: {', '.join(equal[:3])}{suffix}"
        )
    return [
        match
        for match in matches
        if (match.target.decl.part.partition("@")[0], match.target.decl.fqn) not in differing
    ]


def _check_optimizer(
    request: LoadRequest, matches: Sequence[Match], differences: Differences
) -> list[Match]:
    """Adds to the differences what the optimizer's next step could not go on from; returns the
    matches that are to be read.

    An optimizer's state of one parameter is loaded whole or left as it is.
    """
    target = request.optimizer
    if target is None:
        return list(matches)
    if target.loads_state:
        keep_current = request.options.hyperparameters == "current"
        differences.wrong += state_mismatches(
            target,
            request.source,
            request.metadata,
            request.state.aliases,
            keep_current=keep_current,
        )
    keys = {(match.target.decl.part.partition("@")[0], match.target.decl.fqn) for match in matches}
    for key in (part.decl.key for part in request.state.tensors if part.decl.key not in keys):
        fqn = (
            key[1]
            if key[0] == MASTER
            else key[1].rpartition("/")[0]
            if key[0] == OPTIMIZER
            else None
        )
        target.unchanged.update([fqn] if fqn is not None else [])
    return [
        candidate
        for candidate in matches
        if candidate.part != OPTIMIZER
        or candidate.target.decl.fqn.rpartition("/")[0] not in target.unchanged
    ]


def _saved_group_options(request: LoadRequest) -> Sequence[Mapping[str, Any]] | None:
    """The options for each param group of the target, None to leave them."""
    if (
        request.optimizer is None
        or not request.optimizer.loads_state
        or request.options.hyperparameters == "current"
        or not request.metadata.groups
    ):
        return None
    return match_groups(
        request.optimizer.optimizers, request.optimizer.names, request.metadata.groups
    )


def _install(request: LoadRequest, groups: Sequence[Mapping[str, Any]] | None) -> None:
    """What is not tensors: optimizer state and hyperparameters, modules' own extra state."""
    if request.optimizer is not None:
        names = request.optimizer.param_names()
        request.optimizer.install(
            scalars={n: s for n, s in request.metadata.scalars.items() if n in names}, groups=groups
        )
    for name, module in request.state.model.extra_owners.items():
        if MODEL in request.state.requested and name in request.metadata.modules:
            module.set_extra_state(request.metadata.modules[name])


def _report(
    request: LoadRequest,
    comm: Comm,
    read_stats: Sequence[ReadStats],
    verified_nbytes: int,
    damage: Sequence[str],
    differences: Differences,
    mismatches: Mismatches,
    started: float,
    label: str,
    rank_extra: Any,
) -> LoadReport:
    saved_world_size = request.metadata.rank_extras
    notes = [
        *damage,
        *_kept_note(mismatches.kept, saved_world_size, comm),
        *_padded_note(mismatches.padded),
        *_no_digests_note(request, read_stats),
        *differences.notes,
    ]
    if saved_world_size not in (0, comm.world):
        notes.append(
            f"rank_extra is not given back: {saved_world_size} ranks saved, {comm.world} load; `uc.open(path).rank_extra` has all of it"
        )
    nbytes, seconds = sum(stats.nbytes for stats in read_stats), time.monotonic() - started
    if comm.rank == 0:
        gb_per_second = nbytes / 1e9 / max(seconds, 1e-9)
        _LOG.info(
            "loaded %s: rank 0 read %.3f GB in %.2f s, %.2f GB/s%s",
            label,
            nbytes / 1e9,
            seconds,
            gb_per_second,
            "; ".join(["", *notes]),
        )
        # a chosen part, or weights alone, is what the caller wanted; else a scheduler may be
        # forgotten
        if mismatches.unused:
            level = logging.WARNING if is_resumed(request) else logging.INFO
            _LOG.log(
                level,
                "%s: nothing took %s, which the checkpoint holds",
                label,
                ", ".join(mismatches.unused),
            )
    return LoadReport(
        step=request.metadata.step,
        extra=request.metadata.extra,
        rank_extra=rank_extra,
        missing=tuple(mismatches.missing),
        unexpected=tuple(mismatches.unexpected),
        wrong=tuple(mismatches.wrong),
        bytes_read=nbytes,
        verified_bytes=verified_nbytes,
        sources={part: tuple(sorted(parts)) for part, parts in sorted(differences.sources.items())},
        seconds=seconds,
        notes=tuple(notes),
        kept=tuple(mismatches.kept),
        unused=tuple(mismatches.unused),
    )


def _no_digests_note(request: LoadRequest, read_stats: Sequence[ReadStats]) -> list[str]:
    """Where there was nothing to compare. Formats of others have no digests: of those it is told
    where more than the default was asked.
    """
    verify, is_unified = request.options.verify, request.source.format == "unified"
    if (
        request.metadata.has_digests
        or verify == "off"
        or not (is_unified or verify == "full")
        or not any(stats.nbytes for stats in read_stats)
    ):
        return []
    return [
        f'verify="{verify}": the checkpoint has no digests; sizes and headers are all that was compared'
    ]


def _padded_note(padded: Sequence[str]) -> list[str]:
    """The sentence on tensors of which the checkpoint has a part."""
    return (
        [f"padded, and the target keeps what the checkpoint lacks: {', '.join(padded)}"]
        if padded
        else []
    )


def _kept_note(kept: Sequence[str], saved_world_size: int, comm: Comm) -> list[str]:
    """The sentence on objects that keep what they are, which rank 0 also warns of."""
    if not kept:
        return []
    reason = (
        f"saved by {saved_world_size} rank(s), loaded by {comm.world}"
        if saved_world_size != comm.world
        else "saved on a machine that is not here"
    )
    remedy = "a load_from_ranks of theirs, or by hand from `uc.open(path).rank_extra`; for a place in the data uc.ElasticSampler in `extra`"
    message = f"{', '.join(kept)}: left as they are: {reason}; needed {remedy}"
    if comm.rank == 0:
        _LOG.warning("%s", message)
    return [message]

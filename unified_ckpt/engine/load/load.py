"""Load a Source into live state of any sharding: match, check, plan, read, verify, install.

A load could do harm in three ways: fail after changing the target, accept bytes that were
never saved, or leave a tensor unchanged without saying so. Every rank therefore checks all
names, shapes, files and headers before the first byte is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.load_plan import plan_reads
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.load.differences import (
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
    GroupRead,
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
from unified_ckpt.engine.source.stateful import StoredObjects, plan_restore
from unified_ckpt.errors import CheckpointError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_spread import mark, spread_of
from unified_ckpt.runtime.exchange.shared_memory import PeerWait, marking_failed
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers, exchange_number
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.storage import Reader
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.optimizer_target import match_groups

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. Tensors are named "part:fqn"; byte counts are of this rank.

    `missing`, `unexpected`: names that only the target or only the checkpoint has; `wrong`: one
    sentence for each mismatch of shape, dtype or state. All three are empty when strict.
    `rank_extra`: this rank's entry, or None if the checkpoint was saved by another world size.
    `sources`: for each target part, the stored parts that were read for it.
    `notes`: further remarks, one sentence each.
    `kept`: paths in `rank_extra` of objects left unchanged because their state belongs to other
    ranks. `unused`: stored parts and object states ("extra:scheduler") that no rank loaded.
    `kept` and `unused` are the same on every rank.
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
    tile_buffers: TileBuffers,
    *,
    timeout_seconds: float,
    nodes: Sequence[int] | None = None,
) -> LoadReport:
    """Fill the targets in place, collectively. Errors before the first byte are equal on all ranks.

    `nodes`: the node of each rank, or None if all ranks share one; the ranks of a node read for
    each other. `request`: the load, or the error that this rank raised while preparing it.
    An IntegrityError raised while reading leaves the target unusable and says so.
    """
    started = time.monotonic()
    collective = comm.begin_collective(f"load of {label}", timeout_seconds=timeout_seconds)
    with collective.propagating_errors():
        nodes = nodes or [0] * collective.world
        return _load(collective, label, request, tile_buffers, nodes, started)


def _load(
    collective: Collective,
    label: str,
    request: LoadRequest | Exception,
    tile_buffers: TileBuffers,
    nodes: Sequence[int],
    started: float,
) -> LoadReport:
    """Run the steps of a load. Nothing is written to the target before the step "read"."""
    rank, world = collective.rank, collective.world
    with gc_paused, collective.step("prepare-target"):
        if isinstance(request, Exception):
            raise request
        metadata, verify = request.metadata, request.options.verify
        matches, differences = match_targets(
            request.state.tensors,
            request.source,
            aliases=request.state.aliases,
            cast=request.options.cast,
            pads=metadata.pads,
            rank=rank,
        )
        matches = _check_tied(request, matches, differences, rank=rank)
        if request.optimizer is not None and request.optimizer.loads_state:
            differences.missing += parameters_without_state(
                set(request.optimizer.param_names()),
                request.source,
                metadata,
                request.state.aliases,
            )
        catalog = request.source.catalog({(match.part, match.name) for match in matches})
        if isinstance(catalog.storage, ShardedStorage) and verify == "off":
            catalog.storage.skip_verify()
        digests_by_key = read_saved_digests(request.source, matches) if verify != "off" else {}
        stored = StoredObjects(request.source, metadata, catalog.verification_log)
        stateful = plan_restore(request.extra, request.rank_extra, stored, rank=rank, world=world)
        differences.missing += stateful.missing
        group_options = _saved_group_options(request)
        matches = _check_optimizer(request, matches, differences)
    by_decl = {match.target.decl: match for match in matches}
    with gc_paused, collective.step("match"):
        mismatches = collect_mismatches(collective, request, differences, stateful)
    raise_mismatches(request, mismatches)
    if rank == 0:
        warn_mismatches(label, mismatches)
    with gc_paused, collective.step("plan"):
        groups = _plan_reads(collective, request, by_decl, catalog, nodes)
    if catalog.verification_log is not None:  # then the storage verifies
        verify = "off"
    try:
        with collective.step("read"):
            reads = _read(
                collective, groups, by_decl, catalog.storage, tile_buffers, verify=verify != "off"
            )
            with gc_paused:
                verified_nbytes = verify_read(
                    collective, reads, by_decl, digests_by_key, catalog.storage, mode=verify
                )
    except CheckpointError as error:
        failure = type(error)(
            f"{error}; the target holds a mix of old and new bytes and is unusable"
        )
        mark(failure, spread_of(error))
        raise failure from error
    with gc_paused, collective.step("install"):
        _install(request, group_options)
        stateful.apply(rank=rank, world=world)
    damage: Sequence[str] = ()
    if catalog.verification_log is not None:
        verified_nbytes += catalog.verification_log.verified_nbytes
        damage = catalog.verification_log.damage
    nbytes = sum(stats.nbytes for _, stats in reads)
    notes = [
        *damage,
        *_kept_note(mismatches.kept, metadata.rank_extras, collective),
        *_padded_note(mismatches.padded),
        *_no_digests_note(request, nbytes),
        *differences.notes,
        *_rank_extra_note(metadata.rank_extras, world),
    ]
    report = LoadReport(
        step=metadata.step,
        extra=metadata.extra,
        rank_extra=stateful.rank_extra,
        missing=tuple(mismatches.missing),
        unexpected=tuple(mismatches.unexpected),
        wrong=tuple(mismatches.wrong),
        bytes_read=nbytes,
        verified_bytes=verified_nbytes,
        sources={part: tuple(sorted(parts)) for part, parts in sorted(differences.sources.items())},
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        kept=tuple(mismatches.kept),
        unused=tuple(mismatches.unused),
    )
    if rank == 0:
        _log_report(label, report, resumed=is_resumed(request))
    return report


def _plan_reads(
    collective: Collective,
    request: LoadRequest,
    by_decl: Mapping[TensorDecl, Match],
    catalog: Catalog,
    nodes: Sequence[int],
) -> list[ReadGroup]:
    """Return the reads of this rank, by group of tensors that the same ranks of a node need.

    Collective.
    """
    decls = list(by_decl)
    with collective.step("exchange-declarations"):
        table, holders = gather_declarations(collective, decls)
        if holders is not None:
            if max(nodes) > 0:
                collective.put("redundancy", f"{read_redundancy(holders, nodes):.3f}".encode())
            publish_groups_by_node(collective, holders, nodes)
    if max(nodes) > 0:
        configure_shared_reads(
            catalog, request.options.share_reads, float(collective.get("redundancy"))
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
    storage: Reader,
    tile_buffers: TileBuffers,
    *,
    verify: bool,
) -> list[tuple[ReadGroup, ReadStats]]:
    """Read all groups; return what was read of each. Collective."""
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
    reader = HeartbeatReader(storage, collective.heartbeat)
    stats_by_group = []
    with marking_failed(open_buffers.get(collective.rank)):
        for group in groups:
            destinations = Destinations(
                [by_decl[decl].target for decl in group.decls],
                group.reads.rank_io,
                rank=collective.rank,
            )
            read = GroupRead(group, destinations, reader, collective.rank, verify)
            exchange = exchange_number(collective, group.index)
            read_tiles(read, open_buffers, wait, exchange=exchange)
            read_extents(read, world=collective.world)
            stats_by_group.append((group, read.stats))
    return stats_by_group


def _check_tied(
    request: LoadRequest, matches: Sequence[Match], differences: Differences, *, rank: int
) -> list[Match]:
    """Add tied targets whose stored tensors differ to `differences`; return the other matches."""
    differing, equal = compare_tied(
        matches,
        differences.tied,
        request.source,
        rank=rank,
        use_digests=request.options.verify != "off",
    )
    differences.wrong += differing.values()
    if equal:
        suffix = f", and {len(equal) - 3} more" if len(equal) > 3 else ""
        differences.notes.append(
            f"tied in the target, stored as equal tensors: {', '.join(equal[:3])}{suffix}"
        )
    return [match for match in matches if _target_key(match) not in differing]


def _target_key(match: Match) -> Key:
    """Return the requested part and the name of the target."""
    return match.target.decl.part.partition("@")[0], match.target.decl.fqn


def _check_optimizer(
    request: LoadRequest, matches: Sequence[Match], differences: Differences
) -> list[Match]:
    """Add optimizer state that the next step cannot use to `differences`; return what to read.

    The state of one parameter is loaded whole or left unchanged.
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
    matched_keys = {_target_key(match) for match in matches}
    for part, name in (tensor.decl.key for tensor in request.state.tensors):
        if (part, name) in matched_keys:
            continue
        if part == MASTER:
            target.unchanged.add(name)
        elif part == OPTIMIZER:
            target.unchanged.add(name.rpartition("/")[0])
    return [
        match
        for match in matches
        if match.part != OPTIMIZER
        or match.target.decl.fqn.rpartition("/")[0] not in target.unchanged
    ]


def _saved_group_options(request: LoadRequest) -> Sequence[Mapping[str, Any]] | None:
    """Return the saved options of each param group, or None to keep those of the target."""
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
    """Install what is not a tensor: optimizer state, hyperparameters, module extra state."""
    if request.optimizer is not None:
        fqns = request.optimizer.param_names()
        scalars = {fqn: state for fqn, state in request.metadata.scalars.items() if fqn in fqns}
        request.optimizer.install(scalars=scalars, groups=groups)
    for name, module in request.state.model.extra_owners.items():
        if MODEL in request.state.requested and name in request.metadata.modules:
            module.set_extra_state(request.metadata.modules[name])


def _log_report(label: str, report: LoadReport, *, resumed: bool) -> None:
    """Log the load of rank 0, and what no rank loaded."""
    _LOG.info(
        "loaded %s: rank 0 read %.3f GB in %.2f s, %.2f GB/s%s",
        label,
        report.bytes_read / 1e9,
        report.seconds,
        report.bytes_read / 1e9 / max(report.seconds, 1e-9),
        "; ".join(["", *report.notes]),
    )
    if report.unused:  # a resumed run may have forgotten a scheduler; others chose their parts
        level = logging.WARNING if resumed else logging.INFO
        unused = ", ".join(report.unused)
        _LOG.log(level, "%s: no rank loaded %s from the checkpoint", label, unused)


def _no_digests_note(request: LoadRequest, nbytes: int) -> list[str]:
    """Say that the `nbytes` read could not be verified.

    Formats of other frameworks have no digests, so only an explicit verify="full" is answered.
    """
    verify, is_unified = request.options.verify, request.source.format == "unified"
    is_expected = verify == "full" or (is_unified and verify != "off")
    if request.metadata.has_digests or not is_expected or not nbytes:
        return []
    return [
        f'verify="{verify}": the checkpoint has no digests; only sizes and headers were checked'
    ]


def _padded_note(padded: Sequence[str]) -> list[str]:
    """Name the targets of which the checkpoint has only a part."""
    if not padded:
        return []
    return [f"padded; the target keeps its values beyond the stored shape: {', '.join(padded)}"]


def _rank_extra_note(saved_world_size: int, world: int) -> list[str]:
    """Say that `rank_extra` is not restored by another number of ranks."""
    if saved_world_size in (0, world):
        return []
    return [
        f"rank_extra is not restored: saved by {saved_world_size} ranks, loaded by {world}; "
        "read it from `uc.open(path).rank_extra`"
    ]


def _kept_note(kept: Sequence[str], saved_world_size: int, collective: Collective) -> list[str]:
    """Name the objects whose state was left unchanged; rank 0 also logs a warning."""
    if not kept:
        return []
    if saved_world_size != collective.world:
        reason = f"saved by {saved_world_size} rank(s), loaded by {collective.world}"
    else:
        reason = "saved on a node that is missing"
    message = (
        f"{', '.join(kept)}: left unchanged: {reason}; give them a load_from_ranks, or restore "
        "them from `uc.open(path).rank_extra`; for data positions, save a uc.ElasticSampler in "
        "`extra`"
    )
    if collective.rank == 0:
        _LOG.warning("%s", message)
    return [message]

"""Load a Source into live state of any sharding: match, check, plan, read, verify, install.

A load could do harm in three ways: fail after changing the target, accept bytes that were
never saved, or leave a tensor unchanged without saying so. Every rank therefore checks all
names, shapes, files and headers before the target is modified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import increment_version

from unified_ckpt.core.planning.load_plan import plan_reads
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.text import first_items
from unified_ckpt.engine.load.extents import plan_boxes, read_groups
from unified_ckpt.engine.load.match import (
    Match,
    MatchReport,
    match_targets,
    parameters_without_state,
)
from unified_ckpt.engine.load.mismatches import (
    Mismatches,
    check_modules,
    collect_mismatches,
    raise_mismatches,
    warn_mismatches,
)
from unified_ckpt.engine.load.optimizer_check import state_mismatches, unplaced_state
from unified_ckpt.engine.load.read import GroupReadPlan
from unified_ckpt.engine.load.report import LoadReport, load_notes, log_report
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.share_reads import read_redundancy
from unified_ckpt.engine.load.tensor_reader import LocatedTensor, TensorReader, locate_tensors
from unified_ckpt.engine.load.tied_tensors import compare_tied
from unified_ckpt.engine.load.verify import verify_read
from unified_ckpt.engine.plan.holders import (
    gather_declarations,
    read_memberships,
    send_groups_by_node,
)
from unified_ckpt.engine.source.stateful import StatefulRestore, plan_restore
from unified_ckpt.errors import CheckpointError, describe_error
from unified_ckpt.format.names import MASTER, OPTIMIZER
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_spread import mark, spread_of
from unified_ckpt.runtime.comm.gather_phases import gather_phases
from unified_ckpt.runtime.comm.phases import summarize_phases
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers, TileBufferSet
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.torch_state.optimizer_rules import match_groups


def load(
    comm: Comm,
    label: str,
    request: LoadRequest | Exception,
    tile_buffers: TileBuffers,
    *,
    topology: Topology,
    timeout_seconds: float,
) -> LoadReport:
    """Fill the targets in place, collectively.

    Errors raised before the target is modified are equal on all ranks. Tied tensors and digests
    are read before that.

    The ranks of a node read for each other. `request`: the load, or the error that this rank
    raised while preparing it. An IntegrityError raised while reading leaves the target unusable
    and says so.
    """
    started = time.monotonic()
    collective = comm.begin_collective(f"load of {label}", timeout_seconds=timeout_seconds)
    with gc_paused, collective.propagating_errors():
        return _load(collective, label, request, tile_buffers, topology, started)


def _load(
    collective: Collective,
    label: str,
    request: LoadRequest | Exception,
    tile_buffers: TileBuffers,
    topology: Topology,
    started: float,
) -> LoadReport:
    """Run the steps of a load. Nothing is written to the target before the step "read"."""
    rank = collective.rank
    with collective.phase("match-targets"):
        if isinstance(request, Exception):
            raise request
        matched = _match(collective, request)
    mismatches = matched.mismatches
    raise_mismatches(request, mismatches)
    if rank == 0:
        warn_mismatches(label, mismatches)
    with ExitStack() as exchange:
        with collective.step("plan"):
            group_plans = _plan_reads(collective, request, matched, topology)
            # Before the target is modified: the memory may not suffice.
            buffers = exchange.enter_context(_tile_exchange(collective, group_plans, tile_buffers))
        nbytes, verified_nbytes = _read_and_verify(
            collective, request, matched, group_plans, buffers, topology
        )
    with collective.step("install"):
        module_notes = _install(request, matched.group_options)
        matched.stateful.apply(request.placed.placement)
        measured = gather_phases(collective, request.policy.traffic)
    report = LoadReport(
        step=request.metadata.step,
        extra=request.metadata.extra,
        rank_extra=matched.stateful.rank_extra,
        missing=tuple(mismatches.missing),
        unexpected=tuple(mismatches.unexpected),
        wrong=tuple(mismatches.wrong),
        bytes_read=nbytes,
        verified_bytes=verified_nbytes,
        sources={part: tuple(sorted(p)) for part, p in sorted(matched.report.sources.items())},
        seconds=time.monotonic() - started,
        notes=(
            *request.source.verification.damage,
            *load_notes(request, mismatches, nbytes, rank=rank),
            *matched.report.notes,
            *module_notes,
        ),
        kept=tuple(mismatches.kept),
        unused=tuple(mismatches.unused),
        data_coordinate=request.placed.data_coordinate,
        saved_ranks=request.placed.saved_ranks,
        ranks=collective.world,
        phases=summarize_phases(measured.phases_by_rank) if rank == 0 else None,
        network=measured.network,
        metadata=request.metadata,
    )
    if rank == 0:
        log_report(label, report)
    return report


@dataclass(frozen=True, slots=True)
class _Matched:
    """What this rank will read, and the mismatches of all ranks.

    `tensors`: those to read, by stored key. `group_options`: of `_saved_group_options`.
    """

    matches: Sequence[Match]
    report: MatchReport
    tensors: Mapping[Key, LocatedTensor]
    storage: Reader | None
    stateful: StatefulRestore
    group_options: Sequence[Mapping[str, Any]] | None
    mismatches: Mismatches


def _match(collective: Collective, request: LoadRequest) -> _Matched:
    """Find the stored tensor of each target. Collective: return the mismatches of all ranks."""
    rank, world, metadata = collective.rank, collective.world, request.metadata
    matches, report = match_targets(
        request.state.tensors,
        request.source,
        aliases=request.state.aliases,
        cast=request.options.cast,
        metadata=metadata,
        rank=rank,
    )
    matches += request.custom.match_as_saved(report, request.source)
    report.wrong += [sentence for *_, sentence in report.differing.values()]
    matches = _check_tied(request, matches, report, rank=rank)
    if request.optimizer is not None and request.optimizer.loads_state:
        stateless = parameters_without_state(
            set(request.optimizer.param_names()), request.source, metadata, request.state.aliases
        )
        report.missing += [f"{OPTIMIZER}:{fqn}" for fqn in stateless]
        request.optimizer.unchanged.update(stateless)
    parts = {match.stored_key[0] for match in matches} | {*request.custom.methods}
    parts &= {*request.source.parts}
    request.source.check_values(parts, share=rank, shares=world)
    stateful = plan_restore(
        request.extra, request.rank_extra, request.source, metadata, request.placed.placement
    )
    report.missing += stateful.missing
    check_modules(request, report)
    group_options = _saved_group_options(request)
    matches = _check_optimizer(request, matches, report)
    mismatches = collect_mismatches(collective, request, report, stateful)
    stateful.keep(mismatches.unplaced)
    matches += request.custom.match_offered(mismatches.offered, request.source)
    sizes = {match.stored_key: match.target.decl.spec.nbytes for match in matches}
    tensors, storage = locate_tensors(request.source, sizes, verify=request.options.verify != "off")
    return _Matched(matches, report, tensors, storage, stateful, group_options, mismatches)


def _plan_reads(
    collective: Collective,
    request: LoadRequest,
    matched: _Matched,
    topology: Topology,
) -> list[GroupReadPlan]:
    """Return the reads of this rank, by group of tensors that the same ranks of a node need.

    Collective.
    """
    boxes, matches = list[Match](), dict[TensorDecl, Match]()
    for match in matched.matches:
        if match.target.decl.sharding.box is not None:
            boxes.append(match)
        else:
            matches[match.target.decl] = match
    decls = list(matches)
    table_id, declarations = gather_declarations(collective, decls)
    if declarations is not None:
        if topology.spans_nodes:
            collective.put_json("redundancy", read_redundancy(declarations, topology.nodes))
        send_groups_by_node(collective, declarations, topology.nodes)
    if topology.spans_nodes:
        request.policy.redundancy = collective.get_json("redundancy")
    group_plans = []
    groups = read_memberships(collective, table_id, decls, prefix=f"{topology.node}/")
    for group in groups:
        read_plan = plan_reads(
            group.decls,
            holders=group.holders,
            max_over_read=request.options.max_over_read,
            rank=collective.rank,
        )
        group_matches = [matches[decl] for decl in group.decls]
        tensors = tuple(matched.tensors[match.stored_key] for match in group_matches)
        targets = tuple(match.target for match in group_matches)
        group_plans.append(
            GroupReadPlan(group.index, group.holders, group.decls, targets, tensors, read_plan)
        )
    if boxes:
        index = max((group.index for group in groups), default=-1) + 1
        targets = tuple(match.target for match in boxes)
        tensors = tuple(matched.tensors[match.stored_key] for match in boxes)
        group_plans.append(plan_boxes(index, collective.rank, targets, tensors))
    return group_plans


def _read_and_verify(
    collective: Collective,
    request: LoadRequest,
    matched: _Matched,
    group_plans: Sequence[GroupReadPlan],
    buffers: TileBufferSet,
    topology: Topology,
) -> tuple[int, int]:
    """Fill the targets; return the bytes that this rank read, and those that it verified."""
    verified_before = request.source.verification.verified_nbytes
    reader = TensorReader(request.source, matched.storage, collective.heartbeat)
    try:
        with collective.step("read"):
            # bytes are read straight into memory, which torch does not count as a change
            increment_version([match.target.local for match in matched.matches])
            group_readers = read_groups(collective, group_plans, reader, buffers, topology)
            verified_nbytes = verify_read(collective, group_readers, mode=request.options.verify)
    except Exception as error:
        error_type = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = error_type(
            f"{describe_error(error)}; the target holds a mix of old and new bytes and is "
            "unusable; load again, from another step if the bytes are damaged"
        )
        mark(failure, spread_of(error))
        raise failure from error
    nbytes = sum(group_reader.nbytes for group_reader in group_readers)
    return nbytes, verified_nbytes + request.source.verification.verified_nbytes - verified_before


def _tile_exchange(
    collective: Collective, group_plans: Sequence[GroupReadPlan], tile_buffers: TileBuffers
) -> AbstractContextManager[TileBufferSet]:
    """Return the exchange of tiles, which allocates them. Collective."""
    rank_ios = [plan.read_plan.rank_io for plan in group_plans]
    tile_nbytes = max((rank_io.tile_nbytes for rank_io in rank_ios if rank_io.io_tiles), default=0)
    return tile_buffers.exchanging(collective, rank_ios, tile_nbytes=tile_nbytes)


def _check_tied(
    request: LoadRequest, matches: Sequence[Match], match_report: MatchReport, *, rank: int
) -> list[Match]:
    """Record tied targets whose stored tensors differ in `match_report`; return the others."""
    differing, equal = compare_tied(
        matches,
        match_report.tied,
        request.source,
        rank=rank,
        use_digests=request.options.verify != "off",
    )
    match_report.wrong += differing.values()
    if equal:
        match_report.notes.append(
            f"tied in the target, stored as equal tensors: {first_items(equal, 3)}"
        )
    return [match for match in matches if match.target_key not in differing]


def _check_optimizer(
    request: LoadRequest, matches: Sequence[Match], match_report: MatchReport
) -> list[Match]:
    """Record optimizer state that the next step cannot use; return the matches to read.

    The state of one parameter is loaded whole or left unchanged.
    """
    target = request.optimizer
    if target is None:
        return list(matches)
    if target.loads_state:
        # Other formats have such entries in `extra`, or nowhere.
        is_unified = request.source.format == "unified"
        problems = match_report.wrong if is_unified else match_report.notes
        problems += request.entries.problems
        match_report.notes += request.entries.unused
        match_report.wrong += state_mismatches(
            target,
            request.source,
            request.metadata,
            request.state.aliases,
            use_current=request.options.hyperparameters == "current",
        )
    refs = request.state.param_refs()
    for fqn, problem in unplaced_state(request.metadata, refs, request.placed.unplaced):
        target.unchanged.add(fqn)
        match_report.wrong.append(problem)
    matched_keys = {match.target_key for match in matches}
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
        if match.stored_key[0] != OPTIMIZER
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


def _install(request: LoadRequest, groups: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Install what is not filled in place: optimizer state, hyperparameters, module extra state.

    Call the methods of modules that customize their loading; return notes about these.
    """
    metadata, modules = request.metadata, request.metadata.modules
    is_unified = request.source.format == "unified"
    notes = list(request.custom.install(modules, strict=request.strict, is_unified=is_unified))
    if request.optimizer is not None:
        request.optimizer.install(
            scalars=metadata.scalars, groups=groups, from_groups=metadata.groups
        )
    for entries in request.entries.restored:
        entries.install()
    loaded = request.custom.owners()
    for owners in request.state.extra_owners().values():
        for name, module in owners.items():
            if name in modules and id(module) not in loaded:
                module.set_extra_state(modules[name])
    return notes

"""Turn the arguments of a load into a LoadRequest: named, placed tensors and optimizer memory.

Changes none of the caller's objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.load.match import TensorNames, saved_shapes, saved_state
from unified_ckpt.engine.source.by_position import IndexedOptimizerSource
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import LayoutError
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    FlatState,
    flatten_state,
    resolve_like_params,
)
from unified_ckpt.runtime.torch_state.growth import init_grown_state
from unified_ckpt.runtime.torch_state.modules import Model
from unified_ckpt.runtime.torch_state.optimizer_target import (
    OptimizerTarget,
    prepare_masters,
    prepare_optimizer,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    Optimizers,
    as_optimizers,
    check_one_master,
    collect_masters,
    has_masters,
    master_key,
)
from unified_ckpt.runtime.torch_state.placements import check_not_expanded, make_resolver


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a load: arguments of `Checkpointer.load`."""

    model: Model | None
    optimizer: Optimizers | None
    master_weights: Optimizers | None
    parts: Mapping[str, Model] | None
    layout: Layout | None
    extra: Any = None
    rank_extra: Any = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a rank wants to load. `extra`, `rank_extra`: trees with stateful objects to restore.

    `state`: the tensors to fill; `optimizer`: memory for optimizer state and masters.
    """

    source: Source
    state: FlatState
    metadata: SourceMetadata
    optimizer: OptimizerTarget | None
    layout: Layout | None
    matched_rules: set[str]
    strict: bool
    options: LoadOptions
    extra: Any = None
    rank_extra: Any = None


def try_load_request(
    comm: Comm, source: Source | Exception, targets: Targets, *, strict: bool, options: LoadOptions
) -> LoadRequest | Exception:
    """Return the request, or this rank's error, which `load` then raises on every rank."""
    try:
        if isinstance(source, Exception):
            raise source
        return load_request(comm, source, targets, strict=strict, options=options)
    except Exception as error:
        return error


def load_request(
    comm: Comm, source: Source, targets: Targets, *, strict: bool, options: LoadOptions
) -> LoadRequest:
    """Return the request of this rank. Raises LayoutError for targets that cannot be placed."""
    resolver, model = make_resolver(comm, targets.layout), targets.model
    optimizer, master_weights = targets.optimizer, targets.master_weights
    optimizers, master_holders = as_optimizers(optimizer), as_optimizers(master_weights)
    state = flatten_state(
        resolver,
        model=model,
        optimizer=None if optimizers else optimizer,
        master_weights=None if master_holders else master_weights,
        extra_parts=targets.parts,
        model_dtype=None,
    )
    names, optimizer_target = state.param_names(), None
    metadata = SourceMetadata() if isinstance(source, IndexedOptimizerSource) else source.metadata()
    if master_weights is None:
        master_holders = [
            holder
            for holder in optimizers
            if has_masters(holder) or _creates_masters(holder, names, metadata)
        ]
    else:
        _check_masters(optimizers, master_holders, master_weights, names, metadata)
    target_parts = {
        *state.requested,
        *([OPTIMIZER] if optimizers else []),
        *([MASTER] if master_holders else []),
    }
    parts_to_read = _parts_to_read(target_parts, options.parts)
    if master_weights is None and OPTIMIZER not in parts_to_read:
        master_holders = [holder for holder in master_holders if has_masters(holder)]
    if (
        master_weights is None
        and master_holders
        and parts_to_read & {MODEL, OPTIMIZER, *state.extra_parts}
    ):
        parts_to_read.add(MASTER)  # else the next step overwrites the model from old masters
    optimizers = optimizers if OPTIMIZER in parts_to_read else []
    if isinstance(source, IndexedOptimizerSource):
        source = _with_parameter_names(
            source, optimizers, state, by_name=OPTIMIZER in parts_to_read
        )
        metadata = source.metadata()
    master_holders = master_holders if MASTER in parts_to_read else []
    if optimizers or master_holders:
        if model is None and not targets.parts:
            raise LayoutError(
                "optimizer: its parameters have no names without their model; pass `model` too"
            )
        param_refs = state.param_refs()
        optimizer_target = _optimizer_target(optimizers, master_holders, source, metadata, state)
        if optimizers:
            state.requested.add(OPTIMIZER)
            state.tensors += resolve_like_params(
                resolver, OPTIMIZER, optimizer_target.tensors, param_refs
            )
        if master_holders:
            state.requested.add(MASTER)
            masters = collect_masters(master_holders, names) | {
                fqn: tensor for fqn, (_, tensor) in optimizer_target.masters.items()
            }
            state.tensors += resolve_like_params(resolver, MASTER, masters, param_refs)
    state.tensors = [tensor for tensor in state.tensors if tensor.decl.part in parts_to_read]
    for tensor in state.tensors:
        if not tensor.local.is_contiguous():
            check_not_expanded(f"{tensor.decl.part}:{tensor.decl.fqn}", tensor.local)
    state.requested.intersection_update(parts_to_read)
    return LoadRequest(
        source=source,
        state=state,
        metadata=metadata,
        optimizer=optimizer_target,
        layout=targets.layout,
        matched_rules=resolver.matched_patterns,
        strict=strict,
        options=options,
        extra=targets.extra,
        rank_extra=targets.rank_extra,
    )


def _check_masters(
    optimizers: list[Optimizer],
    master_holders: list[Optimizer],
    masters: Optimizers,
    names: Mapping[int, str],
    metadata: SourceMetadata,
) -> None:
    """Raise LayoutError if an optimizer would use other masters than `master_weights`."""
    target_masters = (
        masters if isinstance(masters, Mapping) else collect_masters(master_holders, names)
    )
    check_one_master(target_masters, collect_masters(optimizers, names))
    for optimizer in optimizers:
        if (
            optimizer not in master_holders
            and not has_masters(optimizer)
            and _creates_masters(optimizer, names, metadata)
        ):
            raise LayoutError(
                "master_weights: got other masters than those that "
                f"{type(optimizer).__name__} creates at its first step; omit master_weights=, or "
                "pass the optimizer there"
            )


def _creates_masters(
    optimizer: Optimizer, names: Mapping[int, str], metadata: SourceMetadata
) -> bool:
    """Return whether the next step of an optimizer without masters creates them."""
    fqns = {
        names.get(id(param), "") for group in optimizer.param_groups for param in group["params"]
    }
    saved_groups = (group for group in metadata.groups if not fqns.isdisjoint(group["names"]))
    return master_key(optimizer, next(saved_groups, None)) is not None


def _optimizer_target(
    optimizers: list[Optimizer],
    master_holders: list[Optimizer],
    source: Source,
    metadata: SourceMetadata,
    state: FlatState,
) -> OptimizerTarget:
    """Allocate state of `optimizers` and masters of `master_holders`.

    The holders are some of the optimizers, if there are any.
    """
    selected_optimizers, names = optimizers or master_holders, state.param_names()
    shapes = {fqn: param_ref.tensor.shape for fqn, param_ref in state.param_refs().items()}
    fqns = _parameter_names(selected_optimizers, names) if optimizers else set()
    saved, padded = saved_state(fqns, source, state.aliases, pads=metadata.pads, shapes=shapes)
    differing = {
        key.rpartition("/")[0]
        for key, (_, shape) in saved.items()
        if shape != shapes.get(key.rpartition("/")[0])
    }
    checkpoint_shapes = saved_shapes(differing, source, state.aliases)
    optimizer_target = prepare_optimizer(
        selected_optimizers,
        names,
        saved,
        shapes=shapes,
        saved_shapes=checkpoint_shapes,
        loads_state=bool(optimizers),
    )
    init_grown_state(optimizer_target, padded)
    if master_holders:
        master_names, names_of = set(source.names(MASTER)), TensorNames(source, state.aliases)
        stored = {
            fqn for fqn in shapes if not master_names.isdisjoint(names_of(fqn, MASTER, MASTER))
        }
        prepare_masters(
            optimizer_target,
            metadata.groups,
            stored_masters=stored,
            shapes=shapes,
            grows=bool(metadata.pads),
        )
    return optimizer_target


def _with_parameter_names(
    source: IndexedOptimizerSource, optimizers: list[Optimizer], state: FlatState, *, by_name: bool
) -> Source:
    """Return the source with optimizer state named as these optimizers order their parameters.

    `by_name`: without optimizers, name it as the checkpoint does; else leave it out.
    """
    if not optimizers:
        return source.with_stored_order if by_name else source.without_optimizer()
    names, param_refs = state.param_names(), state.param_refs()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names_by_group = [
        [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for group in groups
    ]
    return source.with_order(
        [[(name, param_refs[name].tensor.shape) for name in group] for group in names_by_group]
    )


def _parts_to_read(target_parts: set[str], selected: Sequence[str] | None) -> set[str]:
    """Return the parts to read. Raises LayoutError for a selected part without a target."""
    unknown = [part for part in selected or () if part not in target_parts]
    if unknown:
        raise LayoutError(
            f"LoadOptions(parts=...): {unknown[0]!r} has no target in this load; expected some of "
            f"{', '.join(sorted(target_parts))}"
        )
    return target_parts if selected is None else set(selected)


def _parameter_names(optimizers: list[Optimizer], names: Mapping[int, str]) -> set[str]:
    """Return the names of the optimizers' parameters. `names`: by id of the parameter."""
    return {
        names[id(parameter)]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }

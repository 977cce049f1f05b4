"""Turn the arguments of a load into a LoadRequest: named, placed tensors and optimizer memory.

Changes none of the caller's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from torch.optim import Optimizer

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.load.custom_modules import CustomModules, custom_modules
from unified_ckpt.engine.load.growth import init_grown_state
from unified_ckpt.engine.load.match import TensorNames, saved_shapes, saved_state
from unified_ckpt.engine.load.placement import PlacedMetadata, place_metadata
from unified_ckpt.engine.source.protocol import (
    IndexedOptimizerSource,
    ReadPolicy,
    Source,
    SourceMetadata,
)
from unified_ckpt.errors import LayoutError, result_or_error
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import FlatState, flatten_state, resolve_like_params
from unified_ckpt.runtime.torch_state.modules import ModelArgument
from unified_ckpt.runtime.torch_state.optimizer_rules import SavedGroups, group_params
from unified_ckpt.runtime.torch_state.optimizer_target import (
    OptimizerTarget,
    SavedOptimizer,
    created_master_key,
    prepare_masters,
    prepare_optimizer,
)
from unified_ckpt.runtime.torch_state.optimizer_wrappers import EntryMatch, match_entries
from unified_ckpt.runtime.torch_state.optimizers import (
    OptimizerArgument,
    as_optimizers,
    check_same_masters,
    collect_masters,
    has_masters,
    master_key,
    stepped_optimizers,
    with_views,
)
from unified_ckpt.runtime.torch_state.placements import ShardingResolver, make_resolver
from unified_ckpt.runtime.torch_state.shards.optimizer_views import check_loadable
from unified_ckpt.runtime.torch_state.tensors import check_not_expanded


class LoadArguments(TypedDict, total=False):
    """The keyword arguments of every load; `uc.load` documents them."""

    model: ModelArgument | None
    optimizer: OptimizerArgument | None
    master_weights: OptimizerArgument | None
    parts: Mapping[str, ModelArgument] | None
    extra: Any
    rank_extra: Any
    layout: Layout | None
    strict: bool
    options: LoadOptions | None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a rank wants to load. `extra`, `rank_extra`: trees with stateful objects to restore.

    `state`: the tensors to fill; `optimizer`: memory for optimizer state and masters. `entries`:
    those of optimizers' `state_dict()` beside state and groups. `custom`: modules to load by their
    own methods. `ignores_unexpected`: what only the checkpoint has is no mismatch.
    """

    source: Source
    state: FlatState
    placed: PlacedMetadata
    optimizer: OptimizerTarget | None
    layout: Layout | None
    matched_rules: set[str]
    strict: bool
    options: LoadOptions
    policy: ReadPolicy = field(default_factory=ReadPolicy)  # that the source was opened with
    extra: Any = None
    rank_extra: Any = None
    entries: EntryMatch = field(default_factory=EntryMatch)
    custom: CustomModules = field(default_factory=CustomModules)
    ignores_unexpected: bool = False

    @property
    def metadata(self) -> SourceMetadata:
        """What the checkpoint holds besides tensors, with the values of this rank."""
        return self.placed.metadata


def try_load_request(
    comm: Comm,
    source: Source | Exception,
    arguments: LoadArguments,
    *,
    options: LoadOptions,
    policy: ReadPolicy,
    targets: Callable[[Source], LoadArguments] | None = None,
) -> LoadRequest | Exception:
    """Return the request, or this rank's error, which `load` then raises on every rank.

    `targets`: returns further arguments, of which it may leave out what it does not need.
    """
    if isinstance(source, Exception):
        return source

    def request() -> LoadRequest:
        chosen = arguments if targets is None else {**arguments, **targets(source)}
        request = load_request(comm, source, chosen, options=options, policy=policy)
        return request if targets is None else replace(request, ignores_unexpected=True)

    return result_or_error(request)


def load_request(
    comm: Comm,
    source: Source,
    arguments: LoadArguments,
    *,
    options: LoadOptions,
    policy: ReadPolicy,
) -> LoadRequest:
    """Return the request of this rank. Raises LayoutError for targets that cannot be placed."""
    layout, model = arguments.get("layout"), arguments.get("model")
    optimizer, master_weights = arguments.get("optimizer"), arguments.get("master_weights")
    resolver = make_resolver(comm, layout)
    optimizers, optimizers_with_masters = as_optimizers(optimizer), as_optimizers(master_weights)
    # Optimizers are flattened below, as what they must hold depends on what is stored.
    state = flatten_state(
        resolver,
        model=model,
        optimizer=None if optimizers else optimizer,
        master_weights=None if optimizers_with_masters else master_weights,
        extra_parts=arguments.get("parts"),
        model_dtype=None,
    )
    slices = state.slices()
    optimizers = with_views(optimizers, slices)
    for each in optimizers:
        check_loadable(each)
    optimizers_with_masters = with_views(optimizers_with_masters, slices)
    indexed = source.indexed  # its metadata follows from the order of the optimizers' parameters
    placed = place_metadata(comm, source, state, resolver, options) if indexed is None else None
    metadata = placed.metadata if placed is not None else SourceMetadata()
    optimizers, optimizers_with_masters, parts_to_read = _select_optimizers(
        optimizers, optimizers_with_masters, master_weights, state, metadata, options
    )
    if indexed is not None:
        by_name = OPTIMIZER in parts_to_read
        source = _with_parameter_names(indexed, optimizers, state, by_name=by_name)
    placed = placed or place_metadata(comm, source, state, resolver, options)
    metadata = placed.metadata
    # Masters that nobody requested are read with their parameters only.
    requested = {*parts_to_read} if options.parts is None else {*options.parts}
    follows_weights = master_weights is None and requested.isdisjoint((OPTIMIZER, MASTER))
    optimizer_target = None
    if optimizers or optimizers_with_masters:
        if model is None and not arguments.get("parts"):
            raise LayoutError(
                "optimizer: its parameters have no names without their model; pass `model` too"
            )
        names = {*state.param_names().values()} if follows_weights else set[str]()
        unchanged = names - state.params_of(parts_to_read)
        optimizer_target = _optimizer_target(
            optimizers, optimizers_with_masters, source, metadata, state, unchanged
        )
        _add_optimizer_tensors(
            resolver, state, optimizer_target, optimizers, optimizers_with_masters
        )
    entries = EntryMatch()
    if optimizers:
        stepped = stepped_optimizers(optimizer)
        entries = match_entries(stepped, state.param_names(), metadata.scalars, slices)
    state.tensors = [tensor for tensor in state.tensors if tensor.decl.part in parts_to_read]
    models = {MODEL: model, **(arguments.get("parts") or {})}
    models = {part: models[part] for part in sorted(parts_to_read & models.keys())}
    custom = custom_modules(models, state, resolver)
    for tensor in state.tensors:
        if not tensor.local.is_contiguous():
            check_not_expanded(f"{tensor.decl.part}:{tensor.decl.fqn}", tensor.local)
    state.requested_parts.intersection_update(requested if follows_weights else parts_to_read)
    return LoadRequest(
        source=source,
        state=state,
        placed=placed,
        optimizer=optimizer_target,
        layout=layout,
        matched_rules=resolver.matched_patterns,
        strict=arguments.get("strict", True),
        options=options,
        policy=policy,
        extra=arguments.get("extra"),
        rank_extra=arguments.get("rank_extra"),
        entries=entries,
        custom=custom,
    )


def _select_optimizers(
    optimizers: list[Optimizer],
    optimizers_with_masters: list[Optimizer],
    master_weights: OptimizerArgument | None,
    state: FlatState,
    metadata: SourceMetadata,
    options: LoadOptions,
) -> tuple[list[Optimizer], list[Optimizer], set[str]]:
    """Return the optimizers whose state is read, those whose masters are, and the parts to read.

    Without `master_weights`, masters are those of `optimizers`: existing ones, and those that an
    optimizer would create at its next step. Without its state, the class must tell that it would.
    """
    names, saved = state.param_names(), SavedGroups(metadata.groups)
    if master_weights is None:
        optimizers_with_masters = [
            candidate
            for candidate in optimizers
            if has_masters(candidate) or created_master_key(candidate, names, saved) is not None
        ]
    else:
        _check_masters(optimizers, optimizers_with_masters, master_weights, names, saved)
    target_parts = {
        *state.requested_parts,
        *([OPTIMIZER] if optimizers else []),
        *([MASTER] if optimizers_with_masters else []),
    }
    parts_to_read = _parts_to_read(target_parts, options)
    if master_weights is None and OPTIMIZER not in parts_to_read:
        optimizers_with_masters = [
            candidate
            for candidate in optimizers_with_masters
            if has_masters(candidate) or master_key(candidate) is not None
        ]
    if (
        master_weights is None
        and optimizers_with_masters
        and parts_to_read & {MODEL, OPTIMIZER, *state.extra_parts}
    ):
        parts_to_read.add(MASTER)  # else the next step overwrites the model from old masters
    return (
        optimizers if OPTIMIZER in parts_to_read else [],
        optimizers_with_masters if MASTER in parts_to_read else [],
        parts_to_read,
    )


def _add_optimizer_tensors(
    resolver: ShardingResolver,
    state: FlatState,
    optimizer_target: OptimizerTarget,
    optimizers: list[Optimizer],
    optimizers_with_masters: list[Optimizer],
) -> None:
    """Add optimizer state and masters to the targets in `state`, sharded like their parameters."""
    param_refs = state.param_refs()
    if optimizers:
        state.requested_parts.add(OPTIMIZER)
        state.tensors += resolve_like_params(
            resolver, OPTIMIZER, optimizer_target.tensors, param_refs
        )
    if optimizers_with_masters:
        state.requested_parts.add(MASTER)
        existing = collect_masters(optimizers_with_masters, state.param_names()).items()
        created = ((fqn, tensor) for fqn, (_, tensor) in optimizer_target.masters.items())
        masters = {
            fqn: tensor
            for fqn, tensor in (*existing, *created)
            if fqn not in optimizer_target.unchanged
        }
        state.tensors += resolve_like_params(resolver, MASTER, masters, param_refs)


def _check_masters(
    optimizers: list[Optimizer],
    optimizers_with_masters: list[Optimizer],
    masters: OptimizerArgument,
    names: Mapping[int, str],
    saved: SavedGroups,
) -> None:
    """Raise LayoutError if an optimizer would use other masters than `master_weights`."""
    target_masters = (
        masters if isinstance(masters, Mapping) else collect_masters(optimizers_with_masters, names)
    )
    check_same_masters(target_masters, collect_masters(optimizers, names))
    for optimizer in optimizers:
        if (
            optimizer not in optimizers_with_masters
            and not has_masters(optimizer)
            and created_master_key(optimizer, names, saved) is not None
        ):
            raise LayoutError(
                "master_weights: got other masters than those that "
                f"{type(optimizer).__name__} creates at its first step; omit master_weights=, or "
                "pass the optimizer there"
            )


def _optimizer_target(
    optimizers: list[Optimizer],
    optimizers_with_masters: list[Optimizer],
    source: Source,
    metadata: SourceMetadata,
    state: FlatState,
    unchanged: set[str],
) -> OptimizerTarget:
    """Allocate state of `optimizers` and masters of `optimizers_with_masters`.

    `optimizers_with_masters`: some of `optimizers`; or any, if `optimizers` is empty. `unchanged`:
    names of parameters without masters to read.
    """
    selected_optimizers, names = optimizers or optimizers_with_masters, state.param_names()
    shapes = {fqn: param_ref.tensor.shape for fqn, param_ref in state.param_refs().items()}
    params = (param for *_, param in group_params(optimizers))
    fqns = {names[id(param)] for param in params if id(param) in names}
    dims = metadata.paddable_dims
    saved, padded = saved_state(fqns, source, state.aliases, paddable_dims=dims, shapes=shapes)
    differing = {
        key.rpartition("/")[0]
        for key, (_, shape) in saved.items()
        if shape != shapes.get(key.rpartition("/")[0])
    }
    checkpoint_shapes = saved_shapes(differing, source, state.aliases)
    saved_groups = SavedGroups(metadata.groups)
    optimizer_target = prepare_optimizer(
        selected_optimizers,
        names,
        SavedOptimizer(saved, checkpoint_shapes, saved_groups),
        shapes=shapes,
        loads_state=bool(optimizers),
    )
    init_grown_state(optimizer_target, padded)
    optimizer_target.unchanged |= unchanged
    if optimizers_with_masters:
        master_names, names_of = set(source.names(MASTER)), TensorNames(source, state.aliases)
        stored = {
            fqn for fqn in shapes if not master_names.isdisjoint(names_of(fqn, MASTER, MASTER))
        }
        prepare_masters(
            optimizer_target,
            saved_groups,
            stored_masters=stored,
            shapes=shapes,
            targets_may_be_larger=bool(dims),
        )
    return optimizer_target


def _with_parameter_names(
    source: IndexedOptimizerSource, optimizers: list[Optimizer], state: FlatState, *, by_name: bool
) -> Source:
    """Return the source with optimizer state named as these optimizers order their parameters.

    `by_name`: without optimizers, name it as the checkpoint does; else leave it out.
    """
    if not optimizers:
        return source.with_stored_order if by_name else source.without_optimizer
    names, param_refs = state.param_names(), state.param_refs()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names_by_group = [
        [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for group in groups
    ]
    return source.with_order(
        [[(name, param_refs[name].tensor.shape) for name in group] for group in names_by_group]
    )


def _parts_to_read(target_parts: set[str], options: LoadOptions) -> set[str]:
    """Return the parts to read. Raises LayoutError for a selected part without a target."""
    unknown = [part for part in options.parts or () if part not in target_parts]
    if unknown:
        raise LayoutError(
            f"LoadOptions(parts=...): {unknown[0]!r} has no target in this load; expected some of "
            f"{', '.join(sorted(target_parts))}"
        )
    return set(filter(options.loads, target_parts))

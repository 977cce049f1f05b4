"""From what a caller gives to what a save or a load needs: tensors flattened, named and placed. Changes nothing of the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.load.match import TensorNames, saved_shapes, saved_state
from unified_ckpt.engine.source.by_position import ByPosition
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import LayoutError
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    State,
    flatten_state,
    place_targets,
)
from unified_ckpt.runtime.torch_state.growth import begin_grown
from unified_ckpt.runtime.torch_state.modules import Model
from unified_ckpt.runtime.torch_state.optimizer_target import (
    OptimizerTarget,
    prepare_masters,
    prepare_optimizer,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    Optimizers,
    as_list,
    check_one_master,
    holds_masters,
    master_key,
    masters_of,
)
from unified_ckpt.runtime.torch_state.placements import _placer, refuse_shared


@dataclass(frozen=True, slots=True)
class Targets:
    """What a load is asked to fill; arguments of `Checkpointer.load`."""

    model: Model | None
    optimizer: Optimizers | None
    master_weights: Optimizers | None
    parts: Mapping[str, Model] | None
    layout: Layout | None
    extra: Any = None
    rank_extra: Any = None


def try_load_request(
    comm: Comm, source: Source | Exception, what: Targets, *, strict: bool, options: LoadOptions
) -> LoadRequest | Exception:
    """The targets of a load, or the error that this rank met, to be told to every rank in the load."""
    try:
        if isinstance(source, Exception):
            raise source
        request = load_request(comm, source, what, strict=strict, options=options)
        request.extra, request.rank_extra = what.extra, what.rank_extra
        return request
    except Exception as error:
        return error


def load_request(
    comm: Comm, folder: Source, what: Targets, *, strict: bool, options: LoadOptions
) -> LoadRequest:
    """The tensors to fill. Nothing of the caller's is changed."""
    placer, model, optimizer, master_weights = (
        _placer(comm, what.layout),
        what.model,
        what.optimizer,
        what.master_weights,
    )
    objects, holders = as_list(optimizer), as_list(master_weights)
    state = flatten_state(
        placer,
        model=model,
        optimizer=None if objects else optimizer,
        master_weights=None if holders else master_weights,
        further=what.parts,
        model_dtype=None,
    )
    names, target = state.names(), None
    said = Said() if isinstance(folder, ByPosition) else folder.said()
    if master_weights is None:
        holders = [one for one in objects if holds_masters(one) or _makes_masters(one, names, said)]
    else:
        _check_masters(objects, holders, master_weights, names, said)
    given = {*state.asked, *([OPTIMIZER] if objects else []), *([MASTER] if holders else [])}
    wanted = _wanted(given, options.parts)
    if master_weights is None and OPTIMIZER not in wanted:
        holders = [one for one in holders if holds_masters(one)]
    if master_weights is None and holders and wanted & {MODEL, OPTIMIZER, *state.further}:
        wanted.add(MASTER)  # else the next step would overwrite what is loaded
    objects = objects if OPTIMIZER in wanted else []
    if isinstance(folder, ByPosition):
        folder = _settled(folder, objects, state, by_name=OPTIMIZER in wanted)
        said = folder.said()
    holders = holders if MASTER in wanted else []
    if objects or holders:
        if model is None and not what.parts:
            raise LayoutError(
                "optimizer: parameters have no names without their model; needed `model` too"
            )
        leaders = state.leaders()
        target = _optimizer_target(objects, holders, folder, said, state)
        if objects:
            state.asked.add(OPTIMIZER)
            state.parts += place_targets(placer, OPTIMIZER, target.tensors, leaders)
        if holders:
            state.asked.add(MASTER)
            masters = masters_of(holders, names) | {
                fqn: tensor for fqn, (_, tensor) in target.masters.items()
            }
            state.parts += place_targets(placer, MASTER, masters, leaders)
    state.parts = [part for part in state.parts if part.row.part in wanted]
    for part in state.parts:
        if not part.local.is_contiguous():
            refuse_shared(f"{part.row.part}:{part.row.fqn}", part.local)
    state.asked.intersection_update(wanted)
    return LoadRequest(folder, state, said, target, what.layout, placer.matched, strict, options)


def _check_masters(
    objects: list[Optimizer],
    holders: list[Optimizer],
    masters: Optimizers,
    names: Mapping[int, str],
    said: Said,
) -> None:
    """LayoutError where `master_weights` is filled, and an optimizer goes on from masters of its own."""
    known = masters if isinstance(masters, Mapping) else masters_of(holders, names)
    check_one_master(known, masters_of(objects, names))
    for one in objects:
        if one not in holders and not holds_masters(one) and _makes_masters(one, names, said):
            raise LayoutError(
                f"master_weights: got other masters than those that {type(one).__name__} makes at its first step; "
                "leave out master_weights=, or pass the optimizer there"
            )


def _makes_masters(optimizer: Optimizer, names: Mapping[int, str], said: Said) -> bool:
    """Whether the next step of an optimizer without masters makes them."""
    params = {
        names.get(id(param), "") for group in optimizer.param_groups for param in group["params"]
    }
    return (
        master_key(
            optimizer,
            next((one for one in said.groups if not params.isdisjoint(one["names"])), None),
        )
        is not None
    )


def _optimizer_target(
    objects: list[Optimizer], holders: list[Optimizer], source: Source, said: Said, state: State
) -> OptimizerTarget:
    """Memory for the state of `objects` and the masters of `holders`, which are some of them where there are any."""
    of, names = objects or holders, state.names()
    shapes = {name: leader.at.shape for name, leader in state.leaders().items()}
    held = _held(of, names) if objects else set()
    saved, grown = saved_state(held, source, state.aliases, pads=said.pads, shapes=shapes)
    differing = {
        key.rpartition("/")[0]
        for key, (_, shape) in saved.items()
        if shape != shapes.get(key.rpartition("/")[0])
    }
    theirs = saved_shapes(differing, source, state.aliases)
    target = prepare_optimizer(
        of, names, saved, shapes=shapes, saved_shapes=theirs, wanted=bool(objects)
    )
    begin_grown(target, grown)
    if holders:
        known, names_of = set(source.names(MASTER)), TensorNames(source, state.aliases)
        stored = {fqn for fqn in shapes if not known.isdisjoint(names_of(fqn, MASTER, MASTER))}
        prepare_masters(target, said.groups, stored=stored, shapes=shapes, grows=bool(said.pads))
    return target


def _settled(
    source: ByPosition, optimizers: list[Optimizer], state: State, *, by_name: bool
) -> Source:
    """The source with the names that these optimizers have for what it has by position. `by_name`: some are wanted, whoever has them."""
    if not optimizers:
        return source.whole if by_name else source.without_optimizer()
    names, leaders = state.names(), state.leaders()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known = [
        [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for group in groups
    ]
    return source.named_for([[(name, leaders[name].at.shape) for name in group] for group in known])


def _wanted(given: set[str], chosen: Sequence[str] | None) -> set[str]:
    """The parts to read. LayoutError for one that was chosen and has no target."""
    stray = [part for part in chosen or () if part not in given]
    if stray:
        raise LayoutError(
            f"LoadOptions(parts=...): {stray[0]!r} has no target in this load; needed some of {', '.join(sorted(given))}"
        )
    return given if chosen is None else set(chosen)


def _held(optimizers: list[Optimizer], names: Mapping[int, str]) -> set[str]:
    return {
        names[id(p)]
        for o in optimizers
        for group in o.param_groups
        for p in group["params"]
        if id(p) in names
    }


@dataclass(slots=True)
class LoadRequest:
    """What a rank wants filled. `optimizer`: state made ready for it. `extra`, `rank_extra`: trees with objects to fill."""

    source: Source
    state: State
    said: Said
    optimizer: OptimizerTarget | None
    layout: Layout | None
    matched: set[str]
    strict: bool
    options: LoadOptions
    extra: Any = None
    rank_extra: Any = None

"""Restores stateful objects in `extra` and `rank_extra`: schedulers, loaders, random generators.

State could be lost if the checkpoint has none for an object, if it belongs to another place in the
mesh, or if a load stops half way. Every rank therefore looks up the state of each object before the
first byte is written, and errors name the object's path.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap, zip_longest
from typing import Any

from unified_ckpt.core.sharding.rank_mesh import DataCoordinates, RankPlacement
from unified_ckpt.core.text import format_ranks
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.rank_extras import (
    Absent,
    RankExtraEntries,
    equal_value,
    value_at,
)
from unified_ckpt.engine.source.stateful_objects import (
    NamedObject,
    replace_at_paths,
    stateful_objects,
)
from unified_ckpt.engine.source.view import RankExtras
from unified_ckpt.errors import (
    CheckpointError,
    IncompleteError,
    IntegrityError,
    MismatchError,
    NotFoundError,
    StorageError,
)
from unified_ckpt.format import codec
from unified_ckpt.format.codec import Path, path_text
from unified_ckpt.runtime.torch_state.rng import GeneratorState
from unified_ckpt.runtime.torch_state.sampler import start_loader

RANK_EXTRA_ENTRY = "LoadReport.rank_extra"
_READ_ERRORS = (IntegrityError, IncompleteError, StorageError)  # an older checkpoint may load


@dataclass(frozen=True, slots=True)
class _ObjectRestore:
    """State to load into an object; of all saving ranks if `from_all_ranks`."""

    named: NamedObject
    state: Any
    from_all_ranks: bool = False


@dataclass(slots=True)
class StatefulRestore:
    """The state that a rank's objects will load, and the entry of `rank_extra` it gets.

    `missing`: paths of objects without stored state; `kept`: paths of objects left unchanged
    because the stored state is not theirs, or its node is missing. `unplaced`: paths of values that
    this rank does not get because of its place in the mesh; `RANK_EXTRA_ENTRY` for the entry.
    `labels`: of all objects; `paths`: of those in `rank_extra`.
    """

    rank_extra: Any = None
    labels: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    restores: list[_ObjectRestore] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)

    def keep(self, unplaced: Collection[str]) -> None:
        """Keep what any rank could not place, so that all ranks agree. Random states may differ."""
        kept = [
            restore.named.path
            for restore in self.restores
            if path_text(restore.named.path) in unplaced and not restore.named.is_random
        ]
        self.restores = [item for item in self.restores if item.named.path not in kept]
        entry = None if RANK_EXTRA_ENTRY in unplaced else self.rank_extra
        self.rank_extra = _without_states(entry, kept)

    def apply(self, placement: RankPlacement) -> None:
        """Load a copy of its state into each object. Errors name the object."""
        rank, world = placement.coordinate, placement.count
        for number, restore in enumerate(self.restores):
            try:
                if restore.from_all_ranks:
                    restore.named.target.load_from_ranks(restore.state, rank=rank, world=world)
                else:
                    # The object may change its state, and the report has the same one.
                    restore.named.target.load_state_dict(copy.deepcopy(restore.state))
                    start_loader(restore.named.target)
            except Exception as error:
                location = path_text(restore.named.path)
                class_name = type(restore.named.target).__name__
                not_restored = ", ".join(
                    path_text(later.named.path) for later in self.restores[number + 1 :]
                )
                others = f", but {not_restored} are not" if not_restored else ""
                consequence = f"the tensors are loaded{others}: the target is unusable"
                error_class = type(error) if isinstance(error, _READ_ERRORS) else CheckpointError
                raise error_class(
                    f"{location}: {class_name} could not load its state: "
                    f"{type(error).__name__}: {error}; {consequence}"
                ) from error


@dataclass(frozen=True, slots=True)
class PerRankStates(RankExtras):
    """The state of one object at each saved data coordinate. Valid during the load.

    Read on access: MismatchError if the ranks of a coordinate stored different ones.
    """

    _path: Path
    _coordinates: DataCoordinates

    def _entry(self, rank: int) -> Any:
        coordinate, ranks = rank, self._coordinates.ranks(rank)
        state = equal_value(ranks, partial(RankExtraEntries(self._source).read, path=self._path))
        if isinstance(state, Absent):
            reason = "stored different ones" if state is Absent.DIFFERENT else "stored none"
            error_class = MismatchError if state is Absent.DIFFERENT else NotFoundError
            raise error_class(
                f"{path_text(self._path)}: got no state for data coordinate {coordinate} of "
                f"{len(self)}: rank(s) {format_ranks(ranks)} {reason}"
            )
        return state


def plan_restore(
    extra: Any,
    rank_extra: Any,
    source: Source,
    metadata: SourceMetadata,
    placement: RankPlacement,
) -> StatefulRestore:
    """Look up the stored state of each object in `extra` and `rank_extra`. Changes no object.

    Raises FormatError for trees that a save would refuse. Reads the entries of the saved ranks
    whose values this rank gets, or one entry to see which objects the checkpoint has.
    """
    plan = StatefulRestore()
    for named in _checked_objects(extra, "extra"):
        plan.labels.append(named.label)
        key = next(iter(named.path[1:]), None)
        if metadata.save_id is None and key in source.parts:  # another format's
            raise MismatchError(
                f"{path_text(named.path)}: the checkpoint has its tensors as the part {key}, "
                f"expected its whole state in extra; load them with parts={{{key!r}: ...}}"
            )
        _add_restore(plan, named, value_at(metadata.extra, named.path))
    objects = _checked_objects(rank_extra, "rank_extra")
    plan.labels += [named.label for named in objects]
    plan.paths += [named.path for named in objects]
    if metadata.rank_extras:
        entries = RankExtraEntries(source)
        for named in objects:
            _plan_rank_object(plan, named, entries, metadata.rank_extras, placement)
        plan.rank_extra = _rank_value(plan, entries, placement)
    else:
        plan.missing += [path_text(named.path) for named in objects]
    plan.restores.sort(key=lambda restore: restore.named.is_random)  # across both trees
    return plan


def _plan_rank_object(
    plan: StatefulRestore,
    named: NamedObject,
    entries: RankExtraEntries,
    saved_world: int,
    placement: RankPlacement,
) -> None:
    """Add the restore of an object in `rank_extra`, or name why it stays as it is."""
    path, read = path_text(named.path), partial(entries.read, path=named.path)
    sources = placement.random_states if named.is_random else placement.values
    # Any entry shows whether the checkpoint has a state for this object.
    state = equal_value(sources.ranks or (placement.rank % saved_world,), read)
    combines = callable(getattr(named.target, "load_from_ranks", None))
    combined = sources.combined if combines else None
    if state is Absent.LOST:
        plan.kept.append(path)
    elif state is Absent.MISSING or (sources.ranks and state is not Absent.DIFFERENT):
        _add_restore(plan, named, state)
    elif combined is not None and not _differs(combined, read, placement):
        states = PerRankStates(entries.source, combined.count, named.path, combined)
        plan.restores.append(_ObjectRestore(named, states, from_all_ranks=True))
    else:
        plan.kept.append(path)
        plan.unplaced.append(path)


def _differs(
    combined: DataCoordinates, read: Callable[[int], Any], placement: RankPlacement
) -> bool:
    """Return whether ranks of one data coordinate stored different states.

    Each rank checks some of the coordinates.
    """
    if not combined.replicated:
        return False
    share = range(placement.rank, combined.count, placement.world)
    return any(equal_value(combined.ranks(each), read) is Absent.DIFFERENT for each in share)


def _rank_value(plan: StatefulRestore, entries: RankExtraEntries, placement: RankPlacement) -> Any:
    """Return the entry of `rank_extra` that this rank gets, or None, without unplaced states."""
    unplaced = [path for path in plan.paths if path_text(path) in plan.unplaced]

    def read(rank: int) -> Any:
        entry = entries.read(rank)
        return entry if isinstance(entry, Absent) else _without_states(entry, unplaced)

    entry = equal_value(placement.values.ranks, read)
    if entry is Absent.DIFFERENT or not placement.values.ranks:
        plan.unplaced.append(RANK_EXTRA_ENTRY)
    return None if isinstance(entry, Absent) else entry


def _without_states(value: Any, paths: Iterable[Path]) -> Any:
    """Return a value with None at these paths, as far as it has them."""
    present = [path for path in paths if value_at(value, path) is not Absent.MISSING]
    return replace_at_paths(value, "rank_extra", dict.fromkeys(present))


def _checked_objects(value: Any, root: str) -> list[NamedObject]:
    """Return the objects of a tree after checking that the rest of it can be encoded."""
    objects = stateful_objects(value, root)
    codec.encode(
        replace_at_paths(value, root, dict.fromkeys(named.path for named in objects)), root
    )
    return objects


def _add_restore(plan: StatefulRestore, named: NamedObject, state: Any) -> None:
    if state is Absent.MISSING:
        plan.missing.append(path_text(named.path))
    elif isinstance(named.target, GeneratorState) and (problem := named.target.mismatch(state)):
        raise MismatchError(f"{path_text(named.path)}: {problem}")
    else:
        if _has_number_keys(state):
            state = _with_int_keys(state, named.target.state_dict())
        plan.restores.append(_ObjectRestore(named, state))


def _has_number_keys(state: Any) -> bool:
    if isinstance(state, list | tuple):
        return any(map(_has_number_keys, state))
    return isinstance(state, dict) and any(
        _is_number(key) or _has_number_keys(value) for key, value in state.items()
    )


def _is_number(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal()


def _with_int_keys(state: Any, current: Any) -> Any:
    """Return the state with ints as keys where the object has ints, in dicts of its classes.

    torch.distributed.checkpoint stores keys as text, such as the milestones of `MultiStepLR`.
    """
    if type(state) in (list, tuple) and type(current) in (list, tuple):
        return type(state)(starmap(_with_int_keys, zip_longest(state, current[: len(state)])))
    if not isinstance(state, dict) or not isinstance(current, dict):
        return state
    all_ints = bool(current) and all(type(key) is int for key in current)
    if not (all_ints and all(map(_is_number, state))):
        return {key: _with_int_keys(value, current.get(key)) for key, value in state.items()}
    items = {int(key): value for key, value in state.items()}
    items = {key: _with_int_keys(value, current.get(key)) for key, value in items.items()}
    return type(current)(items) if isinstance(current, Counter | OrderedDict) else items

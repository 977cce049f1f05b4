"""Objects that tell and take their own state, in what a caller gives as `extra` and `rank_extra`:
schedulers, loaders, random states.

How state could be lost: an object is named and the checkpoint has nothing for it; another number of
ranks saved; a load ends half way and nobody says so. So what each object is to get is looked up on
every rank before the first byte is written, and an error names its path.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from unified_ckpt.engine.source.protocol import Source, SourceMetadata, VerificationLog
from unified_ckpt.engine.source.view import RankExtras
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    IntegrityError,
    MismatchError,
    NotFoundError,
    StorageError,
)
from unified_ckpt.format import codec
from unified_ckpt.format.codec import Path, path_text
from unified_ckpt.runtime.torch_state.rng import GeneratorState, RandomStates, is_generator
from unified_ckpt.runtime.torch_state.sampler import start_loader

_MISSING = object()
_READ_ERRORS = (IntegrityError, IncompleteError, StorageError)  # another checkpoint may do


@dataclass(frozen=True, slots=True)
class NamedObject:
    """An object, and where it stands."""

    path: Path
    target: Any

    @property
    def label(self) -> str:
        """`("extra", "a", 0)` -> `"extra:a[0]"`."""
        rest = path_text(("", *self.path[1:])).removeprefix(".")
        return f"{self.path[0]}:{rest}" if rest else str(self.path[0])


def stateful_objects(value: Any, root: str) -> list[NamedObject]:
    """The objects in a tree of dicts, lists and tuples, in the order in which they stand, but
    random states last: others may draw.

    Random generators are among them, each as a `GeneratorState`.
    FormatError for a module with sharded parameters: its state is no one rank's.
    """
    objects = list(_iter_objects(value, (root,), set()))
    for named in objects:
        if isinstance(named.target, nn.Module) and any(
            isinstance(param, DTensor) for param in named.target.parameters()
        ):
            raise FormatError(
                f"{path_text(named.path)}: a module with sharded parameters; needed `parts`, which stores them whole"
            )
    return sorted(objects, key=_is_random)


def _is_random(named: NamedObject) -> bool:
    return isinstance(named.target, RandomStates | GeneratorState)


def _iter_objects(value: Any, path: Path, ancestors: set[int]) -> Iterator[NamedObject]:
    """`ancestors`: the containers that `value` is in; one that holds itself is the codec's to
    refuse.
    """
    if _is_stateful(value):
        yield NamedObject(path, value)
    elif is_generator(value):
        yield NamedObject(path, GeneratorState(value))
    elif (
        type(value) in (*codec.MAPPINGS, *codec.SEQUENCES)
        and id(value) not in ancestors
        and len(path) <= codec.MAX_DEPTH
    ):
        for key, item in _items(value):
            yield from _iter_objects(item, (*path, key), ancestors | {id(value)})


def _is_stateful(value: Any) -> bool:
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, methods))


def _items(value: Any) -> Collection[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def replace_with_states(value: Any, root: str) -> Any:
    """The tree with each object's state in its place. The caller's own containers stay as they are;
    states are not copied.
    """
    return _replace_at_paths(
        value, root, {named.path: _state_of(named) for named in stateful_objects(value, root)}
    )


def _state_of(named: NamedObject) -> Any:
    location, class_name = path_text(named.path), type(named.target).__name__
    try:
        state = named.target.state_dict()
    except Exception as error:
        raise FormatError(
            f"{location}: {class_name}.state_dict() raised {type(error).__name__}: {error}; needed its state"
        ) from error
    if state is None:
        raise FormatError(f"{location}: {class_name}.state_dict() gave None; needed the state")
    return state


def _replace_at_paths(value: Any, root: str, states: Mapping[Path, Any]) -> Any:
    """The tree with these states at their paths; what is not on the way to one is the same object."""
    prefixes = {path[:length] for path in states for length in range(1, len(path))}
    return _replace_below(value, (root,), states, prefixes)


def _replace_below(
    value: Any, path: Path, states: Mapping[Path, Any], prefixes: Collection[Path]
) -> Any:
    if path in states:
        return states[path]
    if path not in prefixes:
        return value
    items = [
        (key, _replace_below(item, (*path, key), states, prefixes)) for key, item in _items(value)
    ]
    if isinstance(value, tuple):
        return tuple(item for _, item in items)
    clone = copy.copy(value)
    for key, item in items:
        clone[key] = item
    return clone


@dataclass(frozen=True, slots=True)
class _ObjectRestore:
    """`state`: what the object gets; of all saving ranks, where `from_all_ranks`."""

    named: NamedObject
    state: Any
    from_all_ranks: bool = False


@dataclass(slots=True)
class StatefulRestore:
    """What a rank's objects get, and its own entry of `rank_extra`. `missing`: paths of objects for
    which the checkpoint has nothing;
    `kept`: of those that keep what they are, because the state that is there is not for them.
    `labels`: of all objects.
    """

    rank_extra: Any = None
    labels: list[str] = field(default_factory=list)
    restores: list[_ObjectRestore] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def apply(self, *, rank: int, world: int) -> None:
        """Gives each object its own copy. CheckpointError that names the object whose call fails;
        an error of reading stays what it is.
        """
        for number, restore in enumerate(self.restores):
            try:
                if restore.from_all_ranks:
                    restore.named.target.load_from_ranks(restore.state, rank=rank, world=world)
                else:
                    restore.named.target.load_state_dict(
                        copy.deepcopy(restore.state)
                    )  # it may keep or change it; the report has the same
                    start_loader(restore.named.target)
            except Exception as error:
                location, class_name = (
                    path_text(restore.named.path),
                    type(restore.named.target).__name__,
                )
                not_restored = ", ".join(
                    path_text(later.named.path) for later in self.restores[number + 1 :]
                )
                consequence = f"the tensors are loaded{f', {not_restored} not' if not_restored else ''}: the target is unusable"
                error_class = type(error) if isinstance(error, _READ_ERRORS) else CheckpointError
                raise error_class(
                    f"{location}: {class_name} did not take its state: {type(error).__name__}: {error}; {consequence}"
                ) from error


class PerRankStates(Sequence[Any]):
    """One object's state on each rank of the save, read when asked for; while the load lasts."""

    def __init__(self, entries: RankExtras, path: Path) -> None:
        self._entries, self._path = entries, path

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        state = _value_at(self._entries[rank], self._path)
        if state is _MISSING:
            raise NotFoundError(
                f"{path_text(self._path)}: rank {rank} of the {len(self)} that saved has left none"
            )
        return state

    def __len__(self) -> int:
        return len(self._entries)


def plan_restore(
    extra: Any,
    rank_extra: Any,
    source: Source,
    metadata: SourceMetadata,
    verification_log: VerificationLog | None,
    *,
    rank: int,
    world: int,
) -> StatefulRestore:
    """What is there for the objects in `extra` and `rank_extra`, trees of this rank's. Changes none
    of them.

    FormatError for what a save would refuse. Where another number of ranks has saved, one entry is
    read, to see what is there.
    """
    plan, saved_world_size = StatefulRestore(), metadata.rank_extras
    for named in _checked_objects(extra, "extra"):
        plan.labels.append(named.label)
        _add_restore(plan, named, _value_at(metadata.extra, named.path))
    objects = _checked_objects(rank_extra, "rank_extra")
    plan.labels += [named.label for named in objects]
    damage_count = len(verification_log.damage) if verification_log is not None else 0
    entry = (
        source.rank_extra(rank % saved_world_size)
        if saved_world_size and (saved_world_size == world or objects)
        else None
    )
    is_lost = (
        entry is None
        and verification_log is not None
        and len(verification_log.damage) > damage_count
    )  # with the machine that had it
    for named in objects:
        state = _value_at(entry, named.path)
        if is_lost:
            plan.kept.append(path_text(named.path))
        elif saved_world_size == world or state is _MISSING:
            _add_restore(plan, named, state)
        elif callable(getattr(named.target, "load_from_ranks", None)):
            plan.restores.append(
                _ObjectRestore(
                    named,
                    PerRankStates(RankExtras(source, saved_world_size), named.path),
                    from_all_ranks=True,
                )
            )
        else:
            plan.kept.append(path_text(named.path))
    plan.restores.sort(key=lambda restore: _is_random(restore.named))  # of both trees
    plan.rank_extra = entry if saved_world_size == world else None
    return plan


def _checked_objects(value: Any, root: str) -> list[NamedObject]:
    """The objects of a tree that could be saved as it is, but for their states."""
    objects = stateful_objects(value, root)
    codec.encode(
        _replace_at_paths(value, root, dict.fromkeys(named.path for named in objects)), root
    )
    return objects


def _add_restore(plan: StatefulRestore, named: NamedObject, state: Any) -> None:
    if state is _MISSING:
        plan.missing.append(path_text(named.path))
    elif isinstance(named.target, GeneratorState) and (problem := named.target.mismatch(state)):
        raise MismatchError(
            f"{path_text(named.path)}: {problem}; needed the same kind of generator"
        )
    else:
        plan.restores.append(_ObjectRestore(named, state))


def _value_at(tree: Any, path: Path) -> Any:
    """What stands at the path of a tree, without its root; None there counts as nothing."""
    for step in path[1:]:
        valid_steps: Collection[Any] = (
            range(len(tree))
            if isinstance(tree, codec.SEQUENCES)
            else tree
            if isinstance(tree, dict)
            else ()
        )
        if step not in valid_steps:
            return _MISSING
        tree = tree[step]
    return _MISSING if tree is None else tree

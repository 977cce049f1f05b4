"""Objects that tell and take their own state, in what a caller gives as `extra` and `rank_extra`: schedulers, loaders, random states.

How state could be lost: an object is named and the checkpoint has nothing for it; another number of ranks saved; a load ends half way and
nobody says so. So what each object is to get is looked up on every rank before the first byte is written, and an error names its path.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from unified_ckpt.engine.source.protocol import Ledger, Said, Source
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
from unified_ckpt.runtime.torch_state.sampler import start

_MISSING = object()
_OF_READING = (IntegrityError, IncompleteError, StorageError)  # another checkpoint may do


@dataclass(frozen=True, slots=True)
class Named:
    """An object, and where it stands."""

    path: Path
    target: Any

    @property
    def label(self) -> str:
        """`("extra", "a", 0)` -> `"extra:a[0]"`."""
        rest = path_text(("", *self.path[1:])).removeprefix(".")
        return f"{self.path[0]}:{rest}" if rest else str(self.path[0])


def objects_in(value: Any, root: str) -> list[Named]:
    """The objects in a tree of dicts, lists and tuples, in the order in which they stand, but random states last: others may draw.

    Random generators are among them, each as a `GeneratorState`.
    FormatError for a module with sharded parameters: its state is no one rank's.
    """
    found = list(_walk(value, (root,), set()))
    for one in found:
        if isinstance(one.target, nn.Module) and any(
            isinstance(param, DTensor) for param in one.target.parameters()
        ):
            raise FormatError(
                f"{path_text(one.path)}: a module with sharded parameters; needed `parts`, which stores them whole"
            )
    return sorted(found, key=_is_random)


def _is_random(one: Named) -> bool:
    return isinstance(one.target, RandomStates | GeneratorState)


def _walk(value: Any, path: Path, held: set[int]) -> Iterator[Named]:
    """`held`: the containers that `value` is in; one that holds itself is the codec's to refuse."""
    if _is_object(value):
        yield Named(path, value)
    elif is_generator(value):
        yield Named(path, GeneratorState(value))
    elif (
        type(value) in (*codec.MAPPINGS, *codec.SEQUENCES)
        and id(value) not in held
        and len(path) <= codec.MAX_DEPTH
    ):
        for key, item in _items(value):
            yield from _walk(item, (*path, key), held | {id(value)})


def _is_object(value: Any) -> bool:
    ways = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(map(callable, ways))


def _items(value: Any) -> Collection[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def with_states(value: Any, root: str) -> Any:
    """The tree with each object's state in its place. The caller's own containers stay as they are; states are not copied."""
    return _replace(value, root, {one.path: _state_of(one) for one in objects_in(value, root)})


def _state_of(one: Named) -> Any:
    where, kind = path_text(one.path), type(one.target).__name__
    try:
        state = one.target.state_dict()
    except Exception as error:
        raise FormatError(
            f"{where}: {kind}.state_dict() raised {type(error).__name__}: {error}; needed its state"
        ) from error
    if state is None:
        raise FormatError(f"{where}: {kind}.state_dict() gave None; needed the state")
    return state


def _replace(value: Any, root: str, states: Mapping[Path, Any]) -> Any:
    """The tree with these states at their paths; what is not on the way to one is the same object."""
    around = {path[:length] for path in states for length in range(1, len(path))}
    return _replaced(value, (root,), states, around)


def _replaced(value: Any, path: Path, states: Mapping[Path, Any], around: Collection[Path]) -> Any:
    if path in states:
        return states[path]
    if path not in around:
        return value
    items = [(key, _replaced(item, (*path, key), states, around)) for key, item in _items(value)]
    if isinstance(value, tuple):
        return tuple(item for _, item in items)
    made = copy.copy(value)
    for key, item in items:
        made[key] = item
    return made


@dataclass(frozen=True, slots=True)
class _Fill:
    """`state`: what the object gets; of all saving ranks, where `of_all`."""

    one: Named
    state: Any
    of_all: bool = False


@dataclass(slots=True)
class Filling:
    """What a rank's objects get, and its own entry of `rank_extra`. `missing`: paths of objects for which the checkpoint has nothing;
    `kept`: of those that keep what they are, because the state that is there is not for them. `labels`: of all objects."""

    rank_extra: Any = None
    labels: list[str] = field(default_factory=list)
    fills: list[_Fill] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def fill(self, *, rank: int, world: int) -> None:
        """Gives each object its own copy. CheckpointError that names the object whose call fails; an error of reading stays what it is."""
        for number, fill in enumerate(self.fills):
            try:
                if fill.of_all:
                    fill.one.target.load_from_ranks(fill.state, rank=rank, world=world)
                else:
                    fill.one.target.load_state_dict(
                        copy.deepcopy(fill.state)
                    )  # it may keep or change it; the report has the same
                    start(fill.one.target)
            except Exception as error:
                where, kind = path_text(fill.one.path), type(fill.one.target).__name__
                rest = ", ".join(path_text(other.one.path) for other in self.fills[number + 1 :])
                after = f"the tensors are loaded{f', {rest} not' if rest else ''}: the target is unusable"
                kind_of_error = type(error) if isinstance(error, _OF_READING) else CheckpointError
                raise kind_of_error(
                    f"{where}: {kind} did not take its state: {type(error).__name__}: {error}; {after}"
                ) from error


class RankStates(Sequence[Any]):
    """One object's state on each rank of the save, read when asked for; while the load lasts."""

    def __init__(self, entries: RankExtras, path: Path) -> None:
        self._entries, self._path = entries, path

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        found = _at(self._entries[rank], self._path)
        if found is _MISSING:
            raise NotFoundError(
                f"{path_text(self._path)}: rank {rank} of the {len(self)} that saved has left none"
            )
        return found

    def __len__(self) -> int:
        return len(self._entries)


def look_up(
    extra: Any,
    rank_extra: Any,
    source: Source,
    said: Said,
    ledger: Ledger | None,
    *,
    rank: int,
    world: int,
) -> Filling:
    """What is there for the objects in `extra` and `rank_extra`, trees of this rank's. Changes none of them.

    FormatError for what a save would refuse. Where another number of ranks has saved, one entry is read, to see what is there.
    """
    filling, saved_by = Filling(), said.rank_extras
    for one in _checked(extra, "extra"):
        filling.labels.append(one.label)
        _offer(filling, one, _at(said.extra, one.path))
    objects = _checked(rank_extra, "rank_extra")
    filling.labels += [one.label for one in objects]
    told = len(ledger.damage) if ledger is not None else 0
    entry = (
        source.rank_extra(rank % saved_by) if saved_by and (saved_by == world or objects) else None
    )
    lost = (
        entry is None and ledger is not None and len(ledger.damage) > told
    )  # with the machine that had it
    for one in objects:
        found = _at(entry, one.path)
        if lost:
            filling.kept.append(path_text(one.path))
        elif saved_by == world or found is _MISSING:
            _offer(filling, one, found)
        elif callable(getattr(one.target, "load_from_ranks", None)):
            filling.fills.append(
                _Fill(one, RankStates(RankExtras(source, saved_by), one.path), of_all=True)
            )
        else:
            filling.kept.append(path_text(one.path))
    filling.fills.sort(key=lambda fill: _is_random(fill.one))  # of both trees
    filling.rank_extra = entry if saved_by == world else None
    return filling


def _checked(value: Any, root: str) -> list[Named]:
    """The objects of a tree that could be saved as it is, but for their states."""
    found = objects_in(value, root)
    codec.encode(_replace(value, root, dict.fromkeys(one.path for one in found)), root)
    return found


def _offer(filling: Filling, one: Named, state: Any) -> None:
    if state is _MISSING:
        filling.missing.append(path_text(one.path))
    elif isinstance(one.target, GeneratorState) and (problem := one.target.problem(state)):
        raise MismatchError(f"{path_text(one.path)}: {problem}; needed the same kind of generator")
    else:
        filling.fills.append(_Fill(one, state))


def _at(saved: Any, path: Path) -> Any:
    """What stands at the path of a tree, without its root; None there counts as nothing."""
    for step in path[1:]:
        known: Collection[Any] = (
            range(len(saved))
            if isinstance(saved, codec.SEQUENCES)
            else saved
            if isinstance(saved, dict)
            else ()
        )
        if step not in known:
            return _MISSING
        saved = saved[step]
    return _MISSING if saved is None else saved

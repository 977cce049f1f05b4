"""Paths of values beside tensors: ("extra", "scheduler"), ("modules", name), and so on.

("optimizer", parameter, state) is optimizer state that is not a tensor, ("optimizer", parameter)
all of a parameter. ("param_groups", parameter) are the options of the parameter's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.intervals import Interval
from unified_ckpt.errors import FormatError
from unified_ckpt.format.codec import Path, path_text
from unified_ckpt.format.manifest_fields import RankValuesFile

EXTRA, MODULES, OPTIMIZER_STATE, PARAM_GROUPS = "extra", "modules", "optimizer", "param_groups"
# In `extra`: where `unified_ckpt.dcp` stored the state dict. All ranks that have one have this one.
DCP_RECORD = "torch.distributed.checkpoint"
_LENGTHS = {
    EXTRA: range(1, 256),
    MODULES: range(2, 3),
    OPTIMIZER_STATE: range(2, 4),
    PARAM_GROUPS: range(2, 3),
}


def value_name(path: Path) -> str:
    """Return how reports name a value: "extra.scheduler", "modules:norm", "optimizer:w/step"."""
    if path[0] == EXTRA:
        return path_text(path)
    if path[0] == PARAM_GROUPS:
        return f"param group of {path[1]}"
    return f"{path[0]}:{'/'.join(path[1:])}"


def decode_rank_values(tree: Any, location: str) -> list[tuple[Path, Any]]:
    """Return (path, value) of an entry. FormatError if it is not a list of such pairs."""
    values = []
    for item in tree if isinstance(tree, list) else [None]:
        path, value = item if isinstance(item, list) and len(item) == 2 else ([], None)
        if not _is_value_path(path):
            raise FormatError(f"{location}: got {item!r:.80}, expected a path and a value")
        values.append((tuple(path), value))
    return values


def _is_value_path(path: Any) -> bool:
    return (
        isinstance(path, list)
        and bool(path)
        and all(isinstance(step, str) for step in path)
        and len(path) in _LENGTHS.get(path[0], ())
    )


def insert_value(tree: Any, steps: Sequence[str], value: Any) -> Any:
    """Set the value at a path of keys, in place where the tree is a dict; return the tree."""
    if not steps:
        return value
    if type(tree) is not dict:
        tree = {}
    tree[steps[0]] = insert_value(tree.get(steps[0]), steps[1:], value)
    return tree


def insert_values(
    values: Iterable[tuple[Path, Any]], extra: Any, modules: dict[str, Any], scalars: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Set values at their paths, in place in `modules` and in `scalars`, optimizer state.

    Return `extra` and the options of parameters.
    """
    options: dict[str, Any] = {}
    for path, value in values:
        if path[0] == EXTRA:
            extra = insert_value(extra, path[1:], value)
        elif path[0] == MODULES:
            modules[path[1]] = value
        elif path[0] == OPTIMIZER_STATE:
            insert_value(scalars, path[1:], value)
        else:
            options[path[1]] = value
    return extra, options


@dataclass(frozen=True, slots=True)
class RankValues:
    """Which values differed between the ranks of a save, and which ranks held the same ones.

    `ranks`: for each entry of `Source.rank_values`, half-open intervals of ranks.
    """

    paths: Sequence[Path]
    ranks: Sequence[Sequence[Interval]]
    world_size: int

    @classmethod
    def from_record(cls, record: RankValuesFile | None) -> RankValues | None:
        """Return what a manifest records, None if no values differed."""
        if record is None:
            return None
        ranks = [[(start, stop) for start, stop in intervals] for intervals in record.ranks]
        return cls([tuple(path) for path in record.paths], ranks, record.world_size)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values."""
        return tuple(map(value_name, self.paths))

    def entries(self, rank: int) -> list[int]:
        """Return the entries with values of a saving rank."""
        return [
            number
            for number, intervals in enumerate(self.ranks)
            if any(start <= rank < stop for start, stop in intervals)
        ]

"""Finds what a checkpoint stores for a leaf of a state dict, whoever saved it.

A wrong tensor could be loaded if a key meant another tensor than at the save. So a folder of
`dcp.save` is read by the sections that it records, and a folder of torch.distributed.checkpoint by
its own keys. Only other folders are read by the sections of the state dict to be filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.dcp.leaves import KeyPath, Leaf, flat_key
from unified_ckpt.dcp.sections import (
    GROUPS,
    NAME_OPTIONS,
    PARAMS,
    STATE,
    OptimizerKey,
    Sections,
    find_sections,
    mapping_at,
    other_key,
)
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.rank_values import with_rank_values
from unified_ckpt.engine.source.value_paths import DCP_RECORD
from unified_ckpt.foreign.dcp.keys import StoredObjects
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WEIGHTS
from unified_ckpt.runtime.torch_state.names import strip_wrappers
from unified_ckpt.runtime.torch_state.optimizer_rules import MASTER_KEYS, SavedGroups

_DDP_PREFIX = "module."


class Absent(Enum):
    """That nothing is stored; None may be a stored value."""

    VALUE = 1


class StoredState:
    """What a checkpoint stores for the leaves of a state dict."""

    def __init__(self, source: Source, state_dict: Mapping[Any, Any]) -> None:
        self._source, self._state_dict = source, state_dict
        self._names = cache(self._names_of)
        self.metadata = source.metadata()
        extra = self.metadata.extra
        self._objects = extra if isinstance(extra, StoredObjects) else None
        record = extra.get(DCP_RECORD) if isinstance(extra, dict) else None
        self._is_recorded = record is not None
        self._sections = recorded_sections(record) if record else find_sections(state_dict)

    def _names_of(self, part: str) -> set[str]:
        stored = [p for p in (WEIGHTS if part == MODEL else [part]) if p in self._source.parts]
        return {name for p in stored for name in (*self._source.names(p), *self._source.aliases(p))}

    @property
    def is_by_key(self) -> bool:
        """Whether the folder is one of torch.distributed.checkpoint."""
        return self._objects is not None

    def leaves_optimizer_out(self) -> bool:
        """Return whether an optimizer's state is stored, and that of the state dict is empty.

        So is `FSDP.optim_state_dict` of FSDP1, until the optimizer's first step.
        """
        path = find_sections(self._state_dict).optimizer
        if path is None:
            return False
        optimizer = mapping_at(self._state_dict, path)
        if STATE not in optimizer or optimizer[STATE] or not _param_names(optimizer):
            return False
        if not self.is_by_key:
            return bool(self._names(OPTIMIZER))
        prefix = flat_key((*path, STATE, ""))
        return any(name.startswith(prefix) for name in self._names(MODEL))

    def tensor_key(self, leaf: Leaf) -> Key | None:
        """Return the stored tensor of a leaf, None if there is none."""
        keys = self._tensor_keys(leaf.path)
        return next((key for key in keys if key[1] in self._names(key[0])), None)

    def values(self, leaves: Iterable[Leaf], metadata: SourceMetadata) -> list[Any]:
        """Return the stored values of leaves, or `Absent`. `metadata`: with those of this rank."""
        if self._objects is not None:
            return [_object(self._objects, leaf.path) for leaf in leaves]
        groups = SavedGroups(metadata.groups)
        return [self._value(leaf, metadata, groups) for leaf in leaves]

    def fitting_values(
        self, leaves: Sequence[Leaf], fits: Callable[[Leaf, Any], bool]
    ) -> list[Any]:
        """Return the values that ranks share, where they fit, else of a rank whose value does.

        Lists that are longer on some ranks have keys there that the shared values lack.
        """
        values, ranks = self.values(leaves, self.metadata), self.metadata.rank_values
        for entry in range(len(ranks.ranks) if ranks is not None else 0):
            if all(map(fits, leaves, values)):
                break
            metadata = with_rank_values(self.metadata, self._source.rank_values(entry))
            held = self.values(leaves, metadata)
            values = [
                other if fits(leaf, other) and not fits(leaf, value) else value
                for leaf, value, other in zip(leaves, values, held, strict=True)
            ]
        return values

    def _tensor_keys(self, path: KeyPath) -> Iterator[Key]:
        """Yield what may hold a tensor. The first one that exists does."""
        if self._objects is not None:
            yield MODEL, flat_key(path)
            return
        key, name = self._sections.optimizer_key(path), self._sections.model_name(path)
        if not self._is_recorded or (
            key is None and name is None
        ):  # uc.save has parts named as keys
            yield other_key(path)
        if key is not None:
            yield OPTIMIZER, f"{key.owner}/{flat_key(key.keys)}"
            if key.keys[0] in MASTER_KEYS:
                yield MASTER, str(key.owner)
        elif name is not None:
            yield from ((MODEL, stored) for stored in self._model_names(name))

    def _model_names(self, name: str) -> list[str]:
        """Return the names that a save may have given to a name of a model's state dict."""
        stripped = strip_wrappers(name)
        others = [] if self._is_recorded else [stripped, stripped.removeprefix(_DDP_PREFIX)]
        return [name, *others]

    def _value(self, leaf: Leaf, metadata: SourceMetadata, groups: SavedGroups) -> Any:
        key, name = self._sections.optimizer_key(leaf.path), self._sections.model_name(leaf.path)
        if key is not None:
            return self._optimizer_value(key, leaf, metadata, groups)
        for stored_name in self._model_names(name) if name is not None else ():
            if stored_name in metadata.modules:
                return metadata.modules[stored_name]
        if leaf.path == ("step",) and not self._is_recorded and metadata.step is not None:
            return metadata.step
        return _value_at(metadata.extra, leaf.path)

    def _optimizer_value(
        self, key: OptimizerKey, leaf: Leaf, metadata: SourceMetadata, groups: SavedGroups
    ) -> Any:
        if not key.is_option:
            return _value_at(metadata.scalars.get(str(key.owner), {}), key.keys)
        if key.keys[0] in NAME_OPTIONS:
            return leaf.value  # the names of this optimizer
        saved: Sequence[Mapping[str, Any]]
        if isinstance(key.owner, int):  # the position may be another one in the checkpoint
            optimizer = mapping_at(self._state_dict, self._sections.optimizer or ())
            names = optimizer[GROUPS][key.owner].get(PARAMS, ())
            saved = groups.with_any(names) or metadata.groups[key.owner : key.owner + 1]
        else:
            saved = groups.with_any([key.owner])
        return _value_at(saved[0]["options"], key.keys) if saved else Absent.VALUE


def _param_names(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer[GROUPS] for name in group[PARAMS]]


def recorded_sections(record: Mapping[str, Any]) -> Sections:
    """Return the sections that a save recorded."""
    paths = (record.get(MODEL), record.get(OPTIMIZER))
    model, optimizer = (None if path is None else tuple(path) for path in paths)
    return Sections(model, optimizer)


def _value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path of dicts and lists, whose keys may be text or numbers."""
    for step in path:
        if isinstance(tree, list):
            position = int(step) if str(step).isdecimal() else len(tree)
            tree = tree[position] if position < len(tree) else Absent.VALUE
        elif isinstance(tree, Mapping):
            tree = next((tree[k] for k in (step, str(step)) if k in tree), Absent.VALUE)
        else:
            return Absent.VALUE
    return tree


def _object(objects: StoredObjects, path: KeyPath) -> Any:
    """Return the object at a path. Before torch 2.4, a dict without tensors was one object."""
    for stop in range(len(path), 0, -1):
        if (key := flat_key(path[:stop])) in objects:
            return _value_at(objects.load(key), path[stop:])
    return Absent.VALUE

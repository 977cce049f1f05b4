"""The state beside tensors as one rank of the save held it, where values differed between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.value_paths import insert_values, value_name
from unified_ckpt.format.codec import Path
from unified_ckpt.runtime.torch_state.optimizer_rules import same_value


def with_rank_values(
    metadata: SourceMetadata, values: Iterable[tuple[Path, Any]]
) -> SourceMetadata:
    """Return the metadata with these values in place of those of the lowest rank."""
    extra, modules = _copy_dicts(metadata.extra), dict(metadata.modules)
    scalars = {fqn: dict(state) for fqn, state in metadata.scalars.items()}
    extra, options = insert_values(values, extra, modules, scalars)
    groups = _with_options(metadata.groups, options) if options else metadata.groups
    return replace(metadata, extra=extra, modules=modules, scalars=scalars, groups=groups)


def with_values_of_ranks(
    source: Source, metadata: SourceMetadata, ranks: Sequence[int]
) -> tuple[SourceMetadata, tuple[str, ...]]:
    """Return the metadata with the values that are equal on all of these saving ranks.

    Also returns the names of the others: all that differed if there are no ranks.
    """
    rank_values = metadata.rank_values
    if rank_values is None:
        return metadata, ()
    if not ranks:
        return metadata, rank_values.names
    entries = {entry for rank in ranks for entry in rank_values.entries(rank)}
    held: dict[Path, Any] = {}
    unplaced = set[Path]()
    for path, value in (item for entry in sorted(entries) for item in source.rank_values(entry)):
        if not same_value(held.setdefault(path, value), value):
            unplaced.add(path)
    placed = [item for item in held.items() if item[0] not in unplaced]
    return with_rank_values(metadata, placed), tuple(map(value_name, sorted(unplaced)))


def _copy_dicts(tree: Any) -> Any:
    """Return a tree of dicts as new dicts, with the same values."""
    if type(tree) is not dict:
        return tree
    return {key: _copy_dicts(item) for key, item in tree.items()}


def _with_options(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Move parameters with options of their own into groups that have these options."""
    changed: list[Mapping[str, Any]] = []
    for group in groups:
        own: list[dict[str, Any]] = []
        for fqn in (fqn for fqn in group["names"] if fqn in options):
            same = (other for other in own if same_value(other["options"], options[fqn]))
            match = next(same, None)
            if match is None:
                own.append({**group, "names": [fqn], "options": options[fqn]})
            else:
                match["names"].append(fqn)
        shared = [fqn for fqn in group["names"] if fqn not in options]
        changed += [{**group, "names": shared}] if shared or not own else []
        changed += own
    return changed


def has_tensor(value: Any) -> bool:
    """Return whether a value is or contains a tensor."""
    if isinstance(value, Mapping):
        return any(map(has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensor, value))
    return isinstance(value, torch.Tensor)

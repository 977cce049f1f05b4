"""Applies rename rules to what a source holds besides tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.value_paths import EXTRA, MODULES
from unified_ckpt.errors import FormatError
from unified_ckpt.format.codec import Path
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.format.renames import Renames
from unified_ckpt.runtime.torch_state.optimizer_rules import same_value
from unified_ckpt.views.rule_matches import (
    Rules,
    only_renames,
    unstacked_names,
)


def renamed_metadata(
    source: Source,
    renames: Renames,
    shape_keys: Mapping[str, Key],
    pads: Mapping[Key, Sequence[int]],
) -> tuple[SourceMetadata, Callable[[Path], Sequence[Path]]]:
    """Rename param groups, non-tensor optimizer state and non-tensor state of modules.

    Also returns the new paths of values that differed between ranks.

    `shape_keys`: a tensor with the shape of each parameter. FormatError if parameters that are
    merged differ, or if a rule does more than rename a module.
    """
    metadata, rules = source.metadata(), Rules(renames, MODEL)
    optimizer_rules = Rules(renames, OPTIMIZER, named_only=True)

    def new_names(fqn: str) -> list[str]:
        match = rules.match(fqn)
        if match is None:
            return [] if renames.unmatched == "drop" else [fqn]
        if match.rule.unstack is None:
            return list(match.targets)
        over, keys = match.rule.unstack, [shape_keys[fqn]] if fqn in shape_keys else []
        return [
            name
            for target in match.targets
            for key in keys
            for name in unstacked_names(source, match.rule, over, target, [[key]])
        ]

    def new_state_names(fqn: str) -> list[str]:
        match = optimizer_rules.match(fqn)  # of all state of a parameter, not only of its tensors
        return [] if match is not None and match.rule.drop else new_names(fqn)

    for fqn in metadata.modules:
        module_match = rules.match(fqn)
        if (
            module_match is not None
            and not module_match.rule.drop
            and not only_renames(module_match.rule)
        ):
            raise FormatError(
                f"{fqn}: is non-tensor state of a module, and a rule does more than rename it; add "
                "a rule before it with `drop = true`"
            )
    modules = {name: value for fqn, value in metadata.modules.items() for name in new_names(fqn)}

    def new_paths(path: Path) -> list[Path]:
        if path[0] == EXTRA:
            return [path]
        names = new_names(path[1]) if path[0] == MODULES else new_state_names(path[1])
        return [(path[0], name, *path[2:]) for name in names]

    rank_values = metadata.rank_values
    if rank_values is not None:
        paths = [new_path for path in rank_values.paths for new_path in new_paths(path)]
        rank_values = replace(rank_values, paths=paths)
    renamed = replace(
        metadata,
        groups=renamed_groups(metadata.groups, new_state_names),
        scalars=_renamed_scalars(metadata.scalars, new_state_names),
        modules=modules,
        paddable_dims={**metadata.paddable_dims, **pads},
        rank_values=rank_values,
    )
    return renamed, new_paths


def renamed_groups(
    groups: Sequence[Mapping[str, Any]], new_names: Callable[[str], Sequence[str]]
) -> list[Mapping[str, Any]]:
    """Rename the parameters of param groups; a merged one belongs to the first of its groups."""
    owners: dict[str, int] = {}
    renamed: list[Mapping[str, Any]] = []
    for index, group in enumerate(groups):
        names = list(dict.fromkeys(name for fqn in group["names"] for name in new_names(fqn)))
        for name in names:
            first = groups[owners.setdefault(name, index)]
            if not same_value(first["options"], group["options"]):
                raise FormatError(
                    f"{name}: merges parameters whose hyperparameters differ; put all of them into "
                    "one param group"
                )
        renamed.append({**group, "names": [name for name in names if owners[name] == index]})
    return renamed


def _renamed_scalars(
    scalars: Mapping[str, Mapping[str, Any]], new_names: Callable[[str], Sequence[str]]
) -> dict[str, Mapping[str, Any]]:
    """Rename the parameters of non-tensor optimizer state."""
    renamed: dict[str, Mapping[str, Any]] = {}
    for fqn, state in scalars.items():
        for name in new_names(fqn):
            if not same_value(renamed.setdefault(name, state), state):
                raise FormatError(
                    f"{name}: merges parameters whose optimizer state {', '.join(state)} differs; "
                    "expected equal values"
                )
    return renamed

"""Applies rename rules to what a source holds besides tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import Renames
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.views.rule_matches import (
    Rules,
    only_renames,
    unstacked_count,
    unstacked_name,
)


def renamed_metadata(
    source: Source,
    renames: Renames,
    shape_keys: Mapping[str, Key],
    pads: Mapping[Key, Sequence[int]],
) -> SourceMetadata:
    """Rename param groups, non-tensor optimizer state and non-tensor state of modules.

    `shape_keys`: a tensor with the shape of each parameter. FormatError if parameters that are
    merged differ, or if a rule does more than rename a module.
    """
    metadata, rules = source.metadata(), Rules(renames, MODEL)

    def new_names(fqn: str) -> list[str]:
        match = rules.match(fqn)
        if match is None:
            return [] if renames.unmatched == "drop" else [fqn]
        if match.rule.unstack is None:
            return list(match.targets)
        key = shape_keys.get(fqn)
        count = 0 if key is None else unstacked_count(source, match.rule, [[key]])
        return [
            unstacked_name(match.rule, target, index)
            for target in match.targets
            for index in range(count)
        ]

    owners: dict[str, int] = {}
    groups = []
    for group_index, group in enumerate(metadata.groups):
        names = list(dict.fromkeys(name for fqn in group["names"] for name in new_names(fqn)))
        for name in names:
            owner = metadata.groups[owners.setdefault(name, group_index)]
            if owner["options"] != group["options"]:
                raise FormatError(
                    f"{name}: merges parameters whose hyperparameters differ; put all of them into "
                    "one param group"
                )
        groups.append({**group, "names": [name for name in names if owners[name] == group_index]})
    scalars: dict[str, Mapping[str, Any]] = {}
    for fqn, state in metadata.scalars.items():
        for name in new_names(fqn):
            if scalars.setdefault(name, state) != state:
                raise FormatError(
                    f"{name}: merges parameters whose optimizer state {', '.join(state)} differs; "
                    "expected equal values"
                )
    for fqn in metadata.modules:
        match = rules.match(fqn)
        if match is not None and not match.rule.drop and not only_renames(match.rule):
            raise FormatError(
                f"{fqn}: is non-tensor state of a module, and a rule does more than rename it; add "
                "a rule before it with `drop = true`"
            )
    modules = {name: value for fqn, value in metadata.modules.items() for name in new_names(fqn)}
    return replace(
        metadata,
        groups=groups,
        scalars=scalars,
        modules=modules,
        paddable_dims={**metadata.paddable_dims, **pads},
    )

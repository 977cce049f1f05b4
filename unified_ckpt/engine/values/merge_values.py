"""Merges what ranks hold beside tensors: one copy of what is equal, each copy of what differs.

A value could be lost if one rank's copy were stored for ranks that hold another one. So the values
of all ranks are compared at every save. They are compared in encoded form: in any order of the keys
of dicts, floats by their bits, tensors by digest.

Param groups with equal options become one, in the order of their first appearance.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.text import format_ranks, human_size, raise_if_any
from unified_ckpt.engine.folder.non_tensor_state import MergedState, RankEntries
from unified_ckpt.engine.source.value_paths import (
    DCP_RECORD,
    EXTRA,
    MODULES,
    OPTIMIZER_STATE,
    PARAM_GROUPS,
    insert_values,
    value_name,
)
from unified_ckpt.errors import FormatError, LayoutError
from unified_ckpt.format import codec
from unified_ckpt.format.codec import Path
from unified_ckpt.runtime.torch_state.modules import resolve_alias_chains
from unified_ckpt.runtime.torch_state.optimizer_rules import RUNTIME_OPTIONS

_NOTHING: Sequence[Any] = (None, {})  # what a rank passes that leaves a value to others
MAX_DIFFERING_NBYTES = 64 << 20  # of values that differ: they pass through one rank


@dataclass(frozen=True, slots=True)
class ParsedValues:
    """`EncodedValues` as parsed, and the ranks that hold these values."""

    ranks: Sequence[int]
    content: Mapping[str, Any]

    @classmethod
    def parse(cls, ranks: Sequence[int], body: bytes) -> ParsedValues:
        """Return the state of these ranks."""
        content = json.loads(body)
        groups = content["trees"].get(PARAM_GROUPS, ())
        for group, names in zip(groups, content.get("names", ()), strict=True):
            group["names"] = names
        return cls(ranks, content)

    def whole_values(self) -> Iterator[tuple[Path, Any]]:
        """Yield (path, encoded value) of everything but param groups, in few values."""
        trees = self.content["trees"]
        if trees.get(EXTRA) is not None:
            yield (EXTRA,), trees[EXTRA]
        for root in (MODULES, OPTIMIZER_STATE):
            yield from (((root, name), node) for name, node in trees.get(root, {}).items())

    def values(self) -> Iterator[tuple[Path, Any]]:
        """Yield (path, encoded value) of everything that ranks share by name."""
        trees = self.content["trees"]
        if trees.get(EXTRA) is not None:
            object_paths = {tuple(path) for path in self.content["object_paths"]}
            yield from _leaves(trees[EXTRA], (EXTRA,), object_paths)
        yield from (((MODULES, name), node) for name, node in trees.get(MODULES, {}).items())
        for fqn, state in trees.get(OPTIMIZER_STATE, {}).items():
            if "$type" in state:  # its keys are not all text
                yield (OPTIMIZER_STATE, fqn), state
            else:
                yield from (((OPTIMIZER_STATE, fqn, key), node) for key, node in state.items())
        for group in trees.get(PARAM_GROUPS, ()):
            yield from (((PARAM_GROUPS, fqn), group["options"]) for fqn in group["names"])

    def identity(self, path: Path, node: Any) -> str:
        """Return a text that is the same for equal values."""
        if path[0] == PARAM_GROUPS and isinstance(node, dict):
            node = {key: value for key, value in node.items() if key not in RUNTIME_OPTIONS}
        if not isinstance(node, dict | list):
            return json.dumps(node)
        return json.dumps(_canonical(node, self.content["digests"]), sort_keys=True)

    def nbytes(self, node: Any) -> int:
        """Return about how many bytes a value takes."""
        sizes: list[int] = [self.content["digests"][name][1] for name in blob_names(node)]
        return len(json.dumps(node)) + sum(sizes)


def _leaves(node: Any, path: Path, atomic: set[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the values in dicts with text as keys. The state of an object is one value."""
    if type(node) is dict and node and "$type" not in node and path not in atomic:
        for key, item in node.items():
            yield from _leaves(item, (*path, key), atomic)
    else:
        yield path, node


def _canonical(node: Any, digest_by_blob: Mapping[str, Any]) -> Any:
    """Return an encoded value with digests in place of blobs, and the items of dicts sorted."""
    if isinstance(node, list):
        return [_canonical(item, digest_by_blob) for item in node]
    if not isinstance(node, dict):
        return node
    if "$type" in node and "blob" in node:
        return {**node, "blob": digest_by_blob[node["blob"]]}
    node = {key: _canonical(item, digest_by_blob) for key, item in node.items()}
    if node.get("$type") in ("dict", "defaultdict", "Counter") and "items" in node:
        node["items"].sort(key=lambda item: json.dumps(item[0], sort_keys=True))
    return node


def blob_names(node: Any) -> Iterator[str]:
    """Yield the names of the blobs of an encoded value."""
    if isinstance(node, dict) and "$type" in node and "blob" in node:
        yield node["blob"]
    elif isinstance(node, dict | list):
        for item in node.values() if isinstance(node, dict) else node:
            yield from blob_names(item)


_Variants = list[tuple[int, Any]]  # the values of one path: index of the state, encoded value


@dataclass(slots=True)
class ValueMerge:
    """Which values of which ranks are stored. `states`: those of all ranks, the lowest rank first.

    `shared`: for each state, what is stored of it for all ranks. `differing`: values that differ,
    by path. `groups`: the param groups, with the index of the state that their options are of.
    """

    states: Sequence[ParsedValues]
    shared: list[dict[Path, Any]] = field(default_factory=list)
    differing: dict[Path, _Variants] = field(default_factory=dict)
    groups: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def check(self, *, allow_differing: bool) -> None:
        """Raise LayoutError for values that differ, and FormatError if they are too large.

        Keys of `dcp.save` that differ are always an error: tensors of several keys would be one.
        """
        raise_if_any(
            LayoutError,
            "dcp.save: ranks hold their model or optimizer under different keys of the state dict, "
            "expected one key on all ranks; pass the same nesting on every rank",
            [
                f"{path[-1]}: {self._holders(path)}"
                for path in sorted(self.differing)
                if path[:2] == (EXTRA, DCP_RECORD)
            ],
        )
        if not allow_differing:
            raise_if_any(
                LayoutError,
                "ranks hold different values of the same name, expected equal ones; make them "
                'equal before the save, or store each with check_replicas="first"',
                [f"{value_name(path)}: {self._holders(path)}" for path in sorted(self.differing)],
            )
        sizes = {}
        for path, variants in self.differing.items():
            distinct = {self.states[i].identity(path, node): (i, node) for i, node in variants}
            sizes[path] = sum(self.states[i].nbytes(node) for i, node in distinct.values())
        if sum(sizes.values()) > MAX_DIFFERING_NBYTES:
            largest = max(sizes, key=lambda path: sizes[path])
            raise FormatError(
                f"{value_name(largest)}: got {human_size(sum(sizes.values()))} of values that "
                f"differ between ranks, expected at most {human_size(MAX_DIFFERING_NBYTES)}; pass "
                "tensors in parts= as DTensors or with a Layout, or pass the value in rank_extra="
            )

    def _holders(self, path: Path) -> str:
        ranks: dict[str, list[int]] = {}
        for index, node in self.differing[path]:
            identity = self.states[index].identity(path, node)
            ranks.setdefault(identity, []).extend(self.states[index].ranks)
        return " differ from ".join(f"rank(s) {format_ranks(held)}" for held in ranks.values())

    def needed_blobs(self) -> list[set[str]]:
        """Return the names of the blobs that are stored, of each state."""
        nodes = [[*shared.values()] for shared in self.shared]
        for index, group in self.groups:
            nodes[index].append(group["options"])
        for index, node in chain.from_iterable(self.differing.values()):
            nodes[index].append(node)
        return [set(chain.from_iterable(map(blob_names, of_state))) for of_state in nodes]

    def decode(self, blobs: Sequence[Mapping[str, Any]]) -> MergedState:
        """Return the values. `blobs`: those that are needed of each state."""
        merged, objects = MergedState(), dict[str, None]()
        for state, shared, own_blobs in zip(self.states, self.shared, blobs, strict=True):
            for part, aliases in state.content.get("aliases", {}).items():
                merged.aliases.setdefault(part, {}).update(aliases)
            merged.has_optimizer |= state.content.get("has_optimizer", False)
            objects |= dict.fromkeys(state.content.get("objects", ()))
            values = zip(shared, codec.decode(list(shared.values()), own_blobs), strict=True)
            merged.extra, _ = insert_values(values, merged.extra, merged.modules, merged.scalars)
            for fqn in state.content["trees"].get(OPTIMIZER_STATE, ()):
                merged.scalars.setdefault(fqn, {})
        merged.aliases = {
            part: resolve_alias_chains(aliases) for part, aliases in merged.aliases.items()
        }
        merged.groups = [
            {**group, "options": codec.decode(group["options"], blobs[index], path="options")}
            for index, group in self.groups
        ]
        merged.objects, merged.rank_entries = tuple(objects), self._rank_entries(blobs)
        return merged

    def _rank_entries(self, blobs: Sequence[Mapping[str, Any]]) -> RankEntries:
        values = group_by_value(
            ([list(path), node], index)
            for path, variants in sorted(self.differing.items())
            for index, node in variants
        )
        ranks: dict[bytes, list[int]] = {}
        for index, items in sorted(values.items()):
            own_blobs = {name: blobs[index][name] for name in blob_names(items)}
            packed = codec.pack_encoded(items, own_blobs)
            ranks.setdefault(packed, []).extend(self.states[index].ranks)
        world_size = len({rank for state in self.states for rank in state.ranks})
        return RankEntries(
            world_size,
            sorted(self.differing),
            [(sorted(held), packed) for packed, held in ranks.items()],
        )


def merge_values(states: Iterable[ParsedValues]) -> ValueMerge:
    """Compare the values of all ranks. The lowest rank that has a value decides the shared one.

    A rank without a value, with None or with an empty dict agrees with the others.
    """
    merge = ValueMerge(sorted(states, key=lambda state: state.ranks[0]))
    holders: dict[Path, _Variants] = {}
    counts = Counter(root for state in merge.states for root in state.content["trees"])
    for index, state in enumerate(merge.states):
        is_single = all(counts[root] == 1 for root in state.content["trees"])
        for path, node in state.whole_values() if is_single else state.values():
            holders.setdefault(path, []).append((index, node))
    for path, variants in holders.items():
        holders[path] = [each for each in variants if each[1] not in _NOTHING] or variants
    options: dict[tuple[int, int], str] = {}  # of param groups, which many parameters share

    def identity(path: Path, index: int, node: Any) -> str:
        if path[0] != PARAM_GROUPS:
            return merge.states[index].identity(path, node)
        key = index, id(node)
        if key not in options:
            options[key] = merge.states[index].identity(path, node)
        return options[key]

    for path, variants in holders.items():
        if len(variants) > 1 and len({identity(path, *variant) for variant in variants}) > 1:
            merge.differing[path] = variants
    first_holders = {path: variants[0] for path, variants in holders.items()}
    _separate_nested(merge, holders, first_holders)
    merge.shared = [{} for _ in merge.states]
    for path, (index, node) in first_holders.items():
        if path[0] != PARAM_GROUPS:
            merge.shared[index][path] = node
    _merge_groups(merge)
    return merge


def _separate_nested(
    merge: ValueMerge,
    holders: Mapping[Path, _Variants],
    first_holders: dict[Path, tuple[int, Any]],
) -> None:
    """Treat values of `extra` as different where one rank has a dict and another a plain value.

    Removes from `first_holders` what the value of a lower rank excludes.
    """
    for path in [path for path in holders if path[0] == EXTRA]:
        for outer in (path[:length] for length in range(1, len(path))):
            if outer not in holders:
                continue
            (outer_index, outer_node), (inner_index, _) = holders[outer][0], holders[path][0]
            if outer_node in _NOTHING:
                first_holders.pop(outer, None)
                continue
            merge.differing[outer], merge.differing[path] = holders[outer], holders[path]
            first_holders.pop(outer if inner_index < outer_index else path, None)


def _merge_groups(merge: ValueMerge) -> None:
    """Join param groups with equal options. Groups of one rank stay separate."""
    merged: dict[str, dict[str, Any]] = {}
    grouped = set[str]()
    for index, state in enumerate(merge.states):
        counts = Counter[str]()
        groups = state.content["trees"].get(PARAM_GROUPS, ())
        for group in groups:
            kinds = [group.get("optimizer"), group.get("masters")]
            content = _canonical([group["options"], kinds], state.content["digests"])
            key = json.dumps(content, sort_keys=True)
            counts[key] += 1
            # Groups of one rank stay separate even if their options are equal now.
            key += str(counts[key])
            fqns = [fqn for fqn in group["names"] if fqn not in grouped]
            if not fqns and group["names"]:
                continue
            if key not in merged:
                merged[key] = {**group, "names": []}
                merge.groups.append((index, merged[key]))
            first_group = merged[key]
            first_group["names"].extend(fqns)
            # A rank whose parameters have no state yet knows no types.
            types = group.get("state_types", {}) | first_group.get("state_types", {})
            first_group["state_types"] = types
        grouped.update(fqn for group in groups for fqn in group["names"])

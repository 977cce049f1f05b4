"""Decides which node copies which files, so that each unit of a save is on enough nodes.

A *unit* is a whole tensor, or all shards in a file. Files of several nodes may hold the same unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

StoredFiles = Mapping[str, str]  # of a node: file -> name of its content; equal names, equal units
CopyPlan = dict[int, list[str]]  # of a node: node to copy from -> files, sorted


def place_replicas(
    stored_files: Sequence[StoredFiles], units_of: Mapping[str, Sequence[str]], *, copies: int
) -> list[CopyPlan]:
    """Return what each node copies, so that each unit is on `copies` nodes.

    `units_of`: units by the content names in `stored_files`.

    The `copies` - 1 nodes after a node copy from it, even if only files that no unit counts. A unit
    on too few nodes goes to the next nodes that lack it. If several nodes have it, a hash picks the
    source, so that all nodes send about as much.
    """
    count = len(stored_files)
    copy_plans: list[CopyPlan] = [
        {(i - step) % count: [] for step in range(1, copies)} for i in range(count)
    ]
    nodes_by_name: dict[str, int] = {}  # bit mask, by name
    for node, files_of_node in enumerate(stored_files):
        for name in files_of_node.values():
            nodes_by_name[name] = nodes_by_name.get(name, 0) | 1 << node
    nodes_by_unit: dict[str, int] = {}
    for name, mask in nodes_by_name.items():
        for unit in units_of[name]:
            nodes_by_unit[unit] = nodes_by_unit.get(unit, 0) | mask
    sources = [
        (node, file, name)
        for node, files_of_node in enumerate(stored_files)
        for file, name in files_of_node.items()
        if any(nodes_by_unit[unit].bit_count() < copies for unit in units_of[name])
    ]

    def tie_break(source: tuple[int, str, str]) -> bytes:
        return hashlib.blake2b(f"{source[0]}/{source[2]}".encode(), digest_size=8).digest()

    for node, file, name in sorted(sources, key=tie_break):
        targets = _choose_targets(
            node, [nodes_by_unit[unit] for unit in units_of[name]], count=count, copies=copies
        )
        for unit in units_of[name]:
            nodes_by_unit[unit] |= targets
        for i in range(count):
            if targets >> i & 1:
                copy_plans[i].setdefault(node, []).append(file)
    return [
        {source: sorted(files) for source, files in sorted(copy_plan.items())}
        for copy_plan in copy_plans
    ]


def _choose_targets(source: int, masks: Sequence[int], *, count: int, copies: int) -> int:
    """Return the nodes after `source`, as a bit mask, that bring each mask to `copies` nodes."""
    targets = 0
    for mask in dict.fromkeys(masks):
        step = 1
        while (mask | targets).bit_count() < copies:
            node = (source + step) % count
            targets |= 1 << node & ~mask
            step += 1
    return targets

"""Which machine takes a copy of which file, so that everything that a save stores is on as many
machines as the caller wants. Pure.

A unit is what is counted: a whole tensor, or all fragments of a file. Files of several machines may
hold the same unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

StoredFiles = Mapping[
    str, str
]  # of a machine: file -> name of what it holds; equal names, equal units
CopyPlan = dict[int, list[str]]  # of a machine: machine to copy from -> files, sorted


def place_replicas(
    stored_files: Sequence[StoredFiles], units_of: Mapping[str, Sequence[str]], *, copies: int
) -> list[CopyPlan]:
    """For each machine what it copies. `units_of`: by the names that the holdings give.

    Every machine is copied from by the `copies` - 1 after it, of which some may want no file: each
    also has what is its ranks' own. A unit that fewer machines have goes on to the next ones that
    lack it. Of several machines that have it, one gives it; which one is drawn, so that all give
    about as much.
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
    for node, file, name in sorted(sources, key=lambda one: _tie_break(one[0], one[2])):
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
    """The machines after the giver, as a mask, that bring every one of the masks to as many
    machines as there are to be copies.
    """
    targets = 0
    for mask in dict.fromkeys(masks):
        step = 1
        while (mask | targets).bit_count() < copies:
            node = (source + step) % count
            targets |= 1 << node & ~mask
            step += 1
    return targets


def _tie_break(node: int, name: str) -> bytes:
    return hashlib.blake2b(f"{node}/{name}".encode(), digest_size=8).digest()

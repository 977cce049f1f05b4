"""Which machine takes a copy of which file, so that everything that a save stores is on as many machines as the caller wants. Pure.

A unit is what is counted: a whole tensor, or all fragments of a file. Files of several machines may hold the same unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

Holding = Mapping[str, str]  # of a machine: file -> name of what it holds; equal names, equal units
Orders = dict[int, list[str]]  # of a machine: machine to copy from -> files, sorted


def spread(
    holdings: Sequence[Holding], units_of: Mapping[str, Sequence[str]], *, copies: int
) -> list[Orders]:
    """For each machine what it copies. `units_of`: by the names that the holdings give.

    Every machine is copied from by the `copies` - 1 after it, of which some may want no file: each also has what is its ranks' own. A
    unit that fewer machines have goes on to the next ones that lack it. Of several machines that have it, one gives it; which one is
    drawn, so that all give about as much.
    """
    count = len(holdings)
    orders: list[Orders] = [
        {(i - step) % count: [] for step in range(1, copies)} for i in range(count)
    ]
    machines: dict[str, int] = {}  # bit mask, by name
    for number, holding in enumerate(holdings):
        for name in holding.values():
            machines[name] = machines.get(name, 0) | 1 << number
    have: dict[str, int] = {}
    for name, mask in machines.items():
        for unit in units_of[name]:
            have[unit] = have.get(unit, 0) | mask
    given = [
        (number, file, name)
        for number, holding in enumerate(holdings)
        for file, name in holding.items()
        if any(have[unit].bit_count() < copies for unit in units_of[name])
    ]
    for number, file, name in sorted(given, key=lambda one: _drawn(one[0], one[2])):
        takers = _takers(
            number, [have[unit] for unit in units_of[name]], count=count, copies=copies
        )
        for unit in units_of[name]:
            have[unit] |= takers
        for i in range(count):
            if takers >> i & 1:
                orders[i].setdefault(number, []).append(file)
    return [{source: sorted(files) for source, files in sorted(order.items())} for order in orders]


def _takers(giver: int, masks: Sequence[int], *, count: int, copies: int) -> int:
    """The machines after the giver, as a mask, that bring every one of the masks to as many machines as there are to be copies."""
    takers = 0
    for mask in dict.fromkeys(masks):
        step = 1
        while (mask | takers).bit_count() < copies:
            machine = (giver + step) % count
            takers |= 1 << machine & ~mask
            step += 1
    return takers


def _drawn(machine: int, name: str) -> bytes:
    return hashlib.blake2b(f"{machine}/{name}".encode(), digest_size=8).digest()

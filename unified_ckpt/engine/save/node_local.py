"""A save by machines that do not see each other's folder: every island writes what it holds, and all commit together.

How data could be lost: an island gives its new checkpoint the name while another has none, and the older one is gone. So nothing gets
its name before all islands have all on their disks, and what it replaces is removed only after all have theirs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from unified_ckpt.core.nodes.node_groups import FRAGMENTS, Island, fragment_name, island_rule
from unified_ckpt.core.sharding.declarations import Key, Row, group_tables
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.plan.holders import announce, check_rules, memberships, publish
from unified_ckpt.engine.plan.save_plan import checked_groups
from unified_ckpt.engine.save.extra_state import Words
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import codec
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import Part

Rules = Mapping[
    Key, Sharding | None
]  # by world row: the rule within the island, None for a tensor that is stored in fragments
Totals = Mapping[str, list[int]]  # part -> tensors and bytes of all islands


@dataclass(frozen=True, slots=True)
class Gate:
    """What all islands of a save do together. `meeting`: of all ranks."""

    meeting: Meeting
    island: Island
    save_id: str

    def together(self, name: str) -> AbstractContextManager[None]:
        """A step that every island gets through, or none."""
        return self.meeting.phase(name)

    def wait(self, name: str) -> None:
        """Returns once every island has come here; raises the error of one that has not."""
        with self.together(name):
            pass

    def share(self, key: str, value: bytes) -> list[bytes]:
        """For one rank of each island, inside a phase of the island: what each of them says, by number."""
        try:
            self.meeting.put(f"{key}/{self.island.number}", b"." + value)
            return [self.meeting.get(f"{key}/{number}")[1:] for number in range(self.island.count)]
        except CheckpointError as error:
            error.agreed = False  # among the islands, not yet among the ranks of this one
            raise


@contextmanager
def telling(gate: Gate | None) -> Iterator[None]:
    """An error inside is told to all islands, and raised on all of them."""
    try:
        yield
    except BaseException as error:
        if gate is None:
            raise
        if not gate.meeting.has("failed"):
            gate.meeting.agree("island", error)
        raise gate.meeting.failure(error) from error


def open_gate(meeting: Meeting, island: Island) -> Gate:
    """Collective over all ranks. They agree on one save id."""
    save_id = meeting.broadcast(
        "save-id", secrets.token_hex(8).encode() if meeting.rank == 0 else None
    )
    return Gate(meeting, island, save_id.decode())


def spread_extra(gate: Gate, words: Words) -> Words:
    """Collective over all ranks. The `extra` of rank 0 for the first rank of each island, whose folder may be the one that is left."""
    meeting, island = gate.meeting, gate.island
    if meeting.rank == 0:
        meeting.put("extra", codec.pack(words.extra, "extra"))
    if meeting.rank != island.ranks[0]:
        return words
    return replace(words, extra=codec.unpack(meeting.get("extra"), "extra"))


def check_world(
    meeting: Meeting, parts: Sequence[Part], *, layout: Layout | None, matched: set[str]
) -> Totals:
    """Collective over all ranks. LayoutError or MismatchError where their claims do not add up; else what they hold between them."""
    with meeting.phase("world"):
        check_rules(meeting, layout, matched)
        _, census = announce(meeting, [part.row for part in parts])
        if census is not None:
            specs = {row.key: row.spec for group in checked_groups(census) for row in group.rows}
            totals: dict[str, list[int]] = {}
            for (part, _), spec in specs.items():
                count, nbytes = totals.get(part, [0, 0])
                totals[part] = [count + 1, nbytes + spec.nbytes]
            meeting.put("totals", json.dumps(totals).encode())
    found: Totals = json.loads(meeting.get("totals"))
    return found


def island_rules(gate: Gate, comm: Comm, parts: Sequence[Part]) -> Rules:
    """Collective over the island, whose ranks `comm` has. What of their tensors it holds whole, and by which rule."""
    rows, island = [part.row for part in parts], gate.island
    meeting = comm.meet(
        "island", same=False, timeout_seconds=gate.meeting.timeout_seconds, within=gate.meeting
    )
    with meeting.phase("island"):
        table, census = announce(meeting, rows)
        if census is not None:
            groups = group_tables(census.tables, census.roll)
            publish(meeting, census, groups, [{} for _ in groups])
        members, _ = memberships(meeting, table, rows)
    rules: dict[Key, Sharding | None] = {}
    for member in members:
        world = [island.ranks[i] for i in member.holders]
        rules.update(
            {row.key: island_rule(row.sharding, world, island.ranks) for row in member.rows}
        )
    return rules


def on_island(parts: Sequence[Part], rules: Rules, island: Island, *, index: int) -> list[Part]:
    """A rank's parts as its island stores them: whole tensors by the island's rule, of the others a fragment for each box."""
    found: list[Part] = []
    for part in parts:
        row, rule = part.row, rules[part.row.key]
        if rule is not None:
            if (
                rule.position(index) is not None
            ):  # else it has a piece of a copy that the island does not hold whole
                found.append(Part(Row(row.part, row.fqn, row.spec, rule), part.local))
        elif row.spec.nbytes == 0:
            found.append(
                Part(
                    Row(row.part, row.fqn, row.spec, Sharding()),
                    part.local.new_empty(row.spec.shape),
                )
            )
        else:
            for box, local in row.sharding.boxes(island.ranks[index], row.spec.shape):
                piece = part.local[
                    tuple(
                        slice(low, low + n)
                        for low, n in zip(local.offsets, local.shape, strict=True)
                    )
                ]
                if box.numel:
                    spec = TensorSpec(row.spec.dtype, box.shape)
                    found.append(
                        Part(
                            Row(
                                row.part + FRAGMENTS,
                                fragment_name(row.fqn, box, row.spec.shape),
                                spec,
                                Sharding(),
                            ),
                            piece,
                        )
                    )
    return sorted(found, key=lambda part: part.row.key)

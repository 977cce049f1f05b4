"""A save by machines that do not see each other's folder: every island writes what it holds, and
all commit together.

How data could be lost: an island gives its new checkpoint the name while another has none, and the
older one is gone. So nothing gets its name before all islands have all on their disks, and what it
replaces is removed only after all have theirs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, NodeGroup, group_sharding, shard_name
from unified_ckpt.core.sharding.declarations import Key, TensorDecl, group_tables
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.plan.holders import (
    check_layout_rules,
    gather_declarations,
    publish_groups,
    read_memberships,
)
from unified_ckpt.engine.plan.save_plan import checked_groups
from unified_ckpt.engine.save.extra_state import ExtraState
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import codec
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_spread import narrow
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

LocalShardings = Mapping[
    Key, Sharding | None
]  # by world row: the rule within the island, None for a tensor that is stored in fragments
GlobalTotals = Mapping[str, list[int]]  # part -> tensors and bytes of all islands


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """What all islands of a save do together. `collective`: of all ranks."""

    collective: Collective
    node_group: NodeGroup
    save_id: str

    def step(self, name: str) -> AbstractContextManager[None]:
        """A step that every island gets through, or none."""
        return self.collective.step(name)

    def barrier(self, name: str) -> None:
        """Returns once every island has come here; raises the error of one that has not."""
        with self.step(name):
            pass

    def all_gather(self, key: str, value: bytes) -> list[bytes]:
        """For one rank of each island, inside a phase of the island: what each of them says, by
        number.
        """
        try:
            self.collective.put(f"{key}/{self.node_group.number}", b"." + value)
            return [
                self.collective.get(f"{key}/{number}")[1:]
                for number in range(self.node_group.count)
            ]
        except CheckpointError as error:
            narrow(error)
            raise


@contextmanager
def propagating_errors(commit_group: CommitGroup | None) -> Iterator[None]:
    """An error inside is told to all islands, and raised on all of them."""
    try:
        yield
    except BaseException as error:
        if commit_group is None:
            raise
        if not commit_group.collective.has("failed"):
            commit_group.collective.finish_step("island", error)
        raise commit_group.collective.failure(error) from error


def join_commit_group(collective: Collective, node_group: NodeGroup) -> CommitGroup:
    """Collective over all ranks. They agree on one save id."""
    save_id = collective.broadcast(
        "save-id", secrets.token_hex(8).encode() if collective.rank == 0 else None
    )
    return CommitGroup(collective, node_group, save_id.decode())


def broadcast_extra(commit_group: CommitGroup, extra_state: ExtraState) -> ExtraState:
    """Collective over all ranks. The `extra` of rank 0 for the first rank of each island, whose
    folder may be the one that is left.
    """
    collective, node_group = commit_group.collective, commit_group.node_group
    if collective.rank == 0:
        collective.put("extra", codec.pack(extra_state.extra, "extra"))
    if collective.rank != node_group.ranks[0]:
        return extra_state
    return replace(extra_state, extra=codec.unpack(collective.get("extra"), "extra"))


def check_global(
    collective: Collective,
    parts: Sequence[LocalTensor],
    *,
    layout: Layout | None,
    matched_rules: set[str],
) -> GlobalTotals:
    """Collective over all ranks. LayoutError or MismatchError where their claims do not add up;
    else what they hold between them.
    """
    with collective.step("world"):
        check_layout_rules(collective, layout, matched_rules)
        _, declarations = gather_declarations(collective, [part.decl for part in parts])
        if declarations is not None:
            specs = {
                decl.key: decl.spec
                for group in checked_groups(declarations)
                for decl in group.decls
            }
            totals: dict[str, list[int]] = {}
            for (part, _), spec in specs.items():
                count, nbytes = totals.get(part, [0, 0])
                totals[part] = [count + 1, nbytes + spec.nbytes]
            collective.put("totals", json.dumps(totals).encode())
    totals_by_part: GlobalTotals = json.loads(collective.get("totals"))
    return totals_by_part


def local_shardings(
    commit_group: CommitGroup, comm: Comm, parts: Sequence[LocalTensor]
) -> LocalShardings:
    """Collective over the island, whose ranks `comm` has. What of their tensors it holds whole, and
    by which rule.
    """
    decls, node_group = [part.decl for part in parts], commit_group.node_group
    collective = comm.begin_collective(
        "island",
        cached=False,
        timeout_seconds=commit_group.collective.timeout_seconds,
        parent=commit_group.collective,
    )
    with collective.step("island"):
        table_id, declarations = gather_declarations(collective, decls)
        if declarations is not None:
            groups = group_tables(declarations.tables, declarations.ranks_by_table)
            publish_groups(collective, declarations, groups, [{} for _ in groups])
        members, _ = read_memberships(collective, table_id, decls)
    shardings: dict[Key, Sharding | None] = {}
    for membership in members:
        global_ranks = [node_group.ranks[index] for index in membership.holders]
        shardings.update(
            {
                decl.key: group_sharding(decl.sharding, global_ranks, node_group.ranks)
                for decl in membership.decls
            }
        )
    return shardings


def localize(
    parts: Sequence[LocalTensor],
    shardings: LocalShardings,
    node_group: NodeGroup,
    *,
    group_rank: int,
) -> list[LocalTensor]:
    """A rank's parts as its island stores them: whole tensors by the island's rule, of the others a
    fragment for each box.
    """
    localized: list[LocalTensor] = []
    for part in parts:
        decl, sharding = part.decl, shardings[part.decl.key]
        if sharding is not None:
            if (
                sharding.position(group_rank) is not None
            ):  # else it has a piece of a copy that the island does not hold whole
                localized.append(
                    LocalTensor(TensorDecl(decl.part, decl.fqn, decl.spec, sharding), part.local)
                )
        elif decl.spec.nbytes == 0:
            localized.append(
                LocalTensor(
                    TensorDecl(decl.part, decl.fqn, decl.spec, Sharding()),
                    part.local.new_empty(decl.spec.shape),
                )
            )
        else:
            for box, local in decl.sharding.boxes(node_group.ranks[group_rank], decl.spec.shape):
                shard = part.local[
                    tuple(
                        slice(start, start + size)
                        for start, size in zip(local.offsets, local.shape, strict=True)
                    )
                ]
                if box.numel:
                    spec = TensorSpec(decl.spec.dtype, box.shape)
                    localized.append(
                        LocalTensor(
                            TensorDecl(
                                decl.part + SHARD_SUFFIX,
                                shard_name(decl.fqn, box, decl.spec.shape),
                                spec,
                                Sharding(),
                            ),
                            shard,
                        )
                    )
    return sorted(localized, key=lambda part: part.decl.key)

"""The node groups that commit one save together.

Data could be lost if a group published its checkpoint while another has none and the older one is
gone. So no folder is published before all groups have written theirs and synced the tensors, and
what it replaces is removed only after all are published.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import codec
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import demote_shared
from unified_ckpt.runtime.comm.traffic import Traffic


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """This rank's node group among those of a save; `collective` is that of all ranks.

    `save_id`: equal on all ranks. `traffic`: of this rank.
    """

    collective: Collective
    node_group: NodeGroup
    save_id: str
    traffic: Traffic = field(default_factory=Traffic)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return the values of all node groups, by number, on the first rank of each.

        Inside a step of the group. The values are what `codec` packs.
        """
        with self.waiting():
            self.collective.put(f"{key}/{self.node_group.number}", codec.pack(value, key))
            keys = [f"{key}/{number}" for number in range(self.node_group.count)]
            return [codec.unpack(self.collective.get(each), key) for each in keys]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let an error of other node groups end the step of this one on all of its ranks."""
        try:
            yield
        except CheckpointError as error:
            demote_shared(error)  # the groups know it, but not the other ranks of this one
            raise

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Raise an error of the block on the ranks of all node groups."""
        try:
            yield
        except BaseException as error:
            if not self.collective.has("failed"):
                self.collective.finish_step("node-group", error)
            raise self.collective.failure(error) from error


def join_commit_group(collective: Collective, node_group: NodeGroup) -> CommitGroup:
    """Collective over all ranks. Agree on one save id."""
    save_id = collective.broadcast("save-id", secrets.token_hex(8).encode()).decode()
    return CommitGroup(collective, node_group, save_id)

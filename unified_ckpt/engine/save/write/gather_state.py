"""Gathers what ranks hold beside tensors on the first rank of each folder, and merges it there.

Each rank sends its values once, with digests in place of tensors; equal ones are sent by one rank.
The bytes of tensors follow only where they are stored and the first rank does not hold them. So a
rank sends as many messages in a save of 2 ranks as in one of 16,384.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.engine.folder.non_tensor_state import MergedState
from unified_ckpt.engine.plan.holders import DistinctValues, gather_values
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.values.encode_values import EncodedValues
from unified_ckpt.engine.values.merge_values import ParsedValues, merge_values
from unified_ckpt.errors import FormatError
from unified_ckpt.format import codec
from unified_ckpt.runtime.comm.collective import Collective

_KEY = "state"


@dataclass(frozen=True, slots=True)
class _DistinctBody:
    """Values as they were sent: the body, and the ranks and node groups that hold it."""

    ranks: list[int]
    body: bytes
    groups: list[int]

    def is_sent(self, group: NodeGroup) -> bool:
        """Return whether some node group has to get it from another one."""
        return len(self.groups) < group.count


def gather_state(planned: PlannedSave) -> MergedState | None:
    """Collective. Return the merged state of all ranks on the first rank of each folder.

    None elsewhere. LayoutError if values differ and the options ask for an error; FormatError if
    the values that differ are too large.
    """
    collective, group = planned.folder_ranks, planned.call.connections.topology.node_group
    gathered = gather_values(collective, _KEY, [values.body for values in planned.state])
    if collective.rank != 0:
        _send_blobs(collective, gathered, planned.state)
        return None
    ranks_by_digest = group_by_value(
        (rank, digest)
        for rank, digests in zip(group.ranks, gathered.digests, strict=True)
        for digest in digests
    )
    local = [(ranks, gathered.bodies[digest]) for digest, ranks in ranks_by_digest.items()]
    states = _all_states(planned, local)
    merge = merge_values([ParsedValues.parse(state.ranks, state.body) for state in states])
    merge.check(allow_differing=planned.request.options.check_replicas != "always")
    needed = merge.needed_blobs()
    with_blobs = {
        index: states[index] for index, state in enumerate(merge.states) if state.content["digests"]
    }
    blobs = _group_blobs(planned, gathered, with_blobs, needed)
    sent = [index for index, names in enumerate(needed) if names and states[index].is_sent(group)]
    if sent:
        own = [[index, blobs[index]] for index in sent if blobs.get(index)]
        for blobs_of_folder in planned.scope.gather("state-blobs", own):
            blobs |= dict(blobs_of_folder)
    return merge.decode([blobs.get(index, {}) for index in range(len(states))])


def _all_states(planned: PlannedSave, local: list[tuple[list[int], bytes]]) -> list[_DistinctBody]:
    """Return the distinct states of all node groups, the lowest rank first."""
    states: dict[bytes, _DistinctBody] = {}
    for number, items in enumerate(planned.scope.gather("states", local)):
        for ranks, body in items:
            state = states.setdefault(body, _DistinctBody([], body, []))
            state.ranks.extend(ranks)
            state.groups.append(number)
    for state in states.values():
        state.ranks.sort()
    return sorted(states.values(), key=lambda state: state.ranks[0])


def _group_blobs(
    planned: PlannedSave,
    gathered: DistinctValues,
    states: Mapping[int, _DistinctBody],
    needed: Sequence[Collection[str]],
) -> dict[int, Mapping[str, Any]]:
    """Return the needed blobs of states that this node group provides, by index of the state.

    `states`: those with blobs.

    A group provides all of its states to itself if all groups have them, else the first group that
    has a state provides it to all.
    """
    group, collective = planned.call.connections.topology.node_group, planned.folder_ranks
    digest_by_body = {body: digest for digest, body in gathered.bodies.items()}
    own = dict(zip(gathered.local_digests, planned.state, strict=True))
    sent_by_this_rank = {
        digest
        for digest, is_sender in zip(gathered.local_digests, gathered.is_sender, strict=True)
        if is_sender
    }
    blobs = dict[int, Mapping[str, Any]]()
    for index, state in states.items():
        digest = digest_by_body.get(state.body)
        if digest is None:  # no rank of this group has it
            continue
        provides = state.groups[0] == group.number or not state.is_sent(group)
        wanted = sorted(needed[index]) if provides else []
        if digest in own:
            blobs[index] = _own_blobs(own[digest], wanted)
            wanted = []
        if digest not in sent_by_this_rank:
            collective.put_json(f"{_KEY}-blobs/{digest}", wanted)
        if wanted:
            body = collective.get(f"{_KEY}-blobs-body/{digest}")
            blobs[index] = codec.unpack(body, "blobs")
    return blobs


def _send_blobs(
    collective: Collective, gathered: DistinctValues, state: Sequence[EncodedValues]
) -> None:
    """Send the blobs that the first rank asks for, of what this rank was the first to have."""
    for digest, is_sender, values in zip(
        gathered.local_digests, gathered.is_sender, state, strict=True
    ):
        wanted = (
            collective.get_json(f"{_KEY}-blobs/{digest}") if is_sender and values.has_blobs else []
        )
        if wanted:
            body = codec.pack(_own_blobs(values, wanted), "blobs")
            collective.put(f"{_KEY}-blobs-body/{digest}", body)


def _own_blobs(values: EncodedValues, names: Collection[str]) -> dict[str, Any]:
    """Return blobs of this rank. FormatError for one that was too large to be copied."""
    for name in names:
        if name not in values.blobs:
            raise FormatError(
                f"{name}: got a large tensor that rank 0 does not hold, in a background save, "
                "expected it on rank 0 too; pass it in parts=, or call `save`"
            )
    return {name: values.blobs[name] for name in names}

"""Before the first save to a folder: which ranks see it, which of them share a machine, and how they talk to each other.

How data could be lost: a folder that several machines see is taken for each one's own, and they write over each other; one that they do
not share is taken for shared. So every machine leaves a fresh file there, and looks for those of the others by name: a list of a folder
may be an old one, a name that nobody has asked for is looked up anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from unified_ckpt.core.nodes.node_groups import Island
from unified_ckpt.core.nodes.write_alignment import Volume, block_nbytes_of
from unified_ckpt.core.text import short
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import everybody, file_system, first_ranks, numbered
from unified_ckpt.runtime.exchange.tcp import parse_address
from unified_ckpt.runtime.exchange.tcp_exchange import Post
from unified_ckpt.runtime.storage.storage import LocalStorage

_PROBE = ".unified-probe-"


@dataclass(frozen=True, slots=True)
class Land:
    """The ranks that see this rank's folder. `comm`: their own way to talk; `island`: None where they are all ranks; `post`: None where
    they are on one machine."""

    comm: Comm
    island: Island | None
    post: Post | None

    def close(self) -> None:
        if self.island is not None:
            self.comm.leave()
        if self.post is not None:
            self.post.close()


@dataclass(frozen=True, slots=True)
class Found:
    """`island`: this rank's; `machines`: of its ranks; `block_nbytes`: of the folder, see `Volume`."""

    island: Island
    machines: tuple[int, ...]
    block_nbytes: int


def find_land(comm: Comm, found: Found, *, timeout_seconds: float) -> Land | None:
    """Collective over all ranks, inside a phase of theirs. None where all are on one machine."""
    island, several = found.island, len(set(found.machines)) > 1
    if island.count == 1 and not several:
        return None
    own = comm if island.count == 1 else comm.among(f"island/{island.number}", island.ranks)
    if not several:
        return Land(own, island, None)
    keys, meeting, post = (
        own.keys("post"),
        own.meet("connections", same=False, timeout_seconds=timeout_seconds),
        None,
    )
    try:
        with meeting.phase("listen"):
            post = Post(
                Volume(found.machines, found.block_nbytes),
                lambda rank: parse_address(keys.get(str(rank)).decode()),
                rank=own.rank,
                ranks=own.ranks,
                timeout_seconds=timeout_seconds,
            )
            keys.set(str(own.rank), post.address.encode())
    except CheckpointError as error:
        if post is not None:
            post.close()
        error.agreed = False  # among these ranks, not yet among all
        raise
    return Land(own, island if island.count > 1 else None, post)


def look(
    meeting: Meeting, storage: LocalStorage, machine: str, *, block_nbytes: int | None
) -> Found:
    """Collective. Which ranks see this rank's folder. `block_nbytes`: None to go by the kind of file system.

    StorageError where ranks of one machine see different folders, or a machine sees another's and not the reverse.
    """
    told = everybody(meeting, "machine", [machine, file_system(storage.root), block_nbytes])
    machines = numbered([name for name, _, _ in told])
    if max(machines) == 0:
        return Found(Island(0, 1, tuple(range(meeting.world)), meeting.world), tuple(machines), 1)
    seen = _probe(meeting, storage, machines)
    islands = {first: i for i, first in enumerate(sorted(set(seen)))}
    ranks = tuple(rank for rank, first in enumerate(seen) if first == seen[meeting.rank])
    island = Island(islands[seen[meeting.rank]], len(islands), ranks, meeting.world)
    wanted = [told[rank][2] for rank in ranks if told[rank][2] is not None]
    kinds = [told[rank][1] for rank in ranks]
    return Found(
        island,
        tuple(machines[rank] for rank in ranks),
        _strictest(wanted) if wanted else block_nbytes_of(kinds),
    )


def _strictest(blocks: Sequence[int]) -> int:
    return 0 if 0 in blocks else max(blocks)


def _probe(meeting: Meeting, storage: LocalStorage, machines: Sequence[int]) -> list[int]:
    """For each rank the first machine whose file it sees in its folder."""
    own, leads = machines[meeting.rank], first_ranks(machines)
    token = meeting.broadcast(
        "token", secrets.token_hex(8).encode() if meeting.rank == 0 else None
    ).decode()

    def there(machine: int) -> bool:
        return storage.size(f"{_PROBE}{token}-{machine}") is not None

    try:
        with meeting.phase("probe"):
            if meeting.rank == leads[own]:
                storage.put(f"{_PROBE}{token}-{own}", b"probe", fsync=True)
        with meeting.phase("look"):
            if not there(own):
                raise StorageError(
                    f"{storage.root}: this rank does not see the folder that rank {leads[own]} of its machine sees"
                )
            first = next(machine for machine in range(len(leads)) if there(machine))
            seen = [int(text) for text in everybody(meeting, "seen", first)]
            if meeting.rank == leads[own]:
                mates = (
                    {machines[rank] for rank, one in enumerate(seen) if one == first}
                    if first == own
                    else {first}
                )
                if seen[leads[first]] != first or not all(there(machine) for machine in mates):
                    blind = [leads[machine] for machine in sorted(mates) if not there(machine)] or [
                        leads[first]
                    ]
                    raise StorageError(
                        f"{storage.root}: rank(s) {short(blind)} and rank {meeting.rank} are on different machines, and only one side sees "
                        "the other's files; needed one folder for both, or one for each"
                    )
        return seen
    finally:
        if meeting.rank == leads[own]:
            with suppress(NotFoundError):
                storage.remove_file(f"{_PROBE}{token}-{own}")

"""Knows a group of ranks and the key-value store that they share.

torch's collectives are not used, so a save never interferes with those of the training. A `Comm`
lives as long as its ranks; each operation of all ranks is one `Collective`. Every wait is bounded,
and its error names the missing ranks.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.call import Call, differences
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.key_store import KeyStore
from unified_ckpt.runtime.comm.stale_keys import StaleKeys

# The number of the next collective once two threads of a rank were in one process group.
_REFUSED = 1 << 60
# Of each store, by process group: its holder is the thread that joins a collective.
_ARRIVING: WeakKeyDictionary[Store, dict[str, threading.Lock]] = WeakKeyDictionary()


class Comm:
    """A group of ranks over one c10d store.

    `ranks`: the global rank of each member; `rank`: this process's index among them. `parent`: a
    collective of more ranks: all collectives of this group end when it fails. `arriving`: shared by
    all of this process that count the same collectives, None if there are no others.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: Sequence[int],
        parent: Collective | None = None,
        arriving: threading.Lock | None = None,
    ) -> None:
        self.rank, self.ranks, self.world = rank, tuple(ranks), len(ranks)
        self._store, self._key_store, self._parent = store, KeyStore(store), parent
        self._arriving = arriving or threading.Lock()
        self._number = -1
        self._stale_keys = StaleKeys(self._key_store, rank=rank, world=self.world)

    def begin_collective(
        self,
        operation: Call | str,
        *,
        timeout_seconds: float,
        cached: bool = False,
        busy: bool = False,
        delete_stale: bool = True,
        parent: Collective | None = None,
    ) -> Collective:
        """Start a collective: wait until every rank has called this for the same operation.

        `operation`: its description, whose first word is its name, or a `Call` with arguments too.
        RankError names the ranks where the name or the arguments differ.

        `cached`: this rank has cached its plan; `Collective.all_cached` is true if every rank has.
        `busy`: this rank has an unfinished background collective; `any_busy` is true if any has.
        `delete_stale=False` leaves `delete_stale_keys` to the caller.

        `parent`: a collective of more ranks that this one belongs to. Raise its error if it fails
        meanwhile, or RankError naming the ranks that did not arrive in time.

        Collectives of one process group are counted, so the ranks must begin them in one order.
        Two threads have none: CheckpointError on all ranks, from then on.
        """
        call = Call(operation, {}) if isinstance(operation, str) else operation
        call = replace(call, cached=cached, busy=busy)
        if self.world > 1 and not self._arriving.acquire(blocking=False):
            raise self._refuse(call)
        try:
            collective = self._join(call, timeout_seconds=timeout_seconds, parent=parent)
        finally:
            if self.world > 1:
                self._arriving.release()
        if delete_stale:
            self.delete_stale_keys(collective)
        return collective

    def _join(self, call: Call, *, timeout_seconds: float, parent: Collective | None) -> Collective:
        """Return the next collective once all ranks have joined it with the same call."""
        # A rank that leaves a collective before the others must get a new number here.
        self._number = max(self._key_store.add("collectives", 0), self._number + 1)
        if self._number >= _REFUSED:
            raise CheckpointError(self._key_store.get("refused").decode())
        collective = Collective(
            self._key_store,
            self._number,
            rank=self.rank,
            ranks=self.ranks,
            timeout_seconds=timeout_seconds,
            parent=parent or self._parent,
        )
        collective.use_wait = self._stale_keys.delete_one
        if parent is not None:  # the same rank is in both: one clock for what it does
            collective.clock = parent.clock
        parent = parent or self._parent
        self._stale_keys.add(collective)
        equal_calls = collective.add(f"call/{call.digest}")
        if collective.add("arrived") == self.world:
            if equal_calls < self.world:  # when this rank arrived
                equal_calls = collective.add(f"call/{call.digest}", 0)
            is_same = equal_calls == self.world
            outcome = _outcome([call]) if is_same else self._compare_calls(collective, call)
            outcome = self._close_arrivals(collective, outcome)
        else:
            outcome = self._wait_for_arrivals(collective, call, has_parent=parent is not None)
        if outcome.startswith("refused: "):
            raise CheckpointError(outcome.partition(": ")[2])
        if outcome.startswith(("late: ", "differ: ")):
            raise RankError(outcome.partition(": ")[2])
        collective.all_cached = outcome.startswith("cached")
        collective.any_busy = outcome.endswith(" busy")
        collective.clock.mark_arrived()
        return collective

    def _refuse(self, call: Call) -> CheckpointError:
        """End the collective that the other thread waits for, and all later ones, on every rank.

        Otherwise ranks that join those of two threads in different orders would wait for each
        other. No RankError: another attempt would not help.
        """
        self._key_store.compare_set(
            "refused",
            "",
            f"{call.description}: got calls from two threads of rank {self.ranks[self.rank]} at "
            "once, expected one thread per process group; give each thread one of its own: "
            "Checkpointer(group=torch.distributed.new_group())",
        )
        text = self._key_store.get("refused").decode()
        number = self._key_store.add("collectives", 0)
        while (next_number := self._replace_number(number, _REFUSED)) != _REFUSED:
            number = next_number
        # A rank that left a collective before the others is one ahead.
        for joined in (number, number + 1):
            Collective(
                self._key_store, joined, rank=self.rank, ranks=self.ranks, timeout_seconds=0
            ).set_once("arrivals-closed", f"refused: {text}")
        return CheckpointError(text)

    def _replace_number(self, number: int, new_number: int) -> int:
        """Set the number of the next collective if it is still `number`, and return it."""
        return int(self._key_store.compare_set("collectives", str(number), str(new_number)))

    def _wait_for_arrivals(self, collective: Collective, call: Call, *, has_parent: bool) -> str:
        """Return the outcome of the arrivals, on a rank that is not the last."""
        # Set last: a rank that dies before this line has not arrived.
        collective.put(f"arrived/{self.rank}", call.encoded)
        try:
            outcome = collective.poll("arrivals-closed", ignore_failures=not has_parent)
        except CheckpointError as error:  # of the parent: some ranks may never arrive here
            self._close_arrivals(collective, f"late: {error}")
            raise
        if outcome is not None:
            return outcome.decode()
        missing = collective.missing_ranks([f"arrived/{r}" for r in range(self.world)])
        return self._close_arrivals(
            collective,
            f"late: {call.description}: rank(s) {missing} did not arrive within "
            f"{collective.timeout_seconds:g} s; expected the same call on all {self.world} ranks",
        )

    def _compare_calls(self, collective: Collective, call: Call) -> str:
        """Return the outcome of arrivals that are not all equal, on the rank that arrives last."""
        keys = [f"arrived/{rank}" for rank in range(self.world) if rank != self.rank]
        collective.wait(keys, ignore_failures=True)
        if missing := collective.missing_ranks(keys):
            return f"differ: {call.description}: rank(s) {missing} did not arrive"
        calls = [Call.decode(collective.get(key)) for key in keys]
        calls.insert(self.rank, call)
        text = differences(calls, self.ranks)
        return f"differ: {text}" if text else _outcome(calls)

    def subgroup(
        self, name: str, members: Sequence[int], *, parent: Collective | None = None
    ) -> Comm:
        """Return the `Comm` of some of these ranks. Every member calls this with the same name."""
        return Comm(
            PrefixStore(name, self._store),
            rank=list(members).index(self.rank),
            ranks=[self.ranks[i] for i in members],
            parent=parent,
        )

    def key_store(self, name: str) -> KeyStore:
        """Return a store of these ranks for keys outside of collectives."""
        return KeyStore(PrefixStore(name, self._store))

    def hand_over_keys(self) -> None:
        """Hand the keys still to be deleted over to this rank's next `Comm`."""
        self._stale_keys.store_entries()

    def delete_stale_keys(self, joined: Collective) -> None:
        """Let later waits of this rank delete its keys of collectives before `joined`.

        Every rank has joined it.
        """
        self._stale_keys.delete(joined)

    def _close_arrivals(self, collective: Collective, outcome: str) -> str:
        """End the arrival phase; return the first outcome that any rank set.

        Every rank may set it, in case the first one dies meanwhile. The number of the next
        collective is set before, so that no rank joins this one again.
        """
        number = collective.number
        while number <= collective.number:
            number = self._replace_number(number, collective.number + 1)
        return collective.set_once("arrivals-closed", outcome)


def _outcome(calls: Sequence[Call]) -> str:
    """Return in words whether all ranks have cached their plans, and whether any is busy."""
    cached = "cached" if all(call.cached for call in calls) else "new"
    return cached + " busy" * any(call.busy for call in calls)


def single_process() -> Comm:
    """Return a `Comm` of one rank."""
    return Comm(dist.HashStore(), rank=0, ranks=(0,))  # type: ignore[attr-defined]


def from_torch(group: dist.ProcessGroup | None) -> Comm:
    """Return the ranks of a process group, over its store. None: all ranks.

    Without an initialized process group, the same as `single_process`.
    """
    given: object = group
    if dist.is_available() and not isinstance(given, dist.ProcessGroup | None):
        if given == dist.GroupMember.NON_GROUP_MEMBER:
            raise RankError(
                f"process group: rank {dist.get_rank()} is not a member; pass a group that "
                "contains every calling rank"
            )
        raise TypeError(
            f"group: got {type(given).__name__}, expected a ProcessGroup; a DeviceMesh has one for "
            "each dim: mesh.get_group(dim)"
        )
    store = process_group_store()
    if store is None or (group is None and dist.get_world_size() == 1):
        return single_process()
    group = group or dist.distributed_c10d._get_default_group()
    ranks = group_ranks(group)
    global_rank = dist.get_rank()
    if global_rank not in ranks:
        raise RankError(
            f"process group: rank {global_rank} is not a member, its ranks are "
            f"{format_ranks(ranks)}; pass a group that contains every calling rank"
        )
    # Groups of equal ranks are kept apart: each may belong to a thread of its own.
    name = hashlib.sha256(repr((group.group_name, ranks)).encode()).hexdigest()[:16]
    return Comm(
        PrefixStore(f"unified_ckpt/{name}", store),
        rank=ranks.index(global_rank),
        ranks=ranks,
        arriving=_ARRIVING.setdefault(store, {}).setdefault(name, threading.Lock()),
    )


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a process group of torch; None means all ranks."""
    return tuple(dist.get_process_group_ranks(group))


def process_group_store() -> Store | None:
    """Return the default process group's store, None without one. A restart makes a new one."""
    is_running = dist.is_available() and dist.is_initialized()
    return dist.distributed_c10d._get_default_store() if is_running else None


def default_device_type() -> str:
    """Return the type of device that the default process group is for; "cpu" without one."""
    if process_group_store() is None:
        return "cpu"
    return str(dist.distributed_c10d._get_pg_default_device().type)


def is_destroyed(group: dist.ProcessGroup | None) -> bool:
    """Return whether a process group was destroyed. None, all ranks, never is."""
    return group is not None and group not in dist.distributed_c10d._world.pg_map


def join_torchrun(exit_stack: ExitStack) -> bool:
    """Make torchrun's processes one group until `exit_stack` closes; return if this is rank 0."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    dist.init_process_group("gloo")
    exit_stack.callback(dist.destroy_process_group)
    return dist.get_rank() == 0

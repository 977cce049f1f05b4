"""How ranks talk: keys in a store that they share. Collectives of torch are not used, so a save
never meets the training's own.

A `Comm` lasts as long as the ranks do. Each collective call is one `Meeting`: everybody arrives,
talks under keys of its own, and leaves together or fails together, with one text. Every wait is
bounded and names who is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.call_terms import Call, differences
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.stale_keys import StaleKeys

_NO_ARGUMENTS: Mapping[str, object] = {}


@contextmanager
def _store_errors() -> Iterator[None]:
    """Says in our words that the store's server has ended; torch's text names nobody."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankError(
            f"the ranks' common store cannot be reached; the process that serves it, usually rank 0's, has ended: {error}"
        ) from error


class KeyStore:
    """Keys that the ranks share. No call waits. RankError where the store cannot be reached."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str | bytes, /) -> None:
        with _store_errors():
            # the stub says str; bytes are taken
            self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, /) -> bytes:
        """Of a key that is set: `check` first."""
        with _store_errors():
            return bytes(self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        with _store_errors():
            return bool(self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        with _store_errors():
            return int(self._store.add(key, amount))

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        with _store_errors():
            return [bytes(value) for value in self._store.multi_get(keys)]

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Sets the key if it holds this, or if it is not set and "" is expected; what it holds
        then.
        """
        with _store_errors():
            return bytes(self._store.compare_set(key, expected, value))

    def delete_key(self, key: str, /) -> bool:
        with _store_errors():
            return bool(self._store.delete_key(key))


class Comm:
    """Ranks over one c10d store. `ranks`: the global rank of each; `rank`: this one's index among
    them.

    `within`: a meeting of more ranks, of which all its own meetings are part: they end when that
    one fails.
    """

    def __init__(
        self, store: Store, *, rank: int, ranks: Sequence[int], parent: Collective | None = None
    ) -> None:
        self.rank, self.ranks, self.world = rank, tuple(ranks), len(ranks)
        self._store, self._key_store, self._parent = store, KeyStore(store), parent
        self._number = -1
        self._stale_keys = StaleKeys(self._key_store, rank=rank, world=self.world)

    def begin_collective(
        self,
        description: str,
        *,
        cached: bool,
        timeout_seconds: float,
        busy: bool = False,
        delete_stale: bool = True,
        parent: Collective | None = None,
        arguments: Mapping[str, object] | None = _NO_ARGUMENTS,
    ) -> Collective:
        """Waits until every rank has called. `Meeting.all_same`: whether every rank said `cached`;
        `.any_busy`: whether one said `busy`, which it is while an earlier meeting of its own is not
        over. `delete_stale`: if not, the caller does it when there is time.

        `description`: the call, in words, the first of which is its name. `arguments`: what all
        ranks must give alike, for JSON; None on a rank that has failed before it knew them.
        RankError naming the ranks where calls or terms differ.

        `parent`: a meeting of more ranks that this one is part of. Raises its error when it fails
        meanwhile, or RankError naming the ranks that did not come in time.
        """
        parent = parent or self._parent
        # A rank that is back before the others have left must not join their meeting again.
        self._number = max(self._key_store.add("meetings", 0), self._number + 1)
        collective = Collective(
            self._key_store,
            self._number,
            rank=self.rank,
            ranks=self.ranks,
            timeout_seconds=timeout_seconds,
            parent=parent,
        )
        self._stale_keys.add(collective)
        if cached:
            collective.add("same")
        if busy:
            collective.add("busy")
        call = Call(description, arguments)
        collective.add(f"call/{call.digest}")
        if collective.add("in") == self.world:
            outcome = "same" if collective.add("same", 0) == self.world else "new"
            if collective.add(f"call/{call.digest}", 0) < self.world and (
                text := self._call_differences(collective, call)
            ):
                outcome = f"differ: {text}"
            self._close_arrivals(collective, outcome + " busy" * (collective.add("busy", 0) > 0))
        collective.put(
            f"in/{self.rank}", call.encoded
        )  # last of all: a rank that dies before is one that did not come
        try:
            all_arrived = collective.wait(["go"], ignore_failures=parent is None)
        except (
            CheckpointError
        ) as error:  # of the meeting around this one, which some rank may not come to any more
            self._close_arrivals(collective, f"late: {error}")
            raise
        if not all_arrived:
            missing = collective.missing_ranks([f"in/{r}" for r in range(self.world)])
            expected = f"needed the same call on all {self.world} ranks"
            self._close_arrivals(
                collective,
                f"late: {description}: rank(s) {missing} did not come within {timeout_seconds:g} s; {expected}",
            )
        outcome = collective.get("go").decode()
        if outcome.startswith(("late: ", "differ: ")):
            raise RankError(outcome.partition(": ")[2])
        collective.all_cached, collective.any_busy = (
            outcome.startswith("same"),
            outcome.endswith(" busy"),
        )
        if delete_stale:
            self.delete_stale_keys()
        return collective

    def _call_differences(self, collective: Collective, call: Call) -> str:
        """On the rank that came last: how the ranks' calls differ; empty where some rank only
        failed before it knew its terms.
        """
        keys = [f"in/{rank}" for rank in range(self.world) if rank != self.rank]
        collective.wait(keys, ignore_failures=True)
        if missing := collective.missing_ranks(keys):
            return f"{call.description}: rank(s) {missing} did not come"
        other_calls = iter(collective.get(key) for key in keys)
        return differences(
            [
                call if rank == self.rank else Call.decode(next(other_calls))
                for rank in range(self.world)
            ],
            self.ranks,
        )

    def subgroup(
        self, name: str, members: Sequence[int], *, parent: Collective | None = None
    ) -> Comm:
        """A `Comm` of some of these ranks, this one among them, each of which makes one by the same
        name.
        """
        ranks = [self.ranks[i] for i in members]
        return Comm(
            PrefixStore(name, self._store),
            rank=list(members).index(self.rank),
            ranks=ranks,
            parent=parent,
        )

    def key_store(self, name: str) -> KeyStore:
        """Keys of these ranks outside of meetings."""
        return KeyStore(PrefixStore(name, self._store))

    def detach(self) -> None:
        """Leaves word of the keys that are still to be deleted, for the next `Comm` of this rank."""
        self._stale_keys.hand_over()

    def delete_stale_keys(self) -> None:
        """Deletes this rank's keys of meetings that are over: two round trips for each, and one for
        each key.
        """
        self._stale_keys.delete()

    def _close_arrivals(self, collective: Collective, outcome: str) -> None:
        """Ends a roll call by the first verdict of any rank: each may, should the first die of it.
        The next meeting is open before that is told, so that no one comes to this one again.
        """
        outcome = collective.set_once("closed", outcome)
        number = collective.number
        while number <= collective.number:
            number = int(
                self._key_store.compare_set("meetings", str(number), str(collective.number + 1))
            )
        collective.put("go", outcome.encode())


def single_process() -> Comm:
    """One rank and nobody to wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Comm(store, rank=0, ranks=(0,))


def from_torch(group: dist.ProcessGroup | None) -> Comm:
    """The ranks of a process group (None: all), over the store that it was made with;
    `single_process` where there is no process group.
    """
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or (group is None and dist.get_world_size() == 1)
    ):
        return single_process()
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    global_rank = dist.get_rank()
    if global_rank not in ranks:
        raise RankError(
            f"rank {global_rank} is not in the process group given; its ranks are {format_ranks(ranks)}"
        )
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store = dist.distributed_c10d._get_default_store()
    return Comm(
        PrefixStore(f"unified_ckpt/{name}", store), rank=ranks.index(global_rank), ranks=ranks
    )


def join_torchrun(exit_stack: ExitStack) -> bool:
    """For a command: the processes that torchrun has started become ranks of one group, until
    `exit_stack` ends. Whether this is the first.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    dist.init_process_group("gloo")
    exit_stack.callback(dist.destroy_process_group)
    return dist.get_rank() == 0

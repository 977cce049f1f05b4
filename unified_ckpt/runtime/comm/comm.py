"""How ranks talk: keys in a store that they share. Collectives of torch are not used, so a save never meets the training's own.

A `Comm` lasts as long as the ranks do. Each collective call is one `Meeting`: everybody arrives, talks under keys of its own, and
leaves together or fails together, with one text. Every wait is bounded and names who is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from unified_ckpt.core.text import short
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.call_terms import Call, differences
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.stale_keys import Leftovers

_NO_TERMS: Mapping[str, object] = {}


@contextmanager
def _reaching() -> Iterator[None]:
    """Says in our words that the store's server has ended; torch's text names nobody."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankError(
            f"the ranks' common store cannot be reached; the process that serves it, usually rank 0's, has ended: {error}"
        ) from error


class Keys:
    """Keys that the ranks share. No call waits. RankError where the store cannot be reached."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str | bytes, /) -> None:
        with _reaching():
            self._store.set(key, value)  # type: ignore[arg-type]  # the stub says str; bytes are taken

    def get(self, key: str, /) -> bytes:
        """Of a key that is set: `check` first."""
        with _reaching():
            return bytes(self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        with _reaching():
            return bool(self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        with _reaching():
            return int(self._store.add(key, amount))

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        with _reaching():
            return [bytes(value) for value in self._store.multi_get(keys)]

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Sets the key if it holds this, or if it is not set and "" is expected; what it holds then."""
        with _reaching():
            return bytes(self._store.compare_set(key, expected, value))

    def delete_key(self, key: str, /) -> bool:
        with _reaching():
            return bool(self._store.delete_key(key))


class Comm:
    """Ranks over one c10d store. `ranks`: the global rank of each; `rank`: this one's index among them.

    `within`: a meeting of more ranks, of which all its own meetings are part: they end when that one fails.
    """

    def __init__(
        self, store: Store, *, rank: int, ranks: Sequence[int], within: Meeting | None = None
    ) -> None:
        self.rank, self.ranks, self.world = rank, tuple(ranks), len(ranks)
        self._store, self._keys, self._within = store, Keys(store), within
        self._number = -1
        self._leftovers = Leftovers(self._keys, rank=rank, world=self.world)

    def meet(
        self,
        what: str,
        *,
        same: bool,
        timeout_seconds: float,
        busy: bool = False,
        tidy: bool = True,
        within: Meeting | None = None,
        terms: Mapping[str, object] | None = _NO_TERMS,
    ) -> Meeting:
        """Waits until every rank has called. `Meeting.all_same`: whether every rank said `same`; `.any_busy`: whether one said `busy`,
        which it is while an earlier meeting of its own is not over. `tidy`: if not, the caller does it when there is time.

        `what`: the call, in words, the first of which is its name. `terms`: what all ranks must give alike, for JSON; None on a rank that
        has failed before it knew them. RankError naming the ranks where calls or terms differ.

        `within`: a meeting of more ranks that this one is part of. Raises its error when it fails meanwhile, or RankError naming the
        ranks that did not come in time.
        """
        within = within or self._within
        # A rank that is back before the others have left must not join their meeting again.
        self._number = max(self._keys.add("meetings", 0), self._number + 1)
        meeting = Meeting(
            self._keys,
            self._number,
            rank=self.rank,
            ranks=self.ranks,
            timeout_seconds=timeout_seconds,
            within=within,
        )
        self._leftovers.add(meeting)
        if same:
            meeting.count("same")
        if busy:
            meeting.count("busy")
        call = Call(what, terms)
        meeting.count(f"call/{call.digest}")
        if meeting.count("in") == self.world:
            verdict = "same" if meeting.count("same", 0) == self.world else "new"
            if meeting.count(f"call/{call.digest}", 0) < self.world and (
                text := self._differences(meeting, call)
            ):
                verdict = f"differ: {text}"
            self._close(meeting, verdict + " busy" * (meeting.count("busy", 0) > 0))
        meeting.put(
            f"in/{self.rank}", call.encoded
        )  # last of all: a rank that dies before is one that did not come
        try:
            all_came = meeting.wait(["go"], heedless=within is None)
        except (
            CheckpointError
        ) as error:  # of the meeting around this one, which some rank may not come to any more
            self._close(meeting, f"late: {error}")
            raise
        if not all_came:
            late = meeting.absent([f"in/{r}" for r in range(self.world)])
            needed = f"needed the same call on all {self.world} ranks"
            self._close(
                meeting,
                f"late: {what}: rank(s) {late} did not come within {timeout_seconds:g} s; {needed}",
            )
        verdict = meeting.get("go").decode()
        if verdict.startswith(("late: ", "differ: ")):
            raise RankError(verdict.partition(": ")[2])
        meeting.all_same, meeting.any_busy = verdict.startswith("same"), verdict.endswith(" busy")
        if tidy:
            self.tidy()
        return meeting

    def _differences(self, meeting: Meeting, own: Call) -> str:
        """On the rank that came last: how the ranks' calls differ; empty where some rank only failed before it knew its terms."""
        keys = [f"in/{rank}" for rank in range(self.world) if rank != self.rank]
        meeting.wait(keys, heedless=True)
        if absent := meeting.absent(keys):
            return f"{own.what}: rank(s) {absent} did not come"
        others = iter(meeting.get(key) for key in keys)
        return differences(
            [own if rank == self.rank else Call.decode(next(others)) for rank in range(self.world)],
            self.ranks,
        )

    def among(self, name: str, members: Sequence[int], *, within: Meeting | None = None) -> Comm:
        """A `Comm` of some of these ranks, this one among them, each of which makes one by the same name."""
        ranks = [self.ranks[i] for i in members]
        return Comm(
            PrefixStore(name, self._store),
            rank=list(members).index(self.rank),
            ranks=ranks,
            within=within,
        )

    def keys(self, name: str) -> Keys:
        """Keys of these ranks outside of meetings."""
        return Keys(PrefixStore(name, self._store))

    def leave(self) -> None:
        """Leaves word of the keys that are still to be deleted, for the next `Comm` of this rank."""
        self._leftovers.hand_on()

    def tidy(self) -> None:
        """Deletes this rank's keys of meetings that are over: two round trips for each, and one for each key."""
        self._leftovers.delete()

    def _close(self, meeting: Meeting, verdict: str) -> None:
        """Ends a roll call by the first verdict of any rank: each may, should the first die of it. The next meeting is open before that
        is told, so that no one comes to this one again."""
        verdict = meeting.settle("closed", verdict)
        number = meeting.number
        while number <= meeting.number:
            number = int(self._keys.compare_set("meetings", str(number), str(meeting.number + 1)))
        meeting.put("go", verdict.encode())


def solo() -> Comm:
    """One rank and nobody to wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Comm(store, rank=0, ranks=(0,))


def from_torch(group: dist.ProcessGroup | None) -> Comm:
    """The ranks of a process group (None: all), over the store that it was made with; `solo` where there is no process group."""
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or (group is None and dist.get_world_size() == 1)
    ):
        return solo()
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    me = dist.get_rank()
    if me not in ranks:
        raise RankError(
            f"rank {me} is not in the process group given; its ranks are {short(ranks)}"
        )
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store = dist.distributed_c10d._get_default_store()
    return Comm(PrefixStore(f"unified_ckpt/{name}", store), rank=ranks.index(me), ranks=ranks)


def join_torchrun(owned: ExitStack) -> bool:
    """For a command: the processes that torchrun has started become ranks of one group, until `owned` ends. Whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    dist.init_process_group("gloo")
    owned.callback(dist.destroy_process_group)
    return dist.get_rank() == 0

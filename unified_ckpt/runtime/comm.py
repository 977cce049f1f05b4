"""How ranks talk: keys in a store that they share. Collectives of torch are not used, so a save never meets the training's own.

A `Comm` lasts as long as the ranks do. Each collective call is one `Meeting`: everybody arrives, talks under keys of its own, and
leaves together or fails together, with one text. Every wait is bounded and names who is missing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from unified_ckpt.core.tables import short
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.leftovers import Leftovers
from unified_ckpt.runtime.verdicts import decode_error, encode_error

_ECHO_SECONDS = 10.0
_BEATS = 20  # signs of life in the time that silence is allowed to last


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
    """Keys of all ranks outside of meetings, under a name of their own. No call waits. RankError where the store cannot be reached."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str, /) -> None:
        with _reaching():
            self._store.set(key, value)

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

    def delete_key(self, key: str, /) -> bool:
        with _reaching():
            return bool(self._store.delete_key(key))


class Comm:
    """Ranks over one c10d store. `ranks`: the global rank of each; `rank`: this one's index among them."""

    def __init__(self, store: Store, *, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks, self.world = rank, tuple(ranks), len(ranks)
        self._store = store
        self._number = -1
        self._leftovers = Leftovers(Keys(store), rank=rank, world=self.world)

    def meet(self, what: str, *, same: bool, timeout_seconds: float, busy: bool = False, tidy: bool = True) -> Meeting:
        """Waits until every rank has called. `Meeting.all_same`: whether every rank said `same`; `.any_busy`: whether one said `busy`,
        which it is while an earlier meeting of its own is not over. `tidy`: if not, the caller does it when there is time.

        Raises RankError naming the ranks that did not come in time.
        """
        with _reaching():  # a rank that is back before the others have left must not join their meeting again
            self._number = max(self._store.add("meetings", 0), self._number + 1)
        meeting = Meeting(self._store, self._number, rank=self.rank, ranks=self.ranks, timeout_seconds=timeout_seconds)
        self._leftovers.add(meeting)
        meeting.put(f"in/{self.rank}", what.encode())
        if same:
            meeting.count("same")
        if busy:
            meeting.count("busy")
        if meeting.count("in") == self.world:
            verdict = "same" if meeting.count("same", 0) == self.world else "new"
            self._close(meeting, verdict + " busy" * (meeting.count("busy", 0) > 0))
        if not meeting.wait(["go"], heedless=True):
            late = meeting.absent([f"in/{r}" for r in range(self.world)])
            needed = f"needed the same call on all {self.world} ranks"
            self._close(meeting, f"late: {what}: rank(s) {late} did not come within {timeout_seconds:g} s; {needed}")
        verdict = meeting.get("go").decode()
        if verdict.startswith("late: "):
            raise RankError(verdict[6:])
        meeting.all_same, meeting.any_busy = verdict.startswith("same"), verdict.endswith(" busy")
        if tidy:
            self.tidy()
        return meeting

    def among(self, name: str, members: Sequence[int]) -> Comm:
        """A `Comm` of some of these ranks, this one among them, each of which makes one by the same name."""
        ranks = [self.ranks[i] for i in members]
        return Comm(PrefixStore(name, self._store), rank=list(members).index(self.rank), ranks=ranks)

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
        """One rank closes a roll call. It opens the next meeting before it tells, so that no one comes to this one again."""
        if meeting.count("closed") == 1:
            self._store.add("meetings", 1)
            meeting.put("go", verdict.encode())


class Meeting:
    """One collective call of all ranks. Whatever waits raises RankError after `timeout_seconds` in which no rank gave a sign of life."""

    def __init__(self, store: Store, number: int, *, rank: int, ranks: Sequence[int], timeout_seconds: float) -> None:
        self.number, self.rank, self.world, self.timeout_seconds = number, rank, len(ranks), timeout_seconds
        self.ranks = ranks  # as the caller counts them; texts name these
        self.all_same = self.any_busy = False
        self._last_beat = time.monotonic()
        self._background = self.goes_on = False
        self.keys: list[str] = []  # that this rank has set, as the store knows them
        self._store, self._prefix = store, f"{number}/"

    def to_background(self) -> None:
        """This rank may come to other meetings before it leaves this one, which it says by `leave`."""
        self._background = self.goes_on = True
        self.count("left", 0)  # there from the start: where it is not, all have left and somebody has deleted it

    def leave(self) -> None:
        """This rank is through with a meeting in the background."""
        self.goes_on = False
        self.count("left")

    def leftovers(self) -> str:
        """This rank's keys to delete, after a tab; before it, the counter that must reach the number of ranks first, if any."""
        return f"{self._prefix}n/left\t{' '.join(self.keys)}" if self._background else "\t" + " ".join(self.keys)

    def put(self, key: str, value: bytes) -> None:
        """Sets a key of this meeting, which has no spaces; `value` must not be empty."""
        with _reaching():
            self._store.set(self._kept(key), value)  # type: ignore[arg-type]  # the stub says str; bytes are taken

    def has(self, key: str) -> bool:
        with _reaching():
            return bool(self._store.check([self._prefix + key]))

    def absent(self, keys: Sequence[str]) -> str:
        """In words, the ranks whose key of these (`…/<rank>`) is not set."""
        return short(self.ranks[int(key.rpartition("/")[2])] for key in keys if not self.has(key))

    def wait(self, keys: Sequence[str], *, seconds: float | None = None, heedless: bool = False) -> bool:
        """Whether all keys were set in time, which begins anew with each rank's sign of life, unless `seconds` bounds it.

        Raises at once the error of a rank that has failed meanwhile, unless `heedless`.
        """
        # Looks again after a tenth of the time waited so far: torch's own `wait` cannot be interrupted, and logs each time-out.
        names, began, beats = [self._prefix + key for key in keys], time.monotonic(), 0
        while True:
            with _reaching():
                if self._store.check(names):
                    return True
                if not heedless and self._store.check([self._prefix + "failed"]):
                    if self._store.check(names):  # set between the two looks
                        return True
                    raise self.failure()
            waited = time.monotonic() - began
            left = (self.timeout_seconds if seconds is None else seconds) - waited
            if left <= 0:
                heard = 0 if seconds is not None else self._beats()
                if heard <= beats:
                    return False
                began, beats = time.monotonic(), heard
                continue
            time.sleep(min(max(waited / 10, 0.0001), 1.0, left))

    def heed(self) -> None:
        """Raises what another rank has failed with, if one has."""
        if self.has("failed"):
            raise self.failure()

    def beat(self) -> None:
        """A sign of life, for those who wait: this rank is getting on. Cheap: most calls do nothing."""
        now = time.monotonic()
        if now - self._last_beat > self.timeout_seconds / _BEATS:
            self._last_beat = now
            self.count("beats")

    def _beats(self) -> int:
        with _reaching():
            return int(self._store.add(f"{self._prefix}n/beats", 0))

    def failure(self, cause: BaseException | None = None) -> CheckpointError:
        """The first error of this meeting, the same on every rank."""
        with _reaching():
            error = decode_error(self._store.get(f"{self._prefix}failed").decode())
        error.agreed, error.named, error.__cause__ = True, True, cause
        return error

    def get(self, key: str, *, of: int | None = None) -> bytes:
        """A key's value, once some rank has set it; `of`: the one that does, before it waits for anybody."""
        if not self.wait([key]):
            if of is not None:
                raise RankError(f"rank(s) {self.ranks[of]} did not get to {key!r} within {self.timeout_seconds:g} s")
            late = RankError(f"rank {self.ranks[self.rank]} waited {self.timeout_seconds:g} s for {key!r}, which no rank set")
            late.echo = True  # whoever should have set it waits for somebody else, or is named by who collects from it
            raise late
        with _reaching():
            return bytes(self._store.get(self._prefix + key))

    def count(self, key: str, amount: int = 1) -> int:
        """Adds to a counter and returns its value."""
        with _reaching():
            return int(self._store.add(self._kept(f"n/{key}"), amount))

    def settle(self, key: str, value: str) -> str:
        """Sets the key unless another rank was first; returns what it holds now."""
        with _reaching():
            return bytes(self._store.compare_set(self._kept(key), "", value)).decode()

    def _kept(self, key: str) -> str:
        """The store's name of a key that this rank sets, and deletes when all have left: by a list with spaces between them."""
        if " " in key:
            raise AssertionError(f"{key!r}: has a space; needed a key without")
        self.keys.append(self._prefix + key)
        return self._prefix + key

    def broadcast(self, key: str, value: bytes | None) -> bytes:
        """Rank 0's value, on every rank."""
        if self.rank == 0:
            if not value:
                raise AssertionError(f"rank 0 has nothing to say for {key!r}")
            self.put(key, value)
            return value
        return self.get(key, of=0)

    def collect(self, key: str, value: bytes, *, at: int, ranks: Sequence[int]) -> list[bytes]:
        """The values of `ranks`, in their order, on rank `at`; an empty list elsewhere. Other ranks' values are not sent."""
        if self.rank in ranks:
            self.put(f"{key}/{self.rank}", value)
        if self.rank != at:
            return []
        keys = [f"{key}/{rank}" for rank in ranks]
        if not self.wait(keys):
            raise RankError(f"rank(s) {self.absent(keys)} did not get to {key!r} within {self.timeout_seconds:g} s")
        with _reaching():
            return [bytes(value) for value in self._store.multi_get([self._prefix + k for k in keys])]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A step that all ranks do: leaves it when all are through, or raises the first error of any on all of them."""
        try:
            yield
        except BaseException as error:
            if getattr(error, "agreed", False):
                raise  # every rank has it already
            self.agree(name, error)
            raise
        self.agree(name)

    def agree(self, phase: str, error: BaseException | None = None) -> None:
        """Returns once all ranks have got through `phase`, or raises the first error on all of them, naming its rank.

        A rank that fails does not wait for the slow ones: they learn of it when they come.
        """
        if error is not None and self.world == 1:
            raise error
        self.put(f"at/{phase}/{self.rank}", b"1")
        if error is not None:
            if getattr(error, "echo", False):
                self.wait(["failed"], seconds=_ECHO_SECONDS, heedless=True)  # the rank that failed first says why
            self.settle("failed", encode_error(error, rank=self.ranks[self.rank], world=self.world))
            self.settle(f"done/{phase}", "failed")
            raise self.failure(error)
        if self.count(f"at/{phase}") == self.world:
            self.settle(f"done/{phase}", "ok")
        if not self.wait([f"done/{phase}"]):
            absent = self.absent([f"at/{phase}/{r}" for r in range(self.world)])
            late = RankError(f"rank(s) {absent} did not get through {phase!r} within {self.timeout_seconds:g} s")
            if self.settle(f"done/{phase}", "failed") == "failed":
                self.settle("failed", encode_error(late, rank=self.ranks[self.rank], world=1))
        if self.get(f"done/{phase}") != b"ok":
            self.wait(["failed"])
            raise self.failure()


def solo() -> Comm:
    """One rank and nobody to wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Comm(store, rank=0, ranks=(0,))


def from_torch(group: dist.ProcessGroup | None) -> Comm:
    """The ranks of a process group (None: all), over the store that it was made with; `solo` where there is no process group."""
    if not dist.is_available() or not dist.is_initialized() or (group is None and dist.get_world_size() == 1):
        return solo()
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    me = dist.get_rank()
    if me not in ranks:
        raise RankError(f"rank {me} is not in the process group given; its ranks are {short(ranks)}")
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

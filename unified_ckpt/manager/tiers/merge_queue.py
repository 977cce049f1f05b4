"""Local saves of several machines, merged to the root: the first rank of each machine is its lead, the first lead says what is merged now.

All leads take part in each merge, in a thread of their own, and talk through the store only: training and its process group see nothing.
The first lead's copies (`copies.py`) decide which save comes next, and set a numbered key; the others look for it and follow.

How it could lose data or hang:
- leads merge different saves: only the first one decides, and the meeting of a merge names the folder;
- a lead removes a local save that is still to be merged: local ones go at commits only, and what the first lead owes then stays on all;
- a lead is away: the others fail when its silence is too long; the first one tries again, and tells its ranks when it gives up;
- a lead's process ends while others still merge: at exit it waits until the first lead has ended what it owed when this one last saved,
  as long as anybody gets on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.errors import CheckpointError, RankError, StorageError
from unified_ckpt.manager.stopping.agreement import pause_between_looks
from unified_ckpt.manager.stopping.at_exit import BeforeExit
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BESIDE_TRAINING

_LOG = logging.getLogger("unified_ckpt")
STAYS = "%s is not copied: %s/%s is save %s of an earlier life, and stays; if_exists='replace' replaces it"
_LOOK_SECONDS = 0.2
_SIGN_SECONDS = 1.0  # between two signs of life of a lead that merges


@dataclass(frozen=True, slots=True)
class Order:
    """A local checkpoint that is due in the root. `if_exists`: for another save of its name there; `number`: of those that were due."""

    step: int
    name: str
    if_exists: str
    fsync: bool
    max_file_bytes: int
    number: int


class Convoy:
    """This machine's part in all merges of a manager. `ranks`: of the job; `leads`: among them, by machine; `token`: of the manager.

    `note` is called in the other leads' threads with the ids that are in the root. The first lead calls `merge`, `tell` and `ended`.
    """

    def __init__(
        self,
        ranks: Comm,
        leads: Sequence[int],
        token: str,
        *,
        source: str,
        target: str,
        timeout_seconds: float,
        note: Callable[[frozenset[str]], object],
    ) -> None:
        self._comm = ranks.among(f"tiers/{token}/merge", leads)
        self._commits = ranks.among(f"tiers/{token}/keep", leads)
        self._keys = ranks.keys(f"tiers/{token}/keys")
        self._source, self._target, self._timeout_seconds, self._note = (
            source,
            target,
            timeout_seconds,
            note,
        )
        self._look_seconds = pause_between_looks(_LOOK_SECONDS, lookers=len(leads))
        self._number = self._seen = 0  # of what was told, and of what was heard
        self._due = 0  # the number of the last save that was due, the same on every lead
        self._stopped = threading.Event()
        self._signed = 0.0
        self._thread: threading.Thread | None = None
        self._exit: BeforeExit | None = None
        if self._comm.rank != 0:
            self._thread = threading.Thread(
                target=self._follow, name="unified_ckpt-merge", daemon=True
            )
            self._thread.start()
            self._exit = BeforeExit(self._before_exit)

    # every lead

    def due(self, number: int) -> None:
        """The save of this number is to be merged."""
        self._due = number

    def agree(self, owed: set[int]) -> set[int]:
        """Collective over the leads, after each local commit. The steps that the first lead owes, its own `owed`, on all."""
        meeting = self._commits.meet("keep", same=False, timeout_seconds=self._timeout_seconds)
        told = meeting.broadcast(
            "owed", json.dumps(sorted(owed)).encode() if meeting.rank == 0 else None
        )
        return set(json.loads(told))

    def wait(self) -> None:
        """For a follower: returns once what is due is merged, or has failed. StorageError where nobody gets on."""
        last, signs = time.monotonic(), -1
        while self._due and self._comm.rank != 0 and not self._stopped.is_set():
            if self._keys.check(["ended"]) and int(self._keys.get("ended")) >= self._due:
                return
            if (now := self.signs()) != signs:
                last, signs = time.monotonic(), now
            if time.monotonic() - last > self._timeout_seconds:
                raise StorageError(
                    f"{self._source}: what was to be merged to {self._target} gets on by no byte; it is local only"
                )
            self._stopped.wait(self._look_seconds)

    def signs(self) -> int:
        """Grows as long as some lead gets on."""
        return self._keys.add("signs", 0)

    def stop(self) -> None:
        """Gives up what is under way. A merge that hangs clears itself away if it ever comes back."""
        if self._exit is not None:
            self._exit.cancel()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10 * self._look_seconds)
        self._comm.leave()
        self._commits.leave()

    # the first lead

    def merge(self, order: Order, beat: Callable[[int], object]) -> int:
        """Collective: has all leads come, and merges. Bytes written by this machine."""
        self._number += 1
        self._keys.set("merge", json.dumps({"number": self._number, "order": asdict(order)}))
        return self._merge(order, beat)

    def tell(self, saves: frozenset[str]) -> None:
        """After a merge, what is in the root: the others note it."""
        self._keys.set("saves", json.dumps(sorted(saves)))

    def ended(self, order: Order) -> None:
        """This one and those before it have ended, well or not."""
        self._keys.set("ended", str(order.number))

    # the others

    def _follow(self) -> None:
        heard = b""
        while not self._stopped.is_set():
            try:
                if self._keys.check(["saves"]) and (told := self._keys.get("saves")) != heard:
                    heard = told
                    self._note(frozenset(json.loads(told)))
                if self._keys.check(["merge"]):
                    found = json.loads(self._keys.get("merge"))
                    if found["number"] > self._seen:
                        self._seen = found["number"]
                        self._merge(Order(**found["order"]), self._beat)
            except Exception as error:  # the first lead has it too, and tells it to all ranks
                _LOG.debug("a merge to %s failed: %s", self._target, error)
            self._stopped.wait(self._look_seconds)

    def _beat(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise StorageError(f"{self._target}: given up after {nbytes} bytes more")

    def _merge(self, order: Order, beat: Callable[[int], object]) -> int:
        def sign(nbytes: int) -> None:
            if time.monotonic() - self._signed > _SIGN_SECONDS:
                self._signed = time.monotonic()
                self._keys.add("signs", 1)
            beat(nbytes)

        how = MergeOptions(
            max_file_bytes=order.max_file_bytes,
            if_exists=order.if_exists,
            fsync=order.fsync,
            timeout_seconds=self._timeout_seconds,
        )
        with contextlib.suppress(OSError):
            os.makedirs(self._target, exist_ok=True)
        storage, paths = (
            LocalStorage(self._target, how=BESIDE_TRAINING),
            [os.path.join(self._source, order.name)],
        )
        done = merge_paths(
            self._comm, paths, storage, order.name, how, machines=range(self._comm.world), beat=sign
        )
        if done.other and self._comm.rank == 0:
            _LOG.warning(STAYS, paths[0], self._target, order.name, done.save_id)
        for note in done.notes:
            _LOG.warning("%s: %s", order.name, note)
        return done.nbytes

    def _before_exit(self) -> None:
        try:
            self.wait()
        except RankError as error:
            _LOG.debug(
                "the first lead has ended: %s", error
            )  # after what it owed, and with a word if that has failed
        except CheckpointError as error:
            _LOG.error("a merge failed while the process ended: %s", error)
        self.stop()

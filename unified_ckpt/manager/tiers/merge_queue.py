"""Local saves of several machines, merged to the root: the first rank of each machine is its lead,
the first lead says what is merged now.

All leads take part in each merge, in a thread of their own, and talk through the store only:
training and its process group see nothing. The first lead's copies (`copies.py`) decide which save
comes next, and set a numbered key; the others look for it and follow.

How it could lose data or hang:
- leads merge different saves: only the first one decides, and the meeting of a merge names the
  folder;
- a lead removes a local save that is still to be merged: local ones go at commits only, and what
  the first lead owes then stays on all;
- a lead is away: the others fail when its silence is too long; the first one tries again, and
  tells its ranks when it gives up;
- a lead's process ends while others still merge: at exit it waits until the first lead has ended
  what it owed when this one last saved, as long as anybody gets on.
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
from unified_ckpt.manager.stopping.agreement import poll_interval
from unified_ckpt.manager.stopping.at_exit import ExitHook
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BACKGROUND

_LOG = logging.getLogger("unified_ckpt")
NOT_COPIED = "%s is not copied: %s/%s is save %s of an earlier life, and stays; if_exists='replace' replaces it"
_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 1.0  # between two signs of life of a lead that merges


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A local checkpoint that is due in the root. `if_exists`: for another save of its name there;
    `number`: of those that were due.
    """

    step: int
    name: str
    if_exists: str
    fsync: bool
    max_file_bytes: int
    number: int


class MergeQueue:
    """This machine's part in all merges of a manager. `ranks`: of the job; `leads`: among them, by
    machine; `token`: of the manager.

    `note` is called in the other leads' threads with the ids that are in the root. The first lead
    calls `merge`, `publish_saves` and `mark_finished`.
    """

    def __init__(
        self,
        comm: Comm,
        leaders: Sequence[int],
        token: str,
        *,
        source: str,
        target: str,
        timeout_seconds: float,
        on_committed: Callable[[frozenset[str]], object],
    ) -> None:
        self._merge_comm = comm.subgroup(f"tiers/{token}/merge", leaders)
        self._commit_comm = comm.subgroup(f"tiers/{token}/keep", leaders)
        self._keys = comm.key_store(f"tiers/{token}/keys")
        self._source, self._target, self._timeout_seconds, self._on_committed = (
            source,
            target,
            timeout_seconds,
            on_committed,
        )
        self._poll_seconds = poll_interval(_POLL_SECONDS, pollers=len(leaders))
        self._last_published = self._last_received = 0  # of what was told, and of what was heard
        self._last_scheduled = 0  # the number of the last save that was due, the same on every lead
        self._stopped = threading.Event()
        self._last_heartbeat = 0.0
        self._thread: threading.Thread | None = None
        self._exit_hook: ExitHook | None = None
        if self._merge_comm.rank != 0:
            self._thread = threading.Thread(
                target=self._follow, name="unified_ckpt-merge", daemon=True
            )
            self._thread.start()
            self._exit_hook = ExitHook(self._before_exit)

    # every lead

    def schedule(self, number: int) -> None:
        """The save of this number is to be merged."""
        self._last_scheduled = number

    def broadcast_pending(self, pending: set[int]) -> set[int]:
        """Collective over the leads, after each local commit. The steps that the first lead owes,
        its own `pending`, on all.
        """
        collective = self._commit_comm.begin_collective(
            "keep", cached=False, timeout_seconds=self._timeout_seconds
        )
        body = collective.broadcast(
            "owed", json.dumps(sorted(pending)).encode() if collective.rank == 0 else None
        )
        return set(json.loads(body))

    def wait(self) -> None:
        """For a follower: returns once what is due is merged, or has failed. StorageError where
        nobody gets on.
        """
        last_progress, heartbeats = time.monotonic(), -1
        while self._last_scheduled and self._merge_comm.rank != 0 and not self._stopped.is_set():
            if self._keys.check(["ended"]) and int(self._keys.get("ended")) >= self._last_scheduled:
                return
            if (count := self.heartbeat_count()) != heartbeats:
                last_progress, heartbeats = time.monotonic(), count
            if time.monotonic() - last_progress > self._timeout_seconds:
                raise StorageError(
                    f"{self._source}: what was to be merged to {self._target} gets on by no byte; it is local only"
                )
            self._stopped.wait(self._poll_seconds)

    def heartbeat_count(self) -> int:
        """Grows as long as some lead gets on."""
        return self._keys.add("signs", 0)

    def stop(self) -> None:
        """Gives up what is under way. A merge that hangs clears itself away if it ever comes back."""
        if self._exit_hook is not None:
            self._exit_hook.cancel()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10 * self._poll_seconds)
        self._merge_comm.detach()
        self._commit_comm.detach()

    # the first lead

    def merge(self, job: UploadJob, on_progress: Callable[[int], object]) -> int:
        """Collective: has all leads come, and merges. Bytes written by this machine."""
        self._last_published += 1
        self._keys.set("merge", json.dumps({"number": self._last_published, "order": asdict(job)}))
        return self._merge(job, on_progress)

    def publish_saves(self, saves: frozenset[str]) -> None:
        """After a merge, what is in the root: the others note it."""
        self._keys.set("saves", json.dumps(sorted(saves)))

    def mark_finished(self, job: UploadJob) -> None:
        """This one and those before it have ended, well or not."""
        self._keys.set("ended", str(job.number))

    # the others

    def _follow(self) -> None:
        last_body = b""
        while not self._stopped.is_set():
            try:
                if self._keys.check(["saves"]) and (body := self._keys.get("saves")) != last_body:
                    last_body = body
                    self._on_committed(frozenset(json.loads(body)))
                if self._keys.check(["merge"]):
                    message = json.loads(self._keys.get("merge"))
                    if message["number"] > self._last_received:
                        self._last_received = message["number"]
                        self._merge(UploadJob(**message["order"]), self._raise_if_stopped)
            except Exception as error:  # the first lead has it too, and tells it to all ranks
                _LOG.debug("a merge to %s failed: %s", self._target, error)
            self._stopped.wait(self._poll_seconds)

    def _raise_if_stopped(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise StorageError(f"{self._target}: given up after {nbytes} bytes more")

    def _merge(self, job: UploadJob, on_progress: Callable[[int], object]) -> int:
        def heartbeat(nbytes: int) -> None:
            if time.monotonic() - self._last_heartbeat > _HEARTBEAT_SECONDS:
                self._last_heartbeat = time.monotonic()
                self._keys.add("signs", 1)
            on_progress(nbytes)

        options = MergeOptions(
            max_file_bytes=job.max_file_bytes,
            if_exists=job.if_exists,
            fsync=job.fsync,
            timeout_seconds=self._timeout_seconds,
            on_progress=heartbeat,
        )
        with contextlib.suppress(OSError):
            os.makedirs(self._target, exist_ok=True)
        storage, paths = (
            LocalStorage(self._target, write_policy=BACKGROUND),
            [os.path.join(self._source, job.name)],
        )
        report = merge_paths(
            self._merge_comm,
            paths,
            storage,
            job.name,
            options,
            nodes=range(self._merge_comm.world),
        )
        if report.is_other_save and self._merge_comm.rank == 0:
            _LOG.warning(NOT_COPIED, paths[0], self._target, job.name, report.save_id)
        for warning in report.notes:
            _LOG.warning("%s: %s", job.name, warning)
        return report.nbytes

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

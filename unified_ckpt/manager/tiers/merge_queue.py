"""Merges local saves of several nodes into the root. The first rank of each node is its leader; the
first leader schedules the merges.

All leaders take part in each merge, in a thread of their own. They communicate only through the
store, so training and its process group are not involved. The upload queue of the first leader
(`upload_queue.py`) selects the next save and publishes it under a numbered key; the other leaders
poll this key.

How data could be lost, or a process could hang:
- Leaders merge different saves: only the first leader selects, and the collective of a merge names
  the folder.
- A leader removes a local save that still has to be merged: local saves are removed only at
  commits, and those that the first leader has queued stay on all nodes.
- A leader is gone: the others fail after a time without a heartbeat. The first leader retries, and
  reports to its ranks when it gives up.
- The process of a leader ends while others still merge: at exit it waits until the first leader has
  finished the merges queued at its last save, while there is progress.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from unified_ckpt.engine.folder.copy import CopyReport
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.errors import CheckpointError, RankError, StorageError
from unified_ckpt.manager.stopping.agreement import poll_interval
from unified_ckpt.manager.stopping.at_exit import ExitHook
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BACKGROUND

_LOG = logging.getLogger("unified_ckpt")
_POLL_SECONDS = 0.2
# Keys of the store, under tiers/<token>/keys:
_MERGE = "merge"  # the current merge: its number and its job
_FINISHED = "finished"  # number of the last job that has finished or failed
_HEARTBEATS = "heartbeats"  # counter of all leaders
_HEARTBEAT_SECONDS = 1.0  # minimum interval between heartbeats of a merging leader


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A local checkpoint to be written to the root.

    `if_exists` applies to another save of this name in the root. `number` counts the saves that
    were due, from 1. `counted`: steps that stay in place of one of the latest.
    """

    step: int
    name: str
    if_exists: str
    fsync: bool
    max_file_bytes: int
    number: int
    counted: Sequence[int] = ()


class MergeQueue:
    """This node's part in all merges of a manager.

    `source`, `target`: the local directory and the root. `comm`: all ranks of the job. `leaders`:
    one rank per node, in the order of nodes. `token`: identifies the manager. Only the first leader
    calls `merge` and `mark_finished`.
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
    ) -> None:
        self._merge_comm = comm.subgroup(f"tiers/{token}/merge", leaders)
        # Of the leaders, one per node.
        self._topology = Topology.shared_folder(self._merge_comm.rank, range(len(leaders)))
        self._commit_comm = comm.subgroup(f"tiers/{token}/commits", leaders)
        self._keys = comm.key_store(f"tiers/{token}/keys")
        self._source, self._target = source, target
        self._timeout_seconds = timeout_seconds
        self._poll_seconds = poll_interval(_POLL_SECONDS, pollers=len(leaders))
        self._last_published = self._last_received = 0  # numbers of merges published and received
        self._last_scheduled = 0  # number of the last save that was due, equal on every leader
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

    def schedule(self, number: int) -> None:
        """Record that the save of this number is to be merged."""
        self._last_scheduled = number

    def broadcast_state(
        self, pending: set[int], root_saves: frozenset[str]
    ) -> tuple[set[int], frozenset[str]]:
        """Return the steps that the first leader has pending, and the saves in the root. Collective
        over the leaders, after each local commit.
        """
        collective = self._commit_comm.begin_collective(
            "pending", timeout_seconds=self._timeout_seconds
        )
        state = collective.broadcast_json("pending", [sorted(pending), sorted(root_saves)])
        return set(state[0]), frozenset(state[1])

    def wait(self) -> None:
        """Block a follower until every scheduled merge has finished or failed. Raises StorageError
        if there is no progress.
        """
        last_progress, heartbeats = time.monotonic(), -1
        while self._last_scheduled and self._merge_comm.rank != 0 and not self._stopped.is_set():
            if (
                self._keys.check([_FINISHED])
                and int(self._keys.get(_FINISHED)) >= self._last_scheduled
            ):
                return
            if (count := self.heartbeat_count()) != heartbeats:
                last_progress, heartbeats = time.monotonic(), count
            if time.monotonic() - last_progress > self._timeout_seconds:
                raise StorageError(
                    f"{self._source}: no progress of the merge to {self._target} for "
                    f"{self._timeout_seconds:g} s; the save is only local"
                )
            self._stopped.wait(self._poll_seconds)

    def heartbeat_count(self) -> int:
        """Return a counter that grows while some leader makes progress."""
        return self._keys.add(_HEARTBEATS, 0)

    def stop(self) -> None:
        """Abandon the running merge. If a hanging merge ever returns, it removes its own files."""
        if self._exit_hook is not None:
            self._exit_hook.cancel()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10 * self._poll_seconds)
        self._merge_comm.hand_over_keys()
        self._commit_comm.hand_over_keys()

    def merge(self, job: UploadJob, on_progress: Callable[[int], object]) -> CopyReport:
        """Start a merge on all leaders and run it. Collective. The report counts the tensor bytes
        of all nodes.
        """
        self._last_published += 1
        self._keys.set(_MERGE, json.dumps({"number": self._last_published, "job": asdict(job)}))
        report = self._merge(job, on_progress)
        manifest = read_manifest(LocalStorage(self._target), job.name) if report.nbytes else None
        if manifest is None:
            return report
        return replace(report, nbytes=sum(part.total_nbytes for part in manifest.parts.values()))

    def mark_finished(self, job: UploadJob) -> None:
        """Publish that this job and all jobs before it have finished or failed."""
        try:
            self._keys.set(_FINISHED, str(job.number))
        except RankError as error:
            text = "cannot report to the other nodes that the merge of %s has ended: %s"
            _LOG.warning(text, job.name, error)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._keys.check([_MERGE]):
                    message = json.loads(self._keys.get(_MERGE))
                    if message["number"] > self._last_received:
                        self._last_received = message["number"]
                        self._merge(UploadJob(**message["job"]), self._raise_if_stopped)
            except Exception as error:  # the first leader fails too, and reports it
                _LOG.debug("a merge to %s failed: %s", self._target, error)
            self._stopped.wait(self._poll_seconds)

    def _raise_if_stopped(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise StorageError(f"{self._target}: the merge was cancelled after {nbytes} more bytes")

    def _merge(self, job: UploadJob, on_progress: Callable[[int], object]) -> CopyReport:
        def heartbeat(nbytes: int) -> None:
            if time.monotonic() - self._last_heartbeat > _HEARTBEAT_SECONDS:
                self._last_heartbeat = time.monotonic()
                self._keys.add(_HEARTBEATS, 1)
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
        storage = LocalStorage(self._target, write_policy=BACKGROUND)
        paths = [os.path.join(self._source, job.name)]
        report = merge_paths(
            self._merge_comm,
            paths,
            storage,
            job.name,
            options,
            topology=self._topology,
        )
        for warning in report.notes:
            _LOG.warning("%s: %s", job.name, warning)
        return report

    def _before_exit(self) -> None:
        try:
            self.wait()
        except RankError as error:
            # it finished its merges, or has reported the failure
            _LOG.debug("the first leader has ended: %s", error)
        except CheckpointError as error:
            _LOG.error("a merge failed while the process was ending: %s", error)
        self.stop()

"""Merges local saves of several nodes into the root. The first rank of each node is its leader; the
first leader selects what is merged.

All leaders take part in each merge, in the threads of their upload queues (`upload_queue.py`). They
communicate only through the store, so training and its process group are not involved. The first
leader publishes the next save under a numbered key; the other leaders poll this key.

How data could be lost, or a process could hang:
- Leaders merge different saves: only the first leader selects, and the collective of a merge names
  the folder.
- A leader removes a local save that still has to be merged: local saves are removed only at
  commits, and those that the first leader has queued stay on all nodes.
- A leader is gone: the others fail after a time without a heartbeat. The first leader retries, and
  reports to its ranks when it gives up.
- The process of a leader ends while others still merge: at exit its queue waits until the first
  leader has finished the merges queued at its last save, while there is progress.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unified_ckpt.engine.folder.copy import CopyReport
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.errors import RankError
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.stopping.agreement import poll_interval
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.posix_calls import make_folders
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.runtime.storage.write_calls import BACKGROUND

_LOG = logging.getLogger("unified_ckpt")
_POLL_SECONDS = 0.2
# Keys of the store, under tiers/<token>/keys:
_MERGE = "merge"  # the last merge: its number, its job, and the last job that has ended
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
    max_file_bytes: int | None
    number: int
    counted: Sequence[int] = ()


class MergeGroup:
    """The leaders of all nodes, as one of them sees them.

    `source`: the local directory. `leaders`: one rank per node, in the order of nodes. `token`:
    identifies the manager. `is_first`: this leader selects what is merged. Only the others call
    `receive`, every `poll_seconds`. `finished`: number of the last job that has finished or failed.
    """

    def __init__(self, run: RunContext, leaders: Sequence[int], token: str, *, source: str) -> None:
        comm = run.session.comm
        self._merge_comm = comm.subgroup(f"tiers/{token}/merge", leaders)
        self._topology = Topology.shared_folder(self._merge_comm.rank, range(len(leaders)))
        self._commit_comm = comm.subgroup(f"tiers/{token}/commits", leaders)
        self._keys = comm.key_store(f"tiers/{token}/keys")
        self._run, self._source = run, source
        self.is_first = self._merge_comm.rank == 0
        self.poll_seconds = poll_interval(_POLL_SECONDS, pollers=len(leaders))
        self.finished = 0
        self._message: dict[str, Any] = {"number": 0, "job": {}, "finished": 0}
        self._last_heartbeat = 0.0

    def broadcast_state(
        self, pending: set[int], root_saves: frozenset[str]
    ) -> tuple[set[int], frozenset[str]]:
        """Return the steps that the first leader has pending, and the saves in the root. Collective
        over the leaders, after each local commit.
        """
        collective = self._commit_comm.begin_collective(
            "pending", timeout_seconds=self._run.timeout_seconds
        )
        state = collective.broadcast_json("pending", [sorted(pending), sorted(root_saves)])
        return set(state[0]), frozenset(state[1])

    def heartbeat_count(self) -> int:
        """Return a counter that grows while some leader makes progress."""
        return self._keys.add(_HEARTBEATS, 0)

    def close(self) -> None:
        """Leave the keys to the other leaders."""
        self._merge_comm.hand_over_keys()
        self._commit_comm.hand_over_keys()

    def start(self, job: UploadJob, on_progress: Callable[[int], object]) -> CopyReport:
        """Start a merge on all leaders and run it. Collective. The report counts the tensor bytes
        of all nodes.
        """
        self._publish(number=self._message["number"] + 1, job=asdict(job))
        report = self.merge(job, on_progress)
        manifest = read_manifest(open_root(self._run.root), job.name) if report.nbytes else None
        if manifest is None:
            return report
        return replace(report, nbytes=sum(part.total_nbytes for part in manifest.parts.values()))

    def receive(self) -> UploadJob | None:
        """Return the merge that the first leader started since the last call, or None."""
        if not self._keys.check([_MERGE]):
            return None
        last_number, self._message = self._message["number"], json.loads(self._keys.get(_MERGE))
        self.finished = self._message["finished"]
        is_new = self._message["number"] > last_number
        return UploadJob(**self._message["job"]) if is_new else None

    def _publish(self, **fields: object) -> None:
        self._message |= fields
        self._keys.set(_MERGE, json.dumps(self._message))

    def mark_finished(self, job: UploadJob) -> None:
        """Publish that this job and all jobs before it have finished or failed."""
        self.finished = job.number
        try:
            self._publish(finished=job.number)
        except RankError as error:
            text = "cannot report to the other nodes that the merge of %s has ended: %s"
            _LOG.warning(text, job.name, error)

    def merge(self, job: UploadJob, on_progress: Callable[[int], object]) -> CopyReport:
        """Take part in a merge. Collective over the leaders."""

        def heartbeat(nbytes: int) -> None:
            if time.monotonic() - self._last_heartbeat > _HEARTBEAT_SECONDS:
                self._last_heartbeat = time.monotonic()
                self._keys.add(_HEARTBEATS, 1)
            on_progress(nbytes)

        options = MergeOptions(
            max_file_bytes=job.max_file_bytes,
            if_exists=job.if_exists,
            timeout_seconds=self._run.timeout_seconds,
            on_progress=heartbeat,
        )
        if not is_bucket_url(self._run.root):
            with contextlib.suppress(OSError):
                make_folders(self._run.root, fsync=job.fsync)
        policy = replace(BACKGROUND, fsync=job.fsync)
        storage = open_root(self._run.root, write_policy=policy)
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

"""Two tiers of a run: a local directory for frequent saves, and the root, to which some of them are
uploaded.

Rank 0 acts, and every rank learns the result. On several nodes the first rank of each node, its
leader, acts for the local directory of that node. No call waits for the storage of the root unless
its docstring says so.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.save_job import SaveJob
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.steps.scan import Scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.manager.tiers.local_tier import LocalTier
from unified_ckpt.manager.tiers.merge_group import MergeGroup, UploadJob
from unified_ckpt.manager.tiers.upload_queue import SOURCE_DAMAGED, UploadQueue
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.storage.roots import open_root

_LOG = logging.getLogger("unified_ckpt")


class TieredStorage:
    """The two tiers of one manager's ranks.

    `local_directory` is absolute and is not the root. Collective methods say so; the others are
    for leaders.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.local_directory = os.path.realpath(run.options.local_directory or "")
        if run.root == self.local_directory:
            raise FormatError(
                f"local_directory={run.options.local_directory!r}: got the root, {run.root}, "
                "expected another folder; choose one on a local disk"
            )
        self._local = LocalTier(run, self.local_directory)
        self._upload_queue = UploadQueue(run, self.local_directory, self._after_upload)
        self._leaders: tuple[int, ...] = ()  # known after the first collective
        self._token = secrets.token_hex(8)  # rank 0's token is used by all
        self._merge_group: MergeGroup | None = None  # on leaders, if there are several nodes
        self._scheduled = 0  # count of local saves that were due
        self.damaged: frozenset[str] = frozenset()  # save ids in the root; the rules ignore them
        self._failures_in_a_row = 0
        self._local_suspect = False  # a local checkpoint was damaged

    def select_target(self, job: SaveJob, *, direct: bool) -> SaveTarget:
        """Choose where a save goes. Collective.

        `direct`: it goes directly to the root. Raises the error of uploads that failed
        `raise_after` times in a row, unless it is the last save, which may succeed. On one node the
        last save goes directly to the root, and so does the next one due after damage. On several
        nodes a due save is merged in any case.
        """
        if not self._leaders:
            operation, timeout = f"two tiers of {self._run.root}", self._run.timeout_seconds
            topology = self._run.session.resolve_ranks(operation, timeout_seconds=timeout)
            self._leaders = topology.node_leaders
        single_node = len(self._leaders) == 1
        direct = direct or (single_node and (job.is_last or (job.for_root and self._local_suspect)))

        def select(collective: Collective) -> dict[str, Any]:
            problem = None if direct else self._open_local(collective)
            return {"problem": problem, "token": self._token}

        reply = self._exchange("select_target", select)
        self._count_outcomes(reply["outcomes"], strict=False, is_last=job.is_last)
        self._token = reply["token"]
        comm = self._run.session.comm
        if self._merge_group is None and not single_node and comm.rank in self._leaders:
            # From the first save on, a leader takes part in merges.
            self._merge_group = self._upload_queue.merge_group = MergeGroup(
                self._run, self._leaders, self._token, source=self.local_directory
            )
        self._local_suspect = self._local_suspect and (not direct or not job.for_root)
        if direct:
            return SaveTarget(job.name)
        problem = reply["problem"]
        return SaveTarget(
            os.path.join(self.local_directory, job.name),
            local=True,
            problem=f"the local directory cannot be used: {problem}" if problem else "",
        )

    def _open_local(self, collective: Collective) -> str | None:
        """Open the local directory of every node before the first save. Collective over the
        leaders. Returns on rank 0 why one cannot be used.
        """
        is_open = self._local.marker is not None
        if not all(collective.collect_json("is-open", is_open, dst=0, ranks=self._leaders)):
            root_saves: list[str] | str
            try:
                root_saves = sorted(self._root_save_ids())
            except (CheckpointError, OSError) as error:
                root_saves = str(error)
            collective.put_json("root-saves", root_saves)
        problem = None if is_open else self._local.open(collective.get_json("root-saves"))
        problems = collective.collect_json("local-problem", problem, dst=0, ranks=self._leaders)
        return next(filter(None, problems), None)

    def wait_until_in_root(self, step: int, name: str) -> bool:
        """Wait for the upload of the last local step and return whether it is in the root.
        Collective, before the last save.

        Raises StorageError if the upload makes no progress.
        """

        def wait(collective: Collective) -> dict[str, Any]:
            if collective.rank != 0:
                return {}
            self._upload_queue.wait(step=step, heartbeat=collective.heartbeat)
            root_manifest, local_manifest = (
                read_manifest(open_root(path), name)
                for path in (self._run.root, self.local_directory)
            )
            in_root = root_manifest is not None and (
                local_manifest is None or local_manifest.save_id == root_manifest.save_id
            )
            return {"in_root": in_root}

        reply = self._exchange("wait_until_in_root", wait)
        # the result already covers `step`
        others = [outcome for outcome in reply["outcomes"] if outcome["step"] != step]
        self._count_outcomes(others, strict=False, is_last=True)
        return bool(reply["in_root"])

    def flush(self) -> None:
        """Block until no upload is pending. Collective. Raises the error of a failed or stalled
        upload.
        """

        def wait(collective: Collective) -> dict[str, Any]:
            if collective.rank != 0:
                return {}
            self._upload_queue.wait(heartbeat=collective.heartbeat)
            return {"root_saves": sorted(self._local.root_saves)}

        reply = self._exchange("flush", wait)
        if (
            self._merge_group is not None
            and self._local.marker is not None
            and not any(outcome["error"] for outcome in reply["outcomes"])
        ):
            self._record_root_saves(frozenset(reply["root_saves"]))
            self._apply_local_retention(tuple)
        self._count_outcomes(reply["outcomes"], strict=True)

    def _exchange(
        self, operation: str, leader_action: Callable[[Collective], dict[str, Any]]
    ) -> dict[str, Any]:
        """Run `leader_action` on all leaders. Returns rank 0's result on every rank, with the
        upload results not yet reported.
        """
        collective = self._run.session.comm.begin_collective(
            operation, timeout_seconds=self._run.timeout_seconds
        )
        with collective.step("exchange"):
            acts = collective.rank in (0, *self._leaders)
            result = leader_action(collective) if acts else {}
            if collective.rank == 0:
                result["outcomes"] = [
                    {
                        "step": outcome.step,
                        "error": outcome.error and encode_error(outcome.error, rank=0, world=1),
                        "damaged": isinstance(outcome.error, SOURCE_DAMAGED),
                    }
                    for outcome in self._upload_queue.pop_outcomes()
                ]
            return dict(collective.broadcast_json("reply", result))

    def _count_outcomes(
        self, outcomes: list[dict[str, Any]], *, strict: bool, is_last: bool = False
    ) -> None:
        """Count failed uploads, alike on every rank.

        `strict` raises the first error; otherwise the error that is `raise_after` in a row is
        raised, unless `is_last`.
        """
        failure: CheckpointError | None = None
        for outcome in outcomes:
            self._local_suspect = self._local_suspect or outcome["damaged"]
            self._failures_in_a_row = self._failures_in_a_row + 1 if outcome["error"] else 0
            if outcome["error"] and (
                strict or (self._failures_in_a_row >= self._run.options.raise_after and not is_last)
            ):
                failure = failure or decode_error(outcome["error"])
            elif outcome["error"] and self._run.session.comm.rank == 0:
                text = (
                    "the copy of step %d to %s failed, training continues; "
                    "failure %d of %d in a row: %s"
                )
                _LOG.warning(
                    text,
                    outcome["step"],
                    self._run.root,
                    self._failures_in_a_row,
                    self._run.options.raise_after,
                    decode_error(outcome["error"]),
                )
        if failure is not None:
            raise failure

    def on_commit(self, job: SaveJob, target: SaveTarget) -> None:
        """Schedule the upload and apply retention after a commit. Called on every rank; a failure
        is logged.
        """
        rank = self._run.session.comm.rank
        try:
            if target.local and rank in self._leaders:
                self._after_local_commit(job, target)
            elif not target.local and rank == 0:
                self._apply_root_retention(job.step, job.state.counted)
        except (CheckpointError, OSError) as error:
            _LOG.warning(
                "%s: step %d is saved; cannot remove old checkpoints yet: %s",
                self.local_directory,
                job.step,
                error,
            )

    def _after_local_commit(self, job: SaveJob, target: SaveTarget) -> None:
        if job.for_root:
            self._scheduled += 1
            self._upload_queue.submit(
                UploadJob(
                    job.step,
                    os.path.relpath(target.path, self.local_directory),
                    job.options.if_exists,
                    job.options.fsync,
                    job.options.max_file_bytes,
                    self._scheduled,
                    job.state.counted,
                )
            )
        required = self._upload_queue.pending_steps
        if self._merge_group is not None:
            pending, root_saves = self._merge_group.broadcast_state(
                required(), self._local.root_saves
            )
            self._record_root_saves(root_saves)
            self._apply_local_retention(lambda: pending, last_step=job.step)
        else:
            self._apply_local_retention(required, last_step=job.step)

    def _apply_local_retention(
        self, required: Callable[[], Collection[int]], *, last_step: int | None = None
    ) -> None:
        removed = self._local.apply_retention(required, last_step=last_step)
        self._run.events.removed(removed, tier="local")

    def _record_root_saves(self, saves: frozenset[str]) -> None:
        """Record what rank 0 knows of the root, on the other leaders.

        Rank 0 itself may know later saves by now; it knows none if it cannot use its directory.
        """
        if saves and self._run.session.comm.rank != 0:
            self._local.record_root_saves(saves)

    def _after_upload(self, job: UploadJob, error: Exception | None) -> None:
        if error is not None:  # it may have been committed all the same
            self._local.record_root_saves(self._root_save_ids() | self._local.root_saves)
            return
        self._apply_root_retention(job.step, job.counted)
        if self._merge_group is None:  # several nodes remove local ones at the next commit
            self._upload_queue.release()
            self._apply_local_retention(self._upload_queue.pending_steps)

    def _apply_root_retention(self, step: int, counted: Sequence[int]) -> None:
        """Remove old checkpoints from the root after the commit of `step`. The local marker learns
        of a new save there before an old one goes.
        """
        self._local.record_root_saves(self._root_save_ids() | self._local.root_saves)
        self._run.rotate_root(
            step,
            counted=counted,
            excluded=self.damaged,
            protected=self._upload_queue.pending_steps(),
        )
        self._local.record_root_saves(self._root_save_ids())

    def _root_save_ids(self) -> frozenset[str]:
        return run_marker.save_ids(self._run.scan_root().complete)

    def scan(self) -> Scan:
        """Scan both tiers, the better copy of a step last, without local checkpoints of other
        runs.
        """
        root_scan = self._run.scan_root()
        local = run_marker.scan_local(
            self.local_directory,
            self._run.options.step_prefix,
            self._run.root,
            root_saves=run_marker.save_ids(root_scan.complete),
        )
        return run_marker.merge_tiers(root_scan, local.scan, local.foreign_saves)

    def flush_this_rank(self) -> None:
        """Wait for pending uploads without a collective, as long as they progress. Failed uploads
        are logged. Those that fail on another rank are not repeated: it may have ended.
        """
        self._upload_queue.ranks_ended = True
        self._upload_queue.wait()
        for outcome in self._upload_queue.pop_outcomes():
            if outcome.error is not None:
                _LOG.warning(
                    "the copy of step %d to %s failed: %s",
                    outcome.step,
                    self._run.root,
                    outcome.error,
                )

    def stop(self) -> None:
        """Abandon pending uploads and merges."""
        self._upload_queue.stop()

"""Two tiers of a run: a local directory for frequent saves, and the root, to which some of them are
uploaded.

Rank 0 acts, and every rank learns the result. On several nodes the first rank of each node, its
leader, acts for the local directory of that node. No call waits for the storage of the root unless
its docstring says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from unified_ckpt.engine.folder import commit
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.steps.remove import remove_folder
from unified_ckpt.manager.steps.rotate import rotate_after_save
from unified_ckpt.manager.steps.scan import BadStep, Scan, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.manager.tiers.merge_queue import MergeQueue, TierPaths, UploadJob
from unified_ckpt.manager.tiers.protected_steps import ProtectedSteps
from unified_ckpt.manager.tiers.run_marker import RunMarker
from unified_ckpt.manager.tiers.upload_queue import SOURCE_DAMAGED, UploadQueue
from unified_ckpt.options import ManagerOptions, SaveOptions
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.topology import first_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes on this node. `path` is relative to the root unless absolute. `replace`:
    the folder there is of another run.
    """

    path: str
    local: bool = False
    replace: bool = False


class TieredStorage:
    """The two tiers of one manager's ranks.

    `root` and `local_directory` are absolute and differ. `nodes` is collective and returns the node
    of each rank. Collective methods say so; the others are for leaders.
    """

    def __init__(
        self,
        root: str,
        options: ManagerOptions,
        *,
        ranks: Callable[[], Comm],
        nodes: Callable[[], list[int]],
        timeout_seconds: float,
    ) -> None:
        self.root, self.local_directory = root, os.path.realpath(options.local_directory or "")
        if self.root == self.local_directory:
            raise FormatError(
                f"local_directory={options.local_directory!r}: got the root, {root}, "
                "expected another folder; choose one on a local disk"
            )
        self._options = options
        self._ranks = ranks
        self._nodes = nodes
        self._timeout_seconds = timeout_seconds
        self._paths = TierPaths(self.local_directory, root)
        self._upload_queue = UploadQueue(
            self._paths,
            options,
            stall_seconds=timeout_seconds,
            on_uploaded=self._after_upload,
        )
        self._leaders: tuple[int, ...] = ()  # known after the first collective
        self._token = secrets.token_hex(8)  # rank 0's token is used by all
        self._merge_queue: MergeQueue | None = None  # on leaders, if there are several nodes
        self._scheduled = 0  # count of local saves that were due
        self._last_local_steps: set[int] = set()  # a later step may exist and be damaged
        self._protected = ProtectedSteps()
        self.bad_steps: frozenset[BadStep] = frozenset()  # damaged steps of both tiers
        self._marker: RunMarker | None = None  # None until the local directory is opened
        # saves and uploads change the local directory in threads
        self._local_lock = threading.Lock()
        self._failures_in_a_row = 0
        self._local_suspect = False  # a local checkpoint was damaged

    def select_target(
        self, step: int, name: str, *, for_root: bool, direct: bool, is_last: bool
    ) -> SaveTarget:
        """Choose where a save goes. Collective.

        `for_root`: it is due in the root too. `direct`: it goes directly to the root. Raises the
        error of uploads that failed `raise_after` times in a row, unless `is_last`: the last save
        may succeed. On one node the last save goes directly to the root, and so does the next one
        due after damage. On several nodes a due save is merged in any case.
        """
        self._leaders = self._leaders or first_ranks(self._nodes())
        single_node = len(self._leaders) == 1
        direct = direct or (single_node and (is_last or (for_root and self._local_suspect)))

        def answer(collective: Collective) -> dict[str, Any]:
            target = self._select_target(collective, name, for_root=for_root, direct=direct)
            return {"target": asdict(target), "token": self._token}

        leader_action = None if direct else partial(self._answer_target, name=name)
        reply = self._exchange("select_target", answer, leader_action=leader_action)
        self._count_outcomes(reply["outcomes"], strict=False, is_last=is_last)
        self._token = reply["token"]
        self._join_merges()
        target = SaveTarget(**reply["target"])
        self._local_suspect = self._local_suspect and (target.local or not for_root)
        if not target.local:
            return target
        self._last_local_steps = self._last_local_steps | {step}
        return replace(target, path=os.path.join(self.local_directory, name))

    def begin_direct(self, step: int) -> None:
        """Record that a save is about to go directly to the root."""
        self._protected.on_begin(step, scheduled=self._scheduled)

    def _join_merges(self) -> None:
        """Take part in merges as a leader, from the first save on."""
        if (
            self._merge_queue is None
            and len(self._leaders) > 1
            and self._ranks().rank in self._leaders
        ):
            self._merge_queue = self._upload_queue.merge_queue = MergeQueue(
                self._ranks(),
                self._leaders,
                self._token,
                paths=self._paths,
                timeout_seconds=self._timeout_seconds,
                on_committed=self._update_marker,
            )

    def wait_until_in_root(self, step: int, name: str) -> bool:
        """Wait for the upload of the last local step and return whether it is in the root.
        Collective, before the last save.

        Raises StorageError if the upload makes no progress.
        """

        def answer(collective: Collective) -> dict[str, Any]:
            self._upload_queue.wait(step=step, heartbeat=collective.heartbeat)
            root_manifest, local_manifest = (
                commit.read_manifest(LocalStorage(path), name)
                for path in (self.root, self.local_directory)
            )
            in_root = root_manifest is not None and (
                local_manifest is None or local_manifest.save_id == root_manifest.save_id
            )
            return {"in_root": in_root}

        reply = self._exchange("wait_until_in_root", answer)
        # the result already covers `step`
        others = [outcome for outcome in reply["outcomes"] if outcome["step"] != step]
        self._count_outcomes(others, strict=False, is_last=True)
        return bool(reply["in_root"])

    def flush(self) -> None:
        """Block until no upload is pending. Collective. Raises the error of a failed or stalled
        upload.
        """

        def answer(collective: Collective) -> dict[str, Any]:
            self._upload_queue.wait(heartbeat=collective.heartbeat)
            return {}

        reply = self._exchange("flush", answer)
        if (
            self._merge_queue is not None
            and self._marker is not None
            and not any(outcome["error"] for outcome in reply["outcomes"])
        ):
            self._apply_local_retention(set())
        self._count_outcomes(reply["outcomes"], strict=True)

    def _exchange(
        self,
        operation: str,
        rank0_action: Callable[[Collective], dict[str, Any]],
        *,
        leader_action: Callable[[Collective], None] | None = None,
    ) -> dict[str, Any]:
        """Run `rank0_action` on rank 0 and return its answer on every rank, with the upload results
        not yet reported.

        `leader_action` runs on the other leaders.
        """
        collective = self._ranks().begin_collective(
            operation, timeout_seconds=self._timeout_seconds
        )
        with collective.step("exchange"):
            if collective.rank == 0:
                answer = rank0_action(collective)
                outcomes = [
                    {
                        "step": outcome.step,
                        "error": outcome.error and encode_error(outcome.error, rank=0, world=1),
                        "damaged": isinstance(outcome.error, SOURCE_DAMAGED),
                    }
                    for outcome in self._upload_queue.pop_outcomes()
                ]
                saves = sorted(self._marker.root_saves) if self._marker is not None else []
                collective.put(
                    "reply", json.dumps({**answer, "outcomes": outcomes, "saves": saves}).encode()
                )
            elif leader_action is not None and collective.rank in self._leaders:
                leader_action(collective)
            reply: dict[str, Any] = json.loads(collective.get("reply"))
        if (
            self._merge_queue is not None
            and self._marker is not None
            and not self._marker.root_saves.issuperset(reply["saves"])
        ):
            self._update_marker(frozenset(reply["saves"]))
        return reply

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
                strict or (self._failures_in_a_row >= self._options.raise_after and not is_last)
            ):
                failure = failure or decode_error(outcome["error"])
            elif outcome["error"] and self._ranks().rank == 0:
                text = (
                    "the copy of step %d to %s failed, training continues; "
                    "failure %d of %d in a row: %s"
                )
                _LOG.warning(
                    text,
                    outcome["step"],
                    self.root,
                    self._failures_in_a_row,
                    self._options.raise_after,
                    decode_error(outcome["error"]),
                )
        if failure is not None:
            raise failure

    def _select_target(
        self, collective: Collective, name: str, *, for_root: bool, direct: bool
    ) -> SaveTarget:
        """Choose the local directory if every node can use its own. Rank 0 only."""
        if direct:
            return SaveTarget(name)
        cached: list[frozenset[str]] = []

        def root_saves() -> frozenset[str]:
            cached[:] = cached or [self._root_save_ids()]
            return cached[0]

        answers, other_leaders = [self._check_local(name, root_saves)], self._leaders[1:]
        if any(collective.get(f"has-marker/{rank}") == b"0" for rank in other_leaders):
            try:
                body: list[str] | str = sorted(root_saves())
            except (CheckpointError, OSError) as error:
                body = str(error)
            collective.put("root-saves", json.dumps(body).encode())
        answers += [json.loads(collective.get(f"local/{rank}")) for rank in other_leaders]
        problem = next((answer["error"] for answer in answers if answer["error"]), None)
        if problem is not None and for_root:
            _LOG.warning(
                "the local directory cannot be used; saving to %s instead: %s", self.root, problem
            )
            return SaveTarget(name)
        # a save that is not due raises the problem itself
        return SaveTarget(name, local=True, replace=any(answer["replace"] for answer in answers))

    def _answer_target(self, collective: Collective, name: str) -> None:
        """Send what `_select_target` on rank 0 waits for. Other leaders only."""

        def root_saves() -> frozenset[str]:
            body = json.loads(collective.get("root-saves"))
            if isinstance(body, str):
                raise StorageError(body)
            return frozenset(body)

        collective.put(f"has-marker/{collective.rank}", b"0" if self._marker is None else b"1")
        collective.put(
            f"local/{collective.rank}", json.dumps(self._check_local(name, root_saves)).encode()
        )

    def _check_local(self, name: str, root_saves: Callable[[], frozenset[str]]) -> dict[str, Any]:
        """Whether the save of this name in the local directory is to be replaced, or why the
        directory cannot be used.
        """
        try:
            with self._local_lock:
                marker = self._marker or self._open_local(root_saves())
            manifest = commit.read_manifest(LocalStorage(self.local_directory), name)
        except (CheckpointError, OSError) as error:
            return {"replace": False, "error": str(error)}
        return {
            "replace": manifest is not None and manifest.save_id in marker.foreign_saves,
            "error": None,
        }

    def _open_local(self, root_saves: frozenset[str]) -> RunMarker:
        """Decide, before the first save, which local checkpoints are of this run, given the saves
        in the root.

        Also removes what interrupted saves of this run left in the local directory.
        """
        os.makedirs(self.local_directory, exist_ok=True)
        storage, prefix = LocalStorage(self.local_directory), self._options.step_prefix
        previous, local = run_marker.read(self.local_directory), scan(storage, prefix)
        foreign_ids = run_marker.foreign_saves(
            previous, self.root, root_saves=root_saves, local_saves=run_marker.save_ids(local.steps)
        )
        marker = RunMarker(self.root, root_saves, foreign_ids)
        run_marker.write(self.local_directory, marker)
        if foreign_ids:
            _LOG.warning(
                "%s: %d checkpoints of another run are not used; "
                "remove them with `unified-ckpt prune`",
                self.local_directory,
                len(foreign_ids),
            )
        if previous is not None and previous.root == self.root:
            for stale in local.stale_folders:
                if stale.kind == "staging" and not stale.only_copy:
                    remove_folder(storage, stale.name)
        self._marker = marker
        return marker

    def on_commit(
        self, target: SaveTarget, step: int, *, for_root: bool, options: SaveOptions
    ) -> None:
        """Schedule the upload and apply retention after a commit. Called on every rank; a failure
        is logged.
        """
        try:
            self._after_commit(target, step, for_root=for_root, options=options)
        except (CheckpointError, OSError) as error:
            _LOG.warning(
                "%s: step %d is saved; cannot remove old checkpoints yet: %s",
                self.local_directory,
                step,
                error,
            )

    def _after_commit(
        self, target: SaveTarget, step: int, *, for_root: bool, options: SaveOptions
    ) -> None:
        if not target.local:
            self._protected.on_commit(step)
            if self._ranks().rank == 0:
                self._apply_root_retention()
        elif self._ranks().rank in self._leaders:
            self._scheduled += for_root
            if for_root and self._merge_queue is not None:
                self._merge_queue.schedule(self._scheduled)
            if for_root and self._ranks().rank == 0:
                name = os.path.relpath(target.path, self.local_directory)
                self._upload_queue.submit(
                    UploadJob(
                        step,
                        name,
                        options.if_exists,
                        options.fsync,
                        options.max_file_bytes,
                        self._scheduled,
                    )
                )
            self._last_local_steps = {step}
            self._apply_local_retention(
                None
                if self._merge_queue is None
                else self._merge_queue.broadcast_pending(self._upload_queue.pending_steps())
            )

    def _after_upload(self, job: UploadJob) -> None:
        self._protected.on_upload(job.number)
        self._apply_root_retention()
        if self._merge_queue is None:
            self._upload_queue.release()
            self._apply_local_retention(None)
        elif self._marker is not None:
            # all nodes remove local ones at the next commit
            self._merge_queue.publish_saves(self._marker.root_saves)

    def _apply_root_retention(self) -> None:
        """Remove old checkpoints from the root. The local marker learns of a new save there before
        an old one goes.
        """
        root_saves = self._root_save_ids()
        self._update_marker(root_saves | (self._marker.root_saves if self._marker else frozenset()))
        storage = LocalStorage(self.root)
        rules = when.retention_rules(self._options)
        bad_ids = {bad.save_id for bad in self.bad_steps if not bad.local}
        rotate_after_save(
            storage,
            self._options.step_prefix,
            rules,
            protected=lambda: self._protected.steps() | self._upload_queue.pending_steps(),
            excluded=bad_ids,
        )
        self._update_marker(self._root_save_ids())

    def _apply_local_retention(self, required: set[int] | None) -> None:
        """Remove old local checkpoints. `required`: steps that stay.

        None means the steps that this node still uploads. They are read under the lock, so the
        later of a commit and an upload sees what both changed.
        """
        with self._local_lock:
            required = self._upload_queue.pending_steps() if required is None else required
            excluded = self._marker.foreign_saves if self._marker else frozenset()
            # later it is removed, for space
            excluded |= {
                bad.save_id
                for bad in self.bad_steps
                if bad.local and bad.step > max(self._last_local_steps, default=0)
            }
            rules = when.local_retention_rules(self._options)
            rotate_after_save(
                LocalStorage(self.local_directory),
                self._options.step_prefix,
                rules,
                protected=lambda: required | self._last_local_steps,
                excluded=excluded,
            )
        self._update_marker(None)

    def _update_marker(self, saves: frozenset[str] | None) -> None:
        """Write the ids of the saves in the root to the marker of the local directory; None keeps
        the ids it has.
        """
        with self._local_lock:
            if self._marker is None:
                return
            if saves is not None:
                self._marker = replace(self._marker, root_saves=saves)
            try:
                if run_marker.read(self.local_directory) != self._marker:
                    run_marker.write(self.local_directory, self._marker)
            except CheckpointError as error:
                _LOG.warning(
                    "after a restart, local checkpoints may be excluded as another run's: %s",
                    error,
                )

    def _root_save_ids(self) -> frozenset[str]:
        return run_marker.save_ids(
            scan(LocalStorage(self.root), self._options.step_prefix).complete
        )

    def scan(self) -> Scan:
        """Scan both tiers, the better copy of a step last, without local checkpoints of other
        runs.
        """
        return scan_tiers(self.root, self.local_directory, self._options.step_prefix)[0]

    def flush_this_rank(self) -> None:
        """Wait for pending uploads without a collective, as long as they progress. Failed uploads
        are logged.
        """
        self._upload_queue.wait()
        for outcome in self._upload_queue.pop_outcomes():
            if outcome.error is not None:
                _LOG.warning(
                    "the copy of step %d to %s failed: %s", outcome.step, self.root, outcome.error
                )
        if self._merge_queue is not None:
            self._merge_queue.wait()

    def stop(self) -> None:
        """Abandon pending uploads and merges."""
        self._upload_queue.stop()
        if self._merge_queue is not None:
            self._merge_queue.stop()


def scan_tiers(root: str, local_directory: str, prefix: str) -> tuple[Scan, frozenset[str]]:
    """Scan both tiers, the better copy last. Also returns the ids of excluded local saves, which
    are of other runs.
    """
    root_scan = scan(LocalStorage(root), prefix)
    try:
        local_scan = scan(LocalStorage(local_directory), prefix)
    except CheckpointError as error:
        _LOG.warning("cannot list the local directory: %s", error)
        local_scan = Scan((), ())
    marker, root_saves = run_marker.read(local_directory), run_marker.save_ids(root_scan.complete)
    excluded = run_marker.foreign_saves(
        marker, root, root_saves=root_saves, local_saves=run_marker.save_ids(local_scan.steps)
    )
    local_scan = run_marker.attributable_steps(marker, root, local_scan, root_saves=root_saves)
    return run_marker.merge_tiers(root_scan, local_scan, excluded), excluded

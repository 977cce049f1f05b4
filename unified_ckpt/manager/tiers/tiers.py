"""Two tiers of one run: a local directory for frequent saves, and the root, to which some are
copied. Rank 0 acts, all are told alike.

On several machines the first rank of each, its lead, acts for that machine's local directory.
Nothing here waits for the root's storage but what says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from unified_ckpt.engine.folder import commit
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.steps.remove import remove_folder
from unified_ckpt.manager.steps.rotate import rotate_after_save
from unified_ckpt.manager.steps.scan import BadStep, Scan, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.manager.tiers.merge_queue import MergeQueue, UploadJob
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
    """Where a save goes: `path`, below the root unless absolute, on this machine. `replace`: what
    is there is of another run.
    """

    path: str
    local: bool = False
    replace: bool = False


class TieredStorage:
    """Of the ranks of one manager. `root`, `local_directory`: absolute, and two. `machines`:
    collective, the machine of each rank. Collective calls say so; the others are for leads.
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
                f"local_directory={options.local_directory!r}: is the root, {root}, whose checkpoints would go by keep_latest_local; "
                "needed another folder"
            )
        self._options, self._ranks, self._nodes, self._timeout_seconds = (
            options,
            ranks,
            nodes,
            timeout_seconds,
        )
        self._upload_queue = UploadQueue(
            self.local_directory,
            root,
            options,
            stall_seconds=timeout_seconds,
            on_uploaded=self._after_upload,
        )
        self._leaders: tuple[int, ...] = ()  # once they are known
        self._token = secrets.token_hex(8)  # rank 0's is that of all
        self._merge_queue: MergeQueue | None = None  # on the leads of several machines
        self._scheduled = 0  # local saves that were due
        self._last_local_steps: set[int] = (
            set()
        )  # the last steps that were saved locally: a later one may be there, and be damaged
        self._protected = ProtectedSteps()
        self.bad_steps: frozenset[BadStep] = (
            frozenset()
        )  # what lies in both tiers and is known to be damaged
        self._marker: RunMarker | None = None  # once it is opened
        self._local_lock = (
            threading.Lock()
        )  # of the local directory: a save's thread and that of copies
        self._failures_in_a_row = 0  # copies in a row
        self._local_suspect = False  # what lay in the local directory was damaged

    # collective

    def select_target(
        self, step: int, name: str, *, for_root: bool, direct: bool, is_last: bool
    ) -> SaveTarget:
        """Collective. Where the save `name` of `step` goes; `for_root` for the root too, `direct`
        to it. Raises what copies have failed with
        `raise_after` times in a row, but for a `is_last` save, which may succeed.

        One machine's `is_last` save goes straight to the root, and one after damage; those of
        several machines are merged in any case.
        """
        self._leaders = self._leaders or first_ranks(self._nodes())
        single_node = len(self._leaders) == 1
        direct = direct or (single_node and (is_last or (for_root and self._local_suspect)))

        def answer(collective: Collective) -> dict[str, Any]:
            return {
                "place": asdict(
                    self._select_target(collective, name, for_root=for_root, direct=direct)
                ),
                "token": self._token,
            }

        reply = self._exchange(
            "where",
            answer,
            leader_action=None
            if direct
            else lambda collective: self._answer_target(collective, name),
        )
        self._count_outcomes(reply["outcomes"], strict=False, is_last=is_last)
        self._token = reply["token"]
        self._join_merges()
        target = SaveTarget(**reply["place"])
        self._local_suspect = self._local_suspect and (target.local or not for_root)
        self._last_local_steps = (
            self._last_local_steps | {step} if target.local else self._last_local_steps
        )
        return (
            replace(target, path=os.path.join(self.local_directory, name))
            if target.local
            else target
        )

    def begin_direct(self, step: int) -> None:
        """Before a save that goes straight to the root."""
        self._protected.on_begin(step, scheduled=self._scheduled)

    def _join_merges(self) -> None:
        """The lead's part in merges, from the first save on."""
        if (
            self._merge_queue is None
            and len(self._leaders) > 1
            and self._ranks().rank in self._leaders
        ):
            self._merge_queue = self._upload_queue.merge_queue = MergeQueue(
                self._ranks(),
                self._leaders,
                self._token,
                source=self.local_directory,
                target=self.root,
                timeout_seconds=self._timeout_seconds,
                on_committed=self._update_marker,
            )

    def wait_until_in_root(self, step: int, name: str) -> bool:
        """Collective, before the last save. Whether the last step saved locally is in the root too,
        once its copy is waited for. Raises that copy's silence.
        """

        def answer(collective: Collective) -> dict[str, Any]:
            self._upload_queue.wait(step=step, heartbeat=collective.heartbeat)
            root_manifest, local_manifest = (
                commit.read_manifest(LocalStorage(path), name)
                for path in (self.root, self.local_directory)
            )
            return {
                "settled": root_manifest is not None
                and (local_manifest is None or local_manifest.save_id == root_manifest.save_id)
            }

        reply = self._exchange("settle", answer)
        self._count_outcomes(
            [outcome for outcome in reply["outcomes"] if outcome["step"] != step],
            strict=False,
            is_last=True,
        )  # of `step`: as told
        return bool(reply["settled"])

    def flush(self) -> None:
        """Collective. Returns once nothing is owed to the root. Raises the error of a copy that
        failed, or its silence.
        """

        def answer(collective: Collective) -> dict[str, Any]:
            self._upload_queue.wait(heartbeat=collective.heartbeat)
            return {}

        reply = self._exchange("copies", answer)
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
        """What `rank0_action` says on rank 0, and how copies ended that were not told yet, on every
        rank.
        `leader_action`: called on the other leads.
        """
        collective = self._ranks().begin_collective(
            operation, cached=False, timeout_seconds=self._timeout_seconds
        )
        with collective.step("tell"):
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
                    "told", json.dumps({**answer, "outcomes": outcomes, "saves": saves}).encode()
                )
            elif leader_action is not None and collective.rank in self._leaders:
                leader_action(collective)
            reply: dict[str, Any] = json.loads(collective.get("told"))
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
        """Every rank counts alike. `strict`: raises the first error, else the one that is
        `raise_after` in a row; `is_last`: none.
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
                    "the copy of step %d to %s failed, the training goes on; %d of %d in a row: %s"
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

    # of rank 0, and of the other leads

    def _select_target(
        self, collective: Collective, name: str, *, for_root: bool, direct: bool
    ) -> SaveTarget:
        """On rank 0: the local directory, where all machines can use theirs."""
        if direct:
            return SaveTarget(name)
        cached: list[frozenset[str]] = []

        def root_saves() -> frozenset[str]:
            cached[:] = cached or [self._root_save_ids()]
            return cached[0]

        answers, other_leaders = [self._check_local(name, root_saves)], self._leaders[1:]
        if any(collective.get(f"opened/{rank}") == b"0" for rank in other_leaders):
            try:
                body: list[str] | str = sorted(root_saves())
            except (CheckpointError, OSError) as error:
                body = str(error)
            collective.put("committed", json.dumps(body).encode())
        answers += [json.loads(collective.get(f"look/{rank}")) for rank in other_leaders]
        problem = next((answer["error"] for answer in answers if answer["error"]), None)
        if problem is not None and for_root:
            _LOG.warning(
                "the local directory cannot be used, this save goes to %s: %s", self.root, problem
            )
            return SaveTarget(name)
        return SaveTarget(
            name, local=True, replace=any(answer["replace"] for answer in answers)
        )  # one that is not due says itself what is wrong

    def _answer_target(self, collective: Collective, name: str) -> None:
        """On the other leads, what `_select_target` waits for."""

        def root_saves() -> frozenset[str]:
            body = json.loads(collective.get("committed"))
            if isinstance(body, str):
                raise StorageError(body)
            return frozenset(body)

        collective.put(f"opened/{collective.rank}", b"0" if self._marker is None else b"1")
        collective.put(
            f"look/{collective.rank}", json.dumps(self._check_local(name, root_saves)).encode()
        )

    def _check_local(self, name: str, root_saves: Callable[[], frozenset[str]]) -> dict[str, Any]:
        """Whether what this machine's local directory has by this name is to be replaced, or why it
        cannot be used.
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
        """Before the first save: whose the local directory is, by what is `root_saves` in the root.
        Clears away what this run's interrupted saves have left there.
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
                "%s: %d checkpoints are of another run; they are not used, and stay until `prune`",
                self.local_directory,
                len(foreign_ids),
            )
        if previous is not None and previous.root == self.root:
            for stale in local.stale_folders:
                if stale.kind == "construction" and not stale.only_copy:
                    remove_folder(storage, stale.name)
        self._marker = marker
        return marker

    def on_commit(
        self, target: SaveTarget, step: int, *, for_root: bool, options: SaveOptions
    ) -> None:
        """After the commit, on every rank: leads have it copied where it is due, and apply the
        rules. What fails is a warning.
        """
        try:
            self._after_commit(target, step, for_root=for_root, options=options)
        except (CheckpointError, OSError) as error:
            _LOG.warning(
                "%s: step %d is saved; old checkpoints stay for now: %s",
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
            self._merge_queue.publish_saves(
                self._marker.root_saves
            )  # local ones go on all machines alike, with the next commit

    def _apply_root_retention(self) -> None:
        """Touches the root's storage. The local directory learns of a new save there before an old
        one goes.
        """
        root_saves = self._root_save_ids()
        self._update_marker(root_saves | (self._marker.root_saves if self._marker else frozenset()))
        storage, rules, bad_ids = (
            LocalStorage(self.root),
            when.retention_rules(self._options),
            {bad.save_id for bad in self.bad_steps if not bad.local},
        )
        rotate_after_save(
            storage,
            self._options.step_prefix,
            rules,
            protected=lambda: self._protected.steps() | self._upload_queue.pending_steps(),
            excluded=bad_ids,
        )
        self._update_marker(self._root_save_ids())

    def _apply_local_retention(self, required: set[int] | None) -> None:
        """`required`: steps that stay in any case; None: those that this machine still copies,
        asked for under the lock, so that of a commit and the end of a copy the later one sees what
        both have changed.
        """
        with self._local_lock:
            required = self._upload_queue.pending_steps() if required is None else required
            excluded = self._marker.foreign_saves if self._marker else frozenset()
            excluded |= {
                bad.save_id
                for bad in self.bad_steps
                if bad.local and bad.step > max(self._last_local_steps, default=0)
            }  # then it goes, for room
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
        """The local directory, if this run has one, says which saves are in the root; None: those
        that it knows.
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
                    "after a restart local checkpoints may be taken for those of another run: %s",
                    error,
                )

    def _root_save_ids(self) -> frozenset[str]:
        return run_marker.save_ids(
            scan(LocalStorage(self.root), self._options.step_prefix).complete
        )

    # of any rank

    def scan(self) -> Scan:
        """Both tiers, the best last; without the local checkpoints of other runs."""
        return scan_tiers(self.root, self.local_directory, self._options.step_prefix)[0]

    def flush_this_rank(self) -> None:
        """Not collective: waits for what is owed as long as it gets on. Raises its silence, tells
        its failures.
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
        self._upload_queue.stop()
        if self._merge_queue is not None:
            self._merge_queue.stop()


def scan_tiers(root: str, local_directory: str, prefix: str) -> tuple[Scan, frozenset[str]]:
    """What lies in both, the best last, and the ids of the local saves that are of other runs and
    not among them.
    """
    root_scan = scan(LocalStorage(root), prefix)
    try:
        local_scan = scan(LocalStorage(local_directory), prefix)
    except CheckpointError as error:
        _LOG.warning("the local directory cannot be looked at: %s", error)
        local_scan = Scan((), ())
    marker, root_saves = run_marker.read(local_directory), run_marker.save_ids(root_scan.complete)
    excluded = run_marker.foreign_saves(
        marker, root, root_saves=root_saves, local_saves=run_marker.save_ids(local_scan.steps)
    )
    local_scan = run_marker.attributable_steps(marker, root, local_scan, root_saves=root_saves)
    return run_marker.merge_tiers(root_scan, local_scan, excluded), excluded

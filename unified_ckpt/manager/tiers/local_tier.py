"""The local directory of this node: whether it can be used, which checkpoints in it are of this
run, and which of them stay. Used by the leader of the node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from unified_ckpt.engine.folder.backup import delete_checkpoint
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.steps.rotate import rotate
from unified_ckpt.manager.steps.scan import StepRecord, scan
from unified_ckpt.manager.tiers import run_marker
from unified_ckpt.manager.tiers.run_marker import RunMarker
from unified_ckpt.runtime.storage.posix_calls import make_folders
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


class LocalTier:
    """The local directory of this node. `marker`: None until the directory is opened."""

    def __init__(self, run: RunContext, directory: str) -> None:
        self._run, self.directory = run, directory
        self.marker: RunMarker | None = None
        self._lock = threading.Lock()  # saves and uploads change the directory in threads
        self._last_step = -1  # of the latest commit; a later step may be of a save that runs

    @property
    def root_saves(self) -> frozenset[str]:
        """The saves in the root that the marker names."""
        return self.marker.root_saves if self.marker is not None else frozenset()

    def open(self, root_saves: Collection[str] | str) -> str | None:
        """Open the directory unless it is open. Return why it cannot be used, None if it can.

        `root_saves`: ids committed in the root, or why these are not known.
        """
        if self.marker is None and isinstance(root_saves, str):
            return root_saves
        try:
            with self._lock:
                if self.marker is None:
                    self._open(frozenset(root_saves))
        except (CheckpointError, OSError) as error:
            return str(error)
        return None

    def _open(self, root_saves: frozenset[str]) -> None:
        """Decide, before the first save, which local checkpoints are of this run, given the saves
        in the root.

        Also removes what interrupted saves of this run left in the directory.
        """
        make_folders(self.directory)
        storage, root = LocalStorage(self.directory), self._run.root
        scanned = scan(storage, self._run.options.step_prefix)
        local = run_marker.steps_of_run(scanned, self.directory, root, root_saves=root_saves)
        foreign_ids = local.foreign_saves
        marker = RunMarker(root=root, root_saves=root_saves, foreign_saves=foreign_ids)
        run_marker.write(self.directory, marker)
        if foreign_ids:
            _LOG.warning(
                "%s: %d checkpoints of another run are not used; remove them if nothing needs them",
                self.directory,
                len(foreign_ids),
            )
        if local.marker is not None and local.marker.root == root:
            for stale in scanned.stale_folders:
                if stale.kind == "staging":
                    delete_checkpoint(storage, stale.name)
        self.marker = marker

    def record_root_saves(self, saves: frozenset[str]) -> None:
        """Write the ids of the saves in the root to the marker. An old save is removed only after
        the marker names a newer one.
        """
        with self._lock:
            if self.marker is not None:
                self.marker = self.marker.model_copy(update={"root_saves": saves})
        self._write_marker()

    def apply_retention(
        self, required: Callable[[], Collection[int]], *, last_step: int | None = None
    ) -> list[StepRecord]:
        """Remove and return old checkpoints, except the `required` steps and saves of other runs.
        `last_step`: the step just saved, None after an upload.

        `required` is called under the lock, so the later of a commit and an upload sees what both
        changed.
        """
        with self._lock:
            self._last_step = self._last_step if last_step is None else last_step
            removed = rotate(
                LocalStorage(self.directory),
                self._run.options.step_prefix,
                when.local_retention_rules(self._run.options.keep_latest_local),
                last_step=self._last_step,
                protected=required(),
                excluded=self.marker.foreign_saves if self.marker else (),
            )
        self._write_marker()
        return removed

    def _write_marker(self) -> None:
        """Write the marker unless the directory has it; somebody may have emptied it."""
        with self._lock:
            if self.marker is None:
                return
            stored = None
            with suppress(CheckpointError):  # damaged since: it is written again
                stored = run_marker.read(self.directory)
            try:
                if stored != self.marker:
                    run_marker.write(self.directory, self.marker)
            except CheckpointError as error:
                _LOG.warning(
                    "after a restart, local checkpoints may be excluded as another run's: %s",
                    error,
                )

"""What all parts of a run share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unified_ckpt.manager.events.run_events import RunEvents
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.steps.rotate import rotate
from unified_ckpt.manager.steps.scan import Scan, scan
from unified_ckpt.options import LoadOptions, ManagerOptions
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.session import Session


@dataclass(frozen=True, slots=True)
class RunContext:
    """The session, options and events of a run. `options`: with absolute paths."""

    session: Session
    options: ManagerOptions
    load_options: LoadOptions
    events: RunEvents

    @property
    def root(self) -> str:
        """The absolute folder of the checkpoints, or the URL of their prefix in a bucket."""
        return self.session.root

    @property
    def timeout_seconds(self) -> float:
        """How long ranks wait for each other, except in a restore."""
        return self.session.options.timeout_seconds

    def scan_root(self) -> Scan:
        """Scan the root as this rank sees it."""
        return scan(open_root(self.root), self.options.step_prefix)

    def rotate_root(
        self,
        last_step: int,
        *,
        counted: Collection[int],
        excluded: Collection[str],
        protected: Collection[int] = (),
    ) -> None:
        """Remove old checkpoints from the root after the commit of `last_step`, and record it.

        `counted`: as in `Rules`. `excluded`, `protected`: as in `rotate`.
        """
        removed = rotate(
            open_root(self.root),
            self.options.step_prefix,
            when.retention_rules(self.options, counted=counted),
            last_step=last_step,
            protected=protected,
            excluded=excluded,
        )
        self.events.removed(removed, tier="root")

"""What all parts of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from unified_ckpt.manager.events.run_events import RunEvents
from unified_ckpt.options import LoadOptions, ManagerOptions
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
        """The absolute folder of the checkpoints."""
        return self.session.root

    @property
    def timeout_seconds(self) -> float:
        """How long ranks wait for each other, except in a restore."""
        return self.session.options.timeout_seconds

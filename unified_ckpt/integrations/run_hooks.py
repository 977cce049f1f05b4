"""The hooks of a callback, for every run that begins after they were registered."""

from __future__ import annotations

from dataclasses import dataclass, field

from unified_ckpt.manager.events.run_events import CommitHook, FailureHook
from unified_ckpt.manager.manager import CheckpointManager


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a callback calls after commits and failed attempts to save."""

    commit: list[CommitHook] = field(default_factory=list)
    failure: list[FailureHook] = field(default_factory=list)

    def register(self, manager: CheckpointManager) -> None:
        """Add the hooks to the manager of a run."""
        for hook in self.commit:
            manager.on_commit(hook)
        for failure_hook in self.failure:
            manager.on_failure(failure_hook)

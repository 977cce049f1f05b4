"""The state of a step, and its save, as values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.checkpointer import Path
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.save.request import CapturedState, SaveArguments, StateArguments
from unified_ckpt.manager.events.run_events import SaveAttempt
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.options import SaveOptions


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of a step, to be saved. `prepare` returns the arguments of a save; it is called at
    each attempt, on every rank, and raises the same error on all of them.

    `metrics`, `options`: as in `CheckpointManager.save`. `counted`: steps that stay in place of one
    of the latest. `path`: where a trainer wants it; None for the step's folder. The manager neither
    counts nor removes checkpoints at such paths, and one step may be saved at several. `captured`:
    the state as it was at an earlier time, in place of `prepare`.
    """

    step: int
    prepare: Callable[[], StateArguments]
    metrics: Mapping[str, float] | None = None
    options: SaveOptions | None = None
    counted: Sequence[int] = ()
    path: Path | None = None
    captured: CapturedState | None = None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save. `metrics`: finite numbers. `for_root`: due in the root, not only in the local
    tier. `retried`: it repeats a failed save. `is_last`: no later save follows; it goes to the
    root, and a failure is raised. `called`: when, as a monotonic time.
    """

    state: StepState
    name: str
    metrics: Mapping[str, float]
    options: SaveOptions
    for_root: bool = True
    retried: bool = False
    is_last: bool = False
    called: float = field(default_factory=time.monotonic)

    def attempt(self, target: SaveTarget, number: int) -> SaveAttempt:
        """Return the attempt that begins now."""
        waited = time.monotonic() - self.called
        path = os.fspath(self.path_at(target))
        return SaveAttempt(self.step, target, path, number, self.called, waited, dict(self.metrics))

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.state.step

    def path_at(self, target: SaveTarget) -> Path:
        """Return the path for this target."""
        return ManagedPath(target.path) if self.state.path is None else self.state.path

    def arguments_at(self, target: SaveTarget) -> SaveArguments:
        """Return the arguments for this target, with the options. A local save replaces what has
        its name: `if_exists` is about the root.
        """
        captured, changes = self.state.captured, {"if_exists": "replace"} if target.local else {}
        return {
            **(self.state.prepare() if captured is None else captured.arguments),
            "step": self.step,
            "metrics": self.metrics,
            "options": self.options.model_copy(update=changes),
        }

"""The numbers of a Trainer's saves, in the Trainer's log."""

from __future__ import annotations

from collections import deque
from typing import Any

from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.integrations.loggers import metrics_of
from unified_ckpt.manager.events.run_events import SaveFailure
from unified_ckpt.manager.manager import CheckpointManager

_TRAINING = {"loss", "train_loss"}  # one of them is in each entry about training


class SaveLog:
    """Adds the numbers of the last commit, and the count of failed attempts, to the next entry
    about training.

    They join an entry that the Trainer logs anyway, in the thread of training: an entry of their
    own would disturb Trainers that average between entries, and callbacks that expect the same
    entries on all ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self._unlogged = deque[dict[str, float]]()  # filled by the thread of a save
        self._log = trainer.log
        trainer.log = self._log_with_save

    def follow(self, manager: CheckpointManager) -> None:
        """Log the saves of this manager from now on."""
        self._unlogged.clear()
        manager.on_commit(self._add)
        manager.on_failure(self._add)

    def _add(self, report: SaveReport | SaveFailure) -> None:
        self._unlogged.append(metrics_of(report))

    def _log_with_save(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        while self._unlogged and _TRAINING & logs.keys():
            logs.update(self._unlogged.popleft())
        self._log(logs, *args, **kwargs)

"""The numbers of a Trainer's saves, in the Trainer's log."""

from __future__ import annotations

from collections import deque
from typing import Any

from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.integrations.loggers import metrics_of
from unified_ckpt.manager.manager import CheckpointManager

_TRAINING = {"loss", "train_loss"}  # one of them is in each entry about training


class SaveLog:
    """Adds the numbers of the last commit to the next entry about training.

    They join an entry that the Trainer logs anyway, in the thread of training: an entry of their
    own would disturb Trainers that average between entries, and callbacks that expect the same
    entries on all ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self._unlogged: deque[SaveReport] = deque(maxlen=1)  # filled by the thread of a save
        self._log = trainer.log
        trainer.log = self._log_with_save

    def follow(self, manager: CheckpointManager) -> None:
        """Log the saves of this manager from now on."""
        self._unlogged.clear()
        manager.on_commit(self._unlogged.append)

    def _log_with_save(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._unlogged and _TRAINING & logs.keys():
            logs.update(metrics_of(self._unlogged.pop()))
        self._log(logs, *args, **kwargs)

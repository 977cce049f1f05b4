"""Arguments that keep a best checkpoint, and the Trainer's state file for comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    "learning_rate": 0.3,
}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the state file without the run's folder and speed."""
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
    for entry in state["log_history"]:
        for key in [key for key in entry if "runtime" in key or "per_second" in key]:
            del entry[key]
    return state

"""Stores what training changes beside the model as parts: the reference model of TRL's trainers,
and parts that the caller adds, such as an average of the weights.

How state could be lost: with `sync_ref_model` the reference model follows the trained model. The
stock Trainer does not save it, so a resume would compare with the model of the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from unified_ckpt.integrations.run_state import RunState
from unified_ckpt.manager.run import Run
from unified_ckpt.runtime.storage.paths import absolute_path

_LOG = logging.getLogger("unified_ckpt")
REFERENCE_PART = "ref_model"


def reference_parts(trainer: Any) -> dict[str, nn.Module]:
    """Return the reference model by the name of its part, nothing if training leaves it as it
    is.
    """
    reference = getattr(trainer, "ref_model", None)
    if reference is None or not getattr(trainer.args, "sync_ref_model", False):
        return {}
    return {REFERENCE_PART: trainer.accelerator.unwrap_model(reference)}


def load_parts(parts: Mapping[str, Any], run: Run, state: RunState) -> None:
    """Load parts beside the model. Collective. Rank 0 logs a warning for each that the checkpoint
    lacks.
    """
    checkpoint, saved = absolute_path(state.path), [name for name in parts if name in state.parts]
    if saved:
        options = run.load_options.model_copy(update={"parts": tuple(saved)})
        targets = {name: parts[name] for name in saved}
        run.session.load(checkpoint, {"parts": targets, "options": options})
    for name in sorted(parts.keys() - set(saved)) if run.session.comm.rank == 0 else ():
        _LOG.warning(
            "%s: has no part %s; training continues with the one that was passed", checkpoint, name
        )

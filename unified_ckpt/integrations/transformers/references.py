"""Stores the reference model of TRL's trainers as a part, if training changes it.

How state could be lost: with `sync_ref_model` the reference model follows the trained model. The
stock Trainer does not save it, so a resume would compare with the model of the first step.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from unified_ckpt.api import open as open_source
from unified_ckpt.checkpointer import Checkpointer
from unified_ckpt.options import LoadOptions

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


def load_references(
    trainer: Any, checkpointer: Checkpointer, checkpoint: str, options: LoadOptions
) -> None:
    """Load the reference model. Collective. Logs a warning if the checkpoint has none."""
    parts = reference_parts(trainer)
    if not parts:
        return
    with open_source(checkpoint) as source:
        is_saved = REFERENCE_PART in source.parts
    if is_saved:
        options = options.model_copy(update={"parts": (REFERENCE_PART,)})
        checkpointer.load(checkpoint, parts=parts, options=options)
    elif trainer.args.process_index == 0:
        _LOG.warning(
            "%s: has no reference model, which sync_ref_model changes; "
            "training continues with the one that was passed",
            checkpoint,
        )

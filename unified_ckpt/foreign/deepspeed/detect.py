"""Recognizes DeepSpeed checkpoints by file names; does not import torch."""

from __future__ import annotations

import os
import re

from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.foreign.huggingface.detect import BIN, BIN_INDEX, has_safetensors
from unified_ckpt.runtime.storage.regular_files import is_folder, probe

DEEPSPEED_LATEST = ("latest", "latest_universal")
DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")


def is_deepspeed(listing: PathListing) -> bool:
    """Return whether this is a step folder, or a root with `latest` and a step folder.

    A root copied without its step folders, as on model hubs, may still be a model folder.
    """
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in listing.entries):
        return True
    if listing.entries.isdisjoint(DEEPSPEED_LATEST):
        return False
    if DEEPSPEED_LATEST[1] in listing.entries and any(
        probe(is_folder, os.path.join(listing.path, name, "zero")) for name in listing.entries
    ):
        return True
    if "checkpoint" in listing.entries or any(
        name.startswith("global_step") for name in listing.entries
    ):
        return True
    has_weights = has_safetensors(listing) or bool(listing.entries & {BIN, BIN_INDEX})
    return "zero_to_fp32.py" in listing.entries and not has_weights

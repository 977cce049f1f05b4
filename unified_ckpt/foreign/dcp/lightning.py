"""Opens Lightning's sharded checkpoints: a DCP folder with the remaining state in `meta.pt`.

A checkpoint in a single file is read as a file of `torch.save`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.foreign.dcp.detect import LIGHTNING_META
from unified_ckpt.foreign.dcp.source import read_dcp
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import NAMESPACE_CLASSES, to_plain
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.sharded_source import ShardedSource


def open_lightning(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a sharded checkpoint. Errors as for `open_dcp`."""
    path = os.path.join(root, LIGHTNING_META)
    meta = expect_dict(to_plain(load_torch(path, placeholders=NAMESPACE_CLASSES)), path)
    step = meta.get("global_step")

    def adapt(metadata: SourceMetadata) -> tuple[SourceMetadata, Callable[[int], Any]]:
        extra = {**meta, **(metadata.extra or {})}
        step_number = step if isinstance(step, int) else None
        return replace(metadata, step=step_number, extra=extra), lambda _: None

    return read_dcp(root, "lightning-sharded", adapt)

"""Opens Lightning's sharded checkpoints: a DCP folder with the remaining state in `meta.pt`.

A checkpoint in a single file is read as a file of `torch.save`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.sources.pytorch.dcp import read_dcp
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.placeholders import NAMESPACE_CLASSES, to_plain
from unified_ckpt.views.shards import ShardedSource, SourceExtras

META_FILE = "meta.pt"


def open_lightning(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a sharded checkpoint. Errors as for `open_dcp`."""
    folder = read_dcp(root)
    meta = to_plain(load_torch(os.path.join(root, META_FILE), placeholders=NAMESPACE_CLASSES))
    if not isinstance(meta, Mapping):
        raise FormatError(f"{root}/{META_FILE}: got {type(meta).__name__}, expected a dict")
    step = meta.get("global_step")
    metadata = replace(
        folder.metadata,
        step=step if isinstance(step, int) else None,
        extra={**meta, **(folder.metadata.extra or {})},
    )
    return ShardedSource(
        root,
        folder.tensors,
        format="lightning-sharded",
        metadata=metadata,
        extras=SourceExtras(folder.refused),
    )

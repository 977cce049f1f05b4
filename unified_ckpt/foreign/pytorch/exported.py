"""Recognizes files of `torch.save` and DCP folders that a conversion of this package wrote.

They have plain keys for users of torch, and one that says what the other keys mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.foreign.restricted_pickle.load import load_tensors

EXPORT_KEY, EXPORT_VERSION = "unified_ckpt_export", 1
ENTRIES = (EXPORT_KEY, "step", "extra", "metrics", "rank_extra")  # beside the parts


def restore_entries(metadata: SourceMetadata) -> tuple[SourceMetadata, Callable[[int], Any]]:
    """Return the metadata that was exported, and `rank_extra` by rank.

    `metadata`: of the file, with its keys in `extra`; returned as it is if another writer saved it.
    """
    entries = metadata.extra
    if not isinstance(entries, dict) or EXPORT_KEY not in entries:
        return metadata, lambda _: None
    rank_extra = dict(enumerate(entries.get("rank_extra") or ()))
    restored = replace(
        metadata,
        step=entries.get("step"),
        extra=entries.get("extra"),
        metrics=entries.get("metrics") or {},
        rank_extras=len(rank_extra),
    )
    return restored, lambda rank: load_tensors(rank_extra.get(rank))

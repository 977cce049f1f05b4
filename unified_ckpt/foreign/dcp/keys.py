"""Opens a torch.distributed.checkpoint folder by its flat keys, as `dcp.load` addresses it.

Tensors are in the part "model" under their keys. The metadata's `extra` is a `StoredObjects`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.foreign.dcp.metadata import Entry, KeyPath, read_entries
from unified_ckpt.foreign.dcp.source import build_tensor, load_object, map_files
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.format.names import MODEL
from unified_ckpt.views.sharded_source import ShardedSource


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """What a folder stores beside tensors. `paths`: of all keys in the state dict."""

    root: str
    paths: Mapping[str, KeyPath]
    _entries: Mapping[str, Entry]
    _files: Mapping[str, MappedFile]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def load(self, key: str) -> Any:
        """Load an object. FormatError if it contains classes."""
        return load_object(self._files, self.root, key, self._entries[key])


def open_keys(root: str) -> ShardedSource:
    """Open a DCP folder by its keys.

    FormatError if the folder is damaged, IncompleteError names missing and truncated files.
    """
    entries = read_entries(root)
    files = map_files(root, entries)
    tensors = {
        (MODEL, key): build_tensor(files, root, key, entry, entry.dtype)
        for key, entry in entries.items()
        if entry.dtype is not None
    }
    objects = {key: entry for key, entry in entries.items() if entry.dtype is None}
    paths = {key: entry.path for key, entry in entries.items()}
    extra = StoredObjects(root, paths, objects, files)
    return ShardedSource(root, tensors, format="dcp", metadata=SourceMetadata(extra=extra))

"""What a path shows from outside: a file, or the names in a folder."""

from __future__ import annotations

from dataclasses import dataclass

from unified_ckpt.runtime.storage.regular_files import is_file, list_folder


@dataclass(frozen=True, slots=True)
class PathListing:
    """What a path shows from outside. `entries` are a folder's file names; a file has none."""

    path: str
    is_file: bool
    entries: frozenset[str]


def list_path(path: str) -> PathListing:
    """List a path without opening any file in it."""
    return PathListing(path, is_file(path), frozenset(list_folder(path)))

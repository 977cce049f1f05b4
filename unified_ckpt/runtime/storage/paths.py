"""Paths that users pass: local ones, absolute or relative, and fsspec URLs."""

from __future__ import annotations

import os
import re

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.storage.posix_calls import make_folders
from unified_ckpt.runtime.storage.regular_files import refresh_names

# pathlib.Path("s3://bucket/run") becomes "s3:/bucket/run".
_COLLAPSED_URL = re.compile(r"^(?!file:)([A-Za-z][A-Za-z0-9+.-]+:/)(?!/)")


def is_url(path: str) -> bool:
    """Return whether a path names an fsspec file system other than the local one."""
    return "://" in path and not path.startswith("file://")


def strip_file_scheme(path: str) -> str:
    """Return a local path without its `file://` scheme, if it has one."""
    return path.removeprefix("file://")


def writable_path(path: str) -> str:
    """Return the absolute path of a local folder to write or list. StorageError for a URL."""
    full_path = absolute_path(path)
    if is_url(full_path):
        raise StorageError(
            f"{full_path}: got a URL, expected a local folder; URLs can only be read"
        )
    return full_path


def absolute_path(path: str, *, root: str = "") -> str:
    """Return an absolute path, or a URL with both its slashes restored.

    A relative path starts from `root`, or from the current working directory.
    """
    path, root = (_COLLAPSED_URL.sub(r"\1/", text) for text in (path, root))
    if is_url(root) and not is_url(path) and not os.path.isabs(strip_file_scheme(path)):
        return f"{root.rstrip('/')}/{path}"
    if is_url(path):
        return path
    return os.path.abspath(os.path.join(strip_file_scheme(root), strip_file_scheme(path)))


def ensure_parent(path: str, *, fsync: bool = True) -> tuple[str, str]:
    """Create the parent folder of a checkpoint; return its real path and the checkpoint's name.

    Refreshes the names in it: another node may have removed or replaced what had this one.
    `fsync`: durably. StorageError if it cannot be created, or the path has no name.
    """
    parent, name = os.path.split(writable_path(path))
    if not name:
        raise StorageError(f"{path}: has no folder name; pass the path of the checkpoint folder")
    try:
        make_folders(parent, fsync=fsync)
    except OSError as error:
        raise StorageError(
            f"{parent}: cannot be created: {error.strerror}; pass a writable location"
        ) from error
    refresh_names(os.path.join(parent, name))
    return os.path.realpath(parent), name

"""Opens a root by its path: a local folder, a bucket, or another URL that is only read."""

from __future__ import annotations

import os

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects.reader import ObjectReader
from unified_ckpt.runtime.objects.registry import (
    URL_FORMS,
    bucket_of,
    is_bucket_url,
    split_url,
)
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.paths import (
    absolute_path,
    ensure_parent,
    is_url,
    strip_file_scheme,
)
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.regular_files import list_folder
from unified_ckpt.runtime.storage.remote import RemoteStorage
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import FOREGROUND, WritePolicy


def root_path(path: str) -> str:
    """Return the absolute path of a folder to write or list, without links, or a bucket's URL.

    StorageError for a URL that can only be read.
    """
    full_path = absolute_path(path)
    if is_bucket_url(full_path):
        bucket, prefix = split_url(full_path)
        return f"{bucket}/{prefix}".rstrip("/")
    return os.path.realpath(_local_path(full_path))


def open_root(path: str, *, write_policy: WritePolicy = FOREGROUND) -> LocalStorage | ObjectStorage:
    """Return the storage of a root to read and write: a local folder, or a URL of a bucket.

    `write_policy`: of local files. StorageError for a URL that can only be read.
    """
    if is_bucket_url(path):
        return ObjectStorage(*bucket_of(path))
    return LocalStorage(_local_path(path), write_policy=write_policy)


def open_parent(
    path: str, *, write_policy: WritePolicy = FOREGROUND
) -> tuple[LocalStorage | ObjectStorage, str]:
    """Return the storage of the folder that holds a checkpoint, and the checkpoint's name.

    A local folder is created. StorageError if that fails, or if the path has no name.
    """
    if is_bucket_url(path):
        parent, _, name = path.rstrip("/").rpartition("/")
        if parent.endswith(":/"):
            raise StorageError(f"{path}: got a bucket, expected a checkpoint's URL in it")
        return open_root(parent), name
    folder, name = ensure_parent(_local_path(path), fsync=write_policy.fsync)
    return LocalStorage(folder, write_policy=write_policy), name


def open_reader(path: str) -> LocalStorage | ObjectReader | RemoteStorage:
    """Return a reader of this folder or URL."""
    if is_bucket_url(path):
        return ObjectReader(*bucket_of(path))
    return RemoteStorage(path) if is_url(path) else LocalStorage(strip_file_scheme(path))


def listable(storage: Reader) -> LocalStorage | ObjectStorage:
    """Return a storage of the same folder that can be listed. StorageError if there is none."""
    if isinstance(storage, ObjectReader):
        return ObjectStorage(storage.store, storage.prefix)
    if not isinstance(storage, LocalStorage):
        raise StorageError(
            f"{storage.root}: got a URL whose folders are not listed, expected a local folder or a "
            "bucket"
        )
    return storage


def list_entries(path: str) -> list[str]:
    """Return the entries of a folder, or of a prefix in a bucket; none without one."""
    return open_root(path).names() if is_bucket_url(path) else list_folder(path)


def _local_path(path: str) -> str:
    """Return the path of a local folder. StorageError for a URL: it can only be read."""
    full_path = absolute_path(path)
    if is_url(full_path):
        raise StorageError(
            f"{full_path}: got a URL, expected a local folder, {URL_FORMS}; other URLs can only be "
            "read"
        )
    return full_path

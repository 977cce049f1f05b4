"""Which store a URL names: one client per bucket and process, made when it is first asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from unified_ckpt.core.keywords import check_options
from unified_ckpt.errors import OptionError, StorageError
from unified_ckpt.runtime.objects.store import ObjectStore
from unified_ckpt.storage_options import StorageOptions

SCHEMES = ("s3", "gs")
URL_FORMS = " or ".join(f"{scheme}://bucket/prefix" for scheme in SCHEMES)  # for messages

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<bucket>[^/]*)(?P<prefix>.*)", re.DOTALL
)
_options: dict[str, StorageOptions] = {}  # by the URL of a bucket, as all of these
_clients: dict[str, ObjectStore] = {}
_registered: dict[str, ObjectStore] = {}


def is_bucket_url(path: str) -> bool:
    """Return whether a path is the URL of a bucket, or of a prefix in one."""
    return path.partition("://")[0] in SCHEMES and "://" in path


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of a bucket, and the prefix without "/" at its ends.

    Empty segments are dropped. OptionError for a URL that names no bucket, or has keys or relative
    segments.
    """
    match = _URL.fullmatch(url)
    scheme = match["scheme"] if match else ""
    if scheme not in SCHEMES or match is None:
        raise StorageError(f"{url}: got no URL of an object store, expected {URL_FORMS}")
    if "@" in match["bucket"]:  # errors and logs show URLs
        raise OptionError(
            f"{scheme}://…: got keys in a URL, expected {scheme}://bucket/prefix; pass "
            "storage_options"
        )
    if not match["bucket"]:
        raise OptionError(f"{url}: got no bucket, expected {scheme}://bucket/prefix")
    segments = [segment for segment in match["prefix"].split("/") if segment]
    if {".", ".."} & set(segments):
        raise OptionError(f"{url}: got a relative segment, expected a prefix without . and ..")
    return f"{scheme}://{match['bucket']}", "/".join(segments)


def bucket_of(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a URL's bucket, and the prefix without "/" at its ends.

    No request is sent. StorageError for another scheme, MissingPackageError without the SDK.
    """
    bucket, prefix = split_url(url)
    store = _registered.get(bucket) or _clients.get(bucket)
    if store is None:
        from unified_ckpt.runtime.objects.s3 import S3Store  # imports the SDK

        client = S3Store(bucket, _options.get(bucket, StorageOptions()))
        store = _clients.setdefault(bucket, cast("ObjectStore", client))
    return store, prefix


def set_storage_options(url: str, options: StorageOptions | None) -> None:
    """Reach the bucket of a URL by these options, in this process; None changes nothing.

    A client with other options is replaced; who holds it uses it on.
    """
    bucket, _ = split_url(url)
    if options is not None and options != _options.get(bucket):
        _options[bucket] = options
        _clients.pop(bucket, None)


def use_storage_options(paths: Iterable[str], options: StorageOptions | None) -> None:
    """Use these options for the buckets of those paths that are URLs, as `set_storage_options`.

    TypeError unless they are None or StorageOptions.
    """
    check_options(options, StorageOptions, "storage_options")
    for path in filter(is_bucket_url, paths):
        set_storage_options(path, options)


def register(url: str, store: ObjectStore | None) -> None:
    """Use this store for a bucket instead of a client, in this process; None ends this."""
    bucket, _ = split_url(url)
    if store is None:
        _registered.pop(bucket, None)
    else:
        _registered[bucket] = store

"""Which store serves the URLs of a bucket."""

from __future__ import annotations

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects.store import ObjectStore

_SCHEMES = ("s3://", "gs://")
_STORES: dict[str, ObjectStore] = {}


def is_bucket_url(path: str) -> bool:
    """Return whether a path is a URL that this library reads and writes."""
    return path.startswith(_SCHEMES)


def register(url: str, store: ObjectStore) -> None:
    """Serve the URLs of a bucket by a store."""
    _STORES[url] = store


def bucket_of(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a URL's bucket, and the prefix of its keys."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    bucket_url = f"{scheme}://{bucket}"
    if bucket_url not in _STORES:
        raise StorageError(f"{bucket_url}: no store serves this bucket")
    return _STORES[bucket_url], prefix

"""Copies of local checkpoint folders in a bucket, as a save to the bucket leaves them."""

from __future__ import annotations

from pathlib import Path

from tests.support.objects.memory import MemoryStore
from unified_ckpt.format.manifest import encode_manifest, parse_manifest
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.runtime.objects.store import multipart_etag


def copy_to_bucket(folder: Path, store: MemoryStore, prefix: str) -> None:
    """Upload each file, and the manifest with their ETags, if there is one."""
    etags: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MANIFEST:
            etags[path.name] = upload(store, f"{prefix}/{path.name}", path.read_bytes())
    if (folder / MANIFEST).exists():
        manifest = parse_manifest((folder / MANIFEST).read_bytes(), file=MANIFEST)
        body = encode_manifest(
            manifest.model_copy(update={"etags": etags, "url": f"{store.url}/{prefix}"})
        )
        store.put(f"{prefix}/{MANIFEST}", body)


def upload(store: MemoryStore, key: str, body: bytes) -> str:
    """Upload an object in one part."""
    upload_id = store.begin(key)
    etags = [store.put_part(key, upload_id, 1, [memoryview(body)])]
    assert store.complete(key, upload_id, etags) == multipart_etag(etags)
    return multipart_etag(etags)

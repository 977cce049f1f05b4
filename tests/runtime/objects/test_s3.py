"""What only the client of S3 does: processes, bodies, and what its requests look like."""

from __future__ import annotations

import hashlib
import multiprocessing

from unified_ckpt.runtime.objects.options import StorageOptions
from unified_ckpt.runtime.objects.s3 import S3Store


def test_a_forked_process_has_connections_of_its_own(moto: StorageOptions) -> None:
    """A process and its child put parts of one upload by one client."""
    store, key = S3Store("s3://bucket", moto), "fork/k"
    upload_id = store.begin(key)

    def put_second() -> None:
        store.put_part(key, upload_id, 2, [memoryview(b"child")])

    child = multiprocessing.get_context("fork").Process(target=put_second)
    child.start()
    first = store.put_part(key, upload_id, 1, [memoryview(b"parent")])
    child.join(60)
    assert child.exitcode == 0
    second = hashlib.md5(b"child").hexdigest()
    store.complete(key, upload_id, [first, second])
    assert store.get(key)[0] == b"parentchild"

"""Servers for the tests of this folder, started when a test first needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.objects.servers import Swift, make_bucket, moto_server, swift_server
from unified_ckpt.storage_options import StorageOptions


@pytest.fixture(scope="session")
def moto() -> Iterator[StorageOptions]:
    """How to reach moto, which has the bucket "bucket"."""
    with moto_server() as options:
        make_bucket(options, "bucket")
        yield options


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """A running Swift, which has the bucket "bucket" and takes parts of any size."""
    with swift_server(tmp_path_factory.mktemp("swift")) as server:
        make_bucket(server.options, "bucket")
        yield server

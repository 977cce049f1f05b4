"""One launch for many cases: starting torchrun costs seconds, a case costs milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.processes.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("matrix")
    yield Matrix(root)
    shutil.rmtree(root)  # some 200 MB

"""One launch for many cases: starting torchrun costs seconds, a case costs milliseconds."""

from __future__ import annotations

import pytest
from matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))

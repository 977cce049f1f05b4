"""One launch for many cases: starting torchrun costs seconds, a case costs milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun
from tests.support.processes.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("matrix")
    yield Matrix(root)
    shutil.rmtree(root)  # some 200 MB


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the cases that `worker_two.py` has run."""
    root = tmp_path_factory.mktemp("two_ranks")
    torchrun(2, "worker_two.py", root, timeout_seconds=280)
    return root

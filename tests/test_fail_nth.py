"""The k-th request of one rank for a resource is refused, for each k until none is refused.

Each run must end on all ranks with one error that names the rank and the cause, or succeed whole.
It leaves files and targets as promised, and leaks nothing. The same call then succeeds in the same
process group, and every byte is compared.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.fail_nth import RESOURCES, FailNth
from tests.support.fail_nth_cases import OPERATIONS
from tests.support.fail_nth_runs import Mode, check_errors, refuse_each, run_in_shortage
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.comm import Comm

DEFAULT = [
    ("save to 2 folders", "memory"),
    ("save in the background on 2 ranks", "threads"),
    ("save on 2 nodes", "threads"),
    ("load", "threads"),
    ("load from 2 folders", "threads"),
]
SLOW = [
    ("save", "files"),
    ("save on 2 ranks", "memory"),
    ("save on 2 ranks", "files"),
    ("save on 2 nodes", "memory"),
    ("save in the background", "memory"),
    ("load", "memory"),
    ("load on 2 ranks", "files"),
    ("load from 2 folders", "memory"),
    ("load from 2 folders", "files"),
    ("load from 2 folders", "sockets"),
    ("load and grow", "memory"),
    ("repair", "files"),
    ("convert to DCP", "files"),
    ("save by a manager", "files"),
    ("restore by a manager", "files"),
]


def cases() -> Iterator[Any]:
    """Yield an operation, a resource, the rank, and which of its calls fails."""
    for (name, operation), requested, mode in product(OPERATIONS.items(), RESOURCES, Mode):
        last_rank, row = len(operation.nodes) - 1, (name, requested)
        for rank in sorted({0, last_rank}):
            marks: list[Any] = [pytest.mark.long]
            if rank == last_rank and mode is Mode.ONCE and row in [*DEFAULT, *SLOW]:
                marks = [pytest.mark.slow] * (row in SLOW)
            label = f"{name}-{requested}-{rank}-{mode.name}".replace(" ", "_").lower()
            yield pytest.param(*row, rank, mode, marks=marks, id=label)


@pytest.fixture
def fail_nth(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailNth]:
    from_torch = comms.from_torch

    def from_threads(group: Any) -> Comm:
        return group if isinstance(group, Comm) else from_torch(group)

    monkeypatch.setattr(comms, "from_torch", from_threads)
    with FailNth().installed() as refusing:
        yield refusing


@pytest.mark.parametrize(("name", "requested", "rank", "mode"), [*cases()])
def test_refused_request(
    tmp_path: Path, fail_nth: FailNth, name: str, requested: str, rank: int, mode: Mode
) -> None:
    counts = refuse_each(OPERATIONS[name], requested, tmp_path, fail_nth, rank=rank, mode=mode)
    print(f"{name}, {requested}: {counts.refused} refused, {counts.tolerated} of them tolerated")


@contextmanager
def few_files(allowed: int) -> Iterator[None]:
    """Let this process open so many more files in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (fd for fd in count() if not os.path.lexists(f"/proc/self/fd/{fd}"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, allowed, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "save in the background on 2 ranks", "load on 2 ranks"])
def test_limit_of_descriptors(tmp_path: Path, name: str) -> None:
    """The kernel refuses what the process opens beyond 0, 1, 2, … files, on all ranks."""
    operation, start = OPERATIONS[name], tmp_path / "start"
    start.mkdir()
    operation.prepare(start)
    for allowed in count():
        root = tmp_path / str(allowed)
        shutil.copytree(start, root)
        outcome = run_in_shortage(operation, root, few_files(allowed), Mode.LASTING)
        if not any(outcome.errors):
            break
        check_errors(operation, outcome, None)
    assert allowed > 2


def test_rows_exist() -> None:
    names = {name for name, _ in [*DEFAULT, *SLOW]}
    assert names <= OPERATIONS.keys()

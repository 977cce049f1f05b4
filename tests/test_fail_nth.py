"""The k-th request of one rank for a resource is refused, for each k until none is refused.

Each run must end on all ranks with one error that names the rank and the cause, or succeed whole.
It leaves files and targets as promised, and leaks nothing. The same call then succeeds in the same
process group, and every byte is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fail_nth import RESOURCES, FailNth
from tests.support.fail_nth_cases import OPERATIONS
from tests.support.fail_nth_runs import refuse_each
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
    """Yield an operation, a resource, the rank, and whether the group has done it once before."""
    for name, operation in OPERATIONS.items():
        for resource in RESOURCES:
            for rank in sorted({0, len(operation.nodes) - 1}, reverse=True):
                for warm in (False, True):
                    row, first = (name, resource), rank == len(operation.nodes) - 1 and not warm
                    marks: list[Any] = [] if first and row in DEFAULT else [pytest.mark.long]
                    if first and row in SLOW:
                        marks = [pytest.mark.slow]
                    label = f"{name}-{resource}-{rank}-{'warm' if warm else 'cold'}"
                    yield pytest.param(*row, rank, warm, marks=marks, id=label.replace(" ", "_"))


@pytest.fixture
def fail_nth(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailNth]:
    from_torch = comms.from_torch

    def from_threads(group: Any) -> Comm:
        return group if isinstance(group, Comm) else from_torch(group)

    monkeypatch.setattr(comms, "from_torch", from_threads)
    with FailNth().installed() as refusing:
        yield refusing


@pytest.mark.parametrize(("name", "resource", "rank", "warm"), [*cases()])
def test_refused_request(
    tmp_path: Path, fail_nth: FailNth, name: str, resource: str, rank: int, warm: bool
) -> None:
    counts = refuse_each(OPERATIONS[name], resource, tmp_path, fail_nth, rank=rank, warm=warm)
    print(f"{name}, {resource}: {counts.refused} refused, {counts.tolerated} of them tolerated")


def test_rows_exist() -> None:
    assert {name for name, _ in [*DEFAULT, *SLOW]} <= OPERATIONS.keys()

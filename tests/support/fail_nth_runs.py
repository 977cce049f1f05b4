"""Runs an operation with its k-th request refused, and checks what it leaves on every rank."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import keys_in_store, on_node
from tests.support.fail_nth import FailNth
from tests.support.harness import try_ranks
from unified_ckpt.runtime.comm.comm import Comm

SECONDS = 30.0  # of silence until a rank counts as dead
FAST = 5.0  # within which every rank must learn of a failure
CAUSES = (
    "can't allocate memory",
    "can't start new thread",
    "MemoryError",
    *map(os.strerror, (errno.EMFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)),
)


class Mode(Enum):
    """When a request is refused."""

    ONCE = "one request of the first call in a process group"
    AGAIN = "one request of the second call, which reuses plans and buffers"
    LASTING = "all requests of the first call from one on, so that cleaning up may fail too"


@dataclass
class RankCall:
    """One rank in one run of an operation. `state`: what `Operation.start` returned."""

    comm: Comm
    root: Path
    checkpointer: uc.Checkpointer
    mode: Mode = Mode.ONCE
    state: Any = None


class Operation:
    """What one user does on `nodes`, the node of each rank; it may be done again after a failure.

    `leaves_files`: a failed run leaves all files as they were. `unknown_cause`: the text of an
    error whose cause only the failing rank knows, which logs it.
    """

    nodes: Sequence[int] = (0,)
    leaves_files = True
    unknown_cause = ""

    def prepare(self, root: Path) -> None:
        """Write what the operation needs."""

    def start(self, rank: RankCall) -> Any:
        """Return what one run needs on a rank: its targets."""

    def run(self, rank: RankCall) -> None:
        """Do it."""
        raise NotImplementedError

    def check(self, rank: RankCall) -> None:
        """Check every byte after a success."""
        raise NotImplementedError

    def check_unchanged(self, rank: RankCall, error: BaseException) -> None:
        """Check the target after a failure."""


@dataclass
class Outcome:
    """What happened on all ranks in one run."""

    errors: list[BaseException | None]
    seconds: float
    keys: int


@dataclass
class Counts:
    """What was tried of one operation and resource."""

    refused: int = 0
    tolerated: int = 0


class Resources:
    """Descriptors, threads and mappings of shared memory of this process."""

    def __init__(self) -> None:
        self.counts = self._now()

    def check_equal(self) -> None:
        """Check that nothing was leaked, once ending threads are gone."""
        deadline = time.monotonic() + 3
        while any(map(int.__gt__, self._now(), self.counts)):
            gc.collect()
            if time.monotonic() > deadline:
                links = [self._link(fd) for fd in os.listdir("/proc/self/fd")]
                raise AssertionError(
                    f"leaked: got {self._now()} descriptors, threads and shared mappings, "
                    f"expected {self.counts}: {links} {threading.enumerate()}"
                )
            time.sleep(0.002)

    @staticmethod
    def _link(fd: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    @staticmethod
    def _now() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        files = len(os.listdir("/proc/self/fd"))
        return files, threading.active_count(), maps.count("memfd:unified_ckpt")


def run_in_shortage(
    operation: Operation, root: Path, shortage: AbstractContextManager[object], mode: Mode
) -> Outcome:
    """Run the operation on all ranks in a shortage, check what it leaves, then run it again."""
    before, world = read_tree(root), len(operation.nodes)
    started = ended = 0.0
    errors: list[BaseException | None] = [None] * world
    in_shortage = ExitStack()

    def begin() -> None:
        nonlocal started
        started = time.monotonic()
        in_shortage.enter_context(shortage)

    def end() -> None:
        nonlocal ended
        in_shortage.close()
        ended = time.monotonic()

    begins, ends, checked = (
        threading.Barrier(world, action, timeout=2 * SECONDS) for action in (begin, end, None)
    )

    def act(comm: Comm) -> int:
        with on_node(comm, operation.nodes) as checkpointer:
            rank = RankCall(comm, root, checkpointer, mode)
            if mode is Mode.AGAIN:
                rank.state = operation.start(rank)
                operation.run(rank)
            rank.state = operation.start(rank)
            begins.wait()
            try:
                operation.run(rank)
            except BaseException as error:
                errors[comm.rank] = error
            ends.wait()
            error = errors[comm.rank]
            if error is None and not any(errors):
                operation.check(rank)
            elif error is not None:
                operation.check_unchanged(rank, error)
            if comm.rank == 0 and any(errors) and operation.leaves_files and mode is Mode.ONCE:
                check_same_tree(before, read_tree(root))
            checked.wait()
            rank.state = operation.start(rank)
            operation.run(rank)
            operation.check(rank)
            return keys_in_store(comm) if world > 1 else 0

    with in_shortage:
        results = try_ranks(world, act, timeout_seconds=4 * SECONDS)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for failure in failures:
            failure.add_note(f"after the errors {errors}")
        raise min(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
    keys = max(int(key) for key in results if isinstance(key, int))
    return Outcome(errors, ended - started, keys)


def read_tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in sorted(root.rglob("*"))
    }


def check_same_tree(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert sorted(before) == sorted(after)
    assert [name for name in before if before[name] != after[name]] == []


def check_errors(operation: Operation, outcome: Outcome, rank: int | None) -> None:
    """Check that all ranks or none failed, soon, and that the error names the rank and cause.

    `rank`: None if any may have failed.
    """
    errors, where = [error for error in outcome.errors if error is not None], f"{outcome.errors!r}"
    assert not errors or len(errors) == len(outcome.errors), f"only some ranks failed: {where}"
    assert outcome.seconds < FAST, f"took {outcome.seconds:.1f} s: {where}"
    for error in errors:
        allowed: tuple[type[BaseException], ...] = (uc.CheckpointError,)
        if len(errors) == 1:
            allowed += (MemoryError, OSError, RuntimeError)
        assert isinstance(error, allowed), where
        text = f"{type(error).__name__}: {error}"
        causes = (*CAUSES, *filter(None, [operation.unknown_cause]))
        assert any(cause in text for cause in causes), f"no cause: {where}"
        places = ["rank "]
        if rank is not None:
            node = operation.nodes[rank]
            places = [f"rank {rank}", f"node {node}", f"node-{node}/"]
        if len(errors) > 1:
            assert any(place in text for place in places), f"the error names another rank: {where}"
    if len(errors) > 1:
        assert len({str(error) for error in errors}) == 1, where


def refuse_each(
    operation: Operation,
    resource: str,
    tmp_path: Path,
    fail_nth: FailNth,
    *,
    rank: int = 0,
    mode: Mode = Mode.ONCE,
) -> Counts:
    """Refuse request 0, 1, 2, … of a rank, one per run, until none is refused."""
    start, counts = tmp_path / "start", Counts()
    if not start.exists():
        start.mkdir()
        operation.prepare(start)
    index, keys = -1, 0  # the first run refuses nothing
    while True:
        root = tmp_path / f"{resource}-{index}"
        shutil.copytree(start, root, symlinks=True)
        gc.collect()
        resources = Resources()
        shortage = fail_nth.refusing(resource, rank, index, lasts=mode is Mode.LASTING)
        outcome = run_in_shortage(operation, root, shortage, mode)
        refused = fail_nth.refused
        try:
            check_errors(operation, outcome, rank)
        except AssertionError as error:
            error.add_note(f"request {index} was refused: {refused}")
            raise
        if index < 0:
            assert not any(outcome.errors), outcome.errors
            keys = outcome.keys
            if not fail_nth.count:
                return counts
        elif refused:
            counts.refused += 1
            counts.tolerated += not any(outcome.errors)
            assert outcome.keys <= keys + 12, f"{outcome.keys} keys, {keys} without a failure"
        else:
            return counts
        outcome.errors = []
        resources.check_equal()
        shutil.rmtree(root)
        index += 1

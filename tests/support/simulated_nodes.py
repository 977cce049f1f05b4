"""Nodes as folders: thread ranks that are told which node they are on, each with a place of
its own to save to.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import unified_ckpt as uc
from tests.support.oracles import local_part, where
from tests.support.reshard_cases import Case, bits
from unified_ckpt import api
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.load import request
from unified_ckpt.engine.load.load import LoadRequest
from unified_ckpt.engine.save.request import SaveArguments, SaveRequest
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import WritePolicy
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.testing import DrawnLayout, make_checkpointer, run_ranks, try_ranks

NAME = "checkpoint-1"
SECONDS = 30.0
SAVE = uc.SaveOptions(fsync=False, timeout_seconds=SECONDS)
LOAD = uc.LoadOptions(timeout_seconds=SECONDS)
Result = TypeVar("Result")
Paths = Sequence[Path]


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `State` may be given as the model: tensors by any rule, which no Layout could name."""
    save_request, load_request = api.save_request, request.load_request

    def to_save(comm: Comm, what: SaveArguments, options: uc.SaveOptions) -> SaveRequest:
        state: Any = what.get("model")
        if not isinstance(state, FlatState):
            return save_request(comm, what, options)
        return SaveRequest(
            state,
            what.get("extra"),
            what.get("rank_extra"),
            None,
            set(),
            {},
            what.get("step"),
            what.get("metrics") or {},
            what.get("attach"),
            options,
        )

    def to_load(
        comm: Comm, folder: Any, what: Any, *, strict: bool, options: uc.LoadOptions
    ) -> LoadRequest:
        if not isinstance(what.model, FlatState):
            return load_request(comm, folder, what, strict=strict, options=options)
        return LoadRequest(
            source=folder,
            state=what.model,
            metadata=folder.metadata(),
            optimizer=None,
            layout=None,
            matched_rules=set(),
            strict=strict,
            options=options,
            extra=what.extra,
            rank_extra=what.rank_extra,
        )

    monkeypatch.setattr(api, "save_request", to_save)
    monkeypatch.setattr(request, "load_request", to_load)


@pytest.fixture
def twice(saved: Path, tmp_path: Path) -> Path:
    """What the module's `saved` has of two nodes with a copy each, to be damaged."""
    return Path(shutil.copytree(saved / "twice", tmp_path / "twice"))


@pytest.fixture
def once(saved: Path, tmp_path: Path) -> Path:
    """The same of one copy over two nodes."""
    return Path(shutil.copytree(saved / "once", tmp_path / "once"))


@contextmanager
def on_node(
    comm: Comm, nodes: Sequence[int], *, storage: Callable[[str], LocalStorage] | None = None
) -> Iterator[uc.Checkpointer]:
    """A Checkpointer of a rank on its node. `storage`: what it writes to, by the folder's path."""
    made = make_checkpointer(comm)
    made._node = f"node {nodes[comm.rank]}"
    if storage is not None:
        locate = made._locate

        def locate_storage(
            path: str | os.PathLike[str], policy: WritePolicy
        ) -> tuple[LocalStorage, str]:
            local, name = locate(path, policy)
            return storage(local.root), name

        made._locate = locate_storage  # type: ignore[method-assign]
    try:
        yield made
    finally:
        made.close()


def folder_of(root: Path, node: int) -> Path:
    return root / f"node-{node}" / NAME


def save_all(
    root: Path, nodes: Sequence[int], state: Callable[[int], Any], **what: Any
) -> list[uc.SaveReport]:
    """Each rank saves to its node's folder."""

    def act(comm: Comm) -> uc.SaveReport:
        with on_node(comm, nodes) as made:
            return made.save(
                folder_of(root, nodes[comm.rank]),
                model=state(comm.rank),
                **{"options": SAVE, **what},
            )

    return run_ranks(len(nodes), act)


def save_case(case: Case, root: Path, nodes: Sequence[int], **what: Any) -> list[uc.SaveReport]:
    return save_all(root, nodes, case.state, **what)


def load_case(
    case: Case,
    wanted: DrawnLayout,
    nodes: Sequence[int],
    paths: Mapping[int, Paths],
    **what: Any,
) -> list[uc.LoadReport | BaseException]:
    """Loads from the folders of each node, and compares every byte of the ranks that got
    through.
    """

    def act(comm: Comm) -> uc.LoadReport:
        state = case.target(wanted, comm.rank)
        with on_node(comm, nodes) as made:
            report = made.load(
                list(paths[nodes[comm.rank]]), model=state, **{"options": LOAD, **what}
            )
        for part in state.tensors:
            oracle = local_part(case.arrays[part.decl.key], part.decl.sharding, comm.rank)
            assert bits(part.local) == oracle.tobytes(), (comm.rank, part.decl)
        return report

    return try_ranks(wanted.world, act)


def keys_in_store(comm: Comm) -> int:
    """Collective. How many keys the ranks have in their store when each has deleted what it can, on
    rank 0; 0 elsewhere.
    """
    with counting(comm):
        return int(comm._store.num_keys()) if comm.rank == 0 else 0


@contextmanager
def counting(comm: Comm) -> Iterator[None]:
    """Collective. Every rank has deleted what it can of its keys, and waits until rank 0 has left
    the block.
    """
    meeting = comm.begin_collective("count", cached=False, timeout_seconds=SECONDS)
    meeting.collect("tidy", b"1", dst=0, ranks=range(comm.world))
    if comm.rank == 0:
        yield
        meeting.put("counted", b"1")
    else:
        meeting.get("counted", sender=0)
        yield


class Held:
    """What this process holds that may not grow: threads and open files."""

    def __init__(self) -> None:
        self.threads, self.files = self._now()

    def no_more(self) -> None:
        """Nothing is held that was not at first, once threads that are about to end are gone."""
        bound, deadline = (self.threads, self.files), time.monotonic() + SECONDS
        while any(now > most for now, most in zip(self._now(), bound, strict=True)):
            assert time.monotonic() < deadline, (
                f"{self._now()} threads and open files; needed at most {bound}"
            )
            time.sleep(0.01)

    @staticmethod
    def _now() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))


def fine(found: Sequence[Result | BaseException]) -> list[Result]:
    """What all ranks returned."""
    results: list[Result] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results


def gaps(case: Case, nodes: Sequence[int], there: Sequence[int]) -> tuple[list[Key], list[Key]]:
    """Tensors of which the nodes `there` have a part only, and those of which they have nothing;
    by what their ranks held.
    """
    parts, unknown = [], []
    for one in case.saved.tensors:
        mask = np.zeros(one.decl.spec.shape, dtype=bool)
        holders = [rank for rank in one.ranks if nodes[rank] in there]
        boxes = [
            box for rank in holders for box, _ in one.decl.sharding.boxes(rank, one.decl.spec.shape)
        ]
        for box in boxes:
            mask[where(box)] = True
        if mask.size == 0 and holders:
            continue
        if not mask.any():
            unknown.append(one.decl.key)
        elif not mask.all():
            parts.append(one.decl.key)
    return parts, unknown

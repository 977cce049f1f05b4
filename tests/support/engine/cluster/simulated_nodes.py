"""Nodes as folders: thread ranks with an assigned node, each saving to its node's folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.reshard_cases import Case, bits
from tests.support.equality import check_equal
from tests.support.harness import DrawnLayout, make_checkpointer, run_ranks, try_ranks
from tests.support.oracles import local_part, where
from unified_ckpt import session
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.load import request
from unified_ckpt.engine.load.load import LoadRequest
from unified_ckpt.engine.load.placement import place_metadata
from unified_ckpt.engine.save.request import SaveArguments, SaveRequest
from unified_ckpt.engine.source.protocol import ReadPolicy
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import WritePolicy
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.placements import make_resolver

NAME = "checkpoint-1"
SECONDS = 30.0
SAVE = uc.SaveOptions(fsync=False, timeout_seconds=SECONDS)
LOAD = uc.LoadOptions(timeout_seconds=SECONDS)
Result = TypeVar("Result")
Paths = Sequence[Path]


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a `FlatState` as the model: tensors with shardings that no Layout can describe."""
    save_request, load_request = session.save_request, request.load_request

    def to_save(comm: Comm, arguments: SaveArguments, options: uc.SaveOptions) -> SaveRequest:
        state: Any = arguments.get("model")
        if not isinstance(state, FlatState):
            return save_request(comm, arguments, options)
        return SaveRequest(
            state,
            arguments.get("extra"),
            arguments.get("rank_extra"),
            None,
            set(),
            {},
            arguments.get("step"),
            arguments.get("metrics") or {},
            arguments.get("attach"),
            options,
        )

    def to_load(
        comm: Comm,
        folder: Any,
        arguments: Any,
        *,
        options: uc.LoadOptions,
        policy: ReadPolicy,
    ) -> LoadRequest:
        if not isinstance(arguments["model"], FlatState):
            return load_request(comm, folder, arguments, options=options, policy=policy)
        state = arguments["model"]
        return LoadRequest(
            source=folder,
            state=state,
            placed=place_metadata(comm, folder, state, make_resolver(comm, None), options),
            optimizer=None,
            layout=None,
            matched_rules=set(),
            strict=arguments.get("strict", True),
            options=options,
            policy=policy,
            extra=arguments.get("extra"),
            rank_extra=arguments.get("rank_extra"),
        )

    monkeypatch.setattr(session, "save_request", to_save)
    monkeypatch.setattr(request, "load_request", to_load)


@pytest.fixture
def twice(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage of the module's `saved` folders of two nodes with a replica each."""
    return Path(shutil.copytree(saved / "twice", tmp_path / "twice"))


@pytest.fixture
def once(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage of the module's `saved` folders of two nodes with one replica in all."""
    return Path(shutil.copytree(saved / "once", tmp_path / "once"))


@contextmanager
def on_node(
    comm: Comm, nodes: Sequence[int], *, storage: Callable[[str], LocalStorage] | None = None
) -> Iterator[uc.Checkpointer]:
    """A Checkpointer of a rank on its node. `storage`: makes its storage from a folder's path."""
    checkpointer = make_checkpointer(comm, node=f"node {nodes[comm.rank]}")
    if storage is not None:
        locate = checkpointer.session.locate

        def locate_storage(
            path: str | os.PathLike[str], policy: WritePolicy
        ) -> tuple[LocalStorage, str]:
            local, name = locate(path, policy)
            made = storage(local.root)
            made.fsync = local.fsync
            return made, name

        checkpointer.session.locate = locate_storage  # type: ignore[method-assign]
    try:
        yield checkpointer
    finally:
        checkpointer.close()


class CloseToOpenStorage(LocalStorage):
    """A folder of a network file system, where nobody finds a file before its writer closes it."""

    def size(self, name: str) -> int | None:
        path = os.path.realpath(self.path(name))
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # another thread closes it
                is_same = os.readlink(f"/proc/self/fd/{fd}") == path
                if is_same and fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                    return None
        return super().size(name)


def folder_of(root: Path, node: int) -> Path:
    return root / f"node-{node}" / NAME


def save_all(
    root: Path,
    nodes: Sequence[int],
    state: Callable[[int], Any],
    *,
    rank_extra: Callable[[int], object] = lambda _: None,
    **arguments: Any,
) -> list[uc.SaveReport]:
    """Save on every rank to its node's folder."""

    def act(comm: Comm) -> uc.SaveReport:
        with on_node(comm, nodes) as checkpointer:
            return checkpointer.save(
                folder_of(root, nodes[comm.rank]),
                model=state(comm.rank),
                rank_extra=rank_extra(comm.rank),
                **{"options": SAVE, **arguments},
            )

    return run_ranks(len(nodes), act)


@dataclass(frozen=True)
class NodeState:
    """Tensors cut over the ranks. `cuts`: the dim of each cut; ranks have the others whole."""

    full: Mapping[str, torch.Tensor]
    cuts: Mapping[str, int]

    def local(
        self, rank: int, world: int, *, copies: int = 1, step: int = 0
    ) -> dict[str, torch.Tensor]:
        """What a rank has at a step; each copy of the tensors is on world / copies ranks."""
        size = world // copies
        return {
            name: (whole + step).chunk(size, self.cuts[name])[rank % size].clone()
            if name in self.cuts
            else whole + step
            for name, whole in self.full.items()
        }

    def layout(self, world: int, *, copies: int = 1) -> uc.Layout:
        return uc.Layout(
            mesh={"rep": copies, "dp": world // copies},
            rules={name: {"dp": dim} for name, dim in self.cuts.items()},
            shapes={name: tuple(self.full[name].shape) for name in self.cuts},
        )

    def save(
        self,
        root: Path,
        nodes: Sequence[int],
        *,
        copies: int = 1,
        step: int | None = None,
        **arguments: Any,
    ) -> list[uc.SaveReport]:
        def state(rank: int) -> dict[str, torch.Tensor]:
            return self.local(rank, len(nodes), copies=copies, step=step or 0)

        layout = self.layout(len(nodes), copies=copies)
        return save_all(root, nodes, state, layout=layout, step=step, **arguments)

    def load(
        self,
        root: Path,
        nodes: Sequence[int],
        *,
        copies: int = 1,
        rank_extra: Callable[[int], object] | None = None,
        **options: Any,
    ) -> list[uc.LoadReport | BaseException]:
        """Load in the layout of the save; check every byte on ranks that succeed."""

        def act(comm: Comm) -> uc.LoadReport:
            start = self.local(comm.rank, comm.world, copies=copies)
            target = {name: torch.full_like(tensor, -1) for name, tensor in start.items()}
            more = {} if rank_extra is None else {"rank_extra": rank_extra(comm.rank)}
            with on_node(comm, nodes) as checkpointer:
                report = checkpointer.load(
                    folder_of(root, nodes[comm.rank]),
                    model=target,
                    layout=self.layout(comm.world, copies=copies),
                    options=LOAD.model_copy(update=options),
                    **more,
                )
            right = self.local(comm.rank, comm.world, copies=copies, step=report.step or 0)
            check_equal(target, right, comm.rank)
            return report

        return try_ranks(len(nodes), act)


def save_case(
    case: Case, root: Path, nodes: Sequence[int], **arguments: Any
) -> list[uc.SaveReport]:
    return save_all(root, nodes, case.state, **arguments)


def load_case(
    case: Case,
    layout: DrawnLayout,
    nodes: Sequence[int],
    paths: Mapping[int, Paths],
    **arguments: Any,
) -> list[uc.LoadReport | BaseException]:
    """Load from each node's folders, and compare every byte of the ranks that succeed."""

    def act(comm: Comm) -> uc.LoadReport:
        state = case.target(layout, comm.rank)
        with on_node(comm, nodes) as checkpointer:
            report = checkpointer.load(
                list(paths[nodes[comm.rank]]), model=state, **{"options": LOAD, **arguments}
            )
        for part in state.tensors:
            oracle = local_part(case.arrays[part.decl.key], part.decl.sharding, comm.rank)
            assert bits(part.local) == oracle.tobytes(), (comm.rank, part.decl)
        return report

    return try_ranks(layout.world, act)


def keys_in_store(comm: Comm) -> int:
    """Collective. Rank 0 returns the number of keys in the store after every rank has deleted its
    own; the others return 0.
    """
    with counting(comm):
        return int(comm._store.num_keys()) if comm.rank == 0 else 0


@contextmanager
def counting(comm: Comm) -> Iterator[None]:
    """Collective. Every rank deletes its keys, and waits until rank 0 leaves the block."""
    meeting = comm.begin_collective("count", cached=False, timeout_seconds=SECONDS)
    comm.delete_stale_keys(meeting)  # those that no wait was long enough to delete
    meeting.collect("tidy", b"1", dst=0, ranks=range(comm.world))
    if comm.rank == 0:
        yield
        meeting.put("counted", b"1")
    else:
        meeting.get("counted")
        yield


class ResourceUsage:
    """Threads and open files of this process, which may not grow."""

    def __init__(self) -> None:
        self.threads, self.files = self._now()

    def no_more(self) -> None:
        """Check that nothing has grown, once ending threads are gone."""
        bound, deadline = (self.threads, self.files), time.monotonic() + SECONDS
        while any(now > most for now, most in zip(self._now(), bound, strict=True)):
            assert time.monotonic() < deadline, (
                f"{self._now()} threads and open files; needed at most {bound}"
            )
            time.sleep(0.01)

    @staticmethod
    def _now() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))


def fine(outcomes: Sequence[Result | BaseException]) -> list[Result]:
    """Return the results of all ranks; raise the first error."""
    results: list[Result] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def gaps(case: Case, nodes: Sequence[int], present: Sequence[int]) -> tuple[list[Key], list[Key]]:
    """Tensors that the nodes `present` hold in part, and tensors they do not hold at all, from the
    ranks' shardings.
    """
    parts, unknown = [], []
    for tensor in case.saved.tensors:
        mask = np.zeros(tensor.decl.spec.shape, dtype=bool)
        holders = [rank for rank in tensor.ranks if nodes[rank] in present]
        boxes = [
            box
            for rank in holders
            for box, _ in tensor.decl.sharding.boxes(rank, tensor.decl.spec.shape)
        ]
        for box in boxes:
            mask[where(box)] = True
        if mask.size == 0 and holders:
            continue
        if not mask.any():
            unknown.append(tensor.decl.key)
        elif not mask.all():
            parts.append(tensor.decl.key)
    return parts, unknown

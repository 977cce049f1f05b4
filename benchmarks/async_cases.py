"""The ways to save in the background, each at its best settings, and the limit: a copy.

Nothing here is timed. A way begins a save, during which training stands still, reports whether it
is done, and ends it. `rate` throttles its storage.
"""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import floors
import peers
import torch
import torch.distributed as dist
from common import State, check_equal, locals_of
from torch import nn
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

Rate = float | None  # bytes a second of each rank's storage; None: not throttled


@dataclass(frozen=True, slots=True)
class Way:
    """One way to save.

    `begin` returns what the other functions take. In lazy ways, `wait` is what the optimizer's step
    waits for.
    """

    name: str
    begin: Callable[[Rate], Any]
    done: Callable[[Any], bool]
    end: Callable[[Any], object]
    check: Callable[[], object]
    folder: Path | None
    wait: Callable[[Any], object] | None = None
    close: Callable[[], object] = lambda: None
    columns: Callable[[], Mapping[str, object]] = dict
    settings: Mapping[str, object] = field(default_factory=dict)


# ---- slow storage


class SlowFile(io.FileIO):
    """Writes as slowly as a storage of `rate`."""

    def __init__(self, path: str | os.PathLike[str], rate: float) -> None:
        super().__init__(path, "w")
        self._rate = rate

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        time.sleep(count / self._rate)
        return count


class SlowFileSystem(FileSystem):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as opened:
                yield opened
            return
        with io.BufferedWriter(SlowFile(path, self._rate)) as stream:
            yield stream


def dcp_writer(folder: Path, rate: Rate) -> FileSystemWriter:
    writer = FileSystemWriter(folder)
    if rate is not None:
        writer.fs = SlowFileSystem(rate)
    return writer


class SlowUnified:
    """Throttles all writes of unified_ckpt from `begin` to `end`, also those in the background."""

    def __init__(self) -> None:
        from unified_ckpt.runtime.storage.storage import LocalStorage

        self._storage, self._write = LocalStorage, LocalStorage.write_at

    def begin(self, rate: Rate) -> None:
        def write_at(storage: Any, name: str, start: int, buffers: Sequence[Any]) -> None:
            self._write(storage, name, start, buffers)
            if rate is not None:
                time.sleep(sum(map(len, buffers)) / rate)

        self._storage.write_at = write_at  # type: ignore[method-assign,assignment]

    def end(self) -> None:
        self._storage.write_at = self._write  # type: ignore[method-assign]


# ---- the limit


def owned(state: State, kind: str) -> list[torch.Tensor]:
    """uint8 views of the bytes that this rank writes: its own, or an even share of replicas."""
    views = [local.view(-1).view(torch.uint8) for local in locals_of(state.tensors()).values()]
    if kind != "replica":
        return views
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [
        view[view.numel() * rank // ranks : view.numel() * (rank + 1) // ranks] for view in views
    ]


def memcpy_way(state: State, kind: str, *, threads: int = 1) -> Way:
    """A copy into touched host memory; from a GPU, a copy of each tensor into pinned memory."""
    source = owned(state, kind)
    sizes = [view.numel() for view in source]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=source[0].is_cuda).fill_(1)
    target = memory.split(sizes)

    def begin(_: Rate) -> Sequence[torch.Tensor]:
        floors.copy_in_threads(target, source, threads=threads)
        return target

    def check() -> None:
        if not all(
            torch.equal(copy, original.cpu()) for copy, original in zip(target, source, strict=True)
        ):
            raise RuntimeError("memcpy: bytes differ")

    return Way(
        "memcpy",
        begin,
        lambda _: True,
        lambda _: None,
        check,
        None,
        settings={"threads": threads, "pinned": source[0].is_cuda},
    )


# ---- unified


class Stepper(torch.optim.Optimizer):
    """An optimizer whose step runs only its hooks."""

    def step(self, closure: Any = None) -> Any:
        return closure


def as_module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that holds these parameters under their names, without copies."""
    root = nn.Module()
    for fqn, tensor in tensors.items():
        *path, name = fqn.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root


def as_optimizer(module: nn.Module, state: State) -> Stepper:
    optimizer = Stepper(module.parameters(), {})
    for fqn, parameter in module.named_parameters():
        optimizer.state[parameter] = {
            moment: state.optimizer[f"{fqn}/{moment}"] for moment in common.MOMENTS
        }
    return optimizer


def unified_way(
    scratch: Path, state: State, kind: str, *, lazy: bool, max_file_bytes: int | None
) -> Way:
    """One Checkpointer for all saves, with a module and an optimizer as in a trainer."""
    import unified_ckpt as uc

    folder = scratch / "checkpoint-1"
    checkpointer = uc.Checkpointer(options=uc.SaveOptions(max_file_bytes=max_file_bytes))
    module = as_module(state.model)
    optimizer = as_optimizer(module, state)
    slow = SlowUnified()

    def begin(rate: Rate) -> uc.PendingSave:
        slow.begin(rate)
        return checkpointer.save_async(folder, model=module, optimizer=optimizer, lazy=lazy)

    def end(pending: uc.PendingSave) -> None:
        pending.result()
        slow.end()

    return Way(
        "unified_lazy" if lazy else "unified",
        begin,
        lambda pending: pending.done(),
        end,
        partial(peers.check_merged, folder, state, kind),
        folder,
        wait=(lambda _: optimizer.step()) if lazy else None,
        close=checkpointer.close,
        columns=lambda: {"kept_bytes": checkpointer.staging_nbytes},
        settings={"checkpointer": "reused"},
    )


# ---- torch.distributed.checkpoint


def end_daemon() -> None:
    """End DCP's process, which DCP keeps in a global."""
    _async_process_executor._CHECKPOINT_PROCESS = None


def daemon_columns() -> Mapping[str, object]:
    """Memory of DCP's own process, without shared memory."""
    daemon = _async_process_executor._CHECKPOINT_PROCESS
    if daemon is None:
        return {}
    lines = Path(f"/proc/{daemon._save_process.pid}/status").read_text().splitlines()
    return {
        "daemon_bytes": next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")
        )
    }


def dcp_way(
    name: str,
    scratch: Path,
    state: State,
    blank: Callable[[], State],
    group: dist.ProcessGroup,
    *,
    process: bool,
    cached: bool = False,
    lazy: bool = False,
) -> Way:
    """DCP's `async_save`.

    `cached`: a stager is reused with its memory, which the process shares. `lazy`: it copies in a
    thread. State on a GPU is copied to pinned memory without blocking;
    `cache_staged_state_dict=True` pins too, and fails without a GPU.
    """
    folder = scratch / name
    pinned = common.device_of(state).type == "cuda"
    options = StagingOptions(pinned, process, lazy, pinned)
    stager = DefaultStager(options) if cached else None
    kind_of = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD

    def begin(rate: Rate) -> Any:
        planner = DefaultSavePlanner(enable_plan_caching=True) if process else peers.planner(name)
        return async_save(
            state.tensors(),
            storage_writer=dcp_writer(folder, rate),
            planner=planner,
            process_group=group,
            async_checkpointer_type=kind_of,
            async_stager=stager,
        )

    def upload(pending: Any) -> Any:
        return pending.upload_completion if isinstance(pending, AsyncSaveResponse) else pending

    def check() -> None:
        loaded = blank()
        peers.dcp_load(folder, loaded)
        check_equal(locals_of(loaded.tensors()), locals_of(state.tensors()), where=name)

    return Way(
        name,
        begin,
        lambda pending: bool(upload(pending).done()),
        lambda pending: upload(pending).result(),
        check,
        folder,
        wait=(lambda pending: pending.staging_completion.result()) if lazy else None,
        close=stager.close if stager is not None else lambda: None,
        columns=daemon_columns if process else dict,
        settings={
            "stager": "kept" if cached else "new each time",
            "pinned": cached and pinned,
            "threads": 1,
            "plan_cache": True,
        },
    )


# ---- torch.save in a thread


def torch_save_way(scratch: Path, state: State, kind: str) -> Way:
    """A copy into reused memory, then `torch.save` and fsync in a thread; rank 0 saves replicas.

    Without the copy, the file would hold what later steps write to the tensors.
    """
    folder, parts = scratch / "torch_save", {"model": state.model, "optimizer": state.optimizer}
    saves = kind != "replica" or dist.get_rank() == 0
    staged: dict[str, dict[str, torch.Tensor]] = {}

    def write(rate: Rate) -> None:
        for part, tensors in staged.items():
            path = peers.shard_path(folder, part, "pt")
            if rate is None:
                torch.save(tensors, path)
            else:
                with io.BufferedWriter(SlowFile(path, rate)) as file:
                    torch.save(tensors, file)
            common.sync_path(path)
        common.sync_path(folder)

    def begin(rate: Rate) -> threading.Thread:
        thread = threading.Thread(target=write, args=(rate,))
        if saves:
            folder.mkdir(exist_ok=True)
            for part, tensors in parts.items():
                copies = staged.setdefault(part, {})
                for name, local in locals_of(tensors).items():
                    copies[name] = copies[name].copy_(local) if name in copies else local.clone()
            thread.start()
        return thread

    def end(thread: threading.Thread) -> None:
        if saves:
            thread.join()

    def check() -> None:
        if saves:
            check_equal(
                peers.read_shards(folder, suffix="pt"),
                locals_of(state.tensors()),
                where="torch_save",
            )

    return Way(
        "torch_save",
        begin,
        lambda thread: not thread.is_alive(),
        end,
        check,
        folder if saves else None,
        settings={"clone": "kept"},
    )


# ---- torch_checkpointing


def torch_checkpointing_way(scratch: Path, state: State, *, lazy: bool) -> Way:
    """A thread copies, and another process writes. With `lazy`, the step waits for the copy."""
    name = "torch_checkpointing_lazy" if lazy else "torch_checkpointing"
    folder, manager = scratch / name, peers.torch_checkpointing_manager(background=True)

    def wait(_: object) -> None:
        with manager.lock():
            pass

    def begin(_: Rate) -> Any:
        pending = manager.save(str(folder), peers.shard_payload(state))
        if not lazy:
            wait(pending)
        return pending

    def end(pending: Any) -> None:
        pending.result()
        peers.sync_shards(folder)

    return Way(
        name,
        begin,
        lambda pending: bool(pending.done()),
        end,
        partial(peers.torch_checkpointing_check, folder, state, manager),
        folder,
        wait=wait if lazy else None,
        close=manager.close,
    )


# ---- all of them


def ways(
    scratch: Path, state: State, kind: str, blank: Callable[[], State], *, max_file_bytes: int
) -> dict[str, Callable[[], Way]]:
    """The ways by name, in the order of a round.

    Each is created on demand, because each holds memory of its own. `blank` creates a state to load
    into.
    """
    # DCP's thread uses this group while the training uses its own
    group = dist.new_group(backend="gloo")
    dcp = partial(dcp_way, scratch=scratch, state=state, blank=blank, group=group)
    unified = partial(unified_way, scratch, state, kind, max_file_bytes=max_file_bytes)
    return {
        "memcpy": partial(memcpy_way, state, kind),
        "unified": partial(unified, lazy=False),
        "unified_lazy": partial(unified, lazy=True),
        "dcp_thread": partial(dcp, "dcp_thread", process=False),
        "dcp_thread_cached": partial(dcp, "dcp_thread_cached", process=False, cached=True),
        "dcp_thread_lazy": partial(dcp, "dcp_thread_lazy", process=False, cached=True, lazy=True),
        "dcp_process": partial(dcp, "dcp_process", process=True),
        "dcp_process_cached": partial(dcp, "dcp_process_cached", process=True, cached=True),
        "dcp_process_lazy": partial(dcp, "dcp_process_lazy", process=True, cached=True, lazy=True),
        "torch_save": partial(torch_save_way, scratch, state, kind),
        **{
            way: partial(torch_checkpointing_way, scratch, state, lazy=way.endswith("lazy"))
            for way in ("torch_checkpointing", "torch_checkpointing_lazy")
            if peers.has_torch_checkpointing()
        },
    }

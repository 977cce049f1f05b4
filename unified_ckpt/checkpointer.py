"""Saves and loads of one set of ranks, with what is kept from one call for the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from unified_ckpt.core.keywords import (
    check_type,
    checked_path,
    checked_paths,
    options_or_default,
    show_keywords,
)
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.load.load import load as _load
from unified_ckpt.engine.load.report import LoadReport, log_unused
from unified_ckpt.engine.load.request import LoadArguments, try_load_request
from unified_ckpt.engine.nodes.discover import OpenRequest
from unified_ckpt.engine.repair.across_nodes import Reports, repair_across_nodes
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.pending import PendingSave, lazy_error
from unified_ckpt.engine.save.planned_save import SaveCache, SaveCall
from unified_ckpt.engine.save.probe_topology import Topologies
from unified_ckpt.engine.save.request import (
    CapturedState,
    SaveArguments,
    SaveRequest,
    StateArguments,
    capture,
    save_request,
)
from unified_ckpt.engine.save.save import begin_save
from unified_ckpt.engine.save.save import save as _save
from unified_ckpt.engine.source.protocol import ReadPolicy
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import result_or_error
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.storage import (
    LocalStorage,
    absolute_path,
    ensure_parent,
)
from unified_ckpt.runtime.storage.write_calls import BACKGROUND, FOREGROUND, WritePolicy
from unified_ckpt.runtime.torch_state.optimizer_wrappers import unwrap_optimizer
from unified_ckpt.runtime.torch_state.optimizers import stepped_optimizers
from unified_ckpt.sources import wrap_in_views
from unified_ckpt.sources.huggingface.hub_names import in_model_names
from unified_ckpt.sources.open import open_on_all_ranks

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer

Path = str | os.PathLike[str]


class Checkpointer:
    """Saves and loads of one set of ranks, which keeps the plan and buffers between calls.

    `root`: the directory of relative paths, None for the working directory.
    `group`: the ranks that make every call, None for all. A single process needs no group. Threads
    that call at once need a group each, even of equal ranks.
    `options`: the default for saves.
    `node`: the name of this node, for ranks on one machine that cannot share memory.

    Use it as a context manager, or call `close` to release the buffers.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        options: SaveOptions | None = None,
        node: str | None = None,
    ) -> None:
        self._root = absolute_path(checked_path(root, "root")) if root is not None else ""
        check_type(node, str, "node")
        self._group, self._node = group, node
        self._options = options_or_default(options, SaveOptions)
        self._topologies: Topologies | None = None  # of the process group, from the first call on
        self._cache = SaveCache()
        self._pending: PendingSave | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without plans and buffers."""
        root, group, options, node = self._root or None, self._group, self._options, self._node
        return partial(type(self), root, group=group, options=options, node=node), ()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the save in flight, and release the buffers and the plan.

        Later calls create them again. Raises the error of that save if no call has raised it yet.
        """
        try:
            self.wait()
        finally:
            if self._pending is None:  # an interrupted wait leaves the buffers to the thread
                self._release()

    def _release(self) -> None:
        self._cache.close()
        if self._topologies is not None:
            self._topologies.close()
        self._cache, self._topologies = SaveCache(), None

    @show_keywords(SaveArguments)
    def save(self, path: Path, **arguments: Unpack[SaveArguments]) -> SaveReport:
        """Save like `uc.save`, with the plan and buffers of this object. Every rank must call it.

        `options`: overrides the options of this Checkpointer. Waits for an earlier `save_async` and
        raises its error.
        """
        self.wait()
        with gc_paused:
            return _save(self._save_call(path, arguments, FOREGROUND))

    @show_keywords(SaveArguments)
    def save_async(
        self,
        path: Path,
        *,
        lazy: bool = False,
        after_commit: Callable[[SaveReport], object] | None = None,
        **arguments: Unpack[SaveArguments],
    ) -> PendingSave:
        """Save like `save`, but return once this rank's bytes are copied. A thread writes them.

        `lazy`: the thread copies parameters and optimizer state during the next forward and
        backward pass, and the optimizer's step waits for it. Until `staged()`, nothing else may
        change them or make a collective call of this Checkpointer.
        `after_commit`: called in the thread of every rank after the commit. The thread also calls
        `attach`.

        One save is in flight at a time: this call waits for an earlier one, see `idle`. Errors in
        the thread are raised by `PendingSave.result`, or by the next call of this Checkpointer.
        """
        return self._start_async(path, arguments, lazy=lazy, after_commit=after_commit, on_end=None)

    def _start_async(
        self,
        path: Path,
        arguments: SaveArguments,
        *,
        lazy: bool,
        after_commit: Callable[[SaveReport], object] | None,
        on_end: Callable[[BaseException | None], object] | None,
    ) -> PendingSave:
        self.wait()
        optimizers: list[Optimizer] = []
        if lazy:
            owners = (arguments.get("optimizer"), arguments.get("master_weights"))
            stepped = [opt for owner in owners for opt in stepped_optimizers(owner)]
            by_id = {id(opt): opt for opt in map(unwrap_optimizer, stepped)}
            optimizers = list(by_id.values())
        with gc_paused:
            call = self._save_call(
                path, arguments, BACKGROUND, lazy_optimizers=optimizers if lazy else None
            )
            background_save = begin_save(call, lazy=lazy)
            self._pending = PendingSave(after_commit=after_commit, on_end=on_end)
            self._pending.start(background_save, lazy_optimizers=optimizers)
            return self._pending

    def _capture(self, state: StateArguments) -> CapturedState:
        """Return what `save` would store now, for `_save_captured`. Tensors are not copied."""
        with gc_paused:
            arguments = SaveArguments(**state, step=None, metrics=None)
            return capture(arguments)

    def _save_captured(self, path: Path, captured: CapturedState) -> SaveReport:
        """Collective. Save what was captured. CheckpointError, and nothing is saved, if a tensor
        has changed since, or changes before its bytes are written.
        """
        self.wait()
        with gc_paused:
            return _save(self._save_call(path, captured.arguments, FOREGROUND, captured=captured))

    def idle(self) -> bool:
        """Return whether no rank has a save in flight, equal on all ranks. Collective."""
        busy = self._pending is not None and not self._pending.done()
        timeout = self._options.timeout_seconds
        collective = self._get_comm().begin_collective("idle", timeout_seconds=timeout, busy=busy)
        return not collective.any_busy

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its error if no call has raised it yet."""
        pending = self._pending
        if pending is not None:
            pending.wait()  # an interrupted wait leaves the save in flight, with its buffers
            self._pending = None
            pending.raise_pending()

    @property
    def staging_nbytes(self) -> int:
        """Host memory held for snapshots, replicas and tiles, in bytes."""
        cache = self._cache
        tile_nbytes = cache.tile_buffers.nbytes + cache.load_tile_buffers.nbytes
        return cache.snapshot_memory.nbytes + cache.replica_memory.nbytes + tile_nbytes

    @show_keywords(LoadArguments, strict=True)
    def load(
        self,
        path: Path | Sequence[Path] | SourceView,
        **arguments: Unpack[LoadArguments],
    ) -> LoadReport:
        """Load like `uc.load`, with the buffers of this object. Every rank must call it.

        Waits for an earlier `save_async` and raises its error.
        """
        return self._load(path, arguments)

    def _load(
        self,
        path: Path | Sequence[Path] | SourceView,
        arguments: LoadArguments,
        *,
        restores_values: bool = False,
    ) -> LoadReport:
        """Load like `load`. `restores_values`: the caller restores objects from the report's
        `extra` and `rank_extra`, so no message names those that the load has no target for.
        """
        self.wait()
        options = arguments.get("options") or LoadOptions()
        comm, timeout = self._get_comm(), options.timeout_seconds
        # Open until the end: other ranks may read this node's folder while this rank reads theirs.
        policy = ReadPolicy(options.verify, options.share_reads)
        with ExitStack() as resources:
            if isinstance(path, SourceView):
                label = f"an opened checkpoint ({path.format})"
                topology = self._resolve_ranks(f"load of {label}", timeout)
                source = result_or_error(partial(wrap_in_views, path.source, options.source))
            else:
                paths = checked_paths(path)
                label = ", ".join(paths)
                topology = self._resolve_ranks(f"load of {label}", timeout)
                resolved = [absolute_path(folder, root=self._root) for folder in paths]
                opening = OpenRequest(label, resolved, topology, timeout, policy)
                source = open_on_all_ranks(comm, opening, options.source, resources)
            if not isinstance(source, Exception):
                source = result_or_error(partial(in_model_names, source, arguments.get("model")))
            with gc_paused:
                request = try_load_request(comm, source, arguments, options=options, policy=policy)
            report = _load(
                comm,
                label,
                request,
                self._cache.load_tile_buffers,
                topology=topology,
                timeout_seconds=timeout,
            )
        if comm.rank == 0:
            resumes = arguments.get("optimizer") is not None and options.parts is None
            log_unused(label, report, resumes=resumes, restores_values=restores_values)
        return report

    def repair(self, path: Path) -> Reports:
        """Repair each node's folder of a checkpoint from the folders of the other nodes.

        Every rank must call it. Returns the reports of all nodes.
        """
        self.wait()
        resolved, timeout = self._resolve(path), self._options.timeout_seconds
        topology = self._resolve_ranks(f"repair of {resolved}", timeout)
        return repair_across_nodes(self._get_comm(), resolved, topology, timeout_seconds=timeout)

    def _save_call(
        self,
        path: Path,
        arguments: SaveArguments,
        write_policy: WritePolicy,
        *,
        captured: CapturedState | None = None,
        lazy_optimizers: Sequence[Optimizer] | None = None,
    ) -> SaveCall:
        """Build the request and resolve the topology. An error in the request goes to all ranks.

        `captured`: the state that the arguments are of, if it was captured.
        `lazy_optimizers`: the optimizers whose step waits for a lazy save.
        """
        comm = self._get_comm()
        options = arguments.get("options") or self._options
        storage, name = LocalStorage("/"), ""
        request: SaveRequest | Exception
        try:
            storage, name = self._locate(path, write_policy)
            request = save_request(comm, arguments, options)
            is_managed_path = isinstance(path, ManagedPath)
            request = replace(request, is_managed_path=is_managed_path, captured=captured)
            if lazy_optimizers is not None:
                request = lazy_error(lazy_optimizers) or request
        except Exception as error:
            request = error
        connections = self._get_topologies().resolve_folder(
            storage,
            name,
            failure=request if isinstance(request, Exception) else None,
            write_alignment=options.write_alignment,
            timeout_seconds=options.timeout_seconds,
        )
        return SaveCall(
            comm, storage, name, request, self._cache, options.timeout_seconds, connections
        )

    def _resolve_ranks(self, operation: str, timeout_seconds: float) -> Topology:
        """Collective at the first load. Return the topology of the ranks."""
        return self._get_topologies().resolve_ranks(operation, timeout_seconds=timeout_seconds)

    def _get_topologies(self) -> Topologies:
        in_flight = self._pending is not None and not self._pending.done()
        if not in_flight and not self._is_group_current():
            self._release()  # an elastic or in-process restart: plans and connections are void
        if self._topologies is None:
            self._topologies = Topologies(comms.from_torch(self._group), self._node)
        return self._topologies

    def _is_group_current(self) -> bool:
        """Return whether the process group is still that of the first call."""
        return self._topologies is None or self._topologies.is_current()

    def _get_comm(self) -> comms.Comm:
        return self._get_topologies().comm

    def _resolve(self, path: Path) -> str:
        return absolute_path(checked_path(path), root=self._root)

    def _locate(self, path: Path, write_policy: WritePolicy) -> tuple[LocalStorage, str]:
        parent, name = ensure_parent(self._resolve(path))
        return LocalStorage(parent, write_policy=write_policy), name

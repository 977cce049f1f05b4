"""What lives between the calls of one set of ranks: `Comm`, topology, plan, buffers, pending save.

This is all of the surface between the engine and those who drive it: `Checkpointer`, the manager,
the trainers and the commands. They call these names, and no private one of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unified_ckpt.core.keywords import checked_path, checked_paths
from unified_ckpt.engine.cluster.discover import OpenRequest
from unified_ckpt.engine.cluster.save_scope import join_scope
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.load.load import load
from unified_ckpt.engine.load.report import LoadReport, log_unused
from unified_ckpt.engine.load.request import LoadArguments, try_load_request
from unified_ckpt.engine.repair.across_nodes import Reports, repair_across_nodes
from unified_ckpt.engine.save.background.background_save import begin_save
from unified_ckpt.engine.save.background.pending import PendingSave, lazy_error
from unified_ckpt.engine.save.call import Buffers, SaveCall
from unified_ckpt.engine.save.layout.layout_plan import LayoutCache
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import (
    CapturedState,
    SaveArguments,
    SaveRequest,
    StateArguments,
    capture,
    save_request,
)
from unified_ckpt.engine.save.save import save
from unified_ckpt.engine.source.protocol import ReadPolicy, Source
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import result_or_error
from unified_ckpt.foreign.huggingface.hub_names import in_model_names
from unified_ckpt.foreign.open import wrap_in_views
from unified_ckpt.foreign.open_on_ranks import open_on_all_ranks
from unified_ckpt.options import LoadOptions, SaveOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.connections import Connections
from unified_ckpt.runtime.exchange.probe_topology import Topologies
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.objects.registry import use_storage_options
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.roots import open_parent
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BACKGROUND, FOREGROUND, WritePolicy
from unified_ckpt.runtime.torch_state.optimizer_wrappers import unwrap_optimizer
from unified_ckpt.runtime.torch_state.optimizers import stepped_optimizers
from unified_ckpt.storage_options import StorageOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer

Path = str | os.PathLike[str]


class Session:
    """The calls of one set of ranks, and what one call leaves for the next.

    `root`: the absolute directory of relative paths, "" for the working directory. `group`: the
    ranks that make every call, None for all. `options`: the default for saves. `node`: the name of
    this node, or None for the kernel's identity. `storage_options`: for all buckets of its calls.
    `alone`: this process makes every call by itself, also in a process group.

    Every method that is called collective must be called by every rank.
    """

    def __init__(
        self,
        root: str = "",
        *,
        group: dist.ProcessGroup | None = None,
        options: SaveOptions | None = None,
        node: str | None = None,
        storage_options: StorageOptions | None = None,
        alone: bool = False,
    ) -> None:
        self.root, self.group, self.node, self._alone = root, group, node, alone
        self._storage_options = storage_options
        use_storage_options([root], storage_options)
        self.options = options or SaveOptions()
        self.pending: PendingSave | None = None  # the save in flight, or the last one
        self.topologies: Topologies | None = None  # of the process group, from the first call on
        self.buffers, self._layouts = Buffers(), LayoutCache()
        self._connections: Connections | None = None  # of the last save

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without plans, buffers and credentials."""
        group, options, node, alone = self.group, self.options, self.node, self._alone
        make = partial(type(self), group=group, options=options, node=node, alone=alone)
        return make, (self.root,)

    @property
    def comm(self) -> comms.Comm:
        """The ranks. A new `Comm` after the process group was replaced."""
        return self._current_topologies().comm

    @property
    def node_count(self) -> int | None:
        """The number of nodes of the ranks; None before the first save or load."""
        return self._current_topologies().node_count

    def is_group_current(self) -> bool:
        """Return whether the process group is still that of the first call."""
        return self.topologies is None or self.topologies.is_current()

    def resolve_ranks(self, operation: str, *, timeout_seconds: float) -> Topology:
        """Return the topology of the ranks. Collective at the first call."""
        topologies = self._current_topologies()
        return topologies.resolve_ranks(operation, timeout_seconds=timeout_seconds)

    def is_folder_leader(self, folder: str) -> bool:
        """Return whether this rank is the first of those that see an absolute folder."""
        return self._current_topologies().is_folder_leader(folder)

    def save(
        self,
        path: Path,
        arguments: SaveArguments,
        *,
        state: Callable[[], StateArguments] | None = None,
    ) -> SaveReport:
        """Collective. Wait for the save in flight and raise its error; then save like `uc.save`.

        `state`: returns further arguments. Every rank raises an error of it.
        """
        self.wait()
        with gc_paused:
            return save(self._save_call(path, arguments, FOREGROUND, state=state))

    def capture(self, state: StateArguments) -> CapturedState:
        """Return what `save` would store now, for `save_captured`. Tensors are not copied.

        Every rank calls.
        """
        with gc_paused:
            return capture(SaveArguments(**state, step=None, metrics=None))

    def save_captured(self, path: Path, captured: CapturedState) -> SaveReport:
        """Collective. Save what was captured. CheckpointError, and nothing is saved, if a tensor
        has changed since, or changes before its bytes are written.
        """
        self.wait()
        with gc_paused:
            return save(self._save_call(path, captured.arguments, FOREGROUND, captured=captured))

    def begin_save(
        self,
        path: Path,
        arguments: SaveArguments,
        *,
        lazy: bool = False,
        after_commit: Callable[[SaveReport], object] | None = None,
        on_end: Callable[[BaseException | None], object] | None = None,
        state: Callable[[], StateArguments] | None = None,
    ) -> PendingSave:
        """Collective. Save like `Checkpointer.save_async`. `state`: as of `save`.

        `on_end`: called in the thread with the save's error, before the save counts as done.
        """
        self.wait()
        optimizers: list[Optimizer] = []
        if lazy:
            owners = (arguments.get("optimizer"), arguments.get("master_weights"))
            stepped = [opt for owner in owners for opt in stepped_optimizers(owner)]
            by_id = {id(opt): opt for opt in map(unwrap_optimizer, stepped)}
            optimizers = list(by_id.values())
        with gc_paused:
            call = self._save_call(
                path,
                arguments,
                BACKGROUND,
                state=state,
                lazy_optimizers=optimizers if lazy else None,
            )
            background_save = begin_save(call, lazy=lazy)
            self.pending = PendingSave(after_commit=after_commit, on_end=on_end)
            self.pending.start(background_save, lazy_optimizers=optimizers)
            return self.pending

    def is_idle(self) -> bool:
        """Collective. Return whether no rank has a save in flight, equal on all ranks."""
        busy = self._is_in_flight()
        timeout = self.options.timeout_seconds
        collective = self.comm.begin_collective("idle", timeout_seconds=timeout, busy=busy)
        return not collective.any_busy

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its error if no call has raised it yet."""
        pending = self.pending
        if pending is not None:
            pending.wait()  # an interrupted wait leaves the save in flight, with its buffers
            self.pending = None
            pending.raise_pending()

    def load(
        self,
        path: Path | Sequence[Path] | SourceView,
        arguments: LoadArguments,
        *,
        restores_values: bool = False,
        targets: Callable[[Source], LoadArguments] | None = None,
    ) -> LoadReport:
        """Collective. Wait for the save in flight and raise its error; then load like `uc.load`.

        `restores_values`: the caller restores objects from the report's `extra` and `rank_extra`,
        so no message names those that the load has no target for. `targets`: returns further
        arguments for the opened checkpoint, of which it may leave out what it does not need. Every
        rank raises an error of it.
        """
        self.wait()
        options = arguments.get("options") or LoadOptions()
        comm, timeout = self.comm, options.timeout_seconds
        # Open until the end: other ranks may read this node's folder while this rank reads theirs.
        policy = ReadPolicy(options.verify, options.share_reads)
        with ExitStack() as resources:
            if isinstance(path, SourceView):
                label = f"an opened checkpoint ({path.format})"
                topology = self.resolve_ranks(f"load of {label}", timeout_seconds=timeout)
                source = result_or_error(partial(wrap_in_views, path.source, options.source))
            else:
                paths = checked_paths(path)
                label = ", ".join(paths)
                topology = self.resolve_ranks(f"load of {label}", timeout_seconds=timeout)
                resolved = list(map(self._resolve, paths))
                opening = OpenRequest(label, resolved, topology, timeout, policy)
                source = open_on_all_ranks(comm, opening, options.source, resources)
            if not isinstance(source, Exception):
                source = result_or_error(partial(in_model_names, source, arguments.get("model")))
            with gc_paused:
                request = try_load_request(
                    comm, source, arguments, options=options, policy=policy, targets=targets
                )
            report = load(
                comm,
                label,
                request,
                self.buffers.load_tiles,
                topology=topology,
                timeout_seconds=timeout,
            )
        if comm.rank == 0:
            resumes = arguments.get("optimizer") is not None and options.parts is None
            log_unused(label, report, resumes=resumes, restores_values=restores_values)
        return report

    def repair(self, path: Path) -> Reports:
        """Collective. Repair each node's folder of a checkpoint from those of the other nodes."""
        self.wait()
        resolved, timeout = self._resolve(path), self.options.timeout_seconds
        topology = self.resolve_ranks(f"repair of {resolved}", timeout_seconds=timeout)
        return repair_across_nodes(self.comm, resolved, topology, timeout_seconds=timeout)

    def close(self) -> None:
        """Wait for the save in flight, and release the buffers and the plan.

        Later calls create them again. Raises the error of that save if no call has raised it yet.
        """
        try:
            self.wait()
        finally:
            if self.pending is None:  # an interrupted wait leaves the buffers to the thread
                self.release()

    def release(self) -> None:
        """Release the buffers and the plan. No save may be in flight."""
        self.buffers.close()
        if self.topologies is not None:
            self.topologies.close()
        self.buffers, self._layouts = Buffers(), LayoutCache()
        self.topologies = self._connections = None

    def _save_call(
        self,
        path: Path,
        arguments: SaveArguments,
        write_policy: WritePolicy,
        *,
        captured: CapturedState | None = None,
        state: Callable[[], StateArguments] | None = None,
        lazy_optimizers: Sequence[Optimizer] | None = None,
    ) -> SaveCall:
        """Build the request and resolve the topology. An error in the request goes to all ranks.

        `captured`: the state that the arguments are of, if it was captured. `state`: as of `save`.
        `lazy_optimizers`: the optimizers whose step waits for a lazy save.
        """
        comm = self.comm
        options = arguments.get("options") or self.options
        storage: Storage = LocalStorage("/")
        name = ""  # of a failed request, which writes nothing
        request: SaveRequest | Exception
        try:
            storage, name = self.locate(path, replace(write_policy, fsync=options.fsync))
            if state is not None:
                arguments = {**arguments, **state()}
            request = save_request(comm, arguments, options)
            request = replace(
                request,
                is_managed_path=isinstance(path, ManagedPath),
                shares_folder=isinstance(path, ManagedPath) and path.shares_folder,
                captured=captured,
            )
            if lazy_optimizers is not None:
                request = lazy_error(lazy_optimizers) or request
        except Exception as error:
            request = error
        connections = self._current_topologies().resolve_folder(
            storage,
            name,
            failure=request if isinstance(request, Exception) else None,
            write_alignment=options.write_alignment,
            timeout_seconds=options.timeout_seconds,
        )
        if self._connections != connections:
            self.buffers.reconnect(connections)
            self._layouts, self._connections = LayoutCache(), connections
        return SaveCall(
            comm,
            storage,
            name,
            request,
            self._layouts,
            self.buffers,
            options.timeout_seconds,
            connections,
            join_scope,
        )

    def locate(self, path: Path, write_policy: WritePolicy) -> tuple[Storage, str]:
        """Return the storage of the folder that holds a checkpoint, and the checkpoint's name."""
        return open_parent(self._resolve(path), write_policy=write_policy)

    def _current_topologies(self) -> Topologies:
        if not self._is_in_flight() and not self.is_group_current():
            self.release()  # an elastic or in-process restart: plans and connections are void
        if self.topologies is None:
            comm = comms.single_process() if self._alone else comms.from_torch(self.group)
            self.topologies = Topologies(comm, self.node)
        return self.topologies

    def _is_in_flight(self) -> bool:
        return self.pending is not None and not self.pending.done()

    def _resolve(self, path: Path) -> str:
        resolved = absolute_path(checked_path(path), root=self.root)
        use_storage_options([resolved], self._storage_options)
        return resolved

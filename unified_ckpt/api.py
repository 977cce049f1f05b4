"""The public calls: a `Checkpointer` that keeps what repeated saves share, and its one-shot forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.folder.commit import StepPath
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report, verify_with_replicas
from unified_ckpt.engine.load.load import LoadReport
from unified_ckpt.engine.load.load import load as _load
from unified_ckpt.engine.load.request import Targets, try_load_request
from unified_ckpt.engine.nodes.discover import gather_node_numbers
from unified_ckpt.engine.repair.across_nodes import Reports, repair_across_nodes
from unified_ckpt.engine.save.job import SaveCache, SaveReport
from unified_ckpt.engine.save.pending import PendingSave, lazy_error
from unified_ckpt.engine.save.probe_topology import ProbeResult, Topology, connect_topology, probe_topology
from unified_ckpt.engine.save.request import SaveArguments, SaveRequest, save_request
from unified_ckpt.engine.save.save import begin_save
from unified_ckpt.engine.save.save import save as _save
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import IntegrityError
from unified_ckpt.options import LoadOptions, SaveOptions, SourceOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.topology import node_id
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.storage import LocalStorage, absolute_path, ensure_parent
from unified_ckpt.runtime.storage.write_calls import BACKGROUND, FOREGROUND, WritePolicy
from unified_ckpt.runtime.torch_state.modules import Model
from unified_ckpt.runtime.torch_state.optimizers import Optimizers, as_optimizers
from unified_ckpt.sources import open_source
from unified_ckpt.sources.open import open_on_all_ranks, try_apply_options

if TYPE_CHECKING:
    import torch.distributed as dist

Path = str | os.PathLike[str]


class Checkpointer:
    """Saves and loads for one set of ranks. Keeps the plan of the last layout, the buffers and the
    save in flight between calls.

    `root`: what relative paths are relative to. `group`: the ranks of every call, None for all; a
    single process needs no group.
    `options`: for saves, where a call gives none. `machine`: a name that the ranks which share
    memory with this one have, where it is not the kernel that they run under. A context manager;
    `close` gives the buffers back.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        options: SaveOptions | None = None,
        node: str | None = None,
    ) -> None:
        self._root = absolute_path(os.fspath(root)) if root is not None else ""
        self._group, self._options, self._node = group, options or SaveOptions(), node
        self._comm: comms.Comm | None = None
        self._topologies: dict[
            str, tuple[ProbeResult, Topology | None]
        ] = {}  # by the folder that saves are made in
        self._nodes: list[int] | None = None
        self._cache = SaveCache()
        self._pending: PendingSave | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in flight, gives back the buffers and forgets the plan. The next call
        makes them anew.

        Raises the error of that save, if it has not been told yet.
        """
        try:
            self.wait()
        finally:
            if self._pending is None:  # not so where the wait was interrupted: the thread uses them
                self._release()

    def _release(self) -> None:
        self._cache.close()
        if self._comm is not None:
            self._comm.detach()
        for topology in {
            id(topology): topology for _, topology in self._topologies.values()
        }.values():
            if topology is not None:
                topology.close()
        self._cache, self._comm, self._topologies, self._nodes = SaveCache(), None, {}, None

    def save(
        self,
        path: Path,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        master_weights: Optimizers | None = None,
        parts: Mapping[str, Model] | None = None,
        extra: Any = None,
        rank_extra: Any = None,
        layout: Layout | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        attach: Callable[[str], object] | None = None,
        options: SaveOptions | None = None,
    ) -> SaveReport:
        """Writes a checkpoint folder. Every rank calls; each tensor of every part is whole in the
        folder.

        `model`: a module, a list of them, or {fqn: tensor}. `optimizer`: one with the model's
        parameters, a list, or {"fqn/state": tensor}; a parameter of a further part goes by
        "part.fqn". `master_weights`: a dict, or an optimizer that holds them. `parts`: further
        parts by name. `extra`: rank 0's is stored; `rank_extra`: every rank's. `metrics`: rank 0's,
        finite numbers by name, for people and retention. `attach(folder)` adds files on rank 0
        before the commit.

        Objects in `extra` and `rank_extra` give their `state_dict()`, which every rank calls.
        Raises LayoutError, MismatchError, FormatError, StorageError or RankError, the same on every
        rank; what was at `path` is then as it was. Waits for an earlier `save_async`, and raises
        its error.
        """
        self.wait()
        arguments = SaveArguments(
            model,
            optimizer,
            master_weights,
            parts,
            extra,
            rank_extra,
            layout,
            step,
            metrics,
            attach,
        )
        comm, options = self._get_comm(), options or self._options
        with gc_paused:
            storage, name, request = self._build_request(path, arguments, options, FOREGROUND)
            topology = self._resolve_topology(storage, name, request, options)
            return _save(
                comm,
                storage,
                name,
                request,
                self._cache,
                timeout_seconds=options.timeout_seconds,
                topology=topology,
            )

    def save_async(
        self,
        path: Path,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        master_weights: Optimizers | None = None,
        parts: Mapping[str, Model] | None = None,
        extra: Any = None,
        rank_extra: Any = None,
        layout: Layout | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        attach: Callable[[str], object] | None = None,
        options: SaveOptions | None = None,
        lazy: bool = False,
        after_commit: Callable[[SaveReport], object] | None = None,
    ) -> PendingSave:
        """`save` that returns once this rank's bytes are copied; a thread writes and commits them.
        Same arguments and errors.

        Errors of the thread come with the next call of this Checkpointer, or with
        `PendingSave.result`. One save is in flight: this call waits for an earlier one; `idle`
        tells all ranks alike whether it would. `attach` and `after_commit` run in the thread; the
        latter on every rank, once the checkpoint is there.

        `lazy`: parameters and optimizer state are copied by the thread, beside the next forward and
        backward pass; a step of the optimizer waits for it. Nothing else may change them, or call a
        collective of this Checkpointer, until `staged()`.
        """
        self.wait()
        arguments = SaveArguments(
            model,
            optimizer,
            master_weights,
            parts,
            extra,
            rank_extra,
            layout,
            step,
            metrics,
            attach,
        )
        with gc_paused:
            return self._start_async(
                path, arguments, options=options, lazy=lazy, after_commit=after_commit, on_end=None
            )

    def _start_async(
        self,
        path: Path,
        arguments: SaveArguments,
        *,
        options: SaveOptions | None,
        lazy: bool,
        after_commit: Callable[[SaveReport], object] | None,
        on_end: Callable[[], object] | None,
    ) -> PendingSave:
        options = options or self._options
        storage, name, request = self._build_request(path, arguments, options, BACKGROUND)
        lazy_optimizers = (
            list(
                {
                    id(optimizer): optimizer
                    for optimizer in (
                        *as_optimizers(arguments.optimizer),
                        *as_optimizers(arguments.master_weights),
                    )
                }.values()
            )
            if lazy
            else []
        )
        if lazy and isinstance(request, SaveRequest):
            request = lazy_error(lazy_optimizers) or request
        comm, timeout = self._get_comm(), options.timeout_seconds
        topology = self._resolve_topology(storage, name, request, options)
        staged = begin_save(
            comm,
            storage,
            name,
            request,
            self._cache,
            timeout_seconds=timeout,
            lazy=lazy,
            topology=topology,
        )
        self._pending = PendingSave(after_commit=after_commit, on_end=on_end)
        self._pending.start(staged, lazy_optimizers=lazy_optimizers)
        return self._pending

    def idle(self) -> bool:
        """Whether no rank has a save in flight; the same answer on every rank, all of which call.
        Waits for none.
        """
        busy = self._pending is not None and not self._pending.done()
        return (
            not self._get_comm()
            .begin_collective(
                "idle", cached=False, timeout_seconds=self._options.timeout_seconds, busy=busy
            )
            .any_busy
        )

    def wait(self) -> None:
        """Returns once no save is in flight. Raises the error of the one that was, if it has not
        been told yet.
        """
        pending = self._pending
        if pending is not None:
            # interrupted here, it is still in flight: its buffers are no other save's
            pending.wait()
            self._pending = None
            pending.raise_pending()

    @property
    def staging_nbytes(self) -> int:
        """Host memory held for snapshots and for what ranks put together."""
        return (
            self._cache.snapshot_memory.nbytes
            + self._cache.tile_buffers.nbytes
            + self._cache.load_tile_buffers.nbytes
        )

    def load(
        self,
        path: Path | Sequence[Path] | SourceView,
        *,
        model: Model | None = None,
        optimizer: Optimizers | None = None,
        master_weights: Optimizers | None = None,
        parts: Mapping[str, Model] | None = None,
        extra: Any = None,
        rank_extra: Any = None,
        layout: Layout | None = None,
        strict: bool = True,
        options: LoadOptions | None = None,
    ) -> LoadReport:
        """Fills state of any shape in place from a checkpoint: a unified folder, a Hugging Face
        model folder, or DCP's. Every rank calls.

        Optimizer state that does not exist yet is made from the checkpoint, never by a step; what
        the checkpoint lacks is cleared.
        `extra`, `rank_extra`: objects with `load_state_dict`, in dicts and lists as they were
        saved; they are filled after the tensors.

        Ranks on several machines may have a folder each, whole or in fragments: what is not on a
        machine's disk comes from the others, once it is sure that a complete copy of one save is
        there between them. `path` may name several folders of this machine, or be a checkpoint that
        every rank has opened, which stays open.

        Raises MismatchError listing every name, shape and dtype that differs, IncompleteError,
        IntegrityError or FormatError; before the first byte is written. But for an IntegrityError
        of a digest, and a CheckpointError of an object that does not take its state: these say that
        the target is unusable.
        """
        self.wait()
        options = options or LoadOptions()
        comm, timeout = self._get_comm(), options.timeout_seconds
        paths = (
            []
            if isinstance(path, SourceView)
            else [path]
            if isinstance(path, (str, os.PathLike))
            else list(path)
        )
        title = (
            f"an opened checkpoint ({path.format})"
            if isinstance(path, SourceView)
            else ", ".join(os.fspath(item) for item in paths)
        )
        with (
            ExitStack() as exit_stack
        ):  # to the end: others may read this machine's folder as long as this rank reads theirs
            nodes = self._resolve_nodes(f"load of {title}", timeout)
            opened = (
                try_apply_options(path.source, options.source)
                if isinstance(path, SourceView)
                else None
            )
            source = opened or open_on_all_ranks(
                comm, title, [self._resolve(item) for item in paths], nodes, exit_stack, options
            )
            targets = Targets(model, optimizer, master_weights, parts, layout, extra, rank_extra)
            with gc_paused:
                request = try_load_request(comm, source, targets, strict=strict, options=options)
            return _load(
                comm,
                title,
                request,
                self._cache.load_tile_buffers,
                timeout_seconds=timeout,
                nodes=nodes,
            )

    def _resolve_nodes(self, title: str, timeout_seconds: float) -> list[int]:
        """Collective at the first load. The machine of each rank."""
        if self._nodes is None:
            comm, node = self._get_comm(), self._node or node_id()
            self._nodes = (
                gather_node_numbers(comm, title, node, timeout_seconds=timeout_seconds)
                if comm.world > 1
                else [0]
            )
        return self._nodes

    def _build_request(
        self, path: Path, arguments: SaveArguments, options: SaveOptions, write_policy: WritePolicy
    ) -> tuple[LocalStorage, str, SaveRequest | Exception]:
        """Where to, and what; or the error that this rank met, to be told to every rank in the
        save.
        """
        storage, name = LocalStorage("/"), ""
        try:
            storage, name = self._locate(path, write_policy)
            return (
                storage,
                name,
                replace(
                    save_request(self._get_comm(), arguments, options),
                    is_step_path=isinstance(path, StepPath),
                ),
            )
        except Exception as error:
            return storage, name, error

    def _resolve_topology(
        self,
        storage: LocalStorage,
        name: str,
        request: SaveRequest | Exception,
        options: SaveOptions,
    ) -> Topology | None:
        """Collective at the first save to a folder. The ranks that see it with this one, None where
        all do, on one machine.
        """
        comm, timeout = self._get_comm(), options.timeout_seconds
        if comm.world == 1:
            return None
        if storage.root not in self._topologies:
            title, terms = f"save to {storage.path(name)}", {"first to this folder": True}
            collective = comm.begin_collective(
                title, cached=False, timeout_seconds=timeout, arguments=terms
            )
            with collective.step("machines"):
                if isinstance(request, Exception):
                    raise request
                probe = probe_topology(
                    collective,
                    storage,
                    self._node or node_id(),
                    block_nbytes=options.write_alignment,
                )
            with collective.step("land"):
                same_probe = [
                    topology for other, topology in self._topologies.values() if other == probe
                ]
                self._topologies[storage.root] = (
                    probe,
                    same_probe[0]
                    if same_probe
                    else connect_topology(comm, probe, timeout_seconds=timeout),
                )
        return self._topologies[storage.root][1]

    def _get_comm(self) -> comms.Comm:
        if self._comm is None:
            self._comm = comms.from_torch(self._group)
        return self._comm

    def _resolve(self, path: Path) -> str:
        return absolute_path(os.fspath(path), root=self._root)

    def _locate(self, path: Path, write_policy: WritePolicy) -> tuple[LocalStorage, str]:
        parent, name = ensure_parent(self._resolve(path))
        return LocalStorage(parent, write_policy=write_policy), name

    def repair(self, path: Path) -> Reports:
        """Mends each machine's folder of a checkpoint from the other machines'. Every rank calls,
        and gets the reports of all machines.
        """
        self.wait()
        resolved, timeout = self._resolve(path), self._options.timeout_seconds
        return repair_across_nodes(
            self._get_comm(),
            resolved,
            self._resolve_nodes(f"repair of {resolved}", timeout),
            timeout_seconds=timeout,
        )


def save(path: Path, *, group: dist.ProcessGroup | None = None, **arguments: Any) -> SaveReport:
    """One-shot form of `Checkpointer.save`, which takes the same arguments."""
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.save(path, **arguments)


def save_async(
    path: Path, *, group: dist.ProcessGroup | None = None, **arguments: Any
) -> PendingSave:
    """One-shot form of `Checkpointer.save_async`. Its buffers go with the save: for more than one,
    a Checkpointer keeps them.
    """
    checkpointer = Checkpointer(group=group)
    options, lazy, after_commit = (
        arguments.pop("options", None),
        arguments.pop("lazy", False),
        arguments.pop("after_commit", None),
    )
    try:
        save_arguments = SaveArguments(**arguments)
        return checkpointer._start_async(
            path,
            save_arguments,
            options=options,
            lazy=lazy,
            after_commit=after_commit,
            on_end=checkpointer._release,
        )
    except BaseException:
        if checkpointer._pending is None:  # else its end does it
            checkpointer._release()
        raise


def load(
    path: Path | Sequence[Path] | SourceView,
    *,
    group: dist.ProcessGroup | None = None,
    **arguments: Any,
) -> LoadReport:
    """One-shot form of `Checkpointer.load`, which takes the same arguments."""
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.load(path, **arguments)


# uc.open, never imported bare
def open(path: Path, *, options: SourceOptions | None = None) -> SourceView:  # noqa: A001
    """A checkpoint in any format, lazily: no process group, nothing read but what is asked for.

    Raises NotFoundError, FormatError or IncompleteError.
    """
    return SourceView(open_source(os.fspath(path), options or SourceOptions()))


def verify(
    path: Path, deep: bool = False, *, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Checks that every byte is there: files, sizes, headers; with `deep` every digest. Problems
    are in the report.

    Raises NotFoundError or FormatError where there is no checkpoint to check. `progress` is called
    with bytes checked.
    """
    try:
        source = open_path(os.fspath(path), lock=True)
    except IntegrityError as error:
        return unreadable_report(absolute_path(os.fspath(path)), error, deep=deep)
    with closing(source) as folder:
        return verify_with_replicas(folder, deep=deep, progress=progress)

"""Saves and loads of one set of ranks, with what is kept from one call for the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from unified_ckpt.core.keywords import (
    check_type,
    checked_path,
    options_or_default,
    show_keywords,
)
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.repair.across_nodes import Reports
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import SaveArguments
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.session import Session
from unified_ckpt.storage_options import StorageOptions

if TYPE_CHECKING:
    import torch.distributed as dist

Path = str | os.PathLike[str]


class Checkpointer:
    """Saves and loads of one set of ranks, which keeps the plan and buffers between calls.

    `root`: the directory of relative paths, None for the working directory.
    `group`: the ranks that make every call, None for all. A single process needs no group. Threads
    that call at once need a group each, even of equal ranks.
    `options`: the default for saves.
    `node`: the name of this node, for ranks on one machine that cannot share memory.
    `storage_options`: how to reach the buckets of its calls, see StorageOptions.

    Use it as a context manager, or call `close` to release the buffers. `session` has the calls of
    libraries that save or load on behalf of their users.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        options: SaveOptions | None = None,
        node: str | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        check_type(node, str, "node")
        self.session = Session(
            absolute_path(checked_path(root, "root")) if root is not None else "",
            group=group,
            options=options_or_default(options, SaveOptions),
            node=node,
            storage_options=storage_options,
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the save in flight, and release the buffers and the plan.

        Later calls create them again. Raises the error of that save if no call has raised it yet.
        """
        self.session.close()

    @show_keywords(SaveArguments)
    def save(self, path: Path, **arguments: Unpack[SaveArguments]) -> SaveReport:
        """Save like `uc.save`, with the plan and buffers of this object. Every rank must call it.

        `options`: overrides the options of this Checkpointer. Waits for an earlier `save_async` and
        raises its error.
        """
        return self.session.save(path, arguments)

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
        return self.session.begin_save(path, arguments, lazy=lazy, after_commit=after_commit)

    def idle(self) -> bool:
        """Return whether no rank has a save in flight, equal on all ranks. Collective."""
        return self.session.is_idle()

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its error if no call has raised it yet."""
        self.session.wait()

    @property
    def staging_nbytes(self) -> int:
        """Host memory held for snapshots, replicas and tiles, in bytes."""
        return self.session.buffers.nbytes

    @show_keywords(LoadArguments, strict=True)
    def load(
        self,
        path: Path | Sequence[Path] | SourceView,
        **arguments: Unpack[LoadArguments],
    ) -> LoadReport:
        """Load like `uc.load`, with the buffers of this object. Every rank must call it.

        Waits for an earlier `save_async` and raises its error.
        """
        return self.session.load(path, arguments)

    def repair(self, path: Path) -> Reports:
        """Repair each node's folder of a checkpoint from the folders of the other nodes.

        Every rank must call it. Returns the reports of all nodes.
        """
        return self.session.repair(path)

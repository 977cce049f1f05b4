"""The public functions: one call each, with a `Checkpointer` of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Unpack

from unified_ckpt.checkpointer import Checkpointer, Path
from unified_ckpt.core.keywords import check_argument_names, show_keywords
from unified_ckpt.engine.estimate.estimate import Estimate, EstimateCall, estimate_save
from unified_ckpt.engine.estimate.state import (
    EstimateArguments,
    PredictedOptimizer,
    arguments_from_source,
    predict_arguments,
)
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report, verify_with_replicas
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.pending import PendingSave
from unified_ckpt.engine.save.request import (
    SaveArguments,
    SaveRequest,
    save_request,
)
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import IntegrityError, OptionError
from unified_ckpt.options import ManagerOptions, SaveOptions, SourceOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.storage.storage import (
    absolute_path,
    writable_path,
)
from unified_ckpt.runtime.torch_state.modules import ModelArgument
from unified_ckpt.sources import open_source

if TYPE_CHECKING:
    import torch.distributed as dist


@show_keywords(SaveArguments)
def save(
    path: Path, *, group: dist.ProcessGroup | None = None, **arguments: Unpack[SaveArguments]
) -> SaveReport:
    """Write a checkpoint folder in which every tensor is whole. Every rank calls.

    `model`: a module, a list of modules, or {fqn: tensor}.
    `optimizer`: the optimizer of the model's parameters, a list of them, or
    {"fqn/state": tensor}; a parameter of an extra part is named "part.fqn".
    `master_weights`: {fqn: tensor}, or an optimizer that holds them.
    `parts`: models of extra parts by part name.
    `extra`: any state; rank 0's is stored. `rank_extra`: any state of each rank.
    `layout`: how plain tensors are split over the ranks.
    `step`: the training step, 0 or more.
    `metrics`: finite numbers by name for people and retention; rank 0's are stored.
    `attach`: called on rank 0 with the folder before the commit, to add files.
    `options`: how to save, see SaveOptions. `group`: the ranks that call, None for all.

    Objects in `extra` and `rank_extra` are stored by their `state_dict()`, which every rank
    calls. Raises LayoutError, MismatchError, FormatError, StorageError or RankError, the same
    on every rank; whatever was at `path` is then unchanged.
    """
    check_argument_names(arguments, SaveArguments, function="save")
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.save(path, **arguments)


@show_keywords(SaveArguments)
def save_async(
    path: Path,
    *,
    group: dist.ProcessGroup | None = None,
    lazy: bool = False,
    after_commit: Callable[[SaveReport], object] | None = None,
    **arguments: Unpack[SaveArguments],
) -> PendingSave:
    """Save like `save`, but return once this rank's bytes are copied; a thread commits.

    `lazy`, `after_commit`: see `Checkpointer.save_async`, which also keeps its buffers for the next
    save. `PendingSave.result` waits for the commit and raises the thread's error.
    """
    check_argument_names(arguments, SaveArguments, function="save_async")
    checkpointer = Checkpointer(group=group)
    try:
        return checkpointer._start_async(
            path,
            arguments,
            lazy=lazy,
            after_commit=after_commit,
            on_end=lambda _: checkpointer._release(),
        )
    except BaseException:
        if checkpointer._pending is None:  # else the end of the save releases it
            checkpointer._release()
        raise


@show_keywords(LoadArguments, strict=True)
def load(
    path: Path | Sequence[Path] | SourceView,
    *,
    group: dist.ProcessGroup | None = None,
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Fill state of any shape in place from a checkpoint. Every rank calls.

    `path`: a checkpoint in any format that `uc.open` reads; several folders of this node; or a
    view that every rank has opened, which stays open. Ranks on several nodes may have a folder
    each. What a node's disk lacks comes from other nodes, once a complete copy of one save is
    known to exist.

    The targets are as in `save`. Optimizer state that does not exist yet is created from the
    checkpoint, never by a step; state that the checkpoint lacks is cleared. `extra` and
    `rank_extra`: objects with `load_state_dict`, in dicts and lists as they were saved; they
    are filled after the tensors. `strict`: every target must be in the checkpoint and the
    reverse.

    Raises MismatchError listing every name, shape and dtype that differs, IncompleteError,
    IntegrityError or FormatError before a target is modified. Two errors come later and
    mean that the target is unusable: an IntegrityError of a digest, and a CheckpointError of an
    object that rejects its state.
    """
    check_argument_names(arguments, LoadArguments, function="load")
    with Checkpointer(group=group) as checkpointer:
        return checkpointer.load(path, **arguments)


@show_keywords(EstimateArguments)
def estimate(
    model: ModelArgument | Path | SourceView | None = None,
    optimizer: PredictedOptimizer | None = None,
    *,
    root: Path | None = None,
    manager_options: ManagerOptions | None = None,
    interval_seconds: float | None = None,
    group: dist.ProcessGroup | None = None,
    **arguments: Unpack[EstimateArguments],
) -> Estimate:
    """Say what a save will write, before the run starts. Every rank calls. Writes no checkpoint.

    `model`, `optimizer`, `parts`, `layout`, `options`: as in `save`. Tensors may be on the meta
    device. An optimizer before its first step counts with the state that this step creates.
    `model`: also the path of a checkpoint or model folder, or what `uc.open` returned, whose
    parts then count. `optimizer`: also the name of a class of torch.optim, such as "adamw", which
    trains all parameters, or all floating-point tensors of a dict or a checkpoint.
    `master_weights`: also True, for float32 masters of the 16-bit tensors that are trained.

    `root`: the folder of the run. Its disk is measured: all ranks, or up to 32 of them, write and
    sync 128 MiB together, which are removed.
    `manager_options`: what is kept, and `interval_seconds`, which the argument overrides. Without
    them, one checkpoint stays while the next one is written.

    All ranks are taken to share a folder. Raises OptionError for an optimizer before its first step
    whose state cannot be predicted, StorageError if `root` cannot be measured, and the errors of
    `save` for state that cannot be saved.
    """
    check_argument_names(arguments, EstimateArguments, function="estimate")
    comm, options = comms.from_torch(group), arguments.get("options") or SaveOptions()
    request: SaveRequest | Exception
    folder = None
    try:
        if interval_seconds is not None and not 0 < interval_seconds < math.inf:
            raise OptionError(
                f"interval_seconds: got {interval_seconds!r}, expected a number above 0"
            )
        folder = None if root is None else writable_path(os.fspath(root))
        with ExitStack() as resources:
            if isinstance(model, str | os.PathLike):
                model = resources.enter_context(open(model))
            if isinstance(model, SourceView):
                model, optimizer, arguments = arguments_from_source(
                    model.source, optimizer, arguments
                )
        predicted = predict_arguments(model, optimizer, arguments)
        request = save_request(comm, predicted, options, reads_values=False)
    except Exception as error:
        request = error
    timeout = options.timeout_seconds
    return estimate_save(
        comm, EstimateCall(request, folder, manager_options, interval_seconds, timeout)
    )


# Called as uc.open; never import it bare.
def open(path: Path, *, options: SourceOptions | None = None) -> SourceView:  # noqa: A001
    """Open a checkpoint in any format lazily, without a process group: data is read when indexed.

    Raises NotFoundError, FormatError or IncompleteError.
    """
    return SourceView(open_source(os.fspath(path), options or SourceOptions()))


def verify(
    path: Path, deep: bool = False, *, progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Check that all files are there with the right sizes and headers; `deep` also checks digests.

    Problems are in the report. Raises NotFoundError or FormatError if there is no checkpoint to
    check. `progress` is called with the bytes of each check.
    """
    try:
        source = open_path(os.fspath(path), lock=True)
    except IntegrityError as error:
        return unreadable_report(absolute_path(os.fspath(path)), error, deep=deep)
    with closing(source) as folder:
        return verify_with_replicas(folder, deep=deep, progress=progress)

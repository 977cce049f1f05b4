"""The public functions: one call each, with a `Checkpointer` of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Unpack

from unified_ckpt.checkpointer import Checkpointer, Path
from unified_ckpt.core.keywords import (
    check_flag,
    check_function,
    check_options,
    checked_path,
    options_or_default,
    show_keywords,
)
from unified_ckpt.engine.cluster.verify import verify_with_replicas
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import VerifyReport, unreadable_report
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import (
    SaveArguments,
    SaveRequest,
    save_request,
)
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import IntegrityError, OptionError
from unified_ckpt.estimates.estimate import (
    Estimate,
    EstimateCall,
    check_steps,
    estimate_save,
)
from unified_ckpt.estimates.state import (
    EstimateArguments,
    PredictedOptimizer,
    arguments_from_source,
    predict_arguments,
)
from unified_ckpt.foreign.open import open_source
from unified_ckpt.options import ManagerOptions, SaveOptions, SourceOptions
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.objects.registry import use_storage_options
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.runtime.storage.roots import root_path
from unified_ckpt.runtime.torch_state.modules import ModelArgument
from unified_ckpt.session import Session
from unified_ckpt.storage_options import StorageOptions

if TYPE_CHECKING:
    import torch.distributed as dist


@show_keywords(SaveArguments)
def save(
    path: Path,
    *,
    group: dist.ProcessGroup | None = None,
    storage_options: StorageOptions | None = None,
    **arguments: Unpack[SaveArguments],
) -> SaveReport:
    """Save whole tensors from any layout to a folder. Every rank must call it.

    `path`: the folder to write, equal on all ranks; or the URL of a prefix in a bucket.
    `model`: a module, a list of modules, or {name: tensor}.
    `optimizer`: the optimizer of these parameters, a list of them, or {"name/state": tensor}.
    Parameters of an extra part are named "part.name".
    `master_weights`: {name: tensor}, or an optimizer that holds them.
    `parts`: other models by part name, such as an EMA.
    `extra`: any state. What is equal on all ranks is stored once, what differs for each rank.
    `rank_extra`: any state of each rank. Objects in both are stored by their `state_dict()`, which
    every rank calls.
    `layout`: how plain tensors are split over the ranks.
    `step`: the training step, 0 or more.
    `metrics`: finite numbers by name, stored from rank 0.
    `attach`: a function that rank 0 calls with the folder before the commit, to add files. In a
    bucket, the folder is an empty local one.
    `options`: see SaveOptions. `group`: the ranks that call, None for all.
    `storage_options`: how to reach the bucket, see StorageOptions.

    Raises the same error on every rank, and leaves `path` unchanged: LayoutError, MismatchError,
    FormatError, StorageError or RankError.
    """
    with Checkpointer(group=group, storage_options=storage_options) as checkpointer:
        return checkpointer.save(path, **arguments)


@show_keywords(SaveArguments)
def save_async(
    path: Path,
    *,
    group: dist.ProcessGroup | None = None,
    storage_options: StorageOptions | None = None,
    lazy: bool = False,
    after_commit: Callable[[SaveReport], object] | None = None,
    **arguments: Unpack[SaveArguments],
) -> PendingSave:
    """Save like `save`, but return once this rank's bytes are copied. A thread writes them.

    `lazy`, `after_commit`: see `Checkpointer.save_async`, which also keeps its buffers for the next
    save. `PendingSave.result` waits for the commit and raises errors of the thread.
    """
    session = Session(group=group, storage_options=storage_options)
    try:
        return session.begin_save(
            path,
            arguments,
            lazy=lazy,
            after_commit=after_commit,
            on_end=lambda _: session.release(),
        )
    except BaseException:
        if session.pending is None:  # else the end of the save releases it
            session.release()
        raise


@show_keywords(LoadArguments, strict=True)
def load(
    path: Path | Sequence[Path] | SourceView,
    *,
    group: dist.ProcessGroup | None = None,
    storage_options: StorageOptions | None = None,
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Load a checkpoint into state of any layout, in place. Every rank must call it.

    `path`: a checkpoint of any format that `uc.open` reads, a list of folders of one save, or the
    result of `uc.open`, which stays open. If each node has its own folder, a node gets missing
    slices from other nodes.
    `model`, `optimizer`, `master_weights`, `parts`, `layout`: the targets, as in `save`. Missing
    optimizer state is created from the checkpoint, never by a step. State that the checkpoint
    lacks is cleared.
    `extra`, `rank_extra`: objects with `load_state_dict`, in dicts and lists as they were saved.
    They are filled after the tensors.
    `strict`: the targets and the checkpoint must have the same names.
    `options`: see LoadOptions. `group`, `storage_options`: as in `save`.

    Raises MismatchError, NotFoundError, IncompleteError, IntegrityError or FormatError before it
    modifies a target. One MismatchError lists every name, shape and dtype that differs. The target
    is unusable after later errors, which say so: of bytes that cannot be read or have changed, of a
    lack of memory or threads, and of an object that rejects its state.
    """
    with Checkpointer(group=group, storage_options=storage_options) as checkpointer:
        return checkpointer.load(path, **arguments)


@show_keywords(EstimateArguments)
def estimate(
    model: ModelArgument | Path | SourceView | None = None,
    optimizer: PredictedOptimizer | None = None,
    *,
    root: Path | None = None,
    manager_options: ManagerOptions | None = None,
    interval_seconds: float | None = None,
    steps: int | range | None = None,
    group: dist.ProcessGroup | None = None,
    storage_options: StorageOptions | None = None,
    **arguments: Unpack[EstimateArguments],
) -> Estimate:
    """Predict the size and time of a save, without writing a checkpoint. Every rank must call it.

    `model`, `parts`, `layout`, `options`: as in `save`. Tensors may be on the meta device. `model`
    may also be the path of a checkpoint or model folder, or the result of `uc.open`.
    `optimizer`: as in `save`, or the name of a class of torch.optim, such as "adamw", for all
    parameters. Before its first step, the state that this step creates is included.
    `master_weights`: as in `save`, or True for float32 masters of the trained 16-bit tensors.
    `root`: the folder of the run. To measure its disk, up to 32 ranks write, sync and remove
    128 MiB there.
    `manager_options`: the rules of retention and the interval. Without them, one checkpoint stays
    while the next one is written. `interval_seconds`: overrides their interval.
    `steps`: the step at which the run ends, to estimate all of its checkpoints by the steps of
    `manager_options`. A run starts at the step of the checkpoint `model`, or at 0; else pass a
    range.
    `group`, `storage_options`: as in `save`.

    Assumes that all ranks share a folder. Raises OptionError if the state of a fresh optimizer
    cannot be predicted, StorageError if `root` cannot be measured, and the errors of `save`.
    """
    check_options(manager_options, ManagerOptions, "manager_options")
    comm, options = comms.from_torch(group), arguments.get("options") or SaveOptions()
    request: SaveRequest | Exception
    folder, run_steps = None, None
    first_step = 0
    try:
        if interval_seconds is not None and not (
            isinstance(interval_seconds, int | float) and 0 < interval_seconds < math.inf
        ):
            raise OptionError(
                f"interval_seconds: got {interval_seconds!r}, expected a number above 0"
            )
        folder = None if root is None else root_path(_reachable(root, storage_options, "root"))
        with ExitStack() as resources:
            if isinstance(model, str | os.PathLike):
                model = resources.enter_context(open(model, storage_options=storage_options))
            if isinstance(model, SourceView):
                first_step = model.source.metadata().step or 0
                model, optimizer, arguments = arguments_from_source(
                    model.source, optimizer, arguments
                )
        predicted = predict_arguments(model, optimizer, arguments)
        request = save_request(comm, predicted, options, reads_values=False)
        if steps is not None:
            run_steps = check_steps(steps, first_step, manager_options)
    except Exception as error:
        request = error
    timeout = options.timeout_seconds
    call = EstimateCall(request, folder, manager_options, interval_seconds, timeout, run_steps)
    return estimate_save(comm, call)


# Called as uc.open; never import it bare.
def open(  # noqa: A001
    path: Path,
    *,
    options: SourceOptions | None = None,
    storage_options: StorageOptions | None = None,
) -> SourceView:
    """Open a checkpoint of any format lazily, without a process group.

    `uc.open(path)["model"]["lm_head.weight"][0:1024]` reads these rows only. `options`: see
    SourceOptions. `storage_options`: as in `save`. Raises NotFoundError, FormatError,
    IntegrityError or IncompleteError.
    """
    path, options = _reachable(path, storage_options), options_or_default(options, SourceOptions)
    return SourceView(open_source(path, options))


def _reachable(path: Path, storage_options: StorageOptions | None, name: str = "path") -> str:
    """Return the path as text, and use the options for its bucket."""
    text = checked_path(path, name)
    use_storage_options([absolute_path(text)], storage_options)
    return text


def verify(
    path: Path,
    deep: bool = False,
    *,
    progress: Callable[[int], object] | None = None,
    storage_options: StorageOptions | None = None,
) -> VerifyReport:
    """Check that all files exist with the right sizes and headers; `deep` also checks digests.

    `progress`: called with the number of bytes of each check. `storage_options`: as in `save`.
    Problems are in the report. Raises NotFoundError or FormatError if there is no checkpoint at
    `path`.
    """
    check_flag(deep, "deep")
    check_function(progress, "progress")
    path = _reachable(path, storage_options)
    try:
        source = open_path(path, lock=True)
    except IntegrityError as error:
        return unreadable_report(absolute_path(path), error, deep=deep)
    with closing(source) as folder:
        return verify_with_replicas(folder, deep=deep, progress=progress)

"""`save` and `async_save` with the signatures of torch's `state_dict_saver`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint.state_dict_saver as torch_saver
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager
from torch.distributed.checkpoint.stateful import Stateful

from unified_ckpt.dcp.arguments import check_collectives, save_destination
from unified_ckpt.dcp.captured import save_arguments
from unified_ckpt.dcp.exceptions import call_as_dcp, dcp_error
from unified_ckpt.dcp.sessions import session_of
from unified_ckpt.engine.folder.if_exists import ManagedPath
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import SaveArguments, StateArguments

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.storage import StorageWriter

_LOG = logging.getLogger("unified_ckpt")
AsyncCheckpointerType = torch_saver.AsyncCheckpointerType
AsyncSaveResponse = torch_saver.AsyncSaveResponse
# Programs such as torchtune resume from the last folder that has this file. torch.distributed.
# checkpoint, which would need a pickle in it, raises its exception.
_MARKER = ".metadata"
_MARKER_TEXT = (
    "Saved by unified_ckpt.dcp; load it with unified_ckpt.dcp.load or unified_ckpt.load.\n"
)


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveReport:
    """Save a state dict to a folder of this library. Every rank of the group must call it.

    `checkpoint_id`: a path or an `s3://` or `gs://` URL; or `storage_writer`, a FileSystemWriter.
    `planner`: None or a DefaultSavePlanner. `no_dist`: this process saves by itself.

    A committed checkpoint at the path is replaced, unless the writer has `overwrite=False`. Raises
    DcpError, which is a CheckpointException too, and NotImplementedError for other arguments.
    """
    check_collectives(use_collectives)
    destination = save_destination(checkpoint_id, storage_writer, planner)
    session = session_of(process_group, no_dist=no_dist)
    return call_as_dcp(
        lambda: session.save(
            ManagedPath(destination.path, shares_folder=True),
            SaveArguments(options=destination.options, attach=_add_marker),
            state=_state(state_dict, flattens=destination.flattens),
        ),
        session,
    )


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,  # noqa: ARG001
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[SaveReport] | AsyncSaveResponse:
    """Save like `save`, but return once this rank's bytes are copied. A thread writes them.

    `async_checkpointer_type`: a thread writes in any case. `async_stager`: not used. Where it would
    stage in the background, the result is an AsyncSaveResponse, as from DCP.

    One save of a group is in flight at a time: a call waits for the one before. The Future has the
    report or the error, on every rank.
    """
    check_collectives(use_collectives)
    destination = save_destination(checkpoint_id, storage_writer, planner)
    session = session_of(process_group, no_dist=no_dist)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a save cannot be cancelled
    reports: list[SaveReport] = []

    def end(error: BaseException | None) -> None:
        if error is None:
            future.set_result(reports[0])
            return
        _LOG.error("async_save to %s failed: %s", destination.path, error)
        future.set_exception(dcp_error(error, session))

    try:
        session.begin_save(
            ManagedPath(destination.path, shares_folder=True),
            SaveArguments(options=destination.options, attach=_add_marker),
            state=_state(state_dict, flattens=destination.flattens),
            after_commit=reports.append,
            on_end=end,
        )
    except Exception as error:  # a loop that waits later goes on, as with DCP
        if not future.done():
            end(error)
    if async_stager is not None:
        warnings.warn(
            "async_stager: is not used, because unified_ckpt copies into buffers of its own; "
            "omit it",
            stacklevel=2,
        )
    if not _stages_in_background(async_stager):
        return future
    staged: Future[None] = Future()
    staged.set_result(None)
    return AsyncSaveResponse(staging_completion=staged, upload_completion=future)


def save_state_dict(
    state_dict: Mapping[str, Any],
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,  # noqa: ARG001  # no rank coordinates
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> SaveReport:
    """Save like `save`. Deprecated by torch."""
    return save(
        state_dict,
        storage_writer=storage_writer,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )


def _stages_in_background(stager: AsyncStager | None) -> bool:
    """Return whether DCP returns an AsyncSaveResponse with this stager."""
    if isinstance(stager, DefaultStager):
        return bool(stager._config.use_async_staging)
    return stager is not None and not isinstance(stager, BlockingAsyncStager)


def _add_marker(folder: str) -> None:
    """Add the file that a finished checkpoint of torch.distributed.checkpoint has."""
    Path(folder, _MARKER).write_text(_MARKER_TEXT)


def _state(state_dict: Mapping[str, Any], *, flattens: bool) -> Callable[[], StateArguments]:
    """Return a function that returns the arguments of a save of the state dict.

    It calls `state_dict` of objects, on every rank in the order of the keys.
    """

    def capture() -> StateArguments:
        states = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in sorted(state_dict.items(), key=lambda item: str(item[0]))
        }
        return save_arguments(states, flattens=flattens)

    return capture


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch_saver, name)

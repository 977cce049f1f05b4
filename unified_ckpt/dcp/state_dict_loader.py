"""`load` with the signature of torch's `state_dict_loader`."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint.state_dict_loader as torch_loader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful

from unified_ckpt.dcp.arguments import Origin, load_origin
from unified_ckpt.dcp.exceptions import call_as_dcp
from unified_ckpt.dcp.sessions import session_of
from unified_ckpt.dcp.targets import Targets
from unified_ckpt.engine.folder.later_save import is_dcp_folder
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import result_or_error
from unified_ckpt.foreign.dcp.keys import open_keys
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.storage.paths import is_url
from unified_ckpt.session import Session

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

_LOG = logging.getLogger("unified_ckpt")


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into a state dict, in place. Every rank of the group must call it.

    Reads folders of this library, of torch.distributed.checkpoint, and all that `uc.load` reads.

    Tensors are filled, and cast to their dtype. Other values are replaced, and objects get the
    filled state by `load_state_dict`, whose errors are raised as they are. Keys that only the
    checkpoint has are ignored. Raises DcpError for keys that only the state dict has, and for other
    shapes, before it changes a value. Arguments: as in `save`.
    """
    origin = load_origin(checkpoint_id, storage_reader, planner)
    session = session_of(process_group, no_dist=no_dist)
    filled = call_as_dcp(lambda: _fill(session, origin, state_dict), session)
    for key, loaded in filled.items():
        if isinstance(target := state_dict.get(key), Stateful):
            target.load_state_dict(loaded)
        else:
            state_dict[key] = loaded


def _fill(session: Session, origin: Origin, state_dict: MutableMapping[Any, Any]) -> dict[Any, Any]:
    """Return the state dict with loaded values, and the loaded state in place of each object."""
    targets = Targets(state_dict, origin)
    with ExitStack() as resources:
        report = session.load(
            _by_keys(origin.path, resources),
            LoadArguments(options=LoadOptions(cast=True)),
            restores_values=True,
            targets=targets.arguments,
        )
    targets.install(report)
    if targets.warning and session.comm.rank == 0:
        _LOG.warning("%s: %s", origin.path, targets.warning)
    return targets.state_dict


def _by_keys(path: str, resources: ExitStack) -> str | SourceView:
    """Return a folder of torch.distributed.checkpoint opened by its keys, any other path as it is.

    A folder that cannot be opened is left to the load, which raises the error on every rank.
    """
    if is_url(path):
        return path
    source = result_or_error(lambda: open_keys(path) if is_dcp_folder(path) else None)
    if source is None or isinstance(source, Exception):
        return path
    return resources.enter_context(SourceView(source))


def load_state_dict(
    state_dict: MutableMapping[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,  # noqa: ARG001  # no rank coordinates
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load like `load`. Deprecated by torch."""
    load(
        state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    state_dict: dict[str, Any] = {}
    load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=_EmptyStateDictLoadPlanner(keys=keys),  # type: ignore[no-untyped-call]
        process_group=process_group,
    )
    return state_dict


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch_loader, name)

"""Opens a checkpoint on all ranks of a load: a foreign format, or unified folders on nodes.

A rank that raised before the others begin a collective would leave them to wait for the timeout.
Errors of one rank are therefore returned, and raised where all ranks meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.nodes import discover
from unified_ckpt.engine.nodes.discover import OpenRequest
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.sources import open_source, resolve_format, wrap_in_views

_LOG = logging.getLogger("unified_ckpt")


def open_on_all_ranks(
    comm: Comm, request: OpenRequest, options: SourceOptions, resources: ExitStack
) -> Source | Exception:
    """Open a checkpoint in any format, or return this rank's error for the load to share.

    Collective if the ranks are on several nodes; all of them must see the same format. The source
    is closed with `resources`. Rank 0 logs what it leaves out.
    """
    format_name = _try_format_name(request.paths, options)
    if request.topology.spans_nodes:
        _check_one_format(comm, request, format_name)
    if isinstance(format_name, Exception):
        return format_name
    if format_name is None:
        source = discover.open_unified(comm, request, resources)
        if isinstance(source, Exception):
            return source
        return try_wrap_in_views(source, options)
    try:
        foreign_source = open_source(request.paths[0], options)
    except Exception as error:
        return error
    resources.callback(foreign_source.close)
    indexed = foreign_source.indexed
    base = foreign_source if indexed is None else indexed.without_optimizer
    left_out = base.metadata().left_out
    if left_out and comm.rank == 0:
        _LOG.warning(format_list(f"{request.label}: these entries are not read", left_out))
    return foreign_source


def _try_format_name(paths: Sequence[str], options: SourceOptions) -> str | Exception | None:
    """Return the name of the foreign format, None for unified and plain folders, or an error."""
    try:
        detected = resolve_format(paths[0], options) if len(paths) == 1 else None
    except Exception as error:
        return error
    return detected.name if detected is not None else None


def _check_one_format(
    comm: Comm, request: OpenRequest, format_name: str | Exception | None
) -> None:
    """Raise an error of any rank, or FormatError if the ranks see several formats. Collective."""
    label = request.label
    collective = comm.begin_collective(f"load of {label}", timeout_seconds=request.timeout_seconds)
    with collective.step("format"):
        if isinstance(format_name, Exception):
            raise format_name
        format_names = collective.all_gather_json("format", format_name)
        if len(set(format_names)) > 1:
            first, local = (name or "unified" for name in (format_names[0], format_name))
            raise FormatError(
                f"{label}: got format {first} on rank 0 and {local} on this rank, expected one "
                "folder; pass a path that all nodes share"
            )


def try_wrap_in_views(source: Source, options: SourceOptions) -> Source | Exception:
    """Return `wrap_in_views(source, options)`, or this rank's error for the load to share."""
    try:
        return wrap_in_views(source, options)
    except Exception as error:
        return error

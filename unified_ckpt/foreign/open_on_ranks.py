"""Opens a checkpoint on all ranks of a load: a foreign format, or unified folders on nodes.

A rank that raised before the others begin a collective would leave them to wait for the timeout.
Errors of one rank are therefore returned, and raised where all ranks meet.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.cluster import discover
from unified_ckpt.engine.cluster.discover import OpenRequest
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, result_or_error
from unified_ckpt.foreign.formats import Format
from unified_ckpt.foreign.open import open_source, resolve_format, wrap_in_views
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.comm import Comm

_LOG = logging.getLogger("unified_ckpt")


def open_on_all_ranks(
    comm: Comm, request: OpenRequest, options: SourceOptions, resources: ExitStack
) -> Source | Exception:
    """Open a checkpoint in any format, or return this rank's error for the load to share.

    Collective if the ranks are on several nodes; all of them must see the same format. The source
    is closed with `resources`. Rank 0 logs what it leaves out.
    """
    detected: Format | Exception | None = None
    if len(request.paths) == 1:
        detected = result_or_error(lambda: resolve_format(request.paths[0], options))
    if request.topology.spans_nodes:
        _check_one_format(comm, request, detected)
    if isinstance(detected, Exception):
        return detected
    if detected is None:
        source = discover.open_unified(comm, request, resources)
        if isinstance(source, Exception):
            return source
        return result_or_error(lambda: wrap_in_views(source, options))
    foreign_source = result_or_error(lambda: open_source(request.paths[0], options))
    if isinstance(foreign_source, Exception):
        return foreign_source
    resources.callback(foreign_source.close)
    indexed = foreign_source.indexed
    base = foreign_source if indexed is None else indexed.without_optimizer
    left_out = base.metadata().left_out
    if left_out and comm.rank == 0:
        _LOG.warning(format_list(f"{request.label}: these entries are not read", left_out))
    return foreign_source


def _check_one_format(
    comm: Comm, request: OpenRequest, detected: Format | Exception | None
) -> None:
    """Raise an error of any rank, or FormatError if the ranks see several formats. Collective."""
    label = request.label
    collective = comm.begin_collective(f"load of {label}", timeout_seconds=request.timeout_seconds)
    with collective.step("format"):
        if isinstance(detected, Exception):
            raise detected
        format_name = detected.name if detected is not None else None
        format_names = collective.all_gather_json("format", format_name)
        if len(set(format_names)) > 1:
            first, local = (name or "unified" for name in (format_names[0], format_name))
            raise FormatError(
                f"{label}: got format {first} on rank 0 and {local} on this rank, expected one "
                "folder; pass a path that all nodes share"
            )

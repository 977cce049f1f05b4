"""Opens a checkpoint on all ranks of a load: a foreign format, or unified folders on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from unified_ckpt.engine.nodes import discover
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.options import LoadOptions, SourceOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import all_gather
from unified_ckpt.sources import apply_options, open_source, resolve_format


def open_on_all_ranks(
    comm: Comm,
    label: str,
    paths: Sequence[str],
    nodes: Sequence[int],
    stack: ExitStack,
    options: LoadOptions,
) -> Source | Exception:
    """Open the checkpoint at `paths`, in any format, or return the error that this rank met.

    Collective if the ranks are on several nodes; all of them must see the same format. `nodes` has
    the node of each rank, `label` names the checkpoint in errors. The source is closed with
    `stack`.
    """
    detected = resolve_format(paths[0], options.source) if len(paths) == 1 else None
    format_name = detected.name if detected is not None else None
    if max(nodes) > 0:
        collective = comm.begin_collective(
            f"load of {label}", timeout_seconds=options.timeout_seconds
        )
        with collective.step("format"):
            format_names = all_gather(collective, "format", format_name)
            if len(set(format_names)) > 1:
                first, local = (name or "unified" for name in (format_names[0], format_name))
                raise FormatError(
                    f"{label}: got format {first} on rank 0 and {local} on this rank, expected one "
                    "folder; pass a path that all nodes share"
                )
    if format_name is None:
        source = discover.open_source(
            comm, label, paths, nodes, stack, timeout_seconds=options.timeout_seconds
        )
        if isinstance(source, Exception):
            return source
        return try_apply_options(source, options.source)
    try:
        foreign_source = open_source(paths[0], options.source)
    except Exception as error:  # the load shares it with all ranks
        return error
    stack.callback(foreign_source.close)
    return foreign_source


def try_apply_options(source: Source, options: SourceOptions) -> Source | Exception:
    """Return `apply_options(source, options)`, or this rank's error for the load to share."""
    try:
        return apply_options(source, options)
    except Exception as error:
        return error

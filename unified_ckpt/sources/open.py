"""The checkpoint at a path, for all ranks of a load: in a format of others, or in ours, which may
lie on several machines.
"""

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
    """`find_source`, in any format. Collective where the ranks are on several machines, all of
    which must see the same format.
    """
    detected = resolve_format(paths[0], options.source) if len(paths) == 1 else None
    format_name = detected.name if detected is not None else None
    if max(nodes) > 0:
        collective = comm.begin_collective(
            f"load of {label}", cached=False, timeout_seconds=options.timeout_seconds
        )
        with collective.step("format"):
            format_names = all_gather(collective, "format", format_name)
            if len(set(format_names)) > 1:
                raise FormatError(
                    f"{label}: is {format_names[0] or 'no foreign format'} for rank 0, {format_names[collective.rank]} here; needed one folder"
                )
    if format_name is None:
        source = discover.open_source(
            comm, label, paths, nodes, stack, timeout_seconds=options.timeout_seconds
        )
        return (
            source if isinstance(source, Exception) else try_apply_options(source, options.source)
        )
    try:
        foreign_source = open_source(paths[0], options.source)
    except Exception as error:  # told to every rank in the load
        return error
    stack.callback(foreign_source.close)
    return foreign_source


def try_apply_options(source: Source, options: SourceOptions) -> Source | Exception:
    """The source under the names that the options ask for, or the error that this rank met, to be
    told to every rank.
    """
    try:
        return apply_options(source, options)
    except Exception as error:
        return error

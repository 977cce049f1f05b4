"""The checkpoint at a path, for all ranks of a load: in a format of others, or in ours, which may lie on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from unified_ckpt.engine.nodes.discover import find_source
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.options import LoadOptions, SourceOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import everybody
from unified_ckpt.sources import changed, format_of, open_any


def find_any(
    comm: Comm,
    where: str,
    paths: Sequence[str],
    machines: Sequence[int],
    owned: ExitStack,
    options: LoadOptions,
) -> Source | Exception:
    """`find_source`, in any format. Collective where the ranks are on several machines, all of which must see the same format."""
    found = format_of(paths[0], options.source) if len(paths) == 1 else None
    kind = found.name if found is not None else None
    if max(machines) > 0:
        meeting = comm.meet(f"load of {where}", same=False, timeout_seconds=options.timeout_seconds)
        with meeting.phase("format"):
            kinds = everybody(meeting, "format", kind)
            if len(set(kinds)) > 1:
                raise FormatError(
                    f"{where}: is {kinds[0] or 'no foreign format'} for rank 0, {kinds[meeting.rank]} here; needed one folder"
                )
    if kind is None:
        ours = find_source(
            comm, where, paths, machines, owned, timeout_seconds=options.timeout_seconds
        )
        return ours if isinstance(ours, Exception) else try_changed(ours, options.source)
    try:
        opened = open_any(paths[0], options.source)
    except Exception as error:  # told to every rank in the load
        return error
    owned.callback(opened.close)
    return opened


def try_changed(source: Source, options: SourceOptions) -> Source | Exception:
    """The source under the names that the options ask for, or the error that this rank met, to be told to every rank."""
    try:
        return changed(source, options)
    except Exception as error:
        return error

"""Checkpoints in formats of others: which one a path holds, and it as a Source.

A folder with our manifest, or of Hugging Face's weights alone, is none of these: the engine reads it itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from unified_ckpt.engine.checkpoint import open_path
from unified_ckpt.engine.gather import find_source
from unified_ckpt.engine.source import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import Comm
from unified_ckpt.runtime.probe import everybody
from unified_ckpt.runtime.storage import is_url


def format_of(path: str) -> str | None:
    """The format of a local path that somebody else wrote; None for ours, for Hugging Face's safetensors, and for what is not known."""
    if is_url(path):
        return None
    if os.path.isfile(path):
        return "torch" if path.endswith((".pt", ".pth", ".bin", ".ckpt")) else None
    found = set(os.listdir(path)) if os.path.isdir(path) else set()
    if names.MANIFEST in found or names.index_name("model") in found or names.file_name("model", number=1, count=1) in found:
        return None
    if ".metadata" in found:
        return "dcp"
    return "huggingface-bin" if found & {"pytorch_model.bin", "pytorch_model.bin.index.json"} else None


def open_any(path: str) -> Source:
    """The checkpoint at a path, in any format. NotFoundError, FormatError or IncompleteError where there is none that can be read."""
    local = os.path.abspath(_local(path))
    match format_of(_local(path)):  # what needs torch is imported here: `inspect` of our own folders starts without
        case "dcp":
            from unified_ckpt.sources.dcp import open_dcp

            return open_dcp(local)
        case "torch":
            from unified_ckpt.sources.torch_files import open_torch_file

            return open_torch_file(local)
        case "huggingface-bin":
            from unified_ckpt.sources.torch_files import open_bin_folder

            return open_bin_folder(local)
    return open_path(path, hold=True)


def find_any(
    comm: Comm, where: str, paths: Sequence[str], machines: Sequence[int], owned: ExitStack, *, timeout_seconds: float
) -> Source | Exception:
    """`find_source`, in any format. Collective where the ranks are on several machines, all of which must see the same format."""
    kind = format_of(_local(paths[0])) if len(paths) == 1 else None
    if max(machines) > 0:
        meeting = comm.meet(f"load of {where}", same=False, timeout_seconds=timeout_seconds)
        with meeting.phase("format"):
            kinds = everybody(meeting, "format", kind)
            if len(set(kinds)) > 1:
                raise FormatError(
                    f"{where}: is {kinds[0] or 'no foreign format'} for rank 0, {kinds[meeting.rank]} here; needed one folder"
                )
    if kind is None:
        return find_source(comm, where, paths, machines, owned, timeout_seconds=timeout_seconds)
    try:
        found = open_any(paths[0])
    except Exception as error:  # told to every rank in the load
        return error
    owned.callback(found.close)
    return found


def _local(path: str) -> str:
    return path.removeprefix("file://")

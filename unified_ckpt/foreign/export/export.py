"""Writes a source in the format of another framework, with one process, in bounded memory.

How data could be lost: a crash leaves a partial checkpoint under the requested name, or a tensor is
left out. So what was written is opened and compared with the source's names, and only then renamed
to the requested name, which was free.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from secrets import token_hex

from unified_ckpt.engine.folder.if_exists import (
    PublishTarget,
    check_target_name,
    resolve_if_exists,
)
from unified_ckpt.engine.folder.publish.renames import rename_if_free
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest
from unified_ckpt.engine.rewrite.tensors import OnProgress, tensor_sizes, unwritten_names_notes
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.foreign.export.selection import model_config
from unified_ckpt.foreign.formats import FORMATS, import_function
from unified_ckpt.format.names import staging_name
from unified_ckpt.options import ConvertOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import FOREGROUND

WRITERS = {each.name: each.writer for each in FORMATS if each.writer}


def export_source(
    comm: Comm,
    source: Source | Exception,
    options: ConvertOptions,
    target_path: str,
    request: ConvertRequest,
    main_path: str,
) -> ConvertReport:
    """Write an opened source in the format `options.to`. FormatError for several processes."""
    if comm.world > 1:
        raise FormatError(
            f"to={options.to!r}: got {comm.world} processes, expected one; convert in a single "
            "process"
        )
    if isinstance(source, Exception):
        raise source
    start_time, sizes = time.monotonic(), tensor_sizes(source)
    step = source.metadata().step  # nothing may fail once the target has its name
    total = sum(sizes.values())
    source_options = options.source.model_copy(update={"config": model_config(options, main_path)})
    options = options.model_copy(update={"source": source_options})
    export(source, target_path, options, progress=lambda nbytes: request.progress(nbytes, total))
    nbytes, tensors = Counter[str](), Counter(part for part, _ in sizes)
    for (part, _), size in sizes.items():
        nbytes[part] += size
    return ConvertReport(
        target_path,
        source.format,
        None,
        step,
        time.monotonic() - start_time,
        dict(tensors),
        dict(nbytes),
        notes=tuple(unwritten_names_notes(source)) if options.to == "orbax" else (),
    )


def export(
    source: Source,
    path: str,
    options: ConvertOptions,
    *,
    progress: OnProgress = lambda _: None,
) -> None:
    """Write the source to an absolute path, in the format `options.to`.

    `progress` is called with the number of bytes written. StorageError if something other than an
    empty folder is there, or if writing fails. After any error, nothing new is at `path`.
    """
    write = import_function(WRITERS[options.to])
    folder, name = os.path.split(path)
    policy = replace(FOREGROUND, fsync=options.fsync)
    storage, target = LocalStorage(folder, write_policy=policy), PublishTarget(name, "error")
    check_target_name(storage, target)
    resolve_if_exists(storage, target)
    staging = staging_name(name, token_hex(8))
    staging_path = storage.path(staging)
    try:
        write(source, staging_path, options, progress)
        storage.sync_tree(staging)
        if not rename_if_free(storage, staging, name):
            raise StorageError(f"{path}: was created while the export ran; choose another name")
    except BaseException as error:
        kind = storage.kind(staging)
        if kind == "folder":
            storage.remove_folder(staging)
        elif kind is not None:
            storage.remove_file(staging)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        raise

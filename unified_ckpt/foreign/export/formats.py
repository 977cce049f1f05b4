"""Writes a source as a `torch.save` file, a torch.distributed.checkpoint folder, or for PaddleNLP
or Orbax.

One process writes, in bounded memory: bytes are copied in chunks.

How data could be lost: a crash leaves a partial checkpoint under the requested name, or a tensor is
left out. So what was written is opened and compared with the source's names, and only then renamed
to the requested name, which was free.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from secrets import token_hex
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.folder.if_exists import (
    PublishTarget,
    check_target_name,
    resolve_if_exists,
)
from unified_ckpt.engine.folder.transaction import rename_if_free
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, read_chunks
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError, StorageError
from unified_ckpt.foreign.dcp.export import StateEntry, write_entries
from unified_ckpt.foreign.dcp.source import open_dcp
from unified_ckpt.foreign.orbax.export import write_orbax
from unified_ckpt.foreign.paddle.export import write_paddle
from unified_ckpt.foreign.pytorch.exported import EXPORT_KEY, EXPORT_VERSION
from unified_ckpt.foreign.pytorch.state_dict import open_torch_file
from unified_ckpt.foreign.pytorch.write_archive import StreamedTensor, write_archive
from unified_ckpt.format.names import MODEL, OPTIMIZER, staging_name
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.optimizers import SHARED
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

_CHUNK_NBYTES = 4 << 20  # copied per read

Progress = Callable[[int], object]


Tensors = Mapping[str, StreamedTensor]


def write_torch(source: Source, path: str, progress: Progress) -> None:
    """Write one file with "model", "optimizer", each further part, "step", "extra", "metrics" and
    "rank_extra".

    "optimizer" is what `Optimizer.load_state_dict` takes. Parameters are numbered in the order of
    their groups, as torch does; each group's "param_names" has their names.
    """
    if MODEL not in source.parts:
        part_names = ", ".join(source.parts)
        raise FormatError(
            f"got parts {part_names}, expected the model among them for a torch.save file; use "
            "--to dcp"
        )
    with open(path, "xb") as file:
        write_archive(file, _state_dict(source, progress))
    with closing(open_torch_file(path, SourceOptions())) as opened:
        _check_written(source, opened, source.parts)


def write_dcp(source: Source, path: str, progress: Progress) -> None:
    """Write a folder that `dcp.load` reads, with the keys of `write_torch`.

    "optimizer" is as `get_state_dict` returns it.
    """
    os.mkdir(path)
    write_entries(path, _state_entries(source, progress))
    with closing(open_dcp(path, SourceOptions())) as opened:
        _check_written(source, opened, source.parts)


EXPORTS: Mapping[str, Callable[[Source, str, ConvertOptions, Progress], None]] = {
    "torch": lambda source, path, _, progress: write_torch(source, path, progress),
    "dcp": lambda source, path, _, progress: write_dcp(source, path, progress),
    "orbax": lambda source, path, _, progress: write_orbax(source, path, progress),
    "paddle": lambda source, path, options, _: write_paddle(source, path, options),
}


def export(
    source: Source, path: str, options: ConvertOptions, *, progress: Progress = lambda _: None
) -> None:
    """Write the source to an absolute path, in the format `options.to`.

    `progress` is called with the number of bytes written. StorageError if something other than an
    empty folder is there, or if writing fails. After any error but one of the last sync, nothing
    new is at `path`.
    """
    folder, name = os.path.split(path)
    storage, target = LocalStorage(folder), PublishTarget(name, "error")
    check_target_name(storage, target)
    resolve_if_exists(storage, target)
    staging = staging_name(name, token_hex(8))
    staging_path = storage.path(staging)
    try:
        EXPORTS[options.to](source, staging_path, options, progress)
        if options.fsync:
            storage.sync_tree(staging)
        if not rename_if_free(storage, staging, name):
            raise StorageError(f"{path}: was created while the export ran; choose another name")
    except BaseException as error:
        _remove(staging_path)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        raise
    if options.fsync:
        storage.sync_folder("")  # makes the name durable


def _remove(path: str) -> None:
    if is_folder(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def _check_written(source: Source, written: Source, parts: Any) -> None:
    """IntegrityError unless what was written has every tensor of the source, with the same spec."""
    problems = []
    for part in parts:
        written_specs = written.specs(part, written.names(part)) if part in written.parts else {}
        specs = source.specs(part, source.names(part)) if part in source.parts else {}
        known_names = set(written_specs) | set(written.aliases(part)) | set(source.aliases(part))
        problems += [
            f"{part}:{name}: got {written_specs.get(name)}, expected {spec}"
            for name, spec in specs.items()
            if written_specs.get(name, spec) != spec
        ]
        problems += [f"{part}:{name}" for name in specs.keys() - known_names]
    raise_if_any(
        IntegrityError, "the tensors written differ from the source; this is a bug", problems
    )


def _tensors(source: Source, part: str, progress: Progress) -> dict[str, StreamedTensor]:
    """The tensors of a part, tied ones under all their names."""
    if part not in source.parts:
        return {}
    specs = source.specs(part, source.names(part))
    tensors = {
        name: StreamedTensor(
            torch_dtype(spec.dtype),
            spec.shape,
            partial(_chunks, source, (part, name), spec.nbytes, progress),
        )
        for name, spec in specs.items()
    }
    if part == OPTIMIZER:  # aliases have no state of their own
        return tensors
    return tensors | {alias: tensors[name] for alias, name in source.aliases(part).items()}


def _chunks(source: Source, key: Key, nbytes: int, progress: Progress) -> Iterator[memoryview]:
    for chunk in read_chunks(source, key, nbytes, chunk_nbytes=_CHUNK_NBYTES):
        yield from (
            chunk[offset : offset + BULK.call_nbytes]
            for offset in range(0, len(chunk), BULK.call_nbytes)
        )
        progress(len(chunk))


def _state_dict(source: Source, progress: Progress) -> dict[str, Any]:
    metadata = source.metadata()
    entries = _entries_without_optimizer(source, metadata, progress)
    if OPTIMIZER in source.parts:
        entries[OPTIMIZER] = _optimizer(metadata, _tensors(source, OPTIMIZER, progress))
    return entries


def _entries_without_optimizer(
    source: Source, metadata: SourceMetadata, progress: Progress
) -> dict[str, Any]:
    """Return everything but the optimizer, with the key that tells our reader what it reads."""
    parts: dict[str, Any] = {
        part: _tensors(source, part, progress) for part in source.parts if part != OPTIMIZER
    }
    if MODEL in parts:
        parts[MODEL] |= metadata.modules
    entries = {
        EXPORT_KEY: EXPORT_VERSION,
        "step": metadata.step,
        "extra": metadata.extra,
        "metrics": dict(metadata.metrics) or None,
        "rank_extra": [source.rank_extra(rank) for rank in range(metadata.rank_extras)] or None,
    }
    entries = {name: value for name, value in entries.items() if value is not None}
    raise_if_any(
        FormatError,
        "part names conflict with reserved keys of the file",
        sorted(parts.keys() & entries.keys()),
    )
    return parts | entries


def _optimizer(metadata: SourceMetadata, tensors: Tensors) -> dict[str, Any]:
    """Optimizer state by position, or by name if there are no groups that give an order."""
    states = _states(metadata, tensors)
    if not metadata.groups:
        return states
    positions = {
        fqn: number
        for number, fqn in enumerate(fqn for group in metadata.groups for fqn in group["names"])
    }
    groups = [
        {
            **group["options"],
            "params": [positions[fqn] for fqn in group["names"]],
            "param_names": list(group["names"]),
        }
        for group in metadata.groups
    ]
    raise_if_any(
        FormatError,
        "parameters with optimizer state are in no param group",
        sorted(states.keys() - positions.keys()),
    )
    return {
        "state": {positions[fqn]: states[fqn] for fqn in positions if fqn in states},
        "param_groups": groups,
    }


def _states(metadata: SourceMetadata, tensors: Tensors) -> dict[str, dict[str, Any]]:
    states_by_fqn: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        fqn, _, state = name.rpartition("/")
        states_by_fqn.setdefault(fqn, {})[state] = tensor
    shared = {
        state.removeprefix(SHARED)
        for scalar_states in metadata.scalars.values()
        for state in scalar_states
        if state.startswith(SHARED)
    }
    raise_if_any(
        FormatError,
        "optimizer state that belongs to no parameter has no place in this format; leave the "
        "optimizer out with parts=...",
        sorted(shared),
    )
    for fqn, scalar_states in metadata.scalars.items():
        states_by_fqn.setdefault(fqn, {}).update(scalar_states)
    return states_by_fqn


def _state_entries(source: Source, progress: Progress) -> list[StateEntry]:
    metadata, entries = source.metadata(), list[StateEntry]()
    for key, value in _entries_without_optimizer(source, metadata, progress).items():
        if key in source.parts or (key == "extra" and _is_dict_of_names(value)):
            entries += [StateEntry((key, name), item) for name, item in value.items()]
        else:
            entries.append(StateEntry((key,), value))
    for fqn, states in _states(metadata, _tensors(source, OPTIMIZER, progress)).items():
        entries += [
            StateEntry((OPTIMIZER, "state", fqn, state), value) for state, value in states.items()
        ]
    for number, group in enumerate(metadata.groups):
        options = {**group["options"], "params": list(group["names"])}
        entries += [
            StateEntry((OPTIMIZER, "param_groups", number, key), value)
            for key, value in options.items()
        ]
    return entries


def _is_dict_of_names(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) for key in value)

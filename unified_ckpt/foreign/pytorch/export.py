"""Writes a source as a file of `torch.save`, in bounded memory: bytes are copied in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.tensors import OnProgress
from unified_ckpt.engine.source.protocol import Source, SourceMetadata, read_chunks
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.foreign.pytorch.exported import EXPORT_KEY, EXPORT_VERSION
from unified_ckpt.foreign.pytorch.state_dict import open_torch_file
from unified_ckpt.foreign.pytorch.write_archive import StreamedTensor, write_archive
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.storage.write_calls import BULK
from unified_ckpt.runtime.torch_state.optimizers import SHARED
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

_CHUNK_NBYTES = 4 << 20  # copied per read


def write_torch(source: Source, path: str, _options: ConvertOptions, progress: OnProgress) -> None:
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
    metadata = source.metadata()
    entries = entries_without_optimizer(source, metadata, progress)
    if OPTIMIZER in source.parts:
        entries[OPTIMIZER] = _optimizer(source, metadata, progress)
    with open(path, "xb") as file:
        write_archive(file, entries)
    with closing(open_torch_file(path, SourceOptions())) as opened:
        check_written(source, opened)


def check_written(source: Source, written: Source) -> None:
    """IntegrityError unless what was written has every tensor of the source, with the same spec."""
    problems = []
    for part in source.parts:
        written_specs = written.specs(part, written.names(part)) if part in written.parts else {}
        specs = source.specs(part, source.names(part))
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


def _tensors(source: Source, part: str, progress: OnProgress) -> dict[str, StreamedTensor]:
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


def _chunks(source: Source, key: Key, nbytes: int, progress: OnProgress) -> Iterator[memoryview]:
    for chunk in read_chunks(source, key, nbytes, chunk_nbytes=_CHUNK_NBYTES):
        yield from (
            chunk[offset : offset + BULK.call_nbytes]
            for offset in range(0, len(chunk), BULK.call_nbytes)
        )
        progress(len(chunk))


def entries_without_optimizer(
    source: Source, metadata: SourceMetadata, progress: OnProgress
) -> dict[str, Any]:
    """Return everything but the optimizer, with the key that marks it as written by `convert`.

    FormatError for parts whose names are reserved.
    """
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


def _optimizer(source: Source, metadata: SourceMetadata, progress: OnProgress) -> dict[str, Any]:
    """Optimizer state by position, or by name if there are no groups that give an order."""
    states = optimizer_states(source, metadata, progress)
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


def optimizer_states(
    source: Source, metadata: SourceMetadata, progress: OnProgress
) -> dict[str, dict[str, Any]]:
    """Return optimizer state by parameter. FormatError for state that belongs to none."""
    states_by_fqn: dict[str, dict[str, Any]] = {}
    for name, tensor in _tensors(source, OPTIMIZER, progress).items():
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

"""Formats of others that a source is written in: a file of `torch.save`, a folder of torch.distributed.checkpoint. By one process, in
bounded memory: bytes are copied through, some at a time.

How data could be lost: a crash leaves half of it under the name that was asked for; a tensor is left out. So the name is given last, by one
rename, to a name that was free, after what was written has been opened and has every tensor of the source.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.source.protocol import Catalog, Location, Said, Source
from unified_ckpt.errors import FormatError, IntegrityError, StorageError
from unified_ckpt.exports.dcp import Entry, write_entries
from unified_ckpt.exports.paddle import write_paddle
from unified_ckpt.exports.torch_archive import Tensor, write_archive
from unified_ckpt.format.names import staging_name
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import ALONE
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.pytorch.dcp import open_dcp
from unified_ckpt.sources.pytorch.state_dict import open_torch_file

_CHUNK_NBYTES = 4 << 20  # copied at a time

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Asked:
    """How to write. `config`: where the model's config.json is, for formats whose names need it. `progress`: called with bytes done."""

    fsync: bool = True
    max_file_bytes: int = 5_000_000_000
    config: str | None = None
    progress: Progress = lambda _: None


Tensors = Mapping[str, Tensor]


def write_torch(source: Source, path: str, asked: Asked) -> None:
    """One file with {"model": {name: tensor}, "optimizer": what `load_state_dict` takes, each further part, "step", "extra"}.

    Parameters are counted in the order of their groups, as torch's optimizers do; their names are each group's "param_names".
    """
    if MODEL not in source.parts:
        has = ", ".join(source.parts)
        raise FormatError(
            f"a file of torch.save is read by the model in it; the parts to write are {has}; needed the model, or --to dcp"
        )
    with open(path, "xb") as file:
        write_archive(file, _state_dict(source, asked.progress))
        _flush(file, asked.fsync)
    with closing(open_torch_file(path, SourceOptions())) as opened:
        _check(source, opened, [MODEL])


def write_dcp(source: Source, path: str, asked: Asked) -> None:
    """A folder that `dcp.load` reads: "model", "optimizer" as `get_state_dict` gives it, each further part, "step", "extra"."""
    os.mkdir(path)
    write_entries(path, _entries(source, asked.progress), partial(_flush, fsync=asked.fsync))
    with closing(open_dcp(path, SourceOptions())) as opened:
        _check(source, opened, source.parts)


def _write_paddle(source: Source, path: str, asked: Asked) -> None:
    write_paddle(
        source, path, SourceOptions(config=asked.config), max_file_bytes=asked.max_file_bytes
    )


EXPORTS: Mapping[str, Callable[[Source, str, Asked], None]] = {
    "torch": write_torch,
    "dcp": write_dcp,
    "paddle": _write_paddle,
}


def export(source: Source, to: str, path: str, asked: Asked) -> None:
    """`path`: absolute. StorageError where something but an empty folder has the name, or it cannot be written; nothing is then there that
    was not.
    """
    folder, name = os.path.split(path)
    storage, target = LocalStorage(folder), commit.Target(name, "error")
    commit.check_way(storage, target)
    commit.check_target(storage, target)
    staging = staging_name(name, token_hex(8))
    begun = storage.path(staging)
    try:
        EXPORTS[to](source, begun, asked)
        if not commit.give_free_name(storage, staging, name):
            raise StorageError(f"{path}: came while it was written; needed a free name")
    except OSError as error:
        _remove(begun)
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    except BaseException:
        _remove(begun)
        raise


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def _flush(file: Any, fsync: bool) -> None:
    file.flush()
    if fsync:
        os.fsync(file.fileno())


def _check(source: Source, written: Source, parts: Any) -> None:
    """IntegrityError where what was written has not every tensor of the source, as it is."""
    wrong = []
    for part in parts:
        theirs = written.specs(part, written.names(part)) if part in written.parts else {}
        specs = source.specs(part, source.names(part)) if part in source.parts else {}
        known = set(theirs) | set(written.aliases(part)) | set(source.aliases(part))
        wrong += [
            f"{part}:{name}: {spec} was written as {theirs.get(name)}"
            for name, spec in specs.items()
            if theirs.get(name, spec) != spec
        ]
        wrong += [f"{part}:{name}" for name in specs.keys() - known]
    if wrong:
        raise IntegrityError(
            listed("written were other tensors than the source has; this is a bug", wrong)
        )


def _tensors(source: Source, part: str, progress: Progress) -> dict[str, Tensor]:
    """Those of a part, with the other names of tied ones."""
    if part not in source.parts:
        return {}
    specs = source.specs(part, source.names(part))
    catalog = source.catalog([(part, name) for name in specs])
    found = {
        name: Tensor(
            TORCH_DTYPES[spec.dtype],
            spec.shape,
            partial(_pieces, catalog, catalog.locations[part, name], spec.nbytes, progress),
        )
        for name, spec in specs.items()
    }
    if part == OPTIMIZER:  # a parameter has its state once
        return found
    return found | {alias: found[name] for alias, name in source.aliases(part).items()}


def _pieces(
    catalog: Catalog, location: Location, nbytes: int, progress: Progress
) -> Iterator[memoryview]:
    for start in range(0, nbytes, _CHUNK_NBYTES):
        held = memoryview(bytearray(min(_CHUNK_NBYTES, nbytes - start)))
        catalog.storage.read_at(location.file, location.start + start, held)
        yield from (held[at : at + ALONE.nbytes] for at in range(0, len(held), ALONE.nbytes))
        progress(len(held))


def _state_dict(source: Source, progress: Progress) -> dict[str, Any]:
    said = source.said()
    told: dict[str, Any] = {
        part: _tensors(source, part, progress) for part in source.parts if part != OPTIMIZER
    }
    if MODEL in told:
        told[MODEL] |= said.modules
    if OPTIMIZER in source.parts or said.groups:
        told[OPTIMIZER] = _optimizer(said, _tensors(source, OPTIMIZER, progress))
    beside = _beside(source, said)
    twice = sorted(told.keys() & beside.keys())
    if twice:
        raise FormatError(
            listed("parts have names that torch's file needs for other things", twice)
        )
    return told | beside


def _beside(source: Source, said: Said) -> dict[str, Any]:
    """What is not tensors, and there."""
    told = {
        "step": said.step,
        "extra": said.extra,
        "rank_extra": [source.rank_extra(rank) for rank in range(said.rank_extras)] or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _optimizer(said: Said, tensors: Tensors) -> dict[str, Any]:
    """By position; by name where no group says in which order."""
    states = _states(said, tensors)
    if not said.groups:
        return states
    place = {
        fqn: number
        for number, fqn in enumerate(fqn for group in said.groups for fqn in group["names"])
    }
    groups = [
        {
            **group["options"],
            "params": [place[fqn] for fqn in group["names"]],
            "param_names": list(group["names"]),
        }
        for group in said.groups
    ]
    stray = sorted(states.keys() - place.keys())
    if stray:
        raise FormatError(
            listed("optimizer state is of parameters that are in no param group", stray)
        )
    return {
        "state": {place[fqn]: states[fqn] for fqn in place if fqn in states},
        "param_groups": groups,
    }


def _states(said: Said, tensors: Tensors) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        fqn, _, state = name.rpartition("/")
        found.setdefault(fqn, {})[state] = tensor
    for fqn, state_of in said.scalars.items():
        found.setdefault(fqn, {}).update(state_of)
    return found


def _entries(source: Source, progress: Progress) -> list[Entry]:
    said = source.said()
    found = [
        Entry((part, name), tensor)
        for part in source.parts
        if part != OPTIMIZER
        for name, tensor in _tensors(source, part, progress).items()
    ]
    found += [
        Entry((MODEL, name), value) for name, value in said.modules.items() if MODEL in source.parts
    ]
    for fqn, states in _states(said, _tensors(source, OPTIMIZER, progress)).items():
        found += [Entry((OPTIMIZER, "state", fqn, state), value) for state, value in states.items()]
    for number, group in enumerate(said.groups):
        options = {**group["options"], "params": list(group["names"])}
        found += [
            Entry((OPTIMIZER, "param_groups", number, key), value) for key, value in options.items()
        ]
    beside = _beside(source, said)
    extra = beside.pop("extra", None)
    if isinstance(extra, dict) and extra and all(isinstance(key, str) for key in extra):
        found += [Entry(("extra", key), value) for key, value in extra.items()]
    elif extra is not None:
        beside["extra"] = extra
    return found + [Entry((key,), value) for key, value in beside.items()]

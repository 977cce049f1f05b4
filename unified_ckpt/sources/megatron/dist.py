"""Megatron-Core's torch_dist: DCP's files with tensors of the whole model, layers and experts of which may be stacked, and `common.pt`.

The optimizer is read where it was saved by parameter (fully_reshardable, or without the distributed optimizer). The flat buffers of
dp_reshardable are not: what lies where in them depends on the layout of the job, which the folder does not tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.files.json import read_object
from unified_ckpt.sources.megatron.files import STUBS, Arguments, arguments, plain
from unified_ckpt.sources.megatron.master_check import Twin
from unified_ckpt.sources.megatron.names import EMBEDDING, OUTPUT, apart, is_expert
from unified_ckpt.sources.megatron.states import group_of, options_of
from unified_ckpt.sources.megatron.view import named
from unified_ckpt.sources.pytorch.dcp import Entry, assemble, map_files, read_entries
from unified_ckpt.sources.restricted_pickle.archive import Mapped
from unified_ckpt.sources.restricted_pickle.load import load_torch, load_torch_bytes
from unified_ckpt.views.shards import Assembled, Assembly, Fragment, assembly

_PLANNED = [
    f"torch.distributed.checkpoint.planner.{name}"
    for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
]
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_FLAT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*(?:bucket_idx|gbuf_idx).*"
)
_MASTERS = ("param", "fp32_param")
_KEPT_APART = ("args", "optimizer", "rng_state", "rerun_state_machine", "checkpoint_version")
_REFUSED = (
    "is in flat buffers (dp_reshardable), in an order that the folder does not tell; needed a checkpoint saved with "
    "--dist-ckpt-optim-fully-reshardable"
)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the folder holds: tensors by part and name, objects by key, `common` beside them. `doubt`: why no optimizer is read."""

    tensors: Mapping[Key, Assembly]
    objects: Mapping[str, Entry]
    files: Mapping[str, Mapped]
    common: Mapping[str, Any]
    doubt: str


def open_dist(folder: str, options: SourceOptions) -> Source:
    """IncompleteError naming files that are missing; FormatError for another backend, or a damaged folder."""
    _check_backend(folder)
    read = _read(folder)
    args = arguments(read.common.get("args"), folder)
    tensors = dict(_guarded(read.tensors))
    groups, steps = _groups(folder, read, args)
    tensors |= {
        (OPTIMIZER, f"{name}/step"): assembly(torch.float32, (), [step_fragment(step, folder)])
        for name, step in steps.items()
    }
    iteration = read.common.get("iteration")
    extra = {key: plain(value) for key, value in read.common.items() if key not in _KEPT_APART}
    said = Said(
        step=iteration if isinstance(iteration, int) else None,
        extra={**extra, "args": plain(dict(args.told))} if args.told else extra or None,
        groups=groups,
        rank_extras=args.number("world_size", 0) if _grid(read) else 0,
    )
    aliases = {OUTPUT: EMBEDDING} if (MODEL, OUTPUT) not in tensors else {}
    refused = (
        {OPTIMIZER: f"{read.doubt}; without the optimizer the model loads"} if read.doubt else {}
    )
    make = partial(
        Assembled,
        folder,
        tensors,
        format="megatron-core",
        aliases={MODEL: aliases, MASTER: aliases},
        refused=refused,
    )
    return named(
        folder,
        make,
        said,
        tensors,
        args,
        options,
        rank_extra=partial(_random_state, folder, read, args),
    )


def _check_backend(folder: str) -> None:
    path = os.path.join(folder, "metadata.json")
    if not os.path.isfile(path):
        raise FormatError(
            f"{folder}: has no metadata.json, which Megatron-Core writes last: its save did not end"
        )
    backend = read_object(path).get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(f"{path}: says {backend!r}; needed torch_dist")


def _read(folder: str) -> _Read:
    entries = read_entries(folder, stubs=_PLANNED)
    files = map_files(folder, entries)
    tensors: dict[Key, Assembly] = {}
    objects: dict[str, Entry] = {}
    doubt = ""
    for key, one in entries.items():
        if one.dtype is None:
            objects[key] = one
            continue
        if key.endswith("_extra_state"):
            continue
        if _FLAT.fullmatch(key):
            doubt = _REFUSED
            continue
        state = _STATE.fullmatch(key)
        name = (state[2] if state else key).removeprefix("module.").removeprefix("model.")
        part = MODEL if state is None else MASTER if state[1] in _MASTERS else OPTIMIZER
        made = assemble(files, folder, key, one, one.dtype)
        tensors[part, f"{name}/{state[1]}" if state is not None and part == OPTIMIZER else name] = (
            made
        )
    for (part, key), made in tensors.items():
        name = key.rpartition("/")[0] if part == OPTIMIZER else key
        if part != MODEL and (
            (MODEL, name) not in tensors or tensors[MODEL, name].spec.shape != made.spec.shape
        ):
            doubt = f"{part}:{key}: has shape {made.spec.shape}, as state that was flattened has; needed that of the model's tensor"
    kept = {key: made for key, made in tensors.items() if key[0] == MODEL or not doubt}
    return _Read(kept, objects, files, _common(folder, files, objects), doubt)


def _common(
    folder: str, files: Mapping[str, Mapped], objects: Mapping[str, Entry]
) -> Mapping[str, Any]:
    """What is the same on every rank."""
    key = next((key for key in objects if key.startswith("common_state")), None)
    path = os.path.join(folder, "common.pt")
    told = (
        _object(folder, files, key, objects[key])
        if key is not None and not os.path.isfile(path)
        else load_torch(path, stubs=STUBS)
    )
    if not isinstance(told, Mapping):
        raise FormatError(f"{path}: holds a {type(told).__name__}; needed a dict")
    return told


def _object(folder: str, files: Mapping[str, Mapped], key: str, one: Entry) -> Any:
    shard = one.shards[0]
    where = f"{os.path.join(folder, shard.file)}: {key}"
    told = load_torch_bytes(files[shard.file].bytes(shard.start, shard.nbytes), where, stubs=STUBS)
    return (
        told[0] if isinstance(told, list) and len(told) == 1 else told
    )  # the objects of this rank under this key: one


def _guarded(tensors: Mapping[Key, Assembly]) -> Iterable[tuple[Key, Assembly]]:
    """Optimizer state is compared with the model by its fp32 copy, where both were saved in the same boxes."""
    for (part, key), one in tensors.items():
        name = key.rpartition("/")[0] if part == OPTIMIZER else key
        master = tensors.get((MASTER, name))
        if part == MODEL or master is None:
            if part != MASTER or one.spec.dtype != tensors[MODEL, name].spec.dtype:
                yield (part, key), one
            continue
        if part == MASTER and tensors[MODEL, name].spec.dtype == one.spec.dtype:
            continue  # of a parameter that is fp32 itself
        models, masters = (
            {fragment.box: fragment for fragment in of.fragments}
            for of in (tensors[MODEL, name], master)
        )
        fragments = tuple(
            Twin(name, fragment.where, models[fragment.box].load, masters[fragment.box].load).guard(
                fragment
            )
            if fragment.box in models and fragment.box in masters
            else fragment
            for fragment in one.fragments
        )
        yield (part, key), Assembly(one.spec, fragments, one.grid)


# ---- param groups


def _groups(
    folder: str, read: _Read, args: Arguments
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Param groups by the names of stored tensors, and the steps made for each of these."""
    told = read.common.get("optimizer")
    held = {key.rpartition("/")[0] for part, key in read.tensors if part == OPTIMIZER}
    if not told or not held:
        return [], {}
    parts = [told[n] for n in sorted(told)] if 0 in told else [told]
    groups: list[dict[str, Any]] = []
    steps: dict[str, float] = {}
    names = [
        (stored, *next(iter(apart(stored, one.spec.shape))))
        for (part, stored), one in read.tensors.items()
        if part == MODEL
    ]
    try:
        for number, part in enumerate(parts):
            inner = part.get("optimizer", part)
            mine = [
                (stored, own, len(one.shape))
                for stored, own, one in names
                if stored in held and (len(parts) == 1 or is_expert(own) == (number == 1))
            ]
            which = group_of(inner["param_groups"], [(own, dims) for _, own, dims in mine], args)
            common_step = inner.get("state", {}).get("common_step")
            for place, group in enumerate(inner["param_groups"]):
                of_group = [
                    stored for (stored, _, _), at in zip(mine, which, strict=True) if at == place
                ]
                groups.append({"names": of_group, "options": plain(options_of(group))})
                step = group.get("step", common_step)
                if step is None and of_group:
                    raise FormatError("nothing says how many steps the optimizer made")
                steps |= dict.fromkeys(of_group, float(step or 0))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{folder}: its optimizer is not what Megatron-Core writes: {error!r}"
        ) from error
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from error
    return groups, steps


def step_fragment(step: float, where: str) -> Fragment:
    """As torch's optimizers keep it for each parameter."""
    return Fragment(Box((), ()), partial(torch.tensor, step, dtype=torch.float32), where)


# ---- random state


def _grid(read: _Read) -> tuple[int, ...]:
    """Over how many ranks (pipeline, tensor) the random state was saved."""
    for key in read.objects:
        found = re.fullmatch(r"rng_state/shard_[\d.]+_([\d.]+)", key)
        if found:
            return tuple(int(one) for one in found[1].split("."))
    return ()


def _random_state(folder: str, read: _Read, args: Arguments, rank: int) -> Any:
    grid = _grid(read)
    world = args.number("world_size", 0)
    if len(grid) != 2 or not 0 <= rank < world:
        return None
    pp, tp = rank * grid[0] // world, rank % grid[1]
    key = f"rng_state/shard_{pp}.{tp}_{grid[0]}.{grid[1]}"
    if key not in read.objects:
        return None
    told = _object(folder, read.files, key, read.objects[key])
    data_rank = (
        rank
        // (grid[1] * args.number("context_parallel_size", 1))
        % max(1, args.number("data_parallel_size", 1))
    )
    return {"rng_state": plain(told[data_rank if len(told) > 1 else 0])}

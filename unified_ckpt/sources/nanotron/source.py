"""nanotron: a safetensors file for each tensor and rank that has a part of it, whose header says which; optimizer state in a file of each
rank, by parameter name, flat over data-parallel ranks under ZeRO-1. The fp32 copies of its gradient accumulator are the master weights.

Names are nanotron's own. Not read: `random/`, which holds objects of its classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import Box, boxes_between, inside, intersect, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError, NotFoundError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.detect.names import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.sources.files.json import read_object
from unified_ckpt.sources.files.safetensors import TensorFile, open_tensors
from unified_ckpt.sources.pytorch.optimizer_scalars import joined_scalars
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import Assembled, Assembly, Fragment, assembly, whole_tensor

_MODEL_FILE = re.compile(
    r"model_(?P<name>.+?)(?:_pp-rank-(\d+)-of-\d+_tp-rank-(\d+)-of-(\d+)(?:_exp-rank-(\d+)-of-\d+)?)?\.safetensors"
)
_OPTIMIZER_FILE = re.compile(
    r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)(?:_exp-(\d+)-of-(\d+))?\.pt"
)

Pair = tuple[Box, Box]  # the same elements of a rank's part and of the whole tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """What ranks (pp, tp, exp) have of a tensor: all of a part's elements, by where they lie in both. None: any rank has the whole."""

    file: TensorFile
    ranks: tuple[int, int, int] | None
    shape: tuple[int, ...]  # of the whole tensor
    pairs: tuple[Pair, ...]

    @property
    def held(self) -> tuple[int, ...]:
        return self.file.entries["data"].shape


@dataclass(frozen=True, slots=True)
class _State:
    """A file of optimizer state, of ranks (pp, dp, tp, exp)."""

    path: str
    pp: int
    dp: int
    tp: int
    exp: int
    told: Mapping[str, Any]

    def names(self) -> dict[int, str]:
        return {
            index: str(name).removeprefix("module.") for index, name in self.told["names"].items()
        }


def open_nanotron(root: str, options: SourceOptions) -> Assembled:
    """A step's folder, or the one above with `latest.txt`. IncompleteError naming what is missing, FormatError for what is damaged."""
    if options.names == "huggingface":
        raise FormatError(
            f"{root}: nanotron's tensors have its own names, and fused ones; needed names='own'"
        )
    root = _step_folder(root)
    meta = _json(os.path.join(root, NANOTRON_META))
    parts = _parts(root)
    tensors: dict[Key, Assembly] = {}
    for name, those in parts.items():
        fragments = [fragment for part in those for fragment in _of_model(part)]
        tensors[MODEL, name] = _made(root, name, those[0].file.dtype("data"), those, fragments)
    states = _states(root)
    tensors |= _optimizer(root, states, parts)
    scheduler = os.path.join(root, "lr_scheduler", "lr_scheduler.pt")
    extra = {
        "metadata": meta,
        **({"lr_scheduler": load_torch(scheduler)} if os.path.isfile(scheduler) else {}),
    }
    step = (meta.get("metas") or {}).get("last_train_step")
    said = Said(
        step=step if isinstance(step, int) else None,
        extra=extra,
        groups=_groups(states),
        scalars=_scalars(states),
    )
    return Assembled(root, tensors, format="nanotron", said=said)


def _step_folder(root: str) -> str:
    latest = os.path.join(root, NANOTRON_LATEST)
    if not os.path.isfile(latest):
        return root
    with open_file(latest) as file:
        told = file.read().decode().strip()
    if not told.isdigit():
        raise FormatError(f"{latest}: holds {told[:40]!r}; needed the number of a step")
    if not os.path.isdir(os.path.join(root, told)):
        raise NotFoundError(
            f"{os.path.join(root, told)}: is not there, and {NANOTRON_LATEST} names it"
        )
    return os.path.join(root, told)


def _json(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise IncompleteError(f"{path}: is missing")
    return read_object(path)


# ---- the model


def _parts(root: str) -> dict[str, list[_Part]]:
    """Every tensor's parts by its name: the path of its folder, and the end of its file's name."""
    top = os.path.join(root, "model")
    found: dict[str, list[_Part]] = {}
    for folder, _, files in sorted(os.walk(top)):
        for file in sorted(files):
            match = _MODEL_FILE.fullmatch(file)
            if match is not None:
                name = ".".join(
                    [*os.path.relpath(folder, top).split(os.sep), match["name"]]
                ).removeprefix("..")
                found.setdefault(name, []).append(_part(os.path.join(folder, file), match))
    if not found:
        raise IncompleteError(f"{top}: holds no tensor")
    for parts in found.values():
        _check_order(parts)
    return found


def _check_order(parts: list[_Part]) -> None:
    """Refuses files of tensor-parallel ranks that were swapped: of each slice, a higher rank has higher elements. FormatError.

    The model would be right, for headers say which elements a file has; the optimizer's files have only their names.
    """
    last: dict[tuple[int, int], tuple[int, tuple[int, ...], str]] = {}
    for part in parts:
        if part.ranks is not None:
            pp, tp, exp = part.ranks
            first, path = part.pairs[0][1].offsets, part.file.path
            for rank, other, where in [last[pp, exp]] if (pp, exp) in last else []:
                if (rank < tp) != (other < first) and other != first:
                    raise FormatError(
                        f"{path}: has elements before those of {where}: files were swapped; put each back under its own name"
                    )
            last[pp, exp] = tp, first, path


def _part(path: str, match: re.Match[str]) -> _Part:
    file = open_tensors(path)
    if "data" not in file.entries:
        raise FormatError(f"{path}: has tensors {', '.join(sorted(file.entries))}; needed `data`")
    shape = file.entries["data"].shape
    if match[2] is None:
        return _Part(file, None, shape, ((whole(shape), whole(shape)),))
    try:
        told = str(file.metadata["local_global_slices_pairs"])
        full = tuple(
            int(size)
            for size in re.findall(
                r"\d+", re.sub(r"np\.int\d+", "", str(file.metadata["unsharded_shape"]))
            )
        )
        pairs = tuple(
            (_box(local, shape), _box(of, full))
            for local, of in (pair.split("#") for pair in told.split(";"))
        )
    except (KeyError, ValueError) as error:
        raise FormatError(
            f"{path}: its header does not say which part of the tensor it is: {error!r}"
        ) from error
    if any(
        local.shape != of.shape or not inside(local, shape) or not inside(of, full)
        for local, of in pairs
    ):
        raise FormatError(f"{path}: its header's slices {told} do not fit {shape} of {full}")
    return _Part(file, (int(match[2]), int(match[3]), int(match[5] or 0)), full, pairs)


def _box(told: str, shape: tuple[int, ...]) -> Box:
    """`start,stop,step|...`, one for each dim, None as in a slice. ValueError for what is no box."""
    slices = [
        [None if one == "None" else int(one) for one in dim.split(",")] for dim in told.split("|")
    ]
    if len(slices) != len(shape) or any(step not in (None, 1) for _, _, step in slices):
        raise ValueError(told)
    ranges = [
        slice(start, stop).indices(size)
        for (start, stop, _), size in zip(slices, shape, strict=True)
    ]
    return Box(tuple(low for low, _, _ in ranges), tuple(high - low for low, high, _ in ranges))


def _of_model(part: _Part) -> Iterator[Fragment]:
    for local, of in part.pairs:
        yield Fragment(of, partial(_cut, partial(part.file.tensor, "data"), local), part.file.path)


def _made(
    root: str, name: str, dtype: torch.dtype, parts: list[_Part], fragments: list[Fragment]
) -> Assembly:
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise FormatError(
            f"{root}: {name}: its files are of shapes {', '.join(map(str, sorted(shapes)))}; needed one"
        )
    try:
        return assembly(dtype, parts[0].shape, fragments)
    except CheckpointError as error:
        there = ", ".join(sorted({fragment.where for fragment in fragments}))
        raise type(error)(f"{root}: {name}: {error}; there are {there}") from error


# ---- the optimizer


def _states(root: str) -> list[_State]:
    """The files of all ranks, in order. IncompleteError naming those that are missing; [] where there is no optimizer."""
    folder = os.path.join(root, "optimizer")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = {
        tuple(int(one or 0) for one in match.groups()[::2]): match
        for name in names
        if (match := _OPTIMIZER_FILE.fullmatch(name))
    }
    if not found:
        return []
    sizes = {tuple(int(one or 1) for one in match.groups()[1::2]) for match in found.values()}
    if len(sizes) > 1:
        raise FormatError(
            f"{folder}: its files are of {sorted(sizes)} ranks (pp, dp, tp, exp); needed those of one save"
        )
    missing = [ranks for ranks in product(*map(range, next(iter(sizes)))) if ranks not in found]
    if missing:
        raise IncompleteError(
            listed(
                f"{folder}: files are missing, of ranks (pp, dp, tp, exp)", list(map(str, missing))
            )
        )
    made = []
    for ranks, match in sorted(found.items()):
        path = os.path.join(folder, match[0])
        told = load_torch(path, numbered=True)
        if not isinstance(told, Mapping) or not all(
            isinstance(told.get(key), Mapping) for key in ("state", "names")
        ):
            raise FormatError(f"{path}: is no optimizer's state with names")
        pp, dp, tp, exp = ranks
        made.append(_State(path, pp, dp, tp, exp, told))
    return made


def _optimizer(
    root: str, states: list[_State], parts: Mapping[str, list[_Part]]
) -> dict[Key, Assembly]:
    """State and fp32 copies of every parameter, put together as the model's tensor is."""
    pieces: dict[Key, dict[tuple[int, int, int], list[tuple[_State, torch.Tensor]]]] = {}
    for state in states:
        for key, tensor in _flat(state):
            pieces.setdefault(key, {}).setdefault((state.pp, state.tp, state.exp), []).append(
                (state, tensor)
            )
    tensors: dict[Key, Assembly] = {}
    lost = sorted({_parameter(key) for key in pieces} - set(parts))
    if lost:
        raise IncompleteError(
            listed(f"{root}: parameters of the optimizer that the model has no file of", lost)
        )
    for key, of_ranks in pieces.items():
        those = parts[_parameter(key)]
        first = next(iter(of_ranks.values()))[0][1]
        if first.dim() == 0:
            tensors[key] = whole_tensor(first, next(iter(of_ranks.values()))[0][0].path)
            continue
        fragments: list[Fragment] = []  # of a tensor that every rank has whole, the lowest one's
        for part in those:
            held = of_ranks.get(part.ranks) if part.ranks is not None else of_ranks[min(of_ranks)]
            if held is not None:
                fragments += _of_state(root, key, part, held)
        tensors[key] = _made(root, ":".join(key), first.dtype, those, fragments)
    return tensors


def _parameter(key: Key) -> str:
    return key[1].rpartition("/")[0] if key[0] == OPTIMIZER else key[1]


def _flat(state: _State) -> Iterator[tuple[Key, torch.Tensor]]:
    names = state.names()
    for index, entry in state.told["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield (OPTIMIZER, f"{names[index]}/{key}"), value
    for name, value in state.told.get("gradient_accumulator", {}).items():
        yield (MASTER, str(name).removeprefix("module.")), value


def _scalars(states: list[_State]) -> dict[str, dict[str, Any]]:
    return joined_scalars(
        (state.path, state.names()[index], entry)
        for state in states
        for index, entry in state.told["state"].items()
    )


def _of_state(
    root: str, key: Key, part: _Part, held: list[tuple[_State, torch.Tensor]]
) -> Iterator[Fragment]:
    """Fragments of what the data-parallel ranks have of a part: the part itself, or flat ranges of it, one after another."""
    numel = sum(tensor.numel() for _, tensor in held)
    if numel != prod(part.held):
        raise FormatError(
            f"{root}: {':'.join(key)}: its files have {numel} elements; needed {prod(part.held)}, those of {part.file.path}"
        )
    first = 0
    for state, tensor in held:
        flat = tensor.detach().reshape(-1)
        at = first
        for block in boxes_between(part.held, first, first + flat.numel()):
            lines = flat[at - first : at - first + block.numel].view(block.shape)
            at += block.numel
            for local, of in part.pairs:
                common = intersect(block, local)
                if common is not None:
                    moved = tuple(
                        a - b + c
                        for a, b, c in zip(common.offsets, local.offsets, of.offsets, strict=True)
                    )
                    inner = Box(
                        tuple(a - b for a, b in zip(common.offsets, block.offsets, strict=True)),
                        common.shape,
                    )
                    yield Fragment(
                        Box(moved, common.shape), partial(_cut, lines.detach, inner), state.path
                    )
        first += flat.numel()


def _cut(load: Any, box: Box) -> torch.Tensor:
    found: torch.Tensor = load()[
        tuple(
            slice(first, first + count) for first, count in zip(box.offsets, box.shape, strict=True)
        )
    ]
    return found


def _groups(states: list[_State]) -> list[dict[str, Any]]:
    """Param groups by their number, of the parameters of all ranks; where ranks have other options for one, it is several."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for state in states:
        names = state.names()
        for number, group in enumerate(state.told.get("param_groups", [])):
            options = {key: value for key, value in group.items() if key != "params"}
            one = found.setdefault((number, repr(options)), {"names": {}, "options": options})
            one["names"].update(
                dict.fromkeys(names[index] for index in group["params"] if index in names)
            )
    return [
        {"names": list(one["names"]), "options": one["options"]}
        for _, one in sorted(found.items(), key=lambda item: item[0])
    ]

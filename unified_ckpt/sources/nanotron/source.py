"""nanotron: a safetensors file for each tensor and rank that has a part of it, whose header says
which; optimizer state in a file of each rank, by parameter name, flat over data-parallel ranks
under ZeRO-1. The fp32 copies of its gradient accumulator are the master weights.

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

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, is_inside, range_to_boxes
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError, NotFoundError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.detect.names import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.sources.files.json import read_json_object
from unified_ckpt.sources.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.sources.pytorch.optimizer_scalars import merge_scalars
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import (
    ShardedSource,
    ShardedTensor,
    TensorShard,
    sharded_tensor,
    whole_tensor,
)

_MODEL_FILE = re.compile(
    r"model_(?P<name>.+?)(?:_pp-rank-(\d+)-of-\d+_tp-rank-(\d+)-of-(\d+)(?:_exp-rank-(\d+)-of-\d+)?)?\.safetensors"
)
_OPTIMIZER_FILE = re.compile(
    r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)(?:_exp-(\d+)-of-(\d+))?\.pt"
)

BoxPair = tuple[Box, Box]  # the same elements of a rank's part and of the whole tensor


@dataclass(frozen=True, slots=True)
class _ShardFile:
    """What ranks (pp, tp, exp) have of a tensor: all of a part's elements, by where they lie in
    both. None: any rank has the whole.
    """

    file: TensorFile
    ranks: tuple[int, int, int] | None
    global_shape: tuple[int, ...]  # of the whole tensor
    box_pairs: tuple[BoxPair, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.file.entries["data"].shape


@dataclass(frozen=True, slots=True)
class _OptimizerFile:
    """A file of optimizer state, of ranks (pp, dp, tp, exp)."""

    path: str
    pp: int
    dp: int
    tp: int
    exp: int
    content: Mapping[str, Any]

    def parameter_names(self) -> dict[int, str]:
        return {
            index: str(name).removeprefix("module.")
            for index, name in self.content["names"].items()
        }


def open_nanotron(root: str, options: SourceOptions) -> ShardedSource:
    """A step's folder, or the one above with `latest.txt`. IncompleteError naming what is missing,
    FormatError for what is damaged.
    """
    if options.names == "huggingface":
        raise FormatError(
            f"{root}: nanotron's tensors have its own names, and fused ones; needed names='own'"
        )
    root = _step_folder(root)
    meta = _read_json(os.path.join(root, NANOTRON_META))
    shard_files = _list_shard_files(root)
    tensors: dict[Key, ShardedTensor] = {}
    for name, tensor_files in shard_files.items():
        shards = [shard for shard_file in tensor_files for shard in _model_shards(shard_file)]
        tensors[MODEL, name] = _build_tensor(
            root, name, tensor_files[0].file.dtype("data"), tensor_files, shards
        )
    optimizer_files = _read_optimizer_files(root)
    tensors |= _optimizer_tensors(root, optimizer_files, shard_files)
    scheduler = os.path.join(root, "lr_scheduler", "lr_scheduler.pt")
    extra = {
        "metadata": meta,
        **({"lr_scheduler": load_torch(scheduler)} if os.path.isfile(scheduler) else {}),
    }
    step = (meta.get("metas") or {}).get("last_train_step")
    metadata = SourceMetadata(
        step=step if isinstance(step, int) else None,
        extra=extra,
        groups=_param_groups(optimizer_files),
        scalars=_scalars(optimizer_files),
    )
    return ShardedSource(root, tensors, format="nanotron", metadata=metadata)


def _step_folder(root: str) -> str:
    latest = os.path.join(root, NANOTRON_LATEST)
    if not os.path.isfile(latest):
        return root
    with open_binary(latest) as file:
        step = file.read().decode().strip()
    if not step.isdigit():
        raise FormatError(f"{latest}: holds {step[:40]!r}; needed the number of a step")
    if not os.path.isdir(os.path.join(root, step)):
        raise NotFoundError(
            f"{os.path.join(root, step)}: is not there, and {NANOTRON_LATEST} names it"
        )
    return os.path.join(root, step)


def _read_json(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise IncompleteError(f"{path}: is missing")
    return read_json_object(path)


# ---- the model


def _list_shard_files(root: str) -> dict[str, list[_ShardFile]]:
    """Every tensor's parts by its name: the path of its folder, and the end of its file's name."""
    top = os.path.join(root, "model")
    shard_files: dict[str, list[_ShardFile]] = {}
    for folder, _, files in sorted(os.walk(top)):
        for file in sorted(files):
            match = _MODEL_FILE.fullmatch(file)
            if match is not None:
                name = ".".join(
                    [*os.path.relpath(folder, top).split(os.sep), match["name"]]
                ).removeprefix("..")
                shard_files.setdefault(name, []).append(
                    _read_shard_file(os.path.join(folder, file), match)
                )
    if not shard_files:
        raise IncompleteError(f"{top}: holds no tensor")
    for tensor_files in shard_files.values():
        _check_order(tensor_files)
    return shard_files


def _check_order(shard_files: list[_ShardFile]) -> None:
    """Refuses files of tensor-parallel ranks that were swapped: of each slice, a higher rank has
    higher elements. FormatError.

    The model would be right, for headers say which elements a file has; the optimizer's files have
    only their names.
    """
    last_by_rank: dict[tuple[int, int], tuple[int, tuple[int, ...], str]] = {}
    for shard_file in shard_files:
        if shard_file.ranks is not None:
            pp, tp, exp = shard_file.ranks
            first, path = shard_file.box_pairs[0][1].offsets, shard_file.file.path
            for rank, last_first, last_path in (
                [last_by_rank[pp, exp]] if (pp, exp) in last_by_rank else []
            ):
                if (rank < tp) != (last_first < first) and last_first != first:
                    raise FormatError(
                        f"{path}: has elements before those of {last_path}: files were swapped; put each back under its own name"
                    )
            last_by_rank[pp, exp] = tp, first, path


def _read_shard_file(path: str, match: re.Match[str]) -> _ShardFile:
    file = open_tensor_file(path)
    if "data" not in file.entries:
        raise FormatError(f"{path}: has tensors {', '.join(sorted(file.entries))}; needed `data`")
    shape = file.entries["data"].shape
    if match[2] is None:
        return _ShardFile(file, None, shape, ((full_box(shape), full_box(shape)),))
    try:
        slices = str(file.metadata["local_global_slices_pairs"])
        global_shape = tuple(
            int(size)
            for size in re.findall(
                r"\d+", re.sub(r"np\.int\d+", "", str(file.metadata["unsharded_shape"]))
            )
        )
        box_pairs = tuple(
            (_parse_box(local_box, shape), _parse_box(global_box, global_shape))
            for local_box, global_box in (pair.split("#") for pair in slices.split(";"))
        )
    except (KeyError, ValueError) as error:
        raise FormatError(
            f"{path}: its header does not say which part of the tensor it is: {error!r}"
        ) from error
    if any(
        local_box.shape != global_box.shape
        or not is_inside(local_box, shape)
        or not is_inside(global_box, global_shape)
        for local_box, global_box in box_pairs
    ):
        raise FormatError(
            f"{path}: its header's slices {slices} do not fit {shape} of {global_shape}"
        )
    return _ShardFile(
        file, (int(match[2]), int(match[3]), int(match[5] or 0)), global_shape, box_pairs
    )


def _parse_box(text: str, shape: tuple[int, ...]) -> Box:
    """`start,stop,step|...`, one for each dim, None as in a slice. ValueError for what is no box."""
    slices = [
        [None if bound == "None" else int(bound) for bound in dim.split(",")]
        for dim in text.split("|")
    ]
    if len(slices) != len(shape) or any(step not in (None, 1) for _, _, step in slices):
        raise ValueError(text)
    ranges = [
        slice(start, stop).indices(size)
        for (start, stop, _), size in zip(slices, shape, strict=True)
    ]
    return Box(tuple(low for low, _, _ in ranges), tuple(high - low for low, high, _ in ranges))


def _model_shards(shard_file: _ShardFile) -> Iterator[TensorShard]:
    for local_box, global_box in shard_file.box_pairs:
        yield TensorShard(
            global_box,
            partial(_load_box, partial(shard_file.file.tensor, "data"), local_box),
            shard_file.file.path,
        )


def _build_tensor(
    root: str,
    name: str,
    dtype: torch.dtype,
    shard_files: list[_ShardFile],
    shards: list[TensorShard],
) -> ShardedTensor:
    shapes = {shard_file.global_shape for shard_file in shard_files}
    if len(shapes) > 1:
        raise FormatError(
            f"{root}: {name}: its files are of shapes {', '.join(map(str, sorted(shapes)))}; needed one"
        )
    try:
        return sharded_tensor(dtype, shard_files[0].global_shape, shards)
    except CheckpointError as error:
        paths = ", ".join(sorted({shard.file for shard in shards}))
        raise type(error)(f"{root}: {name}: {error}; there are {paths}") from error


# ---- the optimizer


def _read_optimizer_files(root: str) -> list[_OptimizerFile]:
    """The files of all ranks, in order. IncompleteError naming those that are missing; [] where
    there is no optimizer.
    """
    folder = os.path.join(root, "optimizer")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    matches = {
        tuple(int(number or 0) for number in match.groups()[::2]): match
        for name in names
        if (match := _OPTIMIZER_FILE.fullmatch(name))
    }
    if not matches:
        return []
    sizes = {
        tuple(int(number or 1) for number in match.groups()[1::2]) for match in matches.values()
    }
    if len(sizes) > 1:
        raise FormatError(
            f"{folder}: its files are of {sorted(sizes)} ranks (pp, dp, tp, exp); needed those of one save"
        )
    missing = [ranks for ranks in product(*map(range, next(iter(sizes)))) if ranks not in matches]
    if missing:
        raise IncompleteError(
            format_list(
                f"{folder}: files are missing, of ranks (pp, dp, tp, exp)", list(map(str, missing))
            )
        )
    optimizer_files = []
    for ranks, match in sorted(matches.items()):
        path = os.path.join(folder, match[0])
        content = load_torch(path, numbered=True)
        if not isinstance(content, Mapping) or not all(
            isinstance(content.get(key), Mapping) for key in ("state", "names")
        ):
            raise FormatError(f"{path}: is no optimizer's state with names")
        pp, dp, tp, exp = ranks
        optimizer_files.append(_OptimizerFile(path, pp, dp, tp, exp, content))
    return optimizer_files


def _optimizer_tensors(
    root: str, optimizer_files: list[_OptimizerFile], shard_files: Mapping[str, list[_ShardFile]]
) -> dict[Key, ShardedTensor]:
    """State and fp32 copies of every parameter, put together as the model's tensor is."""
    tensors_by_rank: dict[
        Key, dict[tuple[int, int, int], list[tuple[_OptimizerFile, torch.Tensor]]]
    ] = {}
    for optimizer_file in optimizer_files:
        for key, tensor in _state_tensors(optimizer_file):
            tensors_by_rank.setdefault(key, {}).setdefault(
                (optimizer_file.pp, optimizer_file.tp, optimizer_file.exp), []
            ).append((optimizer_file, tensor))
    tensors: dict[Key, ShardedTensor] = {}
    missing = sorted({_parameter_name(key) for key in tensors_by_rank} - set(shard_files))
    if missing:
        raise IncompleteError(
            format_list(
                f"{root}: parameters of the optimizer that the model has no file of", missing
            )
        )
    for key, rank_tensors in tensors_by_rank.items():
        tensor_files = shard_files[_parameter_name(key)]
        first_tensor = next(iter(rank_tensors.values()))[0][1]
        if first_tensor.dim() == 0:
            tensors[key] = whole_tensor(first_tensor, next(iter(rank_tensors.values()))[0][0].path)
            continue
        shards: list[TensorShard] = []  # of a tensor that every rank has whole, the lowest one's
        for shard_file in tensor_files:
            file_tensors = (
                rank_tensors.get(shard_file.ranks)
                if shard_file.ranks is not None
                else rank_tensors[min(rank_tensors)]
            )
            if file_tensors is not None:
                shards += _optimizer_shards(root, key, shard_file, file_tensors)
        tensors[key] = _build_tensor(root, ":".join(key), first_tensor.dtype, tensor_files, shards)
    return tensors


def _parameter_name(key: Key) -> str:
    return key[1].rpartition("/")[0] if key[0] == OPTIMIZER else key[1]


def _state_tensors(optimizer_file: _OptimizerFile) -> Iterator[tuple[Key, torch.Tensor]]:
    names = optimizer_file.parameter_names()
    for index, entry in optimizer_file.content["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield (OPTIMIZER, f"{names[index]}/{key}"), value
    for name, value in optimizer_file.content.get("gradient_accumulator", {}).items():
        yield (MASTER, str(name).removeprefix("module.")), value


def _scalars(optimizer_files: list[_OptimizerFile]) -> dict[str, dict[str, Any]]:
    return merge_scalars(
        (optimizer_file.path, optimizer_file.parameter_names()[index], entry)
        for optimizer_file in optimizer_files
        for index, entry in optimizer_file.content["state"].items()
    )


def _optimizer_shards(
    root: str,
    key: Key,
    shard_file: _ShardFile,
    file_tensors: list[tuple[_OptimizerFile, torch.Tensor]],
) -> Iterator[TensorShard]:
    """Fragments of what the data-parallel ranks have of a part: the part itself, or flat ranges of
    it, one after another.
    """
    numel = sum(tensor.numel() for _, tensor in file_tensors)
    if numel != prod(shard_file.local_shape):
        raise FormatError(
            f"{root}: {':'.join(key)}: its files have {numel} elements; needed {prod(shard_file.local_shape)}, those of {shard_file.file.path}"
        )
    flat_start = 0
    for optimizer_file, tensor in file_tensors:
        flat = tensor.detach().reshape(-1)
        offset = flat_start
        for block in range_to_boxes(shard_file.local_shape, flat_start, flat_start + flat.numel()):
            block_values = flat[offset - flat_start : offset - flat_start + block.numel].view(
                block.shape
            )
            offset += block.numel
            for local_box, global_box in shard_file.box_pairs:
                common = intersect(block, local_box)
                if common is not None:
                    global_offsets = tuple(
                        a - b + c
                        for a, b, c in zip(
                            common.offsets, local_box.offsets, global_box.offsets, strict=True
                        )
                    )
                    inner = Box(
                        tuple(a - b for a, b in zip(common.offsets, block.offsets, strict=True)),
                        common.shape,
                    )
                    yield TensorShard(
                        Box(global_offsets, common.shape),
                        partial(_load_box, block_values.detach, inner),
                        optimizer_file.path,
                    )
        flat_start += flat.numel()


def _load_box(load: Any, box: Box) -> torch.Tensor:
    tensor: torch.Tensor = load()[
        tuple(
            slice(first, first + count) for first, count in zip(box.offsets, box.shape, strict=True)
        )
    ]
    return tensor


def _param_groups(optimizer_files: list[_OptimizerFile]) -> list[dict[str, Any]]:
    """Param groups by their number, of the parameters of all ranks; where ranks have other options
    for one, it is several.
    """
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for optimizer_file in optimizer_files:
        names = optimizer_file.parameter_names()
        for number, group in enumerate(optimizer_file.content.get("param_groups", [])):
            options = {key: value for key, value in group.items() if key != "params"}
            entry = merged.setdefault((number, repr(options)), {"names": {}, "options": options})
            entry["names"].update(
                dict.fromkeys(names[index] for index in group["params"] if index in names)
            )
    return [
        {"names": list(entry["names"]), "options": entry["options"]}
        for _, entry in sorted(merged.items(), key=lambda item: item[0])
    ]

"""Reads ZeRO's optimizer files, one per rank, each opened on demand.

Missing and truncated files are detected when the folder is opened, because zip archives end
with their table of contents. Files of two saves are detected when a file is opened: its
content must match rank 0's.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, StorageError
from unified_ckpt.foreign.deepspeed.layout import FlatLayout, FlatRange
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.restricted_pickle.archive import check_archive_name
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder, to_plain
from unified_ckpt.runtime.storage.regular_files import file_size, is_file, is_shortage

FP32 = "fp32"  # our key for the weights, next to the keys of optimizer state
ParamGroups = tuple[tuple[Mapping[str, Any], tuple[int, ...]], ...]  # (options, flat groups)
PLACEHOLDER_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",  # scripts put their arguments into the client state
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of one rank's file; tuples have one entry per flat group.

    `flat_tensors`: this rank's partition of the weights and of each state. `scalars`: state that
    is one number. `param_groups`: see `parse_param_groups`. `paddings`: elements that are omitted
    at the end. `gaps`: unused elements after each parameter; None if there are none.
    """

    path: str
    stage: int
    world_size: int
    flat_tensors: tuple[Mapping[str, torch.Tensor], ...]
    scalars: tuple[Mapping[str, torch.Tensor], ...]
    param_groups: ParamGroups
    paddings: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...] | None
    loss_scaler: Any


def read_rank_file(path: str) -> RankFile:
    """Read one rank's file. FormatError if ZeRO did not write it."""
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    with parsing(path, "an optimizer file of ZeRO"):
        return _parse_rank_file(path, content["optimizer_state_dict"])


def _parse_rank_file(path: str, content: Mapping[str, Any]) -> RankFile:
    saved_stage = content.get("zero_stage", 1)  # BF16_Optimizer does not store it
    stage = int(saved_stage.args[0] if isinstance(saved_stage, Placeholder) else saved_stage)
    if stage == 3:
        weights, optimizer_state = content["fp32_flat_groups"], content["optimizer_state_dict"]
    else:
        weights = content["single_partition_of_fp32_groups"]
        optimizer_state = content["base_optimizer_state"]
    elastic = isinstance(optimizer_state, list)  # only the states, without padding
    states_by_index = dict(enumerate(optimizer_state)) if elastic else optimizer_state["state"]
    groups = [] if elastic else optimizer_state["param_groups"]
    steps = {i: group["step"] for group in groups if "step" in group for i in group["params"]}
    common = {}
    if "base_optimizer_state_step" in content:
        common = {"step": content["base_optimizer_state_step"]}
    flat_tensors, scalars = [], []
    for index, weight in enumerate(weights):
        group_step = {"step": steps[index]} if index in steps else {}
        values = common | group_step | dict(states_by_index.get(index, {}))
        flat_tensors.append(
            {FP32: weight.detach()}
            | {key: value for key, value in values.items() if _is_flat_tensor(value)}
        )
        scalars.append(
            {
                key: as_state_tensor(path, key, value)
                for key, value in values.items()
                if not _is_flat_tensor(value)
            }
        )
    gaps = content.get("param_alignment_paddings")
    paddings = (0,) * len(weights)
    if stage < 3 and "zero_stage" in content:
        paddings = tuple(content.get("group_paddings") or paddings)
    return RankFile(
        path,
        stage,
        _world_size(path, content["partition_count"]),
        tuple(flat_tensors),
        tuple(scalars),
        parse_param_groups(path, groups, len(weights)),
        paddings,
        tuple(map(tuple, gaps)) if gaps is not None else None,
        to_plain(content.get("loss_scaler")),
    )


def _is_flat_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def parse_param_groups(path: str, groups: Sequence[Mapping[str, Any]], count: int) -> ParamGroups:
    """Return each param group's options, and the indices of its flat groups, of `count` in all.

    Empty if the file has no param groups.
    """
    param_groups = tuple(
        (
            {str(k): v for k, v in group.items() if k not in ("params", "step")},
            tuple(group["params"]),
        )
        for group in groups
    )
    flat_groups = [indices for _, indices in param_groups]
    if param_groups and [i for indices in flat_groups for i in indices] != list(range(count)):
        raise FormatError(
            f"{path}: got param groups of flat groups {flat_groups}, expected {count} in order"
        )
    return param_groups


def as_state_tensor(path: str, key: str, value: Any) -> torch.Tensor:
    """Return optimizer state as a tensor; numbers become float32, as torch keeps step counts."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, int | float):
        return torch.tensor(float(value), device="cpu")
    raise FormatError(
        f"{path}: optimizer state {key!r}: got {type(value).__name__}, expected a tensor or number"
    )


def _world_size(path: str, partition_count: Any) -> int:
    counts = set(partition_count) if isinstance(partition_count, list) else {partition_count}
    if len(counts) != 1:
        raise FormatError(
            f"{path}: got groups partitioned over {sorted(counts)} ranks, as with expert "
            "parallelism; expected one number of ranks"
        )
    return int(counts.pop())


class OptimizerFiles:
    """The optimizer files of all ranks, opened on demand and kept open.

    `paths`: by rank. `reference`: rank 0's file, with which all others must agree.
    """

    def __init__(self, reference: RankFile, paths: Sequence[str], layout: FlatLayout) -> None:
        self._reference, self._paths, self._layout = reference, paths, layout
        self._lock = threading.Lock()
        self._open_files: dict[int, RankFile] = {0: reference}
        self._check(reference, 0)

    def file_path(self, flat_range: FlatRange) -> str:
        """Return the path of the file that has this range."""
        return self._paths[flat_range.rank]

    def elements(self, flat_range: FlatRange, key: str) -> torch.Tensor:
        """Return the range's elements of a state, as an alias of the mapped file."""
        rank = flat_range.rank
        with self._lock:
            if rank not in self._open_files:
                rank_file = read_rank_file(self._paths[rank])
                self._check(rank_file, rank)
                self._open_files[rank] = rank_file
            partition = self._open_files[rank].flat_tensors[flat_range.group][key]
            return partition[flat_range.partition_slice]

    def _check(self, rank_file: RankFile, rank: int) -> None:
        path, reference = rank_file.path, self._reference
        partitioning = rank_file.stage, rank_file.world_size, rank_file.gaps
        if partitioning != (reference.stage, reference.world_size, reference.gaps):
            raise FormatError(
                f"{path}: got ZeRO stage {rank_file.stage} on {rank_file.world_size} ranks, "
                f"expected stage {reference.stage} on {reference.world_size} "
                f"as in {reference.path}"
            )
        if list(map(set, rank_file.flat_tensors)) != list(map(set, reference.flat_tensors)):
            raise FormatError(
                f"{path}: got other flat groups or states than {reference.path}, "
                "expected files of one save"
            )
        if not all(map(_equal, rank_file.scalars, reference.scalars)):
            raise FormatError(
                f"{path}: got step {_steps(rank_file)}, expected {_steps(reference)} as in "
                f"{reference.path}: these are files of two saves"
            )
        for group, flat_tensors in enumerate(rank_file.flat_tensors):
            min_numel = self._layout.min_numel(rank, group)
            max_numel = self._layout.partition_numels[group]
            for key, tensor in flat_tensors.items():
                dtype = reference.flat_tensors[group][key].dtype
                size_fits = tensor.dim() == 1 and min_numel <= tensor.numel() <= max_numel
                if not size_fits or tensor.dtype != dtype:
                    raise FormatError(
                        f"{path}: flat group {group}: {key}: got shape {tuple(tensor.shape)} of "
                        f"{tensor.dtype}, expected {min_numel} to {max_numel} elements of {dtype}"
                    )

    def close(self) -> None:
        """Drop the open files; tensors read from them stay mapped while they are referenced."""
        with self._lock:
            self._open_files.clear()


def _equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def _steps(rank_file: RankFile) -> list[float]:
    return [float(scalars["step"]) for scalars in rank_file.scalars if "step" in scalars]


def check_archives(paths: Sequence[str]) -> None:
    """Raise IncompleteError naming files that are missing or truncated.

    An archive ends with its table of contents. FormatError if a file was written under another
    rank's name.
    """
    raise_if_any(
        IncompleteError,
        "files are missing or truncated",
        [path for path in paths if not is_file(path) or not _is_complete(path)],
    )


def _is_complete(path: str) -> bool:
    """Return whether an archive ends with its table of contents.

    DeepSpeed can also write pre-zip files. These only have to be non-empty; truncation shows when
    they are read.
    """
    try:
        check_archive_name(path)
        return (file_size(path) or 0) > 1
    except (zipfile.BadZipFile, OSError, StorageError) as error:
        if is_shortage(error):
            raise
        return False

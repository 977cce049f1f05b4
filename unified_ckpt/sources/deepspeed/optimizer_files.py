"""The optimizer's files of ZeRO, one a rank: what one says, and all of them, each opened when it is
first needed.

A file that is missing or cut short is found out when the folder is opened, for archives end with
their own table of contents. What a file says is compared with rank 0's when it is opened: files of
two saves are an error.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError, StorageError
from unified_ckpt.sources.deepspeed.layout import FlatLayout, FlatRange
from unified_ckpt.sources.restricted_pickle.archive import check_archive_name
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import Placeholder

FP32 = "fp32"  # our key for the weights, among the keys of the optimizer's state
ParamGroups = tuple[tuple[Mapping[str, Any], tuple[int, ...]], ...]
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
    """What one rank's file says. By group: `flat_tensors`, the rank's share of the weights and of
    each state; `scalars`, state that is one number.

    `param_groups`: as `parse_param_groups` gives them. `paddings`: elements of each group that are
    left out at the end. `gaps`: unused elements after each parameter, None where there are none.
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
    """FormatError where it is not what ZeRO writes."""
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    try:
        return _parse_rank_file(path, content["optimizer_state_dict"])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise FormatError(
            f"{path}: is not what DeepSpeed's ZeRO writes: {type(error).__name__}: {error}"
        ) from error


def _parse_rank_file(path: str, content: Mapping[str, Any]) -> RankFile:
    stage = as_int(content.get("zero_stage", 1))  # BF16_Optimizer says none
    optimizer_state = (
        content["optimizer_state_dict"] if stage == 3 else content["base_optimizer_state"]
    )
    weights = (
        content["fp32_flat_groups"] if stage == 3 else content["single_partition_of_fp32_groups"]
    )
    elastic = isinstance(optimizer_state, list)  # the states alone, without padding
    states_by_index = dict(enumerate(optimizer_state)) if elastic else optimizer_state["state"]
    groups = [] if elastic else optimizer_state["param_groups"]
    steps = {
        index: value["step"] for value in groups if "step" in value for index in value["params"]
    }
    common = (
        {"step": content["base_optimizer_state_step"]}
        if "base_optimizer_state_step" in content
        else {}
    )
    flat_tensors, scalars = [], []
    for index, weight in enumerate(weights):
        values = (
            common
            | ({"step": steps[index]} if index in steps else {})
            | dict(states_by_index.get(index, {}))
        )
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
    without_padding = stage < 3 and "zero_stage" in content
    return RankFile(
        path,
        stage,
        _world_size(path, content["partition_count"]),
        tuple(flat_tensors),
        tuple(scalars),
        parse_param_groups(path, groups, len(weights)),
        tuple(content.get("group_paddings") or [0] * len(weights))
        if without_padding
        else (0,) * len(weights),
        tuple(map(tuple, gaps)) if gaps is not None else None,
        placeholder_fields(content.get("loss_scaler")),
    )


def _is_flat_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def parse_param_groups(path: str, groups: Sequence[Mapping[str, Any]], count: int) -> ParamGroups:
    """For each param group its options, and which of the `count` flat groups are its. None where
    the file says nothing of them.
    """
    param_groups = tuple(
        (
            {str(k): v for k, v in group.items() if k not in ("params", "step")},
            tuple(group["params"]),
        )
        for group in groups
    )
    if param_groups and [index for _, indices in param_groups for index in indices] != list(
        range(count)
    ):
        raise FormatError(
            f"{path}: param groups have flat groups {[indices for _, indices in param_groups]}; needed {count}, in order"
        )
    return param_groups


def as_state_tensor(path: str, key: str, value: Any) -> torch.Tensor:
    """Optimizer state as a tensor. A plain number as torch's optimizers keep their count: in
    float32.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, int | float):
        return torch.tensor(float(value), device="cpu")
    raise FormatError(
        f"{path}: optimizer state {key!r} is a {type(value).__name__}; needed a tensor or a number"
    )


def placeholder_fields(value: Any) -> Any:
    """An object's fields in place of it."""
    return (
        value.state if isinstance(value, Placeholder) and isinstance(value.state, dict) else value
    )


def as_int(value: Any) -> int:
    """Of a number that may be a member of an enum."""
    return int(value.args[0] if isinstance(value, Placeholder) else value)


def _world_size(path: str, partition_count: Any) -> int:
    counts = set(partition_count) if isinstance(partition_count, list) else {partition_count}
    if len(counts) != 1:
        raise FormatError(
            f"{path}: its groups are spread over {sorted(counts)} ranks, as experts are; needed one number for all"
        )
    return int(counts.pop())


class OptimizerFiles:
    """The files of all ranks. `paths`: by rank. Rank 0's is open; another is opened when it is
    first asked for, and stays so.
    """

    def __init__(self, reference: RankFile, paths: Sequence[str], layout: FlatLayout) -> None:
        self._reference, self._paths, self._layout = reference, paths, layout
        self._lock = threading.Lock()
        self._open_files: dict[int, RankFile] = {0: reference}
        self._check(reference, 0)

    def file_path(self, flat_range: FlatRange) -> str:
        return self._paths[flat_range.rank]

    def elements(self, flat_range: FlatRange, key: str) -> torch.Tensor:
        """An alias of the file of the span's rank."""
        rank = flat_range.rank
        with self._lock:
            if rank not in self._open_files:
                rank_file = read_rank_file(self._paths[rank])
                self._check(rank_file, rank)
                self._open_files[rank] = rank_file
            return self._open_files[rank].flat_tensors[flat_range.group][key][
                flat_range.partition_offset : flat_range.partition_offset + flat_range.numel
            ]

    def _check(self, rank_file: RankFile, rank: int) -> None:
        reference = self._reference
        if (rank_file.stage, rank_file.world_size, rank_file.gaps) != (
            reference.stage,
            reference.world_size,
            reference.gaps,
        ):
            raise FormatError(
                f"{rank_file.path}: is of ZeRO stage {rank_file.stage} on {rank_file.world_size} ranks, {reference.path} of {reference.stage} on {reference.world_size}"
            )
        if [set(tensor) for tensor in rank_file.flat_tensors] != [
            set(tensor) for tensor in reference.flat_tensors
        ]:
            raise FormatError(
                f"{rank_file.path}: has other groups or states than {reference.path}; needed files of one save"
            )
        if any(
            not _equal(scalars, expected)
            for scalars, expected in zip(rank_file.scalars, reference.scalars, strict=True)
        ):
            raise FormatError(
                f"{rank_file.path}: is of step {_steps(rank_file)}, {reference.path} of {_steps(reference)}; needed files of one save"
            )
        for group, flat_tensors in enumerate(rank_file.flat_tensors):
            min_numel, max_numel = (
                self._layout.min_numel(rank, group),
                self._layout.partition_numels[group],
            )
            for key, tensor in flat_tensors.items():
                if (
                    tensor.dim() != 1
                    or not min_numel <= tensor.numel() <= max_numel
                    or tensor.dtype != reference.flat_tensors[group][key].dtype
                ):
                    got = f"has {tuple(tensor.shape)} elements of {tensor.dtype} for {key} of group {group}"
                    raise FormatError(
                        f"{rank_file.path}: {got}; needed {min_numel} to {max_numel} of {reference.flat_tensors[group][key].dtype}"
                    )

    def close(self) -> None:
        """Forgets the files; what was read of them stays mapped as long as somebody holds it."""
        with self._lock:
            self._open_files.clear()


def _equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def _steps(rank_file: RankFile) -> list[float]:
    return [float(scalars["step"]) for scalars in rank_file.scalars if "step" in scalars]


def check_archives(paths: Sequence[str]) -> None:
    """IncompleteError naming the files that are not there, or end before their table of contents,
    which archives have last.

    FormatError for a file that was written as another rank's.
    """
    incomplete = [path for path in paths if not os.path.isfile(path) or not _is_complete(path)]
    if incomplete:
        raise IncompleteError(format_list("files are missing or end early", incomplete))


def _is_complete(path: str) -> bool:
    """A file of before archives, which DeepSpeed can be told to write, only has to have something:
    what lacks is seen when it is read.
    """
    try:
        check_archive_name(path)
        return os.path.getsize(path) > 1
    except (zipfile.BadZipFile, OSError, StorageError):
        return False

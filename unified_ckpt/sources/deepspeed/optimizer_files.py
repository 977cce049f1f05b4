"""The optimizer's files of ZeRO, one a rank: what one says, and all of them, each opened when it is first needed.

A file that is missing or cut short is found out when the folder is opened, for archives end with their own table of contents. What a file
says is compared with rank 0's when it is opened: files of two saves are an error.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError, StorageError
from unified_ckpt.sources.deepspeed.layout import Layout, Span
from unified_ckpt.sources.restricted_pickle.archive import check_archive_name
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import Stub

FP32 = "fp32"  # our key for the weights, among the keys of the optimizer's state
Owners = tuple[tuple[Mapping[str, Any], tuple[int, ...]], ...]
STUBS = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",  # scripts put their arguments into the client state
)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank's file says. By group: `flats`, the rank's share of the weights and of each state; `scalars`, state that is one number.

    `owners`: as `owners_of` gives them. `paddings`: elements of each group that are left out at
    the end. `gaps`: unused elements after each parameter, None where there are none.
    """

    path: str
    stage: int
    world: int
    flats: tuple[Mapping[str, torch.Tensor], ...]
    scalars: tuple[Mapping[str, torch.Tensor], ...]
    owners: Owners
    paddings: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...] | None
    loss_scaler: Any


def read_shard(path: str) -> Shard:
    """FormatError where it is not what ZeRO writes."""
    told = load_torch(path, stubs=STUBS)
    try:
        return _shard(path, told["optimizer_state_dict"])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise FormatError(
            f"{path}: is not what DeepSpeed's ZeRO writes: {type(error).__name__}: {error}"
        ) from error


def _shard(path: str, told: Mapping[str, Any]) -> Shard:
    stage = plain_int(told.get("zero_stage", 1))  # BF16_Optimizer says none
    inner = told["optimizer_state_dict"] if stage == 3 else told["base_optimizer_state"]
    weights = told["fp32_flat_groups"] if stage == 3 else told["single_partition_of_fp32_groups"]
    elastic = isinstance(inner, list)  # the states alone, without padding
    states = dict(enumerate(inner)) if elastic else inner["state"]
    groups = [] if elastic else inner["param_groups"]
    steps = {number: one["step"] for one in groups if "step" in one for number in one["params"]}
    everybody = (
        {"step": told["base_optimizer_state_step"]} if "base_optimizer_state_step" in told else {}
    )
    flats, scalars = [], []
    for number, weight in enumerate(weights):
        said = (
            everybody
            | ({"step": steps[number]} if number in steps else {})
            | dict(states.get(number, {}))
        )
        flats.append(
            {FP32: weight.detach()} | {key: one for key, one in said.items() if _is_flat(one)}
        )
        scalars.append(
            {key: as_number(path, key, one) for key, one in said.items() if not _is_flat(one)}
        )
    gaps = told.get("param_alignment_paddings")
    stripped = stage < 3 and "zero_stage" in told
    return Shard(
        path,
        stage,
        _world(path, told["partition_count"]),
        tuple(flats),
        tuple(scalars),
        owners_of(path, groups, len(weights)),
        tuple(told.get("group_paddings") or [0] * len(weights))
        if stripped
        else (0,) * len(weights),
        tuple(map(tuple, gaps)) if gaps is not None else None,
        unstubbed(told.get("loss_scaler")),
    )


def _is_flat(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() > 0


def owners_of(path: str, groups: Sequence[Mapping[str, Any]], count: int) -> Owners:
    """For each param group its options, and which of the `count` flat groups are its. None where the file says nothing of them."""
    owners = tuple(
        ({str(k): v for k, v in one.items() if k not in ("params", "step")}, tuple(one["params"]))
        for one in groups
    )
    if owners and [number for _, numbers in owners for number in numbers] != list(range(count)):
        raise FormatError(
            f"{path}: param groups have flat groups {[numbers for _, numbers in owners]}; needed {count}, in order"
        )
    return owners


def as_number(path: str, key: str, one: Any) -> torch.Tensor:
    """Optimizer state as a tensor. A plain number as torch's optimizers keep their count: in float32."""
    if isinstance(one, torch.Tensor):
        return one.detach()
    if isinstance(one, int | float):
        return torch.tensor(float(one), device="cpu")
    raise FormatError(
        f"{path}: optimizer state {key!r} is a {type(one).__name__}; needed a tensor or a number"
    )


def unstubbed(one: Any) -> Any:
    """An object's fields in place of it."""
    return one.state if isinstance(one, Stub) and isinstance(one.state, dict) else one


def plain_int(told: Any) -> int:
    """Of a number that may be a member of an enum."""
    return int(told.args[0] if isinstance(told, Stub) else told)


def _world(path: str, told: Any) -> int:
    counts = set(told) if isinstance(told, list) else {told}
    if len(counts) != 1:
        raise FormatError(
            f"{path}: its groups are spread over {sorted(counts)} ranks, as experts are; needed one number for all"
        )
    return int(counts.pop())


class Ranks:
    """The files of all ranks. `paths`: by rank. Rank 0's is open; another is opened when it is first asked for, and stays so."""

    def __init__(self, first: Shard, paths: Sequence[str], layout: Layout) -> None:
        self._first, self._paths, self._layout = first, paths, layout
        self._lock = threading.Lock()
        self._open: dict[int, Shard] = {0: first}
        self._check(first, 0)

    def where(self, span: Span) -> str:
        return self._paths[span.rank]

    def elements(self, span: Span, key: str) -> torch.Tensor:
        """An alias of the file of the span's rank."""
        rank = span.rank
        with self._lock:
            if rank not in self._open:
                found = read_shard(self._paths[rank])
                self._check(found, rank)
                self._open[rank] = found
            return self._open[rank].flats[span.group][key][span.start : span.start + span.numel]

    def _check(self, one: Shard, rank: int) -> None:
        first = self._first
        if (one.stage, one.world, one.gaps) != (first.stage, first.world, first.gaps):
            raise FormatError(
                f"{one.path}: is of ZeRO stage {one.stage} on {one.world} ranks, {first.path} of {first.stage} on {first.world}"
            )
        if [set(flat) for flat in one.flats] != [set(flat) for flat in first.flats]:
            raise FormatError(
                f"{one.path}: has other groups or states than {first.path}; needed files of one save"
            )
        if any(
            not _equal(mine, theirs)
            for mine, theirs in zip(one.scalars, first.scalars, strict=True)
        ):
            raise FormatError(
                f"{one.path}: is of step {_step(one)}, {first.path} of {_step(first)}; needed files of one save"
            )
        for group, flats in enumerate(one.flats):
            least, most = self._layout.least(rank, group), self._layout.partitions[group]
            for key, flat in flats.items():
                if (
                    flat.dim() != 1
                    or not least <= flat.numel() <= most
                    or flat.dtype != first.flats[group][key].dtype
                ):
                    has = f"has {tuple(flat.shape)} elements of {flat.dtype} for {key} of group {group}"
                    raise FormatError(
                        f"{one.path}: {has}; needed {least} to {most} of {first.flats[group][key].dtype}"
                    )

    def close(self) -> None:
        """Forgets the files; what was read of them stays mapped as long as somebody holds it."""
        with self._lock:
            self._open.clear()


def _equal(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def _step(one: Shard) -> list[float]:
    return [float(scalars["step"]) for scalars in one.scalars if "step" in scalars]


def check_whole(paths: Sequence[str]) -> None:
    """IncompleteError naming the files that are not there, or end before their table of contents, which archives have last.

    FormatError for a file that was written as another rank's.
    """
    cut = [path for path in paths if not os.path.isfile(path) or not _has_contents(path)]
    if cut:
        raise IncompleteError(listed("files are missing or end early", cut))


def _has_contents(path: str) -> bool:
    """A file of before archives, which DeepSpeed can be told to write, only has to have something: what lacks is seen when it is read."""
    try:
        check_archive_name(path)
        return os.path.getsize(path) > 1
    except (zipfile.BadZipFile, OSError, StorageError):
        return False

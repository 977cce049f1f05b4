"""Where the elements of each parameter lie in ZeRO's flat groups. Pure: numbers and names, no
files.

Source of the layouts: DeepSpeed's `stage_1_and_2.py`, `bf16_optimizer.py` and `stage3.py`. Stages 1
and 2 put a group's parameters one after another and cut that in equal partitions, one a rank. Stage
3 cuts each parameter in equal parts, and a rank has its parts one after another. The order of the
parameters is that of `param_shapes`; the slices that the optimizer's files name are wrong under
round-robin gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.errors import FormatError

MAX_RANGE_NUMEL = 4 << 20  # elements of one span: what is compared at once with the other copy


class FlatRange(NamedTuple):
    """Elements [first, first + numel) of a flattened parameter: those from `partition_offset` of a
    rank's share of a group.
    """

    param_offset: int
    numel: int
    rank: int
    group: int
    partition_offset: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """`ranges`: by parameter. `partition_numels`: elements of each group on one rank.
    `used_numels`: elements of each group that are some parameter's or lie between two; what a rank
    has beyond them is padding, which some versions leave out.
    """

    ranges: Mapping[str, tuple[FlatRange, ...]]
    partition_numels: tuple[int, ...]
    used_numels: tuple[int, ...]

    def min_numel(self, rank: int, group: int) -> int:
        """Elements that a rank must have of a group."""
        partition_numel = self.partition_numels[group]
        return min(partition_numel, max(0, self.used_numels[group] - rank * partition_numel))


def zero12_layout(
    groups: Sequence[Mapping[str, int]],
    gaps: Sequence[Sequence[int]],
    partition_numels: Sequence[int],
    *,
    world_size: int,
) -> FlatLayout:
    """Of stages 1 and 2, and of BF16_Optimizer. `groups`: elements by parameter, in order; `gaps`:
    unused elements after each.

    FormatError where the partitions are not those of these parameters.
    """
    ranges: dict[str, tuple[FlatRange, ...]] = {}
    used_numels = []
    _check_group_count(groups, partition_numels)
    for group, (numels, group_gaps, partition_numel) in enumerate(
        zip(groups, gaps, partition_numels, strict=True)
    ):
        if len(group_gaps) != len(numels):
            raise FormatError(
                f"group {group} has {len(numels)} parameters and {len(group_gaps)} paddings; needed one each"
            )
        offset = 0
        for (name, numel), gap in zip(numels.items(), group_gaps, strict=True):
            ranges[name] = (
                tuple(_contiguous_ranges(offset, numel, partition_numel, group))
                if partition_numel
                else ()
            )
            offset += numel + gap
        slack = world_size * partition_numel - offset
        if not 0 <= slack < 2 * world_size:  # a group is padded to a multiple of 2 * world
            raise FormatError(
                f"group {group} has {world_size} partitions of {partition_numel} elements; its parameters need {offset}"
            )
        used_numels.append(offset)
    return FlatLayout(ranges, tuple(partition_numels), tuple(used_numels))


def _contiguous_ranges(
    offset: int, numel: int, partition_numel: int, group: int
) -> Iterator[FlatRange]:
    """Elements [at, at + numel) of a group, by the ranks that have them."""
    param_offset = 0
    while param_offset < numel:
        rank, partition_offset = divmod(offset + param_offset, partition_numel)
        count = min(numel - param_offset, partition_numel - partition_offset, MAX_RANGE_NUMEL)
        yield FlatRange(param_offset, count, rank, group, partition_offset)
        param_offset += count


def zero3_layout(
    groups: Sequence[Mapping[str, int]], partition_numels: Sequence[int], *, world_size: int
) -> FlatLayout:
    """Of stage 3. FormatError where the partitions are not those of these parameters."""
    ranges: dict[str, tuple[FlatRange, ...]] = {}
    _check_group_count(groups, partition_numels)
    for group, (numels, partition_numel) in enumerate(zip(groups, partition_numels, strict=True)):
        offset = 0
        for name, numel in numels.items():
            ranges[name] = tuple(
                partitioned_ranges(
                    numel, world_size=world_size, group=group, partition_offset=offset
                )
            )
            offset += -(-numel // world_size)
        if offset != partition_numel:
            raise FormatError(
                f"group {group} has {partition_numel} elements on each rank; its parameters need {offset}"
            )
    return FlatLayout(
        ranges,
        tuple(partition_numels),
        tuple(world_size * partition_numel for partition_numel in partition_numels),
    )


def partitioned_ranges(
    numel: int, *, world_size: int, group: int, partition_offset: int
) -> Iterator[FlatRange]:
    """A parameter that is cut in equal parts, the last ones padded. `partition_offset`: of each
    part in its rank's share.
    """
    part_numel = -(-numel // world_size)
    for rank in range(world_size):
        param_offset, stop = rank * part_numel, min(numel, (rank + 1) * part_numel)
        while param_offset < stop:
            count = min(stop - param_offset, MAX_RANGE_NUMEL)
            yield FlatRange(
                param_offset,
                count,
                rank,
                group,
                partition_offset + param_offset - rank * part_numel,
            )
            param_offset += count


def _check_group_count(groups: Sequence[object], partition_numels: Sequence[object]) -> None:
    if len(groups) != len(partition_numels):
        raise FormatError(
            f"has {len(partition_numels)} groups; the model's file names {len(groups)}"
        )

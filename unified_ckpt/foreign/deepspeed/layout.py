"""Where each parameter's elements lie in ZeRO's flat groups. Pure: numbers and names, no files.

The layouts follow DeepSpeed's `stage_1_and_2.py`, `bf16_optimizer.py` and `stage3.py`.
Stages 1 and 2 concatenate a group's parameters and split the result into equal partitions,
one per rank. Stage 3 splits each parameter into equal parts; a rank concatenates its parts.

The order of the parameters is that of `param_shapes`. The slices recorded in the optimizer's
files are wrong under round-robin gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.errors import FormatError

MAX_RANGE_NUMEL = 4 << 20  # elements that are compared at once with the model's weights


class FlatRange(NamedTuple):
    """A contiguous range of a flattened parameter, and where one rank stores it.

    Covers elements [param_offset, param_offset + numel) of the parameter. They start at
    `partition_offset` in the partition of `group` on `rank`.
    """

    param_offset: int
    numel: int
    rank: int
    group: int
    partition_offset: int

    @property
    def param_slice(self) -> slice:
        """The range within the flattened parameter."""
        return slice(self.param_offset, self.param_offset + self.numel)

    @property
    def partition_slice(self) -> slice:
        """The range within the rank's partition of the group."""
        return slice(self.partition_offset, self.partition_offset + self.numel)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The flat ranges of every parameter, and the sizes of the flat groups.

    `ranges`: by parameter name. `partition_numels`: elements per rank of each group.
    `used_numels`: elements of each group up to the end of its last parameter, gaps included.
    Anything beyond is padding, which some DeepSpeed versions omit.
    """

    ranges: Mapping[str, tuple[FlatRange, ...]]
    partition_numels: tuple[int, ...]
    used_numels: tuple[int, ...]

    def min_numel(self, rank: int, group: int) -> int:
        """Return the number of elements that `rank` must store of `group`."""
        partition_numel = self.partition_numels[group]
        return min(partition_numel, max(0, self.used_numels[group] - rank * partition_numel))


def zero12_layout(
    groups: Sequence[Mapping[str, int]],
    gaps: Sequence[Sequence[int]],
    partition_numels: Sequence[int],
    *,
    world_size: int,
) -> FlatLayout:
    """Return the layout of stages 1 and 2, and of BF16_Optimizer.

    `groups`: numel by parameter name, in order. `gaps`: unused elements after each parameter.
    `partition_numels`: elements per rank of each group. FormatError if they do not fit the
    parameters.
    """
    ranges: dict[str, tuple[FlatRange, ...]] = {}
    used_numels = []
    _check_group_count(groups, partition_numels)
    for group, (numels, group_gaps, partition_numel) in enumerate(
        zip(groups, gaps, partition_numels, strict=True)
    ):
        if len(group_gaps) != len(numels):
            raise FormatError(
                f"flat group {group}: got {len(group_gaps)} paddings for {len(numels)} parameters, "
                "expected one per parameter"
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
        if not 0 <= slack < 2 * world_size:  # groups are padded to a multiple of 2 * world_size
            raise FormatError(
                f"flat group {group}: got {world_size} partitions of {partition_numel} elements, "
                f"expected {offset} elements for its parameters"
            )
        used_numels.append(offset)
    return FlatLayout(ranges, tuple(partition_numels), tuple(used_numels))


def _contiguous_ranges(
    offset: int, numel: int, partition_numel: int, group: int
) -> Iterator[FlatRange]:
    """Yield ranges for elements [offset, offset + numel) of a group, split at partition ends."""
    for rank in range(offset // partition_numel, -(-(offset + numel) // partition_numel)):
        partition = rank * partition_numel
        first, stop = max(offset, partition), min(offset + numel, partition + partition_numel)
        yield from _ranges_on(rank, group, first - offset, stop - offset, first - partition)


def _ranges_on(
    rank: int, group: int, first: int, stop: int, partition_offset: int
) -> Iterator[FlatRange]:
    """Yield ranges for elements [first, stop) of a parameter, all on one rank."""
    for start in range(first, stop, MAX_RANGE_NUMEL):
        count = min(MAX_RANGE_NUMEL, stop - start)
        yield FlatRange(start, count, rank, group, partition_offset + start - first)


def zero3_layout(
    groups: Sequence[Mapping[str, int]], partition_numels: Sequence[int], *, world_size: int
) -> FlatLayout:
    """Return the layout of stage 3. FormatError if the partitions do not fit the parameters."""
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
                f"flat group {group}: got {partition_numel} elements per rank, "
                f"expected {offset} for its parameters"
            )
    return FlatLayout(
        ranges,
        tuple(partition_numels),
        tuple(world_size * partition_numel for partition_numel in partition_numels),
    )


def partitioned_ranges(
    numel: int, *, world_size: int, group: int, partition_offset: int
) -> Iterator[FlatRange]:
    """Yield the ranges of a parameter split into equal parts, one per rank, the last ones padded.

    `partition_offset`: where each part starts in its rank's partition.
    """
    part_numel = -(-numel // world_size)
    for rank in range(world_size):
        stop = min(numel, (rank + 1) * part_numel)
        yield from _ranges_on(rank, group, rank * part_numel, stop, partition_offset)


def _check_group_count(groups: Sequence[object], partition_numels: Sequence[object]) -> None:
    if len(groups) != len(partition_numels):
        raise FormatError(
            f"got {len(partition_numels)} flat groups, expected {len(groups)} as in the model file"
        )

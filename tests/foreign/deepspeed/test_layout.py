"""ZeRO's flat groups restore parameters sliced by torch; sizes that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt.foreign.deepspeed.layout as layouts
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.engine.source.protocol import SourceMetadata, read_box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.deepspeed.layout import FlatLayout, FlatRange, zero3_layout, zero12_layout
from unified_ckpt.foreign.deepspeed.parameters import tensor_from_ranges
from unified_ckpt.foreign.formats import detect_format
from unified_ckpt.views.sharded_source import ShardedSource

SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)


def named(sizes: list[list[int]]) -> list[dict[str, int]]:
    return [
        {f"p{group}.{i}": numel for i, numel in enumerate(numels)}
        for group, numels in enumerate(sizes)
    ]


def assemble(layout: FlatLayout, shares: list[list[torch.Tensor]], name: str) -> torch.Tensor:
    ranges = layout.ranges[name]
    assert [span.param_offset for span in ranges] == [
        sum(flat_range.numel for flat_range in ranges[:i]) for i in range(len(ranges))
    ]
    return torch.cat(
        [
            shares[flat_range.rank][flat_range.group][
                flat_range.partition_offset : flat_range.partition_offset + flat_range.numel
            ]
            for flat_range in ranges
        ]
    )


@given(sizes=SIZES, world=st.integers(1, 9), cut=st.integers(1, 50), align=st.sampled_from([1, 4]))
def test_zero12_layout_restores_parameters(
    sizes: list[list[int]], world: int, cut: int, align: int
) -> None:
    """Stages 1 and 2."""
    groups, parameters = named(sizes), {}
    gaps = [[-numel % align for numel in numels[:-1]] + [0] for numels in sizes]
    shares: list[list[torch.Tensor]] = [[] for _ in range(world)]
    partitions = []
    for group, after in zip(groups, gaps, strict=True):
        flat: list[torch.Tensor] = []
        for (name, numel), gap in zip(group.items(), after, strict=True):
            parameters[name] = torch.randn(numel)
            flat += [parameters[name], torch.full((gap,), torch.nan)]
        joined = torch.cat(flat)
        partitions.append(-(-joined.numel() // (2 * world)) * 2)
        padded = torch.cat(
            [joined, torch.full((world * partitions[-1] - joined.numel(),), torch.nan)]
        )
        for rank, part in enumerate(padded.split(partitions[-1])):
            shares[rank].append(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "MAX_RANGE_NUMEL", cut)
        layout = zero12_layout(groups, gaps, partitions, world_size=world)
    for name, expected in parameters.items():
        assert torch.equal(assemble(layout, shares, name), expected)
        assert all(flat_range.numel <= cut for flat_range in layout.ranges[name])
    for number, numels in enumerate(sizes):  # only padding may be missing
        assert sum(layout.min_numel(rank, number) for rank in range(world)) == sum(numels) + sum(
            gaps[number]
        )


@given(sizes=SIZES, world=st.integers(1, 9), cut=st.integers(1, 50))
def test_zero3_layout_restores_parameters(sizes: list[list[int]], world: int, cut: int) -> None:
    """Stage 3."""
    groups, parameters = named(sizes), {}
    shares: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in groups:
        parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for name, numel in group.items():
            parameters[name], part = torch.randn(numel), -(-numel // world)
            padded = torch.cat([parameters[name], torch.full((world * part - numel,), torch.nan)])
            for rank, tensor in enumerate(padded.split(part)):
                parts[rank].append(tensor)
        for rank in range(world):
            shares[rank].append(torch.cat(parts[rank]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "MAX_RANGE_NUMEL", cut)
        layout = zero3_layout(groups, [tensor.numel() for tensor in shares[0]], world_size=world)
    for name, expected in parameters.items():
        assert torch.equal(assemble(layout, shares, name), expected)


WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: zero12_layout([{"a": 10}], [[0]], [4], world_size=2),
        "flat group 0: got 2 partitions of 4 elements, expected 10",
    ),
    (
        lambda: zero12_layout([{"a": 10}], [[0]], [7], world_size=2),
        "flat group 0: got 2 partitions of 7 elements, expected 10",
    ),
    (
        lambda: zero12_layout([{"a": 10}], [[0, 0]], [6], world_size=2),
        "flat group 0: got 2 paddings for 1 parameters",
    ),
    (
        lambda: zero12_layout([{"a": 10}], [[0]], [6, 6], world_size=2),
        "got 2 flat groups, expected 1",
    ),
    (
        lambda: zero3_layout([{"a": 10, "b": 3}], [6], world_size=2),
        "flat group 0: got 6 elements per rank, expected 7",
    ),
    (
        lambda: zero3_layout([{"a": 10}, {"b": 3}], [5], world_size=2),
        "got 1 flat groups, expected 2",
    ),
]


@pytest.mark.parametrize(("make", "text"), WRONG)
def test_wrong_partitions_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        make()


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        (
            [FlatRange(0, 2, 0, 0, 0), FlatRange(3, 1, 1, 0, 0)],
            r"rank 1: got elements from 3 of a tensor of shape \(2, 2\), expected them from 2",
        ),
        (
            [FlatRange(0, 3, 0, 0, 0), FlatRange(2, 2, 1, 0, 0)],
            r"rank 1: got elements from 2 (.|\n)*, expected them from 3",
        ),
        ([FlatRange(0, 3, 0, 0, 0)], r"got files with 3 elements, expected 4 for shape \(2, 2\)"),
    ],
)
def test_ranges_with_gaps_or_overlaps_are_refused(spans: list[FlatRange], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        tensor_from_ranges(
            (2, 2), torch.float32, spans, lambda _: torch.zeros(1), lambda span: f"rank {span.rank}"
        )


def test_ranges_are_loaded_on_demand() -> None:
    loaded: list[int] = []

    def load(number: int) -> torch.Tensor:
        loaded.append(number)
        return torch.full((4,), float(number))

    spans = [FlatRange(4 * i, 4, i, 0, 0) for i in range(6)]
    tensor = tensor_from_ranges(
        (8, 3), torch.float32, spans, load, lambda span: f"rank {span.rank}"
    )
    source = ShardedSource(
        "folder", {("model", "w"): tensor}, format="test", metadata=SourceMetadata()
    )
    values = torch.frombuffer(
        read_box(source, ("model", "w"), Box((3, 0), (2, 3))), dtype=torch.float32
    )
    assert values.tolist() == [2, 2, 2, 3, 3, 3]
    assert sorted(set(loaded)) == [2, 3]
    assert prod(tensor.box_shape) == 24


@pytest.mark.parametrize(
    ("entries", "known"),
    [
        (["latest", "global_step3", "zero_to_fp32.py"], True),
        (["latest", "checkpoint", "zero_to_fp32.py"], True),  # as Lightning writes it
        (["latest_universal", "global_step3_universal"], True),
        (["mp_rank_00_model_states.pt"], True),
        (
            [
                "zero_pp_rank_0_mp_rank_00_model_states.pt",
                "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            ],
            True,
        ),
        (["latest", "epoch-5", "zero_to_fp32.py"], True),  # a tag chosen by the caller
        (["latest", "zero_to_fp32.py", "model.safetensors"], False),
        (["latest", "step-5"], False),
        (["global_step3"], False),
        (["iter_0000001", "latest_checkpointed_iteration.txt"], False),
        (["mp_rank_00"], False),
    ],
)
def test_deepspeed_folder_detection(tmp_path: Path, entries: list[str], known: bool) -> None:
    for name in entries:
        (tmp_path / name).touch()
    format_ = detect_format(str(tmp_path), format_name=None)
    assert (format_ is not None and format_.name == "deepspeed") == known

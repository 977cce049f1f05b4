"""Loads into boxes that ranks declare, from checkpoints of whole tensors and of rules.

The oracle is numpy slices.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import unified_ckpt as uc
from tests.support.engine.tilings import Tiling, tilings
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.objects.buckets import URL, registered_bucket
from unified_ckpt.core.planning import box_reads, lanes
from unified_ckpt.engine.load import extents, tensor_reader
from unified_ckpt.engine.plan.chunks import chunks
from unified_ckpt.runtime.comm.comm import Comm

WORLD = 3
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.just((4, 3000))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads of some KiB have several chunks, lanes, and gaps that are too long."""
    monkeypatch.setattr(extents, "CHUNK_NBYTES", 1 << 12)
    monkeypatch.setattr(extents, "chunks", partial(chunks, nbytes=1 << 12))
    monkeypatch.setattr(lanes, "MIN_LANE_NBYTES", 1 << 12)
    monkeypatch.setattr(tensor_reader, "lane_count", lambda *, ranks: 2)
    monkeypatch.setattr(box_reads, "SMALL_NBYTES", 64)
    monkeypatch.setattr(box_reads, "MAX_GAP_NBYTES", 1 << 10)


def array_of(shape: tuple[int, ...], number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    numel = int(np.prod(shape, dtype=int))
    return np.arange(100_000 * number, 100_000 * number + numel, dtype=np.float32).reshape(shape)


@settings(max_examples=10)
@given(
    drawn=st.tuples(*(tilings(WORLD, SHAPES) for _ in range(3))),
    verify=st.sampled_from(["read", "full", "off"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loads_fill_boxes(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Tiling, ...],
    verify: str,
    dtype: torch.dtype,
) -> None:
    """Beside a tensor of a rule, and one that every rank holds whole."""
    folder = tmp_path_factory.mktemp("c") / "c"
    arrays = [array_of(each.shape, number) for number, each in enumerate(drawn)]
    rows = torch.arange(66.0).view(2 * WORLD, 11)
    others = {"rows": rows, "whole": torch.arange(5.0)}
    stored = {f"w{i}": torch.from_numpy(array) for i, array in enumerate(arrays)}
    uc.save(folder, model=stored | others, options=uc.SaveOptions(fsync=False))

    def act(comm: Comm) -> None:
        rank = comm.rank
        targets = [each.target(rank, dtype, -1.0) for each in drawn]
        model: dict[str, Any] = {f"w{i}": target for i, target in enumerate(targets)}
        model |= {"rows": torch.zeros(2, 11), "whole": torch.zeros(5)}
        layout = uc.Layout({"dp": WORLD}, {"rows": {"dp": 0}})
        with make_checkpointer(comm) as checkpointer:
            options = uc.LoadOptions(verify=verify)  # type: ignore[arg-type]
            checkpointer.load(folder, model=model, layout=layout, options=options)
        assert torch.equal(model["rows"], rows[2 * rank : 2 * rank + 2])
        assert torch.equal(model["whole"], others["whole"])
        for tiling, target, array in zip(drawn, targets, arrays, strict=True):
            filled, expected = tiling.filled(rank, target), tiling.expected(rank, array)
            for one, other in zip(filled, expected, strict=True):
                assert np.array_equal(one, other)
            assert (tiling.padding(target) == -1).all()

    run_ranks(WORLD, act)


def columns(array: torch.Tensor, low: int, high: int, **options: Any) -> uc.Shards:
    """Return a target for some columns of a matrix."""
    local = torch.full((len(array), high - low), -1, dtype=options.get("dtype", array.dtype))
    box = ((0, low), (0, 0), tuple(local.shape))
    return uc.Shards(local, options.get("shape", tuple(array.shape)), [box])


def damage(folder: Path, offset: int) -> None:
    """Flip a bit, `offset` bytes from the end of the model's file."""
    (file,) = folder.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-offset] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("span", "at", "verify", "is_detected"),
    [
        ((0, 1 << 19), 5, "read", True),  # two whole blocks, in the last one
        ((100, 1 << 19), 5, "read", True),
        ((100, 1 << 19), 2_000_000, "read", False),  # in the first one, which is read in part
        ((100, 1 << 19), 2_000_000, "full", True),
        ((0, 200_000), 5, "full", False),  # a block from which nothing is needed
        ((0, 1 << 19), 5, "off", False),
    ],
)
def test_damage_is_detected_in_blocks_that_are_read(
    tmp_path: Path, span: tuple[int, int], at: int, verify: str, *, is_detected: bool
) -> None:
    """Of two blocks of a tensor of 2 MiB; the load has no other ranks."""
    whole = torch.arange(float(1 << 19))
    uc.save(tmp_path / "c", model={"w": whole})
    damage(tmp_path / "c", at)
    target = uc.Shards.flat(torch.zeros(span[1] - span[0]), (1 << 19,), span[0])
    load = partial(uc.load, tmp_path / "c", model={"w": target})
    options = uc.LoadOptions(verify=verify)  # type: ignore[arg-type]
    if is_detected:
        with pytest.raises(uc.IntegrityError, match="model:w"):
            load(options=options)
    else:
        load(options=options)


def test_blocks_between_boxes_of_one_rank_are_verified(tmp_path: Path) -> None:
    """A flat range is several boxes, none of which has the whole block."""
    whole = torch.arange(float(3 * 70_000)).view(3, 70_000)
    uc.save(tmp_path / "c", model={"w": whole})
    target = uc.Shards.flat(torch.zeros(whole.numel() - 10), (3, 70_000), 5)
    assert len(target.boxes) == 3
    report = uc.load(tmp_path / "c", model={"w": target})
    assert report.verified_bytes == 0, "the first and last elements of the block are not read"
    target = uc.Shards.flat(torch.zeros(whole.numel()), (3, 70_000), 0)
    halves = [((0, low), (0, low), (3, 35_000)) for low in (0, 35_000)]
    for each in (target, uc.Shards(torch.zeros(3, 70_000), (3, 70_000), halves)):
        report = uc.load(tmp_path / "c", model={"w": each})
        assert report.verified_bytes == whole.nbytes
        assert torch.equal(each.tensor.view(-1), whole.view(-1))


def test_boxes_that_overlap_are_loaded(tmp_path: Path) -> None:
    """As halos are. Their bytes are read twice, so that only "full" verifies them."""
    whole = torch.arange(64.0).view(8, 8)
    uc.save(tmp_path / "c", model={"w": whole})
    boxes = [((0, 0), (0, 0), (5, 8)), ((3, 0), (5, 0), (5, 8)), ((3, 0), (10, 0), (5, 8))]
    for verify, nbytes in (("read", 0), ("full", 3 * whole.nbytes)):
        local = torch.zeros(15, 8)
        options = uc.LoadOptions(verify=verify)  # type: ignore[arg-type]
        model = {"w": uc.Shards(local, (8, 8), boxes)}
        report = uc.load(tmp_path / "c", model=model, options=options)
        assert torch.equal(local, torch.cat([whole[:5], whole[3:], whole[3:]]))
        assert report.verified_bytes == nbytes


def test_names_of_boxes_are_reported_once(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    uc.save(tmp_path / "c", model={"w": whole, "v": whole.double()})
    shards = [((0, 0), (0, 0), (1, 4)), ((2, 0), (1, 0), (1, 4))]
    model = {
        name: uc.Shards(torch.zeros(2, 4), shape, shards)
        for name, shape in (("w", (4, 4)), ("v", (3, 4)), ("absent", (3, 4)))
    }
    with pytest.raises(uc.MismatchError) as caught:
        uc.load(tmp_path / "c", model=model)
    error = caught.value
    assert [*error.missing, *error.unexpected] == ["model:absent"]
    assert sorted(text[:7] for text in error.wrong) == ["model:v", "model:w"]


def test_padded_targets_fill_the_corner(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    uc.save(tmp_path / "c", model={"w": whole})
    boxes = [((low, 0), (low, 0), (4, 3)) for low in (0, 4)]
    local = torch.full((8, 3), -1.0)
    rename = [{"match": "w", "pad": 0}]
    options = uc.LoadOptions(source=uc.SourceOptions(rename=rename))
    report = uc.load(tmp_path / "c", model={"w": uc.Shards(local, (8, 3), boxes)}, options=options)
    assert torch.equal(local[:5], whole)
    assert (local[5:] == -1).all()
    assert any("(5, 3) -> (8, 3)" in note for note in report.notes)


def test_ties_are_compared_in_boxes(tmp_path: Path) -> None:
    """Two stored tensors that one local tensor ties: equal ones are loaded, others are an error."""
    whole = torch.arange(12.0).view(3, 4)
    for name, other in (("equal", whole.clone()), ("other", whole + 1)):
        uc.save(tmp_path / name, model={"a": whole.clone(), "b": other})
    for verify in ("read", "off"):
        options = uc.LoadOptions(verify=verify)  # type: ignore[arg-type]
        model = dict.fromkeys(("a", "b"), checkpointable(whole, 1, 3))
        report = uc.load(tmp_path / "equal", model=model, options=options)
        assert torch.equal(model["a"], whole[:, 1:3])
        assert [note for note in report.notes if "tied" in note] == [
            "tied in the target, stored as equal tensors: model:a"
        ]
        with pytest.raises(uc.MismatchError, match="ties a and b"):
            uc.load(tmp_path / "other", model=model, options=options)


def checkpointable(whole: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return columns of a matrix as two boxes of torch's protocol, one below the other."""
    tensor: Any = torch.zeros(len(whole), high - low)
    tensor.global_shape = tuple(whole.shape)
    tensor.local_offsets = ((0, 0), (1, 0))
    tensor.global_offsets = ((0, low), (1, low))
    tensor.local_sizes = ((1, high - low), (len(whole) - 1, high - low))
    return tensor


def trained(parameter: torch.Tensor, *, steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    module = nn.Module()
    module.w = nn.Parameter(parameter)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for step in range(steps):
        module.w.grad = torch.full_like(module.w, step + 1.0) * module.w.detach().cos()
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_state_is_cut_as_its_parameter(tmp_path: Path, steps: int) -> None:
    """Of a parameter of torch's protocol; with `steps`, the target has state of its own."""
    whole, optimizer = trained(torch.linspace(0, 1, 12).view(3, 4), steps=3)
    uc.save(tmp_path / "c", model=whole, optimizer=optimizer)

    def act(comm: Comm) -> None:
        low, high = ((0, 1), (1, 4))[comm.rank]
        parameter = checkpointable(whole.w, low, high)
        module, target = trained(torch.zeros(3, high - low), steps=steps)
        for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            setattr(module.w, name, getattr(parameter, name))
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", model=module, optimizer=target)
        assert torch.equal(module.w, whole.w[:, low:high])
        state, expected = target.state[module.w], optimizer.state[whole.w]
        assert state["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], expected[name][:, low:high])

    run_ranks(2, act)


def test_masters_are_read_into_boxes(tmp_path: Path) -> None:
    """A wider model takes the masters, in the place of its own tensors."""
    master = torch.linspace(0, 1, 12).view(3, 4)
    uc.save(tmp_path / "c", model={"w": master.bfloat16()}, master_weights={"w": master})
    model = {"w": columns(master, 1, 3)}
    uc.load(tmp_path / "c", model=model, master_weights={"w": columns(master, 1, 3)}, strict=False)
    uc.save(tmp_path / "masters", master_weights={"w": master})
    target = columns(master, 1, 3)
    uc.load(tmp_path / "masters", model={"w": target})
    assert torch.equal(target.tensor, master[:, 1:3])


@pytest.mark.parametrize("compression", ["O1", "O2"])
def test_compressed_state_is_read_into_boxes(tmp_path: Path, compression: str) -> None:
    module, optimizer = trained(torch.linspace(0, 1, 300 * 70).view(300, 70), steps=3)
    options = uc.SaveOptions(compression=compression)  # type: ignore[arg-type]
    uc.save(tmp_path / "c", model=module, optimizer=optimizer, options=options)
    whole = {f"w/{name}": torch.zeros(300, 70) for name in ("exp_avg", "exp_avg_sq")}
    uc.load(tmp_path / "c", optimizer={**whole, "w/step": torch.zeros(())})
    for low, high in ((0, 70), (3, 9)):
        boxes = {name: columns(tensor, low, high) for name, tensor in whole.items()}
        uc.load(tmp_path / "c", optimizer={**boxes, "w/step": torch.zeros(())})
        for name, target in boxes.items():
            assert torch.equal(target.tensor, whole[name][:, low:high])


def test_folders_of_dcp_are_read_into_boxes(tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    save_dcp({"w": whole}, tmp_path / "c")
    target = columns(whole, 2, 5)
    uc.load(tmp_path / "c", model={"w": target})
    assert torch.equal(target.tensor, whole[:, 2:5])


def test_boxes_are_read_from_a_bucket() -> None:
    """Rows in place, columns with their gaps, in requests that are announced."""
    whole = torch.arange(300.0 * 500).view(300, 500)
    with registered_bucket():
        uc.save(f"{URL}/c", model={"w": whole, "v": whole + 1})
        rows = [((10, 0), (0, 0), (200, 500))]
        model = {
            "w": columns(whole, 3, 9),
            "v": uc.Shards(torch.zeros(200, 500), (300, 500), rows),
        }
        uc.load(f"{URL}/c", model=model)
    assert torch.equal(model["w"].tensor, whole[:, 3:9])
    assert torch.equal(model["v"].tensor, whole[10:210] + 1)


class Doubled(nn.Module):
    """Stores a tensor of torch's protocol under another name, halved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", checkpointable(torch.zeros(3, 4), 1, 3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}w"].mul_(2)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_modules_that_convert_receive_a_copy_of_boxes(tmp_path: Path) -> None:
    whole, module = torch.arange(12.0).view(3, 4), Doubled()
    uc.save(tmp_path / "c", model={"w": whole})
    report = uc.load(tmp_path / "c", model=module)
    assert torch.equal(module.w, 2 * whole[:, 1:3])
    assert any("loaded by Doubled" in note for note in report.notes)


def test_tensors_without_elements_keep_their_names(tmp_path: Path) -> None:
    empty = uc.Shards(torch.zeros(0, 4), (0, 4), [])
    uc.save(tmp_path / "c", model={"w": empty, "v": torch.zeros(1)})
    with uc.open(tmp_path / "c") as source:
        assert source["model"]["w"].shape == (0, 4)
    uc.load(tmp_path / "c", model={"w": empty, "v": torch.zeros(1)})

"""Two checkpoints compared: every kind of difference is found, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import unified_ckpt as uc
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source import diff_values as module
from unified_ckpt.engine.source.diff import DiffReport, diff_sources

State = dict[str, torch.Tensor]


def report_of(tmp_path: Path, first: State, second: State, **options: Any) -> DiffReport:
    save = uc.SaveOptions(fsync=False, if_exists="replace")
    with ExitStack() as stack:
        sources = []
        for name, state in (("a", first), ("b", second)):
            uc.save(tmp_path / name, model=state, options=save)
            sources.append(
                stack.enter_context(closing(open_path(str(tmp_path / name), lock=False)))
            )
        return diff_sources(*sources, **options)


def state() -> State:
    return {
        "w": torch.arange(12.0).reshape(3, 4),
        "n": torch.arange(5),
        "h": torch.arange(7).to(torch.bfloat16),
    }


def test_equal_checkpoints_are_equal_without_reading(tmp_path: Path) -> None:
    tensors = {**state(), "nan": torch.tensor([float("nan"), 1.0])}
    for deep, nbytes in ((False, 0), (True, 2 * (48 + 40 + 14 + 8))):
        report = report_of(tmp_path, tensors, tensors, deep=deep)
        assert (report.equal, report.differences, report.bytes_read) == (4, (), nbytes)


NUMBERS = torch.tensor([0.0, 1, 2, 3])
CASES: dict[str, tuple[torch.Tensor, int, float | None]] = {
    "one element": (torch.tensor([0.0, 1, 2, 3.5]), 1, 0.5),
    "nan": (torch.tensor([0.0, 1, 2, float("nan")]), 1, None),
    "minus zero": (torch.tensor([-0.0, 1, 2, 3]), 1, 0.0),
    "infinity": (torch.tensor([0.0, 1, 2, float("inf")]), 1, float("inf")),
    "another dtype, equal values": (torch.tensor([0.0, 1, 2, 3], dtype=torch.float64), 0, 0.0),
    "another dtype, other values": (torch.tensor([0, 1, 2, 5]), 1, 2.0),
    "packed": (torch.arange(1, 9, dtype=torch.uint8).view(torch.float8_e8m0fnu), 8, None),
}


@pytest.mark.parametrize("case", CASES)
def test_differences_are_counted_and_measured(tmp_path: Path, case: str) -> None:
    other, elements, largest = CASES[case]
    first = torch.arange(8, dtype=torch.uint8).view(other.dtype) if case == "packed" else NUMBERS
    (difference,) = report_of(tmp_path, {"w": first}, {"w": other}).differences
    assert (difference.name, difference.elements) == ("w", elements)
    assert difference.max_abs == largest or case == "packed"


def test_packed_elements_are_compared_as_bytes(tmp_path: Path) -> None:
    codes = torch.arange(8, dtype=torch.uint8)
    first, second = (c.view(torch.float4_e2m1fn_x2) for c in (codes, codes ^ (codes == 3)))
    (difference,) = report_of(tmp_path, {"w": first}, {"w": second}).differences
    assert (difference.elements, difference.max_abs) == (1, None)


def test_part_that_one_checkpoint_lacks(tmp_path: Path) -> None:
    for name, parts in (("a", {"ema": state()}), ("b", {})):
        uc.save(tmp_path / name, model=state(), parts=parts)
    with ExitStack() as stack:
        sources = [
            stack.enter_context(closing(open_path(str(tmp_path / name), lock=False)))
            for name in "ab"
        ]
        report = diff_sources(*sources)
    assert {(d.part, d.name, d.second) for d in report.differences} == {
        ("ema", name, None) for name in state()
    }


def test_shapes_and_absence(tmp_path: Path) -> None:
    first, second = state(), state()
    first["w"] = first["w"].reshape(4, 3)
    del second["n"]
    second["x"] = torch.ones(1)
    report = report_of(tmp_path, first, second)
    shapes = {
        difference.name: (
            difference.first and difference.first.shape,
            difference.second and difference.second.shape,
        )
        for difference in report.differences
    }
    assert shapes == {"w": ((4, 3), (3, 4)), "n": ((5,), None), "x": (None, (1,))}
    assert report.equal == 1


def test_tied_weight_is_equal_under_either_name(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tied, apart = {"a": shared, "b": shared}, {"a": shared, "b": shared.clone()}
    for first, second in ((tied, apart), (apart, tied)):
        assert report_of(tmp_path, first, second, deep=True).differences == ()


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 39), max_size=5),
    st.sampled_from([torch.float32, torch.int16, torch.float16]),
)
def test_chunk_differences_add_up(count: int, places: list[int], dtype: torch.dtype) -> None:
    first = torch.arange(count).to(dtype)
    second = first.clone()
    for place in {place % count for place in places}:
        second[place] += 3
    differ = int((first != second).sum())
    chunks = [(first[low : low + 7], second[low : low + 7]) for low in range(0, count, 7)]
    differences = [module._chunk_difference(a, b) for a, b in chunks]
    assert sum(elements for elements, _ in differences) == differ
    assert max(step or 0.0 for _, step in differences) == (3.0 if differ else 0.0)


def test_chunks_are_the_tensor_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5)
    first, second = {"w": torch.arange(23.0)}, {"w": torch.arange(23.0)}
    second["w"][[4, 5, 22]] += torch.tensor([1.0, 2.0, 4.0])
    (difference,) = report_of(tmp_path, first, second).differences
    assert (difference.elements, difference.max_abs) == (3, 4.0)


def test_only_requested_parts_and_names_are_compared(tmp_path: Path) -> None:
    first, second = state(), {name: tensor + 1 for name, tensor in state().items()}
    assert [
        difference.name
        for difference in report_of(tmp_path, first, second, match="model:[wn]").differences
    ] == ["n", "w"]
    with pytest.raises(uc.NotFoundError, match="is in neither checkpoint; expected one of model"):
        report_of(tmp_path, first, second, parts=["optimizer"])


def test_diff_command_compares_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uc.save(tmp_path / "a", model=state())
    torch.save({**state(), "h": torch.arange(7).to(torch.float32)}, tmp_path / "b.pt")
    (tmp_path / "c").mkdir()
    save_file(state(), tmp_path / "c" / "model.safetensors")
    cases: list[tuple[list[str], int, str]] = [
        (["c"], 0, "3 tensors equal, 0 different"),
        (["b.pt"], 1, "model:h  BF16 [7] and F32 [7], equal values"),
        (["b.pt", "--match", "w", "--json"], 0, '"equal": 1'),
        (["nowhere"], 1, "there is no such folder"),
    ]
    for (name, *options), code, text in cases:
        assert main(["diff", str(tmp_path / "a"), str(tmp_path / name), *options]) == code
        assert text in "".join(capsys.readouterr())


def test_name_tied_to_other_tensors_is_compared(tmp_path: Path) -> None:
    a, b = torch.zeros(3), torch.ones(3)
    first, second = {"a": a, "b": b, "c": a}, {"a": a, "b": b, "c": b}
    report = report_of(tmp_path, first, second)
    assert [(difference.name, difference.elements) for difference in report.differences] == [
        ("c", 3)
    ]
    assert report_of(tmp_path / "same", first, dict(first)).equal == 2, (
        "a name of one tensor on both sides is that tensor"
    )

"""Two checkpoints compared: every kind of difference is found, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import unified_ckpt as uc
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source import diff as module
from unified_ckpt.engine.source.diff import DiffReport, diff_sources

State = dict[str, torch.Tensor]


def report_of(tmp_path: Path, first: State, second: State, **options: Any) -> DiffReport:
    for name, state in (("a", first), ("b", second)):
        uc.save(
            tmp_path / name, model=state, options=uc.SaveOptions(fsync=False, if_exists="replace")
        )
    one, other = (
        open_path(str(tmp_path / "a"), lock=False),
        open_path(str(tmp_path / "b"), lock=False),
    )
    return diff_sources(one, other, **options)


def state() -> State:
    return {
        "w": torch.arange(12.0).reshape(3, 4),
        "n": torch.arange(5),
        "h": torch.arange(7).to(torch.bfloat16),
    }


def test_equal_checkpoints_are_equal_without_reading(tmp_path: Path) -> None:
    report = report_of(tmp_path, state(), state())
    assert (report.equal, report.differences, report.bytes_read) == (3, (), 0)
    report = report_of(tmp_path, state(), state(), deep=True)
    assert (report.equal, report.differences, report.bytes_read) == (3, (), 2 * (48 + 40 + 14))


CASES: dict[str, tuple[torch.Tensor, int, float | None]] = {
    "one element": (torch.tensor([0.0, 1, 2, 3.5]), 1, 0.5),
    "nan": (torch.tensor([0.0, 1, 2, float("nan")]), 1, None),
    "minus zero": (torch.tensor([-0.0, 1, 2, 3]), 1, 0.0),
    "infinity": (torch.tensor([0.0, 1, 2, float("inf")]), 1, float("inf")),
    "another dtype, equal values": (torch.tensor([0.0, 1, 2, 3], dtype=torch.float64), 0, 0.0),
    "another dtype, other values": (torch.tensor([0, 1, 2, 5]), 1, 2.0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_counted_and_measured(tmp_path: Path, case: str) -> None:
    other, elements, largest = CASES[case]
    report = report_of(tmp_path, {"w": torch.tensor([0.0, 1, 2, 3])}, {"w": other})
    (found,) = report.differences
    assert (found.name, found.elements, found.max_abs) == ("w", elements, largest)


def test_nan_equals_itself(tmp_path: Path) -> None:
    one = {"w": torch.tensor([float("nan"), 1.0])}
    assert report_of(tmp_path, one, one, deep=True).differences == ()


def test_shapes_and_absence(tmp_path: Path) -> None:
    first, second = state(), state()
    first["w"] = first["w"].reshape(4, 3)
    del second["n"]
    second["x"] = torch.ones(1)
    report = report_of(tmp_path, first, second)
    told = {
        one.name: (one.first and one.first.shape, one.second and one.second.shape)
        for one in report.differences
    }
    assert told == {"w": ((4, 3), (3, 4)), "n": ((5,), None), "x": (None, (1,))}
    assert report.equal == 1


def test_a_tied_weight_is_equal_under_either_name(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    uc.save(tmp_path / "tied", model={"a": shared, "b": shared})
    uc.save(tmp_path / "apart", model={"a": shared, "b": shared.clone()})
    with_alias, without = (
        open_path(str(tmp_path / "tied"), lock=False),
        open_path(str(tmp_path / "apart"), lock=False),
    )
    for one, other in ((with_alias, without), (without, with_alias)):
        assert diff_sources(one, other, deep=True).differences == ()


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 39), max_size=5),
    st.sampled_from([torch.float32, torch.int16, torch.float16]),
)
def test_any_elements_that_differ_are_found_over_chunks(
    count: int, places: list[int], dtype: torch.dtype
) -> None:
    one = torch.arange(count).to(dtype)
    other = one.clone()
    for place in {place % count for place in places}:
        other[place] += 3
    differ = int((one != other).sum())
    chunks = [(one[low : low + 7], other[low : low + 7]) for low in range(0, count, 7)]
    found = [module._chunk_difference(a, b) for a, b in chunks]
    assert sum(elements for elements, _ in found) == differ
    assert max(step or 0.0 for _, step in found) == (3.0 if differ else 0.0)


def test_chunks_are_the_tensor_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5)
    first, second = {"w": torch.arange(23.0)}, {"w": torch.arange(23.0)}
    second["w"][[4, 5, 22]] += torch.tensor([1.0, 2.0, 4.0])
    (found,) = report_of(tmp_path, first, second).differences
    assert (found.elements, found.max_abs) == (3, 4.0)


def test_only_requested_parts_and_names_are_compared(tmp_path: Path) -> None:
    first, second = state(), {name: tensor + 1 for name, tensor in state().items()}
    assert [
        one.name for one in report_of(tmp_path, first, second, match="model:[wn]").differences
    ] == ["n", "w"]
    with pytest.raises(uc.NotFoundError, match="is in neither checkpoint; expected one of model"):
        report_of(tmp_path, first, second, parts=["optimizer"])


def test_the_verb_compares_formats_and_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uc.save(tmp_path / "a", model=state())
    torch.save({**state(), "h": torch.arange(7).to(torch.float32)}, tmp_path / "b.pt")
    (tmp_path / "c").mkdir()
    save_file(state(), tmp_path / "c" / "model.safetensors")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert "3 tensors equal, 0 different" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b.pt")]) == 1
    assert "model:h  BF16 [7] and F32 [7], equal values" in capsys.readouterr().out
    assert (
        main(["diff", str(tmp_path / "a"), str(tmp_path / "b.pt"), "--match", "w", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["equal"] == 1
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_packed_formats_are_compared_by_their_bits(tmp_path: Path) -> None:
    one = torch.from_numpy(np.arange(8, dtype=np.uint8)).view(torch.float8_e8m0fnu)
    other = torch.from_numpy(np.arange(1, 9, dtype=np.uint8)).view(torch.float8_e8m0fnu)
    (found,) = report_of(tmp_path, {"w": one}, {"w": other}).differences
    assert found.elements == 8


def test_a_name_that_is_tied_to_another_tensor_on_each_side_is_compared(tmp_path: Path) -> None:
    a, b = torch.zeros(3), torch.ones(3)
    first, second = {"a": a, "b": b, "c": a}, {"a": a, "b": b, "c": b}
    report = report_of(tmp_path, first, second)
    assert [(one.name, one.elements) for one in report.differences] == [("c", 3)]
    assert report_of(tmp_path / "same", first, dict(first)).equal == 2, (
        "a name of one tensor on both sides is that tensor"
    )

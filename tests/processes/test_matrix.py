"""Every layout saves the same content, and loads folders of others bit for bit, in real torchrun +
gloo processes.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.processes.layouts import ROWS, WORLDS, dense_formula, world_of
from tests.support.processes.matrix import FOLDERS, LOADED, Matrix
from tests.support.processes.merged import read_merged

DEFAULT = [row for row in ROWS if world_of(row) in WORLDS]
SLOW = [row for row in ROWS if world_of(row) not in WORLDS]
ALL = [*DEFAULT, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)]


@pytest.mark.parametrize("row", ALL)
def test_folder_holds_the_dense_state_without_layout(matrix: Matrix, row: str) -> None:
    wrong = matrix.saved(f"formula/{row}")
    assert not wrong, "\n".join(wrong)
    matrix.saved("formula/plain")
    have, want = read_merged(matrix.root / "formula" / row), dense_formula(tied=True)
    for key in have.keys() - want.keys():  # the last stage has its own copy of the tied weight
        assert "pp" in row
        assert key.startswith("head.weight")
        want[key] = want[key.replace("head.", "embed.")]
    assert have.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(have[key], tensor, rtol=0, atol=0, msg=key)
    assert uc.verify(matrix.root / "formula" / row, deep=True).problems == ()
    digests, plain = (
        load_file(matrix.root / "formula" / name / "digests.safetensors") for name in (row, "plain")
    )
    assert all(torch.equal(digests[key], plain[key]) for key in plain), (
        "digests depend on who wrote what"
    )


def failures(cases: list[dict[str, object]], **keys: str) -> str:
    chosen = [case for case in cases if all(case[key] == value for key, value in keys.items())]
    assert chosen, f"no case with {keys} was run"
    return "\n".join(
        f"{case['kind']}/{case['source']} -> {case['target']}, rank {case['rank']}: {text}"
        for case in chosen
        for text in case["wrong"]
    )


@pytest.mark.parametrize("target", LOADED)
def test_folders_load_bit_for_bit_in(matrix: Matrix, target: str) -> None:
    wrong = failures(matrix.loaded(world_of(target), "default"), target=target)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("target", SLOW)
def test_folders_load_bit_for_bit_on_8_ranks_in(matrix: Matrix, target: str) -> None:
    wrong = failures(matrix.loaded(8, *FOLDERS), target=target)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("target", DEFAULT)
def test_slow_folders_load_bit_for_bit_in(matrix: Matrix, target: str) -> None:
    wrong = failures(matrix.loaded(world_of(target), "slow", "8 ranks"), target=target)
    assert not wrong, wrong

"""Training after a resume: the same bits in the same layout, the same losses in any other."""

from __future__ import annotations

import pytest

from tests.support.processes.layouts import ROWS, WORLDS, world_of
from tests.support.processes.matrix import FOLDERS, LOADED, Matrix

ALL = [
    pytest.param(row, marks=[] if f"trained/{row}" in FOLDERS["default"] else pytest.mark.slow)
    for row in ROWS
]
TOLERANCE = 2e-5  # relative; sums in another order, in float32


@pytest.mark.parametrize("row", ALL)
def test_same_layout_gives_bitwise_losses(matrix: Matrix, row: str) -> None:
    losses = matrix.losses(row)
    assert losses["again"] == losses["after"]


@pytest.mark.parametrize("row", ALL)
def test_layout_gives_the_losses_of_the_dense_run(matrix: Matrix, row: str) -> None:
    losses, dense = matrix.losses(row), matrix.losses("plain")
    assert losses["before"] + losses["after"] == pytest.approx(
        dense["before"] + dense["after"], rel=TOLERANCE
    )


def test_loss_moves_enough_to_be_compared(matrix: Matrix) -> None:
    losses = matrix.losses("plain")["before"] + matrix.losses("plain")["after"]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("target", LOADED)
def test_reshard_continues_with_the_dense_losses(matrix: Matrix, target: str) -> None:
    check_losses(matrix, target, "default")


@pytest.mark.slow
@pytest.mark.parametrize("target", [row for row in ROWS if world_of(row) in WORLDS])
def test_reshard_of_slow_folders_continues_with_the_dense_losses(
    matrix: Matrix, target: str
) -> None:
    check_losses(matrix, target, "slow", "8 ranks")


def check_losses(matrix: Matrix, target: str, *groups: str) -> None:
    dense = matrix.losses("plain")
    cases = [
        case
        for case in matrix.loaded(world_of(target), *groups)
        if case["target"] == target and case["losses"]
    ]
    assert {case["source"] for case in cases} - {target}
    for case in cases:
        assert case["losses"] == pytest.approx(dense["after"], rel=TOLERANCE), case["source"]

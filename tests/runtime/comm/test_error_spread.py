"""How far an error has spread is no attribute of public exceptions."""

from __future__ import annotations

import pytest

from unified_ckpt.errors import CheckpointError, LayoutError
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.error_spread import Spread, mark, narrow, spread_of


def test_unmarked_error_is_local() -> None:
    assert spread_of(ValueError("x")) is Spread.LOCAL
    assert not {"agreed", "echo", "named"} & set(dir(CheckpointError))


@pytest.mark.parametrize("spread", Spread)
def test_mark_concerns_one_error_only(spread: Spread) -> None:
    error = LayoutError("x")
    assert mark(error, spread) is error
    assert spread_of(error) is spread
    assert spread_of(LayoutError("x")) is Spread.LOCAL


@pytest.mark.parametrize("spread", Spread)
def test_narrow_changes_shared_errors_only(spread: Spread) -> None:
    error = mark(LayoutError("x"), spread)
    narrow(error)
    assert spread_of(error) is (Spread.PARTIAL if spread is Spread.SHARED else spread)


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (Spread.LOCAL, "rank 3: x"),
        (Spread.SECONDARY, "rank 3: x"),
        (Spread.PARTIAL, "x"),
        (Spread.SHARED, "x"),
    ],
)
def test_rank_is_named_once(spread: Spread, text: str) -> None:
    error = mark(LayoutError("x"), spread)
    assert str(decode_error(encode_error(error, rank=3, world=8))) == text

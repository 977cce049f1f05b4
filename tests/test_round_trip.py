"""A checkpoint of any job, saved in any way, resumes bit for bit or is refused before the first
byte: see `round_trips`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.round_trips import Case, check, draw_case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases drawn by hypothesis."""
    return draw_case(lambda values: draw(st.sampled_from(values)))


@given(cases())
@settings(max_examples=60)
def test_round_trip_is_bitwise_or_refused(case: Case) -> None:
    """Three further steps equal those of the uninterrupted run, or an error comes before the first
    byte.
    """
    with tempfile.TemporaryDirectory() as root:
        check(case, Path(root))


@pytest.mark.long
@given(cases())
@settings(max_examples=6000)
def test_round_trip_of_many_cases(case: Case) -> None:
    """The same property with thousands of cases."""
    with tempfile.TemporaryDirectory() as root:
        check(case, Path(root))

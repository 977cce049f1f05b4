from __future__ import annotations

import threading

import pytest

from unified_ckpt.runtime.threads import map_in_threads


@pytest.mark.parametrize("count", [1, 2, 50])
def test_results_are_in_the_order_of_the_items(count: int) -> None:
    assert map_in_threads(str, range(20), count=count) == [str(n) for n in range(20)]
    assert map_in_threads(str, [], count=count) == []


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4)
    assert map_in_threads(lambda n: barrier.wait(10) >= 0 and n, range(4), count=4) == [0, 1, 2, 3]


def test_an_error_ends_the_calls() -> None:
    calls = list[int]()

    def fail(number: int) -> None:
        calls.append(number)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call"):
        map_in_threads(fail, range(100), count=2)
    assert len(calls) <= 2
    assert not [t for t in threading.enumerate() if t.name == "unified_ckpt-call"]

"""The floors and the table of `benchmarks/bench_machine.py`, without measuring anything."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/, whose names are short, and forgets it afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    threads=st.integers(1, 4),
)
def test_lanes_move_every_byte_once(
    script: Callable[[str], ModuleType], sizes: list[int], ranks: int, threads: int
) -> None:
    """Each byte has one lane, and the lanes of a rank fill its memory in order."""
    files = [(Path(str(number)), 7, size) for number, size in enumerate(sizes)]
    moved = []
    for rank in range(ranks):
        position = 0
        for lane in script("floors").lanes_of(files, rank=rank, ranks=ranks, threads=threads):
            for span in lane:
                assert span.position == position
                position += span.nbytes
                moved += [(span.path.name, span.start + i) for i in range(span.nbytes)]
    assert moved == [(path.name, first + i) for path, first, size in files for i in range(size)]


def row_of(goal: str, case: str, seconds: float, **more: Any) -> dict[str, Any]:
    limit = "memcpy" if goal == "G1" else "raw"
    row = {"bench": "machine", "goal": goal, "title": "what", "case": case, "ratio_of": limit}
    row |= {"seconds_min": seconds, "first_seconds": 2 * seconds, "cpu_seconds": 1.0, "n": 3}
    row |= {"nbytes": 10**9, "device": "cuda", "settings": {}, "peak_extra_bytes": 1 << 20}
    return row | {"peak_extra_device_bytes": 65 << 20} | more


def test_table_of_a_gpu_names_floor_peer_and_goal(script: Callable[[str], ModuleType]) -> None:
    machine = {
        **dict.fromkeys(("kernel", "size", "python", "started"), "x"),
        "bench": "environment",
        "gpus": ["H200"],
        "cpus": 16,
        "memory_bytes": 10**9,
        "load_average": 0.25,
        "filesystems": ["tmpfs"],
        "peers": {"torch": "2", "safetensors": None},
    }
    rows = [machine, row_of("G1", "memcpy", 0.1), row_of("G1", "unified", 0.104)]
    rows += [row_of("G5", "raw", 0.02, tried=[{"threads": 4, "seconds": 0.02}])]
    rows += [row_of("G5", "unified_verified", 0.05), row_of("G5", "dcp", 0.4)]
    rows += [row_of("G5", "safetensors_prefetch", 0.03, settings={"threads": 8})]
    rows += [{"bench": "machine", "goal": "G6", "title": "cold", "skipped": "no time was left"}]
    table = script("machine_table").markdown(rows)
    assert "1 x H200, 16 cores" in table
    assert "| G1 | what | unified | 0.104 | 9.62 | 0.100 | 1.04 | ≤ 1.05 x floor | yes |" in table
    assert "| 0.020 | 2.50 | ≥ 25 GB/s | **no** | safetensors_prefetch (threads=8) | 0.03" in table
    assert "| G3 | what | unified | first call 0.10 s/GB longer | ≤ 0.1 | **no** |" in table
    assert "| G7 | what | unified_verified | 65.0 MiB of its GPU | ≤ 64 | **no** |" in table
    assert "all x 4: 50.00" in table
    assert "- cold: all: no time was left" in table

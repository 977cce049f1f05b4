"""Many small tensors: the work per tensor does not depend on their number.

Work is counted with a profiler hook, because clock times depend on the machine;
`benchmarks/bench_small_tensors.py` measures times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.engine.calls import calls_of
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.runtime.storage.storage import LocalStorage

NO_SYNC = uc.SaveOptions(fsync=False)


def state_of(tensors: int) -> dict[str, torch.Tensor]:
    """Mixed dtypes and scalars, so that neighbours by name are not neighbours in the file."""
    state = {f"layers.{i}.w": torch.full((2, 3), float(i)) for i in range(tensors // 2)}
    state |= {
        f"layers.{i}.b": torch.full((3,), i % 128, dtype=torch.bfloat16)
        for i in range(tensors // 4)
    }
    return state | {f"layers.{i}.step": torch.tensor(float(i)) for i in range(tensors - len(state))}


def operations(root: Path, tensors: int) -> dict[str, int]:
    """Return the work of each operation on tensors that are adjacent in the file."""
    state, counts = {f"t{i}": torch.full((3,), float(i)) for i in range(tensors)}, dict[str, int]()

    def run(name: str, act: Callable[[], object]) -> None:
        counts[name] = calls_of(act)

    def iterate() -> None:
        with uc.open(root / "one") as source:
            for name in source["model"]:
                source["model"][name][...]

    run("save", lambda: uc.save(root / "one", model=state, options=NO_SYNC))
    run("load", lambda: uc.load(root / "one", model=state))
    with uc.Checkpointer(root, options=NO_SYNC) as checkpointer:
        checkpointer.save("two", model=state)
        run("save again", lambda: checkpointer.save("three", model=state))
        run("save_async", lambda: checkpointer.save_async("four", model=state))
    run("open", iterate)
    run("verify", lambda: uc.verify(root / "one", deep=True))
    run("convert", lambda: uc.convert(root / "one", root / "five"))
    (root / "two" / "model.safetensors").write_bytes(b"?")
    run("repair", lambda: uc.repair(root / "two", []))
    return counts


def assert_linear(few: dict[str, int], many: dict[str, int], *, times: int) -> None:
    grown = {name: round(many[name] / few[name], 2) for name in few}
    assert max(grown.values()) < 1.15 * times, (
        f"{times} times as many tensors are so many times the work: {grown}"
    )


def test_work_is_linear_in_tensors(tmp_path: Path) -> None:
    operations(tmp_path / "warm", 10)
    assert_linear(operations(tmp_path / "few", 250), operations(tmp_path / "many", 1000), times=4)


@pytest.mark.slow
def test_work_of_4000_tensors_is_linear(tmp_path: Path) -> None:
    operations(tmp_path / "warm", 10)
    assert_linear(operations(tmp_path / "few", 500), operations(tmp_path / "many", 4000), times=8)


def test_ranks_share_small_tensors_in_linear_work(tmp_path: Path) -> None:
    """Each rank plans and compares all replicas; the bound leaves room for polling."""

    def work(tensors: int, root: Path) -> int:
        state = state_of(tensors)
        counts = []

        def act(comm: Any) -> None:
            with make_checkpointer(comm) as checkpointer:
                counts.append(
                    calls_of(lambda: checkpointer.save(root, model=state, options=NO_SYNC))
                )
                counts.append(calls_of(lambda: checkpointer.load(root, model=state)))

        run_ranks(2, act)
        return sum(counts)

    work(10, tmp_path / "warm")
    few, many = work(250, tmp_path / "few"), work(1000, tmp_path / "many")
    assert many < 1.3 * 4 * few, f"{many / few:.2f} times the work for 4 times the tensors"


@pytest.mark.parametrize("tensors", [3, 2000])
def test_small_tensors_need_few_io_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    calls = {"read": 0, "write": 0}
    read, write = LocalStorage.read_at, LocalStorage.write_at

    def read_at(storage: LocalStorage, *where: Any) -> None:
        calls["read"] += 1
        read(storage, *where)

    def write_at(storage: LocalStorage, *where: Any) -> None:
        calls["write"] += 1
        write(storage, *where)

    monkeypatch.setattr(LocalStorage, "read_at", read_at)
    monkeypatch.setattr(LocalStorage, "write_at", write_at)
    state = state_of(tensors)
    uc.save(tmp_path / "one", model=state, options=NO_SYNC)
    assert calls["write"] < 20
    stored = load_file(tmp_path / "one" / "model.safetensors")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    uc.load(tmp_path / "one", model=target)
    assert calls["read"] < 20
    assert stored.keys() == target.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(stored[name], tensor)
        assert torch.equal(target[name], tensor)

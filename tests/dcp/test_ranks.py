"""State dicts of several ranks: their union is stored, and errors are equal on all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import unified_ckpt as uc
from tests.support.dcp.ranks import run_dcp_ranks, try_dcp_ranks
from tests.support.dcp.states import LARGE, assert_equal
from unified_ckpt import dcp


def test_keys_are_a_union_for_any_number_of_ranks(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        weights = {f"{rank}.w": torch.full((4,), float(rank)), "both": torch.ones(LARGE)}
        return {
            "model": weights,
            f"loader_{rank}": {"position": rank, "bytes": b"x" * rank},
            f"part_{rank}": {"t": torch.full((LARGE,), float(rank))},
            "equal": 5,
        }

    run_dcp_ranks(3, lambda rank: dcp.save(state_of(rank), checkpoint_id=tmp_path / "1"))
    target: dict[str, Any] = {}
    for rank in range(3):
        target |= {
            "model": {**target.get("model", {}), f"{rank}.w": torch.zeros(4)},
            f"loader_{rank}": {"position": -1, "bytes": b""},
            f"part_{rank}": {"t": torch.zeros(LARGE)},
        }
    dcp.load(target, checkpoint_id=tmp_path / "1")
    for rank in range(3):
        expected = state_of(rank)
        assert_equal(target["model"][f"{rank}.w"], expected["model"][f"{rank}.w"])
        for key in (f"loader_{rank}", f"part_{rank}"):
            assert_equal(target[key], expected[key])


def test_values_that_differ_return_to_their_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DCP keeps those of one rank. Tensors of the model and large ones are kept of one rank here,
    too, and named: never an error, as DCP has none. No tensor has rows of two ranks.
    """
    folder = tmp_path / "1"

    def save(rank: int) -> None:
        state = {
            "model": {"w": torch.full((4,), float(rank))},
            "random": torch.full((8,), rank, dtype=torch.uint8),
            "step": rank,
            "buffer": torch.full((LARGE,), float(rank)),
            "huge": {str(n): torch.full((1 << 16,), float(3 * n + rank)) for n in range(3)},
        }
        for _ in range(2):  # the second one reuses the plan
            dcp.save(state, checkpoint_id=folder)

    def load(_: int) -> dict[str, Any]:
        target: dict[str, Any] = {"random": torch.zeros(8, dtype=torch.uint8), "step": -1}
        target |= {"model": {"w": torch.zeros(4)}, "buffer": torch.zeros(LARGE)}
        target["huge"] = {str(n): torch.zeros(1 << 16) for n in range(3)}
        dcp.load(target, checkpoint_id=folder)
        return target

    with caplog.at_level(logging.WARNING, "unified_ckpt"):
        run_dcp_ranks(2, save)
    assert "ranks hold different values of extra.random, extra.step" in caplog.text
    assert "model:w: rank(s) 0 differ from rank(s) 1" in caplog.text
    assert "tensors:buffer: rank(s) 0 differ from rank(s) 1" in caplog.text
    assert "huge:1: rank(s) 0 differ from rank(s) 1" in caplog.text
    targets = run_dcp_ranks(2, load)
    assert [target["step"] for target in targets] == [0, 1]
    assert [target["random"][0].item() for target in targets] == [0, 1]
    assert_equal(targets[0]["model"], targets[1]["model"])
    for n in range(3):
        (value,) = set(targets[0]["huge"][str(n)].tolist())
        assert value in (3 * n, 3 * n + 1)
    assert load(0)["step"] == 0  # one rank gets those of the lowest


def test_errors_are_equal_and_name_the_rank(tmp_path: Path) -> None:
    class Failing:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            if self.rank == 1:
                raise ValueError("no state yet")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    folder = tmp_path / "1"
    calls = [
        lambda rank: dcp.save({"a": Failing(rank)}, checkpoint_id=folder),
        lambda rank: dcp.async_save({"a": Failing(rank)}, checkpoint_id=folder).result(),
        lambda rank: dcp.save({"a": object() if rank == 1 else 1}, checkpoint_id=folder),
        lambda rank: dcp.load({f"key_{rank}": 0}, checkpoint_id=tmp_path / "0"),
    ]
    dcp.save({"key_0": 5}, checkpoint_id=tmp_path / "0")
    for call in calls:
        errors = try_dcp_ranks(2, call)
        assert len({str(error) for error in errors}) == 1
        for error in errors:
            assert isinstance(error, torch_dcp.CheckpointException)
            assert isinstance(error, uc.CheckpointError)
            assert list(error.failures) == [1]
    assert not folder.exists()


def test_errors_of_load_state_dict_are_raised_as_they_are(tmp_path: Path) -> None:
    """A program catches its own error, as with DCP. The other ranks have loaded."""

    class Strict:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("other options")

    def load(rank: int) -> Any:
        target: dict[str, Any] = {"a": Strict() if rank == 1 else {"a": 0}}
        dcp.load(target, checkpoint_id=tmp_path / "1")
        return target

    dcp.save({"a": Strict()}, checkpoint_id=tmp_path / "1")
    first, second = try_dcp_ranks(2, load)
    assert first == {"a": {"a": 1}}
    assert isinstance(second, ValueError)


def test_models_under_different_keys_are_refused(tmp_path: Path) -> None:
    """Their tensors of one name would be stored as one."""

    def save(rank: int) -> None:
        model = {"w": torch.full((4,), float(rank))}
        dcp.save({f"model_{rank}": {"model": model}}, checkpoint_id=tmp_path / "1")

    for error in try_dcp_ranks(2, save):
        assert isinstance(error, dcp.DcpError)
        assert "ranks hold their model or optimizer under different keys" in str(error)
    assert not (tmp_path / "1").exists()


def test_optimizer_options_that_differ_return(tmp_path: Path) -> None:
    """Ranks of a pipeline hold other parameters, with other learning rates."""

    def state_of(rank: int) -> dict[str, Any]:
        name, moment = f"{rank}.w", torch.full((4,), float(rank))
        group = {"params": [name], "lr": 0.5 + rank, "betas": (0.9, rank)}
        return {
            "model": {name: torch.ones(4)},
            "optim": {"state": {name: {"exp_avg": moment}}, "param_groups": [group]},
        }

    def load(rank: int) -> dict[str, Any]:
        target = state_of(rank)
        target["optim"]["param_groups"][0] |= {"lr": 0, "betas": ()}
        target["optim"]["state"][f"{rank}.w"]["exp_avg"].zero_()
        dcp.load(target, checkpoint_id=tmp_path / "1")
        return target

    run_dcp_ranks(2, lambda rank: dcp.save(state_of(rank), checkpoint_id=tmp_path / "1"))
    for rank, target in enumerate(run_dcp_ranks(2, load)):
        assert_equal(target, state_of(rank))


def test_several_saves_may_be_in_flight(tmp_path: Path) -> None:
    def save(rank: int) -> list[Any]:
        weights = torch.zeros(LARGE)
        futures = []
        for number in range(3):
            weights.fill_(number)
            state = {"model": {"w": weights}, "number": number, f"rank_{rank}": rank}
            future: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(number))
            future.add_done_callback(lambda done: ends.append(done.result().path))
            futures.append(future)
        return [future.result() for future in futures]

    ends: list[str] = []
    run_dcp_ranks(2, save)
    assert len(ends) == 6
    for number in range(3):
        target = {"model": {"w": torch.full((LARGE,), -1.0)}, "number": -1, "rank_1": -1}
        dcp.load(target, checkpoint_id=tmp_path / str(number))
        assert target["model"]["w"].eq(number).all()  # type: ignore[index]
        assert (target["number"], target["rank_1"]) == (number, 1)


def test_failed_background_save_does_not_stop_the_next(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")

    def save(rank: int) -> str:
        failed: Any = dcp.async_save({"a": rank}, checkpoint_id=tmp_path / "file" / "1")
        dcp.save({"a": 1}, checkpoint_id=tmp_path / "2")
        return str(failed.exception())

    first, second = run_dcp_ranks(2, save)
    assert first == second
    assert "file" in first
    assert uc.verify(tmp_path / "2").ok


def test_lists_may_differ_in_length(tmp_path: Path) -> None:
    """A data loader's queue. One rank can load all items that any rank had, as from DCP."""

    def state_of(rank: int) -> dict[str, Any]:
        return {"queue": [{"tokens": rank * 10 + i} for i in range(rank)]}

    def load(rank: int) -> dict[str, Any]:
        target: dict[str, Any] = {"queue": [{"tokens": -1} for _ in range(rank)]}
        dcp.load(target, checkpoint_id=tmp_path / "1")
        return target

    run_dcp_ranks(3, lambda rank: dcp.save(state_of(rank), checkpoint_id=tmp_path / "1"))
    assert run_dcp_ranks(3, load) == [state_of(rank) for rank in range(3)]
    assert load(2)["queue"][0]["tokens"] in (10, 20)


def test_small_values_fill_boxes(tmp_path: Path) -> None:
    dcp.save({"a": {"t": torch.arange(8.0).reshape(4, 2)}}, checkpoint_id=tmp_path / "1")
    local = torch.zeros(2, 2)
    shards = uc.Shards(local, (4, 2), [((1, 0), (0, 0), (1, 2)), ((3, 0), (1, 0), (1, 2))])
    dcp.load({"a": {"t": shards}}, checkpoint_id=tmp_path / "1")
    assert local.tolist() == [[2, 3], [6, 7]]

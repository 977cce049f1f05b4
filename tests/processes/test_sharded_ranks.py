"""Hugging Face's Trainer with sharded models: FSDP2 through Accelerate, and models sharded at load.
The cases are in the worker.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "hf_trainer_sharded.py"


def run(root: Path, world: int, *cases: str) -> None:
    torchrun(world, "worker_sharded.py", root, *cases, timeout_seconds=280)


def test_stopped_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """transformers cannot resume a model that is sharded at load, and loads no FSDP2 model from a
    folder that from_pretrained opens.
    """
    run(tmp_path, 2, "same:accelerate", "same:tp=2")


@pytest.mark.slow
def test_other_ways_to_shard_and_what_a_trainer_does_besides(tmp_path: Path) -> None:
    run(
        tmp_path,
        2,
        "same:fsdp=2",
        "same:dp_replicate=2",
        "same:accelerate:llama:accumulate",
        "stock:accelerate",
        "refusals:-",
    )
    run(tmp_path, 2, "best:accelerate", "alone:accelerate", "best:fsdp=2", "alone:fsdp=2")


@pytest.mark.slow
def test_errors_that_users_make_are_told_on_every_rank(tmp_path: Path) -> None:
    run(tmp_path, 2, "same:fsdp=2", "errors:accelerate:fsdp=2", "errors:fsdp=2:fsdp=2")


@pytest.mark.slow
def test_other_layouts_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    run(tmp_path, 1, "same:plain")
    run(
        tmp_path,
        2,
        "into:accelerate:plain",
        "into:tp=2:plain",
        "same:tp=2",
        "into:fsdp=2:tp=2",
        "into:accelerate:tp=2",
    )
    run(tmp_path, 4, "into:accelerate:tp=2", "into:fsdp=2,dp_replicate=2:tp=2", "same:tp=2,fsdp=2")
    run(tmp_path, 2, "into:tp=2:tp=2,fsdp=2", "into:accelerate:tp=2,fsdp=2")
    run(tmp_path, 1, "into:plain:tp=2", "into:plain:tp=2,fsdp=2")


@pytest.mark.slow
def test_checkpoints_of_the_stock_trainer_go_on_in_layouts_that_it_cannot_load(
    tmp_path: Path,
) -> None:
    run(tmp_path, 1, "stock_stop:plain")
    run(
        tmp_path, 2, "stock_into:accelerate:plain", "stock_into:tp=2:plain", "stock_stop:accelerate"
    )
    run(tmp_path, 1, "stock_into:plain:accelerate")


@pytest.mark.slow
def test_adapters_under_fsdp2(tmp_path: Path) -> None:
    run(tmp_path, 2, "adapters:accelerate")
    run(tmp_path, 1, "adapters_into:plain:accelerate")


@pytest.mark.slow
def test_experts_over_ranks(tmp_path: Path) -> None:
    """Experts stacked in memory; with `ep` each rank has some of them. The number of param groups
    differs between the layouts.
    """
    run(
        tmp_path,
        2,
        "same:accelerate:mixtral",
        "same:tp=2:mixtral",
        "same:fsdp=2,ep=2:mixtral",
        "hub:accelerate",
        "hub:tp=2,ep=2",
    )
    run(
        tmp_path,
        2,
        "into:tp=2,ep=2:accelerate-mixtral:mixtral",
        "into:accelerate:fsdp=2,ep=2-mixtral:mixtral",
    )
    run(tmp_path, 1, "into:plain:tp=2-mixtral:mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["accelerate", "tp=2"])
def test_killed_in_the_middle_of_a_save(tmp_path: Path, layout: str) -> None:
    """A job that dies while it saves goes on from the checkpoint before, and ends as if nothing had
    been.
    """
    run(tmp_path, 2, f"same:{layout}")
    with pytest.raises(RuntimeError, match=r"SIGKILL|Signal 9"):
        run(tmp_path, 2, f"killed:{layout}")
    left = os.listdir(tmp_path / f"killed-{layout}")
    assert [name for name in left if name.startswith("checkpoint-")] == ["checkpoint-2"], left
    assert any(name.startswith(".unified-") for name in left), "it was in the middle"
    assert uc.verify(tmp_path / f"killed-{layout}" / "checkpoint-2", deep=True).ok
    run(tmp_path, 2, f"after:{layout}")


@pytest.mark.slow
def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    for world, steps in [(2, 10), (1, 20)]:
        torchrun(world, str(EXAMPLE), tmp_path, steps, timeout_seconds=280)
    assert {"checkpoint-15", "checkpoint-20"} <= set(os.listdir(tmp_path))

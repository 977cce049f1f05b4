"""Hugging Face's Trainer with sharded models: FSDP through Accelerate, and models sharded at load.
`worker_sharded.py` has the cases.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes.launch import PROGRAMS, torchrun

pytestmark = pytest.mark.integration

EXAMPLE = PROGRAMS.parents[2] / "docs" / "examples" / "hf_trainer_sharded.py"


def run(root: Path, world: int, *cases: str) -> None:
    torchrun(world, "worker_sharded.py", root, *cases, timeout_seconds=280)


@pytest.mark.slow
def test_other_shardings_and_trainer_features(tmp_path: Path) -> None:
    run(
        tmp_path,
        2,
        "same:fsdp=2",
        "same:dp_replicate=2",
        "same:accelerate:llama:accumulate",
        "native:accelerate",
        "refusals:-",
        "errors:accelerate:fsdp=2",
        "errors:fsdp=2:fsdp=2",
    )
    run(tmp_path, 2, "best:accelerate", "alone:accelerate", "best:fsdp=2", "alone:fsdp=2")


@pytest.mark.slow
def test_resume_in_the_same_and_other_layouts_and_world_sizes(tmp_path: Path) -> None:
    """transformers alone can neither resume a model sharded at load nor load an FSDP2 model from
    a `from_pretrained` folder.
    """
    run(tmp_path, 1, "same:plain")
    run(
        tmp_path,
        2,
        "same:accelerate",
        "into:accelerate:plain",
        "into:tp=2:plain",
        "same:tp=2",
        "into:fsdp=2:tp=2",
        "into:accelerate:tp=2",
        "same:fsdp1",
        "into:accelerate:fsdp1",
        "into:fsdp1:tp=2",
    )
    run(tmp_path, 4, "into:accelerate:tp=2", "into:fsdp=2,dp_replicate=2:tp=2", "same:tp=2,fsdp=2")
    run(tmp_path, 2, "into:tp=2:tp=2,fsdp=2", "into:accelerate:tp=2,fsdp=2")
    run(tmp_path, 1, "into:plain:tp=2", "into:plain:tp=2,fsdp=2")


@pytest.mark.slow
def test_native_checkpoints_resume_in_other_layouts(
    tmp_path: Path,
) -> None:
    run(tmp_path, 1, "native_stop:plain")
    run(
        tmp_path,
        2,
        "native_into:accelerate:plain",
        "native_into:tp=2:plain",
        "native_stop:accelerate",
    )
    run(tmp_path, 1, "native_into:plain:accelerate")


@pytest.mark.slow
def test_adapters_under_fsdp2(tmp_path: Path) -> None:
    run(tmp_path, 2, "adapters:accelerate")
    run(tmp_path, 1, "adapters_into:plain:accelerate")


@pytest.mark.slow
def test_experts_over_ranks(tmp_path: Path) -> None:
    """Experts are stacked in memory; with `ep` each rank has some of them. The number of param
    groups differs between layouts.
    """
    run(
        tmp_path,
        2,
        "same:accelerate:mixtral",
        "same:tp=2:mixtral",
        "same:fsdp=2,ep=2:mixtral",
        "hub:accelerate",
        "hub:tp=2,ep=2",
        "into:tp=2,ep=2:accelerate-mixtral:mixtral",
        "into:accelerate:fsdp=2,ep=2-mixtral:mixtral",
    )
    run(tmp_path, 1, "into:plain:tp=2-mixtral:mixtral")


@pytest.mark.slow
def test_example_continues_on_fewer_ranks(tmp_path: Path) -> None:
    for world, steps in [(2, 10), (1, 20)]:
        torchrun(world, str(EXAMPLE), tmp_path, steps, timeout_seconds=280)
    assert {"checkpoint-15", "checkpoint-20"} <= set(os.listdir(tmp_path))

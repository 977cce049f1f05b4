"""The data position when the total batch size changes: every sample is drawn once per epoch."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.integrations.trainer_positions import LENGTH, Numbered, recording_trainer, train
from tests.support.integrations.trainers import StopAt
from unified_ckpt.integrations.transformers.position import (
    BatchGeometry,
    DataPosition,
    convert_position,
    position_at,
)

pytestmark = pytest.mark.integration


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from (Numbered()[i] for i in range(LENGTH))


class SaveAndStopAt(StopAt):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_end(args, state, control, **more)
        control.should_save = control.should_training_stop


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The samples of three epochs of the native Trainer, in order."""
    samples = train(
        recording_trainer(
            tmp_path_factory.mktemp("native"), batch=4, native=True, save_strategy="no"
        )
    )
    assert [sorted(samples[i : i + LENGTH]) for i in range(0, 3 * LENGTH, LENGTH)] == [
        list(range(LENGTH))
    ] * 3
    return samples


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, order: list[int]) -> Path:
    """A run with the callback that stopped at step 15, which is sample 60."""
    root = tmp_path_factory.mktemp("stopped")
    assert train(recording_trainer(root, StopAt(15), batch=4)) == order[:60]
    return root


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 3), (12, 1)])
def test_every_sample_is_drawn_once(
    stopped: Path, order: list[int], batch: int, accumulation: int
) -> None:
    resumed = recording_trainer(
        stopped, batch=batch, gradient_accumulation_steps=accumulation, save_strategy="no"
    )
    assert train(resumed, resume=True) == order[60:]
    assert resumed.state.global_step == resumed.state.max_steps == 15 + 84 // (batch * accumulation)


def test_position_survives_two_changes_of_batch_size(
    tmp_path: Path, stopped: Path, order: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    assert (
        train(recording_trainer(tmp_path / "run", SaveAndStopAt(17), batch=12), resume=True)
        == order[60:84]
    )
    with caplog.at_level(logging.INFO, logger="unified_ckpt"):
        rest = train(recording_trainer(tmp_path / "run", batch=12, save_strategy="no"), resume=True)
    assert rest == order[84:], "step 17 is sample 84, not 17 * 12"
    assert "resuming:" not in caplog.text


def test_max_steps_are_steps(stopped: Path, order: list[int]) -> None:
    resumed = recording_trainer(stopped, batch=12, max_steps=22, save_strategy="no")
    assert train(resumed, resume=True) == order[60:]
    assert resumed.state.global_step == 22


def test_samples_of_a_partial_step_are_repeated_with_a_warning(
    stopped: Path, order: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        rest = train(
            recording_trainer(stopped, StopAt(17), batch=8, save_strategy="no"), resume=True
        )
    assert rest == order[56:72]
    assert "4 samples of the epoch are repeated: 12 were seen, and a step now has 8" in caplog.text


def test_stream_resumes_at_the_sample(tmp_path: Path) -> None:
    samples = train(recording_trainer(tmp_path, StopAt(15), batch=4, data=Stream(), max_steps=20))
    resumed = recording_trainer(tmp_path, batch=6, data=Stream(), max_steps=25, save_strategy="no")
    assert samples + train(resumed, resume=True) == [*range(LENGTH)] * 2 + [*range(24)]


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (
            {"train_sampling_strategy": "group_by_length"},
            "the order of this data loader may depend on batch size or processes",
        ),
        (
            {"data_seed": 9},
            "the data is shuffled of 48 samples, seed 9; it was shuffled of 48, seed 5",
        ),
        (
            {"train_sampling_strategy": "sequential"},
            "the data is in its own order of 48 samples, seed None",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "persistent workers start anew",
        ),
    ],
)
def test_changed_order_warns(
    stopped: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], warning: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        train(
            recording_trainer(stopped, StopAt(16), batch=6, save_strategy="no", **arguments),
            resume=True,
        )
    assert warning in caplog.text


def test_ignore_data_skip_restarts_the_epoch(stopped: Path, order: list[int]) -> None:
    rest = train(
        recording_trainer(stopped, StopAt(17), batch=12, save_strategy="no", ignore_data_skip=True),
        resume=True,
    )
    assert rest == order[48:72]


def test_position_at() -> None:
    pace = BatchGeometry(8, 2, "shuffled", 1, 100)
    assert position_at(0.0, rounds_in_epoch=13, geometry=pace) == DataPosition(0, 0, 0)
    assert position_at(2 + 6 / 13, rounds_in_epoch=13, geometry=pace) == DataPosition(2, 48, 6)
    assert position_at(3.0, rounds_in_epoch=13, geometry=pace) == DataPosition(3, 0, 0)
    for rounds in (3, 7, 10_007, 1_000_003):
        assert all(
            position_at(41 + k / rounds, rounds_in_epoch=rounds, geometry=pace).rounds == k
            for k in range(0, rounds, rounds // 3)
        )
    saved = {
        "epoch": 2,
        "samples": 48,
        "geometry": {
            "round_samples": 8,
            "accumulation": 2,
            "order": "shuffled",
            "seed": 1,
            "length": 100,
        },
    }
    assert convert_position(saved, BatchGeometry(3, 4, "shuffled", 1, 100)) == (
        DataPosition(2, 48, 16),
        [],
    )
    place, notes = convert_position(saved, BatchGeometry(10, 2, "shuffled", 1, 100))
    assert place == DataPosition(2, 40, 4)
    assert len(notes) == 1

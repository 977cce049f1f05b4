"""`manager_options`: TrainingArguments decide when to save; a signal stops and saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainingArguments

import unified_ckpt as uc
from tests.support.integrations.trainer_arguments import BEST
from tests.support.integrations.trainers import At, check_same, terminate
from tests.support.integrations.trainers import trainer as native_trainer
from unified_ckpt.format.events import LoadEvent
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback
from unified_ckpt.integrations.transformers.arguments import options_of_run
from unified_ckpt.manager.events.file import read_events

OPTIONS = uc.ManagerOptions(notice_seconds=0.001, retry_seconds=0.0)


def arguments(**values: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, report_to=[], **{"save_steps": 2, **values})


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        ({"interval_steps": 3}, {}, "save_steps=2"),
        ({"interval_steps": 2}, {"save_strategy": "epoch"}, "save_strategy='epoch'"),
        ({"interval_seconds": 60}, {}, "save_steps=2"),
        ({"steps": {1}}, {}, "save_steps=2"),
        ({"on_start": True}, {}, "save_steps=2"),
        ({"continuous": True}, {}, "save_steps=2"),
        ({"on_completion": False}, {}, "save_steps=2"),
        ({"keep_latest": 3}, {"save_total_limit": 2}, "save_total_limit=2"),
        ({"best_metric": "eval_x"}, {"metric_for_best_model": "y"}, "metric_for_best_model='y'"),
        (
            {"best_metric": "eval_y", "best_mode": "min"},
            {"metric_for_best_model": "y"},
            "greater_is_better=True",
        ),
        ({"on_preemption": True}, {"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"step_prefix": "step-"}, {}, "checkpoint-"),
        ({"load_full_state_path": "x"}, {}, "resume_from_checkpoint"),
        ({"enabled": False}, {}, "UnifiedCheckpointCallback"),
        ({"asynchronous": False}, {"async_save": True}, "async_save=True"),
    ],
)
def test_contradiction_names_both(
    options: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    asynchronous = values.pop("async_save", None)
    with pytest.raises(uc.CheckpointError) as caught:
        options_of_run(arguments(**values), uc.ManagerOptions(**options), async_save=asynchronous)
    assert f"ManagerOptions({[*options][-1]}=" in str(caught.value)
    assert words in str(caught.value)


def test_same_values_and_other_rules_are_accepted() -> None:
    options = uc.ManagerOptions(
        interval_steps=2, keep_latest=2, keep_best=1, best_metric="eval_y", best_mode="max"
    )
    chosen = options_of_run(
        arguments(save_total_limit=2, metric_for_best_model="y"), options, async_save=None
    )
    assert (chosen.keep_latest, chosen.keep_best, chosen.best_mode) == (2, 1, "max")
    assert chosen.interval_steps is None, "the Trainer asks for each save"
    assert chosen.asynchronous


def test_without_options_the_first_error_is_raised() -> None:
    chosen = options_of_run(arguments(), None, async_save=None)
    assert (chosen.retries, chosen.raise_after, chosen.asynchronous) == (0, 1, False)
    assert not chosen.on_preemption


def trainer(out: Path, *callbacks: TrainerCallback, **values: Any) -> Any:
    options = values.pop("options", OPTIONS)
    ours = UnifiedCheckpointCallback(
        manager_options=options, save_options=uc.SaveOptions(fsync=False)
    )
    return native_trainer(out, ours, *callbacks, native=True, **values), ours


def test_contradiction_is_raised_by_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(uc.CheckpointError, match="save_steps=2"):
        trainer(tmp_path, options=uc.ManagerOptions(interval_steps=7))


def test_signal_stops_and_the_resume_is_bitwise(tmp_path: Path) -> None:
    straight, _ = trainer(tmp_path / "straight")
    straight.train()
    stopped, callback = trainer(tmp_path / "run", At(3, terminate))
    stopped.train()
    assert callback.checkpoints.should_stop
    assert stopped.state.global_step == 3
    assert [record.step for record in callback.checkpoints.steps()] == [2, 3]
    resumed, callback = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert not callback.checkpoints.should_stop
    check_same(resumed, straight)
    loads = [event for event in read_events(str(tmp_path / "run")) if isinstance(event, LoadEvent)]
    assert [(load.path, load.step) for load in loads] == [("checkpoint-3", 3)]


def fail() -> None:
    raise ValueError("raised by the test")


@pytest.mark.parametrize(
    ("method", "step", "saved"),
    [("on_step_begin", 3, 3), ("on_evaluate", 3, 3), ("on_optimizer_step", 3, 2)],
)
def test_exception_saves_a_whole_step(tmp_path: Path, method: str, step: int, saved: int) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 3}
    straight, _ = trainer(tmp_path / "straight", **settings)
    straight.train()
    options = OPTIONS.model_copy(update={"save_on_exception": True})
    run, callback = trainer(
        tmp_path / "run", At(step, fail, method=method), options=options, **settings
    )
    with pytest.raises(ValueError, match="raised by the test"):
        run.train()
    assert callback.checkpoints.steps()[-1].step == saved
    folders = [tmp_path / "run" / f"checkpoint-{saved}", tmp_path / "straight" / "checkpoint-2"]
    assert sorted(os.listdir(folders[0])) == sorted(os.listdir(folders[1]))
    resumed, _ = trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    if method != "on_evaluate":  # the random numbers of that evaluation are not drawn again
        check_same(resumed, straight)


@pytest.mark.integration
def test_stopped_run_keeps_its_model_and_last_checkpoint(tmp_path: Path) -> None:
    """Stock training ends by loading the best model and removing all others."""
    settings = {**BEST, "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    straight, _ = trainer(tmp_path / "straight", **settings)
    straight.train()
    stopped, _ = trainer(tmp_path / "run", At(3, terminate), **settings)
    stopped.train()
    assert "checkpoint-3" in os.listdir(tmp_path / "run")
    resumed, _ = trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(tmp_path / "straight"))


@pytest.mark.integration
def test_stop_at_the_end_of_an_epoch_evaluates_first(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
    }
    stopped, callback = trainer(tmp_path / "run", At(6, terminate), **settings)
    stopped.train()
    assert [record.step for record in callback.checkpoints.steps()] == [3, 6]
    assert [entry["step"] for entry in stopped.state.log_history if "eval_loss" in entry] == [3, 6]


@pytest.mark.integration
def test_best_by_a_logged_metric_stays(tmp_path: Path) -> None:
    options = OPTIONS.model_copy(
        update={"keep_best": 1, "best_metric": "eval_loss", "asynchronous": False}
    )
    run, callback = trainer(
        tmp_path / "run", options=options, **{**BEST, "save_steps": 1, "save_total_limit": 1}
    )
    run.train()
    evaluated = {
        entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry
    }
    best = min(evaluated, key=lambda step: (evaluated[step], -step))
    assert {record.step for record in callback.checkpoints.steps()} == {best, 6}


def test_configuration_of_paddle_runs(tmp_path: Path) -> None:
    """One value has all options, with the Trainer's own root, interval and limit."""

    def configured(out: Path, **values: Any) -> Any:
        options = uc.from_paddle(
            "async_save",
            output_dir=str(tmp_path / "run"),
            save_steps=2,
            save_total_limit=1,
            save=uc.SaveOptions(fsync=False, max_file_bytes=10_000),
        )
        callback = UnifiedCheckpointCallback(manager_options=options)
        values |= {"save_total_limit": 1, "lr_scheduler_type": "constant"}
        return native_trainer(out, callback, native=True, **values)

    straight, _ = trainer(tmp_path / "straight", lr_scheduler_type="constant")
    straight.train()
    configured(tmp_path / "run", max_steps=2).train()
    assert len(list((tmp_path / "run/checkpoint-2").glob("model-*.safetensors"))) > 1
    resumed = configured(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    with pytest.raises(uc.FormatError, match=r"root: got .*other, expected .*run as configured"):
        configured(tmp_path / "other")

"""Training arguments that affect checkpoints. Checkpoints, the best one and the state file equal
those of the native Trainer.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.integrations.trainer_arguments import BEST, state_of
from tests.support.integrations.trainers import (
    SEQUENCES,
    At,
    StopAt,
    check_same,
    entries,
    losses,
    model,
    terminate,
    trainer,
)
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback
from unified_ckpt.integrations.transformers.compatibility import warn_overrides
from unified_ckpt.integrations.transformers.small_files import runs_override

pytestmark = pytest.mark.integration


class Counter(TrainerCallback, ExportableState):
    """Counts the steps of all runs."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.count = start, start

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "save_strategy": "epoch",
            "max_steps": -1,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 16,
            "save_total_limit": 2,
        },
        {**BEST, "save_strategy": "best", "save_total_limit": 2},
        {
            **BEST,
            "save_steps": 1,
            "load_best_model_at_end": True,
            "save_only_model": True,
            "save_total_limit": 1,
        },
        {
            **BEST,
            "save_steps": 2,
            "load_best_model_at_end": True,
            "save_total_limit": 2,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=["epoch", "best", "only_model", "accumulation"],
)
def test_checkpoints_equal_those_of_the_native_trainer(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    native = trainer(tmp_path / "native", Counter(), native=True, **arguments)
    native.train()
    ours = trainer(tmp_path / "ours", Counter(), **arguments)  # its construction sets the seed
    ours.train()
    check_same(ours, native)
    names = entries(tmp_path / "ours")
    assert names == entries(tmp_path / "native")
    assert names
    for name in names:
        assert state_of(tmp_path / "ours" / name) == state_of(tmp_path / "native" / name)
    assert (
        Path(ours.state.best_model_checkpoint or "").name
        == Path(native.state.best_model_checkpoint or "").name
    )


def test_callback_states_are_restored(tmp_path: Path) -> None:
    arguments = {
        **BEST,
        "restore_callback_states_from_checkpoint": True,
        "load_best_model_at_end": True,
    }
    trainer(tmp_path, StopAt(4), Counter(7), EarlyStoppingCallback(9, 0.25), **arguments).train()
    resumed = trainer(tmp_path, Counter(), EarlyStoppingCallback(1), **arguments)
    resumed.train(resume_from_checkpoint=True)
    (counter,) = [
        callback for callback in resumed.callback_handler.callbacks if isinstance(callback, Counter)
    ]
    (early,) = [
        callback
        for callback in resumed.callback_handler.callbacks
        if isinstance(callback, EarlyStoppingCallback)
    ]
    assert (counter.start, counter.count) == (7, 13)
    assert (early.early_stopping_patience, early.early_stopping_threshold) == (9, 0.25)
    assert resumed.state.global_step == 6


def test_gradient_scaler_is_restored(tmp_path: Path) -> None:
    def scaled(name: str, *callbacks: TrainerCallback) -> Trainer:
        run = trainer(tmp_path / name, *callbacks)
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=3)
        return run

    straight = scaled("straight")
    straight.train()
    scaled("run", StopAt(4)).train()
    resumed = scaled("run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    assert resumed.accelerator.scaler.state_dict() == straight.accelerator.scaler.state_dict()
    assert resumed.accelerator.scaler.get_scale() > 32.0


@pytest.mark.slow
def test_compiled_model_resumes_with_model_names(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    straight = trainer(tmp_path / "native", native=True, **compiled)
    straight.train()
    trainer(tmp_path / "run", StopAt(4), **compiled).train()
    with uc.open(tmp_path / "run" / "checkpoint-4") as source:
        assert "lm_head.weight" in source["model"]
    resumed = trainer(tmp_path / "run", **compiled)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)


class Small(Trainer):
    """Raises an out-of-memory error for batches above 2."""

    def training_step(
        self, model: Any, inputs: dict[str, torch.Tensor], *more: Any
    ) -> torch.Tensor:
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *more)


@pytest.mark.slow  # it runs the garbage collector many times
def test_auto_batch_size_survives_a_resume(tmp_path: Path) -> None:
    def small(out: Path, *callbacks: TrainerCallback) -> Trainer:
        training_arguments = trainer(
            out, native=True, auto_find_batch_size=True, per_device_train_batch_size=3
        ).args
        return Small(
            model=model(),
            args=training_arguments,
            train_dataset=SEQUENCES,
            callbacks=list(callbacks),
        )

    straight = small(tmp_path / "native")
    straight.train()
    small(tmp_path / "run", UnifiedCheckpointCallback(), StopAt(4)).train()
    resumed = small(tmp_path / "run", UnifiedCheckpointCallback())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.train_batch_size == straight.state.train_batch_size
    check_same(resumed, straight)


def test_sigterm_saves_and_the_run_resumes(tmp_path: Path) -> None:
    def jit(*callbacks: TrainerCallback) -> Trainer:
        run = trainer(tmp_path, *callbacks, enable_jit_checkpoint=True, save_strategy="no")
        (handler,) = [
            callback
            for callback in run.callback_handler.callbacks
            if hasattr(callback, "jit_manager")
        ]
        handler.jit_manager._sigterm_handler = lambda *_: (
            handler.jit_manager._enable_checkpoint()
        )  # no 3 s of grace
        signal.signal(signal.SIGTERM, handler.jit_manager._sigterm_handler)
        return run

    before = signal.getsignal(signal.SIGTERM)
    try:
        jit(At(2, terminate, method="on_step_begin")).train()
        assert entries(tmp_path) == ["checkpoint-2"]
        assert uc.verify(tmp_path / "checkpoint-2", deep=True).ok
        assert "checkpoint-is-incomplete.txt" not in os.listdir(tmp_path / "checkpoint-2")
        resumed = jit()
        resumed.train(resume_from_checkpoint=True)
        assert len(losses(resumed)) == 6
    finally:
        signal.signal(signal.SIGTERM, before)


def test_save_model_and_push_to_hub_write_weights(tmp_path: Path) -> None:
    """`Trainer.push_to_hub` calls `save_model` as the Trainer itself does within a checkpoint."""
    run = trainer(tmp_path)
    run.save_model(str(tmp_path / "mine"))
    run.save_model(str(tmp_path / "pushed"), _internal_call=True)
    for name in ("mine", "pushed"):
        assert (tmp_path / name / "model.safetensors").is_file()


class Saves(Trainer):
    """Writes more files beside the weights, as ms-swift's trainers do: a converted model, and a
    copy of a file of the run.
    """

    arguments = "args.json"

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        shutil.copy(folder.parent / "run.json", folder)
        torch.save({}, folder / self.arguments)
        self.model.save_pretrained(folder / "converted")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)


def saves(folder: Path, cls: type[Saves] = Saves, **options: Any) -> Saves:
    args = trainer(folder, native=True, max_steps=2).args
    callback = UnifiedCheckpointCallback(**options)
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    return cls(model=model(), args=args, train_dataset=SEQUENCES, callbacks=[callback])


@pytest.mark.parametrize("in_background", [False, True])
def test_files_of_an_overridden_save_are_attached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    """Without the weights: those of the checkpoint are the engine's."""
    native = trainer(tmp_path / "native", native=True, max_steps=2)
    native.train()
    run = saves(tmp_path / "run", async_save=in_background)
    run.train()
    check_same(run, native)
    folder = tmp_path / "run" / "checkpoint-2"
    assert uc.verify(folder, deep=True).ok
    assert {"args.json", "run.json", "training_args.bin"} <= set(os.listdir(folder))
    assert entries(tmp_path / "run") == ["checkpoint-2", "run.json"]
    assert (folder / "converted" / "model.safetensors").is_file()
    written, expected = (
        path / "config.json" for path in (folder, tmp_path / "native" / "checkpoint-2")
    )
    assert written.read_text() == expected.read_text()
    (warning,) = (entry.message for entry in caplog.records if entry.name == "unified_ckpt")
    assert warning.startswith("Saves.save_model is not called for checkpoints")


def test_overridden_save_of_a_sharded_model_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = saves(tmp_path)
    assert runs_override(run)
    run.is_fsdp_enabled = True
    warn_overrides(run)
    assert "Saves._save is not called for checkpoints" in caplog.text


class WritesWeights(Saves):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        state = self.model.state_dict() if state_dict is None else state_dict
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        save_file(zeros, Path(str(output_dir), "model.safetensors"))


def test_weights_of_an_overridden_save_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = saves(tmp_path, WritesWeights)
    run.train()
    assert "WritesWeights._save: its model.safetensors is left out" in caplog.text
    with uc.open(tmp_path / "checkpoint-2") as source:
        check_equal({n: t[...] for n, t in source["model"].items()}, run.model.state_dict())


class FullDisk(Saves):
    arguments = "/dev/full"


def test_overridden_save_on_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    """As the Trainer's own files: a manager retries the save."""
    with pytest.raises(uc.StorageError, match="cannot write the Trainer's files"):
        saves(tmp_path, FullDisk).train()


class Counts(Trainer):
    """Stores state of its own, as TRL's GRPOTrainer does."""

    count = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count += 1
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir, "count").write_text(str(self.count))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.count = int(Path(checkpoint, "count").read_text())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Leave it to the engine."""


def test_overrides_of_a_subclass_run(tmp_path: Path) -> None:
    def run(resume: str | None) -> Counts:
        fitter = Counts(
            model=model(),
            args=trainer(tmp_path, native=True).args,
            train_dataset=SEQUENCES,
            callbacks=[UnifiedCheckpointCallback()],
        )
        fitter.train(resume_from_checkpoint=resume)
        return fitter

    whole = run(None)
    resumed = run(str(tmp_path / "checkpoint-2"))
    assert resumed.count == whole.count == 6
    check_same(resumed, whole)

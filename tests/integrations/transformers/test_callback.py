"""Hugging Face's Trainer with and without the callback: losses, weights, resuming, and errors for
wrong use.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.equality import check_equal, same
from tests.support.integrations.trainers import StopAt, check_same, entries, losses, trainer
from tests.support.training_jobs import TRAITS, JobSpec, Net
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """An uninterrupted run of the native Trainer."""
    run = trainer(tmp_path_factory.mktemp("native"), native=True)
    run.train()
    return run


@pytest.mark.integration
def test_training_and_saves_equal_the_native_trainer(tmp_path: Path, whole: Trainer) -> None:
    run = trainer(tmp_path)
    run.train()
    check_same(run, whole)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    folder = tmp_path / "checkpoint-6"
    assert {
        "config.json",
        "trainer_state.json",
        "training_args.bin",
        "unified_checkpoint.json",
    } <= set(os.listdir(folder))
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth"} & set(os.listdir(folder))
    assert uc.verify(folder, deep=True).ok
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in run.model.state_dict().items())


@pytest.mark.integration
def test_config_has_the_dtype_of_the_weights(tmp_path: Path, whole: Trainer) -> None:
    trainer(tmp_path).train()
    native_config = Path(whole.args.output_dir) / "checkpoint-6" / "config.json"
    assert (tmp_path / "checkpoint-6" / "config.json").read_text() == native_config.read_text()
    in_half = UnifiedCheckpointCallback(save_options=uc.SaveOptions(model_dtype="bfloat16"))
    half = trainer(tmp_path / "half", in_half, native=True, max_steps=2)
    half.train()
    assert (
        LlamaForCausalLM.from_pretrained(tmp_path / "half" / "checkpoint-2").dtype == torch.bfloat16
    )
    assert half.model.config.dtype != "bfloat16"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param(
            {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
            marks=pytest.mark.integration,
        ),
    ],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, arguments: dict[str, Any]) -> None:
    straight = trainer(tmp_path / "straight", **arguments)
    straight.train()
    trainer(tmp_path / "run", StopAt(4), **arguments).train()
    (tmp_path / "run" / "checkpoint-4" / "training_args.bin").unlink()  # a pickle nobody reads
    resumed = trainer(tmp_path / "run", **arguments)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)


@pytest.mark.integration
def test_resume_from_a_path_with_an_attached_callback(tmp_path: Path, whole: Trainer) -> None:
    trainer(tmp_path, StopAt(4)).train()
    resumed = trainer(tmp_path, native=True)
    UnifiedCheckpointCallback().attach(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    check_same(resumed, whole)


@pytest.mark.integration
def test_auto_resume_skips_incomplete_checkpoints(
    tmp_path: Path, whole: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path).train()
    (tmp_path / "checkpoint-6" / "optimizer.safetensors").unlink()
    (tmp_path / "checkpoint-4" / "unified_checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        resumed = trainer(tmp_path)
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is skipped" in caplog.text
    assert "checkpoint-4 is skipped" in caplog.text
    check_same(resumed, whole)


@pytest.mark.integration
def test_auto_resume_without_a_complete_checkpoint_raises(tmp_path: Path) -> None:
    """The native Trainer would continue from leftover weights, with a fresh optimizer."""
    trainer(tmp_path, max_steps=4).train()
    (tmp_path / "checkpoint-2" / "unified_checkpoint.json").unlink()
    os.truncate(tmp_path / "checkpoint-4" / "optimizer.safetensors", 100)
    with pytest.raises(
        uc.IncompleteError,
        match=r"none of its checkpoints can be resumed \(2\):\n  checkpoint-4: optimizer.*\n  "
        r"checkpoint-2: it has no",
    ):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(uc.NotFoundError, match="got no valid manifest"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.integration
def test_native_checkpoint_is_resumed_by_the_native_trainer(tmp_path: Path, whole: Trainer) -> None:
    trainer(tmp_path, StopAt(4), native=True).train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, whole)
    assert (tmp_path / "checkpoint-6" / "unified_checkpoint.json").is_file()


@pytest.mark.integration
@pytest.mark.parametrize(("limit", "left"), [(1, [6]), (2, [4, 6])])
def test_save_total_limit(tmp_path: Path, limit: int, left: list[int]) -> None:
    trainer(tmp_path, save_total_limit=limit).train()
    assert entries(tmp_path) == [f"checkpoint-{step}" for step in left]


@pytest.mark.integration
def test_best_checkpoint_is_kept_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a relative path, as in most scripts."""
    monkeypatch.chdir(tmp_path)
    run = trainer(
        Path("run"),
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        learning_rate=0.5,
    )
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None
    assert os.path.isdir(best)
    loaded = LlamaForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in run.model.state_dict().items())
    assert "checkpoint-6" in os.listdir("run")
    resumed = trainer(Path("run"), max_steps=8)
    resumed.train(resume_from_checkpoint="run/checkpoint-6")
    assert losses(resumed)[:6] == losses(run)


def test_resume_from_save_only_model_is_that_of_stock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues at the step, with a new optimizer and schedule, and says so once."""
    ended = {}
    for native in (False, True):
        folder = tmp_path / str(native)
        trainer(folder, native=native, save_only_model=True).train()
        assert not any("optimizer" in name for name in os.listdir(folder / "checkpoint-6"))
        caplog.clear()
        resumed = trainer(folder, native=native, max_steps=8)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 8
        ended[native] = losses(resumed), dict(resumed.model.state_dict())
        lines = [line for line in caplog.messages if "with a new optimizer" in line]
        assert len(lines) == (0 if native else 1)
    assert ended[False][0] == ended[True][0]
    assert same(ended[False][1], ended[True][1])


class Queued(torch.nn.Module):
    """Has no configuration; takes the saved shape of its queue, and counts its loads."""

    config = None

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.loads = torch.nn.Embedding(100, 4), 0
        self.register_buffer("queue", torch.full((rows, 2), float(rows)))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.embedding(input_ids).square().mean()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.loads += 1
        self.queue = torch.zeros_like(state_dict["queue"])
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_load_state_dict_of_the_model_is_called(tmp_path: Path) -> None:
    states = []
    for native in (False, True):
        trainer(tmp_path / str(native), native=native, net=Queued(3), max_steps=2).train()
        resumed = trainer(tmp_path / str(native), native=native, net=Queued(5), max_steps=4)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.model.loads == 1
        states.append(dict(resumed.model.state_dict()))
    assert same(*states)


def test_wrong_paths_raise(tmp_path: Path) -> None:
    trainer(tmp_path / "run", StopAt(2)).train()
    run, folder = trainer(tmp_path / "run"), tmp_path / "run" / "checkpoint-2"
    shutil.copytree(folder, tmp_path / "cut")
    for name in ("unified_checkpoint.json", "trainer_state.json"):
        (tmp_path / "cut" / name).unlink()
    for path, text in (
        (
            tmp_path / "run",
            "got a run's folder, expected a checkpoint; the latest is checkpoint-2",
        ),
        (folder / "config.json", "got a file"),
        (tmp_path / "nothing", "got nothing"),
        (tmp_path / "cut", "it is unfinished or damaged"),
    ):
        with pytest.raises(ValueError, match=text):  # as in the native Trainer
            run.train(resume_from_checkpoint=str(path))
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        run.train(resume_from_checkpoint=True)


@pytest.mark.integration
def test_interrupted_save_leaves_nothing_to_resume(
    tmp_path: Path, whole: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unified_ckpt.engine.folder.publish.renames import RenamePublisher

    trainer(tmp_path, StopAt(2)).train()

    def dead(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RenamePublisher, "publish", dead)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path).train(resume_from_checkpoint=True)
    assert [name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")] == [
        "checkpoint-2"
    ]
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, whole)


@pytest.mark.integration
def test_backup_survives_the_removal_of_other_checkpoints(tmp_path: Path) -> None:
    """At its end, the native Trainer removes all checkpoints but the best.

    It mistakes a backup for a step, because the names begin alike.
    """
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "results.json").write_text("{}")
    limits = {
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    trainer(tmp_path, **limits).train()
    assert os.listdir(tmp_path / "checkpoint-2-before-1") == ["results.json"]
    assert len(entries(tmp_path)) == 2


class LossNet(Net):
    """`Net` with a loss; its buffers change in every forward pass."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(self.first(self.embed(input_ids % 6))) * self.norm.to(
            self.first.weight.dtype
        )
        buffers = dict(self.named_buffers())
        if self.training and "mean" in buffers:
            buffers["mean"].lerp_(hidden.detach().mean((0, 1)), 0.1)
        if self.training and "count" in buffers:
            buffers["count"].add_(3)
            buffers["mask"].logical_xor_(hidden.detach().mean((0, 1)) > 0)
        return {
            "loss": torch.nn.functional.cross_entropy(
                self.head(hidden).flatten(0, 1).float(), labels.flatten() % 6
            )
        }


def loss_net(spec: JobSpec, seed: int) -> LossNet:
    torch.manual_seed(seed)
    return LossNet(spec)


@pytest.mark.integration
@given(
    st.sampled_from(("fp32", "bf16", "model_dtype")),
    st.frozensets(st.sampled_from([trait for trait in TRAITS if trait != "ema"]), max_size=4),
    st.sampled_from(
        (None, ("model", "optimizer"), ("master_weights", "optimizer"), ("modle", "optimizer"))
    ),
)
@settings(max_examples=8, phases=[Phase.generate])
def test_trainer_round_trip_is_bitwise_or_refused(
    precision: str, traits: frozenset[str], parts: tuple[str, ...] | None
) -> None:
    """With any choice of parts, a run resumes bit for bit or its first save fails.

    A failed save leaves nothing.
    """
    spec = JobSpec(precision, traits)
    without_masters, rounded = (
        precision != "model_dtype",
        precision == "model_dtype" and parts == ("model", "optimizer"),
    )
    refused = parts is not None and (
        parts[0] == "modle" or (without_masters and "model" not in parts)
    )
    options = uc.SaveOptions(
        fsync=False, parts=parts, model_dtype=None if without_masters else "bfloat16"
    )

    def run(out: Path, seed: int) -> Trainer:
        fitter = trainer(
            out, native=True, net=loss_net(spec, seed), max_steps=4, optim="adamw_torch"
        )
        UnifiedCheckpointCallback(save_options=options).attach(fitter)
        return fitter

    with tempfile.TemporaryDirectory() as folder:
        straight = run(Path(folder, "straight"), 1)
        if refused:
            with pytest.raises(uc.CheckpointError):
                straight.train()
            assert entries(Path(folder, "straight")) == []
            return
        straight.train()
        (Path(folder) / "resumed").mkdir()
        os.rename(Path(folder, "straight", "checkpoint-2"), Path(folder, "resumed", "checkpoint-2"))
        resumed = run(Path(folder, "resumed"), 2)
        if rounded:  # fp32 weights are not restored from a bf16 model silently
            with pytest.raises(uc.CheckpointError):
                resumed.train(resume_from_checkpoint=True)
            return
        resumed.train(resume_from_checkpoint=True)
        check_same(resumed, straight)


def test_output_dir_that_is_a_checkpoint_raises(tmp_path: Path) -> None:
    """Training would write its steps into it."""
    uc.save(tmp_path / "checkpoint-2", model=torch.nn.Linear(4, 4), step=2)
    before = entries(tmp_path / "checkpoint-2")
    with pytest.raises(uc.OptionError, match=f"checkpoint-2: got a checkpoint.*pass {tmp_path}$"):
        trainer(tmp_path / "checkpoint-2").train()
    assert entries(tmp_path / "checkpoint-2") == before


def test_manager_starts_beside_a_final_model(tmp_path: Path) -> None:
    """The Trainer leaves its final model and its log in `output_dir`, which holds no step then."""
    trained = trainer(tmp_path, save_strategy="no")
    trained.train()
    trained.save_model()
    trained.save_state()
    assert {"model.safetensors", "trainer_state.json"} <= set(entries(tmp_path))
    optimizer = torch.optim.AdamW(trained.model.parameters())
    with uc.CheckpointManager(tmp_path) as manager:
        assert manager.restore(model=trained.model, optimizer=optimizer) is None
    trainer(tmp_path).train()


class Average(TrainerCallback):
    """Averages the weights, as the documentation shows."""

    def __init__(self) -> None:
        self.shards: dict[str, torch.Tensor] = {}

    def parts(self, model: torch.nn.Module) -> dict[str, Any]:
        for name, p in model.named_parameters():
            self.shards.setdefault(name, p.detach().clone())
        return {"ema": self.shards}

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        ema = self.parts(more["model"])["ema"]
        for name, p in more["model"].named_parameters():
            ema[name].lerp_(p.detach(), 0.5)


def averaged(out: Path, *callbacks: TrainerCallback, has_average: bool = True) -> tuple[Any, Any]:
    average = Average()
    ours = UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))
    if has_average:
        ours.add_parts(average.parts)
    return trainer(out, ours, average, *callbacks, native=True), average


def test_parts_of_the_caller_resume(tmp_path: Path) -> None:
    straight, expected = averaged(tmp_path / "straight")
    straight.train()
    averaged(tmp_path / "run", StopAt(4))[0].train()
    resumed, average = averaged(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    check_equal(average.shards, expected.shards)


def test_parts_that_a_checkpoint_lacks_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    averaged(tmp_path, StopAt(4), has_average=False)[0].train()
    averaged(tmp_path)[0].train(resume_from_checkpoint=True)
    assert "has no part ema; training continues with the one that was passed" in caplog.text

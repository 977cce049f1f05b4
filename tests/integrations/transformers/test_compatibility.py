"""Resuming from unusable checkpoints: each error names the cause and the remedy, and nothing is
loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import unified_ckpt as uc
from tests.support.integrations.trainers import StopAt, trainer
from tests.support.runtime.torch_state.optimizers import Grouped
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after two steps."""
    path = tmp_path_factory.mktemp("run")
    trainer(path, StopAt(2)).train()
    return path


def check_refused(resumed: Trainer, path: Path, error: type[Exception], match: str) -> None:
    """Check that the error is raised and the model is unchanged."""
    before = {name: tensor.clone() for name, tensor in resumed.model.state_dict().items()}
    with pytest.raises(error, match=match):
        resumed.train(resume_from_checkpoint=str(path))
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in resumed.model.state_dict().items()
    )


def test_another_model_is_explained_by_its_configuration(run: Path, tmp_path: Path) -> None:
    wide = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.1,
        )
    )
    match = (
        r"checkpoint-2: got a checkpoint of another model: .*hidden_size is 32 in the "
        r"checkpoint, 64 in the model(.|\n)*norm.weight: checkpoint has shape"
    )
    check_refused(trainer(tmp_path, net=wide), run / "checkpoint-2", uc.MismatchError, match)


def test_another_optimizer_is_refused(run: Path, tmp_path: Path) -> None:
    resumed = trainer(tmp_path, optim="sgd")
    with pytest.raises(
        uc.MismatchError,
        match=r"got state of torch.AdamW, expected torch.SGD; use the same `optim`",
    ):
        resumed.train(resume_from_checkpoint=str(run / "checkpoint-2"))


def test_deleted_optimizer_begins_anew_with_a_warning(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers continues with an empty optimizer, silently."""
    folder = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(run, tmp_path / "run")
    for file in folder.glob("optimizer*"):
        file.unlink()
    trainer(tmp_path / "run", max_steps=3).train(resume_from_checkpoint=str(folder))
    assert f"{folder}: got only weights (save_only_model, or deleted since)" in caplog.text
    trainer(tmp_path / "fresh", net=LlamaForCausalLM.from_pretrained(folder), max_steps=1).train()


def test_state_that_another_engine_did_not_save_is_named(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = trainer(tmp_path / "saved")
    saved.train()
    folder = tmp_path / "run" / "checkpoint-2"
    uc.save(folder, model=saved.model, optimizer=saved.optimizer, step=2)
    shutil.copy(run / "checkpoint-2" / "trainer_state.json", folder)
    trainer(tmp_path / "run", max_steps=3).train(resume_from_checkpoint=str(folder))
    assert "schedule: advanced to step 2; random states: begin anew" in caplog.text


@pytest.mark.parametrize(
    ("leave", "error", "match"),
    [
        (
            lambda folder: (folder / "global_step2").mkdir(),
            uc.IncompleteError,
            "no weights found",
        ),
        (
            lambda folder: (folder / "pytorch_model_fsdp_0").mkdir(),
            uc.IncompleteError,
            "no .metadata, which is written last",
        ),
    ],
    ids=["DeepSpeed", "Accelerate's FSDP, not whole"],
)
def test_other_formats_are_refused(
    run: Path, tmp_path: Path, leave: Callable[[Path], None], error: type[Exception], match: str
) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    shutil.copy(run / "checkpoint-2" / "trainer_state.json", folder)
    leave(folder)
    check_refused(trainer(tmp_path), folder, error, match)


def test_save_only_model_of_the_callback_overrides(run: Path, tmp_path: Path) -> None:
    """The callback's `save_only_model` overrides the training arguments, both ways."""
    for in_arguments, in_callback, has in [
        (False, True, False),
        (True, False, True),
        (True, None, False),
    ]:
        trained = trainer(
            tmp_path / f"{in_arguments}-{in_callback}",
            native=True,
            max_steps=2,
            save_only_model=in_arguments,
        )
        callback = UnifiedCheckpointCallback(
            save_options=uc.SaveOptions(fsync=False), save_only_model=in_callback
        )
        callback.attach(trained)
        trained.train()
        with uc.open(tmp_path / f"{in_arguments}-{in_callback}" / "checkpoint-2") as source:
            assert ("optimizer" in source.parts) == has


def test_a_resume_reads_each_tensor_once(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed, callback = trainer(tmp_path, native=True, max_steps=3), UnifiedCheckpointCallback()
    callback.attach(resumed)
    with caplog.at_level("INFO", logger="unified_ckpt"):
        resumed.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    with uc.open(run / "checkpoint-2") as source:
        nbytes = sum(
            view.dtype.itemsize * prod(view.shape)
            for part in ("model", "optimizer")
            for view in source[part].values()
        )
    assert len([line for line in caplog.messages if line.startswith("loaded")]) == 1
    (line,) = [line for line in caplog.messages if line.startswith("resumed from")]
    checkpoint = run / "checkpoint-2"
    assert line.startswith(f"resumed from {checkpoint} (")
    assert ": step 2, saved by 1 rank, loaded by 1 rank; " in line
    assert "; data: epoch 0 after 8 samples; " in line
    assert callback._patched is not None
    assert callback._patched._report is not None
    assert callback._patched._report.bytes_read == nbytes


def test_dataparallel_and_deepspeed_are_refused_by_name(tmp_path: Path) -> None:
    refused = trainer(tmp_path, native=True)
    refused.args._n_gpu = 2
    with pytest.raises(uc.LayoutError, match="got DataParallel; use torchrun"):
        UnifiedCheckpointCallback().attach(refused)
    refused.args._n_gpu, refused.is_deepspeed_enabled = 0, True
    with pytest.raises(uc.LayoutError, match="got DeepSpeed; use FSDP2"):
        UnifiedCheckpointCallback().attach(refused)


def test_refused_optimizer_is_known_before_the_first_step(tmp_path: Path) -> None:
    refused = trainer(tmp_path, native=True)
    refused.optimizer = Grouped(torch.optim.SGD(refused.model.parameters()))
    with pytest.raises(uc.LayoutError, match="Grouped: got param groups of its own beside those"):
        UnifiedCheckpointCallback().attach(refused)

"""Accelerate resumes checkpoints of other engines, of other trainers and of plain loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

import unified_ckpt as uc
from tests.support.foreign import paddleformers, paddles
from tests.support.integrations import lightnings
from tests.support.integrations.plain_loops import (
    BATCH,
    FORMATS,
    STEPS,
    Loop,
    Samples,
    loss_of,
    net,
    optimizer_of,
    resume_lines,
    scheduler_of,
)
from unified_ckpt.integrations.accelerate import after_step, attach, load_state

pytestmark = pytest.mark.filterwarnings(*lightnings.WARNINGS)


class Wrapper(nn.Module):
    """A model as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Job:
    """A script with Accelerate, with everything prepared."""

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
        model: nn.Module | None = None,
        **arguments: Any,
    ) -> None:
        torch.manual_seed(11)
        self.accelerator = Accelerator(cpu=True, **arguments)
        module = wrap(model or net(dropout))
        stepper = optimizer(module)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            module, stepper, scheduler_of(stepper)
        )
        self.losses: list[float] = []
        self.rates: list[float] = []

    def run(self, start: int) -> Job:
        while True:
            for number, batch in enumerate(DataLoader(Samples(), batch_size=BATCH)):
                if start + len(self.losses) == STEPS:
                    return self
                if not self.losses and number < start % 4:
                    continue
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.zero_grad()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("stock accelerate", ""),
        *product(
            sorted(FORMATS.keys() - {"accelerate", "stock accelerate"}), ["", "job", "checkpoint"]
        ),
    ],
)
def test_resumed_run_equals_uninterrupted_loop(
    tmp_path: Path, kind: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`side`: where the model is an attribute. Accelerate loads its own folders itself."""
    caplog.set_level("INFO", "unified_ckpt")
    stop = 6
    loop = Loop(wrap=Wrapper) if side == "checkpoint" else Loop()
    path = FORMATS[kind](loop.run(stop), tmp_path / "saved")
    job = Job(wrap=Wrapper) if side == "job" else Job()
    attach(job.accelerator)
    job.accelerator.load_state(path)
    job.run(stop)
    straight = Loop().run()
    assert job.losses == straight.losses[stop:]
    assert job.rates == straight.rates[stop:]
    if kind == "stock accelerate":
        return
    (line,) = resume_lines(caplog)
    schedule = f"advanced to step {stop}" if kind == "dcp" else "loaded"
    for words in (f"step {stop}", f"schedule: {schedule}", "random states: "):
        assert words in line
    assert ("attribute 'model'" in line) == bool(side)
    assert "no rank loaded" not in caplog.text


@pytest.mark.parametrize("kind", ["unified", "managed"])
def test_random_states_are_those_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    loop, paths = Loop(dropout=0.5), list[Path]()
    loop.run(4, save=lambda loop: paths.append(FORMATS[kind](loop, tmp_path / "saved")))
    job = Job(dropout=0.5)
    assert load_state(job.accelerator, paths[0]).step == 4
    assert job.run(4).losses == loop.losses[4:]


@pytest.mark.parametrize("native", [False, True])
def test_lightning_checkpoint_continues(
    tmp_path: Path, native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of stock Lightning, or our folder; the model was an attribute there."""
    caplog.set_level("INFO", "unified_ckpt")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = net()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            scheduler = {"scheduler": scheduler_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def train_dataloader(self) -> Any:
            return DataLoader(Samples(), batch_size=BATCH)

    torch.manual_seed(3)
    saving = {"every_n_train_steps": 6, "save_top_k": -1}
    lightnings.trainer(tmp_path, native=native, checkpoints=saving, max_steps=6).fit(Module())
    job = Job()
    load_state(job.accelerator, tmp_path / "step=6.ckpt")
    straight = Loop().run()
    assert job.run(6).losses == straight.losses[6:]
    assert job.rates == straight.rates[6:]
    (line,) = resume_lines(caplog)
    assert "step 6" in line
    assert "was the attribute 'model'" in line


def test_schedule_is_stepped_once_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate steps it as often as there are processes, unless batches are split."""
    path = FORMATS["torch"](Loop().run(4), tmp_path / "saved")
    for split, steps in ((False, 8), (True, 4)):
        job = Job()
        assert isinstance(job.scheduler, AcceleratedScheduler)
        job.scheduler.split_batches = split
        monkeypatch.setattr(type(job.accelerator), "num_processes", 2)
        load_state(job.accelerator, path)
        monkeypatch.undo()
        assert job.scheduler.scheduler.last_epoch == steps


def test_numbers_and_steps_continue_after_another_engine(tmp_path: Path) -> None:
    """Without a path, the latest step of another engine in the project is loaded."""
    (tmp_path / "checkpoints").mkdir()
    for stop in (3, 4):
        FORMATS["dcp"](Loop().run(stop), tmp_path / "checkpoints" / f"step-{stop}")
    for manager_options in (None, uc.ManagerOptions(interval_steps=2)):
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        job = Job(project_config=project)
        saves = uc.SaveOptions(fsync=False)
        manager = attach(job.accelerator, manager_options=manager_options, save_options=saves)
        job.accelerator.load_state()
        straight = Loop().run()
        assert job.run(4).losses == straight.losses[4:]
        if manager is not None:
            after_step(job.accelerator)
            manager.wait()
            assert not (tmp_path / "checkpoints" / "checkpoint_5").exists()
            after_step(job.accelerator)  # the sixth
            manager.close()
            assert uc.verify(tmp_path / "checkpoints" / "checkpoint_5").ok


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(2))


def test_what_does_not_fit_raises_and_changes_nothing(tmp_path: Path) -> None:
    loop = Loop().run(4)
    paths = {kind: FORMATS[kind](loop, tmp_path / kind) for kind in ("torch", "unified", "dcp")}
    weights, cut = tmp_path / "weights.pt", tmp_path / "cut.pt"
    torch.save(loop.model.state_dict(), weights)
    cut.write_bytes(paths["torch"].read_bytes()[:-200])
    wide = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 1))

    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    cases: list[tuple[Path, dict[str, Any], str]] = [
        (weights, {}, "optimizers: checkpoint has none, accelerator has AdamW"),
        (cut, {}, r"cut\.pt"),
    ]
    for path in paths.values():
        cases += [
            (path, {"model": wide}, r"0\.weight: checkpoint has shape \(16, 8\)"),
            (path, {"optimizer": momentum}, "momentum_buffer|exp_avg"),
        ]
    for path, arguments, text in cases:
        job = Job(**arguments)
        before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
        with pytest.raises(uc.CheckpointError, match=text):
            load_state(job.accelerator, path)
        for name, tensor in job.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert not job.optimizer.state
    job = Job()
    job.accelerator.register_for_checkpointing(Average())
    with pytest.raises(uc.MismatchError, match=r"custom_0:value: is not in the checkpoint"):
        load_state(job.accelerator, paths["unified"])
    load_state(job.accelerator, weights, strict=False)
    assert torch.equal(job.model.state_dict()["0.bias"], loop.model.state_dict()["0.bias"])
    next(paths["dcp"].glob("*.distcp")).unlink()
    with pytest.raises(uc.IncompleteError, match=r"distcp.* is missing"):
        load_state(Job().accelerator, paths["dcp"])


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *((paddles, name) for name in ("single_bf16", "tp2_nomerge", "half_legacy")),
        *((paddleformers, name) for name in ("single_unified", "single_flex")),
    ],
)
def test_paddle_folders_continue_at_their_step(tmp_path: Path, engine: Any, name: str) -> None:
    job = Job(model=engine.llama())
    report = load_state(job.accelerator, engine.copied(name, tmp_path / name))
    assert report.step == job.scheduler.scheduler.last_epoch == 2
    assert len(job.optimizer.state) == len(list(job.model.parameters()))

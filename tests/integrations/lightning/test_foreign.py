"""Lightning resumes checkpoints of other engines, of other trainers and of plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import unified_ckpt as uc
from tests.support.foreign import megatron_models, megatrons, paddleformers, paddles
from tests.support.integrations import trainers
from tests.support.integrations.lightnings import WARNINGS, trainer
from tests.support.integrations.plain_loops import (
    BATCH,
    EPOCH,
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
from unified_ckpt.integrations.lightning import load_from_checkpoint

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


class Module(pl.LightningModule):
    """A model as an attribute. `batches`: of the loader; `interval`: of its scheduler."""

    def __init__(
        self, model: nn.Module | None = None, *, batch: int = BATCH, interval: str = "step"
    ) -> None:
        super().__init__()
        self.model = model or net()
        self.batch, self.interval = batch, interval
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.epochs: list[int] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.epochs.append(self.current_epoch)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", loss_of(self.model, batch))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        scheduler = {"scheduler": scheduler_of(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=self.batch)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=8)


def fit(out: Path, path: Path, module: Module | None = None, **arguments: Any) -> Module:
    torch.manual_seed(11)
    module = module or Module()
    trainer(out, **{"max_epochs": -1, "max_steps": STEPS, **arguments}).fit(module, ckpt_path=path)
    return module


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stop", [EPOCH, EPOCH + 2])
def test_resumed_run_equals_uninterrupted_loop(
    tmp_path: Path, kind: str, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit: without dropout and shuffling, nothing else draws random numbers."""
    straight, path = Loop().run(), FORMATS[kind](Loop().run(stop), tmp_path / "saved")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    module = fit(tmp_path / "out", path)
    assert module.losses == straight.losses[stop:]
    assert module.rates == straight.rates[stop:]
    assert module.trainer.global_step == STEPS
    assert module.epochs == [step // EPOCH for step in range(stop, STEPS)]
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], tensor)
    assert (
        before.items()
        <= {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}.items()
    ), "the checkpoint is only read"
    (line,) = resume_lines(caplog)
    data = "skips 2 batches of epoch 1" if stop > EPOCH else "begins epoch 1"
    schedule = "advanced to step" if kind == "dcp" else "loaded"
    for words in (
        f"step {stop}",
        "model: is the attribute 'model'",
        f"schedule: {schedule}",
        data,
        "callbacks: begin anew",
    ):
        assert words in line


@pytest.mark.parametrize("kind", ["unified", "managed", "accelerate", "stock accelerate"])
@pytest.mark.parametrize("stop", [EPOCH, EPOCH + 2])
def test_random_states_are_those_of_the_checkpoint(tmp_path: Path, kind: str, stop: int) -> None:
    path = tmp_path / "saved"
    loop = Loop(dropout=0.5)
    paths: list[Path] = []
    loop.run(stop, save=lambda loop: paths.append(FORMATS[kind](loop, path)))
    module = fit(tmp_path / "out", paths[0], Module(net(0.5)), limit_val_batches=0)
    assert module.losses == loop.losses[stop:]


def test_epochs_end_where_max_epochs_says(tmp_path: Path) -> None:
    """Also where a step is several batches, and a schedule goes by epochs."""
    path = FORMATS["unified"](Loop().run(EPOCH + 2), tmp_path / "saved")
    assert fit(tmp_path / "out", path, max_epochs=3, max_steps=-1).epochs == [1] * 2 + [2] * 4
    halves = Module(batch=BATCH // 2, interval="epoch")
    halved = fit(
        tmp_path / "out", path, halves, max_epochs=3, max_steps=-1, accumulate_grad_batches=2
    )
    assert halved.epochs == [1] * 4 + [2] * 8
    assert halved.trainer.global_step == 3 * EPOCH
    assert halved.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert not fit(tmp_path / "out", path, max_epochs=1, max_steps=-1).losses


def test_later_saves_resume_as_usual(tmp_path: Path) -> None:
    straight = Loop().run()
    path = FORMATS["torch"](Loop().run(3), tmp_path / "saved")
    saving: Any = {"every_n_train_steps": 2, "save_top_k": -1}
    module = fit(tmp_path / "out", path, max_steps=6, checkpoints=saving)
    assert module.losses == straight.losses[3:6]
    assert fit(tmp_path / "out", tmp_path / "out" / "step=6.ckpt").losses == straight.losses[6:]


class Manual(Module):
    """Two models, each with an optimizer and a scheduler of its own that it steps itself."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"one": net(), "two": net()}))
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> Any:
        steppers: Any = zip(self.optimizers(), self.lr_schedulers(), strict=True)  # type: ignore
        for model, (optimizer, scheduler) in zip(self.model.children(), steppers, strict=True):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        optimizers = [optimizer_of(model) for model in self.model.children()]
        return optimizers, [scheduler_of(optimizer) for optimizer in optimizers]


def test_steps_of_several_optimizers_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Lightning counts them. When a module steps its schedulers is not known."""
    quiet: dict[str, Any] = {"limit_val_batches": 0, "max_steps": 2 * STEPS}
    torch.manual_seed(3)
    straight = Manual()
    trainer(tmp_path / "out", **{**quiet, "max_epochs": -1}).fit(straight)
    torch.manual_seed(3)
    stopped = Manual()
    run = trainer(tmp_path / "out", **{**quiet, "max_epochs": -1, "max_steps": 12})
    run.fit(stopped)
    options = uc.SaveOptions(fsync=False)
    uc.save(
        tmp_path / "saved",
        model=stopped.model,
        optimizer=run.optimizers,
        step=6,
        options=options,
    )
    resumed = fit(tmp_path / "out", tmp_path / "saved", Manual(), **quiet)
    assert resumed.trainer.global_step == 2 * STEPS
    assert len(resumed.losses) == 2 * (STEPS - 6)
    assert resumed.losses[:2] == straight.losses[12:14]
    assert "schedule: begins anew, begins anew" in resume_lines(caplog)[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Samples()
        return (samples[i % len(samples)] for i in range(1000))


def test_data_of_unknown_length_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Streamed(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=BATCH)

    path = FORMATS["unified"](Loop().run(6), tmp_path / "saved")
    assert len(fit(tmp_path / "out", path, Streamed()).losses) == STEPS - 6
    assert "data: begins anew" in resume_lines(caplog)[0]


def test_hooks_edit_the_weights_of_any_format(tmp_path: Path) -> None:
    class Edits(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["global_step"] == 4
            weights = checkpoint["state_dict"]
            assert {*weights} == {*self.state_dict()}
            weights["model.0.bias"] = torch.full((16,), 7.0)

    loop = Loop().run(4)
    module = fit(tmp_path / "out", FORMATS["torch"](loop, tmp_path / "saved"), Edits(), max_steps=4)
    weights = loop.model.state_dict()
    assert torch.equal(module.model.state_dict()["0.bias"], torch.full((16,), 7.0))
    assert torch.equal(module.model.state_dict()["3.bias"], weights["3.bias"])


def test_what_does_not_fit_raises_and_changes_nothing(tmp_path: Path) -> None:
    class Beside(Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

    class Twice(Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = net()

    class Other(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    loop = Loop().run(4)
    paths = {kind: FORMATS[kind](loop, tmp_path / kind) for kind in ("torch", "unified", "dcp")}
    wide = Module(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 1)))
    for kind, path in paths.items():
        for module, text in (
            (wide, r"0\.weight: checkpoint has shape \(16, 8\), target has \(32, 8\)"),
            (Beside(), r"attribute 'model' of|attribute 'model', and it lacks .*head\.weight"),
            (Twice(), "the attributes model, teacher of the module all have"),
            (Other(), "momentum_buffer|exp_avg"),
        ):
            before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            with pytest.raises(uc.CheckpointError, match=text):
                fit(tmp_path / "out", path, module)
            if not isinstance(module, Other):  # Lightning makes optimizers after the load
                for name, tensor in module.state_dict().items():
                    assert torch.equal(tensor, before[name]), (kind, name)


def test_damaged_and_incomplete_checkpoints_raise(tmp_path: Path) -> None:
    loop = Loop().run(4)
    whole, folder = FORMATS["torch"](loop, tmp_path / "a"), FORMATS["dcp"](loop, tmp_path / "b")
    cut, weights = tmp_path / "cut.pt", tmp_path / "weights.pt"
    cut.write_bytes(whole.read_bytes()[:-200])
    torch.save(loop.model.state_dict(), weights)
    next(folder.glob("*.distcp")).unlink()
    (tmp_path / "run").mkdir()
    latest = FORMATS["dcp"](loop, tmp_path / "run" / "step-4")
    for path, error, text in (
        (cut, uc.FormatError, r"cut\.pt"),
        (weights, uc.MismatchError, "got no optimizer, expected a full checkpoint"),
        (folder, uc.IncompleteError, r"distcp.* is missing"),
        (tmp_path / "run", uc.NotFoundError, rf"the latest is {latest}"),
    ):
        with pytest.raises(error, match=text):
            fit(tmp_path / "out", path)
    with pytest.raises(uc.FormatError, match="got no state of Lightning; create the module"):
        load_from_checkpoint(Module, whole)
    run, module = trainer(tmp_path / "out"), Module()
    run.validate(module, ckpt_path=str(weights), verbose=False)
    assert torch.equal(module.model.state_dict()["0.bias"], loop.model.state_dict()["0.bias"])


class Causal(Module):
    """A model of transformers on 16 sequences, as other engines train it."""

    vocabulary = 64

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(0)
        return DataLoader(list(torch.randint(0, self.vocabulary, (16, 8), generator=draw)), 4)


@pytest.mark.parametrize(
    ("engine", "name", "title"),
    [
        *((paddles, name, "PaddleNLP") for name in ("single_bf16", "single_tied", "tp2_nomerge")),
        (paddles, "half_legacy", "PaddleNLP"),
        (paddleformers, "single_tied_unified", "PaddleNLP"),
        (paddleformers, "sharding2_flex", "Paddle FlexCheckpoint"),
    ],
)
def test_paddle_folders_continue_at_their_step(
    tmp_path: Path, engine: Any, name: str, title: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Causal(engine.llama(tied="tied" in name))
    module.vocabulary = module.model.config.vocab_size
    fit(
        tmp_path / "out",
        engine.copied(name, tmp_path / name),
        module,
        max_steps=5,
        limit_val_batches=0,
    )
    assert len(module.losses) == 3
    assert module.rates == [0.01, 0.005, 0.005]
    assert f"{name} ({title}): step 2" in resume_lines(caplog)[0]


def test_master_weights_are_not_lost(tmp_path: Path) -> None:
    """A bfloat16 module without masters rounds them."""
    path = paddles.copied("single_bf16", tmp_path / "single_bf16")
    arguments: dict[str, Any] = {"precision": "bf16-true", "max_steps": 3, "limit_val_batches": 0}
    cast = uc.LoadOptions(cast=True)
    with pytest.raises(uc.MismatchError, match="got master weights, which are more precise"):
        fit(tmp_path / "out", path, Causal(paddles.llama()), load_options=cast, **arguments)
    without = uc.LoadOptions(cast=True, parts=("model", "optimizer"))
    module = fit(tmp_path / "out", path, Causal(paddles.llama()), load_options=without, **arguments)
    assert len(module.losses) == 1


def test_megatron_step_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its param groups are others than those of the module."""
    kind, job, more = megatron_models.JOBS["llama"]
    _, state = megatron_models.drawn(kind, job, tmp_path)
    root = megatrons.write(tmp_path / "megatron", job, state, **more)
    module = Causal(megatron_models.new_model(kind, job))
    module.vocabulary = megatron_models.VOCAB
    source = uc.SourceOptions(config=str(tmp_path / "hub"))
    options = uc.LoadOptions(source=source, hyperparameters="current")
    arguments: dict[str, Any] = {"max_steps": 9, "limit_val_batches": 0, "load_options": options}
    fit(tmp_path / "out", root, module, **arguments)
    assert module.rates == [0.0025, 0.0025]
    (line,) = resume_lines(caplog)
    assert "step 7" in line
    assert "skips 3 batches of epoch 1" in line


@pytest.mark.parametrize("native", [False, True])
def test_trainer_checkpoints_continue_at_their_step(tmp_path: Path, native: bool) -> None:
    trainers.trainer(tmp_path / "hf", native=native, max_steps=4, save_steps=2).train()
    path, module = tmp_path / "hf" / "checkpoint-4", Causal(trainers.model())
    with uc.open(path) as source:
        saved = {name: source["model"][name][...] for name in source["model"]}
    fit(tmp_path / "out", path, module, max_steps=4, limit_val_batches=0)
    assert module.trainer.global_step == 4
    for name, tensor in module.model.state_dict().items():
        assert name not in saved or torch.equal(tensor, saved[name])
    later = Causal(trainers.model())
    fit(tmp_path / "out", path, later, max_steps=6, limit_val_batches=0)
    assert len(later.losses) == 2
    assert all(math.isfinite(loss) for loss in later.losses)

"""Lightning's Trainer with and without the callback: ModelCheckpoint, hooks, removal, and errors
for wrong use.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.integrations.lightnings import (
    OPTIONS,
    WARNINGS,
    Net,
    check_same,
    fit,
    samples,
    trainer,
)
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback, load_from_checkpoint

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
EPOCHS = {"every_n_epochs": 1, "save_top_k": -1}
EVERY = {"every_n_train_steps": 1, "save_top_k": -1}


def names(folder: Path) -> list[str]:
    """Return all entries: scripts list them, too."""
    return sorted(os.listdir(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    """A run of two epochs with the callback, and a folder of its checkpoints at every step."""
    out = tmp_path_factory.mktemp("whole")
    return fit(out, checkpoints=EVERY), out


def test_training_and_saves_equal_native_lightning(tmp_path: Path, whole: tuple[Net, Path]) -> None:
    run, folder = whole
    check_same(run, fit(tmp_path, native=True, checkpoints=EVERY))
    assert names(folder) == names(tmp_path) == [f"step={step}.ckpt" for step in range(1, 9)]
    for path in folder.glob("*.ckpt"):
        assert uc.verify(path, deep=True).ok
    with uc.open(folder / "step=8.ckpt") as source:
        assert source.step == 8
        assert source.parts == ("model", "optimizer")
        weights = run.state_dict()
        assert all(
            torch.equal(source["model"][name][...], tensor) for name, tensor in weights.items()
        )
        assert "up.weight/exp_avg" in source["optimizer"]
        assert source.extra["lightning"]["hyper_parameters"] == dict(run.hparams)


@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_resume_within_an_epoch_equals_uninterrupted_run(
    tmp_path: Path, whole: tuple[Net, Path], step: int
) -> None:
    resumed = fit(tmp_path, ckpt_path=whole[1] / f"step={step}.ckpt", seed=5)
    assert len(resumed.losses) == 8 - step
    check_same(resumed, whole[0])


class Edited(Net):
    """Loads its state by a method of its own, after a hook has edited it."""

    loads = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["up.bias"] = torch.full_like(state["up.bias"], 3.0)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.loads += 1
        state_dict = {**state_dict, "up.weight": state_dict["up.weight"] * 2}
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_load_state_dict_of_the_module_is_called(
    tmp_path: Path, whole: tuple[Net, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, validated = whole[1] / "step=8.ckpt", Edited()
    trainer(tmp_path).validate(validated, ckpt_path=path, verbose=False)
    assert validated.loads == 1
    assert torch.equal(validated.up.weight, whole[0].up.weight * 2)
    assert validated.up.bias.tolist() == [3.0] * len(validated.up.bias)
    with caplog.at_level(logging.INFO, logger="unified_ckpt"):
        fit(tmp_path, ckpt_path=path)
    (line,) = [line for line in caplog.messages if line.startswith("resumed from")]
    assert line.startswith(f"resumed from {path}: step 8, saved by 1 rank, loaded by 1 rank")


def test_native_checkpoint_is_resumed_by_native_lightning(tmp_path: Path) -> None:
    checkpoints = {"save_last": True}
    fit(tmp_path, native=True, checkpoints=checkpoints, max_epochs=1)
    assert (tmp_path / "last.ckpt").is_file()
    native = fit(tmp_path / "other", ckpt_path=tmp_path / "last.ckpt", native=True)
    assert fit(tmp_path, ckpt_path="last", checkpoints=checkpoints).losses == native.losses
    assert uc.verify(tmp_path / "last.ckpt").ok, "it is a folder now"
    assert (tmp_path / "last-before-1.ckpt").is_file(), "what this library did not write is kept"


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_entry_with_the_name_of_the_last_is_kept(
    tmp_path: Path, save_last: bool | str, kind: str
) -> None:
    """The entry is a file of native Lightning, or a folder that another strategy wrote."""
    if kind == "folder":
        (tmp_path / "last.ckpt").mkdir()
    existing = tmp_path / ("last.ckpt" if kind == "file" else "last.ckpt/zero.pt")
    existing.write_bytes(b"mine")
    fit(
        tmp_path,
        checkpoints={"save_last": save_last, "enable_version_counter": False},
        max_epochs=1,
    )
    assert uc.verify(tmp_path / "last.ckpt").ok
    backup = tmp_path / ("last-before-1.ckpt" if kind == "file" else "last.ckpt-before-1/zero.pt")
    assert backup.read_bytes() == b"mine"


def test_last_checkpoint_that_is_being_read_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, checkpoints={"save_last": True}, max_epochs=1)
    with uc.open(tmp_path / "last.ckpt"):
        fit(tmp_path, checkpoints={"save_last": "link", "enable_version_counter": False})
    assert os.readlink(tmp_path / "last.ckpt") == "step=8.ckpt"
    assert uc.verify(tmp_path / "last.ckpt-before-1").ok


def test_save_top_k_and_last(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, checkpoints={"monitor": "val", "save_top_k": 2, "save_last": True}, max_epochs=4
    )
    module = Net(lr=0.5)
    run.fit(module)
    checkpoint = run.checkpoint_callback
    assert isinstance(checkpoint, ModelCheckpoint)
    assert len(checkpoint.best_k_models) == 2
    assert names(tmp_path) == sorted(
        ["last.ckpt", *(Path(path).name for path in checkpoint.best_k_models)]
    )
    last = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    (metrics,) = run.test(module, ckpt_path="best", verbose=False)
    assert metrics["val"] == pytest.approx(float(checkpoint.best_model_score or 0))
    run.validate(module, ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)
    assert all(torch.equal(tensor, last[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("top_k", [1, -1])
def test_link_to_the_last_never_dangles(
    tmp_path: Path, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unified_ckpt.integrations.lightning import run as run_file

    targets: list[str] = []

    def remove(path: str, **more: Any) -> None:
        remove_checkpoint(path, **more)
        targets.append((tmp_path / "last.ckpt").resolve().name)
        assert (tmp_path / "last.ckpt" / "unified_checkpoint.json").is_file()

    remove_checkpoint = run_file.remove_checkpoint
    monkeypatch.setattr(run_file, "remove_checkpoint", remove)
    checkpoints = {"save_last": "link", "save_top_k": top_k, "every_n_train_steps": 2}
    run = fit(tmp_path, checkpoints=checkpoints)
    assert os.readlink(tmp_path / "last.ckpt") == "step=8.ckpt"
    assert targets == (["step=4.ckpt", "step=6.ckpt", "step=8.ckpt"] if top_k == 1 else [])
    check_same(fit(tmp_path, ckpt_path="last", checkpoints=checkpoints), run)


def test_last_checkpoint_replaces_a_link(tmp_path: Path) -> None:
    fit(tmp_path, checkpoints={"save_last": "link"}, max_epochs=1)
    resumed = fit(
        tmp_path, ckpt_path="last", checkpoints={"save_last": True, "enable_version_counter": False}
    )
    assert len(resumed.losses) == 4
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert [name for name in names(tmp_path) if "before" in name] == []
    with uc.open(tmp_path / "last.ckpt") as source:
        assert source.step == 8


def test_resume_from_save_weights_only_raises(tmp_path: Path) -> None:
    run = fit(tmp_path, checkpoints={"save_weights_only": True, "every_n_train_steps": 8})
    folder = tmp_path / "step=8.ckpt"
    assert not any("optimizer" in name for name in names(folder))
    other = Net()
    trainer(tmp_path).validate(other, ckpt_path=folder, verbose=False)
    assert all(
        torch.equal(tensor, run.state_dict()[name]) for name, tensor in other.state_dict().items()
    )
    with pytest.raises(
        uc.MismatchError,
        match=r"got no optimizer \(save_weights_only\), expected a full checkpoint",
    ):
        fit(tmp_path, ckpt_path=folder)


def test_other_models_and_optimizers_are_refused(whole: tuple[Net, Path], tmp_path: Path) -> None:
    folder = whole[1] / "step=3.ckpt"

    class Other(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.upper = self.__dict__["_modules"].pop("up")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.upper(x))

    with pytest.raises(
        uc.MismatchError,
        match=r"got the state of torch\.optim\.adamw\.AdamW, expected torch\.optim\.sgd",
    ):
        trainer(tmp_path).fit(Other(), ckpt_path=folder)
    with pytest.raises(
        uc.MismatchError, match=r"up\.weight: checkpoint has shape \(16, 8\), target has \(32, 8\)"
    ):
        trainer(tmp_path).fit(Net(width=32), ckpt_path=folder)
    renamed = Renamed()
    before = {name: tensor.clone() for name, tensor in renamed.state_dict().items()}
    with pytest.raises(uc.MismatchError, match=r"upper\.weight: is not in the checkpoint"):
        trainer(tmp_path).fit(renamed, ckpt_path=folder)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in renamed.state_dict().items()
    ), "nothing was written"
    renamed.strict_loading = False
    with pytest.raises(uc.MismatchError, match=r"optimizer:upper\.weight"):
        trainer(tmp_path).fit(renamed, ckpt_path=folder)


def test_wrong_paths_raise(whole: tuple[Net, Path], tmp_path: Path) -> None:
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    shutil.copytree(whole[1] / "step=3.ckpt", folder / "step=3.ckpt")
    shutil.copytree(whole[1] / "step=4.ckpt", folder / "step=4.ckpt")
    (folder / "step=4.ckpt" / "unified_checkpoint.json").unlink()
    (tmp_path / "weights.safetensors").write_bytes(b"12345678{}")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"")
    (tmp_path / "link.ckpt").symlink_to("gone.ckpt")

    uc.save(tmp_path / "plain", model=Net())
    latest = rf"the latest is {folder}/step=3\.ckpt"
    beside = rf"the latest next to it is {folder}/step=3"
    for path, error, text in (
        *(
            (
                run,
                uc.NotFoundError,
                rf"got a run's folder, expected a checkpoint; {latest}",
            )
            for run in (tmp_path, tmp_path / "lightning_logs" / "version_0", folder)
        ),
        (
            folder / "step=4.ckpt",
            uc.NotFoundError,
            rf"got no valid manifest; it is unfinished.*; {beside}",
        ),
        (
            folder / "step=9.ckpt",
            FileNotFoundError,  # as in stock Lightning
            rf"step=9\.ckpt: got nothing, expected a checkpoint; {beside}",
        ),
        (tmp_path / "link.ckpt", uc.NotFoundError, r"got a dangling link to gone\.ckpt"),
        (tmp_path / "weights.safetensors", uc.FormatError, "got a file of another format"),
        (tmp_path / "hub", uc.FormatError, "got a folder without Lightning's state"),
        (tmp_path / "plain", uc.MismatchError, "got no optimizer, expected a full checkpoint"),
    ):
        with pytest.raises(error, match=text):
            fit(tmp_path / "out", ckpt_path=path)


def test_unstorable_value_is_named_by_its_key(tmp_path: Path) -> None:
    class Unstorable(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"function": len}

    class Lambda(Net):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"activation": torch.nn.functional.relu})

    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"loss": [torch.nn.CrossEntropyLoss()]})

    class Metric(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["metric"] = torch.nn.BatchNorm1d(2)

    fitter = trainer(tmp_path, checkpoints={})
    with pytest.raises(uc.FormatError, match=r"extra\.lightning\.mine\.function: got"):
        fitter.fit(Unstorable())
    with pytest.raises(
        uc.FormatError, match=r"extra\.lightning\.hyper_parameters\.activation: got"
    ) as caught:
        trainer(tmp_path, checkpoints={}).fit(Lambda())
    assert "save_hyperparameters(ignore" in caught.value.__notes__[0]
    for module, text in (  # a load returned their state
        (Module, r"hyper_parameters\.loss\[0\]: got a CrossEntropyLoss, expected .*ignore=\["),
        (
            Metric,
            r"metric: got a BatchNorm1d, expected values; add what its state_dict\(\) returns",
        ),
    ):
        with pytest.raises(uc.FormatError, match=text):
            trainer(tmp_path, checkpoints={}).fit(module())
    assert names(tmp_path) == []


class Hooks(Net):
    """Saves an extra object, and renames a tensor."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"a": (1, 2), "shadow": {"up": self.up.weight.detach().clone()}}
        checkpoint["state_dict"]["lower.weight"] = checkpoint["state_dict"].pop("down.weight")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        state = checkpoint["state_dict"]
        assert state["up.weight"].shape == (16, 8)
        state["down.weight"] = state.pop("lower.weight")


def test_hooks_rename_tensors_and_add_state(tmp_path: Path) -> None:
    module = Hooks()
    trainer(tmp_path, checkpoints=EVERY).fit(module)
    resumed = Hooks()
    trainer(tmp_path / "other").fit(resumed, ckpt_path=tmp_path / "step=5.ckpt")
    check_same(resumed, module)
    assert resumed.mine["a"] == (1, 2)
    with uc.open(tmp_path / "step=5.ckpt") as source:
        assert torch.equal(resumed.mine["shadow"]["up"], source["model"]["up.weight"][...])
        assert "lower.weight" in source["model"]
        assert "down.weight" not in source["model"]


class HalfSize(Net):
    """Saves its weights in half precision. Pairs them with its own by position at a load."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state.update({name: state[name].half() for name in ("up.weight", "down.weight")})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert list(checkpoint["state_dict"]) == list(self.state_dict())


def test_hooks_cast_weights_and_see_the_order_of_the_module(tmp_path: Path) -> None:
    module = HalfSize()
    trainer(tmp_path, checkpoints=EPOCHS).fit(module)
    resumed = HalfSize()
    trainer(tmp_path / "other").fit(resumed, ckpt_path=tmp_path / "step=8.ckpt")
    halves = ("up.weight", "down.weight")
    expected = {
        name: tensor.half().float() if name in halves else tensor
        for name, tensor in module.state_dict().items()
    }
    check_equal(resumed.state_dict(), expected)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_trainer_is_copied_and_pickled_after_a_fit(tmp_path: Path, save_last: Any) -> None:
    module, fitter = Net(), trainer(tmp_path, checkpoints={**EPOCHS, "save_last": save_last})
    fitter.fit(module)
    pickled = io.BytesIO()
    torch.save(fitter, pickled)
    pickled.seek(0)
    for copied in (copy.deepcopy(fitter), torch.load(pickled, weights_only=False)):
        copied.fit_loop.max_epochs += 1
        resumed = Net()
        copied.fit(resumed, ckpt_path="last")
        assert copied.global_step == fitter.global_step + 4
        copied.save_checkpoint(tmp_path / "copy.ckpt")
        with uc.open(tmp_path / "copy.ckpt") as source:
            assert torch.equal(source["model"]["up.weight"][...], resumed.up.weight)


class Adversaries(Net):
    """Has two optimizers, like a generator and its discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.up.parameters()), torch.optim.SGD(
            self.down.parameters(), lr=0.1, momentum=0.9
        )

    def training_step(self, batch: Any, number: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            optimizer.step()


class Twice(Adversaries):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.up.parameters())


def test_several_optimizers(tmp_path: Path) -> None:
    with pytest.raises(uc.LayoutError, match=r"up\.weight: belongs to two optimizers"):
        trainer(tmp_path, checkpoints={}).fit(Twice())
    module, resumed = Adversaries(), Adversaries()
    trainer(tmp_path, checkpoints=EPOCHS).fit(module)
    trainer(tmp_path / "other").fit(resumed, ckpt_path=tmp_path / "step=8.ckpt")
    assert len(resumed.losses) == 8
    check_same(resumed, module)


def test_weight_averaging_is_restored(tmp_path: Path) -> None:
    averages: list[dict[str, torch.Tensor]] = []

    class Average(EMAWeightAveraging):
        def on_train_end(self, *arguments: Any) -> None:
            assert self._average_model is not None
            averages.append(
                {name: tensor.clone() for name, tensor in self._average_model.state_dict().items()}
            )
            super().on_train_end(*arguments)

    net = {"width": 20_000}  # large enough to be a part
    run = fit(
        tmp_path, checkpoints=EVERY, callbacks=[Average(decay=0.9)], net=net, limit_train_batches=2
    )
    resumed = fit(
        tmp_path / "other",
        ckpt_path=tmp_path / "step=3.ckpt",
        callbacks=[Average(decay=0.9)],
        net=net,
        limit_train_batches=2,
    )
    check_same(resumed, run)
    assert all(torch.equal(averages[1][name], tensor) for name, tensor in averages[0].items())
    with uc.open(tmp_path / "step=3.ckpt") as source:
        assert set(source.parts) == {"model", "optimizer", "current_model_state"}


@pytest.mark.incident("Lightning#16426")
def test_only_unified_checkpoints_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only checkpoints of this library are removed."""
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        fitter = trainer(
            tmp_path,
            checkpoints={"save_last": True},
            callbacks=[LearningRateFinder(num_training_steps=3), OnExceptionCheckpoint(tmp_path)],
        )
        fitter.fit(Net())
        assert names(tmp_path) == ["last.ckpt", "step=8.ckpt"]
        (tmp_path / "foreign.ckpt").mkdir()
        (tmp_path / "foreign.ckpt" / "model.safetensors").write_bytes(b"precious")
        (tmp_path / "file.ckpt").write_bytes(b"precious")
        for name in ("foreign.ckpt", "file.ckpt", "last.ckpt", "nothing.ckpt"):
            fitter.strategy.remove_checkpoint(tmp_path / name)
    assert names(tmp_path) == ["file.ckpt", "foreign.ckpt", "last.ckpt", "step=8.ckpt"]
    assert "foreign.ckpt is not removed: it is not a unified checkpoint" in caplog.text
    assert "file.ckpt is not removed" in caplog.text
    assert "last.ckpt is not removed: it is the latest" in caplog.text


def test_exception_leaves_a_resumable_checkpoint(tmp_path: Path, whole: tuple[Net, Path]) -> None:
    class Broken(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if self.global_step == 3:
                raise RuntimeError("broken")

    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], checkpoints={}).fit(Broken())
    check_same(fit(tmp_path, ckpt_path=tmp_path / "on_exception.ckpt"), whole[0])


def test_requeued_job_skips_an_interrupted_save(
    tmp_path: Path, whole: tuple[Net, Path], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(whole[1] / "step=3.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    (tmp_path / ".unified-0123-hpc_ckpt_2.ckpt").mkdir()
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        resumed = fit(tmp_path, ckpt_path="hpc")
    assert "hpc_ckpt_2.ckpt does not exist" in caplog.text
    check_same(resumed, whole[0])


@pytest.mark.incident("Lightning#688")
def test_interrupted_save_leaves_the_older_checkpoint(
    tmp_path: Path, whole: tuple[Net, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job dies during a save."""
    from unified_ckpt.engine.folder.publish.renames import RenamePublisher

    checkpoints = {"every_n_train_steps": 2, "save_top_k": 1, "save_last": True}
    publish, count = RenamePublisher.publish, iter(range(100))

    def crash(*arguments: Any, **more: Any) -> Any:
        if next(count) == 3:  # the second last.ckpt, over the first
            raise SystemExit
        return publish(*arguments, **more)

    monkeypatch.setattr(RenamePublisher, "publish", crash)
    with pytest.raises(SystemExit):
        fit(tmp_path, checkpoints=checkpoints)
    monkeypatch.undo()
    assert [name for name in names(tmp_path) if not name.startswith(".")] == [
        "last.ckpt",
        "step=4.ckpt",
    ]
    with uc.open(tmp_path / "last.ckpt") as source:
        assert source.step == 2
    check_same(fit(tmp_path, ckpt_path="last", checkpoints=checkpoints), whole[0])


def test_strategies_are_refused_by_name(tmp_path: Path) -> None:
    callback = UnifiedCheckpointCallback()

    class CustomStrategy(SingleDeviceStrategy):
        pass

    fitter = trainer(tmp_path, native=True)
    fitter._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(
        uc.LayoutError,
        match=r"got FSDPStrategy; use ModelParallelStrategy",
    ):
        callback.setup(fitter, Net(), "fit")
    for name in ("DeepSpeedStrategy", "SingleDeviceXLAStrategy"):
        fitter._accelerator_connector.strategy = type(name, (), {"save_checkpoint": None})()
        with pytest.raises(uc.LayoutError, match=f"got {name}; use"):
            callback.setup(fitter, Net(), "fit")
    fitter = trainer(tmp_path, callbacks=[UnifiedCheckpointCallback()])
    with pytest.raises(uc.CheckpointError, match="got two in this Trainer"):
        fitter.fit(Net())
    trainer(tmp_path, strategy=CustomStrategy(torch.device("cpu")), max_epochs=1).fit(Net())
    fitter = trainer(tmp_path, checkpoints={"dirpath": "memory://run"})
    with pytest.raises(uc.StorageError, match="set a local dirpath"):
        fitter.fit(Net())


def test_resume_and_module_from_a_save_without_the_model(tmp_path: Path) -> None:
    """Weights are read from the master weights, and from the tensors saved with them."""
    options = OPTIONS.model_copy(
        update={"model_dtype": "bfloat16", "parts": ("master_weights", "optimizer")}
    )
    fitter = trainer(
        tmp_path,
        native=True,
        callbacks=[UnifiedCheckpointCallback(save_options=options)],
        max_epochs=1,
    )
    run = Net(dropout=0.0)
    fitter.fit(run)
    fitter.save_checkpoint(tmp_path / "mine")
    assert not list((tmp_path / "mine").glob("model.safetensors*"))
    weights = {name: tensor.clone() for name, tensor in run.state_dict().items()}
    for loaded in (
        load_from_checkpoint(Net, tmp_path / "mine"),
        fit(tmp_path, max_epochs=1, ckpt_path=tmp_path / "mine"),
    ):
        assert all(
            torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items()
        )


def test_load_from_checkpoint(tmp_path: Path, whole: tuple[Net, Path]) -> None:
    fitter = trainer(tmp_path)
    run = Net(width=24)
    fitter.fit(run)
    fitter.save_checkpoint(tmp_path / "mine")
    loaded = load_from_checkpoint(Net, tmp_path / "mine")
    assert loaded.hparams["width"] == 24
    assert all(
        torch.equal(tensor, run.state_dict()[name]) for name, tensor in loaded.state_dict().items()
    )
    assert load_from_checkpoint(Net, tmp_path / "mine", lr=3.0).hparams["lr"] == 3.0
    (tmp_path / "hparams.yaml").write_text("width: 24\nlr: 2.0\n")
    for device in ("meta", torch.device("cpu")):
        loaded = load_from_checkpoint(
            Net, tmp_path / "mine", map_location=device, hparams_file=tmp_path / "hparams.yaml"
        )
        assert (loaded.hparams["width"], loaded.hparams["lr"]) == (24, 2.0)
        assert loaded.device == torch.device(device)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Net, tmp_path / "mine", width=8)
    uc.save(tmp_path / "plain", model=Net())
    with pytest.raises(uc.CheckpointError, match="checkpoint without Lightning's state"):
        load_from_checkpoint(Net, tmp_path / "plain")


def test_save_checkpoint_over_a_folder_of_the_caller(tmp_path: Path) -> None:
    """`save_checkpoint` does not replace a folder of the project or of the run."""
    fitter = trainer(tmp_path / "run")
    fitter.fit(Net())
    fitter.save_checkpoint(tmp_path / "run" / "mine")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "main.py").write_text("1")
    for folder in (tmp_path / "project", tmp_path / "run"):
        before = sorted(folder.rglob("*"))
        with pytest.raises(uc.StorageError, match=r"holds .*, expected a"):
            fitter.save_checkpoint(folder)
        assert sorted(folder.rglob("*")) == before


class Shards(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.shard = 0

    def train_dataloader(self) -> Any:
        self.shard += 1
        return torch.utils.data.DataLoader(samples(), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shard = 10 * state_dict["shard"]


def test_datamodules_and_callbacks_are_restored(tmp_path: Path) -> None:
    def run(out: Path, **more: Any) -> tuple[Shards, EarlyStopping]:
        module, data, stopping = (
            Net(),
            Shards(),
            EarlyStopping("loss", patience=5, check_on_train_epoch_end=True),
        )
        trainer(out, checkpoints=EPOCHS, callbacks=[stopping], **more.pop("trainer", {})).fit(
            module, datamodule=data, **more
        )
        return data, stopping

    first, before = run(tmp_path)
    second, after = run(
        tmp_path / "other", ckpt_path=tmp_path / "step=8.ckpt", trainer={"max_epochs": 2}
    )
    assert (first.shard, second.shard) == (1, 11)
    assert after.state_dict() == before.state_dict()


def test_failed_resume_leaves_nothing_to_the_next_run(
    whole: tuple[Net, Path], tmp_path: Path
) -> None:
    class Fails(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise RuntimeError("not today")

    fitter = trainer(tmp_path)
    with pytest.raises(RuntimeError, match="not today"):
        fitter.fit(Fails(), ckpt_path=whole[1] / "step=3.ckpt")
    torch.manual_seed(0)
    module = Net()
    fitter.fit(module)
    check_same(module, whole[0])
    assert len(module.losses) == 8


def test_tied_weights_and_compiled_modules(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(width=8)
            self.again = torch.nn.Linear(8, 8)
            self.again.weight = self.up.weight
            self.up = torch.compile(self.up, backend="eager")  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.again(self.up(x).relu()))

    run, resumed = Tied(), Tied()
    trainer(tmp_path, checkpoints=EVERY).fit(run)
    trainer(tmp_path / "other").fit(resumed, ckpt_path=tmp_path / "step=6.ckpt")
    check_same(resumed, run)
    assert resumed.again.weight is resumed.up.weight
    with uc.open(tmp_path / "step=6.ckpt") as source:
        assert {"up.weight", "again.bias"} <= set(source["model"])
        assert "again.weight" not in set(source["model"])


def test_pytorch_lightning_package(tmp_path: Path) -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = (self.layer(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=4, shuffle=True)

    def run(out: Path, ckpt_path: Path | None = None) -> Module:
        torch.manual_seed(0)
        module = Module()
        checkpoints = pytorch_lightning.callbacks.ModelCheckpoint(
            dirpath=out,
            filename="{step}",
            **EVERY,  # type: ignore[arg-type]
        )
        fitter = pytorch_lightning.Trainer(
            default_root_dir=out,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=2,
            callbacks=[checkpoints, UnifiedCheckpointCallback(save_options=OPTIONS)],
        )
        fitter.fit(module, ckpt_path=ckpt_path)
        return module

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    straight = run(tmp_path / "a")
    assert run(tmp_path / "b", tmp_path / "a" / "step=3.ckpt").losses == straight.losses[3:]
    loaded = load_from_checkpoint(Module, tmp_path / "a" / "step=8.ckpt")
    assert torch.equal(loaded.layer.weight, straight.layer.weight)
    assert isinstance(loaded, pytorch_lightning.LightningModule)
    assert not isinstance(loaded, pl.LightningModule)

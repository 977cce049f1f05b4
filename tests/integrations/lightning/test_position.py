"""A Lightning run resumed from each of its checkpoints equals the run that never stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging

from tests.support.integrations.lightnings import check_same, fit

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings(
        r"ignore::UserWarning:(pytorch_)?lightning\b",
        "ignore:.*LeafSpec:FutureWarning",
        "ignore:'set_vital' is deprecated",
    ),
]
EVERY = {"every_n_train_steps": 1, "save_top_k": -1}
EPOCHS = {"every_n_epochs": 1, "save_top_k": -1}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "at the end of epochs": (EPOCHS, {}, {}),
    "at the end of epochs, counting steps": (EPOCHS, {}, {"max_epochs": -1, "max_steps": 7}),
    "after validations in mid-epoch": (EPOCHS, {}, {"val_check_interval": 2}),
    "in float64": (EPOCHS, {}, {"precision": "64-true"}),
    "with a worker and a sampler that counts epochs": (
        {**EVERY, "every_n_train_steps": 2},
        {"loader": "epochs"},
        {},
    ),
    "with a loader that owns a generator": (EVERY, {"loader": "generator"}, {}),
    "with a loader that has a state": (
        {**EVERY, "every_n_train_steps": 2},
        {"loader": "stateful"},
        {},
    ),
    "with hooks that draw numbers": (EVERY, {"draws": True}, {}),
    "with a loader that has a state, at the end of epochs, counting steps": (
        EPOCHS,
        {"loader": "stateful"},
        {"max_epochs": -1, "max_steps": 7},
    ),
}
SLOW: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "every step, counting steps": (EVERY, {}, {"max_epochs": -1, "max_steps": 7}),
    "between steps of the optimizer": (EVERY, {}, {"accumulate_grad_batches": 2}),
    "without validation": (EVERY, {}, {"limit_val_batches": 0}),
    "in bfloat16": (EPOCHS, {}, {"precision": "bf16-true"}),
    "with a worker": ({**EVERY, "every_n_train_steps": 3}, {"loader": "workers"}, {}),
    "with a loader that has a state, counting steps": (
        EVERY,
        {"loader": "stateful"},
        {"max_epochs": -1, "max_steps": 7},
    ),
    "with a worker and hooks that draw numbers": (
        {**EVERY, "every_n_train_steps": 3},
        {"loader": "workers", "draws": True},
        {},
    ),
    "with a loader that has a state and hooks that draw numbers": (
        EVERY,
        {"loader": "stateful", "draws": True},
        {},
    ),
    "with combined loaders and hooks that draw numbers": (
        EVERY,
        {"loader": "combined", "draws": True},
        {},
    ),
    "with a loader that has a state, at the end of epochs": (EPOCHS, {"loader": "stateful"}, {}),
}


@pytest.mark.incident("Lightning#19764")
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, case: str) -> None:
    """A resume within an epoch repeated samples. So did hooks that draw
    random numbers before the first batch.
    """
    checkpoints, net, arguments = (CASES | SLOW)[case]
    whole = fit(tmp_path / "whole", checkpoints=checkpoints, net=net, **arguments)
    saved = sorted(path.name for path in (tmp_path / "whole").glob("*.ckpt"))
    assert len(saved) > 1
    for name in saved:
        resumed = fit(
            tmp_path / name,
            ckpt_path=tmp_path / "whole" / name,
            net=net,
            seed=5,
            **arguments,
        )
        step = step_in_name(tmp_path / name)
        assert len(resumed.losses) == len(whole.losses) - step * arguments.get(
            "accumulate_grad_batches", 1
        ), name
        assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :], name
        check_same(resumed, whole)


@pytest.mark.parametrize(
    ("net", "arguments"),
    [
        ({}, {}),
        ({}, {"accumulate_grad_batches": 3}),
        ({}, {"reload_dataloaders_every_n_epochs": 2}),
        ({}, {"val_check_interval": 3}),
        ({"draws": True}, {"val_check_interval": 3}),
        ({"loader": "workers"}, {"reload_dataloaders_every_n_epochs": 1}),
        ({"loader": "stateful"}, {}),
    ],
    ids=repr,
)
def test_run_resumed_twice_equals_uninterrupted_run(
    tmp_path: Path, net: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """After a save at the end of an epoch, Lightning did not count the next one, nor draw its order
    after the skipped validation. It saved the step again within the accumulation of the next one.
    """
    arguments = {"net": net, "checkpoints": EVERY, "max_epochs": 3} | arguments
    whole = fit(tmp_path / "whole", **arguments)

    def resume(path: Path, out: str) -> Path:
        """Return the run's first checkpoint."""
        resumed = fit(tmp_path / out, ckpt_path=path, seed=5, **arguments)
        assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :] != [], path
        check_same(resumed, whole)
        return min((tmp_path / out).glob("*.ckpt"), key=step_in_name)

    for path in sorted((tmp_path / "whole").glob("*.ckpt"), key=step_in_name)[1:-4:2]:
        first = resume(path, path.stem)
        assert step_in_name(first) == step_in_name(path) + 1
        resume(first, f"{path.stem}, twice")


def step_in_name(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[0])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_skipped_scheduler_updates_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: str
) -> None:
    """Lightning updates ReduceLROnPlateau after the save, with metrics that it does not save."""
    net = {"plateau": interval}
    fit(tmp_path / "whole", checkpoints=EVERY, net=net)
    for step in (2, 5):
        caplog.clear()
        path = tmp_path / "whole" / f"step={step}.ckpt"
        fit(tmp_path / str(step), checkpoints=EVERY, ckpt_path=path, net=net)
        assert "ReduceLROnPlateau (monitor loss)" in caplog.text
    fit(tmp_path / "epochs", checkpoints=EPOCHS, net=net)
    caplog.clear()
    path = tmp_path / "epochs" / "step=4.ckpt"
    fit(tmp_path / "after", checkpoints=EPOCHS, ckpt_path=path, net=net)
    assert ("ReduceLROnPlateau" in caplog.text) is (interval == "epoch")


def test_state_that_is_not_reproducible_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning skips an update of averages, and workers keep their random states."""

    def run(out: str, **arguments: Any) -> None:
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
        net = {"loader": "persistent"}
        fit(tmp_path / out, checkpoints=EVERY, net=net, callbacks=[averaging], **arguments)

    run("whole")
    for step in (1, 4):
        caplog.clear()
        run(str(step), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert "StochasticWeightAveraging: Lightning skips an update" in caplog.text
        assert ("persistent workers" in caplog.text) is (step == 4)

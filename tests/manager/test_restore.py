"""Selection of a restore point: required parts, substitutes, and warnings for skipped steps.

What is restored after any damage is tested by the machines.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.harness import run_ranks
from tests.support.manager.managers import (
    check_state,
    copy_folder,
    delete_file,
    folders,
    manager_of,
    restored,
    save_steps,
    state,
    warnings_of,
)
from tests.support.runtime.torch_state.optimizers import FusedAdam
from unified_ckpt.foreign.paddle.options import from_paddle
from unified_ckpt.format import names
from unified_ckpt.manager.restore import select
from unified_ckpt.manager.restore.targets import required_parts
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import locks

PREVIOUS = 1


def link(folder: Path) -> None:
    shutil.move(folder, folder.with_name("big"))
    folder.symlink_to(folder.with_name("big"))


def interrupt_replacement(folder: Path) -> None:
    """Leave the only copy under another name, as a crash does."""
    folder.rename(folder.with_name(f".replaced-abc-{folder.name}"))


def flip_step(folder: Path) -> None:
    """Change one bit of the manifest so that the step is as plausible as the original."""
    file = folder / names.MANIFEST
    flip(file, file.read_bytes().index(b'"step": 2') + len('"step": '))


SKIPPED: dict[str, tuple[Callable[[Path], None], str, type[uc.CheckpointError], str]] = {
    "a CRC": (
        lambda folder: flip(folder / "model.safetensors", -1),
        "model.safetensors.* has CRC",
        uc.IntegrityError,
        "has CRC",
    ),
    "a manifest": (
        lambda folder: flip(
            file := folder / names.MANIFEST, file.read_bytes().index(b'"step": 2') + 8
        ),
        r"checkpoint-2 is skipped: .*unified_checkpoint\.json: is not the file .*: got CRC",
        uc.NotFoundError,
        "checkpoint-2: is incomplete: .* is not the file that was written: got CRC",
    ),
    "a missing file": (
        delete_file,
        "checkpoint-2 is skipped: optimizer.safetensors is missing",
        uc.NotFoundError,
        "checkpoint-2: is incomplete: optimizer.safetensors is missing; complete steps: 1",
    ),
    "a link": (
        link,
        "checkpoint-2 is skipped: it is a link to .*/big, not a folder",
        uc.NotFoundError,
        "checkpoint-2: is incomplete: it is a link",
    ),
    "a backup": (
        interrupt_replacement,
        ".replaced-abc-checkpoint-2 is skipped: an interrupted .*rename it back to checkpoint-2",
        uc.NotFoundError,
        "checkpoint-2: does not exist: .*rename it back",
    ),
}


@pytest.mark.incident("transformers#35782")
@pytest.mark.parametrize("name", SKIPPED)
def test_newer_step_that_is_skipped_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, warning, error, text = SKIPPED[name]
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "checkpoint-2")
    assert restored(tmp_path) == PREVIOUS
    (warned,) = warnings_of(caplog)
    assert re.search(warning, warned)
    with manager_of(None, tmp_path) as manager, pytest.raises(error, match=text):
        manager.restore(2, **state(0))


def test_bad_sector_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    preadv, bad = os.preadv, (tmp_path / "checkpoint-2" / "optimizer.safetensors").stat()

    def fail(fd: int, buffers: Any, start: int, *rest: int) -> int:
        if os.path.samestat(os.fstat(fd), bad) and start + sum(map(len, buffers)) == bad.st_size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, start, *rest)

    monkeypatch.setattr(os, "preadv", fail)

    def act(comm: Comm) -> int | None:
        with manager_of(comm, tmp_path) as manager:
            report = manager.restore(**state(0))
            with pytest.raises(uc.StorageError, match="Input/output error"):
                manager.restore(2, **state(0))
            return report.step if report is not None else None

    assert run_ranks(2, act) == [PREVIOUS] * 2


def test_unlistable_folder_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)

    def refused(call: Any) -> Any:
        def act(path: Any = ".") -> Any:
            if str(path).endswith("checkpoint-2"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path)

        return act

    monkeypatch.setattr(os, "scandir", refused(os.scandir))
    monkeypatch.setattr(os, "listdir", refused(os.listdir))
    assert restored(tmp_path) == PREVIOUS
    assert "checkpoint-2 is skipped: it cannot be read: Permission denied" in caplog.text


@pytest.mark.parametrize(
    ("module", "call"),
    [(select, "diagnose"), (locks, "_lock")],
    ids=["before it is opened", "before it is locked"],
)
def test_step_removed_during_selection_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    save_steps(tmp_path, 1, 2)
    first, going = getattr(module, call), tmp_path / "checkpoint-2"

    def act(*values: Any) -> Any:
        selected = first(*values)
        if going.exists() and (call == "_lock" or values[0].path == str(going)):
            shutil.rmtree(going)
        return selected

    monkeypatch.setattr(module, call, act)
    assert restored(tmp_path) == PREVIOUS


# nodes

NODE_FOLDERS = Path(__file__).parents[1] / "fixtures" / "golden" / "nodes"


@pytest.mark.parametrize("copies", [True, False], ids=["with copies", "without"])
def test_one_of_two_nodes_is_left(tmp_path: Path, *, copies: bool) -> None:
    """What `load` takes, `restore` selects, `common_steps` lists and `verify` has no note about."""
    step = copy_folder(NODE_FOLDERS / "node-0" / "checkpoint-7", tmp_path / "checkpoint-7")
    if not copies:
        shutil.rmtree(step / names.REPLICAS)
    targets = {"embed.weight": torch.empty(8, 4), "scalar": torch.empty(())}
    with manager_of(None, tmp_path) as manager:
        assert [record.step for record in manager.common_steps()] == [7] * copies
        if copies:
            assert manager.restore(model=targets).step == uc.load(step, model=targets).step == 7
            assert not uc.verify(step).notes
            return
        missing = r"folder\(s\) 1 of 2 are on no node present; rank\(s\) 1 of the save wrote them"
        with pytest.raises(uc.IncompleteError, match=missing):
            manager.restore(model=targets)
    with pytest.raises(uc.IncompleteError, match=missing):
        uc.load(step, model=targets)


# parts


def weights(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 4), value, dtype=torch.bfloat16)},
        "master_weights": {"w": torch.full((4, 4), float(value))},
        "optimizer": {"w/exp_avg": torch.full((4, 4), -float(value))},
    }


def test_restore_of_a_run_that_saves_only_master_weights(tmp_path: Path) -> None:
    named = from_paddle("async_save skip_save_model_weight master_weight_compatible")
    with manager_of(None, tmp_path, save_options=named.save, interval_steps=10) as manager:
        manager.save(10, **weights(10))
        manager.finish(20, **weights(20))
    targets = weights(0)
    with manager_of(None, tmp_path) as manager:
        assert manager.steps()[-1].parts == ("master_weights", "optimizer")
        assert manager.restore(**targets).step == 20  # type: ignore[union-attr]
        del targets["master_weights"]
        with pytest.raises(
            uc.MismatchError,
            match="master_weights: w: the checkpoint's master weights are more precise",
        ):
            manager.restore(**targets)
        without = uc.LoadOptions(parts=("model", "optimizer"))
        assert manager.restore(**targets, options=without).step == 20  # type: ignore[union-attr]
    assert torch.equal(targets["model"]["w"], weights(20)["model"]["w"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saving_no_model_without_masters_is_refused(tmp_path: Path, asynchronous: bool) -> None:
    """It raises at once, because a retry cannot help."""
    named = from_paddle(f"skip_save_model_weight {'async_save' if asynchronous else ''}")
    with manager_of(
        None, tmp_path, save_options=named.save, interval_steps=10, asynchronous=asynchronous
    ) as manager:
        with pytest.raises(
            uc.FormatError, match="leaves out the model, and this state has no master weights"
        ):
            manager.save(10, model=weights(10)["model"], optimizer={"w/exp_avg": torch.zeros(4, 4)})
        manager.save(20, **weights(20))
    assert folders(tmp_path) == ["checkpoint-20"]


def test_parts_left_out_by_load_options_are_not_required(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    save_steps(tmp_path, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        targets = state(0)
        assert manager.restore(options=uc.LoadOptions(parts=("model",)), **targets).step == 20  # type: ignore[union-attr]
        check_state({"model": targets["model"]}, 20)
        assert manager.restore(options=uc.LoadOptions(parts=("optimizer",)), **targets).step == 10  # type: ignore[union-attr]


def test_not_strict_loads_the_latest_step_with_some_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20, full=False)
    flip(tmp_path / "checkpoint-20" / "model.safetensors", -1)
    targets = state(0)
    with manager_of(None, tmp_path) as manager:
        report = manager.restore(strict=False, **targets)
        assert (report.step, report.missing) == (10, ("optimizer:w/exp_avg",))
        check_state({"model": targets["model"]}, 10)
        assert (
            f"{tmp_path}/checkpoint-10 is loaded without optimizer (strict=False): no step has "
            f"all parts" in caplog.text
        )
        save_steps(tmp_path, 5)
        assert manager.restore(strict=False, **targets).step == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("start", ["weights", "adapters", "some parts", "another engine", "state"])
def test_failed_load_is_followed_by_a_whole_one_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start: str
) -> None:
    """Otherwise the optimizer of the damaged step stays beside the weights of the next choice."""
    root, other, targets, options = tmp_path / "run", tmp_path / "other", state(0), {}
    if start == "some parts":
        save_steps(root, 1, full=False)
    elif start == "another engine":
        with warnings.catch_warnings(action="ignore"):  # one process
            dcp.save({"model": state(1)["model"]}, checkpoint_id=root / "checkpoint-1")
    elif start == "adapters":
        targets |= {"parts": {"adapter_model": {"w": torch.zeros(3, 40)}}}
        options = {"load_adapters_path": str(other)}
    else:
        save_steps(other, 7)
        name = "load_parameters_path" if start == "weights" else "load_full_state_path"
        options = {name: str(other / "checkpoint-7")}
    save_steps(root, 2, **{"parts": targets["parts"]} if "parts" in targets else {})
    flip(root / "checkpoint-2" / "model.safetensors", -1)
    with manager_of(None, root, **options) as manager:
        if start == "state":
            assert manager.restore(**targets).step == 7  # type: ignore[union-attr]
            check_state(targets, 7)
        else:
            with pytest.raises(uc.IntegrityError, match="has CRC"):
                manager.restore(strict=start in ("weights", "adapters"), **targets)
    assert f"{root}/checkpoint-2 is skipped: " in caplog.text
    if start in ("weights", "adapters"):
        assert "is not loaded: a failed load has overwritten targets" in caplog.text


def test_complete_steps_without_a_required_part_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20, full=False)
    with manager_of(None, tmp_path) as manager:
        with pytest.raises(
            uc.IncompleteError,
            match=r"none of its steps can be loaded \(2\):\n  checkpoint-20: it has no "
            r"optimizer; leave",
        ):
            manager.restore(**state(0))
        assert manager.restore(allow_fresh=True, **state(0)) is None
        (text,) = warnings_of(caplog)
        assert "checkpoint-10: it has no optimizer" in text
        save_steps(tmp_path, 5)
        caplog.clear()
        with caplog.at_level(logging.INFO, "unified_ckpt"):
            assert manager.restore(**state(0)).step == 5  # type: ignore[union-attr]
    assert warnings_of(caplog) == []
    assert "checkpoint-20 is skipped: it has no optimizer" in caplog.text


WEIGHTS, OPTIMIZER, EMA = {"model", "master_weights"}, {"optimizer"}, {"ema"}


@pytest.mark.parametrize(
    ("targets", "parts", "required"),
    [
        ([], None, []),
        (["model", "extra"], None, [WEIGHTS]),
        (["master_weights", "model", "optimizer"], None, [WEIGHTS, OPTIMIZER]),
        (["model", "optimizer", "parts"], None, [EMA, WEIGHTS, OPTIMIZER]),
        (["model", "optimizer", "parts"], ("ema", "optimizer"), [EMA, OPTIMIZER]),
    ],
)
def test_required_parts(
    targets: list[str], parts: tuple[str, ...] | None, required: list[set[str]]
) -> None:
    arguments: Any = {name: {"ema": {}} if name == "parts" else {} for name in targets}
    options = uc.LoadOptions(parts=parts)
    assert required_parts({**arguments, "rank_extra": None}, options) == required


@pytest.mark.parametrize("stored", ["masters", "model"])
@pytest.mark.parametrize("holder", ["optimizer", "dict", "lazy"])
def test_load_parameters_path_fills_masters(tmp_path: Path, stored: str, holder: str) -> None:
    """Otherwise masters stay random, and the next step overwrites the weights with them."""
    model, masters = torch.nn.Linear(4, 3).bfloat16(), torch.nn.Linear(4, 3)
    masters.load_state_dict(
        {name: tensor.float() + 1e-4 for name, tensor in model.state_dict().items()}
    )
    more = {"master_weights": masters.state_dict()} if stored == "masters" else {}
    uc.save(tmp_path / "weights", model=model, **more)
    other = torch.nn.Linear(4, 3).bfloat16()
    optimizer = FusedAdam(other.parameters(), master_weights=holder != "dict")
    targets: dict[str, Any] = {"model": other, "optimizer": optimizer}
    if holder == "dict":
        targets["master_weights"] = {
            name: torch.zeros(tensor.shape) for name, tensor in other.state_dict().items()
        }
    if holder == "optimizer":
        for parameter in other.parameters():
            optimizer.initialize_state(parameter, False)
    with manager_of(
        None, tmp_path / "run", load_parameters_path=str(tmp_path / "weights")
    ) as manager:
        report = manager.restore(**targets)
    assert report is not None
    assert torch.equal(other.weight, model.weight)
    loaded = (
        targets["master_weights"]["weight"]
        if holder == "dict"
        else optimizer.state[other.weight]["master_param"]
    )
    assert torch.equal(loaded, masters.weight if stored == "masters" else model.weight.float())


@pytest.mark.parametrize("warmed", [False, True])
def test_load_parameters_and_adapters_paths_fill_masters(tmp_path: Path, warmed: bool) -> None:
    """Each path fills the masters of what it has. A trained layer may have none in the checkpoint's
    optimizer, and a stored master may be of a frozen layer.
    """
    saved = {name: torch.nn.Linear(4, 3).bfloat16() for name in ("base", "frozen")}
    masters = {
        f"{name}.{key}": tensor.float() + 1e-4
        for name, layer in saved.items()
        for key, tensor in layer.state_dict().items()
    }
    uc.save(tmp_path / "base", model=torch.nn.ModuleDict(saved), master_weights=masters)
    adapter = {"w": torch.randn(3).bfloat16()}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    save_file(adapter, tmp_path / "lora" / "adapter_model.safetensors")
    layers = {name: torch.nn.Linear(4, 3).bfloat16() for name in saved}
    model, weight = torch.nn.ModuleDict(layers), torch.nn.Parameter(torch.zeros(3).bfloat16())
    optimizer = FusedAdam([*layers["base"].parameters(), weight], master_weights=True)
    for parameter in optimizer.param_groups[0]["params"] if warmed else ():
        optimizer.initialize_state(parameter, False)
    options = {"load_parameters_path": tmp_path / "base", "load_adapters_path": tmp_path / "lora"}
    with manager_of(None, tmp_path / "run", **options) as manager:
        manager.restore(model=model, parts={"adapter_model": {"w": weight}}, optimizer=optimizer)
    assert torch.equal(weight, adapter["w"])
    states = {name: optimizer.state[p] for name, p in layers["base"].named_parameters()}
    for name, entry in states.items():
        assert torch.equal(entry["master_param"], masters[f"base.{name}"])
        assert not entry["exp_avg"].any()
    assert torch.equal(optimizer.state[weight]["master_param"], adapter["w"].float())
    assert len(optimizer.state) == 3


def test_load_parameters_path_fills_further_parts(tmp_path: Path) -> None:
    """Adapters and averages are loaded too; a restore without any target raises."""
    saved, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    uc.save(tmp_path / "weights", parts={"adapter_model": saved})
    with manager_of(
        None, tmp_path / "run", load_parameters_path=str(tmp_path / "weights")
    ) as manager:
        report = manager.restore(
            parts={"adapter_model": other}, optimizer=torch.optim.AdamW(other.parameters())
        )
        assert report.bytes_read > 0
        assert torch.equal(other.weight, saved.weight)
        with pytest.raises(uc.MismatchError, match=r"ema:weight: is not in the checkpoint"):
            manager.restore(parts={"ema": other})
        with pytest.raises(
            uc.LayoutError,
            match="got no model and no parts to fill, expected one of them; pass `model`",
        ):
            manager.restore(optimizer={"w/exp_avg": torch.zeros(2)})
        low = torch.nn.Linear(4, 3).bfloat16()
        optimizer = FusedAdam(low.parameters(), master_weights=True)
        for parameter in low.parameters():
            optimizer.initialize_state(parameter, False)
        manager.restore(
            parts={"adapter_model": low}, optimizer=optimizer, options=uc.LoadOptions(cast=True)
        )
        assert torch.equal(optimizer.state[low.weight]["master_param"], saved.weight)

"""Lightning's single-file checkpoints match its own load; requests for classes are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.lightnings import Net, fit
from unified_ckpt.cli.main import main

pytestmark = pytest.mark.filterwarnings(
    r"ignore::UserWarning:(pytorch_)?lightning\b",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore::DeprecationWarning:(pytorch_)?lightning",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    out = tmp_path_factory.mktemp("lightning")
    return fit(out, stock=True, checkpoints={"save_last": True}, max_epochs=1), out / "last.ckpt"


def test_weights_and_optimizer_match_lightning(
    run: tuple[Net, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    net, path = run
    content = torch.load(path, weights_only=False)
    (optimizer,) = content["optimizer_states"]
    names = [name for name, _ in net.named_parameters()]
    with uc.open(path) as source:
        assert (source.format, source.step) == ("lightning", 4)
        assert {name: view.shape for name, view in source["model"].items()} == {
            k: tuple(v.shape) for k, v in content["state_dict"].items()
        }
        assert all(
            torch.equal(view[...], content["state_dict"][name])
            for name, view in source["model"].items()
        )
        for number, name in enumerate(names):
            assert all(
                torch.equal(source["optimizer"][f"{name}/{key}"][...], value)
                for key, value in optimizer["state"][number].items()
            )
        assert len(source["optimizer"]) == 3 * len(names)
        assert source.extra["lr_schedulers"] == content["lr_schedulers"]
        assert source.extra["hyper_parameters"]["lr"] == 0.01
    assert main(["inspect", str(path)]) == 0
    assert "Lightning" in capsys.readouterr().out


def test_module_and_optimizer_are_loaded(run: tuple[Net, Path]) -> None:
    net, path = run
    other = Net()
    (optimizer,) = [other.configure_optimizers()["optimizer"]]
    uc.load(path, model=other, optimizer=optimizer)
    assert all(
        torch.equal(tensor, net.state_dict()[name]) for name, tensor in other.state_dict().items()
    )
    state = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    for number, parameter in enumerate(other.parameters()):
        assert all(
            torch.equal(optimizer.state[parameter][key], value)
            for key, value in state[number].items()
        )


class Runs:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize(
    "place", ["hyper_parameters", "callbacks", "optimizer_states", "state_dict"]
)
def test_hostile_values_are_refused_and_not_executed(
    run: tuple[Net, Path], tmp_path: Path, place: str
) -> None:
    content = torch.load(run[1], weights_only=False)
    content[place] = {"x": Runs(tmp_path / "mark")}
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(uc.FormatError, match=r"last\.ckpt(.|\n)*posix\.system"):
        uc.open(tmp_path / "last.ckpt")
    assert not (tmp_path / "mark").exists()


def test_truncated_file_is_named(run: tuple[Net, Path], tmp_path: Path) -> None:
    body = run[1].read_bytes()
    (tmp_path / "last.ckpt").write_bytes(body[: len(body) // 2])
    with pytest.raises(uc.FormatError, match=r"last\.ckpt: is damaged"):
        uc.load(tmp_path / "last.ckpt", model=Net())

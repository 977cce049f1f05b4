"""Files of torch.save, and Hugging Face's pytorch_model*.bin: weights as torch.load gives them, refused where there is no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc
from unified_ckpt.cli.main import main


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def filled(path: Path) -> dict[str, torch.Tensor]:
    other = net(1)
    uc.load(path, model=other)
    return other.state_dict()


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


FORMS: dict[str, Any] = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state, "optimizer": {"state": {}}, "epoch": 3},
    "lightning": lambda state: {"state_dict": state, "optimizer_states": [{}], "global_step": 7, "pytorch-lightning_version": "2.6.6"},
    "ddp": lambda state: {"model_state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_model_is_filled_from_a_file_of_a_training_script(tmp_path: Path, form: str, zipped: bool) -> None:
    path = tmp_path / "last.pt"
    torch.save(FORMS[form](net().state_dict()), path, _use_new_zipfile_serialization=zipped)
    check_equal(filled(path), net().state_dict())


def test_what_is_plain_beside_the_model_is_extra(tmp_path: Path) -> None:
    torch.save(FORMS["lightning"](net().state_dict()), tmp_path / "last.ckpt")
    report = uc.load(tmp_path / "last.ckpt", model=net(1))
    assert report.step == 7
    assert report.extra == {"global_step": 7, "pytorch-lightning_version": "2.6.6"}


def test_an_optimizer_is_refused_not_guessed(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    other = net(1)
    with pytest.raises(uc.MismatchError, match="optimizer"):
        uc.load(tmp_path / "last.pt", model=other, optimizer=torch.optim.AdamW(other.parameters()))
    check_equal(other.state_dict(), net(1).state_dict())


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    torch.save({"a": shared, "b": shared, "c": torch.ones(2)}, tmp_path / "tied.pt")
    with uc.open(tmp_path / "tied.pt") as source:
        assert list(source["model"]) == ["a", "c"]
        assert torch.equal(source["model"]["b"][...], shared)


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_hugging_faces_bin_folders(tmp_path: Path, shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    state = model.state_dict()
    names, folder = sorted(state), tmp_path / "hf"
    folder.mkdir()
    if shards == "1GB":
        torch.save(state, folder / "pytorch_model.bin")
    else:  # as transformers 4 wrote them
        halves = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, members in halves.items():
            torch.save({name: state[name] for name in members}, folder / file)
        weight_map = {name: file for file, members in halves.items() for name in members}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    other = LlamaForCausalLM(config)
    uc.load(folder, model=other)
    check_equal(dict(other.state_dict()), dict(state))
    assert main(["inspect", str(folder)]) == 0
    assert "pickles" in capsys.readouterr().out
    if shards != "1GB":
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(uc.IncompleteError, match="pytorch_model-00002"):
            uc.load(folder, model=other)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "holds a list"),
        ({"epoch": 3}, "holds no state dict: its keys are epoch"),
        ({"w": torch.ones(2).to_sparse()}, "needed a dense"),
    ],
)
def test_what_is_no_model_is_refused_by_what_it_holds(tmp_path: Path, value: Any, text: str) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(uc.FormatError, match=text):
        uc.open(tmp_path / "x.pt")

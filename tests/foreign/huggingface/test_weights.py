"""Folders of Hugging Face weights whose index and files disagree: read as transformers reads them,
or refused; never read in part.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.equality import check_equal

OLD, NEW = {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.ones(2), "b": torch.ones(3)}
KINDS = ["safetensors", "trainer", "bin"]


def write(folder: Path, tensors: dict[str, torch.Tensor], kind: str, file: str) -> None:
    save_file(tensors, folder / f"{file}.safetensors") if kind != "bin" else torch.save(
        tensors, folder / f"pytorch_{file}.bin"
    )


def sharded(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> dict[str, str]:
    """Write each tensor to a file of its own, and an index."""
    folder.mkdir(exist_ok=True)
    if kind == "trainer":
        (folder / "trainer_state.json").write_text("{}")
    stem, suffix = ("pytorch_model", "bin") if kind == "bin" else ("model", "safetensors")
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        write(folder, {name: tensor}, kind, f"model-0000{number}-of-00002")
        weight_map[name] = f"{stem}-0000{number}-of-00002.{suffix}"
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    with uc.open(folder) as source:
        return {name: source["model"][name][...] for name in source["model"]}


@pytest.mark.parametrize("kind", KINDS)
def test_index_of_an_older_save_does_not_hide_a_single_file(tmp_path: Path, kind: str) -> None:
    """`save_pretrained` removes older shards from the folder, but not their index."""
    for file in sharded(tmp_path / "hf", OLD, kind).values():
        (tmp_path / "hf" / file).unlink()
    write(tmp_path / "hf", NEW, kind, "model")
    check_equal(read_model(tmp_path / "hf"), NEW)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_two_saves_in_one_folder_are_refused(tmp_path: Path, kind: str) -> None:
    """transformers reads the single file; other readers follow the index."""
    sharded(tmp_path / "hf", OLD, kind)
    write(tmp_path / "hf", NEW, kind, "model")
    with pytest.raises(
        uc.FormatError,
        match=r"got files of two saves \((pytorch_)?model\.\w+, and "
        r"(pytorch_)?model-00001-of-00002",
    ):
        uc.open(tmp_path / "hf")


@pytest.mark.parametrize("kind", KINDS)
def test_index_of_a_single_file(tmp_path: Path, kind: str) -> None:
    weight_map = sharded(tmp_path / "hf", NEW, kind)
    index = next((tmp_path / "hf").glob("*.index.json"))
    for file in weight_map.values():
        (tmp_path / "hf" / file).unlink()
    write(tmp_path / "hf", NEW, kind, "model")
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(NEW, index.name.removesuffix(".index.json"))})
    )
    check_equal(read_model(tmp_path / "hf"), NEW)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_missing_in_the_index_is_read_from_its_file(tmp_path: Path, kind: str) -> None:
    weight_map = sharded(tmp_path / "hf", NEW, kind)
    write(tmp_path / "hf", {"b": NEW["b"], "c": torch.ones(4)}, kind, "model-00002-of-00002")
    assert "c" not in weight_map
    check_equal(read_model(tmp_path / "hf"), NEW | {"c": torch.ones(4)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_two_files_is_refused(tmp_path: Path, kind: str) -> None:
    sharded(tmp_path / "hf", NEW, kind)
    write(tmp_path / "hf", {"b": NEW["b"], "a": OLD["a"]}, kind, "model-00002-of-00002")
    with pytest.raises(uc.FormatError, match=r"-00002-of-00002(.|\n)*a"):
        uc.open(tmp_path / "hf")

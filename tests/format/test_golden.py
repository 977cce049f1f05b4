"""Checkpoints that an earlier release wrote are read by this one, value by value.

A test that reads what it has just written misses a change of the format on both sides. These
folders were written once. Expected values follow from names and shapes, not from our reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.engine.compressed_cases import stored_tensors
from tests.support.format import golden
from tests.support.format.manifests import edit_manifest
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.runtime.comm.comm import Comm

NODE_FOLDERS = [f"nodes/node-{node}/checkpoint-7" for node in range(golden.NODES)]
COMPRESSED_NODE_FOLDERS = [f"compressed-{folder}" for folder in NODE_FOLDERS]
FOLDERS = ["everything", "several-files", "without-model", "adapter", "rank-mesh", *NODE_FOLDERS]
FOLDERS += COMPRESSED_NODE_FOLDERS
FOLDERS += [f"compressed-{compression}" for compression in golden.COMPRESSIONS]


def blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return zeros of the same shapes and dtypes; tied tensors stay tied."""
    targets: dict[int, torch.Tensor] = {}
    return {
        name: targets.setdefault(id(value), torch.zeros_like(value))
        for name, value in tensors.items()
    }


def check(targets: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert targets.keys() == expected.keys()
    for name, value in expected.items():
        assert targets[name].dtype == value.dtype, name
        assert torch.equal(targets[name], value), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_folder_verifies(folder: str) -> None:
    report = uc.verify(golden.GOLDEN / folder, deep=True)
    assert report.ok, report.problems
    assert json.loads((golden.GOLDEN / folder / "unified_checkpoint.json").read_text())[
        "format_version"
    ].startswith("1.")


@pytest.mark.parametrize("folder", FOLDERS)
def test_newer_folder_is_refused_by_name(folder: str, tmp_path: Path) -> None:
    """What this release will answer to a folder of a later one."""
    path = tmp_path / "checkpoint-8"
    shutil.copytree(golden.GOLDEN / folder, path)
    versions = {"unified-ckpt": "9.8.7"}
    edit_manifest(path, lambda m: m.update(format_version="2.0", versions=versions))
    refusal = r"written by a newer version, unified-ckpt 9\.8\.7; upgrade unified-ckpt"
    for read in (uc.load, uc.open, uc.verify):
        with pytest.raises(uc.FormatError, match=refusal):
            read(path)
    with (
        uc.CheckpointManager(tmp_path) as manager,
        pytest.raises(uc.IncompleteError, match=refusal),
    ):
        manager.restore(model={})


def test_golden_state_loads() -> None:
    """Every part, and the values that are not tensors."""
    targets: dict[str, Any] = {
        "model": blank(golden.model()),
        "master_weights": blank(golden.master_weights()),
        "optimizer": blank(golden.optimizer()),
        "parts": {"ema": blank(golden.ema())},
    }
    options = uc.LoadOptions(verify="full")
    report = uc.load(golden.GOLDEN / "everything", **targets, options=options)
    check(targets["model"], golden.model())
    check(targets["master_weights"], golden.master_weights())
    check(targets["optimizer"], golden.optimizer())
    check(targets["parts"]["ema"], golden.ema())
    extra = dict(report.extra)
    assert np.array_equal(extra.pop("table"), golden.EXTRA["table"])
    assert extra == {name: golden.EXTRA[name] for name in ("epoch", "names", "day")}
    assert (report.step, report.rank_extra) == (7, {"rank": 0})


def test_golden_rank_values_go_to_coordinates() -> None:
    def act(comm: Comm) -> object:
        layout = uc.Layout({"tp": 2, "dp": 2}, rules={})
        return make_checkpointer(comm).load(golden.GOLDEN / "rank-mesh", layout=layout).rank_extra

    assert run_ranks(4, act) == [{"batch": 0}, {"batch": 1}, {"batch": 0}, {"batch": 1}]


@pytest.mark.parametrize("compression", golden.COMPRESSIONS)
def test_golden_compressed_folder_decodes(compression: str) -> None:
    """To the bits that it had when it was written."""
    folder = golden.GOLDEN / f"compressed-{compression}"
    assert golden.hashes(folder) == json.loads(folder.with_suffix(".json").read_text())


@pytest.mark.parametrize("compression", golden.COMPRESSIONS)
def test_golden_compressed_folder_is_encoded_again(tmp_path: Path, compression: str) -> None:
    """A conversion decodes it, and another one gives the bytes that were written once."""
    folder = golden.GOLDEN / f"compressed-{compression}"
    uc.convert(folder, tmp_path / "plain", fsync=False)
    uc.convert(tmp_path / "plain", tmp_path / "again", compression=compression, fsync=False)
    assert stored_tensors(tmp_path / "again") == stored_tensors(folder)


def test_golden_files_open_in_safetensors() -> None:
    """Plain files with an index, tied tensors stored once."""
    folder = golden.GOLDEN / "several-files"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {name: load_file(folder / file)[name] for name, file in index.items()}
    check(stored, {name: value for name, value in golden.model().items() if name != "head.weight"})
    assert len(set(index.values())) > 1


def test_golden_model_without_file_loads() -> None:
    tensors, _ = golden.bfloat16_model()
    targets = blank(tensors)
    uc.load(golden.GOLDEN / "without-model", model=targets)
    check(targets, tensors)


def test_golden_adapter_loads() -> None:
    targets = blank(golden.adapter())
    uc.load(golden.GOLDEN / "adapter", parts={"adapter_model": targets})
    check(targets, golden.adapter())


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_golden_nodes_load(tmp_path: Path, lost: int | None) -> None:
    """Together, and with either node lost: the other one has copies of its shards."""
    paths = [
        Path(shutil.copytree(golden.GOLDEN / folder, tmp_path / str(node)))
        for node, folder in enumerate(NODE_FOLDERS)
        if node != lost
    ]
    expected = {name: golden.model()[name] for name in ("embed.weight", "scalar")}
    targets = blank(expected)
    uc.load(paths, model=targets)
    check(targets, expected)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_golden_compressed_nodes_decode(tmp_path: Path, lost: int | None) -> None:
    """To the values of a folder that all ranks share, with its exceptions."""
    paths = [
        Path(shutil.copytree(golden.GOLDEN / folder, tmp_path / str(node)))
        for node, folder in enumerate(COMPRESSED_NODE_FOLDERS)
        if node != lost
    ]
    uc.convert(paths, tmp_path / "plain", fsync=False, compare=False)
    expected = json.loads((golden.GOLDEN / "compressed-O1.json").read_text())
    assert golden.hashes(tmp_path / "plain") == expected


def test_golden_compressed_folder_of_one_node_opens() -> None:
    """Its whole tensors decode; its exceptions file has those of the other node, too."""
    expected = json.loads((golden.GOLDEN / "compressed-O1.json").read_text())
    for folder in COMPRESSED_NODE_FOLDERS:
        found = golden.hashes(golden.GOLDEN / folder)
        whole = {name: value for name, value in found.items() if "@" not in name}
        assert whole.items() <= expected.items()
        assert len(whole) == 3 + 3 + 10

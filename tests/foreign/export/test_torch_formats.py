"""Checkpoints in torch's formats are read back by torch bit for bit, weights and optimizer."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import unified_ckpt as uc
from tests.support.torch_training import Counting, train
from unified_ckpt.cli.main import main
from unified_ckpt.foreign.export.export import export
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

QUICK = uc.SaveOptions(fsync=False)
Net = tuple[nn.Module, torch.optim.Optimizer]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(9, 6),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, 6, bias=False),
        nn.Linear(6, 9, bias=False),
    )
    model[4].weight = model[0].weight
    groups = [
        {"params": model[1].parameters(), "lr": 0.1},
        {"params": [model[3].weight, model[0].weight], "lr": 0.2, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups)


def loss_of(model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    ids = torch.randint(0, 9, (4,), generator=draw)
    return nn.functional.cross_entropy(model(ids), ids)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint, and the losses of the steps after it."""
    model, optimizer = net(0)
    train(model, optimizer, loss_of, 0, 3)
    path = tmp_path_factory.mktemp("exports") / "c"
    extra = {
        "scheduler": {"last": (1, 2.5), "milestones": Counter({0: 2, 1: 1})},
        "noise": torch.arange(3),
    }
    uc.save(
        path,
        model=model,
        optimizer=optimizer,
        extra=extra,
        rank_extra={"seed": 5},
        step=3,
        options=QUICK,
    )
    return path, train(model, optimizer, loss_of, 3, 3)


def test_torch_file_equals_what_torch_saves(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, expected = saved
    report = uc.convert(folder, tmp_path / "c.pt", to="torch")
    assert (report.step, report.tensors["model"], report.id) == (3, 4, None)
    state_dict = torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)
    assert state_dict["step"] == 3
    assert state_dict["extra"]["scheduler"] == {
        "last": (1, 2.5),
        "milestones": Counter({0: 2, 1: 1}),
    }
    assert torch.equal(state_dict["extra"]["noise"], torch.arange(3))
    assert state_dict["rank_extra"] == [{"seed": 5}]
    assert state_dict["model"]["0.weight"].data_ptr() == state_dict["model"]["4.weight"].data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in state_dict["model"].values())
    model, optimizer = net(1)
    model.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert train(model, optimizer, loss_of, 3, 3) == expected
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert archive.testzip() is None
    assert main(["diff", str(tmp_path / "c.pt"), str(folder), "--part", "model"]) == 0


def test_dcp_folder_equals_what_dcp_saves(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, expected = saved
    assert main(["convert", str(folder), str(tmp_path / "d"), "--to", "dcp"]) == 0
    model, optimizer = net(1)
    train(model, optimizer, loss_of, 0, 1)  # creates the state to be filled
    weights, state = get_state_dict(model, optimizer)
    target: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0}
    with warnings.catch_warnings(action="ignore"):  # the warning about a single process
        dcp.load(target, checkpoint_id=tmp_path / "d")
    set_state_dict(
        model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    assert target["step"] == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert train(model, optimizer, loss_of, 3, 3) == expected
    assert main(["diff", str(tmp_path / "d"), str(folder), "--deep"]) == 0
    loaded_model, fresh = net(2)
    report = uc.load(tmp_path / "d", model=loaded_model, optimizer=fresh)
    assert report.extra["scheduler"]["last"] == (1, 2.5)
    assert sorted(report.extra["scheduler"]["milestones"].elements()) == [0, 0, 1]
    assert train(loaded_model, fresh, loss_of, 3, 3) == expected


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("named", [True, False], ids=["groups", "no groups"])
def test_exports_read_back_as_what_they_were(tmp_path: Path, to: str, named: bool) -> None:
    """Also an optimizer without param groups, or of parameters that the model lacks."""
    model, optimizer = net(0)
    train(model, optimizer, loss_of, 0, 1)
    state: Any = (
        optimizer if named else {"other/exp_avg": torch.ones(2), "1.bias/step": torch.tensor(3.0)}
    )
    extra = {"step": 9, "words": ("a", b"b", torch.ones(1)), "lists": [{"n": 1}, {"n": 2}]}
    parts = {"ema": {"1.bias": torch.ones(5)}, "empty": {}}
    uc.save(
        tmp_path / "c",
        model=model,
        optimizer=state,
        parts=parts,
        extra=extra,
        rank_extra={"seed": torch.ones(2)},
        step=3,
        metrics={"loss": 0.5},
        options=QUICK,
    )
    path = tmp_path / ("c.pt" if to == "torch" else "d")
    report = uc.convert(tmp_path / "c", path, to=to)
    assert (report.left_out, report.notes) == ((), ())
    ema, fresh = torch.zeros(5), net(1)
    loaded = uc.load(
        path, model=fresh[0], optimizer=fresh[1] if named else None, parts={"ema": {"1.bias": ema}}
    )
    assert ema.tolist() == [1] * 5
    assert loaded.step == 3
    assert str(loaded.extra) == str(extra)
    uc.convert(path, tmp_path / "again")
    with uc.open(tmp_path / "c") as first, uc.open(tmp_path / "again") as again:
        assert first.source.aliases("model") == again.source.aliases("model")
        metadata, other = first.source.metadata(), again.source.metadata()
        assert [group["names"] for group in metadata.groups] == [
            group["names"] for group in other.groups
        ]
        assert (metadata.scalars, metadata.metrics) == (other.scalars, other.metrics)
        assert str(list(first.rank_extra)) == str(list(again.rank_extra))
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "again"), "--deep"]) == 0


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_every_dtype_and_shape(tmp_path: Path, to: str) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "none": (0, 3), "line": (7,), "block": (3, 5)}
    model = {
        f"{name}.{kind}": torch.randint(
            0, 2, (*shape, dtype.itemsize), generator=draw, dtype=torch.uint8
        )
        .view(dtype)
        .reshape(shape)
        for name, dtype in TORCH_DTYPES.items()
        for kind, shape in shapes.items()
        if name != "F4"
    }
    uc.save(tmp_path / "c", model=model, options=QUICK)
    path = tmp_path / ("c.pt" if to == "torch" else "d")
    uc.convert(tmp_path / "c", path, to=to)
    if to == "torch":
        tensors = torch.load(path, weights_only=True)["model"]
    else:
        tensors = {name: torch.empty_like(tensor) for name, tensor in model.items()}
        with warnings.catch_warnings(action="ignore"):  # the warning about a single process
            dcp.load({"model": tensors}, checkpoint_id=path)
    assert tensors.keys() == model.keys()
    for name, tensor in model.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_failed_export_leaves_no_files(tmp_path: Path, to: str) -> None:
    uc.save(tmp_path / "c", model={"a": torch.ones(3), "b": torch.ones(3)}, options=QUICK)
    (tmp_path / "there.pt").write_text("mine")
    with pytest.raises(uc.StorageError, match=r"there.pt: got a file, expected"):
        uc.convert(tmp_path / "c", tmp_path / "there.pt", to=to)
    file = next((tmp_path / "c").glob("model*.safetensors"))
    with uc.open(tmp_path / "c") as opened:
        source = opened.source
        source.specs("model", source.names("model"))
        os.truncate(file, file.stat().st_size - 8)  # after its size was read
        with pytest.raises(uc.StorageError, match="ends at byte"):
            export(source, str(tmp_path / "new"), uc.ConvertOptions(to=to))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_state_of_a_parameter_in_no_group_is_refused(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text(
        '[[rules]]\nmatch = "1.bias/*"\nto = "2.bias/{1}"\nparts = "optimizer"\n'
    )
    with pytest.raises(
        uc.FormatError,
        match=r"parameters with optimizer state are in no param group \(1\):\n  2.bias",
    ):
        uc.convert(
            saved[0],
            tmp_path / "c.pt",
            to="torch",
            source=uc.SourceOptions(rename=str(tmp_path / "r.toml")),
        )
    assert not (tmp_path / "c.pt").exists()


def test_non_tensor_state_of_modules_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(2, 3))
    model[0].count = 4
    uc.save(tmp_path / "c", model=model, options=QUICK)
    uc.convert(tmp_path / "c", tmp_path / "c.pt", to="torch")
    uc.convert(tmp_path / "c", tmp_path / "d", to="dcp")
    torch_model, dcp_model = nn.Sequential(Counting(2, 3)), nn.Sequential(Counting(2, 3))
    torch_model.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True)["model"])
    target = {"model": dcp_model.state_dict()}
    with warnings.catch_warnings(action="ignore"):  # the warning about a single process
        dcp.load(target, checkpoint_id=tmp_path / "d")
    dcp_model.load_state_dict(target["model"])
    assert torch_model[0].count == dcp_model[0].count == 4

    renamed = nn.ModuleDict({"head": Counting(2, 3)})
    (tmp_path / "r.toml").write_text('[[rules]]\nmatch = "0.*"\nto = "head.{1}"\n')
    uc.load(
        tmp_path / "c",
        model=renamed,
        options=uc.LoadOptions(source=uc.SourceOptions(rename=str(tmp_path / "r.toml"))),
    )
    assert renamed["head"].count == 4
    (tmp_path / "s.toml").write_text(
        '[[rules]]\nmatch = "{i}.*"\nstack = {over = "i"}\nto = "h.{1}"\n'
    )
    with pytest.raises(uc.FormatError, match=r"0._extra_state: is non-tensor state of a module"):
        uc.open(tmp_path / "c", options=uc.SourceOptions(rename=str(tmp_path / "s.toml")))


def test_torch_file_without_model_is_refused(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c",
        model={"w": torch.ones(1)},
        parts={"adapter_model": {"q": torch.ones(2)}},
        options=QUICK,
    )
    with pytest.raises(
        uc.FormatError,
        match=r"got parts adapter_model, expected the model",
    ):
        uc.convert(tmp_path / "c", tmp_path / "c.pt", to="torch", parts=("adapter_model",))
    assert os.listdir(tmp_path) == ["c"]


def test_colliding_dcp_keys_are_refused(tmp_path: Path) -> None:
    tensors = {"state.w.b/c": torch.ones(1), "state.w/b.c": torch.zeros(1)}
    uc.save(tmp_path / "c", model={"w": torch.ones(1)}, optimizer=tensors, options=QUICK)
    with pytest.raises(
        uc.FormatError, match=r"several entries get one key .*\n  optimizer.state.state.w.b.c"
    ):
        uc.convert(tmp_path / "c", tmp_path / "d", to="dcp")
    assert not (tmp_path / "d").exists()


SCRIPT = """
import resource, sys, torch, unified_ckpt as uc
from unified_ckpt.foreign.export.convert import convert
import unified_ckpt.foreign.dcp.export, unified_ckpt.foreign.pytorch.export
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rename = sys.argv[4] if len(sys.argv) > 4 else None
convert(
    sys.argv[1],
    sys.argv[2],
    to=sys.argv[3],
    source=uc.SourceOptions(rename=rename),
    fsync=False,
)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch", "dcp", "unified"])
def test_memory_is_bounded(tmp_path: Path, to: str) -> None:
    """A tensor of 512 MiB is copied; for the unified format it is also transposed."""
    uc.save(
        tmp_path / "c",
        model={"w": torch.arange(1 << 27, dtype=torch.int32).view(1 << 14, 1 << 13)},
        options=QUICK,
    )
    (tmp_path / "r.toml").write_text(
        '[[rules]]\nmatch = "w"\nto = "w"\nsteps = [{permute = [1, 0]}]\n'
    )
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(tmp_path / "c"),
        str(tmp_path / "d.pt"),
        to,
        *([str(tmp_path / "r.toml")] if to == "unified" else []),
    ]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < (500 if to == "unified" else 150), f"{grown} MiB"
    if to == "unified":
        with uc.open(tmp_path / "d.pt") as opened:
            assert opened["model"]["w"][5, 0:3].tolist() == [5, 5 + (1 << 13), 5 + (2 << 13)]

"""The public calls in one process: folder contents, loads, and refusals."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import os
import pydoc
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.format.manifests import manifest_of
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.manager.buckets import registered
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.format.manifest_fields import ReplicaDifference
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES


class Net(nn.Module):
    """An embedding, a block, a head (tied on demand), a persistent buffer and a transient one."""

    def __init__(self, *, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(30, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


def test_dir_lists_the_public_names() -> None:
    assert sorted(uc.__all__) == [name for name in dir(uc) if not name.startswith("_")]
    assert uc.__version__.count(".") >= 1
    with pytest.raises(AttributeError, match="sav"):
        _ = uc.sav


@pytest.mark.parametrize(
    ("definition", "shown"),
    [
        (uc.save, ["optimizer: 'OptimizerArgument | None' = None", "Save whole tensors"]),
        (uc.save_async, ["metrics: 'Mapping[str, float] | None' = None", "lazy"]),
        (uc.load, ["strict: 'bool' = True", "Load a checkpoint into state"]),
        (uc.convert, ["to: 'str' = 'unified'", "verify the result"]),
        (uc.Checkpointer.save, ["step: 'int | None' = None"]),
        (uc.CheckpointManager.restore, ["model: 'ModelArgument | None' = None"]),
        (uc.SaveOptions, ["node_copies: 'Count' = 1", "`node_copies`: Each byte is stored on"]),
    ],
)
def test_help_shows_real_signatures(definition: object, shown: list[str]) -> None:
    text = pydoc.plain(pydoc.render_doc(definition))
    assert [part for part in shown if part not in text] == []
    assert "**" not in text.partition("\n\n")[2].splitlines()[0]


def test_reports_are_three_readable_lines(tmp_path: Path) -> None:
    net, folder = Net(), tmp_path / "a"
    saved = uc.save(folder, model=net, optimizer=torch.optim.AdamW(net.parameters()), step=7)
    loaded = uc.load(folder, model=Net())
    converted = uc.convert(folder, tmp_path / "b")
    lines = [
        str(report).splitlines()
        for report in (saved, loaded, uc.verify(folder), uc.repair(folder), converted)
    ]
    assert [len(texts) for texts in lines] == [3] * 5
    assert lines[0][:2] == [str(folder), f"  save {saved.id} of step 7 committed"]
    assert re.fullmatch(r"  [\d.]+ KiB in \d+\.\d\d s", lines[0][2])
    assert re.fullmatch(r"loaded step 7 in \d+\.\d\d s", lines[1][0])
    assert lines[1][1].endswith(" verified: model")
    assert lines[2][1] == "  sizes and headers match"
    assert lines[3][1:] == ["  nothing to repair", "  0 problems found; 0 files, 0 B written"]
    assert lines[4][1] == "  written, from unified, step 7"
    (folder / "model.safetensors").unlink()
    assert str(uc.verify(folder)).splitlines()[1].startswith("  damaged, ")
    damaged = str(uc.repair(folder)).splitlines()
    assert damaged[1].startswith("  damaged, 1 problem: model.safetensors: is missing")
    assert damaged[2] == "  1 problem found; 0 files, 0 B written"
    difference = ReplicaDifference(tensor="model:w", ranks=[[0], [1]], copies=2)
    differing = replace(saved, encoded_nbytes=2048, replica_differences=(difference,))
    assert str(differing).endswith(", 2 KiB of it compressed; replicas of 1 tensor differ")


def stored(folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """Every tensor of a part, read by the safetensors library."""
    weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"]
    return {
        name: t
        for file in sorted(set(weight_map.values()))
        for name, t in load_file(folder / file).items()
    }


# one folder


def test_module_round_trip(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    report = uc.save(tmp_path / "c", model=model, step=7)
    assert (report.path, report.step) == (str(tmp_path / "c"), 7)
    assert report.nbytes == sum(t.nbytes for t in model.state_dict().values())
    assert report.id == manifest_of(tmp_path / "c")["save_id"]
    memory = {name: t.data_ptr() for name, t in other.state_dict().items()}
    back = uc.load(tmp_path / "c", model=other)
    assert same(model.state_dict(), other.state_dict())
    assert {name: t.data_ptr() for name, t in other.state_dict().items()} == memory, (
        "filled in place"
    )
    assert (back.step, back.extra, back.rank_extra, back.missing, back.unexpected, back.wrong) == (
        7,
        None,
        None,
        (),
        (),
        (),
    )
    assert back.bytes_read == back.verified_bytes == report.nbytes
    assert back.sources == {"model": ("model",)}


def test_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        f"t.{name}": torch.zeros(3, 4).to(dtype)
        if name != "F4"
        else torch.zeros(3, 4, dtype=torch.uint8).view(dtype)
        for name, dtype in TORCH_DTYPES.items()
    }
    tensors |= {
        "große": torch.randn(300, 200),
        "0-d": torch.tensor(2.0),
        "empty": torch.zeros(0, 5),
        'quo"ted\n': torch.ones(2),
    }
    moments = {"0-d/m": torch.ones(())}
    uc.save(tmp_path / "c", model=tensors, optimizer=moments, extra={1}, rank_extra=[2])
    parts = ["model.safetensors", "optimizer.safetensors"]
    parts += [f"{file}.index.json" for file in parts]
    ours = ["digests.safetensors", "rank_extra.safetensors", "unified_checkpoint.json"]
    assert sorted(os.listdir(tmp_path / "c")) == sorted(parts + ours)
    assert os.listdir(tmp_path) == ["c"]
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (
        tmp_path / "theirs.safetensors"
    ).read_bytes()
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}


def test_empty_model(tmp_path: Path) -> None:
    for path, step in ((tmp_path / "c", 0), (tmp_path / "checkpoint-500", None)):
        uc.save(path, model={}, step=step)
        report = uc.load(path, model={})
        assert (report.step, report.bytes_read, report.sources) == (step, 0, {})


@pytest.mark.parametrize("count", [3, 20_000])
def test_negated_views_are_refused(tmp_path: Path, count: int) -> None:
    """torch stores the sign apart from the memory."""
    pairs = torch.view_as_complex(torch.randn(count, 2))
    uc.save(tmp_path / "c", model={"conj": pairs, "neg": pairs.imag.clone()})
    for name, tensor in {"conj": pairs.conj(), "neg": pairs.conj().imag}.items():
        text = rf"{name}: is a conjugate or negative view; call `resolve_conj"
        with pytest.raises(uc.LayoutError, match=text):
            uc.save(tmp_path / "d", model={name: tensor})
        with pytest.raises(uc.LayoutError, match=text):
            uc.load(tmp_path / "c", model={name: tensor}, strict=False)
        with pytest.raises(uc.LayoutError, match=text):  # not the other's alias
            uc.save(
                tmp_path / "d",
                model={"plain": pairs if name == "conj" else pairs.imag, name: tensor},
            )
        uc.save(tmp_path / name, model={}, extra={name: tensor})
        assert torch.equal(uc.open(tmp_path / name).extra[name], tensor)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("form", [str, Path, lambda path: f"file://{path}", os.path.relpath])
def test_path_types(tmp_path: Path, form: Callable[[Path], str | Path]) -> None:
    path = form(tmp_path / "a" / "c")
    uc.save(path, model=Net())
    other = Net(seed=1)
    uc.load(path, model=other)
    assert same(other.state_dict(), Net().state_dict())
    assert uc.verify(path, deep=True).ok
    (tmp_path / "latest").symlink_to(tmp_path / "a" / "c")
    with uc.open(tmp_path / "latest") as opened:
        assert opened.parts == ("model",)


def test_one_log_line_per_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="unified_ckpt"):
        uc.save(tmp_path / "c", model=Net())
        uc.load(tmp_path / "c", model=Net())
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "saved " in caplog.text
    assert "loaded " in caplog.text


# tied weights


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = Net(tied=True)
    uc.save(tmp_path / "c", model=model)
    assert "head.weight" not in stored(tmp_path / "c")
    assert manifest_of(tmp_path / "c")["parts"]["model"]["aliases"] == {
        "head.weight": "embed.weight"
    }
    for other in (Net(tied=True, seed=1), Net(seed=1)):
        report = uc.load(tmp_path / "c", model=other)
        assert same(other.state_dict(), model.state_dict())
        assert (report.missing, report.unexpected) == ((), ())
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["model"]["head.weight"][...], model.embed.weight)
        assert "head.weight" not in list(opened["model"])


def test_equal_untied_weights_load_into_tied(tmp_path: Path) -> None:
    """The first and the last pipeline stage each store a copy, without knowing of the other."""
    model = Net()
    model.head.weight.data = model.embed.weight.data.clone()
    uc.save(tmp_path / "c", model=model)
    other = Net(tied=True, seed=1)
    report = uc.load(tmp_path / "c", model=other)
    assert same(other.state_dict(), model.state_dict())
    assert report.notes == ("tied in the target, stored as equal tensors: model:embed.weight",)


@pytest.mark.parametrize("verify", ["read", "off"])
def test_different_untied_weights_do_not_load_into_tied(tmp_path: Path, verify: str) -> None:
    """One of the two would be lost silently. They are compared by digest, or by bytes if digests
    are off.
    """
    model, other = Net(), Net(tied=True, seed=1)
    model.head.weight.data = model.embed.weight.data.clone()
    model.head.weight.data[-1, -1] += 1
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer)
    before = copy.deepcopy(other.state_dict())
    options = uc.LoadOptions(verify=verify)
    with pytest.raises(
        uc.MismatchError,
        match=r"ties embed.weight and head.weight, which differ in the .*'drop': True",
    ):
        uc.load(tmp_path / "c", model=other, options=options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    dropped = uc.SourceOptions(rename=[{"match": "head.weight", "drop": True}])
    uc.load(tmp_path / "c", model=other, options=uc.LoadOptions(verify=verify, source=dropped))
    assert torch.equal(other.head.weight, model.embed.weight)


def test_untied_weights_of_two_dtypes_do_not_load_into_tied(tmp_path: Path) -> None:
    weight = torch.ones(3)
    uc.save(tmp_path / "c", model={"a": weight, "b": weight.bfloat16()})
    tied = nn.Module()
    tied.a = tied.b = nn.Parameter(torch.zeros(3))
    with pytest.raises(uc.MismatchError, match="ties a and b, which differ in the checkpoint"):
        uc.load(tmp_path / "c", model=tied)


# lists, parts, masters


def stage(*numbers: int, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({f"layer{n}": nn.Linear(4, 4) for n in numbers})


def test_lists_of_modules_and_optimizers(tmp_path: Path) -> None:
    """Virtual pipeline stages save what one module loads, and the reverse."""
    stages = [stage(0, 2), stage(1, 3, seed=1)]
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=0.1 + n) for n, module in enumerate(stages)
    ]
    for module, optimizer in zip(stages, optimizers, strict=True):
        sum((p**2).sum() for p in module.parameters()).backward()
        optimizer.step()
    uc.save(tmp_path / "c", model=stages, optimizer=optimizers)
    whole = stage(0, 1, 2, 3, seed=5)
    fresh = torch.optim.AdamW([{"params": whole[f"layer{n}"].parameters()} for n in range(4)])
    uc.load(tmp_path / "c", model=whole, optimizer=fresh)
    for module, optimizer in zip(stages, optimizers, strict=True):
        for name, param in module.named_parameters():
            whole_param = dict(whole.named_parameters())[name]
            assert torch.equal(whole_param, param)
            assert torch.equal(
                fresh.state[whole_param]["exp_avg"], optimizer.state[param]["exp_avg"]
            )
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 1.1, 0.1, 1.1]


@pytest.mark.parametrize("deleted", ["optimizer", "ema", "model"])
def test_deleted_part(tmp_path: Path, deleted: str) -> None:
    moments = {"embed.weight/exp_avg": torch.ones(30, 8)}
    uc.save(tmp_path / "c", model=Net(), optimizer=moments, parts={"ema": Net(seed=1)})
    for path in (tmp_path / "c").glob(f"{deleted}*"):
        path.unlink()
    remaining = {
        "model": {"model": Net(seed=3)},
        "optimizer": {"optimizer": {"embed.weight/exp_avg": torch.zeros(30, 8)}},
        "ema": {"parts": {"ema": Net(seed=3)}},
    }
    for part, target in remaining.items():
        if part == deleted:
            with pytest.raises(
                uc.MismatchError, match=rf"{part}:embed\.weight.* is not in the checkpoint"
            ):
                uc.load(tmp_path / "c", **target)
        else:
            uc.load(tmp_path / "c", **target)
    assert uc.verify(tmp_path / "c", deep=True).ok


def mixed() -> Net:
    """Training weights in fp32, except for a norm in bf16."""
    model = Net()
    model.block[1].bfloat16()
    return model


def test_masters_are_created_from_the_model(tmp_path: Path) -> None:
    model = mixed()
    uc.save(tmp_path / "c", model=model, options=uc.SaveOptions(model_dtype="bfloat16"))
    weights, masters = stored(tmp_path / "c"), stored(tmp_path / "c", "master_weights")
    for name, tensor in model.state_dict().items():
        has_master = tensor.is_floating_point() and tensor.dtype != torch.bfloat16
        assert torch.equal(weights[name], tensor.to(torch.bfloat16) if has_master else tensor)
        assert (name in masters) == has_master
        assert not has_master or torch.equal(masters[name], tensor)
    other = mixed()
    nn.init.zeros_(other.embed.weight)
    report = uc.load(tmp_path / "c", model=other)
    assert same(other.state_dict(), model.state_dict()), "an fp32 trainer gets fp32 weights back"
    assert report.sources == {"model": ("master_weights", "model")}
    small = Net().bfloat16()
    report = uc.load(tmp_path / "c", model=small)
    assert torch.equal(small.embed.weight, model.embed.weight.bfloat16())
    assert report.sources == {"model": ("model",)}


def test_save_without_the_model_keeps_other_values(tmp_path: Path) -> None:
    """A model tensor that differs from its rounded master on any rank is stored, for all ranks. NaN
    payloads do not count.
    """
    nan = torch.tensor([float("nan"), -0.0, 3.0])
    masters = {
        "same": nan,
        "edited": torch.ones(3),
        "whole": torch.ones(3, dtype=torch.int32),
        "other": torch.ones(4),
    }
    model = {
        "same": nan.bfloat16(),
        "edited": torch.full((3,), 2.0).bfloat16(),
        "whole": torch.ones(3).bfloat16(),
    }
    model |= {"other": torch.ones(2, 2).bfloat16(), "zero": torch.tensor(-0.0).bfloat16()}
    options = uc.SaveOptions(parts=("master_weights",))
    uc.save(
        tmp_path / "c",
        model=model,
        master_weights=masters | {"zero": torch.tensor(0.0)},
        options=options,
    )
    assert stored(tmp_path / "c", "model_without_masters").keys() == model.keys() - {"same"}
    other = {name: torch.ones_like(tensor) for name, tensor in model.items()}
    uc.load(tmp_path / "c", model=other)
    assert all(
        torch.equal(other[name].view(torch.int16), model[name].view(torch.int16))
        for name in model.keys() - {"same"}
    )
    assert torch.equal(other["same"].nan_to_num(7.0), model["same"].nan_to_num(7.0))


def test_omitted_parts_leave_all_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report, the log and the manifest name what is left out, also if a plan is cached."""
    caplog.set_level("INFO", "unified_ckpt")
    state = {
        "model": {"w": torch.ones(3).bfloat16()},
        "master_weights": {"w": torch.ones(3)},
        "optimizer": {"w/exp_avg": torch.ones(3)},
        "parts": {"ema": {"w": torch.ones(3)}, "teacher": {"w": torch.ones(3)}},
    }
    everything = {"model", "master_weights", "optimizer", "ema", "teacher"}
    choices = [("master_weights",), ("ema", "model"), (), ("master_weights",)]
    with uc.Checkpointer(tmp_path) as checkpointer:
        for i, omit in enumerate(choices):
            report = checkpointer.save(f"c{i}", **state, options=uc.SaveOptions(omit=omit))
            assert report.omitted_parts == omit
            assert (", without " in str(report)) == bool(omit)
            assert ("; without" in caplog.messages[-1]) == bool(omit)
            with uc.open(tmp_path / f"c{i}") as source:
                assert set(source.parts) == everything - {*omit}
                assert tuple(source.source.metadata().omitted_parts) == omit
    with pytest.raises(uc.OptionError, match=r"SaveOptions: got parts=.*and omit=.*one of them"):
        uc.SaveOptions(parts=("model",), omit=("ema",))


def test_save_without_the_model_is_decided_by_all_ranks(tmp_path: Path) -> None:
    """Ranks hold masters of some tensors or some rows. A tensor that any rank finds different is
    stored; the others are not.
    """
    values = torch.arange(8.0).reshape(4, 2)
    model = {name: values.clone() for name in ("first", "second", "rows", "edited", "none")}
    options = uc.SaveOptions(parts=("master_weights",), timeout_seconds=20)

    def act(comm: Comm) -> None:
        masters = {
            "first" if comm.rank == 0 else "second": values.double(),
            "rows": values,
            "edited": values + comm.rank,
        }
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        local_model = {**model, "rows": model["rows"][rows], "edited": model["edited"][rows]}
        local_masters = {
            name: tensor[rows] if name in ("rows", "edited") else tensor
            for name, tensor in masters.items()
        }
        layout = uc.Layout({"dp": 2}, {"rows": {"dp": 0}, "edited": {"dp": 0}})
        with make_checkpointer(comm) as checkpointer:
            for name in ("c", "d"):  # the second save uses the cached plan
                checkpointer.save(
                    tmp_path / name,
                    model=local_model,
                    master_weights=local_masters,
                    layout=layout,
                    options=options,
                )

    run_ranks(2, act)
    for name in ("c", "d"):
        assert stored(tmp_path / name, "model_without_masters").keys() == {"edited", "none"}
        other = {name: torch.zeros(4, 2) for name in model}
        uc.load(tmp_path / name, model=other)
        assert all(torch.equal(other[name], values) for name in model)


# extra and attach


def test_extra_and_module_state(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        amax = (0.0,)

        def get_extra_state(self) -> object:
            return {"amax": self.amax, "history": torch.ones(3)}

        def set_extra_state(self, state: dict[str, object]) -> None:
            self.amax = state["amax"]

    model, other = nn.Sequential(Scaled(2, 2)), nn.Sequential(Scaled(2, 2))
    model[0].amax = (1.5, 2.5)
    extra, big = {"tuple": (1, [2, (3,)]), 4: {5: b"6"}}, torch.randn(40, 30).bfloat16()
    uc.save(tmp_path / "c", model=model, extra={**extra, "big": big}, rank_extra=(7,))
    report = uc.load(tmp_path / "c", model=other)
    assert (other[0].amax, report.rank_extra) == ((1.5, 2.5), (7,))
    with uc.open(tmp_path / "c") as opened:
        for loaded in (report.extra, opened.extra):
            assert torch.equal(loaded.pop("big"), big)
            assert loaded == extra
        assert (len(opened.rank_extra), opened.rank_extra[-1]) == (1, (7,))
        with pytest.raises(IndexError, match=r"rank_extra\[1\]: the checkpoint has 1 entries"):
            opened.rank_extra[1]


# what is in the way


@pytest.mark.parametrize("if_exists", ["error", "keep"])
def test_concurrent_checkpoint_is_not_overwritten(tmp_path: Path, if_exists: str) -> None:
    """Another job commits first."""
    with pytest.raises(uc.StorageError, match="another job has committed a checkpoint"):
        uc.save(
            tmp_path / "c",
            model=Net(),
            step=2,
            attach=lambda _: uc.save(tmp_path / "c", model=Net(seed=1), step=1),
            options=uc.SaveOptions(if_exists=if_exists),
        )
    other = Net()
    assert uc.load(tmp_path / "c", model=other).step == 1
    assert same(other.state_dict(), Net(seed=1).state_dict())
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


FOLDERS = {  # entries of the caller's path -> text of the refusal
    "files": (("notes.txt", "src/a.py"), r"holds other files \(notes.txt, src\)"),
    "weights": (("model.safetensors",), r"holds other files \(model.safetensors\)"),
    "our run": (
        ("checkpoint-2/", "checkpoint-10/", "notes.txt"),
        r"holds checkpoints, .* did you mean .*/c/checkpoint-10\?",
    ),
    "stock run": (
        ("checkpoint-500/optimizer.pt", "checkpoint-60/optimizer.pt"),
        r"did you mean .*/c/checkpoint-500\?",
    ),
    "DeepSpeed's run": (
        ("latest", "global_step3/mp_rank_00_model_states.pt"),
        r"did you mean .*/c/global_step3\?",
    ),
    "checkpoint with checkpoints in it": (
        (".", "checkpoint-2/"),
        r"holds checkpoints|holds a committed checkpoint",
    ),
}


def fill(folder: Path, entries: Sequence[str]) -> None:
    """Write files by name. A name that ends in a slash, or is a dot, is a checkpoint of ours."""
    for name in entries:
        if name == "." or name.endswith("/"):
            uc.save(folder / name, model=Net(), step=int(name[11:-1] or 0) if len(name) > 1 else 7)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(name.encode())


@pytest.mark.parametrize("kind", FOLDERS)
def test_refusal_says_what_is_in_the_way(tmp_path: Path, kind: str) -> None:
    entries, message = FOLDERS[kind]
    fill(tmp_path / "c", entries)
    for if_exists in ("error", "replace"):
        with pytest.raises(uc.StorageError, match=message):
            uc.save(tmp_path / "c", model=Net(), options=uc.SaveOptions(if_exists=if_exists))


@pytest.mark.parametrize("entries", [(), ("checkpoint-is-incomplete.txt",)])
def test_empty_folder_is_replaced(tmp_path: Path, entries: tuple[str, ...]) -> None:
    """Also a folder with only the file by which transformers announces a checkpoint."""
    (tmp_path / "c").mkdir()
    fill(tmp_path / "c", entries)
    uc.save(tmp_path / "c", model=Net())
    assert uc.verify(tmp_path / "c", deep=True).ok
    assert os.listdir(tmp_path) == ["c"]
    assert not set(entries) & set(os.listdir(tmp_path / "c"))


# paths


URLS = ["s3://bucket/run", "gs://bucket/run", Path("s3://bucket/run")]
WRITES: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda url, _: uc.save(url, model=Net()),
    "save below a root": lambda url, _: uc.Checkpointer(url).save("checkpoint-1", model=Net()),
    "save_async": lambda url, _: uc.save_async(url, model=Net()).result(),
    "manager": lambda url, _: uc.CheckpointManager(url),
    "convert": lambda url, ours: uc.convert(ours, url),
}
LOCAL_WRITES: dict[str, Callable[[Any, Path], object]] = {
    "local tier": lambda url, ours: uc.CheckpointManager(
        ours.parent,
        options=uc.ManagerOptions(local_directory=os.fspath(url), local_interval_steps=1),
    ),
    "export": lambda url, ours: uc.convert(ours, url, to="dcp"),
    "repair": lambda url, _: uc.repair(url),
}


@pytest.fixture
def no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint in the working directory, beside which no folder called `s3:` may appear."""
    uc.save(tmp_path / "ours", model=Net())
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "ours"
    assert os.listdir(tmp_path) == ["ours"]


@pytest.mark.parametrize("write", WRITES | LOCAL_WRITES)
def test_url_that_is_only_read_is_refused(no_local_folder: Path, write: str) -> None:
    writes = WRITES | LOCAL_WRITES
    with pytest.raises(uc.CheckpointError, match=r"://.*: got a URL.*, expected a local"):
        writes[write]("memory://run", no_local_folder)


@pytest.mark.parametrize("write", LOCAL_WRITES)
def test_bucket_is_no_local_folder(no_local_folder: Path, write: str) -> None:
    with registered(MemoryStore()) as store:
        with pytest.raises(uc.CheckpointError, match=r"s3://bucket/run.*expected a local"):
            LOCAL_WRITES[write]("s3://bucket/run", no_local_folder)
        assert store.bucket.bodies() == {}


@pytest.mark.parametrize("write", WRITES)
def test_bucket_is_written(no_local_folder: Path, write: str) -> None:
    """Also by a Path, which has one slash less."""
    for url in URLS:
        bucket = MemoryBucket(url=str(url)[:2] + "://bucket")
        with registered(MemoryStore(bucket)):
            WRITES[write](url, no_local_folder)
            manifests = [key for key in bucket.bodies() if key.endswith("unified_checkpoint.json")]
            for key in manifests:
                assert uc.verify(f"{bucket.url}/{os.path.dirname(key)}", deep=True).ok
        folder = "run/checkpoint-1" if write == "save below a root" else "run"
        expected = [] if write == "manager" else [f"{folder}/unified_checkpoint.json"]
        assert manifests == expected


READS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: uc.load(path, model=Net()),
    "open": uc.open,
    "verify": uc.verify,
    "convert": lambda path: uc.convert(path, path.with_name("other")),
    "load of two": lambda path: uc.load([path, path], model=Net()),
    "repair": uc.repair,
}


@pytest.mark.parametrize("kind", ["our run", "stock run", "DeepSpeed's run"])
@pytest.mark.parametrize("read", READS)
def test_run_folder_suggests_its_latest_checkpoint(tmp_path: Path, read: str, kind: str) -> None:
    entries = [entry for entry in FOLDERS[kind][0] if entry != "latest"]
    fill(tmp_path / "c", entries)
    (tmp_path / "c" / "loop").symlink_to("loop")
    latest = {
        "our run": "checkpoint-10",
        "stock run": "checkpoint-500",
        "DeepSpeed's run": "global_step3",
    }[kind]
    with pytest.raises(
        uc.NotFoundError, match=rf"c: is the folder of a run, .* did you mean .*/c/{latest}\?"
    ):
        READS[read](tmp_path / "c")


def test_relative_paths_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolved against the working directory at construction; a program may change it later."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = uc.ManagerOptions(
        asynchronous=False, on_preemption=False, load_parameters_path="pretrained/1000"
    )
    uc.save("pretrained/1000", model=Net(seed=3))
    with (
        uc.Checkpointer("run") as checkpointer,
        uc.CheckpointManager("managed", options=options) as manager,
    ):
        monkeypatch.chdir("elsewhere")
        checkpointer.save("checkpoint-1", model=Net())
        target = Net()
        assert manager.restore(model=target) is not None
        assert same(target.state_dict(), Net(seed=3).state_dict())
        manager.save(2, model=target, force=True)
    assert sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("unified_checkpoint.json")
    ) == [
        "managed/checkpoint-2/unified_checkpoint.json",
        "pretrained/1000/unified_checkpoint.json",
        "run/checkpoint-1/unified_checkpoint.json",
    ]


# loads that need not fit


@pytest.mark.incident("Lightning#20274")
def test_load_not_strict(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c",
        model={
            "same": torch.ones(3),
            "shape": torch.ones(3),
            "dtype": torch.ones(3),
            "old": torch.ones(3),
        },
    )
    target = {
        "same": torch.zeros(3),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(3).half(),
        "new": torch.zeros(3),
    }
    report = uc.load(tmp_path / "c", model=target, strict=False)
    assert report.missing == ("model:new",)
    assert report.unexpected == ("model:old",)
    assert [text.partition(": ")[0] for text in report.wrong] == ["model:dtype", "model:shape"]
    assert {name: tensor.sum().item() for name, tensor in target.items()} == {
        "same": 3,
        "shape": 0,
        "dtype": 0,
        "new": 0,
    }


@pytest.mark.parametrize(
    ("saved", "target_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64"), ("int64", "int32")],
)
@pytest.mark.parametrize("shape", [(), (7,), (300, 100)])
def test_load_with_cast(
    tmp_path: Path, saved: str, target_dtype: str, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 100).to(getattr(torch, saved))
    uc.save(tmp_path / "c", model={"w": tensor})
    plain = torch.zeros(shape, dtype=getattr(torch, target_dtype))
    for target in (plain, plain.mT.contiguous().mT if len(shape) == 2 else plain.clone()):
        uc.load(tmp_path / "c", model={"w": target}, options=uc.LoadOptions(cast=True))
        assert torch.equal(target, tensor.to(getattr(torch, target_dtype)))


WIDER = [
    ("bfloat16", "float32"),
    ("float16", "float64"),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "float16"),
    ("uint8", "int16"),
    ("int32", "int64"),
]
NARROWER = [
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("bfloat16", "float16"),
    ("float8_e5m2", "float8_e4m3fn"),
    ("int64", "int32"),
    ("uint8", "int8"),
    ("int8", "float32"),
    ("float32", "int32"),
]


@pytest.mark.incident("pytorch#187138")
@pytest.mark.parametrize(("saved", "target_dtype"), [*WIDER, *NARROWER])
@pytest.mark.parametrize("shape", [(), (300, 100)])
def test_wider_targets_need_no_cast(
    tmp_path: Path, saved: str, target_dtype: str, shape: tuple[int, ...]
) -> None:
    """As by torch's `load_state_dict`, for weights, optimizer state and further parts."""
    tensor = (torch.rand(shape) * 100 + 1).to(getattr(torch, saved))
    target = {name: torch.zeros(shape).to(getattr(torch, target_dtype)) for name in "abc"}
    uc.save(
        tmp_path / "c",
        model={"w": tensor},
        optimizer={"w/exp_avg": tensor},
        parts={"ema": {"w": tensor}},
    )

    def load() -> None:
        uc.load(
            tmp_path / "c",
            model={"w": target["a"]},
            optimizer={"w/exp_avg": target["b"]},
            parts={"ema": {"w": target["c"]}},
        )

    if (saved, target_dtype) in NARROWER:
        with pytest.raises(uc.MismatchError, match="to cast") as error:
            load()
        assert len(error.value.wrong) == 3
        assert not any(each.float().any() for each in target.values())
        return
    load()
    for each in target.values():
        assert torch.equal(each, tensor.to(each.dtype))


def test_wider_targets_of_some_ranks(tmp_path: Path) -> None:
    """Ranks with slices of several dtypes read together."""
    weights = torch.randn(1000, 96).bfloat16()
    uc.save(tmp_path / "c", model={"w": weights})
    dtypes = (torch.float32, torch.bfloat16, torch.float64)

    def act(comm: Comm) -> torch.Tensor:
        target = torch.zeros(1000, 32, dtype=dtypes[comm.rank])
        layout = uc.Layout({"tp": 3}, {"w": {"tp": 1}})
        make_checkpointer(comm).load(tmp_path / "c", model={"w": target}, layout=layout)
        return target

    for rank, target in enumerate(run_ranks(3, act)):
        assert torch.equal(target, weights[:, rank * 32 : rank * 32 + 32].to(dtypes[rank]))


def test_wider_targets_take_the_most_precise_weights(tmp_path: Path) -> None:
    """A float64 model is filled from float32 master weights, not from the rounded model."""
    weights = torch.randn(40, 3)
    uc.save(tmp_path / "c", model={"w": weights.bfloat16()}, master_weights={"w": weights})
    model = {"w": torch.zeros(40, 3, dtype=torch.float64)}
    uc.load(tmp_path / "c", model=model)
    assert torch.equal(model["w"], weights.double())


@pytest.mark.parametrize("scale", ["w_scale", "w_scale_inv"])
def test_codes_with_scales_require_cast(tmp_path: Path, scale: str) -> None:
    """Without their scales they are other weights; folders of the hub hold both."""
    codes = torch.randn(4, 3).to(torch.float8_e4m3fn)
    save_file({"w": codes, scale: torch.ones(())}, tmp_path / "model.safetensors")
    target = torch.zeros(4, 3)
    with pytest.raises(uc.MismatchError, match="model:w: checkpoint has dtype F8_E4M3"):
        uc.load(tmp_path, model={"w": target})
    assert uc.load(tmp_path, model={"w": target}, strict=False).wrong
    assert not target.any()
    uc.load(tmp_path, model={"w": target}, strict=False, options=uc.LoadOptions(cast=True))
    assert torch.equal(target, codes.float())


# Hugging Face folders


def test_load_hugging_face_folder(tmp_path: Path) -> None:
    """Without digests, step, extra or optimizer; masters are read from the model."""
    state = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = Net(seed=1)
    report = uc.load(tmp_path, model=other)
    assert same(other.state_dict(), Net().state_dict())
    assert (report.step, report.extra, report.verified_bytes) == (None, None, 0)
    assert report.bytes_read == sum(t.nbytes for t in state.values())
    with uc.open(tmp_path) as opened:
        assert (opened.format, opened.parts) == ("huggingface", ("model",))
    text = r"optimizer:embed\.weight: is not in the checkpoint"
    with pytest.raises(uc.MismatchError, match=text):
        uc.load(tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    masters = {name: torch.zeros_like(t) for name, t in state.items() if t.is_floating_point()}
    report = uc.load(tmp_path, master_weights=masters, strict=False)
    assert all(torch.equal(masters[name], state[name]) for name in masters)
    assert report.sources == {"master_weights": ("model",)}


# uc.open


def test_open_names_what_is_wrong(tmp_path: Path) -> None:
    """What is right is read in `tests/foreign/conformance.py`."""
    model = {"w": torch.randn(70, 40, 3).bfloat16(), "b": torch.tensor(3)}
    uc.save(tmp_path / "c", model=model, step=4)
    with uc.open(tmp_path / "c") as opened:
        assert (opened.format, opened.parts, opened.step) == ("unified", ("model",), 4)
        view = opened["model"]["w"]
        assert (view.shape, view.dtype) == ((70, 40, 3), torch.bfloat16)
        assert len(opened["model"]) == 2
        assert torch.equal(view[numpy.int64(-1)], model["w"][-1])
        assert ("model" in opened, "ema" in opened, list(opened)) == (True, False, ["model"])
        for index, text in (
            (slice(None, None, 2), "model:w: got slice step 2, expected 1"),
            (70, "model:w: index 70 is out of range for a dim of size 70"),
            ((0, 0, 0, 0), "model:w: 4 indices for 3 dims"),
            (True, "model:w: got index True, expected an int"),
            (torch.ones(70, dtype=torch.bool), "expected an int, a slice or an ellipsis"),
            (numpy.array([0, 1]), "expected an int, a slice or an ellipsis"),
        ):
            with pytest.raises(IndexError, match=text):
                view[index]
        with pytest.raises(KeyError, match="model:x"):
            opened["model"]["x"]
        with pytest.raises(
            uc.NotFoundError, match=r"part 'optimizer': does not exist, expected one of model"
        ):
            opened["optimizer"]


# verify


def test_verify_counts_bytes(tmp_path: Path) -> None:
    model = {f"w{n}": torch.randn(600, 500) for n in range(3)}
    uc.save(tmp_path / "c", model=model, optimizer={"w0/m": torch.zeros(5)})
    counts: list[int] = []
    report = uc.verify(tmp_path / "c", deep=True, progress=counts.append)
    assert report.ok
    assert (report.tensors, report.nbytes, report.deep) == (4, 3 * 1_200_000 + 20, True)
    assert sum(counts) == report.nbytes


# a Checkpointer between calls


def test_checkpointer_is_reusable(tmp_path: Path) -> None:
    """Paths below its root, options of the call before its own, and calls after `close`."""
    model, other = Net(), Net(seed=1)
    with uc.Checkpointer(
        root=tmp_path, options=uc.SaveOptions(if_exists="replace")
    ) as checkpointer:
        for step in range(2):
            report = checkpointer.save("latest", model=model, step=step)
            assert report.path == str(tmp_path / "latest")
        assert checkpointer.load("latest", model=other).step == 1
        assert same(other.state_dict(), model.state_dict())
        with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
            checkpointer.save("latest", model=model, options=uc.SaveOptions())
        checkpointer.close()
        checkpointer.save(tmp_path / "latest", model=model, step=9)
    assert uc.load(tmp_path / "latest", model=Net()).step == 9


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    """A TypeError, as for any Python call, before any rank waits for another."""
    unknown: dict[str, Any] = {"model": Net(), "modle": {}}
    uc.save(tmp_path / "c", model=Net())
    options = uc.ManagerOptions(load_parameters_path=str(tmp_path / "c"))
    with (
        uc.Checkpointer(tmp_path) as checkpointer,
        uc.CheckpointManager(tmp_path / "run", options=options) as manager,
    ):
        for name, function in (("save", uc.save), ("load", uc.load)):
            text = (
                rf"^{name}\(\) got an unexpected keyword argument 'modle'; did you mean 'model'\?"
            )
            with pytest.raises(TypeError, match=text):
                function(tmp_path / "c", **unknown)
        for call in (
            *(partial(save, tmp_path / "d") for save in (uc.save, uc.save_async)),
            *(partial(save, "d") for save in (checkpointer.save, checkpointer.save_async)),
            *(partial(load, tmp_path / "c") for load in (uc.load, checkpointer.load)),
            partial(manager.save, 1, force=True),
            partial(manager.finish, 1),
            manager.restore,
        ):
            with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
                call(**unknown)
        assert manager.latest() is None
    assert not (tmp_path / "d").exists()


def test_options_of_another_class_are_refused(tmp_path: Path) -> None:
    """Also a dict, even an empty one; a field of the options beside the arguments names them."""
    model, wrong = Net(), r"options: got \w+, expected {}; pass {}\(\.\.\.\)"
    uc.save(tmp_path / "c", model=model)
    calls: list[tuple[Callable[..., object], str]] = [
        (partial(uc.save, tmp_path / "d", model=model), "SaveOptions"),
        (partial(uc.save_async, tmp_path / "d", model=model), "SaveOptions"),
        (partial(uc.load, tmp_path / "c", model=model), "LoadOptions"),
        (partial(uc.open, tmp_path / "c"), "SourceOptions"),
        (partial(uc.estimate, model), "SaveOptions"),
        (uc.Checkpointer, "SaveOptions"),
        (partial(uc.CheckpointManager, tmp_path / "run"), "ManagerOptions"),
    ]
    for call, kind in calls:
        for options in ({}, uc.ConvertOptions()):
            with pytest.raises(TypeError, match=wrong.format(kind, kind)):
                call(options=options)
    arguments: dict[str, Any] = {"model": model, "if_exists": "replace"}
    with pytest.raises(TypeError, match=r"; pass options=SaveOptions\(if_exists=\.\.\.\)"):
        uc.save(tmp_path / "d", **arguments)
    assert not (tmp_path / "d").exists()


EMPTY: list[Callable[[Any], object]] = [
    lambda path: uc.save(path, model=Net()),
    lambda path: uc.save_async(path, model=Net()),
    lambda path: uc.load(path, model=Net()),
    lambda path: uc.load([path], model=Net()),
    uc.open,
    uc.verify,
    uc.repair,
    lambda path: uc.repair("c", [path]),
    lambda path: uc.convert(path, "d"),
    lambda path: uc.convert(["c", path], "d"),
    lambda path: uc.convert("c", path),
    lambda path: uc.estimate(Net(), root=path),
    uc.Checkpointer,
    lambda path: uc.Checkpointer("c").save(path, model=Net()),
    lambda path: uc.Checkpointer("c").load(path, model=Net()),
    lambda path: uc.Checkpointer("c").repair(path),
    uc.CheckpointManager,
    lambda path: uc.from_paddle("", output_dir=path),
]


@pytest.mark.parametrize("read", READS)
def test_missing_path_is_a_file_not_found_error(tmp_path: Path, read: str) -> None:
    """Scripts catch what trainers raise for a wrong path, and start a run."""
    for error in (FileNotFoundError, ValueError, uc.NotFoundError):
        with pytest.raises(error, match="c: "):
            READS[read](tmp_path / "c")


@pytest.mark.parametrize("wrong", ["", 3, b"c", ["c"]], ids=repr)
def test_paths_that_are_no_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    """An empty path, as of an unset variable, was the working directory."""
    monkeypatch.chdir(tmp_path)
    uc.save("c", model=Net())
    lists = (EMPTY[2], EMPTY[8], EMPTY[14]) if isinstance(wrong, list) else ()
    for call in (call for call in EMPTY if call not in lists):
        if wrong == "":
            with pytest.raises(uc.OptionError, match=r"^\w+: got an empty path; pass '\.' for"):
                call(wrong)
            with pytest.raises(uc.OptionError, match=r"^\w+: got 'a\\x00b', expected a path with"):
                call("a\0b")
        else:
            kind = type(wrong).__name__
            with pytest.raises(
                TypeError, match=rf"^\w+: got {kind}, expected a str or an os\.Path"
            ):
                call(wrong)
    options: list[Callable[[Any], object]] = [
        lambda path: uc.SourceOptions(config=path),
        lambda path: uc.SourceOptions(rename=path),
        lambda path: uc.ConvertOptions(adapter=path),
        lambda path: uc.ManagerOptions(trash_directory=path),
        lambda path: uc.ManagerOptions(local_directory=path, local_interval_steps=1),
        lambda path: uc.ManagerOptions(load_parameters_path=path),
        lambda path: uc.ManagerOptions(load_full_state_path=path),
        lambda path: uc.ManagerOptions(load_adapters_path=path),
    ]
    for option in options:
        assert option(Path("c")) == option("c")
        text = "got an empty path" if wrong == "" else r"^\w+Options\("
        with pytest.raises(uc.CheckpointError, match=text):
            option(wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_arguments_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    """By name, before anything is written, rather than by an error from within."""
    wrong: Any = "no"
    model = Net()
    uc.save(tmp_path / "c", model=model)
    manager = uc.CheckpointManager(tmp_path / "run")
    function, flag = "expected a function$", "expected True or False$"
    calls: list[tuple[Callable[..., object], str, str]] = [
        (partial(uc.save, tmp_path / "d", model=model), "attach", function),
        (partial(uc.save_async, tmp_path / "d", model=model), "after_commit", function),
        (partial(uc.save_async, tmp_path / "d", model=model), "lazy", flag),
        (partial(uc.load, tmp_path / "c", model=model), "strict", flag),
        (partial(uc.verify, tmp_path / "c"), "deep", flag),
        (partial(uc.verify, tmp_path / "c"), "progress", function),
        (partial(uc.convert, tmp_path / "c", tmp_path / "d"), "progress", function),
        (partial(manager.save, 1, model=model), "attach", function),
        (partial(manager.save, 1, model=model), "force", flag),
        (manager.on_commit, "hook", function),
        (manager.on_failure, "hook", function),
        (partial(uc.save, tmp_path / "d", model=model), "group", "expected a ProcessGroup;"),
        (partial(uc.Checkpointer, tmp_path), "node", "expected a str$"),
        (uc.from_paddle, "config", "expected a str$"),
        (uc.from_maxtext, "flags", "expected a Mapping$"),
    ]
    for call, name, text in calls:
        with pytest.raises(TypeError, match=rf"^{name}: got .*, {text}"):
            call(**{name: 3 if text == "expected a str$" else wrong})
    with pytest.raises(uc.LayoutError, match="parts: got a str, expected"):
        uc.save(tmp_path / "d", model=model, parts=wrong)
    with pytest.raises(uc.OptionError, match="interval_seconds: got 'no', expected a number"):
        uc.estimate(model, interval_seconds=wrong)
    assert not (tmp_path / "d").exists()


def test_load_arguments_are_complete() -> None:
    """Type checkers accept the same arguments in every form of a load."""
    parameters = inspect.signature(uc.Checkpointer.load).parameters.values()
    names = {p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY}
    assert names == LoadArguments.__optional_keys__


def test_package_beside_torch_imports_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a training would wait for it. Without torch, the command starts sooner."""
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    runpy.run_path(str(uc.__file__), run_name=uc.__name__)
    assert imported == ["unified_ckpt.api"]
    monkeypatch.delitem(sys.modules, "torch")
    runpy.run_path(str(uc.__file__), run_name=uc.__name__)
    assert imported == ["unified_ckpt.api"]

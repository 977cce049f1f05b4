"""Estimates name the files and bytes that real saves then write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.torch_training import train_step
from unified_ckpt.cli.main import main
from unified_ckpt.engine.save.request import save_request
from unified_ckpt.estimates.estimate import (
    Estimate,
    EstimateCall,
    estimate_save,
    kept_checkpoints,
    sample_shares,
    saved_steps,
)
from unified_ckpt.estimates.state import predict_arguments
from unified_ckpt.manager.rules.when import due_reasons
from unified_ckpt.runtime.comm.comm import Comm

MANIFEST = "unified_checkpoint.json"


class Net(nn.Module):
    """Rows of moments that are encoded and such that are not, a tied head, buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, dtype=dtype)
        self.inner = nn.Sequential(nn.Linear(64, 8, dtype=dtype), nn.BatchNorm1d(8, dtype=dtype))
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(64, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def check_files(estimate: Estimate, folder: Path) -> None:
    """Every file but the manifest is there with exactly the estimated bytes."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sizes.keys() - estimate.files.keys() == {MANIFEST}
    assert dict(estimate.files) == {name: sizes[name] for name in estimate.files}
    parts = json.loads((folder / MANIFEST).read_text())["parts"]
    assert estimate.parts == {part: record["total_nbytes"] for part, record in parts.items()}
    assert estimate.nbytes == sum(estimate.files.values())


@pytest.mark.parametrize("model_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("compression", ["none", "lossless", "O1", "O2"])
def test_files_equal_those_of_the_save(tmp_path: Path, compression: Any, model_dtype: Any) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    options = uc.SaveOptions(compression=compression, model_dtype=model_dtype, max_file_bytes=5_000)
    before = uc.estimate(net, optimizer, options=options)
    train_step(optimizer)
    assert uc.save(tmp_path / "a", model=net, optimizer=optimizer, options=options).outliers == 0
    check_files(before, tmp_path / "a")
    assert len([file for file in before.files if file.startswith("optimizer-")]) > 1
    assert uc.estimate(net, optimizer, options=options) == before
    assert uc.estimate(tmp_path / "a", options=options) == before


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        lambda params: torch.optim.Adam(params, amsgrad=True),
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
        torch.optim.Rprop,
        torch.optim.SGD,
        lambda params: torch.optim.SGD(params, momentum=0.9),
        lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    ],
)
def test_optimizers_before_their_first_step(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    net = Net(torch.bfloat16)
    optimizer = make(list(net.parameters()))
    before = uc.estimate(net, optimizer)
    train_step(optimizer)
    uc.save(tmp_path / "a", model=net, optimizer=optimizer)
    check_files(before, tmp_path / "a")


def test_optimizer_without_a_rule_needs_a_step(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adafactor(net.parameters())
    with pytest.raises(uc.OptionError, match="Adafactor before its first step"):
        uc.estimate(net, optimizer)
    train_step(optimizer)
    uc.save(tmp_path / "a", model=net, optimizer=optimizer)
    check_files(uc.estimate(net, optimizer), tmp_path / "a")


def test_model_on_the_meta_device_and_optimizer_by_name(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(optimizer)
    uc.save(tmp_path / "a", model=net, optimizer=optimizer, parts={"ema": Net()})
    with torch.device("meta"):
        plan, ema = Net(), Net()
    check_files(uc.estimate(plan, "AdamW", parts={"ema": ema}), tmp_path / "a")
    huge = nn.Linear(1 << 20, 1 << 20, device="meta")  # 4 TiB of weights
    assert uc.estimate(huge, torch.optim.Adam(huge.parameters())).nbytes > 12 << 40


@pytest.mark.integration
@pytest.mark.parametrize("compression", ["none", "O2"])
@pytest.mark.parametrize("model_dtype", [None, "bfloat16"])
def test_models_of_hugging_face(tmp_path: Path, compression: Any, model_dtype: Any) -> None:
    """From the folder of a model, from its meta model, and from the trained one; tied weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=128, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hub")
    with torch.device("meta"):
        plan = LlamaForCausalLM(config)
    options = uc.SaveOptions(compression=compression, model_dtype=model_dtype)
    estimate = uc.estimate(plan, "adamw", options=options)
    assert uc.estimate(tmp_path / "hub", "adamw", options=options) == estimate
    optimizer = torch.optim.AdamW(model.parameters())
    assert uc.estimate(model, optimizer, options=options) == estimate
    train_step(optimizer)
    report = uc.save(tmp_path / "a", model=model, optimizer=optimizer, options=options)
    assert estimate.parts == report.parts
    exceptions = {file.name for file in (tmp_path / "a").iterdir() if "exceptions" in file.name}
    assert bool(exceptions) == bool(report.outliers)
    for name in exceptions:
        (tmp_path / "a" / name).unlink()
    check_files(estimate, tmp_path / "a")


def with_masters(net: nn.Module) -> dict[str, Any]:
    """A model in bfloat16, its float32 masters, and AdamW over these."""
    masters = {name: param.detach().float() for name, param in net.named_parameters()}
    optimizer = torch.optim.AdamW([nn.Parameter(master) for master in masters.values()])
    train_step(optimizer)
    moments = {
        f"{name}/{key}": value
        for name, state in zip(masters, optimizer.state.values(), strict=True)
        for key, value in state.items()
    }
    return {"model": net, "master_weights": masters, "optimizer": moments}


@pytest.mark.parametrize("compression", ["none", "O1"])
def test_run_from_a_model_folder(
    tmp_path: Path, compression: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = tmp_path / "hub", tmp_path / "run"
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    source.mkdir()
    save_file(net.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    flags = ["--masters", "--compression", compression, "--root", str(run)]
    plan = ["estimate", str(source), "--optimizer", "adamw", *flags, "--keep-latest", "3"]
    assert main([*plan, "--every-minutes", "30", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    arguments = with_masters(net)
    for name, param in net.named_parameters():  # exactly rounded: no exceptions
        arguments["master_weights"][name].copy_(param)
    uc.save(run / "a", **arguments, options=uc.SaveOptions(compression=compression))
    sizes = {file.name: file.stat().st_size for file in (run / "a").iterdir()}
    assert sizes.pop(MANIFEST)
    assert shown["files"] == sizes
    assert shown["room_nbytes"] == 4 * sum(sizes.values())
    assert shown["bytes_per_day"] == 48 * sum(sizes.values())
    assert shown["seconds"] * shown["bytes_per_second"] == pytest.approx(sum(sizes.values()))


def test_estimate_is_three_readable_lines() -> None:
    parts = {"none": {"model": 2048}, "lossless": {"model": 1024}}
    estimate = Estimate("none", {"a": 2000, "b": 1072}, parts, 3, 60.0, 1 << 30, 1 << 20)  # type: ignore[arg-type]
    assert str(estimate).splitlines() == [
        "3 KiB per save in 2 files: model 2 KiB",
        "  other compressions: lossless 1 KiB",
        "  12 KiB of room for 3 kept and one being written, 1 GiB free; "
        "0.00 s at 1 MiB/s as measured; 4.22 MiB per day",
    ]


@given(
    interval=st.integers(1, 9),
    listed=st.frozensets(st.integers(0, 40), max_size=3),
    on_completion=st.booleans(),
    rules=st.fixed_dictionaries(
        {},
        optional={"keep_latest": st.integers(1, 4), "keep_every_steps": st.integers(1, 8)},
    ),
    steps=st.builds(
        lambda start, count: range(start, start + count), st.integers(0, 20), st.integers(1, 30)
    ),
)
def test_rest_of_a_run_follows_the_manager(
    interval: int,
    listed: frozenset[int],
    on_completion: bool,
    rules: dict[str, Any],
    steps: range,
) -> None:
    """The oracle walks through all steps, asks the manager's rules, and applies retention."""
    options = uc.ManagerOptions(
        interval_steps=interval, steps=listed, on_completion=on_completion, **rules
    )
    saved, written, every = set[int](), 0, rules.get("keep_every_steps")
    for step in (*steps[1:], steps.stop):
        is_due = due_reasons(options, step, last_step=steps.start, first=False)
        if is_due or (on_completion and step == steps.stop):
            saved, written = saved | {step}, written + 1
            if rules:
                latest = sorted(saved)[-rules.get("keep_latest", 1) :]
                saved = {old for old in saved if old in latest or (every and old % every == 0)}
    planned = saved_steps(options, steps)
    assert len(planned) == written
    estimated = kept_checkpoints(options, planned)
    assert estimated is not None
    assert estimated >= len(saved)
    if "keep_every_steps" not in rules:  # else one of the latest may be such a step, too
        assert estimated == len(saved)


def test_rest_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint, its step counts; saves by the clock have no number."""
    uc.save(tmp_path / "a", model={"w": torch.zeros(256)}, step=1000)
    plan = ["estimate", str(tmp_path / "a"), "--root", str(tmp_path), "--steps", "2500"]
    assert main([*plan, "--every-steps", "500", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["steps"], shown["checkpoints"]) == (1500, 3)
    assert shown["run_nbytes"] == 3 * shown["nbytes"]
    assert shown["run_seconds"] == pytest.approx(3 * shown["seconds"])
    assert shown["room_nbytes"] == 2 * shown["nbytes"]
    assert main([*plan, "--every-steps", "500"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("  1500 steps remaining: 3 checkpoints, ")
    assert main([*plan, "--every-minutes", "5"]) == 1
    assert "saves by the clock cannot be counted" in capsys.readouterr().err
    options = uc.ManagerOptions(interval_steps=10)
    for steps in [0, 1.5, range(5, 5), range(0, 10, 2), True]:
        with pytest.raises(uc.OptionError, match="steps: got "):
            uc.estimate({"w": torch.zeros(2)}, manager_options=options, steps=steps)
    estimate = uc.estimate({"w": torch.zeros(2)}, manager_options=options, steps=range(40, 65))
    assert (estimate.steps, estimate.checkpoints, estimate.kept) == (25, 3, 3)
    assert estimate.room_nbytes == estimate.run_nbytes == 3 * estimate.nbytes


@pytest.mark.parametrize(
    "choice", [{"parts": ("master_weights", "optimizer")}, {"omit": ("model",)}]
)
def test_checkpoint_without_its_model(tmp_path: Path, choice: Any) -> None:
    """A save that leaves out the model, from tensors on the meta device and from values."""
    options = uc.SaveOptions(model_dtype="bfloat16", **choice)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with torch.device("meta"):
        plan = Net()
    train_step(optimizer)
    uc.save(tmp_path / "a", model=net, optimizer=optimizer, options=options)
    check_files(uc.estimate(plan, "adamw", options=options), tmp_path / "a")
    assert uc.estimate(tmp_path / "a").parts.keys() == {"model", "master_weights", "optimizer"}


def test_what_a_checkpoint_has_is_not_given_again(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(optimizer)
    uc.save(tmp_path / "a", model=net, optimizer=optimizer)
    with pytest.raises(uc.OptionError, match="optimizer: got it beside a checkpoint"):
        uc.estimate(tmp_path / "a", "adamw")
    with pytest.raises(uc.OptionError, match="layout: got it beside a checkpoint"):
        uc.estimate(tmp_path / "a", layout=uc.Layout({}, {}))
    with pytest.raises(uc.OptionError, match="without trainable 16-bit tensors; set"):
        uc.estimate(tmp_path / "a", master_weights=True)
    with pytest.raises(uc.OptionError, match="'adamv', expected the name of a class"):
        uc.estimate(net, "adamv")
    with pytest.raises(uc.OptionError, match="'muon' cannot train this model"):
        uc.estimate(net, "muon")
    with pytest.raises(uc.OptionError, match="interval_seconds: got 0"):
        uc.estimate(net, interval_seconds=0)
    with pytest.raises(uc.NotFoundError):
        uc.estimate(tmp_path / "b")


def test_ranks_plan_one_folder(tmp_path: Path) -> None:
    """Split and whole tensors of four ranks: one estimate on all, and the files of the save."""
    layout = uc.Layout({"tp": 4}, {"split": {"tp": 0}})
    options = uc.SaveOptions(compression="O2")

    def rank(comm: Comm) -> Estimate:
        model = {"split": torch.zeros(8, 64), "whole": torch.zeros(3, 64)}
        arguments = predict_arguments(model, "adamw", {"layout": layout})
        arguments["options"] = options
        request = save_request(comm, arguments, options, reads_values=False)
        estimate = estimate_save(comm, EstimateCall(request, str(tmp_path), None, None, 60))
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(tmp_path / "a", **arguments)
        return estimate

    estimates = run_ranks(4, rank)
    check_files(estimates[0], tmp_path / "a")
    assert all(estimate == estimates[0] for estimate in estimates)
    assert os.listdir(tmp_path) == ["a"]  # nothing of the measurement


@pytest.mark.parametrize("world", [1, 5, 32, 33, 1000, 16_384])
def test_measurement_is_bounded(world: int) -> None:
    """Few ranks write, from all over the world, and not much in total."""
    writers, share = sample_shares(world)
    assert 0 in writers
    assert writers[-1] >= world // 2
    assert 96 << 20 <= len(writers) * share <= 128 << 20
    assert min(world, 16) <= len(writers) <= 32


def test_error_of_one_rank_reaches_all() -> None:
    def rank(comm: Comm) -> Estimate:
        error = uc.OptionError("no")
        request = save_request(comm, {"model": {"a": torch.zeros(2)}}, uc.SaveOptions())
        call = EstimateCall(error if comm.rank else request, None, None, None, 60)
        return estimate_save(comm, call)

    with pytest.raises(uc.CheckpointError, match="no"):
        run_ranks(2, rank)


def test_folder_that_cannot_be_measured() -> None:
    with pytest.raises(uc.StorageError, match="cannot be measured"):
        uc.estimate({"a": torch.zeros(2)}, root="/proc/run")
    with pytest.raises(uc.StorageError, match="got a URL"):
        uc.estimate({"a": torch.zeros(2)}, root="memory://run")


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, None),
        ({"keep_latest": 3}, 3),
        ({"keep_best": 2, "best_metric": "loss"}, 3),
        ({"keep_latest": 3, "keep_best": 2, "best_metric": "loss"}, 5),
        ({"keep_latest": 3, "best_metric": "loss"}, 4),
        ({"best_metric": "loss"}, None),
        ({"keep_latest": 3, "keep_every_steps": 100}, None),
        ({"keep_latest": 3, "trash_directory": "trash"}, None),
    ],
)
def test_room_follows_the_rules(rules: dict[str, Any], kept: int | None) -> None:
    options = uc.ManagerOptions(interval_seconds=600, **rules)
    assert kept_checkpoints(options) == kept
    estimate = uc.estimate({"a": torch.zeros(2)}, manager_options=options)
    assert estimate.room_nbytes == ((kept + 1) * estimate.nbytes if kept else None)
    assert estimate.bytes_per_day == 144 * estimate.nbytes
    assert ("grows with every save" in str(estimate)) == (kept is None)


@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_declared_boxes_are_counted(tmp_path: Path, optimizer: str | None) -> None:
    """Those of a model, of predicted or given optimizer state, and of predicted masters."""
    whole = torch.zeros(8, 64, dtype=torch.bfloat16)
    options = uc.SaveOptions()

    def rank(comm: Comm) -> Estimate:
        low, high = ((0, 3), (3, 8))[comm.rank]
        rows = uc.Shards(whole[low:high], (8, 64), [((low, 0), (0, 0), (high - low, 64))])
        given = optimizer or {"w/exp_avg": rows.like(torch.zeros(high - low, 64))}
        model = {"w": rows, "whole": torch.zeros(3)}
        arguments = predict_arguments(model, given, {"master_weights": True})
        arguments["options"] = options
        request = save_request(comm, arguments, options, reads_values=False)
        estimate = estimate_save(comm, EstimateCall(request, None, None, None, 60))
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(tmp_path / "a", **arguments)
        return estimate

    for estimate in run_ranks(2, rank):
        check_files(estimate, tmp_path / "a")
        assert estimate.parts["master_weights"] == whole.numel() * 4
        assert estimate.parts["optimizer"] >= whole.numel() * 4

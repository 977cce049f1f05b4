"""Checkpoints of the stock Trainer and of Accelerate: read as they read them, gone on from, and
refused where there is a doubt.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import unified_ckpt as uc
from tests.support.expert_models import mixtral
from tests.support.trainers import STEPS, StopAt, check_same, losses, model, trainer
from unified_ckpt.cli.main import main
from unified_ckpt.integrations.transformers import open_model_names
from unified_ckpt.runtime.torch_state.rng import RandomStates
from unified_ckpt.sources.pytorch.parameter_order import meta_model

Hostile = Callable[[Path], Any]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """The stock Trainer, stopped after four steps; its checkpoint."""
    out = tmp_path_factory.mktemp("stock")
    made = trainer(out, StopAt(4), stock=True, weight_decay=0.1, lr_scheduler_type="cosine")
    made.train()
    return made, out / "checkpoint-4"


@pytest.fixture
def folder(stock: tuple[Trainer, Path], tmp_path: Path) -> Path:
    """A copy, to damage."""
    shutil.copytree(stock[1], tmp_path / "checkpoint-4")
    return tmp_path / "checkpoint-4"


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            **more,
        }
    )


def plain(made: Trainer) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = made.optimizer.optimizer  # type: ignore[union-attr]
    return found


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        f"{names[id(p)]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def check_equal(found: dict[str, torch.Tensor], needed: dict[str, torch.Tensor]) -> None:
    assert found.keys() == needed.keys()
    assert [
        name
        for name, tensor in needed.items()
        if not torch.equal(found[name], tensor) or found[name].dtype != tensor.dtype
    ] == []


def test_weights_and_optimizer_are_the_trainers_by_name(stock: tuple[Trainer, Path]) -> None:
    made, folder = stock
    with uc.open(folder) as source:
        assert (source.format, source.parts, source.step) == ("trainer", ("model", "optimizer"), 4)
        check_equal(
            {name: view[...] for name, view in source["model"].items()},
            dict(made.model.state_dict()),
        )
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(made.model, plain(made)),
        )
        decayed, rest = source.source.metadata().groups
        assert decayed["options"]["weight_decay"] == 0.1
        assert decayed["options"]["lr"] == plain(made).param_groups[0]["lr"]
        assert "model.layers.0.input_layernorm.weight" in rest["names"]
        assert source.extra["scheduler"]["last_epoch"] == 4
        assert source.extra["trainer_state"]["global_step"] == 4
        told = torch.load(folder / "rng_state.pth", weights_only=False)
        assert torch.equal(source.rank_extra[0]["torch"], told["cpu"])


class Loads(TrainerCallback):
    """Once the stock Trainer has resumed: forgets what it has loaded, and loads that through the
    engine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(
        self, *_: Any, model: nn.Module, optimizer: Any, lr_scheduler: Any, **__: Any
    ) -> None:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer.optimizer.state.clear()
        for group in optimizer.optimizer.param_groups:
            group.update(lr=9.0, weight_decay=9.0)
        lr_scheduler.last_epoch = 99
        report = uc.load(self._folder, model=model, optimizer=optimizer.optimizer)
        lr_scheduler.load_state_dict(report.extra["scheduler"])


def test_a_trainer_goes_on_with_the_losses_of_one_that_was_not_stopped(
    stock: tuple[Trainer, Path], tmp_path: Path
) -> None:
    told = {
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "stock": True,
        "save_strategy": "no",
    }
    straight = trainer(tmp_path / "straight", **told)
    straight.train()
    resumed = trainer(tmp_path / "resumed", Loads(stock[1]), **told)
    resumed.train(resume_from_checkpoint=str(stock[1]))
    assert len(losses(straight)) == STEPS
    check_same(resumed, straight)


def test_random_states_are_the_ranks(stock: tuple[Trainer, Path]) -> None:
    net, told = model(), torch.load(stock[1] / "rng_state.pth", weights_only=False)
    uc.load(stock[1], model=net, rank_extra=RandomStates())
    assert torch.equal(torch.get_rng_state(), told["cpu"])
    assert random.getstate() == told["python"]


def test_the_next_save_is_unified_and_has_the_same_names(
    stock: tuple[Trainer, Path], tmp_path: Path
) -> None:
    folder = stock[1]
    net = model()
    decayed, rest = (
        [net.get_parameter(name) for name in group] for group in names_of_groups(folder)
    )
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}])
    report = uc.load(folder, model=net, optimizer=optimizer)
    uc.save(tmp_path / "ours", model=net, optimizer=optimizer, step=report.step)
    assert main(["diff", str(folder), str(tmp_path / "ours")]) == 0
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def names_of_groups(folder: Path) -> list[list[str]]:
    with uc.open(folder) as source:
        return [list(group["names"]) for group in source.source.metadata().groups]


def test_an_optimizer_in_another_order_of_as_many_is_refused_not_mixed_up(
    stock: tuple[Trainer, Path],
) -> None:
    """Shapes alike, layers swapped: torch's load_state_dict takes it without a word."""
    net, groups = model(), names_of_groups(stock[1])
    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    swapped = [
        [re.sub("layers.[01]", lambda found: other[found[0]], name) for name in group]
        for group in groups
    ]
    optimizer = torch.optim.AdamW(
        [{"params": [net.get_parameter(name) for name in group]} for group in swapped]
    )
    with pytest.raises(
        uc.FormatError,
        match=r"two orders fit: the target optimizer has .*layers.1.* where .* has .*layers.0",
    ):
        uc.load(stock[1], model=net, optimizer=optimizer)
    told = uc.SourceOptions(optimizer_order=tuple(map(tuple, groups)))
    uc.load(
        stock[1],
        model=net,
        optimizer=optimizer,
        options=uc.LoadOptions(source=told, hyperparameters="current"),
    )
    check_equal(state_of(net, optimizer), state_of(stock[0].model, plain(stock[0])))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda names: [names[0][1:], names[1]],
            r"param groups of \[15, 5\] parameters, expected \[16, 5\]",
        ),
        (
            lambda names: [[*names[0][1:], names[0][0]], names[1]],
            r"do not fit its optimizer: param group 0",
        ),
        (
            lambda names: [["x.weight", *names[0][1:]], names[1]],
            r"the model has no tensors for these names(.|\n)*x.weight",
        ),
    ],
)
def test_an_order_that_does_not_fit_is_refused(
    stock: tuple[Trainer, Path], change: Callable[..., Any], text: str
) -> None:
    order = tuple(map(tuple, change(names_of_groups(stock[1]))))
    with (
        uc.open(stock[1], options=uc.SourceOptions(optimizer_order=order)) as source,
        pytest.raises(uc.FormatError, match=text),
    ):
        list(source["optimizer"])


def test_without_a_config_the_optimizer_to_be_filled_says_the_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = names_of_groups(folder)
    (folder / "config.json").unlink()
    net = model()
    with (
        uc.open(folder) as source,
        pytest.raises(
            uc.FormatError, match=r"by position(.|\n)*no config.json(.|\n)*pass an optimizer"
        ),
    ):
        list(source["optimizer"])
    uc.load(folder, model=net)
    optimizer = torch.optim.AdamW(
        [{"params": [net.get_parameter(name) for name in group]} for group in groups]
    )
    uc.load(folder, model=net, optimizer=optimizer)
    assert len(optimizer.state) == 21
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "model  21 tensors" in shown
    assert "is by position, and its parameter names are unknown" in shown
    assert main(["inspect", "--json", str(folder)]) == 0
    assert "no config.json" in json.loads(capsys.readouterr().out)["unreadable"]["optimizer"]
    with pytest.raises(
        uc.FormatError,
        match=r"the target optimizer: got 1 param group\(s\), expected 2",
    ):
        uc.load(folder, model=net, optimizer=torch.optim.AdamW(net.parameters()))


def test_another_models_config_does_not_name_it(folder: Path) -> None:
    llama(num_hidden_layers=3, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    with (
        uc.open(folder) as source,
        pytest.raises(
            uc.FormatError, match=r"has other names or shapes for these parameters(.|\n)*layers.2"
        ),
    ):
        list(source["optimizer"])


@pytest.mark.parametrize("architecture", ["pipeline", "Trainer", "AutoModel", "logging", 7])
def test_a_config_names_a_model_or_nothing_is_called(folder: Path, architecture: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    with pytest.raises(
        uc.CheckpointError,
        match=r"config.json: (got architectures|transformers .* cannot build a model)",
    ):
        meta_model(folder)


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 0}, {"hidden_act": "none"}, {"num_hidden_layers": "x"}],
    ids=str,
)
def test_a_config_that_makes_no_model_stops_nobody_who_knows_the_order(
    folder: Path, change: dict[str, Any]
) -> None:
    """What transformers raises then may be anything."""
    groups, net = names_of_groups(folder), model()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with (
        uc.open(folder) as source,
        pytest.raises(
            uc.FormatError, match=r"config.json: transformers .* cannot build a model from it: \w+"
        ),
    ):
        list(source["optimizer"])
    optimizer = torch.optim.AdamW(
        [{"params": [net.get_parameter(name) for name in group]} for group in groups]
    )
    uc.load(folder, model=net, optimizer=optimizer)
    assert len(optimizer.state) == 21


def test_frozen_embeddings_leave_no_doubt_and_frozen_layers_do(tmp_path: Path) -> None:
    net = model()
    net.model.embed_tokens.requires_grad_(False)
    net.lm_head.requires_grad_(False)
    made = trainer(tmp_path / "a", stock=True, net=net, max_steps=1, save_steps=1)
    made.train()
    with uc.open(tmp_path / "a" / "checkpoint-1") as source:
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(made.model, plain(made)),
        )
    net = model()
    net.model.layers[0].requires_grad_(False)
    trainer(tmp_path / "b", stock=True, net=net, max_steps=1, save_steps=1).train()
    with (
        uc.open(tmp_path / "b" / "checkpoint-1") as source,
        pytest.raises(uc.FormatError, match="shapes do not identify them"),
    ):
        list(source["optimizer"])


def test_tied_weights_are_one_and_adafactor_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = llama(num_hidden_layers=1, tie_word_embeddings=True)
    made = trainer(
        tmp_path,
        stock=True,
        net=LlamaForCausalLM(config),
        max_steps=1,
        save_steps=1,
        optim="adafactor",
    )
    made.train()
    with uc.open(tmp_path / "checkpoint-1") as source:
        found = {name: view[...] for name, view in source["optimizer"].items()}
        needed = {
            name: value
            for name, value in state_of(made.model, plain(made)).items()
            if isinstance(value, torch.Tensor)
        }
        check_equal(found, needed)
        assert "lm_head.weight" not in source["model"]
    net = LlamaForCausalLM(config)
    uc.load(tmp_path / "checkpoint-1", model=net)
    assert torch.equal(net.lm_head.weight, made.model.lm_head.weight)


def test_a_lost_optimizer_is_a_mismatch_not_a_fresh_start(folder: Path) -> None:
    """The stock Trainer resumes with an empty optimizer, without a word."""
    (folder / "optimizer.pt").unlink()
    net = model()
    with pytest.raises(
        uc.MismatchError, match=r"optimizer:lm_head.weight: is not in the checkpoint"
    ):
        uc.load(folder, model=net, optimizer=torch.optim.AdamW(net.parameters()))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
)
@pytest.mark.parametrize("keep", [0, 20, 0.5])
def test_a_file_that_ends_early_is_named(folder: Path, file: str, keep: float) -> None:
    body = (folder / file).read_bytes()
    (folder / file).write_bytes(body[: int(keep if keep > 1 or not keep else len(body) * keep)])
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises((uc.FormatError, uc.IntegrityError, uc.IncompleteError), match=file):
        uc.load(folder, model=net)
    check_equal(dict(net.state_dict()), before)


def test_a_save_that_was_cut_off_is_told(folder: Path) -> None:
    (folder / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(uc.IncompleteError, match="was stopped during the save"):
        uc.open(folder)


def test_missing_weights_are_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(uc.IncompleteError, match="no weights found"):
        uc.open(folder)


class Runs:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "pytorch_model.bin"]
)
def test_hostile_pickles_are_refused_by_name_and_not_run(
    folder: Path, tmp_path: Path, file: str
) -> None:
    if file == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    torch.save({"state": {0: Runs(tmp_path / "mark")}, "param_groups": []}, folder / file)
    with (
        pytest.raises(uc.FormatError, match=rf"{file}(.|\n)*posix\.system"),
        uc.open(folder) as source,
    ):
        source.rank_extra[0]
    assert not (tmp_path / "mark").exists()
    torch.save(Runs(tmp_path / "mark"), folder / "training_args.bin")  # is never opened


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            {"state": {5: {}}, "param_groups": [{"params": [0]}]},
            "state that belongs to no param group",
        ),
        ({"state": {}, "param_groups": [{"params": [0, 0]}]}, "occurs twice"),
        ({"state": {}, "param_groups": [{}]}, "expected a list of params"),
        ([], "expected an optimizer state dict"),
    ],
)
def test_what_is_no_optimizers_state_is_refused(folder: Path, told: Any, text: str) -> None:
    torch.save(told, folder / "optimizer.pt")
    with pytest.raises(uc.FormatError, match=text):
        uc.open(folder)


# Accelerate


def job(seed: int) -> tuple[Accelerator, nn.Module, Any, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(net, optimizer, scheduler)


def train(net: nn.Module, optimizer: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        x = torch.randn(8, 6)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("safe", [True, False])
def test_accelerates_folder_goes_on_bit_for_bit(tmp_path: Path, safe: bool) -> None:
    accelerator, net, optimizer, _ = job(0)
    train(net, optimizer, 3)
    accelerator.save_state(str(tmp_path / "c"), safe_serialization=safe)
    expected = train(net, optimizer, 3)
    _, other, fresh, scheduler = job(1)
    report = uc.load(
        tmp_path / "c", model=other, optimizer=fresh.optimizer, rank_extra=RandomStates()
    )
    scheduler.scheduler.load_state_dict(report.extra["scheduler"])
    assert train(other, fresh, 3) == expected
    with uc.open(tmp_path / "c") as source:
        assert source.format == "accelerate"
        if safe:  # such a file has lost the order of its tensors
            with pytest.raises(uc.FormatError, match="by position"):
                list(source["optimizer"])


def test_a_compiled_model_has_its_plain_names(tmp_path: Path) -> None:
    net = torch.compile(nn.Linear(3, 2), backend="eager")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(str(tmp_path / "c"))
    assert sorted(load_file(tmp_path / "c" / "model.safetensors")) == [
        "_orig_mod.bias",
        "_orig_mod.weight",
    ]
    with uc.open(tmp_path / "c") as source:
        assert list(source["model"]) == ["bias", "weight"]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Accelerator, list[nn.Module], list[Any]]:
        torch.manual_seed(seed)
        nets: list[nn.Module] = [nn.Linear(3, 2), nn.Linear(2, 4)]
        optimizers = [
            torch.optim.AdamW(net.parameters(), lr=0.1 * (i + 1)) for i, net in enumerate(nets)
        ]
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(*nets, *optimizers)
        return accelerator, list(prepared[:2]), list(prepared[2:])

    accelerator, nets, optimizers = made(0)
    nets[1](nets[0](torch.randn(5, 3))).square().sum().backward()
    for one in optimizers:
        one.step()
    accelerator.save_state(str(tmp_path / "c"))
    _, others, fresh = made(1)
    uc.load(
        tmp_path / "c",
        model=others[0],
        parts={"model_1": others[1]},
        optimizer=[one.optimizer for one in fresh],
    )
    for net, other, optimizer, new in zip(nets, others, optimizers, fresh, strict=True):
        check_equal(dict(other.state_dict()), dict(net.state_dict()))
        check_equal(state_of(other, new.optimizer), state_of(net, optimizer.optimizer))
    assert [one.param_groups[0]["lr"] for one in fresh] == [0.1, 0.2]


def save_sharded(
    folder: Path, number: int, net: nn.Module, optimizer: torch.optim.Optimizer, form: str
) -> None:
    """Model and optimizer of this number as Accelerate has them under FSDP: folders, or files of
    one rank.
    """
    weights, state = get_state_dict(net, optimizer)
    for name, told in (
        (f"pytorch_model_fsdp_{number}", {"model": weights}),
        (f"optimizer_{number}", {"optimizer": state}),
    ):
        if form == "folders":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Saving without distributed", which is meant
                dcp.save(told, checkpoint_id=str(folder / name), no_dist=True)
        else:
            (inner,) = told.values()
            torch.save(inner, folder / f"{name}_rank0.bin")


@pytest.mark.parametrize("pattern", ["pytorch_model_fsdp_*", "optimizer_*", "random_states_*"])
def test_numbered_files_swapped(tmp_path: Path, pattern: str) -> None:
    """Of two models of one shape, or of two ranks: every name fits, and the values are the other's."""
    for number in range(2):
        net = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        save_sharded(tmp_path, number, net, optimizer, "files")
        torch.save(
            {"torch_manual_seed": torch.get_rng_state()}, tmp_path / f"random_states_{number}.pkl"
        )
    with uc.open(tmp_path) as source:
        assert source.rank_extra[0] is not None
    one, other = sorted(tmp_path.glob(pattern))
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)
    with (
        pytest.raises(
            uc.FormatError, match=rf"{one.name}: was written as {other.name}, so files were swapped"
        ),
        uc.open(tmp_path) as source,
    ):
        source.rank_extra[0]


@pytest.mark.parametrize("form", ["folders", "files"])
def test_several_sharded_models_and_optimizers(tmp_path: Path, form: str) -> None:
    """Symptom: the state of the second optimizer in place of the first one's, whose parameters have
    the same names.
    """

    def made(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        nets: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
        return nets, [
            torch.optim.AdamW(net.parameters(), lr=0.1 * (i + 1)) for i, net in enumerate(nets)
        ]

    nets, optimizers = made(0)
    nets[1](nets[0](torch.randn(5, 3))).square().sum().backward()
    (tmp_path / "c").mkdir()
    for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        optimizer.step()
        save_sharded(tmp_path / "c", number, net, optimizer, form)
    uc.convert(tmp_path / "c", tmp_path / "ours")
    for path in (tmp_path / "c", tmp_path / "ours"):
        others, fresh = made(1)
        uc.load(path, model=others[0], parts={"model_1": others[1]}, optimizer=fresh)
        for net, other, optimizer, new in zip(nets, others, optimizers, fresh, strict=True):
            check_equal(dict(other.state_dict()), dict(net.state_dict()))
            check_equal(state_of(other, new), state_of(net, optimizer))
        assert [one.param_groups[0]["lr"] for one in fresh] == [0.1, 0.2]


def test_two_optimizers_of_one_name_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    for number in range(2):
        save_sharded(tmp_path, number, net, optimizer, "folders")
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_1")
    with pytest.raises(
        uc.FormatError,
        match=r"optimizer_1: another optimizer also has state of these parameters",
    ):
        uc.open(tmp_path)


def test_experts_that_are_stacked_in_memory(tmp_path: Path) -> None:
    """The folder has the hub's names, the optimizer the model's own: one load fills both, and a
    conversion would mix them.
    """
    made = trainer(tmp_path, stock=True, net=mixtral(), max_steps=1, save_steps=1)
    made.train()
    folder, net = tmp_path / "checkpoint-1", mixtral()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(net.parameters())
    with open_model_names(folder, model=net) as source:
        report = uc.load(source, model=net, optimizer=optimizer)
    assert report.step == 1
    assert report.rank_extra is not None
    check_equal(dict(net.state_dict()), dict(made.model.state_dict()))
    check_equal(state_of(net, optimizer), state_of(made.model, plain(made)))
    with pytest.raises(
        uc.FormatError, match=r"has other names or shapes for these parameters(.|\n)*experts"
    ):
        uc.convert(folder, tmp_path / "ours")


# converted


def test_a_converted_checkpoint_is_resumed_as_if_the_callback_had_written_it(
    stock: tuple[Trainer, Path], tmp_path: Path
) -> None:
    told = {"weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    straight = trainer(tmp_path / "straight", stock=True, save_strategy="no", **told)
    straight.train()
    report = uc.convert(stock[1], tmp_path / "run" / "checkpoint-4")
    assert (report.format, report.step, report.tensors) == (
        "trainer",
        4,
        {"model": 21, "optimizer": 63},
    )
    assert uc.verify(tmp_path / "run" / "checkpoint-4", deep=True).ok
    resumed = trainer(tmp_path / "run", **told)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
    check_equal(
        dict(LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4").state_dict()),
        dict(stock[0].model.state_dict()),
    )


def test_one_of_ours_that_lost_its_manifest_is_no_trainers(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "unified_checkpoint.json").unlink()
    with pytest.raises(uc.FormatError, match="is an unfinished save"):
        uc.open(tmp_path / "checkpoint-2")


def test_an_optimizer_without_names_is_not_converted_nor_left_out(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(uc.FormatError, match=r"by position(.|\n)*pass an optimizer"):
        uc.convert(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()

"""Checkpoints of the native Trainer and of Accelerate: read, resumed from, refused if ambiguous."""

from __future__ import annotations

import json
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
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.foreign.expert_models import mixtral
from tests.support.integrations.trainers import StopAt, check_same, model, trainer
from tests.support.torch_training import state_of, train
from unified_ckpt.cli.main import main
from unified_ckpt.runtime.torch_state.rng import RandomStates

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def native_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """Train four steps with the native Trainer; return it and its checkpoint."""
    out = tmp_path_factory.mktemp("native")
    trained = trainer(out, StopAt(4), native=True, weight_decay=0.1, lr_scheduler_type="cosine")
    trained.train()
    return trained, out / "checkpoint-4"


@pytest.fixture
def folder(native_run: tuple[Trainer, Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    shutil.copytree(native_run[1], tmp_path / "checkpoint-4")
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


def plain(trained: Trainer) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = trained.optimizer.optimizer  # type: ignore[union-attr]
    return optimizer


def test_weights_and_optimizer_match_the_trainer(native_run: tuple[Trainer, Path]) -> None:
    trained, folder = native_run
    with uc.open(folder) as source:
        assert (source.format, source.parts, source.step) == ("trainer", ("model", "optimizer"), 4)
        check_equal(
            {name: view[...] for name, view in source["model"].items()},
            dict(trained.model.state_dict()),
        )
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(trained.model, plain(trained)),
        )
        decayed, rest = source.source.metadata().groups
        assert decayed["options"]["weight_decay"] == 0.1
        assert decayed["options"]["lr"] == plain(trained).param_groups[0]["lr"]
        assert "model.layers.0.input_layernorm.weight" in rest["names"]
        assert source.extra["scheduler"]["last_epoch"] == 4
        assert source.extra["trainer_state"]["global_step"] == 4
        rng_state = torch.load(folder / "rng_state.pth", weights_only=False)
        assert torch.equal(source.rank_extra[0]["torch"], rng_state["cpu"])


def test_next_save_is_unified_with_same_names(
    native_run: tuple[Trainer, Path], tmp_path: Path
) -> None:
    folder = native_run[1]
    net = model()
    decayed, rest = (
        [net.get_parameter(name) for name in group] for group in names_of_groups(folder)
    )
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}])
    report = uc.load(folder, model=net, optimizer=optimizer, rank_extra=RandomStates())
    rng_state = torch.load(folder / "rng_state.pth", weights_only=False)
    assert torch.equal(torch.get_rng_state(), rng_state["cpu"])
    assert random.getstate() == rng_state["python"]
    uc.save(tmp_path / "ours", model=net, optimizer=optimizer, step=report.step)
    assert main(["diff", str(folder), str(tmp_path / "ours")]) == 0
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def names_of_groups(folder: Path) -> list[list[str]]:
    with uc.open(folder) as source:
        return [list(group["names"]) for group in source.source.metadata().groups]


def test_permuted_optimizer_is_refused(
    native_run: tuple[Trainer, Path],
) -> None:
    """Layers of equal shapes are swapped, which torch's load_state_dict accepts silently."""
    net, groups = model(), names_of_groups(native_run[1])
    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    swapped = [
        [re.sub("layers.[01]", lambda match: other[match[0]], name) for name in group]
        for group in groups
    ]
    optimizer = torch.optim.AdamW(
        [{"params": [net.get_parameter(name) for name in group]} for group in swapped]
    )
    with pytest.raises(
        uc.FormatError,
        match=r"two orders fit: the target optimizer has .*layers.1.* where .* has .*layers.0",
    ):
        uc.load(native_run[1], model=net, optimizer=optimizer)
    source = uc.SourceOptions(optimizer_order=tuple(map(tuple, groups)))
    uc.load(
        native_run[1],
        model=net,
        optimizer=optimizer,
        options=uc.LoadOptions(source=source, hyperparameters="current"),
    )
    check_equal(state_of(net, optimizer), state_of(native_run[0].model, plain(native_run[0])))


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
def test_wrong_order_is_refused(
    native_run: tuple[Trainer, Path], change: Callable[..., Any], text: str
) -> None:
    order = tuple(map(tuple, change(names_of_groups(native_run[1]))))
    with (
        uc.open(native_run[1], options=uc.SourceOptions(optimizer_order=order)) as source,
        pytest.raises(uc.FormatError, match=text),
    ):
        list(source["optimizer"])


def edit_config(**change: Any) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return act


def store(content: Any) -> Callable[[Path], object]:
    return lambda folder: torch.save(content, folder / "optimizer.pt")


BROKEN = r"config.json: transformers .* cannot build a model from it: \w+"
NO_CLASS = r"config.json: (got architectures|transformers .* cannot build a model)"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"by position(.|\n)*no config.json(.|\n)*pass an optimizer",
    ),
    "another model": (
        lambda folder: llama(
            num_hidden_layers=3, architectures=["LlamaForCausalLM"]
        ).save_pretrained(folder),
        r"has other names or shapes for these parameters(.|\n)*layers.2",
    ),
    "no heads": (edit_config(num_attention_heads=0), BROKEN),
    "no activation": (edit_config(hidden_act="none"), BROKEN),
    "layers by name": (edit_config(num_hidden_layers="x"), BROKEN),
    **{
        f"architecture {name}": (edit_config(architectures=[name]), NO_CLASS)
        for name in ("pipeline", "Trainer", "AutoModel", "logging", 7)
    },
    "interrupted": (
        lambda folder: (folder / "checkpoint-is-incomplete.txt").touch(),
        "was stopped during the save",
    ),
    "state of no group": (
        store({"state": {5: {}}, "param_groups": [{"params": [0]}]}),
        "state that belongs to no param group",
    ),
    "a parameter twice": (
        store({"state": {}, "param_groups": [{"params": [0, 0]}]}),
        "occurs twice",
    ),
    "no params": (store({"state": {}, "param_groups": [{}]}), "expected a list of params"),
    "no state dict": (store([]), "expected an optimizer state dict"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder_is_refused(folder: Path, case: str) -> None:
    damage, text = DAMAGE[case]
    damage(folder)
    with pytest.raises(uc.CheckpointError, match=text), uc.open(folder) as source:
        list(source["optimizer"])


@pytest.mark.parametrize("case", ["no config", "no heads"])
def test_target_optimizer_gives_order_without_config(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    groups, net = names_of_groups(folder), model()
    DAMAGE[case][0](folder)
    with pytest.raises(uc.FormatError, match=r"by position(.|\n)*pass an optimizer"):
        uc.convert(folder, folder.parent / "ours")
    assert not (folder.parent / "ours").exists()
    uc.load(folder, model=net)
    optimizer = torch.optim.AdamW(
        [{"params": [net.get_parameter(name) for name in group]} for group in groups]
    )
    uc.load(folder, model=net, optimizer=optimizer)
    assert len(optimizer.state) == 21
    assert main(["inspect", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "model  21 tensors" in output
    assert "optimizer state is stored by position; --config PATH names its parameters" in output
    assert main(["inspect", "--json", "--config", str(folder), str(folder)]) == 0
    assert "config.json" in json.loads(capsys.readouterr().out)["unreadable"]["optimizer"]
    with pytest.raises(
        uc.FormatError,
        match=r"the target optimizer: got 1 param group\(s\), expected 2",
    ):
        uc.load(folder, model=net, optimizer=torch.optim.AdamW(net.parameters()))


def test_frozen_embeddings_and_frozen_layers(tmp_path: Path) -> None:
    net = model()
    net.model.embed_tokens.requires_grad_(False)
    net.lm_head.requires_grad_(False)
    trained = trainer(tmp_path / "a", native=True, net=net, max_steps=1, save_steps=1)
    trained.train()
    with uc.open(tmp_path / "a" / "checkpoint-1") as source:
        check_equal(
            {name: view[...] for name, view in source["optimizer"].items()},
            state_of(trained.model, plain(trained)),
        )
    net = model()
    net.model.layers[0].requires_grad_(False)
    trainer(tmp_path / "b", native=True, net=net, max_steps=1, save_steps=1).train()
    with (
        uc.open(tmp_path / "b" / "checkpoint-1") as source,
        pytest.raises(uc.FormatError, match="shapes do not identify them"),
    ):
        list(source["optimizer"])


def test_tied_weights_and_adafactor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = llama(num_hidden_layers=1, tie_word_embeddings=True)
    trained = trainer(
        tmp_path,
        native=True,
        net=LlamaForCausalLM(config),
        max_steps=1,
        save_steps=1,
        optim="adafactor",
    )
    trained.train()
    with uc.open(tmp_path / "checkpoint-1") as source:
        tensors = {name: view[...] for name, view in source["optimizer"].items()}
        check_equal(tensors, state_of(trained.model, plain(trained)))
        assert "lm_head.weight" not in source["model"]
    net = LlamaForCausalLM(config)
    uc.load(tmp_path / "checkpoint-1", model=net)
    assert torch.equal(net.lm_head.weight, trained.model.lm_head.weight)


def test_missing_optimizer_is_a_mismatch(folder: Path) -> None:
    """The native Trainer silently resumes with an empty optimizer."""
    (folder / "optimizer.pt").unlink()
    net = model()
    with pytest.raises(
        uc.MismatchError, match=r"optimizer:lm_head.weight: is not in the checkpoint"
    ):
        uc.load(folder, model=net, optimizer=torch.optim.AdamW(net.parameters()))


# Accelerate


def job(seed: int) -> tuple[Accelerator, nn.Module, Any, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = Accelerator(cpu=True)
    return accelerator, *accelerator.prepare(net, optimizer, scheduler)


def sum_loss(net: nn.Module, _: torch.Generator) -> torch.Tensor:
    """Of samples that depend on the process's random state, which is restored."""
    x = torch.randn(8, 6)
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_folder_resumes_bitwise(tmp_path: Path, safe: bool) -> None:
    accelerator, net, optimizer, _ = job(0)
    train(net, optimizer, sum_loss, 0, 3)
    accelerator.register_for_checkpointing(torch.optim.SGD(net.parameters()))
    accelerator.save_state(str(tmp_path / "c"), safe_serialization=safe)
    expected = train(net, optimizer, sum_loss, 0, 3)
    _, other, fresh, scheduler = job(1)
    report = uc.load(
        tmp_path / "c", model=other, optimizer=fresh.optimizer, rank_extra=RandomStates()
    )
    scheduler.scheduler.load_state_dict(report.extra["scheduler"])
    assert train(other, fresh, sum_loss, 0, 3) == expected
    with uc.open(tmp_path / "c") as source:
        assert source.format == "accelerate"
        assert source.source.metadata().left_out == ["custom_checkpoint_0.pkl"]
        if safe:  # safetensors files do not keep the order of tensors
            with pytest.raises(uc.FormatError, match="by position"):
                list(source["optimizer"])


def test_compiled_model_has_plain_names(tmp_path: Path) -> None:
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


def save_sharded(
    folder: Path, number: int, net: nn.Module, optimizer: torch.optim.Optimizer, form: str
) -> None:
    """Save model and optimizer as Accelerate does under FSDP: as folders, or files of one rank."""
    weights, state = get_state_dict(net, optimizer)
    for name, state_dict in (
        (f"pytorch_model_fsdp_{number}", {"model": weights}),
        (f"optimizer_{number}", {"optimizer": state}),
    ):
        if form == "folders":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Saving without distributed" is intended
                dcp.save(state_dict, checkpoint_id=str(folder / name))
        else:
            (inner,) = state_dict.values()
            torch.save(inner, folder / f"{name}_rank0.bin")


@pytest.mark.parametrize("pattern", ["pytorch_model_fsdp_*", "optimizer_*", "random_states_*"])
def test_swapped_numbered_files_are_refused(tmp_path: Path, pattern: str) -> None:
    """Of two equal models, or two ranks: every name fits, but the values are wrong."""
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
    first, second = sorted(tmp_path.glob(pattern))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    with (
        pytest.raises(
            uc.FormatError,
            match=rf"{first.name}: was written as {second.name}, so files were swapped",
        ),
        uc.open(tmp_path) as source,
    ):
        source.rank_extra[0]


@pytest.mark.parametrize("form", ["folders", "files", "states"])
def test_several_models_and_optimizers(tmp_path: Path, form: str) -> None:
    """Once, the second optimizer's state replaced that of the first under the same names."""

    def create(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        nets: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
        return nets, [
            torch.optim.AdamW(net.parameters(), lr=0.1 * (i + 1)) for i, net in enumerate(nets)
        ]

    nets, optimizers = create(0)
    nets[1](nets[0](torch.randn(5, 3))).square().sum().backward()
    (tmp_path / "c").mkdir()
    for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        optimizer.step()
        if form != "states":
            save_sharded(tmp_path / "c", number, net, optimizer, form)
    paths = [tmp_path / "c"]
    if form == "states":  # by position, so that a conversion would not know their names
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*nets, *optimizers)
        accelerator.save_state(str(tmp_path / "c"))
    else:
        uc.convert(tmp_path / "c", tmp_path / "ours")
        paths.append(tmp_path / "ours")
    for path in paths:
        others, fresh = create(1)
        uc.load(path, model=others[0], parts={"model_1": others[1]}, optimizer=fresh)
        for net, other, optimizer, new in zip(nets, others, optimizers, fresh, strict=True):
            check_equal(dict(other.state_dict()), dict(net.state_dict()))
            check_equal(state_of(other, new), state_of(net, optimizer))
        assert [prepared.param_groups[0]["lr"] for prepared in fresh] == [0.1, 0.2]


def test_optimizers_with_equal_names_are_refused(tmp_path: Path) -> None:
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


def test_experts_stacked_in_memory(tmp_path: Path) -> None:
    """The folder has hub names, the optimizer the model's names: loads and conversions map them."""
    trained = trainer(tmp_path / "run", native=True, net=mixtral(), max_steps=1, save_steps=1)
    trained.train()
    folder = tmp_path / "run" / "checkpoint-1"
    converted = uc.convert(folder, tmp_path / "ours")
    assert converted.tensors["optimizer"] == 3 * converted.tensors["model"]
    with uc.open(tmp_path / "ours") as opened:
        assert set(opened["model"]) == trained.model.state_dict().keys()

    def manage(net: nn.Module, optimizer: torch.optim.Optimizer) -> uc.LoadReport:
        with uc.CheckpointManager(tmp_path / "run") as manager:
            report = manager.restore(model=net, optimizer=optimizer)
        assert report is not None
        return report

    loads = [
        lambda net, optimizer: uc.load(folder, model=net, optimizer=optimizer),
        lambda net, optimizer: uc.load(folder, model=nn.DataParallel(net), optimizer=optimizer),
        lambda net, optimizer: uc.load(tmp_path / "ours", model=net, optimizer=optimizer),
        manage,
    ]
    for load in loads:
        net = mixtral()
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(net.parameters())
        report = load(net, optimizer)
        assert report.step == 1
        assert report.rank_extra is not None
        check_equal(dict(net.state_dict()), dict(trained.model.state_dict()))
        check_equal(state_of(net, optimizer), state_of(trained.model, plain(trained)))


# converted


def test_converted_checkpoint_resumes_like_a_callback_save(
    native_run: tuple[Trainer, Path], tmp_path: Path
) -> None:
    arguments = {"weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    uninterrupted = trainer(tmp_path / "straight", native=True, save_strategy="no", **arguments)
    uninterrupted.train()
    report = uc.convert(native_run[1], tmp_path / "run" / "checkpoint-4")
    assert (report.format, report.step, report.tensors) == (
        "trainer",
        4,
        {"model": 21, "optimizer": 63},
    )
    assert uc.verify(tmp_path / "run" / "checkpoint-4", deep=True).ok
    resumed = trainer(tmp_path / "run", **arguments)
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, uninterrupted)
    check_equal(
        dict(LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4").state_dict()),
        dict(native_run[0].model.state_dict()),
    )


def test_our_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "unified_checkpoint.json").unlink()
    with pytest.raises(uc.FormatError, match="is an unfinished save"):
        uc.open(tmp_path / "checkpoint-2")

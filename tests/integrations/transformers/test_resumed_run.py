"""A Trainer resumes what the engine loads, whoever saved it: losses equal those of the run that was
not interrupted, and folders stay as they are.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import unified_ckpt as uc
from tests.foreign import conformance_frameworks
from tests.support.foreign import megatron_models, paddleformers
from tests.support.foreign.dcp_folders import save_dcp
from tests.support.foreign.paddles import FIXTURES, copied, llama
from tests.support.foreign.source_cases import Case
from tests.support.integrations.trainers import STEPS as LAST
from tests.support.integrations.trainers import At, losses, model, trainer
from tests.support.torch_training import small_net
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

pytestmark = pytest.mark.integration

STEP = 3
ARGUMENTS: dict[str, Any] = {"learning_rate": 0.01, "lr_scheduler_type": "cosine"}


def without_dropout() -> LlamaForCausalLM:
    """Formats without random states then continue bit for bit too."""
    net = model()
    for layer in net.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return net


def save_unified(run: Trainer, root: Path) -> Path:
    path = root / "last"
    uc.save(
        path,
        model=run.model,
        optimizer=run.optimizer.optimizer,
        step=STEP,
        extra={"lr": {"schedule": run.lr_scheduler}},
        rank_extra={"random": uc.RandomStates()},
    )
    return path


def save_managed(run: Trainer, root: Path) -> Path:
    with uc.CheckpointManager(root) as manager:
        manager.save(
            STEP,
            force=True,
            model=run.model,
            optimizer=run.optimizer.optimizer,
            extra={"scheduler": run.lr_scheduler},
        )
    return root / f"checkpoint-{STEP}"


def save_bare(run: Trainer, root: Path) -> Path:
    """Neither schedule nor step: the schedule is the current one at the optimizer's count."""
    uc.save(root / "last", model=run.model, optimizer=run.optimizer.optimizer)
    return root / "last"


def state_dicts(run: Trainer) -> dict[str, Any]:
    model_state, optimizer_state = run.model.state_dict(), run.optimizer.optimizer.state_dict()
    return {"model": model_state, "optimizer": optimizer_state}


def save_torch(run: Trainer, root: Path) -> Path:
    schedule = run.lr_scheduler.state_dict()
    torch.save({**state_dicts(run), "scheduler": schedule, "step": STEP}, root / "last.pt")
    return root / "last.pt"


def save_lightning(run: Trainer, root: Path) -> Path:
    states = state_dicts(run)
    content = {
        "state_dict": states["model"],
        "optimizer_states": [states["optimizer"]],
        "lr_schedulers": [run.lr_scheduler.state_dict()],
        "pytorch-lightning_version": "2.6.0",
        "epoch": 0,
        "global_step": STEP,
    }
    torch.save(content, root / "last.ckpt")
    return root / "last.ckpt"


def save_distributed(run: Trainer, root: Path) -> Path:
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer.optimizer)
    schedule = run.lr_scheduler.state_dict()
    state = {"model": model_state, "optimizer": optimizer_state, "lr_scheduler": schedule}
    return save_dcp({**state, "train_state": {"step": STEP}}, root / f"step-{STEP}")


def save_accelerate(run: Trainer, root: Path) -> Path:
    run.accelerator.save_state(str(root / "checkpoint_0"))
    return root / "checkpoint_0"


WRITERS: dict[str, Callable[[Trainer, Path], Path]] = {
    "unified": save_unified,
    "managed": save_managed,
    "bare": save_bare,
    "torch": save_torch,
    "Lightning": save_lightning,
    "DCP": save_distributed,
    "Accelerate": save_accelerate,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, dict[str, Path]]:
    """An uninterrupted run, and what was saved after its third step in each format."""
    paths: dict[str, Path] = {}

    def save() -> None:
        for name, write in WRITERS.items():
            paths[name] = write(run, tmp_path_factory.mktemp(name))

    root = tmp_path_factory.mktemp("whole")
    run = trainer(root, At(STEP, save), native=True, net=without_dropout(), **ARGUMENTS)
    run.train()
    return run, paths


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files}


def resumed_line(caplog: pytest.LogCaptureFixture) -> str:
    lines = [line for line in caplog.messages if line.startswith("resumed from")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_continues_the_run(
    whole: tuple[Trainer, dict[str, Path]],
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    straight, paths = whole
    before = contents(paths[name])
    resumed = trainer(tmp_path, net=without_dropout(), **ARGUMENTS)
    with caplog.at_level(logging.INFO, logger="unified_ckpt"):
        resumed.train(resume_from_checkpoint=str(paths[name]))
    assert losses(resumed) == losses(straight)[STEP:]
    rates = [entry["learning_rate"] for entry in straight.state.log_history if "loss" in entry]
    assert [
        entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry
    ] == rates[STEP:]
    check_same_weights(resumed, straight)
    assert resumed.state.global_step == LAST
    assert contents(paths[name]) == before
    assert f"): step {STEP}" in resumed_line(caplog)
    # DCP drops the empty states of the Trainer's `lr_lambdas`.
    loads_schedule = name not in ("bare", "Accelerate", "DCP")
    schedule = "loaded" if loads_schedule else f"advanced to step {STEP}"
    assert f"schedule: {schedule}" in resumed_line(caplog)


def check_same_weights(actual: Trainer, expected: Trainer) -> None:
    states = actual.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_random_states_in_rank_extra_are_restored(tmp_path: Path) -> None:
    """With dropout, which draws from them."""
    paths = []
    straight = trainer(
        tmp_path / "whole", At(STEP, lambda: paths.append(save_unified(straight, tmp_path)))
    )
    straight.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(paths[0]))
    assert losses(resumed) == losses(straight)[STEP:]
    check_same_weights(resumed, straight)


# ---- other engines


NORM = "model.norm.weight"


def tokens(resumed: Trainer, *, count: int = 64) -> Trainer:
    resumed.train_dataset = [
        {key: value % count for key, value in sample.items()} for sample in resumed.train_dataset
    ]
    return resumed


@pytest.mark.parametrize(
    ("fixture", "samples", "converted"),
    [
        ("single_bf16", 4, False),
        ("single_bf16", 4, True),
        ("half_legacy", None, False),
        ("half_legacy", None, True),
        ("single_unified", 0, False),
        ("sharding2_flex", 4, False),
    ],
)
def test_paddle_resumes_its_weights_state_and_schedule(
    tmp_path: Path,
    fixture: str,
    samples: int | None,
    converted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its `trainer_state.json` has other fields than that of the Trainer."""
    stored, new_model = FIXTURES / fixture, llama
    if not stored.exists():
        stored, new_model = paddleformers.FIXTURES / fixture / "checkpoint-2", paddleformers.llama
    path = stored
    if converted:
        uc.convert(path, tmp_path / "checkpoint-2")
        path = tmp_path / "checkpoint-2"
    before, checked = contents(path), []

    def check() -> None:
        with uc.open(stored) as source:
            for name, parameter in resumed.model.named_parameters():
                state = resumed.optimizer.state[parameter]
                assert torch.equal(parameter, source["master_weights"][name][...])
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(state[key], source["optimizer"][f"{name}/{key}"][...])
        checked.append(resumed.state.global_step)

    at_start = At(2, check, method="on_train_begin")
    arguments: dict[str, Any] = {"learning_rate": 0.6}
    count = new_model().config.vocab_size
    resumed = tokens(trainer(tmp_path / "run", at_start, net=new_model(), **arguments), count=count)
    with caplog.at_level(logging.INFO, logger="unified_ckpt"):
        resumed.train(resume_from_checkpoint=str(path))
    assert checked == [2]
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])  # linear from 0.6 to 0 in 6 steps
    assert contents(path) == before
    assert "schedule: advanced to step 2; random states: begin anew" in resumed_line(caplog)
    if samples is not None:
        assert f"data: epoch 0 after {samples} samples" in resumed_line(caplog)
    again = tokens(trainer(tmp_path / "run", net=new_model(), **arguments), count=count)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert losses(again) == losses(resumed)


def megatron(root: Path) -> tuple[Case, Any]:
    kind, job, _ = megatron_models.JOBS["llama"]
    return conformance_frameworks.megatron(root, name="llama"), megatron_models.new_model(kind, job)


def maxtext(root: Path) -> tuple[Case, Any]:
    case = conformance_frameworks.maxtext(root / "case", kind="llama3")
    return case, LlamaForCausalLM(LlamaConfig.from_pretrained(str(case.options.config)))


@pytest.mark.parametrize("write", [megatron, maxtext])
def test_other_engines_resume_their_weights_and_state(
    tmp_path: Path, write: Callable[[Path], tuple[Case, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    case, net = write(tmp_path)
    checked = []

    def check() -> None:
        weights = "master_weights" if ("master_weights", NORM) in case.tensors else "model"
        for name, parameter in resumed.model.named_parameters():
            state = resumed.optimizer.state[parameter]
            assert torch.equal(parameter, case.tensors[weights, name].float())
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], case.tensors["optimizer", f"{name}/{key}"])
        checked.append(resumed.state.global_step)

    callback = UnifiedCheckpointCallback(load_options=uc.LoadOptions(source=case.options))
    at_start = At(7, check, method="on_train_begin")
    arguments: dict[str, Any] = {"learning_rate": 1.0, "max_steps": 9, "native": True}
    resumed = trainer(tmp_path / "run", callback, at_start, net=net.float(), **arguments)
    with caplog.at_level(logging.INFO, logger="unified_ckpt"):
        tokens(resumed, count=net.config.vocab_size).train(resume_from_checkpoint=str(case.path))
    assert checked == [7]
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    assert rates == pytest.approx([2 / 9, 1 / 9])
    assert "step 7" in resumed_line(caplog)
    assert "schedule: advanced to step 7" in resumed_line(caplog)


# ---- True


def test_true_resumes_a_step_of_another_engine(
    whole: tuple[Trainer, dict[str, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight, paths = whole
    shutil.copytree(paths["DCP"], tmp_path / f"step-{STEP}")
    resumed = trainer(tmp_path, net=without_dropout(), save_steps=5, **ARGUMENTS)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)[STEP:]
    assert f"step-{STEP} is of another format (dcp)" in caplog.text
    shutil.rmtree(tmp_path / f"checkpoint-{LAST}")
    again = trainer(tmp_path, net=without_dropout(), **ARGUMENTS)
    again.train(resume_from_checkpoint=True)  # the run's own step
    assert losses(again) == losses(straight)[STEP:]


def test_true_names_what_is_no_step(whole: tuple[Trainer, dict[str, Path]], tmp_path: Path) -> None:
    shutil.copytree(whole[1]["unified"], tmp_path / "best")
    with pytest.raises(
        uc.IncompleteError, match=r"none of its checkpoints can be resumed.*\n  best"
    ):
        trainer(tmp_path, net=without_dropout()).train(resume_from_checkpoint=True)


def test_true_refuses_a_root_that_is_a_checkpoint(
    whole: tuple[Trainer, dict[str, Path]], tmp_path: Path
) -> None:
    shutil.copytree(whole[1]["DCP"], tmp_path, dirs_exist_ok=True)
    with pytest.raises(uc.IncompleteError, match="the folder itself is a checkpoint of torch"):
        trainer(tmp_path, net=without_dropout()).train(resume_from_checkpoint=True)


# ---- weights alone, and the stock Trainer's own


def test_weights_alone_continue_at_their_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp = save_dcp({"model": model().state_dict()}, tmp_path / "step-2")
    trainer(tmp_path / "stock", native=True, max_steps=2, save_only_model=True).train()
    trainer(tmp_path / "full", native=True, max_steps=2).train()
    for path in (dcp, tmp_path / "stock" / "checkpoint-2", tmp_path / "full" / "checkpoint-2"):
        caplog.clear()
        resumed = trainer(tmp_path / "run", max_steps=3, save_strategy="no")
        with caplog.at_level(logging.INFO, logger="unified_ckpt"):
            resumed.train(resume_from_checkpoint=str(path))
        assert resumed.state.global_step == 3
        texts = [text for text in caplog.messages if text.startswith(f"{path}: got only weights")]
        assert len(texts) == ("full" not in str(path))
        assert texts or f"resumed from {path} (Hugging Face Trainer): step 2" in resumed_line(
            caplog
        )


# ---- refused


def damaged(root: Path) -> Path:
    path = copied("single_bf16", root / "checkpoint-2")
    next(path.glob("optimizer-*.safetensors")).write_bytes(b"\1" * 20)
    return path


def without_step(root: Path) -> Path:
    net = llama()
    uc.save(root / "last", model=net, optimizer=torch.optim.SGD(net.parameters()))
    return root / "last"


def hub_folder(root: Path) -> Path:
    llama().save_pretrained(root / "hub")
    return root / "hub"


def more_precise_masters(root: Path) -> Path:
    net = llama().bfloat16()
    masters = {name: tensor.detach().float() for name, tensor in net.named_parameters()}
    uc.save(
        root / "step-1",
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        master_weights=masters,
        step=1,
    )
    return root / "step-1"


def another_model(root: Path) -> Path:
    net, optimizer = small_net("plain")
    uc.save(root / "step-1", model=net, optimizer=optimizer, step=1)
    return root / "step-1"


def another_optimizer(root: Path) -> Path:
    net = llama()
    sgd = torch.optim.SGD(net.parameters(), momentum=0.9)
    net(**{name: torch.ones(1, 2, dtype=torch.long) for name in ("input_ids", "labels")})[
        "loss"
    ].backward()
    sgd.step()
    uc.save(root / "step-1", model=net, optimizer=sgd, step=1)
    return root / "step-1"


@pytest.mark.parametrize(
    ("write", "error", "match"),
    [
        (damaged, uc.FormatError, "optimizer-00001-of-00001.safetensors"),
        (without_step, uc.MismatchError, "got no step, expected one; save it with step="),
        (hub_folder, uc.MismatchError, "got no step, expected one; save it with step="),
        (more_precise_masters, uc.MismatchError, "got master weights, which are more precise"),
        (another_model, uc.MismatchError, "got a checkpoint of another model"),
        (another_optimizer, uc.MismatchError, "got other optimizer state; use the same `optim`"),
    ],
)
def test_refused_checkpoint_changes_nothing(
    tmp_path: Path, write: Callable[[Path], Path], error: type[Exception], match: str
) -> None:
    path = write(tmp_path)
    net = llama().bfloat16() if write is more_precise_masters else llama()
    resumed = tokens(trainer(tmp_path / "run", net=net))
    before = {name: tensor.clone() for name, tensor in resumed.model.state_dict().items()}
    with pytest.raises(error, match=match):
        resumed.train(resume_from_checkpoint=str(path))
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in resumed.model.state_dict().items()
    )
    assert not list((tmp_path / "run").glob("*checkpoint-*"))

"""Every part and value of a checkpoint is found again in an export, or named in `left_out`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.paddles import llama
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.torch_training import train_step
from unified_ckpt.foreign.export.convert import FORMATS
from unified_ckpt.foreign.paddle.export.trainer_files import PADDLE_FORMATS
from unified_ckpt.runtime.comm.comm import Comm

STEP = 7
TRAINER_STATE = {"epoch": 0.5, "global_step": STEP, "max_steps": 9, "stateful_callbacks": {}}


class StatefulNorm(torch.nn.Module):
    """A norm with state that is not a tensor; names and shapes are those of a Llama's."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint with all kinds of state, one with those that PaddleNLP accepts, and a model.

    Two ranks save, whose schedulers differ.
    """
    root = tmp_path_factory.mktemp("unwritten")
    torch.manual_seed(0)
    model = llama()
    model.model.norm = StatefulNorm(model.model.norm)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    train_step(optimizer)
    ema = {name: tensor.detach() * 2 for name, tensor in model.named_parameters()}

    def attach(folder: str) -> None:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for name, parts in (("all", {"ema": ema}), ("without parts", {})):
                checkpointer.save(
                    root / name,
                    model=model,
                    optimizer=optimizer,
                    parts=parts,
                    step=STEP,
                    metrics={"loss": 0.5},
                    extra={"scheduler": {"last": comm.rank}, "trainer_state": TRAINER_STATE},
                    rank_extra={"seed": comm.rank},
                    attach=attach,
                    options=uc.SaveOptions(model_dtype="bfloat16", fsync=False),
                )

    run_ranks(2, act)
    options = uc.SaveOptions(fsync=False)
    uc.save(root / "model", model=llama(), attach=attach, options=options)
    return {path.name: path for path in root.iterdir()}


def contents(path: Path, config: Path | None = None) -> dict[str, Any]:
    """Return what `uc.open` finds: parts, and values beside tensors by the names of reports."""
    with uc.open(path, options=uc.SourceOptions(config=config)) as opened:
        metadata = opened.source.metadata()
        values: dict[str, Any] = {
            part: {name: view[...] for name, view in opened[part].items()} for part in opened
        }
        fields: dict[str, Any] = {
            "step": opened.step,
            "rank_extra": list(opened.rank_extra),
            "param_groups": [dict(group["options"]) for group in metadata.groups],
            "modules": dict(metadata.modules),
            "metrics": dict(metadata.metrics),
            **{f"extra:{key}": value for key, value in (opened.extra or {}).items()},
        }
        values |= {name: value for name, value in fields.items() if value}
        if metadata.rank_values is not None:
            values |= {f"{name} of each rank": True for name in metadata.rank_values.names}
    if (
        config is not None and path.is_dir()
    ):  # files of MaxText's names without a manifest, of which the model is opened
        values = {file.name.partition(".")[0]: {} for file in path.glob("*.safetensors")} | values
    return values


def lost(expected: dict[str, Any], actual: dict[str, Any], to: str) -> Iterator[str]:
    """Yield the names that the export lacks. MaxText has other names and scales queries. Orbax
    stores the masters as its model.
    """
    rtol = 1e-6 if to == "orbax" else 0.0
    for name, value in expected.items():
        new_name = "model" if to == "orbax" and name == "master_weights" else name
        if to == "orbax" and name == "model":
            continue
        if to == "maxtext" and isinstance(value, dict) and new_name in actual:
            continue
        if isinstance(value, dict) and name in ("model", "master_weights", "optimizer", "ema"):
            tensors = actual.get(new_name, {})
            if any(
                key not in tensors
                or not torch.allclose(
                    tensors[key].flatten(), tensor.flatten(), rtol=rtol, atol=rtol
                )
                for key, tensor in value.items()
            ):
                yield name
        elif actual.get(name) != value:
            yield name


@pytest.mark.parametrize("to", [name for name in FORMATS if name != "peft"])
def test_all_that_an_export_lacks_is_named(
    folders: dict[str, Path], tmp_path: Path, to: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = folders["without parts" if to in ("paddle", "paddleformers") else "all"]
    target = tmp_path / ("new.pt" if to == "torch" else "new")
    report = uc.convert(source, target, to=to)
    missing = set(lost(contents(source), contents(target, source), to))
    if "optimizer" in missing:  # it has the groups
        missing -= {"param_groups"}
    if to in PADDLE_FORMATS:  # a part of it
        missing -= {"extra:trainer_state"}
        assert "extra:trainer_state.stateful_callbacks" in report.left_out
    files = {entry.name for entry in source.iterdir()} | {"trainer_state.json"}
    named = {name for name in report.left_out if name not in files}
    assert missing <= named
    assert named - missing <= {"extra:trainer_state.stateful_callbacks"}, "these are there"
    if to not in ("unified", "huggingface"):
        assert all(name in caplog.text for name in missing)


@pytest.mark.parametrize("to", [name for name in FORMATS if name != "peft"])
def test_an_export_of_a_model_lacks_nothing(
    folders: dict[str, Path], tmp_path: Path, to: str
) -> None:
    target = tmp_path / ("new.pt" if to == "torch" else "new")
    report = uc.convert(folders["model"], target, to=to)
    assert set(report.left_out) <= {"config.json"}
    assert report.notes == ()


def test_paddle_resumes_at_the_step(folders: dict[str, Path], tmp_path: Path) -> None:
    """PaddleNLP's Trainer reads `global_step`, and refuses keys that it does not know."""
    uc.convert(folders["without parts"], tmp_path / "new", to="paddle")
    state = json.loads((tmp_path / "new" / "trainer_state.json").read_text())
    assert state == {key: TRAINER_STATE[key] for key in ("epoch", "global_step", "max_steps")}
    with uc.open(tmp_path / "new") as opened:
        assert opened.step == STEP

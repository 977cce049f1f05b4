"""Unified Checkpoints of PaddleFormers: its own files are reproduced bytewise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign.paddleformers import FIXTURES, HEAD, copied
from tests.support.foreign.paddles import llama
from unified_ckpt.foreign.paddle.lazy_pickles import load_arrays, to_plain
from unified_ckpt.options import SourceOptions

LINEAR = "model.layers.0.mlp.up_proj.weight"
STATE = "paddleformers.trainer.trainer_callback.TrainerState"


def convert(source: Path, target: Path, **options: Any) -> Path:
    uc.convert(source, target, to="paddleformers", fsync=False, **options)
    return target


def trainer_state(folder: Path) -> dict[str, Any]:
    state: Any = load_arrays(str(folder / "trainer_state.bin"), classes=[STATE])
    return dict(state.state)


def test_round_trip_reproduces_the_files_bytewise(tmp_path: Path) -> None:
    """The step of one process, converted to unified and back."""
    expected = FIXTURES / "single_unified" / "checkpoint-2"
    uc.convert(expected, tmp_path / "ours", fsync=False)
    written = convert(tmp_path / "ours", tmp_path / "theirs")
    assert {path.name for path in written.iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.iterdir():
        if path.suffix == ".safetensors":
            assert (written / path.name).read_bytes() == path.read_bytes(), path.name
        elif path.suffix == ".json":
            assert json.loads((written / path.name).read_text()) == json.loads(path.read_text())
    assert trainer_state(written) == trainer_state(expected)
    schedulers = [to_plain(load_arrays(str(f / "scheduler.pdparams"))) for f in (written, expected)]
    assert schedulers[0] == schedulers[1]


def test_a_tied_model_has_both_names_in_every_part(tmp_path: Path) -> None:
    """PaddleFormers reads the optimizer under the first name, and ignores the other."""
    source = copied("single_tied_unified", tmp_path / "c")
    written = convert(source, tmp_path / "theirs")
    for stem in ("model", "master_weights", "optimizer"):
        file = f"{stem}-00001-of-00001.safetensors"
        tensors, original = load_file(written / file), load_file(source / file)
        assert all(same(tensors[name], tensor) for name, tensor in original.items())
        assert any(name.startswith("model.embed_tokens.weight") for name in tensors)
        assert any(name.startswith(HEAD) for name in tensors)


def test_linear_weights_are_transposed_but_in_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama(tied=True)  # whose config says so; others may say nothing
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    save = {"model": model, "optimizer": optimizer, "step": 1}
    uc.save(tmp_path / "ours", **save, attach=model.config.save_pretrained)
    written = convert(tmp_path / "ours", tmp_path / "theirs", model_dtype="bfloat16")
    file = "{}-00001-of-00001.safetensors"
    weight, state = model.get_parameter(LINEAR).detach(), optimizer.state
    moment = state[model.get_parameter(LINEAR)]["exp_avg"]
    assert same(load_file(written / file.format("model"))[LINEAR], weight.bfloat16())
    masters = load_file(written / file.format("master_weights"))
    assert same(masters[LINEAR], weight.bfloat16().float().t().contiguous())
    states = load_file(written / file.format("optimizer"))
    assert same(states[f"{LINEAR}/moment1_0"], moment.t().contiguous())
    index = json.loads((written / "optimizer.safetensors.index.json").read_text())
    assert index["master_weights"] is True
    config = json.loads((written / "config.json").read_text())
    assert (config["torch_dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert trainer_state(written)["global_step"] == 1


def test_several_files_and_quantized_moments_are_refused(tmp_path: Path) -> None:
    """One process of PaddleFormers reads the first file of a part, and not the others."""
    source = FIXTURES / "single_unified" / "checkpoint-2"
    with pytest.raises(uc.FormatError, match="max_file_bytes: got 2000, expected none"):
        convert(source, tmp_path / "theirs", max_file_bytes=2000)
    with pytest.raises(uc.FormatError, match="compression: got 'O1'"):
        convert(source, tmp_path / "theirs", compression="O1")
    assert list(tmp_path.iterdir()) == []


SCHEDULERS: dict[str, tuple[Any, Any]] = {
    "Paddle's": ({"last_epoch": 5, "last_lr": 0.25}, {"last_epoch": 5, "last_lr": 0.25}),
    "torch's": (
        {"last_epoch": 5, "_last_lr": [0.5, 0.5], "base_lrs": [1.0, 1.0]},
        {"last_epoch": 5, "last_lr": 0.5},
    ),
    "of two rates": ({"last_epoch": 5, "_last_lr": [0.5, 0.25]}, None),
    "unknown": ("cosine", None),
}


@pytest.mark.parametrize("case", SCHEDULERS)
def test_the_scheduler_is_written_or_named(tmp_path: Path, case: str) -> None:
    saved, expected = SCHEDULERS[case]
    config = FIXTURES / "single_unified" / "checkpoint-2"
    with uc.open(config) as opened:
        weights = {name: opened["model"][name][...] for name in opened["model"]}
    uc.save(tmp_path / "ours", model=weights, step=7, extra={"scheduler": saved})
    options = {"source": SourceOptions(config=str(config))}
    report = uc.convert(tmp_path / "ours", tmp_path / "theirs", to="paddleformers", **options)
    path = tmp_path / "theirs" / "scheduler.pdparams"
    assert (to_plain(load_arrays(str(path))) if path.exists() else None) == expected
    assert ("extra:scheduler" in report.left_out) == (expected is None)
    assert ("extra:scheduler.base_lrs" in report.left_out) == (case == "torch's")

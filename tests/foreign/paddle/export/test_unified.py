"""PaddleNLP Unified Checkpoints: its own files are reproduced bytewise, others round-trip."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign.paddle_files import changed, rewritten
from tests.support.foreign.paddles import FIXTURES, as_torch, copied, llama, stored
from unified_ckpt.foreign.export.export import export
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.paddle.beta_powers import beta_power
from unified_ckpt.foreign.paddle.export import tensors as paddle_tensors
from unified_ckpt.foreign.paddle.export.unified import write_paddle
from unified_ckpt.options import SourceOptions
from unified_ckpt.views import materialize

FILE = 5_000_000_000


def convert_to_paddle(
    source: Path, target: Path, config: Path, *, max_file_bytes: int = FILE
) -> Path:
    opened = open_source(str(source))
    try:
        options = uc.ConvertOptions(
            to="paddle",
            source=SourceOptions(config=str(config)),
            fsync=False,
            max_file_bytes=max_file_bytes,
        )
        export(opened, str(target), options)
    finally:
        opened.close()
    return target


def parse_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("origin", ["single_bf16", "tp2_nomerge", "tp2_skip"])
def test_round_trip_reproduces_paddle_files_bytewise(tmp_path: Path, origin: str) -> None:
    """PaddleNLP's folder, converted to unified and back, equals the files of one process."""
    expected = FIXTURES / "single_bf16"
    uc.convert(FIXTURES / origin, tmp_path / "ours")
    export = convert_to_paddle(tmp_path / "ours", tmp_path / "theirs", expected)
    names = sorted(
        path.name for path in expected.iterdir() if path.suffix in (".safetensors", ".json")
    )
    assert sorted(path.name for path in export.iterdir()) == names
    for name in names:
        if name.endswith(".safetensors"):
            assert (export / name).read_bytes() == (expected / name).read_bytes(), name
        else:
            assert parse_json(export / name) == parse_json(expected / name), name


def test_a_tied_model_has_both_names_in_every_part(tmp_path: Path) -> None:
    """Several processes of PaddleNLP need both names, though one process writes only lm_head."""
    expected = FIXTURES / "single_tied"
    uc.convert(expected, tmp_path / "ours")
    export = convert_to_paddle(tmp_path / "ours", tmp_path / "theirs", expected)
    assert (export / "model-00001-of-00001.safetensors").read_bytes() == (
        expected / "model-00001-of-00001.safetensors"
    ).read_bytes()
    for stem in ("master_weights", "optimizer"):
        tensors, original = stored(export, stem), stored(expected, stem)
        assert all(same(tensors[name], tensor) for name, tensor in original.items())
        more = {
            name.replace("lm_head", "llama.embed_tokens")
            for name in original
            if name.startswith("lm_head")
        }
        assert tensors.keys() - original.keys() == more
        assert all(
            same(tensors[name], tensors[name.replace("llama.embed_tokens", "lm_head")])
            for name in more
        )


@pytest.mark.parametrize("to", ["paddle", "orbax", "maxtext"])
def test_state_without_a_place_is_named(
    tmp_path: Path, to: str, caplog: pytest.LogCaptureFixture
) -> None:
    uc.convert(FIXTURES / "single_bf16", tmp_path / "ours")
    report = uc.convert(tmp_path / "ours", tmp_path / "new", to=to)
    state = {
        "extra:scheduler",
        "param_groups",
        *(["extra:trainer_state"] if to != "paddle" else []),
    }
    assert {name for name in report.left_out if ":" in name or "param" in name} == state
    assert all(name in caplog.text for name in state)


def test_an_adapter_is_written_as_one(tmp_path: Path) -> None:
    expected = FIXTURES / "lora_tp2"
    uc.convert(expected, tmp_path / "ours")
    export = convert_to_paddle(tmp_path / "ours", tmp_path / "theirs", expected)
    assert parse_json(export / "peft_model.safetensors.index.json")["type"] == "lora"
    assert parse_json(export / "config.json") == parse_json(expected / "config.json")
    for stem in ("peft_model", "optimizer"):
        tensors, original = stored(export, stem), stored(expected, stem)
        assert tensors.keys() == original.keys()
        assert all(same(tensors[name], tensor) for name, tensor in original.items())


def test_file_sizes_are_bounded_and_tensors_chunked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle_tensors, "_CHUNK_NBYTES", 3001)  # not a multiple of any row
    monkeypatch.setattr(materialize, "CHUNK_NBYTES", 2500)
    export = convert_to_paddle(
        FIXTURES / "single_bf16",
        tmp_path / "theirs",
        FIXTURES / "single_bf16",
        max_file_bytes=20_000,
    )
    for stem in ("model-", "master_weights", "optimizer"):
        tensors, original = stored(export, stem), stored(FIXTURES / "single_bf16", stem)
        assert tensors.keys() == original.keys()
        assert all(same(tensors[name], tensor) for name, tensor in original.items())
    files = sorted(path.name for path in export.glob("optimizer-*.safetensors"))
    assert len(files) > 5
    assert files[0] == f"optimizer-00001-of-{len(files):05d}.safetensors"
    assert max(path.stat().st_size for path in export.glob("*.safetensors")) < 30_000


def trained(folder: Path, optimizer_of: Any = torch.optim.AdamW) -> Path:
    torch.manual_seed(0)
    model = llama()
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
    uc.save(folder, model=model, optimizer=optimizer, step=2, attach=model.config.save_pretrained)
    return folder


def test_torch_checkpoint_round_trip(tmp_path: Path) -> None:
    folder = trained(tmp_path / "ours")
    export = convert_to_paddle(folder, tmp_path / "theirs", folder)
    with uc.open(folder) as first, uc.open(export) as second:
        assert second.format == "paddle"
        for part in ("model", "optimizer"):
            assert set(first[part]) == set(second[part])
            assert all(
                same(first[part][name][...], second[part][name][...]) for name in first[part]
            )
        files = stored(export, "model-")
        assert all(
            same(first["model"][name.replace("llama.", "model.")][...], as_torch(name, tensor))
            for name, tensor in files.items()
        )
        powers, of_paddle = (
            stored(export, "optimizer"),
            stored(FIXTURES / "single_bf16", "optimizer"),
        )  # two steps at the same betas
        for power in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
            assert same(
                powers[f"llama.norm.weight/{power}"], of_paddle[f"llama.norm.weight/{power}"]
            )
        assert parse_json(export / "optimizer.safetensors.index.json")["master_weights"] is False


@pytest.mark.parametrize(
    ("optimizer_of", "match"),
    [
        (
            lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True),
            "max_exp_avg_sq: is optimizer state that Paddle does not have",
        ),
        (
            lambda p, lr: torch.optim.Adagrad(p, lr=lr),
            "sum: is optimizer state that Paddle does not have",
        ),
    ],
)
def test_unknown_optimizer_state_is_refused_before_writing(
    tmp_path: Path, optimizer_of: Any, match: str
) -> None:
    folder = trained(tmp_path / "ours", optimizer_of)
    with pytest.raises(uc.FormatError, match=rf"has no place for(.|\n)*{match}"):
        convert_to_paddle(folder, tmp_path / "theirs", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


ZEROS = torch.zeros(32)
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown layer": (
        {"model": {"mixer.weight": torch.zeros(4, 4)}},
        r"mixer.weight: got shape \(4, 4\) of an unknown layer",
    ),
    "another part": (
        {"model": {"model.norm.weight": ZEROS}, "parts": {"ema": {"model.norm.weight": ZEROS}}},
        r"expected parts model(.|\n)*ema",
    ),
    "another dtype": (
        {"model": {"model.norm.weight": ZEROS.double()}},
        r"norm\.weight: got dtype F64, expected BF16, F16, F32",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_models_that_paddle_cannot_hold_are_refused(tmp_path: Path, case: str) -> None:
    stored, text = UNFIT[case]
    uc.save(tmp_path / "ours", **stored)
    with pytest.raises(uc.FormatError, match=text):
        convert_to_paddle(tmp_path / "ours", tmp_path / "theirs", FIXTURES / "single_bf16")
    assert not (tmp_path / "theirs").exists()


def test_missing_and_wrong_configs_are_refused(tmp_path: Path) -> None:
    source, target = FIXTURES / "single_bf16", tmp_path / "theirs"
    with pytest.raises(uc.FormatError, match=r"set SourceOptions\(config="):
        write_paddle(open_source(str(source)), str(target), uc.ConvertOptions(), print)
    other_config = copied("single_bf16", tmp_path / "other")
    changed(other_config, "config.json", hidden_size=64, head_dim=8)
    with pytest.raises(uc.FormatError, match=r"by config.json"):
        convert_to_paddle(source, target, other_config)
    assert not target.exists()


def test_existing_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine").write_text("kept")
    with pytest.raises(uc.StorageError, match="holds other files"):
        convert_to_paddle(FIXTURES / "single_bf16", tmp_path / "theirs", FIXTURES / "single_bf16")
    assert [path.name for path in tmp_path.rglob("*")] == ["theirs", "mine"]


def test_corrupt_export_is_detected_and_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes are written than were read, as with a bad disk or a bug in the writer."""
    real = paddle_tensors.read_chunks

    def corrupt_read(*args: Any, **options: Any) -> Iterator[memoryview]:
        for chunk in real(*args, **options):
            chunk[0] ^= 1
            yield chunk

    monkeypatch.setattr(paddle_tensors, "read_chunks", corrupt_read)
    with pytest.raises(
        uc.IntegrityError,
        match=r"the written tensors differ from the source(.|\n)*lm_head.weight: 1 elements",
    ):
        convert_to_paddle(FIXTURES / "single_bf16", tmp_path / "theirs", FIXTURES / "single_bf16")
    assert list(tmp_path.iterdir()) == []


def test_underflowed_beta1_power_round_trips(tmp_path: Path) -> None:
    """After about 800 steps at 0.9 the float32 power is zero, so it cannot give a step."""
    folder = copied("single_bf16", tmp_path / "c")
    changed(folder, "trainer_state.json", global_step=5000)
    powers = {"beta1_pow_acc_0": 0.0, "beta2_pow_acc_0": beta_power(0.999, 5000)}
    rewritten(
        folder,
        "optimizer",
        lambda tensors: [
            tensors[name].fill_(powers[name.partition("/")[2]]) for name in tensors if "pow" in name
        ],
    )
    uc.convert(folder, tmp_path / "ours")
    with uc.open(tmp_path / "ours") as source:
        assert source["optimizer"]["lm_head.weight/step"][...] == 5000
        assert "betas" not in source.source.metadata().groups[0]["options"]
    export = convert_to_paddle(tmp_path / "ours", tmp_path / "theirs", folder)
    assert (export / "optimizer-00001-of-00001.safetensors").read_bytes() == (
        folder / "optimizer-00001-of-00001.safetensors"
    ).read_bytes()

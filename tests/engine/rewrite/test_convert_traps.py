"""Regressions of conversions: wrong bytes, lost state, damaged files of others."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import unified_ckpt as uc
from tests.support.managers import manager_of, state
from unified_ckpt.runtime.storage import mapped_pages
from unified_ckpt.sources.deepspeed.model import read_model_file
from unified_ckpt.sources.detect.names import FORMATS
from unified_ckpt.views import shards

KEPT: dict[str, torch.Tensor] = {}


def save_dcp(told: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # one process
        dcp.save(told, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("to", ["unified", "huggingface"])
def test_the_name_of_a_part_that_is_a_path_reaches_no_other_folder(tmp_path: Path, to: str) -> None:
    uc.save(tmp_path / "kept", model={"w": torch.ones(3)})
    old = save_dcp(
        {"model": {"w": torch.zeros(3)}, "../kept/model": {"w": torch.zeros(3)}}, tmp_path / "old"
    )
    with pytest.raises(uc.FormatError, match=r"part name: got '\.\./kept/model', expected"):
        uc.convert(old, tmp_path / "new", to=to, parts=("model", "../kept/model"))
    assert uc.verify(tmp_path / "kept", deep=True).problems == ()
    assert sorted(os.listdir(tmp_path)) == ["kept", "old"]


@pytest.mark.parametrize(("source", "target"), [("out/checkpoint-5", "out"), ("out", "out/hf")])
def test_a_target_that_holds_the_source_or_lies_in_it_is_refused(
    tmp_path: Path, source: str, target: str
) -> None:
    uc.save(tmp_path / "out", model={"w": torch.ones(3)})
    uc.save(tmp_path / "out" / "checkpoint-5", model={"w": torch.ones(3)})
    with pytest.raises(uc.StorageError, match="contain one another"):
        uc.convert(tmp_path / source, tmp_path / target, if_exists="replace")
    assert uc.verify(tmp_path / "out" / "checkpoint-5").problems == ()


def change_in_place(tensors: Any) -> Any:
    """A user's function that modifies a mapped tensor."""
    return {"model": {"w": KEPT["w"]}, "ema": {"w": KEPT["w"]}}


def test_what_a_function_of_the_user_has_changed_in_a_mapped_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pages, "_RECLAIM_NBYTES", 1 << 20)
    monkeypatch.setattr(shards, "CACHE_NBYTES", 1 << 20)
    torch.save({"w": torch.zeros(3 << 20)}, tmp_path / "w.pt")
    KEPT["w"] = torch.load(tmp_path / "w.pt", mmap=True)["w"].fill_(1)
    source = uc.SourceOptions(conversion_fn=f"{__name__}:change_in_place")
    uc.convert(tmp_path / "w.pt", tmp_path / "new", source=source)
    with uc.open(tmp_path / "new") as found:
        for part in ("model", "ema"):
            assert bool((found[part]["w"][...] == 1).all()), part
    assert bool((KEPT["w"] == 1).all())


@pytest.mark.parametrize(
    "options",
    [
        {"model_dtype": "float16"},
        {"model_dtype": "float32"},
        {"to": "huggingface", "model_dtype": "float32"},
    ],
)
def test_copies_are_compared_also_where_the_model_is_cast_from_one_of_them(
    tmp_path: Path, options: dict[str, str]
) -> None:
    weights = torch.randn(9, 9)
    uc.save(
        tmp_path / "old",
        model={"w": weights.bfloat16()},
        master_weights={"w": weights.t().contiguous()},
    )
    with pytest.raises(
        uc.IntegrityError, match=r"differ from the model; nothing was written \(1\):\n  w: "
    ):
        uc.convert(tmp_path / "old", tmp_path / "new", **options)
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize(
    "options",
    [
        {"model_dtype": "bfloat16"},
        {"to": "huggingface", "model_dtype": "bfloat16"},
        {"to": "torch"},
        {"to": "dcp"},
    ],
    ids=str,
)
def test_damage_is_not_passed_on_where_bytes_are_changed_on_the_way(
    tmp_path: Path, options: dict[str, str]
) -> None:
    uc.save(tmp_path / "old", model={"w": torch.ones(64)})
    path = tmp_path / "old" / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-2] ^= 1
    path.write_bytes(body)
    with pytest.raises(uc.IntegrityError, match="is damaged; nothing was written"):
        uc.convert(tmp_path / "old", tmp_path / "new.pt", **options)
    assert os.listdir(tmp_path) == ["old"]


def test_metrics_go_along_so_that_the_best_stays_the_best(tmp_path: Path) -> None:
    uc.save(tmp_path / "old", model={"w": torch.ones(3)}, metrics={"loss": 0.1}, step=1)
    uc.convert(tmp_path / "old", tmp_path / "new")
    assert '"metrics": {"loss": 0.1}' in (tmp_path / "new" / "unified_checkpoint.json").read_text()


def test_a_config_that_is_not_there_is_told_before_anything_is_written(tmp_path: Path) -> None:
    uc.save(tmp_path / "old", model={"w": torch.ones(3)})
    with pytest.raises(uc.NotFoundError, match=r"typo\.json: does not exist"):
        uc.convert(
            tmp_path / "old",
            tmp_path / "new",
            source=uc.SourceOptions(config=str(tmp_path / "typo.json")),
        )
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}, "two tensors have this name"),
        (
            {"encoder": {"w": torch.ones(2)}, "loss": torch.tensor(0.5), "epoch": 4},
            r"got nested tensors, which would be left out \(1\):\n  enc",
        ),
        (
            {
                "w": torch.ones(2),
                "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
            },
            r"left out \(1\):\n  optimizer",
        ),
        (
            {"model": {"encoder": {"w": torch.ones(2)}, "scale": torch.ones(1)}},
            r"left out \(1\):\n  encoder",
        ),
    ],
)
def test_no_tensor_of_a_torch_file_is_left_out_in_silence(
    tmp_path: Path, told: dict[str, Any], match: str
) -> None:
    torch.save(told, tmp_path / "a.pt")
    with pytest.raises(uc.FormatError, match=match):
        uc.convert(tmp_path / "a.pt", tmp_path / "new")


def test_two_tensors_of_dcp_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    old = save_dcp({"w": torch.ones(2), "model": {"w": torch.zeros(2)}}, tmp_path / "old")
    with pytest.raises(uc.FormatError, match="w"):
        uc.open(old)


def test_lazy_bits_of_a_dcp_tensor_count(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64).conj()
    assert tensor.is_conj()
    old = save_dcp(
        {"model": {"c": tensor, "n": torch._neg_view(torch.arange(4.0))}}, tmp_path / "old"
    )
    with uc.open(old) as found:
        assert torch.equal(found["model"]["c"][...], tensor.resolve_conj())
        assert torch.equal(found["model"]["n"][...], -torch.arange(4.0))


def test_lazy_bits_tell_tensors_of_one_memory_apart(tmp_path: Path) -> None:
    """Regression: the second tensor was taken for an alias of the first, with its sign."""
    pairs, numbers = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    told = {
        "plain": pairs,
        "turned": pairs.conj(),
        "numbers": numbers,
        "negative": torch._neg_view(numbers),
    }
    torch.save(told, tmp_path / "a.pt")
    torch.save({"module": told, "param_shapes": None}, tmp_path / "mp_rank_00_model_states.pt")
    with uc.open(tmp_path / "a.pt") as found:
        assert all(
            torch.equal(found["model"][name][...], tensor.resolve_conj().resolve_neg())
            for name, tensor in told.items()
        )
    assert read_model_file(str(tmp_path / "mp_rank_00_model_states.pt")).aliases == {}


def test_files_outside_of_a_dcp_folder_are_not_read(tmp_path: Path) -> None:
    old = save_dcp({"model": {"w": torch.ones(2)}}, tmp_path / "old")
    os.rename(old / "__0_0.distcp", tmp_path / "__0_0.distcp")
    path = old / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0f../__0_0.distcp"))
    with pytest.raises((uc.FormatError, uc.IncompleteError)):
        uc.open(old)


def test_each_format_has_one_name() -> None:
    found = [one.name for one in FORMATS]
    assert len(found) == len(set(found))


def test_a_step_of_another_engine_that_was_cut_short_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        found = state(step)
        save_dcp(
            {
                "model": found["model"],
                "optimizer": {"state": {"w": {"exp_avg": found["optimizer"]["w/exp_avg"]}}},
            },
            tmp_path / f"checkpoint-{step}",
        )
    (tmp_path / "checkpoint-30" / "__0_0.distcp").unlink()
    found = state(0)
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        assert manager.restore(**found).step == 20  # type: ignore[union-attr]
        assert "checkpoint-30 is skipped: " in caplog.text
        assert manager.restore(10, **found).step == 10  # type: ignore[union-attr]
        with pytest.raises(uc.IncompleteError, match="is missing"):
            manager.restore(30, **found)
        manager.save(15, **state(15))
        caplog.clear()
        assert manager.restore(**found).step == 15  # type: ignore[union-attr]
        assert (
            "checkpoint-20 is skipped: is of another format (dcp), and step 15 of this run is "
            "loaded; restore(20) loads it" in caplog.text
        )


def test_a_format_that_was_told_wrongly_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for one in FORMATS:
        with pytest.raises(uc.CheckpointError):
            uc.open(tmp_path / "empty", options=uc.SourceOptions(format=one.name))


def test_the_only_optimizer_of_a_file_is_it_under_any_name_and_masters_are_a_part(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    told = {
        "model": {n: p.bfloat16() for n, p in model.state_dict().items()},
        "master_weights": model.state_dict(),
        "opt": optimizer.state_dict(),
    }
    torch.save(told, tmp_path / "a.pt")
    report = uc.convert(tmp_path / "a.pt", tmp_path / "new")
    assert report.tensors == {"master_weights": 2, "model": 2, "optimizer": 6}
    assert report.compared == 2


def test_the_master_of_a_tied_tensor_is_found_under_its_other_name(tmp_path: Path) -> None:
    weight = torch.randn(4)
    told = {"model": {"emb": weight.bfloat16()}, "master_weights": {"head": weight}}
    told["model"]["head"] = told["model"]["emb"]
    torch.save(told, tmp_path / "a.pt")
    assert uc.convert(tmp_path / "a.pt", tmp_path / "new", model_dtype="float32").compared == 1
    with uc.open(tmp_path / "new") as found:
        assert torch.equal(found["model"]["emb"][...], weight), "not made from bfloat16"

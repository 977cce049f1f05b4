"""`convert`: any number of ranks writes the source bit for bit, or one error on all ranks."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import unified_ckpt as uc
from tests.support.paddles import FIXTURES, llama
from tests.support.refusals import same_error
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest, convert_source
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format import names
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources import open_source
from unified_ckpt.testing import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)

NAME = "new"


def network(seed: int = 0, *, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(61, 700), nn.ReLU(), nn.Linear(700, 13), nn.LayerNorm(13))
    if tied:
        model[3].bias = model[2].bias
    return model


def trained(seed: int = 0, *, tied: bool = False) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = network(seed, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.8, 0.9))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 61)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.distributed.checkpoint folder."""
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    path = tmp_path_factory.mktemp("dcp") / "old"
    with warnings.catch_warnings(action="ignore"):  # one process
        dcp.save(
            {"model": weights, "optimizer": state, "step": 7, "words": {"seen": [1, 2]}},
            checkpoint_id=path,
            no_dist=True,
        )
    (path / "config.json").write_text('{"model_type": "none"}')
    return path


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unified folder with masters, tied names, rank_extra of three ranks, an attached file."""
    model, optimizer = trained(1, tied=True)
    root = tmp_path_factory.mktemp("ours")

    def attach(folder: str) -> None:
        Path(folder, "notes").mkdir()
        Path(folder, "notes", "words.txt").write_text("hello")
        Path(folder, "trainer_state.json").write_text("{}")

    def act(comm: Comm) -> None:
        with uc.testing.make_checkpointer(comm) as checkpointer:
            checkpointer.save(
                root / "old",
                model=model,
                optimizer=optimizer,
                extra={"scheduler": (1, 2.5)},
                rank_extra={"seed": comm.rank},
                step=11,
                attach=attach,
                options=uc.SaveOptions(model_dtype="bfloat16"),
            )

    run_ranks(3, act)
    return root / "old"


def tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read with the safetensors library."""
    found = {}
    for part in ("model", "model_without_masters", "master_weights", "optimizer"):
        listing = folder / names.index_name(part)
        if listing.exists():
            files = set(json.loads(listing.read_text())["weight_map"].values())
            found[part] = {
                name: one
                for file in sorted(files)
                for name, one in load_file(folder / file).items()
            }
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def convert_by(
    world: int,
    source: Path,
    root: Path,
    *,
    storages: Callable[[int], LocalStorage] | None = None,
    sources: Callable[[int], Source | Exception] | None = None,
    nodes: list[int] | None = None,
    **options: Any,
) -> list[ConvertReport | BaseException]:
    """Convert with this many ranks, as threads."""
    root.mkdir(exist_ok=True)
    told: dict[str, Any] = {
        "max_file_bytes": 1 << 30,
        "if_exists": "error",
        "fsync": True,
        "timeout_seconds": 20.0,
        **options,
    }

    def act(comm: Comm) -> ConvertReport:
        found = sources(comm.rank) if sources is not None else open_source(str(source))
        storage = storages(comm.rank) if storages is not None else LocalStorage(str(root))
        try:
            return convert_source(
                comm,
                found,
                storage,
                NAME,
                ConvertRequest(source_path=str(source), recorded_options={}, **told),
                nodes=nodes or [0] * world,
            )
        finally:
            if not isinstance(found, Exception):
                found.close()

    return try_ranks(world, act)


def test_dcp_folder_converts_and_training_resumes(old: Path, tmp_path: Path) -> None:
    report = uc.convert(old, tmp_path / NAME)
    assert (report.format, report.step, report.tensors) == ("dcp", 7, {"model": 6, "optimizer": 18})
    assert uc.verify(tmp_path / NAME, deep=True).problems == ()
    (model, optimizer), other = trained(), network(5)
    fresh = torch.optim.AdamW(other.parameters())
    loaded = uc.load(tmp_path / NAME, model=other, optimizer=fresh)
    assert loaded.step == 7
    assert loaded.extra == {"step": 7, "words": {"seen": [1, 2]}}
    same(dict(model.state_dict()), dict(other.state_dict()))
    for one, two in ((model, optimizer), (other, fresh)):
        torch.manual_seed(3)
        two.zero_grad()
        one(torch.randn(5, 61)).square().sum().backward()
        two.step()
    same(dict(model.state_dict()), dict(other.state_dict()))
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    assert json.loads((tmp_path / NAME / "config.json").read_text()) == {"model_type": "none"}


def test_manifest_records_source_and_checks(ours: Path, tmp_path: Path) -> None:
    report = uc.convert(ours, tmp_path / NAME)
    manifest = json.loads((tmp_path / NAME / names.MANIFEST).read_text())
    told = manifest["converted_from"]
    assert told["format"] == "unified"
    assert told["path"] == str(ours)
    assert (
        told["save_id"]
        == json.loads((ours / names.MANIFEST).read_text())["save_id"]
        != manifest["save_id"]
    )
    assert told["compared"] == report.compared == 5, "of five parameters there are two copies"
    assert told["verified"] == report.verified == sum(report.tensors.values())
    again = uc.convert(old_path := tmp_path / NAME, tmp_path / "again")
    assert again.tensors == report.tensors
    digests = [
        json.loads((path / names.MANIFEST).read_text())["converted_from"]["digests"]
        for path in (old_path, tmp_path / "again")
    ]
    assert digests[0] == digests[1], "of what is in it, whoever wrote it"


def test_unified_folder_is_converted_in_full(ours: Path, tmp_path: Path) -> None:
    uc.convert(ours, tmp_path / NAME)
    for part, found in tensors(ours).items():
        same(found, tensors(tmp_path / NAME)[part])
    with uc.open(ours) as one, uc.open(tmp_path / NAME) as two:
        assert one.extra == two.extra == {"scheduler": (1, 2.5)}
        assert (
            list(one.rank_extra) == list(two.rank_extra) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
        )
        assert one.step == two.step == 11
    assert (tmp_path / NAME / "notes" / "words.txt").read_text() == "hello"
    model = network(9, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(tmp_path / NAME, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert torch.equal(model[3].bias, trained(1, tied=True)[0][2].bias)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("max_file_bytes", [50_000, 1 << 30])
def test_any_number_of_ranks_writes_the_same(
    ours: Path, tmp_path: Path, nodes: list[int], max_file_bytes: int
) -> None:
    found = convert_by(
        len(nodes), ours, tmp_path / "many", nodes=nodes, max_file_bytes=max_file_bytes
    )
    assert all(isinstance(one, ConvertReport) for one in found), found
    assert len({str(one) for one in found}) == 1 or all(
        one.id == found[0].id for one in found if isinstance(one, ConvertReport)
    )
    assert uc.verify(tmp_path / "many" / NAME, deep=True).problems == ()
    for part, one in tensors(ours).items():
        same(one, tensors(tmp_path / "many" / NAME)[part])
    assert os.listdir(tmp_path / "many") == [NAME]


def test_masters_that_differ_from_the_model_are_refused(ours: Path, tmp_path: Path) -> None:
    """As if a converter had joined shards in another order: every shape fits."""
    broken = tmp_path / "broken"
    weights = tensors(ours)
    swapped = dict(weights["master_weights"])
    swapped["0.weight"] = swapped["0.weight"].flip(0).contiguous()
    uc.save(broken, model=weights["model"], master_weights=swapped)
    with pytest.raises(
        uc.IntegrityError,
        match=r"differ from the model; nothing was written \(1\):\n  0.weight: \d+ of 42700 "
        r"elements differ, by up to 0",
    ):
        uc.convert(broken, tmp_path / NAME)
    assert sorted(os.listdir(tmp_path)) == ["broken"]
    found = convert_by(3, broken, tmp_path / "many")
    same_error(found, uc.IntegrityError, "0.weight: ")
    assert os.listdir(tmp_path / "many") == []
    assert uc.convert(broken, tmp_path / NAME, compare=False).compared == 0


def test_a_master_of_another_shape_is_no_second_copy(tmp_path: Path) -> None:
    uc.save(tmp_path / "odd", model={"w": torch.ones(4)}, master_weights={"w": torch.ones(2, 2)})
    with pytest.raises(
        uc.IntegrityError, match=r"w: shape \(2, 2\) in master_weights, \(4,\) in model"
    ):
        uc.convert(tmp_path / "odd", tmp_path / NAME)


def test_damaged_byte_of_a_source_with_digests_is_detected(ours: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(ours, broken)
    path = broken / "optimizer.safetensors"
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)
    with pytest.raises(
        uc.IntegrityError,
        match=r"is damaged; bytes differ from the digests in \(1\):\n  optimizer:",
    ):
        uc.convert(broken, tmp_path / NAME)
    assert sorted(os.listdir(tmp_path)) == ["broken"]


def test_missing_file_is_named_and_nothing_is_written(old: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(old, broken)
    (broken / "__0_0.distcp").unlink()
    with pytest.raises(
        uc.IncompleteError, match=r"__0_0.distcp: is missing; affected entries:? \(38\)"
    ):
        uc.convert(broken, tmp_path / NAME)
    assert sorted(os.listdir(tmp_path)) == ["broken"]


def test_a_source_that_one_rank_cannot_open_fails_all(ours: Path, tmp_path: Path) -> None:
    lost = uc.NotFoundError("x: there is no such folder")
    found = convert_by(
        3,
        ours,
        tmp_path / "many",
        sources=lambda rank: lost if rank == 1 else open_path(str(ours), lock=False),
    )
    same_error(found, uc.NotFoundError, "no such folder")
    assert os.listdir(tmp_path / "many") == []


def test_ranks_that_see_different_checkpoints_fail(ours: Path, old: Path, tmp_path: Path) -> None:
    found = convert_by(
        2, ours, tmp_path / "many", sources=lambda rank: open_source(str(old if rank else ours))
    )
    same_error(found, uc.RankError, "rank 1 sees other tensors than rank 0")
    assert os.listdir(tmp_path / "many") == []


def test_a_model_in_another_dtype_is_cast_from_the_masters(ours: Path, tmp_path: Path) -> None:
    report = uc.convert(ours, tmp_path / NAME, to="huggingface", model_dtype="float32")
    assert report.id is None
    masters, model = tensors(ours)["master_weights"], tensors(ours)["model"]
    expected = {
        name: masters[name] if name in masters else one.float() for name, one in model.items()
    }
    same(load_file(tmp_path / NAME / "model.safetensors"), expected)
    uc.convert(ours, tmp_path / "half", model_dtype="float16")
    same(tensors(tmp_path / "half")["model"], {name: one.half() for name, one in expected.items()})
    same(tensors(tmp_path / "half")["optimizer"], tensors(ours)["optimizer"])


def test_hugging_face_folder_has_only_the_model(ours: Path, tmp_path: Path) -> None:
    uc.convert(ours, tmp_path / NAME, to="huggingface", max_file_bytes=50_000)
    found = sorted(os.listdir(tmp_path / NAME))
    assert found == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
        "notes",
    ]
    same(tensors(tmp_path / NAME)["model"], tensors(ours)["model"])
    with pytest.raises(uc.StorageError, match=r"holds other files .*, expected"):
        uc.convert(ours, tmp_path / NAME, to="huggingface", if_exists="replace")


def test_selected_parts(ours: Path, tmp_path: Path) -> None:
    uc.convert(ours, tmp_path / NAME, parts=("master_weights", "optimizer"))
    assert tensors(tmp_path / NAME).keys() == {"master_weights", "optimizer"}
    with pytest.raises(
        uc.NotFoundError,
        match=r"has parts master_weights, model, optimizer; it lacks \(1\):\n  ema",
    ):
        uc.convert(ours, tmp_path / "other", parts=("model", "ema"))


@pytest.fixture
def partly(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A training state of which some tensors have no master, and its model."""
    masters = {"w": torch.randn(300, 40)}
    model = {
        "w": masters["w"].bfloat16(),
        "frozen": torch.randn(7).bfloat16(),
        "count": torch.tensor(3),
    }
    model["tied"] = model["frozen"]
    uc.save(
        tmp_path / "whole",
        model=model,
        master_weights=masters,
        optimizer={"w/exp_avg": torch.ones(300, 40)},
        step=4,
    )
    return tmp_path / "whole", model


SKIP_MODEL = ("master_weights", "optimizer")


def test_convert_without_the_model_keeps_all_of_it(
    partly: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """As a save does, and again from the result. Exports have the model again."""
    folder, model = partly
    for before, after in ((folder, tmp_path / "a"), (tmp_path / "a", tmp_path / "b")):
        uc.convert(before, after, parts=SKIP_MODEL)
        assert tensors(after).keys() == {*SKIP_MODEL, "model_without_masters"}
        assert json.loads((after / names.MANIFEST).read_text())["omitted_parts"] == ["model"]
        assert uc.verify(after, deep=True).ok
        found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        uc.load(after, model=found)
        same(found, model)
    whole = {name: tensor for name, tensor in model.items() if name != "tied"}
    uc.convert(tmp_path / "a", tmp_path / "hf", to="huggingface", model_dtype="bfloat16")
    same(load_file(tmp_path / "hf" / "model.safetensors"), whole)
    uc.convert(tmp_path / "a", tmp_path / "c.pt", to="torch")
    told = torch.load(tmp_path / "c.pt", weights_only=True)
    same({name: tensor.to(model[name].dtype) for name, tensor in told["model"].items()}, model)
    uc.convert(
        tmp_path / "a", tmp_path / "back", parts=("model", *SKIP_MODEL), model_dtype="bfloat16"
    )
    same(tensors(tmp_path / "back")["model"], whole)
    assert json.loads((tmp_path / "back" / names.MANIFEST).read_text())["omitted_parts"] == []


def test_convert_without_the_model_needs_its_masters(
    partly: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, model = partly
    with pytest.raises(
        uc.FormatError, match="leaves out the model, and no master weights are written"
    ):
        uc.convert(folder, tmp_path / "n", parts=("optimizer",))
    uc.save(tmp_path / "edited", model=model, master_weights={"w": torch.zeros(300, 40)})
    for compare in (True, False):
        with pytest.raises(
            uc.IntegrityError,
            match="master weights, cast to the model's dtype, differ from the model",
        ):
            uc.convert(
                tmp_path / "edited", tmp_path / "n", parts=("master_weights",), compare=compare
            )
    uc.save(tmp_path / "more", model=model, parts={"ema": model})
    uc.convert(tmp_path / "more", tmp_path / "ema", parts=("ema",))
    assert json.loads((tmp_path / "ema" / names.MANIFEST).read_text())["omitted_parts"] == ["model"]
    assert sorted(os.listdir(tmp_path)) == ["edited", "ema", "more", "whole"]


@pytest.mark.parametrize("if_exists", ["error", "keep", "replace"])
def test_existing_target(ours: Path, old: Path, tmp_path: Path, if_exists: str) -> None:
    first = uc.convert(old, tmp_path / NAME)
    if if_exists == "error":
        with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
            uc.convert(ours, tmp_path / NAME)
    else:
        report = uc.convert(ours, tmp_path / NAME, if_exists=if_exists)
        assert report.existed == (if_exists == "keep")
        assert (report.id == first.id) == (if_exists == "keep")
    assert uc.open(tmp_path / NAME).step == (11 if if_exists == "replace" else 7)
    assert os.listdir(tmp_path) == [NAME]


def test_damaged_rank_extra_is_left_out_with_a_note(ours: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(ours, broken)
    path = broken / names.RANK_EXTRA
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    (note,) = uc.convert(broken, tmp_path / NAME).notes
    assert note.startswith("rank_extra of all 3 ranks was left out: ")
    assert json.loads((tmp_path / NAME / names.MANIFEST).read_text())["converted_from"][
        "notes"
    ] == [note]
    assert list(uc.open(tmp_path / NAME).rank_extra) == []


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exists", [False, True])
def test_crash_at_every_operation_commits_nothing_bad(
    ours: Path, tmp_path: Path, exists: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(os, "fsync", lambda fd: None)

    def prepared(root: Path) -> Path:
        root.mkdir()
        if exists:
            uc.save(root / NAME, model={"w": torch.ones(3)}, step=3)
        return root

    def steps(root: Path) -> list[int | None]:
        for path in root.glob(f"{NAME}*"):
            assert uc.verify(path, deep=True).problems == ()
        return [uc.open(path).step for path in root.glob(f"{NAME}*")]

    root, fuse = prepared(tmp_path / "root"), FaultPoint()
    convert_by(
        2, ours, root, storages=lambda _: FaultyStorage(str(root), fuse), if_exists="replace"
    )
    count = len(fuse.operations)
    assert count > 20
    for at in (at for at in range(count) if at % every == 0 or at >= count - 4):
        root, fuse = prepared(tmp_path / f"root-{at}"), FaultPoint(at)
        found = convert_by(
            2,
            ours,
            root,
            storages=lambda _, root=root, fuse=fuse: FaultyStorage(str(root), fuse),
            if_exists="replace",
            timeout_seconds=1.0,
        )
        assert fuse.triggered
        assert all(
            isinstance(one, ConvertReport | SimulatedCrash | uc.CheckpointError) for one in found
        ), found
        assert steps(root) in ([11], [3] if exists else [])
        found = convert_by(2, ours, root, if_exists="replace")
        assert all(isinstance(one, ConvertReport) for one in found), found
        assert steps(root) == [11]
        shutil.rmtree(root)


def test_a_full_disk_leaves_nothing(ours: Path, tmp_path: Path) -> None:
    found = convert_by(
        2,
        ours,
        tmp_path / "many",
        storages=lambda rank: FullStorage(str(tmp_path / "many"), 3 if rank else 1 << 40),
    )
    same_error(found, uc.StorageError, "No space left")
    assert os.listdir(tmp_path / "many") == []


def test_command_line(
    ours: Path, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(ours), str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{tmp_path / 'a'}: from unified, step 11, ")
    assert "5 tensors of master_weights, cast down, equal the model bit for bit" in text
    assert (
        main(
            [
                "convert",
                str(old),
                str(tmp_path / "b"),
                "--from",
                "dcp",
                "--max-file-size",
                "50KB",
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "dcp"
    assert told["tensors"] == {"model": 6, "optimizer": 18}
    assert len(list((tmp_path / "b").glob("optimizer-*.safetensors"))) > 1
    assert main(["convert", str(old), str(tmp_path / "b")]) == 1
    assert "holds a committed checkpoint" in capsys.readouterr().err
    assert main(["convert", str(old), str(tmp_path / "c"), "--from", "tape"]) == 1
    assert "format: got 'tape', expected one of" in capsys.readouterr().err
    assert main(["convert", str(old), str(tmp_path / "c"), "--to", "tape"]) == 1
    assert "to: got 'tape', expected one of unified, huggingface" in capsys.readouterr().err
    for size in ("5", "x", "0", "-1GB", "1XB"):
        if size != "5":
            with pytest.raises(SystemExit, match="2"):
                main(["convert", str(old), str(tmp_path / "c"), "--max-file-size", size])
    assert not (tmp_path / "c").exists()


def test_paddle_folder_round_trips_bytewise(tmp_path: Path) -> None:
    single = FIXTURES / "single_bf16"
    assert uc.convert(single, tmp_path / NAME).compared > 0
    assert main(["convert", str(tmp_path / NAME), str(tmp_path / "back"), "--to", "paddle"]) == 0
    files = sorted(path.name for path in single.glob("*.safetensors"))
    assert files == sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    for file in files:
        assert (tmp_path / "back" / file).read_bytes() == (single / file).read_bytes(), file


def test_model_is_written_in_maxtext_layout(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    assert uc.convert(tmp_path / "hf", tmp_path / "maxtext", to="maxtext").id is None
    stacked = load_file(tmp_path / "maxtext" / "model.safetensors")
    values = torch.stack(
        [layer.self_attn.v_proj.weight for layer in model.model.layers]
    )  # [layers, heads * D, E]
    assert torch.equal(
        stacked["decoder.layers.self_attention.value.kernel"],
        values.permute(2, 0, 1).unflatten(2, (2, -1)),
    )
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(uc.FormatError, match=r"depend on the model's config\.json; give --config"):
        uc.convert(tmp_path / "hf", tmp_path / "no", to="maxtext")


def test_hugging_face_folder_converts_to_unified(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(
        {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64)},
        tmp_path / "hf" / "model.safetensors",
    )
    for file in ("config.json", "tokenizer.json", "merges.txt", "training_args.bin", "secrets.txt"):
        (tmp_path / "hf" / file).write_text("{}")
    report = uc.convert(tmp_path / "hf", tmp_path / NAME)
    assert (report.format, report.tensors, report.step) == ("huggingface", {"model": 2}, None)
    assert {"config.json", "tokenizer.json", "merges.txt"} <= set(os.listdir(tmp_path / NAME))
    assert not {"training_args.bin", "secrets.txt"} & set(os.listdir(tmp_path / NAME))
    assert uc.verify(tmp_path / NAME, deep=True).problems == ()


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"model_type": "llama", "dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"model_type": "llama", "torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"model_type": "llama"}, {}),  # `from_pretrained` then asks the weights
        (
            {
                "model_type": "gemma3",
                "dtype": "float32",
                "text_config": {"model_type": "x", "dtype": "float32"},
                "vision_config": {"a": 1},
            },
            {"dtype": "bfloat16", "text_config": {"model_type": "x", "dtype": "bfloat16"}},
        ),
        ({"model_type": "llama", "dtype": "float32", "quantization_config": {"bits": 4}}, {}),
    ],
)
@pytest.mark.parametrize("to", ["huggingface", "unified"])
def test_config_declares_the_dtype_of_the_weights(
    tmp_path: Path, to: str, config: dict[str, Any], declared: dict[str, Any]
) -> None:
    """`from_pretrained` makes the model in the dtype that config.json says, whatever the files
    have.
    """
    (tmp_path / "hf").mkdir()
    save_file(
        {"a": torch.ones(3, 4), "n": torch.ones(2, dtype=torch.int64)},
        tmp_path / "hf" / "model.safetensors",
    )
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    uc.convert(tmp_path / "hf", tmp_path / NAME, to=to, model_dtype="bfloat16")
    assert json.loads((tmp_path / NAME / "config.json").read_text()) == config | declared


def test_half_model_from_pretrained_in_its_own_dtype(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf")
    uc.convert(tmp_path / "hf", tmp_path / NAME, to="huggingface", model_dtype="bfloat16")
    assert type(llama()).from_pretrained(tmp_path / NAME).dtype == torch.bfloat16


def test_config_of_same_dtype_is_copied_bytewise(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(3, 4)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"dtype":  "float32", "model_type": "llama"}')
    uc.convert(tmp_path / "hf", tmp_path / NAME)
    assert (tmp_path / NAME / "config.json").read_bytes() == (
        tmp_path / "hf" / "config.json"
    ).read_bytes()


def sentence_transformer(root: Path) -> None:
    """A model followed by a dense layer, as sentence-transformers saves it."""
    root.mkdir()
    save_file({"a": torch.ones(3, 4)}, root / "model.safetensors")
    (root / "config.json").write_text('{"model_type": "bert", "dtype": "float32"}')
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    (root / "modules.json").write_text(
        json.dumps([{"path": path, "type": kind} for path, kind in kinds.items()])
    )
    for folder in ("1_Pooling", "2_Dense"):
        (root / folder).mkdir()
        (root / folder / "config.json").write_text("{}")
    save_file({"linear.weight": torch.arange(6.0)}, root / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize("to", ["huggingface", "unified"])
def test_modules_beside_the_model_are_copied(tmp_path: Path, to: str) -> None:
    sentence_transformer(tmp_path / "st")
    report = uc.convert(tmp_path / "st", tmp_path / NAME, to=to)
    assert report.left_out == ()
    for file in (
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    ):
        assert (tmp_path / NAME / file).read_bytes() == (tmp_path / "st" / file).read_bytes()


@pytest.mark.parametrize("to", ["torch", "dcp", "paddle"])
def test_export_lists_files_not_copied(tmp_path: Path, to: str) -> None:
    llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    report = uc.convert(tmp_path / "hf", tmp_path / ("new.pt" if to == "torch" else "new"), to=to)
    config = () if to == "paddle" else ("config.json",)
    assert report.left_out == (*config, "generation_config.json", "tokenizer.json")


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_modules_that_a_format_cannot_hold_are_refused(tmp_path: Path, to: str) -> None:
    sentence_transformer(tmp_path / "st")
    target = tmp_path / ("new.pt" if to == "torch" else "new")
    with pytest.raises(
        uc.FormatError,
        match=rf"modules.json lists modules (.|\n)*1_Pooling, 2_Dense(.|\n)*{to} cannot hold",
    ):
        uc.convert(tmp_path / "st", target, to=to)
    assert not target.exists()


def test_every_file_is_read_copied_or_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hf" / "original").mkdir(parents=True)
    save_file({"a": torch.ones(3, 4)}, tmp_path / "hf" / "model.safetensors")
    copied = (
        "config.json",
        "quantize_config.json",
        "modeling_mine.py",
        "chat_template.jinja",
        "tokenizer.json",
        "LICENSE",
    )
    for file in copied:
        (tmp_path / "hf" / file).write_text("{}")
    for file in (
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "notes.txt",
    ):
        (tmp_path / "hf" / file).write_text("x")
    left_out = ["model-00001-of-00002.safetensors", "notes.txt", "original/", "pytorch_model.bin"]
    report = uc.convert(tmp_path / "hf", tmp_path / NAME)
    assert set(copied) <= set(os.listdir(tmp_path / NAME))
    assert list(report.left_out) == left_out
    assert all(name in caplog.text for name in ("neither read nor copied", *left_out))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    assert f"neither read nor copied: {', '.join(left_out)}" in capsys.readouterr().out

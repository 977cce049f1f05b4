"""`convert`: any number of ranks writes the source bit for bit, or one error on all ranks."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.equality import check_equal
from tests.support.foreign.paddles import llama
from tests.support.format.manifests import manifest_of
from tests.support.harness import (
    FaultPoint,
    FaultyStorage,
    FullStorage,
    SimulatedCrash,
    make_checkpointer,
    run_ranks,
    try_ranks,
)
from tests.support.manager.managers import manager_of, state
from tests.support.refusals import same_error
from unified_ckpt.cli.main import main
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest, convert_source
from unified_ckpt.engine.rewrite.weights_check import MasterCheck
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.foreign.deepspeed.model import read_model_file
from unified_ckpt.foreign.formats import FORMATS
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format import digests, names
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage import mapped_pages
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.views import shard_assembler

NAME = "new"
MAPPED: dict[str, torch.Tensor] = {}
Tensors = dict[str, torch.Tensor]


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


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # one process
        dcp.save(state, checkpoint_id=path)


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.distributed.checkpoint folder."""
    weights, state = get_state_dict(*trained())
    path = tmp_path_factory.mktemp("dcp") / "dcp_folder"
    words = {"step": 7, "words": {"seen": [1, 2]}}
    save_dcp({"model": weights, "optimizer": state, **words}, path)
    (path / "config.json").write_text('{"model_type": "none"}')
    return path


@pytest.fixture(scope="module")
def unified_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unified folder with masters, tied names, rank_extra of three ranks, an attached file."""
    model, optimizer = trained(1, tied=True)
    path = tmp_path_factory.mktemp("unified_folder") / "checkpoint-11"

    def attach(folder: str) -> None:
        Path(folder, "notes").mkdir()
        Path(folder, "notes", "words.txt").write_text("hello")
        Path(folder, "trainer_state.json").write_text("{}")

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(
                path,
                model=model,
                optimizer=optimizer,
                extra={"scheduler": (1, 2.5)},
                rank_extra={"seed": comm.rank},
                step=11,
                metrics={"loss": 0.1},
                attach=attach,
                options=uc.SaveOptions(model_dtype="bfloat16"),
            )

    run_ranks(3, act)
    return path


def tensors(folder: Path) -> dict[str, Tensors]:
    """Read with the safetensors library."""
    parts = {}
    for part in ("model", "model_without_masters", "master_weights", "optimizer"):
        listing = folder / names.index_name(part)
        if listing.exists():
            files = set(json.loads(listing.read_text())["weight_map"].values())
            parts[part] = {
                name: tensor
                for file in sorted(files)
                for name, tensor in load_file(folder / file).items()
            }
    return parts


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
    settings: dict[str, Any] = {
        "max_file_bytes": 1 << 30,
        "if_exists": "error",
        "timeout_seconds": 20.0,
        **options,
    }

    def act(comm: Comm) -> ConvertReport:
        opened = sources(comm.rank) if sources is not None else open_source(str(source))
        storage = storages(comm.rank) if storages is not None else LocalStorage(str(root))
        try:
            return convert_source(
                comm,
                opened,
                storage,
                NAME,
                ConvertRequest(source_path=str(source), recorded_options={}, **settings),
                topology=Topology.shared_folder(comm.rank, nodes or [0] * world),
            )
        finally:
            if not isinstance(opened, Exception):
                opened.close()

    return try_ranks(world, act)


# the result is the source


def test_dcp_folder_converts_and_training_resumes(dcp_folder: Path, tmp_path: Path) -> None:
    report = uc.convert(dcp_folder, tmp_path / NAME)
    assert (report.format, report.step, report.tensors) == ("dcp", 7, {"model": 6, "optimizer": 18})
    assert uc.verify(tmp_path / NAME, deep=True).problems == ()
    (model, optimizer), other = trained(), network(5)
    fresh = torch.optim.AdamW(other.parameters())
    loaded = uc.load(tmp_path / NAME, model=other, optimizer=fresh)
    assert (loaded.step, loaded.extra) == (7, {"step": 7, "words": {"seen": [1, 2]}})
    check_equal(dict(other.state_dict()), dict(model.state_dict()))
    for actual, expected in zip(other.parameters(), model.parameters(), strict=True):
        check_equal(fresh.state[actual], optimizer.state[expected])
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["betas"]) == (0.03, (0.8, 0.9))
    assert (tmp_path / NAME / "config.json").read_text() == '{"model_type": "none"}'


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("max_file_bytes", [50_000, 1 << 30])
def test_any_number_of_ranks_writes_the_same(
    unified_folder: Path, tmp_path: Path, nodes: list[int], max_file_bytes: int
) -> None:
    reports = convert_by(
        len(nodes), unified_folder, tmp_path, nodes=nodes, max_file_bytes=max_file_bytes
    )
    assert all(isinstance(report, ConvertReport) for report in reports), reports
    assert len({report.id for report in reports if isinstance(report, ConvertReport)}) == 1
    assert uc.verify(tmp_path / NAME, deep=True).problems == ()
    for part, expected in tensors(unified_folder).items():
        check_equal(expected, tensors(tmp_path / NAME)[part])
    with uc.open(unified_folder) as original, uc.open(tmp_path / NAME) as converted:
        for source in (original, converted):
            assert (source.step, source.extra) == (11, {"scheduler": (1, 2.5)})
            assert list(source.rank_extra) == [{"seed": rank} for rank in range(3)]
    assert os.listdir(tmp_path) == [NAME]


def test_manifest_records_source_and_checks(unified_folder: Path, tmp_path: Path) -> None:
    report = uc.convert(unified_folder, tmp_path / NAME)
    manifest = manifest_of(tmp_path / NAME)
    record = manifest["converted_from"]
    assert (record["format"], record["path"]) == ("unified", str(unified_folder))
    assert record["save_id"] == manifest_of(unified_folder)["save_id"] != manifest["save_id"]
    assert record["compared"] == report.compared == 5, "five parameters have two copies"
    assert record["verified"] == report.verified == sum(report.tensors.values())
    assert manifest["metrics"] == {"loss": 0.1}, "the best checkpoint stays the best"
    assert uc.convert(tmp_path / NAME, tmp_path / "again").tensors == report.tensors
    again = manifest_of(tmp_path / "again")["converted_from"]["digests"]
    assert again == record["digests"], "they depend on the content only"
    assert (tmp_path / NAME / "notes" / "words.txt").read_text() == "hello"
    model = network(9, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(tmp_path / NAME, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert torch.equal(model[3].bias, trained(1, tied=True)[0][2].bias)


def test_model_dtype_casts_from_the_masters(unified_folder: Path, tmp_path: Path) -> None:
    report = uc.convert(unified_folder, tmp_path / NAME, to="huggingface", model_dtype="float32")
    assert report.id is None
    parts = tensors(unified_folder)
    expected = {name: tensor.float() for name, tensor in parts["model"].items()}
    expected |= parts["master_weights"]
    check_equal(load_file(tmp_path / NAME / "model.safetensors"), expected)
    uc.convert(unified_folder, tmp_path / "half", model_dtype="float16")
    halves = tensors(tmp_path / "half")
    check_equal(halves["model"], {name: tensor.half() for name, tensor in expected.items()})
    check_equal(halves["optimizer"], parts["optimizer"])


@pytest.mark.parametrize(
    "options",
    [
        {"parts": ("model",)},
        {"source": {"rename": ({"match": "*", "parts": "optimizer", "drop": True},)}},
        {"source": {"conversion_fn": f"{__name__}:only_model"}},
    ],
)
def test_no_optimizer_is_loaded_from_a_conversion_without_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model, optimizer = trained()
    uc.save(tmp_path / "full", model=model, optimizer=optimizer)
    if "source" in options:
        options = {"source": uc.SourceOptions(**options["source"]), "compare": False}
    uc.convert(tmp_path / "full", tmp_path / NAME, **options)
    manifest = manifest_of(tmp_path / NAME)
    assert (manifest["omitted_parts"], manifest["optimizer"]) == (["optimizer"], None)
    with pytest.raises(uc.MismatchError, match="is not in the checkpoint"):
        uc.load(tmp_path / NAME, model=model, optimizer=optimizer)
    assert len(optimizer.state) == 6


def only_model(parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a conversion's model without its optimizer."""
    return {"model": dict(parts["model"])}


def test_hugging_face_folder_has_only_the_model(unified_folder: Path, tmp_path: Path) -> None:
    uc.convert(unified_folder, tmp_path / NAME, to="huggingface", max_file_bytes=50_000)
    assert sorted(os.listdir(tmp_path / NAME)) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
        "notes",
    ]
    check_equal(tensors(tmp_path / NAME)["model"], tensors(unified_folder)["model"])
    with pytest.raises(uc.StorageError, match=r"holds other files .*, expected"):
        uc.convert(unified_folder, tmp_path / NAME, to="huggingface", if_exists="replace")


def test_damaged_rank_extra_is_left_out_with_a_note(unified_folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(unified_folder, tmp_path / "broken"))
    flip(broken / names.RANK_EXTRA, -1)
    (note,) = uc.convert(broken, tmp_path / NAME).notes
    assert note.startswith("rank_extra of all 3 ranks was left out: ")
    assert manifest_of(tmp_path / NAME)["converted_from"]["notes"] == [note]
    with uc.open(tmp_path / NAME) as opened:
        assert list(opened.rank_extra) == []


@pytest.fixture
def partly(tmp_path: Path) -> Tensors:
    """The model of a training state of which some tensors have no master, saved as `whole`."""
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
    return model


SKIP_MODEL = ("master_weights", "optimizer")


def test_convert_without_model_stores_unmastered_tensors(partly: Tensors, tmp_path: Path) -> None:
    """Like a save without the model. The result converts again, and exports contain the model."""
    for before, after in (("whole", "a"), ("a", "b")):
        uc.convert(tmp_path / before, tmp_path / after, parts=SKIP_MODEL)
        assert tensors(tmp_path / after).keys() == {*SKIP_MODEL, "model_without_masters"}
        assert manifest_of(tmp_path / after)["omitted_parts"] == ["model"]
        assert uc.verify(tmp_path / after, deep=True).ok
        loaded = {name: torch.zeros_like(tensor) for name, tensor in partly.items()}
        uc.load(tmp_path / after, model=loaded)
        check_equal(loaded, partly)
    convert = partial(uc.convert, tmp_path / "a")
    whole = {name: tensor for name, tensor in partly.items() if name != "tied"}
    convert(tmp_path / "hf", to="huggingface", model_dtype="bfloat16")
    check_equal(load_file(tmp_path / "hf" / "model.safetensors"), whole)
    convert(tmp_path / "c.pt", to="torch")
    exported = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    check_equal({name: tensor.to(partly[name].dtype) for name, tensor in exported.items()}, partly)
    convert(tmp_path / "back", parts=("model", *SKIP_MODEL), model_dtype="bfloat16")
    check_equal(tensors(tmp_path / "back")["model"], whole)
    assert manifest_of(tmp_path / "back")["omitted_parts"] == []


# refusals: nothing is written


def test_convert_without_model_requires_masters(partly: Tensors, tmp_path: Path) -> None:
    uc.save(tmp_path / "edited", model=partly, master_weights={"w": torch.zeros(300, 40)})
    uc.save(tmp_path / "more", model=partly, parts={"ema": partly})
    uc.convert(tmp_path / "more", tmp_path / "ema", parts=("ema",))
    assert manifest_of(tmp_path / "ema")["omitted_parts"] == ["model"]
    differ = r"master weights, cast to the model's dtype, differ from the model"
    for folder, parts, compare, kind, match in (
        ("whole", ("optimizer",), True, uc.FormatError, "and no master weights are written"),
        ("edited", ("master_weights",), True, uc.IntegrityError, differ),
        ("edited", ("master_weights",), False, uc.IntegrityError, differ),
    ):
        with pytest.raises(kind, match=match):
            uc.convert(tmp_path / folder, tmp_path / NAME, parts=parts, compare=compare)
    assert sorted(os.listdir(tmp_path)) == ["edited", "ema", "more", "whole"]


SHUFFLED = torch.randn(700, 61, generator=torch.Generator().manual_seed(1))
DIFFERENT = r"differ from the model; nothing was written \(1\):\n  w: \d+ of 42700 elements differ"


@pytest.mark.parametrize(
    ("to", "model_dtype"),
    [
        ("unified", None),
        ("unified", "float16"),
        ("unified", "float32"),
        ("huggingface", "float32"),
    ],
)
def test_masters_that_differ_from_the_model_are_refused(
    tmp_path: Path, to: str, model_dtype: str | None
) -> None:
    """Like shards joined in the wrong order: every shape fits, but the values differ."""
    masters = {"w": SHUFFLED.flip(0).contiguous()}
    uc.save(tmp_path / "old", model={"w": SHUFFLED.bfloat16()}, master_weights=masters)
    convert = partial(uc.convert, tmp_path / "old", tmp_path / NAME, to=to, model_dtype=model_dtype)
    with pytest.raises(uc.IntegrityError, match=DIFFERENT):
        convert()
    assert os.listdir(tmp_path) == ["old"]
    assert convert(compare=False).compared == 0
    same_error(convert_by(3, tmp_path / "old", tmp_path / "many"), uc.IntegrityError, DIFFERENT)
    assert os.listdir(tmp_path / "many") == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_dtype": "bfloat16"},
        {"to": "huggingface", "model_dtype": "bfloat16"},
        {"to": "torch"},
        {"to": "dcp"},
    ],
    ids=str,
)
def test_damage_is_detected_although_a_view_changes_bytes(
    tmp_path: Path, options: dict[str, str]
) -> None:
    uc.save(tmp_path / "old", model={"w": torch.ones(64)})
    flip(tmp_path / "old/model.safetensors", -2)
    match = "is damaged; nothing was written|model:w: bytes read are not the bytes that were saved"
    with pytest.raises(uc.IntegrityError, match=match):
        uc.convert(tmp_path / "old", tmp_path / "new.pt", **options)
    assert os.listdir(tmp_path) == ["old"]


W = {"w": torch.ones(2)}
MOMENTS = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}
Make = Callable[[Path], object]


def as_unified(**arguments: Any) -> Make:
    return lambda path: uc.save(path, **arguments)


def as_torch(tree: dict[str, Any]) -> Make:
    return lambda path: torch.save(tree, path)


def as_dcp(tree: dict[str, Any]) -> Make:
    return partial(save_dcp, tree)


def dcp_outside(path: Path) -> None:
    """The metadata lead to a file beside the folder."""
    save_dcp({"model": W}, path)
    os.rename(path / "__0_0.distcp", path.with_name("__0_0.distcp"))
    body = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(body.replace(b"\x0c__0_0.distcp", b"\x0f../__0_0.distcp"))


def dcp_without_file(path: Path) -> None:
    save_dcp({"model": W}, path)
    (path / "__0_0.distcp").unlink()


REFUSED: list[tuple[Make, dict[str, Any], type[uc.CheckpointError], str]] = [
    (
        as_unified(model={"w": torch.ones(4)}, master_weights={"w": torch.ones(2, 2)}),
        {},
        uc.IntegrityError,
        r"w: shape \(2, 2\) in master_weights, \(4,\) in model",
    ),
    (
        as_unified(model={}),
        {},
        uc.FormatError,
        r"got a checkpoint without tensors, expected at least one",
    ),
    (
        as_dcp({"model": W, "../kept/model": W}),
        {"parts": ("model", "../kept/model")},
        uc.FormatError,
        r"part name: got '\.\./kept/model', expected",
    ),
    (
        as_unified(model=W, parts={"ema": W}),
        {"parts": ("model", "ema"), "to": "huggingface"},
        uc.FormatError,
        r"parts: got model, ema, expected one of them; huggingface has one model",
    ),
    (
        as_unified(model=W),
        {"parts": ("model", "ema")},
        uc.NotFoundError,
        r"has parts model; it lacks \(1\):\n  ema",
    ),
    (
        as_unified(model=W),
        {"source": uc.SourceOptions(config="typo.json")},
        uc.NotFoundError,
        r"typo\.json: does not exist",
    ),
    (
        lambda path: llama().save_pretrained(path) or (path / "config.json").unlink(),
        {"to": "maxtext"},
        uc.FormatError,
        r"depend on the model's config\.json; pass SourceOptions\(config=...\)",
    ),
    (dcp_without_file, {}, uc.IncompleteError, r"__0_0.distcp: is missing; affected entr.* \(1\)"),
    (dcp_outside, {}, uc.CheckpointError, r"__0_0\.distcp"),
    (as_dcp({"w": torch.ones(2), "model": W}), {}, uc.FormatError, "w"),
    (as_torch({"_orig_mod.w": torch.ones(2), **W}), {}, uc.FormatError, "two tensors have this na"),
    (
        as_torch({"encoder": W, "loss": torch.tensor(0.5), "epoch": 4}),
        {},
        uc.FormatError,
        r"got nested tensors, which would be left out \(1\):\n  enc",
    ),
    (as_torch({**W, "optimizer": MOMENTS}), {}, uc.FormatError, r"left out \(1\):\n  optimizer"),
    (
        as_torch({"model": {"encoder": W, "scale": torch.ones(1)}}),
        {},
        uc.FormatError,
        r"left out \(1\):\n  encoder",
    ),
]


@pytest.mark.parametrize(("make", "options", "kind", "match"), REFUSED)
def test_convert_refuses(
    tmp_path: Path,
    make: Make,
    options: dict[str, Any],
    kind: type[uc.CheckpointError],
    match: str,
) -> None:
    make(tmp_path / "old.pt")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(kind, match=match):
        uc.convert(tmp_path / "old.pt", tmp_path / NAME, **options)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(("source", "target"), [("out/checkpoint-5", "out"), ("out", "out/hf")])
def test_target_that_holds_the_source_or_lies_in_it_is_refused(
    tmp_path: Path, source: str, target: str
) -> None:
    for path in (tmp_path / "out", tmp_path / "out" / "checkpoint-5"):
        uc.save(path, model=W)
    with pytest.raises(uc.StorageError, match="contain one another"):
        uc.convert(tmp_path / source, tmp_path / target, if_exists="replace")
    assert uc.verify(tmp_path / "out" / "checkpoint-5").problems == ()


def test_rank_extra_of_some_ranks_is_converted(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        value = None if comm.rank == 1 else {"rank": comm.rank}
        make_checkpointer(comm).save(tmp_path / "a", model=W, rank_extra=value)

    run_ranks(3, save)
    uc.convert(tmp_path / "a", tmp_path / "b")
    with uc.open(tmp_path / "b") as opened:
        assert list(opened.rank_extra) == [{"rank": 0}, None, {"rank": 2}]


def test_lost_digests_and_comparisons_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks send must cover every block and every element."""
    uc.save(tmp_path / "a", model=W, master_weights=W)
    check = MasterCheck(open_source(str(tmp_path / "a")))
    check.merge([])
    with pytest.raises(uc.IntegrityError, match="w: compared 0 elements, expected 2"):
        check.check("a")
    monkeypatch.setattr(digests, "block_crcs", lambda *_, **__: [])
    with pytest.raises(uc.IntegrityError, match="w: got 0 digests, expected 1"):
        uc.convert(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_ranks_that_fail_alone_fail_all(
    unified_folder: Path, dcp_folder: Path, tmp_path: Path
) -> None:
    """A rank cannot open the source, sees another one, or has a full disk."""
    lost = uc.NotFoundError("x: there is no such folder")
    cases: list[tuple[dict[str, Any], type[uc.CheckpointError], str]] = [
        (
            {"sources": lambda rank: lost if rank else open_source(str(unified_folder))},
            uc.NotFoundError,
            "no such folder",
        ),
        (
            {"sources": lambda rank: open_source(str(dcp_folder if rank else unified_folder))},
            uc.RankError,
            "rank 1 sees other tensors than rank 0",
        ),
        (
            {"storages": lambda rank: FullStorage(str(tmp_path), 3 if rank else 1 << 40)},
            uc.StorageError,
            "No space left",
        ),
    ]
    for arguments, kind, match in cases:
        same_error(convert_by(2, unified_folder, tmp_path, **arguments), kind, match)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exists", [False, True])
def test_crash_at_every_operation_commits_nothing_bad(
    unified_folder: Path, tmp_path: Path, exists: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)

    def steps(root: Path) -> Iterator[int | None]:
        for path in root.glob(f"{NAME}*"):
            assert uc.verify(path, deep=True).problems == ()
            yield manifest_of(path)["step"]

    def crash(operation: int | None) -> FaultPoint:
        """Stop at an operation; a conversion after that succeeds."""
        root, fuse = tmp_path / f"root-{operation}", FaultPoint(operation)
        root.mkdir()
        if exists:
            uc.save(root / NAME, model=W, step=3)
        convert = partial(convert_by, 2, unified_folder, root, if_exists="replace")
        outcomes = convert(
            storages=lambda _: FaultyStorage(str(root), fuse),
            timeout_seconds=20.0 if operation is None else 1.0,
        )
        for outcome in outcomes:
            assert isinstance(outcome, ConvertReport | SimulatedCrash | uc.CheckpointError), outcome
        assert list(steps(root)) in ([11], [3] if exists else [])
        assert all(isinstance(outcome, ConvertReport) for outcome in convert())
        assert list(steps(root)) == [11]
        shutil.rmtree(root)
        return fuse

    count = len(crash(None).operations)
    assert count > 20
    for operation in {*range(0, count, every), *range(count - 4, count)}:
        assert crash(operation).triggered


# bytes that a source has in memory


def change_in_place(tensors: Any) -> Any:
    """A user's function that modifies a mapped tensor."""
    return {"model": {"w": MAPPED["w"]}, "ema": {"w": MAPPED["w"]}}


def test_changes_of_a_user_function_in_mapped_memory_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pages, "_RECLAIM_NBYTES", 1 << 20)
    monkeypatch.setattr(shard_assembler, "CACHE_NBYTES", 1 << 20)
    torch.save({"w": torch.zeros(3 << 20)}, tmp_path / "w.pt")
    MAPPED["w"] = torch.load(tmp_path / "w.pt", mmap=True)["w"].fill_(1)
    source = uc.SourceOptions(conversion_fn=f"{__name__}:change_in_place")
    uc.convert(tmp_path / "w.pt", tmp_path / NAME, source=source)
    with uc.open(tmp_path / NAME) as opened:
        for tensor in (opened["model"]["w"][...], opened["ema"]["w"][...], MAPPED["w"]):
            assert bool((tensor == 1).all())


def test_lazy_bits_of_tensors_count(tmp_path: Path) -> None:
    """Also where two tensors with different signs share one memory."""
    pairs, numbers = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    lazy = {"conjugate": pairs.conj(), "negative": torch._neg_view(numbers)}
    shared = {"plain": pairs, "numbers": numbers, **lazy}
    torch.save(shared, tmp_path / "a.pt")
    save_dcp({"model": lazy}, tmp_path / "dcp")
    for path, expected in ((tmp_path / "a.pt", shared), (tmp_path / "dcp", lazy)):
        with uc.open(path) as opened:
            actual = {name: tensor[...] for name, tensor in opened["model"].items()}
        check_equal(
            actual, {n: t.clone().resolve_conj().resolve_neg() for n, t in expected.items()}
        )
    deepspeed = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": shared, "param_shapes": None}, deepspeed)
    assert read_model_file(str(deepspeed)).aliases == {}


def test_masters_of_a_torch_file(tmp_path: Path) -> None:
    """Under the other name of a tied tensor, beside an optimizer of any name."""
    weight = torch.randn(4)
    half = weight.bfloat16()
    state = {"step": torch.tensor(1.0), "exp_avg": weight, "exp_avg_sq": weight}
    tree = {
        "model": {"emb": half, "head": half},
        "master_weights": {"head": weight},
        "opt": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    torch.save(tree, tmp_path / "a.pt")
    report = uc.convert(tmp_path / "a.pt", tmp_path / NAME, model_dtype="float32")
    assert report.compared == 1
    assert report.tensors == {"master_weights": 1, "model": 1, "optimizer": 3}
    check_equal(tensors(tmp_path / NAME)["model"], {"emb": weight})


# other formats


def test_format_options(tmp_path: Path) -> None:
    formats = [known_format.name for known_format in FORMATS]
    assert len(formats) == len(set(formats))
    for name in formats:
        with pytest.raises(uc.CheckpointError):
            uc.open(tmp_path, options=uc.SourceOptions(format=name))


def test_foreign_step_is_not_mixed_into_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restored = state(20)
    moments = {"state": {"w": {"exp_avg": restored["optimizer"]["w/exp_avg"]}}}
    save_dcp({"model": restored["model"], "optimizer": moments}, tmp_path / "checkpoint-20")
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        report = manager.restore(20, **restored)
        assert report.step == 20
        manager.save(15, **state(15))
        report = manager.restore(**restored)
        assert report.step == 15
    assert (
        "checkpoint-20 is skipped: is of another format (dcp), and step 15 of this run is "
        "loaded; restore(20) loads it" in caplog.text
    )


def test_command_line(
    unified_folder: Path, dcp_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(source: Path, target: str, *options: str) -> int:
        return main(["convert", str(source), str(tmp_path / target), *options])

    assert run(unified_folder, "a") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{tmp_path / 'a'}: from unified, step 11, ")
    assert "5 tensors of master_weights, cast down, equal the model bit for bit" in text
    assert run(dcp_folder, "b", "--from", "dcp", "--max-file-size", "50KB", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["tensors"]) == ("dcp", {"model": 6, "optimizer": 18})
    assert len(list((tmp_path / "b").glob("optimizer-*.safetensors"))) > 1
    for target, option, match in (
        ("b", [], "holds a committed checkpoint"),
        ("c", ["--from", "tape"], "--from: got 'tape', expected one of"),
        ("c", ["--to", "tape"], "--to: got 'tape', expected one of unified, huggingface"),
    ):
        assert run(dcp_folder, target, *option) == 1
        assert match in capsys.readouterr().err
    for size in ("x", "0", "-1GB", "1XB"):
        with pytest.raises(SystemExit, match="2"):
            run(dcp_folder, "c", "--max-file-size", size)
    assert not (tmp_path / "c").exists()


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


# files beside the tensors


def hugging_face(root: Path, **texts: str) -> Path:
    """A folder with one float32 tensor and further files."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    save_file(
        {"a": torch.ones(3, 4), "n": torch.ones(2, dtype=torch.int64)}, root / "model.safetensors"
    )
    return root


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
    """`from_pretrained` takes the dtype from config.json, not from the files. The file of a model
    that keeps its dtype is copied as it is.
    """
    text = json.dumps(config, indent=3)
    source = hugging_face(tmp_path / "hf", **{"config.json": text})
    uc.convert(source, tmp_path / "half", to=to, model_dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == config | declared
    uc.convert(source, tmp_path / NAME, to=to)
    assert (tmp_path / NAME / "config.json").read_text() == text


def test_half_model_from_pretrained_in_its_own_dtype(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf")
    uc.convert(tmp_path / "hf", tmp_path / NAME, to="huggingface", model_dtype="bfloat16")
    assert type(llama()).from_pretrained(tmp_path / NAME).dtype == torch.bfloat16


MODULES = {
    "config.json": '{"model_type": "bert", "dtype": "float32"}',
    "modules.json": json.dumps(
        [
            {"path": path, "type": path.lstrip("12_") or "Transformer"}
            for path in ("", "1_Pooling", "2_Dense")
        ]
    ),
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "of a dense layer",
}


@pytest.mark.parametrize("to", ["huggingface", "unified", "torch", "dcp"])
def test_modules_beside_the_model_are_copied_or_refused(tmp_path: Path, to: str) -> None:
    """A model followed by a dense layer, as sentence-transformers saves it."""
    source = hugging_face(tmp_path / "st", **MODULES)
    if to in ("torch", "dcp"):
        with pytest.raises(
            uc.FormatError,
            match=rf"modules.json lists modules (.|\n)*1_Pooling, 2_Dense(.|\n)*{to} cannot hold",
        ):
            uc.convert(source, tmp_path / "new.pt", to=to)
        assert os.listdir(tmp_path) == ["st"]
    else:
        assert uc.convert(source, tmp_path / NAME, to=to).left_out == ()
        assert {n: (tmp_path / NAME / n).read_text() for n in MODULES} == MODULES


@pytest.mark.parametrize("to", ["torch", "dcp", "paddle"])
def test_export_lists_files_not_copied(tmp_path: Path, to: str) -> None:
    llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    report = uc.convert(tmp_path / "hf", tmp_path / "new.pt", to=to)
    config = () if to == "paddle" else ("config.json",)
    assert report.left_out == (*config, "generation_config.json", "tokenizer.json")


@pytest.mark.parametrize("to", ["unified", "huggingface", "dcp"])
def test_arguments_of_a_trainer_stay_in_our_folders(tmp_path: Path, to: str) -> None:
    """A pickle: no folder of weights gets it, and a conversion names it."""
    uc.save(tmp_path / "checkpoint-1", model={"w": torch.ones(2)})
    (tmp_path / "checkpoint-1" / "training_args.bin").write_bytes(b"x")
    report = uc.convert(tmp_path / "checkpoint-1", tmp_path / "new", to=to)
    copied = (tmp_path / "new" / "training_args.bin").exists()
    assert copied is (to == "unified")
    assert ("training_args.bin" in report.left_out) is not copied


def test_every_file_is_read_copied_or_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    copied = {
        "config.json",
        "quantize_config.json",
        "modeling_mine.py",
        "chat_template.jinja",
        "tokenizer.json",
        "merges.txt",
        "LICENSE",
    }
    left_out = (
        "model-00001-of-00002.safetensors",
        "notes.txt",
        "original/",
        "pytorch_model.bin",
        "training_args.bin",
    )
    other = {name.replace("l/", "l/consolidated.00.pth"): "x" for name in left_out}
    source = hugging_face(tmp_path / "hf", **dict.fromkeys(copied, "{}"), **other)
    report = uc.convert(source, tmp_path / NAME)
    assert (report.format, report.tensors, report.step) == ("huggingface", {"model": 2}, None)
    assert uc.verify(tmp_path / NAME, deep=True).problems == ()
    assert copied <= set(os.listdir(tmp_path / NAME))
    assert report.left_out == left_out
    assert all(name in caplog.text for name in ("neither read nor copied", *left_out))
    assert main(["convert", str(source), str(tmp_path / "again")]) == 0
    assert f"neither read nor copied: {', '.join(left_out)}" in capsys.readouterr().out

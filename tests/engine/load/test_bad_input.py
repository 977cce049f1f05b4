"""Bad folders and mismatched targets: one error, equal on every rank; the target is unchanged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.manifests import edit_index, edit_manifest
from tests.support.paddles import FIXTURES
from tests.support.refusals import HARD, REFUSED, same_error
from unified_ckpt.cli.main import main
from unified_ckpt.format.manifest import IndexFile
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, try_ranks

SHAPES = {"embed": (302, 256), "heads": (302, 256), "norm": (257,)}
STATES = {"embed/exp_avg": (302, 256), "embed/step": ()}
RULES = {"*embed*": {"tp": 0}, "heads": {"tp": 1}}
EXTRA = {"step": 3, "seen": bytes(5000)}

Tensors = dict[str, torch.Tensor]


# a sound checkpoint, and targets for it


def layout(world: int) -> uc.Layout | None:
    """Two ranks cut `embed` by rows and `heads` by columns."""
    return uc.Layout({"tp": world}, RULES) if world > 1 else None


def share(tensors: Tensors, rank: int, world: int) -> Tensors:
    """What a rank holds of whole tensors."""
    dims = {"embed": 0, "heads": 1, "embed/exp_avg": 0}
    return {
        n: t.chunk(world, dims[n])[rank].clone() if n in dims and world > 1 else t
        for n, t in tensors.items()
    }


def filled(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two ranks; `embed` and `heads` in files of one size."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoint-3"
    model, optimizer = filled(SHAPES, seed=1), filled(STATES, seed=2)
    options = uc.SaveOptions(max_file_bytes=1, fsync=False)

    def act(comm: Comm) -> None:
        mine, state = (share(of, comm.rank, 2) for of in (model, optimizer))
        ours = layout(2)
        make_checkpointer(comm).save(
            folder,
            model=mine,
            optimizer=state,
            layout=ours,
            step=3,
            extra=EXTRA,
            rank_extra={"rng": comm.rank},
            options=options,
        )

    assert try_ranks(2, act, timeout_seconds=HARD) == [None, None]
    assert file_of(folder, "embed").stat().st_size == file_of(folder, "heads").stat().st_size
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / sound.name)


def file_of(folder: Path, name: str, part: str = "model") -> Path:
    return (
        folder
        / json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"][name]
    )


def edit_json(path: Path, edit: Callable[[dict[str, object]], object]) -> None:
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))


def flip(path: Path, at: int) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 0x40
    path.write_bytes(body)


def targets(rank: int, world: int) -> tuple[Tensors, Tensors]:
    return share(filled(SHAPES, seed=7), rank, world), share(filled(STATES, seed=8), rank, world)


def load_fails(
    folder: Path,
    kind: type[uc.CheckpointError],
    match: str,
    *,
    world: int,
    touched: bool = False,
    only_model: bool = False,
    **options: object,
) -> uc.CheckpointError:
    """A load by ranks of which none gets anything: same error everywhere, targets byte for byte as
    they were.
    """
    held = [targets(rank, world) for rank in range(world)]

    def act(comm: Comm) -> None:
        model, optimizer = held[comm.rank]
        chosen = uc.LoadOptions(timeout_seconds=HARD, **options)
        what = {} if only_model else {"optimizer": optimizer}
        make_checkpointer(comm).load(
            folder, model=model, layout=layout(world), options=chosen, **what
        )

    error = same_error(list(try_ranks(world, act, timeout_seconds=HARD)), kind, match)
    if not touched:
        for rank in range(world):
            for now, before in zip(held[rank], targets(rank, world), strict=True):
                assert all(torch.equal(now[name], before[name]) for name in before), (
                    "the target was touched"
                )
    return error


def both_ways(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("world", [1, 2])(test)


@both_ways
def test_the_checkpoint_is_sound(sound: Path, world: int) -> None:
    def act(comm: Comm) -> None:
        model, optimizer = targets(comm.rank, world)
        report = make_checkpointer(comm).load(
            sound, model=model, optimizer=optimizer, layout=layout(world)
        )
        for found, seed, shapes in ((model, 1, SHAPES), (optimizer, 2, STATES)):
            assert all(
                torch.equal(found[name], t)
                for name, t in share(filled(shapes, seed=seed), comm.rank, world).items()
            )
        assert (report.step, report.extra) == (3, EXTRA)
        assert report.rank_extra == ({"rng": comm.rank} if world == 2 else None)

    assert try_ranks(world, act, timeout_seconds=HARD) == [None] * world
    assert uc.verify(sound, deep=True).ok
    with uc.open(sound) as opened:
        assert list(opened.rank_extra) == [{"rng": 0}, {"rng": 1}]


# damaged folders of ours


def truncated(folder: Path) -> None:
    os.truncate(file_of(folder, "heads"), 1000)


def one_byte_short(folder: Path) -> None:
    os.truncate(file_of(folder, "embed"), file_of(folder, "embed").stat().st_size - 1)


def one_byte_more(folder: Path) -> None:
    with file_of(folder, "embed").open("ab") as file:
        file.write(b"\0")


def emptied(folder: Path) -> None:
    file_of(folder, "norm").write_bytes(b"")


def swapped(folder: Path) -> None:
    a, b = file_of(folder, "embed"), file_of(folder, "heads")
    assert a != b
    c = a.rename(a.with_name("c"))
    b.rename(a)
    c.rename(b)


def header_bit(folder: Path) -> None:
    flip(file_of(folder, "embed"), 20)


def file_gone(folder: Path) -> None:
    file_of(folder, "heads").unlink()


def index_gone(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def index_of_a_stranger(folder: Path) -> None:
    (folder / "stranger.safetensors").write_bytes(file_of(folder, "embed").read_bytes())
    edit_index(
        folder, "model", lambda index: index["weight_map"].update(embed="stranger.safetensors")
    )


def index_of_a_missing_file(folder: Path) -> None:
    edit_index(
        folder,
        "model",
        lambda index: index["weight_map"].update(embed="model-00009-of-00009.safetensors"),
    )


def index_of_the_wrong_file(folder: Path) -> None:
    embed, heads = (file_of(folder, name).name for name in ("embed", "heads"))
    edit_index(folder, "model", lambda index: index["weight_map"].update(embed=heads, heads=embed))


def index_without_a_file(folder: Path) -> None:
    edit_index(folder, "model", lambda index: index["weight_map"].pop("embed"))


def index_with_a_key_twice(folder: Path) -> None:
    """One flipped bit is enough: `"embed/step"` has become `"embed/exp_avg"`."""
    path = folder / "optimizer.safetensors.index.json"
    body = path.read_text().replace("embed/step", "embed/exp_avg")
    path.write_text(body)
    edit_manifest(
        folder,
        lambda manifest: manifest["parts"]["optimizer"].update(
            index=IndexFile.from_bytes(body.encode()).model_dump()
        ),
    )


def index_bit(folder: Path) -> None:
    path = folder / "optimizer.safetensors.index.json"
    flip(path, path.read_bytes().index(b"embed/step"))


def index_leads_out(folder: Path) -> None:
    edit_index(
        folder, "model", lambda index: index["weight_map"].update(embed="../../../etc/passwd")
    )


def manifest_leads_out(folder: Path) -> None:
    edit_manifest(
        folder,
        lambda m: m["parts"]["model"]["files"].update(
            {"/etc/passwd": {"nbytes": 1, "header_crc": "0" * 16}}
        ),
    )


def index_torn(folder: Path) -> None:
    (folder / "optimizer.safetensors.index.json").write_text('{"weight_map": {')


def manifest_from_the_future(folder: Path) -> None:
    edit_manifest(folder, lambda m: m.update(format_version="2.0"))


def manifest_torn(folder: Path) -> None:
    path = folder / "unified_checkpoint.json"
    path.write_bytes(path.read_bytes()[:-40])


def manifest_of_nothing(folder: Path) -> None:
    (folder / "unified_checkpoint.json").write_bytes(b"")


def manifest_gone(folder: Path) -> None:
    (folder / "unified_checkpoint.json").unlink()


def extra_bit(folder: Path) -> None:
    flip(folder / "extra.safetensors", -1)


def extra_gone(folder: Path) -> None:
    (folder / "extra.safetensors").unlink()


def rank_extra_bit(folder: Path) -> None:
    """In the entry of rank 1."""
    path = folder / "rank_extra.safetensors"
    flip(path, path.read_bytes().rindex(b"UCPACK01"))


def rank_extra_cut(folder: Path) -> None:
    os.truncate(folder / "rank_extra.safetensors", 60)


def digests_gone(folder: Path) -> None:
    (folder / "digests.safetensors").unlink()


DAMAGED: list[tuple[Callable[[Path], None], type[uc.CheckpointError], str]] = [
    (
        truncated,
        uc.IntegrityError,
        r"model-\d+-of-\d+\.safetensors: has 1000 bytes; the manifest says \d+",
    ),
    (one_byte_short, uc.IntegrityError, r"safetensors: has \d+ bytes; the manifest says \d+"),
    (one_byte_more, uc.IntegrityError, r"safetensors: has \d+ bytes; the manifest says \d+"),
    (emptied, uc.IntegrityError, r"safetensors: has 0 bytes; the manifest says \d+"),
    (swapped, uc.IntegrityError, r"safetensors: .*header"),
    (header_bit, uc.IntegrityError, r"safetensors: .*header"),
    (
        file_gone,
        uc.IncompleteError,
        r"files are missing \(1\):\n  model-\d+-of-\d+\.safetensors with 1 tensor\(s\): "
        r"model:heads",
    ),
    (index_gone, uc.IncompleteError, r"model\.safetensors\.index\.json: is missing"),
    (
        index_of_a_stranger,
        uc.IntegrityError,
        r"index\.json: .*safetensors is only in the manifest or only in the index",
    ),
    (
        index_of_a_missing_file,
        uc.IntegrityError,
        r"index\.json: .*safetensors is only in the manifest or only in the index",
    ),
    (
        index_without_a_file,
        uc.IntegrityError,
        r"index\.json: .*safetensors is only in the manifest or only in the index",
    ),
    (
        index_of_the_wrong_file,
        uc.IntegrityError,
        r"safetensors: only (its header|the index of model) lists '(embed|heads)'",
    ),
    (
        index_with_a_key_twice,
        uc.FormatError,
        r"optimizer\.safetensors\.index\.json: got key 'embed/exp_avg' twice in one object",
    ),
    (
        index_bit,
        uc.IntegrityError,
        r"optimizer\.safetensors\.index\.json: has CRC \w{16}; the manifest says \w{16}; "
        r"`unified-ckpt verify",
    ),
    (
        index_leads_out,
        uc.FormatError,
        r"index\.json: file name '\.\./\.\./\.\./etc/passwd' leads out of the folder",
    ),
    (
        manifest_leads_out,
        uc.FormatError,
        r"unified_checkpoint\.json: parts\.model\.files.*'/etc/passwd' leads out of the folder",
    ),
    (index_torn, uc.IntegrityError, r"optimizer\.safetensors\.index\.json: has CRC"),
    (
        manifest_from_the_future,
        uc.FormatError,
        r"unified_checkpoint\.json: got format version 2\.0, expected 1\.x",
    ),
    (manifest_torn, uc.FormatError, r"unified_checkpoint\.json: not valid JSON"),
    (manifest_of_nothing, uc.FormatError, r"unified_checkpoint\.json: not valid JSON"),
    (
        manifest_gone,
        uc.FormatError,
        r"checkpoint-3: is an unfinished save: it has no unified_checkpoint\.json",
    ),
    (extra_bit, uc.IntegrityError, r"extra\.safetensors: is not the file that was written"),
    (extra_gone, uc.IncompleteError, r"extra\.safetensors: is missing"),
    (digests_gone, uc.IncompleteError, r"digests\.safetensors: is missing"),
]


@pytest.mark.parametrize(
    ("damage", "kind", "match"), DAMAGED, ids=[damage.__name__ for damage, _, _ in DAMAGED]
)
@both_ways
def test_a_damaged_folder(
    folder: Path,
    damage: Callable[[Path], None],
    kind: type[uc.CheckpointError],
    match: str,
    world: int,
) -> None:
    damage(folder)
    load_fails(folder, kind, match, world=world)


@pytest.mark.parametrize(
    ("damage", "kind", "match"),
    [
        (rank_extra_bit, uc.IntegrityError, r"rank 1: .*rank_extra.*entry 1 has CRC"),
        (
            rank_extra_cut,
            uc.IntegrityError,
            r"rank_extra\.safetensors: has 60 bytes; the manifest says \d+",
        ),
    ],
)
def test_damaged_rank_extra(
    folder: Path, damage: Callable[[Path], None], kind: type[uc.CheckpointError], match: str
) -> None:
    """It is given back to the world that left it, so only that world minds; and all of it, if one
    rank's is damaged.
    """
    damage(folder)
    load_fails(folder, kind, match, world=2)


@pytest.mark.parametrize(
    ("damage", "kind", "match"), DAMAGED, ids=[damage.__name__ for damage, _, _ in DAMAGED]
)
def test_verify_finds_the_damage(
    folder: Path, damage: Callable[[Path], None], kind: type[uc.CheckpointError], match: str
) -> None:
    damage(folder)
    try:
        report = uc.verify(folder)
    except uc.CheckpointError as error:
        with pytest.raises(kind, match=match):
            raise error
        return
    assert not report.ok


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda of: of.pop("b"),
            r"model\.safetensors: only its header lists 'b', expected the same tensors in both",
        ),
        (
            lambda of: of.update(c=of["a"]),
            r"model\.safetensors: only the index of model lists 'c', expected the same "
            r"tensors in both",
        ),
    ],
)
def test_an_index_and_a_header_that_name_other_tensors(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], match: str
) -> None:
    """A tensor that only the header names would keep what the target holds, without a word."""
    uc.save(
        tmp_path / "checkpoint-1",
        model={"a": torch.ones(2), "b": torch.ones(2)},
        options=uc.SaveOptions(fsync=False),
    )
    edit_index(tmp_path / "checkpoint-1", "model", lambda index: edit(index["weight_map"]))
    target = {"a": torch.zeros(2)}
    with pytest.raises(uc.IntegrityError, match=match):
        uc.load(tmp_path / "checkpoint-1", model=target)
    with (
        pytest.raises(uc.IntegrityError, match=match),
        uc.open(tmp_path / "checkpoint-1") as opened,
    ):
        opened["model"]["a"]
    assert not target["a"].any()


def test_a_newer_minor_version_passes(folder: Path) -> None:
    edit_manifest(folder, lambda m: m.update(format_version="1.9", mood="fine"))
    model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    uc.load(folder, model=model)
    assert torch.equal(model["embed"], filled(SHAPES, seed=1)["embed"])


# a bit that has turned


@both_ways
def test_flipped_bit_is_found_during_a_load(folder: Path, world: int) -> None:
    flip(file_of(folder, "heads"), -1000)
    text = (
        r"model:heads: block 0 \(from byte 0 of the tensor, in "
        r"model-\d+-of-\d+\.safetensors\) has CRC \w{16}, expected \w{16}"
    )
    load_fails(
        folder,
        uc.IntegrityError,
        rf"(?s){text}.*the target holds a mix of old and new bytes and is unusable",
        world=world,
        touched=True,
    )
    report = uc.verify(folder, deep=True)
    assert len(report.problems) == 1
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(report.problems[0])
    assert uc.verify(folder).ok


def test_slice_is_verified_like_a_load(tmp_path: Path) -> None:
    """Blocks of 1 MiB that lie whole in it are compared, under other names too; no digest is read
    for a slice that has none.
    """
    folder, full = (
        tmp_path / "checkpoint-1",
        {"w": torch.arange(650_000.0).reshape(1300, 500), "b": torch.arange(7.0)},
    )
    uc.save(folder, model=full, options=uc.SaveOptions(fsync=False))
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [{"match": "w", "to": "v"}]}))
    flip(
        folder / "model.safetensors",
        (folder / "model.safetensors").stat().st_size - full["w"].nbytes + 1_500_000,
    )  # row 750, block 1
    wrong = (
        r"model:w: bytes read are not .*\n  block 1 \(from byte 1048576 of the tensor, in "
        r"model\.safetensors\) has CRC \w{16}, expected"
    )
    with (
        uc.open(folder) as source,
        uc.open(folder, options=uc.SourceOptions(rename=str(rules))) as renamed,
    ):
        for tensor in (source["model"]["w"], renamed["model"]["v"]):
            for index in (..., slice(400, None), slice(524, 1049)):
                with pytest.raises(uc.IntegrityError, match=wrong):
                    tensor[index]
            assert torch.equal(tensor[:750], full["w"][:750])
            assert torch.equal(tensor[1049:], full["w"][1049:])
            assert torch.equal(tensor[:, 100:300][:700], full["w"][:700, 100:300])
        assert torch.equal(source["model"]["b"][...], full["b"])
    os.truncate(folder / "digests.safetensors", 100)
    with uc.open(folder) as source:
        assert torch.equal(source["model"]["w"][:10], full["w"][:10])
        with pytest.raises(uc.IntegrityError, match=r"digests\.safetensors: has 100 bytes"):
            source["model"]["b"][...]


def test_flipped_bit_passes_unverified(folder: Path) -> None:
    flip(file_of(folder, "heads"), -1000)
    model, _ = targets(0, 1)
    report = uc.load(folder, model=model, options=uc.LoadOptions(verify="off"))
    assert report.verified_bytes == 0
    assert not torch.equal(model["heads"], filled(SHAPES, seed=1)["heads"])


def test_full_verification_reads_the_rest_of_the_blocks(folder: Path) -> None:
    """The turned bit is in the last rows, the rank wants the first, of the same block."""
    flip(file_of(folder, "embed"), -1000)
    rows = uc.Layout({"tp": 2}, {"embed": {"tp": 0}})
    rest = {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != "embed"}

    def act(comm: Comm, verify: str) -> None:
        model = {"embed": torch.zeros(151, 256), **rest} if comm.rank == 0 else {}
        options = uc.LoadOptions(verify=verify, timeout_seconds=HARD)
        make_checkpointer(comm).load(folder, model=model, layout=rows, options=options)

    assert try_ranks(2, lambda comm: act(comm, "read"), timeout_seconds=HARD) == [None, None]
    same_error(
        try_ranks(2, lambda comm: act(comm, "full"), timeout_seconds=HARD),
        uc.IntegrityError,
        r"model:embed: block 0 .* has CRC",
    )


# Hugging Face folders, which have no manifest to know better


def raw_file(path: Path, header: object, body: bytes = b"", *, claims: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if claims is None else claims).to_bytes(8, "little") + text + body)


def entry(
    low: int, high: int, *, dtype: str = "F32", shape: list[int] | None = None
) -> dict[str, object]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [low, high]}


HEADERS: dict[str, tuple[object, bytes, type[uc.CheckpointError], str]] = {
    "negative": (
        {"a": entry(-8, 0)},
        bytes(8),
        uc.FormatError,
        r"tensor 'a': got data_offsets \[-8, 0\]",
    ),
    "backward": (
        {"a": entry(8, 0)},
        bytes(8),
        uc.FormatError,
        r"tensor 'a': got data_offsets \[8, 0\], expected start <= stop",
    ),
    "overlap": (
        {"a": entry(0, 8), "b": entry(4, 12)},
        bytes(12),
        uc.FormatError,
        r"tensor 'b' overlaps tensor 'a'",
    ),
    "twice the same": (
        {"a": entry(0, 8), "b": entry(0, 8)},
        bytes(8),
        uc.FormatError,
        r"tensor 'b' overlaps tensor 'a'",
    ),
    "gap": (
        {"a": entry(0, 8), "b": entry(12, 20)},
        bytes(20),
        uc.FormatError,
        r"tensor 'b' leaves a gap after tensor 'a'",
    ),
    "wrong length": (
        {"a": entry(0, 12)},
        bytes(12),
        uc.FormatError,
        r"tensor 'a': got 12 bytes from data_offsets, expected 8 for F32 of shape \(2,\)",
    ),
    "past the end": ({"a": entry(0, 8)}, bytes(7), uc.IntegrityError, r"file is truncated"),
    "more at the end": (
        {"a": entry(0, 8)},
        bytes(9),
        uc.FormatError,
        r"1 bytes belong to no tensor",
    ),
    "huge offsets": (
        {"a": entry(2**63, 2**63 + 8)},
        bytes(8),
        uc.FormatError,
        r"tensor 'a': got data_offsets",
    ),
    "huge shape": (
        {"a": entry(0, 8, shape=[2**62, 2**62])},
        bytes(8),
        uc.FormatError,
        r"tensor 'a': got shape .*a product below",
    ),
    "huge and empty": (
        {"a": entry(0, 0, shape=[0, 2**62, 2**62])},
        b"",
        uc.FormatError,
        r"tensor 'a': got shape .*a product below 2\*\*59",
    ),
    "unknown dtype": (
        {"a": entry(0, 8, dtype="F128")},
        bytes(8),
        uc.FormatError,
        r"tensor 'a': got unknown dtype 'F128'",
    ),
    "no object": ([1, 2], b"", uc.FormatError, r"header: got a JSON list, expected an object"),
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_bad_header(tmp_path: Path, case: str, indexed: bool) -> None:
    header, body, kind, match = HEADERS[case]
    raw_file(tmp_path / "model.safetensors", header, body)
    if indexed:
        names = header if isinstance(header, dict) else {"a": 0}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
        )
    target = {"a": torch.full((2,), 5.0), "b": torch.full((2,), 6.0)}
    with pytest.raises(kind, match=match):
        uc.load(tmp_path, model=target)
    assert target["a"].tolist() == [5, 5]
    with pytest.raises(kind, match=match):
        uc.open(tmp_path)["model"]["a"]


@pytest.mark.parametrize("claims", [100_000_001, 2**63, 2**64 - 1])
def test_a_header_that_claims_too_much(tmp_path: Path, claims: int) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry(0, 8)}, bytes(8), claims=claims)
    os.truncate(tmp_path / "model.safetensors", 200_000_000)  # sparse
    with pytest.raises(
        uc.FormatError,
        match=rf"model\.safetensors: got a header length of {claims} bytes, expected at most "
        rf"100000000",
    ):
        uc.load(tmp_path, model={"a": torch.zeros(2)})


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry(0, 8)}, bytes(8), claims=99_999_999)
    with pytest.raises(
        uc.FormatError,
        match=r"header length of 99999999 bytes in a file of \d+; the file is truncated",
    ):
        uc.load(tmp_path, model={"a": torch.zeros(2)})


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b.safetensors", "C:x", ""],
)
def test_an_index_that_leads_out(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        uc.FormatError, match=r"leads out of the folder; expected a plain file name"
    ):
        uc.load(tmp_path, model={"a": torch.zeros(2)})


def test_an_index_with_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "m\ud800.safetensors"}})
    )
    with pytest.raises(
        uc.FormatError,
        match=r"file name 'm\\ud800\.safetensors' is not valid Unicode; expected a plain file name",
    ):
        uc.load(tmp_path, model={"a": torch.zeros(2)})


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (("optimizer", "scalars"), "x", "optimizer is not a dict with string keys"),
        (("optimizer", "scalars"), [1], "optimizer is not a dict with string keys"),
        (
            ("optimizer", "scalars"),
            {"weight": 3},
            "optimizer: the state of weight is a int, expected a dict",
        ),
        (
            ("optimizer", "groups", 0, "options"),
            [1],
            "param_groups_0 is not a dict with string keys",
        ),
        (
            ("optimizer", "groups", 0, "options"),
            5,
            "param_groups_0 is not a dict with string keys",
        ),
        (("modules",), [1], "modules is not a dict with string keys"),
    ],
)
def test_a_manifest_whose_trees_are_of_another_kind(
    tmp_path: Path, where: tuple[str | int, ...], value: object, match: str
) -> None:
    model = torch.nn.Linear(2, 2)
    uc.save(
        tmp_path / "checkpoint-1",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        options=uc.SaveOptions(fsync=False),
    )

    def change(found: Any) -> None:
        for step in where[:-1]:
            found = found[step]
        found[where[-1]] = value

    edit_manifest(tmp_path / "checkpoint-1", change)
    target = torch.nn.Linear(2, 2)
    before = target.weight.clone()
    with pytest.raises(uc.FormatError, match=f"unified_checkpoint.json: {match}"):
        uc.load(
            tmp_path / "checkpoint-1",
            model=target,
            optimizer=torch.optim.SGD(target.parameters(), lr=0.1),
        )
    assert torch.equal(target.weight, before)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(
        uc.IncompleteError,
        match=r"files are missing \(1\):\n  model-00002-of-00002\.safetensors with 1 "
        r"tensor\(s\): model:b",
    ):
        uc.load(tmp_path, model=target)
    assert target["a"].tolist() == [1, 1]


def test_an_index_whose_file_lacks_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")})
    )
    with pytest.raises(
        uc.IntegrityError,
        match=r"model\.safetensors: has no tensor 'b', but the index of model lists it there",
    ):
        uc.load(tmp_path, model={"a": torch.zeros(2), "b": torch.zeros(2)})


# no checkpoint there


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: None, r"there is no such folder"),
        (lambda path: path.mkdir(), r"holds no checkpoint: expected unified_checkpoint\.json"),
        (lambda path: path.write_bytes(b"x"), r"is a file, expected a checkpoint folder"),
    ],
)
@both_ways
def test_nothing_to_load(
    tmp_path: Path, make: Callable[[Path], object], match: str, world: int
) -> None:
    make(tmp_path / "checkpoint-3")
    load_fails(tmp_path / "checkpoint-3", uc.NotFoundError, rf"checkpoint-3: {match}", world=world)


@pytest.mark.parametrize(("name", "match"), REFUSED.items())
def test_unsupported_format_is_refused_by_name(tmp_path: Path, name: str, match: str) -> None:
    """As a file and in a folder, by every way in; beside weights that are read it is no matter."""
    (tmp_path / name).write_bytes(b"x")
    calls: list[Callable[[Path], object]] = [
        lambda path: uc.load(path, model={"a": torch.zeros(2)}),
        uc.open,
    ]
    calls.append(lambda path: uc.convert(path, tmp_path.parent / "converted"))
    for path in (tmp_path, tmp_path / name):
        for call in calls:
            with pytest.raises(uc.FormatError, match=match):
                call(path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    target = {"a": torch.zeros(2)}
    uc.load(tmp_path, model=target)
    assert target["a"].tolist() == [1, 1]


def test_unfinished_save_is_refused(folder: Path) -> None:
    left = folder.rename(folder.with_name(".unified-0123-checkpoint-3"))
    manifest_gone(left)
    (left / "digests.safetensors").unlink()
    for call in (lambda: uc.load(left, model={}), lambda: uc.open(left), lambda: uc.verify(left)):
        with pytest.raises(
            uc.FormatError,
            match=r"is an unfinished save: it has no unified_checkpoint\.json, expected a "
            r"committed checkpoint",
        ):
            call()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("make", "note"),
    [
        (shutil.rmtree, "there is no such folder"),
        (
            lambda bad: (bad / "unified_checkpoint.json").write_text("{"),
            r"unified_checkpoint\.json: ",
        ),
        (lambda bad: (bad / "model.safetensors").unlink(), "files are missing"),
    ],
    ids=["missing", "manifest", "file"],
)
@both_ways
def test_one_of_several_folders_that_cannot_be_opened(
    tmp_path: Path, make: Callable[[Path], object], note: str, turned: bool, world: int
) -> None:
    """The other one is whole: that is enough, and what is wrong with the first is told."""
    good, bad = tmp_path / "good" / "checkpoint-1", tmp_path / "bad" / "checkpoint-1"
    uc.save(good, model={"w": torch.ones(4)}, step=1, options=uc.SaveOptions(fsync=False))
    shutil.copytree(good, bad)
    make(bad)

    def act(comm: Comm) -> tuple[int | None, list[float], str]:
        target = {"w": torch.zeros(4)}
        report = make_checkpointer(comm).load([good, bad] if turned else [bad, good], model=target)
        return report.step, target["w"].tolist(), " ".join(report.notes)

    for found in try_ranks(world, act, timeout_seconds=HARD):
        assert isinstance(found, tuple), found
        assert found[:2] == (1, [1.0] * 4)
        assert re.search(f"bad/checkpoint-1.*{note}", found[2])
    shutil.rmtree(good)
    for error in try_ranks(world, act, timeout_seconds=HARD):
        assert isinstance(error, uc.CheckpointError), error


def test_the_rank_extra_of_another_save_is_refused(tmp_path: Path) -> None:
    """Of one size and one header, and each of its entries has its CRC."""
    for number in (1, 2):
        model, options = {"w": torch.zeros(2)}, uc.SaveOptions(fsync=False)
        uc.save(
            tmp_path / f"checkpoint-{number}",
            model=model,
            rank_extra=number,
            step=number,
            options=options,
        )
    shutil.copy(tmp_path / "checkpoint-1" / "rank_extra.safetensors", tmp_path / "checkpoint-2")
    with pytest.raises(uc.IntegrityError, match=r"rank_extra\.safetensors: its table has CRC"):
        uc.load(tmp_path / "checkpoint-2", model={"w": torch.zeros(2)})
    with (
        uc.open(tmp_path / "checkpoint-2") as source,
        pytest.raises(uc.IntegrityError, match="its table has CRC"),
    ):
        source.rank_extra[0]
    assert not uc.verify(tmp_path / "checkpoint-2").ok


def test_weights_without_a_manifest_are_not_taken_for_one_of_several(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(uc.NotFoundError, match="gone: there is no such folder"):
        uc.load([tmp_path, tmp_path / "gone"], model={"w": torch.zeros(4)})


@both_ways
def test_no_path_at_all(world: int) -> None:
    def act(comm: Comm) -> None:
        make_checkpointer(comm).load([], model={"w": torch.zeros(4)})

    found = try_ranks(world, act, timeout_seconds=HARD)
    same_error(found, uc.NotFoundError, "got no path, expected a checkpoint's")


# targets that do not fit


@both_ways
def test_everything_that_does_not_match_is_listed(sound: Path, world: int) -> None:
    """Ranks have different faults; every rank gets all of them, and nothing is loaded."""
    held = [targets(rank, world)[0] for rank in range(world)]
    held[0]["lm_head"] = torch.zeros(3)
    held[-1]["norm"] = torch.zeros(258)
    held[-1]["heads"] = held[-1]["heads"].to(torch.float16)
    for mine in held:
        del mine["embed"]
    before = [{name: tensor.clone() for name, tensor in mine.items()} for mine in held]

    def act(comm: Comm) -> None:
        ours = uc.Layout({"tp": world}, {"heads": {"tp": 1}}) if world > 1 else None
        make_checkpointer(comm).load(sound, model=held[comm.rank], layout=ours)

    error = same_error(
        list(try_ranks(world, act, timeout_seconds=HARD)),
        uc.MismatchError,
        r"checkpoint and target differ \(4\):",
    )
    assert isinstance(error, uc.MismatchError)
    assert error.missing == ("model:lm_head",)
    assert error.unexpected == ("model:embed",)
    assert error.wrong == (
        "model:heads: checkpoint has dtype F32, target has F16; pass "
        "LoadOptions(cast=True) to cast",
        "model:norm: checkpoint has shape (257,), target has (258,); "
        "to keep the target's values beyond that, pass SourceOptions(rename=[{'match': 'norm', "
        "'pad': 0}])",
    )
    for text in (
        *error.wrong,
        "model:lm_head: is not in the checkpoint",
        "model:embed: is in the checkpoint, requested by no rank",
        "strict=False",
    ):
        assert text in str(error)
    for mine, old in zip(held, before, strict=True):
        assert all(torch.equal(mine[name], old[name]) for name in old)


@both_ways
def test_an_expanded_target_of_one_rank(tmp_path: Path, world: int) -> None:
    """All hear of it before a byte is written. It can be saved."""
    full = {"a": torch.ones(30, 20), "b": torch.ones(1).expand(8)}
    uc.save(tmp_path / "checkpoint-1", model=full, options=uc.SaveOptions(fsync=False))
    held = [{"a": torch.zeros(30, 20), "b": torch.zeros(8)} for _ in range(world)]
    held[-1]["b"] = torch.zeros(1).expand(8)

    def act(comm: Comm) -> None:
        make_checkpointer(comm).load(tmp_path / "checkpoint-1", model=held[comm.rank])

    found = (
        r"model:b: is expanded: all elements along dim 0 of shape \(8,\) share memory; call "
        r"`contiguous\(\)`"
    )
    same_error(list(try_ranks(world, act, timeout_seconds=HARD)), uc.LayoutError, found)
    assert not any(tensor.any() for mine in held for tensor in mine.values())
    held[-1] = {"a": torch.zeros(20, 30).t(), "b": torch.zeros(16)[::2]}
    assert try_ranks(world, act, timeout_seconds=HARD) == [None] * world
    assert all(tensor.all() for mine in held for tensor in mine.values())


@both_ways
def test_no_optimizer_in_the_checkpoint(sound: Path, tmp_path: Path, world: int) -> None:
    uc.save(tmp_path / "weights", model=filled(SHAPES, seed=1))
    error = load_fails(
        tmp_path / "weights",
        uc.MismatchError,
        r"optimizer:embed/exp_avg: is not in the checkpoint",
        world=world,
    )
    assert isinstance(error, uc.MismatchError)
    assert error.missing == ("optimizer:embed/exp_avg", "optimizer:embed/step")


def test_no_optimizer_for_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    uc.save(tmp_path / "weights", model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with pytest.raises(
        uc.MismatchError,
        match=r"(?s)optimizer:bias: is not in the checkpoint.*optimizer:weight: is not in the "
        r"checkpoint",
    ):
        uc.load(tmp_path / "weights", model=model, optimizer=optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(
        torch.equal(state["exp_avg"], old)
        for state, old in zip(optimizer.state.values(), moments, strict=True)
    )


def test_an_optimizer_of_another_model(sound: Path) -> None:
    model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with pytest.raises(
        uc.LayoutError,
        match=r"optimizer group 0: has a parameter of shape \(3, 4\) that is not in `model`",
    ):
        uc.load(sound, model=model, optimizer=torch.optim.SGD(other.parameters()))


# ranks that do not come


def test_a_load_on_a_subset_of_ranks(sound: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank == 1:
            make_checkpointer(comm).load(
                sound, model=targets(0, 1)[0], options=uc.LoadOptions(timeout_seconds=1.5)
            )

    same_error(
        [try_ranks(2, act, timeout_seconds=HARD)[1]],
        uc.RankError,
        r"load of .*: rank\(s\) 0 did not arrive within 1\.5 s",
    )


# numbers that no checkpoint has


def numbers(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a manifest has integers."""
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        yield from numbers(value, (*path, key))
    if type(node) is int:
        yield path


@pytest.mark.parametrize("verb", ["open", "load", "load of several", "verify", "repair"])
@pytest.mark.parametrize("number", [2**62, 2**31 + 7, 2**64])
def test_absurd_numbers_take_no_memory_and_no_time(
    sound: Path, tmp_path: Path, number: int, verb: str
) -> None:
    """In place of each integer of a manifest in turn, as if it had been written so."""
    for at, (*steps, last) in enumerate(
        numbers(json.loads((sound / "unified_checkpoint.json").read_text()))
    ):
        folder = Path(shutil.copytree(sound, tmp_path / str(at)))

        def edit(found: Any, steps: list[str | int] = steps, last: str | int = last) -> None:
            for step in steps:
                found = found[step]
            found[last] = number

        edit_manifest(folder, edit)
        within(10, partial(VERBS[verb], folder))


# what is no regular file


PLACED: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


def drawn(folder: Path) -> None:
    """Every tensor, and what is beside them."""
    with uc.open(folder) as source:
        for part in source.parts:
            for tensor in source[part].values():
                tensor[...]
        list(source.rank_extra)


def restored(folder: Path) -> None:
    with uc.CheckpointManager(
        folder.parent, options=uc.ManagerOptions(on_preemption=False, keep_latest=1)
    ) as manager:
        manager.restore(model=targets(0, 1)[0])


VERBS: dict[str, Callable[[Path], object]] = {
    "open": drawn,
    "load": lambda folder: uc.load(folder, model=targets(0, 1)[0], strict=False),
    "load of several": lambda folder: uc.load(
        [folder, folder / "none"], model=targets(0, 1)[0], strict=False
    ),
    "verify": lambda folder: uc.verify(folder, deep=True),
    "repair": uc.repair,
    "convert": lambda folder: uc.convert(folder, folder.parent / "converted"),
    "save": lambda folder: uc.save(
        folder,
        model={"w": torch.ones(2)},
        options=uc.SaveOptions(fsync=False, if_exists="keep_complete"),
    ),
    "restore": restored,
    "list": lambda folder: main(["list", str(folder.parent)]),
    "inspect": lambda folder: main(["inspect", str(folder)]),
    "prune": lambda folder: main(
        [
            "prune",
            str(folder.parent),
            "--keep-latest",
            "1",
            "--incomplete",
            "--older-than-hours",
            "0",
        ]
    ),
}


def within(seconds: float, act: Callable[[], object]) -> None:
    """A call that waits for the other end of a FIFO is interrupted, and fails the test."""

    def interrupt(*_: object) -> None:
        raise AssertionError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        act()
    except (uc.CheckpointError, SystemExit):
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", PLACED)
def test_what_is_no_regular_file_is_not_opened(
    sound: Path, tmp_path: Path, kind: str, verb: str
) -> None:
    """In place of each file of a checkpoint in turn, and of one of the trainer. A FIFO waits for a
    writer, a device may never end.
    """
    for file in (*sorted(path.name for path in sound.iterdir()), "notes.txt"):
        root = tmp_path / file
        folder = Path(shutil.copytree(sound, root / sound.name))
        (folder / file).unlink(missing_ok=True)
        PLACED[kind](folder / file)
        within(10, partial(VERBS[verb], folder))


def test_a_fifo_is_named(folder: Path) -> None:
    file = file_of(folder, "heads")
    file.unlink()
    os.mkfifo(file)
    load_fails(
        folder,
        uc.StorageError,
        rf"{file.name}: stat failed: is a FIFO, expected a regular file",
        world=2,
    )


def test_a_save_that_attaches_a_fifo_ends(tmp_path: Path) -> None:
    def save() -> None:
        uc.save(
            tmp_path / "checkpoint-1",
            model={"w": torch.ones(2)},
            attach=lambda folder: os.mkfifo(f"{folder}/pipe"),
        )

    within(10, save)
    assert uc.verify(tmp_path / "checkpoint-1").ok


def test_links_to_files_are_read(folder: Path) -> None:
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder.parent / f"blob-{number}")
        path.symlink_to(folder.parent / f"blob-{number}")
    model = targets(0, 1)[0]
    uc.load(folder, model=model)
    assert torch.equal(model["heads"], filled(SHAPES, seed=1)["heads"])


def hugging_face(root: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(3)}, root / f"model-0000{number}-of-00002.safetensors")
    weight_map = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled(root: Path) -> None:
    for number in (1, 2):
        torch.save({f"w{number}": torch.ones(3)}, root / f"pytorch_model-0000{number}-of-00002.bin")
    weight_map = {f"w{number}": f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def distributed(root: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root)


def deepspeed(root: Path) -> None:
    (root / "latest").write_text("global_step1")
    (root / "global_step1").mkdir()
    torch.save(
        {"module": {"w": torch.ones(3)}}, root / "global_step1" / "mp_rank_00_model_states.pt"
    )


def paddle(root: Path) -> None:
    shutil.copytree(FIXTURES / "fused", root, dirs_exist_ok=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [hugging_face, pickled, distributed, deepspeed, paddle])
def test_no_fifo_of_another_format_is_opened(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "sound").mkdir()
    write(tmp_path / "sound")
    for file in sorted(
        path.relative_to(tmp_path / "sound")
        for path in (tmp_path / "sound").rglob("*")
        if path.is_file()
    ):
        folder = Path(shutil.copytree(tmp_path / "sound", tmp_path / file.name))
        (folder / file).unlink()
        os.mkfifo(folder / file)
        within(10, partial(drawn, folder))
        within(10, partial(uc.verify, folder))
        within(10, partial(main, ["list", str(folder.parent)]))

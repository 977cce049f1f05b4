"""Bad folders and mismatched targets: one error, equal on every rank; the target is unchanged."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.equality import same
from tests.support.format.manifests import edit_index, edit_manifest
from tests.support.harness import make_checkpointer, try_ranks
from tests.support.limits import alarm
from tests.support.machines.cluster_model import read_files
from tests.support.refusals import HARD, REFUSED, same_error
from tests.support.torch_training import train_step
from unified_ckpt.cli.main import main
from unified_ckpt.format import digests
from unified_ckpt.format.header import encode_header
from unified_ckpt.format.manifest_fields import IndexFile
from unified_ckpt.runtime.comm.comm import Comm

SHAPES = {"embed": (302, 256), "heads": (302, 256), "norm": (257,)}
STATES = {"embed/exp_avg": (302, 256), "embed/step": ()}
RULES = {"*embed*": {"tp": 0}, "heads": {"tp": 1}}
EXTRA = {"step": 3, "seen": bytes(5000)}
MANIFEST = "unified_checkpoint.json"
UNSYNCED = uc.SaveOptions(fsync=False)

Tensors = dict[str, torch.Tensor]


# a sound checkpoint, and targets for it


def layout(world: int) -> uc.Layout | None:
    """Two ranks cut `embed` by rows and `heads` by columns."""
    return uc.Layout({"tp": world}, RULES) if world > 1 else None


def share(tensors: Tensors, rank: int, world: int) -> Tensors:
    """The slices that a rank holds of whole tensors."""
    dims = {"embed": 0, "heads": 1, "embed/exp_avg": 0}
    return {
        n: t.chunk(world, dims[n])[rank].clone() if n in dims and world > 1 else t
        for n, t in tensors.items()
    }


def filled(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def states(rank: int, world: int, *, seed: int) -> list[Tensors]:
    """A rank's model and optimizer state."""
    wholes = (filled(SHAPES, seed=seed), filled(STATES, seed=seed + 1))
    return [share(whole, rank, world) for whole in wholes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks; the files of `embed` and `heads` have equal sizes."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoint-3"

    def act(comm: Comm) -> None:
        model, optimizer = states(comm.rank, 2, seed=1)
        make_checkpointer(comm).save(
            folder,
            model=model,
            optimizer=optimizer,
            layout=layout(2),
            step=3,
            extra=EXTRA,
            rank_extra={"rng": comm.rank},
            options=uc.SaveOptions(max_file_bytes=1, fsync=False),
        )

    assert try_ranks(2, act, timeout_seconds=HARD) == [None, None]
    assert file_of(folder, "embed").stat().st_size == file_of(folder, "heads").stat().st_size
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / sound.name)


def file_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def load_fails(
    path: Path | list[Path],
    kind: type[uc.CheckpointError],
    match: str,
    *,
    world: int,
    touched: bool = False,
) -> uc.CheckpointError:
    """Check that a load raises the same error on every rank and leaves each target unchanged."""
    targets = [states(rank, world, seed=7) for rank in range(world)]
    before = copy.deepcopy(targets)

    def act(comm: Comm) -> None:
        model, optimizer = targets[comm.rank]
        make_checkpointer(comm).load(
            path,
            model=model,
            optimizer=optimizer,
            layout=layout(world),
            options=uc.LoadOptions(timeout_seconds=HARD),
        )

    error = same_error(list(try_ranks(world, act, timeout_seconds=HARD)), kind, match)
    assert touched or same(targets, before), "the target was touched"
    return error


def with_one_and_two_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("world", [1, 2])(test)


@with_one_and_two_ranks
def test_load_sound_checkpoint(folder: Path, world: int) -> None:
    """Also of a newer minor version, through links to its files."""
    edit_manifest(folder, lambda m: m.update(format_version="1.9", mood="fine"))
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder.parent / f"blob-{number}")
        path.symlink_to(folder.parent / f"blob-{number}")

    def act(comm: Comm) -> None:
        model, optimizer = states(comm.rank, world, seed=7)
        report = make_checkpointer(comm).load(
            folder, model=model, optimizer=optimizer, layout=layout(world)
        )
        assert same([model, optimizer], states(comm.rank, world, seed=1))
        assert (report.step, report.extra) == (3, EXTRA)
        assert report.rank_extra == ({"rng": comm.rank} if world == 2 else None)

    assert try_ranks(world, act, timeout_seconds=HARD) == [None] * world
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as opened:
        assert list(opened.rank_extra) == [{"rng": 0}, {"rng": 1}]


# damaged folders


def resized(name: str, change: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(
        file_of(folder, name), change(file_of(folder, name).stat().st_size)
    )


def swapped(folder: Path) -> None:
    first, second = file_of(folder, "embed"), file_of(folder, "heads")
    body = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(body)


def index_with_a_key_twice(folder: Path) -> None:
    """One flipped bit is enough: `"embed/step"` has become `"embed/exp_avg"`."""
    path = folder / "optimizer.safetensors.index.json"
    path.write_text(path.read_text().replace("embed/step", "embed/exp_avg"))
    record = IndexFile.from_bytes(path.read_bytes()).model_dump()
    edit_manifest(folder, lambda m: m["parts"]["optimizer"].update(index=record))


def in_index(**files: str) -> Callable[[Path], None]:
    """Entries of the model's index that name other files: those of a tensor, where it is one."""

    def damage(folder: Path) -> None:
        (folder / "unlisted.safetensors").write_bytes(file_of(folder, "embed").read_bytes())
        places = {
            name: file_of(folder, file).name if file in SHAPES else file
            for name, file in files.items()
        }
        edit_index(folder, "model", lambda index: index["weight_map"].update(places))

    return damage


def flipped(file: str, offset_of: bytes) -> Callable[[Path], None]:
    return lambda folder: flip(folder / file, (folder / file).read_bytes().rindex(offset_of))


OTHER_SIZE = r"model-\d+-of-\d+\.safetensors: has \d+ bytes; the manifest says \d+"
OTHER_FILES = r"index\.json: .*safetensors is only in the manifest or only in the index"
NO_MANIFEST = r"checkpoint-3: is an unfinished save: it has no unified_checkpoint\.json, expected"
BAD_CRC = r"optimizer\.safetensors\.index\.json: has CRC \w{16}; the manifest says \w{16}; `unif"
DAMAGED: dict[str, tuple[Callable[[Path], object], type[uc.CheckpointError], str]] = {
    "truncated": (resized("heads", lambda _: 1000), uc.IntegrityError, OTHER_SIZE),
    "last byte cut": (resized("embed", lambda size: size - 1), uc.IntegrityError, OTHER_SIZE),
    "byte appended": (resized("embed", lambda size: size + 1), uc.IntegrityError, OTHER_SIZE),
    "emptied": (resized("norm", lambda _: 0), uc.IntegrityError, OTHER_SIZE),
    "swapped": (swapped, uc.IntegrityError, r"safetensors: .*header"),
    "header bit": (
        lambda folder: flip(file_of(folder, "embed"), 20),
        uc.IntegrityError,
        r"safetensors: .*header",
    ),
    "missing file": (
        lambda folder: file_of(folder, "heads").unlink(),
        uc.IncompleteError,
        r"files are missing \(1\):\n  model-\d+-of-\d+\.safetensors with 1 tensor\(s\): "
        r"model:heads",
    ),
    "missing index": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        uc.IncompleteError,
        r"model\.safetensors\.index\.json: is missing",
    ),
    "unlisted file": (in_index(embed="unlisted.safetensors"), uc.IntegrityError, OTHER_FILES),
    "index of a missing file": (
        in_index(embed="model-00009-of-00009.safetensors"),
        uc.IntegrityError,
        OTHER_FILES,
    ),
    "index without a file": (
        lambda folder: edit_index(folder, "model", lambda index: index["weight_map"].pop("embed")),
        uc.IntegrityError,
        OTHER_FILES,
    ),
    "index of the wrong file": (
        in_index(embed="heads", heads="embed"),
        uc.IntegrityError,
        r"safetensors: only (its header|the index of model) lists '(embed|heads)'",
    ),
    "index with a key twice": (
        index_with_a_key_twice,
        uc.FormatError,
        r"optimizer\.safetensors\.index\.json: got key 'embed/exp_avg' twice in one object",
    ),
    "index bit": (
        flipped("optimizer.safetensors.index.json", b"embed/step"),
        uc.IntegrityError,
        BAD_CRC,
    ),
    "index torn": (
        lambda folder: (folder / "optimizer.safetensors.index.json").write_text('{"weight_map": {'),
        uc.IntegrityError,
        BAD_CRC,
    ),
    "index outside of the folder": (
        in_index(embed="../../../etc/passwd"),
        uc.FormatError,
        r"index\.json: file name '\.\./\.\./\.\./etc/passwd' leads out of the folder",
    ),
    "manifest outside of the folder": (
        lambda folder: edit_manifest(
            folder,
            lambda m: m["parts"]["model"]["files"].update(
                {"/etc/passwd": {"nbytes": 1, "header_crc": "0" * 16}}
            ),
        ),
        uc.FormatError,
        r"unified_checkpoint\.json: parts\.model\.files.*'/etc/passwd' leads out of the folder",
    ),
    "unknown format version": (
        lambda folder: edit_manifest(folder, lambda m: m.update(format_version="2.0")),
        uc.FormatError,
        r"unified_checkpoint\.json: got format version 2\.0, expected at most 1\.x",
    ),
    "manifest torn": (
        lambda folder: os.truncate(folder / MANIFEST, 900),
        uc.FormatError,
        r"unified_checkpoint\.json: not valid JSON",
    ),
    "empty manifest": (
        lambda folder: os.truncate(folder / MANIFEST, 0),
        uc.FormatError,
        r"unified_checkpoint\.json: not valid JSON",
    ),
    "missing manifest": (lambda folder: (folder / MANIFEST).unlink(), uc.FormatError, NO_MANIFEST),
    "extra bit": (
        lambda folder: flip(folder / "extra.safetensors", -1),
        uc.IntegrityError,
        r"extra\.safetensors: is not the file that was written",
    ),
    "missing extra": (
        lambda folder: (folder / "extra.safetensors").unlink(),
        uc.IncompleteError,
        r"extra\.safetensors: is missing",
    ),
    "missing digests": (
        lambda folder: (folder / "digests.safetensors").unlink(),
        uc.IncompleteError,
        r"digests\.safetensors: is missing",
    ),
}
# Only a load with the world size of the save reads it. One bad entry fails all ranks.
RANK_EXTRA: dict[str, tuple[Callable[[Path], object], type[uc.CheckpointError], str]] = {
    "rank_extra bit": (
        flipped("rank_extra.safetensors", b"UCPACK01"),
        uc.IntegrityError,
        r"rank 1: .*rank_extra.*entry 1 has CRC",
    ),
    "rank_extra cut": (
        lambda folder: os.truncate(folder / "rank_extra.safetensors", 60),
        uc.IntegrityError,
        r"rank_extra\.safetensors: has 60 bytes; the manifest says \d+",
    ),
}


@pytest.mark.parametrize(
    ("case", "world"),
    [*((case, world) for case in DAMAGED for world in (1, 2)), *((case, 2) for case in RANK_EXTRA)],
)
def test_load_and_verify_damaged_folder(folder: Path, case: str, world: int) -> None:
    damage, kind, match = (DAMAGED | RANK_EXTRA)[case]
    damage(folder)
    load_fails(folder, kind, match, world=world)
    try:
        problems = uc.verify(folder).problems
    except kind as error:
        problems = tuple(re.findall(match, str(error)))
    assert problems or case == "rank_extra bit", "verify without `deep` reads no entry"


def test_unfinished_save_is_refused_by_its_name(folder: Path) -> None:
    unfinished = folder.rename(folder.with_name(".unified-0123-checkpoint-3"))
    for name in (MANIFEST, "digests.safetensors"):
        (unfinished / name).unlink()
    for read in (loaded, read_all, uc.verify):
        with pytest.raises(uc.FormatError, match=NO_MANIFEST):
            read(unfinished)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda weight_map: weight_map.pop("b"),
            r"model\.safetensors: only its header lists 'b', expected the same tensors in both",
        ),
        (
            lambda weight_map: weight_map.update(c=weight_map["a"]),
            r"model\.safetensors: only the index of model lists 'c', expected the same "
            r"tensors in both",
        ),
    ],
)
def test_load_index_and_header_with_other_tensors(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], match: str
) -> None:
    """If only the header names a tensor, the target would silently keep its old values."""
    uc.save(tmp_path / "c", model={"a": torch.ones(2), "b": torch.ones(2)}, options=UNSYNCED)
    edit_index(tmp_path / "c", "model", lambda index: edit(index["weight_map"]))
    target = {"a": torch.zeros(2)}
    for read in (partial(uc.load, model=target), read_all):
        with pytest.raises(uc.IntegrityError, match=match):
            read(tmp_path / "c")
    assert not target["a"].any()


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("optimizer", "scalars"), "x", "optimizer is not a dict with string keys"),
        (("optimizer", "scalars"), [1], "optimizer is not a dict with string keys"),
        (
            ("optimizer", "scalars"),
            {"weight": 3},
            "optimizer: the state of weight is a int, expected a dict",
        ),
        (("optimizer", "groups", 0, "options"), [1], "param_groups_0 is not a dict with string"),
        (("optimizer", "groups", 0, "options"), 5, "param_groups_0 is not a dict with string keys"),
        (("modules",), [1], "modules is not a dict with string keys"),
    ],
)
def test_manifest_tree_of_wrong_type(
    tmp_path: Path, path: tuple[str | int, ...], value: object, match: str
) -> None:
    model = torch.nn.Linear(2, 2)
    job: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    uc.save(tmp_path / "c", **job, options=UNSYNCED)
    edit_manifest(tmp_path / "c", lambda manifest: put(manifest, path, value))
    with torch.no_grad():
        before = model.weight.fill_(7).clone()
    with pytest.raises(uc.FormatError, match=f"unified_checkpoint.json: {match}"):
        uc.load(tmp_path / "c", **job)
    assert torch.equal(model.weight, before)


def put(node: Any, path: tuple[str | int, ...], value: object) -> None:
    """Replace the value at a path of keys and indices."""
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


# flipped bits


@pytest.mark.incident("pytorch#126952")
@with_one_and_two_ranks
def test_load_flipped_bit(folder: Path, world: int) -> None:
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
    (problem,) = uc.verify(folder, deep=True).problems
    assert re.search(text, problem)
    assert uc.verify(folder).ok
    model, _ = states(0, 1, seed=7)
    assert uc.load(folder, model=model, options=uc.LoadOptions(verify="off")).verified_bytes == 0
    assert not torch.equal(model["heads"], filled(SHAPES, seed=1)["heads"])


def test_slice_verifies_whole_blocks(tmp_path: Path) -> None:
    """A slice verifies the 1 MiB blocks that it contains, also under renamed tensors.

    If it contains no whole block, no digest is read.
    """
    folder = tmp_path / "checkpoint-1"
    full = {"w": torch.arange(650_000.0).reshape(1300, 500), "b": torch.arange(7.0)}
    uc.save(folder, model=full, options=UNSYNCED)
    flip(folder / "model.safetensors", 1_500_000 - full["w"].nbytes)  # row 750, block 1
    wrong = (
        r"model:w: bytes read are not .*\n  block 1 \(from byte 1048576 of the tensor, in "
        r".*model\.safetensors\) has CRC \w{16}, expected"
    )
    rules = uc.SourceOptions(rename=[{"match": "w", "to": "v"}])
    with uc.open(folder) as source, uc.open(folder, options=rules) as renamed:
        for tensor in (source["model"]["w"], renamed["model"]["v"]):
            for index in (..., slice(400, None), slice(524, 1049)):
                with pytest.raises(uc.IntegrityError, match=wrong):
                    tensor[index]
            for rows in (slice(750), slice(1049, None)):
                assert torch.equal(tensor[rows], full["w"][rows])
            assert torch.equal(tensor[:, 100:300][:700], full["w"][:700, 100:300])
        assert torch.equal(source["model"]["b"][...], full["b"])
    os.truncate(folder / "digests.safetensors", 100)
    with uc.open(folder) as source:
        assert torch.equal(source["model"]["w"][:10], full["w"][:10])
        with pytest.raises(uc.IntegrityError, match=r"digests\.safetensors: has 100 bytes"):
            source["model"]["b"][...]


@pytest.mark.parametrize("verify", ["read", "full"])
def test_full_verification_reads_whole_blocks(folder: Path, verify: str) -> None:
    """The flipped bit is in the last rows; the rank loads the first rows of the same block."""
    flip(file_of(folder, "embed"), -1000)

    def act(comm: Comm) -> None:
        make_checkpointer(comm).load(
            folder,
            model=states(0, 2, seed=7)[0] if comm.rank == 0 else {},
            layout=layout(2),
            strict=False,
            options=uc.LoadOptions(verify=verify, timeout_seconds=HARD),
        )

    outcomes = try_ranks(2, act, timeout_seconds=HARD)
    if verify == "read":
        assert outcomes == [None, None]
    else:
        same_error(outcomes, uc.IntegrityError, r"model:embed: block 0 .* has CRC")


# Hugging Face folders, which have no manifest

INDEX = "model.safetensors.index.json"


def entry(low: int, high: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [low, high]}


def raw_file(header: object, body: bytes = b"", *, claims: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if claims is None else claims).to_bytes(8, "little") + text + body


def index_of(**files: str) -> bytes:
    return json.dumps({"weight_map": files}).encode()


A = {"a": entry(0, 8)}
SOUND = raw_file(A, bytes(8))
PLAIN: list[tuple[dict[str, bytes], type[uc.CheckpointError], str]] = [
    (
        {"model.safetensors": raw_file({**A, "b": entry(4, 12)}, bytes(12))},
        uc.FormatError,
        r"tensor 'b' overlaps tensor 'a'",
    ),
    ({"model.safetensors": raw_file(A, bytes(7))}, uc.IntegrityError, r"file is truncated"),
    (
        {"model.safetensors": raw_file(A, bytes(7)), INDEX: index_of(a="model.safetensors")},
        uc.IntegrityError,
        r"file is truncated",
    ),
    (
        {"model.safetensors": raw_file(A, bytes(9))},
        uc.FormatError,
        r"1 bytes belong to no tensor",
    ),
    (
        {"model.safetensors": raw_file(A, bytes(8), claims=2**63)},
        uc.FormatError,
        r"model\.safetensors: got a header length of 9223372036854775808 bytes, expected at most",
    ),
    (
        {"model.safetensors": raw_file(A, bytes(8), claims=99_999_999)},
        uc.FormatError,
        r"header length of 99999999 bytes in a file of \d+; the file is truncated",
    ),
    *(
        (
            {"model.safetensors": SOUND, INDEX: index_of(a=name)},
            uc.FormatError,
            r"leads out of the folder; expected a plain file name",
        )
        for name in ("../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b", "C:x")
    ),
    ({INDEX: index_of(a="")}, uc.FormatError, r"leads out of the folder; expected a plain"),
    (
        {INDEX: index_of(a="m\ud800.safetensors")},
        uc.FormatError,
        r"file name 'm\\ud800\.safetensors' is not valid Unicode; expected a plain file name",
    ),
    (
        {
            "model-00001-of-00002.safetensors": SOUND,
            INDEX: index_of(
                a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"
            ),
        },
        uc.IncompleteError,
        r"missing \(1\):\n  model-00002-of-00002\.safetensors with 1 tensor\(s\): model:b",
    ),
    (
        {"model.safetensors": SOUND, INDEX: index_of(a="model.safetensors", b="model.safetensors")},
        uc.IntegrityError,
        r"model\.safetensors: has no tensor 'b', but the index of model lists it there",
    ),
]


@pytest.mark.parametrize(("files", "kind", "match"), PLAIN)
def test_load_plain_safetensors_that_are_bad(
    tmp_path: Path, files: dict[str, bytes], kind: type[uc.CheckpointError], match: str
) -> None:
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    target = {"a": torch.full((2,), 5.0), "b": torch.full((2,), 6.0)}
    for read in (partial(uc.load, model=target), read_all):
        with pytest.raises(kind, match=match):
            read(tmp_path)
    assert (target["a"].tolist(), target["b"].tolist()) == ([5, 5], [6, 6])


def test_dtype_that_torch_lacks(tmp_path: Path) -> None:
    """Once a KeyError, for which a view says that it has no such tensor."""
    header = {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, bytes(3)))
    with uc.open(tmp_path) as opened:
        for read in (lambda: opened["model"]["a"], lambda: "a" in opened["model"]):
            with pytest.raises(uc.FormatError, match="dtype F6_E2M3 is missing in this torch"):
                read()


# no checkpoint in the folder, or several folders


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path, r"checkpoint-3: there is no such folder"),
        (lambda path: path.mkdir() or path, r"checkpoint-3: holds no checkpoint: expected unified"),
        (lambda path: path.touch() or path, r"checkpoint-3: is a file, expected a checkpoint fold"),
        (lambda path: [], r"got no path, expected a checkpoint's"),
        (
            lambda path: save_file({}, path.with_name("model.safetensors")) or [path.parent, path],
            r"checkpoint-3: there is no such folder",
        ),
    ],
)
@with_one_and_two_ranks
def test_load_without_checkpoint(
    tmp_path: Path, make: Callable[[Path], Path | list[Path]], match: str, world: int
) -> None:
    load_fails(make(tmp_path / "checkpoint-3"), uc.NotFoundError, match, world=world)


@pytest.mark.parametrize(("name", "match"), REFUSED.items())
def test_unsupported_format_is_refused_by_name(tmp_path: Path, name: str, match: str) -> None:
    """As a file and in a folder, by every entry point. Next to readable weights it is ignored."""
    (tmp_path / name).write_bytes(b"x")
    target = {"a": torch.zeros(2)}
    for path in (tmp_path, tmp_path / name):
        for call in (
            partial(uc.load, path, model=target),
            partial(uc.open, path),
            partial(uc.convert, path, tmp_path.parent / "converted"),
        ):
            with pytest.raises(uc.FormatError, match=match):
                call()
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    uc.load(tmp_path, model=target)
    assert target["a"].tolist() == [1, 1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("make", "note"),
    [
        (shutil.rmtree, "there is no such folder"),
        (lambda bad: (bad / MANIFEST).write_text("{"), r"unified_checkpoint\.json: "),
        (lambda bad: (bad / "model.safetensors").unlink(), "files are missing"),
    ],
    ids=["missing", "manifest", "file"],
)
@with_one_and_two_ranks
def test_load_of_two_folders_one_broken(
    tmp_path: Path, make: Callable[[Path], object], note: str, reverse: bool, world: int
) -> None:
    """The intact folder is loaded, and a note names the problem of the other folder."""
    good, bad = tmp_path / "good" / "checkpoint-1", tmp_path / "bad" / "checkpoint-1"
    uc.save(good, model={"w": torch.ones(4)}, step=1, options=UNSYNCED)
    shutil.copytree(good, bad)
    make(bad)

    def act(comm: Comm) -> None:
        target = {"w": torch.zeros(4)}
        report = make_checkpointer(comm).load([good, bad] if reverse else [bad, good], model=target)
        assert (report.step, target["w"].tolist()) == (1, [1.0] * 4)
        assert re.search(f"bad/checkpoint-1.*{note}", " ".join(report.notes))

    assert try_ranks(world, act, timeout_seconds=HARD) == [None] * world
    shutil.rmtree(good)
    for error in try_ranks(world, act, timeout_seconds=HARD):
        assert isinstance(error, uc.CheckpointError), error


def test_rank_extra_of_another_save(tmp_path: Path) -> None:
    """Both files have the same size and header, and all entries have valid CRCs."""
    paths = [tmp_path / f"checkpoint-{number}" for number in (1, 2)]
    for number, path in enumerate(paths):
        uc.save(path, model={"w": torch.zeros(2)}, rank_extra=number, options=UNSYNCED)
    shutil.copy(paths[0] / "rank_extra.safetensors", paths[1])
    for read in (partial(uc.load, model={"w": torch.zeros(2)}), read_all):
        with pytest.raises(uc.IntegrityError, match=r"rank_extra\.safetensors: its index has CRC"):
            read(paths[1])
    assert not uc.verify(paths[1]).ok


WRONG_ENTRIES: dict[str, tuple[dict[str, list[int]], str]] = {
    "no entry of the rank": ({"crcs": [], "offsets": [0]}, "its index ends at byte"),
    "reversed": ({"crcs": [0], "offsets": [8, 4]}, r"entry 0 is bytes \[8, 4\), expected a range"),
    "beyond its file": ({"crcs": [0], "offsets": [0, 99]}, r"entry 0 is bytes \[0, 99\), expected"),
    "another CRC": ({"crcs": [1], "offsets": [0, 8]}, "entry 0 has CRC"),
    "no offsets": ({"crcs": [1]}, "holds crcs, blobs, expected crcs, offsets and blobs"),
}


@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_sealed_rank_extra_with_a_wrong_index(tmp_path: Path, case: str) -> None:
    """All CRCs in the manifest are right: another program wrote the file."""
    tables, match = WRONG_ENTRIES[case]
    uc.save(tmp_path / "c", model={"w": torch.zeros(2)}, rank_extra=1, options=UNSYNCED)
    sections = [(name, "U64", (len(words),)) for name, words in tables.items()]
    header, _ = encode_header([*sections, ("blobs", "U8", (64,))])
    words = [word for table in tables.values() for word in table]
    prefix = header + struct.pack(f"<{len(words)}Q", *words)
    body = prefix + bytes(64)
    (tmp_path / "c" / "rank_extra.safetensors").write_bytes(body)
    sums = {"crc": body, "header_crc": header, "table_crc": prefix}
    record = {name: f"{digests.crc(content):016x}" for name, content in sums.items()}
    edit_manifest(tmp_path / "c", lambda m: m["rank_extra"].update(record, nbytes=len(body)))
    with pytest.raises(uc.CheckpointError, match=rf"rank_extra\.safetensors: {match}"):
        read_all(tmp_path / "c")


# targets that do not fit


@with_one_and_two_ranks
def test_mismatch_lists_differences_of_all_ranks(sound: Path, world: int) -> None:
    """Ranks have different faults; every rank gets all of them, and nothing is loaded."""
    targets = [states(rank, world, seed=7)[0] for rank in range(world)]
    for target in targets:
        del target["embed"]
    targets[0]["lm_head"] = torch.zeros(3)
    targets[-1] |= {"norm": torch.zeros(258), "heads": targets[-1]["heads"].half()}
    before = copy.deepcopy(targets)

    def act(comm: Comm) -> None:
        rank_layout = uc.Layout({"tp": world}, {"heads": {"tp": 1}}) if world > 1 else None
        make_checkpointer(comm).load(sound, model=targets[comm.rank], layout=rank_layout)

    error = same_error(
        list(try_ranks(world, act, timeout_seconds=HARD)),
        uc.MismatchError,
        r"checkpoint and target differ \(4\):",
    )
    assert isinstance(error, uc.MismatchError)
    assert (error.missing, error.unexpected) == (("model:lm_head",), ("model:embed",))
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
    assert same(targets, before)


@with_one_and_two_ranks
def test_expanded_target_on_one_rank(tmp_path: Path, world: int) -> None:
    """A load into it raises on all ranks before a byte is written."""
    full = {"a": torch.ones(30, 20), "b": torch.ones(1).expand(8)}
    uc.save(tmp_path / "c", model=full, options=UNSYNCED)
    targets = [{"a": torch.zeros(30, 20), "b": torch.zeros(8)} for _ in range(world)]
    targets[-1]["b"] = torch.zeros(1).expand(8)

    def act(comm: Comm) -> None:
        make_checkpointer(comm).load(tmp_path / "c", model=targets[comm.rank])

    pattern = (
        r"model:b: is expanded: all elements along dim 0 of shape \(8,\) share memory; call "
        r"`contiguous\(\)`"
    )
    same_error(list(try_ranks(world, act, timeout_seconds=HARD)), uc.LayoutError, pattern)
    assert not any(tensor.any() for target in targets for tensor in target.values())
    targets[-1] = {"a": torch.zeros(20, 30).t(), "b": torch.zeros(16)[::2]}
    assert try_ranks(world, act, timeout_seconds=HARD) == [None] * world
    assert all(tensor.all() for target in targets for tensor in target.values())


def test_target_that_state_dict_computes(tmp_path: Path) -> None:
    """As packed weights are: what a load fills is thrown away, and the module keeps its own."""

    class Packed(torch.nn.Linear):
        scale = torch.ones(2)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}scale"] = self.scale * 2

    class Kept(Packed):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}scale"] = self.scale.detach()  # the module's own memory

    uc.save(tmp_path / "c", model=Packed(2, 2), parts={"ema": Packed(2, 2)}, options=UNSYNCED)
    with uc.open(tmp_path / "c") as opened:
        assert same(opened["model"]["scale"][...], torch.full((2,), 2.0))
    parts = {"ema": Packed(2, 2)}
    for targets, name in (({"model": Packed(2, 2)}, "model"), ({"parts": parts}, "ema")):
        before = copy.deepcopy(next(iter(targets.values())))
        text = (
            rf"^{name}:scale: is computed by the module's state_dict\(\), so a load cannot fill it"
        )
        with pytest.raises(uc.LayoutError, match=text):
            uc.load(tmp_path / "c", **targets)
        module, copied = (
            t["ema"] if isinstance(t, dict) else t for t in (next(iter(targets.values())), before)
        )
        assert same(module.state_dict(), copied.state_dict()), "unchanged"
    kept = Kept(2, 2)
    kept.scale = torch.zeros(2)
    uc.load(tmp_path / "c", model=kept)
    assert same(kept.scale, torch.full((2,), 2.0))


@pytest.mark.incident("AReaL#1468")
def test_load_optimizer_without_saved_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    uc.save(tmp_path / "weights", model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train_step(optimizer)
    moments = [dict(state) for state in optimizer.state.values()]
    before = copy.deepcopy([dict(model.state_dict()), *moments])
    with pytest.raises(
        uc.MismatchError,
        match=r"(?s)optimizer:bias: is not in the checkpoint.*optimizer:weight: is not in the "
        r"checkpoint",
    ):
        uc.load(tmp_path / "weights", model=model, optimizer=optimizer)
    assert same([dict(model.state_dict()), *moments], before)


def test_load_on_subset_of_ranks(sound: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank == 1:
            options = uc.LoadOptions(timeout_seconds=0.5)
            make_checkpointer(comm).load(sound, model=states(0, 1, seed=7)[0], options=options)

    with pytest.raises(uc.RankError, match=r"load of .*: rank\(s\) 0 did not arrive within 0\.5 s"):
        raise try_ranks(2, act, timeout_seconds=HARD)[1]


# absurd numbers, special files


def numbers(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all integers in a manifest."""
    if type(node) is int:
        yield path
    listed = node if isinstance(node, list) else ()
    for key, value in node.items() if isinstance(node, dict) else enumerate(listed):
        yield from numbers(value, (*path, key))


def read_all(folder: Path) -> None:
    """Read every tensor and every `rank_extra`."""
    with uc.open(folder) as source:
        for part in source.parts:
            for tensor in source[part].values():
                tensor[...]
        list(source.rank_extra)


def restored(folder: Path) -> None:
    options = uc.ManagerOptions(on_preemption=False, keep_latest=1)
    with uc.CheckpointManager(folder.parent, options=options) as manager:
        manager.restore(model=states(0, 1, seed=7)[0])


def loaded(*paths: Path) -> None:
    uc.load(list(paths), model=states(0, 1, seed=7)[0], strict=False)


PRUNE = ["--keep-latest", "1", "--incomplete", "--older-than-hours", "0"]
READS: dict[str, Callable[[Path], object]] = {
    "open": read_all,
    "load": loaded,
    "load of several": lambda folder: loaded(folder, folder / "none"),
    "verify": lambda folder: uc.verify(folder, deep=True),
    "repair": uc.repair,
}
VERBS: dict[str, Callable[[Path], object]] = READS | {
    "convert": lambda folder: uc.convert(folder, folder.parent / "converted"),
    "save": lambda folder: uc.save(
        folder,
        model={"w": torch.ones(2)},
        options=UNSYNCED.model_copy(update={"if_exists": "keep_complete"}),
    ),
    "restore": restored,
    "list": lambda folder: main(["list", str(folder.parent)]),
    "inspect": lambda folder: main(["inspect", str(folder)]),
    "prune": lambda folder: main(["prune", str(folder.parent), *PRUNE]),
}


def within(seconds: float, act: Callable[[], object]) -> None:
    """Fail the test if the call takes longer, for example because it waits for a FIFO."""
    late = AssertionError(f"it did not end within {seconds} s")
    with contextlib.suppress(uc.CheckpointError, SystemExit), alarm(seconds, late):
        act()


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("number", [2**62, pytest.param(2**31 + 7, marks=pytest.mark.slow), 2**64])
def test_absurd_manifest_numbers(sound: Path, tmp_path: Path, number: int, verb: str) -> None:
    """Replaces each integer of a valid manifest in turn. No other file changes."""
    folder = Path(shutil.copytree(sound, tmp_path / sound.name))
    for path in numbers(json.loads((sound / MANIFEST).read_text())):
        shutil.copyfile(sound / MANIFEST, folder / MANIFEST)
        edit_manifest(folder, partial(put, path=path, value=number))
        within(10, partial(READS[verb], folder))
    shutil.copyfile(sound / MANIFEST, folder / MANIFEST)
    assert read_files(folder) == read_files(sound)


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_special_file_is_not_opened(sound: Path, tmp_path: Path, kind: str, verb: str) -> None:
    """Replaces each file of a checkpoint in turn, and adds one beside them.

    Opening a FIFO waits for a writer; reading a device may never end.
    """
    for file in (*sorted(path.name for path in sound.iterdir()), "notes.txt"):
        folder = Path(shutil.copytree(sound, tmp_path / file / sound.name))
        (folder / file).unlink(missing_ok=True)
        SPECIAL_FILES[kind](folder / file)
        within(10, partial(VERBS[verb], folder))


def test_load_fifo_is_refused_by_name(folder: Path) -> None:
    file = file_of(folder, "heads")
    file.unlink()
    os.mkfifo(file)
    match = rf"{file.name}: stat failed: is a FIFO, expected a regular file"
    load_fails(folder, uc.StorageError, match, world=2)


def test_save_with_attached_fifo(tmp_path: Path) -> None:
    def attach(folder: str) -> None:
        os.mkfifo(f"{folder}/pipe")

    within(10, lambda: uc.save(tmp_path / "c", model={"w": torch.ones(2)}, attach=attach))
    assert uc.verify(tmp_path / "c").ok

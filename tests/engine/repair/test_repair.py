"""A damaged folder repaired from copies: right to the last byte, or unchanged."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pytest
import torch

import unified_ckpt as uc
from tests.support.damaged_folders import NAME, body, folder, good, put, tensors
from tests.support.manifests import edit_manifest
from tests.support.node_damage import flip, save, shorten
from tests.support.simulated_nodes import folder_of
from unified_ckpt.cli.main import main
from unified_ckpt.engine.repair.repair import repair_folder
from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.locks import exclusive_lock, repair_lock
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import FaultPoint, FaultyStorage, FullStorage, SimulatedCrash

__all__ = ["folder", "good"]  # fixtures

Harm = Callable[[Path], object]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def other(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "other" / NAME))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another save with the same names, shapes and step."""
    return put(tmp_path_factory.mktemp("stranger") / NAME, seed=1)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def check_mended(folder: Path, good: Path, sources: Sequence[Path]) -> None:
    """Check that every byte is right, nothing is left over, and a second repair does nothing."""
    assert body(folder) == body(good)
    assert uc.verify(folder, deep=True).ok
    before = stamps(folder)
    again = uc.repair(folder, sources)
    assert (again.damage, again.repaired, again.problems, again.nbytes) == ((), (), (), 0)
    assert stamps(folder) == before


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def tear(file: Path) -> None:
    """Damage the start, where headers are."""
    file.write_bytes(bytes(40) + file.read_bytes()[40:])


HOW: dict[str, Harm] = {
    "flipped": flip,
    "short": shorten,
    "long": lengthen,
    "torn": tear,
    "empty": lambda f: f.write_bytes(b""),
    "gone": Path.unlink,
}
FILES = [
    "model-00001-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "optimizer-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    names.DIGESTS,
    names.EXTRA,
    names.RANK_EXTRA,
    names.MANIFEST,
]


@pytest.mark.parametrize(("file", "how"), [(file, how) for file in FILES for how in HOW])
def test_each_kind_of_damage_to_each_file(folder: Path, good: Path, file: str, how: str) -> None:
    HOW[how](folder / file)
    report = uc.repair(folder, [good])
    assert report.ok
    assert report.repaired == (file,)
    assert any(file in text for text in report.damage)
    assert report.nbytes == len((good / file).read_bytes())
    check_mended(folder, good, [good])


def test_everything_but_the_digests_is_damaged(folder: Path, good: Path) -> None:
    for file in FILES:
        if file not in (names.DIGESTS, names.EXTRA, names.RANK_EXTRA):
            tear(folder / file)
    report = uc.repair(folder, [good])
    assert report.ok
    assert len(report.repaired) == len(FILES) - 3
    assert report.repaired[-1] == names.MANIFEST
    check_mended(folder, good, [good])


def test_nothing_is_wrong(folder: Path, good: Path) -> None:
    check_mended(folder, good, [good])


# sources that are damaged too


def test_two_half_good_copies_make_one_good_one(folder: Path, other: Path, good: Path) -> None:
    """Other files, other blocks of a file, and other bytes of one block, of a header and of a file
    with one CRC.
    """
    wide = "model-00003-of-00003.safetensors"
    for at, one in ((0.3, folder), (0.6, other)):
        for file in (
            wide,
            names.DIGESTS,
            names.EXTRA,
            names.RANK_EXTRA,
            "optimizer-00001-of-00002.safetensors",
        ):
            flip(one / file, at=at)
        flip(one / wide, at=(20 if one is folder else 30) / (one / wide).stat().st_size)
    flip(folder / "model-00001-of-00003.safetensors")
    shorten(other / "model.safetensors.index.json")
    report = uc.repair(folder, [other])
    assert report.ok, report.problems
    assert any(str(other) in note and "is damaged there too" in note for note in report.notes)
    check_mended(folder, good, [other])
    assert uc.repair(other, [folder]).ok
    check_mended(other, good, [folder])


def test_a_source_without_a_manifest_gives_what_is_proved(
    folder: Path, other: Path, good: Path
) -> None:
    (other / names.MANIFEST).unlink()
    flip(folder / FILES[0])
    (folder / names.DIGESTS).unlink()
    report = uc.repair(folder, [other])
    assert report.ok
    assert any("only bytes of it that" in note for note in report.notes)
    check_mended(folder, good, [])


def test_three_folders_have_it_between_them(
    folder: Path, other: Path, good: Path, tmp_path: Path
) -> None:
    third = Path(shutil.copytree(good, tmp_path / "third"))
    for file in FILES[:3]:
        (folder / file).unlink()
    (other / FILES[0]).unlink()
    tear(third / FILES[1])
    (third / names.MANIFEST).write_text("{")
    assert uc.repair(folder, [other, third]).ok
    check_mended(folder, good, [other])


def test_block_damaged_in_all_copies_is_reported(folder: Path, other: Path, good: Path) -> None:
    """The same byte of both copies. Other damage is repaired."""
    for one in (folder, other):
        flip(one / FILES[1])
    flip(folder / names.EXTRA)
    before = body(folder)
    report = uc.repair(folder, [other])
    assert not report.ok
    assert report.repaired == (names.EXTRA,)
    (problem,) = report.problems
    assert f"{FILES[1]}: block 1 of model:wide has CRC" in problem
    assert "no copy has model:wide block 1; add another copy of save" in problem
    assert f"searched: {other}" in problem
    assert body(folder) == {**before, names.EXTRA: body(good)[names.EXTRA]}


# nothing to repair from


@pytest.mark.parametrize("file", [f for f in FILES if f != names.MANIFEST])
def test_without_sources_reports_what_is_missing(folder: Path, good: Path, file: str) -> None:
    """Or repairs it, if the folder itself proves it."""
    (folder / file).unlink()
    before = stamps(folder)
    report = uc.repair(folder)
    if file in (names.DIGESTS, "model.safetensors.index.json"):
        assert report.repaired == (file,)
        check_mended(folder, good, [])
        return
    assert not report.ok
    assert all(file in problem and "searched: no source" in problem for problem in report.problems)
    assert stamps(folder) == before


def test_digests_that_are_damaged_where_one_block_is_too(folder: Path, good: Path) -> None:
    """Neither what the blocks give nor what the file says is right; between them they are, and
    prove it.
    """
    flip(folder / names.DIGESTS, at=0.999)
    flip(folder / "optimizer-00001-of-00002.safetensors")
    report = uc.repair(folder)
    assert report.repaired == (names.DIGESTS,)
    assert len(report.problems) == 1
    assert (folder / names.DIGESTS).read_bytes() == (good / names.DIGESTS).read_bytes()


# another save, another manifest


@pytest.mark.parametrize("file", FILES)
def test_a_source_of_another_save_is_refused(folder: Path, stranger: Path, file: str) -> None:
    (folder / file).unlink()
    before = stamps(folder)
    with pytest.raises(uc.CheckpointError) as raised:
        uc.repair(folder, [stranger])
    if file != names.MANIFEST:
        assert isinstance(raised.value, uc.MismatchError)
        ids = [
            json.loads((one / names.MANIFEST).read_text())["save_id"] for one in (stranger, folder)
        ]
        assert f"{stranger}: holds save {ids[0]} (step 7); {folder} is of save {ids[1]}" in str(
            raised.value
        )
    else:
        assert isinstance(raised.value, uc.IntegrityError)
    assert stamps(folder) == before


def test_what_is_left_of_a_manifest_tells_the_save(folder: Path, stranger: Path) -> None:
    shorten(folder / names.MANIFEST)
    save_id = json.loads((stranger / names.MANIFEST).read_text())["save_id"]
    with pytest.raises(
        uc.MismatchError, match=rf"of save {save_id}, and the rest of its manifest is of save"
    ):
        uc.repair(folder, [stranger])


def test_manifests_of_one_save_that_differ(folder: Path, other: Path, good: Path) -> None:
    """Nobody can know which is right; without the one that the user knows to be wrong, the other is
    proved and put in.
    """
    edit_manifest(folder, lambda told: told.update(step=8))
    before = stamps(folder)
    with pytest.raises(
        uc.IntegrityError, match="their manifests differ in step; leave this copy out"
    ):
        uc.repair(folder, [other])
    assert stamps(folder) == before
    (folder / names.MANIFEST).unlink()
    assert uc.repair(folder, [other]).ok
    check_mended(folder, good, [other])


def test_two_sources_whose_manifests_differ(folder: Path, other: Path, good: Path) -> None:
    edit_manifest(other, lambda told: told.update(step=8))
    (folder / names.MANIFEST).unlink()
    with pytest.raises(uc.IntegrityError, match="found two manifests that match its files"):
        uc.repair(folder, [other, good])


def test_without_manifest_and_digests_nothing_that_is_there_is_overwritten(
    folder: Path, good: Path
) -> None:
    """All that is there is of the save: what is missing is brought. One block is not: whose folder
    it is, nobody knows.
    """
    for file in (names.MANIFEST, names.DIGESTS, FILES[0]):
        (folder / file).unlink()
    flip(folder / FILES[1])
    before = stamps(folder)
    with pytest.raises(
        uc.IntegrityError,
        match=r"nothing proves that this folder is of save \w+: model-00003-of-00003.*block 1 "
        r"of model:wide",
    ):
        uc.repair(folder, [good])
    assert stamps(folder) == before
    flip(folder / FILES[1])
    assert uc.repair(folder, [good]).ok
    check_mended(folder, good, [good])


@pytest.mark.parametrize("file", [names.DIGESTS, names.EXTRA, names.RANK_EXTRA])
def test_without_a_manifest_small_files_must_fit(folder: Path, good: Path, file: str) -> None:
    (folder / names.MANIFEST).unlink()
    flip(folder / file)
    with pytest.raises(uc.IntegrityError, match="found none that matches its files in 1 folder"):
        uc.repair(folder, [good])


def test_an_empty_folder_is_not_filled(tmp_path: Path, good: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(uc.IntegrityError, match="no tensor file is intact"):
        uc.repair(tmp_path / NAME, [good])
    assert os.listdir(tmp_path / NAME) == []


def test_the_manifest_waits_for_all_else(folder: Path, other: Path) -> None:
    for one in (folder, other):
        flip(one / FILES[1])
    (folder / names.MANIFEST).unlink()
    report = uc.repair(folder, [other])
    assert (
        report.problems[-1]
        == f"{names.MANIFEST}: is written once everything that it describes is intact"
    )
    assert not (folder / names.MANIFEST).exists()


def test_nobody_has_a_manifest(folder: Path, other: Path) -> None:
    for one in (folder, other):
        (one / names.MANIFEST).unlink()
    with pytest.raises(uc.IncompleteError, match="give a copy of this folder with its manifest"):
        uc.repair(folder, [other])


def test_what_cannot_be_repaired_at_all(folder: Path, good: Path, tmp_path: Path) -> None:
    with pytest.raises(uc.NotFoundError, match="does not exist"):
        uc.repair(tmp_path / "absent", [good])
    with pytest.raises(uc.NotFoundError, match="does not exist"):
        uc.repair(folder, [tmp_path / "absent"])
    with pytest.raises(uc.StorageError, match="is the folder to repair"):
        uc.repair(folder, [folder])
    with pytest.raises(uc.StorageError, match="got a URL, expected a local folder"):
        uc.repair("memory://x", [good])
    (folder / "probe").write_text("x")
    with pytest.raises(uc.FormatError, match="got an unfinished save"):
        uc.repair(folder, [good])


def test_a_part_that_was_deleted_stays_deleted(folder: Path, good: Path) -> None:
    for file in folder.glob("optimizer*"):
        file.unlink()
    flip(folder / FILES[0])
    report = uc.repair(folder, [good])
    assert report.ok
    assert report.repaired == (FILES[0],)
    assert (
        "part optimizer: neither its index nor any of its files exists: it was deleted, and is "
        "not restored" in report.notes
    )
    assert not list(folder.glob("optimizer*"))


# crashes, full disks, others who want the folder


def mend_on(storage: LocalStorage, good: Path) -> uc.RepairReport:
    with repair_lock(storage.root) as found, storage:
        return repair_folder(storage, [LocalStorage(str(good))], folder=found)


def check_no_worse(folder: Path, before: dict[str, bytes], right: dict[str, bytes]) -> None:
    for name, held in body(folder).items():
        assert held in (before.get(name), right.get(name)) or name.startswith(".repair-"), name
    assert before.keys() <= body(folder).keys()


def hurt(folder: Path) -> None:
    """Damage, truncate and delete files, the manifest too."""
    flip(folder / FILES[0])
    shorten(folder / FILES[1])
    for file in (FILES[2], names.EXTRA, names.RANK_EXTRA, names.MANIFEST):
        (folder / file).unlink()
    tear(folder / "model.safetensors.index.json")


def test_a_crash_at_every_operation(folder: Path, good: Path, tmp_path: Path) -> None:
    hurt(folder)
    before, right = body(folder), body(good)
    at, through = 0, False
    while not through:
        root, fuse = tmp_path / f"at-{at}" / NAME, FaultPoint(at)
        shutil.copytree(folder, root)
        try:
            mend_on(FaultyStorage(str(root), fuse), good)
        except SimulatedCrash:
            check_no_worse(root, before, right)
            if (root / names.MANIFEST).exists():
                assert body(root).items() >= right.items(), "the manifest comes last"
        through = not fuse.triggered
        assert uc.repair(root, [good]).ok
        check_mended(root, good, [good])
        shutil.rmtree(root.parent)
        at += 1
    assert at > 30
    done = [operation.split(" ") for operation in fuse.operations]
    for i, what in enumerate(done):
        if what[0] == "replace":
            assert done[i - 1] == ["sync", what[1]], "on the disk before it has the name"
            assert done[i + 1] == ["sync_folder", ""]


def test_a_disk_that_fills_up_at_any_write(folder: Path, good: Path, tmp_path: Path) -> None:
    hurt(folder)
    before, right, fuse = body(folder), body(good), FaultPoint()
    mend_on(FaultyStorage(str(shutil.copytree(folder, tmp_path / "counted" / NAME)), fuse), good)
    writes = sum(operation.startswith("write_at") for operation in fuse.operations)
    assert writes > 8
    for at in range(writes):
        root = Path(shutil.copytree(folder, tmp_path / f"at-{at}" / NAME))
        with pytest.raises(StorageError, match="No space left on device"):
            mend_on(FullStorage(str(root), at), good)
        check_no_worse(root, before, right)
        assert not [name for name in os.listdir(root) if name.startswith(".repair-")]
        shutil.rmtree(root.parent)


def test_a_disk_that_has_no_room(folder: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(folder / FILES[0])
    before = stamps(folder)
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: 1000)
    with pytest.raises(uc.StorageError, match="1000 bytes free, expected "):
        uc.repair(folder, [good])
    assert stamps(folder) == before


def test_blocks_that_the_disk_does_not_give(folder: Path, good: Path) -> None:
    class Worn(LocalStorage):
        """Bytes of a file that cannot be read."""

        def read_at(self, name: str, start: int, into: Buffer) -> None:
            if name == FILES[1] and start <= 1_200_000 < start + len(into) and name not in done:
                raise StorageError(f"{self.path(name)}: read failed: Input/output error")
            super().read_at(name, start, into)

        def replace(self, old: str, new: str, *, folder: os.stat_result) -> None:
            done.append(new)
            super().replace(old, new, folder=folder)

    done: list[str] = []
    report = mend_on(Worn(str(folder)), good)
    assert report.repaired == (FILES[1],)
    assert "block 1 of model:wide cannot be read" in report.damage[0]
    check_mended(folder, good, [good])


def test_a_folder_that_a_newer_save_replaces_meanwhile(
    folder: Path, good: Path, stranger: Path
) -> None:
    """Nothing of the old save goes into the new one."""
    flip(folder / FILES[0])

    def replaced(_: int) -> None:
        if not folder.with_name("aside").exists():
            folder.rename(folder.with_name("aside"))
            shutil.copytree(stranger, folder)

    with pytest.raises(uc.StorageError, match="another process replaced this folder"):
        uc.repair(folder, [good], progress=replaced)
    assert body(folder) == body(stranger)


def test_folder_is_locked_during_repair(folder: Path, good: Path) -> None:
    flip(folder / FILES[0])
    alone: list[bool] = []

    def look(_: int) -> None:
        for path in (folder, good):
            with exclusive_lock(str(path)) as mine:
                alone.append(mine)
        with pytest.raises(uc.StorageError, match="another process repairs this folder"):
            uc.repair(folder, [good])

    assert uc.repair(folder, [good], progress=look).ok
    assert set(alone) == {False}
    with exclusive_lock(str(folder)) as mine:
        assert mine


def test_readers_continue_during_repair(folder: Path, good: Path) -> None:
    flip(folder / FILES[0])
    with uc.open(folder) as opened:
        first = opened["model"]["wide"][:100]
        assert uc.repair(folder, [good]).ok
        assert torch.equal(opened["model"]["wide"][:100], first)


def test_a_link_is_replaced_and_what_it_leads_to_is_not_touched(
    folder: Path, good: Path, tmp_path: Path
) -> None:
    flip(folder / FILES[0])
    shutil.move(folder / FILES[0], tmp_path / "shared")
    (folder / FILES[0]).symlink_to(tmp_path / "shared")
    before = (tmp_path / "shared").read_bytes()
    assert uc.repair(folder, [good]).ok
    check_mended(folder, good, [good])
    assert (tmp_path / "shared").read_bytes() == before


def test_a_source_behind_a_url(folder: Path, good: Path) -> None:
    files = fsspec.filesystem("memory")
    for path in good.iterdir():
        files.pipe(f"/repair/{path.name}", path.read_bytes())
    hurt(folder)
    assert uc.repair(folder, ["memory://repair"]).ok
    check_mended(folder, good, ["memory://repair"])  # type: ignore[list-item]
    with pytest.raises(uc.NotFoundError):
        uc.repair(folder, ["memory://absent"])


# nodes


def elements(where: Path) -> torch.Tensor:
    with uc.open(where) as opened:
        return opened["model"]["w"][...]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node 0 holds whole copies; 1 and 2 hold shards of another copy; 3 and 4 as 1 and 2, of
    a third.
    """
    root = tmp_path_factory.mktemp("nodes")
    save(root, [0, 0, 1, 2, 3, 4], copies=3)
    return root


def nodes(twice: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(twice, tmp_path / "nodes")
    return [folder_of(tmp_path / "nodes", node) for node in range(5)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("hurt_one", [0, 1, 2])
def test_nodes_repair_each_other(twice: Path, tmp_path: Path, hurt_one: int, how: str) -> None:
    """Whole from shards, shards from a whole, and shards from shards: every file of
    tensors, digests, extra, indexes.
    """
    found = nodes(twice, tmp_path)
    files = [
        *found[hurt_one].glob("model*.safetensors"),
        found[hurt_one] / names.DIGESTS,
        found[hurt_one] / names.EXTRA,
    ]
    if how == "gone":
        files = files[:1]
    right = body(found[hurt_one])
    for sources in ([0], [1, 2], [3, 2], [0, 1, 2, 3, 4]):
        if (hurt_one in sources and len(sources) < 5) or (hurt_one == 2 and sources == [3, 2]):
            continue
        for file in files:
            HOW[how](file)
        report = uc.repair(found[hurt_one], [found[n] for n in sources if n != hurt_one])
        assert report.ok, report.problems
        assert body(found[hurt_one]) == right


def test_nodes_that_are_all_damaged(twice: Path, tmp_path: Path) -> None:
    """What one node lacks another has; one has damaged digests."""
    found = nodes(twice, tmp_path)
    right = [body(one) for one in found]
    flip(tensors(found[0], "model")[0], at=0.2)
    flip(tensors(found[0], "model")[0], at=0.95)
    flip(tensors(found[1], "model")[0], at=0.9)
    flip(found[1] / names.DIGESTS)
    tensors(found[2], "model")[0].unlink()
    flip(tensors(found[4], "model")[0], at=0.5)
    for number, one in enumerate(found):
        report = uc.repair(one, [other for other in found if other is not one])
        assert report.ok, (number, report.problems)
        assert body(one) == right[number]


def test_no_node_has_the_block(twice: Path, tmp_path: Path) -> None:
    found = nodes(twice, tmp_path)
    file = tensors(found[1], "model")[0]
    flip(file)
    before = stamps(found[1])
    report = uc.repair(found[1], [found[2], found[4]])
    (problem,) = report.problems
    assert "add a copy of this folder, number 1 of 5 of save" in problem
    assert "by rank(s) 2, or folders of other nodes that have the same elements" in problem
    assert stamps(found[1]) == before


def test_node_files_come_only_from_a_copy_of_its_folder(twice: Path, tmp_path: Path) -> None:
    """The manifest and what its ranks left. The folder of a node that holds the same tensors is
    not taken for it.
    """
    found = nodes(twice, tmp_path)
    backup = Path(shutil.copytree(found[1], tmp_path / "backup"))
    flip(found[1] / names.RANK_EXTRA)
    assert not uc.repair(found[1], [one for one in found if one != found[1]]).ok
    assert uc.repair(found[1], [backup]).ok
    (found[1] / names.MANIFEST).unlink()
    before = stamps(found[1])
    for sources in ([found[3]], [found[0], found[2], found[3]]):
        with pytest.raises(uc.IntegrityError, match="found none that matches its files"):
            uc.repair(found[1], sources)
    assert stamps(found[1]) == before
    assert uc.repair(found[1], [found[3], backup]).ok
    assert body(found[1]) == body(backup)


def test_node_with_the_same_tensors_is_told_apart(tmp_path: Path) -> None:
    """Same tensors and digests: only the rank_extra identifies a folder."""
    save(tmp_path, [0, 1], copies=2)
    mine, theirs = (folder_of(tmp_path, node) for node in (1, 0))
    assert (mine / names.DIGESTS).read_bytes() == (theirs / names.DIGESTS).read_bytes()
    backup = Path(shutil.copytree(mine, tmp_path / "backup"))
    for file in (names.MANIFEST, names.RANK_EXTRA):
        (mine / file).unlink()
    before = stamps(mine)
    with pytest.raises(uc.IntegrityError, match="found none that matches its files"):
        uc.repair(mine, [theirs])
    assert stamps(mine) == before
    shutil.copy(backup / names.RANK_EXTRA, mine)
    assert uc.repair(mine, [theirs, backup]).ok
    assert body(mine) == body(backup)


# the command


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    assert main([str(one) for one in arguments]) == code
    return capsys.readouterr().out


def test_command_repairs(folder: Path, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / FILES[0])
    text = said(capsys, "verify", folder, "--repair", code=1)
    assert f"{folder}: still damaged, 1 problem; 0 files repaired (" in text
    assert "add another copy of save" in text
    text = said(capsys, "verify", folder, "--repair", "--from", good, code=0)
    assert f"{folder}: repaired, 1 file, " in text
    assert f"  repaired {FILES[0]}\n" in text
    assert "nothing to repair" in said(capsys, "verify", folder, "--repair", "--from", good, code=0)
    said(capsys, "verify", folder, "--deep", code=0)


def test_command_in_json(
    folder: Path, good: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / FILES[0])
    told = json.loads(
        said(
            capsys, "verify", folder, "--json", "--repair", "--from", other, "--from", good, code=0
        )
    )
    assert told["ok"] is True
    assert told["repaired"] == [FILES[0]]
    assert told["problems"] == []
    assert told["nbytes"] == (good / FILES[0]).stat().st_size


def test_command_refuses(
    folder: Path, good: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / FILES[0])
    before = stamps(folder)
    assert main(["verify", str(folder), "--repair", "--from", str(stranger)]) == 1
    assert "give a copy of the same save" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["verify", str(folder), "--from", str(good)])
    assert left.value.code == 2
    assert "--from requires --repair" in capsys.readouterr().err
    assert stamps(folder) == before


# anything at all


def damage(draw: random.Random, folder: Path, *, flips: dict[str, list[int]]) -> None:
    """A few bits here and there, a file cut off, a file gone. `flips`: places that are damaged in
    some copy, by file.
    """
    for _ in range(draw.randint(0, 4)):
        file = folder / draw.choice(
            [path.name for path in folder.iterdir() if path.suffix == ".safetensors"]
        )
        held = bytearray(file.read_bytes())
        if held:
            at = draw.randrange(len(held))
            held[at] ^= 1 << draw.randrange(8)
            flips.setdefault(file.name, []).append(at)
            file.write_bytes(held)


@pytest.mark.parametrize("seed", range(25))
def test_any_damage_to_two_copies(folder: Path, other: Path, good: Path, seed: int) -> None:
    """Right, or as it was; and right where the two are not damaged close to each other."""
    draw, right = random.Random(seed), body(good)
    flips: dict[str, list[int]] = {}
    for one in (folder, other):
        damage(draw, one, flips=flips)
    gone = draw.choice([None, None, *FILES])
    if gone is not None and gone not in flips:
        draw.choice([Path.unlink, shorten])(draw.choice([folder, other]) / gone)
    before = body(folder)
    try:
        report = uc.repair(folder, [other])
    except uc.CheckpointError:
        assert gone == names.MANIFEST
        assert body(folder) == before
        return
    close = any(
        abs(a - b) < 16
        for places in flips.values()
        for i, a in enumerate(places)
        for b in places[:i]
    )
    assert report.ok or close, report.problems
    for name, held in body(folder).items():
        assert held == right[name] or (not report.ok and held == before[name]), name
    assert (body(folder) == right) == report.ok


@pytest.mark.parametrize("seed", range(15))
def test_any_damage_to_nodes(twice: Path, tmp_path: Path, seed: int) -> None:
    """Right, or as it was, and no good byte is lost: what the nodes had between them, they have."""
    draw = random.Random(seed)
    found = nodes(twice, tmp_path)
    right = [body(one) for one in found]
    for one in found:
        damage(draw, one, flips={})
    for number, one in enumerate(found):
        before = body(one)
        report = uc.repair(one, [other for other in draw.sample(found, 4) if other is not one])
        for name, held in body(one).items():
            assert held == right[number][name] or (not report.ok and held == before[name]), name
        assert (body(one) == right[number]) == report.ok
        lost = {problem.split(":")[0] for problem in report.problems}
        assert lost <= {names.RANK_EXTRA}, report.problems

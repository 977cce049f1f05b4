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
from tests.support.damage import DAMAGES, flip, shorten
from tests.support.engine.repair.damaged_folders import NAME, body, folder, good, put
from tests.support.format.manifests import edit_manifest
from tests.support.harness import FaultPoint, FaultyStorage, FullStorage, SimulatedCrash
from unified_ckpt.cli.main import main
from unified_ckpt.engine.repair.copies import open_source, open_target
from unified_ckpt.engine.repair.repair import FolderRepair
from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.locks import exclusive_lock, repair_lock
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["folder", "good"]  # fixtures


@pytest.fixture
def other(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "other" / NAME))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another save with the same names, shapes and step."""
    return put(tmp_path_factory.mktemp("stranger") / NAME, seed=1)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def check_repaired(folder: Path, good: Path, sources: Sequence[Path]) -> None:
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


HARM: dict[str, Callable[[Path], object]] = {
    **DAMAGES,
    "long": lengthen,
    "torn": tear,
    "empty": lambda file: file.write_bytes(b""),
}
INDEX = "model.safetensors.index.json"
WIDE = "model-00003-of-00003.safetensors"  # with a tensor of two blocks
FILES = [
    "model-00001-of-00003.safetensors",
    WIDE,
    "optimizer-00001-of-00002.safetensors",
    INDEX,
    names.DIGESTS,
    names.EXTRA,
    names.RANK_EXTRA,
]


@pytest.mark.parametrize("seed", range(len(FILES) * len(HARM)))  # each kind on each file
def test_any_damage_to_three_copies(
    folder: Path, other: Path, good: Path, tmp_path: Path, seed: int
) -> None:
    """A file that one of them has intact is healed; any other is right or as it was.

    The digests stay intact in one: without them nobody knows which blocks are damaged.
    """
    draw, right = random.Random(seed), body(good)
    copies = [folder, other, Path(shutil.copytree(good, tmp_path / "third"))]
    list(HARM.values())[seed % len(HARM)](folder / FILES[seed % len(FILES)])
    files = [copy / file for copy in copies for file in FILES]
    files.remove(other / names.DIGESTS)
    for file in draw.choices(files, k=draw.randint(0, 10)):
        if file.exists() and file.stat().st_size:
            draw.choice(list(HARM.values()))(file)
    before = [body(copy) for copy in copies]
    report = uc.repair(folder, copies[1:])
    after = body(folder)
    for name in FILES:
        damaged, healed = before[0].get(name) != right[name], after.get(name) == right[name]
        assert healed or after.get(name) == before[0].get(name), name
        assert healed or all(actual.get(name) != right[name] for actual in before), name
        assert any(text.startswith(f"{name}:") for text in report.damage) == damaged
        assert (name in report.repaired) == (damaged and healed)
    assert report.nbytes == sum(len(right[name]) for name in report.repaired)
    assert report.ok == (after == right)
    if report.ok:
        check_repaired(folder, good, copies[1:])


def test_blocks_come_from_different_copies(folder: Path, other: Path, good: Path) -> None:
    """Each copy has the block that the other lacks."""
    flip(folder / WIDE, 0.3)
    flip(other / WIDE)
    assert uc.repair(folder, [other]).ok
    check_repaired(folder, good, [other])
    assert uc.repair(other, [folder]).ok
    check_repaired(other, good, [folder])


@pytest.mark.parametrize("bad", [0, 1])
def test_block_damaged_in_all_copies_is_reported(
    folder: Path, other: Path, good: Path, bad: int
) -> None:
    """The damaged copy is noted. Other damage is repaired."""
    for copy, blocks in ((folder, (0.5, 0.9)), (other, (0.5 if bad == 0 else 0.9,))):
        for at in blocks:
            flip(copy / WIDE, at)
    flip(folder / names.EXTRA)
    before = body(folder)
    report = uc.repair(folder, [other])
    assert not report.ok
    assert report.repaired == (names.EXTRA,)
    (problem,) = report.problems
    assert f"{WIDE}: block 0 of model:wide has CRC" in problem
    assert f"no copy has block {bad} of model:wide; add another copy of save" in problem
    assert f"searched: {other}" in problem
    (note,) = report.notes
    assert f"{other}: is damaged too: {WIDE}: block {bad}" in note
    assert body(folder) == {**before, names.EXTRA: body(good)[names.EXTRA]}


@pytest.mark.parametrize("file", FILES)
def test_without_sources_only_an_index_is_rebuilt(folder: Path, good: Path, file: str) -> None:
    """And a file that is too long is cut."""
    lengthen(folder / WIDE)
    assert uc.repair(folder).repaired == (WIDE,)
    (folder / file).unlink()
    before = stamps(folder)
    report = uc.repair(folder)
    if file == INDEX:
        check_repaired(folder, good, [])
        return
    (problem,) = report.problems
    assert file in problem
    assert "searched: no source" in problem
    assert stamps(folder) == before


def test_an_index_is_not_rebuilt_without_all_headers(folder: Path) -> None:
    (folder / INDEX).unlink()
    tear(folder / WIDE)
    before = stamps(folder)
    assert len(uc.repair(folder).problems) == 2
    assert stamps(folder) == before


def test_digests_of_an_unknown_kind_are_noted(folder: Path) -> None:
    edit_manifest(folder, lambda fields: fields["digests"].update(algorithm="crc64nvmf"))
    lengthen(folder / WIDE)
    before = stamps(folder)
    report = uc.repair(folder)
    assert "no intact digests prove its bytes" in report.problems[0]
    assert "no digests of a known algorithm" in report.notes[0]
    assert stamps(folder) == before


# refused


@pytest.mark.parametrize("harm", HARM)
def test_no_valid_manifest_no_checkpoint(folder: Path, other: Path, good: Path, harm: str) -> None:
    """A folder without one is not repaired, and proves nothing as a source."""
    HARM[harm](folder / names.MANIFEST)
    flip(folder / WIDE)
    before = stamps(folder)
    with pytest.raises(uc.CheckpointError, match="; copy the whole folder from a copy") as raised:
        uc.repair(folder, [good])
    assert type(raised.value) is (uc.IncompleteError if harm == "missing" else uc.IntegrityError)
    with pytest.raises(uc.CheckpointError, match=f"{folder}/.*; leave this source out"):
        uc.repair(other, [good, folder])
    assert stamps(folder) == before


def test_a_source_of_another_save_is_refused(folder: Path, stranger: Path) -> None:
    flip(folder / WIDE)
    before = stamps(folder)
    ids = [
        json.loads((root / names.MANIFEST).read_text())["save_id"] for root in (stranger, folder)
    ]
    with pytest.raises(
        uc.MismatchError,
        match=rf"{stranger}: got save {ids[0]} \(step 7\), expected {ids[1]} \(step 7\)",
    ):
        uc.repair(folder, [stranger])
    assert stamps(folder) == before


def test_what_cannot_be_repaired_at_all(folder: Path, good: Path, tmp_path: Path) -> None:
    with pytest.raises(uc.NotFoundError, match="does not exist"):
        uc.repair(tmp_path / "absent", [good])
    with pytest.raises(uc.NotFoundError, match="does not exist"):
        uc.repair(folder, [tmp_path / "absent"])
    with pytest.raises(uc.StorageError, match="is the folder to repair"):
        uc.repair(folder, [folder])
    with pytest.raises(uc.StorageError, match="got a URL, expected a local folder"):
        uc.repair("memory://x", [good])
    (folder / names.SAVE_ID_FILE).write_text("x")
    with pytest.raises(uc.FormatError, match="got an unfinished save"):
        uc.repair(folder, [good])
    (folder / names.SAVE_ID_FILE).unlink()
    edit_manifest(folder, lambda fields: fields.update(format_version="2.0"))
    with pytest.raises(uc.FormatError, match="got format version 2"):
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


def repair_on(storage: LocalStorage, good: Path) -> uc.RepairReport:
    with repair_lock(storage.root) as locked, storage:
        target = open_target(storage)
        sources = [open_source(LocalStorage(str(good)), target)]
        return FolderRepair(storage, target, sources, locked, lambda _: None).run()


def check_each_file(folder: Path, before: dict[str, bytes], right: dict[str, bytes]) -> None:
    for name, file_bytes in body(folder).items():
        assert file_bytes in (before.get(name), right.get(name)) or name.startswith(".repair-"), (
            name
        )
    assert before.keys() <= body(folder).keys()


def damage_files(folder: Path) -> None:
    """Damage, truncate and delete files."""
    flip(folder / FILES[0])
    shorten(folder / WIDE)
    for file in (FILES[2], names.EXTRA, names.RANK_EXTRA):
        (folder / file).unlink()
    tear(folder / INDEX)


def test_a_crash_at_every_operation(folder: Path, good: Path, tmp_path: Path) -> None:
    """Each file is as it was or right, and the next repair heals all."""
    damage_files(folder)
    before, right = body(folder), body(good)
    crash_index, completed = 0, False
    while not completed:
        root, fault_point = tmp_path / f"crash-{crash_index}" / NAME, FaultPoint(crash_index)
        shutil.copytree(folder, root)
        try:
            repair_on(FaultyStorage(str(root), fault_point), good)
        except SimulatedCrash:
            check_each_file(root, before, right)
        completed = not fault_point.triggered
        assert uc.repair(root, [good]).ok
        check_repaired(root, good, [good])
        shutil.rmtree(root.parent)
        crash_index += 1
    assert crash_index > 20
    operations = [operation.split(" ") for operation in fault_point.operations]
    for number, operation in enumerate(operations):
        if operation[0] == "replace":  # on the disk before it has the name
            assert operations[number - 1] == ["fsync", operation[1]]
            assert operations[number + 1] == ["fsync", ""]


def test_a_disk_that_fills_up_at_any_write(folder: Path, good: Path, tmp_path: Path) -> None:
    damage_files(folder)
    before, right, fault_point = body(folder), body(good), FaultPoint()
    counted = shutil.copytree(folder, tmp_path / "counted" / NAME)
    repair_on(FaultyStorage(str(counted), fault_point), good)
    writes = sum(operation.startswith("write_at") for operation in fault_point.operations)
    assert writes > 8
    for number in range(writes):
        root = Path(shutil.copytree(folder, tmp_path / f"write-{number}" / NAME))
        with pytest.raises(StorageError, match="No space left on device"):
            repair_on(FullStorage(str(root), number), good)
        check_each_file(root, before, right)
        assert not [name for name in os.listdir(root) if name.startswith(".repair-")]
        shutil.rmtree(root.parent)


def test_a_disk_that_has_no_room(folder: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(folder / FILES[0])
    before = stamps(folder)
    monkeypatch.setattr(LocalStorage, "free_nbytes", lambda _: 1000)
    with pytest.raises(uc.StorageError, match=r"of free space: got 0\.977 KiB, expected "):
        uc.repair(folder, [good])
    assert stamps(folder) == before


def test_blocks_that_the_disk_does_not_give(folder: Path, good: Path) -> None:
    class Worn(LocalStorage):
        """Bytes of a file that cannot be read."""

        def read_at(self, name: str, start: int, into: Buffer) -> None:
            if name == WIDE and start <= 1_200_000 < start + len(into):
                raise StorageError(f"{self.path(name)}: read failed: Input/output error")
            super().read_at(name, start, into)

    report = repair_on(Worn(str(folder)), good)
    assert report.repaired == (WIDE,)
    assert "Input/output error" in report.damage[0]
    check_repaired(folder, good, [good])


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

    def inspect(_: int) -> None:
        for path in (folder, good):
            with exclusive_lock(str(path)) as acquired:
                alone.append(acquired)
        with pytest.raises(uc.StorageError, match="another process repairs this folder"):
            uc.repair(folder, [good])

    assert uc.repair(folder, [good], progress=inspect).ok
    assert set(alone) == {False}
    with exclusive_lock(str(folder)) as acquired:
        assert acquired


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
    check_repaired(folder, good, [good])
    assert (tmp_path / "shared").read_bytes() == before


def test_a_source_behind_a_url(folder: Path, good: Path) -> None:
    files = fsspec.filesystem("memory")
    for path in good.iterdir():
        files.pipe(f"/repair/{path.name}", path.read_bytes())
    damage_files(folder)
    assert uc.repair(folder, ["memory://repair"]).ok
    check_repaired(folder, good, ["memory://repair"])  # type: ignore[list-item]
    with pytest.raises(uc.NotFoundError):
        uc.repair(folder, ["memory://absent"])


# the command


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().out


def test_command_repairs(folder: Path, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / FILES[0])
    text = run_cli(capsys, "verify", folder, "--repair", code=1)
    assert f"{folder}: still damaged, 1 problem; 0 files repaired (" in text
    assert "add another copy of save" in text
    twin = shutil.copytree(folder, folder.with_name("twin"))
    fields = json.loads(
        run_cli(
            capsys, "verify", twin, "--json", "--repair", "--from", folder, "--from", good, code=0
        )
    )
    assert (fields["ok"], fields["repaired"], fields["problems"]) == (True, [FILES[0]], [])
    text = run_cli(capsys, "verify", folder, "--repair", "--from", good, code=0)
    assert f"{folder}: repaired, 1 file, " in text
    assert f"  repaired {FILES[0]}\n" in text
    assert "nothing to repair" in run_cli(
        capsys, "verify", folder, "--repair", "--from", good, code=0
    )
    run_cli(capsys, "verify", folder, "--deep", code=0)


def test_command_refuses(
    folder: Path, good: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / FILES[0])
    before = stamps(folder)
    assert main(["verify", str(folder), "--repair", "--from", str(stranger)]) == 1
    assert "pass a copy of the same save" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["verify", str(folder), "--from", str(good)])
    assert left.value.code == 2
    assert "--from requires --repair" in capsys.readouterr().err
    assert stamps(folder) == before

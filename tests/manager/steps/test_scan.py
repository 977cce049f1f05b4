"""Scans of a root classify folders by manifest, never by name or time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.format.manifests import sealed
from tests.support.machines.run_model import failing_folder
from tests.support.manager.managers import (
    copy_folder,
    delete_file,
    delete_manifest,
    save_steps,
    state,
)
from unified_ckpt.format import names
from unified_ckpt.manager.steps.scan import Scan, scan
from unified_ckpt.runtime.storage.storage import LocalStorage


def scanned(root: Path, prefix: str = "checkpoint-") -> Scan:
    return scan(LocalStorage(str(root)), prefix)


def test_record_matches_the_manifest(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "checkpoint-12", step=12, metrics={"loss": 0.5}, rank_extra=(1, 2), **state(12)
    )
    (record,) = scanned(tmp_path).steps
    manifest = json.loads((tmp_path / "checkpoint-12" / names.MANIFEST).read_bytes())
    assert (
        record.name,
        record.status,
        record.problem,
        record.step,
        record.full,
        record.is_unified,
    ) == (
        "checkpoint-12",
        "complete",
        "",
        12,
        True,
        True,
    )
    assert (record.created, record.seconds, record.save_id) == (
        manifest["created"],
        manifest["seconds"],
        manifest["save_id"],
    )
    assert (record.parts, record.metrics) == (("model", "optimizer"), {"loss": 0.5})
    files = list((tmp_path / "checkpoint-12").iterdir())
    assert (record.files, record.nbytes) == (len(files), sum(file.stat().st_size for file in files))
    assert record.retention_entry.step == 12


def test_steps_are_ordered_by_number_not_time(tmp_path: Path) -> None:
    save_steps(tmp_path, 100, 9, 10)
    assert [record.step for record in scanned(tmp_path).complete] == [9, 10, 100]
    assert scanned(tmp_path / "none") == Scan((), ())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (delete_manifest, "it has no unified_checkpoint.json"),
        (delete_file, "optimizer.safetensors is missing"),
        (lambda f: delete_file(f, "digests.safetensors"), "digests.safetensors is missing"),
        (
            lambda f: delete_file(f, "model.safetensors.index.json"),
            "model.safetensors.index.json is missing",
        ),
        (
            lambda f: os.truncate(f / "model.safetensors", 9),
            "model.safetensors has 9 bytes; the manifest says ",
        ),
        (
            lambda f: (delete_file(f), delete_file(f, "model.safetensors")),
            "model.safetensors is missing (and 1 more)",
        ),
        (lambda f: (f / names.MANIFEST).write_text("{"), "unified_checkpoint.json: not valid JSON"),
        (
            lambda f: (f / names.MANIFEST).write_bytes(sealed({"format_version": "9.0"})),
            "unified_checkpoint.json: got format version 9.0",
        ),
    ],
)
def test_incomplete_record_has_a_problem(tmp_path: Path, damage: object, problem: str) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "checkpoint-2")  # type: ignore[operator]
    result = scanned(tmp_path)
    assert [record.step for record in result.complete] == [1]
    (bad,) = result.newer_problems
    assert (bad.status, bad.name) == ("incomplete", "checkpoint-2")
    assert bad.problem.startswith(problem)


def test_misnamed_record(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    copy_folder(tmp_path / "checkpoint-5", tmp_path / "checkpoint-7")
    uc.save(tmp_path / "checkpoint-8", **state(8))
    records = {record.name: record for record in scanned(tmp_path).steps}
    assert (records["checkpoint-7"].status, records["checkpoint-7"].step) == ("misnamed", 5)
    assert records["checkpoint-7"].problem == "its manifest has step 5; rename it to checkpoint-5"
    assert records["checkpoint-8"].problem == "its manifest has no step; load it by its path"
    assert [record.name for record in scanned(tmp_path).complete] == ["checkpoint-5"]


def test_deleted_part_is_not_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for file in ("optimizer.safetensors", "optimizer.safetensors.index.json"):
        delete_file(tmp_path / "checkpoint-1", file)
    (record,) = scanned(tmp_path).complete
    assert (record.parts, record.full) == (("model",), False)
    for file in ("model.safetensors", "model.safetensors.index.json"):
        delete_file(tmp_path / "checkpoint-1", file)
    assert scanned(tmp_path).steps[0].problem == "all of its parts were deleted"


def test_optimizer_without_state_is_full(tmp_path: Path) -> None:
    uc.save(tmp_path / "checkpoint-1", step=1, model=state(1)["model"], optimizer={})
    assert scanned(tmp_path).complete[0].full


def test_foreign_folders_are_not_unified(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"x")
    (tmp_path / "checkpoint-3b").mkdir()
    (tmp_path / "checkpoint-4").write_text("a file")
    (record,) = scanned(tmp_path).steps
    assert (record.name, record.is_unified, record.status, record.files, record.nbytes) == (
        "checkpoint-3",
        False,
        "incomplete",
        1,
        1,
    )


def test_stale_folders(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".replaced-abc-checkpoint-1")  # the only copy
    copy_folder(tmp_path / "checkpoint-2", tmp_path / ".replaced-abc-checkpoint-2")
    (tmp_path / ".replaced-abc-checkpoint-9").mkdir()  # moved aside by another program
    (tmp_path / ".unified-abc-checkpoint-3" / "sub").mkdir(parents=True)
    (tmp_path / ".unified-abc-checkpoint-3" / "sub" / "model.safetensors").write_bytes(b"123")
    os.utime(tmp_path / ".unified-abc-checkpoint-3" / "sub" / "model.safetensors", (0, 0))
    (tmp_path / ".unified-abc-checkpoint-4").mkdir()
    with (tmp_path / ".unified-abc-checkpoint-4" / "model.safetensors").open("wb") as file:
        file.truncate(2**20)  # killed before it was written
    folders = {folder.name: folder for folder in scanned(tmp_path).stale_folders}
    assert {
        name: (folder.kind, folder.is_unified, folder.only_copy) for name, folder in folders.items()
    } == {
        ".replaced-abc-checkpoint-1": ("backup", True, True),
        ".replaced-abc-checkpoint-2": ("backup", True, False),
        ".replaced-abc-checkpoint-9": ("backup", False, False),
        ".unified-abc-checkpoint-3": ("staging", True, False),
        ".unified-abc-checkpoint-4": ("staging", True, False),
    }
    assert folders[".unified-abc-checkpoint-4"].nbytes < 2**20, "what the disk holds"
    folder = folders[".unified-abc-checkpoint-3"]
    assert (folder.nbytes, folder.files) == (3, 1)
    assert folder.age_seconds < 600, "the folder itself has changed now"

    with failing_folder(tmp_path / ".replaced-abc-checkpoint-1", errno.EIO, calls=("scandir",)):
        folders = {folder.name: folder for folder in scanned(tmp_path).stale_folders}
    folder = folders[".replaced-abc-checkpoint-1"]
    assert (folder.only_copy, folder.age_seconds < 600) == (True, True), "it may be whole"


def test_bare_numbers_are_steps_by_their_contents(tmp_path: Path) -> None:
    """A number alone names nothing: a folder of other files, and a link to one, are no steps."""
    for step in (3, 20):
        uc.save(tmp_path / f"{step}", step=step, **state(step))
    uc.save(tmp_path / "checkpoint-7", step=7, **state(7))
    copy_folder(tmp_path / "3", tmp_path / "4")
    delete_manifest(tmp_path / "4")
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/model.safetensors").write_bytes(b"x")
    (tmp_path / "77").mkdir()
    (tmp_path / "8").write_bytes(b"a file")
    (tmp_path / "500").symlink_to("2024")
    (tmp_path / "600").symlink_to("20")
    steps = scanned(tmp_path, "")
    assert [record.step for record in steps.complete] == [3, 20]
    others = {record.name: record.problem for record in steps.steps if record.problem}
    assert others.keys() == {"4", "600"}
    assert others["600"].startswith("it is a link to ")


def test_another_prefix(tmp_path: Path) -> None:
    uc.save(tmp_path / "step_3", step=3, **state(3))
    assert [record.step for record in scanned(tmp_path, "step_").complete] == [3]

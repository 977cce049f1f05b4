"""A manifest verifies itself: with a flipped byte it is never used to read, verify or repair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.manifests import edit_manifest
from tests.support.refusals import same_error
from tests.support.simulated_nodes import LOAD, SAVE, fine, folder_of, on_node
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.commit import read_manifest_at
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import run_ranks, try_ranks

NAME = "checkpoint-41"
MASKS = (0x01, 0x10, 0x80)
OPTIONS = uc.SaveOptions(fsync=False)
CRC = "[0-9a-f]{16}"
FLIPPED = (
    rf"unified_checkpoint\.json: is not the file that was written: got CRC {CRC}, expected {CRC}"
)


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.125)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / NAME
    model, optimizer = fresh()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    uc.save(
        folder,
        model=model,
        optimizer=optimizer,
        extra={"run": 1, "of": (2.5, "a")},
        rank_extra=[3],
        step=41,
        options=OPTIONS,
    )
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run" / NAME))


@pytest.fixture
def other(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "other" / NAME))


def flip(folder: Path, old: str = '"step": 41', new: str = '"step": 51') -> None:
    """Change one byte of the manifest so that the value is as plausible as the original."""
    text = (folder / names.MANIFEST).read_text()
    assert text.count(old) == 1
    (folder / names.MANIFEST).write_text(text.replace(old, new))


def values(folder: Path, **options: Any) -> str:
    """Return everything that a load returns."""
    model, optimizer = fresh()
    report = uc.load(folder, model=model, optimizer=optimizer, options=uc.LoadOptions(**options))
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return repr((tensors, optimizer.state_dict(), report.step, report.extra, report.rank_extra))


@pytest.mark.parametrize("mask", MASKS)
def test_any_flipped_byte_is_refused(folder: Path, mask: int) -> None:
    file = folder / names.MANIFEST
    target, body = {"weight": torch.zeros(2, 3)}, file.read_bytes()
    for offset, byte in enumerate(body):
        put_byte(file, offset, byte ^ mask)
        assert outcome(lambda: uc.verify(folder, deep=True).ok) is not True, (
            f"byte {offset} of the manifest"
        )
        assert outcome(lambda: uc.load(folder, model=target, strict=False)) is None, (
            f"byte {offset} of the manifest"
        )
        assert read_manifest_at(str(folder)) is None, f"byte {offset} of the manifest"
        put_byte(file, offset, byte)


def put_byte(file: Path, offset: int, byte: int) -> None:
    with file.open("r+b", buffering=0) as opened:
        opened.seek(offset)
        opened.write(bytes([byte]))


def outcome(act: Any) -> Any:
    """Return None if the checkpoint is refused."""
    try:
        return act()
    except uc.CheckpointError:
        return None


@pytest.mark.parametrize("deep", [False, True])
def test_verify_reports_a_flipped_manifest(
    folder: Path, deep: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder, '"lr": 0.125', '"lr": 0.925')
    report = uc.verify(folder, deep=deep)
    assert (report.ok, report.path, report.deep) == (False, str(folder), deep)
    with pytest.raises(uc.IntegrityError, match=FLIPPED):
        raise uc.IntegrityError(*report.problems)
    assert main(["verify", str(folder), "--json", *(["--deep"] if deep else [])]) == 1
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["ok"], manifest["problems"]) == (False, list(report.problems))


def test_restore_skips_a_flipped_manifest_and_list_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 4):
        uc.save(
            tmp_path / f"checkpoint-{step}",
            model={"w": torch.full((4,), float(step))},
            step=step,
            options=OPTIONS,
        )
    flip(tmp_path / "checkpoint-4", '"step": 4', '"step": 5')
    target = {"w": torch.zeros(4)}
    with uc.CheckpointManager(tmp_path, options=uc.ManagerOptions(on_preemption=False)) as manager:
        report = manager.restore(model=target)
        assert [record.step for record in manager.steps()] == [3]
    assert report is not None
    assert (report.step, target["w"].tolist()) == (3, [3.0] * 4)
    (message,) = [text for text in caplog.messages if "is skipped" in text]
    assert "\n" not in message
    with pytest.raises(uc.IntegrityError, match=rf"checkpoint-4 is skipped: {FLIPPED}"):
        raise uc.IntegrityError(message)
    assert main(["list", str(tmp_path)]) == 0
    assert (
        "incomplete: unified_checkpoint.json: is not the file that was written"
        in capsys.readouterr().out
    )


def test_a_save_renames_a_folder_with_a_flipped_manifest(folder: Path) -> None:
    flip(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    uc.save(folder, model={"w": torch.ones(3)}, step=42, options=OPTIONS)
    assert uc.verify(folder, deep=True).ok
    aside = folder.with_name(f"{folder.name}-before-1")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before


# a digit of the major version


def test_a_flipped_version_is_damage_not_a_newer_format(
    folder: Path, other: Path, good: Path
) -> None:
    flip(folder, '"format_version": "1.', '"format_version": "3.')
    with pytest.raises(uc.IntegrityError, match=FLIPPED):
        values(folder)
    assert uc.repair(folder, [other]).repaired == (names.MANIFEST,)
    assert (folder / names.MANIFEST).read_bytes() == (good / names.MANIFEST).read_bytes()


# repair


def test_repair_restores_the_manifest_of_a_copy(folder: Path, other: Path, good: Path) -> None:
    flip(folder)
    report = uc.repair(folder, [other])
    assert (report.ok, report.repaired) == (True, (names.MANIFEST,))
    with pytest.raises(uc.IntegrityError, match=FLIPPED):
        raise uc.IntegrityError(*report.damage)
    assert (folder / names.MANIFEST).read_bytes() == (good / names.MANIFEST).read_bytes()


def test_repair_refuses_a_flipped_manifest_of_a_copy(folder: Path, other: Path, good: Path) -> None:
    (folder / names.MANIFEST).unlink()
    flip(other)
    with pytest.raises(uc.IncompleteError, match=FLIPPED):
        uc.repair(folder, [other])
    assert not (folder / names.MANIFEST).exists()
    report = uc.repair(folder, [other, good])
    assert (report.ok, report.repaired) == (True, (names.MANIFEST,))
    assert any("only bytes of it that" in note for note in report.notes)
    assert (folder / names.MANIFEST).read_bytes() == (good / names.MANIFEST).read_bytes()


# nodes


WHOLE = torch.arange(64.0).reshape(8, 8)
ROWS = uc.Layout(mesh={"dp": 2}, rules={"w": {"dp": 0}})


def save_on_two(root: Path, *, copies: int) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            options = SAVE.model_copy(update={"node_copies": copies})
            checkpointer.save(
                folder_of(root, comm.rank),
                model={"w": WHOLE.chunk(2)[comm.rank].clone()},
                layout=ROWS,
                step=41,
                options=options,
            )

    run_ranks(2, act)


def load_on_two(root: Path, **options: Any) -> list[uc.LoadReport | BaseException]:
    def act(comm: Comm) -> uc.LoadReport:
        target = {"w": torch.zeros(4, 8)}
        with on_node(comm, [0, 1]) as checkpointer:
            report = checkpointer.load(
                folder_of(root, comm.rank),
                model=target,
                layout=ROWS,
                options=LOAD.model_copy(update=options),
            )
        assert torch.equal(target["w"], WHOLE.chunk(2)[comm.rank])
        return report

    return try_ranks(2, act)


def test_nodes_load_with_the_manifest_of_a_replica(tmp_path: Path) -> None:
    save_on_two(tmp_path, copies=2)
    flip(folder_of(tmp_path, 1))
    reports = fine(load_on_two(tmp_path))
    assert [report.step for report in reports] == [41, 41]
    with pytest.raises(uc.IntegrityError, match=FLIPPED):
        raise uc.IntegrityError("; ".join(note for report in reports for note in report.notes))


def test_nodes_without_a_replica_report_the_damage(tmp_path: Path) -> None:
    save_on_two(tmp_path, copies=1)
    flip(folder_of(tmp_path, 1))
    same_error(load_on_two(tmp_path), uc.IncompleteError, FLIPPED)


def test_verify_reports_a_flipped_manifest_of_a_replica(tmp_path: Path) -> None:
    save_on_two(tmp_path, copies=2)
    flip(folder_of(tmp_path, 0) / names.replica_name(1))
    (problem,) = uc.verify(folder_of(tmp_path, 0)).problems
    with pytest.raises(
        uc.IntegrityError, match=f"{names.replica_name(1)}: cannot be read: .*{FLIPPED}"
    ):
        raise uc.IntegrityError(problem)


# digests that cannot be compared


def unknown_digests(manifest: dict[str, Any]) -> None:
    manifest["digests"]["algorithm"] = "crc64nvmf"


def no_digests(manifest: dict[str, Any]) -> None:
    manifest["digests"] = None


UNKNOWN = (
    r"digests\.safetensors: got digests 'crc64nvmf' of 1048576 bytes, "
    r"expected 'crc64nvme' of 1048576"
)


@pytest.mark.parametrize("verify", ["read", "full"])
def test_digests_of_an_unknown_kind_fail_a_verified_load(folder: Path, verify: str) -> None:
    edit_manifest(folder, unknown_digests)
    model, _ = fresh()
    before = model.weight.clone()
    with pytest.raises(uc.FormatError, match=UNKNOWN):
        uc.load(
            folder, model=model, parts=None, options=uc.LoadOptions(verify=verify), strict=False
        )
    assert torch.equal(model.weight, before)
    assert "41" in values(folder, verify="off")


def test_deep_verify_reports_digests_of_an_unknown_kind(folder: Path) -> None:
    edit_manifest(folder, unknown_digests)
    assert uc.verify(folder).ok
    (problem,) = uc.verify(folder, deep=True).problems
    with pytest.raises(uc.FormatError, match=UNKNOWN):
        raise uc.FormatError(problem)


def test_nodes_with_digests_of_an_unknown_kind(tmp_path: Path) -> None:
    save_on_two(tmp_path, copies=1)
    for node in (0, 1):
        edit_manifest(folder_of(tmp_path, node), unknown_digests)
    for error in load_on_two(tmp_path):
        with pytest.raises(uc.CheckpointError, match=UNKNOWN):
            raise error if isinstance(error, BaseException) else AssertionError(error)
        assert "unusable" not in str(error)
    fine(load_on_two(tmp_path, verify="off"))


def test_load_and_deep_verify_report_missing_digests(folder: Path) -> None:
    edit_manifest(folder, no_digests)
    assert (
        uc.verify(folder, deep=True)
        .problems[0]
        .startswith("digests.safetensors: exists, but the manifest has no digests")
    )
    (folder / names.DIGESTS).unlink()
    report = uc.verify(folder, deep=True)
    assert (report.ok, report.notes) == (
        True,
        ("there are no digests: only sizes and headers were checked",),
    )
    assert uc.verify(folder).notes == ()
    for verify, has_note in (("read", True), ("full", True), ("off", False)):
        model, optimizer = fresh()
        notes = uc.load(
            folder, model=model, optimizer=optimizer, options=uc.LoadOptions(verify=verify)
        ).notes
        assert bool(notes) is has_note
        assert not has_note or notes == (
            f'verify="{verify}": the checkpoint has no digests; '
            "only sizes and headers were checked",
        )


def test_a_plain_model_folder_loads(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(folder / "model.safetensors", plain)
    model, _ = fresh()
    assert uc.load(plain, model=model).notes == ()
    assert (
        uc.load(plain, model=model, options=uc.LoadOptions(verify="full"))
        .notes[0]
        .startswith('verify="full": the checkpoint has no digests')
    )
    assert uc.verify(plain, deep=True).ok

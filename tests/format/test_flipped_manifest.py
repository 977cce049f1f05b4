"""A manifest verifies itself: with a flipped byte it is never used to read, verify or repair."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import SAVE, NodeState, fine, folder_of
from tests.support.format.manifests import edit_manifest
from tests.support.refusals import same_error
from tests.support.torch_training import train_step
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.manifest import read_manifest_at
from unified_ckpt.format import names

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
    train_step(optimizer)
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


def test_any_flipped_byte_is_refused(folder: Path) -> None:
    file = folder / names.MANIFEST
    target, body = {"weight": torch.zeros(2, 3)}, file.read_bytes()
    for offset, byte in enumerate(body):
        put_byte(file, offset, byte ^ MASKS[offset % len(MASKS)])
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
    assert re.search(FLIPPED, *report.problems)
    assert main(["verify", str(folder), "--json", *(["--deep"] if deep else [])]) == 1
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["ok"], manifest["problems"]) == (False, list(report.problems))
    assert main(["list", str(folder.parent)]) == 0
    assert "incomplete: unified_checkpoint.json: is not the file" in capsys.readouterr().out


# a digit of the major version


def test_a_flipped_version_is_damage_not_a_newer_format(folder: Path, good: Path) -> None:
    flip(folder, '"format_version": "1.', '"format_version": "3.')
    with pytest.raises(uc.IntegrityError, match=FLIPPED):
        values(folder)
    with pytest.raises(uc.IntegrityError, match="got a damaged manifest"):
        uc.repair(folder, [good])


# nodes


STATE = NodeState({"w": torch.arange(64.0).reshape(8, 8)}, {"w": 0})


def test_nodes_use_the_manifest_of_a_replica(tmp_path: Path) -> None:
    twice = SAVE.model_copy(update={"node_copies": 2})
    STATE.save(tmp_path / "twice", [0, 1], step=41, options=twice)
    flip(folder_of(tmp_path / "twice", 1))
    reports = fine(STATE.load(tmp_path / "twice", [0, 1]))
    assert [report.step for report in reports] == [41, 41]
    assert re.search(FLIPPED, "; ".join(note for report in reports for note in report.notes))
    flip(folder_of(tmp_path / "twice", 0) / names.replica_name(1))
    (problem,) = uc.verify(folder_of(tmp_path / "twice", 0)).problems
    assert re.search(f"{names.replica_name(1)}: cannot be read: .*{FLIPPED}", problem)
    STATE.save(tmp_path / "once", [0, 1], step=41)
    flip(folder_of(tmp_path / "once", 1))
    same_error(STATE.load(tmp_path / "once", [0, 1]), uc.IncompleteError, FLIPPED)


# digests that cannot be compared


def unknown_digests(manifest: dict[str, Any]) -> None:
    manifest["digests"]["algorithm"] = "crc64nvmf"


def no_digests(manifest: dict[str, Any]) -> None:
    manifest["digests"] = None


UNKNOWN = (
    r"digests\.safetensors: got digests 'crc64nvmf' of 1048576 bytes, "
    r"expected 'crc64nvme' of 1048576"
)


def test_digests_of_an_unknown_kind_are_not_compared(folder: Path, tmp_path: Path) -> None:
    edit_manifest(folder, unknown_digests)
    model, _ = fresh()
    before = model.weight.clone()
    for verify in ("read", "full"):
        with pytest.raises(uc.FormatError, match=UNKNOWN):
            uc.load(folder, model=model, options=uc.LoadOptions(verify=verify), strict=False)
        assert torch.equal(model.weight, before)
    assert "41" in values(folder, verify="off")
    assert uc.verify(folder).ok
    (problem,) = uc.verify(folder, deep=True).problems
    assert re.search(UNKNOWN, problem)
    STATE.save(tmp_path, [0, 1], step=41)
    for node in (0, 1):
        edit_manifest(folder_of(tmp_path, node), unknown_digests)
    for error in STATE.load(tmp_path, [0, 1]):
        assert isinstance(error, uc.CheckpointError)
        assert re.search(UNKNOWN, str(error))
        assert "unusable" not in str(error)
    fine(STATE.load(tmp_path, [0, 1], verify="off"))


def test_missing_digests_are_reported(folder: Path, tmp_path: Path) -> None:
    edit_manifest(folder, no_digests)
    problem = uc.verify(folder, deep=True).problems[0]
    assert problem.startswith("digests.safetensors: exists, but the manifest has no digests")
    (folder / names.DIGESTS).unlink()
    report = uc.verify(folder, deep=True)
    note = "there are no digests: only sizes and headers were checked"
    assert (report.ok, report.notes, uc.verify(folder).notes) == (True, (note,), ())
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(folder / "model.safetensors", plain)
    model, optimizer = fresh()
    targets = {"model": model, "optimizer": optimizer}
    for path, verify, has_note in (
        (folder, "read", True),
        (folder, "full", True),
        (folder, "off", False),
        (plain, "read", False),  # nobody expects digests of other writers
        (plain, "full", True),
    ):
        wanted = targets if path == folder else {"model": model}
        notes = uc.load(path, **wanted, options=uc.LoadOptions(verify=verify)).notes
        text = (
            f'verify="{verify}": the checkpoint has no digests; only sizes and headers were checked'
        )
        assert notes == ((text,) if has_note else ())
    assert uc.verify(plain, deep=True).ok

"""`unified-ckpt list` shows what is under a root; `prune` removes what no rule keeps."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.damage import flip
from tests.support.format.manifests import edit_manifest
from tests.support.manager.managers import (
    copy_folder,
    delete_file,
    delete_manifest,
    folders,
    manager_of,
    save_steps,
    state,
    steps_in,
    zero_file,
)
from unified_ckpt.cli import prune
from unified_ckpt.cli.display.form import StepForms
from unified_ckpt.cli.display.step_table import runs_text
from unified_ckpt.cli.list import list_runs
from unified_ckpt.cli.main import build_parser, main
from unified_ckpt.engine.folder import reader
from unified_ckpt.format.names import MANIFEST
from unified_ckpt.manager.steps import scan as scan_module
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.report.run_data import read_report
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage


def set_oldest_time(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (0, 0), follow_symlinks=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three good ones, one incomplete, one misnamed, one of another library; a cut-off save and the
    only copy of another.
    """
    root = tmp_path / "run"
    for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
        uc.save(
            root / f"checkpoint-{step}",
            step=step,
            metrics={"loss": loss},
            **state(step, full=step != 20),
        )
    copy_folder(root / "checkpoint-10", root / "checkpoint-40")
    copy_folder(root / "checkpoint-10", root / "checkpoint-50")
    delete_manifest(root / "checkpoint-50")
    (root / "checkpoint-60").mkdir()
    (root / "checkpoint-60" / "optimizer.pt").write_bytes(b"x")
    (root / ".unified-ab-checkpoint-70").mkdir()
    copy_folder(root / "checkpoint-10", root / ".replaced-ab-checkpoint-5")
    return root


def test_prune_ignores_damaged_newer_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path, 5, 10, 20)
    save_steps(tmp_path, 25, full=False)
    save_steps(tmp_path, 30)
    zero_file(tmp_path / "checkpoint-20" / "optimizer.safetensors")
    flip(tmp_path / "checkpoint-30" / "model.safetensors", 20)
    text = run_verb(capsys, "prune", tmp_path, "--keep-latest", 1)
    assert steps_in(tmp_path) == [10, 20, 25, 30]
    assert "kept checkpoint-20: damaged, and ignored by the rules: optimizer.safetensors: " in text
    assert (
        "kept checkpoint-30: damaged, and ignored by the rules: model.safetensors: "
        "its header has CRC " in text
    )
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]


def test_bare_numbers_are_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run below the root has its own prefix. Numbered folders of others stay unchanged."""
    for step in (10, 20):
        uc.save(tmp_path / f"a/{step}", step=step, **state(step))
    save_steps(tmp_path / "b", 30)
    notes = tmp_path / "a/2024/notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    runs = json.loads(run_verb(capsys, "list", tmp_path, "--json", "--keep-latest", 1))["runs"]
    listed = {Path(run["path"]).name: [step["name"] for step in run["steps"]] for run in runs}
    assert listed == {"a": ["10", "20"], "b": ["checkpoint-30"]}
    assert [row.name for row in read_report(str(tmp_path / "a")).rows] == ["10", "20"]
    assert "2 checkpoints, 0 damaged" in run_verb(capsys, "verify", tmp_path / "a")
    assert "would remove 10 " in run_verb(
        capsys, "prune", tmp_path / "a", "--keep-latest", 1, "--incomplete", "--dry-run"
    )
    run_verb(capsys, "prune", tmp_path / "a", "--keep-latest", 1, "--incomplete")
    assert folders(tmp_path / "a") == ["20", "2024"]
    assert notes.read_text() == "mine"


def test_half_of_a_checkpoint_is_called_partial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb says which folders are missing; with the copies of the other node, none is."""
    golden = Path(__file__).parents[1] / "fixtures" / "golden" / "nodes" / "node-0"
    step = copy_folder(golden / "checkpoint-7", tmp_path / "checkpoint-7")
    verbs = ("list", tmp_path), ("inspect", step), ("verify", step), ("verify", tmp_path)
    for verb, path in verbs:
        assert "partial" not in run_verb(capsys, verb, path)
    shutil.rmtree(step / "replicas")
    for verb, path in verbs:
        code = int(verb == "verify")  # the copies are missing
        text = " ".join(run_verb(capsys, verb, path, code=code).split())
        assert "partial: folder(s) 1 of 2 are on no node present; rank(s) 1 of the save" in text
    assert "partial: folder(s) 1 of 2" in run_verb(capsys, "prune", tmp_path, "--keep-latest", 1)
    [row] = read_report(str(tmp_path)).rows
    assert row.status.startswith("partial: folder(s) 1 of 2")
    assert steps_in(tmp_path) == [7]


def test_list_shows_step_size_status_and_rules(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_verb(capsys, "list", run, "--keep-latest", 1, "--metric", "loss").splitlines()
    assert lines[0] == str(run)
    titles = "step  size  saved (UTC)  took  kind  form  B/param  status"
    assert lines[1].split() == titles.split()
    rows = {line.split()[0]: line for line in lines[2:]}
    assert "full" in rows["10"]
    assert rows["10"].endswith("  complete  loss=0.5")
    assert rows["20"].endswith("  complete  loss=0.25  kept by latest 1, best by loss")
    assert "model only" in rows["20"]
    assert rows["30"].endswith("latest, latest full, latest 1")
    assert "misnamed: its manifest has step 10; rename it to checkpoint-10" in rows["checkpoint-40"]
    assert "incomplete: it has no unified_checkpoint.json" in rows["checkpoint-50"]
    assert "Hugging Face Trainer: checkpoint-60" in rows["60"]
    assert "incomplete: trainer_state.json, which is written last, is missing" in rows["60"]
    assert "  6 checkpoints, " in run_verb(capsys, "list", run)
    assert ", 3 not complete" in run_verb(capsys, "list", run)
    after = lines[lines.index("  stale folders of interrupted saves:") + 1 :]
    assert after[0].startswith("    .replaced-ab-checkpoint-5  ")
    assert after[0].endswith("it is the only copy of a checkpoint: rename it back")
    assert after[1].startswith(
        "    .unified-ab-checkpoint-70  0 B in 0 files, last changed 0.0 h ago"
    )


def on_terminal(arguments: list[str], columns: int, **environment: str) -> tuple[bytes, int]:
    """Run the command on a terminal; return what it shows and its exit code."""
    terminal_end, child_terminal = pty.openpty()
    termios.tcsetwinsize(child_terminal, (24, columns))
    plain = {name: os.environ[name] for name in os.environ.keys() - {"COLUMNS", "NO_COLOR"}}
    process = subprocess.run(
        [sys.executable, "-m", "unified_ckpt", *arguments],
        stdout=child_terminal,
        env={**plain, "TERM": "xterm", **environment},
        check=False,
    )
    os.close(child_terminal)
    shown = b""
    with io.FileIO(terminal_end) as terminal, suppress(OSError):  # EIO at its end
        while block := terminal.read(65536):
            shown += block
    return shown, process.returncode


def test_list_fits_a_terminal_and_has_colours(run: Path) -> None:
    arguments = ["list", str(run), "--keep-latest", "1", "--metric", "loss"]
    shown, code = on_terminal(arguments, 80)
    assert code == 0
    assert b"\x1b[31mincomplete: " in shown
    assert b"\x1b[1mloss=0.25\x1b[0m" in shown
    text = re.sub(rb"\x1b\[\d*m", b"", shown).decode()
    lines = text.partition("  stale folders")[0].splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["step", "size", "saved", "(UTC)", "status"]
    status = lines[0].index("status")
    assert f"{' ' * status}kept by latest 1, best by loss" in lines
    rows = [(line[:status].split()[0], line[status:]) for line in lines if line[2:3].strip()]
    assert ("20", "complete") in rows
    assert ("checkpoint-50", "incomplete: it has no") in [(step, s[:21]) for step, s in rows]
    assert " ".join(line[status:] for line in lines).count("rename it to checkpoint-10") == 1
    plain, _ = on_terminal(arguments, 80, NO_COLOR="1")
    assert b"\x1b" not in plain
    shown_plain = [line.rstrip() for line in plain.decode().splitlines()]
    assert shown_plain == [line.rstrip() for line in text.splitlines()]
    wide, _ = on_terminal(arguments, 200, TERM="dumb")
    assert b"complete  loss=0.25  kept by latest 1, best by loss\r\n" in wide


def watch_command(run: Path, interval: str) -> list[str]:
    return [sys.executable, "-u", "-m", "unified_ckpt", "watch", str(run), "--interval", interval]


def test_watch_follows_a_run_until_interrupted(run: Path) -> None:
    """Without a terminal, each line appears once; a new step appears when it is saved."""
    command = watch_command(run, "0.2")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as stack,
    ):
        assert process.stdout is not None
        stack.callback(process.kill)
        lines = iter(process.stdout.readline, "")
        first = [next(lines) for _ in range(11)]
        assert first[0] == f"{run}\n"
        uc.save(run / "checkpoint-80", step=80, metrics={"loss": 0.125}, **state(80))
        new = next(line for line in lines if line.startswith("  80 "))
        assert new.endswith("  complete  loss=0.125\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not [line for line in lines if line in first[2:5]]


def test_watch_redraws_a_terminal(run: Path) -> None:
    terminal_end, child_terminal = pty.openpty()
    command = watch_command(run, "0.1")
    with (
        subprocess.Popen(command, stdout=child_terminal) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        os.close(child_terminal)
        shown = b""
        while shown.count(b"\x1b[H\x1b[2J") < 2:
            shown += os.read(terminal_end, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    os.close(terminal_end)
    assert b"every 0.1 s; Ctrl-C ends" in shown


def test_list_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_json,) = json.loads(run_verb(capsys, "list", run, "--json"))["runs"]
    assert run_json["path"] == str(run)
    (record,) = (record for record in run_json["steps"] if record["name"] == "checkpoint-30")
    folder = run / "checkpoint-30"
    manifest = json.loads((folder / MANIFEST).read_bytes())
    expected = {
        "step": 30,
        "status": "complete",
        "kept_by": ["latest", "latest full", "no rule"],
        "created": manifest["created"],
        "seconds": manifest["seconds"],
        "metrics": {"loss": 0.75},
        "nbytes": sum(file.stat().st_size for file in folder.iterdir()),
    }
    assert {key: record[key] for key in expected} == expected
    assert [stale["kind"] for stale in run_json["stale"]] == ["backup", "staging"]


@pytest.mark.parametrize(
    ("parts", "kind", "omitted"),
    [
        (("model",), "model only, without optimizer", ["optimizer"]),
        (("model", "optimizer"), "full", []),
        (("master_weights", "optimizer"), "full, without model", ["model"]),
    ],
)
def test_list_and_inspect_name_omitted_parts(
    tmp_path: Path,
    parts: tuple[str, ...],
    kind: str,
    omitted: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = state(3)
    if "master_weights" in parts:
        weights["master_weights"] = {
            name: tensor.double() for name, tensor in weights["model"].items()
        }
    uc.save(tmp_path / "checkpoint-3", step=3, **weights, options=uc.SaveOptions(parts=parts))
    (row,) = (line for line in run_verb(capsys, "list", tmp_path).splitlines() if " 3 " in line)
    kind, comma, without = kind.partition(", ")
    assert f"  {kind}  none  " in row
    assert row.endswith(f"  complete  {without}" if comma else "  complete")
    assert (
        json.loads(run_verb(capsys, "list", tmp_path, "--json"))["runs"][0]["steps"][0][
            "omitted_parts"
        ]
        == omitted
    )
    text = run_verb(capsys, "inspect", tmp_path / "checkpoint-3")
    assert [line.split() for line in text.splitlines() if "omitted" in line] == (
        [["omitted", *omitted]] if omitted else []
    )
    assert (
        json.loads(run_verb(capsys, "inspect", tmp_path / "checkpoint-3", "--json"))[
            "omitted_parts"
        ]
        == omitted
    )


def test_list_several_runs_under_one_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that cannot be read are skipped with a warning."""
    save_steps(tmp_path / "a", 1, 2)
    save_steps(tmp_path / "b" / "checkpoints", 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "lost+found").mkdir()

    def refused(path: str) -> Any:
        if path.endswith("lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refused)
    assert main(["list", str(tmp_path)]) == 0
    text, warning = capsys.readouterr()
    assert [line for line in text.splitlines() if line.startswith(str(tmp_path))] == [
        f"{tmp_path}/a",
        f"{tmp_path}/b/checkpoints",
    ]
    assert "\n2 runs: 3 checkpoints, " in text
    lost = f"unified-ckpt list: skipping {tmp_path / 'lost+found'}, which cannot be read: "
    assert warning == f"{lost}Permission denied\n"
    assert "no checkpoints named checkpoint-<step>" in run_verb(capsys, "list", tmp_path / "notes")


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two tiers, whose local directory has one of another run too."""
    root, local = tmp_path / "run", tmp_path / "local"
    save_steps(local, 90)
    with manager_of(
        None, root, interval_steps=10, local_interval_steps=1, local_directory=str(local)
    ) as manager:
        for step in range(1, 13):
            manager.save(step, **state(step))
            if step == 10:
                manager.wait()
    copy_folder(root / "checkpoint-10", local / "checkpoint-10")
    return root, local


def test_list_and_prune_two_tiers(
    tiers: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root, local = tiers
    lines = run_verb(capsys, "list", root, "--local", local).splitlines()
    assert lines[0] == f"{root} and {local}"
    assert lines[1].split()[:3] == ["step", "tier", "size"]
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["10", "local"],
        ["10", "root"],
        ["12", "local"],
        ["90", "local"],
    ]
    assert lines[2].endswith("complete")
    assert lines[3].endswith("complete")
    assert lines[4].endswith("kept by latest, latest full, latest 1")
    assert lines[5].endswith("complete  of another run")
    (run_json,) = json.loads(
        run_verb(capsys, "list", root, "--local", local, "--keep-latest-local", 2, "--json")
    )["runs"]
    assert run_json["local"] == str(local)
    assert [
        (record["step"], record["tier"], record["of_this_run"], bool(record["kept_by"]))
        for record in run_json["steps"]
    ] == [
        (10, "root", True, True),
        (10, "local", True, True),
        (12, "local", True, True),
        (90, "local", False, False),
    ]
    for missing in ([str(root), "--local", str(root / "none")], [str(root / "none")]):
        assert main(["list", *missing]) == 1
        assert "no such folder" in capsys.readouterr().err
    save_steps(root, 20)
    before = folders(local)
    run_verb(capsys, "prune", root, "--keep-latest", 1)
    assert (steps_in(root), folders(local)) == ([20], before), "`prune` only touches its root"
    run_verb(capsys, "prune", local, "--keep-latest", 1)
    assert steps_in(local) == [90]
    assert ".unified_tier.json" in folders(local)


def test_prune_by_rules_removes_complete_checkpoints_only(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(run)
    text = run_verb(capsys, "prune", run, "--keep-latest", 1, "--dry-run")
    assert "would remove checkpoint-10  " in text
    assert "no rule keeps it" in text
    assert folders(run) == before
    text = run_verb(capsys, "prune", run, "--keep-latest", 1)
    assert f"{run}: removed 1 folder, " in text
    assert set(before) - set(folders(run)) == {"checkpoint-10"}
    assert "removed 0 folders" in run_verb(capsys, "prune", run, "--keep-latest", 1)


def test_prune_by_metric_and_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.6)):
        uc.save(tmp_path / f"checkpoint-{step}", step=step, metrics={"loss": loss}, **state(step))
    rules = ("--keep-latest", 1, "--keep-best", 1, "--metric", "loss")
    result = json.loads(run_verb(capsys, "prune", tmp_path, *rules, "--json"))
    assert list(result["removed"]) == ["checkpoint-1", "checkpoint-3"]
    assert (result["dry_run"], result["kept"]) == (False, {})
    assert steps_in(tmp_path) == [2, 4]
    save_steps(tmp_path, 5, 6, 7, full=False)
    run_verb(capsys, "prune", tmp_path, "--keep-every-steps-model-only", 2)
    assert steps_in(tmp_path) == [2, 4, 6, 7]


@pytest.mark.parametrize("verb", ["list", "prune", "watch"])
def test_a_metric_that_no_checkpoint_has_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """A mistyped metric would otherwise remove the best checkpoint."""
    before = folders(run)

    assert main([verb, str(run), "--keep-best", "1", "--metric", "los"]) == 1

    assert "--metric los: no checkpoint has this metric, expected one of loss" in (
        capsys.readouterr().err
    )
    assert folders(run) == before


def test_prune_removes_only_old_unified_folders(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders(run)
    text = run_verb(capsys, "prune", run, "--incomplete", "--stale")
    assert (
        "kept checkpoint-50: incomplete: it has no unified_checkpoint.json; changed 0.0 h ago"
        in text
    )
    assert "kept checkpoint-60: written by another framework (Hugging Face Trainer)" in text
    assert "kept .unified-ab-checkpoint-70: a save may be writing to it" in text
    assert folders(run) == before
    (run / "checkpoint-50" / "link").symlink_to("nothing")
    for folder in run.iterdir():
        set_oldest_time(folder)
    text = run_verb(capsys, "prune", run, "--incomplete", "--stale")
    assert set(before) - set(folders(run)) == {"checkpoint-50", ".unified-ab-checkpoint-70"}
    assert "kept .replaced-ab-checkpoint-5: " in text
    assert "only copy" in text


def test_prune_keeps_checkpoints_that_are_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path, 1, 2)
    with shared_lock(str(tmp_path / "checkpoint-1")):
        assert "kept checkpoint-1: it is being read" in run_verb(
            capsys, "prune", tmp_path, "--keep-latest", 1, code=1
        )
    assert "removed checkpoint-1" in run_verb(capsys, "prune", tmp_path, "--keep-latest", 1)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run; for tests that change nothing."""
    root = tmp_path_factory.mktemp("two")
    save_steps(root / "a", 1, 2)
    return root


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["list", "", "--keep-latest", "1"], 2, "argument ROOT: got an empty path; pass . for"),
        (["prune", "", "--keep-latest", "1"], 2, "argument ROOT: got an empty path; pass . for"),
        (["inspect", ""], 2, "argument PATH: got an empty path; pass . for"),
        (["prune", "a", "--keep-latset=1"], 2, "--keep-latset=1; did you mean '--keep-latest'?"),
        (["prun", "a"], 2, "did you mean 'prune'?"),
        (["report", "a", "-o", "none/x.html"], 1, "none/x.html: No such file or directory"),
        *(
            ([verb, "a/checkpoint-1", *rules], 1, "a/checkpoint-1: is a checkpoint, expected the")
            for verb, rules in (("list", []), ("watch", []), ("prune", ["--keep-latest", "1"]))
        ),
        (["prune", "a"], 2, "pass a rule such as --keep-latest"),
        (["prune", "a", "--keep-best", "2"], 2, "--keep-best requires --metric"),
        (["prune", ".", "--keep-latest", "1"], 1, "pass the folder of one run"),
        *(
            (["prune", "a", "--stale", "--older-than-hours", wrong], 2, "--older-than-hours")
            for wrong in ("nan", "-3", "inf", "long")
        ),
        *(
            (["prune", "a", "--keep-latest", wrong], 2, "--keep-latest")
            for wrong in ("0", "-1", "many")
        ),
    ],
)
def test_usage_errors_remove_nothing(
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(two_steps)
    try:
        actual = main(arguments)
    except SystemExit as end:  # of argparse
        actual = end.code
    assert (actual, text in capsys.readouterr().err) == (code, True)
    assert steps_in(two_steps / "a") == [1, 2]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"format_version": "2.0"}, "unified_checkpoint.json: got format version 2."),
        ({"world_size": -1}, "unified_checkpoint.json: world_size: "),
        (None, "read failed: Stale file handle"),
    ],
)
def test_prune_keeps_manifests_that_may_be_undamaged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object] | None,
    problem: str,
) -> None:
    def stale(self: LocalStorage, name: str) -> bytes:
        if fields is None and name == f"checkpoint-2/{MANIFEST}":
            raise uc.StorageError(f"{self.path(name)}: read failed: {os.strerror(errno.ESTALE)}")
        return read(self, name)

    read = LocalStorage.read
    save_steps(tmp_path, 1, 2)
    edit_manifest(tmp_path / "checkpoint-2", lambda manifest: manifest.update(fields or {}))
    set_oldest_time(tmp_path / "checkpoint-2")
    monkeypatch.setattr(LocalStorage, "read", stale)
    text = run_verb(capsys, "prune", tmp_path, "--incomplete")
    assert "kept checkpoint-2: it may be a checkpoint: " in text
    assert problem in text
    assert steps_in(tmp_path) == [1, 2]


def test_prune_keeps_a_step_that_was_replaced_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)
    delete_file(tmp_path / "checkpoint-1")
    set_oldest_time(tmp_path / "checkpoint-1")
    age_of = prune._age_seconds

    def slow(storage: LocalStorage, record: StepRecord) -> float:
        age = age_of(storage, record)
        save_steps(tmp_path, 1, options=uc.SaveOptions(if_exists="replace"))
        return age

    monkeypatch.setattr(prune, "_age_seconds", slow)
    assert "kept checkpoint-1: it has changed" in run_verb(
        capsys, "prune", tmp_path, "--incomplete", code=1
    )
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok


def test_list_opens_each_step_once_and_watch_reads_headers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)
    opened: list[str] = []

    def count(*, module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            opened.append(name)
            return original(*arguments, **more)

        monkeypatch.setattr(module, name, counted)

    count(module=scan_module, name="parse_manifest")
    count(module=reader, name="parse_manifest")
    count(module=reader, name="read_index")
    arguments = build_parser().parse_args(["list", str(tmp_path)])
    forms = StepForms()
    first = runs_text(list_runs(str(tmp_path), arguments, forms))
    assert sorted(opened) == ["parse_manifest"] * 2 + ["read_index"] * 4  # of two parts
    opened.clear()
    assert runs_text(list_runs(str(tmp_path), arguments, forms)) == first
    assert opened == ["parse_manifest"] * 2
    save_steps(tmp_path, 2, options=uc.SaveOptions(if_exists="replace"))
    opened.clear()
    list_runs(str(tmp_path), arguments, forms)
    assert sorted(opened) == ["parse_manifest"] * 2 + ["read_index"] * 2  # step 2 is another save

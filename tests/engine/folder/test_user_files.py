"""No user file is lost: whatever is at or around the name of a save, whichever call saves, and
wherever the process is killed.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.harness import SimulatedCrash
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.copy import copy_checkpoint
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.runtime.comm.comm import single_process
from unified_ckpt.runtime.storage.storage import LocalStorage

NAME, STEP = "checkpoint-8", 8
EVENTS = "unified_events.jsonl"  # of a manager
CHANGES = (
    *("make_folder", "write_at", "resize", "_fsync"),
    *("_rename", "_exchange", "remove_file", "remove_folder", "remove_empty"),
)
QUICK: dict[str, Any] = {
    "asynchronous": False,
    "retries": 0,
    "raise_after": 1,
    "on_preemption": False,
}


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(step))}, "step": step}


def attach(folder: str) -> None:
    (Path(folder) / "config.json").write_text("{}")
    (Path(folder) / "logs").mkdir()
    (Path(folder) / "logs" / "a.txt").write_text("of the save")


# who saves to root/run/NAME


def manage(root: Path, if_exists: str, **arguments: Any) -> object:
    with uc.CheckpointManager(
        root / "run",
        options=uc.ManagerOptions(**QUICK),
        save_options=uc.SaveOptions(if_exists=if_exists),
    ) as manager:
        given = {"attach": attach, **state(STEP), **arguments}
        return manager.save(given.pop("step"), force=True, **given)


def save(root: Path, if_exists: str, **arguments: Any) -> object:
    options = uc.SaveOptions(if_exists=if_exists)
    given = {"attach": attach, "options": options, **state(STEP), **arguments}
    return uc.save(root / "run" / NAME, **given)


def save_async(root: Path, if_exists: str, **arguments: Any) -> object:
    options = uc.SaveOptions(if_exists=if_exists)
    given = {"attach": attach, "options": options, **state(STEP), **arguments}
    return uc.save_async(root / "run" / NAME, **given).result()


def copy(root: Path, if_exists: str) -> object:
    source = str(root / "source")
    with LocalStorage(str(root / "run")) as storage:
        return copy_checkpoint(
            source, storage, NAME, if_exists=if_exists, on_progress=lambda _: None
        )


def convert(to: str) -> Callable[[Path, str], object]:
    return lambda root, if_exists: uc.convert(
        root / "source", root / "run" / NAME, to=to, if_exists=if_exists
    )


SAVES: dict[str, Callable[..., object]] = {
    "save": save,
    "save_async": save_async,
    "manager": manage,
    "copy": copy,
    "convert": convert("unified"),
    "convert to huggingface": convert("huggingface"),
    "convert to dcp": convert("dcp"),
}
CHOSEN = {"manager", "copy"}  # these resolve names as a manager does


# what exists at the name


def absent(path: Path) -> None:
    """Leave the name free."""


def marker(path: Path) -> None:
    path.mkdir()
    (path / "checkpoint-is-incomplete.txt").touch()


def committed(path: Path) -> None:
    uc.save(path, **state(5), attach=attach)


def damaged(path: Path) -> None:
    committed(path)
    (path / "unified_checkpoint.json").write_bytes(b"{")


SITUATIONS: dict[str, Callable[[Path], object]] = {
    "absent": absent,
    "empty": Path.mkdir,
    "marker": marker,
    "committed": committed,
    "damaged": damaged,
    "folder": Path.mkdir,
    "weights": lambda path: (
        path.mkdir(),
        save_file({"w": torch.ones(2)}, path / "model.safetensors"),
    ),
    "run": lambda path: uc.save(path / "checkpoint-3", **state(3)),
    "file": lambda path: path.touch(),
    "link": lambda path: path.symlink_to("elsewhere"),
}
OURS = {"committed", "damaged", "weights", "run"}  # these folders also hold user files


@dataclass
class User:
    """Writes files with unique contents, and checks that they still exist."""

    root: Path
    bodies: dict[bytes, str] = field(default_factory=dict)

    def write(self, name: str) -> None:
        path = self.root / name
        body = f"{len(self.bodies)} {name}".encode()
        with suppress(FileExistsError, NotADirectoryError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.stat().st_size == 0:
                path.write_bytes(body)
                self.bodies[body] = name

    def check(self, when: str) -> None:
        """Check that every file exists, byte for byte, under a visible name."""
        visible = set()
        for folder, folders, files in os.walk(self.root):
            folders[:] = [
                name for name in folders if not name.startswith((".unified-", ".replaced-"))
            ]
            for path in (Path(folder) / name for name in files):
                if path.is_file() and path.stat().st_size < 100:
                    visible.add(path.read_bytes())
        assert [name for body, name in self.bodies.items() if body not in visible] == [], (
            f"{when}: lost"
        )


@contextmanager
def watched(
    patch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]
) -> Iterator[list[str]]:
    """Call `actions[n]` before the n-th change of the disk; yield the list of changes.

    After a SimulatedCrash, no further change succeeds.
    """
    done: list[str] = []
    dead: list[SimulatedCrash] = []

    def watch(name: str) -> None:
        real = getattr(LocalStorage, name)

        def change(self: LocalStorage, *args: Any, **more: Any) -> Any:
            if dead:
                raise dead[0]
            done.append(f"{name} {args}")
            try:
                actions.get(len(done), lambda: None)()
            except SimulatedCrash as stopped:
                dead.append(stopped)
                raise
            return real(self, *args, **more)

        patch.setattr(LocalStorage, name, change)

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            watch(name)
        yield done


def stop() -> None:
    raise SimulatedCrash


def run(draw: random.Random, root: Path, start: Path, patch: pytest.MonkeyPatch) -> str:
    """Run one drawn case; return its description."""
    shutil.copytree(start, root)
    who, situation = draw.choice(list(SAVES)), draw.choice(list(SITUATIONS))
    if_exists, exchange = (
        draw.choice(["error", "keep", "keep_complete", "replace"]),
        draw.random() < 0.7,
    )
    target, user = root / "run" / NAME, User(root)
    SITUATIONS[situation](target)
    around = [
        "notes.txt",
        f"run/{NAME}-before-1",
        f"run/{NAME}-best/w.bin",
        "run/data/x.csv",
        ".hidden",
    ]
    inside = [
        f"run/{NAME}/{name}"
        for name in (
            "notes.txt",
            "src/a.py",
            "config.json",
            "model.safetensors",
            "digests/unified_save_id",
        )
    ]
    for name in draw.sample(around, draw.randint(0, 3)) + (
        draw.sample(inside, 2) if situation in ("folder", "run") else []
    ):
        user.write(name)
    if situation in OURS:
        user.write(f"run/{NAME}/mine.txt")
    if situation == "file":
        user.write(f"run/{NAME}")
    late = [
        f"run/{NAME}/{name}"
        for name in (
            "late.txt",
            "config.json",
            "model.safetensors",
            "logs/a.txt",
            "logs/b/c.txt",
            "eval.json/x",
        )
    ]

    def appear() -> None:
        for name in draw.sample(late, draw.randint(1, 4)):
            user.write(name)

    moments: dict[int, Callable[[], object]] = {}
    last = 14
    if draw.random() < 0.6:  # between the call and the commit
        moments[draw.randint(2, 8)] = appear
    if draw.random() < 0.6:
        moments[
            draw.choice([moment for moment in range(1, last + 16) if moment not in moments])
        ] = stop
    text = f"{who}, {situation}, {if_exists}, {moments}, exchange={exchange}"
    error: BaseException | None = None
    with watched(patch, moments) as done:
        if not exchange:
            patch.setattr(LocalStorage, "_exchange", lambda *_: False)
        try:
            SAVES[who](root, if_exists)
        except (uc.CheckpointError, SimulatedCrash) as raised:
            error = raised
        finally:
            patch.undo()
    user.check(f"{text}: {error!r} after {done}")
    if situation in ("folder", "weights", "run") and who not in CHOSEN:
        assert isinstance(error, uc.StorageError), text
        assert not done, f"{text}: the disk changed before the refusal"
    with suppress(SystemExit):
        main(
            [
                "prune",
                str(root / "run"),
                "--keep-latest",
                "1",
                "--stale",
                "--older-than-hours",
                "0",
            ]
        )
    user.check(f"{text}: pruned")
    with suppress(uc.CheckpointError):
        SAVES[who](root, if_exists)
    user.check(f"{text}: saved again")
    shutil.rmtree(root)
    return text


def check_cases(count: int, seed: int, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start"
    (start / "run").mkdir(parents=True)
    uc.save(start / "source", **state(STEP))
    uc.save(start / "run" / "checkpoint-2", **state(2))
    draw = random.Random(seed)
    for number in range(count):
        run(draw, tmp_path / str(number), start, patch)


@pytest.mark.parametrize("if_exists", ["error", "keep", "replace"])
@pytest.mark.parametrize("who", ["save", "save_async", "copy", "convert"])
def test_another_checkpoint_at_the_name(tmp_path: Path, who: str, if_exists: str) -> None:
    uc.save(tmp_path / "source", **state(STEP))
    uc.save(tmp_path / "run" / NAME, **state(5))
    if if_exists == "error":
        with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
            SAVES[who](tmp_path, if_exists)
    else:
        done: Any = SAVES[who](tmp_path, if_exists)
        assert (done.nbytes == 0 if who == "copy" else done.existed) == (if_exists == "keep")
    with uc.open(tmp_path / "run" / NAME) as opened:
        assert opened.step == (STEP if if_exists == "replace" else 5)
    assert os.listdir(tmp_path / "run") == [NAME]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("situation", ["absent", "committed", "damaged", "folder"])
def test_rollback_keeps_late_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str, exchange: bool
) -> None:
    """One node cannot commit, so the others roll back. Files that appeared are kept."""
    user, target = User(tmp_path), tmp_path / NAME
    SITUATIONS[situation](target)
    if situation != "absent":
        user.write(f"{NAME}/early.txt")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    if not exchange:
        monkeypatch.setattr(LocalStorage, "_exchange", lambda *_: False)
    with LocalStorage(str(tmp_path)) as storage:
        goal = PublishTarget(NAME, "replace", is_managed_path=True)
        collective = single_process().begin_collective("save", timeout_seconds=5)
        with (
            suppress(uc.RankError),
            Transaction(collective, storage, goal) as transaction,
        ):
            assert transaction.begin(lambda: None) is None
            storage.put(f"{transaction.folder}/config.json", b"new")
            transaction.publisher.publish()
            user.write(f"{NAME}/late.txt")
            transaction.publisher.withdraw()
            raise uc.RankError("another node failed")
    assert {path: path.read_bytes() for path in before} == before
    assert (target / "late.txt").is_file()
    assert os.listdir(tmp_path) == [NAME]
    user.check("withdrawn")


@pytest.mark.parametrize("who", ["save", "save_async", "manager", "copy", "convert"])
@pytest.mark.parametrize("operation", ["remove_file", "remove_folder"])
def test_failed_clean_up_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    who: str,
    operation: str,
) -> None:
    """As after `chattr +i`: the leftover is no checkpoint, and the next save removes it."""
    uc.save(tmp_path / "source", **state(STEP))
    uc.save(tmp_path / "run" / NAME, **state(5))
    real = getattr(LocalStorage, operation)

    def fail(storage: LocalStorage, name: str) -> None:
        if "trash_" in name:
            raise uc.StorageError(f"{storage.path(name)}: remove failed: Operation not permitted")
        real(storage, name)

    monkeypatch.setattr(LocalStorage, operation, fail)
    SAVES[who](tmp_path, "replace")
    with uc.open(tmp_path / "run" / NAME) as opened:
        assert opened.step == STEP
    (left,) = (path for path in (tmp_path / "run").iterdir() if path.name not in (NAME, EVENTS))
    assert str(left) in caplog.text
    monkeypatch.undo()
    shutil.move(tmp_path / "run" / NAME, tmp_path / "elsewhere")
    with uc.CheckpointManager(
        tmp_path / "run", options=uc.ManagerOptions(**QUICK, keep_latest=1)
    ) as manager:
        assert manager.steps() == []
        assert manager.restore(model={"w": torch.zeros(3)}) is None
        manager.save(9, model={"w": torch.ones(3)}, force=True)
    left_names = sorted(os.listdir(tmp_path / "run"))
    assert left_names == ["checkpoint-9", EVENTS], "the next save removes the leftover"


@pytest.mark.parametrize("who", ["save", "save_async", "manager"])
@pytest.mark.parametrize("body", ["mine", "{}"])
def test_conflicting_user_file_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, who: str, body: str
) -> None:
    """The file appears during the save. An equal file is no conflict."""

    def attach_both(folder: str) -> None:
        attach(folder)
        target.mkdir()
        (target / "config.json").write_text(body)
        (target / "notes.txt").write_text("mine")

    (tmp_path / "run").mkdir()
    target, backup = tmp_path / "run" / NAME, tmp_path / "run" / f"{NAME}-before-1" / "config.json"
    error: Exception | None = None
    try:
        SAVES[who](tmp_path, "error", attach=attach_both)
    except uc.StorageError as raised:
        error = raised
    assert uc.verify(target, deep=True).ok
    assert (target / "config.json").read_text() == "{}"
    assert (target / "notes.txt").read_text() == "mine"
    assert backup.exists() == (body == "mine")
    if body == "mine":
        assert backup.read_text() == "mine"
        assert str(backup) in (str(error) if who != "manager" else caplog.text)
    assert (error is not None) == (body == "mine" and who != "manager")


@pytest.mark.parametrize("who", ["save", "save_async"])
def test_conflicting_files_of_a_replaced_checkpoint(tmp_path: Path, who: str) -> None:
    """Theirs are kept beside it, and nothing else of the checkpoint that is replaced."""
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / NAME
    uc.save(target, **state(STEP))
    (target / "logs").mkdir()
    for name in ("config.json", "logs/a.txt", "logs/b.txt"):
        (target / name).write_text("mine")
    with pytest.raises(uc.StorageError, match=f"{NAME}-before-1/config.json, .*/logs/a.txt"):
        SAVES[who](tmp_path, "replace")
    assert uc.verify(target, deep=True).ok
    backup = tmp_path / "run" / f"{NAME}-before-1"
    kept = {str(path.relative_to(backup)) for path in backup.rglob("*") if path.is_file()}
    assert kept == {"config.json", "logs/a.txt"}
    assert (target / "logs" / "b.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [NAME, backup.name]


@pytest.mark.parametrize("who", ["save", "manager"])
def test_file_that_appears_at_the_name(tmp_path: Path, who: str) -> None:
    """Nobody chose the name of a manager's step: the file is moved aside."""
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / NAME
    expects_error = pytest.raises(uc.StorageError, match="a file appeared during this save")
    with expects_error if who == "save" else nullcontext():
        SAVES[who](tmp_path, "error", attach=lambda _: target.write_text("mine"))
    if who == "save":
        assert target.read_text() == "mine"
        assert os.listdir(tmp_path / "run") == [NAME]
    else:
        assert uc.verify(target, deep=True).ok
        assert (tmp_path / "run" / f"{NAME}-before-1").read_text() == "mine"


def test_backup_is_not_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A partial Trainer folder is renamed; list, restore and prune ignore the backup."""
    for number in (1, 2):
        shutil.rmtree(tmp_path / NAME, ignore_errors=True)
        shutil.rmtree(tmp_path / f"checkpoint-{STEP + 1}", ignore_errors=True)
        (tmp_path / NAME).mkdir()
        (tmp_path / NAME / "optimizer.pt").write_bytes(b"half")
        with uc.CheckpointManager(
            tmp_path, options=uc.ManagerOptions(**QUICK, keep_latest=1)
        ) as manager:
            manager.save(STEP, force=True, model=state(STEP)["model"])
            manager.save(STEP + 1, force=True, model=state(STEP + 1)["model"])
            assert [entry.step for entry in manager.steps()] == [STEP + 1]
            assert manager.restore(model={"w": torch.zeros(3)}).step == STEP + 1
        assert f"kept as {tmp_path}/{NAME}-before-{number}" in caplog.text
    assert (
        main(
            [
                "prune",
                str(tmp_path),
                "--incomplete",
                "--stale",
                "--keep-latest",
                "1",
                "--older-than-hours",
                "0",
            ]
        )
        == 0
    )
    assert main(["list", str(tmp_path)]) == 0
    assert "before" not in capsys.readouterr().out
    backups = {path.name: os.listdir(path) for path in tmp_path.glob("*before*")}
    assert backups == {f"{NAME}-before-{n}": ["optimizer.pt"] for n in (1, 2)}


def test_step_left_under_its_backup_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A crash between two renames leaves the step there, and `restore` does not start beside it."""
    uc.save(tmp_path / f"{NAME}-before-1", model=state(STEP)["model"], step=STEP)
    with uc.CheckpointManager(tmp_path, options=uc.ManagerOptions(**QUICK)) as manager:
        with pytest.raises(uc.IncompleteError, match=f"{NAME}-before-1: an interrupted replac"):
            manager.restore(model={"w": torch.zeros(3)})
        assert manager.restore(model={"w": torch.zeros(3)}, allow_fresh=True) is None
        assert (
            f"{NAME}-before-1 is skipped: an interrupted replacement left the only copy of the "
            f"checkpoint here" in caplog.text
        )
        manager.save(STEP, force=True, model=state(STEP)["model"])
        assert manager.restore(model={"w": torch.zeros(3)}) is not None
    assert main(["prune", str(tmp_path), "--incomplete", "--stale", "--older-than-hours", "0"]) == 0
    assert (tmp_path / f"{NAME}-before-1" / "unified_checkpoint.json").exists()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_no_user_file_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """40 cases: the call, the folder at the name, files that appear, and the crash are drawn."""
    caplog.set_level(logging.CRITICAL)
    check_cases(40, seed, tmp_path, monkeypatch)


@pytest.mark.long
def test_no_user_file_is_lost_many_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cases(4000, 7, tmp_path, monkeypatch)

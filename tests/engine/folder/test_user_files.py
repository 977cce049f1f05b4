"""No file of the user's disappears: whatever is at or around the name of a save, whoever saves, and
wherever the process is killed.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.simulated_nodes import SAVE, folder_of, on_node
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import rollback
from unified_ckpt.engine.folder.copy import copy_checkpoint
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import SimulatedCrash, run_ranks

NAME, STEP = "checkpoint-8", 8
CHANGES = ("make_folder", "write_at", "resize", "sync", "sync_tree", "sync_folder", "rename", "exchange", "remove_file", "remove_folder",  # noqa: E501
           "remove_empty")  # fmt: skip
QUICK: dict[str, Any] = {
    "asynchronous": False,
    "retries": 0,
    "raise_after": 1,
    "on_preemption": False,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(step))}, "step": step}


def attach(folder: str) -> None:
    (Path(folder) / "config.json").write_text("{}")
    (Path(folder) / "logs").mkdir()
    (Path(folder) / "logs" / "a.txt").write_text("of the save")


# who saves to root/run/NAME


def save(root: Path, if_exists: str) -> object:
    return uc.save(
        root / "run" / NAME,
        **state(STEP),
        attach=attach,
        options=uc.SaveOptions(if_exists=if_exists),
    )


def save_async(root: Path, if_exists: str) -> object:
    return uc.save_async(
        root / "run" / NAME,
        **state(STEP),
        attach=attach,
        options=uc.SaveOptions(if_exists=if_exists),
    ).result()


def manage(root: Path, if_exists: str) -> object:
    options = uc.SaveOptions(if_exists=if_exists)
    with uc.CheckpointManager(
        root / "run", options=uc.ManagerOptions(**QUICK), save_options=options
    ) as manager:
        return manager.save(STEP, model=state(STEP)["model"], attach=attach, force=True)


def copy(root: Path, if_exists: str) -> object:
    with LocalStorage(str(root / "run")) as storage:
        return copy_checkpoint(
            str(root / "source"),
            storage,
            NAME,
            if_exists=if_exists,
            fsync=True,
            on_progress=lambda _: None,
        )


def convert(to: str) -> Callable[[Path, str], object]:
    return lambda root, if_exists: uc.convert(
        root / "source", root / "run" / NAME, to=to, if_exists=if_exists
    )


SAVES: dict[str, Callable[[Path, str], object]] = {
    "save": save,
    "save_async": save_async,
    "manager": manage,
    "copy": copy,
    "convert": convert("unified"),
    "convert to huggingface": convert("huggingface"),
    "convert to dcp": convert("dcp"),
}
CHOSEN = {"manager", "copy"}  # whose names are a manager's


# what is at the name


def nothing(path: Path) -> None:
    """The name is free."""


def marker(path: Path) -> None:
    path.mkdir()
    (path / "checkpoint-is-incomplete.txt").touch()


def committed(path: Path) -> None:
    uc.save(path, **state(5), attach=attach)


def damaged(path: Path) -> None:
    committed(path)
    (path / "unified_checkpoint.json").write_bytes(b"{")


SITUATIONS: dict[str, Callable[[Path], object]] = {
    "nothing": nothing,
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
OURS = {"committed", "damaged", "weights", "run"}  # in these folders are files of the user's, too


@dataclass
class User:
    """Writes files, no two alike, and looks for them."""

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
        """Every file is there, byte for byte, under a name that is not hidden."""
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
def watched(patch: pytest.MonkeyPatch, at: dict[int, Callable[[], object]]) -> Iterator[list[str]]:
    """Calls a function before a change of the disk, by number; gives all changes, in order. No
    change follows a Stopped.
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
                at.get(len(done), lambda: None)()
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
    """One case; returns what was drawn, in words."""
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
        for name in ("notes.txt", "src/a.py", "config.json", "model.safetensors", "digests/probe")
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
        moments[draw.choice([one for one in range(1, last + 16) if one not in moments])] = stop
    text = f"{who}, {situation}, {if_exists}, {moments}, exchange={exchange}"
    error: BaseException | None = None
    with watched(patch, moments) as done:
        if not exchange:
            patch.setattr(LocalStorage, "exchange", lambda *_: False)
        try:
            SAVES[who](root, if_exists)
        except (uc.CheckpointError, SimulatedCrash) as found:
            error = found
        finally:
            patch.undo()
    patch.setattr(os, "fsync", lambda fd: None)
    user.check(f"{text}: {error!r} after {done}")
    if situation in ("folder", "weights", "run") and who not in CHOSEN:
        assert isinstance(error, uc.StorageError), text
        assert not done, f"{text}: nothing is changed before the refusal"
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


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("there", ["nothing", "committed", "damaged", "folder"])
def test_rollback_keeps_late_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, exchange: bool
) -> None:
    """Of several nodes one cannot commit: the others take their folders back, in which files
    have appeared.
    """
    user, target = User(tmp_path), tmp_path / NAME
    SITUATIONS[there](target)
    if there != "nothing":
        user.write(f"{NAME}/early.txt")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    if not exchange:
        monkeypatch.setattr(LocalStorage, "exchange", lambda *_: False)
    with LocalStorage(str(tmp_path)) as storage:
        goal = commit.PublishTarget(NAME, "replace", is_step_path=True)
        construction = commit.create(
            storage,
            NAME,
            save_id=None,
            existing_entries=commit.check_existing_entries(storage, goal),
        )
        storage.put(f"{construction.folder}/config.json", b"new", fsync=False)
        published = commit.publish(storage, construction, goal, fsync=True)
        user.write(f"{NAME}/late.txt")
        rollback(storage, published)
        commit.abort(storage, construction)
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
    """As after `chattr +i` on an old file. What is left is no checkpoint, and `prune` clears it
    away.
    """
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
    (left,) = (path for path in (tmp_path / "run").iterdir() if path.name != NAME)
    assert str(left) in caplog.text
    monkeypatch.undo()
    shutil.move(tmp_path / "run" / NAME, tmp_path / "elsewhere")
    with uc.CheckpointManager(
        tmp_path / "run", options=uc.ManagerOptions(**QUICK, keep_latest=1)
    ) as manager:
        assert manager.steps() == []
        assert manager.restore(model={"w": torch.zeros(3)}) is None
        manager.save(9, model={"w": torch.ones(3)}, force=True)
    assert os.listdir(tmp_path / "run") == ["checkpoint-9"], "the next save has removed it"


@pytest.mark.parametrize("who", ["save", "save_async", "manager"])
@pytest.mark.parametrize("body", ["mine", "{}"])
def test_conflicting_user_file_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, who: str, body: str
) -> None:
    """It appears during the save, as the trainer's own file does; one that is equal is no clash."""

    def attach_both(folder: str) -> None:
        attach(folder)
        target.mkdir()
        (target / "config.json").write_text(body)
        (target / "notes.txt").write_text("mine")

    (tmp_path / "run").mkdir()
    target, kept = tmp_path / "run" / NAME, tmp_path / "run" / f"{NAME}-before-1" / "config.json"
    what = {"attach": attach_both, **state(STEP)}
    error: Exception | None = None
    try:
        if who == "manager":
            with uc.CheckpointManager(
                tmp_path / "run", options=uc.ManagerOptions(**QUICK)
            ) as manager:
                manager.save(what.pop("step"), force=True, **what)
        elif who == "save":
            uc.save(target, **what)
        else:
            uc.save_async(target, **what).result()
    except uc.StorageError as found:
        error = found
    assert uc.verify(target, deep=True).ok
    assert (target / "config.json").read_text() == "{}"
    assert (target / "notes.txt").read_text() == "mine"
    assert kept.exists() == (body == "mine")
    if body == "mine":
        assert kept.read_text() == "mine"
        assert str(kept) in (str(error) if who != "manager" else caplog.text)
    assert (error is not None) == (body == "mine" and who != "manager")


def test_backup_is_not_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A half-written folder of the stock Trainer is renamed; list, restore, retention and prune
    leave it alone.
    """
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
            assert [one.step for one in manager.steps()] == [STEP + 1]
            report = manager.restore(model={"w": torch.zeros(3)})
            assert report is not None
            assert report.step == STEP + 1
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
    found = {path.name: os.listdir(path) for path in tmp_path.glob("*before*")}
    assert found == {f"{NAME}-before-{n}": ["optimizer.pt"] for n in (1, 2)}


def test_step_left_under_its_backup_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where names cannot be exchanged, a crash between two renames leaves the step without its own:
    `restore` names it.
    """
    uc.save(tmp_path / f"{NAME}-before-1", model=state(STEP)["model"], step=STEP)
    with uc.CheckpointManager(tmp_path, options=uc.ManagerOptions(**QUICK)) as manager:
        assert manager.restore(model={"w": torch.zeros(3)}) is None
        assert (
            f"{NAME}-before-1 is skipped: an interrupted replacement left the only copy of the "
            f"checkpoint here" in caplog.text
        )
        manager.save(STEP, force=True, model=state(STEP)["model"])
        assert manager.restore(model={"w": torch.zeros(3)}) is not None
    assert main(["prune", str(tmp_path), "--incomplete", "--stale", "--older-than-hours", "0"]) == 0
    assert (tmp_path / f"{NAME}-before-1" / "unified_checkpoint.json").exists()


@pytest.mark.parametrize("seed", range(4))
def test_no_user_file_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """40 drawn cases: who saves, what is at the name, which files appear when, where the process is
    killed.
    """
    caplog.set_level(logging.CRITICAL)
    check_cases(40, seed, tmp_path, monkeypatch)


@pytest.mark.long
def test_no_user_file_is_lost_many_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cases(4000, 7, tmp_path, monkeypatch)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_obstacle_seen_by_one_rank_is_refused_by_all(
    tmp_path: Path, nodes: list[int], background: bool
) -> None:
    """The second save of a layout, which plans nothing; the saves before and after it are fine."""
    layout = uc.Layout(mesh={"dp": 2}, rules={"w": {"dp": 0}}, shapes={"w": (8, 3)})
    mine = folder_of(tmp_path, nodes[1]).with_name("mine")
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")

    def act(comm: Comm) -> str:
        with on_node(comm, nodes) as made:

            def save_as(name: str) -> object:
                path = folder_of(tmp_path, nodes[comm.rank]).with_name(name)
                what: dict[str, Any] = {
                    "model": {"w": torch.ones(4, 3)},
                    "layout": layout,
                    "options": SAVE,
                }
                return (
                    made.save_async(path, **what).result(60)
                    if background
                    else made.save(path, **what)
                )

            save_as("first")
            with pytest.raises(
                uc.StorageError, match=r"rank [01]: .*mine: holds other files \(notes.txt\)"
            ) as refusal:
                save_as("mine")
            save_as("last")
            return str(refusal.value)

    assert len(set(run_ranks(2, act))) == 1
    assert os.listdir(mine) == ["notes.txt"]

"""Saves, conversions, exports and repairs of one folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.power.contents import SAVE, check_state, checkpoints, layout, state, whole_step
from tests.support.power.operation import Operation, Report
from unified_ckpt.engine.folder.backup import delete_checkpoint
from unified_ckpt.integrations.lightning.paths import remove_checkpoint, replace_link
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import storage
from unified_ckpt.runtime.storage.storage import LocalStorage

NAME = "run/latest"
ABANDONED = "run/.unified-0-latest"
FILES = {"notes.txt": b"mine", "logs/run.log": b"mine too" * 2000, "logs/1/old": b""}


def write_files(folder: Path, files: Mapping[str, bytes] = FILES) -> None:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)


def check_files(root: Path, folders: str) -> None:
    """The files are in a folder that matches the pattern."""
    for name, body in FILES.items():
        assert body in [path.read_bytes() for path in root.glob(f"{folders}/{name}")], name


def save(root: Path, report: Report, *, step: int = 1, **arguments: Any) -> None:
    uc.save(root / NAME, step=step, **state(step), **{"options": SAVE, **arguments})
    report(step)


def save_first(root: Path) -> None:
    save(root, lambda _: None)


def check_last(root: Path, reported: Sequence[int]) -> None:
    """The step that was reported last, or a later one, is there under its name."""
    steps = checkpoints(root)
    assert not reported or steps.get(NAME, -1) >= reported[-1], (steps, reported)


def save_with_files(root: Path, report: Report) -> None:
    save(root, report, attach=lambda folder: write_files(Path(folder)))


def check_attached(root: Path, reported: Sequence[int]) -> None:
    check_last(root, reported)
    if (root / NAME).exists():
        check_files(root, NAME)


def save_first_with_user_files(root: Path) -> None:
    """The user's files are beside an attached one, in a folder that the next save lacks."""
    attached = {"logs/attached": b"attached"}
    save(root, lambda _: None, attach=lambda folder: write_files(Path(folder), attached))
    write_files(root / NAME)


def replace(root: Path, report: Report) -> None:
    report(1)
    save(root, report, step=2)


def check_user_files(root: Path, reported: Sequence[int]) -> None:
    check_last(root, reported)
    check_files(root, NAME if 2 in reported else "run/[!.]*")


def replace_by_two_renames(root: Path, report: Report) -> None:
    """Replace on a file system that cannot exchange two names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "exchange", lambda *_: False)
        replace(root, report)


def check_under_any_name(root: Path, reported: Sequence[int]) -> None:
    """A cut between the renames leaves the old checkpoint under a hidden name."""
    assert max(checkpoints(root).values()) >= max([0, *reported])


def replace_with_conflict(root: Path, report: Report) -> None:
    """The new checkpoint has other files with the names of the user's, which stay beside it."""
    others = dict.fromkeys(FILES, b"other")
    with pytest.raises(uc.StorageError, match="is committed, but has different files"):
        save(root, report, step=2, attach=lambda folder: write_files(Path(folder), others))
    report(2)


def check_conflict(root: Path, reported: Sequence[int]) -> None:
    check_last(root, reported)
    check_files(root, "run/[!.]*")


def save_without_fsync(root: Path, report: Report) -> None:
    save(root, report, step=2, options=SAVE.model_copy(update={"fsync": False}))


def check_loads(root: Path, _: Sequence[int]) -> None:
    """A load gives right values or fails."""
    for path in root.glob("run/*"):
        targets = state(0)
        try:
            step = uc.load(path, **targets).step
        except uc.CheckpointError:
            continue
        assert step in (1, 2)
        check_state(targets, step)


def save_on_ranks(root: Path, report: Report, *, background: bool = False) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for step in (1, 2):
                arguments = {**state(step, rank=comm.rank, world=2), "layout": layout(2)}
                if background:
                    call = checkpointer.save_async
                    call(root / NAME, step=step, **arguments, options=SAVE).result(30)
                else:
                    checkpointer.save(root / NAME, step=step, **arguments, options=SAVE)
                report(step)

    run_ranks(2, act)


# repairs


def save_and_damage(root: Path) -> None:
    save_first(root)
    shutil.copytree(root / NAME, root / "copy")
    flip(root / NAME / "optimizer.safetensors")
    (root / NAME / "digests.safetensors").unlink()


def repair(root: Path, report: Report) -> None:
    uc.repair(root / NAME, [root / "copy"])
    report(1)


def check_repaired(root: Path, reported: Sequence[int]) -> None:
    """What was repaired is whole; a repair that was interrupted can be repeated."""
    if not reported:
        assert uc.repair(root / NAME, [root / "copy"]).ok
    assert whole_step(root / NAME) == 1


# removals of what a save left


def abandon(root: Path) -> None:
    """Leave a staging folder that is complete but for its name."""
    save_first(root)
    (root / NAME).rename(root / ABANDONED)


def remove_abandoned(root: Path, report: Report) -> None:
    delete_checkpoint(LocalStorage(str(root)), ABANDONED)
    report(None)


def check_no_rest(root: Path, _: Sequence[None]) -> None:
    assert set(checkpoints(root).values()) <= {1}


# conversions


def convert(root: Path, report: Report, *, name: str = NAME, **options: Any) -> None:
    uc.convert(root / "source", root / name, **options)
    report(2)


def save_source(root: Path) -> None:
    uc.save(root / "source", step=2, **state(2), options=SAVE)


def save_source_and_first(root: Path) -> None:
    save_source(root)
    save_first(root)


def export_source(root: Path) -> None:
    save_source(root)
    uc.convert(root / "source", root / "exported", to="torch")


def check_export(root: Path, reported: Sequence[int], *, name: str) -> None:
    """What has the name is whole, also if no digest could tell."""
    path = root / name
    assert whole_step(path) == 2 if path.exists() else not reported


# links of Lightning


def save_and_link(root: Path) -> None:
    save_first(root)
    replace_link(str(root / NAME), str(root / "run/last"))


def link_and_remove(root: Path, report: Report) -> None:
    report(1)
    path = root / "run/second"
    uc.save(path, step=2, **state(2), options=SAVE)
    replace_link(str(path), str(root / "run/last"))
    report(2)
    remove_checkpoint(str(root / NAME), last_committed=str(path), is_global_zero=True)


def check_link(root: Path, reported: Sequence[int]) -> None:
    checkpoints(root)
    assert (whole_step(root / "run/last") or 0) >= max([0, *reported])


EXPORTS: list[tuple[str, str, dict[str, Any]]] = [
    ("huggingface", "exports/hf", {}),
    ("torch", "exports/x.pt", {}),
    ("dcp", "exports/dcp", {}),
    ("orbax", "exports/orbax", {"parts": ("model",)}),
]
FOLDER_OPERATIONS = {
    "save": Operation(save, check_last),
    "attach": Operation(save_with_files, check_attached),
    "replace": Operation(replace, check_user_files, save_first_with_user_files),
    "replace-by-two-renames": Operation(replace_by_two_renames, check_under_any_name, save_first),
    "conflict": Operation(replace_with_conflict, check_conflict, save_first_with_user_files),
    "without-fsync": Operation(save_without_fsync, check_loads, save_first),
    "ranks": Operation(save_on_ranks, check_last),
    "background": Operation(partial(save_on_ranks, background=True), check_last),
    "repair": Operation(repair, check_repaired, save_and_damage),
    "abandoned": Operation(remove_abandoned, check_no_rest, abandon),
    "link": Operation(link_and_remove, check_link, save_and_link),
    "convert": Operation(partial(convert, if_exists="replace"), check_last, save_source_and_first),
    **{
        f"export-{to}": Operation(
            partial(convert, name=name, to=to, **more),
            partial(check_export, name=name),
            save_source,
        )
        for to, name, more in EXPORTS
    },
}

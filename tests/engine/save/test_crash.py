"""Saves stopped at every storage operation, by one process or several nodes: the old checkpoint
stays complete, and the new one is absent or complete, on all nodes or on none.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.node_commits import (
    EACH,
    PAIR,
    PROCESS,
    REPLACE,
    SHARED,
    Ranks,
    faulty,
    full_storage,
    load_all,
    loads,
    save,
)
from tests.support.engine.cluster.simulated_nodes import NAME, fine
from tests.support.harness import FaultPoint, FaultyStorage, FullStorage, SimulatedCrash
from tests.support.lanes import use_lanes
from tests.support.machines.cluster_model import read_files
from tests.support.refusals import same_error
from unified_ckpt.engine.encode.encoder import GroupWritten
from unified_ckpt.engine.save.write import write
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.storage import LocalStorage

USER_FILES = {"notes.txt": b"mine", "experiment/run.log": b"mine too", ".unified": b"not a save"}
PRECIOUS = "precious.bin"  # in an uncommitted folder
DURABLE = REPLACE.model_copy(update={"fsync": True, "max_file_bytes": 80_000})
TWICE = DURABLE.model_copy(update={"node_copies": 2})


class NoExchange(FaultyStorage):
    """A file system that cannot swap two names in one step."""

    def _exchange(self, old: str, new: str) -> bool:
        return False


class BrokenStorage(LocalStorage):
    """Storage that fails the changing operation number `fault_index`, and no other."""

    def __init__(self, root: str, fault_index: int) -> None:
        super().__init__(root)
        self._left, self._lock = fault_index, threading.Lock()

    def _call(self, operation: str, name: str, call: Callable[[], Any]) -> Any:
        if operation.partition(" ")[0] in ("make", "resize", "write", "fsync", "rename", "remove"):
            with self._lock:
                self._left -= 1
                fails = self._left == -1
            if fails:
                return super()._call(operation, name, self._fail)
        return super()._call(operation, name, call)

    @staticmethod
    def _fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(autouse=True)
def _several_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch)


def prepare(
    root: Path, ranks: Ranks, before: str, options: uc.SaveOptions = DURABLE
) -> dict[str, list[str]]:
    """Save step 1 as `other`, and leave something at the name. Returns the names of all places."""
    fine(save(root, 1, ranks=ranks, name="other", options=options))
    places = {ranks.place(root, rank) for rank in range(ranks.world)}
    if before != "absent":
        fine(save(root, 1, ranks=ranks, options=options))
    for place in places:
        for name, body in USER_FILES.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(body)
        if before == "uncommitted":
            (place / NAME / names.MANIFEST).unlink()
            (place / NAME / PRECIOUS).write_bytes(b"results")
    return ranks.left(root)


def check_left(root: Path, ranks: Ranks, before: str) -> None:
    """Check that staging folders are refused, and that the user's files are unchanged."""
    for place in {ranks.place(root, rank) for rank in range(ranks.world)}:
        for staging in place.glob(".unified-*-*"):
            if staging.is_dir() and not (staging / names.MANIFEST).exists():
                with pytest.raises(uc.CheckpointError, match="unfinished save"):
                    uc.open(staging)
        for name, body in USER_FILES.items():
            assert (place / name).read_bytes() == body
        kept = [path.read_bytes() for path in place.glob(f"*/{PRECIOUS}")]
        assert kept == [b"results"] * (before == "uncommitted"), "renamed, never deleted"


def contents_of(root: Path, name: str, ranks: Ranks) -> list[dict[str, bytes]]:
    """The files of a checkpoint, as each rank sees them."""
    return [read_files(ranks.place(root, rank) / name) for rank in range(ranks.world)]


def survivors(
    root: Path, ranks: Ranks, options: uc.SaveOptions, outcomes: Sequence[int | BaseException]
) -> set[int]:
    """Steps that load from all nodes (`outcomes`) and, where each byte is on two, from each node
    alone.
    """
    (step,) = set(fine(outcomes))
    steps = {step}
    for rank in (0, 2) if options.node_copies > 1 else ():
        place, away = ranks.place(root, rank), root / "away"
        place.rename(away)
        steps.add(loads(root, ranks=ranks))
        shutil.rmtree(place, ignore_errors=True)
        away.rename(place)
    return steps


def crash_cases() -> list[Any]:
    """Ranks, those that stop, what is at the name, and one in how many operations is the last; None
    for each operation at which the kind of work changes.
    """
    default: list[Any] = [(PAIR, where, "absent", DURABLE) for where in (range(2), [1])]
    slow: list[Any] = [(PAIR, range(2), name, DURABLE) for name in ("uncommitted", "committed")]
    slow.append((PAIR, [0], "absent", DURABLE))
    slow += [(PROCESS, [0], name, DURABLE) for name in ("absent", "uncommitted", "committed")]
    cases: list[Any] = [(*case, None) for case in default]
    cases += [pytest.param(*case, None, marks=pytest.mark.slow) for case in slow]
    every = [*default, *slow]
    for where in ([2, 3], range(4)):
        every.append((SHARED, where, "committed", DURABLE))
        every += [(EACH, where, before, DURABLE) for before in ("absent", "committed")]
        every.append((EACH, where, "committed", TWICE))
    for ranks, *rest in every:
        if ranks.world > 2:
            cases.append(pytest.param(ranks, *rest, 29, marks=pytest.mark.slow))
        cases.append(pytest.param(ranks, *rest, 1, marks=pytest.mark.long))
    return cases


def crash_indexes(operations: Sequence[str], every: int | None) -> list[int]:
    """Numbers of operations: one in `every`, or the first and the last of each run of one kind."""
    count, kinds = len(operations), [operation.split(" ")[0] for operation in operations]
    if every is not None:
        return sorted({*range(0, count, every), *range(count - 3, count)})
    kinds = ["write_at" if kind == "resize" else kind for kind in kinds]
    return [
        i
        for i, kind in enumerate(kinds)
        if not (kinds[i - 1 : i] == [kind] == kinds[i + 1 : i + 2])
    ]


# a serving thread ends with its simulated process
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("ranks", "where", "before", "options", "every"), crash_cases())
def test_crash_at_any_operation(
    tmp_path: Path,
    ranks: Ranks,
    where: Collection[int],
    before: str,
    options: uc.SaveOptions,
    every: int | None,
) -> None:
    """The old or the new checkpoint is complete, and the next save succeeds."""
    start, fuse, found = tmp_path / "start", FaultPoint(None), set[int]()
    prepare(start, ranks, before, options)
    shutil.copytree(start, tmp_path / "through")
    through = faulty(where, fuse)
    fine(save(tmp_path / "through", 2, ranks=ranks, storages=through, options=options))
    assert loads(tmp_path / "through", name="other", ranks=ranks) == 1
    steps = load_all(tmp_path / "through", NAME, ranks)
    assert survivors(tmp_path / "through", ranks, options, steps) == {2}
    other = contents_of(start, "other", ranks)
    assert len(fuse.operations) > 6 * len(where)
    for fault_index in crash_indexes(fuse.operations, every):
        root, fuse = tmp_path / f"at-{fault_index}", FaultPoint(fault_index)
        shutil.copytree(start, root)
        outcomes = save(root, 2, ranks=ranks, storages=faulty(where, fuse), options=options)
        assert fuse.triggered
        saved = any(isinstance(outcome, uc.SaveReport) for outcome in outcomes)
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, SimulatedCrash | uc.CheckpointError | uc.SaveReport), outcome
            if rank not in where and ranks is PAIR and not saved:
                text = f"rank {1 - rank}: SimulatedCrash: stopped at operation {fault_index}"
                assert text in str(outcome)
                assert rank == 1 or not list((root / "node-0").glob(".unified-*-*"))
        assert contents_of(root, "other", ranks) == other
        check_left(root, ranks, before)
        steps = load_all(root, NAME, ranks)
        if saved or before == "committed" or not any(isinstance(s, Exception) for s in steps):
            assert not saved or set(steps) == {2}, "a rank reported success"
            found |= survivors(root, ranks, options, steps)
        else:
            kinds = uc.NotFoundError | uc.IncompleteError | uc.FormatError
            assert all(isinstance(step, kinds) for step in steps), steps
        fine(save(root, 3, ranks=ranks, options=options))
        assert loads(root, ranks=ranks) == 3
        check_left(root, ranks, before)
        shutil.rmtree(root)
    assert found <= {1, 2} if before == "committed" else found <= {2}


@pytest.mark.parametrize("ranks", [PROCESS, pytest.param(PAIR, marks=pytest.mark.slow)])
def test_replace_by_two_renames(tmp_path: Path, ranks: Ranks) -> None:
    """The name holds a complete checkpoint, or every later call reports where it is."""
    start, fuse, backups = tmp_path / "start", FaultPoint(None), list[Path]()
    prepare(start, ranks, "committed")
    shutil.copytree(start, tmp_path / "through")
    through = faulty(range(2), fuse, NoExchange)
    fine(save(tmp_path / "through", 2, ranks=ranks, storages=through, options=DURABLE))
    for fault_index in range(len(fuse.operations) - 15, len(fuse.operations)):
        root = tmp_path / f"at-{fault_index}"
        folder = shutil.copytree(start, root) / "node-0" / NAME
        stopping = faulty(range(2), FaultPoint(fault_index), NoExchange)
        save(root, 2, ranks=ranks, storages=stopping, options=DURABLE)
        if not folder.exists():
            (backup,) = folder.parent.glob(".replaced-*")
            backups.append(backup)
            pattern = rf"left .*{backup.name}"
            with pytest.raises(uc.NotFoundError, match=pattern):
                uc.load(folder, model={"w": torch.empty(500, 90)})
            for if_exists in ("error", "replace", "keep"):
                options = DURABLE.model_copy(update={"if_exists": if_exists})
                same_error(save(root, 3, ranks=ranks, options=options), uc.StorageError, pattern)
            backup.rename(folder)
            assert loads(root, ranks=ranks) == 1
        assert loads(root, ranks=ranks) in (1, 2)
        fine(save(root, 3, ranks=ranks, options=DURABLE))
        assert loads(root, ranks=ranks) == 3
    assert len(backups) == 1, "expected one operation between the two renames"


def test_crash_during_the_cleanup(tmp_path: Path) -> None:
    """A partial staging folder remains. It is refused, and the name is free for the next save."""

    class Both(FaultyStorage):
        def remove_file(self, name: str) -> None:
            if name.endswith("/unified_save_id"):
                raise uc.StorageError("cannot")
            super().remove_file(name)

    prepare(tmp_path, PROCESS, "absent")
    fuse = FaultPoint()
    save(tmp_path, 2, ranks=PROCESS, storages=faulty([0], fuse, Both), options=DURABLE)
    (last,) = (
        i for i, operation in enumerate(fuse.operations) if operation.startswith("remove_folder")
    )
    stopping = faulty([0], FaultPoint(last), Both)
    (outcome,) = save(tmp_path, 2, ranks=PROCESS, storages=stopping, options=DURABLE)
    assert isinstance(outcome, SimulatedCrash)
    assert len(list(tmp_path.glob("node-0/.unified-*-*"))) == 1
    check_left(tmp_path, PROCESS, "absent")
    fine(save(tmp_path, 2, ranks=PROCESS, options=DURABLE))
    assert loads(tmp_path, ranks=PROCESS) == 2


# a disk that fills up, or fails once


def full_disk_cases() -> list[Any]:
    """Ranks, those with the full disk, one in how many writes, what is at the name, background."""
    each = [(EACH, where, options) for where in ([0, 1], [2, 3]) for options in (DURABLE, TWICE)]
    cases = [
        *((PAIR, where, DURABLE, 1, pytest.mark.slow) for where in ([0], [1], [0, 1])),
        *((SHARED, where, DURABLE, 1, pytest.mark.slow) for where in ([0, 1], [2, 3])),
        *((*case, 3, pytest.mark.slow) for case in each),
        *((*case, 1, pytest.mark.long) for case in each),
    ]
    return [
        (PAIR, [1], DURABLE, 1, "committed", False),
        (EACH, [0, 1], TWICE, 3, "absent", False),
        *(
            pytest.param(*case, before, background, marks=mark)
            for *case, mark in cases
            for before, background in (("absent", False), ("committed", True))
        ),
    ]


@pytest.mark.parametrize(
    ("ranks", "where", "options", "every", "before", "background"), full_disk_cases()
)
def test_full_disk_at_any_write(
    tmp_path: Path,
    ranks: Ranks,
    where: Collection[int],
    options: uc.SaveOptions,
    every: int,
    before: str,
    background: bool,
) -> None:
    """All ranks raise one error, no file remains, and the old checkpoint is unchanged."""
    left, number = prepare(tmp_path, ranks, before, options), 0
    while True:
        outcomes = save(
            tmp_path,
            2,
            ranks=ranks,
            storages=full_storage(number, where),
            background=background,
            options=options,
        )
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):
            break
        same_error(outcomes, uc.StorageError, "No space left on device")
        assert ranks.left(tmp_path) == left, number
        number += every
    assert number > 3
    assert loads(tmp_path, name="other", ranks=ranks) == 1
    assert survivors(tmp_path, ranks, options, load_all(tmp_path, NAME, ranks)) == {2}


@pytest.mark.parametrize(
    ("rank", "background"),
    [
        (0, True),
        (1, False),
        *(pytest.param(rank, rank == 1, marks=pytest.mark.slow) for rank in (0, 1)),
    ],
)
def test_error_at_any_operation(tmp_path: Path, rank: int, background: bool) -> None:
    """Every rank raises it, and what was there stays; the save is complete once it is renamed."""
    left, failures = prepare(tmp_path, PAIR, "absent"), 0
    while True:
        broken = lambda by, place, n=failures: (  # noqa: E731
            BrokenStorage(place, n) if by == rank else LocalStorage(place)
        )
        outcomes = save(
            tmp_path, 2, ranks=PAIR, storages=broken, background=background, options=DURABLE
        )
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):
            break
        same_error(outcomes, uc.StorageError, rf"rank {rank}: .* failed: Input/output error")
        assert PAIR.left(tmp_path) == left
        failures += 1
    assert failures > 4, "the state is too small for this test"
    assert loads(tmp_path, ranks=PAIR) == 2


@pytest.mark.parametrize("close_fails", [False, True])
def test_failed_save_deletes_only_its_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_fails: bool
) -> None:
    prepare(tmp_path, PROCESS, "absent")
    other = tmp_path / "node-0" / f".unified-0123456789abcdef-{NAME}" / "model.safetensors"
    other.parent.mkdir()
    other.write_bytes(b"of a job that may still run")
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        if close_fails:
            patch.setattr(os, "close", failing_close("model.safetensors"))
        outcomes = save(tmp_path, 2, ranks=PROCESS, storages=lambda _, place: FullStorage(place, 5))
    same_error(outcomes, uc.StorageError, "No space left on device")
    assert sorted(tmp_path.rglob("*")) == before
    fine(save(tmp_path, 2, ranks=PROCESS))
    assert other.read_bytes() == b"of a job that may still run"


def failing_close(file: str) -> Callable[[int], None]:
    """Return a function for `os.close`. It closes any file, and then raises EIO for `file`."""
    close = os.close

    def close_and_fail(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if path.endswith(f"{NAME}/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return close_and_fail


# what a power cut would lose


@pytest.mark.parametrize("storage", [FaultyStorage, NoExchange])
@pytest.mark.parametrize("before", ["absent", "committed"])
@pytest.mark.parametrize("ranks", [PROCESS, PAIR])
def test_everything_is_synced_before_publishing(
    tmp_path: Path, ranks: Ranks, before: str, storage: type[FaultyStorage]
) -> None:
    """Files are written, the manifest last, then synced, then published; what was replaced is
    removed last.
    """
    fuse = FaultPoint()
    prepare(tmp_path, ranks, before)
    fine(save(tmp_path, 2, ranks=ranks, storages=faulty(range(2), fuse, storage), options=DURABLE))
    calls = [operation.split(" ") for operation in fuse.operations]

    def find(kinds: Collection[str], path: str | None = None) -> list[int]:
        return [
            i
            for i, call in enumerate(calls)
            if call[0] in kinds and (path is None or call[1] == path)
        ]

    renames = ("rename", "exchange")
    (folder,) = {calls[i][1] for i in find(["make_folder"])}
    published = find(renames, folder)[0]
    for file in (tmp_path / "node-0" / NAME).iterdir():
        path = f"{folder}/{file.name}"
        written = find(("write_at", "resize"), path)[-1]
        synced = find(["fsync"], path)
        assert any(written < i < published for i in synced), file.name
    writes = find(("write_at", "resize", "make_folder"))
    assert calls[writes[-1]][1] == f"{folder}/{names.MANIFEST}"
    touched = max(
        i for i in find(("write_at", "resize", "remove_file", "make_folder")) if i < published
    )
    assert any(touched < i < published for i in find(["fsync"], folder))
    assert writes[-1] < published
    renamed = max(i for i in find(renames) if "-trash_" not in calls[i][-1])
    synced_parent = min(i for i in find(["fsync"], "") if i > renamed)
    removed = [
        i
        for i in find(("remove_folder", "remove_file"))
        if calls[i][1].startswith(".unified-trash_")
    ]
    assert bool(removed) == (before == "committed")
    removed += [i for i in find(["rename"]) if "-trash_" in calls[i][-1]]
    assert all(synced_parent < i for i in removed)


def test_without_fsync(tmp_path: Path) -> None:
    fuse, options = FaultPoint(), DURABLE.model_copy(update={"fsync": False})
    fine(save(tmp_path, 2, ranks=PROCESS, storages=faulty([0], fuse), options=options))
    assert not any(operation.startswith("fsync") for operation in fuse.operations)


def test_bytes_that_no_rank_writes_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "write_extents", lambda *_, **__: GroupWritten())
    with pytest.raises(uc.IntegrityError, match="model:w: 1 of 1 blocks were not written whole"):
        uc.save(tmp_path / "a", model={"w": torch.ones(1 << 16)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file", ["model.safetensors", names.MANIFEST])
@pytest.mark.parametrize("ranks", [PROCESS, PAIR, SHARED])
def test_write_lost_at_close_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, file: str
) -> None:
    """Some file systems report a lost write only when the file is closed."""
    options = REPLACE.model_copy(update={"fsync": False})
    left = prepare(tmp_path, ranks, "committed", options)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing_close(file))
        outcomes = save(tmp_path, 2, ranks=ranks, options=options)
    same_error(outcomes, uc.StorageError, "close failed: Input/output error")
    assert ranks.left(tmp_path) == left
    assert loads(tmp_path, ranks=ranks) == 1

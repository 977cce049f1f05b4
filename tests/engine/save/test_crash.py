"""Storage that stops after operation k, for every k: the older checkpoint stays whole, the newer
one is absent or whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.save.planned_save import SaveCache, SaveCall
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.save import save
from unified_ckpt.errors import RankError
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor
from unified_ckpt.testing import FaultPoint, FaultyStorage, FullStorage, SimulatedCrash, try_ranks

SECONDS = 20.0
OLD, NEW = "checkpoint-1", "checkpoint-2"
MINE = {"notes.txt": b"mine", "experiment/run.log": b"mine too", ".unified": b"not a save"}

# (shape, dim that two ranks cut): large ones by rows, by columns and whole, each with a file of its
# own; small ones go together.
TENSORS: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "model:embed": ((130, 132), 0),
    "model:o": ((132, 130), 1),
    "model:norm": ((17_000,), None),
    "model:bias": ((5,), None),
    "optimizer:embed/exp_avg": ((130, 132), 0),
    "optimizer:embed/step": ((), None),
    "optimizer:o/exp_avg": ((132, 130), 1),
    "optimizer:o/step": ((), None),
    "ema:embed": ((130, 132), 0),
    "ema:o": ((132, 130), 1),
}
FILE_NBYTES = 80_000

Storages = Callable[[int], LocalStorage]  # by rank


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fsynced, and when, is looked at here; the disk need not do it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def on(
    ranks: Sequence[int], kind: Callable[..., LocalStorage], root: Path, *more: object
) -> Storages:
    """That kind of storage on some ranks, a sound one on the others."""
    return lambda rank: kind(str(root), *more) if rank in ranks else LocalStorage(str(root))


ALL = (0, 1)


def contents(key: str, step: int) -> torch.Tensor:
    """A tensor at a step of the run."""
    shape = TENSORS[key][0]
    return (
        torch.full(shape, float(step)) + torch.arange(torch.Size(shape).numel()).reshape(shape) / 7
    )


def state_of(comm: Comm, step: int) -> FlatState:
    parts = []
    for key, (shape, dim) in TENSORS.items():
        part, _, fqn = key.partition(":")
        cuts = (ShardDim(dim, comm.world, 1),) if dim is not None and comm.world > 1 else ()
        local = contents(key, step)
        if cuts and dim is not None:
            local = local.chunk(comm.world, dim)[comm.rank].contiguous()
        parts.append(
            LocalTensor(TensorDecl(part, fqn, TensorSpec("F32", shape), Sharding(cuts)), local)
        )
    return FlatState(tensors=parts, requested={part.decl.part for part in parts})


def save_step(
    storages: Storages, world: int, name: str, step: int, **options: object
) -> list[object]:
    """What each rank raised, or None."""
    chosen = uc.SaveOptions(max_file_bytes=FILE_NBYTES, **options)

    def act(comm: Comm) -> None:
        kept = SaveCache()
        extra = {"step": step, "seen": bytes(2000)}
        request = SaveRequest(
            state_of(comm, step),
            extra,
            f"rank {comm.rank}",
            None,
            set(),
            {},
            step,
            {},
            None,
            chosen,
        )
        try:
            save(SaveCall(comm, storages(comm.rank), name, request, kept, SECONDS))
        finally:
            kept.tile_buffers.close()

    return list(try_ranks(world, act, timeout_seconds=60))


def save_whole(root: Path, name: str, step: int, *, world: int = 1, **options: object) -> None:
    assert save_step(on((), LocalStorage, root), world, name, step, **options) == [None] * world


# what must hold


def holds(folder: Path) -> int:
    """The step that a whole checkpoint is of: every digest is right, and every tensor is of that
    step.
    """
    report = uc.verify(folder, deep=True)
    assert report.ok, report.problems
    with uc.open(folder) as opened:
        step = opened.step
        assert isinstance(step, int)
        assert opened.extra == {"step": step, "seen": bytes(2000)}
        assert opened.rank_extra[0] == "rank 0"
        for key in TENSORS:
            part, _, fqn = key.partition(":")
            assert torch.equal(opened[part][fqn][...], contents(key, step)), key
    return step


def check_left(root: Path) -> None:
    """Whatever a crash left under whatever name: it is whole, or it is refused. And what is not
    ours is as it was.
    """
    for folder in root.iterdir():
        if folder.is_dir() and (folder / names.MANIFEST).exists():
            try:
                uc.open(folder).close()
            except uc.FormatError:
                continue  # half a manifest is none
            assert holds(folder)
        elif folder.is_dir() and folder.name.startswith(".unified-"):
            with pytest.raises(uc.CheckpointError, match="unfinished save"):
                uc.open(folder)
    for name, body in MINE.items():
        assert (root / name).read_bytes() == body


def prepared(root: Path, *, world: int) -> Path:
    """A folder with an older checkpoint in it, and with things that are not ours."""
    root.mkdir()
    for name, body in MINE.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(body)
    save_whole(root, OLD, 1, world=world, fsync=False)
    return root


def stop_everywhere(
    tmp_path: Path,
    world: int,
    prepare: Callable[[Path], object],
    check: Callable[[Path], None],
    storage: type[FaultyStorage],
    **options: object,
) -> None:
    """Saves step 2 as NEW, stopped at operation 0, 1, 2 …, until one save completes."""
    start = prepared(tmp_path / "start", world=world)
    prepare(start)
    at, through = 0, False
    while not through:
        root, fuse = tmp_path / f"at-{at}", FaultPoint(at)
        shutil.copytree(start, root, symlinks=True)
        errors = save_step(on(ALL, storage, root, fuse), world, NEW, 2, **options)
        through = not fuse.triggered
        if through:
            assert errors == [None] * world
        else:
            assert all(isinstance(error, SimulatedCrash | RankError) for error in errors), errors
        assert holds(root / OLD) == 1
        check_left(root)
        check(root)
        shutil.rmtree(root)
        at += 1
    assert at > 40, "the state is too small to say much"


class NoExchange(FaultyStorage):
    """A file system that cannot swap two names in one step."""

    def exchange(self, old: str, new: str) -> bool:
        return False


@pytest.mark.parametrize("world", [1, 2])
def test_crash_with_a_new_name(tmp_path: Path, world: int) -> None:
    def check(root: Path) -> None:
        if (root / NEW).exists():
            assert holds(root / NEW) == 2
            return
        save_whole(root, NEW, 3, world=world, fsync=False)
        assert holds(root / NEW) == 3

    stop_everywhere(tmp_path, world, lambda root: None, check, FaultyStorage)


@pytest.mark.parametrize("storage", [FaultyStorage, NoExchange])
@pytest.mark.parametrize("world", [1, 2])
def test_crash_with_an_uncommitted_folder_in_the_way(
    tmp_path: Path, world: int, storage: type[FaultyStorage]
) -> None:
    precious = "precious.bin"

    def prepare(root: Path) -> None:
        save_whole(root, NEW, 9, fsync=False)
        (root / NEW / names.MANIFEST).unlink()
        (root / NEW / precious).write_bytes(b"results")

    def check(root: Path) -> None:
        found = list(root.glob(f"*/{precious}"))
        assert [path.read_bytes() for path in found] == [b"results"], "moved aside, never deleted"
        if (root / NEW / names.MANIFEST).exists():
            assert holds(root / NEW) == 2
            return
        save_whole(root, NEW, 3, world=world, fsync=False)
        assert holds(root / NEW) == 3
        assert [path.read_bytes() for path in root.glob(f"*/{precious}")] == [b"results"]
        assert not (root / NEW / precious).exists()

    stop_everywhere(tmp_path, world, prepare, check, storage)


@pytest.mark.parametrize("world", [1, 2])
def test_replace_by_exchange(tmp_path: Path, world: int) -> None:
    """There is a whole checkpoint under the name at every moment."""

    def check(root: Path) -> None:
        assert holds(root / NEW) in (2, 9)
        save_whole(root, NEW, 3, world=world, fsync=False, if_exists="replace")
        assert holds(root / NEW) == 3

    stop_everywhere(
        tmp_path,
        world,
        lambda root: save_whole(root, NEW, 9, fsync=False),
        check,
        FaultyStorage,
        if_exists="replace",
    )


@pytest.mark.parametrize("world", [1, 2])
def test_replace_by_two_renames(tmp_path: Path, world: int) -> None:
    """There is a whole checkpoint under the name, or every later call says where it is."""
    asides: list[int] = []

    def check(root: Path) -> None:
        if not (root / NEW).exists():
            (aside,) = root.glob(".replaced-*")
            asides.append(holds(aside))
            where = rf"left .*{aside.name}"
            with pytest.raises(uc.NotFoundError, match=where):
                uc.load(root / NEW, model={"embed": torch.empty(130, 132)})
            for errors in [
                save_step(on((), LocalStorage, root), world, NEW, 3, if_exists=how)
                for how in ("error", "replace", "keep")
            ]:
                for error in errors:
                    assert isinstance(error, uc.StorageError)
                    with pytest.raises(uc.StorageError, match=where):
                        raise error
            aside.rename(root / NEW)
        assert holds(root / NEW) in (2, 9)
        save_whole(root, NEW, 3, world=world, fsync=False, if_exists="replace")
        assert holds(root / NEW) == 3

    stop_everywhere(
        tmp_path,
        world,
        lambda root: save_whole(root, NEW, 9, fsync=False),
        check,
        NoExchange,
        if_exists="replace",
    )
    assert asides == [9], "one operation lies between the two renames"


@pytest.mark.parametrize("dead", [0, 1])
def test_crash_of_one_of_two_ranks(tmp_path: Path, dead: int) -> None:
    """The other one raises, and nothing is published."""
    start = prepared(tmp_path / "start", world=2)
    at, through = 0, False
    while not through:
        root, fuse = tmp_path / f"at-{at}", FaultPoint(at)
        shutil.copytree(start, root)
        errors = save_step(on([dead], FaultyStorage, root, fuse), 2, NEW, 2)
        through = not fuse.triggered
        assert holds(root / OLD) == 1
        check_left(root)
        if through:
            assert errors == [None, None]
        elif not (root / NEW).exists():
            alive = errors[1 - dead]
            assert isinstance(alive, RankError), alive
            with pytest.raises(
                RankError, match=rf"rank {dead}: SimulatedCrash: stopped at operation {at}"
            ):
                raise alive
            assert dead == 0 or not list(root.glob(".unified-*")), "rank 0 lives and clears away"
        if (root / NEW).exists():
            assert holds(root / NEW) == 2
        shutil.rmtree(root)
        at += 1
    assert at > 8


# a disk that fills up


@pytest.mark.parametrize("full", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("if_exists", ["error", "replace"])
def test_disk_fills_up_at_any_write(tmp_path: Path, full: Sequence[int], if_exists: str) -> None:
    start = prepared(tmp_path / "start", world=2)
    if if_exists == "replace":
        save_whole(start, NEW, 9, fsync=False)
    root, at, errors = shutil.copytree(start, tmp_path / "root"), 0, [None]
    before = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    while True:
        errors = save_step(
            on(full, FullStorage, root, at),
            2,
            NEW,
            2,
            if_exists=if_exists,
            fsync=False,
        )
        if errors == [None, None]:
            break
        for error in errors:
            with pytest.raises(
                uc.StorageError, match=r"rank [01]: .* failed: No space left on device"
            ):
                raise error
        assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == before
        at += 1
    assert at > 8
    assert holds(root / NEW) == 2
    assert holds(root / OLD) == 1


# what a power cut would lose


def logged(root: Path, world: int, **options: object) -> list[list[str]]:
    fuse = FaultPoint()
    assert save_step(on(ALL, FaultyStorage, root, fuse), world, NEW, 2, **options) == [None] * world
    return [operation.split(" ") for operation in fuse.operations]


@pytest.mark.parametrize("storage", [FaultyStorage, NoExchange])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_everything_is_synced_before_publishing(
    tmp_path: Path,
    world: int,
    replace: bool,
    storage: type[FaultyStorage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No write after its file's fsync, none of either after the rename, the old one removed last of
    all.
    """
    root, fuse = prepared(tmp_path / "root", world=1), FaultPoint()
    if replace:
        save_whole(root, NEW, 9, fsync=False)
    assert (
        save_step(on(ALL, storage, root, fuse), world, NEW, 2, if_exists="replace")
        == [None] * world
    )
    done = [operation.split(" ") for operation in fuse.operations]
    (folder,) = {what[1] for what in done if what[0] == "make_folder"}
    published = next(
        i for i, what in enumerate(done) if what[0] in ("rename", "exchange") and what[1] == folder
    )
    for file in (root / NEW).iterdir():
        at = f"{folder}/{file.name}"
        written = max(
            i for i, what in enumerate(done) if what[0] in ("write_at", "resize") and what[1] == at
        )
        assert any(
            what in (["sync", at], ["sync_tree", at]) for what in done[written + 1 : published]
        ), file.name
    touched = max(
        i
        for i, what in enumerate(done[:published])
        if what[0] in ("write_at", "resize", "remove_file", "make_folder")
    )
    assert ["sync_folder", folder] in done[touched + 1 : published]
    assert not any(what[0] in ("write_at", "resize", "make_folder") for what in done[published:])
    renamed = max(
        i
        for i, what in enumerate(done)
        if what[0] in ("rename", "exchange") and "-trash_" not in what[-1]
    )
    assert ["sync_folder", ""] in done[renamed + 1 :]
    removed = [
        i
        for i, what in enumerate(done)
        if what[0] in ("remove_folder", "remove_file") and what[1].startswith(".unified-trash_")
    ]
    assert bool(removed) == replace
    removed += [i for i, what in enumerate(done) if what[0] == "rename" and "-trash_" in what[-1]]
    assert all(["sync_folder", ""] in done[renamed + 1 : i] for i in removed)


def test_manifest_is_written_last(tmp_path: Path) -> None:
    done = logged(prepared(tmp_path / "root", world=1), 2)
    (at,) = [
        i
        for i, what in enumerate(done)
        if what[0] == "write_at" and what[1].endswith("/" + names.MANIFEST)
    ]
    assert not any(what[0] in ("write_at", "resize") for what in done[at + 1 :])


def test_without_fsync(tmp_path: Path) -> None:
    done = logged(prepared(tmp_path / "root", world=1), 2, fsync=False)
    assert not any(what[0].startswith("sync") for what in done)


# what a save leaves of others


def test_failed_save_deletes_only_its_staging_folder(tmp_path: Path) -> None:
    root = prepared(tmp_path / "root", world=1)
    other = root / ".unified-0123456789abcdef-checkpoint-2"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"of a job that may still run")
    before = sorted(root.rglob("*"))
    errors = save_step(on(ALL, FullStorage, root, 5), 1, NEW, 2)
    with pytest.raises(uc.StorageError, match="No space left on device"):
        raise errors[0]
    assert sorted(root.rglob("*")) == before
    save_whole(root, NEW, 2)
    assert (other / "model.safetensors").read_bytes() == b"of a job that may still run"


def test_crash_during_the_cleanup(tmp_path: Path) -> None:
    """Half a folder under construction is left; it is refused, and the name is free."""

    class Both(FaultyStorage):
        def remove_file(self, name: str) -> None:
            if name.endswith("/probe"):
                raise uc.StorageError("cannot")
            super().remove_file(name)

    root = prepared(tmp_path / "root", world=1)
    fuse = FaultPoint()
    save_step(on(ALL, Both, root, fuse), 1, NEW, 2)
    (last,) = [
        i for i, operation in enumerate(fuse.operations) if operation.startswith("remove_folder")
    ]
    errors = save_step(on(ALL, Both, root, FaultPoint(last)), 1, NEW, 2)
    assert isinstance(errors[0], SimulatedCrash)
    assert len(list(root.glob(".unified-*"))) == 1
    check_left(root)
    save_whole(root, NEW, 2)
    assert holds(root / NEW) == 2

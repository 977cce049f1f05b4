"""Two nodes on a network file system: mounts of one folder, each with the caches of an NFS client.

The kernel's FUSE protocol is spoken by `tests/support/runtime/storage/fuse`. Needs the right to
mount.
"""

from __future__ import annotations

import errno
import fcntl
import os
import posix
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.harness import run_ranks
from tests.support.manager.managers import check_state, manager_of, state
from tests.support.runtime.storage.fuse.client import Manners
from tests.support.runtime.storage.fuse.mount import mounted, refusal
from tests.support.runtime.storage.fuse.walk import Walk
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.posix_calls import exchange

pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"cannot mount: {refusal()}")
NFS = Manners(actimeo=60)  # acdirmax
MANNERS = {
    "nfs": NFS,
    "quick": Manners(actimeo=0.3),
    "nolock": Manners(actimeo=60, local_lock="refused", syncs_folders=False),
    "positive": Manners(actimeo=60, lookupcache="positive", local_lock="flock"),
}
LENGTH = 25
Nodes = Callable[[Manners], tuple[Path, Path]]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Mount one server's folder on two nodes. Files are synced for once: that sends them."""
    monkeypatch.setattr(os, "fsync", posix.fsync)
    (tmp_path / "server").mkdir()
    with ExitStack() as stack:

        def mount(manners: Manners) -> tuple[Path, Path]:
            first, second = (
                stack.enter_context(mounted(tmp_path / "server", tmp_path / node, manners))
                for node in ("a", "b")
            )
            return first, second

        yield mount


@pytest.mark.slow
def test_mounts_have_the_caches_of_nfs(nodes: Nodes) -> None:
    """The model itself: without its manners, the other tests would show nothing."""
    a, b = nodes(NFS)
    assert not (b / "new").exists()
    (a / "new").write_bytes(b"1")
    assert not (b / "new").exists(), "names that did not exist are remembered"
    os.listdir(b)
    assert (b / "new").read_bytes() == b"1", "until their folder is opened"
    with (a / "new").open("r+b", buffering=0) as file:
        file.write(b"23")
        assert (b / "new").read_bytes() == b"1", "bytes arrive at the server when a file is closed"
    assert (b / "new").read_bytes() == b"23", "and opening it shows them"
    with (b / "new").open("rb") as file:
        (a / "new").unlink()
        with pytest.raises(OSError, match="Stale file handle"):
            os.pread(file.fileno(), 1, 0)
    (a / "open").write_bytes(b"1")
    with (a / "open").open("rb") as file:
        (a / "open").unlink()
        assert [name[:4] for name in os.listdir(a)] == [".nfs"]
        assert file.read() == b"1"
    assert os.listdir(a) == []


@pytest.mark.slow
def test_two_clients_lose_bytes_of_one_page(nodes: Nodes) -> None:
    """Clients send whole pages. That is why one node writes each block."""
    a, b = nodes(NFS)
    (a / "file").write_bytes(bytes(8))
    with (a / "file").open("r+b", buffering=0) as first, (b / "file").open("r+b") as second:
        first.write(b"aaaa")
        second.seek(4)
        second.write(b"bbbb")
    assert (a / "file").read_bytes() != b"aaaabbbb"


@pytest.mark.slow
def test_flock_excludes_other_clients(nodes: Nodes) -> None:
    a, b = nodes(NFS)
    (a / "file").write_bytes(b"1")
    with (a / "file").open("rb") as first, (b / "file").open("rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_unsupported_calls_fail_as_on_nfs(nodes: Nodes) -> None:
    a, _ = nodes(Manners(syncs_folders=False))
    (a / "file").write_bytes(b"1")
    with pytest.raises(OSError) as raised:
        os.open(a / "file", os.O_RDONLY | os.O_DIRECT)
    assert raised.value.errno == errno.EINVAL
    (a / "other").write_bytes(b"2")
    assert not exchange(str(a / "file"), str(a / "other")), "renameat2 has no flags"
    folder = os.open(a, os.O_RDONLY)
    with pytest.raises(OSError) as raised:
        posix.fsync(folder)
    assert raised.value.errno == errno.EINVAL
    os.close(folder)


@pytest.mark.slow
def test_a_new_checkpoint_is_seen_on_another_node(nodes: Nodes) -> None:
    """A node that asked for the name before sees the checkpoint as soon as it is there."""
    a, b = nodes(NFS)
    path = "run/checkpoint-1"
    with pytest.raises(uc.NotFoundError):
        uc.load(b / path, model={"w": torch.zeros(3)})
    uc.save(a / path, model={"w": torch.ones(3)}, step=1)
    assert not (b / path).exists()
    target = {"w": torch.zeros(3)}
    uc.load(b / path, model=target)
    assert same(target["w"], torch.ones(3))


@pytest.mark.slow
def test_a_replaced_checkpoint_is_opened_anew(nodes: Nodes) -> None:
    """A node that has the folder in its cache loads what has the name now."""
    a, b = nodes(NFS)
    path, target = "run/checkpoint-1", {"w": torch.zeros(3)}
    for value in (1.0, 2.0, 3.0):
        options = uc.SaveOptions(if_exists="replace")
        uc.save(a / path, model={"w": torch.full((3,), value)}, options=options)
        assert uc.verify(b / path, deep=True).problems == ()
        uc.load(b / path, model=target)
        assert same(target["w"], torch.full((3,), value))


@pytest.mark.slow
def test_a_removed_checkpoint_does_not_stop_a_save(nodes: Nodes) -> None:
    """One node saves a step that another removed, though it has its folder in the cache."""
    a, b = nodes(NFS)
    options = uc.ManagerOptions(keep_latest=1, interval_steps=1, asynchronous=False)
    model = {"w": torch.ones(3)}
    with uc.CheckpointManager(a / "run", options=options) as manager:
        manager.save(1, model=model)
        assert uc.verify(b / "run" / "checkpoint-1").problems == ()
        manager.save(2, model=model)
    assert (b / "run" / "checkpoint-1").is_dir(), "the name is cached"
    uc.save(b / "run" / "checkpoint-1", model=model)
    assert sorted(path.name for path in (a / "run").glob("check*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


@pytest.mark.slow
def test_two_tiers_merge_into_a_folder_of_both_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """Local disks of two nodes are merged into the root; each run starts on the other node."""
    mounts = nodes(NFS)
    for first, (start, last) in enumerate(((0, 3), (3, 5), (5, 6))):

        def train(comm: Comm, first: int = first, last: int = last) -> int:
            node = (comm.rank + first) % 2
            options = {"interval_steps": 2, "local_interval_steps": 1, "asynchronous": True}
            options |= {"keep_latest": 1, "local_directory": str(tmp_path / f"local-{node}")}
            manager = manager_of(comm, mounts[node] / "run", node=f"node {node}", **options)
            with manager:
                targets = state(0)
                report = manager.restore(**targets)
                step = 0 if report is None else report.step or 0
                if step:
                    check_state(targets, step)
                for number in range(step + 1, last + 1):
                    manager.save(number, **state(number))
                manager.wait()
            return step

        assert run_ranks(2, train) == [start, start]
        steps = {path.name for path in (tmp_path / "server" / "run").glob("*checkpoint-*")}
        assert steps == {f"checkpoint-{last - last % 2}"}


@pytest.mark.slow
@pytest.mark.parametrize("manners", MANNERS)
def test_random_walk_of_two_nodes(nodes: Nodes, tmp_path: Path, manners: str) -> None:
    """Saves, loads, restores, rotations, repairs and conversions on either node or on both."""
    Walk(Random(manners), nodes(MANNERS[manners]), tmp_path / "server").run(LENGTH)


@pytest.mark.long
@pytest.mark.parametrize("manners", MANNERS)
@pytest.mark.parametrize("seed", range(50))
def test_many_random_walks(nodes: Nodes, tmp_path: Path, manners: str, seed: int) -> None:
    Walk(Random(seed), nodes(MANNERS[manners]), tmp_path / "server").run(LENGTH)

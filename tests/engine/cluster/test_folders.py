"""A rank opens only folders that it reads, and checks connections before the first byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    SAVE,
    NodeState,
    fine,
    folder_of,
    on_node,
)
from tests.support.harness import run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.engine.cluster import folders
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.folder.reader import Folder, open_folder
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange import file_server
from unified_ckpt.runtime.storage.protocol import Reader
from unified_ckpt.runtime.storage.storage import LocalStorage

NODES = 3


def save(root: Path, *, whole: bool) -> None:
    """Save `w` on each node: all of it, or the node's rows."""
    NodeState({"w": torch.ones(6, 2)}, {} if whole else {"w": 0}).save(root, range(NODES))


def load(root: Path) -> list[torch.Tensor | BaseException]:
    def act(comm: Comm) -> torch.Tensor:
        w = torch.zeros(6, 2)
        with on_node(comm, range(NODES)) as checkpointer:
            try:
                checkpointer.load(folder_of(root, comm.rank), model={"w": w}, options=LOAD)
            except uc.CheckpointError:
                assert not w.any(), "nothing was written"
                raise
        return w

    return try_ranks(NODES, act)


@pytest.mark.parametrize(("whole", "each"), [(True, 0), (False, 2)])
def test_only_folders_that_are_read_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, each: int
) -> None:
    """A rank's own folder is open already."""
    save(tmp_path, whole=whole)
    opened: list[str] = []

    def counted(storage: Reader) -> Folder:
        opened.append(storage.root)
        return open_folder(storage)

    monkeypatch.setattr(folders, "open_folder", counted)
    for tensor in fine(load(tmp_path)):
        assert torch.equal(tensor, torch.ones(6, 2))
    assert len(opened) == each * NODES
    assert len(set(opened)) == (NODES if each else 0)


def test_parsed_headers_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is read from every folder; no rank opens a folder twice."""
    model = {f"w{i}": torch.full((2, 2), float(i)) for i in range(8)}
    rules = uc.Layout(mesh={"dp": NODES}, rules={"*": {"dp": 0}})

    def save_rows(comm: Comm) -> None:
        with on_node(comm, range(NODES)) as checkpointer:
            checkpointer.save(
                folder_of(tmp_path, comm.rank), model=model, layout=rules, options=SAVE
            )

    def load_all(comm: Comm) -> None:
        target = {name: torch.zeros(2 * NODES, 2) for name in model}
        with on_node(comm, range(NODES)) as checkpointer:
            checkpointer.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        assert all(
            torch.equal(target[name], tensor[:1].expand(2 * NODES, 2))
            for name, tensor in model.items()
        )

    run_ranks(NODES, save_rows)
    opened: list[Folder] = []

    def recorded(storage: Reader) -> Folder:
        opened.append(open_folder(storage))
        return opened[-1]

    monkeypatch.setattr(folders, "open_folder", recorded)
    monkeypatch.setattr(folders, "_MAX_PARSED", 1)
    run_ranks(NODES, load_all)
    assert len(opened) == 2 * NODES, "a rank's own folder is open already"
    assert sum(bool(folder._headers) for folder in opened) <= NODES, (
        "headers of other folders stay in memory"
    )


def test_load_with_refused_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection raises before the target changes, and names the rank."""
    save(tmp_path, whole=False)

    def closed(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(file_server, "connect", closed)
    text = str(
        same_error(
            load(tmp_path),
            uc.StorageError,
            r"at rank \d: the rank does not answer: Connection refused",
        )
    )
    assert "the target holds a mix" not in text


def test_folder_that_cannot_be_opened_is_tried_once(tmp_path: Path) -> None:
    probed_names = []

    class Storage(LocalStorage):
        def size(self, name: str) -> int | None:
            probed_names.append(name)
            return super().size(name)

    cache = FolderCache([Storage(str(tmp_path))])
    for _ in range(2):
        with pytest.raises(uc.NotFoundError, match="holds no checkpoint"):
            cache[0]
    assert len(probed_names) == 1
    cache.close()


def test_folder_replaced_by_another_save(tmp_path: Path) -> None:
    report = uc.save(tmp_path / "checkpoint-1", model={"w": torch.ones(2)}, options=SAVE)
    storages = [LocalStorage(report.path)] * 2
    assert FolderCache(storages, save_id=report.id)[1].names("model") == {"w"}
    with pytest.raises(
        uc.StorageError, match=f"checkpoint-1: now holds save {report.id}, expected other"
    ):
        FolderCache(storages, save_id="other")[0]
    storages[0].close()

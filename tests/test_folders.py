"""Of many folders a rank opens those that it reads, and finds out before the first byte whether the machines can talk at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from machines import LOAD, SAVE, fine, folder_of, on_machine
from refusals import same_error

import unified_ckpt as uc
from unified_ckpt.engine import folders
from unified_ckpt.engine.checkpoint import Folder, open_folder
from unified_ckpt.engine.folders import Folders
from unified_ckpt.runtime.comm import Comm
from unified_ckpt.runtime.peers import PeerStorage
from unified_ckpt.runtime.storage import LocalStorage, Reader
from unified_ckpt.testing import run_ranks, try_ranks

MACHINES = 3


def save(root: Path, *, whole: bool) -> None:
    """Each machine has `w`, all of it or its rows."""
    rules = None if whole else uc.Layout(mesh={"dp": MACHINES}, rules={"w": {"dp": 0}}, shapes={"w": (6, 2)})

    def act(comm: Comm) -> None:
        w = torch.ones(6, 2) if whole else torch.ones(2, 2)
        with on_machine(comm, range(MACHINES)) as made:
            made.save(folder_of(root, comm.rank), model={"w": w}, layout=rules, options=SAVE)

    run_ranks(MACHINES, act)


def load(root: Path) -> list[torch.Tensor | BaseException]:
    def act(comm: Comm) -> torch.Tensor:
        w = torch.zeros(6, 2)
        with on_machine(comm, range(MACHINES)) as made:
            try:
                made.load(folder_of(root, comm.rank), model={"w": w}, options=LOAD)
            except uc.CheckpointError:
                assert not w.any(), "nothing was written"
                raise
        return w

    return try_ranks(MACHINES, act)


@pytest.mark.parametrize(("whole", "each"), [(True, 0), (False, 2)])
def test_folders_that_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, each: int) -> None:
    """Its own is open already."""
    save(tmp_path, whole=whole)
    opened: list[str] = []

    def counted(storage: Reader) -> Folder:
        opened.append(storage.root)
        return open_folder(storage)

    monkeypatch.setattr(folders, "open_folder", counted)
    for found in fine(load(tmp_path)):
        assert torch.equal(found, torch.ones(6, 2))
    assert len(opened) == each * MACHINES
    assert len(set(opened)) == (MACHINES if each else 0)


def test_machines_that_cannot_talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that is closed is told before the target is touched, and names the rank that does not answer."""
    save(tmp_path, whole=False)

    def closed(storage: PeerStorage, _asked: bytes, _into: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(PeerStorage, "_exchange", closed)
    text = str(same_error(load(tmp_path), uc.StorageError, r"at rank \d: the rank does not answer: Connection refused"))
    assert "the target holds a mix" not in text


def test_a_folder_that_cannot_be_opened_is_not_tried_twice(tmp_path: Path) -> None:
    asked = []

    class Storage(LocalStorage):
        def size(self, name: str) -> int | None:
            asked.append(name)
            return super().size(name)

    found = Folders([Storage(str(tmp_path))])
    for _ in range(2):
        with pytest.raises(uc.NotFoundError, match="holds no checkpoint"):
            found[0]
    assert len(asked) == 1
    found.close()


def test_a_folder_that_holds_another_save_by_now(tmp_path: Path) -> None:
    here = uc.save(tmp_path / "checkpoint-1", model={"w": torch.ones(2)}, options=SAVE)
    storages = [LocalStorage(here.path)] * 2
    assert Folders(storages, save_id=here.id)[1].names("model") == {"w"}
    with pytest.raises(uc.StorageError, match=f"checkpoint-1: holds save {here.id} by now; needed other"):
        Folders(storages, save_id="other")[0]
    storages[0].close()

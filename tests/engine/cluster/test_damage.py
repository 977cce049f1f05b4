"""Damage on one node: the report names what another copy replaced, an error names what is lost.

What a load returns after any damage is tested by the cluster machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import DAMAGES, flip, shorten
from tests.support.engine.cluster.node_damage import FULL, load, save
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    SAVE,
    fine,
    folder_of,
    on_node,
    once,
    save_all,
    twice,
)
from tests.support.format.manifests import edit_index
from tests.support.harness import run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.cluster import discover
from unified_ckpt.engine.folder.reader import Folder, open_path
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["once", "twice"]  # fixtures

Files = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`twice`: two nodes with a copy each; `once`: one copy over two nodes."""
    root = tmp_path_factory.mktemp("saved")
    save(root / "twice", [0, 0, 1, 1], copies=2)
    save(root / "once", [0, 0, 1, 1])
    return root


def notes(reports: Sequence[uc.LoadReport]) -> str:
    return "\n".join(note for report in reports for note in report.notes)


@pytest.mark.parametrize(
    ("file", "damage", "note"),
    [
        ("model.safetensors", "flipped", "block 1 of model:w"),
        ("model.safetensors", "short", "model.safetensors"),
        ("model.safetensors", "missing", "model.safetensors"),
        ("model.safetensors", "header", "model.safetensors"),
        (names.EXTRA, "flipped", names.EXTRA),
        (names.EXTRA, "missing", names.EXTRA),
        (names.MANIFEST, "short", names.MANIFEST),
        (names.MANIFEST, "missing", names.MANIFEST),
        ("model.safetensors.index.json", "missing", "model.safetensors.index.json"),
        ("model.safetensors.index.json", "header", "model.safetensors.index.json"),
    ],
)
@pytest.mark.parametrize("node", [0, 1])
def test_damage_on_one_node_is_noted(
    twice: Path, node: int, file: str, damage: str, note: str
) -> None:
    """Another copy is read. A node with an intact copy reads its own, and notes no blocks."""
    DAMAGES[damage](folder_of(twice, node) / file)
    reports = fine(load(twice, [0, 0, 1, 1], copies=2))
    assert note in notes(reports)
    if damage == "flipped" and file == "model.safetensors":
        assert str(folder_of(twice, node)) in notes(reports)
        assert notes(reports[2 - 2 * node : 4 - 2 * node]) == ""


@pytest.mark.parametrize("damage", ["short", "missing", "header"])
def test_damaged_digests_are_requested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """No tensor bytes are read from a folder whose digests are unusable."""
    model = {f"w{i}": torch.full((300, 40), float(i)) for i in range(20)}
    save_all(tmp_path, [0, 1], lambda rank: model)
    folder = folder_of(tmp_path, 1)
    DAMAGES[damage](folder / names.DIGESTS)
    requested_roots, read = [], []
    block_digests, read_at = Folder.block_digests, LocalStorage.read_at

    def counted(self: Folder, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        requested_roots.append(self.storage.root)
        return block_digests(self, keys)

    def noted(self: LocalStorage, name: str, start: int, into: Buffer) -> None:
        read.append((Path(self.root), name, start))
        read_at(self, name, start, into)

    def act(comm: Comm) -> uc.LoadReport:
        target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        with on_node(comm, [0, 1]) as checkpointer:
            report = checkpointer.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        assert all(torch.equal(target[name], model[name]) for name in model)
        return report

    monkeypatch.setattr(Folder, "block_digests", counted)
    monkeypatch.setattr(LocalStorage, "read_at", noted)
    assert names.DIGESTS in notes(run_ranks(2, act))
    assert requested_roots.count(str(folder)) == 1
    assert [
        start
        for where, name, start in read
        if (where, name) == (folder, "model.safetensors") and start
    ] == []


def test_index_that_lists_a_missing_tensor(twice: Path) -> None:
    edit_index(
        folder_of(twice, 1),
        "model",
        lambda index: index["weight_map"].update(x=index["weight_map"].pop("w")),
    )
    assert "only its header lists 'w'" in notes(fine(load(twice, [0, 0, 1, 1], copies=2)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_error_names_damage_without_another_copy(once: Path, damage: str) -> None:
    (file,) = folder_of(once, 1).glob("model_shards-00002*.safetensors")
    DAMAGES[damage](file)
    outcomes = load(once, [0, 0, 1, 1])
    if damage == "flipped":
        text = str(same_error(outcomes, uc.IntegrityError, "no node has these bytes intact"))
        assert f"{file}: block " in text
        assert "has CRC" in text
        assert "the target holds a mix of old and new bytes and is unusable" in text
    else:
        text = str(
            same_error(outcomes, uc.IncompleteError, r"model:w: no node has \[675:900, 0:400\]")
        )
        assert file.name in text


@pytest.mark.parametrize(
    ("file", "why"),
    [(names.MANIFEST, "not valid JSON"), ("model_shards.safetensors.index.json", "has CRC")],
)
def test_error_names_unopened_folder_without_another_copy(once: Path, file: str, why: str) -> None:
    """The folder exists but does not open; the error must not suggest a lost node only."""
    shorten(folder_of(once, 1) / file)
    text = str(
        same_error(
            load(once, [0, 0, 1, 1]), uc.IncompleteError, "is incomplete on the nodes present"
        )
    )
    assert f"node 1: {folder_of(once, 1) / file}: {why}" in text


def test_copies_damaged_in_different_blocks(twice: Path) -> None:
    """Damage in different blocks leaves a copy of each; in the same block, it is an error."""
    files = [folder_of(twice, node) / "model.safetensors" for node in (0, 1)]
    flip(files[0], 0.2)
    flip(files[1], 0.9)
    text = notes(fine(load(twice, [0, 0, 1, 1], copies=2)))
    assert f"{files[0]}: block 0 of model:w" in text
    assert f"{files[1]}: block 1 of model:w" in text
    flip(files[1], 0.21)
    same_error(
        load(twice, [0, 0, 1, 1], copies=2),
        uc.IntegrityError,
        r"no node has these bytes intact \(2\)",
    )


def test_shards_replace_a_damaged_whole_copy(tmp_path: Path) -> None:
    """Ranks 2 and 3 read their halves locally, so damage on node 0 does not affect them."""
    save(tmp_path, [0, 0, 1, 2], copies=2)
    file = folder_of(tmp_path, 0) / "model.safetensors"
    flip(file, 0.3)
    flip(file, 0.9)
    reports = fine(load(tmp_path, [0, 0, 1, 2], copies=2))
    assert [bool(report.notes) for report in reports] == [True, True, False, False]
    assert f"{file}: block 0 of model:w" in notes(reports)
    assert f"{file}: block 1 of model:w" in notes(reports)


def test_verify_off_also_skips_other_nodes(once: Path) -> None:
    """Bytes are used as they are, and no digests are read."""
    (file,) = folder_of(once, 1).glob("model_shards-00002*.safetensors")
    flip(file)
    for node in (0, 1):
        flip(folder_of(once, node) / names.DIGESTS)

    def act(comm: Comm) -> int:
        target = {name: torch.full_like(tensor, -1) for name, tensor in FULL.items()}
        with on_node(comm, [0, 1]) as checkpointer:
            report = checkpointer.load(
                folder_of(once, comm.rank),
                model=target,
                options=LOAD.model_copy(update={"verify": "off"}),
            )
        assert report.verified_bytes == 0
        assert not [note for note in report.notes if "CRC" in note]
        return sum(int((target[name] != FULL[name]).sum()) for name in FULL)

    assert run_ranks(2, act) == [1, 1]


# parts and rank extras


def test_part_deleted_on_every_node(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        nodes, place = [0, 1], folder_of(tmp_path, comm.rank)
        with on_node(comm, nodes) as checkpointer:
            checkpointer.save(
                place,
                model={"w": torch.ones(3)},
                optimizer={"w/exp_avg": torch.ones(3)},
                options=SAVE,
            )
            for file in place.glob("optimizer*"):
                file.unlink()
            target = {"w": torch.zeros(3)}
            checkpointer.load(place, model=target, options=LOAD)
            assert torch.equal(target["w"], torch.ones(3))
            checkpointer.load(
                place, model=target, optimizer={"w/exp_avg": torch.zeros(3)}, options=LOAD
            )

    same_error(try_ranks(2, act), uc.MismatchError, "optimizer:w/exp_avg: is not in the checkpoint")


def test_no_rank_stored_a_rank_extra(tmp_path: Path) -> None:
    save_all(tmp_path, [0, 1], lambda _: {"w": torch.ones(3)})
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    assert uc.load(folders, model={"w": torch.zeros(3)}).notes == ()


def test_hugging_face_folder_on_one_node_only(tmp_path: Path) -> None:
    """A folder without a manifest is no part of a save; the error names both nodes."""
    from safetensors.torch import save_file

    folder_of(tmp_path, 0).mkdir(parents=True)
    save_file({"w": torch.zeros(3)}, folder_of(tmp_path, 0) / "model.safetensors")

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.load(
                folder_of(tmp_path, comm.rank), model={"w": torch.ones(3)}, options=LOAD
            )

    text = str(
        same_error(try_ranks(2, act), uc.IncompleteError, "node 1: .* there is no such folder")
    )
    assert "node 0: has a folder without a manifest" in text


def test_hugging_face_folders_of_nodes_are_read_by_each(tmp_path: Path) -> None:
    """Nothing says that folders without a manifest belong together."""
    from safetensors.torch import save_file

    for node in range(2):
        folder_of(tmp_path, node).mkdir(parents=True)
        tensor = torch.full((3,), float(node))
        save_file({"w": tensor}, folder_of(tmp_path, node) / "model.safetensors")

    def act(comm: Comm) -> list[float]:
        target = torch.ones(3)
        with on_node(comm, [0, 1]) as checkpointer:
            folder = folder_of(tmp_path, comm.rank)
            checkpointer.load(folder, model={"w": target}, options=LOAD)
        return target.tolist()

    assert run_ranks(2, act) == [[0.0] * 3, [1.0] * 3]


def test_bug_on_one_node_is_raised_on_all(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors of checkpoints may be made up for by other nodes."""

    def open_wrongly(path: str, **options: Any) -> Folder:
        if path == str(folder_of(twice, 1)):
            raise ZeroDivisionError("a bug")
        return open_path(path, **options)

    monkeypatch.setattr(discover, "open_path", open_wrongly)

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.load(folder_of(twice, comm.rank), model={}, strict=False, options=LOAD)

    for outcome in try_ranks(2, act):
        assert "a bug" in str(outcome), outcome


def test_checkpoint_behind_a_url_spans_no_folders(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model={"w": torch.ones(3)})
    for path in (tmp_path / "c").iterdir():
        fsspec.filesystem("memory").pipe(f"/spans/{path.name}", path.read_bytes())

    def act(comm: Comm) -> list[float]:
        target = torch.zeros(3)
        with on_node(comm, [0, 1]) as checkpointer:
            checkpointer.load("memory://spans", model={"w": target}, options=LOAD)
        return target.tolist()

    assert run_ranks(2, act) == [[1.0] * 3] * 2


class ParsedValues:
    """State of one rank, unusable by other ranks."""

    state: object = "fresh"

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state_dict: object) -> None:
        self.state = state_dict


def test_rank_extra_of_an_absent_node(twice: Path) -> None:
    """A job continues on a replacement node although the lost node's random states are gone."""
    shutil.rmtree(folder_of(twice, 1))
    reports = fine(load(twice, [0, 0, 1, 1], copies=2))
    assert [report.rank_extra for report in reports] == ["rank 0 at 0", "rank 1 at 0", None, None]
    assert [bool(report.notes) for report in reports] == [False, False, True, True]
    assert "rank_extra of rank 2 is not restored" in notes(reports)
    objects = [ParsedValues() for _ in range(4)]
    reports = fine(load(twice, [0, 0, 1, 1], copies=2, rank_extra=lambda rank: objects[rank]))
    assert [item.state for item in objects] == ["rank 0 at 0", "rank 1 at 0", "fresh", "fresh"]
    assert {report.kept for report in reports} == {("rank_extra",)}
    for report in reports:
        assert "rank_extra: left unchanged: saved on a node that is missing" in notes([report])

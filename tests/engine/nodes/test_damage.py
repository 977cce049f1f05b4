"""Damage on one node: another copy is read and reported, or an error names what is lost.

Stale folders are not mixed in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.manifests import edit_index, edit_manifest
from tests.support.node_damage import FULL, break_header, flip, held, layout, save, shorten
from tests.support.refusals import same_error
from tests.support.simulated_nodes import (
    LOAD,
    SAVE,
    fine,
    folder_of,
    on_node,
    once,
    save_all,
    twice,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import run_ranks, try_ranks

__all__ = ["once", "twice"]  # fixtures

Files = Callable[[Path], None]


def load(
    root: Path,
    nodes: Sequence[int],
    *,
    copies: int = 1,
    step: int = 0,
    folders: Sequence[Path] | None = None,
) -> list[uc.LoadReport | BaseException]:
    """Loads in the layout of the save; every byte of ranks that get through is that of the step."""

    def act(comm: Comm) -> uc.LoadReport:
        right = held(comm.rank, comm.world, copies=copies, step=step)
        target = {name: torch.full_like(tensor, -1) for name, tensor in right.items()}
        where = (
            folders[nodes[comm.rank]] if folders is not None else folder_of(root, nodes[comm.rank])
        )
        with on_node(comm, nodes) as made:
            report = made.load(
                where, model=target, layout=layout(comm.world, copies=copies), options=LOAD
            )
        assert all(torch.equal(target[name], right[name]) for name in right), comm.rank
        assert report.step == step
        assert report.extra == {"step": step, "bytes": bytes(9000)}
        return report

    return try_ranks(len(nodes), act)


HOW: dict[str, Files] = {
    "flipped": flip,
    "short": shorten,
    "missing": Path.unlink,
    "header": break_header,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`twice`: two nodes with a copy each; `once`: one copy over two nodes."""
    root = tmp_path_factory.mktemp("saved")
    save(root / "twice", [0, 0, 1, 1], copies=2)
    save(root / "once", [0, 0, 1, 1])
    return root


def notes(reports: Sequence[uc.LoadReport]) -> str:
    return "\n".join(note for report in reports for note in report.notes)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("node", [0, 1])
def test_damaged_copy_is_read_from_another_node_and_reported(
    twice: Path, how: str, node: int
) -> None:
    file = folder_of(twice, node) / "model.safetensors"
    HOW[how](file)
    told = notes(fine(load(twice, [0, 0, 1, 1], copies=2)))
    assert "model.safetensors" in told
    assert str(file.parent) in told
    assert ("block" in told) == (how == "flipped")


@pytest.mark.parametrize("how", HOW)
def test_digests_damaged_on_one_node(twice: Path, how: str) -> None:
    HOW[how](folder_of(twice, 1) / names.DIGESTS)
    told = notes(fine(load(twice, [0, 0, 1, 1], copies=2)))
    assert names.DIGESTS in told or "block" in told


@pytest.mark.parametrize("how", ["short", "missing", "header"])
def test_damaged_digests_are_requested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nor is anything else read of a folder that proves nothing."""
    model = {f"w{i}": torch.full((300, 40), float(i)) for i in range(20)}
    save_all(tmp_path, [0, 1], lambda rank: model)
    folder = folder_of(tmp_path, 1)
    HOW[how](folder / names.DIGESTS)
    asked, read = [], []
    block_digests, read_at = Folder.block_digests, LocalStorage.read_at

    def counted(self: Folder, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        asked.append(self.storage.root)
        return block_digests(self, wanted)

    def noted(self: LocalStorage, name: str, start: int, into: Buffer) -> None:
        read.append((Path(self.root), name, start))
        read_at(self, name, start, into)

    def act(comm: Comm) -> uc.LoadReport:
        target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        with on_node(comm, [0, 1]) as made:
            report = made.load(folder_of(tmp_path, comm.rank), model=target, options=LOAD)
        assert all(torch.equal(target[name], model[name]) for name in model)
        return report

    monkeypatch.setattr(Folder, "block_digests", counted)
    monkeypatch.setattr(LocalStorage, "read_at", noted)
    assert names.DIGESTS in notes(run_ranks(2, act))
    assert asked.count(str(folder)) == 1
    assert [
        start
        for where, name, start in read
        if (where, name) == (folder, "model.safetensors") and start
    ] == []


@pytest.mark.parametrize("how", ["flipped", "short", "missing"])
@pytest.mark.parametrize("file", [names.EXTRA])
def test_metadata_damaged_on_one_node(twice: Path, file: str, how: str) -> None:
    HOW[how](folder_of(twice, 1) / file)
    assert file in notes(fine(load(twice, [0, 0, 1, 1], copies=2)))


@pytest.mark.parametrize("how", ["short", "missing", "header"])
@pytest.mark.parametrize("file", [names.MANIFEST, "model.safetensors.index.json"])
def test_folder_that_one_node_cannot_open(twice: Path, file: str, how: str) -> None:
    """Load goes on with the other copy; the report says why the folder was of no use."""
    HOW[how](folder_of(twice, 1) / file)
    assert file in notes(fine(load(twice, [0, 0, 1, 1], copies=2)))


def test_index_that_lists_a_missing_tensor(twice: Path) -> None:
    edit_index(
        folder_of(twice, 1),
        "model",
        lambda index: index["weight_map"].update(x=index["weight_map"].pop("w")),
    )
    assert "only its header lists 'w'" in notes(fine(load(twice, [0, 0, 1, 1], copies=2)))


@pytest.mark.parametrize("how", HOW)
def test_error_names_damage_without_another_copy(once: Path, how: str) -> None:
    (file,) = folder_of(once, 1).glob("model_shards-00002*.safetensors")
    HOW[how](file)
    found = load(once, [0, 0, 1, 1])
    if how == "flipped":
        text = str(same_error(found, uc.IntegrityError, "no node has these bytes intact"))
        assert f"{file}: block " in text
        assert "has CRC" in text
        assert "the target holds a mix of old and new bytes and is unusable" in text
    else:
        text = str(
            same_error(found, uc.IncompleteError, r"model:w: no node has \[675:900, 0:400\]")
        )
        assert file.name in text


@pytest.mark.parametrize(
    ("file", "why"),
    [(names.MANIFEST, "not valid JSON"), ("model_shards.safetensors.index.json", "has CRC")],
)
def test_error_names_unopened_folder_without_another_copy(once: Path, file: str, why: str) -> None:
    """It is there: "on no node here" alone sends its owner to look for a node that is not
    lost.
    """
    shorten(folder_of(once, 1) / file)
    text = str(
        same_error(
            load(once, [0, 0, 1, 1]), uc.IncompleteError, "is incomplete on the nodes present"
        )
    )
    assert f"node 1: {folder_of(once, 1) / file}: {why}" in text


def test_copies_damaged_in_different_blocks(twice: Path) -> None:
    """Block 0 of one and block 1 of the other: between them all is there. The same block of both:
    nowhere.
    """
    files = [folder_of(twice, node) / "model.safetensors" for node in (0, 1)]
    flip(files[0], at=0.2)
    flip(files[1], at=0.9)
    told = notes(fine(load(twice, [0, 0, 1, 1], copies=2)))
    assert f"{files[0]}: block 0 of model:w" in told
    assert f"{files[1]}: block 1 of model:w" in told
    flip(files[1], at=0.21)
    same_error(
        load(twice, [0, 0, 1, 1], copies=2),
        uc.IntegrityError,
        r"no node has these bytes intact \(2\)",
    )


def test_shards_replace_a_damaged_whole_copy(tmp_path: Path) -> None:
    save(tmp_path, [0, 0, 1, 2], copies=2)
    file = folder_of(tmp_path, 0) / "model.safetensors"
    flip(file, at=0.3)
    flip(file, at=0.9)
    told = notes(fine(load(tmp_path, [0, 0, 1, 2], copies=2)))
    assert f"{file}: block 0 of model:w" in told
    assert f"{file}: block 1 of model:w" in told
    (other,) = folder_of(tmp_path, 2).glob("model_shards*.safetensors")
    flip(other)
    same_error(
        load(tmp_path, [0, 0, 1, 2], copies=2),
        uc.IntegrityError,
        r"no node has these bytes intact \(2\)",
    )


def test_local_shards_are_preferred_to_a_remote_whole_copy(tmp_path: Path) -> None:
    """Ranks 2 and 3 have their halves on their own nodes: they do not meet what is wrong with
    node 0's.
    """
    save(tmp_path, [0, 0, 1, 2], copies=2)
    flip(folder_of(tmp_path, 0) / "model.safetensors", at=0.3)
    flip(folder_of(tmp_path, 0) / "model.safetensors", at=0.9)
    reports = fine(load(tmp_path, [0, 0, 1, 2], copies=2))
    assert [bool(report.notes) for report in reports] == [True, True, False, False]


def test_local_copy_is_read_first(twice: Path) -> None:
    """Each node reads its own copy: damage on the other one is not met."""
    flip(folder_of(twice, 1) / "model.safetensors")
    reports = fine(load(twice, [0, 0, 1, 1], copies=2))
    assert [bool(report.notes) for report in reports[:2]] == [False, False]
    assert any(report.notes for report in reports[2:])


def test_verify_off_also_skips_other_nodes(once: Path) -> None:
    """As with one folder: what is read is taken as it is, and no digests are asked for."""
    (file,) = folder_of(once, 1).glob("model_shards-00002*.safetensors")
    flip(file)
    for node in (0, 1):
        flip(folder_of(once, node) / names.DIGESTS)

    def act(comm: Comm) -> int:
        target = {name: torch.full_like(tensor, -1) for name, tensor in FULL.items()}
        with on_node(comm, [0, 1]) as made:
            report = made.load(
                folder_of(once, comm.rank),
                model=target,
                options=LOAD.model_copy(update={"verify": "off"}),
            )
        assert report.verified_bytes == 0
        assert not [note for note in report.notes if "CRC" in note]
        return sum(int((target[name] != FULL[name]).sum()) for name in FULL)

    assert run_ranks(2, act) == [1, 1]


# stale folders


def test_folder_of_another_save_is_not_mixed_in(tmp_path: Path) -> None:
    """Same step, same name, same shapes: the save id tells them apart."""
    save(tmp_path / "run", [0, 1])
    save(tmp_path / "other", [0, 1])
    shutil.rmtree(folder_of(tmp_path / "run", 1))
    shutil.copytree(folder_of(tmp_path / "other", 1), folder_of(tmp_path / "run", 1))
    text = str(
        same_error(
            load(tmp_path / "run", [0, 1]), uc.IncompleteError, "is incomplete on the nodes present"
        )
    )
    ids = [
        json.loads((folder_of(tmp_path / run, n) / names.MANIFEST).read_text())["save_id"]
        for run, n in (("run", 0), ("other", 1))
    ]
    assert all(f"save {save_id} is incomplete on the nodes present" in text for save_id in ids)


def test_older_complete_save_is_selected(tmp_path: Path) -> None:
    """The newest has lost a node, and its folders and the older ones' are all at hand."""
    save(tmp_path / "old", [0, 1], step=1)
    save(tmp_path / "new", [0, 1], step=2)
    date(folder_of(tmp_path / "old", 0), "2020-01-01T00:00:00+00:00")
    date(folder_of(tmp_path / "old", 1), "2020-01-01T00:00:00+00:00")
    both = [[folder_of(tmp_path / run, node) for run in ("old", "new")] for node in (0, 1)]
    fine(load(tmp_path, [0, 1], step=2, folders=both))  # type: ignore[arg-type]
    shutil.rmtree(folder_of(tmp_path / "new", 1))
    both[1].pop()
    fine(load(tmp_path, [0, 1], step=1, folders=both))  # type: ignore[arg-type]


def date(folder: Path, created: str) -> None:
    edit_manifest(folder, lambda told: told.update(created=created))


def test_newest_of_two_complete_saves(tmp_path: Path) -> None:
    """A node that has copies of both, and one that has the old one only."""
    save(tmp_path / "old", [0, 1], copies=2, step=1)
    save(tmp_path / "new", [0, 1], copies=2, step=2)
    for node in (0, 1):
        date(folder_of(tmp_path / "old", node), "2020-01-01T00:00:00+00:00")
    folders = [folder_of(tmp_path / "old", 0), folder_of(tmp_path / "new", 1)]
    fine(load(tmp_path, [0, 1], copies=2, step=2, folders=folders))
    fine(load(tmp_path, [1, 0], copies=2, step=2, folders=folders))


# parts


def test_part_deleted_on_every_node(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        nodes, place = [0, 1], folder_of(tmp_path, comm.rank)
        with on_node(comm, nodes) as made:
            made.save(
                place,
                model={"w": torch.ones(3)},
                optimizer={"w/exp_avg": torch.ones(3)},
                options=SAVE,
            )
            for file in place.glob("optimizer*"):
                file.unlink()
            target = {"w": torch.zeros(3)}
            made.load(place, model=target, options=LOAD)
            assert torch.equal(target["w"], torch.ones(3))
            made.load(place, model=target, optimizer={"w/exp_avg": torch.zeros(3)}, options=LOAD)

    same_error(try_ranks(2, act), uc.MismatchError, "optimizer:w/exp_avg: is not in the checkpoint")


def test_part_without_tensors(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, comm.rank)
        with on_node(comm, [0, 1]) as made:
            made.save(place, model={"w": torch.ones(3)}, optimizer={}, options=SAVE)
        with on_node(comm, [0, 1]) as made:
            made.load(place, model={"w": torch.zeros(3)}, optimizer={}, options=LOAD)

    run_ranks(2, act)


# what is said beside tensors


def test_rank_extra_is_restored_by_rank(tmp_path: Path) -> None:
    save(tmp_path, [0, 0, 1, 1])
    reports = fine(load(tmp_path, [1, 1, 0, 0]))  # each node has the other's folder
    assert [report.rank_extra for report in reports] == [f"rank {rank} at 0" for rank in range(4)]
    assert notes(reports) == ""


def test_rank_extra_of_an_absent_node(twice: Path) -> None:
    shutil.rmtree(folder_of(twice, 1))
    reports = fine(load(twice, [0, 0, 1, 1], copies=2))
    assert [report.rank_extra for report in reports] == ["rank 0 at 0", "rank 1 at 0", None, None]
    assert [bool(report.notes) for report in reports] == [False, False, True, True]
    assert "rank_extra of rank 2 is not restored" in notes(reports)


def test_no_rank_stored_a_rank_extra(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            made.save(folder_of(tmp_path, comm.rank), model={"w": torch.ones(3)}, options=SAVE)

    run_ranks(2, act)

    def one(comm: Comm) -> tuple[str, ...]:
        with on_node(comm, [0]) as made:
            return made.load(
                [folder_of(tmp_path, node) for node in (0, 1)],
                model={"w": torch.ones(3)},
                options=LOAD,
            ).notes

    assert run_ranks(1, one) == [()]


def test_hugging_face_folder_on_one_node_only(tmp_path: Path) -> None:
    """It is no node's checkpoint of several: the error says who has none."""
    from safetensors.torch import save_file

    folder_of(tmp_path, 0).mkdir(parents=True)
    save_file({"w": torch.zeros(3)}, folder_of(tmp_path, 0) / "model.safetensors")

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as made:
            made.load(folder_of(tmp_path, comm.rank), model={"w": torch.ones(3)}, options=LOAD)

    text = str(
        same_error(try_ranks(2, act), uc.IncompleteError, "node 1: .* there is no such folder")
    )
    assert "node 0: has a folder without a manifest" in text


class Own:
    """State of a rank, which only that rank can use."""

    found: object = "fresh"

    def state_dict(self) -> object:
        return self.found

    def load_state_dict(self, state_dict: object) -> None:
        self.found = state_dict


def test_objects_of_an_absent_node_stay_unchanged(twice: Path) -> None:
    """A job that goes on with a new node in the place of a lost one is not stopped by that one's
    random states.
    """
    shutil.rmtree(folder_of(twice, 1))
    nodes, objects = [0, 0, 1, 1], [Own() for _ in range(4)]

    def act(comm: Comm) -> uc.LoadReport:
        target = {
            name: torch.zeros_like(tensor) for name, tensor in held(comm.rank, 4, copies=2).items()
        }
        with on_node(comm, nodes) as made:
            place = folder_of(twice, nodes[comm.rank])
            return made.load(
                place,
                model=target,
                layout=layout(4, copies=2),
                rank_extra=objects[comm.rank],
                options=LOAD,
            )

    reports = fine(try_ranks(4, act))
    assert [one.found for one in objects] == ["rank 0 at 0", "rank 1 at 0", "fresh", "fresh"]
    assert {report.kept for report in reports} == {("rank_extra",)}
    assert all(
        "rank_extra: left unchanged: saved on a node that is missing" in "".join(report.notes)
        for report in reports
    )

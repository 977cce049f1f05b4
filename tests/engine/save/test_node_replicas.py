"""Replicas on other nodes: with n copies, any n - 1 nodes may be lost without losing a bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.node_cases import (
    FEW,
    FUNCTION_FIXTURE,
    LAYOUTS,
    arranged,
    case_of,
    places,
    scattered,
)
from tests.support.engine.cluster.node_commits import EACH, REPLACE, loads, save
from tests.support.engine.cluster.simulated_nodes import (
    LOAD,
    NAME,
    SAVE,
    Paths,
    fine,
    folder_of,
    load_case,
    on_node,
    save_all,
    states,
)
from tests.support.engine.reshard_cases import Case, global_array
from tests.support.harness import (
    DrawnLayout,
    DrawnTensor,
    run_ranks,
)
from tests.support.refusals import same_error
from unified_ckpt.cli.main import main
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.cluster.copies import check_peer_manifest
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["states"]  # a fixture


def twice(copies: int = 2, **options: object) -> uc.SaveOptions:
    return SAVE.model_copy(update={"node_copies": copies, **options})


def save_each(
    case: Case, root: Path, nodes: Sequence[int], options: uc.SaveOptions
) -> list[uc.SaveReport]:
    """Save the case on all ranks, with a `rank_extra` of each."""
    return save_all(
        root,
        nodes,
        case.state,
        extra={"big": torch.ones(9)},
        rank_extra=lambda rank: f"of {rank}",
        options=options,
    )


def paths_without(root: Path, nodes: Sequence[int], away: Sequence[int]) -> dict[int, Paths]:
    """Return the folders of each node; absent nodes have an empty folder."""
    return {
        node: [root / "nothing" / NAME if node in away else folder_of(root, node)]
        for node in set(nodes)
    }


def loads_without(
    case: Case, root: Path, nodes: Sequence[int], away: Sequence[int]
) -> list[uc.LoadReport]:
    """Load without some nodes; check every byte and each rank's `rank_extra`."""
    reports = fine(load_case(case, case.saved, nodes, paths_without(root, nodes, away)))
    assert [report.rank_extra for report in reports] == [f"of {rank}" for rank in range(len(nodes))]
    assert all(torch.equal(report.extra["big"], torch.ones(9)) for report in reports)
    return reports


def check_network(reports: Sequence[uc.SaveReport | uc.LoadReport]) -> None:
    """Rank 0 reports what all ranks sent and received. All nodes are this machine."""
    network = reports[0].network
    assert network is not None
    (traffic,) = network.by_address.values()
    assert traffic.sent_nbytes == traffic.received_nbytes == network.nbytes > 0
    assert {report.network for report in reports[1:]} == {None}


LONG = [
    pytest.param(layout, copies, (nodes, ranks), marks=pytest.mark.long)
    for layout in LAYOUTS
    for copies in (2, 3)
    for nodes in (3, 4)
    for ranks in (1, 2)
]


@pytest.mark.parametrize(
    ("layout", "copies", "size"),
    [
        *(
            pytest.param(layout, 2, (2, 2), marks=[pytest.mark.slow] if " over" in layout else [])
            for layout in LAYOUTS
        ),
        ("rows over nodes", 3, (4, 1)),
        *LONG,
    ],
)
def test_nodes_may_be_lost(tmp_path: Path, layout: str, copies: int, size: tuple[int, int]) -> None:
    case, nodes = case_of(layout, *size), places(*size)
    check_network(save_each(case, tmp_path, nodes, twice(copies)))
    for away in combinations(range(size[0]), copies - 1):
        check_network(loads_without(case, tmp_path, nodes, away))
    for node in range(size[0]):
        assert uc.verify(folder_of(tmp_path, node), deep=True).ok
    # and on a single node that has the remaining folders of all nodes
    target, remaining = arranged(layout, 1, 2), range(copies - 1, size[0])
    fine(
        load_case(
            case, target, [0, 0], {0: [folder_of(tmp_path, survivor) for survivor in remaining]}
        )
    )


def test_error_names_the_lost_nodes(tmp_path: Path) -> None:
    """The error names the lost nodes, except those with replicas."""
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    outcomes = load_case(case, case.saved, nodes, paths_without(tmp_path, nodes, [0, 1]))
    text = str(same_error(outcomes, uc.IncompleteError, "model:big: no node has"))
    assert "folder(s) 0-1 of 3 are on no node present; rank(s) 0-1 of the save wrote them" in text
    shutil.rmtree(folder_of(tmp_path, 1) / names.REPLICAS)
    same_error(
        load_case(case, case.saved, nodes, paths_without(tmp_path, nodes, [0])),
        uc.IncompleteError,
        "folder.s. 0 of 3",
    )


# which bytes are copied


def test_tensor_on_some_nodes(tmp_path: Path) -> None:
    """A tensor on nodes 0 and 2 needs one replica; a tensor on all nodes needs none."""
    specs = {"some": (0, 2), "all": (0, 1, 2, 3), "one": (3,)}
    tensors = [
        DrawnTensor(TensorDecl("model", fqn, TensorSpec("F32", (40, 50)), Sharding()), ranks)
        for fqn, ranks in specs.items()
    ]
    case = Case(
        {tensor.decl.key: global_array(tensor.decl.key, tensor.decl.spec) for tensor in tensors},
        DrawnLayout(4, tuple(tensors)),
    )
    save_each(case, tmp_path, [0, 1, 2, 3], twice(3))
    nodes_by_fqn: dict[str, list[int]] = {}
    for node in range(4):
        for place in (folder_of(tmp_path, node) / names.REPLICAS).iterdir():
            index = place / names.index_name("model")
            for fqn in json.loads(index.read_text())["weight_map"] if index.exists() else ():
                nodes_by_fqn.setdefault(fqn, []).append(node)
    assert len(nodes_by_fqn["some"]) == 1
    assert set(nodes_by_fqn["some"]) <= {1, 3}
    assert sorted(nodes_by_fqn["one"]) == [0, 1]
    for away in combinations(range(4), 2):
        loads_without(case, tmp_path, [0, 1, 2, 3], away)


def test_nodes_that_share_a_folder_count_once(tmp_path: Path) -> None:
    """Two racks with a volume each: the replica is on the other rack's volume."""
    case, nodes, racks = case_of("rows over nodes", 4, 1), [0, 1, 2, 3], [0, 0, 1, 1]

    def act(comm: Comm, copies: int) -> None:
        with on_node(comm, nodes) as checkpointer:
            path = folder_of(tmp_path, racks[comm.rank])
            checkpointer.save(
                path,
                model=case.state(comm.rank),
                rank_extra=comm.rank,
                options=twice(copies, write_alignment=0),
            )

    with pytest.raises(
        uc.RankError,
        match="node_copies=3: got 2 nodes with folders of their own, expected 3",
    ):
        run_ranks(4, lambda comm: act(comm, 3))
    run_ranks(4, lambda comm: act(comm, 2))
    for left_over in (0, 1):
        fine(
            load_case(
                case,
                case.saved,
                nodes,
                {node: [folder_of(tmp_path, left_over)] for node in nodes},
            )
        )


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_no_copies_in_a_shared_folder(tmp_path: Path, nodes: list[int]) -> None:
    case = case_of("rows over nodes", 2, 1)

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            checkpointer.save(tmp_path / NAME, model=case.state(comm.rank), options=twice(5))

    run_ranks(2, act)
    assert not (tmp_path / NAME / names.REPLICAS).exists()


def check_scattered(root: Path, drawn: tuple[Case, list[int], object], copies: int) -> None:
    """Check a drawn case: any tensors on any ranks, and any ranks on any nodes."""
    case, nodes, _ = drawn
    numbers = sorted(set(nodes))
    if len(numbers) == 1:
        return
    copies = min(copies, len(numbers))
    with TemporaryDirectory(dir=root) as name:
        save_each(case, Path(name), nodes, twice(copies))
        for away in combinations(numbers, copies - 1):
            loads_without(case, Path(name), nodes, away)


@given(scattered(**FEW), st.integers(2, 4))
@settings(max_examples=12, derandomize=True, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
def test_any_ranks_on_any_nodes(
    tmp_path: Path, drawn: tuple[Case, list[int], object], copies: int
) -> None:
    check_scattered(tmp_path, drawn, copies)


@pytest.mark.long
@given(scattered(max_world=6, max_tensors=5), st.integers(2, 4))
@settings(max_examples=200, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
def test_any_ranks_on_any_nodes_many_examples(
    tmp_path: Path, drawn: tuple[Case, list[int], object], copies: int
) -> None:
    check_scattered(tmp_path, drawn, copies)


# damage


def test_verify_reports_missing_and_foreign_copies(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path, nodes, twice())
    place = folder_of(tmp_path, 1) / names.REPLICAS
    shutil.rmtree(place / "0")
    (problem,) = uc.verify(folder_of(tmp_path, 1)).problems
    assert problem.startswith("replicas/0: cannot be read:")
    shutil.copytree(folder_of(tmp_path, 2) / names.REPLICAS / "1", place / "0")
    assert (
        "replicas/0: is not node group 0's folder of this save"
        in uc.verify(folder_of(tmp_path, 1)).problems
    )
    assert not any(report.notes for report in loads_without(case, tmp_path, nodes, []))


def test_copy_of_another_save_is_ignored(tmp_path: Path) -> None:
    case, nodes = case_of("rows over nodes", 3, 1), places(3, 1)
    save_each(case, tmp_path / "old", nodes, twice())
    save_each(case, tmp_path / "new", nodes, twice())
    place = folder_of(tmp_path / "new", 1) / names.REPLICAS / "0"
    shutil.rmtree(place)
    shutil.copytree(folder_of(tmp_path / "old", 1) / names.REPLICAS / "0", place)
    same_error(
        load_case(case, case.saved, nodes, paths_without(tmp_path / "new", nodes, [0])),
        uc.IncompleteError,
        "no node has",
    )


def test_only_the_same_save_and_group_is_copied(tmp_path: Path) -> None:
    save_each(case_of("rows over nodes", 2, 1), tmp_path, places(2, 1), twice())
    folder = open_path(str(folder_of(tmp_path, 1)), lock=False)
    assert folder.manifest is not None
    check_peer_manifest(folder, save_id=folder.manifest.save_id, number=1)
    for save_id, number in ((folder.manifest.save_id, 0), ("other", 1)):
        with pytest.raises(
            uc.IntegrityError, match=f"expected what node group {number} wrote of save {save_id}"
        ):
            check_peer_manifest(folder, save_id=save_id, number=number)
    folder.close()


class Rotten(LocalStorage):
    """A disk that flips a bit of the shards before the manifest is written."""

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        if name.endswith(names.MANIFEST) and names.REPLICAS not in name:
            for file in Path(self.path(name)).parent.glob("model_shards*.safetensors"):
                flip(file, -7)
        super().write_at(name, start, buffers)


def test_damaged_block_is_not_copied(tmp_path: Path) -> None:
    """The original is damaged, so the save fails instead of copying it."""
    fine(save(tmp_path, 1))
    before = EACH.left(tmp_path)
    outcomes = save(
        tmp_path,
        2,
        storages=lambda rank, place: (Rotten if rank > 1 else LocalStorage)(place),
        options=TWICE,
    )
    same_error(outcomes, uc.IntegrityError, "it is not copied")
    assert EACH.left(tmp_path) == before
    assert loads(tmp_path) == 1


# crashes and full disks; two nodes of two ranks

TWICE = REPLACE.model_copy(update={"node_copies": 2})


def test_no_space_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine(save(tmp_path, 1))
    before = EACH.left(tmp_path)

    class Small(LocalStorage):
        """A disk with space for the node's own folder only."""

        def free_nbytes(self) -> int:
            return super().free_nbytes() if not self.names_copies() else 1000

        def names_copies(self) -> bool:
            return any(
                (Path(self.root) / entry / names.REPLICAS).exists() for entry in self.names()
            )

    outcomes = save(
        tmp_path,
        2,
        storages=lambda rank, place: Small(place) if rank > 1 else LocalStorage(place),
        options=TWICE,
    )
    same_error(outcomes, uc.StorageError, "of free space: got 0.977 KiB, expected")
    assert EACH.left(tmp_path) == before
    assert loads(tmp_path) == 1


# consecutive saves


def test_layout_and_copy_count_change(tmp_path: Path) -> None:
    """Copies follow the state of each save, also after a save that failed while planning them."""

    def act(comm: Comm) -> None:
        place = folder_of(tmp_path, comm.rank)
        with on_node(comm, [0, 1, 2]) as checkpointer:
            for step, (keys, copies) in enumerate(
                [("ab", 2), ("b", 2), ("abc", 3), ("abc", 4), ("abc", 3), ("abc", 1), ("abc", 2)]
            ):
                layout = uc.Layout(
                    mesh={"dp": 3},
                    rules={key: {"dp": 0} for key in keys},
                    shapes=dict.fromkeys(keys, (30, 7)),
                )
                state = {key: torch.full((10, 7), float(step + comm.rank)) for key in keys}
                options = twice(copies, if_exists="replace")
                if copies > 3:
                    with pytest.raises(uc.RankError, match="node_copies=4"):
                        checkpointer.save(
                            place, model=state, layout=layout, step=step, options=options
                        )
                    continue
                checkpointer.save(place, model=state, layout=layout, step=step, options=options)
                replicas = sorted(
                    json.loads((place / names.MANIFEST).read_text())["node_group"]["replicas"]
                )
                assert replicas == sorted((comm.rank - n) % 3 for n in range(1, copies))
                for number in replicas:
                    replica = place / names.REPLICAS / str(number)
                    index = json.loads((replica / names.index_name("model_shards")).read_text())
                    assert {name[0] for name in index["weight_map"]} == set(keys)
                assert (place / names.REPLICAS).exists() == (copies > 1)

    run_ranks(3, act)


# deleted parts, sizes and attached files


def test_command_line_with_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes include replicas; tensors of a replica are not listed as the folder's own."""
    save_each(case_of("rows over nodes", 2, 1), tmp_path, places(2, 1), twice(step=1))
    folder = folder_of(tmp_path, 0)
    assert main(["verify", str(folder), "--deep"]) == 0
    assert main(["inspect", str(folder)]) == 0
    assert "of folder(s) 1" in capsys.readouterr().out
    assert main(["list", str(folder.parent), "--json"]) == 0
    (step_info,) = json.loads(capsys.readouterr().out)["runs"][0]["steps"]
    assert step_info["nbytes"] == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )


class Tied(torch.nn.Module):
    """One tensor under two names."""

    def __init__(self, rows: int, value: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((rows, 2), value))
        self.head = self.w


def test_tied_tensors_and_attached_files(tmp_path: Path) -> None:
    """Aliases load from one node's folder, which has the other node's shards as a replica."""
    layout = uc.Layout(mesh={"dp": 2}, rules={"w": {"dp": 0}})

    def attach(folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")

    def act(comm: Comm) -> None:
        with on_node(comm, [0, 1]) as checkpointer:
            model = Tied(5, float(comm.rank))
            checkpointer.save(
                folder_of(tmp_path, comm.rank),
                model=model,
                layout=layout,
                options=twice(),
                attach=attach,
            )

    run_ranks(2, act)
    for node in (0, 1):
        assert (folder_of(tmp_path, node) / "config.json").exists()
        assert uc.verify(folder_of(tmp_path, node), deep=True).problems == ()
    shutil.rmtree(folder_of(tmp_path, 0))
    target = {"head": torch.zeros(10, 2)}
    run_ranks(1, lambda comm: load_on_single_node(comm, folder_of(tmp_path, 1), target))
    assert torch.equal(target["head"], torch.tensor([0.0] * 5 + [1.0] * 5)[:, None].expand(10, 2))


def load_on_single_node(comm: Comm, folder: Path, target: dict[str, torch.Tensor]) -> None:
    with on_node(comm, [0]) as checkpointer:
        checkpointer.load(folder, model=target, options=LOAD)

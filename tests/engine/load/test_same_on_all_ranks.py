"""All ranks of a load read one save with the same options, whatever replaces it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import NAME, SAVE, fine, folder_of, on_node
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.engine.cluster import discover
from unified_ckpt.engine.load import load as load_module
from unified_ckpt.engine.load.same_on_all_ranks import check_same_on_all_ranks, shared_settings
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage import open_files

COLUMNS = uc.Layout(mesh={"tp": 2}, rules={"w": {"tp": 1}})
LOAD = uc.LoadOptions(timeout_seconds=8)


@pytest.mark.parametrize("extra", [False, True], ids=["complete", "missing"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [("strict", (True, False)), ("verify", ("read", "off")), ("max_over_read", (1.0, 1000.0))],
)
def test_options_that_differ_between_ranks(
    tmp_path: Path, name: str, values: tuple[object, object], reverse: bool, extra: bool
) -> None:
    full = {"w": torch.ones(1024, 1024), "s": torch.ones(4)}
    uc.save(tmp_path / NAME, model=full, step=1, options=SAVE)
    values = values[::-1] if reverse else values
    shapes = {"w": (1024, 512), "s": (4,), **({"x": (3,)} if extra else {})}
    targets = [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2)]

    def load(comm: Comm) -> None:
        value = values[comm.rank]
        options: dict[str, Any] = {"options": LOAD.model_copy(update={name: value})}
        if name == "strict":
            options = {"options": LOAD, "strict": value}
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / NAME, model=targets[comm.rank], layout=COLUMNS, **options)

    pattern = (
        f"{name} is not the same on all ranks of this load: rank\\(s\\) 0 {values[0]!r}; "
        f"rank\\(s\\) 1 {values[1]!r}; pass one value"
    )
    same_error(try_ranks(2, load), uc.LayoutError, pattern)
    assert not any(tensor.any() for target in targets for tensor in target.values())


@pytest.mark.parametrize(
    ("saves", "match"),
    [
        (
            ["ab"[rank in (1, 5)] for rank in range(2048)],
            r"rank\(s\) 0, 2-4, 6-2047 save a; rank\(s\) 1, 5 save b; expected one",
        ),
        (["a", None], r"rank\(s\) 0 save a; rank\(s\) 1 one without an id"),
        ([None], ""),
    ],
)
def test_differing_ranks_are_listed_as_ranges(saves: list[str | None], match: str) -> None:
    settings = [shared_settings(save_id, strict=True, options=LOAD) for save_id in saves]
    if match:
        with pytest.raises(uc.StorageError, match=match):
            check_same_on_all_ranks(settings)
    else:
        check_same_on_all_ranks(settings)


# the folder that was opened is read

LAYERS = 6


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{i}.weight": torch.full((64, 64), float(value)) for i in range(LAYERS)}


def values(target: Mapping[str, torch.Tensor]) -> list[float]:
    return sorted({value for tensor in target.values() for value in tensor.unique().tolist()})


def save_two(root: Path, nodes: Sequence[int]) -> None:
    """One checkpoint, and another beside it; each node has some rows of both."""

    def save(comm: Comm) -> None:
        for step, name in ((1, NAME), (2, "next")):
            shards = {
                name: tensor.chunk(comm.world)[comm.rank] for name, tensor in model(step).items()
            }
            with on_node(comm, nodes) as checkpointer:
                checkpointer.save(
                    folder_of(root, nodes[comm.rank]).with_name(name),
                    model=shards,
                    layout=uc.Layout(mesh={"dp": comm.world}, rules={"*": {"dp": 0}}),
                    step=step,
                    extra={"step": step},
                    rank_extra=step,
                    options=SAVE.model_copy(update={"max_file_bytes": 20_000}),
                )

    run_ranks(len(nodes), save)


def load_on_nodes(
    root: Path, nodes: Sequence[int]
) -> tuple[list[uc.LoadReport | BaseException], list[dict[str, torch.Tensor]]]:
    """Every node loads the whole model."""
    targets = [model(-1) for _ in nodes]

    def load(comm: Comm) -> uc.LoadReport:
        with on_node(comm, nodes) as checkpointer:
            return checkpointer.load(
                folder_of(root, nodes[comm.rank]),
                model=targets[comm.rank],
                layout=uc.Layout(mesh={"dp": comm.world}, rules={}),  # the mesh of the save
                options=LOAD.model_copy(update={"verify": "full"}),
            )

    return try_ranks(len(nodes), load), targets


def swap(path: Path) -> None:
    """Another checkpoint, which lies beside it, takes its name."""
    path.rename(path.with_name("former"))
    path.with_name("next").rename(path)


@pytest.mark.parametrize("nodes", [[0], [0, 1]])
@pytest.mark.parametrize("moment", ["match_targets", "read_groups"])
def test_load_continues_with_the_folders_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, nodes: list[int]
) -> None:
    """With few files open at a time: one that is opened again is the same one again."""
    monkeypatch.setattr(open_files, "MAX_IDLE", 1)
    save_two(tmp_path, nodes)
    real, lock = getattr(load_module, moment), threading.Lock()

    def late(*args: Any, **arguments: Any) -> Any:
        with lock:
            for path in tmp_path.glob("*/next"):
                swap(path.with_name(NAME))
        return real(*args, **arguments)

    monkeypatch.setattr(load_module, moment, late)
    outcomes, targets = load_on_nodes(tmp_path, nodes)
    assert not list(tmp_path.glob("*/next"))
    for report in fine(outcomes):
        assert (report.step, report.extra, report.rank_extra) == (1, {"step": 1}, 1)
    assert sum(report.verified_bytes for report in fine(outcomes)) >= LAYERS * 64 * 64 * 4
    assert [values(target) for target in targets] == [[1.0]] * len(nodes)


def test_folder_swapped_after_its_node_described_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(tmp_path, [0, 1])
    real = discover._select_save

    def late(*args: Any) -> bytes:
        swap(folder_of(tmp_path, 1))
        return real(*args)

    monkeypatch.setattr(discover, "_select_save", late)
    outcomes, targets = load_on_nodes(tmp_path, [0, 1])
    same_error(
        outcomes,
        uc.StorageError,
        r"rank 1: .*checkpoint-1: was replaced by another save while the ranks opened it, "
        r"expected save \w+",
    )
    assert [values(target) for target in targets] == [[-1.0]] * 2


@pytest.mark.incident("DLRover#907")
def test_ranks_that_open_different_saves_under_one_name(tmp_path: Path) -> None:
    """Two runs, the same step, the same names: another mount on one node, or a replaced folder."""
    for run in (0, 1):
        uc.save(tmp_path / f"run-{run}" / NAME, model=model(run + 1), step=1, options=SAVE)
    targets = [model(-1), model(-1)]

    def load(comm: Comm) -> None:
        path = tmp_path / f"run-{comm.rank}" / NAME
        make_checkpointer(comm).load(path, model=targets[comm.rank], options=LOAD)

    same_error(
        try_ranks(2, load),
        uc.StorageError,
        r"different checkpoints: rank\(s\) 0 save \w+; rank\(s\) 1 save \w+; expected one",
    )
    assert [values(target) for target in targets] == [[-1.0]] * 2


def test_checkpoint_replaced_while_open(tmp_path: Path) -> None:
    """Its files are removed: that is said, and not that the new folder lacks some."""
    uc.save(tmp_path / NAME, model=model(1), options=SAVE)
    target, replace = model(-1), SAVE.model_copy(update={"if_exists": "replace"})
    with uc.open(tmp_path / NAME) as source:
        uc.save(tmp_path / NAME, model=model(2), options=replace)
        with pytest.raises(
            uc.NotFoundError,
            match=r"checkpoint-1: was removed or replaced while it was read; load again",
        ):
            uc.load(source, model=target, options=LOAD)
    assert values(target) == [-1.0]

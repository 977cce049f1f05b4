"""Saves of tensors whose holders declare boxes, read by the safetensors package alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load

import unified_ckpt as uc
from tests.support.engine.cluster.node_cases import FUNCTION_FIXTURE
from tests.support.engine.cluster.simulated_nodes import SAVE, on_node
from tests.support.engine.tilings import Tiling, tilings
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.objects.buckets import folder_bodies, registered_bucket
from tests.support.refusals import same_error
from unified_ckpt.core.planning.declared_boxes import parts
from unified_ckpt.engine.plan.save_plan import SavePlan, make_plan
from unified_ckpt.engine.save import scope
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects.storage import ObjectStorage

WORLD, NAME = 3, "checkpoint-1"
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple) | st.just((60, 130))
WHOLE = torch.arange(96.0).view(8, 12)
ONE = torch.ones(())


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts of some KiB have several tiles."""
    monkeypatch.setattr(parts, "TILE_NBYTES", 1024)


def array_of(shape: tuple[int, ...], number: int) -> NDArray[np.float32]:
    numel = int(np.prod(shape, dtype=int))
    return np.arange(100_000 * number, 100_000 * number + numel, dtype=np.float32).reshape(shape)


def state_of(drawn: Sequence[Tiling], rank: int, *, add: float) -> dict[str, Any]:
    """The boxes of a rank, filled, beside tensors with rules."""
    state: dict[str, Any] = {"whole": torch.arange(40.0) + add, "rows": torch.full((5, 9), add)}
    for number, tiling in enumerate(drawn):
        shards = tiling.target(rank, torch.float32, -1.0)
        regions = tiling.expected(rank, array_of(tiling.shape, number) + add)
        if tiling.flat:
            shards.tensor.copy_(torch.from_numpy(np.concatenate([*regions, np.zeros(0, "f4")])))
        else:
            for (_, local), region in zip(shards.boxes, regions, strict=True):
                shards.tensor.numpy()[(*local.slices, ...)] = region
        state[f"w{number}"] = shards
    return state


def tensors_in(files: Mapping[str, bytes], part: str = "model") -> dict[str, NDArray[Any]]:
    stored: dict[str, NDArray[Any]] = {}
    for name, body in files.items():
        if name.startswith(part) and name.endswith(".safetensors"):
            stored |= load(bytes(body))
    return stored


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@settings(max_examples=20, suppress_health_check=FUNCTION_FIXTURE, deadline=None)
@given(
    drawn=st.tuples(*(tilings(WORLD, SHAPES) for _ in range(3))),
    nodes=st.sampled_from([[0, 0, 0], [0, 0, 1]]),
    kind=st.sampled_from(["save", "async", "partly copied"]),
    part_nbytes=st.sampled_from([None, 1024, 4096, 1 << 20]),
    max_file_bytes=st.sampled_from([4000, 1 << 30]),
)
def test_random_tilings_are_stored_whole(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Tiling, ...],
    nodes: list[int],
    kind: str,
    part_nbytes: int | None,
    max_file_bytes: int,
) -> None:
    """To a folder, or to a bucket with parts of so many bytes; the second save reuses the plan."""
    root = tmp_path_factory.mktemp("c")
    target = str(root) if part_nbytes is None else "s3://bucket/run"
    update = {"max_file_bytes": max_file_bytes}
    if kind == "partly copied":
        update["host_bytes"] = 5000
    options = SAVE.model_copy(update=update)

    planned = list[int]()
    states = {
        (rank, step): state_of(drawn, rank, add=0.5 * step)
        for rank in range(WORLD)
        for step in (1, 2)
    }

    def count(collective: Collective, *args: Any, **kwargs: Any) -> SavePlan:
        planned.append(collective.rank)
        return make_plan(collective, *args, **kwargs)

    def act(comm: Comm) -> None:
        with on_node(comm, nodes) as checkpointer:
            for step in (1, 2):
                state = states[comm.rank, step]
                path = f"{target}/checkpoint-{step}"
                if kind == "save":
                    checkpointer.save(path, model=state, options=options)
                else:
                    checkpointer.save_async(path, model=state, options=options).result(60)

    with pytest.MonkeyPatch.context() as patch, registered_bucket() as bucket:
        patch.setattr(ObjectStorage, "smallest_part_nbytes", part_nbytes or 4096)
        patch.setattr(scope, "make_plan", count)
        bucket.min_part_nbytes = 1
        run_ranks(WORLD, act)
        assert sorted(planned) == list(range(WORLD))
        for step in (1, 2):
            name = f"checkpoint-{step}"
            files = (
                files_in(root / name)
                if part_nbytes is None
                else folder_bodies(bucket, f"run/{name}")
            )
            stored = tensors_in(files)
            for number, tiling in enumerate(drawn):
                expected = array_of(tiling.shape, number) + np.float32(0.5 * step)
                assert np.array_equal(stored.pop(f"w{number}"), expected)
            assert np.array_equal(stored.pop("whole"), np.arange(40, dtype=np.float32) + 0.5 * step)
            assert stored.keys() == {"rows"}
            if part_nbytes is None:
                assert uc.verify(root / name).ok
        assert not bucket.open_uploads()


def rows(low: int, high: int, whole: torch.Tensor = WHOLE) -> uc.Shards:
    return uc.Shards(
        whole[low:high].clone(), tuple(whole.shape), [((low, 0), (0, 0), (high - low, 12))]
    )


def save_each(
    root: Path, arguments: Sequence[Mapping[str, Any]], *, saves: int = 1
) -> list[uc.SaveReport | BaseException]:
    """Save on as many ranks as there are arguments."""

    def act(comm: Comm) -> uc.SaveReport:
        with make_checkpointer(comm) as checkpointer:
            for step in range(saves):
                given = {"options": SAVE, **arguments[comm.rank]}
                report = checkpointer.save(root / f"c{step}", **given)
        return report

    return try_ranks(len(arguments), act, timeout_seconds=60)


def models(*held: Any) -> list[dict[str, Any]]:
    return [{"model": {"w": each}} for each in held]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            models(rows(0, 3), rows(4, 8)),
            uc.LayoutError,
            r"model:w.* no rank declares \[3:4, 0:12\]",
        ),
        (
            models(rows(0, 0), rows(8, 8)),
            uc.LayoutError,
            r"no rank declares any of \[0:8, 0:12\]",
        ),
        (
            models(uc.Shards(ONE, (), []), uc.Shards(ONE, (), [])),
            uc.LayoutError,
            r"model:w, of shape \(\): no rank declares any of \[\.\.\.\]",
        ),
        (models(rows(0, 5), rows(4, 8)), uc.LayoutError, r"\[4:8, 0:12\] of rank\(s\) 1 overlap"),
        (
            models(rows(0, 4), WHOLE),
            uc.LayoutError,
            r"model:w: rank\(s\) 0 declare boxes, and rank\(s\) 1 a sharding",
        ),
        (
            models(rows(0, 4), rows(4, 8, WHOLE.double())),
            uc.MismatchError,
            r"model:w: got F32 \(8, 12\) on rank 0 and F64 \(8, 12\) on rank 1",
        ),
        (
            models(rows(0, 4), rows(4, 8), rows(4, 8, WHOLE + 1)),
            uc.LayoutError,
            r"model:w@4:8/8,0:12/12: rank\(s\) 1 differ from rank\(s\) 2",
        ),
    ],
    ids=["gap", "nothing", "no dims", "overlap", "rule", "dtype", "replicas"],
)
def test_wrong_declarations_are_refused(
    tmp_path: Path,
    arguments: list[dict[str, Any]],
    kind: type[uc.CheckpointError],
    text: str,
) -> None:
    same_error(save_each(tmp_path, arguments), kind, text)
    assert list(tmp_path.iterdir()) == []


def test_other_boxes_are_planned_again(tmp_path: Path) -> None:
    """With the same checkpointer."""

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for step, cut in enumerate((3, 5)):
                held = rows(0, cut) if comm.rank == 0 else rows(cut, 8)
                checkpointer.save(tmp_path / f"c{step}", model={"w": held}, options=SAVE)

    run_ranks(2, act)
    for step in (0, 1):
        stored = tensors_in(files_in(tmp_path / f"c{step}"))
        assert np.array_equal(stored["w"], WHOLE.numpy())


def trained(parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for number, name in enumerate(("exp_avg", "exp_avg_sq")):
        yield f"w/{name}", parameter.abs() / (number + 7)


@pytest.mark.parametrize("compression", ["none", "O2"])
def test_optimizer_state_and_masters_have_boxes(tmp_path: Path, compression: str) -> None:
    """Boxes are stored plain, and counted; masters of omitted models are compared box by box."""
    master = torch.linspace(-1, 1, 128 * 64).view(128, 64)
    state = dict(trained(master))

    def cut(tensor: torch.Tensor, rank: int) -> uc.Shards:
        return uc.Shards.flat(
            tensor.flatten()[(0, 100)[rank] : (100, None)[rank]].clone(),
            tuple(tensor.shape),
            (0, 100)[rank],
        )

    def save(comm: Comm, omitted: tuple[str, ...]) -> uc.SaveReport:
        options = SAVE.model_copy(update={"compression": compression, "omit": omitted})
        with make_checkpointer(comm) as checkpointer:
            return checkpointer.save(
                tmp_path / f"c{len(omitted)}",
                model={"w": cut(master.bfloat16(), comm.rank)},
                optimizer={name: cut(tensor, comm.rank) for name, tensor in state.items()}
                | {"w/step": torch.tensor(3.0)},
                master_weights={"w": cut(master, comm.rank)},
                options=options,
            )

    for omitted in ((), ("model",)):
        for report in run_ranks(2, partial(save, omitted=omitted)):
            assert report.plain_tensors == (0 if compression == "none" else 3 - len(omitted))
        files = files_in(tmp_path / f"c{len(omitted)}")
        stored = tensors_in(files, "optimizer")
        for name, tensor in state.items():
            assert np.array_equal(stored[name], tensor.numpy())
        assert np.array_equal(tensors_in(files, "master_weights")["w"], master.numpy())
        assert any(name.startswith("model") for name in files) == (not omitted)


def test_background_saves_store_the_state_at_the_call(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        held = rows(0, 3) if comm.rank == 0 else rows(3, 8)
        with make_checkpointer(comm) as checkpointer:
            pending = checkpointer.save_async(tmp_path / "c", model={"w": held}, options=SAVE)
            held.tensor.fill_(-1)
            pending.result(60)

    run_ranks(2, act)
    assert np.array_equal(tensors_in(files_in(tmp_path / "c"))["w"], WHOLE.numpy())


def test_ranks_without_boxes_take_part(tmp_path: Path) -> None:
    """Also rank 0, which plans. The files of boxes are named and recorded as others are."""
    nothing = copy.copy(rows(0, 0))
    arguments = models(nothing, rows(0, 8), nothing)
    for each in arguments:
        each["model"] |= {"rule": torch.zeros(3), "one": uc.Shards(ONE, (), [])}
        each["parts"] = {"ema": {"rule": torch.zeros(3)}}
    arguments[1]["model"]["one"] = uc.Shards(ONE, (), [((), (), ())])
    reports = save_each(tmp_path, arguments, saves=2)
    assert not [report for report in reports if isinstance(report, BaseException)]
    for step in (0, 1):
        files = files_in(tmp_path / f"c{step}")
        stored = tensors_in(files)
        assert np.array_equal(stored["w"], WHOLE.numpy())
        assert stored["rule"].shape == (3,)
        assert stored["one"].shape == ()
        assert stored["one"] == 1
        shardings = json.loads(files["unified_checkpoint.json"])["shardings"]
        assert shardings["parts"].keys() == {"ema"}, "the manifest has no lists of boxes"

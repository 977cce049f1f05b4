"""Public reports about state that is spread over ranks: who stores it, and who gets it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm.comm import Comm

UNSYNCED = uc.SaveOptions(fsync=False, timeout_seconds=30.0)
ROWS = torch.arange(48.0).reshape(12, 4)


def save_ranks(path: Path, world: int, arguments: Any, **options: Any) -> None:
    """Save on each rank what `arguments` returns for its number."""
    chosen = UNSYNCED.model_copy(update=options)
    run_ranks(
        world,
        lambda comm: make_checkpointer(comm).save(path, options=chosen, **arguments(comm.rank)),
    )


def tp(world: int, **rules: Any) -> uc.Layout:
    return uc.Layout({"tp": world}, {name: {"tp": rule} for name, rule in rules.items()})


def rows_of(rank: int, world: int) -> dict[str, Any]:
    return {
        "model": {"w": ROWS.chunk(world)[rank].clone()},
        "layout": tp(world, w=0) if world > 1 else None,
    }


@pytest.mark.incident("OpenTau#396")
def test_output_folders_named_by_the_clock(tmp_path: Path) -> None:
    """Rank 1 starts a second later, so its shard goes into another folder. No checkpoint of that
    run can be resumed.
    """

    def save(comm: Comm) -> None:
        path = tmp_path / f"run-12-00-{59 if comm.rank else 58}" / "c"
        make_checkpointer(comm).save(path, options=UNSYNCED, **rows_of(comm.rank, 3))

    same_error(try_ranks(3, save), uc.StorageError, "use one folder that all ranks see")
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.incident("nanochat#315")
def test_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    """Ranks that write before rank 0 has created the folder fail, at the end of the training."""
    path = tmp_path / "base" / "d32" / "checkpoint-1"
    save_ranks(path, 4, lambda rank: rows_of(rank, 4))
    assert torch.equal(load_file(path / "model.safetensors")["w"], ROWS)


@pytest.mark.incident("Automodel#3248")
def test_pipeline_stages_have_different_names(tmp_path: Path) -> None:
    """Stages disagree on the set of names, and the consolidation of one misses those of others."""
    stages = [{"embed.w": ROWS, "block.0": ROWS + 1}, {"block.1": ROWS + 2, "head.w": ROWS + 3}]
    save_ranks(tmp_path / "c", 2, lambda rank: {"model": stages[rank]})
    expected = stages[0] | stages[1]
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    uc.load(tmp_path / "c", model=target)
    assert all(torch.equal(target[name], value) for name, value in expected.items())


@pytest.mark.incident("pytorch#171885")
def test_index_of_files_that_all_ranks_wrote(tmp_path: Path) -> None:
    """DCP's consolidation on every rank wrote the files, but no index: nothing can be opened."""
    tensors = {f"layer.{n}": ROWS + n for n in range(4)}

    def arguments(rank: int) -> dict[str, Any]:
        model = {name: value.chunk(2)[rank].clone() for name, value in tensors.items()}
        return {"model": model, "layout": uc.Layout({"tp": 2}, {"*": {"tp": 0}})}

    save_ranks(tmp_path / "c", 2, arguments, max_file_bytes=400)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "c" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    assert index["weight_map"].keys() == tensors.keys()


@pytest.mark.incident("Automodel#301")
def test_scalars_in_the_merged_file(tmp_path: Path) -> None:
    """A tensor without dims is lost, or becomes 0, where shards are merged afterwards."""

    def arguments(rank: int) -> dict[str, Any]:
        both = rows_of(rank, 2)
        both["model"]["scale"] = torch.tensor(123.0)
        return both

    save_ranks(tmp_path / "c", 2, arguments)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert stored["scale"].shape == ()
    assert stored["scale"] == 123.0


@pytest.mark.incident("pytorch#192485")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_buffers_that_are_no_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    """DCP asks for the float properties of the dtype, after all shards have been written."""
    whole = (ROWS % 2).to(dtype)
    save_ranks(
        tmp_path / "c",
        2,
        lambda rank: {"model": {"w": whole.chunk(2)[rank].clone()}, "layout": tp(2, w=0)},
    )
    stored = load_file(tmp_path / "c" / "model.safetensors")["w"]
    assert stored.dtype == dtype
    assert torch.equal(stored, whole)


@pytest.mark.incident("nanotron#107")
def test_files_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """Names with the rank and the mesh can only be found again by the same mesh."""
    for world in (1, 3):
        save_ranks(tmp_path / f"{world}", world, lambda rank, world=world: rows_of(rank, world))
    one, three = (
        {path.name: path.read_bytes() for path in (tmp_path / world).glob("*.safetensors")}
        for world in ("1", "3")
    )
    assert one == three


@pytest.mark.incident("ROCm-Megatron-LM#63")
def test_halves_of_a_fused_weight_in_another_world(tmp_path: Path) -> None:
    """Each rank holds half of gate and half of up. Another number of ranks read the blocks in rank
    order: the loss rose from 2 to 10, without an error.
    """
    gate, up = ROWS, ROWS + 100
    fused = torch.cat([gate, up])

    def shard(rank: int, world: int) -> torch.Tensor:
        return torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]])

    rule = uc.Strided(0, 2)
    save_ranks(
        tmp_path / "c",
        4,
        lambda rank: {"model": {"fc1": shard(rank, 4)}, "layout": tp(4, fc1=rule)},
    )
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["fc1"], fused)
    targets = [torch.zeros_like(shard(rank, 2)) for rank in range(2)]
    run_ranks(
        2,
        lambda comm: make_checkpointer(comm).load(
            tmp_path / "c", model={"fc1": targets[comm.rank]}, layout=tp(2, fc1=rule)
        ),
    )
    for rank, target in enumerate(targets):
        assert torch.equal(target, shard(rank, 2))


@pytest.mark.incident("pytorch#108869")
def test_rank_without_rows(tmp_path: Path) -> None:
    """6 rows on 4 ranks are shards of 2, 2, 2 and 0 rows; the last rank could not load."""
    whole = torch.arange(6.0)
    shards = [*whole.chunk(3), whole[:0]]

    def arguments(rank: int, source: list[torch.Tensor]) -> dict[str, Any]:
        layout = uc.Layout({"tp": 4}, {"w": {"tp": 0}}, {"w": (6,)})
        return {"model": {"w": source[rank]}, "layout": layout}

    save_ranks(tmp_path / "c", 4, lambda rank: arguments(rank, [s.clone() for s in shards]))
    targets = [torch.zeros_like(shard) for shard in shards]
    run_ranks(
        4,
        lambda comm: make_checkpointer(comm).load(tmp_path / "c", **arguments(comm.rank, targets)),
    )
    assert all(map(torch.equal, targets, shards))


@pytest.mark.incident("pytorch#189945")
def test_last_rows_that_no_rank_holds(tmp_path: Path) -> None:
    """The shape is taken for the end of the last shard: the rest of the rows is cut off."""

    def save(comm: Comm) -> None:
        model = {} if comm.rank == 2 else {"w": ROWS.chunk(3)[comm.rank].clone()}
        make_checkpointer(comm).save(
            tmp_path / "c", model=model, layout=tp(3, w=0), options=UNSYNCED
        )

    same_error(try_ranks(3, save), uc.LayoutError, "model:w: no rank holds the shard at")
    assert not (tmp_path / "c").exists()


@pytest.mark.incident("miles-credit#414")
def test_average_of_local_shards(tmp_path: Path) -> None:
    """The average of a rank's own shard is a plain tensor: only that of rank 0 was stored."""

    def arguments(rank: int) -> dict[str, Any]:
        return rows_of(rank, 3) | {"parts": {"ema": {"w": ROWS.chunk(3)[rank] * 0.5}}}

    save_ranks(tmp_path / "c", 3, arguments)
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["ema"]["w"][...], ROWS * 0.5)


@pytest.mark.incident("Megatron-Bridge#3832")
def test_schedulers_differ_between_ranks(tmp_path: Path) -> None:
    """The encoder's ranks have a schedule of their own; all resumed with that of rank 0."""

    def build(rank: int, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5 if rank else 0.9)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler

    schedulers = [build(rank, 3)[1] for rank in range(2)]
    model = {"w": torch.ones(1)}
    save_ranks(tmp_path / "c", 2, lambda rank: {"model": model, "extra": {"lr": schedulers[rank]}})
    loaded = [build(rank, 0)[1] for rank in range(2)]
    run_ranks(
        2,
        lambda comm: make_checkpointer(comm).load(
            tmp_path / "c", model={"w": torch.zeros(1)}, extra={"lr": loaded[comm.rank]}
        ),
    )
    rates = [scheduler.get_last_lr() for scheduler in loaded]
    assert rates == [scheduler.get_last_lr() for scheduler in schedulers]
    assert rates[0] != rates[1]


@pytest.mark.incident("Megatron-LM#3510")
def test_ranks_without_optimizer_state(tmp_path: Path) -> None:
    """The last rank has no parameter, and so no optimizer state: saves hung, or state was lost."""

    def job(rank: int) -> dict[str, Any]:
        model = nn.Module()
        if rank < 2:
            model.register_parameter(f"w{rank}", nn.Parameter(ROWS.clone()))
        optimizer = torch.optim.AdamW([*model.parameters()] or [{"params": []}], lr=0.1)
        return {"model": model, "optimizer": optimizer}

    jobs = [job(rank) for rank in range(3)]
    for each in jobs:
        for param in each["model"].parameters():
            param.grad = torch.ones_like(param)
        each["optimizer"].step()
    save_ranks(tmp_path / "c", 3, lambda rank: jobs[rank])
    others = [job(rank) for rank in range(3)]
    run_ranks(3, lambda comm: make_checkpointer(comm).load(tmp_path / "c", **others[comm.rank]))
    for saved, loaded in zip(jobs, others, strict=True):
        states = [list(each["optimizer"].state.values()) for each in (saved, loaded)]
        for expected, actual in zip(*states, strict=True):
            assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.incident("DeepSpeed#2898")
def test_optimizer_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Partitions of the optimizer are bound to the number of ranks that wrote them."""
    moments = {"w/exp_avg": ROWS * 2, "w/exp_avg_sq": ROWS * 3}

    def arguments(rank: int, world: int, source: dict[str, torch.Tensor]) -> dict[str, Any]:
        cut = {name: value.chunk(world)[rank].clone() for name, value in source.items()}
        return rows_of(rank, world) | {"optimizer": cut}

    save_ranks(tmp_path / "c", 4, lambda rank: arguments(rank, 4, moments))
    zeros = {name: torch.zeros_like(value) for name, value in moments.items()}
    targets = [arguments(rank, 3, zeros) for rank in range(3)]
    run_ranks(3, lambda comm: make_checkpointer(comm).load(tmp_path / "c", **targets[comm.rank]))
    for name, whole in moments.items():
        assert torch.equal(torch.cat([target["optimizer"][name] for target in targets]), whole)


@pytest.mark.incident("Megatron-LM#1517")
def test_pipeline_stages_become_ranks_of_experts(tmp_path: Path) -> None:
    """A checkpoint of 4 pipeline stages, loaded by 4 expert-parallel ranks, was refused: the
    optimizer state was sharded in another way.
    """
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(4)]

    def held(rank: int, *, pipeline: bool) -> dict[str, Any]:
        chosen = [name for name in names if int(name.split(".")[1 if pipeline else 3]) % 2 == rank]
        return {
            "model": {name: ROWS + names.index(name) for name in chosen},
            "optimizer": {f"{name}/exp_avg": ROWS - names.index(name) for name in chosen},
        }

    save_ranks(tmp_path / "c", 2, lambda rank: held(rank, pipeline=True))
    expected = [held(rank, pipeline=False) for rank in range(2)]
    targets = [
        {part: {name: torch.zeros_like(t) for name, t in tree.items()} for part, tree in e.items()}
        for e in expected
    ]
    run_ranks(2, lambda comm: make_checkpointer(comm).load(tmp_path / "c", **targets[comm.rank]))
    for want, target in zip(expected, targets, strict=True):
        for part, tree in want.items():
            assert all(torch.equal(target[part][name], value) for name, value in tree.items())

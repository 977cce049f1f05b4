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
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.torch_training import train_step

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
        train_step(each["optimizer"])
    save_ranks(tmp_path / "c", 3, lambda rank: jobs[rank])
    others = [job(rank) for rank in range(3)]
    run_ranks(3, lambda comm: make_checkpointer(comm).load(tmp_path / "c", **others[comm.rank]))
    for saved, loaded in zip(jobs, others, strict=True):
        states = [list(each["optimizer"].state.values()) for each in (saved, loaded)]
        for expected, actual in zip(*states, strict=True):
            assert all(torch.equal(actual[name], value) for name, value in expected.items())


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

"""Situations of public reports about DCP's calls. DCP fails in some of them, by its design."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler

from tests.support.dcp_cases.models import fsdp2, hsdp2, job, plain, put, state_of
from tests.support.dcp_cases.optimizers import step
from tests.support.dcp_cases.table import Run, case, check, clear, fill, raises


@case("pytorch#125528, pytorch#138575")
def values_of_a_loop(run: Run) -> None:
    """The epoch and arguments beside modules are replaced; the loop keeps its objects."""
    folder, (model, optimizer) = run.folder(), job(plain)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "epoch": 0, "args": {"lr": 0.5}}
    for epoch in range(2):
        state["epoch"] = epoch + 1
        step(model, optimizer, epoch)
        run.dcp.save(state, checkpoint_id=folder)
    weight = model.tail.weight.detach().clone()
    model, optimizer = job(plain, lr=0.9)
    step(model, optimizer, 0)
    state = {"model": model, "optim": optimizer, "epoch": 0, "args": {"lr": 0.0}}
    run.dcp.load(state, checkpoint_id=folder)
    assert state["model"] is model
    assert state["optim"] is optimizer
    assert (state["epoch"], state["args"]) == (2, {"lr": 0.5})
    assert torch.equal(model.tail.weight.detach(), weight)
    assert optimizer.state[model.tail.weight]["step"] == 2


@case("accelerate#3971")
def optimizers_by_numbers(run: Run) -> None:
    """`optimizer.state_dict()` of FSDP2: parameters have numbers, a new optimizer has no state."""
    folder, (model, optimizer) = run.folder(), job(fsdp2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run.dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    model, optimizer = job(fsdp2, lr=0.9)
    state = {"optimizer": optimizer.state_dict()}
    run.dcp.load(state, checkpoint_id=folder)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    run.dcp.load(state, checkpoint_id=folder)
    optimizer.load_state_dict(state["optimizer"])
    assert all(values["exp_avg"].full_tensor().all() for values in optimizer.state.values())


@case("verl#7283, pytorch#192224")
def parameters_without_a_gradient(run: Run) -> None:
    """Their state is not stored. A load wants it, unless it is partial."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    folder, saved = run.folder(), state_of(*job(fsdp2), options)
    saved["optim"] = {k: v for k, v in saved["optim"].items() if not k.startswith("state.tail")}
    run.dcp.save(fill(saved), checkpoint_id=folder)
    model, optimizer = job(fsdp2, lr=0.9)
    state = clear(state_of(model, optimizer, options))
    with raises("state.tail"):
        run.dcp.load(state, checkpoint_id=folder)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    run.dcp.load(state, checkpoint_id=folder, planner=planner)
    put(state, model, optimizer, options)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state[model.tail.weight]["exp_avg"].full_tensor().any()
    assert optimizer.state[model.even.weight]["exp_avg"].full_tensor().any()


@case("pytorch#120356, torchtitan#279", not_dcp="it keeps the values of one rank")
def positions_of_each_rank(run: Run) -> None:
    """What ranks hold under one key goes back to them, in dicts, lists and tensors."""

    def loader(rank: int) -> dict[str, Any]:
        return {
            "position": rank,
            "workers": {f"worker{number}": {"n": number} for number in range(rank)},
            "queue": [{"tokens": torch.full((rank + 1,), rank)} for _ in range(rank)],
            "buffer": torch.full((rank,), rank),
            "generator": torch.get_rng_state() + rank,
        }

    folder, state = run.folder(), {"loader": clear(loader(run.rank)) | {"position": -1}}
    run.dcp.save({"loader": loader(run.rank)}, checkpoint_id=folder)
    run.dcp.load(state, checkpoint_id=folder)
    loaded, expected = state["loader"], loader(run.rank)
    for key in ("position", "workers"):
        assert loaded[key] == expected[key], key
    for key in ("buffer", "generator"):
        assert torch.equal(loaded[key], expected[key]), key
    assert len(loaded["queue"]) == run.rank
    assert all((item["tokens"] == run.rank).all() for item in loaded["queue"])


@case("torchdata#1372")
def lists_of_other_lengths(run: Run) -> None:
    """A list is empty on one rank, and holds tensors on the others."""

    def state(number: int) -> dict[str, Any]:
        queue = [{"tokens": torch.full((2,), number)}] if run.rank else []
        return {"loader": {"queue": queue, "position": number}}

    folder, loaded = run.folder(), state(0)
    run.dcp.save(state(5), checkpoint_id=folder)
    run.dcp.load(loaded, checkpoint_id=folder)
    assert loaded["loader"]["position"] == 5
    assert all((item["tokens"] == 5).all() for item in loaded["loader"]["queue"])


@case("KempnerForge#104", not_dcp="its thread uses the group too, and hangs")
def collectives_during_background_saves(run: Run) -> None:
    """The main thread uses the group of the save."""
    group = dist.new_group(list(range(run.world)))
    for number in range(4):
        folder, state = run.folder(), {"w": torch.full((100_000,), float(number))}
        future = run.dcp.async_save(state, checkpoint_id=folder, process_group=group)
        for _ in range(10):
            dist.barrier(group=group)
            dist.all_reduce(torch.ones(1000), group=group)
        future.result(60)
        run.dcp.load(clear(state), checkpoint_id=folder)
        assert (state["w"] == number).all()


@case("torchtitan#930", not_dcp="a load does not wait for the save")
def loads_right_after_background_saves(run: Run) -> None:
    folder, state = run.folder(), fill({"w": torch.empty(100_000)})
    future = run.dcp.async_save(state, checkpoint_id=folder)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)
    future.result(60)


@case("pytorch#152310")
def one_replica_saves(run: Run) -> None:
    """The ranks of the first replica of HSDP save, in a group of their own."""
    folder, half = run.folder(), list(range(run.world // 2))
    group = dist.new_group(half)
    state = {"model": get_model_state_dict(job(hsdp2)[0])}
    if run.rank in half:
        run.dcp.save(fill(state), checkpoint_id=folder, process_group=group)
    dist.barrier()
    state = clear({"model": get_model_state_dict(job(fsdp2)[0])})
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


@case("pytorch#144109", not_dcp="it stores a folder that cannot be loaded")
def local_tensors_of_other_sizes(run: Run) -> None:
    """`DTensor.from_local` takes rows that its placements do not give: an error of the save."""
    mesh, rows = init_device_mesh("cpu", (run.world,)), [5, 1, 4, 2][run.rank % 4]
    local = torch.zeros(rows, 2)
    sizes = {"shape": torch.Size([12, 2]), "stride": (2, 1)}
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **sizes)
    folder = run.folder()
    with raises("w: got a local tensor of shape"):
        run.dcp.save({"w": tensor}, checkpoint_id=folder)
    assert not folder.exists()


@case("pytorch#125877")
def folders_that_torch_wrote(run: Run) -> None:
    """The import changes, and the path stays: the newest save counts."""
    folder = run.folder()
    checkpoint.save({"w": torch.zeros(4), "n": 1}, checkpoint_id=folder)
    run.dcp.save(fill({"w": torch.empty(4)}) | {"n": 2}, checkpoint_id=folder)
    loaded = {"w": torch.zeros(4), "n": 0}
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert loaded["n"] == 2


@case("VeOmni#1181")
def folders_in_folders(run: Run) -> None:
    """A checkpoint in the folder of another one, with a file of the user's beside."""
    folder = run.folder()
    if run.rank == 0:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    dist.barrier()
    places = [folder, folder / "optim"]
    for number in range(3):
        for place in reversed(places) if number else places:
            run.dcp.save({"w": torch.full((3,), float(number)), "n": number}, checkpoint_id=place)
        for place in places:
            state = {"w": torch.zeros(3), "n": -1}
            run.dcp.load(state, checkpoint_id=place)
            assert (state["w"] == number).all()
            assert state["n"] == number
    assert (folder / "config.json").exists()


@case("VeOmni#1164")
def paths_of_other_forms(run: Run) -> None:
    """Relative paths, a slash at the end, links and blanks."""
    base, before = run.folder(), Path.cwd()
    if run.rank == 0:
        (base / "linked").mkdir(parents=True)
        (base / "link").symlink_to(base / "linked")
    dist.barrier()
    os.chdir(base)
    try:
        for path in (f"{base}/x/", "relative", "deep/er/", base / "link", base / "link/in", "ä ü"):
            run.dcp.save(fill({"w": torch.empty(3)}), checkpoint_id=path)
            loaded = {"w": torch.zeros(3)}
            run.dcp.load(loaded, checkpoint_id=path)
            check(loaded)
        dist.barrier()
        assert (base / "link").is_symlink()
        assert len(list((base / "linked").iterdir())) > 1
    finally:
        os.chdir(before)


@case("pytorch#140900")
def schedulers(run: Run) -> None:
    """Their state has counters, lists of dicts and functions' places."""

    def make() -> dict[str, Any]:
        optimizers = [job(plain)[1] for _ in range(5)]
        warm = lr_scheduler.ConstantLR(optimizers[2])
        decay = lr_scheduler.ExponentialLR(optimizers[2], 0.9)
        return {
            "milestones": lr_scheduler.MultiStepLR(optimizers[0], [1, 3]),
            "function": lr_scheduler.LambdaLR(optimizers[1], lambda number: 0.9**number),
            "sequence": lr_scheduler.SequentialLR(optimizers[2], [warm, decay], [2]),
            "cycle": lr_scheduler.OneCycleLR(optimizers[3], 0.3, 10),
            "plateau": lr_scheduler.ReduceLROnPlateau(optimizers[4]),
        }

    folder, saved, loaded = run.folder(), make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an optimizer that has made no step
        for name, scheduler in saved.items():
            scheduler.step(*[1.0] * (name == "plateau"))
    run.dcp.save(saved, checkpoint_id=folder)
    run.dcp.load(loaded, checkpoint_id=folder)
    for name, scheduler in loaded.items():
        got, expected = scheduler.state_dict(), saved[name].state_dict()
        if not run.is_ours:  # DCP adds "3" beside 3
            got.pop("milestones", None)
            expected.pop("milestones", None)
        assert got == expected, name

"""Saves in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.dcp_cases.table import Run, case, check, clear, fill

E2E, STAGER = "e2e/test_e2e_save_and_load (async)", "test_state_dict_stager"


def state_of(run: Run) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (run.world,))
    sharded = distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)], src_data_rank=None)
    return {"a": torch.zeros(50), "b": {"c": sharded, "d": [torch.zeros(2), "x"]}, "n": 3}


@case(E2E, thin=True)
def state_at_the_call(run: Run) -> None:
    """The state is that of the call, although training goes on."""
    folder, state = run.folder(), fill(state_of(run))
    future = run.dcp.async_save(state, checkpoint_id=folder)
    assert isinstance(future, Future)
    clear(state)
    state["n"] = 4
    state["b"]["d"][1] = "y"
    future.result(60)
    assert future.done()
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    assert (state["n"], state["b"]["d"][1]) == (3, "x")


@case(E2E)
def callbacks_of_futures(run: Run) -> None:
    """A callback runs when the folder is complete; `result` and `exception` agree."""
    folder, seen, called = run.folder(), [], threading.Event()

    def after(future: Any) -> None:
        seen.append((future.done(), future.exception()))
        called.set()

    future = run.dcp.async_save(fill(state_of(run)), checkpoint_id=folder)
    future.add_done_callback(after)
    assert called.wait(60)
    assert seen == [(True, None)]
    assert future.exception() is None
    state = state_of(run)
    run.dcp.load(state, checkpoint_id=folder)
    check(state)


def save_several(run: Run, *groups: Any) -> None:
    futures = []
    for number, group in enumerate(groups):
        state = {"w": torch.full((1000,), float(number)), "n": number}
        folder = run.folder()
        futures.append(
            (folder, run.dcp.async_save(state, checkpoint_id=folder, process_group=group))
        )
    for number, (folder, future) in enumerate(futures):
        future.result(60)
        state = {"w": torch.zeros(1000), "n": -1}
        run.dcp.load(state, checkpoint_id=folder)
        assert (state["w"] == number).all()
        assert state["n"] == number


@case(E2E)
def several_in_flight(run: Run) -> None:
    """A second save begins before the first has ended, each in a group of its own."""
    save_several(run, *(dist.new_group(list(range(run.world))) for _ in range(3)))


@case(E2E, not_dcp="saves of one group exchange each other's plans, and hang")
def several_in_flight_in_one_group(run: Run) -> None:
    save_several(run, *[dist.new_group(list(range(run.world)))] * 3)


@case(E2E)
def writers_and_planners(run: Run) -> None:
    folder, state = run.folder(), fill(state_of(run))
    writer = FileSystemWriter(folder, thread_count=2, sync_files=False)
    future = run.dcp.async_save(state, storage_writer=writer, planner=DefaultSavePlanner())
    future.result(60)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)


@case(STAGER)
def reused_states(run: Run) -> None:
    """One state is saved again and again, with other values; tensors share memory."""
    table = torch.zeros(4, 6)
    state = {"table": table, "row": table[1], "rest": table[2:]}
    for number in range(3):
        folder = run.folder()
        table.fill_(number + 1)
        table[1] = 10.0 * (number + 1)
        run.dcp.async_save(state, checkpoint_id=folder).result(60)
        loaded = {"table": torch.zeros(4, 6), "row": torch.zeros(6), "rest": torch.zeros(2, 6)}
        run.dcp.load(loaded, checkpoint_id=folder)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@case(f"{E2E}, {STAGER}")
def stagers(run: Run) -> None:
    """With a stager, or a process of its own: a response of two futures."""
    options = StagingOptions(False, False, False, False)
    folder, state = run.folder(), fill(state_of(run))
    response = run.dcp.async_save(state, checkpoint_id=folder, async_stager=DefaultStager(options))
    futures = [response]
    if isinstance(response, AsyncSaveResponse):
        futures = [response.staging_completion, response.upload_completion]
    for future in futures:
        future.result(60)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)


@case(E2E, not_dcp="each rank starts a process that imports torch, for 20 s")
def processes(run: Run) -> None:
    """`AsyncCheckpointerType.PROCESS` gives a future, or a response of two."""
    folder, state = run.folder(), fill({"w": torch.zeros(20), "n": 1})
    response = run.dcp.async_save(
        *(state,),
        checkpoint_id=folder,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=DefaultStager(StagingOptions(False, True, False, False)),
    )
    upload = getattr(response, "upload_completion", response)
    upload.result(100)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)


@case("test_async_process_executor (failures)", thin=True)
def failures_reach_the_future(run: Run) -> None:
    """A failed save raises from its future, on each rank, and the next one succeeds."""
    folder, state = run.folder(), fill(state_of(run))
    run.dcp.save(state, checkpoint_id=folder)
    failed = False
    try:
        writer = FileSystemWriter(folder, overwrite=False)
        future = run.dcp.async_save(state, storage_writer=writer)
        assert future.exception(60) is not None
        future.result(60)
    except run.dcp.CheckpointException as error:
        failed = "exist" in str(error).lower()
    assert failed
    other = run.folder()
    run.dcp.async_save(state, checkpoint_id=other).result(60)
    run.dcp.load(clear(state), checkpoint_id=other)
    check(state)


@case(E2E)
def saves_without_a_group(run: Run) -> None:
    """`no_dist=True`: each rank saves a folder of its own in the background."""
    folder, state = f"{run.folder()}-{run.rank}", {"w": torch.full((5,), float(run.rank))}
    run.dcp.async_save(state, checkpoint_id=folder, no_dist=True).result(60)
    loaded = {"w": torch.zeros(5)}
    run.dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert (loaded["w"] == run.rank).all()
    dist.barrier()


@case(f"{E2E} (no CPU backend)")
def objects_that_change_later(run: Run) -> None:
    """`state_dict` of a Stateful object is called before `async_save` returns."""

    class Position:
        value = 3

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    folder, position = run.folder(), Position()
    future = run.dcp.async_save({"position": position}, checkpoint_id=folder)
    position.value = 4
    future.result(60)
    run.dcp.load({"position": position}, checkpoint_id=folder)
    assert position.value == 3

"""Arguments of calls: paths, planners, groups; Stateful objects, and what is an error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.stateful import Stateful

from tests.support.dcp_cases.table import Run, case, check, clear, fill, raises

CPU = "test_file_system_checkpoint_cpu"
E2E = "e2e/test_e2e_save_and_load"
PLANNER = "test_planner"
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def layers() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 1), "c": nn.EmbeddingBag(5, 10)})


@case(CPU, thin=True)
def modules_of_this_process(run: Run) -> None:
    """`no_dist=True` in a group: each rank saves and loads a folder of its own."""
    for threads in (1, 2):
        folder, state = f"{run.folder()}-{run.rank}", fill(layers().state_dict())
        state["rank"] = torch.tensor(run.rank)
        writer = FileSystemWriter(folder, thread_count=threads)
        run.dcp.save_state_dict(state, storage_writer=writer, no_dist=True)
        loaded = {**layers().state_dict(), "rank": torch.tensor(-1)}
        run.dcp.load_state_dict(loaded, storage_reader=FileSystemReader(folder), no_dist=True)
        assert loaded.pop("rank") == run.rank
        check(loaded)


@case(CPU)
def deprecated_calls_take_positions(run: Run) -> None:
    folder, state = run.folder(), {"w": torch.empty(3)}
    run.dcp.save_state_dict(fill(state), FileSystemWriter(folder), None, 0, False, None)
    run.dcp.load_state_dict(clear(state), FileSystemReader(folder), None, 0, False, None)
    check(state)


@case(f"{PLANNER} (flatten_state_dict)")
def states_that_stay_nested(run: Run) -> None:
    folder, state = run.folder(), {"a": torch.empty(2), "b": {"c": [1]}}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    run.dcp.save(fill(state), checkpoint_id=folder, planner=planner)
    loaded = {"a": torch.zeros(2), "b": {}}
    load_planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    run.dcp.load(loaded, checkpoint_id=folder, planner=load_planner)
    assert loaded["b"] == {"c": [1]}
    check(loaded)


@case(f"{PLANNER} (strict)", thin=True)
def missing_keys_are_errors(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({"module": nn.Linear(2, 2), "n": 1}, checkpoint_id=folder)
    larger = nn.Linear(2, 2)
    larger.extra = nn.Parameter(torch.ones(2))
    before = {name: tensor.clone() for name, tensor in larger.state_dict().items()}
    with raises("missing"):
        run.dcp.load({"module": larger}, checkpoint_id=folder)
    if run.is_ours:  # DCP says the same, but not always before it reads
        assert all(torch.equal(before[name], now) for name, now in larger.state_dict().items())
    with raises("m"):
        run.dcp.load({"n": 0, "m": 0}, checkpoint_id=folder)


@case(f"{PLANNER} (strict)", thin=True)
def partial_loads_keep_the_rest(run: Run) -> None:
    folder, saved = run.folder(), nn.Linear(2, 2)
    run.dcp.save({"module": saved, "n": 1}, checkpoint_id=folder)
    larger = nn.Linear(2, 2)
    larger.extra = nn.Parameter(torch.full((2,), 5.0))
    state = {"module": larger, "n": 0, "m": 3}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    run.dcp.load(state, checkpoint_id=folder, planner=planner)
    assert torch.equal(larger.extra, torch.full((2,), 5.0))
    assert run.world > 1 or torch.equal(larger.weight, saved.weight)
    assert (state["n"], state["m"]) == (1, 3)


@case(f"{PLANNER} (different sizes)", thin=True)
def other_sizes_are_errors(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({"module": nn.Linear(2, 2)}, checkpoint_id=folder)
    with raises("module.weight"):
        run.dcp.load({"module": nn.Linear(3, 2)}, checkpoint_id=folder)
    with raises("module.weight"):  # as many elements, and another shape
        run.dcp.load({"module": {"weight": torch.zeros(4)}}, checkpoint_id=folder)


@case(f"{E2E} (partial load)", thin=True)
def surplus_keys_are_ignored(run: Run) -> None:
    folder = run.folder()
    run.dcp.save(
        fill({"a": torch.empty(3), "b": {"c": torch.empty(2)}, "d": 1}), checkpoint_id=folder
    )
    loaded = {"b": {"c": torch.zeros(2)}}
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert loaded.keys() == {"b"}


@case(f"{E2E} (no_dist)")
def nothing_at_all(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({}, checkpoint_id=folder)
    run.dcp.load({}, checkpoint_id=folder)


@case("e2e/test_fine_tuning")
def folders_that_are_absent(run: Run) -> None:
    with raises():
        run.dcp.load({"w": torch.zeros(1)}, checkpoint_id=run.folder())


class Counter:
    """Counts its calls."""

    def __init__(self, value: int) -> None:
        self.value, self.saves, self.loads = torch.tensor(value), 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        return {"value": self.value.clone(), "blob": b"x" * int(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        assert state["blob"] == b"x" * int(state["value"])
        self.value = state["value"]


@case(f"{E2E}, {CPU} (blobs)", thin=True)
def stateful_objects(run: Run) -> None:
    folder, saved, loaded = run.folder(), Counter(3), Counter(0)
    run.dcp.save({"counter": saved}, checkpoint_id=folder)
    assert saved.saves == 1
    state = {"counter": loaded}
    run.dcp.load(state, checkpoint_id=folder)
    assert state["counter"] is loaded
    assert (loaded.value, loaded.loads) == (3, 1)


class Noticing(dict):
    """A dict that notices assignments."""

    is_set = False

    def __setitem__(self, key: Any, value: Any) -> None:
        self.is_set = True
        super().__setitem__(key, value)


class Empty(Stateful):
    """State without a key."""

    loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {}
        self.loads += 1


@case(E2E, thin=True)
def loads_replace_what_is_not_stateful(run: Run) -> None:
    folder, empty, state = run.folder(), Empty(), Noticing()
    state.update(foo=empty)
    run.dcp.save(state, checkpoint_id=folder)
    run.dcp.load(state, checkpoint_id=folder)
    assert empty.loads == 1
    assert not state.is_set
    state.update(foo={"tensor": torch.ones(3), "list": [1, 2]})
    run.dcp.save(state, checkpoint_id=folder)
    run.dcp.load(state, checkpoint_id=folder)
    assert state.is_set


class Collective:
    """Its `load_state_dict` is a collective call."""

    def __init__(self, call: str) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        numbers = torch.arange(2) + dist.get_rank()
        if self.call == "gather":
            dist.all_gather(
                [torch.zeros_like(numbers) for _ in range(dist.get_world_size())], numbers
            )
        else:
            dist.all_reduce(numbers)


@case(f"{E2E} (different order)", thin=True)
def keys_in_another_order_on_each_rank(run: Run) -> None:
    """Objects whose `load_state_dict` is collective are called in one order."""
    state = {"A": Collective("gather"), "B": Collective("reduce")}
    state = dict(sorted(state.items(), reverse=run.rank > 0))
    folder = run.folder()
    run.dcp.save(state, checkpoint_id=folder)
    run.dcp.load(state, checkpoint_id=folder)


@case(f"{E2E} (overwrite), test_fsspec", thin=True)
def folders_that_exist(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({"w": torch.zeros(10), "old": 1}, checkpoint_id=folder)
    run.dcp.save(fill({"w": torch.empty(10)}), storage_writer=FileSystemWriter(folder))
    state = {"w": torch.zeros(10)}
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    with raises("exist"):
        run.dcp.save(
            {"w": torch.zeros(10)}, storage_writer=FileSystemWriter(folder, overwrite=False)
        )
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)
    writer = FileSystemWriter(run.folder(), overwrite=False)
    run.dcp.save(state, storage_writer=writer)
    with raises():
        run.dcp.load({"old": 0}, checkpoint_id=folder)


@case("test_save_load_api")
def paths_in_three_forms(run: Run) -> None:
    state = fill({"w": torch.empty(4)})
    for number, as_path in enumerate((str, lambda path: path)):
        folder = as_path(run.folder())
        if number:
            run.dcp.save(state, checkpoint_id=folder)
        else:
            run.dcp.save(state, storage_writer=FileSystemWriter(folder))
        for reader in (None, FileSystemReader(folder)):
            place = {"checkpoint_id": folder} if reader is None else {"storage_reader": reader}
            run.dcp.load(clear(state), **place)
            check(state)


@case("test_save_load_api")
def storages_take_another_path(run: Run) -> None:
    """`checkpoint_id` decides; a writer and a reader serve several paths."""
    first, second, state = run.folder(), run.folder(), {"w": torch.empty(4)}
    writer, reader = FileSystemWriter(first), FileSystemReader(first)
    run.dcp.save({"w": torch.zeros(4)}, storage_writer=writer)
    run.dcp.save(fill(state), storage_writer=writer, checkpoint_id=second)
    run.dcp.load(clear(state), storage_reader=reader, checkpoint_id=second)
    check(state)
    run.dcp.load(state, storage_reader=FileSystemReader(first))
    assert not state["w"].any()


@case("test_save_load_api")
def paths_of_unknown_schemes(run: Run) -> None:
    for call in (run.dcp.save, run.dcp.load):
        with raises("", RuntimeError, ValueError, NotImplementedError, BaseException):
            call({"w": torch.zeros(1)}, checkpoint_id="abc://abc.abc")


@case("test_file_system_checkpoint")
def options_of_the_writer(run: Run) -> None:
    for options in (
        {"single_file_per_rank": False},
        {"sync_files": False},
        {"thread_count": 3, "per_thread_copy_ahead": 0},
    ):
        folder, state = run.folder(), {f"w{i}": torch.empty(5) for i in range(4)}
        run.dcp.save(fill(state), storage_writer=FileSystemWriter(folder, **options))
        run.dcp.load(clear(state), storage_reader=FileSystemReader(folder))
        check(state)


@case(f"{PLANNER} (cached plans), test_dedup_tensors")
def options_of_the_planner(run: Run) -> None:
    """Plans are kept between saves, and values and keys change."""
    for options in ({"dedup_save_to_lowest_rank": True}, {"enable_plan_caching": True}):
        for number in range(4):
            folder, keys = run.folder(), ["a", "b"] if number < 2 else ["b", "c", "d"]
            state = {key: torch.full((4, 2), float(number)) for key in keys} | {"n": number}
            planner = DefaultSavePlanner(**options)
            run.dcp.save(state, checkpoint_id=folder, planner=planner)
            loaded = {key: torch.zeros(4, 2) for key in keys} | {"n": -1}
            run.dcp.load(loaded, checkpoint_id=folder, planner=DefaultLoadPlanner())
            assert all(torch.equal(loaded[key], state[key]) for key in keys)
            assert loaded["n"] == number


@case(PLANNER, thin=True)
def process_groups(run: Run) -> None:
    """Two ranks of four save and load; another number of ranks loads."""
    members = [1, 3] if run.world == 4 else list(range(run.world))
    group, folder = dist.new_group(members), run.folder()
    state = {"common": torch.empty(3), f"rank{run.rank}": torch.empty(2), "n": 5}
    if run.rank in members:
        run.dcp.save(fill(state), checkpoint_id=folder, process_group=group)
        run.dcp.load(clear(state), checkpoint_id=folder, process_group=group)
        check(state)
    dist.barrier()
    loaded = {"common": torch.zeros(3), **{f"rank{r}": torch.zeros(2) for r in members}, "n": 0}
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert loaded["n"] == 5
    run.dcp.load(clear(loaded), checkpoint_id=folder, no_dist=True)
    check(loaded)


@case(f"{E2E} (init state dict)", thin=True)
def loads_are_in_place(run: Run) -> None:
    """Dicts and tensors of the caller are filled, not replaced."""
    folder, state = run.folder(), {"a": {"b": torch.empty(3)}, "c": [torch.empty(2)]}
    run.dcp.save(fill(state), checkpoint_id=folder)
    inner, tensor, items = state["a"], state["a"]["b"], state["c"]
    run.dcp.load(clear(state), checkpoint_id=folder)
    assert state["a"] is inner
    assert state["a"]["b"] is tensor
    assert state["c"][0] is items[0]
    check(state)


class Failing(Counter):
    """Raises on the last rank."""

    def __init__(self, run: Run) -> None:
        super().__init__(1)
        self.is_last = run.rank == run.world - 1

    def state_dict(self) -> dict[str, Any]:
        if self.is_last:
            raise ValueError("no state")
        return super().state_dict()


@case("test_checkpoint (failures)", thin=True, not_dcp="the other ranks wait for the last one")
def failures_of_one_rank(run: Run) -> None:
    """All ranks raise one error, which names the rank; the next call succeeds."""
    folder = run.folder()
    for call in (run.dcp.save, run.dcp.async_save):
        with raises("no state") as caught:
            future = call({"s": Failing(run)}, checkpoint_id=folder)
            future.result(60)  # of a background save
        failures = caught[0].failures
        assert failures.keys() == {run.world - 1}
        assert isinstance(failures[run.world - 1][0], Exception)
    assert not folder.exists()
    run.dcp.save({"s": Counter(1)}, checkpoint_id=folder)


@case("test_checkpoint (failures)")
def failures_have_ranks(run: Run) -> None:
    """One rank's state does not fit: all ranks raise, and keep their own state."""
    folder, state = run.folder(), {"w": torch.zeros(4 if run.rank else 3)}
    run.dcp.save({"w": torch.ones(4)}, checkpoint_id=folder)
    with raises("w") as caught:
        run.dcp.load(state, checkpoint_id=folder)
    failures = caught[0].failures
    assert failures.keys() <= set(range(run.world))
    assert all(isinstance(failure[0], Exception) for failure in failures.values())
    assert not state["w"].any()

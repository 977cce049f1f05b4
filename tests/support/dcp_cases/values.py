"""Values, nested state, Stateful objects, errors, planners, paths and groups."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.dcp_cases.table import Run, case, check, fill

CPU = "test_file_system_checkpoint_cpu"
E2E = "e2e/test_e2e_save_and_load"
PLANNER = "test_planner"
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


@case(CPU)
def lists_and_strings(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({"a": [1], "b": "text"}, checkpoint_id=folder)
    state = {"a": [2], "b": "other"}
    run.dcp.load(state, checkpoint_id=folder)
    assert state == {"a": [1], "b": "text"}


@case(f"{CPU}, test_list_stored_state_dict, {E2E}")
def bytes_and_streams(run: Run) -> None:
    folder = run.folder()
    run.dcp.save({"bytes": b"a\0b", "stream": io.BytesIO(b"c\0d")}, checkpoint_id=folder)
    state = {"bytes": b"", "stream": io.BytesIO()}
    run.dcp.load(state, checkpoint_id=folder)
    assert state["bytes"] == b"a\0b"
    assert isinstance(state["stream"], io.BytesIO)
    state["stream"].seek(0)
    assert state["stream"].read() == b"c\0d"


@case(CPU)
def plain_values(run: Run) -> None:
    saved = {
        "numbers": {"true": True, "int": -(2**70), "float": 0.1, "inf": float("inf")},
        "none": None,
        "text": "ä\0",
        "empty": [],
        "tuple": (1, (2, "x"), None),
        "mixed": [1, [2.5, None]],
        "nested": {"lr": 1e-3, "betas": (0.9, 0.999), "deep": {"on": False}},
    }
    folder = run.folder()
    run.dcp.save(saved, checkpoint_id=folder)
    loaded = {key: None for key in saved if not isinstance(saved[key], dict)}
    loaded |= {"numbers": dict.fromkeys(saved["numbers"])}
    loaded |= {"nested": {"lr": 0.0, "betas": (), "deep": {"on": True}}}
    run.dcp.load(loaded, checkpoint_id=folder)
    assert loaded == saved
    assert isinstance(loaded["tuple"], tuple)
    assert isinstance(loaded["nested"]["betas"], tuple)


def nested(number: int, text: str) -> dict[str, Any]:
    return {
        "a": number,
        "b": [number, 2],
        "c": {1: number, 2: 3},
        "d": torch.empty(1),
        "e": [[torch.empty(()), text], [1, number, 3], {"f": [number]}],
        "g": [torch.empty(1), number, [{"h": torch.empty(2)}]],
        "i": [{"j": {"k": torch.empty(1)}}],
    }


@case("test_nested_dict, test_traverse", thin=True)
def nested_lists_and_dicts(run: Run) -> None:
    folder = run.folder()
    run.dcp.save(fill(nested(7, "x")), checkpoint_id=folder)
    loaded = nested(0, "")
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert loaded["a"] == 7
    assert loaded["b"] == [7, 2]
    by_number = {int(key): value for key, value in loaded["c"].items()}  # DCP adds "1" to 1
    assert by_number == {1: 7, 2: 3}
    assert loaded["e"][0][1] == "x"
    assert loaded["e"][1:] == [[1, 7, 3], {"f": [7]}]
    assert loaded["g"][1] == 7


@case("test_traverse")
def ordered_dicts(run: Run) -> None:
    folder = run.folder()
    saved = OrderedDict(a=[99, fill({"a": [0, torch.empty(2)]})["a"][1]])
    run.dcp.save(saved, checkpoint_id=folder)
    loaded = OrderedDict(a=[0, torch.zeros(2)])
    run.dcp.load(loaded, checkpoint_id=folder)
    assert isinstance(loaded, OrderedDict)
    assert loaded["a"][0] == 99
    assert torch.equal(loaded["a"][1], saved["a"][1])


@case("test_nested_dict")
def dicts_by_number(run: Run) -> None:
    def state() -> dict[Any, Any]:
        return {0: {"w": torch.empty(2), 5: [torch.empty(1), "x"]}, 1: {1: torch.empty(3)}}

    run.round_trip(state(), state())


@case("test_nested_dict")
def empty_containers(run: Run) -> None:
    folder, saved = run.folder(), {"dict": {}, "list": [], "w": torch.ones(1), "in": {"x": {}}}
    run.dcp.save(saved, checkpoint_id=folder)
    loaded = {"dict": {}, "list": [], "w": torch.zeros(1), "in": {"x": {}}}
    run.dcp.load(loaded, checkpoint_id=folder)
    assert loaded == saved


@case(CPU, thin=True)
def shapes_and_dtypes(run: Run) -> None:
    def state() -> dict[str, torch.Tensor]:
        shapes: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4)]
        return {
            f"{dtype} {shape}".replace(".", " "): torch.empty(shape, dtype=dtype)
            for dtype in DTYPES
            for shape in shapes
        }

    run.round_trip(state(), state())


@case(CPU)
def views_and_transposes(run: Run) -> None:
    def state() -> dict[str, torch.Tensor]:
        table = torch.zeros(6, 8)
        return {
            "transposed": table.t(),
            "column": table[:, 3],
            "every other row": table[::2],
            "row": table[5, 1:7],
            "permuted": torch.zeros(2, 3, 4).permute(2, 0, 1),
        }

    for one in state():  # they overlap
        run.round_trip({one: state()[one]}, {one: state()[one]})


@case("test_state_dict (shared weight)")
def tensors_under_two_names(run: Run) -> None:
    folder, tensor = run.folder(), torch.arange(6.0)
    run.dcp.save({"a": tensor, "b": tensor}, checkpoint_id=folder)
    loaded = {"a": torch.zeros(6), "b": torch.zeros(6)}
    run.dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["b"], tensor)
    shared = torch.zeros(6)
    run.dcp.load({"a": shared, "b": shared}, checkpoint_id=folder)
    assert torch.equal(shared, tensor)


@case(CPU)
def parameters_that_require_gradients(run: Run) -> None:
    folder, state = run.folder(), {"w": nn.Parameter(torch.arange(4.0))}
    run.dcp.save(state, checkpoint_id=folder)
    target = nn.Parameter(torch.zeros(4))
    run.dcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target.detach(), torch.arange(4.0))
    assert target.requires_grad


@case(f"{CPU} (dtype mismatch)")
def other_dtypes_are_cast(run: Run) -> None:
    numbers = torch.tensor([1.0, 2.5, -3.25, 1 / 3])
    for saved, loaded in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float16),
        (torch.float32, torch.int64),
    ):
        folder, target = run.folder(), {"w": torch.zeros(4, dtype=loaded)}
        run.dcp.save({"w": numbers.to(saved)}, checkpoint_id=folder)
        run.dcp.load(target, checkpoint_id=folder)
        assert torch.equal(target["w"], numbers.to(saved).to(loaded)), (saved, loaded)


@case("e2e/test_pipeline, e2e/test_fsdp_ep", thin=True)
def keys_of_some_ranks(run: Run) -> None:
    """Each rank has keys that others lack; every rank can load all of them."""
    folder = run.folder()
    state = {f"layer{run.rank}": {"w": torch.empty(4, 3)}, "common": torch.empty(2)}
    if run.rank % 2:
        state |= {"odd": torch.empty(5), f"loader{run.rank}": {"position": run.rank, "blob": b"x"}}
    run.dcp.save(fill(state), checkpoint_id=folder)
    loaded = {f"layer{rank}": {"w": torch.zeros(4, 3)} for rank in range(run.world)}
    loaded |= {f"loader{r}": {"position": -1} for r in range(1, run.world, 2)}
    loaded |= {"odd": torch.zeros(5)} if run.rank == 0 else {"common": torch.zeros(2)}
    run.dcp.load(loaded, checkpoint_id=folder)
    check(loaded)
    assert all(loaded[f"loader{r}"] == {"position": r} for r in range(1, run.world, 2))


@case(PLANNER)
def values_that_differ_between_ranks(run: Run) -> None:
    """DCP stores the value of one rank, of tensors and of others, and every rank loads that."""
    folder = run.folder()
    run.dcp.save({"t": torch.tensor([run.rank]), "n": run.rank}, checkpoint_id=folder)
    state = {"t": torch.tensor([-1]), "n": -1}
    run.dcp.load(state, checkpoint_id=folder)
    assert 0 <= int(state["t"]) < run.world
    assert 0 <= state["n"] < run.world
    everyone: list[Any] = [None] * run.world
    dist.all_gather_object(everyone, (int(state["t"]), state["n"]))
    assert run.is_ours or len(set(everyone)) == 1, everyone


@case("test_dtensor_checkpoint")
def extra_state_of_modules(run: Run) -> None:
    class Extra(nn.Linear):
        extra: Any = 0

        def get_extra_state(self) -> Any:
            return {"n": self.extra, "t": torch.tensor([float(self.extra)])}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["n"]
            assert torch.equal(state["t"], torch.tensor([float(self.extra)]))

    folder, saved, loaded = run.folder(), nn.Sequential(Extra(2, 2)), nn.Sequential(Extra(2, 2))
    saved[0].extra, loaded[0].extra = 5, 6
    run.dcp.save({"model": saved, "state": saved.state_dict()}, checkpoint_id=folder)
    run.dcp.load({"model": loaded}, checkpoint_id=folder)
    assert loaded[0].extra == 5
    state = {"state": nn.Sequential(Extra(2, 2)).state_dict()}
    run.dcp.load(state, checkpoint_id=folder)
    assert state["state"]["0._extra_state"]["n"] == 5
    assert torch.equal(state["state"]["0._extra_state"]["t"], torch.tensor([5.0]))

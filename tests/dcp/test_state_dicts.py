"""A state dict comes back from our folder and from torch's, whole or key by key."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import unified_ckpt as uc
from tests.support.dcp.states import (
    LARGE,
    STATES,
    Counter,
    assert_equal,
    cleared,
    recipe,
    trained,
)
from unified_ckpt import dcp


def torch_save(state_dict: dict[str, Any], **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group, and of existing folders
        torch_dcp.save(state_dict, **arguments)


@pytest.fixture(params=["ours", "torch's"])
def save(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The function that writes: a job switches in the middle of its run."""
    return dcp.save if request.param == "ours" else torch_save


@pytest.mark.parametrize("name", STATES)
def test_state_dict_is_filled_in_place(save: Any, name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    save(state, checkpoint_id=tmp_path / "1")
    target = cleared(STATES[name]())
    tensors = [value for value in target.values() if isinstance(value, torch.Tensor)]
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert_equal(target, state)
    assert all(any(tensor is value for value in target.values()) for tensor in tensors)


@pytest.mark.parametrize("name", STATES)
def test_state_dict_is_built_from_the_folder(save: Any, name: str, tmp_path: Path) -> None:
    """torch's planner for an empty state dict, which verl's and torchtune's tools use."""
    state = {str(key): value for key, value in STATES[name]().items() if value != {}}
    save(state, checkpoint_id=tmp_path / "1")
    built: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    dcp.load(built, checkpoint_id=tmp_path / "1", planner=planner)
    assert_equal(built, state)


def test_keys_select_what_is_built(tmp_path: Path) -> None:
    dcp.save({**recipe(), "step": 3}, checkpoint_id=tmp_path / "1")
    load = dcp.state_dict_loader._load_state_dict_from_keys
    assert load({"step"}, checkpoint_id=tmp_path / "1") == {"step": 3}
    assert_equal(
        load("model.1.bias", checkpoint_id=tmp_path / "1"),
        {"model": {"1.bias": recipe()["model"]["1.bias"]}},
    )


def test_objects_get_the_filled_state(save: Any, tmp_path: Path) -> None:
    save({"a": Counter(5), "b": 1}, checkpoint_id=tmp_path / "1")
    counter = Counter()
    target = {"a": counter, "b": 0}
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert target == {"a": counter, "b": 1}
    assert (counter.count, counter.seen.tolist()) == (5, [5, 5, 5])


def test_surplus_is_ignored_and_dtypes_are_cast(save: Any, tmp_path: Path) -> None:
    save(
        {"model": {"w": torch.full((3,), 1.5), "v": torch.ones(2)}, "x": 1},
        checkpoint_id=tmp_path / "1",
    )
    target = {"model": {"w": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert target["model"]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"w": torch.zeros(4)}, r"checkpoint has shape \(3,\), target has \(4,\)"),
        ({"w": torch.zeros(3), "v": torch.zeros(1)}, r"Missing key in .*: model\.v"),
        ({"w": torch.zeros(3), "s": torch.zeros(1)}, r"checkpoint has shape \(2,\)"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    save: Any, target: dict[str, torch.Tensor], text: str, tmp_path: Path
) -> None:
    save({"model": {"w": torch.ones(3), "s": torch.ones(2)}, "x": 1}, checkpoint_id=tmp_path / "1")
    state = {"model": target, "x": 0}
    with pytest.raises(torch_dcp.CheckpointException) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "1")
    assert isinstance(caught.value, uc.CheckpointError)
    assert isinstance(caught.value.failures[0][0], uc.MismatchError)
    assert not any(tensor.any() for tensor in target.values())
    assert state["x"] == 0


def test_missing_keys_are_kept_if_partial(save: Any, tmp_path: Path) -> None:
    save({"a": torch.ones(LARGE), "b": 1}, checkpoint_id=tmp_path / "1")
    target = {"a": torch.zeros(LARGE), "c": torch.zeros(2), "d": 5}
    planner = torch_dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, checkpoint_id=tmp_path / "1", planner=planner)
    assert target["a"].all()
    assert (target["c"].tolist(), target["d"]) == ([0, 0], 5)


@pytest.mark.parametrize("state", [{1: "a", "1": "b"}, {"a.b": 1, "a": {"b": 2}}])
def test_two_values_of_one_key_are_refused(state: dict[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(dcp.DcpError, match="several values of one flat key"):
        dcp.save(state, checkpoint_id=tmp_path / "1")


def test_key_means_the_same_tensor_as_at_the_save(tmp_path: Path) -> None:
    """One of two models is loaded: alone, its key looks like that of the only model."""
    state = {"model": {"w": torch.zeros(LARGE)}, "ema": {"model": {"w": torch.ones(LARGE)}}}
    dcp.save(state, checkpoint_id=tmp_path / "1")
    target = {"ema": {"model": {"w": torch.full((LARGE,), 7.0)}}}
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert target["ema"]["model"]["w"].eq(1).all()
    with pytest.raises(dcp.DcpError, match="Missing key in checkpoint state_dict: w"):
        dcp.load({"w": torch.zeros(LARGE)}, checkpoint_id=tmp_path / "1")


def test_unflattened_dict_is_replaced(tmp_path: Path) -> None:
    state = {"model": torch.ones(LARGE), "values": {"a": 1, "b": [torch.ones(2)]}}
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "1", planner=planner)
    target: dict[str, Any] = {"model": torch.zeros(LARGE), "values": {}}
    reader = torch_dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(target, checkpoint_id=tmp_path / "1", planner=reader)
    assert_equal(target, state)


@pytest.mark.parametrize("name", ["nested", "flat", "app", "no key around the model"])
def test_folder_is_an_ordinary_one(name: str, tmp_path: Path) -> None:
    """`uc.load` resumes from a folder of `dcp.save`."""
    dcp.save(STATES[name](), checkpoint_id=tmp_path / "1")
    (model, optimizer), (expected, _) = trained(seed=1), trained()
    report = uc.load(tmp_path / "1", model=model, optimizer=optimizer)
    assert not report.unused
    assert_equal(model.state_dict(), expected.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]
    assert_equal(optimizer.state_dict()["state"], trained()[1].state_dict()["state"])
    assert (tmp_path / "1" / "model.safetensors").exists()
    assert (tmp_path / "1" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("name", ["optimizer alone", "flat optimizer alone"])
def test_optimizer_in_a_folder_of_its_own_is_one(name: str, tmp_path: Path) -> None:
    """As Accelerate and LLaMA-Factory save it."""
    dcp.save(STATES[name](), checkpoint_id=tmp_path / "1")
    model, optimizer = trained(seed=1)
    uc.load(tmp_path / "1", model=model, optimizer=optimizer, strict=False)
    assert_equal(optimizer.state_dict()["state"], trained()[1].state_dict()["state"])


@pytest.mark.parametrize("name", ["nested", "flat", "app", "no key around the model"])
def test_folder_of_ours_fills_a_state_dict(name: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    ema = {"w": torch.ones(LARGE)}
    uc.save(
        tmp_path / "1",
        model=model,
        optimizer=optimizer,
        step=4,
        parts={"ema": ema},
        extra={"s": {"v": 5}},
    )
    target: dict[str, Any] = cleared(STATES[name]()) | {
        "ema": cleared(ema),
        "s": {"v": 0},
        "step": 0,
    }
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert_equal(target, {**STATES[name](), "ema": ema, "s": {"v": 5}, "step": 4})


def test_groups_are_found_by_their_names(tmp_path: Path) -> None:
    """Another order of the groups gets the same options."""
    dcp.save(recipe(), checkpoint_id=tmp_path / "1")
    target = cleared(recipe())
    target["optimizer"]["param_groups"].reverse()
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert [group["lr"] for group in target["optimizer"]["param_groups"]] == [0.5, 0.001]


def test_objects_inside_of_dicts_get_their_state(tmp_path: Path) -> None:
    state = {"all": {"counter": Counter(5), "generator": torch.Generator().manual_seed(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "1")
    counter, generator = Counter(), torch.Generator()
    dcp.load({"all": {"counter": counter, "generator": generator}}, checkpoint_id=tmp_path / "1")
    assert counter.count == 5
    assert torch.equal(generator.get_state(), state["all"]["generator"].get_state())  # type: ignore[attr-defined]


def test_object_that_would_need_pickle_is_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.DcpError, match=r"extra\.a\.b: got .*object.*expected plain values"):
        dcp.save({"a": {"b": object()}}, checkpoint_id=tmp_path / "1")


def test_meta_tensors_are_allocated(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "1")
    target = {"model": {"w": torch.empty(3, device="meta")}}
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert target["model"]["w"].tolist() == [1, 1, 1]


def test_containers_of_torchs_folder_are_read(tmp_path: Path) -> None:
    """No list of torch.load has all of them; they hold plain values."""
    state = {"window": deque([1.5, 2], maxlen=3), "raw": bytearray(b"\xff"), "span": slice(1, 5)}
    torch_save({"loss": state}, checkpoint_id=tmp_path / "1")
    target: dict[str, Any] = {"loss": {"window": deque(), "raw": bytearray(), "span": slice(0)}}
    dcp.load(target, checkpoint_id=tmp_path / "1")
    assert target["loss"] == state
    assert target["loss"]["window"].maxlen == 3


def test_last_save_counts_whoever_made_it(tmp_path: Path) -> None:
    """A job that goes back to torch saves into a folder of ours, which stays beside its files."""
    for number, save in enumerate((dcp.save, torch_save, dcp.save, torch_save)):
        save({"model": {"w": torch.full((3,), float(number))}}, checkpoint_id=tmp_path / "1")
        target = {"model": {"w": torch.full((3,), -1.0)}}
        dcp.load(target, checkpoint_id=tmp_path / "1")
        assert target["model"]["w"].tolist() == [number] * 3
    dcp.load(target, checkpoint_id=tmp_path / "1-before-1")
    assert target["model"]["w"].tolist() == [1.0] * 3, "what dcp.save replaced is whole"


def test_later_save_of_torch_is_never_missed(tmp_path: Path) -> None:
    """All but `dcp.load` would read, verify or replace the older state without a word."""
    folder, model = tmp_path / "1", torch.nn.Linear(3, 3)
    uc.save(folder, model=model)
    torch_save({"model": model.state_dict()}, checkpoint_id=folder)
    replace = uc.SaveOptions(if_exists="replace")
    calls: list[Callable[[], object]] = [
        lambda: uc.load(folder, model=model),
        lambda: uc.open(folder),
        lambda: uc.verify(folder),
        lambda: uc.save(folder, model=model, options=replace),
    ]
    for call in calls:
        with pytest.raises(uc.FormatError, match="got a later save of torch"):
            call()
    options = uc.LoadOptions(source=uc.SourceOptions(format="dcp"))
    uc.load(folder, model=model, options=options)
    (folder / ".metadata").unlink()
    assert uc.verify(folder, deep=True).ok

"""Values that differ between ranks are stored for each rank that holds them, and return to it."""

from __future__ import annotations

import logging
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import SAVE, folder_of, on_node
from tests.support.engine.values.stateful import Counting
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.refusals import same_error
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.engine.source.value_paths import decode_rank_values
from unified_ckpt.engine.values.merge_values import MAX_DIFFERING_NBYTES
from unified_ckpt.runtime.comm.comm import Comm

W = {"w": torch.arange(6.0)}
NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


class Stateful:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Quantized(torch.optim.SGD):
    """Has state that is neither a tensor nor equal on all ranks."""

    def __init__(self, model: torch.nn.Module, *, lr: float = 7.0, rank: int | None = None) -> None:
        super().__init__([{"params": [param]} for param in model.parameters()], lr=lr)
        if rank is not None:
            codes = {"codes": torch.tensor([rank, 1]), "scale": 0.5}
            self.state[model.weight] = {"count": rank, "moment": codes}


def save_all(path: Path, extras: list[Any], **options: Any) -> list[uc.SaveReport]:
    def save(comm: Comm) -> uc.SaveReport:
        return make_checkpointer(comm).save(
            path, model=W, extra=extras[comm.rank], options=uc.SaveOptions(**options)
        )

    return run_ranks(len(extras), save)


def load_all(path: Path, world: int, extras: list[Any] | None = None) -> list[uc.LoadReport]:
    def load(comm: Comm) -> uc.LoadReport:
        extra = extras[comm.rank] if extras else None
        return make_checkpointer(comm).load(path, model={"w": torch.zeros(6)}, extra=extra)

    return run_ranks(world, load)


def same(a: Any, b: Any) -> bool:
    """Compare values bit by bit, without the code under test."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


KEYS = st.sampled_from(["a", "b", "c d", "$type"])
LEAVES = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, NAN, "x", ()]),
    st.integers(0, 3).map(lambda n: torch.arange(n, n + 2)),
    st.integers(0, 1).map(lambda n: {1: n, 2: "odd keys"}),
    st.lists(st.integers(0, 1), max_size=2),
    st.integers(0, 1).map(lambda n: Stateful({"k": n})),
)
TREES = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, min_size=1), max_size=3)


def plain(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state
    return {key: plain(item) for key, item in value.items()} if type(value) is dict else value


def is_simple(tree: Any) -> bool:
    """Whether no dict has a key that the format marks its own types with."""
    return not isinstance(tree, dict) or (
        "$type" not in tree and all(map(is_simple, tree.values()))
    )


@pytest.mark.incident("prime-rl#1035")
@given(st.lists(TREES.filter(is_simple), min_size=2, max_size=3))
@settings(max_examples=40)
def test_each_rank_gets_its_own_values(
    tmp_path_factory: pytest.TempPathFactory, trees: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("values") / "c"
    save_all(path, trees)
    for rank, report in enumerate(load_all(path, len(trees))):
        for key, value in plain(trees[rank]).items():
            stored = report.extra[key]
            if type(value) is dict and not isinstance(trees[rank][key], Stateful):
                assert all(same(stored[inner], item) for inner, item in value.items())
            else:
                assert same(stored, value), (key, value, stored)
        keys = {key for tree in trees for key in tree}
        assert set(report.extra) == keys


DIFFERENT = [
    ("numbers", 1, 2),
    ("kinds of numbers", 1, 1.0),
    ("zeros", 0.0, -0.0),
    ("bits of NaN", math.nan, NAN),
    ("tensors", torch.zeros(3), torch.tensor([0.0, 0, 1])),
    ("dtypes", torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    ("arrays", np.zeros(3), np.ones(3)),
    ("lists", [1, 2], [2, 1]),
    ("order of an OrderedDict", OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    ("objects", Stateful({"k": 1}), Stateful({"k": 2})),
    ("dict and number", {"k": 1}, 5),
    ("long bytes", b"a" * 2000, b"b" * 2000),
]


@pytest.mark.incident("Megatron-Bridge#3832")
@pytest.mark.parametrize(("first", "second"), [case[1:] for case in DIFFERENT], ids=lambda _: "")
def test_different_values_are_named(
    tmp_path: Path, first: Any, second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reports = save_all(tmp_path / "c", [{"v": first}, {"v": second}, {"v": first}])
    names = {"extra.v", "extra.v.k"} if isinstance(first, dict) and "k" in first else {"extra.v"}
    assert set(reports[0].differing_values) == names
    (warning,) = [r for r in caplog.records if "different values" in r.getMessage()]
    assert warning.levelno == logging.WARNING
    assert all(name in warning.getMessage() for name in names)
    for report, value in zip(load_all(tmp_path / "c", 3), (first, second, first), strict=True):
        expected = plain(value)
        assert same(report.extra["v"], expected)
        assert not report.notes


EQUAL = [
    ("order of keys", {"a": 1, "b": {1: 2, 3: 4}}, {"b": {3: 4, 1: 2}, "a": 1}),
    ("nothing", {"a": 1}, None),
    ("an empty dict", {"a": 1}, {}),
    ("no value", {"a": 1}, {"a": None}),
    ("an empty state", {"a": Stateful({"k": 1})}, {"a": Stateful({})}),
    ("other keys", {"a": 1}, {"b": 1}),
    ("memory", {"a": torch.arange(6.0)[::2]}, {"a": torch.tensor([0.0, 2, 4])}),
]


@pytest.mark.parametrize(("first", "second"), [case[1:] for case in EQUAL], ids=lambda _: "")
def test_equal_values_are_stored_once(
    tmp_path: Path, first: Any, second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In both orders of the ranks, with the strictest check."""
    for number, extras in enumerate(([first, second], [second, first])):
        path = tmp_path / f"c{number}"
        assert save_all(path, extras, check_replicas="always")[0].differing_values == ()
        assert not (path / "rank_values.safetensors").exists()
        expected = plain(first) | ({"b": 1} if second == {"b": 1} else {})
        for report in load_all(path, 2):
            assert same(report.extra, expected)
    assert not caplog.records


def test_values_that_only_one_rank_holds(tmp_path: Path) -> None:
    """Also tensors; and a save of nothing but those."""

    def save(comm: Comm) -> None:
        extra = {"own": torch.arange(4000), "n": 3} if comm.rank == 2 else None
        make_checkpointer(comm).save(tmp_path / "c", extra=extra)

    run_ranks(3, save)
    with uc.open(tmp_path / "c") as opened:
        assert same(opened.extra, {"own": torch.arange(4000), "n": 3})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_state_of_modules_and_optimizers_that_differs(tmp_path: Path, asynchronous: bool) -> None:
    """Also hyperparameters, in later saves than the first, and with tensors in dicts."""

    def act(comm: Comm) -> None:
        rank = comm.rank
        with make_checkpointer(comm) as checkpointer:
            module = Counting()
            for number in (0, rank):
                module.count = number
                optimizer = Quantized(module, lr=0.5 + number, rank=number)
                save = checkpointer.save_async if asynchronous else checkpointer.save
                save(
                    tmp_path / "c",
                    model=module,
                    optimizer=optimizer,
                    options=uc.SaveOptions(if_exists="replace"),
                )
            module = Counting()
            fresh = Quantized(module)
            report = checkpointer.load(tmp_path / "c", model=module, optimizer=fresh)
        assert module.count == rank
        state = fresh.state[module.weight]
        assert (state["count"], state["moment"]["scale"]) == (rank, 0.5)
        assert same(state["moment"]["codes"], torch.tensor([rank, 1]))
        assert [group["lr"] for group in fresh.param_groups] == [0.5 + rank] * 2
        assert not report.notes

    run_ranks(2, act)
    with uc.open(tmp_path / "c") as opened:
        names = opened.source.metadata().rank_values
    assert set(names.names) == {
        "modules:_extra_state",
        "optimizer:weight/count",
        "optimizer:weight/moment",
        "param group of weight",
        "param group of bias",
    }


def test_another_number_of_ranks_gets_values_of_the_lowest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(tmp_path / "c", [{"v": 1, "w": 0}, {"v": 2, "w": 0}, {"v": 3, "w": 0}])
    for extras, warnings in ((None, 0), ([{}, {}], 1)):  # a load of weights alone warns of nothing
        caplog.clear()
        for report in load_all(tmp_path / "c", 2, extras):
            assert report.extra == {"v": 1, "w": 0}
            (note,) = report.notes
            assert note.startswith("extra.v: differed between the ranks of the save")
        assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == warnings


def test_differences_are_an_error_if_asked_for(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        options = uc.SaveOptions(check_replicas="always", timeout_seconds=30)
        extra = {"v": {"k": comm.rank % 2}}
        make_checkpointer(comm).save(tmp_path / "c", model=W, extra=extra, options=options)

    text = r"extra\.v\.k: rank\(s\) 0, 2 differ from rank\(s\) 1"
    same_error(try_ranks(3, save), uc.LayoutError, text)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_large_values_that_differ_are_refused(tmp_path: Path, asynchronous: bool) -> None:
    """By name; large ones that are equal are stored."""
    numel = MAX_DIFFERING_NBYTES // 2 + 8

    def save(comm: Comm, name: str, *, equal: bool) -> None:
        large = torch.full((numel,), 0 if equal else comm.rank, dtype=torch.uint8)
        with make_checkpointer(comm) as checkpointer:
            arguments: dict[str, Any] = {
                "model": W,
                "extra": {"small": comm.rank, "large": large},
                "options": uc.SaveOptions(timeout_seconds=60),
            }
            if asynchronous:
                checkpointer.save_async(tmp_path / name, **arguments).result()
            else:
                checkpointer.save(tmp_path / name, **arguments)

    run_ranks(2, lambda comm: save(comm, "equal", equal=True))
    assert [report.extra["small"] for report in load_all(tmp_path / "equal", 2)] == [0, 1]
    text = r"extra\.large: got 64 MiB of values that differ between ranks, expected at most 64 MiB"
    same_error(try_ranks(2, lambda comm: save(comm, "differs", equal=False)), uc.FormatError, text)
    assert not (tmp_path / "differs").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_large_value_that_rank_0_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The copies of rank 1 lack tensors of its `extra`, which the background would send."""
    monkeypatch.setattr(save_module, "MAX_DIFFERING_NBYTES", 71)
    extra = {"large": torch.arange(9), "small": torch.arange(2)}

    def save(comm: Comm) -> uc.SaveReport:
        with make_checkpointer(comm) as checkpointer:
            call = checkpointer.save_async if asynchronous else checkpointer.save
            result = call(tmp_path / "c", model=W, extra=extra if comm.rank else None)
            return result.result() if isinstance(result, uc.PendingSave) else result

    outcomes = try_ranks(2, save)
    if asynchronous:
        same_error(outcomes, uc.FormatError, "large: got a large tensor that rank 0 does not hold")
        assert not (tmp_path / "c").exists()
    else:
        assert same(load_all(tmp_path / "c", 2)[1].extra, extra)


def test_state_named_as_a_tag_of_the_format(tmp_path: Path) -> None:
    """A dict with the key "$type" is encoded as pairs, so that it is one value."""

    def act(comm: Comm) -> Any:
        module = torch.nn.ParameterDict({"weight": torch.ones(2)})
        optimizer = torch.optim.SGD(module.values(), lr=0.1)
        optimizer.state[module.weight]["$type"] = comm.rank
        checkpointer = make_checkpointer(comm)
        checkpointer.save(tmp_path / "c", model=module, optimizer=optimizer)
        optimizer.state.clear()
        checkpointer.load(tmp_path / "c", model=module, optimizer=optimizer)
        return dict(optimizer.state[module.weight])

    assert run_ranks(2, act) == [{"$type": 0}, {"$type": 1}]


def test_damaged_values_of_ranks_are_found(tmp_path: Path) -> None:
    save_all(tmp_path / "c", [{"v": 1}, {"v": 2}])
    assert uc.verify(tmp_path / "c", deep=True).ok
    flip(tmp_path / "c" / "rank_values.safetensors", -1)
    assert not uc.verify(tmp_path / "c", deep=True).ok
    errors = try_ranks(
        2, lambda comm: make_checkpointer(comm).load(tmp_path / "c", model={"w": torch.zeros(6)})
    )
    assert all(isinstance(error, uc.IntegrityError) for error in errors)
    (tmp_path / "c" / "rank_values.safetensors").unlink()
    assert not uc.verify(tmp_path / "c").ok


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 0]])
def test_folders_of_nodes_have_the_values_of_all_ranks(tmp_path: Path, nodes: list[int]) -> None:
    """Also tensors that ranks of another node hold: any folder may be lost with its node."""

    def extra(rank: int) -> dict[str, Any]:
        shared = {"all": torch.arange(3000), "node": torch.full((3000,), nodes[rank])}
        return shared | ({"last": torch.arange(5000)} if rank == 3 else {"own": [rank]})

    def save(comm: Comm) -> uc.SaveReport:
        with on_node(comm, nodes) as checkpointer:
            return checkpointer.save(
                folder_of(tmp_path, nodes[comm.rank]),
                model=W,
                extra=extra(comm.rank),
                options=SAVE,
            )

    assert run_ranks(4, save)[0].differing_values == ("extra.node", "extra.own")
    folders = [folder_of(tmp_path, node) for node in (0, 1)]
    merged = tmp_path / "merged"
    uc.convert(folders, merged)
    for path in (folders[0], folders[1], merged):
        for rank, report in enumerate(load_all(path, 4)):
            expected = extra(rank) | {"last": torch.arange(5000)}
            assert same(report.extra, {"own": [0]} | expected)


def test_conversion_keeps_values_of_ranks(tmp_path: Path) -> None:
    save_all(tmp_path / "c", [{"v": torch.tensor([1])}, {"v": torch.tensor([2])}])
    uc.convert(tmp_path / "c", tmp_path / "copy")
    assert [r.extra["v"].item() for r in load_all(tmp_path / "copy", 2)] == [1, 2]


def test_rename_rules_apply_to_values_of_ranks(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        module = Counting(comm.rank)
        optimizer = Quantized(module, lr=comm.rank, rank=comm.rank)
        make_checkpointer(comm).save(
            tmp_path / "c", model=torch.nn.ModuleDict({"old": module}), optimizer=optimizer
        )

    run_ranks(2, save)

    def load(comm: Comm) -> tuple[int, int, float]:
        module = Counting()
        optimizer = Quantized(module)
        make_checkpointer(comm).load(
            tmp_path / "c",
            model=torch.nn.ModuleDict({"new": module}),
            optimizer=optimizer,
            options=uc.LoadOptions(
                source=uc.SourceOptions(rename=[{"regex": "old\\.(.*)", "to": "new.{1}"}])
            ),
        )
        return (
            module.count,
            optimizer.state[module.weight]["count"],
            optimizer.param_groups[0]["lr"],
        )

    assert run_ranks(2, load) == [(0, 0, 0), (1, 1, 1)]


@pytest.mark.parametrize(
    "tree",
    [
        "text",
        [1],
        [[["extra"]]],
        [[[], 1]],
        [["extra", 1]],
        [[["extra", 1], 1]],
        [[["modules"], 1]],
        [[["modules", "a", "b"], 1]],
        [[["else", "a"], 1]],
    ],
)
def test_entries_without_paths_are_refused(tree: Any) -> None:
    with pytest.raises(uc.FormatError, match=r"file: entry 3: got .*, expected a path"):
        decode_rank_values(tree, "file: entry 3")

"""Saves that must be refused: one error of the tree, the same text on every rank, no hang, and a
disk as it was.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import keys_in_store, on_node
from tests.support.engine.save.async_saves import Latch, Storages, storages
from tests.support.engine.values.stateful import Counting
from tests.support.format.manifests import edit_manifest
from tests.support.harness import FullStorage, make_checkpointer, run_ranks, try_ranks
from tests.support.refusals import HARD, same_error
from unified_ckpt import session
from unified_ckpt.engine.cluster.save_scope import join_scope
from unified_ckpt.engine.save.scope import SaveScope
from unified_ckpt.engine.save.write import snapshot
from unified_ckpt.foreign.paddle.options import from_paddle
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.connections import Connections

__all__ = ["storages"]  # a fixture

Arguments = dict[str, Any]  # of one rank's save; with `lazy`, of `save_async`
Refused = tuple[type[uc.CheckpointError], str, Sequence[Arguments]]

BIG = torch.zeros(8, 40_000)
WHOLE: Arguments = {"model": {"w": BIG}}


def offloaded(tensor: torch.Tensor) -> torch.Tensor:
    """Free the memory, as training frees what it keeps elsewhere."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def content(root: Path) -> dict[Path, bytes | bool]:
    """Every path below a folder, with the bytes of files."""
    return {path: path.is_file() and path.read_bytes() for path in root.rglob("*")}


def check_refused(
    root: Path,
    kind: type[uc.CheckpointError],
    match: str,
    arguments: Sequence[Arguments],
    paths: Sequence[Path | str] = (),
) -> None:
    """A save by as many ranks as there are arguments: same error everywhere, and nothing left."""
    before = content(root)

    def act(comm: Comm) -> None:
        given = {"options": uc.SaveOptions(timeout_seconds=HARD), **arguments[comm.rank]}
        with make_checkpointer(comm) as checkpointer:
            call = checkpointer.save_async if "lazy" in given else checkpointer.save
            call(paths[comm.rank] if paths else root / "c", **given)

    same_error(list(try_ranks(len(arguments), act, timeout_seconds=HARD)), kind, match)
    assert content(root) == before


# what the ranks give

BY_ROW = uc.Layout({"tp": 2}, {"w": {"tp": 0}})
PAIR = uc.Layout({"tp": 2}, {"w": {"tp": 0}, "v*": {"tp": 0}})
SHAPED = uc.Layout({"tp": 2}, {"w": {"tp": 0}}, {"w": (8, 40_000)})
MOMENTS = {"w/exp_avg": torch.zeros(8, 40_000)}
ADAPTERS = {"parts": {"lora": {"w": BIG}}, "optimizer": {"lora.w/exp_avg": BIG}}
NO_OPTIMIZER = (
    r"^rank [01]: lazy: got no optimizer object, whose step could wait for the copy; pass"
)


def asks(parts: tuple[str, ...], /, **state: object) -> list[Arguments]:
    """A save of these parts by two ranks."""
    return [{**state, "options": uc.SaveOptions(parts=parts, timeout_seconds=HARD)}] * 2


def omits(*parts: str, **state: object) -> list[Arguments]:
    """A save without these parts by two ranks."""
    return [{**state, "options": uc.SaveOptions(omit=parts, timeout_seconds=HARD)}] * 2


def skips_model(**state: object) -> list[Arguments]:
    """A save by two ranks as Paddle's name asks for."""
    save = uc.SaveOptions(timeout_seconds=HARD)
    return [{**state, "options": from_paddle("skip_save_model_weight", save=save).save}] * 2


class Stepping(torch.optim.SGD):
    """Has state that is not a tensor."""

    def __init__(self, model: torch.nn.Module, *, lr: float = 0.1, count: int = 1) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.state[model.weight] = {"count": count}


def trains(own_tensor: bool, counts: Sequence[int] = (3, 3), **options: Any) -> list[Arguments]:
    """Saves of two ranks with equal tensors; with `own_tensor`, each has one that is its own.

    They refuse values that differ.
    """
    modules = [Counting(count) for count in counts]
    values = [{name: value[rank] for name, value in options.items()} for rank in range(2)]
    return [
        {
            "model": module,
            "optimizer": Stepping(module, **value),
            "parts": {"own": {f"r{rank if own_tensor else 0}": BIG}},
            "options": uc.SaveOptions(check_replicas="always", timeout_seconds=HARD),
        }
        for rank, (module, value) in enumerate(zip(modules, values, strict=True))
    ]


DIFFER = r"(?s)ranks hold different values of the same name.*\(%d\):.*%s: rank\(s\) 0 differ from"
REFUSED: dict[str, Refused] = {
    **{
        f"{name}, {'other' if own_tensor else 'equal'} tensors": (
            uc.LayoutError,
            DIFFER % (count, text),
            trains(own_tensor, **values),
        )
        for own_tensor in (False, True)
        for name, count, text, values in [
            ("extra state of ranks", 1, "modules:_extra_state", {"counts": (3, 4)}),
            ("hyperparameters of ranks", 2, "param group of bias", {"lr": (0.1, 0.2)}),
            ("optimizer state of ranks", 1, "optimizer:weight/count", {"count": (1, 2)}),
        ]
    },
    "gap between ranks": (
        uc.LayoutError,
        r"tensors with missing shards \(1\):\n  model:w: no rank holds the shard at \(1,\) "
        r"of \(tp of 2\); ranks 0 declare the tensor",
        [
            {"model": {"w": BIG, "v": BIG}, "layout": BY_ROW},
            {"model": {"v": BIG}, "layout": BY_ROW},
        ],
    ),
    "unequal overlap": (
        uc.LayoutError,
        r"(?s)ranks disagree on shardings \(1\):.*model:w: got dim 0 over 2 .* on rank 0 and "
        r"a whole copy on each rank on rank 1",
        [
            {"model": {"w": BIG[:4], "v": torch.zeros(2)}, "layout": PAIR},
            {
                "model": {"w": BIG, "v": torch.zeros(2)},
                "layout": uc.Layout({"tp": 2}, {"v*": {"tp": 0}}),
            },
        ],
    ),
    "one name with two shapes": (
        uc.MismatchError,
        r"(?s)ranks disagree on shapes or dtypes \(1\):.*model:w: got F32 \(8, 40000\) on "
        r"rank 0 and F32 \(7, 40000\) on rank 1",
        [WHOLE, {"model": {"w": BIG[:7]}}],
    ),
    "one name with two dtypes": (
        uc.MismatchError,
        r"model:w: got F32 \(8, 40000\) on rank 0 and BF16 \(8, 40000\) on rank 1",
        [WHOLE, {"model": {"w": BIG.bfloat16()}}],
    ),
    "experts with one name": (  # taking one for the other would lose it
        uc.LayoutError,
        r"replicas hold different bytes \(1\):\n  model:expert\.w: rank\(s\) 0 differ from "
        r"rank\(s\) 1",
        [{"model": {"expert.w": BIG}}, {"model": {"expert.w": BIG + 1}}],
    ),
    "mesh of 1": (
        uc.LayoutError,
        "Layout mesh dp 1: got 1 positions, expected 2,",
        [{**WHOLE, "layout": uc.Layout({"dp": 1}, {})}] * 2,
    ),
    "mesh of 4": (
        uc.LayoutError,
        "Layout mesh dp 4: got 4 positions, expected 2,",
        [{**WHOLE, "layout": uc.Layout({"dp": 4}, {})}] * 2,
    ),
    "rule without match": (
        uc.LayoutError,
        r"Layout: rules\['w\.weight'\] match no tensor on any rank",
        [{**WHOLE, "layout": uc.Layout({"tp": 2}, {"w.weight": {"tp": 0}})}] * 2,
    ),
    "shape without match": (
        uc.LayoutError,
        r"Layout: rules\['W'\], shapes\['W'\] match no tensor on any rank",
        [{**WHOLE, "layout": uc.Layout({"tp": 2}, {"*": {}, "W": {}}, {"W": (2,)})}] * 2,
    ),
    "layout as dict": (
        uc.LayoutError,
        "layout: got a dict, expected a Layout",
        [{**WHOLE, "layout": {"tp": 1}}],
    ),
    "shards that are not chunks": (
        uc.LayoutError,
        r"rank 1: w: got a local tensor of shape \(2, 40000\), expected \(4, 40000\) from "
        r"its placements",
        [
            {"model": {"w": BIG[:4]}, "layout": SHAPED},
            {"model": {"w": BIG[:2]}, "layout": SHAPED},
        ],
    ),
    "part name with shard suffix": (  # its tensors would be taken for pieces of other folders
        uc.FormatError,
        "parts: got 'ema_shards', expected a name that does not end in '_shards'",
        [{"parts": {"ema_shards": {"q@0:2/4": torch.ones(2)}}}] * 2,
    ),
    "meta tensor on one rank": (
        uc.LayoutError,
        r"rank 1: w: is on the meta device; call `to_empty",
        [WHOLE, {"model": {"w": BIG.to("meta")}}],
    ),
    "offloaded tensor on one rank": (
        uc.LayoutError,
        r"rank 1: w: got 0 bytes of memory, expected 1280000; move it back from where",
        [WHOLE, {"model": {"w": offloaded(BIG)}}],
    ),
    "extra of one rank": (
        uc.FormatError,
        r"rank 0: extra\.x: got an object",
        [{**WHOLE, "extra": {"x": object()}}, WHOLE],
    ),
    "rank extra of one rank": (
        uc.FormatError,
        r"rank 1: rank_extra\.x: got an object",
        [WHOLE, {**WHOLE, "rank_extra": {"x": object()}}],
    ),
    "rank extra of one rank, in the background": (
        uc.FormatError,
        r"^rank 1: rank_extra: got an object",
        [{**WHOLE, "lazy": False}, {**WHOLE, "lazy": False, "rank_extra": object()}],
    ),
    "lazy without optimizer": (uc.LayoutError, NO_OPTIMIZER, [{**WHOLE, "lazy": True}] * 2),
    "lazy with tensors as optimizer": (
        uc.LayoutError,
        NO_OPTIMIZER,
        [{**WHOLE, "optimizer": MOMENTS, "lazy": True}] * 2,
    ),
    # parts that cannot be resumed
    "unknown part": (
        uc.FormatError,
        r"got 'modle', expected .* master_weights, model, optimizer",
        asks(("modle", "optimizer"), model={"w": BIG}, optimizer=MOMENTS),
    ),
    "unknown part of a state with other parts": (
        uc.FormatError,
        "got 'modle', expected parts of this state: ema",
        asks(("modle",), parts={"ema": {"w": BIG}}),
    ),
    "optimizer of a state without": (
        uc.FormatError,
        "got 'optimizer', expected parts of this state: master_weights, model",
        asks(("model", "optimizer"), model={"w": BIG}),
    ),
    "model without masters": (
        uc.FormatError,
        "got 'model_without_masters', expected",
        asks(("model_without_masters",), model={"w": BIG}),
    ),
    "nothing": (uc.FormatError, "nothing to save", [{}, {}]),
    "no parts": (uc.FormatError, "nothing to save", asks((), parts={"ema": {"w": BIG}})),
    "adapters omitted": (
        uc.FormatError,
        r"omit=.'lora',..: leaves out lora, which the stored .*; remove 'lora' from `omit`",
        omits("lora", **ADAPTERS),
    ),
    "no such omitted part": (
        uc.FormatError,
        r"SaveOptions.omit=....: got 'lorra', expected parts of this state: lora, master_weights, ",
        omits("lorra", **ADAPTERS),
    ),
    "all parts omitted": (
        uc.FormatError,
        "nothing to save",
        omits("lora", "optimizer", **ADAPTERS),
    ),
    "adapters left out": (
        uc.FormatError,
        "leaves out lora, which the stored",
        asks(("optimizer",), **ADAPTERS),
    ),
    "model left out without masters": (
        uc.FormatError,
        "leaves out the model, and this state has no master weights",
        skips_model(model={"w": BIG}, optimizer=MOMENTS),
    ),
    "low-precision model left out without masters": (
        uc.FormatError,
        "leaves out the model, and this state has no master weights",
        skips_model(model={"w": BIG.bfloat16()}, optimizer=MOMENTS),
    ),
    "masters left out": (
        uc.FormatError,
        "leaves out master_weights too",
        asks(("optimizer",), model={"w": BIG}, master_weights={"w": BIG}, optimizer=MOMENTS),
    ),
    "model left out beside an average": (
        uc.FormatError,
        "leaves out the model",
        asks(("ema",), model={"w": BIG}, parts={"ema": {"w": BIG}}, extra=1),
    ),
    # values of one process
    **{
        f"extra with {name}": (uc.FormatError, match, [{**WHOLE, "extra": extra}])
        for name, extra, match in [
            ("an object", {"a": {"b": [1, object()]}}, r"extra\.a\.b\[1\]: got an object"),
            ("a function", {"f": lambda: None}, r"extra\.f: got a function"),
            ("a type", {"s": torch.optim.lr_scheduler.LambdaLR}, r"extra\.s: got a type"),
            ("a sampler", {"g": torch.utils.data.RandomSampler([1])}, r"extra\.g: got a torch"),
            (
                "a generator without state",
                {"g": random.SystemRandom()},
                r"extra\.g: GeneratorState\.state_dict\(\) raised NotImplementedError",
            ),
        ]
    },
    **{
        f"step {step!r}": (
            uc.FormatError,
            rf"step: got {step!r}, expected an int of 0 or more",
            [{**WHOLE, "step": step}],
        )
        for step in (-1, True, 1.0, "7", 2**63)
    },
    **{
        f"metric {value!r}": (
            uc.FormatError,
            r"metrics\['loss'\]: got .*, expected a finite number",
            [{**WHOLE, "metrics": {"loss": value}}],
        )
        for value in (float("nan"), 10**400, "0.5", None, [1.0])
    },
    "metrics that are no dict": (
        uc.FormatError,
        r"metrics: got \[0\.5\], expected \{name: number\}",
        [{**WHOLE, "metrics": [0.5]}],
    ),
    "a state_dict of an optimizer": (
        uc.LayoutError,
        r"optimizer: got a state_dict\(\), expected the optimizer itself",
        [{**WHOLE, "optimizer": {"state": {}, "param_groups": []}}],
    ),
    "list as tensor": (
        uc.LayoutError,
        r"model\['w'\]: got a list, expected a torch\.Tensor",
        [{"model": {"w": [1.0]}}],
    ),
    "reserved tensor name": (
        uc.FormatError,
        "tensor name: got the reserved name '__metadata__'",
        [{"model": {"__metadata__": BIG}}],
    ),
    **{
        f"part named {name}": (
            uc.LayoutError,
            rf"parts: got the name '{name}', which has its own argument",
            [{**WHOLE, "parts": {name: {"w": BIG}}}],
        )
        for name in ("model", "optimizer", "master_weights")
    },
    "part named as a path": (
        uc.FormatError,
        r"part name: got '\.\./ema'",
        [{**WHOLE, "parts": {"../ema": {"w": BIG}}}],
    ),
    "part named extra": (
        uc.FormatError,
        "part name: got 'extra', which is reserved",
        [{**WHOLE, "parts": {"extra": {"w": BIG}}}],
    ),
    **{
        f"state named {key}": (
            uc.LayoutError,
            f"optimizer: got the key '{key}', expected names such as 'name/state'",
            [{**WHOLE, "optimizer": {key: BIG}}],
        )
        for key in ("w", "w/", "/m")
    },
    "sparse tensor": (
        uc.LayoutError,
        r"w: got a torch\.sparse_coo tensor, expected a dense one",
        [{"model": {"w": torch.eye(3).to_sparse()}}],
    ),
    "subclass of Tensor": (
        uc.LayoutError,
        r"w: got a Tagged, expected a torch\.Tensor, a Parameter, or a DTensor of one$",
        [{"model": {"w": BIG.as_subclass(type("Tagged", (torch.Tensor,), {}))}}],
    ),
    **{
        f"dtype of no file in {key}": (
            uc.MismatchError,
            rf"^{key}:w: got dtype torch\.complex128, which safetensors cannot store, expected one "
            r"of .*torch\.bfloat16",
            [state],
        )
        for key, state in [
            ("model", {"model": {"w": torch.zeros(2, dtype=torch.complex128)}}),
            ("ema", {"parts": {"ema": {"w": torch.zeros(2, dtype=torch.complex128)}}}),
        ]
    },
    "masters of another model": (
        uc.LayoutError,
        "optimizer group 0: has a parameter",
        [{**WHOLE, "master_weights": torch.optim.SGD([torch.nn.Parameter(BIG)])}],
    ),
    "no model as part": (
        uc.LayoutError,
        r"parts: got \{'ema': NoneType\}, expected",
        [{"parts": {"ema": None}}],
    ),
    "number as part name": (
        uc.LayoutError,
        r"parts: got \{3: dict\}, expected",
        [{"parts": {3: {"w": BIG}}}],
    ),
    "list of parts": (
        uc.LayoutError,
        "parts: got a list, expected",
        [{"parts": [{"w": BIG}]}],
    ),
    "number as model": (
        uc.LayoutError,
        "model: got a int, expected an nn.Module",
        [{"model": 5}],
    ),
    "number as optimizer": (
        uc.LayoutError,
        "optimizer: got a int, expected optimizers",
        [{**WHOLE, "optimizer": 5}],
    ),
}


@pytest.mark.incident("pytorch#189945")
@pytest.mark.parametrize("case", REFUSED)
def test_state_is_refused(tmp_path: Path, case: str) -> None:
    check_refused(tmp_path, *REFUSED[case])


@pytest.mark.parametrize("argument", ["model", "optimizer", "master_weights", "parts"])
@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (3, BIG, r": got the key 3, expected names of tensors"),
        (("w",), BIG, r": got the key \('w',\), expected names of tensors"),
        ("w/m", {"v": BIG}, r"\['w/m'\]: got a dict, expected a torch.Tensor"),
        ("w/m", 3.0, r"\['w/m'\]: got a float, expected a torch.Tensor"),
        (
            "w/m",
            torch.nested.nested_tensor([BIG, BIG[:1]], layout=torch.jagged),
            r"\['w/m'\]: got a nested tensor, expected a dense one",
        ),
    ],
)
def test_state_dict_with_non_tensors(
    tmp_path: Path, argument: str, name: object, value: object, match: str
) -> None:
    """Of any argument, at a save and at a load: an error that names it."""
    state = {name: value}
    arguments = {**WHOLE, argument: {"ema": state} if argument == "parts" else state}
    text = (r"parts\['ema'\]" if argument == "parts" else argument) + match
    uc.save(tmp_path / "checkpoint-3", **WHOLE)
    check_refused(tmp_path, uc.LayoutError, text, [arguments] * 2)
    with pytest.raises(uc.LayoutError, match=text):
        uc.load(tmp_path / "checkpoint-3", **arguments)


def test_snapshot_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = {"rank-1": 1000}
    monkeypatch.setattr(
        snapshot, "free_memory_nbytes", lambda: nbytes.get(threading.current_thread().name)
    )
    text = (
        r"^rank 1: snapshot: got 0\.977 KiB of free memory on this rank, expected [\d.]+ \w+; free "
        r"[\d.]+ \w+, or call `save`, which needs none$"
    )
    check_refused(tmp_path, uc.StorageError, text, [{**WHOLE, "lazy": False}] * 2)
    run_ranks(2, lambda comm: make_checkpointer(comm).save(tmp_path / "c", **WHOLE))


def test_mesh_of_a_load_of_wrong_size(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", **WHOLE)
    with pytest.raises(uc.LayoutError, match=r"Layout mesh dp 3: got 3 positions, expected 1,"):
        uc.load(tmp_path / "c", **WHOLE, layout=uc.Layout({"dp": 3}, {}))


# ranks that make another call


def saves(*, background: bool = False, **changes: Any) -> Callable[[uc.Checkpointer, Path], object]:
    arguments: Arguments = {"model": {"w": BIG}, "step": 3, "options": uc.SaveOptions(), **changes}

    def save(checkpointer: uc.Checkpointer, folder: Path) -> object:
        call = checkpointer.save_async if background else checkpointer.save
        return call(folder, **arguments)

    return save


OTHER = r"rank\(s\) 0, 2: .*, rank\(s\) 1: .*; expected the same"


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            saves(options=uc.SaveOptions(max_file_bytes=9)),
            r"save to .*: rank\(s\) 0, 2: max_file_bytes null, rank\(s\) 1: max_file_bytes 9",
        ),
        (
            saves(options=uc.SaveOptions(check_replicas="always")),
            r'check_replicas "first", rank\(s\) 1: check_replicas "always"; expected',
        ),
        (
            saves(options=uc.SaveOptions(node_copies=2)),
            r"rank\(s\) 0, 2: node_copies 1, rank\(s\) 1: node_copies 2; expected the same",
        ),
        (
            saves(options=uc.SaveOptions(parts=("model",))),
            r'parts null, rank\(s\) 1: parts \["model"\]; expected the same on every rank',
        ),
        (
            saves(step=4),
            r"save to .*/c: rank\(s\) 0, 2: step 3, rank\(s\) 1: step 4; expected the same on "
            r"every rank",
        ),
        (
            saves(step=None),
            r"rank\(s\) 0, 2: step 3, rank\(s\) 1: step null; expected the same on every rank",
        ),
        (saves(background=True), OTHER),
        (lambda checkpointer, folder: checkpointer.load(folder, model={"w": BIG.clone()}), OTHER),
        (lambda checkpointer, folder: checkpointer.repair(folder), OTHER),
        (lambda checkpointer, folder: checkpointer.idle(), OTHER),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_different_call_on_one_rank(
    tmp_path: Path, other: Callable[[uc.Checkpointer, Path], object], match: str, before: bool
) -> None:
    """Nothing is written, whether or not the plan is kept; and the same ranks save again."""

    def act(comm: Comm) -> str:
        with make_checkpointer(comm) as checkpointer:
            if before:
                saves()(checkpointer, tmp_path / "before")
            with pytest.raises(uc.RankError, match=match) as caught:
                (other if comm.rank == 1 else saves())(checkpointer, tmp_path / "c")
            assert not (tmp_path / "c").exists()
            saves()(checkpointer, tmp_path / "after")
        return str(caught.value)

    assert len(set(run_ranks(3, act, timeout_seconds=HARD))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"][: 1 + before]


@pytest.mark.parametrize("background", [False, True])
def test_state_of_one_rank_is_refused_after_a_save(tmp_path: Path, background: bool) -> None:
    """The rank has no state to save, yet joins the others, which have a plan."""

    def act(comm: Comm) -> list[str]:
        texts = []
        with make_checkpointer(comm) as checkpointer:
            for number in range(3):
                save = saves(background=background)
                save(checkpointer, tmp_path / f"before-{number}")
                wrong = {"metrics": {"loss": "low"}} if comm.rank == 1 else {}
                with pytest.raises(uc.FormatError, match=r"metrics.*'low'") as caught:
                    saves(background=background, **wrong)(checkpointer, tmp_path / "c")
                texts.append(str(caught.value))
        return texts

    assert len({text for texts in run_ranks(2, act, timeout_seconds=HARD) for text in texts}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"before-{n}" for n in range(3)]


@pytest.mark.parametrize("background", [False, True])
def test_scope_that_cannot_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The collective of the save ends, so that the next one begins."""

    calls = dict.fromkeys(range(2), 0)

    def join(collective: Collective, connections: Connections) -> SaveScope:
        calls[collective.rank] += 1
        if calls[collective.rank] == 2:
            raise MemoryError
        return join_scope(collective, connections)

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            save = saves(background=background)
            save(checkpointer, tmp_path / "a")
            with pytest.raises(MemoryError):
                save(checkpointer, tmp_path / "b")
            save(checkpointer, tmp_path / "c")

    monkeypatch.setattr(session, "join_scope", join)
    run_ranks(2, act, timeout_seconds=HARD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


# ranks that do not come


@pytest.mark.incident("accelerate#2000")
@pytest.mark.parametrize("background", [False, True])
def test_missing_ranks_are_named(tmp_path: Path, background: bool) -> None:
    def act(comm: Comm) -> None:
        if comm.rank in (0, 2):
            options = uc.SaveOptions(timeout_seconds=0.5)
            saves(options=options, background=background)(make_checkpointer(comm), tmp_path / "c")

    outcomes = list(try_ranks(4, act, timeout_seconds=HARD))
    text = (
        r"save to .*/c: rank\(s\) 1, 3 did not arrive within 0\.5 s; expected the same call "
        r"on all 4 ranks"
    )
    same_error([outcomes[0], outcomes[2]], uc.RankError, text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", range(3))
def test_failed_rank_does_not_delay_the_others(
    tmp_path: Path, storages: Storages, rank: int
) -> None:
    """The time-out of the save is much longer than the test may take."""
    storages.kinds[f"rank-{rank}"] = lambda root: FullStorage(root, 1)
    arguments = {
        "model": {f"w{n}": BIG.clone() for n in range(4)},
        "rank_extra": {"rng": rank},
        "options": uc.SaveOptions(timeout_seconds=10 * HARD, max_file_bytes=1),
    }
    text = rf"rank {rank}: .*No space left on device"
    check_refused(tmp_path, uc.StorageError, text, [arguments] * 3)


@pytest.mark.incident("DLRover#1146")
@pytest.mark.parametrize("background", [False, True])
def test_hanging_rank_is_named(
    tmp_path: Path, storages: Storages, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Its write does not come back, as on a file system that is gone."""
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.5)  # before a failed save is deleted
    latch, raised = Latch(), list[object]()
    storages.kinds["rank-2"] = latch.storage
    options = uc.SaveOptions(timeout_seconds=0.5, max_file_bytes=1)
    model = {f"w{n}": BIG.clone() for n in range(3)}

    def act(comm: Comm) -> None:
        checkpointer = make_checkpointer(comm)
        try:
            saves(options=options, model=model, background=background)(checkpointer, tmp_path / "c")
            checkpointer.wait()
        except uc.CheckpointError as error:
            raised.append(error)
            if len(raised) == 2:
                latch.open()  # both other ranks have raised
            checkpointer.close()

    try_ranks(3, act, timeout_seconds=HARD)
    named = r"rank\(?s?\)? ?2 (did not (finish 'write'|reach 'digests)|reported no error$)"
    same_error(raised, uc.RankError, named)
    assert not (tmp_path / "c").exists()


# places that cannot be written to


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Checkpoints, links, a file, and a folder for each of two nodes."""
    for name in ("checkpoint-3", "newer"):
        uc.save(tmp_path / name, model={"w": BIG[:1]}, step=3)
    edit_manifest(tmp_path / "newer", lambda told: told.update(format_version="2.0"))
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("checkpoint-3")
    (tmp_path / "broken").symlink_to("nowhere")
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
    return tmp_path


ALL = ("error", "keep", "replace")


@pytest.mark.incident("OpenTau#396")
@pytest.mark.parametrize(
    ("names", "choices", "kind", "match"),
    [
        (["file"], ALL, uc.StorageError, "file: got a file, expected a folder or a free name"),
        (["link"], ALL, uc.StorageError, "link: got a link, expected a folder or a free name"),
        (["broken"], ALL, uc.StorageError, "broken: got a link, expected a folder or a free name"),
        (
            ["checkpoint-3"] * 2,
            ["error"],
            uc.StorageError,
            r"checkpoint-3: holds a committed checkpoint \(save \w+, step 3\), expected a free "
            r'name; pass options with if_exists="replace" or if_exists="keep"',
        ),
        (
            ["newer"] * 2,
            ALL,
            uc.FormatError,
            r"unified_checkpoint\.json: got format version 2\.\d",
        ),
        (
            ["https://host/c"],
            ALL,
            uc.StorageError,
            "https://host/c: got a URL, expected a local folder",
        ),
        (["memory://c"], ALL, uc.StorageError, "memory://c: got a URL, expected a local folder"),
        (
            ["S3://bucket/c"],
            ALL,
            uc.StorageError,
            "S3://bucket/c: got a URL, expected a local folder, s3://bucket/prefix or "
            "gs://bucket/prefix; other URLs can only be read",
        ),
        (["file/c"], ALL, uc.StorageError, "file: cannot be created: File exists"),
        (["file/sub/c"] * 2, ALL, uc.StorageError, r"rank [01]: .*file"),
        (
            ["c0", "c1"],
            ALL,
            uc.RankError,
            r'save to .*: rank\(s\) 0: name "c0", rank\(s\) 1: name "c1"; expected the same on',
        ),
        (
            ["node-0/c", "node-1/c"],
            ALL,
            uc.StorageError,
            r"rank 1: .*: this rank does not see this folder, which rank 0 created; use one "
            r"folder that all ranks see",
        ),
    ],
)
def test_place_is_refused(
    places: Path,
    names: Sequence[str],
    choices: Sequence[str],
    kind: type[uc.CheckpointError],
    match: str,
) -> None:
    paths = [name if "://" in name else places / name for name in names]
    for if_exists in choices:
        options = uc.SaveOptions(if_exists=if_exists, timeout_seconds=HARD)
        check_refused(places, kind, match, [{**WHOLE, "options": options}] * len(names), paths)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
@pytest.mark.parametrize(
    ("obstacle", "match"),
    [
        ("file/sub/c", r"rank 1: .*sub: cannot be"),
        ("mine", r"rank [01]: .*mine: holds other files \(notes.txt\)"),
    ],
)
def test_obstacle_for_one_rank_is_the_error_of_all(
    tmp_path: Path, nodes: Sequence[int], obstacle: str, match: str, background: bool
) -> None:
    """Rank 1 meets something at the path, though all have saved beside it: all raise its error.

    They save again with the same plan, and the failed saves leave no keys in the store.
    """
    mine = tmp_path / f"node-{nodes[1]}" / "mine"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    (mine.parent / "file").write_bytes(b"")

    def act(comm: Comm) -> list[int]:
        counts = []
        root = tmp_path / f"node-{nodes[comm.rank]}"
        bad = root / (obstacle if comm.rank == 1 or obstacle == "mine" else "c")
        options = uc.SaveOptions(if_exists="replace")
        with on_node(comm, nodes) as checkpointer:
            for _ in range(6):
                save = saves(options=options, background=background)
                save(checkpointer, root / "c")
                with pytest.raises(uc.StorageError, match=match):
                    save(checkpointer, bad)
                counts.append(keys_in_store(comm))
        return counts

    counts = run_ranks(2, act)[0]
    assert counts[-1] <= counts[1] + 20, "the keys of one save, not of four"
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory. Skips where we may not mount."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("ro", r"rank 0: .*make folder failed: Read-only file system"),
        (
            "size=1m",
            r"rank 0: .*: lacks [\d.]+ \w+ of free space: got [\d.]+ \w+, expected ",
        ),
    ],
)
def test_file_system_without_room(tmp_path: Path, options: str, match: str) -> None:
    with mounted(tmp_path / "disk", options) as disk:
        check_refused(disk, uc.StorageError, match, [WHOLE] * 2)
        assert shutil.disk_usage(disk).used < 100_000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    text = r"rank 0: .*make folder failed: Permission denied"
    check_refused(tmp_path, uc.StorageError, text, [WHOLE] * 2)


def test_disk_fills_up(tmp_path: Path) -> None:
    """Something else takes the room after it was found to be free."""

    def fill(folder: str) -> None:
        with open(f"{disk}/other", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    with mounted(tmp_path / "disk", "size=19m") as disk:
        with pytest.raises(uc.StorageError, match=r"No space left on device"):
            uc.save(disk / "c", **WHOLE, attach=fill)
        assert [path.name for path in disk.iterdir()] == ["other"]
        (disk / "other").unlink()
        uc.save(disk / "c", **WHOLE)
        assert uc.verify(disk / "c", deep=True).ok

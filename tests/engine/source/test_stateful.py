"""Objects in `extra` and `rank_extra` get their own state back, or every rank raises."""

from __future__ import annotations

import copy
import json
import logging
import random
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.refusals import same_error
from tests.support.runtime.torch_state.generators import drawn
from tests.support.torch_training import process_group
from unified_ckpt.runtime.comm.comm import Comm

UNFILLED = {"w": torch.zeros(6)}  # where the tensors of a load do not matter
TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
W = {"w": torch.arange(6.0)}


@dataclass
class Counter:
    """Keeps and changes the loaded dict; a `load_state_dict` may do both."""

    state: dict[str, object] = field(default_factory=dict)
    loads: int = 0

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.state, self.loads = state_dict, self.loads + 1
        state_dict["loaded"] = True


@dataclass
class Elastic(Counter):
    """Loads states that another number of ranks saved."""

    arguments: object = None

    def load_from_ranks(self, saved: Sequence[dict[str, object]], *, rank: int, world: int) -> None:
        self.arguments = (len(saved), saved[-1]["value"], rank, world)


class Ignoring(Counter):
    """Loads nothing."""

    def load_from_ranks(self, saved: Sequence[dict[str, object]], *, rank: int, world: int) -> None:
        pass


@dataclass
class Broken(Counter):
    """Cannot load the state that it saved."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        raise KeyError("momentum")


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    warmup, cosine = (
        lr_scheduler.LinearLR(optimizer, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    )
    return {
        "sequence": lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3]),
        "cycle": lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        "lambda": lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    }


@pytest.mark.incident("Automodel#763")
def test_objects_of_a_plain_training_script(tmp_path: Path) -> None:
    """Schedulers, a scaler, averaged weights and random states, nested in dicts and lists."""

    def make_job() -> dict[str, object]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        extra = {
            "schedulers": schedulers(optimizer),
            "scaler": scaler,
            "averages": [average, (Counter({"n": 3}),)],
            "epoch": 3,
        }
        return {
            "model": model,
            "optimizer": optimizer,
            "extra": extra,
            "rank_extra": {"random": uc.RandomStates()},
        }

    job = make_job()
    extra = job["extra"]
    for _ in range(4):
        job["optimizer"].step()
        for scheduler in extra["schedulers"].values():
            scheduler.step(
                *([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
            )
    extra["averages"][0].update_parameters(nn.Linear(4, 4))
    extra["scaler"].load_state_dict({**extra["scaler"].state_dict(), "scale": 8.0})
    before = copy.copy(extra)
    uc.save(tmp_path / "c", **job, step=1)
    assert extra == before, "the caller's containers are as they were"
    expected = [drawn() for _ in range(3)]
    other = make_job()
    report = uc.load(tmp_path / "c", **other)
    assert [drawn() for _ in range(3)] == expected
    for name, scheduler in other["extra"]["schedulers"].items():
        saved_state = extra["schedulers"][name].state_dict()
        assert repr(scheduler.state_dict()) == repr(saved_state)
        assert scheduler.last_epoch == extra["schedulers"][name].last_epoch == 4
    rate, saved_rate = (each["optimizer"].param_groups[0]["lr"] for each in (other, job))
    assert rate == saved_rate
    assert other["extra"]["scaler"].get_scale() == 8.0
    average = other["extra"]["averages"][0]
    assert int(average.n_averaged) == 1
    assert torch.equal(average.module.weight, extra["averages"][0].module.weight)
    assert other["extra"]["averages"][1][0].state == {"n": 3, "loaded": True}
    assert report.extra["epoch"] == 3
    assert report.extra["averages"][1] == ({"n": 3},), "the report has the state as it was saved"
    assert (report.missing, report.kept, report.notes) == ((), (), ())
    assert isinstance(Counter(), Stateful)


def test_saved_states_and_objects_are_interchangeable(tmp_path: Path) -> None:
    """`extra={"scheduler": scheduler.state_dict()}` and `{"scheduler": scheduler}` save alike."""
    uc.save(tmp_path / "a", model=W, extra={"counter": {"n": 1}}, rank_extra={"counter": {"n": 2}})
    uc.save(
        tmp_path / "b",
        model=W,
        extra={"counter": Counter({"n": 1})},
        rank_extra={"counter": Counter({"n": 2})},
    )
    manifests = [
        json.loads((tmp_path / name / "unified_checkpoint.json").read_text()) for name in "ab"
    ]
    assert manifests[0]["extra"] == manifests[1]["extra"]
    assert manifests[0]["rank_extra"]["crc"] == manifests[1]["rank_extra"]["crc"]
    counter, rank_counter = Counter(), Counter()
    report = uc.load(
        tmp_path / "a", model=W, extra={"counter": counter}, rank_extra={"counter": rank_counter}
    )
    assert (counter.state, rank_counter.state) == (
        {"n": 1, "loaded": True},
        {"n": 2, "loaded": True},
    )
    assert (report.extra, report.rank_extra) == ({"counter": {"n": 1}}, {"counter": {"n": 2}})
    alone = Counter({"n": 5})
    uc.save(tmp_path / "d", model=W, extra=alone)
    uc.load(tmp_path / "d", model=W, extra=counter)
    assert counter.state == {"n": 5, "loaded": True}


def test_containers_keep_their_types(tmp_path: Path) -> None:
    counter = Counter({"n": 1})
    extra = OrderedDict(
        a=defaultdict(list, b=deque([counter, 1], maxlen=4)),
        c=(counter, {7: counter}),
        t=torch.ones(2),
        s=np.float32(1),
    )
    uc.save(tmp_path / "c", model=W, extra=extra)
    stored = uc.open(tmp_path / "c").extra
    assert (type(stored), type(stored["a"]), type(stored["a"]["b"]), stored["a"]["b"].maxlen) == (
        OrderedDict,
        defaultdict,
        deque,
        4,
    )
    assert (stored["a"]["b"][0], stored["c"]) == ({"n": 1}, ({"n": 1}, {7: {"n": 1}}))
    targets = Counter(), Counter()
    uc.load(tmp_path / "c", model=W, extra={"a": {"b": [targets[0]]}, "c": [None, {7: targets[1]}]})
    assert [target.loads for target in targets] == [1, 1]


# refusals


RECURSIVE: dict[str, object] = {"counter": Counter()}
RECURSIVE["again"] = [RECURSIVE, RECURSIVE]


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"a": [object()]}, r"extra\.a\[0\]: got an object"),
        ({"a": Counter}, r"extra\.a: got a type"),
        (
            {"a": Counter(None)},
            r"extra\.a: Counter\.state_dict\(\) returned None, expected the state",
        ),
        ({"a": Counter({"x": [print]})}, r"extra\.a\.x\[0\]: got a builtin_function_or_method"),
        (
            {"a": type("Bad", (Counter,), {"state_dict": lambda self: 1 / 0})()},
            r"extra\.a: Bad\.state_dict\(\) raised ZeroDivisionError",
        ),
        (RECURSIVE, r"extra\.again"),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("background", [False, True])
def test_unsupported_object_is_named_before_writing(
    tmp_path: Path, extra: object, match: str, background: bool
) -> None:
    with pytest.raises(uc.FormatError, match=match), uc.Checkpointer(tmp_path) as checkpointer:
        (checkpointer.save_async if background else checkpointer.save)("c", model=W, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_sharded_module_in_extra_is_refused(tmp_path: Path) -> None:
    with process_group():
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        )
        uc.save(tmp_path / "c", model=W, parts={"ema": module})
        for call in (partial(uc.save, tmp_path / "d"), partial(uc.load, tmp_path / "c")):
            with pytest.raises(
                uc.FormatError,
                match=r"extra\.ema: is a module with sharded parameters; save it with `parts`",
            ):
                call(model=W, extra={"ema": module})


@pytest.mark.incident("KempnerForge#51")
def test_missing_state_raises_on_every_rank(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c", model=W, extra={"counter": Counter({"n": 1}), "none": None, "list": [1]}
    )
    model, counters = {"w": torch.zeros(6)}, [Counter() for _ in range(2)]

    def act(comm: Comm) -> uc.LoadReport:
        more = {"list": [0, Counter()], "none": Counter()} if comm.rank else {}
        return make_checkpointer(comm).load(
            tmp_path / "c",
            model=model,
            extra={"counter": counters[comm.rank], **more},
            rank_extra={"loader": Counter()},
        )

    error = same_error(
        try_ranks(2, act), uc.MismatchError, r"extra\.list\[1\]: is not in the checkpoint"
    )
    assert error.missing == ("extra.list[1]", "extra.none", "rank_extra.loader")
    assert not model["w"].any()
    assert [counter.loads for counter in counters] == [0, 0]
    extra = {"counter": counters[0], "other": Counter()}
    report = uc.load(tmp_path / "c", model=model, extra=extra, strict=False)
    assert (report.missing, counters[0].loads) == (("extra.other",), 1)
    assert torch.equal(model["w"], W["w"])
    for file in ("unified_checkpoint.json", "digests.safetensors"):
        (tmp_path / "c" / file).unlink()  # now a Hugging Face folder
    with pytest.raises(uc.MismatchError, match=r"extra\.counter: is not in the checkpoint"):
        uc.load(tmp_path / "c", model=model, extra={"counter": Counter()})


def test_object_that_cannot_load_its_state_is_named_everywhere(tmp_path: Path) -> None:
    def act(comm: Comm) -> uc.LoadReport:
        kind = Broken if comm.rank == 1 else Counter
        objects = {"a": Counter({"n": 1}), "b": kind({"n": 2}), "c": Counter({"n": 3})}
        make_checkpointer(comm).save(tmp_path / "c", model=W, extra=objects)
        return make_checkpointer(comm).load(tmp_path / "c", model=UNFILLED, extra=objects)

    match = (
        r"rank 1: extra\.b: Broken could not load its state: KeyError: 'momentum'; the "
        r"tensors are loaded, but extra\.c are not"
    )
    same_error(try_ranks(2, act), uc.CheckpointError, match)


def test_damaged_state_of_another_rank(tmp_path: Path) -> None:
    """An IntegrityError lets a manager fall back to the previous checkpoint."""
    save_by(3, tmp_path / "c")
    flip(tmp_path / "c" / "rank_extra.safetensors", -3)
    with pytest.raises(
        uc.IntegrityError,
        match=r"rank_extra\.elastic: Elastic could not load its state: .* entry 2 has CRC",
    ):
        uc.load(tmp_path / "c", model=UNFILLED, rank_extra={"elastic": Elastic()})


# another number of ranks


def save_by(world: int, path: Path) -> None:
    def act(comm: Comm) -> None:
        rank_objects = {
            "elastic": Elastic({"value": comm.rank}),
            "loader": Counter({"value": comm.rank}),
            "deep": [Elastic({"value": -comm.rank})],
        }
        make_checkpointer(comm).save(path, model=W, rank_extra=rank_objects)

    run_ranks(world, act)


@pytest.mark.incident("Megatron-Bridge#5637")
@pytest.mark.parametrize(("saving", "loading"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_objects_with_another_world_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saving: int, loading: int
) -> None:
    """Objects with `load_from_ranks` get all states; others are unchanged, with one warning."""
    save_by(saving, tmp_path / "c")
    rank_objects = [
        {"elastic": Elastic(), "loader": Counter({"as": "it was"}), "deep": [Elastic()]}
        for _ in range(loading)
    ]
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        reports = run_ranks(
            loading,
            lambda comm: make_checkpointer(comm).load(
                tmp_path / "c", model=UNFILLED, rank_extra=rank_objects[comm.rank]
            ),
        )
    for rank, objects in enumerate(rank_objects):
        assert objects["elastic"].arguments == (saving, saving - 1, rank, loading)
        assert objects["deep"][0].arguments == (saving, 1 - saving, rank, loading)
        assert (objects["loader"].state, objects["elastic"].loads) == ({"as": "it was"}, 0)
    match = (
        f"rank_extra.loader: left unchanged: saved by {saving} rank\\(s\\), loaded by "
        f"{loading} rank\\(s\\); give them a load_from_ranks"
    )
    for report in reports:
        assert (report.kept, report.missing) == (("rank_extra.loader",), ())
        assert report.rank_extra is None
        assert re.search(match, report.notes[0])
    assert [record.message for record in caplog.records] == [reports[0].notes[0]]


def test_load_reads_only_required_rank_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_by(6, tmp_path / "c")
    read: list[int] = []
    read_rank_extra = uc.engine.folder.reader.Folder.rank_extra
    monkeypatch.setattr(
        uc.engine.folder.reader.Folder,
        "rank_extra",
        lambda self, rank: (read.append(rank), read_rank_extra(self, rank))[1],
    )
    cases: list[tuple[dict[str, object] | None, list[int]]] = [
        ({"elastic": Elastic()}, [0, 5]),
        (None, []),  # no object needs it
        ({"random": [Counter()]}, [0]),
    ]
    for objects, expected in cases:
        read.clear()
        uc.load(tmp_path / "c", model=UNFILLED, rank_extra=objects, strict=False)
        assert read == expected


@pytest.mark.incident("OpenTau#180")
def test_random_states_with_another_world_size(tmp_path: Path) -> None:
    """The states of 2 ranks are loaded by 3: each rank derives its own, and they differ."""

    def save(comm: Comm) -> None:
        objects = {"random": uc.RandomStates()}
        make_checkpointer(comm).save(tmp_path / "c", model=W, rank_extra=objects)

    def draw(comm: Comm, drawing_rank: int) -> float:
        objects = {"random": uc.RandomStates() if comm.rank == drawing_rank else Ignoring()}
        make_checkpointer(comm).load(tmp_path / "c", model=UNFILLED, rank_extra=objects)
        return float(torch.rand(()))

    run_ranks(2, save)
    # One by one: threads share one random state.
    draws = [run_ranks(3, partial(draw, drawing_rank=rank))[rank] for rank in range(3)]
    assert len(set(draws)) == 3


def test_sampler_with_another_world_size(tmp_path: Path) -> None:
    """Its position counts the samples of all ranks, so any rank's copy is enough."""

    def save(comm: Comm) -> None:
        sampler = uc.ElasticSampler(range(40), 2, comm.rank, seed=4)
        next(sampler.batches(DataLoader(range(40), 5, sampler=sampler)))
        make_checkpointer(comm).save(tmp_path / "c", model=W, rank_extra={"sampler": sampler})

    def load(comm: Comm) -> tuple[int, int]:
        sampler = uc.ElasticSampler(range(40), 3, comm.rank)
        make_checkpointer(comm).load(
            tmp_path / "c", model=UNFILLED, rank_extra={"sampler": sampler}
        )
        return sampler.seen, len(sampler)

    run_ranks(2, save)
    assert run_ranks(3, load) == [(10, 10)] * 3


class Drawing(Counter):
    """Draws random numbers while it loads, like a loader that starts its workers."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        drawn()


def test_random_states_are_loaded_last(tmp_path: Path) -> None:
    objects = {
        "rank_extra": {"random": uc.RandomStates(), "z": Drawing({"n": 1})},
        "extra": [Drawing({"n": 1})],
    }
    uc.save(tmp_path / "c", model=W, **objects)
    expected = drawn()
    uc.load(tmp_path / "c", model=UNFILLED, **objects)
    assert drawn() == expected


def generators(seed: int) -> dict[str, Any]:
    numpy = [
        np.random.Generator(kind(seed))
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    ]
    return {
        "torch": torch.Generator().manual_seed(seed),
        "numpy": numpy,
        "old": np.random.RandomState(seed),
        "python": (random.Random(seed),),
    }


def drawn_from(sources: dict[str, Any]) -> list[float]:
    """Draw twice from each; a second normal number may be cached between draws."""
    return [
        float(draw)
        for _ in range(2)
        for draw in (
            torch.randn((), generator=sources["torch"]),
            *(generator.normal() for generator in sources["numpy"]),
            *(generator.integers(9, dtype=np.uint32) for generator in sources["numpy"]),
            sources["old"].randn(),
            sources["python"][0].gauss(0, 1),
        )
    ][:-1]


@pytest.mark.parametrize("where", ["extra", "rank_extra"])
@pytest.mark.parametrize("background", [False, True])
def test_generators_are_restored_in_place(tmp_path: Path, where: str, background: bool) -> None:
    """A load restores each generator in place.

    A later draw does not change what a background save stores.
    """
    saved = generators(1)
    drawn_from(saved)
    with uc.Checkpointer(tmp_path) as checkpointer:
        (checkpointer.save_async if background else checkpointer.save)(
            "c", model=W, **{where: saved}
        )
        expected = drawn_from(saved)
    other = generators(2)
    uc.load(tmp_path / "c", model=UNFILLED, **{where: other})
    assert drawn_from(other) == expected


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        (
            np.random.default_rng(1),
            np.random.Generator(np.random.Philox(1)),
            "got numpy.random.Generator of PCG64 .*Philox",
        ),
        (
            random.Random(1),
            torch.Generator(),
            "got random.Random in the checkpoint, expected a torch.Generator on cpu",
        ),
        (
            {"generator": "torch.Generator on cuda", "state": torch.zeros(16)},
            torch.Generator(),
            "got torch.Generator on cuda",
        ),
        (
            torch.Generator().get_state(),
            torch.Generator(),
            "got no generator in the checkpoint, expected a torch.Generator on cpu",
        ),
    ],
    ids=["another algorithm", "another library", "another device", "a plain tensor"],
)
def test_generator_of_another_kind_is_refused(
    tmp_path: Path, saved: object, target: object, text: str
) -> None:
    uc.save(tmp_path / "c", model=W, rank_extra={"g": saved})
    model = {"w": torch.zeros(6)}
    with pytest.raises(uc.MismatchError, match=rf"rank_extra\.g: {text}"):
        uc.load(tmp_path / "c", model=model, rank_extra={"g": target})
    assert not model["w"].any()


# in the background, and with a manager


@pytest.mark.incident("Megatron-Bridge#3267")
def test_background_save_stores_state_of_the_call(tmp_path: Path) -> None:
    counter, local = Counter({"n": [1]}), Counter({"t": torch.zeros(3)})
    with uc.Checkpointer(tmp_path) as checkpointer:
        for name in "ab":  # the second has the plan of the first
            checkpointer.save_async(
                name, model=W, extra={"counter": counter}, rank_extra={"local": local}
            )
            counter.state["n"].append(2)
            local.state["t"].add_(1)
    for name, numbers, first in (("a", [1], 0), ("b", [1, 2], 1)):
        with uc.open(tmp_path / name) as opened:
            assert opened.extra == {"counter": {"n": numbers}}
            assert opened.rank_extra[0]["local"]["t"][0] == first


def test_state_dict_is_called_on_every_rank(tmp_path: Path) -> None:
    """All ranks call `state_dict` of an object in `extra`, because it may be collective.

    Ranks that return an empty state agree with rank 0.
    """
    called: list[int] = []

    def act(comm: Comm) -> None:
        def state_dict() -> dict[str, object]:
            called.append(comm.rank)
            return {} if comm.rank else {"of": 0}

        counter = Counter()
        counter.state_dict = state_dict
        make_checkpointer(comm).save(tmp_path / "c", model=W, extra={"counter": counter})

    run_ranks(3, act)
    assert sorted(called) == [0, 1, 2]
    with uc.open(tmp_path / "c") as opened:
        assert opened.extra == {"counter": {"of": 0}}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_manager_saves_and_restores_objects(tmp_path: Path, asynchronous: bool) -> None:
    options = uc.ManagerOptions(interval_steps=2, asynchronous=asynchronous)
    counter, fresh = Counter({"n": 0}), Counter()
    with uc.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.restore(model=W, extra={"counter": counter}) is None
        for step in range(1, 6):
            counter.state["n"] = step
            manager.save(step, model=W, extra={"counter": counter})
    with uc.CheckpointManager(tmp_path, options=options) as manager:
        report = manager.restore(model=UNFILLED, extra={"counter": fresh})
        assert (report.step, fresh.state["n"]) == (4, 4)
        with pytest.raises(uc.MismatchError, match=r"extra\.scheduler: is not in the checkpoint"):
            manager.restore(model=UNFILLED, extra={"scheduler": Counter()})
    options = uc.ManagerOptions(load_parameters_path=str(tmp_path / "checkpoint-4"))
    with uc.CheckpointManager(tmp_path / "other", options=options) as manager:
        report = manager.restore(model=UNFILLED, extra={"counter": fresh, "other": Counter()})
    assert (report.step, fresh.loads) == (0, 1), "only the model is loaded"


# torchdata


@TORCHDATA
@pytest.mark.parametrize(
    ("saved", "workers", "batch_count"),
    [
        *product(["loader random", "loader random generator", "loader"], [0], [3, 7]),
        ("loader random", 2, 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("loader random", 2, 7),
                *product(["loader random generator", "loader"], [2], [3, 7]),
            ]
        ),
    ],
)
def test_epochs_after_resume_equal_the_run(
    tmp_path: Path, saved: str, workers: int, batch_count: int
) -> None:
    """A starting loader draws from its generator, or from the random states of the training. One
    that is saved alone still ends its epoch.
    """

    def make_job(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        generator = None if saved == "loader random" else torch.Generator().manual_seed(seed)
        loader = StatefulDataLoader(
            range(20),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            collate_fn=list,
            generator=generator,
        )
        return {"loader": loader, "random": uc.RandomStates(), "generator": generator}

    def epochs(loader: StatefulDataLoader, count: int) -> list[object]:
        return [(batch, float(torch.rand(()))) for _ in range(count) for batch in loader]

    job, other = make_job(1), make_job(1 if saved == "loader" else 2)
    epochs(job["loader"], 1)
    batches = iter(job["loader"])
    assert len(list(islice(batches, batch_count))) == batch_count
    if batch_count == 7:
        assert list(batches) == []
    uc.save(tmp_path / "c", model=W, rank_extra={name: job[name] for name in saved.split()})
    rest = [(batch, float(torch.rand(()))) for batch in batches]
    whole = 0 if saved == "loader" else 2
    expected = rest + epochs(job["loader"], whole)
    targets = {name: other[name] for name in saved.split()}
    uc.load(tmp_path / "c", model=UNFILLED, rank_extra=targets)
    actual = epochs(other["loader"], whole + (batch_count == 3))
    if saved == "loader":
        actual, expected = ([batch for batch, _ in drawn] for drawn in (actual, expected))
    assert actual == expected

"""Objects in `extra` and `rank_extra` get their own state back, or every rank raises."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from tests.support.generators import drawn
from tests.support.refusals import same_error
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, run_ranks, try_ranks

TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
W = {"w": torch.arange(6.0)}


@dataclass
class Counter:
    """Keeps what it is given, and changes it: both are allowed to a `load_state_dict`."""

    state: dict[str, object] = field(default_factory=dict)
    loads: int = 0

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.state, self.loads = state_dict, self.loads + 1
        state_dict["mine"] = True


@dataclass
class Elastic(Counter):
    """Takes the states of another number of ranks."""

    of: object = None

    def load_from_ranks(self, saved: Sequence[dict[str, object]], *, rank: int, world: int) -> None:
        self.of = (len(saved), saved[-1]["at"], rank, world)


@dataclass
class Broken(Counter):
    """Does not take what it gave."""

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


def test_what_a_plain_script_has_goes_in_as_it_is(tmp_path: Path) -> None:
    """Schedulers of every kind, a scaler, an average of the weights, random states, in dicts and
    lists, saved and loaded alike.
    """

    def made() -> dict[str, object]:
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

    job = made()
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
    other = made()
    report = uc.load(tmp_path / "c", **other)
    assert [drawn() for _ in range(3)] == expected
    for name, scheduler in other["extra"]["schedulers"].items():
        theirs = extra["schedulers"][name].state_dict()
        assert repr(scheduler.state_dict()) == repr(theirs)
        assert scheduler.last_epoch == extra["schedulers"][name].last_epoch == 4
    assert other["extra"]["scaler"].get_scale() == 8.0
    average = other["extra"]["averages"][0]
    assert int(average.n_averaged) == 1
    assert torch.equal(average.module.weight, extra["averages"][0].module.weight)
    assert other["extra"]["averages"][1][0].state == {"n": 3, "mine": True}
    assert report.extra["epoch"] == 3
    assert report.extra["averages"][1] == ({"n": 3},), "the report has the state as it was saved"
    assert (report.missing, report.kept, report.notes) == ((), (), ())
    assert isinstance(Counter(), Stateful)


def test_a_checkpoint_of_states_fills_objects_and_the_reverse(tmp_path: Path) -> None:
    """`extra={"scheduler": scheduler.state_dict()}`, as it was always written, is the same
    checkpoint.
    """
    uc.save(tmp_path / "a", model=W, extra={"counter": {"n": 1}}, rank_extra={"counter": {"n": 2}})
    uc.save(
        tmp_path / "b",
        model=W,
        extra={"counter": Counter({"n": 1})},
        rank_extra={"counter": Counter({"n": 2})},
    )
    told = [json.loads((tmp_path / name / "unified_checkpoint.json").read_text()) for name in "ab"]
    assert told[0]["extra"] == told[1]["extra"]
    assert told[0]["rank_extra"]["crc"] == told[1]["rank_extra"]["crc"]
    one, own = Counter(), Counter()
    report = uc.load(tmp_path / "a", model=W, extra={"counter": one}, rank_extra={"counter": own})
    assert (one.state, own.state) == ({"n": 1, "mine": True}, {"n": 2, "mine": True})
    assert (report.extra, report.rank_extra) == ({"counter": {"n": 1}}, {"counter": {"n": 2}})
    alone = Counter({"n": 5})
    uc.save(tmp_path / "d", model=W, extra=alone)
    uc.load(tmp_path / "d", model=W, extra=one)
    assert one.state == {"n": 5, "mine": True}


def test_containers_keep_their_types(tmp_path: Path) -> None:
    counter = Counter({"n": 1})
    extra = OrderedDict(
        a=defaultdict(list, b=deque([counter, 1], maxlen=4)),
        c=(counter, {7: counter}),
        t=torch.ones(2),
        s=np.float32(1),
    )
    uc.save(tmp_path / "c", model=W, extra=extra)
    found = uc.open(tmp_path / "c").extra
    assert (type(found), type(found["a"]), type(found["a"]["b"]), found["a"]["b"].maxlen) == (
        OrderedDict,
        defaultdict,
        deque,
        4,
    )
    assert (found["a"]["b"][0], found["c"]) == ({"n": 1}, ({"n": 1}, {7: {"n": 1}}))
    into = Counter(), Counter()
    uc.load(tmp_path / "c", model=W, extra={"a": {"b": [into[0]]}, "c": [None, {7: into[1]}]})
    assert [one.loads for one in into] == [1, 1]


# refusals


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
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, extra: object, match: str, background: bool
) -> None:
    with pytest.raises(uc.FormatError, match=match), uc.Checkpointer(tmp_path) as checkpointer:
        (checkpointer.save_async if background else checkpointer.save)("c", model=W, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_holds_itself_is_refused(tmp_path: Path) -> None:
    extra: dict[str, object] = {"counter": Counter()}
    extra["again"] = [extra, extra]
    with pytest.raises(uc.FormatError, match=r"extra\.again"):
        uc.save(tmp_path / "c", model=W, extra=extra)


def test_a_sharded_module_belongs_into_parts(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        )
        with pytest.raises(
            uc.FormatError,
            match=r"extra\.ema: is a module with sharded parameters; save it with `parts`",
        ):
            uc.save(tmp_path / "c", model=W, extra={"ema": module})
        uc.save(tmp_path / "c", model=W, parts={"ema": module})
        with pytest.raises(
            uc.FormatError,
            match=r"extra\.ema: is a module with sharded parameters; save it with `parts`",
        ):
            uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, extra={"ema": module})
    finally:
        torch.distributed.destroy_process_group()


def test_missing_state_is_an_error_on_every_rank_before_a_byte(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c", model=W, extra={"counter": Counter({"n": 1}), "none": None, "list": [1]}
    )
    targets = [{"w": torch.zeros(6)} for _ in range(2)]
    counters = [Counter() for _ in range(2)]

    def act(comm: Comm) -> uc.LoadReport:
        extra = {
            "counter": counters[comm.rank],
            **({"list": [0, Counter()], "none": Counter()} if comm.rank else {}),
        }
        return make_checkpointer(comm).load(
            tmp_path / "c", model=targets[comm.rank], extra=extra, rank_extra={"loader": Counter()}
        )

    error = same_error(
        try_ranks(2, act), uc.MismatchError, r"extra\.list\[1\]: is not in the checkpoint"
    )
    assert error.missing == ("extra.list[1]", "extra.none", "rank_extra.loader")
    assert all(torch.equal(target["w"], torch.zeros(6)) for target in targets)
    assert [counter.loads for counter in counters] == [0, 0]
    report = uc.load(
        tmp_path / "c",
        model=targets[0],
        extra={"counter": counters[0], "other": Counter()},
        strict=False,
    )
    assert report.missing == ("extra.other",)
    assert counters[0].loads == 1
    assert torch.equal(targets[0]["w"], W["w"])


def test_a_huggingface_folder_has_nothing_for_an_object(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=W)
    (tmp_path / "c" / "unified_checkpoint.json").unlink()
    (tmp_path / "c" / "digests.safetensors").unlink()
    with pytest.raises(uc.MismatchError, match=r"extra\.scheduler: is not in the checkpoint"):
        uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, extra={"scheduler": Counter()})


def test_object_that_cannot_load_its_state_is_named_everywhere(tmp_path: Path) -> None:
    def act(comm: Comm) -> uc.LoadReport:
        kind = Broken if comm.rank == 1 else Counter
        one = {"a": Counter({"n": 1}), "b": kind({"n": 2}), "c": Counter({"n": 3})}
        make_checkpointer(comm).save(tmp_path / "c", model=W, extra=one)
        return make_checkpointer(comm).load(tmp_path / "c", model={"w": torch.zeros(6)}, extra=one)

    match = (
        r"rank 1: extra\.b: Broken could not load its state: KeyError: 'momentum'; the "
        r"tensors are loaded, but extra\.c are not"
    )
    same_error(try_ranks(2, act), uc.CheckpointError, match)


def test_a_damaged_state_of_another_rank_is_one_of_integrity(tmp_path: Path) -> None:
    """For a manager, who then takes the checkpoint before."""
    save_by(3, tmp_path / "c")
    file = tmp_path / "c" / "rank_extra.safetensors"
    body = bytearray(file.read_bytes())
    body[-3] ^= 1
    file.write_bytes(body)
    with pytest.raises(
        uc.IntegrityError,
        match=r"rank_extra\.elastic: Elastic could not load its state: .* entry 2 has CRC",
    ):
        uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra={"elastic": Elastic()})


# another number of ranks


def save_by(world: int, path: Path) -> None:
    def act(comm: Comm) -> None:
        own = {
            "elastic": Elastic({"at": comm.rank}),
            "loader": Counter({"at": comm.rank}),
            "deep": [Elastic({"at": -comm.rank})],
        }
        make_checkpointer(comm).save(path, model=W, rank_extra=own)

    run_ranks(world, act)


@pytest.mark.parametrize(("saving", "loading"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_another_number_of_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saving: int, loading: int
) -> None:
    """Objects that know how get all states; the others stay as they are, which one warning says."""
    save_by(saving, tmp_path / "c")
    own = [
        {"elastic": Elastic(), "loader": Counter({"as": "it was"}), "deep": [Elastic()]}
        for _ in range(loading)
    ]
    with caplog.at_level(logging.WARNING, logger="unified_ckpt"):
        reports = run_ranks(
            loading,
            lambda comm: make_checkpointer(comm).load(
                tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra=own[comm.rank]
            ),
        )
    for rank, objects in enumerate(own):
        assert objects["elastic"].of == (saving, saving - 1, rank, loading)
        assert objects["deep"][0].of == (saving, 1 - saving, rank, loading)
        assert (objects["loader"].state, objects["elastic"].loads) == ({"as": "it was"}, 0)
    match = (
        f"rank_extra.loader: left unchanged: saved by {saving} rank\\(s\\), loaded by "
        f"{loading}; give them a load_from_ranks"
    )
    for report in reports:
        assert (report.kept, report.missing, report.rank_extra) == (
            ("rank_extra.loader",),
            (),
            None,
        )
        with pytest.raises(RuntimeError, match=match):
            raise RuntimeError(report.notes[0])
    assert [record.message for record in caplog.records] == [reports[0].notes[0]]


def test_reading_one_ranks_state_does_not_read_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_by(6, tmp_path / "c")
    read: list[int] = []
    theirs = uc.engine.folder.reader.Folder.rank_extra
    monkeypatch.setattr(
        uc.engine.folder.reader.Folder,
        "rank_extra",
        lambda self, rank: (read.append(rank), theirs(self, rank))[1],
    )
    uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra={"elastic": Elastic()})
    assert read == [0, 5]
    read.clear()
    uc.load(tmp_path / "c", model={"w": torch.zeros(6)})
    assert read == [], "nobody wants it"
    uc.load(
        tmp_path / "c",
        model={"w": torch.zeros(6)},
        rank_extra={"random": [Counter()]},
        strict=False,
    )
    assert read == [0]


def test_random_states_of_another_number_of_ranks_are_derived_and_differ(tmp_path: Path) -> None:
    """Where others die (the saved states of 4 ranks do not fit 3), or go on with one rank's states
    on all.
    """
    torch.manual_seed(5)
    run_ranks(
        2,
        lambda comm: make_checkpointer(comm).save(
            tmp_path / "c", model=W, rank_extra={"random": uc.RandomStates()}
        ),
    )
    found = []
    for rank in range(3):  # one by one: the ranks here are threads, which have one random state

        def act(comm: Comm, of: int = rank) -> float:
            own = {"random": uc.RandomStates() if comm.rank == of else Elastic()}
            make_checkpointer(comm).load(
                tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra=own, strict=False
            )
            return float(torch.rand(()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Elastic, "load_from_ranks", lambda self, saved, **_: None)
            found.append(run_ranks(3, act)[rank])
    assert len(set(found)) == 3


def test_a_sampler_in_rank_extra_goes_on_over_any_number_of_ranks(tmp_path: Path) -> None:
    """Where it need not be: its place is that of all ranks."""

    def save(comm: Comm) -> None:
        sampler = uc.ElasticSampler(range(40), 2, comm.rank, seed=4)
        next(sampler.batches(DataLoader(range(40), 5, sampler=sampler)))
        make_checkpointer(comm).save(tmp_path / "c", model=W, rank_extra={"sampler": sampler})

    def load(comm: Comm) -> tuple[int, int]:
        sampler = uc.ElasticSampler(range(40), 3, comm.rank)
        make_checkpointer(comm).load(
            tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra={"sampler": sampler}
        )
        return sampler.seen, len(sampler)

    run_ranks(2, save)
    assert run_ranks(3, load) == [(10, 10)] * 3


class Drawing(Counter):
    """Draws while it loads, as a loader does that starts its workers."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        drawn()


def test_random_states_are_the_last_to_be_loaded(tmp_path: Path) -> None:
    uc.save(
        tmp_path / "c",
        model=W,
        rank_extra={"random": uc.RandomStates(), "z": Drawing({"n": 1})},
        extra=[Drawing({"n": 1})],
    )
    expected = drawn()
    uc.load(
        tmp_path / "c",
        model={"w": torch.zeros(6)},
        rank_extra={"random": uc.RandomStates(), "z": Drawing()},
        extra=[Drawing()],
    )
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


def drawn_from(of: dict[str, Any]) -> list[float]:
    """Twice a normal number each: half of a pair is held back."""
    return [
        float(draw)
        for _ in range(2)
        for draw in (
            torch.randn((), generator=of["torch"]),
            *(one.normal() for one in of["numpy"]),
            *(one.integers(9, dtype=np.uint32) for one in of["numpy"]),
            of["old"].randn(),
            of["python"][0].gauss(0, 1),
        )
    ][:-1]


@pytest.mark.parametrize("where", ["extra", "rank_extra"])
@pytest.mark.parametrize("background", [False, True])
def test_generators_are_objects(tmp_path: Path, where: str, background: bool) -> None:
    """Each goes on where it was, in place; a later draw does not change what a save in the
    background stores.
    """
    mine = generators(1)
    drawn_from(mine)
    with uc.Checkpointer(tmp_path) as checkpointer:
        (checkpointer.save_async if background else checkpointer.save)(
            "c", model=W, **{where: mine}
        )
        expected = drawn_from(mine)
    other = generators(2)
    uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, **{where: other})
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
def test_a_generator_of_another_kind_is_refused(
    tmp_path: Path, saved: object, target: object, text: str
) -> None:
    uc.save(tmp_path / "c", model=W, rank_extra={"g": saved})
    model = {"w": torch.zeros(6)}
    with pytest.raises(uc.MismatchError, match=rf"rank_extra\.g: {text}"):
        uc.load(tmp_path / "c", model=model, rank_extra={"g": target})
    assert not model["w"].any()


# in the background, and with a manager


def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path: Path) -> None:
    counter, own = Counter({"n": [1]}), Counter({"t": torch.zeros(3)})
    with uc.Checkpointer(tmp_path) as checkpointer:
        for name in "ab":  # the second has the plan of the first
            checkpointer.save_async(
                name, model=W, extra={"counter": counter}, rank_extra={"own": own}
            )
            counter.state["n"].append(2)
            own.state["t"].add_(1)
    assert [uc.open(tmp_path / name).extra for name in "ab"] == [
        {"counter": {"n": [1]}},
        {"counter": {"n": [1, 2]}},
    ]
    assert [float(uc.open(tmp_path / name).rank_extra[0]["own"]["t"][0]) for name in "ab"] == [0, 1]


def test_objects_on_every_rank_are_saved(tmp_path: Path) -> None:
    """`state_dict` of an object in `extra` may be collective: all ranks call it, rank 0's is
    stored.
    """
    counters = [
        Counter({"of": 0}),
        *(Counter({"of": print}) for _ in range(2)),
    ]  # which could not be stored
    called = [0, 0, 0]

    def act(comm: Comm) -> None:
        def state_dict() -> dict[str, object]:
            called[comm.rank] += 1
            return counters[comm.rank].state

        counters[comm.rank].state_dict = state_dict
        make_checkpointer(comm).save(
            tmp_path / "c", model=W, extra={"counter": counters[comm.rank]}
        )

    run_ranks(3, act)
    assert called == [1, 1, 1]
    assert uc.open(tmp_path / "c").extra == {"counter": {"of": 0}}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_saves_and_restores_objects(tmp_path: Path, asynchronous: bool) -> None:
    options = uc.ManagerOptions(interval_steps=2, asynchronous=asynchronous)
    counter = Counter({"n": 0})
    with uc.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.restore(model=W, extra={"counter": counter}) is None
        for step in range(1, 6):
            counter.state["n"] = step
            manager.save(
                step, model=W, extra={"counter": counter}, rank_extra={"random": uc.RandomStates()}
            )
    fresh = Counter()
    with uc.CheckpointManager(tmp_path, options=options) as manager:
        report = manager.restore(
            model={"w": torch.zeros(6)},
            extra={"counter": fresh},
            rank_extra={"random": uc.RandomStates()},
        )
        assert (report.step, fresh.state["n"]) == (4, 4)
        with pytest.raises(uc.MismatchError, match=r"extra\.scheduler: is not in the checkpoint"):
            manager.restore(model={"w": torch.zeros(6)}, extra={"scheduler": Counter()})
    options = uc.ManagerOptions(load_parameters_path=str(tmp_path / "checkpoint-4"))
    with uc.CheckpointManager(tmp_path / "other", options=options) as manager:
        report = manager.restore(
            model={"w": torch.zeros(6)}, extra={"counter": fresh, "scheduler": Counter()}
        )
        assert (report.step, fresh.loads) == (None, 1), "only the model is from there"


# torchdata


class Numbers:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 20


@TORCHDATA
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_its_own_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    def made() -> StatefulDataLoader:
        return StatefulDataLoader(
            Numbers(),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            collate_fn=list,
            generator=torch.Generator().manual_seed(1),
        )

    loader, other = made(), made()
    walk = iter(loader)
    for _ in range(3):
        next(walk)
    uc.save(tmp_path / "c", model=W, rank_extra={"loader": loader})
    expected = list(walk)
    uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra={"loader": other})
    assert list(other) == expected


@TORCHDATA
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seen", [3, 7], ids=["midway", "epoch over"])
@pytest.mark.parametrize("own", [False, True], ids=["random states", "generator"])
def test_the_epochs_after_a_resume_are_those_of_the_run(
    tmp_path: Path, workers: int, seen: int, own: bool
) -> None:
    """A loader draws when it starts: of its own generator, or of the random states, which the
    training draws from, too.
    """

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own else None
        loader = StatefulDataLoader(
            Numbers(),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            collate_fn=list,
            generator=generator,
        )
        return {
            "loader": loader,
            "random": uc.RandomStates(),
            **({"generator": generator} if own else {}),
        }

    def epochs(loader: StatefulDataLoader, count: int) -> list[object]:
        return [(batch, float(torch.rand(()))) for _ in range(count) for batch in loader]

    mine, other = made(1), made(2)
    epochs(mine["loader"], 1)
    walk = iter(mine["loader"])
    for _ in range(seen):
        next(walk)
    if seen == 7:
        assert list(walk) == []
    uc.save(tmp_path / "c", model=W, rank_extra=mine)
    expected = [(batch, float(torch.rand(()))) for batch in walk] + epochs(mine["loader"], 2)
    uc.load(tmp_path / "c", model={"w": torch.zeros(6)}, rank_extra=other)
    assert epochs(other["loader"], 3 if seen == 3 else 2) == expected

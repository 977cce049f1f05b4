"""Saves in the background, of thread ranks and of one process: what is saved is what was there at
the call, whatever happens since.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn

import unified_ckpt as uc
from tests.support.async_saves import (
    BUFFERS,
    QUICK,
    SECONDS,
    TENSORS,
    Gate,
    Late,
    Net,
    Storages,
    gate,
    late,
    made,
    storages,
    values,
)
from tests.support.refusals import same_error
from tests.support.reshard_cases import (
    INTS,
    Case,
    Recorded,
    Writes,
    cases,
    check_folder,
    check_written_once,
    request_of,
)
from unified_ckpt.core.planning import save_plan
from unified_ckpt.engine.save import save as save_module
from unified_ckpt.engine.save import snapshot as snapshot_module
from unified_ckpt.engine.save.pending import PendingSave
from unified_ckpt.engine.save.planned_save import SaveCache, SaveCall
from unified_ckpt.engine.save.save import begin_save, save
from unified_ckpt.engine.save.snapshot import Snapshot
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage
from unified_ckpt.testing import make_checkpointer, run_ranks, try_ranks

__all__ = ["gate", "late", "storages"]  # fixtures

NAME = "checkpoint-1"


# storage


class Broken(LocalStorage):
    """Of all its operations that change something, number `at` fails. It works before and after."""

    def __init__(self, root: str, at: int) -> None:
        super().__init__(root)
        self.count, self._at, self._lock2 = 0, at, threading.Lock()

    def _call(self, what: str, name: str, call: Callable[[], Any]) -> Any:
        if what.partition(" ")[0] in ("make", "resize", "write", "fsync", "rename", "remove"):
            with self._lock2:
                number, self.count = self.count, self.count + 1
            if number == self._at:
                return super()._call(what, name, self._fail)
        return super()._call(what, name, call)

    @staticmethod
    def _fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Full(LocalStorage):
    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        def fail() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._call(f"write at byte {start} of", name, fail)


# a state with everything in it


def layout_of(world: int, *, replicas: int = 1) -> uc.Layout | None:
    cut = world // replicas
    rules = {name: {"tp": dim} for name, (_, _, dim) in TENSORS.items() if dim is not None}
    shapes = {name: TENSORS[name][0] for name in rules}
    return (
        uc.Layout(mesh={"dp": replicas, "tp": cut}, rules=rules, shapes=shapes)
        if world > 1
        else None
    )


def spoil(net: Net, optimizer: torch.optim.Optimizer, ema: Mapping[str, Tensor]) -> None:
    """Changes every element that there is."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers(), *ema.values()):
            tensor.zero_()
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
    for group in optimizer.param_groups:
        group["lr"] = -1.0


def check(folder: Path, seed: int, *, model_dtype: torch.dtype | None = None) -> None:
    """The checkpoint is whole and holds the state with this seed, bit for bit."""
    report = uc.verify(folder, deep=True)
    assert report.ok, report.problems
    parameters = [name for name in TENSORS if name not in BUFFERS]
    with uc.open(folder) as opened:
        for name, (shape, dtype, _) in TENSORS.items():
            expected, found = values(shape, seed, dtype), opened["model"][name][...]
            cast = model_dtype is not None and dtype == torch.float32
            assert same_bits(found, expected.to(model_dtype) if cast else expected), f"model:{name}"
            if cast:
                assert same_bits(opened["master_weights"][name][...], expected), (
                    f"master_weights:{name}"
                )
        for number, name in enumerate(parameters):
            shape, dtype, _ = TENSORS[name]
            for more, state in enumerate(("exp_avg", "exp_avg_sq")):
                assert same_bits(
                    opened["optimizer"][f"{name}/{state}"][...],
                    values(shape, seed + number + 1 + more, dtype),
                ), f"{name}/{state}"
            assert opened["optimizer"][f"{name}/step"][...].item() == seed + 1
        assert same_bits(opened["ema"]["columns"][...], values(TENSORS["columns"][0], seed + 50))
        assert same_bits(opened["ema"]["bias"][...], values((7,), seed + 51))
    groups = json.loads((folder / "unified_checkpoint.json").read_text())["optimizer"]["groups"]
    assert [group["options"]["lr"] for group in groups] == [0.1]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


Found = list[Any]


# what is saved is what was there at the call


@pytest.mark.parametrize("model_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_async_tensors_changed_after_the_call(
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    replicas: int,
    model_dtype: str | None,
) -> None:
    """Not a byte has been written when they change. Two saves in a row, so that buffers are used
    again.
    """
    monkeypatch.setattr(save_plan, "TILE_NBYTES", 64 << 10)
    options = QUICK.model_copy(update={"model_dtype": model_dtype, "max_file_bytes": 150_000})
    changed = threading.Barrier(world, action=gate.open)
    again = threading.Barrier(world, action=gate.opened.clear)

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for seed in (3, 9):
                net, optimizer, ema = made(comm, seed, replicas=replicas)
                pending = checkpointer.save_async(
                    tmp_path / f"c{seed}", model=net, optimizer=optimizer, parts={"ema": ema}, step=seed,  # noqa: E501
                    layout=layout_of(world, replicas=replicas), options=options,
                )  # fmt: skip
                assert pending.staged()
                spoil(net, optimizer, ema)
                changed.wait(SECONDS)
                assert pending.result(SECONDS).step == seed
                again.wait(SECONDS)

    run_ranks(world, act)
    for seed in (3, 9):
        check(tmp_path / f"c{seed}", seed, model_dtype=torch.bfloat16 if model_dtype else None)


@given(cases(max_world=5, max_tensors=4, loads=1))
@settings(max_examples=40)
def test_async_any_mesh(case: Case) -> None:
    check_any(case)


@pytest.mark.long
@given(cases(max_world=12, max_tensors=6, loads=1))
@settings(max_examples=400)
def test_async_any_mesh_many_examples(case: Case) -> None:
    check_any(case)


def check_any(case: Case) -> None:
    """Any dtypes, strides and cuts: each byte written once, the folder right, every file as `save`
    writes it.
    """
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_plan, "TILE_NBYTES", 64 << 10)
        writes, roots = Writes(), [Path(name) / kind for kind in ("waited", "background")]
        for root in roots:
            root.mkdir()

        def act(comm: Comm) -> None:
            kept, state = SaveCache(), case.state(comm.rank)
            save(
                SaveCall(comm, LocalStorage(str(roots[0])), NAME, request_of(state), kept, SECONDS)
            )
            storage = Recorded(roots[1], writes, comm.rank)
            staged = begin_save(
                SaveCall(comm, storage, NAME, request_of(state), kept, SECONDS), lazy=False
            )
            staged.copy()
            for part in state.tensors:
                part.local.view(INTS[part.local.element_size()]).bitwise_not_()
            staged.finish(None)
            kept.close()

        run_ranks(case.saved.world, act)
        check_folder(case, roots[1] / NAME)
        check_written_once(writes, roots[1] / NAME)
        check_same_files(*(root / NAME for root in roots))


def check_same_files(one: Path, other: Path) -> None:
    """Byte for byte; the manifests but for what each save has of its own."""
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for path in one.iterdir():
        if path.name == "unified_checkpoint.json":
            first, second = (
                json.loads((folder / path.name).read_text()) for folder in (one, other)
            )
            for manifest in (first, second):
                for key in ("save_id", "created", "seconds", "crc"):
                    assert manifest.pop(key)
            assert first == second
        else:
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name


EXTRA = {
    "epoch": 1,
    "seen": [1, (2, {3: b"x"})],
    "nan": float("inf"),
    "table": Counter(a=1),
    "tensor": torch.arange(6.0)[::2],
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("lazy", [False, True])
def test_async_writes_the_same_files(tmp_path: Path, world: int, lazy: bool) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            net, optimizer, ema = made(comm, 1)
            what = {
                "model": net, "optimizer": optimizer, "parts": {"ema": ema}, "extra": EXTRA, "rank_extra": {"rank": comm.rank},  # noqa: E501
                "layout": layout_of(world), "step": 7, "metrics": {"loss": 0.5}, "options": QUICK,
                "attach": lambda folder: Path(folder, "config.json").write_text("{}"),
            }  # fmt: skip
            checkpointer.save(tmp_path / "waited", **what)
            checkpointer.save_async(tmp_path / "background", **what, lazy=lazy).result(SECONDS)

    run_ranks(world, act)
    check_same_files(tmp_path / "waited", tmp_path / "background")


def test_async_non_tensors_changed_after_the_call(tmp_path: Path, gate: Gate) -> None:
    """`extra` and `rank_extra` in depth, options of param groups, state in lists, metrics."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        [{"params": [net.weight], "lr": 0.5, "tags": ["old"]}, {"params": [net.bias], "lr": 0.25}]
    )
    optimizer.state[net.weight] = {"history": [torch.ones(3), {"n": 1}]}
    extra = {
        "list": [1, [2]],
        "tensor": torch.ones(4),
        "array": torch.ones(4).numpy(),
        "bytes": bytearray(b"old"),
    }
    rank_extra, metrics = {"rng": [torch.zeros(5)]}, {"loss": 1.0}
    pending = uc.save_async(
        tmp_path / "c",
        model=net,
        optimizer=optimizer,
        extra=extra,
        rank_extra=rank_extra,
        metrics=metrics,
        options=QUICK,
    )
    extra["list"][1].append(3)
    extra["tensor"].zero_()
    extra["array"][:] = 9
    extra["bytes"][:] = b"new"
    extra["more"] = 1
    rank_extra["rng"][0].fill_(7)
    metrics["loss"] = 2.0
    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.param_groups[0]["tags"].append("new")
    optimizer.param_groups.reverse()
    optimizer.state[net.weight]["history"][0].zero_()
    optimizer.state[net.weight]["history"][1]["n"] = 2
    assert not pending.done()
    gate.open()
    pending.result(SECONDS)
    other = nn.Linear(3, 2)
    fresh = torch.optim.SGD(
        [{"params": [other.weight], "lr": 0, "tags": []}, {"params": [other.bias], "lr": 0}]
    )
    report = uc.load(tmp_path / "c", model=other, optimizer=fresh)
    assert report.extra["list"] == [1, [2]]
    assert "more" not in report.extra
    assert torch.equal(report.extra["tensor"], torch.ones(4))
    assert report.extra["array"].tolist() == [1] * 4
    assert bytes(report.extra["bytes"]) == b"old"
    assert torch.equal(report.rank_extra["rng"][0], torch.zeros(5))
    assert [group["lr"] for group in fresh.param_groups] == [0.5, 0.25]
    assert fresh.param_groups[0]["tags"] == ["old"]
    history = fresh.state[other.weight]["history"]
    assert torch.equal(history[0], torch.ones(3))
    assert history[1] == {"n": 1}
    assert json.loads((tmp_path / "c" / "unified_checkpoint.json").read_text())["metrics"] == {
        "loss": 1.0
    }


# lazy: the copy is made beside the next forward and backward pass


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(150, 120),
            nn.BatchNorm1d(120),
            nn.Linear(120, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def backward(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    net.zero_grad()
    net(torch.randn(9, 150)).square().mean().backward()


def copied(net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = {f"model:{name}": tensor.clone() for name, tensor in net.state_dict().items()}
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            found |= {
                f"optimizer:{names[parameter]}/{state}": tensor.clone()
                for state, tensor in states.items()
            }
    return found


def check_copied(folder: Path, expected: Mapping[str, Tensor]) -> None:
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as opened:
        for key, tensor in expected.items():
            part, _, name = key.partition(":")
            assert same_bits(opened[part][name][...], tensor), key


def in_background(act: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs a call in a thread; what it returned or raised comes into the list."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def trained() -> tuple[Normed, list[torch.optim.Optimizer]]:
    net = Normed()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([*net.first.parameters(), *net.norm.parameters()], lr=0.1),
        torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9),
    ]
    backward(net, 0)
    for optimizer in optimizers:
        optimizer.step()
    return net, optimizers


@pytest.mark.parametrize("stepping", [0, 1])
def test_lazy_step_waits_and_buffers_are_copied_in_the_call(
    tmp_path: Path, late: Late, stepping: int
) -> None:
    net, optimizers = trained()
    for turn in range(2):
        late.go.clear()
        late.began.clear()
        expected = copied(net, optimizers)
        with uc.Checkpointer(options=QUICK) as checkpointer:
            pending = checkpointer.save_async(
                tmp_path / f"c{turn}", model=net, optimizer=optimizers, lazy=True
            )
            assert late.began.wait(SECONDS)
            assert not pending.staged()
            backward(
                net, turn + 1
            )  # changes the running mean, the running variance and the count of batches
            assert not torch.equal(net.norm.running_mean, expected["model:norm.running_mean"])
            thread, _ = in_background(optimizers[stepping].step)
            thread.join(0.2)
            assert thread.is_alive(), "the step has not waited"
            late.go.set()
            thread.join(SECONDS)
            assert not thread.is_alive()
            assert pending.staged()
            optimizers[1 - stepping].step()
            pending.result(SECONDS)
        check_copied(tmp_path / f"c{turn}", expected)
        assert all(not optimizer._optimizer_step_pre_hooks for optimizer in optimizers)


def test_lazy_ranks_step_at_different_times(tmp_path: Path) -> None:
    """Tiles are filled by other ranks, each in its own time."""

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for seed in (2, 4):
                net, optimizer, ema = made(comm, seed)
                pending = checkpointer.save_async(
                    tmp_path / f"c{seed}",
                    model=net,
                    optimizer=optimizer,
                    parts={"ema": ema},
                    layout=layout_of(3),
                    lazy=True,
                    options=QUICK,
                )
                time.sleep(0.05 * comm.rank)
                for name in BUFFERS:
                    getattr(net, name).zero_()
                ema["columns"].zero_()
                optimizer.step()  # no gradients: it only waits
                assert pending.staged()
                spoil(net, optimizer, ema)
                pending.result(SECONDS)

    run_ranks(3, act)
    for seed in (2, 4):
        check(tmp_path / f"c{seed}", seed)


def test_lazy_masters_held_by_another_optimizer(tmp_path: Path, late: Late) -> None:
    """Its step waits, too."""
    net = nn.Linear(4, 4)
    optimizer, holder = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    for parameter in net.parameters():
        holder.state[parameter] = {"master_param": parameter.detach().double() + 1}
    expected = holder.state[net.weight]["master_param"].clone()
    pending = uc.save_async(
        tmp_path / "c",
        model=net,
        optimizer=optimizer,
        master_weights=holder,
        lazy=True,
        options=QUICK,
    )
    assert late.began.wait(SECONDS)
    thread, _ = in_background(holder.step)
    thread.join(0.2)
    assert thread.is_alive(), "the step has not waited"
    late.go.set()
    thread.join(SECONDS)
    pending.result(SECONDS)
    with uc.open(tmp_path / "c") as opened:
        assert same_bits(opened["master_weights"]["weight"][...], expected)


@pytest.mark.parametrize("before", [True, False])
def test_lazy_with_user_hooks(tmp_path: Path, before: bool) -> None:
    net, (optimizer, _) = trained()
    called: list[int] = []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *_: called.append(1))

    if before:
        register()
    pending = uc.save_async(
        tmp_path / "c", model=net, optimizer=optimizer, lazy=True, options=QUICK
    )
    if not before:
        register()
    backward(net, 1)
    optimizer.step()
    optimizer.step()
    pending.result(SECONDS)
    optimizer.step()
    assert called == [1, 1, 1]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("optimizer", [None, {"weight/exp_avg": torch.zeros(2, 2)}])
def test_lazy_without_an_optimizer_is_refused(tmp_path: Path, optimizer: Any) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save_async(
                tmp_path / "c",
                model={"weight": torch.ones(2, 2)},
                optimizer=optimizer,
                lazy=True,
                options=QUICK,
            )

    same_error(
        try_ranks(2, act),
        uc.LayoutError,
        r"^rank [01]: lazy: got no optimizer object, whose step could wait for the copy; pass",
    )
    assert not (tmp_path / "c").exists()


def test_lazy_copy_error_is_raised_by_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = save_module.copy_tensors

    def failing(snapshot: Snapshot, keys: Any) -> None:
        if threading.current_thread().name == "unified_ckpt-save" and snapshot.rank == 1:
            raise ValueError("the device is gone")
        real(snapshot, keys)

    monkeypatch.setattr(save_module, "copy_tensors", failing)

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            net, optimizer, _ = made(comm, 1)
            pending = checkpointer.save_async(
                tmp_path / "c",
                model=net,
                optimizer=optimizer,
                layout=layout_of(2),
                lazy=True,
                options=QUICK,
            )
            optimizer.step()
            pending.result(SECONDS)

    same_error(try_ranks(2, act), uc.RankError, r"^rank 1: ValueError: the device is gone$")
    assert os.listdir(tmp_path) == []


# errors of the thread

SMALL = {"rows": values((260, 130), 1), "few": values((3,), 2)}


def small_of(comm: Comm, seed: int) -> dict[str, Any]:
    rows = values((260, 130), seed)
    layout = uc.Layout(
        mesh={"dp": comm.world}, rules={"rows": {"dp": 0}}, shapes={"rows": (260, 130)}
    )
    return {
        "model": {
            "rows": torch.chunk(rows, comm.world)[comm.rank].clone(),
            "few": values((3,), seed),
        },
        "layout": layout,
    }


def check_small(folder: Path, seed: int) -> None:
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as opened:
        assert same_bits(opened["model"]["rows"][...], values((260, 130), seed))
        assert same_bits(opened["model"]["few"][...], values((3,), seed))


def test_async_error_at_any_operation(tmp_path: Path, storages: Storages) -> None:
    """And the next save works."""
    at, through = 0, False
    counts: list[int] = []

    def act(comm: Comm, root: Path) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(root / "old", **small_of(comm, 1), options=QUICK)
            durable = QUICK.model_copy(update={"fsync": True})
            broken = [
                Broken(str(root), at - 100 * comm.rank)
            ]  # 0-99: rank 0's operations, 100-199: rank 1's
            storages.kinds[f"rank-{comm.rank}"] = lambda _: broken[0]
            pending = checkpointer.save_async(root / "new", **small_of(comm, 2), options=durable)
            try:
                pending.result(SECONDS)
            finally:
                del storages.kinds[f"rank-{comm.rank}"]
                if comm.rank == at // 100:
                    counts.append(broken[0].count)
                checkpointer.save(root / "next", **small_of(comm, 3), options=QUICK)

    done = 0
    while not through:
        root = tmp_path / f"at-{at}"
        found = try_ranks(2, lambda comm, root=root: act(comm, root))  # type: ignore[misc]
        through = found == [None, None]
        if through:
            check_small(root / "new", 2)
            if at < 100:
                through, at = False, 99
        else:
            same_error(found, uc.StorageError, rf"rank {at // 100}: .* failed: Input/output error")
            if (root / "new").exists():  # what failed comes after the rename: the last fsync
                check_small(root / "new", 2)
            assert {name for name in os.listdir(root) if name != "new"} == {"old", "next"}
            done += 1
        check_small(root / "old", 1)
        check_small(root / "next", 3)
        at += 1
    assert done > 12, "the state is too small to say much"


NEXT: Mapping[str, Callable[[uc.Checkpointer, Path, dict[str, Any]], object]] = {
    "save": lambda checkpointer, root, what: checkpointer.save(root / "c2", **what, options=QUICK),
    "save_async": lambda checkpointer, root, what: checkpointer.save_async(
        root / "c2", **what, options=QUICK
    ),
    "load": lambda checkpointer, root, what: checkpointer.load(root / "old", **what),
    "wait": lambda checkpointer, root, what: checkpointer.wait(),
    "close": lambda checkpointer, root, what: checkpointer.close(),
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("call", NEXT)
def test_async_error_is_raised_once_on_every_rank(
    tmp_path: Path, storages: Storages, call: str, told: bool
) -> None:
    """`told`: by `result`, so not again."""

    def act(comm: Comm) -> BaseException | None:
        checkpointer = make_checkpointer(comm)
        checkpointer.save(tmp_path / "old", **small_of(comm, 1), options=QUICK)
        if comm.rank == 1:
            storages.kinds["rank-1"] = Full
        pending = checkpointer.save_async(tmp_path / "new", **small_of(comm, 2), options=QUICK)
        storages.kinds.pop(f"rank-{comm.rank}", None)
        found: BaseException | None = None
        try:
            if told:
                pending.result(SECONDS)
            else:
                NEXT[call](checkpointer, tmp_path, small_of(comm, 3))
        except uc.CheckpointError as error:
            found = error
        if told:
            NEXT[call](checkpointer, tmp_path, small_of(comm, 3))
        assert pending.done()
        checkpointer._comm = comm  # `close` has forgotten it
        checkpointer.wait()
        checkpointer.save(tmp_path / "next", **small_of(comm, 4), options=QUICK)
        checkpointer.close()
        return found

    same_error(try_ranks(2, act), uc.StorageError, r"^rank 1: .* failed: No space left on device$")
    check_small(tmp_path / "old", 1)
    check_small(tmp_path / "next", 4)
    more = {"c2"} if told and call in ("save", "save_async") else set()
    assert set(os.listdir(tmp_path)) == {"old", "next"} | more


def test_async_error_is_raised_by_the_with_block(tmp_path: Path, storages: Storages) -> None:
    storages.kinds["all"] = Full
    with (
        pytest.raises(uc.StorageError, match="No space left on device"),
        uc.Checkpointer(tmp_path, options=QUICK) as checkpointer,
    ):
        checkpointer.save_async("c", model=SMALL)
    assert checkpointer.staging_nbytes == 0
    assert os.listdir(tmp_path) == []


def test_async_taken_name_is_an_error_of_the_thread(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=SMALL, step=1, options=QUICK)
    pending = uc.save_async(tmp_path / "c", model=SMALL, step=2, options=QUICK)
    with pytest.raises(uc.StorageError, match="holds a committed checkpoint"):
        pending.result(SECONDS)
    kept = uc.save_async(
        tmp_path / "c", model=SMALL, step=2, options=QUICK.model_copy(update={"if_exists": "keep"})
    ).result(SECONDS)
    assert (kept.step, kept.nbytes) == (1, 0)
    new = uc.save_async(
        tmp_path / "c",
        model=SMALL,
        step=2,
        options=QUICK.model_copy(update={"if_exists": "replace"}),
    ).result(SECONDS)
    assert new.step == uc.open(tmp_path / "c").step == 2


def test_async_invalid_state_is_refused_in_the_call(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save_async(
                tmp_path / "c",
                model={"w": torch.ones(3)},
                rank_extra=object() if comm.rank else 1,
                options=QUICK,
            )

    same_error(try_ranks(2, act), uc.FormatError, r"^rank 1: rank_extra")


@pytest.mark.parametrize("raises", [False, True])
def test_after_commit_runs_on_every_rank(tmp_path: Path, raises: bool) -> None:
    seen: list[tuple[int, bool]] = []

    def act(comm: Comm) -> None:
        def after(report: uc.SaveReport) -> None:
            seen.append((comm.rank, Path(report.path, "unified_checkpoint.json").exists()))
            if raises and comm.rank == 1:
                raise ValueError("retention failed")

        with make_checkpointer(comm) as checkpointer:
            checkpointer.save_async(
                tmp_path / "c", **small_of(comm, 1), options=QUICK, after_commit=after
            )

    found = try_ranks(2, act)
    assert sorted(seen) == [(0, True), (1, True)]
    if raises:  # on one rank: no rank may go on to the next call while another is told of it
        same_error(found, uc.RankError, r"^rank 1: ValueError: retention failed$")
    else:
        assert found == [None, None]
    check_small(tmp_path / "c", 1)


# one in flight


@pytest.mark.parametrize("call", NEXT)
def test_next_call_waits_for_the_save_in_flight(
    tmp_path: Path, storages: Storages, call: str
) -> None:
    gate = Gate()
    checkpointer = uc.Checkpointer(options=QUICK)
    checkpointer.save(tmp_path / "old", model=SMALL)
    storages.kinds["all"] = gate.storage
    pending = checkpointer.save_async(tmp_path / "c", model=SMALL)
    del storages.kinds["all"]
    target = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    thread, found = in_background(lambda: NEXT[call](checkpointer, tmp_path, {"model": target}))
    thread.join(0.2)
    assert thread.is_alive()
    assert not pending.done()
    with pytest.raises(TimeoutError, match=r"the save has not ended within 0.01 s; it continues"):
        pending.result(0.01)
    gate.open()
    thread.join(SECONDS)
    assert not isinstance(found[0], BaseException), found
    assert pending.done()
    checkpointer.close()
    assert uc.verify(tmp_path / "c", deep=True).ok


def test_idle_is_equal_on_every_rank(tmp_path: Path, storages: Storages) -> None:
    gate = Gate()
    storages.kinds["rank-1"] = gate.storage  # one rank's is slow

    def act(comm: Comm) -> list[bool]:
        said = []
        with make_checkpointer(comm) as checkpointer:
            said.append(checkpointer.idle())
            for seed in (1, 2):
                pending = checkpointer.save_async(
                    tmp_path / f"c{seed}", **small_of(comm, seed), options=QUICK
                )
                said += [checkpointer.idle() for _ in range(5)]
                gate.open()
                while not said[-1]:
                    time.sleep(0.005)
                    said.append(checkpointer.idle())
                assert pending.done()
            return said

    found = run_ranks(3, act, timeout_seconds=SECONDS)
    assert found[0] == found[1] == found[2]
    assert found[0][:6] == [True] + [False] * 5
    for seed in (1, 2):
        check_small(tmp_path / f"c{seed}", seed)


def test_idle_after_a_failed_save(tmp_path: Path, storages: Storages) -> None:
    storages.kinds["all"] = Full
    with uc.Checkpointer(options=QUICK) as checkpointer:
        pending = checkpointer.save_async(tmp_path / "c", model=SMALL)
        with pytest.raises(uc.StorageError, match="No space left"):
            pending.result(SECONDS)
        assert checkpointer.idle()


# what does not pile up


class Local(threading.local):
    comm: Comm


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("one_shot", [False, True])
def test_store_keys_do_not_accumulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storages: Storages, one_shot: bool, fails: bool
) -> None:
    """`fails`: one rank refuses every second save before the copy, or it fails in the thread."""
    store, counts, local = dist.HashStore(), list[int](), Local()
    monkeypatch.setattr(
        comms, "from_torch", lambda group: Comm(store, rank=local.comm.rank, ranks=range(3))
    )

    def act(comm: Comm) -> None:
        local.comm = comm
        checkpointer = uc.Checkpointer()
        save_async = uc.save_async if one_shot else checkpointer.save_async
        for turn in range(50):
            what = {
                **small_of(comm, turn),
                "options": QUICK.model_copy(update={"if_exists": "replace"}),
            }
            if fails and turn % 4 == 1:
                what["rank_extra"] = object()
            storages.kinds[f"rank-{comm.rank}"] = Full if fails and turn % 4 == 3 else LocalStorage
            try:
                save_async(tmp_path / "c", **what).result(SECONDS)
            except uc.CheckpointError:
                assert fails
                assert turn % 2
            if comm.rank == 0 and turn in (8, 48):
                counts.append(store.num_keys())
        checkpointer.close()

    run_ranks(3, act)
    # A save has some 110 keys here; those of the last one may still be there.
    assert counts[1] < 260, "the keys of two saves, not of 48"
    if not fails:
        check_small(tmp_path / "c", 49)


def own_threads() -> int:
    """Threads of ours, once those that have said their last word are gone. Other tests' threads
    come and go.
    """
    for thread in threading.enumerate():
        if thread.name == "unified_ckpt-save":
            thread.join(SECONDS)
    return sum(thread.name.startswith("unified_ckpt") for thread in threading.enumerate())


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_200_saves_do_not_grow(tmp_path: Path) -> None:
    """Neither memory nor threads nor open files, though the caller keeps every handle."""
    state = {"rows": values((1000, 500), 1), "columns": values((500, 1000), 2)}  # 4 MB
    seen: list[tuple[int, int, int]] = []
    handles: list[PendingSave] = []
    with uc.Checkpointer(options=QUICK.model_copy(update={"if_exists": "replace"})) as checkpointer:
        for turn in range(200):
            handles.append(checkpointer.save_async(tmp_path / "c", model=state, step=turn))
            handles[-1].result(SECONDS)
            if turn % 50 == 49:
                gc.collect()
                seen.append((resident_nbytes(), own_threads(), len(os.listdir("/proc/self/fd"))))
        assert checkpointer.staging_nbytes == pytest.approx(4_000_000, rel=0.01)
    assert checkpointer.staging_nbytes == 0
    assert seen[-1][0] - seen[0][0] < 20_000_000, seen
    assert all(max(counts) <= counts[0] for counts in list(zip(*seen, strict=True))[1:]), seen


def test_many_saves_of_ranks_do_not_grow(tmp_path: Path) -> None:
    """With tiles, over windows that the ranks share; a Checkpointer that is closed gives everything
    back.
    """
    seen: list[int] = []
    before = len(os.listdir("/proc/self/fd"))

    def act(comm: Comm) -> None:
        for _ in range(3):
            with make_checkpointer(comm) as checkpointer:
                net, optimizer, ema = made(comm, 1)
                for _ in range(10):
                    checkpointer.save_async(
                        tmp_path / "c", model=net, optimizer=optimizer, parts={"ema": ema}, layout=layout_of(2),  # noqa: E501
                        options=QUICK.model_copy(update={"if_exists": "replace"}),
                    )  # fmt: skip
                checkpointer.wait()
                comm.begin_collective("all are through", cached=False, timeout_seconds=SECONDS)
                if comm.rank == 0:  # to look takes an open file
                    seen.append(len(os.listdir("/proc/self/fd")))
                comm.begin_collective("all have looked", cached=False, timeout_seconds=SECONDS)

    run_ranks(2, act)
    assert own_threads() == 0
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "memfd:unified_ckpt" not in Path("/proc/self/maps").read_text()
    assert max(seen) <= seen[0], seen
    check(tmp_path / "c", 1)


def test_pending_save_keeps_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[Tensor]] = []
    real = save_module.prepare_snapshot

    def prepare(*what: Any) -> Snapshot:
        found = real(*what)
        buffers.append(weakref.ref(found.memory))
        return found

    monkeypatch.setattr(save_module, "prepare_snapshot", prepare)
    net = nn.Linear(300, 300)
    weight = weakref.ref(net.weight)
    pending = uc.save_async(tmp_path / "c", model=net, options=QUICK)
    pending.result(SECONDS)
    assert own_threads() == 0
    del net
    gc.collect()
    assert [buffer() for buffer in buffers] == [None]
    assert weight() is None


# how long the training stands still


@pytest.mark.parametrize("world", [1, 3])
def test_async_returns_before_anything_is_written(tmp_path: Path, gate: Gate, world: int) -> None:
    """Not even a folder is made: nothing of the blocked time is the storage's."""
    back = threading.Barrier(
        world,
        action=lambda: None if not os.listdir(tmp_path) else pytest.fail("something is there"),
    )

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            for seed in range(3):
                net, optimizer, ema = made(comm, seed)
                pending = checkpointer.save_async(
                    tmp_path / f"c{seed}",
                    model=net,
                    optimizer=optimizer,
                    parts={"ema": ema},
                    layout=layout_of(world),
                    options=QUICK,
                )
                if seed == 0:
                    back.wait(SECONDS)
                    assert not pending.done()
                    gate.open()
                pending.result(SECONDS)

    run_ranks(world, act)
    assert gate.reached.is_set()
    for seed in range(3):
        check(tmp_path / f"c{seed}", seed)


def test_snapshot_without_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"rank-1": 1000}
    monkeypatch.setattr(
        snapshot_module, "free_memory_nbytes", lambda: free.get(threading.current_thread().name)
    )
    errors: list[object] = []

    def act(comm: Comm) -> None:
        net, optimizer, ema = made(comm, 1)
        what = {
            "model": net,
            "optimizer": optimizer,
            "parts": {"ema": ema},
            "layout": layout_of(2),
            "options": QUICK,
        }
        with make_checkpointer(comm) as checkpointer:
            try:
                checkpointer.save_async(tmp_path / "a", **what)
            except uc.CheckpointError as error:
                errors.append(error)
            assert checkpointer.save(tmp_path / "b", **what).nbytes > 0
            if comm.rank == 1:
                free["rank-1"] = 1 << 30
            checkpointer.save_async(tmp_path / "c", **what).result(SECONDS)

    run_ranks(2, act)
    same_error(
        errors,
        uc.StorageError,
        r"^rank 1: snapshot: got 1000 bytes of free memory on this rank, expected \d+; free "
        r"some, or call `save`, which needs none$",
    )
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    for name in ("b", "c"):
        check(tmp_path / name, 1)


# time-outs


def test_save_slower_than_the_timeout(tmp_path: Path, storages: Storages) -> None:
    """One rank writes for three times as long; the others wait for its signs of life."""

    class Slow(LocalStorage):
        def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
            time.sleep(0.1)
            super().write_at(name, start, buffers)

    storages.kinds["rank-1"] = Slow
    options, state = (
        QUICK.model_copy(update={"timeout_seconds": 0.7}),
        {f"t{i:02}": values((260, 130), i) for i in range(40)},
    )

    def act(comm: Comm) -> float:
        with make_checkpointer(comm) as checkpointer:
            return (
                checkpointer.save_async(tmp_path / "c", model=state, options=options)
                .result(SECONDS)
                .seconds
            )

    assert min(run_ranks(2, act)) > 1.5, "it was not slow enough to say much"
    assert uc.verify(tmp_path / "c", deep=True).ok


def test_rank_that_hangs_in_storage_is_named(
    tmp_path: Path, storages: Storages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.5)  # before a failed save is cleared away
    gate = Gate()
    storages.kinds["rank-2"] = gate.storage
    errors: list[object] = []

    def act(comm: Comm) -> None:
        checkpointer = make_checkpointer(comm)
        pending = checkpointer.save_async(
            tmp_path / "c",
            **small_of(comm, 1),
            options=QUICK.model_copy(update={"timeout_seconds": 0.5}),
        )
        try:
            pending.result(SECONDS)
        except uc.CheckpointError as error:
            errors.append(error)
            if len(errors) == 2:
                gate.open()  # the two others have it already
        checkpointer.close()

    run_ranks(3, act)
    same_error(
        errors,
        uc.RankError,
        r"^rank\(s\) 2 did not (finish 'write'|reach 'digests/0') within 0.5 s$",
    )
    assert not (tmp_path / "c").exists()


def test_async_missing_rank_is_named(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank != 1:
            with make_checkpointer(comm) as checkpointer:
                checkpointer.save_async(
                    tmp_path / "c",
                    **small_of(comm, 1),
                    options=QUICK.model_copy(update={"timeout_seconds": 0.3}),
                )

    found = try_ranks(3, act)
    same_error(
        [found[0], found[2]],
        uc.RankError,
        r"rank\(s\) 1 did not arrive within 0.3 s; expected the same call on all 3 ranks$",
    )


# the end of the process

ENDS = """
import sys, time
import torch
import unified_ckpt as uc
from unified_ckpt import api
from unified_ckpt.runtime.storage.storage import LocalStorage

class Slow(LocalStorage):
    def write_at(self, *what):
        time.sleep(0.2)
        super().write_at(*what)

api.LocalStorage = Slow
net = torch.nn.Linear(600, 600)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.no_grad():
    net.weight.fill_(3)
uc.save_async(sys.argv[1], model=net, optimizer=optimizer, lazy=sys.argv[2] == "lazy")
{last}
"""


ENDINGS = [
    ("", 0, "at once"),
    ("raise ValueError('oh')", 1, "lazy"),
    *(
        pytest.param(*ending, marks=pytest.mark.slow)
        for ending in [("sys.exit(3)", 3, "at once"), ("", 0, "lazy"), ("sys.exit(3)", 3, "lazy")]
    ),
]


@pytest.mark.parametrize(("last", "code", "lazy"), ENDINGS)
def test_process_exit_completes_the_save(tmp_path: Path, last: str, code: int, lazy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(last=last), str(tmp_path / "c"), lazy],
        env={**os.environ, "PYTHONPATH": str(Path(uc.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert uc.verify(tmp_path / "c", deep=True).ok
    with uc.open(tmp_path / "c") as opened:
        assert torch.equal(opened["model"]["weight"][...], torch.full((600, 600), 3.0))

"""Background saves by one process and by thread ranks: they store the state at the time of the
call, whatever changes, fails or is interrupted later.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import on_node
from tests.support.engine.reshard_cases import (
    INTS,
    Case,
    Kept,
    Recorded,
    Writes,
    cases,
    check_folder,
    check_written_once,
    request_of,
    save_call,
)
from tests.support.engine.save.async_saves import (
    QUICK,
    SECONDS,
    Latch,
    Storages,
    latch,
    layout_of,
    rank_state,
    storages,
    values,
)
from tests.support.harness import FullStorage, make_checkpointer, run_ranks, set_comm, try_ranks
from tests.support.limits import alarm
from tests.support.refusals import same_error
from tests.support.torch_training import train_step, whole_state
from unified_ckpt.core.planning import exchange
from unified_ckpt.engine.save.background import background_save
from unified_ckpt.engine.save.background.background_save import begin_save
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.save import save
from unified_ckpt.engine.save.tensor_hold import TensorHold
from unified_ckpt.engine.save.write.snapshot import Snapshot
from unified_ckpt.runtime.comm import comm as comms
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage

__all__ = ["latch", "storages"]  # fixtures

NAME = "checkpoint-1"
REPLACE = QUICK.model_copy(update={"if_exists": "replace"})


def check_same_files(expected: Path, actual: Path) -> None:
    """Compare folders byte for byte; in manifests, skip the fields that differ between saves."""
    assert sorted(os.listdir(expected)) == sorted(os.listdir(actual))
    for path in expected.iterdir():
        if path.name == "unified_checkpoint.json":
            first, second = (
                json.loads((folder / path.name).read_text()) for folder in (expected, actual)
            )
            for manifest in (first, second):
                for key in ("save_id", "created", "seconds", "crc"):
                    assert manifest.pop(key)
            assert first == second
        else:
            assert path.read_bytes() == (actual / path.name).read_bytes(), path.name


# what is stored


def spoil(arguments: Mapping[str, Any]) -> None:
    """Change every element of the state, and whatever else a caller can change in place."""
    net, optimizer, extra = arguments["model"], arguments["optimizer"], arguments["extra"]
    tensors = [*net.parameters(), *net.buffers(), *arguments["parts"]["ema"].values()]
    for state in optimizer.state.values():
        history, numbers = state.pop("history", (None, None))
        tensors += [*state.values(), *([history] if history is not None else [])]
        (numbers or {}).clear()
    tensors += [extra["tensor"], arguments["rank_extra"]["rng"][0]]
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    for group in optimizer.param_groups:
        group["lr"] = -1.0
        group["tags"].append("new")
    extra["list"][2].append(3)
    extra["array"][:] = 9
    extra["bytes"][:] = b"new"
    extra["more"] = 1
    arguments["metrics"]["loss"] = 2.0


EXTRA = {
    "list": [1, (2, {3: b"x"}), [2]],
    "nan": float("inf"),
    "table": Counter(a=1),
    "tensor": torch.arange(6.0)[::2],
    "array": torch.ones(4).numpy(),
    "bytes": bytearray(b"old"),
}


WAVES = [(False, 5_000), (True, 0), (True, 40_000)]  # those that run by default
MESHES = [([0], 1), ([0] * 2, 2), ([0] * 3, 1), ([0] * 4, 2), ([0, 0, 1, 1], 1), ([0, 1, 0, 1], 2)]


@pytest.mark.incident("pytorch#144657")
@pytest.mark.parametrize(
    ("nodes", "replicas", "lazy", "changes"),
    [
        *(
            pytest.param(
                *mesh,
                False,
                {"model_dtype": "bfloat16"},
                marks=pytest.mark.slow if mesh in MESHES[1:3] else [],
            )
            for mesh in MESHES
        ),
        *((*mesh, True, {"compression": "O2"}) for mesh in MESHES[-1:]),
        *(
            pytest.param(*mesh, True, {"compression": "O2"}, marks=pytest.mark.slow)
            for mesh in MESHES[:-1]
        ),
        *(
            pytest.param(
                [0] * 4,
                2,
                lazy,
                {"host_bytes": host_bytes},
                marks=[] if (lazy, host_bytes) in WAVES else pytest.mark.slow,
            )
            for lazy in (False, True)
            for host_bytes in (0, 5_000, 40_000, 300_000)
        ),
    ],
)
def test_async_stores_the_state_of_the_call(
    tmp_path: Path,
    storages: Storages,
    monkeypatch: pytest.MonkeyPatch,
    nodes: Sequence[int],
    replicas: int,
    lazy: bool,
    changes: Mapping[str, Any],
) -> None:
    """The files are those of `save`, though everything changes as soon as the caller goes on:
    before the first byte is written, unless `host_bytes` limits the copy.

    A second save reuses the buffers. With `lazy`, ranks step at different times.
    """
    monkeypatch.setattr(exchange, "TILE_NBYTES", 64 << 10)
    options = QUICK.model_copy(update={"max_file_bytes": 150_000, **changes})
    latches, world = [Latch(), Latch()], len(nodes)
    host_bytes, copied = changes.get("host_bytes"), list[int]()

    def open_latch() -> None:
        if host_bytes is None:
            assert not list(tmp_path.glob("*/.unified-*")), "nothing was written in the call"
        latches.pop().open()

    changed = threading.Barrier(world, action=open_latch)

    def act(comm: Comm) -> None:
        root = tmp_path / f"node-{nodes[comm.rank]}"
        with on_node(comm, nodes) as checkpointer:
            for seed in (3, 9):
                net, optimizer, ema = rank_state(comm, seed, replicas=replicas)
                optimizer.state[net.bias]["history"] = [torch.ones(3), {"n": 1}]
                optimizer.param_groups[0]["tags"] = ["old"]
                arguments: dict[str, Any] = {
                    "model": net,
                    "optimizer": optimizer,
                    "parts": {"ema": ema},
                    "layout": layout_of(world, replicas=replicas),
                    "extra": copy.deepcopy(EXTRA),
                    "rank_extra": {"rng": [torch.full((5,), comm.rank)]},
                    "step": seed,
                    "metrics": {"loss": 1.0},
                    "attach": lambda folder: Path(folder, "config.json").write_text("{}"),
                    "options": options,
                }
                waited = checkpointer.save(root / f"waited-{seed}", **arguments)
                assert waited.blocked_seconds == waited.seconds
                if host_bytes is None:
                    storages.kinds[f"rank-{comm.rank}"] = latches[-1].storage
                pending = checkpointer.save_async(root / f"c{seed}", lazy=lazy, **arguments)
                storages.kinds.pop(f"rank-{comm.rank}", None)
                with torch.no_grad():
                    for tensor in (*net.buffers(), *ema.values()):
                        tensor.zero_()
                if lazy:
                    time.sleep(0.02 * comm.rank)
                    optimizer.step()  # no gradients: it only waits
                assert pending.staged()
                spoil(arguments)
                changed.wait(SECONDS)
                report = pending.result(SECONDS)
                assert 0 < report.blocked_seconds <= report.seconds
                for name in ("step", "nbytes", "encoded_nbytes", "outliers"):
                    assert getattr(report, name) == getattr(waited, name), name
                copied.append(checkpointer.session.buffers.snapshot.nbytes)
        assert checkpointer.staging_nbytes == 0

    run_ranks(world, act)
    for root, seed in product(tmp_path.iterdir(), (3, 9)):
        assert uc.verify(root / f"c{seed}", deep=True).ok
        check_same_files(root / f"waited-{seed}", root / f"c{seed}")
    if host_bytes is not None:
        assert max(copied) <= host_bytes
        assert (min(copied) > 0) == (host_bytes > 0)


@given(cases(max_world=5, max_tensors=4, loads=1))
@settings(max_examples=20)
def test_async_any_mesh(case: Case) -> None:
    check_any(case)


@pytest.mark.long
@given(cases(max_world=12, max_tensors=6, loads=1))
@settings(max_examples=400)
def test_async_any_mesh_many_examples(case: Case) -> None:
    check_any(case)


def check_any(case: Case) -> None:
    """Drawn dtypes, strides and shardings: each byte is written once, and every file equals the one
    of `save`, also if the memory does not suffice for a copy.
    """
    host_bytes = (None, 0, 4_000)[case.saved.world % 3]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", 64 << 10)
        writes, roots = Writes(), [Path(name) / kind for kind in ("waited", "background")]
        for root in roots:
            root.mkdir()

        def act(comm: Comm) -> None:
            cache, state = Kept(), case.state(comm.rank)
            save(save_call(comm, LocalStorage(str(roots[0])), NAME, request_of(state), cache))
            storage = Recorded(roots[1], writes, comm.rank)
            request = request_of(state)
            options = request.options.model_copy(update={"host_bytes": host_bytes})
            request = replace(request, options=options)
            pending = PendingSave(after_commit=None, on_end=None)
            pending.start(
                begin_save(save_call(comm, storage, NAME, request, cache), lazy=False),
                lazy_optimizers=[],
            )
            for part in state.tensors:
                part.local.view(INTS[part.local.element_size()]).bitwise_not_()
            pending.result(SECONDS)
            cache.buffers.close()

        run_ranks(case.saved.world, act)
        check_folder(case, roots[1] / NAME)
        check_written_once(writes, roots[1] / NAME)
        check_same_files(*(root / NAME for root in roots))


@pytest.mark.parametrize("lazy", [None, False, True])
def test_default_device_is_ignored(tmp_path: Path, lazy: bool | None) -> None:
    """Of torch.set_default_device("cuda"), with another device that is no memory of the host."""
    net, fresh = filled(1), filled(2)
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(optimizer)
    other = torch.optim.AdamW(fresh.parameters())
    options = QUICK.model_copy(update={"model_dtype": "bfloat16"})
    extra = {"t": torch.ones(2, device="cpu")}
    torch.set_default_device("meta")
    try:
        with uc.Checkpointer(tmp_path, options=options) as checkpointer:
            arguments = {"model": net, "optimizer": optimizer, "extra": extra}
            if lazy is None:
                checkpointer.save("c", **arguments)
            else:
                checkpointer.save_async("c", lazy=lazy, **arguments).result(SECONDS)
            checkpointer.load("c", model=fresh, optimizer=other)
        with uc.open(tmp_path / "c") as opened:
            weight = opened["model"]["weight"]
            assert weight[:3].device.type == weight[:0].device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch.equal(fresh.weight, net.weight)
    assert torch.equal(other.state[fresh.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


@contextmanager
def deterministic() -> Iterator[None]:
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_caller_are_ignored(
    tmp_path: Path, mode: str, lazy: bool, flags: dict[str, bool]
) -> None:
    """Memory from a call inside of a mode serves calls outside, where torch may refuse it."""
    net = filled(1)
    optimizer = torch.optim.AdamW(net.parameters(), **flags)
    train_step(optimizer)
    with uc.Checkpointer(tmp_path, options=REPLACE) as checkpointer:
        for inside in (True, False, True):
            expected = whole_state(net, optimizer)
            with MODES[mode]() if inside else nullcontext():
                pending = checkpointer.save_async("c", model=net, optimizer=optimizer, lazy=lazy)
            train_step(optimizer)
            pending.result(SECONDS)
            with uc.open(tmp_path / "c") as opened:
                for name, tensor in expected.items():
                    part = opened["optimizer" if "/" in name else "model"]
                    assert torch.equal(part[name][...], tensor), name


@pytest.mark.parametrize("changed", ["dtype", "shape"])
def test_tensor_of_another_kind_makes_a_new_plan(tmp_path: Path, changed: str) -> None:
    tensors = {
        "dtype": torch.arange(8).to(torch.bfloat16),
        "shape": torch.arange(12.0).view(3, 4),
    }
    model = {"w": torch.arange(8.0), "other": torch.ones(3)}
    with uc.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        checkpointer.save_async("before", model=model)
        model["w"] = tensors[changed]
        checkpointer.save_async("after", model=model)
    with uc.open(tmp_path / "before") as opened:
        assert torch.equal(opened["model"]["w"][...], torch.arange(8.0))
    with uc.open(tmp_path / "after") as opened:
        assert torch.equal(opened["model"]["w"][...], tensors[changed])


# errors in the thread, and calls that wait for it


def small_of(comm: Comm, seed: int) -> dict[str, Any]:
    layout = uc.Layout({"dp": comm.world}, {"rows": {"dp": 0}}, {"rows": (260, 130)})
    rows = torch.chunk(values((260, 130), seed), comm.world)[comm.rank].clone()
    return {"model": {"rows": rows, "few": values((3,), seed)}, "layout": layout}


def check_small(folder: Path, seed: int) -> None:
    assert uc.verify(folder, deep=True).ok
    with uc.open(folder) as opened:
        assert torch.equal(opened["model"]["rows"][...], values((260, 130), seed))
        assert torch.equal(opened["model"]["few"][...], values((3,), seed))


NEXT: Mapping[str, Callable[[uc.Checkpointer, Path, dict[str, Any]], object]] = {
    "save": lambda checkpointer, root, arguments: checkpointer.save(
        root / "c2", **arguments, options=QUICK
    ),
    "save_async": lambda checkpointer, root, arguments: checkpointer.save_async(
        root / "c2", **arguments, options=QUICK
    ),
    "load": lambda checkpointer, root, arguments: checkpointer.load(root / "old", **arguments),
    "wait": lambda checkpointer, root, arguments: checkpointer.wait(),
    "close": lambda checkpointer, root, arguments: checkpointer.close(),
}


@pytest.mark.incident("VeOmni#1181")
@pytest.mark.parametrize("raised_by_result", [False, True])
@pytest.mark.parametrize("call", NEXT)
def test_async_error_is_raised_once_on_every_rank(
    tmp_path: Path, storages: Storages, call: str, raised_by_result: bool
) -> None:
    """An error that `result` has raised is not raised again."""

    def act(comm: Comm) -> BaseException | None:
        checkpointer = make_checkpointer(comm)
        checkpointer.save(tmp_path / "old", **small_of(comm, 1), options=QUICK)
        if comm.rank == 1:
            storages.kinds["rank-1"] = lambda root: FullStorage(root, 0)
        pending = checkpointer.save_async(tmp_path / "new", **small_of(comm, 2), options=QUICK)
        storages.kinds.pop(f"rank-{comm.rank}", None)
        raised: BaseException | None = None
        try:
            if raised_by_result:
                pending.result(SECONDS)
            else:
                NEXT[call](checkpointer, tmp_path, small_of(comm, 3))
        except uc.CheckpointError as error:
            raised = error
        if raised_by_result:
            assert checkpointer.idle()
            NEXT[call](checkpointer, tmp_path, small_of(comm, 3))
        assert pending.done()
        set_comm(checkpointer.session, comm)  # `close` drops it
        checkpointer.wait()
        checkpointer.save(tmp_path / "next", **small_of(comm, 4), options=QUICK)
        checkpointer.close()
        return raised

    same_error(try_ranks(2, act), uc.StorageError, r"^rank 1: .* failed: No space left on device$")
    check_small(tmp_path / "old", 1)
    check_small(tmp_path / "next", 4)
    more = {"c2"} if raised_by_result and call in ("save", "save_async") else set()
    assert set(os.listdir(tmp_path)) == {"old", "next"} | more


@pytest.mark.parametrize("raises", [False, True])
def test_after_commit_runs_on_every_rank(tmp_path: Path, raises: bool) -> None:
    calls: list[tuple[int, bool]] = []

    def act(comm: Comm) -> None:
        def after(report: uc.SaveReport) -> None:
            calls.append((comm.rank, Path(report.path, "unified_checkpoint.json").exists()))
            with pytest.raises(uc.CheckpointError, match="`after_commit` or `attach` waits for it"):
                checkpointer.wait()
            if raises and comm.rank == 1:
                raise ValueError("retention failed")

        with make_checkpointer(comm) as checkpointer:
            checkpointer.save_async(
                tmp_path / "c", **small_of(comm, 1), options=QUICK, after_commit=after
            )

    outcomes = try_ranks(2, act)
    assert sorted(calls) == [(0, True), (1, True)]
    if raises:  # on one rank; all ranks raise it before the next call
        same_error(outcomes, uc.RankError, r"^rank 1: ValueError: retention failed$")
    else:
        assert outcomes == [None, None]
    check_small(tmp_path / "c", 1)


def test_idle_is_equal_on_every_rank(tmp_path: Path, storages: Storages) -> None:
    latch = Latch()
    storages.kinds["rank-1"] = latch.storage  # one rank is slow

    def act(comm: Comm) -> list[bool]:
        history = []
        with make_checkpointer(comm) as checkpointer:
            history.append(checkpointer.idle())
            for seed in (1, 2):
                pending = checkpointer.save_async(
                    tmp_path / f"c{seed}", **small_of(comm, seed), options=QUICK
                )
                history += [checkpointer.idle() for _ in range(5)]
                latch.open()
                while not history[-1]:
                    time.sleep(0.005)
                    history.append(checkpointer.idle())
                assert pending.done()
            return history

    histories = run_ranks(3, act, timeout_seconds=SECONDS)
    assert histories[0] == histories[1] == histories[2]
    assert histories[0][:6] == [True] + [False] * 5


class StoppedError(Exception):
    """Of a signal's handler, as KeyboardInterrupt is."""


def filled(value: float) -> nn.Linear:
    net = nn.Linear(64, 64, bias=False)
    nn.init.constant_(net.weight, value)
    return net


@pytest.mark.parametrize("call", NEXT)
def test_interrupted_wait_keeps_buffers(tmp_path: Path, storages: Storages, call: str) -> None:
    """The usual emergency save after Ctrl-C copied over what was being written: no digest finds
    that.
    """
    net, latch, saved = filled(1), Latch(), ["c"]
    with uc.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        checkpointer.save("old", model=net)
        storages.kinds["all"] = latch.storage
        pending = checkpointer.save_async("c", model=net)
        nn.init.constant_(net.weight, 2)
        with pytest.raises(StoppedError), alarm(0.1, StoppedError()):
            NEXT[call](checkpointer, tmp_path, {"model": net})
        with pytest.raises(TimeoutError, match=r"the save has not ended within 0\.01 s; it"):
            pending.result(0.01)
        assert checkpointer.staging_nbytes > 0
        assert not checkpointer.idle(), "it is still in flight"
        threading.Timer(0.1, latch.open).start()
        if call != "close":
            checkpointer.save_async("emergency", model=net)
            saved.append("emergency")
    assert checkpointer.staging_nbytes == 0
    for value, name in enumerate(saved, 1):
        assert uc.verify(tmp_path / name, deep=True).ok
        with uc.open(tmp_path / name) as opened:
            assert opened["model"]["weight"][...].unique().tolist() == [value]


def test_interrupt_is_raised_after_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt changes nothing: the tensors are still being copied."""
    hold, interrupts = TensorHold(), [KeyboardInterrupt("first"), KeyboardInterrupt("second")]

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if interrupts:
            raise interrupts.pop(0)
        hold.release()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(KeyboardInterrupt, match="first"):
            hold.wait()
    assert hold.is_released()
    assert interrupts == []


def test_interrupted_wait_still_raises_the_error(tmp_path: Path, latch: Latch) -> None:
    def fail(_: uc.SaveReport) -> None:
        raise uc.StorageError("the disk is gone")

    with uc.Checkpointer(tmp_path, options=QUICK) as checkpointer:
        checkpointer.save_async("a", model=filled(1), after_commit=fail)
        with pytest.raises(StoppedError), alarm(0.1, StoppedError()):
            checkpointer.wait()
        latch.open()
        with pytest.raises(uc.StorageError, match=r"the disk is gone"):
            checkpointer.wait()


def test_save_slower_than_the_timeout(tmp_path: Path, storages: Storages) -> None:
    """One rank writes longer than the timeout; its heartbeats keep the others waiting."""

    class Slow(LocalStorage):
        def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
            time.sleep(0.05)
            super().write_at(name, start, buffers)

    storages.kinds["rank-1"] = Slow
    options = QUICK.model_copy(update={"timeout_seconds": 0.5})
    state = {f"t{i:02}": values((260, 130), i) for i in range(40)}

    def act(comm: Comm) -> float:
        with make_checkpointer(comm) as checkpointer:
            pending = checkpointer.save_async(tmp_path / "c", model=state, options=options)
            return pending.result(SECONDS).seconds

    assert min(run_ranks(2, act)) > 1.0, "the save was too fast for this test"
    assert uc.verify(tmp_path / "c", deep=True).ok


# resources do not accumulate


class Local(threading.local):
    comm: Comm


@pytest.mark.parametrize("module_function", [False, True])
def test_store_keys_do_not_accumulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storages: Storages, module_function: bool
) -> None:
    """One rank refuses every fourth save before the copy, and another fails in the thread."""
    store, counts, local = dist.HashStore(), list[int](), Local()
    monkeypatch.setattr(
        comms, "from_torch", lambda group: Comm(store, rank=local.comm.rank, ranks=range(3))
    )

    def act(comm: Comm) -> None:
        local.comm = comm
        checkpointer = uc.Checkpointer()
        save_async = uc.save_async if module_function else checkpointer.save_async
        for iteration in range(25):
            arguments = {**small_of(comm, iteration), "options": REPLACE}
            if iteration % 4 == 1:
                arguments["rank_extra"] = object()
            storages.kinds[f"rank-{comm.rank}"] = lambda root, number=iteration: FullStorage(
                root, 0 if number % 4 == 3 else 10**6
            )
            try:
                save_async(tmp_path / "c", **arguments).result(SECONDS)
            except uc.CheckpointError:
                assert iteration % 2
            if comm.rank == 0 and iteration in (8, 24):
                counts.append(store.num_keys())
        checkpointer.close()

    run_ranks(3, act)
    # A save uses about 110 keys here; those of the last save may remain.
    assert counts[1] < 260, "expected the keys of at most two saves"
    check_small(tmp_path / "c", 24)


def engine_thread_count() -> int:
    """Count the engine's threads after its save threads have ended."""
    for thread in threading.enumerate():
        if thread.name == "unified_ckpt-save":
            thread.join(SECONDS)
    return sum(thread.name.startswith("unified_ckpt") for thread in threading.enumerate())


@pytest.mark.incident("pytorch#170163")
def test_resources_do_not_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, mappings and open files of saves with shared tiles, though the caller keeps every
    handle.
    """
    snapshots, nets, handles = list[weakref.ref[Any]](), list[weakref.ref[Any]](), list[object]()
    samples: list[tuple[int, int]] = []
    real, before = background_save.prepare_snapshot, len(os.listdir("/proc/self/fd"))

    def prepare(*args: Any, **limits: Any) -> Snapshot:
        snapshot = real(*args, **limits)
        snapshots.append(weakref.ref(snapshot.memory))
        return snapshot

    monkeypatch.setattr(background_save, "prepare_snapshot", prepare)

    def act(comm: Comm) -> None:
        for _ in range(3):
            with make_checkpointer(comm) as checkpointer:
                for _ in range(10):
                    net, optimizer, ema = rank_state(comm, 1)
                    nets.append(weakref.ref(net))
                    arguments = {"optimizer": optimizer, "parts": {"ema": ema}}
                    handles.append(
                        checkpointer.save_async(
                            tmp_path / "c",
                            model=net,
                            **arguments,
                            layout=layout_of(2),
                            options=REPLACE,
                        )
                    )
                checkpointer.wait()
                comm.begin_collective("saves done", cached=False, timeout_seconds=SECONDS)
                if comm.rank == 0:  # listing uses a file descriptor
                    gc.collect()
                    nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                    samples.append((len(os.listdir("/proc/self/fd")), nbytes))
                comm.begin_collective("files counted", cached=False, timeout_seconds=SECONDS)

    run_ranks(2, act)
    assert engine_thread_count() == 0
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "memfd:unified_ckpt" not in Path("/proc/self/maps").read_text()
    assert max(samples)[0] <= samples[0][0], samples
    assert samples[-1][1] - samples[0][1] < 20_000_000, samples
    gc.collect()
    assert not any(reference() is not None for reference in snapshots + nets)
    assert uc.verify(tmp_path / "c", deep=True).ok

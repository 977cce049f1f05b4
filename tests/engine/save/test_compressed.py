"""Compressed saves: any layout stores the same bytes, and every value comes back or is listed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.engine.compressed_cases import (
    arrays_of,
    compressed_cases,
    expected_tensors,
    rounded,
    stored_tensors,
)
from tests.support.engine.reshard_cases import (
    NAME,
    Case,
    Kept,
    Recorded,
    Writes,
    check_written_once,
    request_of,
    root,
    save_call,
)
from tests.support.harness import DrawnLayout, DrawnTensor, run_ranks
from tests.support.lanes import use_lanes
from tests.support.oracles import Array
from tests.support.torch_training import train_step
from unified_ckpt.core.planning import exchange
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.encode import encoder
from unified_ckpt.engine.encode.encoder import PlainEncoder
from unified_ckpt.engine.save.background.background_save import begin_save
from unified_ckpt.engine.save.save import save
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

__all__ = ["root"]  # fixtures

COMPRESSION = st.sampled_from(["lossless", "O1", "O2"])
TILES = st.sampled_from([64 << 10, 16 << 20])
FILE_NBYTES = st.sampled_from([50_000, 1 << 30])


def save_compressed(case: Case, root: Path, *, background: bool, **options: object) -> Writes:
    writes = Writes()

    def act(comm: Comm) -> uc.SaveReport:
        cache, storage = Kept(), Recorded(root, writes, comm.rank)
        state = case.state(comm.rank)
        call = save_call(comm, storage, NAME, request_of(state, **options), cache)
        if not background:
            report = save(call)
        else:
            pending = begin_save(call, lazy=False)
            for tensor in state.tensors:
                tensor.local.zero_()  # training goes on
            report = pending.finish(None)
        cache.buffers.close()
        return report

    reports = run_ranks(case.saved.world, act)
    figures = [(report.nbytes, report.encoded_nbytes, report.outliers) for report in reports]
    assert figures == figures[:1] * len(figures)
    return writes


@given(
    compressed_cases(max_world=6, whole_models=True),
    COMPRESSION,
    TILES,
    FILE_NBYTES,
    st.booleans(),
    st.sampled_from([1, 2, 3, 8]),
)
@settings(max_examples=20)
def test_any_mesh_stores_the_same_bytes(
    root: Path,
    case: Case,
    compression: str,
    tile_nbytes: int,
    max_file_bytes: int,
    background: bool,
    lanes: int,
) -> None:
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        use_lanes(patch, cores=lanes * case.saved.world)
        patch.setattr(encoder, "CHUNK_NBYTES", 256)
        patch.setattr(PlainEncoder, "chunk_nbytes", 256)
        options = {"compression": compression, "max_file_bytes": max_file_bytes}
        writes = save_compressed(case, Path(name), background=background, **options)
        folder = Path(name) / NAME
        check_written_once(writes, folder)
        assert stored_tensors(folder) == expected_tensors(case.arrays, compression)
        assert uc.verify(folder, deep=True).ok


# what is stored plain


W, SHAPE = "layer0.w", (64, 96)
PARTS = {"model", "master_weights"}
ROWS, COLUMNS = (ShardDim(0, 2, 1),), (ShardDim(1, 2, 1),)


def case_of(
    arrays: Mapping[Key, Array], world: int, shard_dims: Mapping[str, tuple[ShardDim, ...]]
) -> Case:
    """Tensors on all ranks, sharded by part."""
    tensors = [
        DrawnTensor(
            TensorDecl(
                part,
                fqn,
                TensorSpec("BF16" if part == "model" else "F32", array.shape),
                Sharding(shard_dims.get(part, ())),
            ),
            tuple(range(world)),
        )
        for (part, fqn), array in arrays.items()
    ]
    return Case(arrays, DrawnLayout(world, tuple(tensors)))


def fitting_arrays(shape: tuple[int, ...] = SHAPE) -> dict[Key, Array]:
    """A state without exceptions."""
    arrays = arrays_of(W, shape, 0)
    masters = np.random.default_rng(1).normal(0, 0.02, shape).astype(np.float32).view(np.uint32)
    masters[masters & 0xFFFF == 0x8000] += 1
    moments = {key: np.zeros(shape, np.uint32) for key in arrays if key[0] == "optimizer"}
    return {("model", W): rounded(masters), ("master_weights", W): masters, **moments}


@pytest.mark.parametrize(
    ("model", "masters", "plain"),
    [(ROWS, ROWS, False), ((), COLUMNS, False), (COLUMNS, ROWS, True), (ROWS, (), True)],
)
def test_masters_are_encoded_where_ranks_hold_their_model(
    tmp_path: Path, model: tuple[ShardDim, ...], masters: tuple[ShardDim, ...], plain: bool
) -> None:
    arrays = fitting_arrays()
    case = case_of(arrays, 2, {"model": model, "master_weights": masters})
    save_compressed(case, tmp_path, background=False, compression="lossless")
    stored, exceptions = stored_tensors(tmp_path / NAME)
    expected = arrays["master_weights", W] if plain else arrays["master_weights", W].astype("<u2")
    assert stored["master_weights", W] == expected.tobytes()
    assert exceptions == {}


def test_masters_are_plain_where_one_rank_lacks_their_model(tmp_path: Path) -> None:
    arrays = fitting_arrays()
    model, *others = case_of(arrays, 2, {}).saved.tensors
    layout = DrawnLayout(2, (DrawnTensor(model.decl, (0,)), *others))
    options = {"background": False, "compression": "lossless"}
    save_compressed(Case(arrays, layout), tmp_path, **options)
    stored, _ = stored_tensors(tmp_path / NAME)
    assert stored["master_weights", W] == arrays["master_weights", W].tobytes()


@pytest.mark.parametrize("shard_dims", [(), ROWS, COLUMNS])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("too_many", [0, 1])
def test_a_tensor_with_too_many_exceptions_is_plain(
    tmp_path: Path, world: int, shard_dims: tuple[ShardDim, ...], too_many: int
) -> None:
    """Counted over the whole tensor, whichever shards they are in, and replicas once."""
    arrays = fitting_arrays()
    count = SHAPE[0] * SHAPE[1] // 64 + too_many
    arrays["model", W].reshape(-1)[:count] ^= 1
    arrays["optimizer", f"{W}/exp_avg"].reshape(-1)[:count] = 0x7F800000
    parts = ("model", "master_weights", "optimizer")
    case = case_of(arrays, world, dict.fromkeys(parts, shard_dims))
    save_compressed(case, tmp_path, background=False, compression="O1")
    stored, exceptions = stored_tensors(tmp_path / NAME)
    assert (stored, exceptions) == expected_tensors(arrays, "O1")
    assert (len(stored["master_weights", W]) == SHAPE[0] * SHAPE[1] * 4) == bool(too_many)
    assert bool(exceptions) != bool(too_many)


def test_a_later_save_decides_again_after_many_exceptions(tmp_path: Path) -> None:
    """The save with the cached plan lists them all; the next one stores the masters plain."""
    arrays = fitting_arrays()
    case = case_of(arrays, 2, dict.fromkeys(("model", "master_weights"), ROWS))

    def act(comm: Comm) -> list[uc.SaveReport]:
        cache, reports = Kept(), []
        state = case.state(comm.rank)
        for number in range(3):
            if number == 1:
                next(t for t in state.tensors if t.decl.part == "model").local.zero_()
            storage = LocalStorage(str(tmp_path))
            request = request_of(state, compression="lossless")
            reports.append(save(save_call(comm, storage, f"save-{number}", request, cache)))
        cache.buffers.close()
        return reports

    numel = SHAPE[0] * SHAPE[1]
    for reports in run_ranks(2, act):
        assert [report.outliers for report in reports] == [0, numel, 0]
        assert [report.encoded_nbytes for report in reports] == [2 * numel, 2 * numel, 0]
    arrays["model", W][:] = 0
    _, exceptions = stored_tensors(tmp_path / "save-1")
    assert exceptions["master_weights"][f"{W}.value"] == arrays["master_weights", W].tobytes()
    assert stored_tensors(tmp_path / "save-2") == (
        {key: array.tobytes() for key, array in arrays.items()},
        {},
    )


@given(
    st.integers(0, 99),
    st.sampled_from([0.0, 1e-6, 1e-3]),
    st.sampled_from([0, 1, 40, 4000]),
    st.booleans(),
)
@settings(max_examples=12)
def test_replicas_that_drift_give_no_other_masters(
    root: Path, seed: int, drift: float, ties: int, background: bool
) -> None:
    """The masters and the model are those of one rank, and no master is lost."""
    shape, rng = (512, 96), np.random.default_rng(seed)
    first = {key: array for key, array in fitting_arrays(shape).items() if key[0] in PARTS}
    masters = first["master_weights", W].view(np.float32)
    drifted = (masters * (1 + drift * rng.normal(size=shape))).astype(np.float32).view(np.uint32)
    where = rng.integers(0, drifted.size, ties)
    drifted.reshape(-1)[where] = first["master_weights", W].reshape(-1)[where] & 0xFFFF0000 | 0x8000
    second = {**first, ("model", W): rounded(drifted), ("master_weights", W): drifted}
    cases = [case_of(arrays, 3, {}) for arrays in (first, second)]

    def act(comm: Comm) -> list[uc.SaveReport | Exception]:
        results = list[uc.SaveReport | Exception]()
        cache = Kept()
        states = [cases[0].state(comm.rank), cases[min(comm.rank, 1)].state(comm.rank)]
        for number, state in enumerate((states[0], states[1], states[1])):
            request = request_of(state, compression="lossless")
            call = save_call(comm, LocalStorage(name), f"save-{number}", request, cache)
            try:
                results.append(
                    begin_save(call, lazy=False).finish(None) if background else save(call)
                )
            except uc.LayoutError as error:
                results.append(error)
        cache.buffers.close()
        return results

    with TemporaryDirectory(dir=root) as name:
        per_rank = run_ranks(3, act)
        with uc.open(Path(name) / "save-1") as opened:
            model, stored = (
                opened[part][W][...].view(dtype).numpy()
                for part, dtype in (("model", torch.int16), ("master_weights", torch.int32))
            )
    model, stored = model.view(np.uint16), stored.view(np.uint32)
    replicas = [first["master_weights", W], drifted]
    written = next(i for i, replica in enumerate(replicas) if np.array_equal(stored, replica))
    assert np.array_equal(model, (first, second)[written]["model", W])
    _, cached, again = per_rank[0]
    assert isinstance(cached, uc.SaveReport)
    assert cached.outliers == np.count_nonzero((stored + 0x8000) >> 16 != model)
    if cached.outliers > drifted.size // 64:  # the next save plans and compares again
        assert f"master_weights:{W}: rank(s) 0 differ from rank(s) 1-2" in str(again)
    else:
        assert isinstance(again, uc.SaveReport)


@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_read_back(tmp_path: Path, background: bool) -> None:
    """A file system may show a node old bytes of another, and a bucket shows no part at all."""

    class Unread(LocalStorage):
        def read_at(self, name: str, start: int, into: Buffer) -> None:
            raise AssertionError(name)

    case = case_of(fitting_arrays(), 2, {})

    def act(comm: Comm) -> uc.SaveReport:
        cache, storage = Kept(), Unread(str(tmp_path))
        request = request_of(case.state(comm.rank), compression="lossless")
        call = save_call(comm, storage, NAME, request, cache)
        report = begin_save(call, lazy=False).finish(None) if background else save(call)
        cache.buffers.close()
        return report

    assert all(report.encoded_nbytes for report in run_ranks(2, act))


@given(st.integers(0, 99), st.sampled_from([(), ROWS, COLUMNS]), st.booleans(), st.booleans())
@settings(max_examples=12)
def test_masters_stand_beside_the_bits_of_a_cast_model(
    root: Path, seed: int, cut: tuple[ShardDim, ...], same_memory: bool, background: bool
) -> None:
    """A float32 model that is stored as bfloat16; torch casts a NaN by its place in memory."""
    rng = np.random.default_rng(seed)
    masters = arrays_of(W, (260, 100), seed)["master_weights", W]
    masters.reshape(-1)[rng.integers(0, masters.size, 100)] = 0x7FA00001 + rng.integers(0, 99, 100)
    arrays: dict[Key, Array] = {("model", W): rounded(masters), ("master_weights", W): masters}
    case = case_of(arrays, 2, {"model": cut if same_memory else (), "master_weights": cut})
    whole = torch.from_numpy(masters.view(np.float32))
    writes = Writes()

    def act(comm: Comm) -> None:
        cache, storage = Kept(), Recorded(Path(name), writes, comm.rank)
        state = case.state(comm.rank)
        master, model = sorted(state.tensors, key=lambda tensor: tensor.decl.part)
        local = master.local if same_memory else whole
        state = FlatState(tensors=[LocalTensor(model.decl, local), master], requested_parts=PARTS)
        call = save_call(comm, storage, NAME, request_of(state, compression="lossless"), cache)
        _ = begin_save(call, lazy=False).finish(None) if background else save(call)
        cache.buffers.close()

    with TemporaryDirectory(dir=root) as name:
        run_ranks(2, act)
        folder = Path(name) / NAME
        check_written_once(writes, folder)
        stored, _ = stored_tensors(folder)
        with uc.open(folder) as opened:
            loaded = opened["master_weights"][W][...].view(torch.int32).numpy().view(np.uint32)
    assert np.array_equal(loaded, masters)
    assert len(stored["master_weights", W]) == 2 * masters.size
    model = np.frombuffer(stored["model", W], np.uint16).reshape(masters.shape)
    numbers = ~np.isnan(masters.view(np.float32))
    assert np.array_equal(model[numbers], rounded(masters)[numbers])
    assert np.isnan((model[~numbers].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
)
def test_other_optimizers_are_stored_plain(tmp_path: Path, make: Any) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = make(model.parameters())
    train_step(optimizer)
    options = uc.SaveOptions(compression="O2")
    report = uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=options)
    plain = uc.save(tmp_path / "p", model=model, optimizer=optimizer)
    assert (report.nbytes, report.encoded_nbytes) == (plain.nbytes, 0)

"""Lanes: threads of one rank that each copy, digest and write a share of its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.lanes import use_lanes
from unified_ckpt.engine.encode.encoder import PlainEncoder
from unified_ckpt.engine.save.write import extents
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.protocol import Buffer
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.threads import Lane, run_lanes
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

MB = 1 << 20
Tensors = dict[str, torch.Tensor]


def make_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "big": torch.randn(96, 5000, generator=generator),  # 1.8 digest blocks
        "column_major": torch.randn(700, 96, generator=generator).t(),
        "half": torch.randn(96, 1111, generator=generator).bfloat16(),
        "long": torch.randn(96, 3, 300, generator=generator).double(),
        "small": torch.randn(7, generator=generator),
    }


def share_of(comm: Comm, full: Tensors) -> Tensors:
    """What a rank holds: rows, of tensors that have enough."""
    return {
        name: tensor.chunk(comm.world)[comm.rank] if tensor.dim() > 1 else tensor
        for name, tensor in full.items()
    }


def save_on_ranks(folder: Path, world: int, options: uc.SaveOptions) -> None:
    full = make_tensors()
    layout = uc.Layout(mesh={"dp": world}, rules={"small": {}, "*": {"dp": 0}})

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(folder, model=share_of(comm, full), layout=layout, options=options)

    run_ranks(world, act)


@pytest.mark.parametrize(("world", "dtype"), [(1, None), (1, "float32"), (2, None), (3, None)])
def test_files_are_those_of_one_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, dtype: Literal["float32"] | None
) -> None:
    """Borders of lanes lie within tensors and within digest blocks."""
    monkeypatch.setattr(PlainEncoder, "chunk_nbytes", 100_000)
    options = uc.SaveOptions(max_file_bytes=MB, model_dtype=dtype)
    counts = list[int]()

    def counted(lanes: Sequence[Lane], *, on_progress: Callable[[], object]) -> None:
        counts.append(len(lanes))
        run_lanes(lanes, on_progress=on_progress)

    monkeypatch.setattr(extents, "run_lanes", counted)
    files_by_lanes = {}
    for lanes in (1, 2, 3, 8):
        use_lanes(monkeypatch, cores=lanes * world)
        counts.clear()
        folder = tmp_path / f"{lanes}"
        save_on_ranks(folder, world, options)
        assert max(counts) == lanes
        files = {path.name: path for path in folder.iterdir() if path.name != names.MANIFEST}
        files_by_lanes[lanes] = {name: path.read_bytes() for name, path in files.items()}
        assert uc.verify(folder, deep=True).ok
    assert all(files == files_by_lanes[1] for files in files_by_lanes.values())
    stored: Tensors = {}
    for path in folder.glob("model-*.safetensors"):
        stored |= load_file(path)
    expected = {name: tensor.contiguous() for name, tensor in make_tensors().items()}
    if dtype:
        expected = {name: tensor.float() for name, tensor in expected.items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


def test_lanes_wait_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow device and a slow disk, eight lanes need an eighth of the time of one."""
    monkeypatch.setattr(PlainEncoder, "chunk_nbytes", 100_000)
    write_at, copy_range = LocalStorage.write_at, extents.copy_range

    def write_slowly(
        storage: LocalStorage, name: str, start: int, buffers: Sequence[Buffer]
    ) -> None:
        time.sleep(0.004)
        write_at(storage, name, start, buffers)

    def copy_slowly(memory: torch.Tensor, tensor: LocalTensor, offset: int) -> None:
        time.sleep(0.002)
        copy_range(memory, tensor, offset)

    monkeypatch.setattr(LocalStorage, "write_at", write_slowly)
    monkeypatch.setattr(extents, "copy_range", copy_slowly)
    model = {f"w{i}": torch.ones(200_000, dtype=torch.double) for i in range(8)}
    options = uc.SaveOptions(max_file_bytes=MB, model_dtype="float32", fsync=False)
    seconds = {}
    for lanes in (1, 8):
        use_lanes(monkeypatch, cores=lanes)
        started = time.perf_counter()
        uc.save(tmp_path / f"{lanes}", model=model, options=options)
        seconds[lanes] = time.perf_counter() - started
    assert seconds[8] < seconds[1] / 3  # and what does not wait

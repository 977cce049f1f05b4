"""Snapshots of tensors on a device, without one: its copies are made when its stream is awaited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.save.async_saves import QUICK, SECONDS, layout_of, rank_state
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.runtime.torch_state.late_device import LateStream, LateTensor, late_streams
from unified_ckpt.core.planning import exchange
from unified_ckpt.engine.save.background import background_save
from unified_ckpt.engine.save.write.snapshot import Snapshot
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state import devices
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


def on_device(tensor: LocalTensor, stream: LateStream) -> LocalTensor:
    model = None if tensor.model is None else on_device(tensor.model, stream)
    return LocalTensor(tensor.decl, LateTensor(tensor.local, stream), model)


@pytest.mark.incident("Megatron-LM#833")
@pytest.mark.parametrize(
    "changes", [{}, {"model_dtype": "bfloat16"}, {"compression": "O2"}], ids=str
)
def test_snapshot_of_a_device_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any]
) -> None:
    """Small slabs for tiles are packed, and wait apart. Temporary memory is that of one piece."""
    monkeypatch.setattr(exchange, "TILE_NBYTES", 64 << 10)
    monkeypatch.setattr(devices, "PIECE_NBYTES", 4000)
    real, largest = background_save.copy_tensors, list[int]()

    def copy_from_device(snapshot: Snapshot, keys: Any, **options: Any) -> None:
        if not keys:  # nothing is deferred
            return
        stream = current_stream()
        tensors = [[on_device(t, stream) for t in group] for group in snapshot.tensors_by_group]
        snapshot.memory.zero_()
        real(replace(snapshot, tensors_by_group=tensors), keys, **options)
        assert stream.synchronized == stream.awaited + 1
        assert stream.blocking <= 4 * sum(bool(copy.slabs) for copy in snapshot.copies)
        largest.append(stream.largest_nbytes)

    monkeypatch.setattr(background_save, "copy_tensors", copy_from_device)

    def act(comm: Comm) -> None:
        net, optimizer, ema = rank_state(comm, 3)
        state: dict[str, Any] = {"model": net, "optimizer": optimizer, "parts": {"ema": ema}}
        state["layout"] = layout_of(2)
        options = QUICK.model_copy(update=changes)
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(tmp_path / "expected", **state, options=options)
            pending = checkpointer.save_async(tmp_path / "copied", **state, options=options)
            pending.result(SECONDS)

    with late_streams() as current_stream:
        run_ranks(2, act)
    for path in (tmp_path / "expected").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "copied" / path.name).read_bytes(), path.name
    assert max(largest) <= 4000

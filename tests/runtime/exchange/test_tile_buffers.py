from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.shared_memory import PartnerBuffer
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers

WORLD, TILE = 3, 8192
ALL = {rank: set(range(WORLD)) for rank in range(WORLD)}
Prepare = Callable[[int, dict[int, set[int]]], list[dict[int, PartnerBuffer]]]


def mapped() -> int:
    """Return how many tile buffers this process maps."""
    gc.collect()  # errors of other tests may reference frames with views
    return Path("/proc/self/maps").read_text().count("memfd:unified_ckpt")


def preparing(windows: list[TileBuffers]) -> Prepare:
    """Return a function that prepares the buffers of ranks, which are threads."""
    store = dist.HashStore()
    comms = [Comm(store, rank=rank, ranks=range(WORLD)) for rank in range(WORLD)]

    def prepare(tile_nbytes: int, partners: dict[int, set[int]]) -> list[dict[int, PartnerBuffer]]:
        def act(rank: int) -> dict[int, PartnerBuffer]:
            collective = comms[rank].begin_collective("save", timeout_seconds=20)
            with collective.step("ready"):
                return windows[rank].prepare(
                    collective, tile_nbytes=tile_nbytes, partners=partners.get(rank, set())
                )

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(act, range(WORLD)))

    return prepare


def test_tile_buffers_are_shared_reused_and_replaced() -> None:
    elsewhere, files = mapped(), len(os.listdir("/proc/self/fd"))
    windows = [TileBuffers() for _ in range(WORLD)]
    prepare = preparing(windows)
    some = prepare(TILE, {0: {0, 2}, 2: {0, 2}})
    assert [set(buffers) for buffers in some] == [{0, 2}, set(), {0, 2}]
    assert mapped() - elsewhere == 4
    first = prepare(TILE, ALL)
    assert windows[1].local is first[1][1]
    windows[1].local.mark_failed()
    assert first[0][1].failed()
    again = prepare(TILE // 2, ALL)
    assert all(again[r][p] is first[r][p] for r in range(WORLD) for p in range(WORLD))
    assert not any(buffers[1].failed() for buffers in again), "a new operation"
    larger = prepare(2 * TILE, ALL)
    for rank in range(WORLD):
        larger[rank][rank].tile(1)[:] = 40 + rank
    for buffers in larger:
        assert [int(buffers[p].tile(1)[-1]) for p in range(WORLD)] == [40, 41, 42]
        assert {buffers[p].tile_nbytes for p in range(WORLD)} == {2 * TILE}
    del some, first, again, buffers
    assert mapped() - elsewhere == WORLD * WORLD, "the old ones are given back"
    for window in windows:
        window.close()
        window.close()
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == (elsewhere, files)

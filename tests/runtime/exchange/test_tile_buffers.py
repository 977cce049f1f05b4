from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from unified_ckpt.errors import RankError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.exchange.shared_memory import TileBuffer
from unified_ckpt.runtime.exchange.tile_buffers import TileBuffers

WORLD, TILE = 3, 8192


class Ranks:
    """Runs ranks as threads, each with its tile buffers."""

    def __init__(self) -> None:
        self.elsewhere = (
            _mapped()
        )  # of other tests, whose errors may still hold frames that hold views
        store = dist.HashStore()
        self.comms = [Comm(store, rank=rank, ranks=range(WORLD)) for rank in range(WORLD)]
        self.windows = [TileBuffers() for _ in range(WORLD)]

    def ready(
        self, *, tile_nbytes: int, partners: dict[int, set[int]]
    ) -> list[dict[int, TileBuffer]]:
        def act(rank: int) -> dict[int, TileBuffer]:
            collective = self.comms[rank].begin_collective("save", cached=False, timeout_seconds=20)
            results = self.windows[rank].prepare(
                collective, tile_nbytes=tile_nbytes, partners=partners.get(rank, set())
            )
            collective.finish_step("ready")
            return results

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(act, range(WORLD)))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    created = Ranks()
    yield created
    for buffers in created.windows:
        buffers.close()


def _mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:unified_ckpt")


def mapped(ranks: Ranks) -> int:
    """Returns how many tile buffers this process maps."""
    return _mapped() - ranks.elsewhere


ALL = {rank: set(range(WORLD)) for rank in range(WORLD)}


def test_partners_share_memory(ranks: Ranks) -> None:
    results = ranks.ready(tile_nbytes=TILE, partners=ALL)
    assert [set(one) for one in results] == [{0, 1, 2}] * WORLD
    for rank in range(WORLD):
        results[rank][rank].tile(0)[:] = rank + 1
    for one in results:
        assert [int(one[rank].tile(0)[-1]) for rank in range(WORLD)] == [1, 2, 3]


def test_tile_buffers_are_reused(ranks: Ranks) -> None:
    first = ranks.ready(tile_nbytes=TILE, partners=ALL)
    again = ranks.ready(tile_nbytes=TILE // 2, partners=ALL)
    assert all(again[r][p] is first[r][p] for r in range(WORLD) for p in range(WORLD))


def test_small_tile_buffer_is_replaced_on_all_ranks(ranks: Ranks) -> None:
    ranks.ready(tile_nbytes=TILE, partners=ALL)
    results = ranks.ready(tile_nbytes=2 * TILE, partners=ALL)
    for rank in range(WORLD):
        results[rank][rank].tile(1)[:] = 40 + rank
    for one in results:
        assert [one[p].tile_nbytes for p in range(WORLD)] == [2 * TILE] * WORLD
        assert [int(one[p].tile(1)[-1]) for p in range(WORLD)] == [40, 41, 42]
    assert mapped(ranks) == WORLD * WORLD, "the old ones are given back"


def test_ranks_without_partners_have_no_tile_buffer(ranks: Ranks) -> None:
    results = ranks.ready(tile_nbytes=TILE, partners={0: {0, 2}, 2: {0, 2}})
    assert [set(one) for one in results] == [{0, 2}, set(), {0, 2}]
    assert mapped(ranks) == 4


def test_failed_tile_buffer_works_again(ranks: Ranks) -> None:
    first = ranks.ready(tile_nbytes=TILE, partners=ALL)
    first[1][1].mark_failed()
    assert first[0][1].failed()
    assert not any(one[1].failed() for one in ranks.ready(tile_nbytes=TILE, partners=ALL))


def test_partner_without_a_tile_buffer_is_named(ranks: Ranks) -> None:
    collective = Collective(dist.HashStore(), 0, rank=0, ranks=(0, 1), timeout_seconds=0.2)
    with pytest.raises(RankError, match=r"rank\(s\) 1 did not reach 'tile-buffer/1' within 0.2 s"):
        ranks.windows[0].prepare(collective, tile_nbytes=TILE, partners={0, 1})


def test_close_releases_everything(ranks: Ranks) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ranks.ready(tile_nbytes=TILE, partners=ALL)
    for buffers in ranks.windows:
        buffers.close()
        buffers.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert mapped(ranks) == 0

"""Reads of stored bytes, some damaged: which damage is found, and how much is verified."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.engine.source import verified_read
from unified_ckpt.engine.source.protocol import VerificationLog
from unified_ckpt.engine.source.verified_read import VerifiedTensor, has_whole_block
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests

BLOCK = 4


@given(st.integers(1, 15), st.data(), st.booleans())
def test_damage_of_covered_or_touched_blocks_is_found(
    nbytes: int, data: st.DataObject, whole_blocks: bool
) -> None:
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    damaged = data.draw(st.sets(st.integers(0, nbytes - 1), max_size=2))
    blocks = [range(low, min(low + BLOCK, nbytes)) for low in range(0, nbytes, BLOCK)]
    saved = np.arange(nbytes, dtype=np.uint8)
    stored = saved.copy()
    stored[list(damaged)] += 100
    covered = [block for block in blocks if start <= block.start and block.stop <= stop]
    touched = [block for block in blocks if start < block.stop and block.start < stop]
    verified = touched if whole_blocks and start < stop else covered
    has_damage = any(damaged.intersection(block) for block in verified)
    log, read = VerificationLog(), np.zeros(stop - start, np.uint8)

    def read_at(offset: int, body: memoryview) -> None:
        body[:] = memoryview(stored.data)[offset : offset + len(body)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_read, "BLOCK_NBYTES", BLOCK)
        patch.setattr(verified_read, "block_count", lambda nbytes: -(-nbytes // BLOCK))
        crcs = [digests.crc(saved[block.start : block.stop].data) for block in blocks]
        tensor = VerifiedTensor(("model", "w"), nbytes, crcs, "file", read_at, log)
        assert has_whole_block(start, stop, nbytes) == bool(covered)
        with pytest.raises(IntegrityError, match="in file") if has_damage else nullcontext():
            tensor.read_into(start, memoryview(read.data), whole_blocks=whole_blocks)
        with pytest.raises(IntegrityError, match=f"got {len(blocks) - 1} digests, expected"):
            VerifiedTensor(("model", "w"), nbytes, crcs[1:], "", read_at, log).read_into(
                start, memoryview(read.data), whole_blocks=whole_blocks
            )
    assert np.array_equal(read, stored[start:stop])
    intact = (block for block in verified if not damaged.intersection(block))
    assert log.verified_nbytes == sum(map(len, intact))

"""How much host memory a save, a background save and a load need beside the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.limits import peak_growth

STATE_NBYTES = 64 << 20
BUFFERS_NBYTES = 32 << 20  # of two lanes, with the interpreter's own
LIMIT_NBYTES = 20 << 20  # for a copy of one tensor


def check_growth(act: Callable[[], object], *, least: int = 0) -> None:
    growth = peak_growth(act)
    assert least <= max(growth, 0) < least + BUFFERS_NBYTES


@pytest.mark.parametrize("is_row_major", [True, False])
def test_peak_of_host_memory(tmp_path: Path, is_row_major: bool) -> None:
    """A background save holds one copy of the state; nothing else grows with it."""
    state = {f"t{index}": torch.full((4096, 1024), float(index)) for index in range(4)}
    if not is_row_major:
        state = {name: tensor.t() for name, tensor in state.items()}
    assert sum(tensor.nbytes for tensor in state.values()) == STATE_NBYTES
    options = uc.SaveOptions(fsync=False, if_exists="replace")
    with uc.Checkpointer(tmp_path, options=options) as checkpointer:
        checkpointer.save("warm", model={"w": torch.ones(4)})
        for least in (STATE_NBYTES, 0):  # the second one reuses the memory
            check_growth(lambda: checkpointer.save_async("c", model=state).result(), least=least)
        assert checkpointer.staging_nbytes < STATE_NBYTES + BUFFERS_NBYTES
        checkpointer.close()
        check_growth(lambda: checkpointer.save("c", model=state))
        if is_row_major:  # others are loaded into a row-major copy
            loaded = {name: torch.full_like(tensor, 9.0) for name, tensor in state.items()}
            limited = options.model_copy(update={"host_bytes": LIMIT_NBYTES})
            check_growth(
                lambda: checkpointer.save_async("c", model=state, options=limited).result(),
                least=LIMIT_NBYTES * 4 // 5,
            )
            check_growth(lambda: checkpointer.load("c", model=loaded))
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.oracles import local_part
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.encode import unfit
from unified_ckpt.engine.encode.unfit import count_unfit_masters, count_unfit_moments
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

# Halves of bits around every carry: zero, tie, the largest, and the steps between signs and NaNs.
HIGH = [0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0x8000, 0xBF80, 0xFFFF]
LOW = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
MASTERS = np.array([[h << 16 | low for low in LOW] for h in HIGH], np.uint32)


def local_tensor(
    part: str, array: np.ndarray, dtype: torch.dtype, *shard_dims: ShardDim, spec: str = ""
) -> LocalTensor:
    """The part of rank 1 of two ranks."""
    sharding = Sharding(shard_dims)
    tensor = torch.from_numpy(np.ascontiguousarray(local_part(array, sharding, 1))).view(dtype)
    name = spec or {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    return LocalTensor(TensorDecl(part, "w", TensorSpec(name, array.shape), sharding), tensor)


def decoded(masters: np.ndarray, model: np.ndarray) -> np.ndarray:
    """What a reader makes of the low 16 bits of masters beside this model."""
    low = masters.astype(np.uint16).view(np.int16).astype(np.int32)
    return (model.astype(np.uint32) << 16) + low.view(np.uint32)


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("rounding", [0x7FFF, 0x8000])
def test_masters_that_16_bits_do_not_give_back(
    monkeypatch: pytest.MonkeyPatch, shift: int, rounding: int
) -> None:
    monkeypatch.setattr(unfit, "_CHUNK_ELEMENTS", 7)
    model = ((MASTERS + np.uint32(rounding)) >> 16).astype(np.uint16) + np.uint16(shift % 2**16)
    rows = (ShardDim(0, 2, 1),)
    tensors = [
        local_tensor("model", model, torch.bfloat16, *rows),
        local_tensor("master_weights", MASTERS, torch.float32, *rows),
    ]
    expected = np.flatnonzero(decoded(MASTERS, model) != MASTERS)
    expected = expected[expected >= 6 * 6]  # the rows of rank 1
    assert count_unfit_masters(*tensors, rank=1) == len(expected)


def test_a_model_that_is_stored_rounded_is_cast() -> None:
    """Ties to even are unfit, and every NaN: torch may cast one to any other."""
    master = local_tensor("master_weights", MASTERS, torch.float32)
    model = local_tensor("model", MASTERS, torch.float32, spec="BF16")
    ties = (MASTERS & 0x1FFFF) == 0x8000
    expected = (ties | np.isnan(MASTERS.view(np.float32))).sum()
    assert count_unfit_masters(model, master, rank=0) == expected


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 1e-45, np.inf, -np.inf, np.nan, -np.nan])
def test_count_of_unfit_moments(signed: bool, value: float) -> None:
    array = np.full((3, 4), 0.5, np.float32)
    array[1, 2] = value
    fits = np.isfinite(value) and (signed or not np.signbit(value))
    tensor = local_tensor("optimizer", array.view(np.uint32), torch.float32)
    assert count_unfit_moments(tensor, signed=signed) == (not fits)

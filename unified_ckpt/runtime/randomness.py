"""The random states of this process: Python's, NumPy's, torch's. Knows how those of another number of ranks give new ones."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_LOG = logging.getLogger("unified_ckpt")


class RandomStates:
    """All random generators that a training step draws from by default, as one object with `state_dict` and `load_state_dict`.

    Python's, NumPy's old global one, torch's of the CPU and of every CUDA device that this process sees. Other generators
    (`torch.Generator`, `np.random.Generator`) are the job's own. Belongs in `rank_extra`: each rank has its own states.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states now."""
        states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Exactly as they were. Those of CUDA devices stay as they are where it is another number of devices."""
        version, inner, gauss = state_dict["python"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state(tuple(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"])
        if not torch.cuda.is_available():
            return
        saved = state_dict.get("cuda")
        if saved is not None and len(saved) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(list(saved))
        else:
            _LOG.warning(
                "random states: saved for %s CUDA devices, here are %d: theirs stay as they are",
                len(saved or ()),
                torch.cuda.device_count(),
            )

    def load_from_ranks(self, saved: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> None:
        """New states for rank `rank` of `world`, from those of another number of ranks: always the same from the same."""
        seed = zlib.crc32(
            f"{zlib.crc32(saved[rank % len(saved)]['torch'].numpy())}/{rank}/{world}".encode()
        )  # 32 bits: NumPy takes no more
        _LOG.info("random states: saved by %d ranks; those of rank %d of %d are derived from them, seed %d", len(saved), rank, world, seed)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # of CUDA devices, too

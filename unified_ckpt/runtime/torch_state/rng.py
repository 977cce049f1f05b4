"""Saves and restores random generators: those of this process, and the user's own.

Where no mesh tells which rank a state belongs to, the process's generators are seeded anew.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_LOG = logging.getLogger("unified_ckpt")


class RandomStates:
    """The default random generators as one stateful object, for `rank_extra`.

    These are Python's, NumPy's global one, and torch's for the CPU and every visible CUDA device.
    Pass your own generators (`torch.Generator`, `np.random.Generator`) separately.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states exactly; those of CUDA only for the same number of devices."""
        version, inner, gauss = state_dict["python"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state(tuple(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"])
        saved = list(state_dict.get("cuda") or ())
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(saved) != devices:
            _LOG.warning(
                "random states: saved for %d CUDA devices, found %d; CUDA states stay unchanged",
                len(saved),
                devices,
            )
        elif saved:
            torch.cuda.set_rng_state_all(saved)

    def load_from_ranks(self, saved: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> None:
        """Derive states for `rank` of `world` from those of another number of ranks.

        Deterministic: equal inputs give equal states. Ranks that read the same data need the same
        ones, so `rank` and `world` should count data coordinates.
        """
        checksum = zlib.crc32(saved[rank % len(saved)]["torch"].numpy())
        seed = zlib.crc32(f"{checksum}/{rank}/{world}".encode())  # NumPy accepts 32 bits
        _LOG.info(
            "random states: saved by %d ranks; rank %d of %d derives its own, seed %d",
            len(saved),
            rank,
            world,
            seed,
        )
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # seeds CUDA devices too


# By type: description of a generator, its state as plain values, and how to set that.
_GENERATOR_TYPES: dict[
    type, tuple[Callable[[Any], str], Callable[[Any], Any], Callable[[Any, Any], None]]
] = {
    torch.Generator: (
        lambda generator: f"torch.Generator on {generator.device.type}",
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
    ),
    np.random.Generator: (
        lambda generator: f"numpy.random.Generator of {type(generator.bit_generator).__name__}",
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: (
        lambda generator: (
            f"numpy.random.RandomState of {generator.get_state(legacy=False)['bit_generator']}"
        ),
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
    random.Random: (
        lambda generator: f"{type(generator).__module__}.{type(generator).__qualname__}",
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
    ),
}


class GeneratorState:
    """The user's own random generator, as an object whose state is restored in place."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        generator_type = next(kind for kind in _GENERATOR_TYPES if isinstance(generator, kind))
        describe, self._get, self._set = _GENERATOR_TYPES[generator_type]
        self._description = describe(generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the current state and the kind of generator."""
        return {"generator": self._description, "state": self._get(self._generator)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state exactly."""
        self._set(self._generator, state_dict["state"])

    def mismatch(self, state: Any) -> str:
        """Explain why the generator cannot load this state; empty if it can."""
        saved = state.get("generator") if isinstance(state, Mapping) else None
        if saved == self._description:
            return ""
        return f"got {saved or 'no generator'} in the checkpoint, expected a {self._description}"


def is_generator(value: Any) -> bool:
    """Return whether `GeneratorState` supports this object."""
    return isinstance(value, tuple(_GENERATOR_TYPES))

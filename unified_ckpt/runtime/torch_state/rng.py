"""Random states as objects: those of this process, which another number of ranks derives anew, and
generators of the job's own.
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
    """All random generators that a training step draws from by default, as one object with
    `state_dict` and `load_state_dict`.

    Python's, NumPy's old global one, torch's of the CPU and of every CUDA device that this process
    sees. Generators of the job's own (`torch.Generator`, `np.random.Generator`) stand beside it.
    Belongs in `rank_extra`: each rank has its own states.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states now."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return states

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Exactly as they were. Those of CUDA devices stay as they are where it is another number
        of devices.
        """
        version, inner, gauss = state_dict["python"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state(tuple(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"])
        saved, devices = (
            list(state_dict.get("cuda") or ()),
            torch.cuda.device_count() if torch.cuda.is_available() else 0,
        )
        if len(saved) != devices:
            _LOG.warning(
                "random states: saved for %d CUDA devices, here are %d: theirs stay as they are",
                len(saved),
                devices,
            )
        elif saved:
            torch.cuda.set_rng_state_all(saved)

    def load_from_ranks(self, saved: Sequence[Mapping[str, Any]], *, rank: int, world: int) -> None:
        """New states for rank `rank` of `world`, from those of another number of ranks: always the
        same from the same.
        """
        seed = zlib.crc32(
            f"{zlib.crc32(saved[rank % len(saved)]['torch'].numpy())}/{rank}/{world}".encode()
        )  # 32 bits: NumPy takes no more
        _LOG.info(
            "random states: saved by %d ranks; those of rank %d of %d are derived from them, seed %d",
            len(saved),
            rank,
            world,
            seed,
        )
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # of CUDA devices, too


# What a generator is called, its state as plain values, and the reverse, by type.
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
    """A random generator of the job's own, as an object whose state is set in place."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        describe, self._get, self._set = next(
            functions
            for generator_type, functions in _GENERATOR_TYPES.items()
            if isinstance(generator, generator_type)
        )
        self._description = describe(generator)

    def state_dict(self) -> dict[str, Any]:
        """The state now, and of what kind of generator."""
        return {"generator": self._description, "state": self._get(self._generator)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Exactly as it was."""
        self._set(self._generator, state_dict["state"])

    def mismatch(self, state: Any) -> str:
        """Why the generator cannot take this state; empty where it can."""
        saved = state.get("generator") if isinstance(state, Mapping) else None
        return (
            ""
            if saved == self._description
            else f"the checkpoint has {saved or 'no generator'}, the target is a {self._description}"
        )


def is_generator(value: Any) -> bool:
    """Whether `GeneratorState` knows it."""
    return isinstance(value, tuple(_GENERATOR_TYPES))

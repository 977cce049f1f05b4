"""The arguments that Megatron saves, and where they place each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.placeholders import Placeholder


@dataclass(frozen=True, slots=True)
class Arguments:
    """The saved Megatron arguments. `path`: the file that they are in."""

    values: Mapping[str, Any]
    path: str

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return an integer argument. FormatError if it is missing and has no default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise FormatError(f"{self.path}: argument {name}: got {value!r}, expected an integer")
        return value

    def get_bool(self, name: str) -> bool:
        """Return a boolean argument; False if it is missing."""
        return bool(self.values.get(name))

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 if unknown, as where one process converted the files of several."""
        world_size = self.get_int("world_size", 0)
        return 0 if world_size % (self.tp * self.pp) else world_size

    @property
    def experts(self) -> int:
        """Number of experts; 0 for a dense model."""
        return self.get_int("num_experts", 0)

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.get_int("tensor_model_parallel_size", 1)

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.get_int("pipeline_model_parallel_size", 1)

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self.get_int("context_parallel_size", 1)

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.get_int("expert_model_parallel_size", 1)

    @property
    def etp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.get_int("expert_tensor_parallel_size", self.tp)


def parse_arguments(namespace: Any, path: str) -> Arguments:
    """Return the arguments from a pickled namespace; empty if there is none."""
    has_values = isinstance(namespace, Placeholder) and isinstance(namespace.state, dict)
    return Arguments(namespace.state if has_values else {}, path)


def rank_positions(rank: int, args: Arguments) -> list[tuple[int, int, int]]:
    """Return where a rank may be, the likeliest first: its (tensor, pipeline, expert) ranks.

    Ranks count tensor, data, then pipeline parallelism; for experts tensor, expert, then data.
    """
    if args.get_bool("use_tp_pp_dp_mapping"):  # allows neither experts nor context parallelism
        return [(rank % args.tp, rank // args.tp % args.pp, 0)]
    inner = rank % (args.world_size // args.pp)  # within its pipeline stage
    # Versions without expert tensor parallelism count context parallelism before experts.
    strides = dict.fromkeys((args.etp, args.tp * args.cp))
    return [
        (rank % args.tp, rank * args.pp // args.world_size, inner // stride % args.ep)
        for stride in strides
    ]


def data_rank(rank: int, args: Arguments) -> int:
    """Return a rank's position among the context- and data-parallel ranks with its slices."""
    if args.get_bool("use_tp_pp_dp_mapping"):
        return rank // (args.tp * args.pp)
    return rank // args.tp % (args.world_size // (args.tp * args.pp))

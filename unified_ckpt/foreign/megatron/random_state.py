"""The random state of each rank of a Megatron job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unified_ckpt.foreign.megatron.arguments import Arguments, data_rank, rank_positions
from unified_ckpt.foreign.megatron.files import RankFile
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain


def read_rng_state(rank_files: Sequence[RankFile], args: Arguments, rank: int) -> Any:
    """Return a rank's random state; that of another expert rank if its own was not saved."""
    if not 0 <= rank < args.world_size:
        return None
    tp, pp, ep = rank_positions(rank, args)[0]
    stage = [file for file in rank_files if (file.tp, file.pp) == (tp, pp)]
    stage.sort(key=lambda file: file.ep != ep)
    return select_rng_state(stage[0].state_dict.get("rng_state"), args, rank)


def select_rng_state(states: Any, args: Arguments, rank: int) -> Any:
    """Return a rank's random state of those that its data-parallel ranks saved; None if none."""
    if not states:
        return None
    number = data_rank(rank, args)
    if len(states) <= args.world_size // (args.tp * args.pp) // args.cp:
        number //= args.cp  # older versions collect one of each context-parallel group
    return {"rng_state": to_plain(states[number if len(states) > 1 else 0])}

"""Check that all ranks of a load read the same save with the same options.

Two ranks may open different saves under one path: through different mounts, or because a save
was replaced in between. Ranks with different options would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import LayoutError, StorageError
from unified_ckpt.options import LoadOptions


def shared_settings(
    save_id: str | None, *, strict: bool, options: LoadOptions
) -> dict[str, object]:
    """Return this rank's settings that must equal those of all other ranks, by name."""
    return {
        "save_id": save_id,
        "strict": strict,
        "verify": options.verify,
        "max_over_read": options.max_over_read,
        "data_dims": None if options.data_dims is None else ", ".join(options.data_dims),
    }


def check_same_on_all_ranks(settings_by_rank: Sequence[Mapping[str, object]]) -> None:
    """Raise StorageError if the ranks read several saves, LayoutError if other settings differ.

    `settings_by_rank`: the result of `shared_settings` on each rank.
    """
    for name in settings_by_rank[0]:
        ranks = group_by_value(
            (rank, settings[name]) for rank, settings in enumerate(settings_by_rank)
        )
        if len(ranks) == 1:
            continue
        if name == "save_id":
            saves = "; ".join(
                f"rank(s) {format_ranks(value_ranks)} "
                f"{f'save {value}' if value else 'one without an id'}"
                for value, value_ranks in ranks.items()
            )
            raise StorageError(
                f"the ranks opened different checkpoints: {saves}; expected one; pass a path to "
                "the same folder on all ranks, and do not replace it during a load"
            )
        values = "; ".join(
            f"rank(s) {format_ranks(value_ranks)} {value!r}" for value, value_ranks in ranks.items()
        )
        raise LayoutError(
            f"{name} is not the same on all ranks of this load: {values}; pass one value"
        )

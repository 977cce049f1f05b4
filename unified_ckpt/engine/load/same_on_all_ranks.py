"""What every rank of a load must have alike, compared before the first byte is written: the save
that it reads, and how it reads it.

A rank knows only of the folder that it opened. Two ranks with one path may have two saves before
them: another mount, or a save that took the other's place between the two openings. And two that
read otherwise wait for each other for what never comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import LayoutError, StorageError
from unified_ckpt.options import LoadOptions


def shared_settings(
    save_id: str | None, *, strict: bool, options: LoadOptions
) -> dict[str, object]:
    """What a rank tells of itself, by name."""
    return {
        "save_id": save_id,
        "strict": strict,
        "verify": options.verify,
        "max_over_read": options.max_over_read,
    }


def check_same_on_all_ranks(settings_by_rank: Sequence[Mapping[str, object]]) -> None:
    """`settings_by_rank`: by each rank. StorageError where they read several saves, LayoutError
    where they read one in several ways.
    """
    for name in settings_by_rank[0]:
        ranks: dict[object, list[int]] = {}
        for rank, settings in enumerate(settings_by_rank):
            ranks.setdefault(settings[name], []).append(rank)
        if len(ranks) == 1:
            continue
        if name == "save_id":
            values = "; ".join(
                f"rank(s) {format_ranks(value_ranks)} {f'save {value}' if value else 'one without an id'}"
                for value, value_ranks in ranks.items()
            )
            raise StorageError(
                f"the ranks read several checkpoints: {values}; needed one: is the path the same folder for all of them, and does nobody "
                "replace it meanwhile?"
            )
        values = "; ".join(
            f"rank(s) {format_ranks(value_ranks)} {value!r}" for value, value_ranks in ranks.items()
        )
        raise LayoutError(
            f"{name} is not the same on all ranks of this load: {values}; needed one value"
        )

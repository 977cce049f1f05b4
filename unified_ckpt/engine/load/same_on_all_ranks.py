"""What every rank of a load must have alike, compared before the first byte is written: the save that it reads, and how it reads it.

A rank knows only of the folder that it opened. Two ranks with one path may have two saves before them: another mount, or a save that took
the other's place between the two openings. And two that read otherwise wait for each other for what never comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unified_ckpt.core.text import short
from unified_ckpt.errors import LayoutError, StorageError
from unified_ckpt.options import LoadOptions


def what_is_alike(save_id: str | None, *, strict: bool, options: LoadOptions) -> dict[str, object]:
    """What a rank tells of itself, by name."""
    return {
        "save_id": save_id,
        "strict": strict,
        "verify": options.verify,
        "max_over_read": options.max_over_read,
    }


def check_alike(told: Sequence[Mapping[str, object]]) -> None:
    """`told`: by each rank. StorageError where they read several saves, LayoutError where they read one in several ways."""
    for name in told[0]:
        ranks: dict[object, list[int]] = {}
        for rank, note in enumerate(told):
            ranks.setdefault(note[name], []).append(rank)
        if len(ranks) == 1:
            continue
        if name == "save_id":
            found = "; ".join(
                f"rank(s) {short(some)} {f'save {value}' if value else 'one without an id'}"
                for value, some in ranks.items()
            )
            raise StorageError(
                f"the ranks read several checkpoints: {found}; needed one: is the path the same folder for all of them, and does nobody "
                "replace it meanwhile?"
            )
        found = "; ".join(f"rank(s) {short(some)} {value!r}" for value, some in ranks.items())
        raise LayoutError(
            f"{name} is not the same on all ranks of this load: {found}; needed one value"
        )

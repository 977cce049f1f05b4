"""Decides whether a save replaces a complete step of the same name. No other module decides it.

Data could be lost if a run that forgets to restore replaced the steps of an earlier run, or if a
run that has gone back could not store its state. So a step is replaced only if this run has gone
back from it.
"""

from __future__ import annotations

from collections.abc import Collection

from unified_ckpt.options import SaveOptions, with_default_if_exists


def with_existing_rule(
    options: SaveOptions, step: int, *, later: Collection[int], damaged: Collection[int]
) -> SaveOptions:
    """Return the options with the `if_exists` of a save of `step`.

    `later`: steps after the one that this run restored from the same root. `damaged`: steps that a
    restore could not use. Other steps stay if they are complete, see "keep_complete". An
    `if_exists` that the options set counts, except for damaged steps.
    """
    if step in damaged:
        return options.model_copy(update={"if_exists": "replace"})
    return with_default_if_exists(
        options, if_exists="replace" if step in later else "keep_complete"
    )


def kept_text(path: str, save_id: str) -> str:
    """Say that an existing step stays."""
    return (
        f"{path} is save {save_id} and stays, because this run has not gone back from it; "
        "to replace it, restore an earlier step, or set SaveOptions(if_exists='replace')"
    )

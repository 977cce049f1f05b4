"""Which checkpoints of a root go after a commit, and their removal. Runs on one rank, in the thread of the save that has just ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from unified_ckpt.core.retention import Rules, kept
from unified_ckpt.engine.folder.commit import committed
from unified_ckpt.engine.folder.completeness import wrong_header
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.steps.remove import removed_all
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


def damaged(storage: LocalStorage, found: Scan) -> dict[str, str]:
    """Save ids of the newest complete ones with a header that is not theirs, and what is wrong: down to the newest full one that is good.
    These must not count as what the run goes on from. Raises what cannot be read."""
    wrong: dict[str, str] = {}
    for one in reversed(found.complete):
        manifest = committed(storage, one.name)
        why = wrong_header(storage, one.name, manifest) if manifest is not None else ""
        if why and one.save_id is not None:
            wrong[one.save_id] = why
        elif one.full:
            break
    return wrong


def condemned(
    found: Scan, rules: Rules, *, protected: Collection[int], apart: Collection[str] = ()
) -> list[StepRecord]:
    """Good checkpoints that no rule keeps. What is incomplete, misnamed or not ours is never among them, nor saves that are `apart`."""
    those = [one for one in found.complete if one.save_id not in apart]
    stays = kept([one.saved for one in those], rules, protected=protected)
    return [one for one in those if one.step not in stays]


def rotate(
    storage: LocalStorage,
    prefix: str,
    rules: Rules,
    *,
    protected: Callable[[], Collection[int]],
    apart: Collection[str] = (),
) -> None:
    """Removes what the rules do not keep. `protected`: steps that always stay, the one just saved among them; asked for after the look at
    what is there, so that who says it before he saves is heard. `apart`: ids of saves that the rules are not about.

    What cannot be removed is told in a warning and tried again after the next save.
    """
    if not rules.full and not rules.model_only:
        return
    found = scan(storage, prefix)
    going = condemned(found, rules, protected=protected(), apart=apart)
    gone, stayed = removed_all(storage, {one.name: one.save_id or "" for one in going})
    if gone:
        _LOG.info("removed from %s by the rules: %s", storage.root, ", ".join(gone))
    for name, why in stayed.items():
        _LOG.warning("%s stays for now: %s", storage.path(name), why)


def keep(
    storage: LocalStorage,
    prefix: str,
    rules: Rules,
    *,
    protected: Callable[[], Collection[int]],
    apart: Collection[str] = (),
) -> None:
    """Rotates after a save. A failure of that is no failure of the save."""
    try:
        rotate(storage, prefix, rules, protected=protected, apart=apart)
    except (CheckpointError, OSError) as error:
        _LOG.warning("%s: old checkpoints stay for now: %s", storage.root, error)

"""Names the ranks that are silent when the wait of another rank times out.

Ranks that wait for a dead rank time out together, and many wait for one that waits itself. Each
marks itself. The first one asks for the marks of all ranks, and shares what it learns; if all
asked, the requests would grow with the square of their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unified_ckpt.errors import RankError

if TYPE_CHECKING:
    from unified_ckpt.runtime.comm.collective import Collective


def mark_overdue(collective: Collective) -> bool:
    """Mark this rank as one whose wait timed out; return whether it is the first."""
    top = collective.top
    top.put(f"overdue/{top.rank}", b"1")
    return top.add("overdue") == 1


def with_silent_ranks(
    collective: Collective, error: BaseException, *, is_first: bool
) -> BaseException:
    """Return an error of a wait, with the ranks that report nothing added to its text.

    Returns it as it is once another rank has shared its own error. A rank that is not the first
    waits twice as long for that: the first one may have died meanwhile.
    """
    if collective.wait_for_cause() or (not is_first and collective.wait_for_cause()):
        return error
    top = collective.top
    silent = top.missing_ranks([f"overdue/{rank}" for rank in range(top.world)])
    if not silent or f" {silent} did not" in str(error):
        return error
    return RankError(f"{error}; rank(s) {silent} reported no error")

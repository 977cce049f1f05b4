"""What `prune` decides about each folder of a root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

_PAST = {"remove": "removed", "finish": "finished", "abort": "aborted"}


@dataclass(frozen=True, slots=True)
class Decision:
    """A folder, and why it is removed, or why not.

    `act` removes it, and returns False if it may not, as `in_use` says, or a word for what it did
    instead. None: it stays. `verb`: in a bucket, commits are finished and uploads aborted.
    """

    name: str
    nbytes: int
    reason: str
    act: Callable[[], bool | str | None] | None = None
    in_use: str = "it is being read"
    verb: Literal["remove", "finish", "abort"] = "remove"

    def carry_out(self, *, dry_run: bool) -> str:
        """Act, and return what was done or would be; "" if it may not."""
        if dry_run or self.act is None:
            return f"would {self.verb}"
        result = self.act()
        if isinstance(result, str):
            return result
        return "" if result is False else _PAST[self.verb]

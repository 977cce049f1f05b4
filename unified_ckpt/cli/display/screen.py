"""What the output is: how wide, and whether it shows colours."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from math import inf
from typing import TextIO

_STYLES = {"title": "1", "bad": "31", "good": "32", "note": "33"}


@dataclass(frozen=True, slots=True)
class Screen:
    """`columns`: how many fit a line. `colours`: whether escape sequences are shown as colours."""

    columns: float = inf
    colours: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """Return that of a stream. Files and pipes have no limit.

        Colours show on terminals that are not dumb, unless NO_COLOR is set.
        """
        if not stream.isatty():
            return cls()
        is_plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        return cls(shutil.get_terminal_size().columns, not is_plain)

    def fit(self, line: str) -> str:
        """Return the line, cut to the columns."""
        return line if len(line) <= self.columns else f"{line[: int(self.columns) - 1]}…"

    def style(self, text: str, style: str) -> str:
        """Return the text in a style: title, bad, good or note."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colours and text else text

"""What stdout is: how wide, and whether it shows colours."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod, RenderableType


def stdout_columns() -> int:
    """Return how many columns fit a line. Files and pipes have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1_000_000


def stdout_console() -> Console:
    """Return a console for `rendered`.

    Colours show on terminals that are not dumb, unless NO_COLOR is set.
    """
    from rich.console import Console  # `inspect` does without it

    is_plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    return Console(
        width=stdout_columns(),
        height=24,  # without one, rich takes each dumb terminal for 80 columns wide
        color_system=None if is_plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def rendered(console: Console, *renderables: RenderableType, cut: bool = False) -> str:
    """Return what a console shows, without trailing spaces. `cut`: each text has one line."""
    overflow: OverflowMethod = "ellipsis" if cut else "fold"
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, no_wrap=cut, overflow=overflow)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())

"""Progress bars of the verbs."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(
    verb: str,
    *,
    total: int | None = None,
    enabled: bool = True,
    unit: str = "B",
    delay: float = 0.0,
) -> Any:
    """Return a bar of bytes or others on stderr, a context manager. It shows on terminals only.

    `delay`: seconds before it shows.
    """
    return tqdm(
        total=total,
        desc=verb,
        unit="iB" if unit == "B" else unit,  # after a prefix: MiB
        unit_scale=unit == "B",
        unit_divisor=1024,
        leave=False,
        delay=delay,
        disable=None if enabled else True,  # None: on terminals only
    )

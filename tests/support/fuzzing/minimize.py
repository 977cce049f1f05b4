"""Chooses the inputs that `tests/corpus` keeps: few and small ones that reach the same lines.

`python -m tests.support.fuzzing.minimize FOLDER TARGET…` adds inputs of FOLDER, as the fuzzer
leaves them, and removes those of the corpus that reach nothing more.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.fuzzing import targets

KEPT = "failed-"  # starts the names of inputs that failed once; they stay
SLOW_IMPORTS = ("transformers",)  # an input that needs one takes seconds
PACKAGE = str(Path(__file__).parents[3] / "unified_ckpt")

Line = tuple[str, int]


@contextmanager
def traced(lines: set[Line]) -> Iterator[None]:
    """Add the lines of the package that run within."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def reached_lines(target: str, data: bytes) -> set[Line]:
    """Return the lines that an input reaches; none for one that needs a slow import."""
    lines = set[Line]()
    for name in SLOW_IMPORTS:
        sys.modules.pop(name, None)
    with traced(lines):
        targets.run(target, data)
    return set() if any(name in sys.modules for name in SLOW_IMPORTS) else lines


def minimize(target: str, corpus: Path) -> None:
    """Replace the inputs of a target in `tests/corpus`."""
    bodies = {
        data: name
        for folder in (corpus, targets.CORPUS)
        for name, data in targets.inputs(target, folder)
    }
    reached = {data: reached_lines(target, data) for data in sorted(bodies, key=len)}
    chosen = {data for data, name in bodies.items() if name.startswith(KEPT)}
    missing = set().union(*reached.values()).difference(*(reached[data] for data in chosen))
    while missing:
        # many lines for each byte
        best = max(reached, key=lambda data: len(reached[data] & missing) / (len(data) + 200))
        chosen.add(best)
        missing -= reached[best]
    for data, name in bodies.items():
        path = targets.CORPUS / target / name
        if data not in chosen:
            path.unlink(missing_ok=True)
        elif not name.startswith(KEPT):
            targets.add_input(target, data)
    print(f"{target}: {len(bodies)} -> {len(chosen)} inputs, {sum(map(len, chosen)):,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", nargs="*", default=sorted(targets.TARGETS))
    arguments = parser.parse_args()
    for name in arguments.target:
        minimize(name, arguments.folder)

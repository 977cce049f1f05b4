"""All targets, and how one input is run: it is refused, or right, and nothing escapes."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.support.fuzzing import foreign_targets, format_targets
from tests.support.fuzzing.guards import LimitExceeded, guarded
from unified_ckpt.errors import CheckpointError

CORPUS = Path(__file__).parents[2] / "corpus"
TARGETS = format_targets.TARGETS | foreign_targets.TARGETS


def run(target: str, data: bytes) -> None:
    """Run one input. Any exception is an error of the code under test."""
    with warnings.catch_warnings(action="ignore"):
        try:
            _run_once(target, data)
        except LimitExceeded:  # the second time nothing is imported
            _run_once(target, data)


def _run_once(target: str, data: bytes) -> None:
    if target in foreign_targets.TARGETS:  # these are guarded beside their own writes
        TARGETS[target](data)
        return
    with guarded():
        try:
            TARGETS[target](data)
        except CheckpointError:
            return


def signature(error: BaseException) -> str:
    """Return what distinguishes an error from another: its type and the lines that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f"{Path(frame.filename).stem}:{frame.name}"
        for frame in frames
        if "unified_ckpt" in frame.filename
    ]
    return f"{type(error).__name__} {' '.join(ours[-3:])}"


def inputs(target: str, corpus: Path = CORPUS) -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of a target's inputs in a corpus."""
    for path in sorted((corpus / target).glob("*")):
        yield path.name, path.read_bytes()


def add_input(target: str, data: bytes, corpus: Path = CORPUS) -> None:
    """Add an input to a corpus, named by its hash."""
    folder = corpus / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)

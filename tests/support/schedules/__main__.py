"""Runs the schedule of a seed again and prints its operations: python -m … SEED."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.support.schedules.saves import Drawn, prepare, run


def main() -> None:
    seed = int(sys.argv[1])
    print(Drawn.of(seed))
    os.fsync = lambda fd: None  # as in all tests
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder, "start"))
        done = run(seed, Path(folder, "start"), Path(folder, "root"))
    for task, label in done.scheduler.trace:
        print(task, label)
    print(f"ends at {done.scheduler.now:g} s; ranks {done.dead} died")


if __name__ == "__main__":
    main()

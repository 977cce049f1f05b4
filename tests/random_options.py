"""Random subsets of all options, each against an oracle: `python -m tests.random_options --help`.

A case follows from its seed alone: `--seed 123 --cases 1` replays it.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import torch

from tests.support.options.cases import draw_case, run_save, surroundings
from tests.support.options.conversions import run_conversion, run_estimate
from tests.support.options.runs import run_manager

SHARES = (0.1, 0.3, 0.6)  # of the options that a case sets


def run_case(seed: int, folder: Path) -> str:
    """Run the case of a seed in an empty folder. Return its outcome, for counts.

    Raises AssertionError, or the package's error, for what breaks a promise.
    """
    random = Random(seed)
    torch.manual_seed(seed)
    share, kind = random.choice(SHARES), random.random()
    if kind < 0.2:
        return run_manager(random, folder, surroundings(folder), share)
    case = draw_case(random, folder)
    if kind < 0.35:
        return run_conversion(case, share)
    return run_estimate(case, share) if kind < 0.4 else run_save(case, share)


def run_cases(first: int, count: int, *, seconds: float = 1e9) -> tuple[Counter[str], list[int]]:
    """Run cases until one limit. Return the counts of outcomes, and the seeds that failed."""
    outcomes, failed, end = Counter[str](), list[int](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as root:
        for seed in range(first, first + count):
            if time.monotonic() > end:
                break
            folder = Path(root, str(seed))
            folder.mkdir()
            try:
                outcomes[run_case(seed, folder)] += 1
            except Exception:
                failed.append(seed)
                print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            shutil.rmtree(folder)
    return outcomes, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # warnings of options that do what they say
    outcomes, failed = run_cases(arguments.seed, arguments.cases, seconds=arguments.seconds)
    for outcome, count in outcomes.most_common():
        print(f"{count:7} {outcome}")
    print(f"{outcomes.total() + len(failed):7} cases, {len(failed)} failed: {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares a trainer's own tests, with stock and with our drop-in:
`python -m tests.trainer_suites TRAINER CHECKOUT [--results FOLDER] [pytest arguments]`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.trainer_suites.by_design import BY_DESIGN
from tests.trainer_suites.pytest_session import read_outcomes

_FOLDER = Path(__file__).parent
_HANG_SECONDS = 180
_MAX_SESSIONS = 20  # each ends at a test that hangs or crashes


@dataclass(frozen=True, slots=True)
class Suite:
    """A trainer's tests. `plugin`: the file here that adds the drop-in. `root`: folder of a
    checkout from which `files` are named. `arguments`: of pytest, always passed.
    """

    plugin: str
    root: str
    files: tuple[str, ...]
    arguments: tuple[str, ...] = ()


SUITES = {
    "accelerate": Suite(
        plugin="accelerate.py",
        root="tests",
        files=(
            "test_accelerator.py",
            "test_data_loader.py",
            "test_grad_sync.py",
            "test_optimizer.py",
            "test_scheduler.py",
            "test_state_checkpointing.py",
        ),
    ),
    "lightning": Suite(
        plugin="lightning.py",
        root="tests/tests_pytorch",
        files=(
            "checkpointing",
            "loops",
            "callbacks",
            "models/test_hooks.py",
            "models/test_hparams.py",
            "models/test_restore.py",
            "core/test_datamodules.py",
            "core/test_saving.py",
            "trainer/connectors/test_checkpoint_connector.py",
            "trainer/connectors/test_signal_connector.py",
            "trainer/test_dataloaders.py",
            "trainer/test_trainer.py",
            "trainer/flags",
            "trainer/optimization",
            "tuner",
        ),
    ),
    "transformers": Suite(
        plugin="transformers.py",
        root="tests/trainer",
        files=(
            "test_trainer_callback.py",
            "test_trainer_checkpointing.py",
        ),
    ),
}


def main() -> int:
    """Run the tests twice and print what differs. Returns 1 if anything differs against the rows
    of by_design.py.
    """
    parser = argparse.ArgumentParser(prog="tests.trainer_suites", description=__doc__)
    parser.add_argument("trainer", choices=sorted(SUITES))
    parser.add_argument("checkout", type=Path, help="a checkout of the trainer's repository")
    parser.add_argument("--results", help="folder of outcomes; those with stock are used again")
    options, arguments = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        results = options.results or stack.enter_context(tempfile.TemporaryDirectory())
        os.makedirs(results, exist_ok=True)
        stock = os.path.join(os.path.abspath(results), "stock.jsonl")
        ours = os.path.join(os.path.abspath(results), "ours.jsonl")
        Path(ours).unlink(missing_ok=True)
        suite, checkout = SUITES[options.trainer], options.checkout.resolve()
        _run(suite, checkout, arguments, (stock, "", ""))
        _run(suite, checkout, arguments, (ours, str(_FOLDER / suite.plugin), stock))
        return _compare(options.trainer, read_outcomes(stock), read_outcomes(ours))


def _run(
    suite: Suite, checkout: Path, arguments: Sequence[str], session: tuple[str, str, str]
) -> None:
    """Run sessions until one reaches its end. `session`: the first arguments of its script."""
    root = checkout / suite.root
    named = [item for item in arguments if (root / item.partition("::")[0]).exists()]
    options = [item for item in arguments if item not in named]
    command = [
        *(sys.executable, "-P", str(_FOLDER / "pytest_session.py"), *session),
        *("-q", "--color=no", "--tb=short", "-p", "no:cacheprovider", *suite.arguments),
        *("-o", f"faulthandler_timeout={_HANG_SECONDS}"),
        *("-o", "faulthandler_exit_on_timeout=true"),
        *(options + [str(root / item) for item in named or suite.files]),
    ]
    for _ in range(_MAX_SESSIONS):
        before = len(read_outcomes(session[0]))
        code = subprocess.run(command, cwd=checkout, check=False).returncode
        if code in (0, 5):  # 5: no tests are left
            return
        if len(read_outcomes(session[0])) == before:
            raise SystemExit(f"pytest: got exit code {code} without an outcome; see above")


def _compare(trainer: str, stock: dict[str, str], ours: dict[str, str]) -> int:
    """Print counts and the names that differ. Returns the exit code."""
    rows = {test: reason for reason, tests in BY_DESIGN[trainer].items() for test in tests}
    passed = [test for test, outcome in stock.items() if outcome == "passed"]
    failed = [test for test in passed if ours.get(test) != "passed"]
    by_design = [test for test in failed if not rows.keys().isdisjoint(_names(test))]
    differing = sorted({*failed} - {*by_design})
    needed = {name for test in by_design for name in _names(test)}
    run = {name for test in passed for name in _names(test)}
    outdated = sorted(rows.keys() & run - needed)
    print(f"passed with stock: {len(passed)} of {len(stock)}")
    print(f"of these passed with ours: {len(passed) - len(failed)}")
    print(f"by design: {len(by_design)}")
    print(f"differ: {len(differing)}")
    for test in differing:
        print(f"  {test}\n    {ours.get(test, 'not run')[:200]}")
    for name in outdated:
        print(f"  passes, remove its row in by_design.py: {name}")
    return 1 if differing or outdated else 0


def _names(test: str) -> tuple[str, str]:
    return test, test.partition("[")[0]


if __name__ == "__main__":
    sys.exit(main())

"""One pytest process of a suite: records the outcome of each test in a file of JSON lines.

Run as `python -P pytest_session.py OUTCOMES PLUGIN SELECTION [pytest arguments]`. `PLUGIN`: path of
a plugin, or "" for none. `SELECTION`: outcomes of an earlier run, whose passed tests are run, or ""
for all. Tests with an outcome are not run again. `-P`: names of files here are those of packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from types import ModuleType

import pytest


class OutcomeRecorder:
    """A pytest plugin that writes each outcome when it is known, because a process may crash."""

    def __init__(self, path: str, selection: str) -> None:
        self._known = read_outcomes(path)
        self._selection = read_outcomes(selection) if selection else None
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - until the process ends

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests that have an outcome, or are not in the selection."""
        items[:] = [item for item in items if self._is_selected(item.nodeid)]

    def _is_selected(self, test: str) -> bool:
        passed = self._selection is None or self._selection.get(test) == "passed"
        return passed and test not in self._known

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record a failure, which stays if the process ends within the test."""
        self._write(nodeid, "failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of the call, or of a setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
            reason = "" if crash is None else f": {crash.message.splitlines()[0]}"
            self._write(report.nodeid, f"{report.outcome}{reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End with 0 after failed tests, which are outcomes; 1 is a test that hangs."""
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, test: str, outcome: str) -> None:
        self._file.write(json.dumps([test, outcome]) + "\n")


def read_outcomes(path: str) -> dict[str, str]:
    """Return the last outcome of each test: "passed", "skipped", or "failed: <error>"."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return dict(json.loads(line) for line in file)


def _load_plugin(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_suite_plugin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    outcomes, plugin, selection, *arguments = sys.argv[1:]
    plugins: list[object] = [OutcomeRecorder(outcomes, selection)]
    if plugin:
        plugins.append(_load_plugin(plugin))
    sys.exit(pytest.main(arguments, plugins=plugins))

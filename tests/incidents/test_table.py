"""The table of public reports, its tests and its page."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.incidents.table import INCIDENTS, REPOSITORIES

ROOT = Path(__file__).parents[2]
BUILD = runpy.run_path(str(ROOT / "docs" / "build_incidents.py"))


def test_each_report_has_one_test_and_each_test_one_report() -> None:
    reports = [row.report for rows in INCIDENTS.values() for row in rows]
    assert len(reports) == len(set(reports))
    tests = BUILD["marked_tests"]()
    assert {report: names for report, names in tests.items() if len(names) != 1} == {}
    assert sorted(tests) == sorted(reports)
    functions = [names[0] for names in tests.values()]
    assert len(functions) == len(set(functions))


def test_repositories_are_those_of_the_reports() -> None:
    names = {row.report.partition("#")[0] for rows in INCIDENTS.values() for row in rows}
    assert names == set(REPOSITORIES)


def test_page_is_current() -> None:
    """After a change of the table: `PYTHONPATH=. python docs/build_incidents.py`."""
    page = ROOT / "docs" / "incidents.md"
    assert page.read_text() == BUILD["page"](), "run docs/build_incidents.py"

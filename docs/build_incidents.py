"""Writes docs/incidents.md from tests/incidents/table.py and the tests marked with its reports.

PYTHONPATH=. python docs/build_incidents.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.incidents.table import INCIDENTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "incidents.md"
INTRODUCTION = """\
# Incidents

Public reports about checkpoints of training jobs that use other libraries. Each row says what \
happened there and what happens here. A test re-creates each situation.

This page is written by `docs/build_incidents.py` from `tests/incidents/table.py`.
"""


def marked_tests() -> dict[str, list[tuple[str, str]]]:
    """Return the tests of each report: file below the root, name."""
    found = defaultdict[str, list[tuple[str, str]]](list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.incident(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for report in _reports(node):
                    found[report].append((path.relative_to(ROOT).as_posix(), node.name))
    return dict(found)


def _reports(function: ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="incident"), args=[ast.Constant(str(report))]):
                yield report


def page() -> str:
    """Return the text of the page."""
    tests = marked_tests()
    lines = [INTRODUCTION]
    for section, rows in INCIDENTS.items():
        lines += [f"## {section}", "", "| report | there | here |", "| --- | --- | --- |"]
        for row in rows:
            file, name = tests[row.report][0]
            shown = f'{row.outcome} [Test](../{file} "{name}")'
            lines.append(f"| [{row.report}]({row.url}) | {row.situation} | {shown} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())

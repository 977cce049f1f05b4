"""Count the statements of Python folders, without docstrings and imports.

python benchmarks/count_statements.py unified_ckpt tests
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path


def count_statements(path: Path) -> int:
    """The number of statements in a file; strings that stand alone and imports do not count."""
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(ast.parse(path.read_bytes()))
    )


def count_folders(folders: list[Path]) -> Counter[str]:
    """The statements of each folder and of the folders directly in it, by path."""
    counts: Counter[str] = Counter()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            statements = count_statements(path)
            for parent in path.relative_to(folder).parents:
                if "/" not in parent.as_posix():  # the folder, or one directly in it
                    counts[(folder / parent).as_posix()] += statements
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    counts = count_folders(arguments.folders)
    total = sum(counts[folder.as_posix()] for folder in arguments.folders)
    if arguments.json:
        print(json.dumps({"folders": counts, "total": total}))
        return
    for folder, count in sorted(counts.items()):
        print(f"{count:7,}  {folder}")
    print(f"{total:7,}  total")


if __name__ == "__main__":
    main()

"""Runs a notebook as one program, without Jupyter, and stores what its cells print.

python docs/build_notebook.py docs/notebooks/tour.ipynb
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

END_OF_CELL = "----- end of cell -----"


def program(notebook: dict[str, Any]) -> str:
    """Return the code cells as one program, which prints `END_OF_CELL` after each."""
    cells = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return "".join(f"{cell}\nprint({END_OF_CELL!r}, flush=True)\n" for cell in cells)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> list[str]:
    """Return what each code cell has printed."""
    return [
        "".join(line for output in cell["outputs"] for line in output["text"])
        for cell in code_cells(notebook)
    ]


def store(notebook: dict[str, Any], printed: str) -> None:
    """Store the output of the program in the cells."""
    *texts, rest = printed.split(f"{END_OF_CELL}\n")
    assert not rest, rest
    for number, (cell, text) in enumerate(zip(code_cells(notebook), texts, strict=True), 1):
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["execution_count"] = number
        cell["outputs"] = [stream] if lines else []


def build(path: Path) -> None:
    notebook = json.loads(path.read_text())
    with TemporaryDirectory() as folder:
        script = Path(folder, f"{path.stem}.py")
        script.write_text(program(notebook))
        printed = subprocess.run([sys.executable, script], check=True, stdout=-1, text=True).stdout
    store(notebook, printed)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))

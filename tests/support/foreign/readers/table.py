"""What other libraries read of the golden folders, compared with their bytes, as a table."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import unified_ckpt as uc
from tests.support.foreign.readers.program import READERS, Read
from tests.support.format.golden import GOLDEN

PROGRAM = Path(__file__).parent / "program.py"
ALONE = ("several-files",)
BESIDE = ("everything", "compressed-O1", "compressed-O2")  # folders with master weights and more
ADAPTER = "adapter"
DTYPES = {
    **{
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in zip("IUF", ("int", "uint", "float"), strict=True)
        for bits in (8, 16, 32, 64)
    },
    "BF16": "bfloat16",
    "BOOL": "bool",
}
COLUMNS = ("an exported model", "the model alone", "a whole checkpoint", "other files")
HEAD = f"| call | versions | {' | '.join(COLUMNS)} |\n{'| --- ' * 6}|"


def stored(path: Path) -> Read:
    """Return what a safetensors file holds, as the program describes it, by JSON and slices."""
    body = path.read_bytes()
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    header.pop("__metadata__", None)
    return {
        name: [
            DTYPES[entry["dtype"]],
            entry["shape"],
            _digest(body[start:], *entry["data_offsets"]),
        ]
        for name, entry in header.items()
    }


def _digest(data: bytes, start: int, stop: int) -> str:
    return hashlib.sha256(data[start:stop]).hexdigest()


def is_model_file(name: str) -> bool:
    """Return whether a file holds tensors of the part `model`."""
    return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) is not None


def files() -> list[str]:
    """Return every safetensors file of the golden folders, relative to them."""
    return sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.safetensors"))


def export(folder: Path) -> Path:
    """Export the model of a whole checkpoint as a Hugging Face folder."""
    uc.convert(GOLDEN / BESIDE[0], folder / "exported", to="huggingface")
    return folder / "exported"


def run_program(python: str, exported: Path) -> dict[str, Any]:
    """Return what the libraries of an interpreter read. `exported`: of `export`."""
    folders = [str(exported), *ALONE, *BESIDE]
    paths = {"file": files(), "folder": folders, "adapter": [ADAPTER]}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(PROGRAM)],
        input=json.dumps(paths),
        cwd=GOLDEN,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a row for each call and outcome, of the results of several interpreters."""
    results = list(results)
    versions_by_cells: dict[tuple[str, ...], list[str]] = {}
    for reader in READERS:
        for result in results:
            if reader.call in result:
                cells = (reader.call, *outcomes(reader.subject, result[reader.call]["read"]))
                versions = versions_by_cells.setdefault(cells, [])
                if result[reader.call]["versions"] not in versions:
                    versions.append(result[reader.call]["versions"])
    return [
        f"| `{call}` | {'; '.join(versions)} | {' | '.join(cells)} |"
        for (call, *cells), versions in versions_by_cells.items()
    ]


def outcomes(subject: str, read: Mapping[str, Read | str]) -> Iterator[str]:
    """Yield the cells of a row, for each of `COLUMNS`."""
    if subject == "file":
        alone = [path for path in read if is_model_file(Path(path).name)]
        yield from 3 * [_cell({path: (read[path], stored(GOLDEN / path)) for path in alone})]
        yield _cell(
            {path: (read[path], stored(GOLDEN / path)) for path in read if path not in alone}
        )
        return
    if subject == "folder":
        exported = next(iter(read))
        for folders in ((exported,), ALONE, BESIDE):
            yield _cell({folder: (read[folder], _stored_model(folder)) for folder in folders})
        yield ""
    else:
        yield from ("", "", "")
        path = f"{ADAPTER}/adapter_model.safetensors"
        yield _cell({path: (read[ADAPTER], stored(GOLDEN / path))}) + ": adapters"


def _stored_model(folder: str) -> Read:
    paths = sorted((GOLDEN / folder).glob("*.safetensors"))
    return {
        name: value
        for path in paths
        if is_model_file(path.name)
        for name, value in stored(path).items()
    }


def _cell(pairs: Mapping[str, tuple[Read | str, Read]]) -> str:
    failed = [expected for actual, expected in pairs.values() if isinstance(actual, str)]
    compared = [
        (actual, expected) for actual, expected in pairs.values() if not isinstance(actual, str)
    ]
    if any(
        actual.get(name) != value
        for actual, expected in compared
        for name, value in expected.items()
    ):
        return "**no: reads other tensors**"
    if not compared:
        return "no: refuses it"
    if failed:
        unread = set.intersection(*({value[0] for value in each.values()} for each in failed))
        return f"yes, without {', '.join(sorted(unread - _dtypes(compared)))}"
    return (
        "yes, and others"
        if any(actual.keys() - expected.keys() for actual, expected in compared)
        else "yes"
    )


def _dtypes(compared: Iterable[tuple[Read, Read]]) -> set[str]:
    return {value[0] for _, expected in compared for value in expected.values()}

"""The house rules that a parser can check: who may import whom, sizes, and words."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "unified_ckpt"
ROOT = Path(__file__).parents[1] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

# From left to right: a module imports only what stands to the left of it, and its own package.
LAYERS = [
    ["errors.py"],
    ["core"],
    ["format"],
    ["options.py"],
    ["runtime"],
    ["engine"],
    ["views"],
    ["sources"],
    ["exports"],
    ["api.py"],
    ["testing.py"],
    ["manager"],
    ["__init__.py"],
    ["integrations", "cli"],
    ["__main__.py"],
]
LAYER = {place: number for number, places in enumerate(LAYERS) for place in places}
EFFECTS = {
    "os",
    "io",
    "threading",
    "time",
    "random",
    "logging",
    "pathlib",
    "subprocess",
    "socket",
    "tempfile",
    "shutil",
    "asyncio",
}
BARRED = {
    "handler",
    "helper",
    "util",
    "utils",
    "processor",
    "info",
    "data",
    "context",
    "base",
    "manager",
}
MANAGERS = {"CheckpointManager", "ManagerOptions"}  # the one, and its options
TRAINS = {"cli/demo_train.py"}  # a training script that the demo runs: not a part of the library


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def place(path: str) -> str:
    """The package or file that a path belongs to: what `LAYERS` names."""
    return path.partition("/")[0]


def imports(tree: ast.Module, *, types_too: bool = True) -> Iterator[str]:
    """Full names of all that is imported, wherever it stands."""
    only_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if not types_too and node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say where from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> str | None:
    """The path of the file that an import of ours names; None for what is not ours."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    for stop in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[1:stop])
        if stop > 1 and folder.with_suffix(".py").exists():
            return relative(folder.with_suffix(".py"))
        if (folder / "__init__.py").exists():
            return relative(folder / "__init__.py")
    raise AssertionError(f"{name} is not there")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {relative(path): ast.parse(path.read_text()) for path in FILES}


def test_every_file_has_a_place(trees: dict[str, ast.Module]) -> None:
    assert [path for path in trees if place(path) not in LAYER] == []
    deep = [
        path for path in trees if path.count("/") > 1 and not path.startswith("sources/")
    ]  # a family of formats has a package
    assert deep == [], "packages are flat"
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(LAYER) == set()


def test_modules_import_what_stands_to_the_left(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for name in imports(tree):
            target = ours(name)
            if target is None or place(target) == place(path):
                continue
            if LAYER[place(target)] >= LAYER[place(path)]:
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_no_module_imports_itself_by_a_detour(trees: dict[str, ast.Module]) -> None:
    found = {
        path: {t for t in map(ours, imports(tree)) if t is not None and t != path}
        for path, tree in trees.items()
    }
    assert len(list(TopologicalSorter(found).static_order())) >= len(
        trees
    )  # raises CycleError, naming the cycle


def test_the_core_is_pure(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if place(path) == "core"
        for name in imports(tree)
        if name.split(".")[0] in EFFECTS
        or (name.split(".")[0] not in sys.stdlib_module_names and ours(name) is None)
    ]
    assert wrong == []


def test_the_format_has_no_effects(trees: dict[str, ast.Module]) -> None:
    effects = EFFECTS - {"pathlib"}  # a path is a value too
    found = {
        path: {name.split(".")[0] for name in imports(tree)} & effects
        for path, tree in trees.items()
        if place(path) == "format"
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("fsspec", {"runtime/remote.py"}),
        ("pydantic", {"format/manifest.py", "format/renames.py", "options.py"}),
    ],
)
def test_some_libraries_have_one_place(
    trees: dict[str, ast.Module], library: str, where: set[str]
) -> None:
    using = {
        path
        for path, tree in trees.items()
        if any(name.split(".")[0] == library for name in imports(tree))
    }
    assert using - where == set()


def test_ranks_talk_in_one_module(trees: dict[str, ast.Module]) -> None:
    types = re.compile(
        r"torch\.distributed\.(tensor|device_mesh|fsdp|checkpoint\.(metadata|filesystem))\b"
    )
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if path not in TRAINS | {"runtime/comm.py"}
        for name in imports(tree, types_too=False)
        if re.match(r"torch\.distributed\b", name) and not types.match(name)
    ]
    assert wrong == []


def test_files_hold_one_idea(trees: dict[str, ast.Module]) -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > 350} == {}


def test_functions_fit_a_screen(trees: dict[str, ast.Module]) -> None:
    long = [
        f"{path}: {node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def test_words_of_a_name() -> None:
    assert words("HTTPHandler_for_baseClass2") == {"http", "handler", "for", "base", "class2"}
    assert words("_database_base64") == {"database", "base64"}


def test_names_say_what_things_are(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name not in MANAGERS
        if words(node.name) & BARRED
    ]
    assert wrong == []
    assert [
        path for path in trees if words(Path(path).stem) & BARRED and path != "manager/manager.py"
    ] == []


def test_only_the_command_line_prints(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if place(path) != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert wrong == []

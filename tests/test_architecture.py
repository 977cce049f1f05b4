"""House rules that a parser can check: imports, sizes and names."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.foreign.dcp_folders import save_dcp

PACKAGE = "unified_ckpt"
ROOT = Path(__file__).parents[1] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

# From left to right: a module imports only what stands to the left of it, and its own package.
LAYERS = [
    ["errors.py"],
    ["core"],
    ["format"],
    ["base_options.py"],
    ["storage_options.py"],
    ["options.py"],
    ["runtime"],
    ["engine"],
    ["views"],
    ["foreign"],
    ["session.py"],
    ["checkpointer.py"],
    ["estimates"],
    ["api.py"],
    ["manager"],
    ["report"],
    ["__init__.py"],
    ["examples"],
    ["integrations", "cli", "dcp"],
    ["__main__.py"],
]
# The same inside a package: a folder imports only what stands in its own row or an earlier one.
INNER_LAYERS = {
    "core": [
        ["grouping.py", "intervals.py", "keywords.py", "text.py"],
        ["sharding"],
        ["recipes.py"],
        ["planning", "nodes"],
        ["recipe_coverage.py", "retention.py"],
    ],
    "runtime": [
        ["gc_pause.py", "packages.py", "threads.py"],
        ["comm", "torch_state"],
        ["objects", "storage"],
        ["exchange"],
    ],
    "engine": [
        ["source", "plan"],
        ["encode"],
        ["folder"],
        ["values"],
        ["save"],
        ["cluster"],
        ["load"],
        ["rewrite", "repair"],
    ],
    "foreign": [
        ["files", "restricted_pickle", "option_flags.py", "unsupported.py"],
        ["transformers_models.py"],
        ["pytorch"],
        ["dcp"],
        ["huggingface"],
        ["deepspeed", "megatron", "nanotron", "orbax", "paddle"],
        ["formats.py"],
        ["open.py", "open_on_ranks.py", "step_names.py"],
        ["export"],
    ],
    "manager": [
        ["rules", "steps"],
        ["events"],
        ["run_context.py", "save_job.py"],
        ["stopping", "tiers"],
        ["restore"],
        ["run_steps.py"],
        ["save_scheduler.py"],
        ["run.py"],
        ["manager.py"],
    ],
}
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
    "helper",
    "util",
    "utils",
    "processor",
    "manager",
}
SETTERS = {  # methods of a collective that set a key
    *("put", "put_json", "set_once", "collect", "collect_json"),
    *("broadcast", "broadcast_json", "all_gather_json"),
}
MANAGERS = {"CheckpointManager", "ManagerOptions"}  # the manager and its options
TRAINS = {"examples/plain_pytorch.py"}  # training scripts: not a part of the library


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def place(path: str) -> str:
    """The package or file that a path belongs to, as `LAYERS` names it."""
    return path.partition("/")[0]


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.Module, *, types_too: bool = True) -> tuple[str, ...]:
    """Full names of all imports, at any depth."""
    only_types = {
        inner
        for node in nodes(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: list[str] = []
    for node in nodes(tree):
        if not types_too and node in only_types:
            continue
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say where from"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


@cache
def ours(name: str) -> str | None:
    """The path of the file that an import names; None outside of the package."""
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
    inner = {
        f"{package}/{place}"
        for package, rows in INNER_LAYERS.items()
        for row in rows
        for place in row
    }
    strays = [
        path
        for path in trees
        if path.partition("/")[0] in INNER_LAYERS and "/".join(path.split("/")[:2]) not in inner
    ]
    assert [path for path in strays if not path.endswith("__init__.py")] == []
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(LAYER) == set()


def test_modules_import_earlier_folders_only(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for name in imports(tree):
            target = ours(name)
            if target is None or place(target) == place(path):
                continue
            if LAYER[place(target)] >= LAYER[place(path)]:
                wrong.append(f"{path} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("package", INNER_LAYERS)
def test_inner_folders_import_earlier_rows(trees: dict[str, ast.Module], package: str) -> None:
    layer = {place: number for number, row in enumerate(INNER_LAYERS[package]) for place in row}
    wrong = []
    for path, tree in trees.items():
        if not path.startswith(f"{package}/") or path == f"{package}/__init__.py":
            continue
        inside = path.split("/")[1]
        for name in imports(tree):
            target = ours(name)
            if target is None or not target.startswith(f"{package}/"):
                continue
            other = target.split("/")[1]
            if other != inside and layer[other] > layer[inside]:
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_folders_hold_few_files() -> None:
    crowded = {
        folder.relative_to(ROOT).as_posix(): count
        for folder in ROOT.rglob("*")
        if folder.is_dir() and (count := len(list(folder.glob("*.py")))) > 17
    }
    assert crowded == {}


APART = {
    "fixtures",
    "incidents",
    "machines",
    "mutations",
    "power",
    "processes",
    "recipes",
    "schedules",
    "support",
    "versions",
}


def test_tests_mirror_the_package() -> None:
    """Each other folder of tests has a package; public reports are rows of tests/incidents/."""
    tests = ROOT.parent / "tests"
    folders = {
        path.parent.relative_to(tests)
        for path in tests.rglob("test_*.py")
        if path.parent != tests and path.relative_to(tests).parts[0] not in APART
    }
    assert len(folders) > 20
    assert sorted(str(folder) for folder in folders if not (ROOT / folder).is_dir()) == []


def test_imports_have_no_cycle(trees: dict[str, ast.Module]) -> None:
    imported_by_file = {
        path: {t for t in map(ours, imports(tree)) if t is not None and t != path}
        for path, tree in trees.items()
    }
    assert len(list(TopologicalSorter(imported_by_file).static_order())) >= len(
        trees
    )  # raises CycleError, naming the cycle


def test_the_core_is_pure(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if place(path) == "core"
        for name in imports(tree)
        if name.split(".")[0] in EFFECTS
        or (name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"} and ours(name) is None)
    ]
    assert wrong == []


def test_the_format_has_no_effects(trees: dict[str, ast.Module]) -> None:
    effects = EFFECTS - {"pathlib", "io"}  # a path is a value too, and so is a BytesIO
    effect_names = {
        path: {name.split(".")[0] for name in imports(tree)} & effects
        for path, tree in trees.items()
        if place(path) == "format"
    }
    assert {path: names for path, names in effect_names.items() if names} == {}


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("fsspec", {"runtime/storage/remote.py"}),
        ("botocore", {"runtime/objects/s3_client.py", "runtime/objects/s3_errors.py"}),
        (
            "pydantic",
            {
                "format/events.py",
                "format/manifest.py",
                "format/manifest_fields.py",
                "format/renames.py",
                "manager/tiers/run_marker.py",
                "base_options.py",
                "storage_options.py",
                "format/commit.py",
                "options.py",
            },
        ),
    ],
)
def test_libraries_are_imported_in_one_place(
    trees: dict[str, ast.Module], library: str, where: set[str]
) -> None:
    using = {
        path
        for path, tree in trees.items()
        if any(name.split(".")[0] == library for name in imports(tree))
    }
    assert using - where == set()


def test_ranks_talk_in_one_folder(trees: dict[str, ast.Module]) -> None:
    types = re.compile(
        r"torch\.distributed\.(tensor|device_mesh|fsdp|checkpoint\.(metadata|filesystem))\b"
    )
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if path not in TRAINS | {"runtime/comm/comm.py", "runtime/comm/key_store.py"}
        for name in imports(tree, types_too=False)
        if re.match(r"torch\.distributed\b", name) and not types.match(name)
        if not (place(path) == "dcp" and name.startswith("torch.distributed.checkpoint"))
    ]
    assert wrong == []


def write_checkpoints(folder: Path) -> None:
    """Write a run, and one folder of each format that is read without torch."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    uc.save(folder / "run" / "checkpoint-1", model=model, optimizer=optimizer, step=1)
    for name in ("hf", "trained/checkpoint-1", "bin"):
        (folder / name).mkdir(parents=True)
    trained = folder / "trained" / "checkpoint-1"
    save_file(model.state_dict(), folder / "hf" / "model.safetensors")
    save_file(model.state_dict(), trained / "model.safetensors")
    torch.save(optimizer.state_dict(), trained / "optimizer.pt")
    torch.save(scheduler.state_dict(), trained / "scheduler.pt")
    (trained / "trainer_state.json").write_text('{"global_step": 1}')
    (trained / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    torch.save({"model": model.state_dict(), "step": 1}, folder / "script.pt")
    save_dcp({"model": model.state_dict(), "step": 1}, folder / "dcp")


def test_metadata_is_read_without_torch(tmp_path: Path) -> None:
    """Importing torch takes most of the second that a look at a folder may take."""
    write_checkpoints(tmp_path)
    paths = ["run/checkpoint-1", "hf", "trained/checkpoint-1", "bin", "script.pt", "dcp"]
    commands = [
        *(["inspect", path] for path in paths),
        *(["inspect", "hf", *more] for more in (["--json"], ["--all", "--match", "*weight*"])),
        *(["list", "run", *more] for more in ([], ["--json"])),
        ["list", "."],
        ["verify", "run/checkpoint-1"],
        ["verify", "run", "--deep"],
        ["prune", "run", "--keep-latest", "1"],
        ["report", "run"],
        ["diff", "run/checkpoint-1", "run/checkpoint-1"],
        ["inspect", "hf/model.safetensors"],
        ["verify", "hf/model.safetensors"],
        ["verify", "run", "--json"],
    ]
    commands.sort(key=lambda command: "--json" not in command)  # those do without rich
    script = f"""
import sys
from unified_ckpt.format import codec
codec.unpack(codec.pack({{1: (b"x" * 2000, 2.5)}}))
assert not {{"torch", "numpy", "pickle"}} & set(sys.modules)
import unified_ckpt.format.manifest
assert not {{"torch", "numpy"}} & set(sys.modules)
from unified_ckpt.cli.main import main
for command in {commands}:
    assert main(command) == 0, command
    assert "torch" not in sys.modules, command
    assert "--json" not in command or "rich.console" not in sys.modules, command
"""
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_files_hold_one_idea(trees: dict[str, ast.Module]) -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > 400} == {}


PUBLIC = {
    ("checkpointer.py", "load"),
    ("api.py", "estimate"),
    ("manager/manager.py", "__init__"),
    ("integrations/transformers/callback.py", "__init__"),
    ("dcp/state_dict_saver.py", "save"),
    ("dcp/state_dict_saver.py", "async_save"),
}


def test_functions_have_at_most_six_parameters(trees: dict[str, ast.Module]) -> None:
    wide = [
        f"{path}: {node.name} has {count} parameters"
        for path, tree in trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (path, node.name) not in PUBLIC
        and (count := parameter_count(node.args)) > 6
    ]
    assert wide == []


def parameter_count(arguments: ast.arguments) -> int:
    """The number of parameters without `self` and `cls`."""
    positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    return len(positional) + len(arguments.kwonlyargs) - (positional[:1] in (["self"], ["cls"]))


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines below the signature and docstring."""
    body = (
        node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    )
    return (node.end_lineno or 0) - body[0].lineno + 1


# Who drives the engine calls public names only, see `session.py`.
DRIVERS = {"manager", "integrations", "dcp", "foreign", "cli", "report", "estimates"}
# Attributes of other libraries that have the name of one of ours.
THIRD_PARTY = {"integrations/accelerate/dataloaders.py: loader._drop_last"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def member_names(tree: ast.Module) -> set[str]:
    """The private methods and attributes that classes of a module define."""
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    inner = [node for cls in classes for node in ast.walk(cls)]
    fields = [node.target for node in inner if isinstance(node, ast.AnnAssign)]
    names = [node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)]
    names += [node.id for node in fields if isinstance(node, ast.Name)]
    names += [
        node.attr
        for node in inner
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("self", "cls")
    ]
    return set(filter(private, names))


def test_drivers_use_public_names(trees: dict[str, ast.Module]) -> None:
    """No `_name` of an object, a class or a module that another module of the package defines."""
    members = {path: member_names(tree) for path, tree in trees.items()}
    wrong = set()
    for path, tree in trees.items():
        if place(path) not in DRIVERS:
            continue
        others = set().union(*(names for other, names in members.items() if other != path))
        own = {"self", "cls"} | {n.name for n in nodes(tree) if isinstance(n, ast.ClassDef)}
        imported = [name for name in imports(tree) if name.startswith(f"{PACKAGE}.")]
        modules = {name.rpartition(".")[2] for name in imported if is_module(name)}
        wrong |= {f"{path}: {name}" for name in imported if private(name.rpartition(".")[2])}
        bases = {
            ast.unparse(b) for n in nodes(tree) if isinstance(n, ast.ClassDef) for b in n.bases
        }
        derives = bool(bases & {name.rpartition(".")[2] for name in imported})
        for node in nodes(tree):
            if not isinstance(node, ast.Attribute) or not private(node.attr):
                continue
            owner = ast.unparse(node.value)
            is_foreign = node.attr in others - members[path] and (owner not in own or derives)
            if owner in modules or is_foreign:
                wrong.add(f"{path}: {owner}.{node.attr}")
    assert wrong - THIRD_PARTY == set()


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or path.is_dir()


# Modules that are chosen by a name: of a public name, a format, a verb.
NAMED = {"__init__.py", "foreign/formats.py", "cli/main.py"}
WITH_DATA_FILES = {"report/page.py", "report/treemap.py"}


def test_no_import_is_hidden_in_a_string(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                is_module_name = re.fullmatch(rf"{PACKAGE}(\.\w+)*\.?", text) and "." in text
                if is_module_name and path not in NAMED | WITH_DATA_FILES:
                    wrong.append(f"{path}:{node.lineno}: {text}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("import_module", "__import__")
            ):
                text = ast.unparse(node)
                is_ours = any(name in text for name in (PACKAGE, "__name__", "__package__"))
                if is_ours and path not in NAMED:
                    wrong.append(f"{path}:{node.lineno}: {text}")
    assert wrong == []


def test_functions_fit_a_screen(trees: dict[str, ast.Module]) -> None:
    long = [
        f"{path}: {node.name} has {body_lines(node)} lines"
        for path, tree in trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > 90
    ]
    assert long == []


def name_parts(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def test_words_of_a_name() -> None:
    assert name_parts("HTTPHandler_for_baseClass2") == {"http", "handler", "for", "base", "class2"}
    assert name_parts("_database_base64") == {"database", "base64"}


def test_names_say_what_things_are(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name not in MANAGERS
        if name_parts(node.name) & BARRED
    ]
    assert wrong == []
    assert [
        path
        for path in trees
        if name_parts(Path(path).stem) & BARRED and path != "manager/manager.py"
    ] == []


def test_only_the_command_line_prints(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if place(path) not in ("cli", "examples")
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert wrong == []


def test_architecture_page_names_files_that_exist() -> None:
    page = ROOT.parent / "docs" / "architecture.md"
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert len(links) > 20
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_architecture_page_follows_a_save_in_few_steps() -> None:
    """At most eight steps, each with a file; the byte offset is one hop away."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    save = text.partition("## One save, step by step")[2].partition("\n## ")[0]
    steps = re.split(r"^\d+\. ", save, flags=re.MULTILINE)[1:]
    assert 0 < len(steps) <= 8
    assert all("](../unified_ckpt/" in step for step in steps)
    file, function = re.search(r"`(\w+)` in\s+\[([\w/.]+)\]", save).group(2, 1)  # type: ignore[union-attr]
    assert f"def {function}(" in (ROOT / file).read_text()


def test_page_of_keys_lists_steps_and_keys(trees: dict[str, ast.Module]) -> None:
    """The steps of saves and loads, and every key that a collective sets by a literal name."""
    text = (ROOT.parent / "docs" / "store-keys.md").read_text()
    folders = ("engine/save/", "engine/load/", "engine/plan/", "engine/cluster/")
    steps, keys = set(), set()
    for path, tree in trees.items():
        for node in nodes(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="step"), args=[ast.Constant(str(name)), *_]
                ) if path.startswith(folders):
                    steps.add(name)
                case ast.Call(
                    func=ast.Attribute(attr=attr, value=receiver),
                    args=[
                        ast.Constant(str(name)) | ast.JoinedStr([ast.Constant(str(name)), *_]),
                        *_,
                    ],
                ) if attr in SETTERS and ast.unparse(receiver).endswith("collective"):
                    keys.add(name)
    assert len(steps) > 15
    assert len(keys) > 50
    assert sorted(step for step in steps if f"`{step}`" not in text) == []
    assert sorted(key for key in keys if f"`{key}" not in text) == []


@pytest.mark.parametrize(
    ("page", "count"), [("guide/troubleshooting.md", 40), ("guide/logging.md", 15)]
)
def test_pages_quote_messages_of_the_source(
    trees: dict[str, ast.Module], page: str, count: int
) -> None:
    """`…` stands for what is formatted; a quote is a part of one literal."""
    texts = "\0".join(text for tree in trees.values() for text in literals(tree))
    texts = re.sub(r"%[-.\d]*[a-z]|…+", "…", texts)
    lines = (ROOT.parent / "docs" / page).read_text()
    quotes = re.findall(r"^\| `([^`]{12,})` \|", lines, re.MULTILINE)
    assert len(quotes) >= count
    assert [quote for quote in quotes if quote not in texts] == []


def literals(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, with `…` for what an f-string formats."""
    for node in nodes(tree):
        match node:
            case ast.JoinedStr(values):
                yield "".join(
                    str(value.value) if isinstance(value, ast.Constant) else "…" for value in values
                )
            case ast.Constant(str(text)):
                yield text


def test_reference_page_is_current() -> None:
    """After a change of a public signature or docstring: `python docs/build_reference.py`."""
    script = ROOT.parent / "docs" / "build_reference.py"
    page = ROOT.parent / "docs" / "reference.md"
    expected: str = runpy.run_path(str(script))["reference"]()
    assert page.read_text() == expected, f"docs/reference.md is stale; run python {script}"

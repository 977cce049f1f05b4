"""Writes docs/reference.md from the signatures and docstrings of the public API.

python docs/build_reference.py

The source is parsed, not imported: no framework has to be installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
COLUMNS = 88
INTRODUCTION = """\
# Reference

Every public name, with its signature, its defaults and its docstring. The commands are on \
[their own page](cli.md). This page is written by `docs/build_reference.py`.

Fields of options take these values; a `Path` or `PathText` is a str or an os.PathLike:

```pyi
{types}
```
"""
SECTIONS = {
    "Save and load": ["save", "save_async", "load", "open", "Checkpointer", "PendingSave"],
    "Manage a run": ["CheckpointManager", "from_paddle", "from_maxtext"],
    "Check, repair, convert": ["verify", "repair", "convert"],
    "Plan ahead": ["estimate"],
    "Options": [
        "SaveOptions",
        "LoadOptions",
        "ManagerOptions",
        "SourceOptions",
        "StorageOptions",
        "ConvertOptions",
        "RunOptions",
    ],
    "Reports": [
        "SaveReport",
        "SaveFailure",
        "LoadReport",
        "VerifyReport",
        "RepairReport",
        "ConvertReport",
        "Estimate",
    ],
    "State": ["Layout", "Strided", "RandomStates", "ElasticSampler", "LazyTensor"],
    "Errors": [
        "CheckpointError",
        "LayoutError",
        "FormatError",
        "OptionError",
        "IntegrityError",
        "NotFoundError",
        "IncompleteError",
        "MismatchError",
        "StorageError",
        "MissingPackageError",
        "RankError",
    ],
}
MODULES = (
    "integrations.transformers",
    "integrations.lightning",
    "integrations.accelerate",
    "integrations.loggers",
    "dcp",
)
TYPES = (  # of fields
    "format.encoded_tensors.Compression",
    "options.IfExists",
    "options.ModelDtype",
    "options.Count",
    "options.Timeout",
    "options.Delay",
)
RETURNED = {"uc.open": "engine.source.view.SourceView"}  # by a function; they are not exported


def reference() -> str:
    """Return the text of the page."""
    package = griffe.load(
        "unified_ckpt",
        search_paths=[ROOT],
        extensions=griffe.load_extensions("unpack_typeddict"),
        allow_inspection=False,
    )
    listed = {name for names in SECTIONS.values() for name in names}
    others = sorted(set(map(str, package.exports or ())) - listed)
    sections = {**SECTIONS, "Other names": others} if others else SECTIONS
    types = [f"{name.rpartition('.')[2]} = {package[name].value}" for name in TYPES]
    lines = [INTRODUCTION.format(types="\n".join(types))]
    for title, names in sections.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += describe(f"uc.{name}", package[name].final_target)
            returned = RETURNED.get(f"uc.{name}")
            if returned is not None:
                lines += describe(returned.rpartition(".")[2], package[returned])
    for module in MODULES:
        lines.append(f"## unified_ckpt.{module}\n")
        for name in package[module].exports or ():
            definition = package[module][name]
            lines += describe(
                str(name), definition.final_target if definition.is_alias else definition
            )
    return "\n".join(lines).rstrip() + "\n"


def describe(name: str, definition: griffe.Object, level: int = 3) -> Iterator[str]:
    """Yield the lines of a function or class, with the public methods of a class."""
    yield f"{'#' * level} {name}\n"
    yield f"```pyi\n{declaration(definition)}\n```\n"
    if definition.docstring is not None:
        yield f"{prose(definition.docstring.value)}\n"
    if isinstance(definition, griffe.Class):
        documented = [field for field in fields(definition) if field.docstring is not None]
        texts = [f"`{field.name}`: {field.docstring.value}" for field in documented]
        if texts:
            yield prose("\n".join(texts)) + "\n"
        for member in definition.members.values():
            is_shown = isinstance(member, griffe.Function) or "property" in member.labels
            if is_shown and not member.name.startswith("_"):
                yield from describe(f"{name}.{member.name}", member, level + 1)


def declaration(definition: griffe.Object) -> str:
    """Return the signature of a function, or a class with its fields."""
    if isinstance(definition, griffe.Attribute):
        return f"{definition.name}: {definition.annotation}"
    if isinstance(definition, griffe.Function):
        fill_defaults(definition)
        return signature(definition)
    if not isinstance(definition, griffe.Class):
        raise TypeError(definition.path)
    lines = [
        f"    {field.name}: {field.annotation}" + (f" = {field.value}" if field.value else "")
        for field in fields(definition)
    ]
    bases = ", ".join(str(base) for base in definition.bases if str(base) != "BaseOptions")
    head = f"class {definition.name}" + (f"({bases})" if bases else "")
    if lines:
        return "\n".join([f"{head}:", *lines])
    if "__init__" in definition.members:
        return signature(definition)
    return head


def fill_defaults(function: griffe.Function) -> None:
    """Set the defaults of a TypedDict's keywords, which `show_keywords` declares."""
    decorators = [ast.parse(str(decorator.value), mode="eval") for decorator in function.decorators]
    declared = {
        keyword.arg: ast.unparse(keyword.value)
        for decorator in decorators
        if isinstance(decorator.body, ast.Call)
        for keyword in decorator.body.keywords
    }
    for parameter in function.parameters:
        if str(parameter.default) == "...":
            parameter.default = declared.get(parameter.name, "None")


def fields(definition: griffe.Class) -> list[griffe.Attribute]:
    """Return the public fields of a class."""
    return [
        member
        for member in definition.members.values()
        if isinstance(member, griffe.Attribute)
        and member.annotation is not None
        and "property" not in member.labels
        and not member.name.startswith("_")
    ]


def signature(definition: griffe.Function | griffe.Class) -> str:
    """Return a signature, one parameter a line if it is long."""
    text = str(definition.signature())
    if len(text) <= COLUMNS:
        return text
    depth, parts, start = 0, [], text.index("(") + 1
    first, end = start, start
    for end, character in enumerate(text[start:], start):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[first : end + 1].strip())
            first = end + 1
    parts.append(text[first:end].strip() + ",")
    return "\n".join([text[:start], *(f"    {part}" for part in parts), text[end:]])


def prose(docstring: str) -> str:
    """Return a docstring in Markdown, one line per paragraph; "`name`:" starts an item."""
    lines = [""]
    for line in docstring.splitlines():
        ends_sentence = not lines[-1] or lines[-1][-1] in ".:"
        is_item = ends_sentence and re.match(r"(`[\w.]+`(, )?)+:", line)
        if is_item or not (line and lines[-1]):
            lines.append(f"- {line}" if is_item else line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines[1:])


if __name__ == "__main__":
    PAGE.write_text(reference())

"""Command-line arguments that several verbs take, and messages that name them.

Imports nothing of the package, so that help and `--version` are printed at once.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, _ActionsContainer
from collections.abc import Iterable
from typing import Any

Argument = tuple[str, dict[str, Any]]  # of `add_argument`
PATHS = ("PATH", "SRC", "DST", "A", "B", "ROOT", "DIR", "OTHER", "FILE", "URL")  # metavars
# the value of an option in a message
_WORDS = r"'[^']*'|\"[^\"]*\""
_VALUE = rf"\.\.\.|\[[^\]]*\]|\([^()]*\)|(?:{_WORDS})(?: or (?:{_WORDS}))*|[\w.]+"


def argument(name: str, **options: Any) -> Argument:
    """Return one argument: its name or names (`-o --output`), and options of `add_argument`."""
    return name, options


def add_arguments(parser: _ActionsContainer, arguments: Iterable[Argument]) -> None:
    """Add arguments to a parser, or to a group of one."""
    for name, options in arguments:
        kind: dict[str, Any] = {"type": path} if options.get("metavar") in PATHS else {}
        parser.add_argument(*name.split(), **kind, **options)


def path(text: str) -> str:
    """Parse an argument: a path."""
    if not text:
        raise ArgumentTypeError("got an empty path; pass . for the current folder")
    return text


def positive_int(text: str) -> int:
    """Parse an argument: an integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}, expected an integer of 1 or more")
    return int(text)


def byte_size(text: str) -> int:
    """Parse an argument: bytes, such as 5000000000, 5GB or 5GiB."""
    prefixes = list(enumerate("KMGT", 1))
    units: dict[str, int] = {f"{prefix}B": 1000**power for power, prefix in prefixes}
    units |= {f"{prefix}iB": 1024**power for power, prefix in prefixes}
    digits = text.rstrip("".join({letter for unit in units for letter in unit}))
    factor = units.get(text.removeprefix(digits), 0 if text != digits else 1)
    if not digits.isdecimal() or int(digits) * factor < 1:
        raise ArgumentTypeError(f"got {text!r}, expected a size such as 5GB or 512MiB")
    return int(digits) * factor


def age_hours(text: str) -> float:
    """Parse an argument: hours; 0 means any age."""
    return 0.0 if text == "0" else positive_number(text)


def positive_number(text: str) -> float:
    """Parse an argument: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


SOURCE_ARGUMENTS = (
    argument("--from", dest="format", metavar="FORMAT", help="its format, instead of detecting it"),
    argument(
        "--config", metavar="PATH", help="the model's Hugging Face config.json, or its folder"
    ),
    argument(
        "--names",
        choices=("auto", "huggingface", "own"),
        default="auto",
        help="which tensor names to use (default: auto)",
    ),
    argument("--rename", metavar="FILE", help="rename tensors by the rules of a TOML or JSON file"),
    argument(
        "--layers",
        choices=("stacked", "unstacked"),
        help="stack identical layers into one tensor, or unstack them",
    ),
    argument(
        "--layer-dim", type=int, default=0, metavar="D", help="dim of the layers (default: 0)"
    ),
    argument(
        "--conversion-fn",
        metavar="MODULE:FUNCTION",
        help="your function that returns the converted tensors",
    ),
)
PREFIX_ARGUMENT = argument(
    "--prefix",
    help="how folder names start, before the step (default: checkpoint-, or nothing if the names "
    "are bare numbers)",
)
RULES_DESCRIPTION = (
    "A checkpoint stays if any rule keeps it. Full and model-only ones are counted separately."
)
RULE_ARGUMENTS = (
    argument("--keep-latest", type=positive_int, metavar="N", help="the latest N"),
    argument(
        "--keep-every-steps", type=positive_int, metavar="K", help="steps that are multiples of K"
    ),
    argument("--keep-every-seconds", type=positive_number, metavar="T", help="one per T seconds"),
    argument("--keep-best", type=positive_int, metavar="N", help="the N best by --metric"),
    argument(
        "--metric",
        dest="best_metric",
        metavar="NAME",
        help="a metric passed to save; its best checkpoint always stays",
    ),
    argument(
        "--mode",
        dest="best_mode",
        choices=("min", "max"),
        default="min",
        help="whether lower or higher is better (default: min)",
    ),
    argument(
        "--keep-latest-model-only",
        type=positive_int,
        metavar="N",
        help="the latest N without optimizer",
    ),
    argument(
        "--keep-every-steps-model-only",
        type=positive_int,
        metavar="K",
        help="steps without optimizer that are multiples of K",
    ),
)


def with_flags(message: str, parser: ArgumentParser) -> str:
    """Return the message with Python options replaced by the flags of the verb.

    `SourceOptions(config=...)` becomes `--config`, `names='own'` becomes `--names own`. A name is
    an option before `=`, in an option class, and at the start before a colon.
    """
    flags = {
        action.dest: action.option_strings[-1]
        for action in parser._actions
        if action.option_strings
    }
    name = "|".join(map(re.escape, flags))
    for pattern in (
        rf"\b\w+Options\((?P<name>{name})(?:=(?P<value>{_VALUE}))?\)",
        rf"\b\w+Options\.(?P<name>{name})\b",
        rf"^(?P<name>{name})(?=: )",
        rf"(?<![\w./-])(?P<name>{name})=(?P<value>{_VALUE})",
        rf"(?<![\w./-])(?P<name>{name})=(?=[\s,;)]|$)",
    ):
        message = re.sub(pattern, lambda match: _flag(match, flags), message)
    return message


def _flag(match: re.Match[str], flags: dict[str, str]) -> str:
    value = match.groupdict().get("value") or "..."
    is_shown = value[0] in "'\"(" and value != "()"
    words = re.sub(r"""['"()]|,(?=\))""", "", value) if is_shown else ""
    return f"{flags[match['name']]} {words}".rstrip()

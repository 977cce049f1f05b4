"""The verb `completion`: prints a script that completes arguments in a shell. Requires shtab."""

from __future__ import annotations

import argparse
from importlib import import_module

from unified_ckpt.cli.arguments import PATHS
from unified_ckpt.cli.main import build_parser
from unified_ckpt.runtime.packages import missing_package


def run(arguments: argparse.Namespace) -> int:
    """Print the script for `arguments.shell`; return 0."""
    try:
        shtab = import_module("shtab")
    except ImportError as error:
        raise missing_package("completion", error, extra="completion") from error
    parser = build_parser()
    for action in _actions(parser):
        if action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser and of its verbs."""
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [each for verb in action.choices.values() for each in verb._actions]
    return actions

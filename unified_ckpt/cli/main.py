"""The command `unified-ckpt`: parses arguments, runs a verb, and turns errors into exit codes.

A verb's module is imported only when the verb is used. Exit 0: fine. 1: the check failed, or a
CheckpointError, which is printed to stderr. 2: usage.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

import unified_ckpt
from unified_ckpt.cli.arguments import (
    PREFIX_ARGUMENT,
    RULE_ARGUMENTS,
    RULES_DESCRIPTION,
    SOURCE_ARGUMENTS,
    Argument,
    add_arguments,
    age_hours,
    argument,
    byte_size,
    positive_int,
    positive_number,
    with_flags,
)
from unified_ckpt.core.keywords import suggestion
from unified_ckpt.errors import CheckpointError

_PATH_HELP = "checkpoint or Hugging Face model folder, local or an fsspec URL"
_MATCH = argument("--match", metavar="GLOB", help="only tensors whose name or part:name matches")
_PART = argument(
    "--part", action="append", dest="parts", metavar="PART", help="only this part (repeatable)"
)
_DTYPE = argument(
    "--dtype",
    dest="model_dtype",
    choices=("float32", "bfloat16", "float16", "float64"),
    help="write the model's tensors in this dtype",
)
_COMPRESSION = argument(
    "--compression",
    choices=("none", "lossless", "O1", "O2"),
    default="none",
    help="how to store master weights and moments (default: none)",
)
_LIST_ARGUMENTS = (
    argument("root", metavar="ROOT", help="folder of one run, or of several"),
    argument("--local", metavar="DIR", help="local directory of a run with two tiers"),
    argument(
        "--keep-latest-local",
        dest="kept_in_local",
        type=positive_int,
        default=1,
        metavar="N",
        help="checkpoints that stay in the local directory (default: 1)",
    ),
    PREFIX_ARGUMENT,
)
_VIEWS = ("inspect", "estimate", "list", "watch", "completion")  # verbs that check nothing
_JSON = argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, slots=True)
class _Verb:
    """The arguments of a verb.

    `source`: the argument that names what to read, if its format can be described by others.
    `has_rules`: it takes retention rules. `has_json`: it prints JSON on request.
    """

    help: str
    description: str
    arguments: tuple[Argument, ...]
    source: str | None = None
    has_rules: bool = False
    has_json: bool = True


_VERBS = {
    "inspect": _Verb(
        "show the contents of a checkpoint",
        "Show the contents of a checkpoint. Reads headers only.",
        (
            argument("path", metavar="PATH", help=_PATH_HELP),
            _MATCH,
            argument(
                "--all",
                action="store_true",
                help="one line per tensor, with its file, instead of a tree",
            ),
        ),
        source="PATH",
    ),
    "verify": _Verb(
        "check or repair a checkpoint, or check all of a run",
        "Check sizes and headers against the manifest.",
        (
            argument("path", metavar="PATH", help=f"{_PATH_HELP}; or a run's folder"),
            PREFIX_ARGUMENT,
            argument("--deep", action="store_true", help="also read and digest every byte"),
            argument(
                "--repair", action="store_true", help="check every byte and repair damaged files"
            ),
            argument(
                "--from",
                action="append",
                default=[],
                dest="sources",
                metavar="OTHER",
                help="repair from this folder of the same save (repeatable)",
            ),
        ),
    ),
    "diff": _Verb(
        "show what differs between two checkpoints",
        "Compare two checkpoints of any formats, tensor by tensor.",
        (
            argument("first", metavar="A", help="checkpoint of any format"),
            argument("second", metavar="B", help="another one"),
            _PART,
            _MATCH,
            argument("--deep", action="store_true", help="also read tensors with equal digests"),
        ),
        source="A",
    ),
    "convert": _Verb(
        "write a checkpoint of any format in another format",
        "Write SRC to DST in another format, and verify the result.",
        (
            argument(
                "sources",
                nargs="+",
                metavar="SRC",
                help="checkpoint of any format, or the folders of one save on several nodes",
            ),
            argument(
                "target",
                metavar="DST",
                help="folder to write; under torchrun, all processes write to it",
            ),
            argument(
                "--to",
                default="unified",
                metavar="FORMAT",
                help="unified (default), huggingface (model only), maxtext, peft, torch, dcp, "
                "paddle, paddleformers, paddle-flex, orbax",
            ),
            _PART,
            _DTYPE,
            argument(
                "--adapter", metavar="PATH", help="merge this LoRA adapter; write only the model"
            ),
            _COMPRESSION,
            argument(
                "--max-file-size",
                dest="max_file_bytes",
                type=byte_size,
                metavar="N",
                help="largest file, such as 5GB (default: by the size of the part)",
            ),
            argument(
                "--if-exists",
                choices=("error", "keep", "replace"),
                default="error",
                help="what to do if DST holds a checkpoint (default: error)",
            ),
            argument(
                "--no-compare",
                dest="compare",
                action="store_false",
                help="allow master weights that, cast down, differ from the model",
            ),
            argument(
                "--no-fsync",
                dest="fsync",
                action="store_false",
                help="return before all bytes are on disk",
            ),
        ),
        source="SRC",
    ),
    "estimate": _Verb(
        "predict the size and time of saves",
        "Predict the size and time of the saves of a run. Measures the disk of --root.",
        (
            argument("path", metavar="PATH", help="checkpoint or model folder of any format"),
            argument(
                "--optimizer",
                metavar="NAME",
                help="add the state of this class of torch.optim, such as adamw",
            ),
            argument(
                "--masters",
                action="store_true",
                dest="master_weights",
                help="add float32 masters of 16-bit tensors",
            ),
            _DTYPE,
            _COMPRESSION,
            argument(
                "--root",
                default=".",
                metavar="DIR",
                help="folder of the run, where 128 MiB are written and removed (default: .)",
            ),
            argument(
                "--keep-latest",
                type=positive_int,
                default=1,
                metavar="N",
                help="checkpoints that stay (default: 1)",
            ),
            argument(
                "--every-minutes", type=positive_number, metavar="M", help="minutes between saves"
            ),
            argument("--every-steps", type=positive_int, metavar="K", help="steps between saves"),
            argument(
                "--steps",
                type=positive_int,
                metavar="N",
                help="the step at which the run ends, to add up its saves from that of PATH",
            ),
        ),
        source="PATH",
    ),
    "list": _Verb(
        "list the checkpoints of one run or several",
        "List the checkpoints under a root, and what interrupted saves left.",
        _LIST_ARGUMENTS,
        has_rules=True,
    ),
    "watch": _Verb(
        "follow a run: list its checkpoints until Ctrl-C",
        "List the checkpoints under a root again and again, until Ctrl-C.",
        (
            *_LIST_ARGUMENTS,
            argument(
                "--interval",
                type=positive_number,
                default=5.0,
                metavar="SECONDS",
                help="seconds between updates (default: 5)",
            ),
        ),
        has_rules=True,
        has_json=False,
    ),
    "prune": _Verb(
        "remove checkpoints that no rule keeps",
        "Remove checkpoints that no rule keeps, without asking for confirmation.",
        (
            argument("root", metavar="ROOT", help="folder of one run"),
            argument("--dry-run", action="store_true", help="only show what would be removed"),
            argument(
                "--incomplete",
                action="store_true",
                help="also remove incomplete folders that are named like a step",
            ),
            argument(
                "--stale", action="store_true", help="also remove what interrupted saves left"
            ),
            argument(
                "--older-than-hours",
                type=age_hours,
                default=24.0,
                metavar="H",
                help="minimum age for --incomplete and --stale (default: 24)",
            ),
            PREFIX_ARGUMENT,
        ),
        has_rules=True,
    ),
    "completion": _Verb(
        "print a script that completes arguments in a shell",
        "Print a script that completes verbs, options and paths in a shell.",
        (argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell"),),
        has_json=False,
    ),
    "report": _Verb(
        "write an HTML page about a run or a checkpoint",
        "Write one HTML page about a run or a checkpoint. Requires the extra `report`.",
        (
            argument("path", metavar="PATH", help="folder of one run, or a checkpoint"),
            argument(
                "-o --output",
                default="report.html",
                metavar="FILE",
                help="the page to write (default: report.html)",
            ),
            PREFIX_ARGUMENT,
        ),
    ),
    "demo": _Verb(
        "train, be killed, resume on fewer processes",
        "Train a small model, kill it during a save, resume it: about a minute.",
        (
            argument("--dir", metavar="DIR", help="work in this empty folder and keep it"),
            argument("--root", metavar="URL", help="save below this URL of a bucket, or folder"),
            argument("--keep", action="store_true", help="keep the folders"),
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. Usage errors raise argparse's SystemExit(2)."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.verb is not None:
        _check_usage(arguments, unknown)
    if sys.stdout is None:  # the caller has closed it, as with `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ASCII terminals lack the tree's branches
    if arguments.verb is None:
        parser.print_help()
        return 0
    verb = import_module(f"unified_ckpt.cli.{arguments.verb}")
    # Until a check has ended, an output that nobody reads is no success.
    code = 0 if arguments.verb in _VIEWS else 1
    try:
        code = int(verb.run(arguments))
        sys.stdout.flush()
    except CheckpointError as error:
        message = with_flags(str(error), arguments.parser)
        print(f"unified-ckpt {arguments.verb}: {message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has exited. Discard the buffer, or the exit raises again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"unified-ckpt {arguments.verb}: {where}{error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as the shell reports SIGINT
    return code


def _check_usage(arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Exit with 2 for unknown options, and for options without those that they require."""
    parser = arguments.parser
    if unknown:
        hint = suggestion(unknown[0].partition("=")[0], parser._option_string_actions)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = vars(arguments)
    if given.get("sources") and not given.get("repair", True):
        parser.error("--from requires --repair")
    if given.get("keep_best") is not None and given["best_metric"] is None:
        parser.error("--keep-best requires --metric")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest what was probably meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        super().error(message)


class _Version(argparse.Action):
    """Prints the version, which is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"unified-ckpt {unified_ckpt.__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = _Parser(
        prog="unified-ckpt", description="Inspect, verify, convert and prune checkpoints."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in _VERBS.items():
        verb_parser = verbs.add_parser(name, help=verb.help, description=verb.description)
        verb_parser.set_defaults(parser=verb_parser)
        add_arguments(verb_parser, (*verb.arguments, *([_JSON] if verb.has_json else [])))
        if verb.source is not None:
            add_arguments(
                verb_parser.add_argument_group(f"how to read {verb.source}"), SOURCE_ARGUMENTS
            )
        if verb.has_rules:
            add_arguments(
                verb_parser.add_argument_group("what to keep", RULES_DESCRIPTION), RULE_ARGUMENTS
            )
    return parser

"""The command `unified-ckpt`: parses, runs a verb, turns errors into exit codes. A verb's module is
imported when it is asked for.

Exit 0: fine. 1: the check failed, or a CheckpointError, whose text goes to stderr. 2: usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from unified_ckpt.cli import retention_args, source_args
from unified_ckpt.errors import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code. Usage errors leave through argparse's SystemExit(2)."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.verb == "verify" and arguments.sources and not arguments.repair:
        parser.error("--from: is for --repair")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that lacks the branches of a tree still shows the names
    verb = import_module(f"unified_ckpt.cli.{arguments.verb}")
    try:
        code = int(verb.run(arguments))
        sys.stdout.flush()
    except CheckpointError as error:
        print(f"unified-ckpt {arguments.verb}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has left, as `head` does. What is still buffered goes nowhere, so that the exit
        # does not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-ckpt",
        description="Looks into checkpoints, checks them, and shows what they are for.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    inspect = verbs.add_parser(
        "inspect",
        help="what a checkpoint holds",
        description="Shows what a checkpoint holds. Reads headers only.",
    )
    inspect.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint, a Hugging Face model folder, or an fsspec URL of one",
    )
    inspect.add_argument(
        "--match", metavar="GLOB", help="only tensors whose name, or part:name, matches"
    )
    inspect.add_argument(
        "--all",
        action="store_true",
        help="a line for every tensor, with its file, in place of the tree",
    )
    source_args.add_source_arguments(inspect, argument="PATH")

    verify = verbs.add_parser(
        "verify",
        help="check a checkpoint",
        description="Checks sizes and headers against the manifest.",
    )
    verify.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint, a Hugging Face model folder, or an fsspec URL of one",
    )
    verify.add_argument(
        "--deep", action="store_true", help="also read every byte and compare every digest"
    )
    verify.add_argument(
        "--repair", action="store_true", help="check everything, and mend what is damaged in PATH"
    )
    verify.add_argument(
        "--from",
        action="append",
        default=[],
        dest="sources",
        metavar="OTHER",
        help="a folder of the same save to take it from",
    )

    diff = verbs.add_parser(
        "diff",
        help="what differs between two checkpoints",
        description="Compares tensor by tensor, of any formats.",
    )
    diff.add_argument("first", metavar="A", help="a checkpoint in any format that `inspect` takes")
    diff.add_argument("second", metavar="B", help="another one")
    diff.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="PART",
        help="only this part; may be given more than once",
    )
    diff.add_argument(
        "--match", metavar="GLOB", help="only tensors whose name, or part:name, matches"
    )
    diff.add_argument(
        "--deep", action="store_true", help="also read tensors whose digests are equal"
    )
    source_args.add_source_arguments(diff, argument="A")

    convert = _add_convert(verbs)

    listing = verbs.add_parser(
        "list",
        help="the checkpoints of a run, or of several",
        description="Shows what lies under a root.",
    )
    listing.add_argument("root", metavar="ROOT", help="the folder of a run, or of runs")
    listing.add_argument(
        "--local", metavar="DIR", help="the local directory of this run: the second tier of one run"
    )
    listing.add_argument(
        "--keep-latest-local",
        type=retention_args.positive_int,
        default=1,
        metavar="N",
        help="what stays there (1)",
    )
    prune = verbs.add_parser(
        "prune",
        help="remove checkpoints by rules",
        description="Removes what no rule keeps. Asks nothing.",
    )
    prune.add_argument("root", metavar="ROOT", help="the folder of one run")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.add_argument(
        "--incomplete",
        action="store_true",
        help="also folders named as steps that are no whole checkpoint",
    )
    prune.add_argument(
        "--leftovers", action="store_true", help="also what interrupted saves have left"
    )
    prune.add_argument(
        "--older-than-hours",
        type=retention_args.age_hours,
        default=24.0,
        metavar="H",
        help="of these two, only what is older (24)",
    )

    demo = verbs.add_parser(
        "demo",
        help="train, be killed, resume on fewer processes",
        description="Trains a small model, about a minute.",
    )
    demo.add_argument(
        "--dir", metavar="DIR", help="work in this empty folder, and leave it as it is then"
    )
    demo.add_argument(
        "--keep", action="store_true", help="keep the folder in which the demo worked"
    )

    for verb in (listing, prune):
        retention_args.add_retention_arguments(verb)
    for verb in (inspect, verify, diff, convert, listing, prune, demo):
        verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _add_convert(verbs: Any) -> argparse.ArgumentParser:
    convert: argparse.ArgumentParser = verbs.add_parser(
        "convert",
        help="write a checkpoint of any format anew",
        description="Writes SRC to DST, and proves it.",
    )
    convert.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="a checkpoint in any format that `inspect` takes; or the folders of one save, of each machine",
    )
    convert.add_argument(
        "target",
        metavar="DST",
        help="the folder to write; under torchrun all processes write to it",
    )
    convert.add_argument(
        "--to",
        default="unified",
        metavar="FORMAT",
        help="unified (the default), huggingface (the model), maxtext, torch, dcp, paddle",
    )
    convert.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="PART",
        help="only this part; may be given more than once",
    )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of the model's tensors as written",
    )
    convert.add_argument(
        "--max-file-size",
        type=retention_args.byte_size,
        default=5_000_000_000,
        metavar="N",
        help="of one file, as 5GB (the default)",
    )
    convert.add_argument(
        "--if-exists",
        choices=("error", "keep", "replace"),
        default="error",
        help="a checkpoint that DST holds",
    )
    convert.add_argument(
        "--no-compare",
        action="store_true",
        help="write also where master weights, cast down, are not the model",
    )
    convert.add_argument(
        "--no-fsync", action="store_true", help="return before everything is on the disk"
    )
    source_args.add_source_arguments(convert, argument="SRC")
    return convert

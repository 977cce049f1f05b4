"""The command `unified-ckpt`: parses arguments, runs a verb, and turns errors into exit codes.

A verb's module is imported only when the verb is used. Exit 0: fine. 1: the check failed, or a
CheckpointError, which is printed to stderr. 2: usage.
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

_PATH_HELP = "checkpoint or Hugging Face model folder, local or an fsspec URL"
_MATCH_HELP = "only tensors whose name or part:name matches"
_PART_HELP = "only this part (repeatable)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. Usage errors raise argparse's SystemExit(2)."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.verb == "verify" and arguments.sources and not arguments.repair:
        parser.error("--from requires --repair")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ASCII terminals lack the tree's branches
    verb = import_module(f"unified_ckpt.cli.{arguments.verb}")
    try:
        code = int(verb.run(arguments))
        sys.stdout.flush()
    except CheckpointError as error:
        print(f"unified-ckpt {arguments.verb}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has exited. Discard the buffer, or the exit raises again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-ckpt", description="Inspect, verify, convert and prune checkpoints."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for add_verb in (
        _add_inspect,
        _add_verify,
        _add_diff,
        _add_convert,
        _add_list,
        _add_prune,
        _add_demo,
    ):
        verb: argparse.ArgumentParser = add_verb(verbs)
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_inspect(verbs: Any) -> argparse.ArgumentParser:
    inspect: argparse.ArgumentParser = verbs.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show what a checkpoint holds. Reads headers only.",
    )
    inspect.add_argument("path", metavar="PATH", help=_PATH_HELP)
    inspect.add_argument("--match", metavar="GLOB", help=_MATCH_HELP)
    inspect.add_argument(
        "--all", action="store_true", help="one line per tensor, with its file, instead of a tree"
    )
    source_args.add_source_arguments(inspect, argument="PATH")
    return inspect


def _add_verify(verbs: Any) -> argparse.ArgumentParser:
    verify: argparse.ArgumentParser = verbs.add_parser(
        "verify",
        help="check or repair a checkpoint",
        description="Check sizes and headers against the manifest.",
    )
    verify.add_argument("path", metavar="PATH", help=_PATH_HELP)
    verify.add_argument("--deep", action="store_true", help="also read and digest every byte")
    verify.add_argument(
        "--repair", action="store_true", help="check every byte and repair what is damaged"
    )
    verify.add_argument(
        "--from",
        action="append",
        default=[],
        dest="sources",
        metavar="OTHER",
        help="repair from this folder of the same save (repeatable)",
    )
    return verify


def _add_diff(verbs: Any) -> argparse.ArgumentParser:
    diff: argparse.ArgumentParser = verbs.add_parser(
        "diff",
        help="show what differs between two checkpoints",
        description="Compare two checkpoints of any formats, tensor by tensor.",
    )
    diff.add_argument("first", metavar="A", help="checkpoint of any format")
    diff.add_argument("second", metavar="B", help="another one")
    diff.add_argument("--part", action="append", default=[], metavar="PART", help=_PART_HELP)
    diff.add_argument("--match", metavar="GLOB", help=_MATCH_HELP)
    diff.add_argument("--deep", action="store_true", help="also read tensors with equal digests")
    source_args.add_source_arguments(diff, argument="A")
    return diff


def _add_convert(verbs: Any) -> argparse.ArgumentParser:
    convert: argparse.ArgumentParser = verbs.add_parser(
        "convert",
        help="write a checkpoint of any format in another format",
        description="Write SRC to DST in another format, and verify the result.",
    )
    convert.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="checkpoint of any format, or the folders of one save on several nodes",
    )
    convert.add_argument(
        "target", metavar="DST", help="folder to write; under torchrun, all processes write to it"
    )
    convert.add_argument(
        "--to",
        default="unified",
        metavar="FORMAT",
        help="unified (default), huggingface (model only), maxtext, torch, dcp, paddle",
    )
    convert.add_argument("--part", action="append", default=[], metavar="PART", help=_PART_HELP)
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="write the model's tensors in this dtype",
    )
    convert.add_argument(
        "--max-file-size",
        type=retention_args.byte_size,
        default=5_000_000_000,
        metavar="N",
        help="largest file, such as 5GB (default)",
    )
    convert.add_argument(
        "--if-exists",
        choices=("error", "keep", "replace"),
        default="error",
        help="what to do if DST holds a checkpoint (default: error)",
    )
    convert.add_argument(
        "--no-compare",
        action="store_true",
        help="allow master weights that, cast down, differ from the model",
    )
    convert.add_argument(
        "--no-fsync", action="store_true", help="return before all bytes are on disk"
    )
    source_args.add_source_arguments(convert, argument="SRC")
    return convert


def _add_list(verbs: Any) -> argparse.ArgumentParser:
    listing: argparse.ArgumentParser = verbs.add_parser(
        "list",
        help="list the checkpoints of one run or several",
        description="List the checkpoints under a root, and what interrupted saves left.",
    )
    listing.add_argument("root", metavar="ROOT", help="folder of one run, or of several")
    listing.add_argument("--local", metavar="DIR", help="local directory of a run with two tiers")
    listing.add_argument(
        "--keep-latest-local",
        type=retention_args.positive_int,
        default=1,
        metavar="N",
        help="checkpoints that stay in the local directory (default: 1)",
    )
    retention_args.add_retention_arguments(listing)
    return listing


def _add_prune(verbs: Any) -> argparse.ArgumentParser:
    prune: argparse.ArgumentParser = verbs.add_parser(
        "prune",
        help="remove checkpoints that no rule keeps",
        description="Remove checkpoints that no rule keeps, without asking for confirmation.",
    )
    prune.add_argument("root", metavar="ROOT", help="folder of one run")
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    prune.add_argument(
        "--incomplete",
        action="store_true",
        help="also remove incomplete folders that are named like a step",
    )
    prune.add_argument(
        "--stale", action="store_true", help="also remove what interrupted saves left"
    )
    prune.add_argument(
        "--older-than-hours",
        type=retention_args.age_hours,
        default=24.0,
        metavar="H",
        help="minimum age for --incomplete and --stale (default: 24)",
    )
    retention_args.add_retention_arguments(prune)
    return prune


def _add_demo(verbs: Any) -> argparse.ArgumentParser:
    demo: argparse.ArgumentParser = verbs.add_parser(
        "demo",
        help="train, be killed, resume on fewer processes",
        description="Train a small model, kill it during a save, resume it: about a minute.",
    )
    demo.add_argument("--dir", metavar="DIR", help="work in this empty folder and keep it")
    demo.add_argument("--keep", action="store_true", help="keep the temporary folder")
    return demo

"""The retention rules on a command line, for `list` and `prune`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from unified_ckpt.core.retention import Rules
from unified_ckpt.manager.rules import when
from unified_ckpt.options import ManagerOptions


def add_retention_arguments(parser: ArgumentParser) -> None:
    """The options that `retention_rules` reads."""
    parser.add_argument(
        "--prefix",
        default="checkpoint-",
        help="what the folders' names begin with, before the step",
    )
    group = parser.add_argument_group(
        "what to keep; the rules are united, and full and model-only checkpoints are counted apart"
    )
    group.add_argument("--keep-latest", type=positive_int, metavar="N", help="the N newest")
    group.add_argument(
        "--keep-every-steps", type=positive_int, metavar="K", help="steps that are multiples of K"
    )
    group.add_argument(
        "--keep-every-seconds", type=positive_seconds, metavar="T", help="one for each T seconds"
    )
    group.add_argument("--keep-best", type=positive_int, metavar="N", help="the N best by --metric")
    group.add_argument(
        "--metric",
        metavar="NAME",
        help="a metric that was passed to save; its best one always stays",
    )
    group.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether the best is the least or the greatest",
    )
    group.add_argument(
        "--keep-latest-model-only",
        type=positive_int,
        metavar="N",
        help="the N newest without optimizer",
    )
    text = "steps without optimizer that are multiples of K"
    group.add_argument("--keep-every-steps-model-only", type=positive_int, metavar="K", help=text)


def retention_rules(arguments: Namespace) -> Rules:
    """The rules that the arguments name."""
    return when.retention_rules(
        ManagerOptions(
            keep_latest=arguments.keep_latest,
            keep_every_steps=arguments.keep_every_steps,
            keep_every_seconds=arguments.keep_every_seconds,
            keep_best=arguments.keep_best,
            best_metric=arguments.metric,
            best_mode=arguments.mode,
            keep_latest_model_only=arguments.keep_latest_model_only,
            keep_every_steps_model_only=arguments.keep_every_steps_model_only,
        )
    )


def usage_error(arguments: Namespace) -> str | None:
    """What is wrong with the root, or the rules together."""
    if not arguments.root:
        return "ROOT is empty; needed a folder, as . for this one"
    return (
        "--keep-best needs --metric"
        if arguments.keep_best is not None and arguments.metric is None
        else None
    )


def positive_int(text: str) -> int:
    """An argument's type: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def byte_size(text: str) -> int:
    """An argument's type: bytes, as 5000000000, 5GB or 5GiB."""
    units = {
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    digits = text.rstrip("".join({letter for unit in units for letter in unit}))
    factor = units.get(text.removeprefix(digits), 0 if text != digits else 1)
    if not digits.isdecimal() or int(digits) * factor < 1:
        raise ArgumentTypeError(f"{text!r} is no size, as 5GB or 512MiB")
    return int(digits) * factor


def age_hours(text: str) -> float:
    """An argument's type: 0 is allowed, and means whatever its age."""
    return 0.0 if text == "0" else positive_seconds(text)


def positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no time above 0")
    return value

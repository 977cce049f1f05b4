"""Command-line arguments of the retention rules, for `list` and `prune`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from unified_ckpt.core.retention import Rules
from unified_ckpt.manager.rules import when
from unified_ckpt.options import ManagerOptions


def add_retention_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that `retention_rules` reads."""
    parser.add_argument(
        "--prefix",
        default="checkpoint-",
        help="how folder names start, before the step (default: checkpoint-)",
    )
    group = parser.add_argument_group(
        "what to keep",
        "A checkpoint stays if any rule keeps it. Full and model-only ones are counted separately.",
    )
    group.add_argument("--keep-latest", type=positive_int, metavar="N", help="the latest N")
    group.add_argument(
        "--keep-every-steps", type=positive_int, metavar="K", help="steps that are multiples of K"
    )
    group.add_argument(
        "--keep-every-seconds", type=positive_number, metavar="T", help="one per T seconds"
    )
    group.add_argument("--keep-best", type=positive_int, metavar="N", help="the N best by --metric")
    group.add_argument(
        "--metric",
        metavar="NAME",
        help="a metric passed to save; its best checkpoint always stays",
    )
    group.add_argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="whether lower or higher is better (default: min)",
    )
    group.add_argument(
        "--keep-latest-model-only",
        type=positive_int,
        metavar="N",
        help="the latest N without optimizer",
    )
    group.add_argument(
        "--keep-every-steps-model-only",
        type=positive_int,
        metavar="K",
        help="steps without optimizer that are multiples of K",
    )


def retention_rules(arguments: Namespace) -> Rules:
    """Return the rules that the arguments give."""
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
    """Return what is wrong with the root or the combination of rules, or None."""
    if not arguments.root:
        return "ROOT is empty, expected a folder; pass . for the current one"
    if arguments.keep_best is not None and arguments.metric is None:
        return "--keep-best requires --metric"
    return None


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

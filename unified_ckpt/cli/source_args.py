"""Command-line arguments that say how to read a checkpoint, for each verb that takes any format."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from unified_ckpt.options import SourceOptions


def add_source_arguments(parser: ArgumentParser, *, argument: str) -> None:
    """Add the arguments that `source_options` reads. `argument` is the one that they apply to."""
    group = parser.add_argument_group(f"how to read {argument}")
    group.add_argument(
        "--from", dest="format", metavar="FORMAT", help="its format, instead of detecting it"
    )
    group.add_argument(
        "--config", metavar="PATH", help="the model's Hugging Face config.json, or its folder"
    )
    group.add_argument(
        "--names",
        choices=("auto", "huggingface", "own"),
        default="auto",
        help="which tensor names to use (default: auto)",
    )
    group.add_argument(
        "--rename", metavar="FILE", help="rename tensors by the rules of a TOML or JSON file"
    )
    group.add_argument(
        "--layers",
        choices=("stacked", "unstacked"),
        help="stack identical layers into one tensor, or unstack them",
    )
    group.add_argument(
        "--layer-dim", type=int, default=0, metavar="D", help="dim of the layers (default: 0)"
    )
    group.add_argument(
        "--layer-list",
        action="append",
        metavar="NAME",
        help="which list of layers, such as model.layers (repeatable)",
    )
    group.add_argument(
        "--conversion-fn",
        metavar="MODULE:FUNCTION",
        help="your function that returns the converted tensors",
    )


def source_options(arguments: Namespace) -> SourceOptions:
    """Return the options that the arguments give."""
    return SourceOptions(
        format=arguments.format,
        config=arguments.config,
        names=arguments.names,
        rename=arguments.rename,
        layers=arguments.layers,
        layer_dim=arguments.layer_dim,
        layer_lists=tuple(arguments.layer_list) if arguments.layer_list else None,
        conversion_fn=arguments.conversion_fn,
    )

"""How a checkpoint is to be read, on a command line: the options of every verb that takes one of
any format.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from unified_ckpt.options import SourceOptions


def add_source_arguments(parser: ArgumentParser, *, argument: str) -> None:
    """The options that `source_options` reads. `argument`: the argument that they are for."""
    group = parser.add_argument_group(f"how to read {argument}")
    group.add_argument(
        "--from",
        dest="format",
        metavar="FORMAT",
        help="its format, where it is not to be found out",
    )
    group.add_argument(
        "--config",
        metavar="PATH",
        help="a Hugging Face config.json, or a folder that has one, of the model",
    )
    group.add_argument(
        "--names",
        choices=("auto", "huggingface", "own"),
        default="auto",
        help="whose names its tensors have (auto)",
    )
    group.add_argument(
        "--rename", metavar="FILE", help="rename its tensors by the rules of a TOML or JSON file"
    )
    group.add_argument(
        "--layers",
        choices=("stacked", "unstacked"),
        help="its identical layers in one tensor each, or one by one",
    )
    group.add_argument(
        "--layer-dim",
        type=int,
        default=0,
        metavar="D",
        help="the dim that stands for the layer (0)",
    )
    group.add_argument(
        "--layer-list",
        action="append",
        metavar="NAME",
        help="of which list, as model.layers; may be given more than once",
    )
    group.add_argument(
        "--conversion-fn",
        metavar="MODULE:FUNCTION",
        help="a function of yours that gives its tensors anew",
    )


def source_options(arguments: Namespace) -> SourceOptions:
    """What the arguments ask for."""
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

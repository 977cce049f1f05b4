"""Applies `SourceOptions` to a source: rename rules, stacking, then the user's function."""

from __future__ import annotations

from unified_ckpt.engine.source.protocol import IndexedOptimizerSource, Order, Source
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.renames import Renames, parse_renames
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.rename_rules import apply_renames
from unified_ckpt.views.stack_layers import stack_layers, unstack_layers
from unified_ckpt.views.user_function import apply_function


def apply_options(source: Source, options: SourceOptions) -> Source:
    """Return the source under the options.

    NotFoundError or FormatError if a file or function is missing, or does not fit the source.
    """
    indexed = source.indexed
    if indexed is None:
        return _apply(source, options)

    def named(order: Order | None) -> Source:
        renamed_source = _apply(indexed.with_stored_order, options)
        if order is not None and options.optimizer_order is None:
            source_order = [
                list(source_group["names"]) for source_group in renamed_source.metadata().groups
            ]
            target_order = [[name for name, _ in group] for group in order]
            if source_order != target_order:
                raise FormatError(
                    "optimizer state is indexed by position, and the target optimizer's order "
                    "differs from the "
                    "checkpoint's; set SourceOptions(optimizer_order=[[names of group 0, as in the "
                    "file], ...])"
                )
        return renamed_source

    return IndexedOptimizerSource(_apply(indexed.without_optimizer, options), named)


def _apply(source: Source, options: SourceOptions) -> Source:
    if isinstance(options.rename, str):
        source = apply_renames(source, read_renames(options.rename), rules_path=options.rename)
    elif options.rename is not None:
        source = apply_renames(
            source, Renames(rules=options.rename), rules_path="SourceOptions(rename=...)"
        )
    if options.layers is not None:
        change_layers = stack_layers if options.layers == "stacked" else unstack_layers
        source = change_layers(source, dim=options.layer_dim)
    return (
        source if options.conversion_fn is None else apply_function(source, options.conversion_fn)
    )


def read_renames(path: str) -> Renames:
    """Read rename rules from a TOML or JSON file."""
    try:
        with open(path, "rb") as file:
            return parse_renames(file.read(), file=path)
    except OSError as error:
        raise NotFoundError(
            f"{path}: cannot be read: {error.strerror}; expected a TOML or JSON file of rename "
            "rules"
        ) from error

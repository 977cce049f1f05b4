"""The model of a source that stores master weights in its place; and a training state without its model. Reads no bytes."""

from __future__ import annotations

from collections.abc import Collection

from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.rewrite.weights_check import masters_of
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    ROUNDED_DTYPES,
    WITHOUT_MASTERS,
)
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.views.derived import Recut, Renamed


def with_model(source: Source) -> Source:
    """The source; one that stores master weights in place of the model has the model too, in the dtypes that are stored."""
    if MODEL in source.parts or MASTER not in source.parts:
        return source
    made = _as_stored(source, [part for part in source.parts if part != WITHOUT_MASTERS])
    of_model = (MASTER, WITHOUT_MASTERS)  # the latter's values count
    made[MODEL] = {name: Renamed((part, name)) for part in of_model for name in source.names(part)}
    aliases = {part: source.aliases(part) for part in made}
    aliases[MODEL] = {
        alias: name for part in of_model for alias, name in source.aliases(part).items()
    }
    return Recut(source, made, aliases=aliases)


def without_model(source: Source, parts: Collection[str]) -> tuple[Source, Collection[str]]:
    """The source and its parts to write, where a training state is written without its model: with the model's tensors that no master
    stands for. FormatError where none would. Whether the others are their masters, rounded, is for the caller to compare.
    """
    if (
        MODEL in parts
        or {MASTER, OPTIMIZER}.isdisjoint(parts)
        or {MODEL, MASTER}.isdisjoint(source.parts)
    ):
        return source, parts
    if MASTER not in parts or MASTER not in source.parts:
        raise FormatError(
            f"parts={tuple(parts)!r}: leaves out the model, and no master weights are written from which it could be loaded; "
            "add 'model' to `parts`"
        )
    if MODEL in source.parts:
        source = _beside_masters(source)
    return source, {*parts, *({WITHOUT_MASTERS} & set(source.parts))}


def _beside_masters(source: Source) -> Source:
    names = source.names(MODEL)
    masters, specs = masters_of(source, names), source.specs(MODEL, names)
    precise = source.specs(MASTER, set(masters.values()))
    rounded = {name for name, master in masters.items() if _may_round(precise[master], specs[name])}
    made = _as_stored(source, [part for part in source.parts if part != MODEL])
    aliases = {part: source.aliases(part) for part in made}
    if rounded != set(names):
        made[WITHOUT_MASTERS] = {
            name: Renamed((MODEL, name)) for name in names if name not in rounded
        }
        aliases[WITHOUT_MASTERS] = {
            alias: name for alias, name in source.aliases(MODEL).items() if name not in rounded
        }
    return Recut(source, made, aliases=aliases)


def _may_round(master: TensorSpec, model: TensorSpec) -> bool:
    return master.shape == model.shape and {
        TORCH_DTYPES[master.dtype],
        TORCH_DTYPES[model.dtype],
    }.issubset(ROUNDED_DTYPES)


def _as_stored(source: Source, parts: Collection[str]) -> dict[str, dict[str, Renamed]]:
    return {part: {name: Renamed((part, name)) for name in source.names(part)} for part in parts}

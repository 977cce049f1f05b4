"""Views that make a model of master weights or of another part, or leave it out. Read no bytes."""

from __future__ import annotations

from collections.abc import Collection

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.rewrite.weights_check import master_names
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.derived import DerivedSource, Renamed, unchanged_parts


def with_model(source: Source) -> Source:
    """Return the source with a model, taken from the master weights if it has none.

    The model's tensors then have the dtypes of the masters.
    """
    if MODEL in source.parts or MASTER not in source.parts:
        return source
    exprs = unchanged_parts(source, [part for part in source.parts if part != WITHOUT_MASTERS])
    model_parts = (MASTER, WITHOUT_MASTERS)  # where both have a name, the latter's value holds
    exprs[MODEL] = {
        name: Renamed((part, name)) for part in model_parts for name in source.names(part)
    }
    aliases = {part: source.aliases(part) for part in exprs}
    aliases[MODEL] = {
        alias: name for part in model_parts for alias, name in source.aliases(part).items()
    }
    return DerivedSource(source, exprs, aliases=aliases)


def part_as_model(source: Source, part: str) -> Source:
    """Return a model with the values of another part, such as averaged weights.

    What the part lacks, such as buffers, has the model's values. FormatError if it has tensors that
    the model lacks.
    """
    if part not in source.parts or MODEL not in source.parts:
        raise NotFoundError(
            f"the source has parts {', '.join(source.parts)}, expected {part} and the model"
        )
    names, aliases = source.names(MODEL), source.aliases(MODEL)
    averaged = {*source.names(part)}
    raise_if_any(
        FormatError,
        f"{part}: expected the model's names; rename these",
        sorted(averaged - {*names, *aliases}),
    )
    tied = {aliases.get(name, name): name for name in averaged}  # the model's name -> the part's
    exprs = {name: Renamed((part, tied[name]) if name in tied else (MODEL, name)) for name in names}
    return DerivedSource(source, {MODEL: exprs}, aliases={MODEL: aliases})


def without_model(source: Source, parts: Collection[str]) -> tuple[Source, Collection[str]]:
    """Return the source and the parts to write for a training state without its model.

    Model tensors that no master can restore are added as a part. FormatError if no master weights
    would be written. The caller checks that the other tensors equal their masters, rounded.
    """
    if (
        MODEL in parts
        or {MASTER, OPTIMIZER}.isdisjoint(parts)
        or {MODEL, MASTER}.isdisjoint(source.parts)
    ):
        return source, parts
    if MASTER not in parts or MASTER not in source.parts:
        raise FormatError(
            f"parts={tuple(parts)!r}: leaves out the model, and no master weights are written that "
            "could restore it; pass 'model' in parts=... too"
        )
    if MODEL in source.parts:
        source = _without_rounded_model(source)
    return source, {*parts, *({WITHOUT_MASTERS} & set(source.parts))}


def _without_rounded_model(source: Source) -> Source:
    names = source.names(MODEL)
    masters, specs = master_names(source, names), source.specs(MODEL, names)
    precise = source.specs(MASTER, set(masters.values()))
    rounded = {
        name
        for name, master in masters.items()
        if precise[master].shape == specs[name].shape
        and {torch_dtype(precise[master].dtype), torch_dtype(specs[name].dtype)}
        <= set(CASTABLE_DTYPES)
    }
    exprs = unchanged_parts(source, [part for part in source.parts if part != MODEL])
    aliases = {part: source.aliases(part) for part in exprs}
    if rounded != set(names):
        exprs[WITHOUT_MASTERS] = {
            name: Renamed((MODEL, name)) for name in names if name not in rounded
        }
        aliases[WITHOUT_MASTERS] = {
            alias: name for alias, name in source.aliases(MODEL).items() if name not in rounded
        }
    return DerivedSource(source, exprs, aliases=aliases)

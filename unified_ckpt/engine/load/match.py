"""Which stored tensor feeds which target: names, aliases, dtypes and the choice between model and master weights. Reads no bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod

from unified_ckpt.core.sharding.declarations import Key, Row
from unified_ckpt.core.sharding.dtypes import ITEM_BITS
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Said, Source
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    WEIGHTS,
    WITHOUT_MASTERS,
)
from unified_ckpt.runtime.torch_state.tensors import Part

Pads = Mapping[Key, Sequence[int]]  # see `Said`
_STAND_INS = {
    MODEL: (WITHOUT_MASTERS, MASTER),
    MASTER: (MODEL, WITHOUT_MASTERS),
}  # what may feed a part beside itself


@dataclass(frozen=True, slots=True)
class Match:
    """A target and the stored tensor that feeds it. The part's row has the stored dtype, and a part name that tells the source."""

    target: Part
    part: str
    name: str


@dataclass(slots=True)
class Differences:
    """What this rank cannot fill, as "part:fqn" or as sentences; and the stored names that it uses, by part asked for.

    `padded`: targets that are larger than what is stored, with both shapes. `masters`: stored masters that are more precise than the
    model's tensors here; `masters_read`: those that are read at full precision. `tied`: by target, further
    stored names for it, in the part that feeds it.
    """

    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    padded: dict[Key, str] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)
    masters_read: set[str] = field(default_factory=set)
    tied: dict[Key, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def match_all(
    targets: Sequence[Part],
    source: Source,
    *,
    aliases: Mapping[str, Mapping[str, str]],
    cast: bool,
    pads: Pads,
    rank: int,
) -> tuple[list[Match], Differences]:
    """Finds each target's stored tensor. `aliases`: the target's own, by part."""
    found: list[Match] = []
    out = Differences()
    names = TensorNames(source, aliases)
    wanted = [_candidates(target.row, source, names) for target in targets]
    needed: dict[str, set[str]] = {}
    for part, name in chain.from_iterable(wanted):
        needed.setdefault(part, set()).add(name)
    specs = {
        (part, name): spec
        for part in needed
        for name, spec in source.specs(part, needed[part]).items()
    }
    for target, options in zip(targets, wanted, strict=True):
        row = target.row
        for part, name in options:
            out.used.setdefault(part, set()).add(name)
        if not options:
            out.missing.append(f"{row.part}:{row.fqn}")
            continue
        part, name = _choose(row, options, specs)
        spec = specs[part, name]
        if row.part == MODEL:
            masters = (
                (name, ITEM_BITS[specs[of, name].dtype]) for of, name in options if of == MASTER
            )
            out.masters.update(name for name, bits in masters if bits > ITEM_BITS[row.spec.dtype])
        if part == MASTER and ITEM_BITS[row.spec.dtype] >= ITEM_BITS[spec.dtype]:
            out.masters_read.add(name)
        if spec.shape != row.spec.shape and not _fits(
            spec.shape, row.spec.shape, pads.get((part, name), ())
        ):
            out.wrong.append(
                f"{row.part}:{row.fqn}: checkpoint has shape {spec.shape}, target has {row.spec.shape}{_remedy(row, spec)}"
            )
        elif spec.dtype != row.spec.dtype and not cast and not _stands_in(row.part, part):
            out.wrong.append(
                f"{row.part}:{row.fqn}: checkpoint has dtype {spec.dtype}, target has {row.spec.dtype}; LoadOptions(cast=True) casts"
            )
        else:
            out.sources.setdefault(row.part, set()).add(part)
            label = row.part if part == row.part else f"{row.part}@{part}"
            others = [other for of, other in options if of == part and other != name]
            if others:
                out.tied[row.key] = others
            same = spec == row.spec and label == row.part
            found.append(
                Match(
                    target
                    if same
                    else _corner(target, Row(label, row.fqn, spec, row.sharding), rank),
                    part,
                    name,
                )
            )
            if spec.shape != row.spec.shape:
                out.padded[row.key] = f"{row.part}:{row.fqn} {spec.shape} -> {row.spec.shape}"
    if out.padded:
        out.wrong += _left_behind(targets, out.padded)
    return found, out


def _remedy(row: Row, stored: TensorSpec) -> str:
    """The rule that makes a larger target right."""
    more = [
        dim for dim, (n, m) in enumerate(zip(stored.shape, row.spec.shape, strict=False)) if n < m
    ]
    if not _fits(stored.shape, row.spec.shape, more):
        return ""
    name, dims = (
        row.fqn.rpartition("/")[0] if row.part == OPTIMIZER else row.fqn,
        more[0] if len(more) == 1 else more,
    )
    return f"; SourceOptions(rename=[{{'match': {name!r}, 'pad': {dims}}}]) keeps what the target has beyond that"


def _left_behind(targets: Sequence[Part], padded: Mapping[Key, str]) -> Iterator[str]:
    """Optimizer state of another shape than its parameter, which grows: which of its elements are new is not known."""
    grown = {
        fqn if part in WEIGHTS else f"{part}.{fqn}" for part, fqn in padded if part != OPTIMIZER
    }
    for row in (target.row for target in targets):
        fqn = row.fqn.rpartition("/")[0]
        if (
            row.part == OPTIMIZER
            and fqn in grown
            and row.key not in padded
            and prod(row.spec.shape) != 1
        ):
            yield (
                f"{row.part}:{row.fqn}: has shape {row.spec.shape}, and its parameter grows: how the state follows is not known; "
                f"drop all of its state by a rule before: {{'match': '{fqn}/*', 'parts': 'optimizer', 'drop': True}}"
            )


def _fits(stored: tuple[int, ...], shape: tuple[int, ...], dims: Collection[int]) -> bool:
    """Whether a target has the stored shape, or more along some of the dims."""
    if len(stored) != len(shape):
        return False
    allowed = {dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)}
    return all(
        n == m or (n < m and dim in allowed)
        for dim, (n, m) in enumerate(zip(stored, shape, strict=True))
    )


def _corner(target: Part, stored: Row, rank: int) -> Part:
    """What the rank holds of the stored tensor, which lies at the origin of the target."""
    if stored.spec.shape == target.row.spec.shape:
        return Part(stored, target.local)
    sharding = target.row.sharding.corner(target.row.spec.shape, stored.spec.shape)
    local = target.local[tuple(slice(n) for n in sharding.local_shape(rank, stored.spec.shape))]
    return Part(replace(stored, sharding=sharding), local)


def _candidates(row: Row, source: Source, names: TensorNames) -> list[tuple[str, str]]:
    """Stored tensors that could feed the row, its own part first, its own name first."""
    fqn, slash, state = row.fqn.rpartition("/") if row.part == OPTIMIZER else (row.fqn, "", "")
    found: dict[tuple[str, str], None] = {}
    for part in (row.part, *_STAND_INS.get(row.part, ())):
        stored = source.names(part)
        found.update(
            dict.fromkeys(
                (part, name + slash + state)
                for name in names(fqn, row.part, part)
                if name + slash + state in stored
            )
        )
    if row.part == MASTER:
        led = (
            (part, fqn.removeprefix(f"{part}."))
            for part in source.parts
            if fqn.startswith(f"{part}.")
        )
        found.update(
            dict.fromkeys((part, name) for part, name in led if name in source.names(part))
        )
    return list(found)


class TensorNames:
    """What a target's tensor may be called in a part of the checkpoint: its own name, and those that it is tied to on either side."""

    def __init__(self, source: Source, aliases: Mapping[str, Mapping[str, str]]) -> None:
        self._source, self._aliases = source, aliases
        self._tied: dict[
            tuple[str, str], tuple[dict[str, str], dict[str, list[str]]]
        ] = {}  # by part of the target, and stored part

    def __call__(self, fqn: str, asked: str, part: str) -> list[str]:
        if (asked, part) not in self._tied:
            self._tied[asked, part] = self._ties(asked, part)
        theirs, ours = self._tied[asked, part]
        if not theirs and not ours:
            return [fqn]
        own = ours.get(fqn, ())
        return [
            name
            for name in (fqn, theirs.get(fqn), *own, *(theirs.get(alias) for alias in own))
            if name is not None
        ]

    def _ties(self, asked: str, part: str) -> tuple[dict[str, str], dict[str, list[str]]]:
        """Alias -> name of the checkpoint; name -> aliases of the target."""
        theirs = {
            alias: name
            for of in (*WEIGHTS, part)
            for alias, name in self._source.aliases(of).items()
        }
        ours: dict[str, list[str]] = {}
        for alias, name in {**self._aliases.get(MODEL, {}), **self._aliases.get(asked, {})}.items():
            ours.setdefault(name, []).append(alias)
        return theirs, ours


def saved_state(
    fqns: Collection[str],
    source: Source,
    aliases: Mapping[str, Mapping[str, str]],
    *,
    pads: Pads,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """The stored optimizer state of parameters: "fqn/state" in the target's names -> (dtype, global shape); and which of it grows to
    its parameter's shape, with that shape. `shapes`: of the target's parameters."""
    states: dict[str, list[str]] = {}
    for key in source.names(OPTIMIZER):
        states.setdefault(key.rpartition("/")[0], []).append(key)
    stored: dict[str, str] = {}
    names = TensorNames(source, aliases)
    for fqn in fqns:
        name = next((n for n in names(fqn, OPTIMIZER, OPTIMIZER) if n in states), None)
        stored.update(
            {f"{fqn}/{key.rpartition('/')[2]}": key for key in states.get(name or "", ())}
        )
    specs = source.specs(OPTIMIZER, set(stored.values()))
    found, grown = {}, set()
    for wanted, key in stored.items():
        spec, shape = specs[key], shapes.get(wanted.rpartition("/")[0], ())
        if spec.shape != shape and _fits(spec.shape, shape, pads.get((OPTIMIZER, key), ())):
            spec = replace(spec, shape=shape)
            grown.add(wanted)
        found[wanted] = spec.dtype, spec.shape
    return found, grown


def saved_shapes(
    fqns: Collection[str], source: Source, aliases: Mapping[str, Mapping[str, str]]
) -> dict[str, tuple[int, ...]]:
    """The stored shapes of some parameters of the model, in the target's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    names_of = TensorNames(source, aliases)
    for part in WEIGHTS:
        of = {
            fqn: [name for name in names_of(fqn, MODEL, part) if name in source.names(part)]
            for fqn in fqns
        }
        specs = source.specs(part, {names[0] for names in of.values() if names})
        shapes = {fqn: specs[names[0]].shape for fqn, names in of.items() if names} | shapes
    return shapes


def unknown_parameters(
    fqns: Collection[str], source: Source, said: Said, aliases: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Parameters of the target's optimizer that the checkpoint's did not have: all of them where it had none."""
    if (
        OPTIMIZER not in source.parts and not said.groups
    ):  # with groups it is one without state, such as plain SGD
        return [f"{OPTIMIZER}:{fqn}" for fqn in sorted(fqns)]
    known = {fqn for group in said.groups for fqn in group["names"]}
    if not known:
        return []
    names = TensorNames(source, aliases)
    return [
        f"{OPTIMIZER}:{fqn}"
        for fqn in sorted(fqns)
        if known.isdisjoint(names(fqn, OPTIMIZER, OPTIMIZER))
    ]


def _choose(
    row: Row, options: Sequence[tuple[str, str]], specs: Mapping[tuple[str, str], TensorSpec]
) -> tuple[str, str]:
    """The one whose dtype is the target's; its own part where none is, or both are."""
    return next((option for option in options if specs[option].dtype == row.spec.dtype), options[0])


def _stands_in(asked: str, part: str) -> bool:
    """Whether the part is read in place of the one asked for, which then is not in the checkpoint: the cast is what that means."""
    return asked != part

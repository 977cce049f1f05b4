"""Which stored tensor feeds which target: names, aliases, dtypes and the choice between model and master weights. Reads no bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.sharding import TensorSpec
from unified_ckpt.core.tables import Row
from unified_ckpt.engine.source import Said, Source
from unified_ckpt.runtime.state import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.runtime.tensors import Part

_STAND_INS = {MODEL: (WITHOUT_MASTERS, MASTER), MASTER: (MODEL, WITHOUT_MASTERS)}  # what may feed a part beside itself
WEIGHTS = (MODEL, MASTER, WITHOUT_MASTERS)


@dataclass(frozen=True, slots=True)
class Match:
    """A target and the stored tensor that feeds it. The part's row has the stored dtype, and a part name that tells the source."""

    target: Part
    part: str
    name: str


@dataclass(slots=True)
class Differences:
    """What this rank cannot fill, as "part:fqn" or as sentences; and the stored names that it uses, by part asked for."""

    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)


def match_all(
    targets: Sequence[Part], source: Source, *, aliases: Mapping[str, Mapping[str, str]], cast: bool
) -> tuple[list[Match], Differences]:
    """Finds each target's stored tensor. `aliases`: the target's own, by part."""
    found: list[Match] = []
    out = Differences()
    wanted = {target: _candidates(target.row, source, aliases) for target in targets}
    specs: dict[tuple[str, str], TensorSpec] = {}
    for part in {part for options in wanted.values() for part, _ in options}:
        needed = {name for options in wanted.values() for where, name in options if where == part}
        specs.update({(part, name): spec for name, spec in source.specs(part, needed).items()})
    for target, options in wanted.items():
        row = target.row
        for part, name in options:
            out.used.setdefault(part, set()).add(name)
        if not options:
            out.missing.append(f"{row.part}:{row.fqn}")
            continue
        part, name = _choose(row, options, specs)
        spec = specs[part, name]
        if spec.shape != row.spec.shape:
            out.wrong.append(f"{row.part}:{row.fqn}: checkpoint has shape {spec.shape}, target has {row.spec.shape}")
        elif spec.dtype != row.spec.dtype and not cast and not _stands_in(row.part, part):
            out.wrong.append(
                f"{row.part}:{row.fqn}: checkpoint has dtype {spec.dtype}, target has {row.spec.dtype}; LoadOptions(cast=True) casts"
            )
        else:
            out.sources.setdefault(row.part, set()).add(part)
            label = row.part if part == row.part else f"{row.part}@{part}"
            found.append(Match(Part(Row(label, row.fqn, spec, row.sharding), target.local), part, name))
    return found, out


def _candidates(row: Row, source: Source, aliases: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Stored tensors that could feed the row, its own part first, its own name first."""
    fqn, state = (row.fqn.rpartition("/")[0], "/" + row.fqn.rpartition("/")[2]) if row.part == OPTIMIZER else (row.fqn, "")
    parts = (row.part, *_STAND_INS.get(row.part, ()))
    named = ((part, name + state) for part in parts for name in names_of(fqn, row.part, part, source, aliases))
    return list(dict.fromkeys((part, name) for part, name in named if name in source.names(part)))


def names_of(fqn: str, asked: str, part: str, source: Source, aliases: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What a target's tensor may be called in a part of the checkpoint: its own name, and those that it is tied to on either side."""
    theirs = {alias: name for of in (*WEIGHTS, part) for alias, name in source.aliases(of).items()}
    ours = [alias for alias, name in {**aliases.get(MODEL, {}), **aliases.get(asked, {})}.items() if name == fqn]
    return [name for name in (fqn, theirs.get(fqn), *ours, *(theirs.get(alias) for alias in ours)) if name is not None]


def saved_state(fqns: Collection[str], source: Source, aliases: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The stored optimizer state of parameters: "fqn/state" in the target's names -> (dtype, global shape)."""
    states: dict[str, list[str]] = {}
    for key in source.names(OPTIMIZER):
        states.setdefault(key.rpartition("/")[0], []).append(key)
    stored: dict[str, str] = {}
    for fqn in fqns:
        name = next((n for n in names_of(fqn, OPTIMIZER, OPTIMIZER, source, aliases) if n in states), None)
        stored.update({f"{fqn}/{key.rpartition('/')[2]}": key for key in states.get(name or "", ())})
    specs = source.specs(OPTIMIZER, set(stored.values()))
    return {wanted: (specs[key].dtype, specs[key].shape) for wanted, key in stored.items()}


def unknown_parameters(fqns: Collection[str], source: Source, said: Said, aliases: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Parameters of the target's optimizer that the checkpoint's did not have: all of them where it had none."""
    if OPTIMIZER not in source.parts and not said.groups:  # with groups it is one without state, such as plain SGD
        return [f"{OPTIMIZER}:{fqn}" for fqn in sorted(fqns)]
    known = {fqn for group in said.groups for fqn in group["names"]}
    if not known:
        return []
    return [f"{OPTIMIZER}:{fqn}" for fqn in sorted(fqns) if known.isdisjoint(names_of(fqn, OPTIMIZER, OPTIMIZER, source, aliases))]


def _choose(row: Row, options: Sequence[tuple[str, str]], specs: Mapping[tuple[str, str], TensorSpec]) -> tuple[str, str]:
    """The one whose dtype is the target's; its own part where none is, or both are."""
    return next((option for option in options if specs[option] == row.spec), options[0])


def _stands_in(asked: str, part: str) -> bool:
    """Whether the part is read in place of the one asked for, which then is not in the checkpoint: the cast is what that means."""
    return asked != part

"""Match each target with the stored tensor to read: names, aliases, dtypes, master weights.

Reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import prod
from typing import NamedTuple

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.dtypes import ITEM_BITS, is_exact_cast
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WEIGHTS, WITHOUT_MASTERS
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

PaddableDims = Mapping[Key, Sequence[int]]  # see `SourceMetadata`
_SCALE_SUFFIXES = ("_scale", "_scale_inv")  # Hugging Face's names of scales beside a weight
# Stored parts to read in place of a part that the checkpoint lacks.
_SUBSTITUTES = {MODEL: (WITHOUT_MASTERS, MASTER), MASTER: (MODEL, WITHOUT_MASTERS)}


class Match(NamedTuple):
    """A target and the stored tensor to read into it.

    The declaration of `target` has the stored dtype. Its part is "part@stored_part" if they
    differ, so that ranks which read different parts do not read together. A tuple, as there is one
    for each tensor.
    """

    target_key: Key
    target: LocalTensor
    stored_key: Key


@dataclass(slots=True)
class MatchReport:
    """What this rank cannot load, as "part:fqn" or one sentence each, and the stored names it uses.

    `used`: stored tensors that targets match, as "part:name". `sources`: stored parts, by requested
    part.
    `differing`: target -> its declaration, the stored tensor of other dtype or shape, one sentence.
    `padded`: targets larger than the stored tensor, with both shapes.
    `masters`: stored master weights more precise than this rank's model; `masters_read`: those
    read at full precision. `tied`: for each target, other stored names in the part that is read.
    """

    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    sources: dict[str, set[str]] = field(default_factory=dict)
    differing: dict[Key, tuple[TensorDecl, Key, str]] = field(default_factory=dict)
    padded: dict[Key, str] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)
    masters_read: set[str] = field(default_factory=set)
    tied: dict[Key, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def match_targets(
    targets: Sequence[LocalTensor],
    source: Source,
    *,
    aliases: Mapping[str, Mapping[str, str]],
    cast: bool,
    metadata: SourceMetadata,
    rank: int,
) -> tuple[list[Match], MatchReport]:
    """Match each target with its stored tensor. `aliases`: those of the target, by part.

    Several targets have one name where they are boxes of one tensor.

    A wider target holds the stored values. But if the save left out the master weights, and
    training goes on, rounded weights in a wider model are not what was trained.
    """
    is_rounded = MASTER in metadata.omitted_parts and any(t.decl.part == OPTIMIZER for t in targets)
    matches: list[Match] = []
    match_report = MatchReport()
    names, stored_names = TensorNames(source, aliases), cache(source.names)
    candidates = [_candidates(target.decl, source.parts, stored_names, names) for target in targets]
    specs = _specs_of(source, chain.from_iterable(candidates))
    has_masters = MASTER in source.parts
    for target, keys in zip(targets, candidates, strict=True):
        decl = target.decl
        match_report.used.update(map(":".join, keys))
        if not keys:
            match_report.missing.append(f"{decl.part}:{decl.fqn}")
            continue
        stored_key = part, name = _select_key(decl, keys, specs)
        spec = specs[stored_key]
        if has_masters:
            _note_masters(match_report, decl, keys, stored_key, specs)
        region = target
        if part != decl.part or spec != decl.spec:
            # A part that is read in place of one that the checkpoint lacks is always cast.
            may_cast = cast or part != decl.part
            if not (is_rounded and part in WEIGHTS):
                may_cast |= _keeps_values(decl, spec, name, stored_names)
            pad_dims = metadata.paddable_dims.get(stored_key, ())
            if problem := _mismatch(decl, spec, pad_dims, cast=may_cast):
                sentence = f"{decl.part}:{decl.fqn}: {problem}"
                match_report.differing[decl.key] = decl, stored_key, sentence
                continue
            if spec.shape != decl.spec.shape:
                match_report.padded[decl.key] = (
                    f"{decl.part}:{decl.fqn} {spec.shape} -> {decl.spec.shape}"
                )
            declared_part = decl.part if part == decl.part else f"{decl.part}@{part}"
            region = _stored_region(target, declared_part, spec, rank)
        match_report.sources.setdefault(decl.part, set()).add(part)
        if len(keys) > 1 and (tied_names := [n for p, n in keys if p == part and n != name]):
            match_report.tied[decl.key] = tied_names
        matches.append(Match(decl.key, region, stored_key))
    match_report.missing = list(dict.fromkeys(match_report.missing))
    if match_report.padded:
        match_report.wrong += _unpadded_state(targets, match_report.padded)
    return matches, match_report


def _specs_of(source: Source, keys: Iterable[Key]) -> dict[Key, TensorSpec]:
    """Return dtype and shape of stored tensors, asked for once per part."""
    names_by_part = group_by_value((name, part) for part, name in dict.fromkeys(keys))
    return {
        (part, name): spec
        for part, names in names_by_part.items()
        for name, spec in source.specs(part, names).items()
    }


def _note_masters(
    match_report: MatchReport,
    decl: TensorDecl,
    keys: Sequence[Key],
    stored_key: Key,
    specs: Mapping[Key, TensorSpec],
) -> None:
    """Record master weights more precise than the target, and whether the target takes them."""
    if decl.part == MODEL:
        match_report.masters.update(
            name
            for part, name in keys
            if part == MASTER and ITEM_BITS[specs[part, name].dtype] > ITEM_BITS[decl.spec.dtype]
        )
    part, name = stored_key
    if part == MASTER and ITEM_BITS[decl.spec.dtype] >= ITEM_BITS[specs[stored_key].dtype]:
        match_report.masters_read.add(name)


def _keeps_values(
    decl: TensorDecl, spec: TensorSpec, name: str, stored_names: Callable[[str], Collection[str]]
) -> bool:
    """Return whether the target holds every value of a stored tensor of its own part.

    8-bit codes beside a tensor of their scales are not its values.
    """
    is_scaled = ITEM_BITS[spec.dtype] == 8 and any(
        name + suffix in stored_names(decl.part) for suffix in _SCALE_SUFFIXES
    )
    return is_exact_cast(spec.dtype, decl.spec.dtype) and not is_scaled


def _mismatch(decl: TensorDecl, spec: TensorSpec, pad_dims: Collection[int], *, cast: bool) -> str:
    """Return why a stored tensor cannot be read into a target, or ""."""
    if spec.shape != decl.spec.shape and not _shape_fits(spec.shape, decl.spec.shape, pad_dims):
        return (
            f"checkpoint has shape {spec.shape}, target has {decl.spec.shape}"
            f"{_padding_hint(decl, spec)}"
        )
    if spec.dtype != decl.spec.dtype and not cast:
        return (
            f"checkpoint has dtype {spec.dtype}, target has {decl.spec.dtype}; pass "
            "LoadOptions(cast=True) to cast"
        )
    return ""


def _padding_hint(decl: TensorDecl, stored_spec: TensorSpec) -> str:
    """Return the SourceOptions rule that would accept a larger target."""
    padded_dims = [
        dim
        for dim, (stored_size, target_size) in enumerate(
            zip(stored_spec.shape, decl.spec.shape, strict=False)
        )
        if stored_size < target_size
    ]
    if not _shape_fits(stored_spec.shape, decl.spec.shape, padded_dims):
        return ""
    name = decl.fqn.rpartition("/")[0] if decl.part == OPTIMIZER else decl.fqn
    dims = padded_dims[0] if len(padded_dims) == 1 else padded_dims
    return (
        "; to keep the target's values beyond that, pass "
        f"SourceOptions(rename=[{{'match': {name!r}, 'pad': {dims}}}])"
    )


def _unpadded_state(targets: Sequence[LocalTensor], padded: Mapping[Key, str]) -> Iterator[str]:
    """Report optimizer state whose shape differs from that of a parameter that is padded.

    Which of its elements are new is unknown.
    """
    padded_fqns = {
        fqn if part in WEIGHTS else f"{part}.{fqn}" for part, fqn in padded if part != OPTIMIZER
    }
    for decl in (target.decl for target in targets):
        fqn = decl.fqn.rpartition("/")[0]
        if (
            decl.part == OPTIMIZER
            and fqn in padded_fqns
            and decl.key not in padded
            and prod(decl.spec.shape) != 1
        ):
            yield (
                f"{decl.part}:{decl.fqn}: has shape {decl.spec.shape}, but its parameter is "
                "padded; drop its state by an earlier rule: "
                f"{{'match': '{fqn}/*', 'parts': 'optimizer', 'drop': True}}"
            )


def _shape_fits(stored: tuple[int, ...], shape: tuple[int, ...], pad_dims: Collection[int]) -> bool:
    """Return whether the shapes are equal, or the target is larger only along `pad_dims`."""
    if len(stored) != len(shape):
        return False
    allowed = {dim % len(shape) for dim in pad_dims if -len(shape) <= dim < len(shape)}
    return all(
        stored_size == target_size or (stored_size < target_size and dim in allowed)
        for dim, (stored_size, target_size) in enumerate(zip(stored, shape, strict=True))
    )


def _stored_region(target: LocalTensor, part: str, spec: TensorSpec, rank: int) -> LocalTensor:
    """Return the region of the target that a stored tensor of `spec` fills, from its origin."""
    decl = target.decl
    stored_decl = TensorDecl(part, decl.fqn, spec, decl.sharding)
    if spec.shape == decl.spec.shape:
        return LocalTensor(stored_decl, target.local)
    sharding = decl.sharding.truncate(decl.spec.shape, spec.shape)
    local = target.local[tuple(slice(n) for n in sharding.local_shape(rank, spec.shape))]
    return LocalTensor(stored_decl._replace(sharding=sharding), local)


def _candidates(
    decl: TensorDecl,
    parts: Collection[str],
    stored_names: Callable[[str], Collection[str]],
    tensor_names: TensorNames,
) -> list[Key]:
    """Return the stored tensors that could fill a target: own part first, then own name first.

    `stored_names` is asked only for parts that could: others may be unreadable.
    """
    fqn, slash, state_name = (
        decl.fqn.rpartition("/") if decl.part == OPTIMIZER else (decl.fqn, "", "")
    )
    keys: dict[Key, None] = {}
    for part in (decl.part, *_SUBSTITUTES.get(decl.part, ())):
        if names := stored_names(part):
            for name in tensor_names(fqn, decl.part, part):
                stored_name = name + slash + state_name
                if stored_name in names:
                    keys[part, stored_name] = None
    if decl.part == MASTER:
        for part in parts:
            name = fqn.removeprefix(f"{part}.")
            if name != fqn and name in stored_names(part):
                keys[part, name] = None
    return list(keys)


class TensorNames:
    """Maps a target's name to its possible stored names, following ties on either side."""

    def __init__(self, source: Source, aliases: Mapping[str, Mapping[str, str]]) -> None:
        self._source, self._aliases = source, aliases
        self._alias_maps = cache(self._build_alias_maps)

    def __call__(self, fqn: str, target_part: str, stored_part: str) -> list[str]:
        """Return the names that `fqn` of a target part may have in a stored part, best first."""
        stored_aliases, target_aliases = self._alias_maps(target_part, stored_part)
        if not stored_aliases and not target_aliases:
            return [fqn]
        tied_fqns = target_aliases.get(fqn, ())
        return [
            name
            for name in (
                fqn,
                stored_aliases.get(fqn),
                *tied_fqns,
                *(stored_aliases.get(alias) for alias in tied_fqns),
            )
            if name is not None
        ]

    def _build_alias_maps(
        self, target_part: str, stored_part: str
    ) -> tuple[dict[str, str], dict[str, list[str]]]:
        """Return {stored alias: stored name} and {target name: target aliases}."""
        stored_aliases = {
            alias: name
            for weights_part in (*WEIGHTS, stored_part)
            for alias, name in self._source.aliases(weights_part).items()
        }
        aliases = {**self._aliases.get(MODEL, {}), **self._aliases.get(target_part, {})}
        return stored_aliases, group_by_value(aliases.items())


def saved_state(
    fqns: Collection[str],
    source: Source,
    aliases: Mapping[str, Mapping[str, str]],
    *,
    paddable_dims: PaddableDims,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """Return the stored optimizer state of some parameters, and the keys that need padding.

    The first result maps "fqn/state", in the target's names, to (dtype, global shape). Padded
    state has the shape of its parameter. `shapes`: those of the target's parameters.
    """
    keys_by_name = group_by_value((k, k.rpartition("/")[0]) for k in source.names(OPTIMIZER))
    stored_keys: dict[str, str] = {}
    names_of = TensorNames(source, aliases)
    for fqn in fqns:
        name = next((n for n in names_of(fqn, OPTIMIZER, OPTIMIZER) if n in keys_by_name), None)
        stored_keys.update(
            {f"{fqn}/{key.rpartition('/')[2]}": key for key in keys_by_name.get(name or "", ())}
        )
    specs = source.specs(OPTIMIZER, set(stored_keys.values()))
    specs_by_key, padded = {}, set()
    for target_key, key in stored_keys.items():
        spec, shape = specs[key], shapes.get(target_key.rpartition("/")[0], ())
        dims = paddable_dims.get((OPTIMIZER, key), ())
        if spec.shape != shape and _shape_fits(spec.shape, shape, dims):
            spec = replace(spec, shape=shape)
            padded.add(target_key)
        specs_by_key[target_key] = spec.dtype, spec.shape
    return specs_by_key, padded


def saved_shapes(
    fqns: Collection[str], source: Source, aliases: Mapping[str, Mapping[str, str]]
) -> dict[str, tuple[int, ...]]:
    """Return the stored shapes of some model parameters, by the target's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    names_of = TensorNames(source, aliases)
    for part in WEIGHTS:
        names_by_fqn = {
            fqn: [name for name in names_of(fqn, MODEL, part) if name in source.names(part)]
            for fqn in fqns
        }
        specs = source.specs(part, {names[0] for names in names_by_fqn.values() if names})
        shapes = {
            fqn: specs[names[0]].shape for fqn, names in names_by_fqn.items() if names
        } | shapes
    return shapes


def parameters_without_state(
    fqns: Collection[str],
    source: Source,
    metadata: SourceMetadata,
    aliases: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Return parameters of the target's optimizer that the saved optimizer did not have.

    That is all of them if the checkpoint has no optimizer.
    """
    if OPTIMIZER not in source.parts and not metadata.groups:  # plain SGD has groups, no state
        return sorted(fqns)
    saved_fqns = {fqn for group in metadata.groups for fqn in group["names"]}
    if not saved_fqns:
        return []
    names_of = TensorNames(source, aliases)
    return [
        fqn for fqn in sorted(fqns) if saved_fqns.isdisjoint(names_of(fqn, OPTIMIZER, OPTIMIZER))
    ]


def _select_key(decl: TensorDecl, keys: Sequence[Key], specs: Mapping[Key, TensorSpec]) -> Key:
    """Return the candidate with the target's dtype, else the widest one that it can hold, else the
    first one.
    """
    if len(keys) == 1:
        return keys[0]
    exact = [key for key in keys if is_exact_cast(specs[key].dtype, decl.spec.dtype)]
    return max(exact, key=lambda key: ITEM_BITS[specs[key].dtype], default=keys[0])

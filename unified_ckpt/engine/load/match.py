"""Which stored tensor feeds which target: names, aliases, dtypes and the choice between model and
master weights. Reads no bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod

from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.dtypes import ITEM_BITS
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    WEIGHTS,
    WITHOUT_MASTERS,
)
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

Pads = Mapping[Key, Sequence[int]]  # see `Said`
_SUBSTITUTES = {
    MODEL: (WITHOUT_MASTERS, MASTER),
    MASTER: (MODEL, WITHOUT_MASTERS),
}  # what may feed a part beside itself


@dataclass(frozen=True, slots=True)
class Match:
    """A target and the stored tensor that feeds it. The part's row has the stored dtype, and a part
    name that tells the source.
    """

    target: LocalTensor
    part: str
    name: str


@dataclass(slots=True)
class Differences:
    """What this rank cannot fill, as "part:fqn" or as sentences; and the stored names that it uses,
    by part asked for.

    `padded`: targets that are larger than what is stored, with both shapes. `masters`: stored
    masters that are more precise than the model's tensors here; `masters_read`: those that are read
    at full precision. `tied`: by target, further stored names for it, in the part that feeds it.
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


def match_targets(
    targets: Sequence[LocalTensor],
    source: Source,
    *,
    aliases: Mapping[str, Mapping[str, str]],
    cast: bool,
    pads: Pads,
    rank: int,
) -> tuple[list[Match], Differences]:
    """Finds each target's stored tensor. `aliases`: the target's own, by part."""
    matches: list[Match] = []
    differences = Differences()
    names = TensorNames(source, aliases)
    candidates = [_candidates(target.decl, source, names) for target in targets]
    names_by_part: dict[str, set[str]] = {}
    for part, name in chain.from_iterable(candidates):
        names_by_part.setdefault(part, set()).add(name)
    specs = {
        (part, name): spec
        for part in names_by_part
        for name, spec in source.specs(part, names_by_part[part]).items()
    }
    for target, keys in zip(targets, candidates, strict=True):
        decl = target.decl
        for part, name in keys:
            differences.used.setdefault(part, set()).add(name)
        if not keys:
            differences.missing.append(f"{decl.part}:{decl.fqn}")
            continue
        part, name = _select_key(decl, keys, specs)
        spec = specs[part, name]
        if decl.part == MODEL:
            masters = (
                (name, ITEM_BITS[specs[source_part, name].dtype])
                for source_part, name in keys
                if source_part == MASTER
            )
            differences.masters.update(
                name for name, item_bits in masters if item_bits > ITEM_BITS[decl.spec.dtype]
            )
        if part == MASTER and ITEM_BITS[decl.spec.dtype] >= ITEM_BITS[spec.dtype]:
            differences.masters_read.add(name)
        if spec.shape != decl.spec.shape and not _shape_fits(
            spec.shape, decl.spec.shape, pads.get((part, name), ())
        ):
            differences.wrong.append(
                f"{decl.part}:{decl.fqn}: checkpoint has shape {spec.shape}, target has {decl.spec.shape}{_padding_hint(decl, spec)}"
            )
        elif spec.dtype != decl.spec.dtype and not cast and not _is_substitute(decl.part, part):
            differences.wrong.append(
                f"{decl.part}:{decl.fqn}: checkpoint has dtype {spec.dtype}, target has {decl.spec.dtype}; LoadOptions(cast=True) casts"
            )
        else:
            differences.sources.setdefault(decl.part, set()).add(part)
            label = decl.part if part == decl.part else f"{decl.part}@{part}"
            tied_names = [
                tied_name
                for source_part, tied_name in keys
                if source_part == part and tied_name != name
            ]
            if tied_names:
                differences.tied[decl.key] = tied_names
            is_identical = spec == decl.spec and label == decl.part
            matches.append(
                Match(
                    target
                    if is_identical
                    else _stored_region(
                        target, TensorDecl(label, decl.fqn, spec, decl.sharding), rank
                    ),
                    part,
                    name,
                )
            )
            if spec.shape != decl.spec.shape:
                differences.padded[decl.key] = (
                    f"{decl.part}:{decl.fqn} {spec.shape} -> {decl.spec.shape}"
                )
    if differences.padded:
        differences.wrong += _unpadded_state(targets, differences.padded)
    return matches, differences


def _padding_hint(decl: TensorDecl, stored_spec: TensorSpec) -> str:
    """The rule that makes a larger target right."""
    padded_dims = [
        dim
        for dim, (stored_size, target_size) in enumerate(
            zip(stored_spec.shape, decl.spec.shape, strict=False)
        )
        if stored_size < target_size
    ]
    if not _shape_fits(stored_spec.shape, decl.spec.shape, padded_dims):
        return ""
    name, dims = (
        decl.fqn.rpartition("/")[0] if decl.part == OPTIMIZER else decl.fqn,
        padded_dims[0] if len(padded_dims) == 1 else padded_dims,
    )
    return f"; SourceOptions(rename=[{{'match': {name!r}, 'pad': {dims}}}]) keeps what the target has beyond that"


def _unpadded_state(targets: Sequence[LocalTensor], padded: Mapping[Key, str]) -> Iterator[str]:
    """Optimizer state of another shape than its parameter, which grows: which of its elements are
    new is not known.
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
                f"{decl.part}:{decl.fqn}: has shape {decl.spec.shape}, and its parameter grows: how the state follows is not known; "
                f"drop all of its state by a rule before: {{'match': '{fqn}/*', 'parts': 'optimizer', 'drop': True}}"
            )


def _shape_fits(stored: tuple[int, ...], shape: tuple[int, ...], pad_dims: Collection[int]) -> bool:
    """Whether a target has the stored shape, or more along some of the dims."""
    if len(stored) != len(shape):
        return False
    allowed = {dim % len(shape) for dim in pad_dims if -len(shape) <= dim < len(shape)}
    return all(
        stored_size == target_size or (stored_size < target_size and dim in allowed)
        for dim, (stored_size, target_size) in enumerate(zip(stored, shape, strict=True))
    )


def _stored_region(target: LocalTensor, stored_decl: TensorDecl, rank: int) -> LocalTensor:
    """What the rank holds of the stored tensor, which lies at the origin of the target."""
    if stored_decl.spec.shape == target.decl.spec.shape:
        return LocalTensor(stored_decl, target.local)
    sharding = target.decl.sharding.truncate(target.decl.spec.shape, stored_decl.spec.shape)
    local = target.local[
        tuple(slice(n) for n in sharding.local_shape(rank, stored_decl.spec.shape))
    ]
    return LocalTensor(replace(stored_decl, sharding=sharding), local)


def _candidates(
    decl: TensorDecl, source: Source, tensor_names: TensorNames
) -> list[tuple[str, str]]:
    """Stored tensors that could feed the row, its own part first, its own name first."""
    fqn, slash, state_name = (
        decl.fqn.rpartition("/") if decl.part == OPTIMIZER else (decl.fqn, "", "")
    )
    keys: dict[tuple[str, str], None] = {}
    for part in (decl.part, *_SUBSTITUTES.get(decl.part, ())):
        stored_names = source.names(part)
        keys.update(
            dict.fromkeys(
                (part, name + slash + state_name)
                for name in tensor_names(fqn, decl.part, part)
                if name + slash + state_name in stored_names
            )
        )
    if decl.part == MASTER:
        prefixed = (
            (part, fqn.removeprefix(f"{part}."))
            for part in source.parts
            if fqn.startswith(f"{part}.")
        )
        keys.update(
            dict.fromkeys((part, name) for part, name in prefixed if name in source.names(part))
        )
    return list(keys)


class TensorNames:
    """What a target's tensor may be called in a part of the checkpoint: its own name, and those
    that it is tied to on either side.
    """

    def __init__(self, source: Source, aliases: Mapping[str, Mapping[str, str]]) -> None:
        self._source, self._aliases = source, aliases
        self._alias_maps: dict[
            tuple[str, str], tuple[dict[str, str], dict[str, list[str]]]
        ] = {}  # by part of the target, and stored part

    def __call__(self, fqn: str, target_part: str, stored_part: str) -> list[str]:
        if (target_part, stored_part) not in self._alias_maps:
            self._alias_maps[target_part, stored_part] = self._build_alias_maps(
                target_part, stored_part
            )
        stored_aliases, target_aliases = self._alias_maps[target_part, stored_part]
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
        """Alias -> name of the checkpoint; name -> aliases of the target."""
        stored_aliases = {
            alias: name
            for weights_part in (*WEIGHTS, stored_part)
            for alias, name in self._source.aliases(weights_part).items()
        }
        target_aliases: dict[str, list[str]] = {}
        for alias, name in {
            **self._aliases.get(MODEL, {}),
            **self._aliases.get(target_part, {}),
        }.items():
            target_aliases.setdefault(name, []).append(alias)
        return stored_aliases, target_aliases


def saved_state(
    fqns: Collection[str],
    source: Source,
    aliases: Mapping[str, Mapping[str, str]],
    *,
    pads: Pads,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """The stored optimizer state of parameters: "fqn/state" in the target's names -> (dtype, global
    shape); and which of it grows to its parameter's shape, with that shape. `shapes`: of the
    target's parameters.
    """
    keys_by_name: dict[str, list[str]] = {}
    for key in source.names(OPTIMIZER):
        keys_by_name.setdefault(key.rpartition("/")[0], []).append(key)
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
        if spec.shape != shape and _shape_fits(spec.shape, shape, pads.get((OPTIMIZER, key), ())):
            spec = replace(spec, shape=shape)
            padded.add(target_key)
        specs_by_key[target_key] = spec.dtype, spec.shape
    return specs_by_key, padded


def saved_shapes(
    fqns: Collection[str], source: Source, aliases: Mapping[str, Mapping[str, str]]
) -> dict[str, tuple[int, ...]]:
    """The stored shapes of some parameters of the model, in the target's names."""
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
    """Parameters of the target's optimizer that the checkpoint's did not have: all of them where it
    had none.
    """
    if (
        OPTIMIZER not in source.parts and not metadata.groups
    ):  # with groups it is one without state, such as plain SGD
        return [f"{OPTIMIZER}:{fqn}" for fqn in sorted(fqns)]
    saved_fqns = {fqn for group in metadata.groups for fqn in group["names"]}
    if not saved_fqns:
        return []
    names_of = TensorNames(source, aliases)
    return [
        f"{OPTIMIZER}:{fqn}"
        for fqn in sorted(fqns)
        if saved_fqns.isdisjoint(names_of(fqn, OPTIMIZER, OPTIMIZER))
    ]


def _select_key(
    decl: TensorDecl, keys: Sequence[tuple[str, str]], specs: Mapping[tuple[str, str], TensorSpec]
) -> tuple[str, str]:
    """The one whose dtype is the target's; its own part where none is, or both are."""
    return next((key for key in keys if specs[key].dtype == decl.spec.dtype), keys[0])


def _is_substitute(target_part: str, stored_part: str) -> bool:
    """Whether the part is read in place of the one asked for, which then is not in the checkpoint:
    the cast is what that means.
    """
    return target_part != stored_part

"""State beside tensors: encoded by ranks, merged, and written as trees and a file of blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.text import format_ranks, raise_if_any
from unified_ckpt.errors import LayoutError
from unified_ckpt.format import blobs, codec, digests, header, names
from unified_ckpt.format.manifest import OptimizerRecord, ParamGroup
from unified_ckpt.format.manifest_fields import NamedFile
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.modules import resolve_alias_chains
from unified_ckpt.runtime.torch_state.optimizer_rules import same_value, without_runtime_options
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer


@dataclass(slots=True)
class NonTensorState:
    """The state beside tensors, merged from all ranks. `groups` are those of `FlatOptimizer`."""

    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_optimizer: bool = False


def encode_non_tensor_state(state: FlatState, *, with_optimizer: bool) -> bytes:
    """Return this rank's non-tensor state. `with_optimizer`: whether to include the optimizer's."""
    optimizer = state.optimizer if with_optimizer else FlatOptimizer()
    return codec.pack(
        {
            "aliases": state.aliases,
            "modules": state.extra_states(),
            "groups": optimizer.groups,
            "scalars": optimizer.scalars,
            "optimizer": bool(optimizer.groups or optimizer.scalars),
        },
        "state",
    )


def merge_non_tensor_state(
    states: Sequence[tuple[Sequence[int], bytes]], *, check: bool
) -> NonTensorState:
    """Merge the states of ranks, given as (ranks, encoded state).

    Param groups with equal options become one; groups keep the order of their first appearance.
    The first rank that has a value decides. LayoutError if values differ, and `check`.
    """
    merged = NonTensorState()
    groups_by_key: dict[bytes, dict[str, Any]] = {}
    first_values: dict[str, tuple[Sequence[int], Any]] = {}
    conflicts, grouped = list[str](), set[str]()
    for ranks, body in states:
        state = codec.unpack(body, "state")
        for name, value in _shared_values(state):
            first_ranks, first = first_values.setdefault(name, (ranks, value))
            if check and not same_value(first, value):
                conflicts.append(
                    f"{name}: rank(s) {format_ranks(first_ranks)} differ from rank(s) "
                    f"{format_ranks(ranks)}"
                )
        for part, aliases in state["aliases"].items():
            merged.aliases.setdefault(part, {}).update(aliases)
        for kept, values in ((merged.modules, "modules"), (merged.scalars, "scalars")):
            kept.update({k: v for k, v in state[values].items() if k not in kept})
        merged.has_optimizer |= state["optimizer"]
        keys = list[bytes]()
        for group in state["groups"]:
            kinds = {kind: group.get(kind) for kind in ("optimizer", "masters")}
            key = codec.pack([group["options"], kinds], "options")
            keys.append(key)
            # Groups of one rank stay separate even if their options are equal now.
            key += b"%d" % keys.count(key)
            fqns = [fqn for fqn in group["names"] if fqn not in grouped]
            if fqns or not group["names"]:
                groups_by_key.setdefault(key, {**group, "names": []})["names"].extend(fqns)
        grouped.update(fqn for group in state["groups"] for fqn in group["names"])
    raise_if_any(
        LayoutError,
        "ranks hold different state of the same name, expected equal values; make them equal "
        'before the save, or store those of the first rank with check_replicas="never"',
        conflicts,
    )
    merged.aliases = {
        part: resolve_alias_chains(aliases) for part, aliases in merged.aliases.items()
    }
    merged.groups = list(groups_by_key.values())
    return merged


def _shared_values(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that all ranks with the same name must share."""
    yield from ((f"modules:{name}", value) for name, value in state["modules"].items())
    yield from ((f"optimizer:{fqn}", value) for fqn, value in state["scalars"].items())
    for group in state["groups"]:
        options = without_runtime_options(group["options"])
        yield from ((f"param group of {fqn}", options) for fqn in group["names"])


def write_extra(
    storage: LocalStorage, folder: str, extra: Any, non_tensor_state: NonTensorState
) -> dict[str, Any]:
    """Encode the state and write its blobs, on rank 0; return the manifest's fields.

    FormatError naming the path of a value that cannot be stored.
    """
    extra_tree, blobs_by_name = codec.encode(extra, "extra")
    modules, more_blobs = codec.encode(non_tensor_state.modules, "modules")
    blobs_by_name.update(more_blobs)
    groups = []
    for index, group in enumerate(non_tensor_state.groups):
        options, more_blobs = codec.encode(group["options"], f"param_groups_{index}")
        blobs_by_name.update(more_blobs)
        groups.append(
            ParamGroup(
                names=group["names"],
                options=options,
                optimizer=group.get("optimizer"),
                masters=group.get("masters"),
            )
        )
    scalars, more_blobs = codec.encode(non_tensor_state.scalars, "optimizer")
    blobs_by_name.update(more_blobs)
    record = (
        OptimizerRecord(groups=groups, scalars=scalars) if non_tensor_state.has_optimizer else None
    )
    return {
        "extra": extra_tree,
        "modules": modules if non_tensor_state.modules else None,
        "optimizer": record,
        "extra_file": _write_blobs(storage, folder, blobs_by_name) if blobs_by_name else None,
    }


def _write_blobs(storage: LocalStorage, folder: str, blobs_by_name: Mapping[str, Any]) -> NamedFile:
    items = header.file_order((name, *blobs.spec(blob)) for name, blob in blobs_by_name.items())
    header_bytes, _ = header.encode_header(items)
    views = [
        memoryview(header_bytes),
        *(blobs.raw_bytes(blobs_by_name[name]) for name, _, _ in items),
    ]
    storage.write_at(f"{folder}/{names.EXTRA}", 0, views)
    crc = 0
    for view in views:
        crc = digests.crc(view, crc)
    nbytes = sum(len(view) for view in views)
    return NamedFile(
        file=names.EXTRA,
        nbytes=nbytes,
        header_crc=f"{digests.crc(header_bytes):016x}",
        crc=f"{crc:016x}",
    )

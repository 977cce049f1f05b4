"""State beside tensors: encoded by ranks, merged, and written as trees and a file of blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.format import blobs, codec, digests, header, names
from unified_ckpt.format.manifest import OptimizerRecord, ParamGroup
from unified_ckpt.format.manifest_fields import NamedFile
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import FlatState
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
    """Return the state beside tensors, which one rank reports for all ranks with the same tensors.

    `with_optimizer`: whether the optimizer is stored.
    """
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


def merge_non_tensor_state(states: Sequence[bytes]) -> NonTensorState:
    """Merge the reported states.

    Param groups with equal options become one; groups keep the order of their first appearance.
    """
    merged = NonTensorState()
    groups_by_key: dict[bytes, dict[str, Any]] = {}
    for body in states:
        state = codec.unpack(body, "state")
        for part, aliases in state["aliases"].items():
            merged.aliases.setdefault(part, {}).update(aliases)
        merged.modules.update(state["modules"])
        merged.scalars.update(state["scalars"])
        merged.has_optimizer |= state["optimizer"]
        groups_of_rank: dict[bytes, dict[str, Any]] = {}
        for index, group in enumerate(state["groups"]):
            # Groups of one rank stay separate even if their options are equal now.
            options = group["options"]
            duplicates = sum(other["options"] == options for other in state["groups"][:index])
            kinds = {kind: group.get(kind) for kind in ("optimizer", "masters")}
            groups_of_rank[codec.pack([options, kinds, duplicates], "options")] = group
        for key, group in groups_of_rank.items():
            merged_group = groups_by_key.setdefault(key, {**group, "names": []})
            merged_names = set(merged_group["names"])
            merged_group["names"].extend(fqn for fqn in group["names"] if fqn not in merged_names)
    merged.groups = list(groups_by_key.values())
    return merged


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

"""Writes the state beside tensors: trees for the manifest, a file of blobs, and one of entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.intervals import to_intervals
from unified_ckpt.engine.folder.entries_index import encode_entries_index
from unified_ckpt.format import blobs, codec, digests, header, names
from unified_ckpt.format.codec import Path
from unified_ckpt.format.manifest import OptimizerRecord, ParamGroup
from unified_ckpt.format.manifest_fields import NamedFile, RankValuesFile
from unified_ckpt.runtime.storage.protocol import Storage


@dataclass(frozen=True, slots=True)
class RankEntries:
    """Values that differ between ranks: for each entry, the ranks that hold it, and its bytes."""

    world_size: int = 0
    paths: Sequence[Path] = ()
    entries: Sequence[tuple[Sequence[int], bytes]] = ()


@dataclass(slots=True)
class MergedState:
    """What the ranks of a save hold beside tensors.

    `groups` are those of `FlatOptimizer`. `rank_entries`: what is not equal on all ranks.
    """

    extra: Any = None
    objects: Sequence[str] = ()
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_optimizer: bool = False
    rank_entries: RankEntries = field(default_factory=RankEntries)


def write_extra(storage: Storage, folder: str, state: MergedState) -> dict[str, Any]:
    """Encode the state and write its blobs, on rank 0; return the manifest's fields.

    FormatError naming the path of a value that cannot be stored.
    """
    blobs_by_name: dict[str, Any] = {}

    def encode(value: Any, path: str) -> Any:
        tree, blobs_of_value = codec.encode(value, path)
        blobs_by_name.update(blobs_of_value)
        return tree

    extra_tree = encode(state.extra, "extra")
    modules = encode(state.modules, "modules")
    groups = [
        ParamGroup(
            names=group["names"],
            options=encode(group["options"], f"param_groups_{index}"),
            optimizer=group.get("optimizer"),
            masters=group.get("masters"),
            state_types=group.get("state_types") or {},
        )
        for index, group in enumerate(state.groups)
    ]
    scalars = encode(state.scalars, "optimizer")
    record = OptimizerRecord(groups=groups, scalars=scalars) if state.has_optimizer else None
    return {
        "extra": extra_tree,
        "modules": modules if state.modules else None,
        "optimizer": record,
        "extra_file": _write_blobs(storage, folder, blobs_by_name) if blobs_by_name else None,
    }


def write_rank_entries(
    storage: Storage, folder: str, rank_entries: RankEntries
) -> RankValuesFile | None:
    """Write the values that differ between ranks, on rank 0; return the file's record."""
    bodies = [body for _, body in rank_entries.entries]
    index = encode_entries_index([(len(body), digests.crc(body)) for body in bodies])
    if index is None:
        return None
    views = [memoryview(body) for body in (index.prefix, *bodies)]
    storage.write_at(f"{folder}/{names.RANK_VALUES}", 0, views)
    return RankValuesFile(
        file=names.RANK_VALUES,
        world_size=rank_entries.world_size,
        paths=[list(path) for path in rank_entries.paths],
        ranks=[[list(span) for span in to_intervals(ranks)] for ranks, _ in rank_entries.entries],
        **index.fields,
    )


def _write_blobs(storage: Storage, folder: str, blobs_by_name: Mapping[str, Any]) -> NamedFile:
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

"""TODO docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.format import blobs, codec, digests, header, names
from unified_ckpt.format.manifest import NamedFile, OptimizerRecord, ParamGroup
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass(slots=True)
class Told:
    """What is not tensors of a part, put together from the ranks. `groups`: as in `FlatOptimizer`."""

    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Extra:
    """Trees for the manifest, and the file that holds what JSON cannot."""

    extra: Any
    modules: Any
    optimizer: OptimizerRecord | None
    file: NamedFile | None


def write_extra(storage: LocalStorage, folder: str, extra: Any, told: Told) -> Extra:
    """Rank 0 only. FormatError naming the path of what cannot be stored."""
    extra_tree, found = codec.encode(extra, "extra")
    modules, more = codec.encode(told.modules, "modules")
    found.update(more)
    groups = []
    for i, group in enumerate(told.groups):
        options, more = codec.encode(group["options"], f"param_groups_{i}")
        found.update(more)
        groups.append(
            ParamGroup(
                names=group["names"],
                options=options,
                optimizer=group.get("optimizer"),
                masters=group.get("masters"),
            )
        )
    scalars, more = codec.encode(told.scalars, "optimizer")
    found.update(more)
    record = OptimizerRecord(groups=groups, scalars=scalars) if told.has_optimizer else None
    file = _write_blobs(storage, folder, found) if found else None
    return Extra(extra_tree, modules if told.modules else None, record, file)


def _write_blobs(storage: LocalStorage, folder: str, found: Mapping[str, Any]) -> NamedFile:
    items = header.file_order((name, *blobs.spec(blob)) for name, blob in found.items())
    head, _ = header.encode_header(items)
    views = [memoryview(head), *(blobs.raw(found[name]) for name, _, _ in items)]
    storage.write_at(f"{folder}/{names.EXTRA}", 0, views)
    crc = 0
    for view in views:
        crc = digests.crc(view, crc)
    nbytes = sum(len(view) for view in views)
    return NamedFile(
        file=names.EXTRA, nbytes=nbytes, header_crc=f"{digests.crc(head):016x}", crc=f"{crc:016x}"
    )

"""Encodes state beside tensors: trees for the manifest, and a file of blobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.format import blobs, codec, digests, header, names
from unified_ckpt.format.manifest import NamedFile, OptimizerRecord, ParamGroup
from unified_ckpt.runtime.storage.storage import LocalStorage


@dataclass(slots=True)
class NonTensorState:
    """The state beside tensors, merged from all ranks. `groups` are those of `FlatOptimizer`."""

    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class EncodedExtra:
    """Encoded trees for the manifest; `file` is the record of the blob file, if there is one."""

    extra: Any
    modules: Any
    optimizer: OptimizerRecord | None
    file: NamedFile | None


def write_extra(
    storage: LocalStorage, folder: str, extra: Any, non_tensor_state: NonTensorState
) -> EncodedExtra:
    """Encode the state and write its blobs, on rank 0.

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
    file = _write_blobs(storage, folder, blobs_by_name) if blobs_by_name else None
    return EncodedExtra(extra_tree, modules if non_tensor_state.modules else None, record, file)


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

"""Lays out the files of a group: which tensors each has, its header, and the offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.write_plan import FileContents, plan_files
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import file_shape
from unified_ckpt.engine.plan.holders import Membership
from unified_ckpt.engine.plan.stored_tensors import StoredTensors, list_stored
from unified_ckpt.format import header, names


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file of a group: its size in bytes, its header, and the rank that writes the header.

    `offsets` are the start offsets of the tensors in the file, by index in `GroupLayout.stored`.
    """

    name: str
    part: str
    nbytes: int
    header_bytes: bytes
    header_rank: int
    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What every member of a holder group knows of its files.

    `stored` is what the files store of `decls`, and `contents` which file has what. `digest_start`
    is the first byte of the group's section in the digest file. `part_nbytes`: of the parts that
    one rank writes whole; None if ranks may divide the bytes anywhere.
    """

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    stored: StoredTensors
    contents: tuple[FileContents, ...]
    files: tuple[FileLayout, ...]
    digest_start: int
    part_nbytes: int | None


def lay_out_group(membership: Membership) -> GroupLayout:
    """Return the files of a group, as every member computes them."""
    stored = list_stored(membership.decls)
    contents = plan_files(
        stored.tensors, holders=membership.holders, limits=membership.group_info["limits"]
    )
    return GroupLayout(
        membership.index,
        membership.holders,
        membership.decls,
        stored,
        tuple(contents),
        tuple(_lay_out_file(membership, stored, file_contents) for file_contents in contents),
        membership.group_info["digests"],
        membership.group_info["part_nbytes"],
    )


def _lay_out_file(
    membership: Membership, stored: StoredTensors, contents: FileContents
) -> FileLayout:
    """Encode the header, which fixes the byte offset of every tensor in the file.

    No other function lays out a part file; `encode_header` computes the offsets.
    """
    index_by_fqn = {stored.tensors[index].fqn: index for index in contents.stored_indices}
    specs = {fqn: stored.tensors[index].spec for fqn, index in index_by_fqn.items()}
    items = [(fqn, spec.dtype, file_shape(spec.dtype, spec.shape)) for fqn, spec in specs.items()]
    header_bytes, entries = header.encode_header(header.file_order(items))
    return FileLayout(
        name=group_file_name(contents, membership.group_info),
        part=contents.part,
        nbytes=header.file_nbytes(header_bytes, entries),
        header_bytes=header_bytes,
        header_rank=contents.header_rank,
        offsets={index_by_fqn[fqn]: entry.start for fqn, entry in entries.items()},
    )


def group_file_name(contents: FileContents, group_info: Mapping[str, Any]) -> str:
    """Return the name of a file of a group."""
    number = group_info["first"][contents.part] + contents.number + 1
    return names.file_name(contents.part, number=number, count=group_info["count"][contents.part])

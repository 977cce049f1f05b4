"""What one rank writes of the tensors of a group, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unified_ckpt.core.planning.exchange import Extent, RankIO
from unified_ckpt.core.planning.part_owners import assign_owners
from unified_ckpt.core.planning.part_plan import plan_parts
from unified_ckpt.core.planning.write_plan import plan_writes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.plan.file_layout import FileLayout, GroupLayout
from unified_ckpt.engine.plan.group_parts import group_parts
from unified_ckpt.engine.plan.stored_tensors import StoredTensors, is_encoded_master


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one holder group for one member.

    `stored` is what its files store of `decls`; of declared boxes, `starts` repeats the tensor, and
    goes on with all stored tensors, of which the rank writes bytes of others. `digest_start` is the
    first byte of the group's section in the digest file. `part_nbytes`: as in `GroupLayout`.
    `file_by_stored` maps indices of stored tensors to those of files.
    """

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    stored: StoredTensors
    files: tuple[FileLayout, ...]
    rank_io: RankIO
    digest_start: int
    part_nbytes: int | None
    file_by_stored: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        files = {index: number for number, file in enumerate(self.files) for index in file.offsets}
        object.__setattr__(self, "file_by_stored", files)

    @property
    def leader(self) -> int:
        """The member that combines the group's digests."""
        return self.holders[0]

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a tile: those of tensors, then those of the model beside encoded masters."""
        nbytes = self.rank_io.tile_nbytes
        return nbytes * 3 // 2 if any(map(is_encoded_master, self.decls)) else nbytes

    def file_of(self, stored_index: int) -> FileLayout:
        """Return the file of a stored tensor."""
        return self.files[self.file_by_stored[stored_index]]

    def part_of(self, extent: Extent) -> tuple[str, int] | None:
        """Return the file and the number of the part that has an extent; None without parts."""
        if self.part_nbytes is None:
            return None
        index = self.stored.starts[extent.decl_index]
        file = self.file_of(index)
        return file.name, (file.offsets[index] + extent.start) // self.part_nbytes

    def written_files(self, rank: int) -> set[str]:
        """Return the files of which a rank writes bytes, if each part has one writer."""
        stored = {self.stored.starts[extent.decl_index] for extent in self.rank_io.extents}
        for tile in self.rank_io.io_tiles:
            stored.update(item.clip.stored_index for item in tile.ranges if item.clip is not None)
        headers = {file.name for file in self.files if file.header_rank == rank}
        return headers | {self.file_of(index).name for index in stored}


def plan_group(layout: GroupLayout, *, rank: int) -> GroupPlan:
    """Return one member's plan of a group. Its cost grows with the group's tensors and holders."""
    files = layout.files
    if layout.part_nbytes is None:
        rank_io = plan_writes(
            layout.decls,
            layout.stored.tensors,
            holders=layout.holders,
            files=layout.contents,
            header_nbytes={index: len(file.header_bytes) for index, file in enumerate(files)},
            rank=rank,
        )
    else:
        parts = group_parts(layout)
        owners = assign_owners(parts)
        rank_io = plan_parts(parts, owners, rank)
        files = tuple(
            replace(file, header_rank=layout.holders[owners[first]])
            for file, first in zip(files, parts.first_parts, strict=False)
        )
    return GroupPlan(
        index=layout.index,
        holders=layout.holders,
        decls=layout.decls,
        stored=layout.stored,
        files=files,
        rank_io=rank_io,
        digest_start=layout.digest_start,
        part_nbytes=layout.part_nbytes,
    )

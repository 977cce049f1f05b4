"""Decides which node writes which bytes of a file that several nodes write.

How bytes could be lost: a network file system caches whole pages on each node. Two nodes that write
different bytes of one page overwrite each other's bytes with stale ones. A file is therefore
divided into aligned blocks, and one node writes each. If one rank's bytes fill a block, that rank
writes it. Otherwise all ranks compute the same writer and send it their bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from unified_ckpt.core.grouping import group_by_value

ANY_BYTE = 1  # as an alignment: any two nodes may write adjacent bytes; nothing is sent
WHOLE_FILES = 0  # as an alignment: one node writes a whole file
_MAX_WRITERS = 64  # nodes that blocks are sent to; limits the connections of a rank


@dataclass(frozen=True)
class WriteAlignment:
    """The write rule of a folder that ranks of several nodes share.

    `nodes`: the node of each rank. `alignment_nbytes`: of an aligned block, or
    ANY_BYTE or WHOLE_FILES.
    """

    nodes: tuple[int, ...]
    alignment_nbytes: int

    @cached_property
    def _ranks_by_node(self) -> list[list[int]]:
        """The ranks of each node, ordered by node."""
        ranks_by_node = group_by_value(enumerate(self.nodes))
        return [ranks_by_node[node] for node in sorted(ranks_by_node)]

    def same_node(self, rank: int, other: int) -> bool:
        """Return whether two ranks are on one node."""
        return self.nodes[rank] == self.nodes[other]

    def split_by_writer(
        self, file: str, start: int, stop: int, *, exclusive_range: tuple[int, int], rank: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield bytes [start, stop) of `rank` as (start, stop, rank that writes them).

        `exclusive_range`: the surrounding bytes that all belong to `rank`. It writes the blocks
        within them itself.
        """
        size = self.alignment_nbytes
        low = high = stop  # borders of the whole blocks in the range; equal: none
        if size != WHOLE_FILES:
            low, high = -(-exclusive_range[0] // size) * size, exclusive_range[1] // size * size
        if low >= high:
            low = high = stop
        yield from self._split_by_block(file, start, min(stop, low), rank)
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high), rank
        yield from self._split_by_block(file, max(start, high), stop, rank)

    def _split_by_block(
        self, file: str, start: int, stop: int, rank: int
    ) -> Iterator[tuple[int, int, int]]:
        size = self.alignment_nbytes or stop  # WHOLE_FILES: one block
        while start < stop:
            block = start // size
            border = min((block + 1) * size, stop)
            yield start, border, self._writer(file, block, rank)
            start = border

    def _writer(self, file: str, block: int, rank: int) -> int:
        """Return a rank on the node that writes the block: `rank` itself if it is there."""
        node_count = min(len(self._ranks_by_node), _MAX_WRITERS)
        node_ranks = self._ranks_by_node[zlib.crc32(f"{file}/{block}".encode()) % node_count]
        return rank if rank in node_ranks else node_ranks[rank % len(node_ranks)]


# File system types, as the kernel names them, by what two nodes may safely do at once in one file.
# Local, or with coherent caches: write any bytes. With a page cache on each node: write different
# blocks. All others, FUSE above all (some upload whole files again): nothing.
_COHERENT = frozenset(
    [
        "apfs",
        "bcachefs",
        "btrfs",
        "ceph",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "gfs2",
        "gpfs",
        "jfs",
        "lustre",
        "ocfs2",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "wekafs",
        "xfs",
        "zfs",
    ]
)
_PAGE_CACHED = frozenset(["nfs", "nfs4", "cifs", "smb3", "afs", "beegfs"])
_PAGE_CACHED_ALIGNMENT = 1 << 20  # pages of up to 64 KiB, and larger folios of recent kernels


def is_slow(fs_type: str) -> bool:
    """Return whether one server, or the link to it, may limit what all nodes read together."""
    return fs_type not in _COHERENT


def choose_alignment(fs_types: Sequence[str]) -> int:
    """Return the alignment in bytes for a folder that nodes see as these file system types.

    The strictest of them decides.
    """
    if all(fs_type in _COHERENT for fs_type in fs_types):
        return ANY_BYTE
    return (
        _PAGE_CACHED_ALIGNMENT
        if all(fs_type in _COHERENT or fs_type in _PAGE_CACHED for fs_type in fs_types)
        else WHOLE_FILES
    )

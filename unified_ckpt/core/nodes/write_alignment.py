"""Which machine writes which bytes of a file that several machines write to. Pure.

How bytes could be lost: a network file system keeps whole pages of a file on each machine, and two
machines that write different bytes of one page give each other's bytes back as they were. So a file
is cut into blocks, and each block is written by one machine: by the rank whose bytes fill it, or,
where bytes of several ranks meet in it, by a rank that all of them find by the same rule, to which
they are sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ANY_BYTE = 1  # bytes of a block: every border is one, nothing is sent
WHOLE_FILES = 0  # a file is one block
_MAX_WRITERS = 64  # machines to which blocks are sent: bounds the connections of a rank


@dataclass(frozen=True)
class WriteAlignment:
    """A folder that the ranks of several machines see. `nodes`: of each rank. `block_nbytes`:
    also NO_BLOCKS or WHOLE_FILES.
    """

    nodes: tuple[int, ...]
    block_nbytes: int

    @cached_property
    def _ranks_by_node(self) -> list[list[int]]:
        """The ranks of each machine, machines in order."""
        ranks_by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            ranks_by_node.setdefault(node, []).append(rank)
        return [ranks_by_node[node] for node in sorted(ranks_by_node)]

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one machine."""
        return self.nodes[rank] == self.nodes[other]

    def split_by_writer(
        self, file: str, start: int, stop: int, *, exclusive_range: tuple[int, int], rank: int
    ) -> Iterator[tuple[int, int, int]]:
        """Bytes [start, stop) that `rank` has, as (start, stop, the rank that writes them).

        `exclusive_range`: bytes around them of which all are that rank's and none is another's.
        Blocks that lie in it go to nobody else.
        """
        low, high = self._whole_blocks(exclusive_range)
        if low >= high:
            low = high = stop
        yield from self._split_by_block(file, start, min(stop, low), rank)
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high), rank
        yield from self._split_by_block(file, max(start, high), stop, rank)

    def _whole_blocks(self, exclusive_range: tuple[int, int]) -> tuple[int, int]:
        if self.block_nbytes == WHOLE_FILES:
            return 0, 0
        low, high = exclusive_range
        return -(
            -low // self.block_nbytes
        ) * self.block_nbytes, high // self.block_nbytes * self.block_nbytes

    def _split_by_block(
        self, file: str, start: int, stop: int, rank: int
    ) -> Iterator[tuple[int, int, int]]:
        while start < stop:
            block = start // self.block_nbytes if self.block_nbytes else 0
            border = min((block + 1) * self.block_nbytes, stop) if self.block_nbytes else stop
            yield start, border, self._writer(file, block, rank)
            start = border

    def _writer(self, file: str, block: int, rank: int) -> int:
        """On the machine that writes the block: `rank` itself if it is there, else one of those
        there, in turns.
        """
        node_ranks = self._ranks_by_node[
            zlib.crc32(f"{file}/{block}".encode()) % min(len(self._ranks_by_node), _MAX_WRITERS)
        ]
        return rank if rank in node_ranks else node_ranks[rank % len(node_ranks)]


# What two machines may do at once in one file, by the type that the kernel gives a file system. One
# kernel, or caches that the file system
# itself keeps alike on all machines: any bytes. Whole pages in each machine's cache: apart by
# blocks. All else, FUSE above all (some
# upload whole files again): a file is one machine's.
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
_PAGE_CACHED_BLOCK_NBYTES = 1 << 20  # pages of up to 64 KiB, and larger folios of late kernels


def is_slow(fs_type: str) -> bool:
    """Whether one server, or a link to one, may bound what all machines together read from such a
    file system.
    """
    return fs_type not in _COHERENT


def alignment_nbytes(fs_types: Sequence[str]) -> int:
    """The bytes of a block on a volume that the machines see as these types of file systems: what
    the strictest of them needs.
    """
    if all(fs_type in _COHERENT for fs_type in fs_types):
        return ANY_BYTE
    return (
        _PAGE_CACHED_BLOCK_NBYTES
        if all(fs_type in _COHERENT or fs_type in _PAGE_CACHED for fs_type in fs_types)
        else WHOLE_FILES
    )

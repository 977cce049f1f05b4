"""Which machine writes which bytes of a file that several machines write to. Pure.

How bytes could be lost: a network file system keeps whole pages of a file on each machine, and two machines that write different bytes of
one page give each other's bytes back as they were. So a file is cut into blocks, and each block is written by one machine: by the rank
whose bytes fill it, or, where bytes of several ranks meet in it, by a rank that all of them find by the same rule, to which they are sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

NO_BLOCKS = 1  # bytes of a block: every border is one, nothing is sent
WHOLE_FILES = 0  # a file is one block
_MAX_WRITERS = 64  # machines to which blocks are sent: bounds the connections of a rank


@dataclass(frozen=True)
class Volume:
    """A folder that the ranks of several machines see. `machines`: of each rank. `block_nbytes`: also NO_BLOCKS or WHOLE_FILES."""

    machines: tuple[int, ...]
    block_nbytes: int

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """The ranks of each machine, machines in order."""
        found: dict[int, list[int]] = {}
        for rank, machine in enumerate(self.machines):
            found.setdefault(machine, []).append(rank)
        return [found[machine] for machine in sorted(found)]

    def near(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one machine."""
        return self.machines[rank] == self.machines[other]

    def cut(
        self, file: str, start: int, stop: int, *, alone: tuple[int, int], rank: int
    ) -> Iterator[tuple[int, int, int]]:
        """Bytes [start, stop) that `rank` has, as (start, stop, the rank that writes them).

        `alone`: bytes around them of which all are that rank's and none is another's. Blocks that lie in it go to nobody else.
        """
        low, high = self._whole_blocks(alone)
        if low >= high:
            low = high = stop
        yield from self._sent(file, start, min(stop, low), rank)
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high), rank
        yield from self._sent(file, max(start, high), stop, rank)

    def _whole_blocks(self, alone: tuple[int, int]) -> tuple[int, int]:
        if self.block_nbytes == WHOLE_FILES:
            return 0, 0
        low, high = alone
        return -(
            -low // self.block_nbytes
        ) * self.block_nbytes, high // self.block_nbytes * self.block_nbytes

    def _sent(self, file: str, start: int, stop: int, rank: int) -> Iterator[tuple[int, int, int]]:
        while start < stop:
            block = start // self.block_nbytes if self.block_nbytes else 0
            border = min((block + 1) * self.block_nbytes, stop) if self.block_nbytes else stop
            yield start, border, self._writer(file, block, rank)
            start = border

    def _writer(self, file: str, block: int, rank: int) -> int:
        """On the machine that writes the block: `rank` itself if it is there, else one of those there, in turns."""
        machine = self._ranks[
            zlib.crc32(f"{file}/{block}".encode()) % min(len(self._ranks), _MAX_WRITERS)
        ]
        return rank if rank in machine else machine[rank % len(machine)]


# What two machines may do at once in one file, by the type that the kernel gives a file system. One kernel, or caches that the file system
# itself keeps alike on all machines: any bytes. Whole pages in each machine's cache: apart by blocks. All else, FUSE above all (some
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
_PAGES = frozenset(["nfs", "nfs4", "cifs", "smb3", "afs", "beegfs"])
_PAGES_BLOCK_NBYTES = 1 << 20  # pages of up to 64 KiB, and larger folios of late kernels


def is_slow(kind: str) -> bool:
    """Whether one server, or a link to one, may bound what all machines together read from such a file system."""
    return kind not in _COHERENT


def block_nbytes_of(kinds: Sequence[str]) -> int:
    """The bytes of a block on a volume that the machines see as these types of file systems: what the strictest of them needs."""
    if all(kind in _COHERENT for kind in kinds):
        return NO_BLOCKS
    return (
        _PAGES_BLOCK_NBYTES
        if all(kind in _COHERENT or kind in _PAGES for kind in kinds)
        else WHOLE_FILES
    )

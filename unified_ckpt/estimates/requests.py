"""The requests of a save to a bucket, and what they cost.

Prices are those of Amazon S3 Standard in us-east-1, November 2026; those of Google Cloud Storage
are of the same order. Other stores may take nothing for requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unified_ckpt.core.planning.part_grid import choose_part_nbytes

WRITE_DOLLARS = 0.005 / 1000  # PUT, POST and LIST
READ_DOLLARS = 0.0004 / 1000  # GET and HEAD; DELETE is free
_COMMIT_WRITES, _COMMIT_READS = 15, 35  # of a new checkpoint: lists, claim, record, manifest


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a save. `writes`: PUT, POST and LIST. `reads`: GET and HEAD."""

    writes: int
    reads: int

    @property
    def total(self) -> int:
        """All requests that cost something."""
        return self.writes + self.reads

    @property
    def dollars(self) -> float:
        """What they cost on Amazon S3."""
        return self.writes * WRITE_DOLLARS + self.reads * READ_DOLLARS


def save_requests(files: Mapping[str, int], *, smallest_part_nbytes: int) -> Requests:
    """Return the requests of a save of these files, without retries. `files`: bytes by name.

    Each file is begun, uploaded in parts, completed, and looked at twice; the commit takes more.
    """
    part_nbytes = choose_part_nbytes(list(files.values()), smallest=smallest_part_nbytes)
    parts = sum(max(-(-nbytes // part_nbytes), 1) for nbytes in files.values())
    return Requests(2 * len(files) + parts + _COMMIT_WRITES, 2 * len(files) + _COMMIT_READS)

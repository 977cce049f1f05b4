"""The layout of the digest file: a header, then one section of block digests after another."""

from __future__ import annotations

from collections.abc import Iterable

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.manifest_fields import DigestFile


def encode_digest_header(block_counts: Iterable[tuple[Key, int]]) -> bytes:
    """Return the header for the digests of these tensors, which follow it in the same order."""
    items = [(f"{part}:{fqn}", "U64", (count,)) for (part, fqn), count in block_counts]
    return header.encode_header(items)[0]


def digest_file_record(sections: Iterable[tuple[int, int]]) -> DigestFile:
    """Return the manifest's record, from the (CRC, bytes) of the header and of all sections."""
    crc, nbytes = digests.combine_all(sections)
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )

"""The index of a part of a unified folder, compared with its digest in the manifest before a name
of it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.errors import IncompleteError, IntegrityError, NotFoundError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.manifest import Part
from unified_ckpt.runtime.storage.storage import Reader

_REPAIR_HINT = "`unified-ckpt verify --repair` makes it anew from the headers"


def read_index(storage: Reader, part: str, record: Part) -> Mapping[str, str] | None:
    """Tensor name -> file name. None for a part that was deleted, index and files.

    IncompleteError where only the index is missing, IntegrityError where it is not the one that was
    written.
    """
    if record.index is None:
        return {}
    name = names.index_name(part)
    location = f"{storage.root}/{name}"
    try:
        body = storage.read(name)
    except NotFoundError as error:
        if all(storage.size(file) is None for file in record.files):
            return None
        raise IncompleteError(
            f"{location}: is missing; needed the index of part {part}; {_REPAIR_HINT}"
        ) from error
    if f"{digests.crc(body):016x}" != record.index.crc:
        raise IntegrityError(
            f"{location}: has CRC {digests.crc(body):016x}; the manifest says {record.index.crc}; {_REPAIR_HINT}"
        )
    weight_map = index.parse_index(body, file=location).weight_map
    differing_files = sorted(set(weight_map.values()) ^ record.files.keys())
    if differing_files:
        raise IntegrityError(
            f"{location}: {differing_files[0]} is in one of manifest and index only; needed the same files in both"
        )
    return weight_map

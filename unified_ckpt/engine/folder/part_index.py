"""The index of a part of a unified folder, compared with its digest in the manifest before a name of it is believed."""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.errors import IncompleteError, IntegrityError, NotFoundError
from unified_ckpt.format import digests, index, names
from unified_ckpt.format.manifest import Part
from unified_ckpt.runtime.storage.storage import Reader

_REMAKE = "`unified-ckpt verify --repair` makes it anew from the headers"


def read_index(storage: Reader, part: str, record: Part) -> Mapping[str, str] | None:
    """Tensor name -> file name. None for a part that was deleted, index and files.

    IncompleteError where only the index is missing, IntegrityError where it is not the one that was written.
    """
    if record.index is None:
        return {}
    name = names.index_name(part)
    where = f"{storage.root}/{name}"
    try:
        body = storage.read(name)
    except NotFoundError as error:
        if all(storage.size(file) is None for file in record.files):
            return None
        raise IncompleteError(
            f"{where}: is missing; needed the index of part {part}; {_REMAKE}"
        ) from error
    if f"{digests.crc(body):016x}" != record.index.crc:
        raise IntegrityError(
            f"{where}: has CRC {digests.crc(body):016x}; the manifest says {record.index.crc}; {_REMAKE}"
        )
    weight_map = index.parse_index(body, file=where).weight_map
    differ = sorted(set(weight_map.values()) ^ record.files.keys())
    if differ:
        raise IntegrityError(
            f"{where}: {differ[0]} is in one of manifest and index only; needed the same files in both"
        )
    return weight_map

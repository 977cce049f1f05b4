"""Read a part's index after comparing it with its digest in the manifest."""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.engine.folder.repair_hint import index_hint
from unified_ckpt.engine.folder.stored_files import check_crc
from unified_ckpt.errors import IncompleteError, IntegrityError, NotFoundError
from unified_ckpt.format import index, names
from unified_ckpt.format.manifest import Part
from unified_ckpt.runtime.storage.storage import Reader


def read_index(storage: Reader, part: str, record: Part) -> Mapping[str, str]:
    """Return {tensor name: file name} of a part that was not deleted.

    Raises IncompleteError if the index is missing, IntegrityError if it was changed.
    """
    if record.index is None:
        return {}
    name = names.index_name(part)
    location = f"{storage.root}/{name}"
    try:
        body = storage.read(name)
    except NotFoundError as error:
        raise IncompleteError(
            f"{location}: is missing, expected the index of part {part}; "
            f"{index_hint(storage, record.files)}"
        ) from error
    try:
        check_crc(body, record.index.crc, f"{location}:")
    except IntegrityError as error:
        raise IntegrityError(f"{error}; {index_hint(storage, record.files)}") from None
    weight_map = index.parse_index(body, file=location)
    differing_files = sorted(set(weight_map.values()) ^ record.files.keys())
    if differing_files:
        raise IntegrityError(
            f"{location}: {differing_files[0]} is only in the manifest or only in the "
            "index, expected the same files in both"
        )
    return weight_map

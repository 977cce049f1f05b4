"""The file names of a checkpoint folder. Knows names only: nothing here looks at a disk."""

from __future__ import annotations

import re

from unified_ckpt.errors import FormatError

MANIFEST = "unified_checkpoint.json"
DIGESTS = "digests.safetensors"
EXTRA = "extra.safetensors"
RANK_EXTRA = "rank_extra.safetensors"
# in the folder under construction: by it the other ranks see that it is the same folder
MARKER = "probe"
REPLICAS = "replicas"  # a folder: what this machine keeps of others', by their numbers

# Files of the folder that a part of this name would overwrite.
_RESERVED_PARTS = frozenset({"digests", "extra", "rank_extra"})
_PART = re.compile(r"[A-Za-z0-9_]{1,64}")
# No "-": the first one after the id then ends the id, whatever the folder is called.
_SAVE_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_BACKUP = re.compile(r".+-before-[0-9]+(?:\.[^.]*)?")
_STAGING = ".unified-"
_TRASH = "gone_"  # begins what stands for the id: ids of saves are hexadecimal
_REPLACED = ".replaced-"
REPAIR_TMP = ".mending-"  # begins the name of a file that a repair has not finished


def check_part_name(part: str) -> None:
    """Raises FormatError unless `part` can be the stem of file names and clashes with no file of
    ours.
    """
    if not _PART.fullmatch(part):
        raise FormatError(
            f"part name {part!r} is not valid; needed 1 to 64 ASCII letters, digits or _"
        )
    if part in _RESERVED_PARTS:
        raise FormatError(
            f"part name {part!r} is taken by a file of the checkpoint itself; choose another name"
        )


def check_save_id(save_id: str) -> None:
    """Raises FormatError unless `save_id` can stand in the name of a sibling folder."""
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(
            f"save id {save_id!r} is not valid; needed 1 to 64 ASCII letters, digits or _"
        )


def index_name(part: str) -> str:
    """`"model"` -> `"model.safetensors.index.json"`."""
    return f"{part}.safetensors.index.json"


def replica_name(number: int) -> str:
    """The folder in which a copy of what folder `number` of a save holds lies, within that of
    another machine.
    """
    return f"{REPLICAS}/{number}"


def file_name(part: str, *, number: int, count: int) -> str:
    """Name of file `number` (from 1) of a part of `count` files. Raises FormatError for a number
    outside 1..count.
    """
    if not 1 <= number <= count:
        raise FormatError(f"part {part!r} has no file {number}; needed 1 to {count}")
    return (
        f"{part}.safetensors" if count == 1 else f"{part}-{number:05d}-of-{count:05d}.safetensors"
    )


def staging_name(name: str, save_id: str) -> str:
    """The sibling in which the folder `name` is built. Raises FormatError for a bad id."""
    check_save_id(save_id)
    return f"{_STAGING}{save_id}-{name}"


def trash_name(name: str, save_id: str) -> str:
    """The sibling in which the folder `name` is taken apart: to others it is one under
    construction. Raises FormatError for a bad id.
    """
    check_save_id(save_id)
    return staging_name(name, f"{_TRASH}{save_id}"[:64])


def is_trash(entry: str) -> bool:
    """Whether a directory entry is what is left of a folder that was to be removed."""
    return is_staging(entry) and entry.startswith(f"{_STAGING}{_TRASH}")


def replaced_name(name: str, save_id: str) -> str:
    """The sibling to which an old folder `name` is moved aside. Raises FormatError for a bad id."""
    check_save_id(save_id)
    return f"{_REPLACED}{save_id}-{name}"


def backup_name(name: str, number: int, *, is_file: bool) -> str:
    """The sibling to which a user's file or folder `name` is renamed where a save needs its name. A
    file keeps its suffix.
    """
    stem, dot, suffix = (
        name.rpartition(".") if is_file and "." in name.strip(".") else (name, "", "")
    )
    return f"{stem}-before-{number}{dot}{suffix}"


def is_backup(entry: str) -> bool:
    """Whether a directory entry has a name that `backup_name` gives."""
    return bool(_BACKUP.fullmatch(entry))


def original_name(entry: str) -> str:
    """The name that a folder had before `backup_name` gave it this one; empty for other names."""
    base, separator, number = entry.rpartition("-before-")
    return base if separator and number.isascii() and number.isdecimal() else ""


def is_staging(entry: str) -> bool:
    """Whether a directory entry is a folder under construction, of any checkpoint."""
    return _is_sibling(entry, _STAGING)


def is_staging_of(entry: str, name: str) -> bool:
    """Whether a directory entry is a folder under construction that is to be called `name`."""
    return is_staging(entry) and _target_name(entry, _STAGING) == name


def is_replaced(entry: str, name: str) -> bool:
    """Whether a directory entry is an old folder `name`, moved aside."""
    return _is_sibling(entry, _REPLACED) and _target_name(entry, _REPLACED) == name


def _target_name(entry: str, prefix: str) -> str:
    return entry.removeprefix(prefix).partition("-")[2]


def _is_sibling(entry: str, prefix: str) -> bool:
    save_id, dash, name = entry.removeprefix(prefix).partition("-")
    return entry.startswith(prefix) and bool(_SAVE_ID.fullmatch(save_id)) and bool(dash and name)

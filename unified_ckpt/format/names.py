"""The names of a checkpoint's files, and of the sibling folders of its life cycle."""

from __future__ import annotations

import re

from unified_ckpt.errors import FormatError

MODEL, MASTER, OPTIMIZER = "model", "master_weights", "optimizer"  # parts
# In a checkpoint that omits the model: the model's tensors that have no master.
WITHOUT_MASTERS = "model_without_masters"
WEIGHTS = (MODEL, MASTER, WITHOUT_MASTERS)

MANIFEST = "unified_checkpoint.json"
DIGESTS = "digests.safetensors"
EXTRA = "extra.safetensors"
RANK_EXTRA = "rank_extra.safetensors"
RANK_VALUES = "rank_values.safetensors"
SAVE_ID_FILE = (
    "unified_save_id"  # in a staging folder; by it, ranks check that they see the same folder
)
UNIFIED_FILES = frozenset({MANIFEST, DIGESTS, SAVE_ID_FILE})  # each shows that we wrote a folder
REPLICAS = "replicas"  # subfolder with copies of other node groups' folders, by their numbers

# A part with this name would overwrite files of the checkpoint itself.
_RESERVED_PARTS = frozenset({"digests", "extra", "rank_extra", "rank_values"})
_PART = re.compile(r"[A-Za-z0-9_]{1,64}")
# Without "-": the first one then ends the id, whatever the folder is called.
_SAVE_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_BACKUP = re.compile(r".+-before-[0-9]+(?:\.[^.]*)?")
_STAGING = ".unified-"
_TRASH = "trash_"  # prefix of the id; ids of saves are hexadecimal
_REPLACED = ".replaced-"
REPAIR_TMP = ".repair-"  # prefix of a file that a repair is writing

# Objects beside the checkpoints in a bucket.
NEWEST = ".unified_newest.json"  # the newest committed step: a listing may lag
_COMMIT = ".unified_commit-"
UPLOADS_PREFIX = ".unified_uploads-"
_REMOVAL = ".unified_removal-"
_JSON = ".json"


def check_part_name(part: str) -> None:
    """Raise FormatError unless `part` is a valid file stem and not reserved."""
    if not _PART.fullmatch(part):
        raise FormatError(f"part name: got {part!r}, expected 1 to 64 ASCII letters, digits or _")
    if part in _RESERVED_PARTS:
        raise FormatError(
            f"part name: got {part!r}, which is reserved for a file of the checkpoint; "
            "choose another name"
        )


def check_save_id(save_id: str) -> None:
    """Raise FormatError unless `save_id` can be part of a folder name."""
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(f"save id: got {save_id!r}, expected 1 to 64 ASCII letters, digits or _")


def index_name(part: str) -> str:
    """Return the index file of a part: `"model"` -> `"model.safetensors.index.json"`."""
    return f"{part}.safetensors.index.json"


def outliers_name(part: str) -> str:
    """Return the outliers file of a part: `"model"` -> `"model.exceptions.safetensors"`."""
    return f"{part}.exceptions.safetensors"


def replica_name(number: int) -> str:
    """Return the subfolder for a copy of node group `number`'s folder."""
    return f"{REPLICAS}/{number}"


def file_name(part: str, *, number: int, count: int) -> str:
    """Return the name of file `number`, from 1, of a part with `count` files."""
    return (
        f"{part}.safetensors" if count == 1 else f"{part}-{number:05d}-of-{count:05d}.safetensors"
    )


def staging_name(name: str, save_id: str) -> str:
    """Return the sibling in which the folder `name` is built; raises FormatError for a bad id."""
    check_save_id(save_id)
    return f"{_STAGING}{save_id}-{name}"


def trash_name(name: str, save_id: str) -> str:
    """Return the sibling in which the folder `name` is deleted.

    Others ignore it, as they do a staging folder. Raises FormatError for a bad id.
    """
    check_save_id(save_id)
    return staging_name(name, f"{_TRASH}{save_id}"[:64])


def commit_name(name: str) -> str:
    """Return the object that makes the save of checkpoint `name` certain, until it is published."""
    return f"{_COMMIT}{name}{_JSON}"


def committing_name(entry: str) -> str:
    """Return the checkpoint of a commit record; empty for other names."""
    is_record = entry.startswith(_COMMIT) and entry.endswith(_JSON)
    return entry[len(_COMMIT) : -len(_JSON)] if is_record else ""


def uploads_name(name: str, save_id: str) -> str:
    """Return the object that lists the uploads of a save; raises FormatError for a bad id."""
    check_save_id(save_id)
    return f"{UPLOADS_PREFIX}{save_id}-{name}{_JSON}"


def uploading_name(entry: str) -> str:
    """Return the checkpoint of a list of uploads; empty for other names."""
    return (_target_name(entry, UPLOADS_PREFIX) or "").removesuffix(_JSON)


def removal_name(name: str, save_id: str) -> str:
    """Return the object that lists the files of a removal; raises FormatError for a bad id."""
    check_save_id(save_id)
    return f"{_REMOVAL}{save_id}-{name}{_JSON}"


def removing_name(entry: str) -> str:
    """Return the checkpoint of a list of files to remove; empty for other names."""
    return (_target_name(entry, _REMOVAL) or "").removesuffix(_JSON)


def is_trash(entry: str) -> bool:
    """Return whether a directory entry is a folder being deleted."""
    return is_staging(entry) and entry.startswith(f"{_STAGING}{_TRASH}")


def replaced_name(name: str, save_id: str) -> str:
    """Return the sibling to which a replaced folder `name` is renamed.

    Raises FormatError for a bad id.
    """
    check_save_id(save_id)
    return f"{_REPLACED}{save_id}-{name}"


def backup_name(name: str, number: int, *, is_file: bool) -> str:
    """Return the sibling to which a user's `name` is renamed when a save needs the name.

    A file keeps its suffix.
    """
    stem, dot, suffix = (
        name.rpartition(".") if is_file and "." in name.strip(".") else (name, "", "")
    )
    return f"{stem}-before-{number}{dot}{suffix}"


def is_backup(entry: str) -> bool:
    """Return whether a directory entry has a name of `backup_name`."""
    return bool(_BACKUP.fullmatch(entry))


def original_name(entry: str) -> str:
    """Return the name a folder had before `backup_name`; empty for other names."""
    base, separator, number = entry.rpartition("-before-")
    return base if separator and number.isascii() and number.isdecimal() else ""


def is_staging(entry: str) -> bool:
    """Return whether a directory entry is a staging folder of any checkpoint."""
    return _target_name(entry, _STAGING) is not None


def is_sibling(entry: str, name: str) -> bool:
    """Return whether a directory entry is a staging or a replaced folder `name`."""
    return name in (_target_name(entry, _STAGING), _target_name(entry, _REPLACED))


def is_replaced(entry: str, name: str) -> bool:
    """Return whether a directory entry is a replaced folder `name`."""
    return _target_name(entry, _REPLACED) == name


def _target_name(entry: str, prefix: str) -> str | None:
    """Return the name of the checkpoint whose sibling an entry is; None for other entries."""
    save_id, _, name = entry.removeprefix(prefix).partition("-")
    return name if name and entry.startswith(prefix) and _SAVE_ID.fullmatch(save_id) else None

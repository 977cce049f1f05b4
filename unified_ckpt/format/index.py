"""The index of a part: which file holds which tensor, as Hugging Face writes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.format.json_text import is_unicode, parse_json


def encode_index(*, total_size: int, weight_map: Mapping[str, str]) -> bytes:
    """Return the same JSON bytes that transformers writes.

    Raises FormatError for a file name that `parse_index` would refuse.
    """
    for file in set(weight_map.values()):
        check_file_name(file)
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def parse_index(encoded: bytes, *, file: str) -> dict[str, str]:
    """Return the file name of each tensor.

    Raises FormatError, naming `file`, if the index is invalid or leaves the folder.
    """
    content = parse_json(encoded, file=file, constants=True)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise FormatError(
            f"{file}: got no weight_map, expected an object {{tensor name: file name}}"
        )
    weight_map: dict[str, str] = content["weight_map"]
    for name, value in weight_map.items():
        if not isinstance(value, str):
            raise FormatError(f"{file}: tensor {name!r}: got file {value!r}, expected a string")
    with error_prefix(file):
        for value in set(weight_map.values()):
            check_file_name(value)
    return weight_map


def is_stale(
    weight_map: Mapping[str, str], *, single: str, file_names: Collection[str], folder: str
) -> bool:
    """Return whether an index is of an older save whose files no longer exist.

    That is so if `single`, the unsharded file, is among `file_names`, since readers prefer it.
    Raises FormatError if files of both exist: transformers reads `single`, others the index.
    """
    others = set(weight_map.values()) - {single}
    if single not in file_names or not others:
        return False
    remaining = sorted(others & set(file_names))
    if remaining:
        raise FormatError(
            f"{folder}: got files of two saves ({single}, and {remaining[0]} from an index), "
            "expected one save; remove the files of the other"
        )
    return True


def check_file_name(name: str) -> None:
    """Raise FormatError unless `name` is a plain file name on every operating system."""
    if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
        raise FormatError(f"file name {name!r} leads out of the folder; expected a plain file name")
    if not is_unicode(name):
        raise FormatError(f"file name {name!a} is not valid Unicode; expected a plain file name")

"""The index of a part: which file holds which tensor, as Hugging Face writes it. Knows names only,
reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

from unified_ckpt.errors import FormatError
from unified_ckpt.format.json_text import parse_json


@dataclass(frozen=True, slots=True)
class Index:
    """`total_size` in bytes of tensors, or None where the writer left it out; `weight_map` tensor
    name -> file name.
    """

    total_size: int | None
    weight_map: dict[str, str]


def encode_index(*, total_size: int, weight_map: Mapping[str, str]) -> bytes:
    """The JSON that transformers writes, byte for byte. Raises FormatError for a file name that
    `parse_index` would refuse.
    """
    for file in set(weight_map.values()):
        check_file_name(file)
    # By hand, for `json.dumps` with an indent takes as long as all else that a save does for a
    # small tensor.
    files = {file: encode_basestring_ascii(file) for file in set(weight_map.values())}
    lines = ",\n".join(
        f"    {encode_basestring_ascii(name)}: {files[weight_map[name]]}"
        for name in sorted(weight_map)
    )
    names = f"{{\n{lines}\n  }}" if lines else "{}"
    return f'{{\n  "metadata": {{\n    "total_size": {total_size}\n  }},\n  "weight_map": {names}\n}}\n'.encode()


def parse_index(encoded: bytes, *, file: str) -> Index:
    """Raises FormatError naming `file` for anything but an index whose files lie beside it."""
    content = parse_json(encoded, file=file, constants=True)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise FormatError(f"{file}: no weight_map; needed an object {{tensor name: file name}}")
    weight_map = content["weight_map"]
    for name, value in weight_map.items():
        if not isinstance(value, str):
            raise FormatError(f"{file}: tensor {name!r} has the file {value!r}; needed a string")
    for value in set(weight_map.values()):
        try:
            check_file_name(value)
        except FormatError as error:
            raise FormatError(f"{file}: {error}") from None
    return Index(_total_size(content.get("metadata")), weight_map)


def is_stale(
    weight_map: Mapping[str, str], *, single: str, file_names: Collection[str], folder: str
) -> bool:
    """Whether an index is of an older save, whose files are gone: beside it is `single`, which
    readers take first. `file_names`: names of files.

    FormatError where files of both are there: transformers reads `single`, others go by the index.
    """
    others = set(weight_map.values()) - {single}
    if single not in file_names or not others:
        return False
    remaining = sorted(others & set(file_names))
    if remaining:
        raise FormatError(
            f"{folder}: has {single} and, of an index, {remaining[0]}: two saves in one folder; needed one, remove the other's files"
        )
    return True


def check_file_name(name: str) -> None:
    """Raises FormatError unless `name` is that of a file in the same folder, on every system."""
    if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
        raise FormatError(f"file name {name!r} leads out of the folder; needed a plain file name")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FormatError(
            f"file name {name!a} is no Unicode text; needed a plain file name"
        ) from None


def _total_size(metadata: object) -> int | None:
    # Only a hint for people: other writers leave it out, or write a float.
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return (
        int(total_size)
        if isinstance(total_size, int | float)
        and not isinstance(total_size, bool)
        and 0 <= total_size < 2**63
        else None
    )

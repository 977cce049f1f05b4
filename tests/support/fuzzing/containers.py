"""A folder as one byte string, a zip archive, and archives whose entries are changed."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

Files = dict[str, bytes]
_LATE = (1980, 1, 1, 0, 0, 0)  # equal folders give equal bytes


def pack(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return an archive of these files, in their order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression, compresslevel=1) as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, _LATE), body, compression)
    return stream.getvalue()


def unpack(packed: bytes, *, max_nbytes: int = 8 << 20) -> Files:
    """Return the files of an archive; {} for other bytes, and for names that leave a folder."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            infos = archive.infolist()
            if sum(info.file_size for info in infos) > max_nbytes:
                return {}
            files = {info.filename: archive.read(info) for info in infos}
    except Exception:  # a damaged archive may raise anything
        return {}
    return {} if any(not _is_inside(name) for name in files) else files


def _is_inside(name: str) -> bool:
    steps = name.split("/")
    return "\0" not in name and all(
        step not in ("", ".", "..") and len(step) < 200 for step in steps
    )


def write(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write the files; return the only entry, which is the checkpoint, or else the folder."""
    for name, body in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 else folder


def without_values(body: bytes) -> bytes:
    """Return a safetensors file or an archive of `torch.save` with zeros as elements.

    They compress well, and readers take most of their decisions without them.
    """
    if body.startswith(b"PK"):
        return edit_archive(
            body, lambda name, entry: bytes(len(entry)) if "/data/" in name else entry
        )
    if is_safetensors(body):
        start = 8 + int.from_bytes(body[:8], "little")
        return body[:start] + bytes(len(body) - start)
    return body


def edit_archive(body: bytes, edit: Callable[[str, bytes], bytes]) -> bytes:
    """Return an archive with each entry replaced by `edit(name, entry)`, with its right CRC."""
    files = unpack(body)
    return pack({name: edit(name, entry) for name, entry in files.items()}, zipfile.ZIP_STORED)


def is_safetensors(body: bytes) -> bool:
    """Return whether these bytes start with the length of a header, and an object."""
    return body[8:9] == b"{" and int.from_bytes(body[:8], "little") <= len(body) - 8


def with_header(body: bytes, text: bytes) -> bytes:
    """Return a safetensors file with another header."""
    start = 8 + int.from_bytes(body[:8], "little")
    return struct.pack("<Q", len(text)) + text + body[start:]


def header_text(body: bytes) -> bytes:
    """Return the JSON of a safetensors file."""
    return body[8 : 8 + int.from_bytes(body[:8], "little")].rstrip(b" ")

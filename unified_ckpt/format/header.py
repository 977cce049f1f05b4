"""The header of a safetensors file: which tensor lies in which bytes.

The format and its tensor order follow `safetensors/src/tensor.rs` of huggingface/safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from json.encoder import encode_basestring
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from unified_ckpt.core.sharding.dtypes import DTYPE_ORDER, ITEM_BITS, nbytes
from unified_ckpt.errors import FormatError, IntegrityError, error_prefix
from unified_ckpt.format.json_text import is_unicode, parse_json

MAX_HEADER_NBYTES = 100_000_000  # of the JSON; the safetensors library refuses more
PREFIX_NBYTES = 8
PT_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})

_METADATA = "__metadata__"
_MAX_DIMS = 255  # the product of millions of dims would take minutes
_MAX_INT = 2**63
_MAX_NUMEL = _MAX_INT // 16  # with zeros counted as ones: empty tensors have strides, too

_INTEGER = "(?:0|[1-9][0-9]{0,17})"
_CANONICAL_METADATA = '{"__metadata__":{"format":"pt"},'
_CANONICAL_ITEM = re.compile(
    r'"([^"\\\x00-\x1f]*)":{"dtype":"([A-Z0-9_]+)",'
    rf'"shape":\[((?:{_INTEGER}(?:,{_INTEGER})*)?)\],'
    rf'"data_offsets":\[({_INTEGER}),({_INTEGER})\]}}(?:,|}}\Z)'
)
_ITEM_LENGTH = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')  # beside its groups

TensorItem = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class Entry(NamedTuple):
    """One tensor of a header: row-major bytes [start, stop) of the file, unlike `data_offsets`.

    A tuple, which takes half the time of a dataclass: a load makes two for each tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def file_order(items: Iterable[TensorItem]) -> list[TensorItem]:
    """Sort items as the safetensors library does; `encode_header` refuses unknown dtypes."""
    # Code points and UTF-8 bytes sort equally, so str order is Rust's.
    return sorted(items, key=lambda item: (DTYPE_ORDER.get(item[1], -1), item[0]))


def encode_header(
    items: Iterable[TensorItem], *, metadata: Mapping[str, str] = PT_METADATA
) -> tuple[bytes, dict[str, Entry]]:
    """Return the header (prefix, JSON, padding) and entries of tensors laid out in the given order.

    If `items` come from `file_order`, the bytes are those that the safetensors library writes.
    Raises FormatError for a name that is reserved, repeated or not valid Unicode, and for a shape
    or dtype that no file can hold.
    """
    spec_cache: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}  # few specs, many names
    spans: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    texts = (
        [f'"{_METADATA}":' + json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))]
        if metadata
        else []
    )
    offset = 0
    for name, dtype, shape in items:
        if name in spans or name == _METADATA:
            problem = "a repeated" if name in spans else "the reserved"
            raise FormatError(f"tensor name: got {problem} name {name!r}, expected a unique name")
        encoded_spec = spec_cache.get((dtype, shape))
        if encoded_spec is None:
            encoded_spec = (
                _checked_nbytes(f"tensor {name!r}", dtype, shape),
                f'{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[',
            )
            spec_cache[dtype, shape] = encoded_spec
        tensor_nbytes, text = encoded_spec
        stop = offset + tensor_nbytes
        spans[name] = dtype, shape, offset, stop
        texts.append(f"{encode_basestring(name)}:{text}{offset},{stop}]}}")
        offset = stop
    try:
        body = ("{" + ",".join(texts) + "}").encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"tensor names and metadata: not valid Unicode: {error}") from None
    body += b" " * (-len(body) % 8)
    if len(body) > MAX_HEADER_NBYTES:
        raise FormatError(
            f"header: got {len(body)} bytes, expected at most {MAX_HEADER_NBYTES}; "
            "divide the tensors into more files"
        )
    data_start = PREFIX_NBYTES + len(body)
    entries = {
        name: Entry(dtype, shape, data_start + start, data_start + stop)
        for name, (dtype, shape, start, stop) in spans.items()
    }
    return len(body).to_bytes(PREFIX_NBYTES, "little") + body, entries


def file_nbytes(header_bytes: bytes, entries: Mapping[str, Entry]) -> int:
    """Return the bytes of a file with this header, as `encode_header` returns it."""
    return max((entry.stop for entry in entries.values()), default=len(header_bytes))


def header_nbytes(first8: bytes | bytearray | memoryview, *, file_size: int, file: str) -> int:
    """Return the bytes of prefix and JSON, from at least the first 8 bytes of a file.

    Raises FormatError if the file cannot have such a header.
    """
    if len(first8) < PREFIX_NBYTES:
        raise FormatError(
            f"{file}: got {len(first8)} bytes, expected at least {PREFIX_NBYTES} "
            "for a safetensors file"
        )
    json_nbytes = int.from_bytes(first8[:PREFIX_NBYTES], "little")
    if json_nbytes > MAX_HEADER_NBYTES:
        raise FormatError(
            f"{file}: got a header length of {json_nbytes} bytes, "
            f"expected at most {MAX_HEADER_NBYTES}; not a safetensors file"
        )
    if PREFIX_NBYTES + json_nbytes > file_size:
        raise FormatError(
            f"{file}: got a header length of {json_nbytes} bytes in a file of {file_size}; "
            "the file is truncated or not a safetensors file"
        )
    return PREFIX_NBYTES + json_nbytes


def parse_header(
    head: bytes | bytearray | memoryview, *, file_size: int, file: str
) -> dict[str, Entry]:
    """Return a file's entries by name, in the order of their bytes.

    `head` is at least the first `header_nbytes(...)` bytes of the file. Entries cover the file to
    its last byte. Raises FormatError, naming `file` and the tensor, for an invalid header, and
    IntegrityError for a valid header of a truncated file.
    """
    data_start = header_nbytes(head, file_size=file_size, file=file)
    if len(head) < data_start:
        raise FormatError(f"{file}: header: got {len(head)} bytes, expected {data_start}")
    body = bytes(head[PREFIX_NBYTES:data_start])
    canonical = _parse_canonical(body, data_start, file_size)
    if canonical is not None:
        return canonical
    tensors = parse_json(body, file=f"{file}: header")
    if not isinstance(tensors, dict):
        raise FormatError(
            f"{file}: header: got a JSON {type(tensors).__name__}, expected an object"
        )
    # Only an escape gives half of a surrogate pair. Rust has no text with one.
    if b"\\u" in body and not is_unicode(json.dumps(tensors, ensure_ascii=False)):
        raise FormatError(f"{file}: header: names or metadata are not valid Unicode")
    metadata = tensors.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{file}: header: {_METADATA} is not an object of strings")
    entries = {
        name: _parse_entry(name, fields, data_start, file) for name, fields in tensors.items()
    }
    in_order = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end, previous = data_start, "the header"
    for name, entry in in_order.items():
        if entry.start != end:
            problem = "overlaps" if entry.start < end else "leaves a gap after"
            raise FormatError(
                f"{file}: tensor {name!r} {problem} {previous}: "
                f"got start byte {entry.start}, expected {end}"
            )
        end, previous = entry.stop, f"tensor {name!r}"
    if file_size < end:
        raise IntegrityError(
            f"{file}: file is truncated: got {file_size} bytes, expected {end} from its header"
        )
    if file_size > end:
        raise FormatError(
            f"{file}: got {file_size} bytes, expected {end} from its header; "
            f"{file_size - end} bytes belong to no tensor"
        )
    return in_order


def _parse_canonical(body: bytes, data_start: int, file_size: int) -> dict[str, Entry] | None:
    """Return the entries of a header as this module and the safetensors library write it.

    Takes less than half the time of the general parser. Returns None for any other header, valid or
    not: the general parser decides.
    """
    try:
        text = body.decode().rstrip(" ")
    except UnicodeDecodeError:
        return None
    position = len(_CANONICAL_METADATA) if text.startswith(_CANONICAL_METADATA) else 1
    shape_cache: dict[tuple[str, str], tuple[tuple[int, ...], int] | None] = {}
    entries: dict[str, Entry] = {}
    end = 0
    items = _CANONICAL_ITEM.findall(text, position)
    for name, dtype, dims, low, high in items:
        if (dtype, dims) not in shape_cache:
            shape_cache[dtype, dims] = _canonical_shape(dtype, dims)
        sized_shape, start, stop = shape_cache[dtype, dims], int(low), int(high)
        if sized_shape is None or start != end or stop != start + sized_shape[1]:
            return None
        entries[name] = Entry(dtype, sized_shape[0], data_start + start, data_start + stop)
        end = stop
    # Items that follow each other without a gap have all of the text.
    items_length = sum(map(len, chain.from_iterable(items))) + len(items) * _ITEM_LENGTH
    if (
        not text.endswith("}}")
        or position + items_length != len(text)
        or text[0] != "{"
        or len(entries) < len(items)
        or _METADATA in entries
        or data_start + end != file_size
    ):
        return None
    return entries


def _canonical_shape(dtype: str, dims: str) -> tuple[tuple[int, ...], int] | None:
    """Return a shape and its bytes, or None if it is invalid."""
    shape = tuple(map(int, dims.split(","))) if dims else ()
    try:
        return (shape, nbytes(dtype, shape)) if _is_shape(shape) else None
    except FormatError:
        return None


def _checked_nbytes(tensor: str, dtype: str, shape: Any) -> int:
    """Return the bytes of a tensor. FormatError, naming it, for an invalid shape."""
    if not isinstance(shape, tuple | list) or not _is_shape(shape):
        raise FormatError(
            f"{tensor}: got shape {str(shape)[:200]}, "
            f"expected at most {_MAX_DIMS} integers from 0 with a product below 2**59"
        )
    with error_prefix(tensor):
        return nbytes(dtype, shape)


def _is_shape(dims: tuple[Any, ...] | list[Any]) -> bool:
    return (
        len(dims) <= _MAX_DIMS
        and all(map(_is_size, dims))
        and prod(dim or 1 for dim in dims) < _MAX_NUMEL
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _parse_entry(name: str, fields: Any, data_start: int, file: str) -> Entry:
    tensor = f"{file}: tensor {name!r}"
    if not isinstance(fields, dict) or not fields.keys() >= {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{tensor}: expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise FormatError(
            f"{tensor}: got unknown dtype {dtype!r}, expected one of {', '.join(ITEM_BITS)}"
        )
    needed = _checked_nbytes(tensor, dtype, shape)
    match offsets:
        case [start, stop] if _is_size(start) and _is_size(stop):
            pass
        case _:
            raise FormatError(
                f"{tensor}: got data_offsets {str(offsets)[:200]}, "
                "expected two integers from 0 to 2**63 - 1"
            )
    if start > stop:
        raise FormatError(f"{tensor}: got data_offsets {offsets}, expected start <= stop")
    if stop - start != needed:
        raise FormatError(
            f"{tensor}: got {stop - start} bytes from data_offsets, "
            f"expected {needed} for {dtype} of shape {tuple(shape)}"
        )
    return Entry(dtype, tuple(shape), data_start + start, data_start + stop)

"""Encodes Python values as tagged JSON that decodes to equal values of equal types. Never pickle.

Plain JSON stands for itself; everything else is an object `{"$type": tag, ...}`. A value that
cannot be restored exactly is refused, with its path. Bytes too large for JSON are returned to the
caller as blobs.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.format import blobs as blob_format
from unified_ckpt.format import scalars
from unified_ckpt.format.json_text import is_unicode, parse_json

INLINE_NBYTES = 1024  # longer byte strings become blobs
MAX_DEPTH = 64  # a level may need three levels of JSON, and JSON libraries fail at about 250

Path = tuple[Any, ...]  # name of the root, then keys and positions

_TAG = "$type"
_MAGIC = b"UCPACK01"
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, int, float, set, str, tuple, bool, bytes)
}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS = (dict, Counter, OrderedDict, defaultdict)
SEQUENCES = (list, tuple, deque)
_CONTAINERS = frozenset({list, dict, Counter, OrderedDict, defaultdict, *_SEQUENCES.values()})
_DECODE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    RuntimeError,
    AttributeError,
    ImportError,
    SyntaxError,
    struct.error,
)


def encode(value: Any, path: str = "extra") -> tuple[Any, dict[str, Any]]:
    """Return a tree for `json.dumps`, and the blobs it refers to by name.

    Blobs are tensors, arrays and long byte strings, not copied; their names are paths under `path`.
    Raises FormatError with the path of a value that cannot be restored exactly: functions, objects,
    subclasses, cycles.
    """
    encoder = _Encoder()
    return encoder.encode(value, (path,)), encoder.blobs


def decode(tree: Any, blobs: Mapping[str, Any], *, path: str = "extra") -> Any:
    """Return the encoded value.

    A blob is the object itself or its raw row-major bytes; tensors made from bytes are on the CPU.
    Raises FormatError with the path of anything that `encode` cannot have written.
    """
    return _Decoder(blobs).decode(tree, (path,))


def pack(value: Any, path: str = "rank_extra") -> bytes:
    """Return a value as one byte string: magic, u64 length of the JSON, JSON, blobs."""
    return pack_encoded(*encode(value, path))


def pack_encoded(tree: Any, blobs: Mapping[str, Any]) -> bytes:
    """Return what `encode` returned as one byte string."""
    parts = {name: blob_format.raw_bytes(blob) for name, blob in blobs.items()}
    header = json.dumps(
        {"tree": tree, "blobs": {name: part.nbytes for name, part in parts.items()}},
        separators=(",", ":"),
    ).encode()
    return b"".join([_MAGIC, struct.pack("<Q", len(header)), header, *parts.values()])


def unpack(packed: blob_format.Buffer, path: str = "rank_extra") -> Any:
    """Return the value of `pack`; raises FormatError for other bytes."""
    view = memoryview(packed)
    header_start = len(_MAGIC) + 8
    if len(view) < header_start or view[: len(_MAGIC)] != _MAGIC:
        start = bytes(view[: len(_MAGIC)])
        raise FormatError(
            f"{path}: got {len(view)} bytes that start with {start!r}, "
            f"expected a packed value that starts with {_MAGIC!r}"
        )
    offset = header_start + int.from_bytes(view[len(_MAGIC) : header_start], "little")
    try:
        header = parse_json(view[header_start:offset], file=f"{path}: header of the packed value")
        tree, sizes = header["tree"], header["blobs"].items()
    except (*_DECODE_ERRORS, RecursionError) as error:
        raise FormatError(f"{path}: header of the packed value is not valid: {error}") from None
    blobs = {}
    for name, nbytes in sizes:
        if type(nbytes) is not int or nbytes < 0:
            raise FormatError(
                f"{path}: blob {name!r}: got size {nbytes!r}, expected an integer from 0"
            )
        blobs[name] = view[offset : offset + nbytes]
        offset += nbytes
    if offset != len(view):
        raise FormatError(
            f"{path}: packed value: got {len(view)} bytes, expected {offset} from its header"
        )
    return decode(tree, blobs, path=path)


class _Encoder:
    """Collects blobs, and detects cycles by the ids of the containers being encoded."""

    def __init__(self) -> None:
        self.blobs: dict[str, Any] = {}
        self._open_ids: set[int] = set()

    def encode(self, value: Any, path: Path) -> Any:
        if type(value) in _CONTAINERS or _is_size(value):
            return self._container(value, path)
        try:
            node = blob_format.describe(value)
            if node is not None:
                return self._blob(node, value, path)
            leaf = scalars.encode(value)
        except FormatError as error:
            raise FormatError(f"{path_text(path)}: {error}; remove it from {path[0]}") from None
        if leaf is NotImplemented:
            raise FormatError(
                f"{path_text(path)}: got {_kind_text(type(value))}, "
                "expected plain values, containers, arrays or tensors; "
                f"remove it from {path[0]}, or pass what it can be rebuilt from"
            )
        return leaf

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._open_ids:
            raise FormatError(
                f"{path_text(path)}: got {_kind_text(type(value))} that contains itself, "
                "expected a tree"
            )
        if len(path) > MAX_DEPTH:
            raise FormatError(
                f"{path_text(path)}: nested deeper than {MAX_DEPTH} levels; pass a flatter value"
            )
        self._open_ids.add(id(value))
        node = (
            self._mapping(value, path) if isinstance(value, dict) else self._sequence(value, path)
        )
        self._open_ids.remove(id(value))
        return node

    def _mapping(self, value: dict[Any, Any], path: Path) -> Any:
        kind = type(value)
        if (
            kind is dict
            and _TAG not in value
            and all(type(key) is str and is_unicode(key) for key in value)
        ):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        node: dict[str, Any] = {_TAG: kind.__name__}
        if isinstance(value, defaultdict):
            node["factory"] = self._factory(value.default_factory, path)
        node["items"] = [
            [self._key(key, path), self.encode(item, (*path, key))] for key, item in value.items()
        ]
        return node

    def _key(self, key: Any, path: Path) -> Any:
        count = len(self.blobs)
        node = self.encode(key, (*path, key))
        if len(self.blobs) > count and not all(
            isinstance(blob, bytes) for blob in list(self.blobs.values())[count:]
        ):
            raise FormatError(
                f"{path_text(path)}: got a tensor in a key or a set, where it is equal to itself "
                "only, expected values"
            )
        return node

    def _factory(self, factory: Any, path: Path) -> str | None:
        name = getattr(factory, "__name__", None)
        if factory is not None and _FACTORIES.get(str(name)) is not factory:
            raise FormatError(
                f"{path_text(path)}: got a defaultdict with factory {factory!r}, "
                f"expected one of {', '.join(_FACTORIES)}; pass a dict"
            )
        return name

    def _sequence(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            items = [self._key(item, path) for item in value]
            items.sort(key=json.dumps)  # sets have no order; equal sets give equal trees
            return {_TAG: kind.__name__, "items": items}
        items = [self.encode(item, (*path, position)) for position, item in enumerate(value)]
        if kind is list:
            return items
        if kind is deque:
            return {_TAG: "deque", "maxlen": value.maxlen, "items": items}
        return {_TAG: "tuple" if kind is tuple else "torch.Size", "items": items}

    def _blob(self, node: dict[str, Any], value: Any, path: Path) -> dict[str, Any]:
        if isinstance(value, bytes | bytearray | io.BytesIO):
            view = blob_format.raw_bytes(value)
            if view.nbytes <= INLINE_NBYTES:
                return {**node, "base64": base64.b64encode(view).decode()}
        path_name = "/".join(
            key if isinstance(key, str) and is_unicode(key) else ascii(key) for key in path
        )
        name, count = path_name, 1
        while name in self.blobs:  # {"a/b": x, "a": {"b": y}}
            count += 1
            name = f"{path_name}~{count}"
        self.blobs[name] = value
        return {**node, "blob": name}


class _Decoder:
    def __init__(self, blobs: Mapping[str, Any]) -> None:
        self._blobs = blobs

    def decode(self, node: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH + 1:
            raise FormatError(f"{path_text(path)}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return [self.decode(item, (*path, position)) for position, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if _TAG not in node:
            return {key: self.decode(item, (*path, key)) for key, item in node.items()}
        tag = node[_TAG]
        try:
            return self._tagged(str(tag), node, path)
        except _DECODE_ERRORS as error:
            raise FormatError(
                f"{path_text(path)}: {tag} is not valid: {type(error).__name__}: {error}"
            ) from None

    def _tagged(self, tag: str, node: dict[str, Any], path: Path) -> Any:
        try:
            leaf = self._leaf(tag, node)
        except FormatError as error:
            raise FormatError(f"{path_text(path)}: {error}") from None
        if leaf is not NotImplemented:
            return leaf
        if tag == "defaultdict" or tag in _MAPPINGS:
            return self._mapping(tag, node, path)
        if tag not in _SEQUENCES and tag != "torch.Size":
            raise FormatError(
                f"{path_text(path)}: got unknown $type {tag!r}; "
                "install the version of unified_ckpt that wrote it, or newer"
            )
        items = [
            self.decode(item, (*path, position))
            for position, item in enumerate(_require_list(node["items"]))
        ]
        if tag == "torch.Size":
            import torch

            return torch.Size(items)
        container = deque(items, node["maxlen"]) if tag == "deque" else _SEQUENCES[tag](items)
        if len(container) != len(items):
            raise FormatError(
                f"{path_text(path)}: {tag}: got {len(items)} items, "
                f"of which {len(container)} are distinct or fit"
            )
        return container

    def _leaf(self, tag: str, node: dict[str, Any]) -> Any:
        if tag not in ("bytes", "bytearray", "BytesIO", "numpy.ndarray", "torch.Tensor"):
            return scalars.decode(tag, node["value"]) if "value" in node else NotImplemented
        if "base64" in node:
            return blob_format.restore(node, base64.b64decode(node["base64"], validate=True))
        name = node["blob"]
        if name not in self._blobs:
            raise FormatError(f"blob {name!r} is missing")
        return blob_format.restore(node, self._blobs[name])

    def _mapping(self, tag: str, node: dict[str, Any], path: Path) -> Any:
        items = {}
        pairs = _require_list(node["items"])
        for position, (key, item) in enumerate(pairs):
            decoded_key = self.decode(key, (*path, position))
            items[decoded_key] = self.decode(item, (*path, decoded_key))
        if len(items) != len(pairs):
            raise FormatError(
                f"{path_text(path)}: {tag}: got {len(pairs)} items with {len(items)} keys, "
                "expected distinct keys"
            )
        if tag == "defaultdict":
            return defaultdict(
                None if node["factory"] is None else _FACTORIES[node["factory"]], items
            )
        return _MAPPINGS[tag](items)


def path_text(path: Path) -> str:
    """Return a path as text: `("extra", "rates", 0)` -> `"extra.rates[0]"`."""
    steps = (
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{ascii(key)[:80]}]"
        for key in path[1:]
    )
    return str(path[0]) + "".join(steps)


def _kind_text(kind: type) -> str:
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _is_size(value: Any) -> bool:
    torch = blob_format.if_imported("torch")
    return torch is not None and type(value) is torch.Size


def _require_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"got {type(value).__name__}, expected a list")
    return value

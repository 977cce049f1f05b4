"""Encodes values without children; types that JSON lacks become `{"$type": tag, "value": …}`.

Types are compared exactly: a subclass is another type, and not encoded here.
"""

from __future__ import annotations

import base64
import math
import pathlib
import struct
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.format import blobs
from unified_ckpt.format.json_text import is_unicode

_INT_BITS = 63  # JSON readers may round or refuse larger integers
_NAN_BITS = struct.pack(">d", math.nan).hex()


def encode(value: Any) -> Any:
    """Return the JSON of a value without children, or NotImplemented for other types.

    Raises FormatError for a value of a supported type that cannot be restored exactly.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind in _ENCODE:
        return _ENCODE[kind](value)
    if kind.__name__ in _PATHS and kind is getattr(pathlib, kind.__name__):
        return _tagged("pathlib", [kind.__name__, str(value)])
    return _encode_foreign(value)


def decode(tag: str, value: Any) -> Any:
    """Return the value that `encode` tagged, or NotImplemented for an unknown tag.

    Raises FormatError, TypeError, ValueError and similar for an invalid value.
    """
    return _DECODE[tag](value) if tag in _DECODE else NotImplemented


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {"$type": tag, "value": value}


def _float_text(value: float) -> str:
    # float.hex() contains "x" and "p", so 16 hex digits can only be the bits of a NaN.
    bits = struct.pack(">d", value).hex()
    return bits if math.isnan(value) and bits != _NAN_BITS else value.hex()


def _float(text: str) -> float:
    if len(text) != len(_NAN_BITS) or not set(text) <= set("0123456789abcdef"):
        return float.fromhex(text)
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _encode_str(value: str) -> Any:
    return (
        value
        if is_unicode(value)
        else _tagged("str", _base64(value.encode(errors="surrogatepass")))
    )


def _encode_datetime(value: datetime) -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise FormatError(
            f"got a datetime with tzinfo {value.tzinfo!r}, expected none or a datetime.timezone"
        )
    return _tagged("datetime", value.isoformat())


def _encode_foreign(value: Any) -> Any:
    numpy, torch = blobs.if_imported("numpy"), blobs.if_imported("torch")
    kind = type(value)
    if numpy is not None and isinstance(value, numpy.dtype):
        blobs.check_numpy_dtype(value)
        return _tagged("numpy.dtype", value.str)
    # A user's subclass of a numpy type differs from the type of its dtype.
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.type is kind:
        return _encode_numpy(value)
    if torch is not None and kind is torch.dtype:
        return _tagged("torch.dtype", blobs.torch_name(value))
    if torch is not None and kind is torch.device:
        return _tagged("torch.device", str(value))
    return NotImplemented


def _encode_numpy(value: Any) -> dict[str, Any]:
    # Text is encoded separately: numpy arrays drop its trailing zeros.
    if isinstance(value, str):
        return _tagged("numpy.str_", _base64(value.encode(errors="surrogatepass")))
    if isinstance(value, bytes):
        return _tagged("numpy.bytes_", _base64(bytes(value)))
    if blobs.numpy_dtype(value.dtype.str).type is not type(value):  # longlong, where int64 is long
        raise FormatError(
            f"got a numpy {type(value).__name__}, "
            f"expected a type of fixed width such as {value.dtype.name}"
        )
    return _tagged("numpy.scalar", [value.dtype.str, _base64(value.tobytes())])


def _numpy_scalar(value: list[Any]) -> Any:
    dtype, stored = value
    node = {"$type": "numpy.ndarray", "dtype": dtype, "shape": []}
    return blobs.restore(node, _unbase64(stored))[()]


def _numpy_text(name: str, value: str) -> Any:
    import numpy

    stored = _unbase64(value)
    return (
        numpy.str_(stored.decode(errors="surrogatepass"))
        if name == "str_"
        else numpy.bytes_(stored)
    )


def _torch_device(value: str) -> Any:
    import torch

    return torch.device(str(value))


def _path(value: list[str]) -> pathlib.PurePath:
    name, text = value
    if name not in _PATHS:
        raise ValueError(f"got unknown path class {name!r}")
    path: pathlib.PurePath
    try:
        path = getattr(pathlib, name)(text)
    except NotImplementedError:  # another system's path can only be a pure one
        path = getattr(pathlib, f"Pure{name}")(text)
    return path


def _base64(stored: bytes) -> str:
    return base64.b64encode(stored).decode()


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_ENCODE: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if value.bit_length() <= _INT_BITS else _tagged("int", hex(value)),
    float: lambda value: value if math.isfinite(value) else _tagged("float", _float_text(value)),
    str: _encode_str,
    complex: lambda value: _tagged("complex", [_float_text(value.real), _float_text(value.imag)]),
    range: lambda value: _tagged(
        "range", [hex(bound) for bound in (value.start, value.stop, value.step)]
    ),
    datetime: _encode_datetime,
    date: lambda value: _tagged("date", value.isoformat()),
    timedelta: lambda value: _tagged("timedelta", [value.days, value.seconds, value.microseconds]),
}
_DECODE: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value, 16),
    "float": _float,
    "str": lambda value: _unbase64(value).decode(errors="surrogatepass"),
    "complex": lambda value: complex(_float(value[0]), _float(value[1])),
    "range": lambda value: range(*(int(bound, 16) for bound in value)),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": lambda value: timedelta(*value),
    "pathlib": _path,
    "numpy.dtype": blobs.numpy_dtype,
    "numpy.scalar": _numpy_scalar,
    "numpy.str_": lambda value: _numpy_text("str_", value),
    "numpy.bytes_": lambda value: _numpy_text("bytes_", value),
    "torch.dtype": blobs.torch_dtype,
    "torch.device": _torch_device,
}

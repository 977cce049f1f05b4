"""The JSON parser for manifests, indexes, headers and other formats.

RFC 8259 does not define which of two equal keys counts, so one flipped bit in a name could drop an
entry silently. Repeated keys are therefore refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from unified_ckpt.errors import FormatError


def parse_json(
    body: bytes | bytearray | memoryview | str, *, file: str, constants: bool = False
) -> Any:
    """Return the value of a UTF-8 JSON text.

    `constants`: accept NaN and Infinity, which Python writes although JSON lacks them, and numbers
    beyond the range of a double. Integers may have up to 4,300 digits: check them before use.
    Raises FormatError, naming `file`, for invalid JSON and for an object that repeats a key.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            key = next(
                name for name, count in Counter(name for name, _ in pairs).items() if count > 1
            )
            raise FormatError(
                f"{file}: got key {key!a} twice in one object, expected it once; "
                "the file is damaged"
            )
        return fields

    hooks: dict[str, Any] = {"object_pairs_hook": reject_duplicates}
    if not constants:
        hooks |= {"parse_constant": _reject_constant, "parse_float": _parse_finite}
    try:
        return json.loads(body if isinstance(body, str) else bytes(body).decode(), **hooks)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not valid JSON: {error}") from None


def is_unicode(text: str) -> bool:
    """Return whether text can be encoded as UTF-8; lone surrogates of os.fsdecode cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is out of range for a double")
    return value

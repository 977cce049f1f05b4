"""JSON out of a file: the one parser for manifests, indexes, headers and the JSON of other formats.
Reads no file.

RFC 8259 leaves open which of two equal keys counts, so one flipped bit in a name can drop an entry
without an error. Both are refused.
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
    """The value of a UTF-8 JSON text. FormatError naming `file` for invalid JSON and for a key that
    an object has twice.

    `constants`: accept NaN and Infinity, which Python's writers produce and JSON lacks. Numbers
    beyond a double are refused without it. Integers have any size up to 4,300 digits: check them
    where they are used.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            key = next(
                name for name, count in Counter(name for name, _ in pairs).items() if count > 1
            )
            raise FormatError(
                f"{file}: key {key!a} occurs twice in one object; needed each once: the file is damaged"
            )
        return fields

    text = body if isinstance(body, str) else bytes(body)
    try:
        text = text if isinstance(text, str) else text.decode()
        if constants:
            return json.loads(text, object_pairs_hook=reject_duplicates)
        return json.loads(
            text,
            object_pairs_hook=reject_duplicates,
            parse_constant=_reject_constant,
            parse_float=_parse_finite,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not valid JSON: {error}") from None


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond a double")
    return value

"""Encodes the JSON that ranks send through the store."""

from __future__ import annotations

import json
import zlib
from typing import Any

_COMPRESSED_NBYTES = 1 << 16  # from here on, compression costs less than sending


def encode_json(value: object) -> bytes:
    """Encode a value as JSON, compressed if it is large."""
    body = json.dumps(value).encode()
    return body if len(body) < _COMPRESSED_NBYTES else zlib.compress(body, 1)


def decode_json(body: bytes) -> Any:
    """Decode what `encode_json` returned."""
    return json.loads(zlib.decompress(body) if body.startswith(b"x") else body)  # never in JSON

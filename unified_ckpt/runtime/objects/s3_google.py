"""Conditional writes to Google Cloud Storage by its S3 API.

It ignores the conditions of S3 on writes, and has conditions on an object's generation instead. It
refuses these beside the headers of an AWS signature. So such a request is signed anew, by Google's
variant of the same signature.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import reduce
from typing import Any
from urllib.parse import urlsplit

GOOGLE_ENDPOINT = "https://storage.googleapis.com"
_REPLACED = {"authorization", "if-match", "if-none-match"}
_PAYLOAD = "UNSIGNED-PAYLOAD"  # TLS protects it


def generation(answer: Any) -> str:
    """Return the generation of an object from the answer to a HEAD, or "" for another store."""
    return str(answer["ResponseMetadata"]["HTTPHeaders"].get("x-goog-generation", ""))


class GenerationSigner:
    """A hook of the SDK's client: turns an If-Match of a generation into Google's condition.

    `credentials`: returns the access key and the secret key.
    """

    def __init__(self, credentials: Callable[[], tuple[str, str]], region: str) -> None:
        self._credentials, self._region = credentials, region

    def __call__(self, request: Any, **_: object) -> None:
        """Sign a prepared request anew, if it has a condition."""
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        if "if-none-match" in headers:
            expected = "0"  # no object
        elif "if-match" in headers:
            expected = headers["if-match"].strip('"')
        else:
            return
        for name in list(request.headers):
            if name.lower().startswith("x-amz-") or name.lower() in _REPLACED:
                del request.headers[name]
        access_key, secret_key = self._credentials()
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        signed = {
            "host": urlsplit(request.url).netloc,
            "x-goog-content-sha256": _PAYLOAD,
            "x-goog-date": now,
            "x-goog-if-generation-match": expected,
        }
        scope = (now[:8], self._region, "storage", "goog4_request")
        digest = hashlib.sha256(canonical_request(request.method, request.url, signed).encode())
        text = "\n".join(["GOOG4-HMAC-SHA256", now, "/".join(scope), digest.hexdigest()])
        signature = sign(f"GOOG4{secret_key}", scope, text)
        names = ";".join(signed)
        request.headers.update({name: signed[name] for name in signed if name != "host"})
        request.headers["Authorization"] = (
            f"GOOG4-HMAC-SHA256 Credential={access_key}/{'/'.join(scope)}, "
            f"SignedHeaders={names}, Signature={signature}"
        )


def canonical_request(method: str, url: str, headers: Mapping[str, str]) -> str:
    """Return the text of a request without a query that is signed; headers are lower and sorted."""
    lines = [f"{name}:{value}" for name, value in headers.items()]
    return "\n".join([method, urlsplit(url).path, "", *lines, "", ";".join(headers), _PAYLOAD])


def sign(key: str, scope: tuple[str, ...], text: str) -> str:
    """Return the signature of a text by a key that is derived for a scope."""
    derived = reduce(_hmac, scope, key.encode())
    return _hmac(derived, text).hex()


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

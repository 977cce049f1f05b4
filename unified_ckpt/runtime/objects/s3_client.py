"""Clients of the AWS SDK, botocore, for one bucket: credentials, endpoint, connections, bodies.

The low-level client signs, connects and parses. It never retries: its retries cover no body of an
answer, and their time has no limit. Payloads are not hashed a second time where TLS protects them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from unified_ckpt.runtime.objects.s3_google import GOOGLE_ENDPOINT, GenerationSigner
from unified_ckpt.runtime.objects.store import Buffer
from unified_ckpt.runtime.packages import missing_package
from unified_ckpt.storage_options import StorageOptions

try:
    import botocore.session
    from botocore.config import Config
except ImportError as error:
    raise missing_package("s3:// and gs://", error, extra="s3") from error

_CONNECTIONS = 64
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a verb may take. In seconds, but for counts.

    An attempt waits at most `read_seconds` for each piece of an answer, or `complete_seconds` for
    the answer of a Complete. No attempt begins after `total_seconds`.
    """

    attempts: int = 10
    total_seconds: float = 180.0
    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 30.0
    connect_seconds: float = 10.0
    read_seconds: float = 60.0
    complete_seconds: float = 300.0
    page_keys: int = 1000  # of a listing


@dataclass(slots=True)
class _State:
    """The clients of one process: a fork must not share connections."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: Any = None  # reads the SDK's files once
    clients: dict[float, Any] = field(default_factory=dict)  # by their read timeout


class Clients:
    """Makes the clients of a bucket when they are first asked for. Safe for threads and forks."""

    def __init__(self, options: StorageOptions, limits: Limits, *, is_google: bool) -> None:
        self._options, self._limits, self._is_google = options, limits, is_google
        self._state = _State()

    def get(self, read_seconds: float) -> Any:
        """Return the client that waits this long for each piece of an answer."""
        state = self._current()
        with state.lock:
            client = state.clients.get(read_seconds)
            if client is None:
                if state.session is None:
                    state.session = botocore.session.Session(profile=self._options.profile)
                client = self._connect(state.session, read_seconds)
                state.clients[read_seconds] = client
            return client

    def renew(self) -> None:
        """Read the credentials anew for the next request: those of files may have changed."""
        self._state = _State()

    def close(self) -> None:
        """Close the connections of this process."""
        state = self._current()
        with state.lock:
            for client in state.clients.values():
                client.close()
            state.clients.clear()

    def _current(self) -> _State:
        if self._state.pid != os.getpid():
            self._state = _State()
        return self._state

    def _endpoint(self, session: Any) -> str | None:
        """Return the endpoint that is set, here or in the SDK's environment, or None for AWS."""
        configured = session.get_scoped_config()
        section = session.full_config.get("services", {}).get(configured.get("services"), {})
        return (
            self._options.endpoint
            or (GOOGLE_ENDPOINT if self._is_google else None)
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or section.get("s3", {}).get("endpoint_url")
            or configured.get("endpoint_url")
        )

    def _region(self, session: Any) -> str | None:
        """Return the region. Of the variables, the SDK for Python reads AWS_DEFAULT_REGION only."""
        if self._options.region or self._is_google:
            return self._options.region or "auto"
        return session.get_config_variable("region") or os.environ.get("AWS_REGION")

    def _s3_config(self, session: Any) -> dict[str, object]:
        """Return how URLs name the bucket, and whether payloads are hashed for the signature."""
        endpoint, style = self._endpoint(session), self._options.path_style
        configured = session.get_scoped_config().get("s3") or {}
        config: dict[str, object] = dict(configured)
        if style is None and endpoint and "addressing_style" not in configured:
            style = ".amazonaws.com" not in endpoint
        if style is not None:
            config["addressing_style"] = "path" if style else "virtual"
        parts = urlsplit(endpoint or "https:")
        if parts.scheme == "https" or parts.hostname in _LOOPBACK:
            config["payload_signing_enabled"] = False
        return config

    def _connect(self, session: Any, read_seconds: float) -> Any:
        options, limits = self._options, self._limits
        config = Config(
            s3=self._s3_config(session),
            signature_version=botocore.UNSIGNED if options.anonymous else "s3v4",
            retries={"total_max_attempts": 1},
            connect_timeout=limits.connect_seconds,
            read_timeout=read_seconds,
            max_pool_connections=_CONNECTIONS,
            tcp_keepalive=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="unified-ckpt",
        )
        endpoint = options.endpoint or (GOOGLE_ENDPOINT if self._is_google else None)
        client = session.create_client(
            "s3",
            config=config,
            endpoint_url=endpoint,
            region_name=self._region(session),
            aws_access_key_id=_text(options.access_key),
            aws_secret_access_key=_text(options.secret_key),
            aws_session_token=_text(options.session_token),
        )
        client.meta.events.register("before-send.s3.UploadPart", _send_buffers)
        if self._is_google:
            signer = GenerationSigner(lambda: self._keys(session), self._region(session) or "auto")
            client.meta.events.register("before-send.s3.PutObject", signer)
            client.meta.events.register("before-send.s3.DeleteObject", signer)
        return client

    def _keys(self, session: Any) -> tuple[str, str]:
        """Return the access key and the secret key that the client uses."""
        access_key, secret_key = _text(self._options.access_key), _text(self._options.secret_key)
        if access_key and secret_key:
            return access_key, secret_key
        found = session.get_credentials().get_frozen_credentials()
        return found.access_key, found.secret_key


class PartBody:
    """The body of a part: file-like, as the SDK asks for, over buffers that are not copied."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = [memoryview(buffer).cast("B") for buffer in buffers]
        self._length = sum(map(len, self.buffers))
        self._position = 0

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(1 << 20), b"")

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as io.IOBase does."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes: only to hash a payload that no TLS protects."""
        stop = self._length if nbytes is None or nbytes < 0 else self._position + nbytes
        pieces, start = [], 0
        for buffer in self.buffers:
            pieces.append(buffer[max(self._position - start, 0) : max(stop - start, 0)])
            start += len(buffer)
        data = b"".join(pieces)
        self._position += len(data)
        return data


def _send_buffers(request: Any, **_: object) -> None:
    """Send the buffers as they are: a file-like body would be read in pieces of 16 KiB."""
    if isinstance(request.body, PartBody):
        request.body = request.body.buffers


def _text(secret: Any) -> str | None:
    return None if secret is None else str(secret.get_secret_value())

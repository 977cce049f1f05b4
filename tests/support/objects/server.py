"""A small S3 server over a `MemoryBucket`, whose answers fail as a test asks.

It speaks as much S3 as the library's client uses, and the dialect of Google Cloud Storage.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from tests.support.objects.faults import Fault
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.store import (
    ConditionUnsupportedError,
    ObjectStat,
    ReplacedError,
    UploadGoneError,
)
from unified_ckpt.storage_options import StorageOptions


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Received:
    """A request: what a test may look at."""

    operation: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


class ResetError(Exception):
    """The connection is to be reset."""


class MemoryServer(ThreadingHTTPServer):
    """Serves one bucket. `requests`: all that were received; `faults`: those still to come.

    `google`: conditions are on generations, in requests without headers of AWS; others are ignored.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bucket: MemoryBucket, *, google: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bucket, self.google = bucket, google
        self.store = MemoryStore(bucket)
        self.requests: list[Received] = []
        self.faults: list[Fault] = []
        self.options = StorageOptions(
            endpoint=f"http://127.0.0.1:{self.server_address[1]}",
            region="us-east-1",
            access_key="access",
            secret_key="secret",
        )

    def operations(self) -> list[str]:
        """The names of the operations that were received."""
        return [request.operation for request in self.requests]

    def next_fault(self, operation: str) -> Fault | None:
        for fault in self.faults:
            if fault.operation == operation and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def generation(self, key: str) -> int:
        """The number of objects that a key has had; 0 without an object."""
        return len(self.bucket.versions[key]) if self.bucket.current(key) else 0


@contextlib.contextmanager
def memory_server(
    bucket: MemoryBucket | None = None, *, google: bool = False
) -> Iterator[MemoryServer]:
    """A running server; ended with the context."""
    server = MemoryServer(bucket or MemoryBucket(), google=google)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


OPERATIONS = {
    ("PUT", "uploadId"): "UploadPart",
    ("PUT", ""): "PutObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("DELETE", ""): "DeleteObject",
    ("HEAD", ""): "HeadObject",
    ("GET", ""): "GetObject",
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "uploads"): "ListMultipartUploads",
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer with a body takes 40 ms
    server: MemoryServer

    def log_message(self, *arguments: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        return True  # sent when the body is read

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ResetError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                # The reset is sent now: closing does not wait for a client to read.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.rfile.close()
                self.connection.close()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def respond(self) -> None:
        path, _, query_text = self.path.partition("?")
        query = {k: v[0] for k, v in parse_qs(query_text, keep_blank_values=True).items()}
        kind = next((name for name in ("uploadId", "uploads", "list-type") if name in query), "")
        key = unquote(path).split("/", 2)[2] if path.count("/") > 1 else ""
        operation = OPERATIONS[self.command, kind]
        if operation == "HeadObject" and not key:
            operation = "HeadBucket"  # the SDK looks for the bucket's region after an HTTP 400
        received = Received(
            operation, self.command, self.path, {k.lower(): v for k, v in self.headers.items()}
        )
        self.server.requests.append(received)
        fault = self.server.next_fault(operation)
        failure = fault.kind if fault else ""
        if failure == "reset before the body":
            raise ResetError
        received.body = self.read_body(stop_early=failure == "reset in the body")
        if failure == "reset after the body":
            raise ResetError
        if fault and failure in ("error", "error in 200"):
            status = 200 if failure == "error in 200" else fault.status
            answer = self.error(status, fault.code, "a fault of the test")
        else:
            answer = self.answer(received, key, query)
        if failure == "lost answer":
            raise ResetError
        if fault and failure == "late":
            time.sleep(fault.seconds)
        self.send(answer, failure, fault.seconds if fault else 0.0)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = respond  # noqa: N815

    def read_body(self, *, stop_early: bool) -> bytes:
        nbytes = int(self.headers.get("content-length", 0))
        assert "transfer-encoding" not in self.headers
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if stop_early:
            self.rfile.read(nbytes // 2)
            raise ResetError
        return self.rfile.read(nbytes)

    def send(self, answer: Answer, failure: str, seconds: float) -> None:
        body = bytearray(answer.body)
        if failure == "wrong":
            body[len(body) // 2] ^= 1
        length = answer.headers.pop("content-length", str(len(body)))
        self.send_response(answer.status)
        headers = {"x-amz-request-id": "REQUEST", "content-length": length, **answer.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if failure in ("short", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            time.sleep(seconds)
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str, message: str = "") -> Answer:
        text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        return self.xml(text, status)

    def xml(self, text: str, status: int = 200) -> Answer:
        return Answer(status, text.encode(), {"content-type": "application/xml"})

    def answer(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        mixed = {name[:6] for name in request.headers} >= {"x-amz-", "x-goog"}
        if self.server.google and mixed:
            text = "Requests cannot specify both x-amz and x-goog headers"
            return self.error(400, "ExcessHeaderValues", text)
        try:
            with self.server.bucket.lock:
                method = getattr(self, re.sub(r"(?<!^)(?=[A-Z])", "_", request.operation).lower())
                result: Answer = method(request, key, query)
                return result
        except UploadGoneError:
            return self.error(404, "NoSuchUpload")
        except ReplacedError:
            return self.error(412, "PreconditionFailed")
        except NotFoundError:
            return self.error(404, "NoSuchKey")
        except ConditionUnsupportedError:
            return self.error(501, "NotImplemented")
        except StorageError as error:
            return self.error(400, str(error).rpartition(": ")[2])

    # objects

    def put_object(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        self.check_conditions(request, key)
        return Answer(headers={"etag": f'"{self.server.store.put(key, request.body)}"'})

    def delete_object(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        self.check_conditions(request, key)
        self.server.store.delete(key)
        return Answer(204)

    def check_conditions(self, request: Received, key: str) -> None:
        """Raise what the bucket's conditions, or those of Google, make of a request."""
        bucket, headers = self.server.bucket, request.headers
        if self.server.google:
            generation = headers.get("x-goog-if-generation-match")
            if generation is not None and int(generation) != self.server.generation(key):
                raise ReplacedError("PreconditionFailed")
            return
        current = bucket.current(key)
        for name, kind in (("if-match", bucket.if_match), ("if-none-match", bucket.if_absent)):
            if name not in headers or kind == "ignored":
                continue
            if kind == "rejected":
                raise ConditionUnsupportedError("NotImplemented")
            if name == "if-none-match" and current is not None:
                raise ReplacedError("PreconditionFailed")
            if name == "if-match" and current is None:
                raise NotFoundError("NoSuchKey")
            if name == "if-match" and current and headers[name].strip('"') != current.stat.etag:
                raise ReplacedError("PreconditionFailed")

    def head_bucket(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        return Answer(headers={"x-amz-bucket-region": "us-east-1"})

    def head_object(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        current = self.server.bucket.current(key)
        if current is None:
            return Answer(404)
        headers = self.object_headers(key, current.stat)
        if current.label:
            headers["x-amz-meta-unified-upload"] = current.label
        return Answer(headers=headers)

    def get_object(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        body, etag = self.server.store.get(key)
        expected = request.headers.get("if-match", "").strip('"')
        if expected and expected != etag and self.server.bucket.if_match == "honored":
            raise ReplacedError("PreconditionFailed")
        stat = self.server.store.stat(key)
        assert stat is not None
        headers = self.object_headers(key, stat)
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if not span:
            return Answer(200, body, headers)
        start, stop = int(span[1]), min(int(span[2]) + 1, len(body))
        if start >= len(body):
            return self.error(416, "InvalidRange")
        headers["content-length"] = str(stop - start)
        headers["content-range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        return Answer(206, body[start:stop], headers)

    def object_headers(self, key: str, stat: ObjectStat) -> dict[str, str]:
        headers = {
            "etag": f'"{stat.etag}"',
            "last-modified": formatdate(stat.modified, usegmt=True),
            "content-length": str(stat.nbytes),
        }
        if self.server.google:
            headers["x-goog-generation"] = str(self.server.generation(key))
        return headers

    # uploads

    def create_multipart_upload(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        label = request.headers.get("x-amz-meta-unified-upload", "")
        upload_id = self.server.store.begin(key, label=label)
        return self.xml(
            f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )

    def upload_part(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        buffers = [memoryview(request.body)]
        number = int(query["partNumber"])
        etag = self.server.store.put_part(key, query["uploadId"], number, buffers)
        return Answer(headers={"etag": f'"{etag}"'})

    def complete_multipart_upload(
        self, request: Received, key: str, query: dict[str, str]
    ) -> Answer:
        if query["uploadId"] not in {each.id for each in self.server.bucket.open_uploads()}:
            raise UploadGoneError("NoSuchUpload")
        parts = ET.fromstring(request.body)
        etags = [each.text.strip('"') for each in parts.iterfind(".//{*}ETag") if each.text]
        etag = self.server.store.complete(key, query["uploadId"], etags)
        return self.xml(
            f"<CompleteMultipartUploadResult><ETag>&quot;{etag}&quot;</ETag>"
            "</CompleteMultipartUploadResult>"
        )

    def abort_multipart_upload(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        if query["uploadId"] not in {each.id for each in self.server.bucket.open_uploads()}:
            raise UploadGoneError("NoSuchUpload")
        self.server.store.abort(key, query["uploadId"])
        return Answer(204)

    # listings

    def list_objects_v2(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        listing = self.server.store.list(query["prefix"], recursive="delimiter" not in query)
        entries = sorted([*listing.objects, *listing.folders])
        after, limit = query.get("continuation-token", ""), int(query["max-keys"])
        page = [entry for entry in entries if entry > after][:limit]
        texts = []
        for entry in page:
            stat = listing.objects.get(entry)
            name = quote(entry, safe="/")
            texts.append(
                f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
                if stat is None
                else f"<Contents><Key>{name}</Key><Size>{stat.nbytes}</Size>"
                f"<ETag>&quot;{stat.etag}&quot;</ETag>"
                f"<LastModified>{iso(stat.modified)}</LastModified></Contents>"
            )
        if page and page[-1] != entries[-1]:
            texts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        return self.page(
            "ListBucketResult", texts, truncated=bool(page) and page[-1] != entries[-1]
        )

    def list_multipart_uploads(self, request: Received, key: str, query: dict[str, str]) -> Answer:
        uploads = sorted(
            (u.key, u.id, u.started) for u in self.server.store.uploads(query["prefix"])
        )
        after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        page = [each for each in uploads if each[:2] > after][: int(query["max-uploads"])]
        texts = [
            f"<Upload><Key>{quote(key, safe='/')}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{iso(started)}</Initiated></Upload>"
            for key, upload_id, started in page
        ]
        is_truncated = bool(page) and page[-1] != uploads[-1]
        if is_truncated:
            texts.append(f"<NextKeyMarker>{quote(page[-1][0], safe='/')}</NextKeyMarker>")
            texts.append(f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>")
        return self.page("ListMultipartUploadsResult", texts, truncated=is_truncated)

    def page(self, name: str, texts: list[str], *, truncated: bool) -> Answer:
        flags = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
        encoding = "<EncodingType>url</EncodingType>"
        return self.xml(f"<{name}>{flags}{encoding}{''.join(texts)}</{name}>")


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

"""An S3 server that costs as little as possible, for benchmarks of clients.

It keeps small objects, and drops the bytes of parts below `sink/`; other objects it keeps whole.
ETags of parts are numbers, not digests: the store's work must not hide the client's.
"""

import hashlib
import itertools
import re
import socket
import sys
import threading
import time
from email.utils import formatdate
from urllib.parse import parse_qs, unquote

SCRATCH_NBYTES = 1 << 20
OBJECTS: dict[str, memoryview] = {}
ETAGS: dict[str, str] = {}
UPLOADS: dict[str, tuple[str, dict[int, tuple[str, memoryview]]]] = {}
NUMBERS = itertools.count(1)
COUNTS: dict[str, int] = {}
LOCK = threading.Lock()


def etag_of(body: memoryview) -> str:
    return hashlib.md5(body).hexdigest() if len(body) < 1 << 20 else f"{next(NUMBERS):032x}"


class Connection:
    """One connection: requests, one after another."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.file = connection, connection.makefile("rb", 1 << 16)
        self.scratch = memoryview(bytearray(SCRATCH_NBYTES))

    def serve(self) -> None:
        try:
            while line := self.file.readline():
                method, target, _ = line.decode().split(" ", 2)
                headers = {}
                while (text := self.file.readline()) != b"\r\n":
                    name, _, value = text.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                if "100-continue" in headers.get("expect", "").lower():
                    self.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                path, _, text = target.partition("?")
                query = {k: v[0] for k, v in parse_qs(text, keep_blank_values=True).items()}
                key = "/".join(unquote(path).split("/")[2:])
                with LOCK:
                    name = f"{method} {'part' if 'partNumber' in query else ''}".strip()
                    COUNTS[name] = COUNTS.get(name, 0) + 1
                getattr(self, method.lower())(key, query, headers)
        except (ConnectionError, ValueError):
            pass
        finally:
            self.file.close()
            self.socket.close()

    def body(self, headers: dict[str, str], *, dropped: bool = False) -> memoryview:
        nbytes = int(headers.get("content-length", 0))
        if dropped:
            left = nbytes
            while left:
                left -= self.file.readinto(self.scratch[: min(left, SCRATCH_NBYTES)])
            return memoryview(bytes(0))
        buffer, done = memoryview(bytearray(nbytes)), 0
        while done < nbytes:
            done += self.file.readinto(buffer[done:])
        return buffer

    def answer(
        self, status: str, body: bytes | memoryview = b"", length: int | None = None, **more: str
    ) -> None:
        headers = {"content-length": str(len(body) if length is None else length), **more}
        text = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.socket.sendall(f"HTTP/1.1 {status}\r\n{text}\r\n".encode())
        if len(body):
            self.socket.sendall(body)

    def put(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        if "partNumber" in query:
            body = self.body(headers, dropped=key.startswith("sink/"))
            etag = f"{next(NUMBERS):032x}"
            UPLOADS[query["uploadId"]][1][int(query["partNumber"])] = etag, body
            return self.answer("200 OK", etag=f'"{etag}"')
        body = self.body(headers)
        with LOCK:
            current = ETAGS.get(key, "")
            expected = headers.get("if-match", "").strip('"')
            if ("if-none-match" in headers and current) or (expected and current != expected):
                error = b"<Error><Code>PreconditionFailed</Code></Error>"
                return self.answer("412 Precondition Failed", error)
            OBJECTS[key], ETAGS[key] = body, etag_of(body)
        return self.answer("200 OK", etag=f'"{ETAGS[key]}"')

    def post(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        text = bytes(self.body(headers)).decode()
        if "uploads" in query:
            upload_id = f"upload{next(NUMBERS)}"
            UPLOADS[upload_id] = key, {}
            return self.xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
        _, parts = UPLOADS.pop(query["uploadId"])
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)<", text)]
        etags = b"".join(bytes.fromhex(parts[number][0]) for number in numbers)
        ETAGS[key] = f"{hashlib.md5(etags).hexdigest()}-{len(numbers)}"
        bodies = [parts[number][1] for number in numbers]
        OBJECTS[key] = bodies[0] if len(bodies) == 1 else memoryview(b"".join(bodies))
        return self.xml("CompleteMultipartUploadResult", f"<ETag>{ETAGS[key]}</ETag>")

    def delete(self, key: str, query: dict[str, str], _: dict[str, str]) -> None:
        if "uploadId" in query:
            UPLOADS.pop(query["uploadId"], None)
        else:
            OBJECTS.pop(key, None)
            ETAGS.pop(key, None)
        self.answer("204 No Content")

    def head(self, key: str, _: dict[str, str], __: dict[str, str]) -> None:
        if key not in OBJECTS:
            return self.answer("404 Not Found")
        return self.answer("200 OK", length=len(OBJECTS[key]), **self.object_headers(key))

    def get(self, key: str, query: dict[str, str], headers: dict[str, str]) -> None:
        if key == "counts":
            with LOCK:
                text, _ = repr(COUNTS), COUNTS.clear()
            return self.answer("200 OK", text.encode(), etag='"1"')
        if "uploads" in query:
            return self.xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
        if "list-type" in query:
            return self.listing(query.get("prefix", ""), query.get("delimiter", ""))
        if key not in OBJECTS:
            return self.answer("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
        body = OBJECTS[key]
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if span is None:
            return self.answer("200 OK", body, **self.object_headers(key))
        start, stop = int(span[1]), min(int(span[2]) + 1, len(body))
        return self.answer(
            "206 Partial Content",
            body[start:stop],
            content_range=f"bytes {start}-{stop - 1}/{len(body)}",
            **self.object_headers(key),
        )

    def listing(self, prefix: str, delimiter: str) -> None:
        keys = sorted(key for key in list(OBJECTS) if key.startswith(prefix))
        inner = [key for key in keys if not delimiter or delimiter not in key[len(prefix) :]]
        rest = {key[len(prefix) :].partition("/")[0] for key in set(keys) - set(inner)}
        text = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f'<ETag>"{ETAGS[key]}"</ETag><Size>{len(OBJECTS[key])}</Size></Contents>'
            for key in inner
        ) + "".join(
            f"<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>"
            for name in sorted(rest)
        )
        self.xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{text}")

    def xml(self, name: str, text: str) -> None:
        self.answer("200 OK", f"<{name}>{text}</{name}>".encode())

    def object_headers(self, key: str) -> dict[str, str]:
        date = formatdate(time.time(), usegmt=True)
        return {"etag": f'"{ETAGS[key]}"', "last_modified": date}


def main() -> None:
    server = socket.create_server(("127.0.0.1", 0), backlog=512)
    sys.stdout.write(f"{server.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        connection = Connection(server.accept()[0])
        threading.Thread(target=connection.serve, daemon=True).start()


if __name__ == "__main__":
    main()

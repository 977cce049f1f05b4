"""What only the client of S3 does: processes, bodies, and what its requests look like."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.credentials import Credentials
from botocore.httpsession import URLLib3Session

from tests.support.objects.server import MemoryServer, memory_server
from unified_ckpt.runtime.objects.s3 import S3Store
from unified_ckpt.runtime.objects.s3_google import canonical_request, sign
from unified_ckpt.runtime.objects.store import RequestFailedError
from unified_ckpt.storage_options import StorageOptions


def test_a_forked_process_has_connections_of_its_own(moto: StorageOptions) -> None:
    """A process and its child put parts of one upload by one client."""
    store, key = S3Store("s3://bucket", moto), "fork/k"
    upload_id = store.begin(key)

    def put_second() -> None:
        store.put_part(key, upload_id, 2, [memoryview(b"child")])

    child = multiprocessing.get_context("fork").Process(target=put_second)
    child.start()
    first = store.put_part(key, upload_id, 1, [memoryview(b"parent")])
    child.join(60)
    assert child.exitcode == 0
    second = hashlib.md5(b"child").hexdigest()
    store.complete(key, upload_id, [first, second])
    assert store.get(key)[0] == b"parentchild"


def test_parts_are_sent_as_they_are(server: MemoryServer) -> None:
    """Neither hashed nor copied nor chunked, over TLS and on loopback."""
    source = bytearray(os.urandom(3_000_000))
    views = [memoryview(source)[1_000_000:], memoryview(source)[:1_000_000]]
    store = S3Store("s3://bucket", server.options)
    upload_id = store.begin("k")
    etag = store.put_part("k", upload_id, 1, views)
    request = server.requests[-1]
    assert request.headers["content-length"] == "3000000"
    assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert request.headers["expect"] == "100-continue"
    assert not [name for name in request.headers if "checksum" in name or "transfer" in name]
    assert etag == hashlib.md5(b"".join(views)).hexdigest()


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    with memory_server() as server:
        yield server


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate and its key for 127.0.0.1, in one file."""
    file = tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext"
    names = ["subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", str(file) + ".crt"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


def test_parts_and_ranges_go_over_tls(
    server: MemoryServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    port = server.server_address[1]
    options = server.options.model_copy(update={"endpoint": f"https://127.0.0.1:{port}"})
    with pytest.raises(RequestFailedError, match=r"AWS_CA_BUNDLE.*1 attempt"):
        S3Store("s3://bucket", options).get("k")
    monkeypatch.setenv("AWS_CA_BUNDLE", f"{certificate}.crt")
    store, body = S3Store("s3://bucket", options), os.urandom(3_000_000)
    upload_id = store.begin("k")
    views = [memoryview(body)[:7], memoryview(body)[7:]]
    store.complete("k", upload_id, [store.put_part("k", upload_id, 1, views)])
    into = bytearray(2_000_000)
    store.get_range("k", 999_999, memoryview(into))
    assert into == body[999_999:2_999_999]
    sent = [each for each in server.requests if each.operation == "UploadPart"]
    assert sent[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_payloads_are_hashed_for_other_hosts_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    request = recorded("s3://bucket", StorageOptions(endpoint="http://store.example", **KEYS))
    assert request.headers["X-Amz-Content-SHA256"].decode() == hashlib.sha256(b"ab").hexdigest()
    assert request.body == [b"a", b"b"]


KEYS: dict[str, Any] = {"access_key": "ACCESS", "secret_key": "SECRET"}


def recorded(url: str, options: StorageOptions) -> Any:
    """The request of a part of two buffers, which is not sent."""
    sent = []

    def send(self: URLLib3Session, request: Any) -> Any:
        sent.append(request)
        return AWSResponse(request.url, 200, {"ETag": '"etag"'}, io.BytesIO())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(URLLib3Session, "send", send)
        patch.setattr(AWSResponse, "content", b"")
        store = S3Store(url, options)
        assert store.put_part("run/k", "id", 1, [memoryview(b"a"), memoryview(b"b")]) == "etag"
    return sent[0]


@pytest.mark.parametrize(
    ("url", "values", "environment", "expected"),
    [
        ("s3://bkt", {"region": "eu-west-1"}, {}, "https://bkt.s3.eu-west-1.amazonaws.com/run/k"),
        (
            "s3://bkt",
            {},
            {"AWS_REGION": "eu-west-2"},
            "https://bkt.s3.eu-west-2.amazonaws.com/run/k",
        ),
        ("s3://bk.t", {"region": "eu-west-1"}, {}, "https://s3.eu-west-1.amazonaws.com/bk.t/run/k"),
        ("s3://bkt", {"endpoint": "https://minio.test"}, {}, "https://minio.test/bkt/run/k"),
        (
            "s3://bkt",
            {"endpoint": "https://minio.test", "path_style": False},
            {},
            "https://bkt.minio.test/run/k",
        ),
        ("s3://bkt", {}, {"AWS_ENDPOINT_URL_S3": "https://r2.test"}, "https://r2.test/bkt/run/k"),
        ("s3://bkt", {}, {"AWS_ENDPOINT_URL": "https://r2.test"}, "https://r2.test/bkt/run/k"),
        (
            "s3://bkt",
            {"region": "eu-west-1", "path_style": True},
            {},
            "https://s3.eu-west-1.amazonaws.com/bkt/run/k",
        ),
        ("gs://bkt", {}, {}, "https://storage.googleapis.com/bkt/run/k"),
        (
            "gs://bkt",
            {},
            {"AWS_ENDPOINT_URL_S3": "https://r2.test"},
            "https://storage.googleapis.com/bkt/run/k",
        ),
    ],
)
def test_url_of_a_request(
    url: str,
    values: dict[str, Any],
    environment: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    request = recorded(url, StorageOptions(**values, **KEYS))
    assert request.url.partition("?")[0] == expected
    assert request.headers["X-Amz-Content-SHA256"] == b"UNSIGNED-PAYLOAD"


def test_google_gets_a_condition_on_the_generation() -> None:
    """Signed by Google's variant of AWS's signature, without a header of AWS."""
    with memory_server(google=True) as server:
        store = S3Store("gs://bucket", server.options)
        etag = store.put("run/é k", b"first", if_absent=True)
        assert etag
        first = server.requests[-1]
        assert first.headers["x-goog-if-generation-match"] == "0"
        assert store.put("run/é k", b"second", if_match=etag)
        assert server.requests[-1].headers["x-goog-if-generation-match"] == "1"
        for request in server.requests:
            conditional = "x-goog-if-generation-match" in request.headers
            assert conditional != any(name.startswith("x-amz-") for name in request.headers)
    assert first.headers["authorization"].startswith(
        f"GOOG4-HMAC-SHA256 Credential=access/{first.headers['x-goog-date'][:8]}/us-east-1/storage/"
        "goog4_request, SignedHeaders=host;x-goog-content-sha256;x-goog-date;"
        "x-goog-if-generation-match, Signature="
    )


def test_google_signature_is_built_as_that_of_aws() -> None:
    """Only names differ: botocore, told Google's, makes the same text and the same signature."""
    url = "https://storage.googleapis.com/bucket/run/%C3%A9%20k"
    headers = {
        "host": "storage.googleapis.com",
        "x-goog-content-sha256": "UNSIGNED-PAYLOAD",
        "x-goog-date": "20261129T010203Z",
        "x-goog-if-generation-match": "7",
    }
    auth = S3SigV4Auth(Credentials("ACCESS", "SECRET"), "storage", "auto")
    request = AWSRequest("PUT", url, headers=headers)
    request.context["timestamp"] = headers["x-goog-date"]
    request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
    with_aws = auth.canonical_request(request)
    ours = canonical_request("PUT", url, headers)
    extra = "x-amz-content-sha256:UNSIGNED-PAYLOAD\n"
    assert with_aws.replace(extra, "").replace("x-amz-content-sha256;", "") == ours
    scope = ("20261129", "auto", "storage", "aws4_request")
    assert sign("AWS4SECRET", scope, "text") == auth.signature("text", request)


def test_a_small_part_is_refused_once(server: MemoryServer) -> None:
    server.bucket.min_part_nbytes = 100
    store = S3Store("s3://bucket", server.options)
    upload_id = store.begin("run/k")
    etags = [store.put_part("run/k", upload_id, n, [memoryview(b"small")]) for n in (1, 2)]
    with pytest.raises(RequestFailedError, match=r"run/k: complete: .*EntityTooSmall.*1 attempt"):
        store.complete("run/k", upload_id, etags)

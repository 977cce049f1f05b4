"""Bad days of the client of S3: each ends in bounded time, in right bytes or the right error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.objects.faults import Fault
from tests.support.objects.server import MemoryServer, memory_server
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.s3 import S3Store
from unified_ckpt.runtime.objects.s3_client import Limits
from unified_ckpt.runtime.objects.store import (
    ConditionUnsupportedError,
    RequestFailedError,
    UploadGoneError,
)
from unified_ckpt.storage_options import StorageOptions

LIMITS = Limits(
    attempts=4,
    total_seconds=20,
    first_delay_seconds=0.01,
    read_seconds=0.5,
    complete_seconds=0.5,
)
LATE = 0.9  # seconds: more than `read_seconds`
ENDLESS = 1_000_000
BODY = random.Random(0).randbytes(300_000)
PARTS = [BODY[:100_000], BODY[100_000:]]


@dataclass
class Day:
    """A store with an object at "run/object" and an upload to "run/upload"."""

    server: MemoryServer
    store: S3Store
    etag: str = ""
    upload_id: str = ""
    etags: list[str] = field(default_factory=list)

    def prepare(self) -> None:
        self.etag = self.store.put("run/object", BODY) or ""
        self.upload_id = self.store.begin("run/upload")
        for number, part in enumerate(PARTS, 1):
            view = [memoryview(part)]
            self.etags.append(self.store.put_part("run/upload", self.upload_id, number, view))
        self.server.requests.clear()

    def stored(self, key: str) -> bytes | None:
        return self.server.bucket.bodies().get(key)


@pytest.fixture(scope="module")
def running() -> Iterator[Day]:
    with memory_server() as server:
        yield Day(server, S3Store("s3://bucket", server.options, limits=LIMITS))


@pytest.fixture
def day(running: Day) -> Day:
    server = running.server
    server.bucket.versions.clear()
    server.bucket.uploads.clear()
    server.faults.clear()
    day = Day(server, running.store)
    day.prepare()
    return day


def put(day: Day) -> None:
    assert day.store.put("run/new", b"new")
    assert day.stored("run/new") == b"new"


def put_if_absent(day: Day) -> None:
    assert day.store.put("run/new", b"new", if_absent=True)
    assert day.stored("run/new") == b"new"


def put_if_match(day: Day) -> None:
    assert day.store.put("run/object", b"new", if_match=day.etag)
    assert day.stored("run/object") == b"new"


def get(day: Day) -> None:
    assert day.store.get("run/object") == (BODY, day.etag)


def get_range(day: Day) -> None:
    into = bytearray(len(BODY) - 7)
    day.store.get_range("run/object", 7, memoryview(into), etag=day.etag)
    assert into == BODY[7:]


def stat(day: Day) -> None:
    found = day.store.stat("run/object")
    assert found is not None
    assert (found.nbytes, found.etag) == (len(BODY), day.etag)


def list_keys(day: Day) -> None:
    assert set(day.store.list("run/").objects) == {"run/object"}


def delete(day: Day) -> None:
    assert day.store.delete("run/object")
    assert day.stored("run/object") is None


def delete_if_match(day: Day) -> None:
    assert day.store.delete("run/object", if_match=day.etag)
    assert day.stored("run/object") is None


def begin(day: Day) -> None:
    upload_id = day.store.begin("run/new")
    assert upload_id in {each.id for each in day.server.bucket.open_uploads()}


def put_part(day: Day) -> None:
    etag = day.store.put_part("run/upload", day.upload_id, 2, [memoryview(PARTS[1])])
    assert etag == day.etags[1]
    assert day.store.complete("run/upload", day.upload_id, day.etags)
    assert day.stored("run/upload") == BODY


def complete(day: Day) -> None:
    etag = day.store.complete("run/upload", day.upload_id, day.etags)
    assert etag.endswith("-2")
    assert day.stored("run/upload") == BODY


def abort(day: Day) -> None:
    day.store.abort("run/upload", day.upload_id)
    assert day.server.bucket.open_uploads() == []


def uploads(day: Day) -> None:
    assert [each.id for each in day.store.uploads("run/")] == [day.upload_id]


VERBS: dict[Callable[[Day], None], str] = {
    put: "PutObject",
    put_if_absent: "PutObject",
    put_if_match: "PutObject",
    get: "GetObject",
    get_range: "GetObject",
    stat: "HeadObject",
    list_keys: "ListObjectsV2",
    delete: "DeleteObject",
    delete_if_match: "DeleteObject",
    begin: "CreateMultipartUpload",
    put_part: "UploadPart",
    complete: "CompleteMultipartUpload",
    abort: "AbortMultipartUpload",
    uploads: "ListMultipartUploads",
}
TRANSIENT = {
    "500": Fault("", "error"),
    "503": Fault("", "error", status=503, code="SlowDown"),
    "429": Fault("", "error", status=429, code="TooManyRequests"),
    "408": Fault("", "error", status=408, code="RequestTimeout"),
    "400": Fault("", "error", status=400, code="RequestTimeout"),
    "409": Fault("", "error", status=409, code="ConditionalRequestConflict"),
    "before": Fault("", "reset before the body"),
    "in": Fault("", "reset in the body"),
    "after": Fault("", "reset after the body"),
    "lost": Fault("", "lost answer"),
}
NAMED_BY_CODE = {"400", "409"}  # a HEAD's answer has no code
WITH_A_BODY = {"ListObjectsV2", "ListMultipartUploads", "GetObject", "CompleteMultipartUpload"}


def named(verbs: object) -> list[object]:
    return [pytest.param(verb, id=verb.__name__) for verb in verbs]  # type: ignore[attr-defined]


def few(verbs: Iterable[Callable[[Day], None]], default: set[Callable[[Day], None]]) -> list[Any]:
    """The verbs; those that are not run by default are slow."""
    return [
        pytest.param(verb, id=verb.__name__, marks=[] if verb in default else pytest.mark.slow)
        for verb in verbs
    ]


@pytest.mark.parametrize("verb", named(VERBS))
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("503", "lost") else pytest.param(name, marks=pytest.mark.slow)
        for name in TRANSIENT
    ],
)
def test_a_verb_outlives_two_faults(day: Day, verb: Callable[[Day], None], name: str) -> None:
    operation = VERBS[verb]
    day.server.faults = [replace(TRANSIENT[name], operation=operation, times=2)]
    if verb is stat and name in NAMED_BY_CODE:
        day.server.faults[0].times = ENDLESS
        with pytest.raises(RequestFailedError, match=f"HTTP {name}"):
            verb(day)
        return
    verb(day)
    assert day.server.faults[0].times == 0
    assert day.server.operations().count(operation) == 3


@pytest.mark.parametrize("verb", few(VERBS, {get_range, put_part, complete, put_if_match}))
def test_a_verb_outlives_a_late_answer(day: Day, verb: Callable[[Day], None]) -> None:
    """The request may have had its effect."""
    day.server.faults = [Fault(VERBS[verb], "late", seconds=LATE)]
    verb(day)
    assert day.server.operations().count(VERBS[verb]) == 2


VERBS_WITH_A_BODY = [verb for verb, operation in VERBS.items() if operation in WITH_A_BODY]


@pytest.mark.parametrize("verb", named(VERBS_WITH_A_BODY))
def test_a_verb_outlives_a_short_answer(day: Day, verb: Callable[[Day], None]) -> None:
    day.server.faults = [Fault(VERBS[verb], "short")]
    verb(day)
    assert day.server.operations().count(VERBS[verb]) == 2


@pytest.mark.parametrize("verb", few(VERBS_WITH_A_BODY, {get_range, complete}))
def test_a_verb_outlives_a_stalled_answer(day: Day, verb: Callable[[Day], None]) -> None:
    day.server.faults = [Fault(VERBS[verb], "stalled", seconds=LATE)]
    verb(day)
    assert day.server.operations().count(VERBS[verb]) == 2


def test_complete_outlives_an_error_in_a_200(day: Day) -> None:
    day.server.faults = [Fault("CompleteMultipartUpload", "error in 200", times=2)]
    complete(day)
    assert day.server.operations().count("CompleteMultipartUpload") == 3


def test_complete_sees_the_end_of_an_upload_in_a_200(day: Day) -> None:
    fault = Fault("CompleteMultipartUpload", "error in 200", times=ENDLESS, code="NoSuchUpload")
    day.server.faults = [fault]
    with pytest.raises(UploadGoneError, match="run/upload"):
        complete(day)
    assert day.server.operations() == ["CompleteMultipartUpload", "HeadObject"]


@pytest.mark.parametrize("verb", named([put_if_absent, put_if_match]))
def test_a_lost_answer_is_not_taken_for_ours(day: Day, verb: Callable[[Day], None]) -> None:
    """A condition fails on a retry, and the stored bytes are another writer's."""
    server, key = day.server, "run/new" if verb is put_if_absent else "run/object"
    server.faults = [Fault("PutObject", "reset before the body")]

    fault = server.next_fault

    def next_fault(operation: str) -> Fault | None:
        found = fault(operation)
        if found:
            server.store.put(key, b"another's")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "next_fault", next_fault)
        if verb is put_if_absent:
            assert day.store.put(key, b"new", if_absent=True) is None
        else:
            assert day.store.put(key, b"new", if_match=day.etag) is None
    assert day.stored(key) == b"another's"


@pytest.mark.parametrize("verb", named(VERBS))
def test_an_endless_fault_ends_in_an_error(day: Day, verb: Callable[[Day], None]) -> None:
    operation = VERBS[verb]
    day.server.faults = [Fault(operation, "error", ENDLESS, status=503, code="SlowDown")]
    with pytest.raises(RequestFailedError) as caught:
        verb(day)
    text = str(caught.value)
    part = " 2" if verb is put_part else ""
    verb_name = verb.__name__.removesuffix("_keys").partition("_if")[0]
    assert text.startswith("s3://bucket/run")
    reason = "SlowDown: a fault of the test; request REQUEST"
    expected = "HTTP 503: Service Unavailable" if verb is stat else f"HTTP 503 {reason}"
    assert f": {verb_name}{part}: {expected} (" in text
    assert "(4 attempts in " in text
    assert day.server.operations().count(operation) == 4


@pytest.mark.parametrize(
    "kind",
    [
        "reset before the body",
        "reset in the body",
        pytest.param("late", marks=pytest.mark.slow),
    ],
)
def test_an_endless_fault_of_the_network_ends(day: Day, kind: str) -> None:
    seconds = LATE if kind == "late" else 0.0
    day.server.faults = [Fault("UploadPart", kind, ENDLESS, seconds=seconds)]  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(RequestFailedError, match=r"run/upload: put_part 2: .*4 attempts"):
        put_part(day)
    assert time.monotonic() - started < 10


def test_a_verb_ends_after_its_seconds(day: Day) -> None:
    limits = Limits(attempts=ENDLESS, total_seconds=1.0, first_delay_seconds=0.1)
    store = S3Store("s3://bucket", day.server.options, limits=limits)
    day.server.faults = [Fault("GetObject", "error", ENDLESS)]
    started = time.monotonic()
    with pytest.raises(RequestFailedError, match="InternalError"):
        store.get("run/object")
    assert time.monotonic() - started < 5


PERMISSIONS = {
    put: "s3:PutObject",
    get: "s3:GetObject, and s3:ListBucket",
    get_range: "s3:GetObject, and s3:ListBucket",
    stat: "s3:GetObject, and s3:ListBucket",
    list_keys: "s3:ListBucket",
    delete: "s3:DeleteObject",
    begin: "s3:PutObject",
    put_part: "s3:PutObject",
    complete: "s3:PutObject",
    abort: "s3:AbortMultipartUpload",
    uploads: "s3:ListBucketMultipartUploads",
}


@pytest.mark.parametrize("verb", named(PERMISSIONS))
def test_a_missing_permission_is_named(day: Day, verb: Callable[[Day], None]) -> None:
    operation = VERBS[verb]
    day.server.faults = [Fault(operation, "error", ENDLESS, status=403, code="AccessDenied")]
    with pytest.raises(RequestFailedError, match=f"the credentials need {PERMISSIONS[verb]}"):
        verb(day)
    assert day.server.operations().count(operation) == 1


@pytest.mark.parametrize(
    ("code", "status", "text", "requests"),
    [
        ("NoSuchBucket", 404, "create the bucket, or correct its name", 1),
        ("RequestTimeTooSkewed", 403, "this machine's clock is wrong; correct it", 1),
        ("InvalidAccessKeyId", 403, "the store does not know the access key", 1),
        ("SignatureDoesNotMatch", 403, "the secret key is wrong, or the region", 1),
        ("ExpiredToken", 400, "the credentials have expired; renew them", 2),
        ("NotImplemented", 501, "HTTP 501 NotImplemented", 1),
        ("InvalidRequest", 400, "HTTP 400 InvalidRequest", 1),
    ],
)
def test_a_final_error_says_what_to_do(
    day: Day, code: str, status: int, text: str, requests: int
) -> None:
    day.server.faults = [Fault("PutObject", "error", ENDLESS, status=status, code=code)]
    with pytest.raises(RequestFailedError, match=f"s3://bucket/run/new: put: .*{text}") as caught:
        put(day)
    assert not isinstance(caught.value, NotFoundError)
    assert day.server.operations() == ["PutObject"] * requests


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("SignatureDoesNotMatch", 403, "the secret key is wrong, or the region"),
        ("InvalidAccessKeyId", 403, "the store does not know the access key"),
        ("RequestTimeTooSkewed", 403, "this machine's clock is wrong; correct it"),
        ("AuthorizationHeaderMalformed", 400, "set the bucket's region"),
        ("PermanentRedirect", 301, "set the bucket's region or endpoint"),
    ],
)
def test_a_refused_stat_says_why(day: Day, code: str, status: int, text: str) -> None:
    fault = Fault("", "error", ENDLESS, status=status, code=code)
    day.server.faults = [replace(fault, operation=name) for name in ("HeadObject", "GetObject")]
    with pytest.raises(RequestFailedError, match=f"stat: HTTP {status} {code}: .*{text}") as caught:
        stat(day)
    assert caught.value.code == code


def test_a_missing_bucket_is_no_missing_object(day: Day) -> None:
    day.server.faults = [Fault("GetObject", "error", ENDLESS, status=404, code="NoSuchBucket")]
    for verb in (get, get_range):
        with pytest.raises(RequestFailedError, match="NoSuchBucket"):
            verb(day)


def test_a_deletion_that_is_refused_beside_its_own_etag_is_unsupported(day: Day) -> None:
    day.server.faults = [Fault("DeleteObject", "error", status=412, code="PreconditionFailed")]
    with pytest.raises(ConditionUnsupportedError, match="the object has this ETag"):
        delete_if_match(day)
    assert day.stored("run/object") is not None


def test_a_rejected_condition_has_an_error_of_its_own(day: Day) -> None:
    fault = Fault("", "error", ENDLESS, status=501, code="NotImplemented")
    day.server.faults = [replace(fault, operation=name) for name in ("PutObject", "DeleteObject")]
    for verb in (put_if_absent, put_if_match, delete_if_match):
        with pytest.raises(ConditionUnsupportedError, match="NotImplemented"):
            verb(day)


def test_expired_credentials_are_read_anew(
    day: Day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of credentials that somebody renews while a save runs."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = old\n")
    options = StorageOptions(endpoint=day.server.options.endpoint, region="us-east-1")
    store = S3Store("s3://bucket", options, limits=LIMITS)
    assert store.put("run/a", b"a")
    file.write_text("[default]\naws_access_key_id = NEW\naws_secret_access_key = new\n")
    day.server.faults = [Fault("PutObject", "error", status=400, code="ExpiredToken")]
    assert store.put("run/b", b"b")
    used = [each.headers["authorization"] for each in day.server.requests]
    assert ["OLD" in each for each in used] == [True, True, False]
    assert "NEW" in used[-1]


def test_a_head_says_nothing_of_expired_credentials(day: Day) -> None:
    day.server.faults = [Fault("HeadObject", "error", status=400, code="ExpiredToken")]
    stat(day)
    day.server.faults = [Fault("HeadObject", "error", ENDLESS, status=400, code="ExpiredToken")]
    with pytest.raises(RequestFailedError, match="the credentials may have expired; renew them"):
        stat(day)


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("http://no-such-host.invalid", "no-such-host.invalid"),
        ("http://127.0.0.1:9", "refused"),
    ],
)
def test_an_unknown_host_ends_after_three_attempts(endpoint: str, text: str) -> None:
    options = StorageOptions(endpoint=endpoint, access_key="a", secret_key="b")
    store = S3Store("s3://bucket", options, limits=replace(LIMITS, attempts=50))
    with pytest.raises(RequestFailedError, match=rf"run/k: get: .*{text}.*3 attempts"):
        store.get("run/k")


def test_no_credentials_are_named(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    endpoint = day.server.options.endpoint
    store = S3Store("s3://bucket", StorageOptions(endpoint=endpoint), limits=LIMITS)
    with pytest.raises(RequestFailedError, match="got no credentials; set AWS_ACCESS_KEY_ID"):
        store.get("run/k")
    store = S3Store("s3://bucket", StorageOptions(endpoint=endpoint, profile="p"), limits=LIMITS)
    with pytest.raises(RequestFailedError, match="profile"):
        store.get("run/k")
    store = S3Store("s3://bucket", StorageOptions(endpoint=endpoint, anonymous=True))
    assert store.get("run/object")[0] == BODY
    assert "authorization" not in day.server.requests[-1].headers


def test_errors_show_no_secrets(day: Day) -> None:
    options = day.server.options.model_copy(update={"session_token": None})
    store = S3Store("s3://bucket", options, limits=LIMITS)
    day.server.faults = [Fault("GetObject", "error", ENDLESS, status=403, code="AccessDenied")]
    with pytest.raises(StorageError) as caught:
        store.get("run/object")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.__cause__)


def test_wrong_bytes_arrive_unnoticed(day: Day) -> None:
    """The client compares nothing: digests of the checkpoint do, see `engine/load`."""
    day.server.faults = [Fault("GetObject", "wrong")]
    assert day.store.get("run/object")[0] != BODY

"""Amazon S3, and stores that speak its protocol, by the AWS SDK's low-level client.

How a save could lie, and what prevents it. A lost answer of a conditional PUT looks like the PUT of
another writer: the stored bytes are compared. An upload that has ended may have been completed or
aborted, and its object replaced since: only the object's ETag or label proves completion. A store
may ignore a condition: it is also checked by a request before, so that it is wrong for one request
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any
from urllib.parse import unquote

from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.objects.s3_client import Clients, Limits, PartBody
from unified_ckpt.runtime.objects.s3_errors import EXPIRED
from unified_ckpt.runtime.objects.s3_google import generation
from unified_ckpt.runtime.objects.s3_requests import Request, RequestSender
from unified_ckpt.runtime.objects.store import (
    Buffer,
    ConditionUnsupportedError,
    Listing,
    ObjectStat,
    ReplacedError,
    RequestFailedError,
    Upload,
    UploadGoneError,
    multipart_etag,
)
from unified_ckpt.storage_options import StorageOptions

_LABEL = "unified-upload"  # in the metadata of an object
_READ_NBYTES = 1 << 20  # of an answer at once: 64 KiB cost a quarter more CPU


class S3Store:
    """A bucket behind S3's protocol: implements `ObjectStore`. No request is sent before a verb."""

    def __init__(
        self, url: str, options: StorageOptions | None = None, *, limits: Limits | None = None
    ) -> None:
        self.url = url
        self._limits = limits or Limits()
        self._is_google = url.startswith("gs://")
        self._clients = Clients(
            options or StorageOptions(), self._limits, is_google=self._is_google
        )
        self._sender = RequestSender(url, self._clients, self._limits)

    def put(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str = ""
    ) -> str | None:
        """Store a small object; see `ObjectStore`."""
        condition: dict[str, str] = {}
        if if_absent or if_match:
            head = self._head(key)
            if (head is not None) if if_absent else (head is None or _etag(head) != if_match):
                return None
            condition = {"IfNoneMatch": "*"} if head is None else self._if_match(key, head)
        request = Request("put", key, "put_object")
        try:
            answer = self._sender.send(request, Key=key, Body=body, **condition)
        except RequestFailedError as error:
            if not condition:
                raise
            self._check_condition(error)
            if error.code not in ("PreconditionFailed", "NoSuchKey"):
                raise
            return self._etag_of(key, body) if error.attempts > 1 else None
        return _etag(answer)

    def get(self, key: str) -> tuple[bytes, str]:
        """Return a small object and its ETag; see `ObjectStore`."""

        def read(answer: Any) -> tuple[bytes, str]:
            with closing(answer["Body"]) as body:
                return body.read(), _etag(answer)

        request = Request("get", key, "get_object")
        try:
            return self._sender.read(request, read, Key=key)
        except RequestFailedError as error:
            raise self._absent(request, error) from error

    def get_range(self, key: str, start: int, into: Buffer, *, etag: str = "") -> None:
        """Fill `into` with bytes from `start`; see `ObjectStore`."""
        view = memoryview(into).cast("B")
        if not len(view):
            return
        request = Request("get_range", key, "get_object")
        condition = {"IfMatch": f'"{etag}"'} if etag else {}

        def read(answer: Any) -> None:
            with closing(answer["Body"]) as body:
                if etag and _etag(answer) != etag:
                    raise self._replaced(key, etag, _etag(answer))
                nbytes = answer["ContentLength"]
                if nbytes != len(view):
                    raise self._short(key, start, len(view), f"{nbytes} bytes")
                _read_into(body, view)

        try:
            self._sender.read(
                request,
                read,
                Key=key,
                Range=f"bytes={start}-{start + len(view) - 1}",
                **condition,
            )
        except RequestFailedError as error:
            if error.code == "PreconditionFailed":
                raise self._replaced(key, etag, "another one") from error
            if error.code == "InvalidRange":
                raise self._short(key, start, len(view), "no bytes") from error
            raise self._absent(request, error) from error

    def stat(self, key: str) -> ObjectStat | None:
        """Return an object's size and ETag; see `ObjectStore`."""
        head = self._head(key)
        if head is None:
            return None
        return ObjectStat(head["ContentLength"], _etag(head), head["LastModified"].timestamp())

    def list(self, prefix: str, *, recursive: bool = False) -> Listing:
        """Return what is below a prefix; see `ObjectStore`."""
        request = Request("list", prefix, "list_objects_v2")
        arguments = {"Prefix": prefix, "MaxKeys": self._limits.page_keys}
        if not recursive:
            arguments["Delimiter"] = "/"
        objects: dict[str, ObjectStat] = {}
        folders: set[str] = set()
        while True:
            answer = self._sender.send(request, **arguments)
            for each in answer.get("Contents", ()):
                modified = each["LastModified"].timestamp()
                objects[each["Key"]] = ObjectStat(each["Size"], _etag(each), modified)
            folders.update(each["Prefix"] for each in answer.get("CommonPrefixes", ()))
            if not answer.get("IsTruncated"):
                return Listing(objects, tuple(sorted(folders)))
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, key: str, *, if_match: str = "") -> bool:
        """Delete an object; see `ObjectStore`."""
        condition: dict[str, str] = {}
        if if_match:
            head = self._head(key)
            if head is None or _etag(head) != if_match:
                return head is None
            condition = self._if_match(key, head)
        request = Request("delete", key, "delete_object")
        try:
            self._sender.send(request, Key=key, **condition)
        except RequestFailedError as error:
            if error.code == "NoSuchKey":
                return True
            if condition:
                self._check_condition(error)
                if error.code == "PreconditionFailed":
                    self._check_honored(key, if_match, error)
                    return False
            raise
        return True

    def begin(self, key: str, *, label: str = "") -> str:
        """Begin an upload and return its id; see `ObjectStore`."""
        request = Request("begin", key, "create_multipart_upload")
        metadata = {_LABEL: label} if label else {}
        return str(self._sender.send(request, Key=key, Metadata=metadata)["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, buffers: Sequence[Buffer]) -> str:
        """Upload a part and return its ETag; see `ObjectStore`."""
        request = Request("put_part", key, "upload_part", number)
        body = PartBody(buffers)
        try:
            answer = self._sender.send(
                request, Key=key, UploadId=upload_id, PartNumber=number, Body=body
            )
        except RequestFailedError as error:
            if error.code == "NoSuchUpload":
                raise UploadGoneError(f"{error}; the upload was completed or aborted") from error
            raise
        return _etag(answer)

    def complete(self, key: str, upload_id: str, etags: Sequence[str], *, label: str = "") -> str:
        """Make the object of these parts visible and return its ETag; see `ObjectStore`."""
        request = Request("complete", key, "complete_multipart_upload")
        parts = [
            {"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in enumerate(etags, 1)
        ]
        try:
            answer = self._sender.send(
                request,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
            )
            expected = _etag(answer)
        except RequestFailedError as error:
            if error.code != "NoSuchUpload":
                raise
            expected = multipart_etag(etags)
        head = self._head(key)
        if head is not None:
            if expected and _etag(head) == expected:
                return expected
            if label and head["Metadata"].get(_LABEL) == label:
                return _etag(head)
        raise UploadGoneError(
            f"{self.url}/{key}: complete: the upload {upload_id} has ended, and the object is "
            f"{'absent' if head is None else 'another one'}"
        )

    def abort(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; see `ObjectStore`."""
        request = Request("abort", key, "abort_multipart_upload")
        try:
            self._sender.send(request, Key=key, UploadId=upload_id)
        except RequestFailedError as error:
            if error.code not in ("NoSuchUpload", "NoSuchKey"):
                raise

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return the unfinished uploads below a prefix; see `ObjectStore`."""
        request = Request("uploads", prefix, "list_multipart_uploads")
        arguments = {
            "Prefix": prefix,
            "MaxUploads": self._limits.page_keys,
            "EncodingType": "url",
        }
        uploads: list[Upload] = []
        while True:
            answer = self._sender.send(request, **arguments)
            decode = unquote if answer.get("EncodingType") == "url" else str
            uploads += [
                Upload(decode(each["Key"]), each["UploadId"], each["Initiated"].timestamp())
                for each in answer.get("Uploads", ())
            ]
            if not answer.get("IsTruncated"):
                return uploads
            arguments["KeyMarker"] = decode(answer["NextKeyMarker"])
            arguments["UploadIdMarker"] = answer["NextUploadIdMarker"]

    def close(self) -> None:
        """Release the connections."""
        self._clients.close()

    def _head(self, key: str) -> Any:
        """Return the SDK's answer, or None if there is no object."""
        try:
            return self._sender.send(Request("stat", key, "head_object"), Key=key)
        except RequestFailedError as error:
            if error.code == "NoSuchKey":
                return None
            if error.code in EXPIRED or error.code.startswith(("HTTP 3", "HTTP 4")):
                self._explain(key, error)
            raise

    def _explain(self, key: str, error: RequestFailedError) -> None:
        """Raise the store's reason for a refusal: an answer to a HEAD has no body."""
        request = Request("stat", key, "get_object")
        try:
            self._sender.read(
                request, lambda answer: answer["Body"].close(), Key=key, Range="bytes=0-0"
            )
        except RequestFailedError as reason:
            if reason.code not in ("NoSuchKey", "InvalidRange"):
                raise reason from error

    def _if_match(self, key: str, head: Any) -> dict[str, str]:
        """Return the condition that an object is still that of a HEAD."""
        expected = generation(head) if self._is_google else _etag(head)
        if not expected:
            raise ConditionUnsupportedError(
                f"{self.url}/{key}: got no x-goog-generation, expected Google Cloud Storage; use "
                "s3:// for other stores"
            )
        return {"IfMatch": f'"{expected}"'}

    def _etag_of(self, key: str, body: bytes) -> str | None:
        """Return the ETag of the object if it has this body: an answer was lost."""
        try:
            stored, etag = self.get(key)
        except NotFoundError:
            return None
        return etag if stored == body else None

    def _check_condition(self, error: RequestFailedError) -> None:
        if error.code == "NotImplemented":
            raise ConditionUnsupportedError(str(error)) from error

    def _check_honored(self, key: str, etag: str, error: RequestFailedError) -> None:
        """Raise ConditionUnsupportedError for a refusal although the object has this ETag.

        Swift compares the condition of a deletion with another ETag than it shows, after an upload.
        """
        head = self._head(key)
        if head is not None and _etag(head) == etag:
            raise ConditionUnsupportedError(f"{error}; the object has this ETag") from error

    def _absent(self, request: Request, error: RequestFailedError) -> CheckpointError:
        if error.code != "NoSuchKey":
            return error
        return NotFoundError(f"{self.url}/{request.key}: {request}: there is no such object")

    def _replaced(self, key: str, etag: str, got: str) -> ReplacedError:
        return ReplacedError(
            f"{self.url}/{key}: get_range: the object was replaced: got ETag {got}, expected {etag}"
        )

    def _short(self, key: str, start: int, nbytes: int, got: str) -> StorageError:
        return StorageError(
            f"{self.url}/{key}: get_range: got {got} from byte {start}, expected {nbytes}"
        )


def _etag(answer: Any) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _read_into(body: Any, into: memoryview) -> None:
    """Fill the buffer from the body of an answer; the SDK raises if it ends early."""
    position = 0
    while position < len(into):
        piece = body.read(min(_READ_NBYTES, len(into) - position))
        into[position : position + len(piece)] = piece
        position += len(piece)

"""What this library asks of an object store: eleven verbs on keys and bytes.

This is all of the surface between checkpoints and a store's protocol. Every implementation passes
the conformance tests in `tests/runtime/objects/`.

Verbs retry inside, in bounded time. A verb that gives up raises RequestFailedError, which names the
verb, the key, the part, and the number of attempts. Keys are those of one bucket.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unified_ckpt.errors import NotFoundError, StorageError

Buffer = memoryview
MIN_PART_NBYTES = 5 << 20  # of every part but the last: S3, GCS, R2
MAX_PARTS = 10_000  # of one upload

_MD5 = re.compile("[0-9a-f]{32}")


class ReplacedError(NotFoundError):
    """The object was removed or replaced by another one: its ETag is not the expected one."""


class UploadGoneError(StorageError):
    """An upload was completed or aborted, by this process or by another one."""


class ConditionUnsupportedError(StorageError):
    """The store does not implement a condition on this request."""


class RequestFailedError(StorageError):
    """A request failed: the network, the store, or a permission. It says nothing about the object.

    `code`: the store's name of the error, or "". `attempts`: the number of requests.
    """

    def __init__(self, message: str, *, code: str = "", attempts: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.attempts = attempts


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """An object. `modified`: seconds since the epoch, by the store's clock."""

    nbytes: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True)
class Listing:
    """What a listing shows below a prefix: objects by key, and folders, which end in "/"."""

    objects: dict[str, ObjectStat]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished upload. `started`: seconds since the epoch, by the store's clock."""

    key: str
    id: str
    started: float


class ObjectStore(Protocol):
    """One bucket. Safe for threads. ETags are without quotes.

    `url`: of the bucket, such as "s3://bucket", for messages.
    """

    url: str

    def put(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str = ""
    ) -> str | None:
        """Store a small object atomically and return its ETag; None if the condition fails.

        `if_absent`: only if there is no object. `if_match`: only over the object with this ETag.
        A retry that finds its own bytes has succeeded. ConditionUnsupportedError if the store
        rejects the condition.
        """

    def get(self, key: str) -> tuple[bytes, str]:
        """Return a small object and its ETag. NotFoundError if there is none."""

    def get_range(self, key: str, start: int, into: Buffer, *, etag: str = "") -> None:
        """Fill `into` with bytes from `start`. StorageError if the object ends before.

        NotFoundError if there is none; ReplacedError if it has another ETag than `etag`.
        """

    def stat(self, key: str) -> ObjectStat | None:
        """Return an object's size and ETag, or None if there is none."""

    def list(self, prefix: str, *, recursive: bool = False) -> Listing:
        """Return what is below a prefix; all pages are read. A listing may lag.

        Without `recursive`, keys that have a "/" after the prefix are folded into folders.
        """

    def delete(self, key: str, *, if_match: str = "") -> bool:
        """Delete an object, if there is one; False if it has another ETag than `if_match`.

        ConditionUnsupportedError if the store rejects the condition.
        """

    def begin(self, key: str, *, label: str = "") -> str:
        """Begin an upload and return its id. Nothing becomes visible.

        `label`: stored with the object, for `complete`. Objects of one key and one label have the
        same bytes.
        """

    def put_part(self, key: str, upload_id: str, number: int, buffers: Sequence[Buffer]) -> str:
        """Upload part `number`, from 1 on, and return its ETag. A repeated number replaces it.

        The buffers are sent one after another, and not changed meanwhile. UploadGoneError if the
        upload has ended.
        """

    def complete(self, key: str, upload_id: str, etags: Sequence[str], *, label: str = "") -> str:
        """Make the object of these parts visible, replacing another one; return its ETag.

        May be repeated, by any process: an upload that has ended counts as completed only if the
        object has the ETag that these parts give, or the label. UploadGoneError otherwise.
        """

    def abort(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; one that has ended is fine."""

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return the unfinished uploads below a prefix. A listing may lag."""

    def close(self) -> None:
        """Release the connections."""


def multipart_etag(etags: Sequence[str]) -> str:
    """Return the ETag of an object of parts with these ETags, or "" if they are no MD5.

    Amazon S3, and the stores that follow it, use the MD5 of the parts' MD5s and their number.
    Google Cloud Storage has other ETags, and so has what a key of KMS encrypts: also ones that look
    like MD5s. There only a label tells whether an object is that of an upload.
    """
    if not all(map(_MD5.fullmatch, etags)):
        return ""
    digests = b"".join(map(bytes.fromhex, etags))
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"

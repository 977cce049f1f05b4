"""The objects that commit a save to a bucket: the record, the tombstone and the newest step.

A commit record makes a save certain and says how to finish it. Whoever finishes it needs nothing
else, and may be paused at any request. Before it, a claim has its key: while a process holds the
key, the manifest that it replaces cannot change.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError

from unified_ckpt.errors import FormatError
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.manifest_fields import Record, SaveId, Size

_Record = TypeVar("_Record", bound=Record)


class CommitClaim(Record):
    """A save that is about to store its commit record. It is not certain: anyone may drop this.

    `attempt` makes each claim of a save another object: a late request finds no claim but its own.
    """

    claimed_by: SaveId
    attempt: Size = 0


class CommitFile(Record):
    """A file of the save: its upload, its bytes, and the ETags of its parts in order."""

    upload_id: str
    nbytes: Size
    etags: list[str]


class CommitRecord(Record):
    """A save that is certain: all bytes are uploaded.

    `uploads_id`: of the list of its uploads. `manifest`: its JSON, without ETags. `replaces`: the
    ETag of the manifest that it replaces, "" for none. `replaced_files`: files that only the
    replaced checkpoint has, with their ETags.
    """

    save_id: SaveId
    step: Size | None
    run_id: str
    uploads_id: SaveId
    manifest: str
    replaces: str
    files: dict[str, CommitFile]
    replaced_files: dict[str, str]


class Tombstone(Record):
    """What stands in place of a manifest while save `committing` replaces a checkpoint.

    `replaced`: the text of that manifest, "" for none, for a commit that cannot be finished.
    """

    committing: SaveId
    replaced: str = ""


class UploadsRecord(Record):
    """The uploads of a save that is not certain yet: upload id by file name.

    Its own id is another one for each attempt: copies of one save have the same `save_id`.
    `aborted`: another process aborts them, so the save may not become certain any more.
    """

    run_id: str
    save_id: SaveId
    uploads: dict[str, str]
    aborted: bool = False


class RemovalRecord(Record):
    """A checkpoint that is being removed: the ETags of its manifest and of its files."""

    save_id: SaveId
    manifest: str
    files: dict[str, str]


class NewestStep(Record):
    """The newest committed step of a root.

    `committing`: a checkpoint whose commit may be unfinished; it may also be this step, or removed.
    """

    name: str
    step: Size
    save_id: SaveId
    committing: str = ""


def encode_record(record: Record) -> bytes:
    """Return a record as JSON."""
    return json.dumps(record.model_dump()).encode()


def parse_record(kind: type[_Record], body: bytes, *, file: str) -> _Record:
    """Return the record in a JSON text. FormatError, naming `file`, if it is invalid."""
    try:
        return kind.model_validate(parse_json(body, file=file))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise FormatError(f"{file}: {field}: {problem['msg']}") from None


def parse_commit(body: bytes, *, file: str) -> CommitRecord | None:
    """Return the commit record; None for a claim, which makes nothing certain.

    FormatError, naming `file`, if it is neither.
    """
    try:
        parse_record(CommitClaim, body, file=file)
    except FormatError:
        return parse_record(CommitRecord, body, file=file)
    return None


def parse_tombstone(body: bytes) -> Tombstone | None:
    """Return the tombstone; None for a manifest or anything else."""
    try:
        return parse_record(Tombstone, body, file="")
    except FormatError:
        return None

"""The newest step of a root in a bucket, at a fixed key: a listing may lag."""

from __future__ import annotations

from unified_ckpt.engine.folder.publish.conditions import read_object, replace_matching, tries
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.format.commit import CommitRecord, NewestStep, encode_record, parse_record
from unified_ckpt.runtime.objects.storage import ObjectStorage


def read_newest(storage: ObjectStorage) -> tuple[NewestStep | None, str]:
    """Return the recorded newest step of a root, whose commit may be unfinished, and its ETag."""
    body, etag = read_object(storage, names.NEWEST)
    try:
        return parse_record(NewestStep, body, file=""), etag
    except FormatError:
        return None, etag


def update_newest(storage: ObjectStorage, name: str, record: CommitRecord) -> None:
    """Record the step at its fixed key, unless a later one is recorded and still there."""
    if record.step is None:
        return
    step = NewestStep(name=name, step=record.step, save_id=record.save_id)
    counter = tries(storage, names.NEWEST)
    while True:
        next(counter)
        newest, etag = read_newest(storage)
        if newest is not None and newest.step > step.step:  # and there, or unfinished?
            files = f"{newest.name}/{names.MANIFEST}", names.commit_name(newest.name)
            if any(read_object(storage, file)[0] for file in files):
                return
        # A process that sleeps here may not replace a later step.
        if newest == step or replace_matching(storage, names.NEWEST, encode_record(step), etag):
            return

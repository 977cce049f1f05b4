"""What a reader has learnt of the objects of a checkpoint, for ranks that need not ask again."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object."""

    etag: str
    nbytes: int


@dataclass(slots=True)
class KnownObjects:
    """Facts about the objects below a prefix, by their names; true for as long as they are read.

    `absent`: names of no object. `heads`: the first bytes of some, or all bytes. `names`: the
    listing. `has_no_record`: no commit of the checkpoint was unfinished.
    """

    versions: dict[str, Version] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    heads: dict[str, memoryview] = field(default_factory=dict)
    names: list[str] | None = None
    has_no_record: bool = False

    def encode(self) -> bytes:
        """Return the length of a JSON text, the text, and the heads after it."""
        facts = {
            "versions": {name: [each.etag, each.nbytes] for name, each in self.versions.items()},
            "absent": sorted(self.absent),
            "heads": {name: len(head) for name, head in self.heads.items()},
            "names": self.names,
            "has_no_record": self.has_no_record,
        }
        text = json.dumps(facts).encode()
        return b"".join([struct.pack("<Q", len(text)), text, *self.heads.values()])


def decode_known(body: memoryview) -> KnownObjects:
    """Return what `encode` was given. The heads are views of `body`."""
    (text_nbytes,) = struct.unpack_from("<Q", body)
    start = 8 + text_nbytes
    facts, heads = json.loads(bytes(body[8:start])), {}
    for name, nbytes in facts["heads"].items():
        heads[name] = body[start : start + nbytes]
        start += nbytes
    return KnownObjects(
        {name: Version(*fields) for name, fields in facts["versions"].items()},
        set(facts["absent"]),
        heads,
        facts["names"],
        facts["has_no_record"],
    )

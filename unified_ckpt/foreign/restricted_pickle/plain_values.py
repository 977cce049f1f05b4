"""Builds values that hold no more than the pickle has.

The classes themselves would allocate what a number says, or copy one content any number of times.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.limits import expect_type


@dataclass(slots=True)
class Contents:
    """Builds bytes of which a pickle has the content. It may name one content any number of times.

    `free_nbytes`: how much may still be built.
    """

    free_nbytes: int

    def encode(self, text: Any, encoding: Any) -> bytes:
        """Return bytes, which pickles of protocol 2 have as text."""
        if encoding not in ("latin1", "latin-1"):
            raise FormatError("has bytes as text, expected the encoding latin1")
        self._count(expect_type(text, str))
        return bytes(text, "latin1")

    def copy(self, content: Any = b"") -> bytearray:
        """Return a bytearray with a content, never one of a length."""
        self._count(expect_type(content, bytes))
        return bytearray(content)

    def _count(self, content: Sized) -> None:
        self.free_nbytes -= len(content)
        if self.free_nbytes < 0:
            raise FormatError("has more bytes in its values than in the pickle")


def empty_deque(items: Any = (), maxlen: Any = None) -> deque[Any]:
    """Return a deque without items, which a pickle adds one by one."""
    if items != ():
        raise FormatError("creates a deque of items, expected one without")
    return deque(maxlen=None if maxlen is None else operator.index(maxlen))


def number_slice(*bounds: Any) -> slice:
    """Return a slice of numbers: what else it may hold, no code that measures values expects."""
    return slice(*(None if bound is None else operator.index(bound) for bound in bounds))

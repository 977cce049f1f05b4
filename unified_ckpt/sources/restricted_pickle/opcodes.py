"""The opcodes of a pickle, walked through without making anything, before C's reader gets it.

That reader makes room for as many objects as the highest number that a pickle gives to one: a flipped bit in a file of a few bytes takes
all memory of the machine, and the operating system ends the job.
"""

from __future__ import annotations

import mmap
import pickle
import pickletools
import re

from unified_ckpt.errors import FormatError

_LINE = pickletools.UP_TO_NEWLINE
_COUNTS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_COUNTS |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
_TWO_LINES = (pickle.GLOBAL[0], pickle.INST[0])
_STOP, _PUT, _LONG_BINPUT = pickle.STOP[0], pickle.PUT[0], pickle.LONG_BINPUT[0]
_SPECIAL = -100
# By opcode: so many bytes to pass over, one of pickletools' ways to tell how many, or special: unknown, the end, a number.
_ARGUMENTS = [_SPECIAL] * 256
for _one in pickletools.opcodes:
    if ord(_one.code) not in (_STOP, _LONG_BINPUT):
        _ARGUMENTS[ord(_one.code)] = _one.arg.n if _one.arg is not None else 0


def _opcodes(nbytes: int) -> bytes:
    """A pattern: one of those whose arguments have so many bytes, and its arguments."""
    codes = [re.escape(bytes([code])) for code in range(256) if _ARGUMENTS[code] == nbytes]
    return b"[" + b"".join(codes) + b"]" + b"." * nbytes


# As many as there are of a length that is known, passed over at once: most of all by far. A number below 2^16 takes 1 MiB.
_KNOWN_LENGTHS = [_opcodes(nbytes) for nbytes in (0, 1, 2, 4, 8)] + [
    pickle.LONG_BINPUT + rb"..\0\0"
]
_PLAIN = re.compile(b"(?:" + b"|".join(_KNOWN_LENGTHS) + b")*+", re.DOTALL)


def check_numbers(held: bytes | mmap.mmap) -> None:
    """FormatError for a pickle that ends early, has an opcode that there is not, or numbers an object beyond the bytes that it has."""
    at, stop = 0, len(held)
    while (at := _after_plain(held, at)) < stop:
        code = held[at]
        at += 1
        nbytes = _ARGUMENTS[code]
        if nbytes >= 0:  # it is cut short
            at += nbytes
        elif nbytes == _LINE:
            at = _after_line(held, code, at)
        elif nbytes != _SPECIAL:
            count = _COUNTS[nbytes]
            at += count + int.from_bytes(held[at : at + count], "little")
        elif code == _LONG_BINPUT:
            _check_number(int.from_bytes(held[at : at + 4], "little"), at, stop)
            at += 4
        elif code == _STOP:
            return
        else:
            raise FormatError(
                f"has {code:#x} at byte {at - 1}, where an opcode of a pickle is needed"
            )
    raise FormatError(f"ends at byte {stop}, before its end is told")


def _after_plain(held: bytes | mmap.mmap, at: int) -> int:
    found = _PLAIN.match(held, at) if at < len(held) else None
    return found.end() if found is not None else at


def _after_line(held: bytes | mmap.mmap, code: int, at: int) -> int:
    """Where the line, or two, ends that is an opcode's argument; beyond the last byte where it does not."""
    end = held.find(b"\n", at)
    if end >= 0 and code in _TWO_LINES:
        end = held.find(b"\n", end + 1)
    if end >= 0 and code == _PUT:
        _check_number(_decimal(held[at:end], at), at, len(held))
    return end + 1 if end >= 0 else len(held)


def _decimal(told: bytes, at: int) -> int:
    if len(told) > 20 or not told.isdigit():
        raise FormatError(f"numbers an object {told[:20]!r} at byte {at}; needed a number")
    return int(told)


def _check_number(number: int, at: int, stop: int) -> None:
    if number > stop:
        raise FormatError(
            f"numbers an object {number} at byte {at}; needed at most as many as the {stop} bytes of the pickle"
        )

"""Walks a pickle's opcodes and checks its memo indexes before the C unpickler runs.

The C unpickler allocates as many memo slots as the highest index in the file. One flipped bit in a
tiny file can therefore exhaust the memory of the node, and the job is killed.
"""

from __future__ import annotations

import mmap
import pickle
import pickletools
import re

from unified_ckpt.errors import FormatError

_LINE = pickletools.UP_TO_NEWLINE
_COUNT_NBYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
_COUNT_NBYTES |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
_TWO_LINES = (pickle.GLOBAL[0], pickle.INST[0])
_STOP, _PUT, _LONG_BINPUT = pickle.STOP[0], pickle.PUT[0], pickle.LONG_BINPUT[0]
_SPECIAL = -100
# By opcode: the argument's length in bytes, a pickletools code for a variable length, or _SPECIAL.
_ARGUMENT_NBYTES = [_SPECIAL] * 256
for _opcode in pickletools.opcodes:
    if ord(_opcode.code) not in (_STOP, _LONG_BINPUT):
        _ARGUMENT_NBYTES[ord(_opcode.code)] = _opcode.arg.n if _opcode.arg is not None else 0


def _opcode_pattern(nbytes: int) -> bytes:
    """Return a pattern for one opcode with its argument of `nbytes` bytes."""
    codes = [re.escape(bytes([code])) for code in range(256) if _ARGUMENT_NBYTES[code] == nbytes]
    return b"[" + b"".join(codes) + b"]" + b"." * nbytes


# One regex match skips a run of fixed-length opcodes, by far the most common ones. Memo indexes
# below 2**16 are included: they allocate at most 1 MiB.
_FIXED_LENGTH_PATTERNS = [_opcode_pattern(nbytes) for nbytes in (0, 1, 2, 4, 8)] + [
    pickle.LONG_BINPUT + rb"..\0\0"
]
_FIXED_LENGTH_RUN = re.compile(b"(?:" + b"|".join(_FIXED_LENGTH_PATTERNS) + b")*+", re.DOTALL)


def check_memo_bounds(pickled: bytes | mmap.mmap) -> None:
    """Raise FormatError if a pickle is truncated or has an invalid opcode or memo index."""
    offset, size = 0, len(pickled)
    while (offset := _skip_fixed_length(pickled, offset)) < size:
        code = pickled[offset]
        offset += 1
        nbytes = _ARGUMENT_NBYTES[code]
        if nbytes >= 0:  # truncated, else the run above had included it
            offset += nbytes
        elif nbytes == _LINE:
            offset = _skip_lines(pickled, code, offset)
        elif nbytes != _SPECIAL:
            count = _COUNT_NBYTES[nbytes]
            offset += count + int.from_bytes(pickled[offset : offset + count], "little")
        elif code == _LONG_BINPUT:
            _check_memo_index(int.from_bytes(pickled[offset : offset + 4], "little"), offset, size)
            offset += 4
        elif code == _STOP:
            return
        else:
            raise FormatError(f"byte {offset - 1}: got {code:#x}, expected a pickle opcode")
    raise FormatError(f"ends at byte {size} without a STOP opcode")


def _skip_fixed_length(pickled: bytes | mmap.mmap, offset: int) -> int:
    match = _FIXED_LENGTH_RUN.match(pickled, offset) if offset < len(pickled) else None
    return match.end() if match is not None else offset


def _skip_lines(pickled: bytes | mmap.mmap, code: int, offset: int) -> int:
    """Return where an argument of one or two lines ends; past the end if it is truncated."""
    end = pickled.find(b"\n", offset)
    if end >= 0 and code in _TWO_LINES:
        end = pickled.find(b"\n", end + 1)
    if end >= 0 and code == _PUT:
        digits = pickled[offset:end]
        if len(digits) > 20 or not digits.isdigit():
            raise FormatError(f"byte {offset}: got memo index {digits[:20]!r}, expected a number")
        _check_memo_index(int(digits), offset, len(pickled))
    return end + 1 if end >= 0 else len(pickled)


def _check_memo_index(index: int, offset: int, size: int) -> None:
    if index > size:
        raise FormatError(
            f"byte {offset}: got memo index {index}, expected at most {size}, the pickle's length"
        )

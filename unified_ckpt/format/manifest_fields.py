"""The types of the manifest's fields: names, sizes and times, checked when they are parsed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from unified_ckpt.errors import FormatError
from unified_ckpt.format.index import check_file_name
from unified_ckpt.format.names import check_part_name, check_save_id

MAX_RANKS = 1 << 20  # limits the rank tables that are allocated from an untrusted manifest


def _checked_by(check: Callable[[str], None]) -> AfterValidator:
    """Return a validator for names that `check` accepts."""

    def validate(name: str) -> str:
        try:
            check(name)
        except FormatError as error:
            raise ValueError(str(error)) from None
        return name

    return AfterValidator(validate)


def _validate_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError("expected a time in UTC, as in 2026-01-31T12:00:00+00:00")
    return text


FileName = Annotated[str, _checked_by(check_file_name)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # 64 bits, lower-case hex
PartName = Annotated[str, _checked_by(check_part_name)]
SaveId = Annotated[str, _checked_by(check_save_id)]
UtcTime = Annotated[str, AfterValidator(_validate_utc)]

"""What tests of bad input share: one error for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import unified_ckpt as uc

HARD = 60.0  # seconds; no rank may take longer


def same_error(found: Sequence[object], kind: type[uc.CheckpointError], match: str) -> uc.CheckpointError:
    """Every rank raised this very class, with one text."""
    for error in found:
        assert type(error) is kind, f"{error!r}"
        with pytest.raises(kind, match=match):
            raise error
    assert len({str(error) for error in found}) == 1
    assert isinstance(found[0], uc.CheckpointError)
    return found[0]

"""FlexCheckpoint folders that Paddle wrote are read bit for bit, in torch's names and layout.

Damaged and ambiguous ones are rejected by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.foreign.flexes import BY_API, SPECIAL, TRAINER, expected


def read(path: Path, **options: Any) -> dict[tuple[str, str], torch.Tensor]:
    with uc.open(path, **options) as source:
        return {
            (part, name): source[part][name][...] for part in source.parts for name in source[part]
        }


@pytest.mark.parametrize("path", [*BY_API, *SPECIAL, *TRAINER], ids=lambda path: path.name)
def test_folder_equals_what_was_written(path: Path) -> None:
    actual, oracle = read(path), expected(path)
    assert actual.keys() == oracle.keys()
    for key, tensor in oracle.items():
        assert same(actual[key], tensor), key

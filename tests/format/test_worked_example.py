"""The eight numbers in `docs/format.md` are encoded and decoded as it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.format.decoders import decode_master, decode_moment
from unified_ckpt.format.encoded_tensors import MasterEncoding, encoding_named

TEXT = (Path(__file__).parents[2] / "docs/format.md").read_text()
EXAMPLE = TEXT.partition("given as bits, and so are scales:")[2]
ROWS = re.findall(r"^\| (\S+) \| `(.*)` \|$", EXAMPLE, re.MULTILINE)


def field(text: str, name: str) -> list[str]:
    return next(part for part in text.split("; ") if part.startswith(name)).split()[1:]


def test_masters_of_the_example() -> None:
    lines = dict(ROWS)
    masters, model = (
        np.array([int(bits, 16) for bits in lines[name].split()], np.uint32)
        for name in ("masters", "model")
    )
    stored = np.array(lines["masters-16"].partition(";")[0].split(), np.int16)
    exceptions = [int(index) for index in field(lines["masters-16"], "outliers")]
    encoding = MasterEncoding()
    (encoded,) = encoding.encode(masters[None])
    assert np.array_equal(encoded.view(np.int16)[0], stored)
    assert encoding.outliers(masters[None], model.astype(np.uint16)[None]).tolist() == exceptions
    assert np.flatnonzero(decode_master(stored, model) != masters).tolist() == exceptions


@pytest.mark.parametrize("name", ["signed-sqrt-8", "signed-sqrt-6", "log-8", "log-4"])
def test_moments_of_the_example(name: str) -> None:
    position = next(i for i, row in enumerate(ROWS) if row[0] == name)
    values = next(row[1] for row in reversed(ROWS[:position]) if row[0] == "values")
    assert ROWS[position + 1][0] == "decoded"
    scales = np.array([int(bits, 16) for bits in field(ROWS[position][1], "scales")], np.uint16)
    codes = np.array([int(byte, 16) for byte in field(ROWS[position][1], "codes")], np.uint8)
    rows = np.array([values.split()], np.float32)
    encoded = encoding_named(name, file="").encode(rows.view(np.uint32))
    assert np.array_equal(encoded[0][0], codes)
    assert np.array_equal(encoded[1].view(np.uint16)[0], scales)
    decoded = decode_moment(name, codes[None], scales[None], 8).view(np.float32)
    assert np.array_equal(decoded[0], np.array(ROWS[position + 1][1].split(), np.float32))

"""Compressed saves: any layout stores the same bytes, and every value comes back or is listed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unified_ckpt as uc
from tests.support.compressed_cases import compressed_cases, expected_tensors, stored_tensors
from tests.support.reshard_cases import (
    NAME,
    Case,
    Recorded,
    Writes,
    check_written_once,
    request_of,
    root,
    save_call,
)
from unified_ckpt.core.planning import exchange
from unified_ckpt.engine.save.planned_save import SaveCache
from unified_ckpt.engine.save.save import begin_save, save
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import run_ranks

__all__ = ["root"]  # fixtures

COMPRESSION = st.sampled_from(["lossless", "O1", "O2"])
TILES = st.sampled_from([64 << 10, 16 << 20])
FILE_NBYTES = st.sampled_from([50_000, 1 << 30])


def save_compressed(case: Case, root: Path, *, background: bool, **options: object) -> Writes:
    writes = Writes()

    def act(comm: Comm) -> uc.SaveReport:
        cache, storage = SaveCache(), Recorded(root, writes, comm.rank)
        request = request_of(case.state(comm.rank), **options)
        call = save_call(comm, storage, NAME, request, cache)
        report = begin_save(call, lazy=False).finish(None) if background else save(call)
        cache.close()
        return report

    reports = run_ranks(case.saved.world, act)
    figures = [(report.nbytes, report.encoded_nbytes, report.exceptions) for report in reports]
    assert figures == figures[:1] * len(figures)
    return writes


@given(compressed_cases(max_world=6), COMPRESSION, TILES, FILE_NBYTES, st.booleans())
@settings(max_examples=40)
def test_any_mesh_stores_the_same_bytes(
    root: Path,
    case: Case,
    compression: str,
    tile_nbytes: int,
    max_file_bytes: int,
    background: bool,
) -> None:
    with TemporaryDirectory(dir=root) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "TILE_NBYTES", tile_nbytes)
        options = {"compression": compression, "max_file_bytes": max_file_bytes}
        writes = save_compressed(case, Path(name), background=background, **options)
        folder = Path(name) / NAME
        check_written_once(writes, folder)
        assert stored_tensors(folder) == expected_tensors(case.arrays, compression)
        assert uc.verify(folder, deep=True).ok

"""The requests of a save to a bucket are those that are estimated."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.manager.buckets import ROOT, new_bucket, registered
from tests.support.objects.server import memory_server
from unified_ckpt.estimates.requests import Requests, save_requests

MIB = 1 << 20


def test_requests_equal_those_of_a_save() -> None:
    model = {f"w{number}": torch.zeros(3 * MIB) for number in range(3)}
    options = uc.SaveOptions(max_file_bytes=14 * MIB)
    with memory_server() as server:
        reach = server.options
        estimate = uc.estimate(model, root=ROOT, options=options, storage_options=reach)
        assert server.operations() == []
        path = f"{ROOT}/checkpoint-1"
        uc.save(path, step=1, model=model, options=options, storage_options=reach)
        counts = Counter(server.operations())
    reads = counts.pop("GetObject") + counts.pop("HeadObject")
    del counts["DeleteObject"]
    assert estimate.requests == Requests(counts.total(), reads)
    assert estimate.free_nbytes is estimate.bytes_per_second is None
    assert f"{estimate.requests.total} requests for $0.0002 per save" in str(estimate)


def test_price_of_large_saves() -> None:
    """A checkpoint of 112 GB: 13 thousand parts of 8 MiB, and two more requests for each file."""
    sizes = [502_000_000] * 32 + [510_000_000] * 63 + [1_004_000_000] * 64
    files = dict(zip(map(str, range(len(sizes))), sizes, strict=True))
    requests = save_requests(files, smallest_part_nbytes=8 * MIB)
    assert requests.writes == 32 * (2 + 60) + 63 * (2 + 61) + 64 * (2 + 120) + 15
    assert requests.dollars == pytest.approx(0.069, abs=0.001)
    assert Requests(1000, 1000).dollars == pytest.approx(0.0054)


def test_estimate_of_a_run_in_a_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(new_bucket()):
        uc.save(f"{ROOT}/checkpoint-1", step=1, model={"w": torch.zeros(4)})
        arguments = ("--root", ROOT, "--every-steps", 10, "--steps", 1001)
        text = run_verb(capsys, "estimate", f"{ROOT}/checkpoint-1", *arguments)
        assert "101 checkpoints" in text
        assert "written, $0.01 for requests" in text
        fields = json.loads(
            run_verb(capsys, "estimate", f"{ROOT}/checkpoint-1", *arguments, "--json")
        )
    assert fields["requests"]["writes"] > 14
    assert fields["free_nbytes"] is None

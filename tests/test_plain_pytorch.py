"""The example for plain PyTorch in one process: stopped at any step, it continues bit for bit,
including data and dropout.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from unified_ckpt.examples.plain_pytorch import main

STEPS = 17  # two epochs of seven steps, and three


def test_example_resumes_within_and_between_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_rng_state(torch.Generator().get_state())
    (tmp_path / "text").write_bytes(random.Random(0).randbytes(52 * 64))  # 52 windows
    options = "--workers", "1", "--text", str(tmp_path / "text")
    straight = main([str(tmp_path / "straight"), "--until", str(STEPS), *options])
    expected = capsys.readouterr().out.splitlines()
    assert len(expected) == STEPS
    parts = straight
    options = *options, "--local-directory", str(tmp_path / "local")
    for until in (7, 12, STEPS):
        parts = main([str(tmp_path / "run"), "--until", str(until), *options])
    assert capsys.readouterr().out.splitlines() == expected
    for module, again in zip(straight, parts, strict=True):
        assert all(
            torch.equal(tensor, again.state_dict()[name])
            for name, tensor in module.state_dict().items()
        )
    assert [
        uc.open(tmp_path / "run" / "checkpoint-17").extra["sampler"][name]
        for name in ("epoch", "seen", "length")
    ] == [2, 24, 52]

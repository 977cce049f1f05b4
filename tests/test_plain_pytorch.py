"""docs/examples/plain_pytorch.py in one process: stopped anywhere it goes on bit by bit, data and
dropout included.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "plain_pytorch.py"
main = runpy.run_path(str(SCRIPT))["main"]
STEPS = 17  # two epochs of seven steps, and three


def test_stopped_in_an_epoch_at_its_end_and_within_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_rng_state(torch.Generator().get_state())
    straight = main([str(tmp_path / "straight"), "--until", str(STEPS), "--workers", "1"])
    expected = capsys.readouterr().out.splitlines()
    assert len(expected) == STEPS
    parts = []
    for until in (4, 7, 12, STEPS):
        parts = main([str(tmp_path / "run"), "--until", str(until), "--workers", "1"])
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


def test_sigterm_saves_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption, as a cluster does it: what was printed before and after is one run."""
    main([str(tmp_path / "straight"), "--until", "9", "--workers", "0"])
    expected = capsys.readouterr().out.splitlines()
    step = torch.optim.AdamW.step
    taken: list[int] = []

    def third(self: torch.optim.AdamW) -> None:
        step(self)
        taken.append(1)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", third)
        main([str(tmp_path / "run"), "--until", "9", "--workers", "0"])
    assert 3 <= len(taken) < 9
    main([str(tmp_path / "run"), "--until", "9", "--workers", "0"])
    assert capsys.readouterr().out.splitlines() == expected

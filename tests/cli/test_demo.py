"""What the demo prints and when it passes. test_documentation.py runs it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from unified_ckpt.cli import demo as verb
from unified_ckpt.cli.demo import SENTENCE, UNTIL_1_RANK, Demo, evaluate

MEASURED = {
    "probe_step": 46,
    "probe": 0.5,
    "from_pretrained": 0.5,
    "text": SENTENCE,
    "seconds": 1.0,
}


def finished_demo(root: Path) -> Demo:
    """Steps whose losses are those of the baseline."""
    demo = Demo(root, str(root), ExitStack(), False)
    for step in range(1, UNTIL_1_RANK + 1):
        demo.record_step(step, 1 / step, "baseline")
        demo.record_step(step, 1 / step, "1 process")
    return demo


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"text": "No manifest, echeckpo"}, False),
        ({"from_pretrained": 0.51}, False),
    ],
)
def test_demo_passes_if_the_folder_gives_what_was_learnt(
    change: dict[str, Any], passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = evaluate(finished_demo(tmp_path), MEASURED | change)
    assert verdict["passed"] is passed
    output = capsys.readouterr().out
    assert ("PASSED in 1 s\n" in output) is passed
    assert ("FAILED in 1 s\n" in output) is not passed
    if "text" in change:
        assert f"{change['text']!r}, not the sentence" in output


def test_demo_fails_if_a_step_differs(tmp_path: Path) -> None:
    demo = finished_demo(tmp_path)
    demo.record_step(UNTIL_1_RANK, 1.1 / UNTIL_1_RANK, "2 ranks DDP")
    assert not evaluate(demo, MEASURED)["passed"]


def test_demo_fits_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "stdout_columns", lambda: 40)
    demo = finished_demo(tmp_path)
    demo.announce("2 ranks DDP: resumes from checkpoint-10; all of its digests were verified")
    evaluate(demo, MEASURED)
    lines = capsys.readouterr().out.splitlines()
    assert "[  0 s] 2 ranks DDP: resumes from" in lines
    assert "        checkpoint-10; all of its" in lines
    assert max(map(len, lines)) <= 40

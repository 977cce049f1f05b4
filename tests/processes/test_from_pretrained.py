"""A folder that a sharded job saved opens in stock `from_pretrained`, with the logits of the model
that was trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun

pytest.importorskip("transformers")

CASES = (
    "llama",
    "llama_fsdp2",
    "llama_tied_fsdp2",
    "llama_tp2",
    "qwen2_fsdp2",
    "qwen3_tp2",
    "mixtral",
    "mixtral_fsdp2",
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    root: Path = tmp_path_factory.mktemp("hf")
    torchrun(2, "worker_hf.py", root, timeout_seconds=120)
    torchrun(1, "worker_hf.py", root, timeout_seconds=120)
    found: dict[str, list[str]] = json.loads((root / "opened.json").read_text())
    assert set(found) == set(CASES)
    return found


@pytest.mark.parametrize("case", CASES)
def test_stock_transformers_and_a_resume_read_the_folder(
    opened: dict[str, list[str]], case: str
) -> None:
    assert not opened[case], "\n".join(opened[case])

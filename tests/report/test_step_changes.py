"""What changed between any two steps, against tensors compared block by block."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.damage import flip
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.report import step_changes
from unified_ckpt.report.contents import layer_of
from unified_ckpt.report.step_changes import StepChanges, compare_steps
from unified_ckpt.runtime.storage.storage import LocalStorage

Models = dict[int, dict[str, torch.Tensor]]


def compare(root: Path) -> StepChanges | None:
    records = scan(LocalStorage(os.fspath(root)), "checkpoint-").complete
    return compare_steps(records, progress=lambda *_: None)


def save(root: Path, models: Models) -> None:
    for step, model in models.items():
        uc.save(
            root / f"checkpoint-{step}", model=model, step=step, options=uc.SaveOptions(fsync=False)
        )


def blocks(tensor: torch.Tensor) -> list[bytes]:
    body = tensor.numpy().tobytes()
    return [body[at : at + BLOCK_NBYTES] for at in range(0, len(body), BLOCK_NBYTES)]


def expected_changes(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, tuple[int, int]]:
    totals: dict[str, tuple[int, int]] = {}
    for name, tensor in after.items():
        old = before.get(name)
        same_spec = old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
        old_blocks = blocks(old) if same_spec and old is not None else []
        for i, block in enumerate(blocks(tensor)):
            nbytes, changed = totals.get(layer_of(name), (0, 0))
            is_same = same_spec and old_blocks[i] == block
            totals[layer_of(name)] = nbytes + len(block), changed + len(block) * (not is_same)
    return totals


@pytest.fixture(scope="module")
def models() -> Models:
    """Six steps: values come back, tensors vanish and change their shapes, blocks change alone."""
    random.seed(1)
    models: Models = {}
    for step in range(6):
        model = {f"layers.{i}.w": torch.full((5,), random.randrange(3)) for i in range(12)}
        model["embed.weight"] = torch.zeros(5 * BLOCK_NBYTES // 8, dtype=torch.float32)
        for block in range(3):
            model["embed.weight"][block * BLOCK_NBYTES // 4] = random.randrange(2)
        if step % 2:
            model["layers.3.w"] = torch.ones(2, 3)
        if step in (2, 4):
            del model["layers.5.w"]
        model["empty"] = torch.zeros(0)
        models[step] = model
    return models


def test_any_two_steps_compare_exactly(tmp_path: Path, models: Models) -> None:
    save(tmp_path, models)
    changes = compare(tmp_path)
    assert changes.names == tuple(f"checkpoint-{step}" for step in models)
    assert changes.left_out == 0
    for before, after in permutations(models, 2):
        found = {
            change.layer: (change.nbytes, change.changed_nbytes)
            for change in changes.compare(before, after)
        }
        assert found == expected_changes(models[before], models[after])
    layers = [layer for _, layer in changes.nbytes if layer.startswith("layers.")]
    assert layers == [f"layers.{i}" for i in range(12)]


def test_limit_keeps_the_newest_steps_exact(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, models)
    whole = compare(tmp_path)
    for limit, left in ((whole.patterns.size - 1, 3), (10, 4)):
        monkeypatch.setattr(step_changes, "_MAX_NUMBERS", limit)
        changes = compare(tmp_path)
        assert changes.left_out == left
        assert changes.names == whole.names[left:]
        for before, after in permutations(range(len(changes.names)), 2):
            assert changes.compare(before, after) == whole.compare(before + left, after + left)
        assert len(np.unique(changes.patterns, axis=0)) == len(changes.patterns)


def test_layers_beyond_the_limit_are_one(
    tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, models)
    monkeypatch.setattr(step_changes, "_MAX_LAYERS", 3)
    changes = compare(tmp_path)
    layers = [change.layer for change in changes.compare(0, 5)]
    assert layers == ["embed", "layers.0", "other layers"]  # "empty" has no bytes
    assert sum(c.nbytes for c in changes.compare(0, 5)) == sum(
        nbytes for nbytes, _ in expected_changes(models[0], models[5]).values()
    )


def test_steps_that_cannot_be_compared_are_left_out(tmp_path: Path, models: Models) -> None:
    save(tmp_path, models)
    flip(tmp_path / "checkpoint-3" / "digests.safetensors", -1)
    changes = compare(tmp_path)
    assert changes.names == tuple(f"checkpoint-{step}" for step in (0, 1, 2, 4, 5))
    assert changes.left_out == 1
    for step in (0, 1, 2, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    assert compare(tmp_path) is None


def test_three_hundred_steps_of_many_tensors_stay_small() -> None:
    """Each step changes all tensors but the frozen ones; some steps change a few more."""
    spec = TensorSpec("F32", (4,))
    steps = [
        (
            f"checkpoint-{step}",
            {
                ("model", f"layers.{i % 80}.t{i}", spec): np.array(
                    [0 if i % 10 == 0 else step // (1 + i % 7)], np.uint64
                )
                for i in range(250)
            },
        )
        for step in range(300)
    ]
    started = time.process_time()
    changes = step_changes._find_patterns(steps, left_out=0)
    assert time.process_time() - started < 8
    assert len(changes.names) == 300
    assert len(changes.patterns) == 8
    text = json.dumps(
        [changes.patterns.tolist(), [list(v.items()) for v in changes.nbytes.values()]]
    )
    assert len(text) < 100_000
    assert sum(c.changed_nbytes == 0 for c in changes.compare(0, 299)) == 8

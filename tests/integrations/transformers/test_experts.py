"""The Trainer with a model whose experts are stacked in memory and separate on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM, TrainerCallback

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.foreign.expert_models import mixtral
from tests.support.integrations.trainers import StopAt, check_same, trainer
from unified_ckpt.integrations.transformers import open_hub_names

pytestmark = pytest.mark.integration


class WeightRecorder(TrainerCallback):
    """Records the weights at the start of training."""

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("native_stop", [False, True])
def test_resume_restores_stacked_experts(tmp_path: Path, native_stop: bool) -> None:
    """transformers issue 48805: a resume warned, and trained on with random experts."""
    straight = trainer(tmp_path / "straight", net=mixtral(), native=True)
    straight.train()
    trainer(tmp_path / "run", StopAt(4), net=mixtral(), native=native_stop).train()
    loaded = MixtralForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4").state_dict()
    recorder, other = WeightRecorder(), mixtral()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    resumed = trainer(tmp_path / "run", recorder, net=other)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, recorder.weights[name]) for name, tensor in loaded.items())
    check_same(resumed, straight)
    with open_hub_names(tmp_path / "run" / "checkpoint-6") as source:
        experts = source["model"]["model.layers.1.block_sparse_moe.experts.3.w3.weight"][...]
    assert torch.equal(
        experts, straight.model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][3, 24:]
    )
    assert uc.verify(tmp_path / "run" / "checkpoint-6", deep=True).ok


def test_best_checkpoint_of_stock_restores_stacked_experts(tmp_path: Path) -> None:
    """The stock Trainer leaves experts of the last step beside the best of all other weights."""
    scores = iter([2.0, 1.0])
    arguments: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    for native, steps in ((True, 1), (False, 2)):
        run = trainer(tmp_path, net=mixtral(), native=native, max_steps=steps, **arguments)
        run.compute_metrics = lambda _: {"score": next(scores)}
        run.train(resume_from_checkpoint=not native)
    best = tmp_path / "checkpoint-1"
    assert run.state.best_model_checkpoint == str(best)
    expected = MixtralForCausalLM.from_pretrained(best).state_dict()
    check_equal(run.model.state_dict(), expected)

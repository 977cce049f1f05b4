"""Files of four Megatron-LM ranks are resumed from and converted by two ranks under FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.megatrons import Job, write
from tests.support.processes.launch import torchrun


@pytest.mark.slow
def test_resume_under_other_parallelism(tmp_path: Path) -> None:
    job = Job(tp=2, pp=2, optimizer="flat")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.groups,
        intermediate_size=job.ffn,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path / "hub")
    torch.manual_seed(0)
    shapes = {
        name: tensor.shape
        for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()
    }
    hub = {
        key: {name: torch.randn(shape) for name, shape in shapes.items()}
        for key in ("param", "exp_avg", "exp_avg_sq")
    }
    torch.save(hub, tmp_path / "hub.pt")
    write(tmp_path / "job", job, hub)
    torchrun(2, "worker_megatron.py", tmp_path, timeout_seconds=180)

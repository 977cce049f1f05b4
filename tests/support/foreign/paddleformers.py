"""Folders that PaddleFormers' Trainer wrote, and the values that it had in memory.
`fixtures/flex/README.md` names their origin.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from unified_ckpt.core.sharding.declarations import Key

FIXTURES = Path(__file__).parents[2] / "fixtures" / "flex" / "trainer"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOMENTS = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 2


def copied(name: str, to: Path) -> Path:
    """Copy a run's only step to change."""
    return Path(shutil.copytree(FIXTURES / name / f"checkpoint-{STEPS}", to))


def expected_tensors(name: str, *, tied: bool = False) -> dict[Key, torch.Tensor]:
    """A run's tensors in torch's names and layout. The optimizer has the embedding as the head."""
    tensors: dict[Key, torch.Tensor] = {}
    with np.load(FIXTURES / f"{name}.expected.npz") as oracle:
        for key in oracle:
            kind, full_name = key.split("/")
            array = torch.from_numpy(oracle[key])
            owner, _, state = (full_name, "", "") if kind == "model" else full_name.rpartition(".")
            array = array.T if owner.split(".")[-2] in LINEAR and array.dim() == 2 else array
            owner = EMBEDDING if tied and owner == HEAD else owner
            if kind == "model":
                tensors["model", owner] = array.bfloat16()
            elif state == "w_0":
                tensors["master_weights", owner] = array
            elif state in MOMENTS:
                tensors["optimizer", f"{owner}/{MOMENTS[state]}"] = array
                tensors["optimizer", f"{owner}/step"] = torch.tensor(float(STEPS))
    return tensors


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    """A model of the fixtures' size."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def shard_optimizer(folder: Path) -> None:
    """Cut a step's master weights and optimizer as sharding of degree 2 does.

    All values of a state lie in one flat buffer, each parameter padded to 256 bytes. Each rank
    writes the pieces that lie in its half. A parameter that both have is in the index once.
    """
    for stem in ("master_weights", "optimizer"):
        tensors = load_file(folder / f"{stem}-00001-of-00001.safetensors")
        (folder / f"{stem}-00001-of-00001.safetensors").unlink()
        by_state: dict[str, list[str]] = {}
        for name in tensors:
            by_state.setdefault(name.partition("/")[2], []).append(name)
        ranks: list[dict[str, torch.Tensor]] = [{}, {}]
        for state_name, names in by_state.items():
            padded = {name: _padded(tensors[name].flatten()) for name in names}
            half = sum(map(len, padded.values())) // 2
            start = 0
            for name, values in padded.items():
                for rank, piece in enumerate((values[: max(0, half - start)], values)):
                    piece = piece[max(0, half - start) :] if rank else piece
                    is_scalar = "pow_acc" in state_name and len(piece)
                    ranks[rank] |= (
                        {name: tensors[name] if is_scalar else piece} if len(piece) else {}
                    )
                start += len(values)
        weight_map: dict[str, str] = {}
        for rank, pieces in enumerate(ranks, 1):
            file = f"{stem}-{rank:05d}-of-00002.safetensors"
            save_file({n: t.clone() for n, t in pieces.items()}, folder / file, {"format": "np"})
            weight_map |= dict.fromkeys(pieces, file)
        path = folder / f"{stem}.safetensors.index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "weight_map": weight_map}))


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % 64))

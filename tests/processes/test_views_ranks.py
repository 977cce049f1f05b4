"""Views on real ranks: other names and shapes, resumed from under FSDP2 and converted; a larger
vocabulary under FSDP2 and TP.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import unified_ckpt as uc
from tests.support.processes.launch import torchrun

RULES = """
[[rules]]
match = ["h.{i}.gate", "h.{i}.up"]
steps = [{transpose = [0, 1]}]
concat = 0
to = "layers.{i}.weight"

[[rules]]
match = "h.{i}.bias"
to = "layers.{i}.bias"

[[rules]]
match = "head"
steps = [{reshape = [5, 2, 7]}, {permute = [0, 2, 1]}, {reshape = [5, 14]}]
to = "out.weight"
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(6, 7))
        self.bias = nn.Parameter(torch.randn(14))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Parameter(torch.randn(5, 14))


def renamed(tensors: dict[str, torch.Tensor], ending: str) -> dict[str, torch.Tensor]:
    """What the rules say, by hand."""
    found = {f"out.weight{ending}": tensors["head"].reshape(5, 2, 7).transpose(1, 2).reshape(5, 14)}
    for i in range(3):
        found[f"layers.{i}.weight{ending}"] = torch.cat(
            [tensors[f"h.{i}.gate"].T, tensors[f"h.{i}.up"].T]
        )
        found[f"layers.{i}.bias{ending}"] = tensors[f"h.{i}.bias"]
    return found


def test_ranks_go_on_through_rules_and_convert_by_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Apart()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        sum(
            (parameter * torch.randn(parameter.shape)).square().sum()
            for parameter in model.parameters()
        ).backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):  # one process
        dcp.save(
            {"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "old", no_dist=True
        )
    whole = renamed(dict(model.state_dict()), "")
    for key in ("exp_avg", "exp_avg_sq"):
        whole |= renamed(
            {name: optimizer.state[p][key] for name, p in model.named_parameters()}, f"/{key}"
        )
    whole |= {f"{name}/step": torch.tensor(2.0) for name in renamed(dict(model.state_dict()), "")}
    torch.save(whole, tmp_path / "whole.pt")
    (tmp_path / "rules.toml").write_text(RULES)
    torchrun(2, "worker_views.py", tmp_path, timeout_seconds=120)
    assert uc.verify(tmp_path / "new", deep=True).problems == ()
    with uc.open(tmp_path / "new") as opened:
        found = {name: view[...] for part in opened.parts for name, view in opened[part].items()}
    assert found.keys() == whole.keys()
    assert [name for name, tensor in whole.items() if not torch.equal(found[name], tensor)] == []


def test_ranks_under_fsdp_and_tp_go_on_with_a_larger_vocabulary(tmp_path: Path) -> None:
    """One call, sharded along the dim that grows by both: the steps are those of one process that
    grew its own state by hand.
    """
    torchrun(4, "worker_grow.py", tmp_path, timeout_seconds=180)
    assert uc.verify(tmp_path / "d", deep=True).problems == ()

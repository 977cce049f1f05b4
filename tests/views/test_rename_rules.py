"""Rename rules: names, splits and joins of tensors and what follows them, against torch."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import unified_ckpt as uc
from tests.support.optimizers import FusedAdam
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import parse_renames
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import make_checkpointer, run_ranks

QUICK = uc.SaveOptions(fsync=False)


class Block(nn.Module):
    """As its own author calls things: fused, and [in, out]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(width, 3 * width))
        self.up = nn.Parameter(torch.randn(2 * width, width))
        self.gate = nn.Parameter(torch.randn(2 * width, width))
        self.norm = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.qkv).chunk(3, -1)
        y = torch.tanh(q * k + v) * self.norm
        return x + (torch.tanh(y @ self.gate.T) * (y @ self.up.T)).sum(-1, keepdim=True)


class FusedModel(nn.Module):
    """A model with another author's names: fused attention, weights as [in, out]."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.emb = nn.Parameter(torch.randn(7, width))
        self.h = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb[ids]
        for block in self.h:
            x = block(x)
        return x @ self.emb.T


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, width, bias=False) for _ in range(3)
        )
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.norm = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.q_proj(x) * self.k_proj(x) + self.v_proj(x)) * self.norm
        gate, up = self.gate_up(y).chunk(2, -1)
        return x + (torch.tanh(gate) * up).sum(-1, keepdim=True)


class SplitModel(nn.Module):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


RULES = """
[[rules]]
match = "emb"
to = "embed.weight"

[[rules]]
match = "h.{i}.qkv"
steps = [{transpose = [0, 1]}]
split = {dim = 0}
to = ["layers.{i}.q_proj.weight", "layers.{i}.k_proj.weight", "layers.{i}.v_proj.weight"]

[[rules]]
match = ["h.{i}.gate", "h.{i}.up"]
concat = 0
to = "layers.{i}.gate_up.weight"

[[rules]]
regex = 'h\\.(\\d+)\\.norm'
to = "layers.{1}.norm"
"""
BACK: dict[str, Any] = {
    "unmatched": "error",
    "rules": [
        {"match": "embed.weight", "to": "emb"},
        {
            "match": [f"layers.{{i}}.{one}_proj.weight" for one in "qkv"],
            "steps": [{"permute": [1, 0]}],
            "concat": 1,
            "to": "h.{i}.qkv",
        },
        {
            "match": "layers.{i}.gate_up.weight",
            "split": {"sizes": [8, 8]},
            "to": ["h.{i}.gate", "h.{i}.up"],
        },
        {"match": "layers.{i}.norm", "to": "h.{i}.norm"},
    ],
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int
) -> list[float]:
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    states = {
        f"{names[id(p)]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {**model.state_dict(), **states}


def check_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [
        name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)
    ] == []


@pytest.fixture
def rules(tmp_path: Path) -> tuple[SourceOptions, SourceOptions]:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "back.json").write_text(json.dumps(BACK))
    return SourceOptions(rename=str(tmp_path / "rules.toml")), SourceOptions(
        rename=str(tmp_path / "back.json")
    )


def test_training_resumes_under_new_names_and_shapes(
    tmp_path: Path, rules: tuple[SourceOptions, SourceOptions]
) -> None:
    """Fused, split and transposed weights and AdamW state give the losses of one long run."""
    torch.manual_seed(0)
    fused = FusedModel()
    optimizer = adamw(fused)
    train(fused, optimizer, 0, 4)
    uc.save(
        tmp_path / "theirs",
        model=fused,
        optimizer=optimizer,
        step=4,
        extra={"seen": 20},
        options=QUICK,
    )
    saved = {name: value.clone() for name, value in state_of(fused, optimizer).items()}
    expected = train(fused, optimizer, 4, 4)

    split = SplitModel()
    fresh = torch.optim.AdamW(split.parameters())
    report = uc.load(
        tmp_path / "theirs", model=split, optimizer=fresh, options=uc.LoadOptions(source=rules[0])
    )
    assert (report.step, report.extra) == (4, {"seen": 20})
    assert fresh.param_groups[0]["lr"] == 0.02
    assert torch.equal(split.layers[1].k_proj.weight, saved["h.1.qkv"].T[4:8])
    uc.save(tmp_path / "ours", model=split, optimizer=fresh, step=4, options=QUICK)
    assert train(split, fresh, 4, 4) == pytest.approx(expected, rel=1e-5)

    again = FusedModel()
    back = torch.optim.AdamW(again.parameters())
    uc.load(tmp_path / "ours", model=again, optimizer=back, options=uc.LoadOptions(source=rules[1]))
    check_same(state_of(again, back), saved)


def save(path: Path, **parts: dict[str, torch.Tensor]) -> Path:
    uc.save(path, **parts, options=QUICK)
    return path


def open_renamed(
    path: Path, rules_file: dict[str, Any] | list[dict[str, Any]], part: str = "model"
) -> dict[str, torch.Tensor]:
    """Open the model part under the rules."""
    file = path.parent / "told.json"
    file.write_text(
        json.dumps({"rules": rules_file} if isinstance(rules_file, list) else rules_file)
    )
    with uc.open(path, options=SourceOptions(rename=str(file))) as opened:
        return {name: view[...] for name, view in opened[part].items()}


def test_fused_attention_of_megatron_is_split(tmp_path: Path) -> None:
    """Rows of a group are queries, key, value: [groups * (queries + 2) * head_dim, hidden]."""
    groups, queries, head, hidden = 2, 3, 4, 5
    fused = torch.randn(groups * (queries + 2) * head, hidden)
    grouped = fused.view(groups, queries + 2, head, hidden)
    shaped = {"reshape": [-1, hidden]}
    rule = {
        "match": "layers.{i}.linear_qkv.weight",
        "steps": [{"reshape": [groups, queries + 2, head, hidden]}],
        "to": [
            {"name": "layers.{i}.q_proj.weight", "steps": [{"slice": [1, 0, queries]}, shaped]},
            {
                "name": "layers.{i}.k_proj.weight",
                "steps": [{"slice": [1, queries, queries + 1]}, shaped],
            },
            {"name": "layers.{i}.v_proj.weight", "steps": [{"slice": [1, queries + 1]}, shaped]},
        ],
    }
    tensors = open_renamed(
        save(tmp_path / "c", model={"layers.0.linear_qkv.weight": fused}), [rule]
    )
    expected = {
        "q": grouped[:, :queries],
        "k": grouped[:, queries : queries + 1],
        "v": grouped[:, queries + 1 :],
    }
    check_same(
        tensors,
        {
            f"layers.0.{projection}_proj.weight": value.reshape(-1, hidden)
            for projection, value in expected.items()
        },
    )


def test_moments_of_scaled_parameters_are_scaled_as_gradients_are(tmp_path: Path) -> None:
    w = torch.randn(3, 4)
    state = {
        "w/exp_avg": torch.randn(3, 4),
        "w/exp_avg_sq": torch.rand(3, 4),
        "w/step": torch.tensor(5.0),
    }
    path = save(tmp_path / "c", model={"w": w}, optimizer=state)
    rules_list = [{"match": "w", "steps": [{"scale": 4}], "to": "v"}]
    check_same(open_renamed(path, rules_list), {"v": w * 4})
    expected = {
        "v/exp_avg": state["w/exp_avg"] / 4,
        "v/exp_avg_sq": state["w/exp_avg_sq"] / 16,
        "v/step": state["w/step"],
    }
    check_same(open_renamed(path, rules_list, "optimizer"), expected)
    save(tmp_path / "d", model={"w": w}, optimizer={"w/strange": torch.randn(3, 4)})
    with pytest.raises(
        FormatError,
        match="optimizer:v/strange: the rule scales a parameter, and the effect on 'strange' "
        "is unknown",
    ):
        open_renamed(tmp_path / "d", rules_list, "optimizer")


def test_counts_of_joined_parameters_must_be_equal(tmp_path: Path) -> None:
    def path(name: str, second: float) -> Path:
        model = {"a": torch.ones(2), "b": torch.ones(2)}
        return save(
            tmp_path / name,
            model=model,
            optimizer={"a/step": torch.tensor(3.0), "b/step": torch.tensor(second)},
        )

    rules_list = [{"match": ["a", "b"], "concat": 0, "to": "ab"}]
    check_same(
        open_renamed(path("c", 3.0), rules_list, "optimizer"), {"ab/step": torch.tensor(3.0)}
    )
    with pytest.raises(
        FormatError, match="optimizer:ab/step: tensor 1 of 2 that are merged into one differs"
    ):
        open_renamed(path("d", 4.0), rules_list, "optimizer")


def test_layers_are_stacked_and_unstacked_by_rules(tmp_path: Path) -> None:
    model = {f"h.{i}.w": torch.randn(2, 3) for i in range(11)}
    path = save(
        tmp_path / "c",
        model=model,
        optimizer={f"h.{i}.w/step": torch.tensor(2.0) for i in range(11)},
    )
    rules_list = [{"match": "h.{layer}.w", "stack": {"over": "layer", "dim": 1}, "to": "h.w"}]
    stacked = open_renamed(path, rules_list)
    check_same(stacked, {"h.w": torch.stack([model[f"h.{i}.w"] for i in range(11)], 1)})
    check_same(open_renamed(path, rules_list, "optimizer"), {"h.w/step": torch.tensor(2.0)})
    save(tmp_path / "s", model=stacked, optimizer={"h.w/step": torch.tensor(2.0)})
    back = [{"match": "h.w", "unstack": {"over": "i", "dim": 1}, "to": "h.{i}.w"}]
    check_same(open_renamed(tmp_path / "s", back), model)
    check_same(
        open_renamed(tmp_path / "s", back, "optimizer"),
        {f"h.{i}.w/step": torch.tensor(2.0) for i in range(11)},
    )


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    shared = torch.randn(3, 2)
    path = save(tmp_path / "c", model={"emb": shared, "head": shared})
    file = tmp_path / "told.json"
    file.write_text(
        json.dumps({"rules": [{"match": "emb", "to": "embed"}, {"match": "head", "to": "lm_head"}]})
    )
    with uc.open(path, options=SourceOptions(rename=str(file))) as opened:
        assert list(opened["model"]) == ["embed"]
        assert torch.equal(opened["model"]["lm_head"][...], shared)
    permuted = open_renamed(path, [{"match": "emb", "steps": [{"permute": [1, 0]}], "to": "embed"}])
    check_same(permuted, {"embed": shared.T, "head": shared})  # no more the same


def test_parts_and_unmatched_tensors(tmp_path: Path) -> None:
    path = save(
        tmp_path / "c",
        model={"a": torch.ones(1), "b": torch.ones(2)},
        optimizer={"a/mu": torch.ones(1), "b/mu": torch.ones(2)},
    )
    optimizer_rules = [{"match": "*/mu", "to": "{1}/exp_avg", "parts": "optimizer"}]
    assert set(open_renamed(path, optimizer_rules, "optimizer")) == {"a/exp_avg", "b/exp_avg"}
    assert set(open_renamed(path, optimizer_rules)) == {"a", "b"}
    assert set(open_renamed(path, {"unmatched": "drop", "rules": [{"match": "a", "to": "c"}]})) == {
        "c"
    }
    assert set(open_renamed(path, [{"match": "a", "drop": True}])) == {"b"}
    assert set(open_renamed(path, [{"match": "a", "drop": True}], "optimizer")) == {"b/mu"}
    assert set(open_renamed(path, [{"match": "x", "to": "y", "optional": True}])) == {"a", "b"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "no tensor matches",
        {"rules": [{"match": "zz*", "to": "y"}]},
        r"rule 1 \(zz\*\): matches no tensor",
    ),
    (
        "no rule",
        {"unmatched": "error", "rules": [{"match": "q", "to": "y"}]},
        "model:k: no rule matches",
    ),
    (
        "one name",
        {"rules": [{"match": "q", "to": "k"}]},
        "model:k: is the new name of model:k and of model:q",
    ),
    (
        "one name by a star",
        {"rules": [{"match": "?", "to": "k"}]},
        "model:k: k and q get the same name",
    ),
    (
        "no neighbour",
        {"rules": [{"match": ["q", "v"], "concat": 0, "to": "qv"}]},
        "model:qv: no tensor matches v to accompany q",
    ),
    (
        "a layer is missing",
        {"rules": [{"match": "h.{i}", "to": "h", "stack": {"over": "i"}}]},
        "model:h: 1 is missing in a stack of 0, 2",
    ),
    (
        "a last layer that lacks a tensor",
        {"rules": [{"regex": r"(h|n)\.(?P<i>\d+)", "to": "{1}", "stack": {"over": "i"}}]},
        "model: n stacks 1 tensors, h 2; add 1 to both, or set `partial = true`",
    ),
    (
        "no number",
        {"rules": [{"match": "{i}", "to": "h", "stack": {"over": "i"}}]},
        "got 'k' as stack index of",
    ),
    (
        "rows twice",
        {
            "rules": [
                {
                    "match": "q",
                    "to": [
                        {"name": "a", "steps": [{"slice": [0, 0, 2]}]},
                        {"name": "b", "steps": [{"slice": [0, 1, 3]}]},
                    ],
                }
            ]
        },
        r"model:a: the rule leaves out box \(3, 0\) \+ \(1, 4\) of model:q, of shape \(4, 4\); "
        r"use each element once",
    ),
    (
        "rows are lost",
        {"rules": [{"match": "q", "steps": [{"slice": [0, 0, 3]}], "to": "y"}]},
        r"outputs 12 elements \(y\) of 16; use all",
    ),
    (
        "uneven",
        {"rules": [{"match": "q", "split": {}, "to": ["a", "b", "c"]}]},
        r"model:a: cannot split dim 0 of shape \(4, 4\) into 3",
    ),
    (
        "sizes",
        {"rules": [{"match": "q", "split": {"sizes": [3, 2]}, "to": ["a", "b"]}]},
        r"slice of dim 0 of shape \(4, 4\): got \[3, 5\)",
    ),
    (
        "shapes",
        {"rules": [{"match": ["q", "k"], "concat": 0, "to": "a"}]},
        r"concat along dim 0: got shapes \(4, 4\), \(5,\)",
    ),
    (
        "dtypes",
        {"rules": [{"match": ["q", "n"], "concat": 0, "to": "a"}]},
        "model:a: got operands of dtypes F32, I64, expected one",
    ),
    (
        "whole numbers",
        {"rules": [{"match": "n", "steps": [{"scale": 2}], "to": "a"}]},
        "model:a: cannot scale torch.int64 by 2",
    ),
    (
        "no hole",
        {"rules": [{"match": "q.*", "to": "a.{i}"}]},
        "rules.0: 'a.{i}': got unknown placeholder i, expected 1",
    ),
    ("no way", {"rules": [{"match": "q"}]}, "expected to, drop or pad"),
    (
        "two ways",
        {"rules": [{"match": "q", "regex": "q", "to": "a"}]},
        "expected either match or regex",
    ),
    ("no pattern", {"rules": [{"regex": "(", "to": "a"}]}, r"'\(': not a valid pattern"),
    ("a wrong word", {"rules": [{"match": "q", "too": "a"}]}, "rules.0.too"),
    (
        "two changes",
        {"rules": [{"match": "q", "to": "a", "steps": [{"scale": 2, "permute": [0]}]}]},
        "expected exactly one operation",
    ),
    (
        "several patterns",
        {"rules": [{"match": ["q", "k"], "to": "a"}]},
        "expected concat if, and only if, there are several",
    ),
]


@pytest.mark.parametrize(
    ("told", "text"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED]
)
def test_ambiguous_rules_are_refused_by_name(
    tmp_path: Path, told: dict[str, Any], text: str
) -> None:
    model = {
        "q": torch.ones(4, 4),
        "k": torch.ones(5),
        "n": torch.ones(4, 4, dtype=torch.int64),
        "h.0": torch.ones(1),
        "h.2": torch.ones(1),
    }
    if "stacks" in text:
        model |= {"h.1": model.pop("h.2"), "n.0": torch.ones(2)}
    if told["rules"][0].get("match") == "?":
        del model["n"]
    with pytest.raises(FormatError, match=text):
        open_renamed(save(tmp_path / "c", model=model), told)


def test_refused_load_leaves_the_target_unchanged(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model={"q": torch.ones(4)})
    target = {"q": torch.zeros(4)}
    (tmp_path / "r.toml").write_text('[[rules]]\nmatch = "z"\nto = "y"\n')
    with pytest.raises(FormatError, match="matches no tensor"):
        uc.load(
            path,
            model=target,
            options=uc.LoadOptions(source=SourceOptions(rename=str(tmp_path / "r.toml"))),
        )
    with pytest.raises(uc.NotFoundError, match=r"none.toml: cannot be read"):
        uc.load(
            path,
            model=target,
            options=uc.LoadOptions(source=SourceOptions(rename=str(tmp_path / "none.toml"))),
        )
    assert not target["q"].any()


def test_merged_param_groups_must_agree(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    groups = [
        {"params": model["a"].parameters(), "lr": 0.1},
        {"params": model["b"].parameters(), "lr": 0.2},
    ]
    optimizer = torch.optim.SGD(groups)
    uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=QUICK)
    rules_list = [{"match": ["a.weight", "b.weight"], "concat": 0, "to": "ab.weight"}]
    with pytest.raises(
        FormatError, match=r"ab.weight: merges parameters whose hyperparameters differ"
    ):
        open_renamed(tmp_path / "c", rules_list)


@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e-320])
def test_scale_that_overflows_moments_is_refused(tmp_path: Path, scale: float) -> None:
    path = save(
        tmp_path / "c", model={"w": torch.ones(2)}, optimizer={"w/exp_avg_sq": torch.ones(2)}
    )
    rules_list = [{"match": "w", "steps": [{"scale": scale}], "to": "v"}]
    with pytest.raises(
        FormatError,
        match=r"scale 1e[-+]\d+ to the power -2 is (0.0|inf); expected a finite",
    ):
        open_renamed(path, rules_list, "optimizer")


@pytest.mark.parametrize(
    "told",
    [
        {"match": "{i}.weight", "steps": [{"transpose": [0, 1]}], "to": "{i}.w"},
        {"match": ["0.weight", "1.weight"], "concat": 0, "to": "w"},
    ],
    ids=["turned", "joined"],
)
def test_factored_state_does_not_follow_its_parameter(tmp_path: Path, told: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    uc.save(tmp_path / "c", model=model, optimizer=optimizer, options=QUICK)
    with pytest.raises(
        FormatError, match=r"'(row|col)_var' has shape \((1, 4|4, 1)\), its parameter \(4, 4\)"
    ):
        open_renamed(tmp_path / "c", [told], "optimizer")
    assert open_renamed(tmp_path / "c", [told]), "without the optimizer"
    assert "a/row_var" in open_renamed(
        tmp_path / "c", [{"match": "0.weight", "to": "a"}], "optimizer"
    ), "a name alone"


# larger targets


class Small(nn.Module):
    """A model with some vocabulary size, its output optionally tied to its input."""

    def __init__(
        self, vocabulary: int, *, tied: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, 4, dtype=dtype)
        self.head = nn.Linear(4, vocabulary, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.emb(ids)))


PADDED: list[dict[str, Any]] = [{"match": ["emb.weight", "head.weight"], "pad": 0}]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.02, centered=True, momentum=0.9),
}


def padded_load(path: Path, rules: Any = PADDED, **targets: Any) -> uc.LoadReport:
    return uc.load(path, **targets, options=uc.LoadOptions(source=SourceOptions(rename=rules)))


def grow_by_hand(
    old: nn.Module,
    old_optimizer: torch.optim.Optimizer,
    new: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Copy parameters and state into the first rows; missing state begins at zero."""
    with torch.no_grad():
        for (_, source), (_, target) in zip(
            old.named_parameters(), new.named_parameters(), strict=True
        ):
            target[: len(source)] = source
            for key, value in old_optimizer.state[source].items():
                rows = optimizer.state[target].get(key)
                if value.dim() > 0:
                    new_rows = (
                        torch.zeros_like(target)[len(source) :]
                        if rows is None
                        else rows[len(source) :]
                    )
                    value = torch.cat([value, new_rows])
                optimizer.state[target][key] = value.clone()


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_larger_vocabulary_resumes_as_if_grown_by_hand(
    tmp_path: Path, kind: str, tied: bool, warm: bool
) -> None:
    """New rows are as the target had them, in the model and in its optimizer; further steps are
    bitwise those of the oracle.
    """
    torch.manual_seed(0)
    old = Small(7, tied=tied)
    optimizer = OPTIMIZERS[kind](old.parameters())
    train(old, optimizer, 0, 3)
    uc.save(tmp_path / "c", model=old, optimizer=optimizer, options=QUICK)
    larger = Small(9, tied=tied)
    pairs = [
        (model, OPTIMIZERS[kind](model.parameters())) for model in (larger, copy.deepcopy(larger))
    ]
    for model, opt in pairs if warm else []:
        train(model, opt, 20, 1)
    grow_by_hand(old, optimizer, *pairs[1])
    for _ in range(2):  # the second time from the larger checkpoint: the rule changes nothing there
        report = padded_load(tmp_path / "c", model=larger, optimizer=pairs[0][1])
        check_same(state_of(*pairs[0]), state_of(*pairs[1]))
        (tmp_path / "c").rename(tmp_path / "old") if report.notes else None
        uc.save(
            tmp_path / "c",
            model=larger,
            optimizer=pairs[0][1],
            options=uc.SaveOptions(fsync=False, if_exists="keep"),
        )
    assert not report.notes
    assert train(*pairs[0], 3, 3) == train(*pairs[1], 3, 3)
    check_same(state_of(*pairs[0]), state_of(*pairs[1]))


def test_a_manager_restores_into_a_larger_vocabulary(tmp_path: Path) -> None:
    """Also what plain torch has saved, whose optimizer state is by position."""
    small, large = Small(7), Small(9)
    optimizer, large_optimizer = adamw(small), adamw(large)
    train(small, optimizer, 0, 2)
    options = uc.LoadOptions(source=SourceOptions(rename=PADDED))
    with uc.CheckpointManager(
        tmp_path / "run", options=uc.ManagerOptions(interval_steps=1), load_options=options
    ) as manager:
        manager.save(2, model=small, optimizer=optimizer)
        manager.wait()
        report = manager.restore(model=large, optimizer=large_optimizer)
    assert report is not None
    assert report.step == 2
    torch.save(
        {"model": small.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt"
    )
    again = Small(9)
    back = adamw(again)
    uc.load(tmp_path / "c.pt", model=again, optimizer=back, options=options)
    for model, opt in ((large, large_optimizer), (again, back)):
        states = {
            name: tensor[:7] if tensor.dim() else tensor
            for name, tensor in state_of(model, opt).items()
        }
        check_same(states, state_of(small, optimizer))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize(
    ("dtype", "remainders"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["masters", "remainders", "copies"],
)
def test_masters_in_the_optimizer_grow_with_the_model(
    tmp_path: Path, dtype: torch.dtype, remainders: bool, warm: bool
) -> None:
    """The new rows of a fresh optimizer's masters are the model's: the next step does not wipe
    them.
    """
    make = partial(FusedAdam, lr=0.02, master_weights=True, store_param_remainders=remainders)
    old, new = Small(7, dtype=dtype), Small(9, dtype=dtype)
    optimizer, new_optimizer = make(old.parameters()), make(new.parameters())
    train(old, optimizer, 0, 2)
    uc.save(tmp_path / "c", model=old, optimizer=optimizer, options=QUICK)
    if warm:
        train(new, new_optimizer, 20, 1)
    expected = []
    for param, small in zip(new.parameters(), old.parameters(), strict=True):
        whole = param.detach().clone()
        master = torch.zeros_like(whole, dtype=torch.int16) if remainders else whole.float()
        fresh = {
            "exp_avg": torch.zeros(9, 4),
            "exp_avg_sq": torch.zeros(9, 4),
            "master_param": master,
        }
        rows = {"": whole, **(new_optimizer.state[param] if warm else fresh)}
        stored = {"": small.detach(), **optimizer.state[small]}
        expected.append({key: torch.cat([stored[key], value[7:]]) for key, value in rows.items()})
    padded_load(tmp_path / "c", model=new, optimizer=new_optimizer)
    for param, state in zip(new.parameters(), expected, strict=True):
        check_same({"": param.detach(), **new_optimizer.state[param]}, state)
    train(new, new_optimizer, 2, 1)


KINDS = ("", "exp_avg", "exp_avg_sq", "master_param")  # the parameter, its state, its master


def slice_of(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """A rank's slices as arguments of a save or load, without state if there is none."""
    pieces = tensor.chunk(world, dim)
    return (pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)).clone()


def sliced(
    wholes: dict[str, torch.Tensor], dim: int, comm: Comm
) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """A rank's slices as arguments of a save or a load; without state where there is none."""
    local = {kind: slice_of(tensor, dim, comm.rank, comm.world) for kind, tensor in wholes.items()}
    model = nn.ParameterDict({"w": nn.Parameter(local.pop(""))})
    optimizer = torch.optim.AdamW(model.parameters())
    if local:
        optimizer.state[model["w"]] = {"step": torch.tensor(2.0), **local}
    layout = uc.Layout(
        mesh={"tp": comm.world}, rules={"w": {"tp": dim}}, shapes={"w": tuple(wholes[""].shape)}
    )
    return {"model": model, "optimizer": optimizer, "layout": layout}, optimizer


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.tuples(*[st.integers(1, 9)] * 2),
    st.tuples(*[st.integers(0, 5)] * 2),
    st.data(),
)
@settings(max_examples=40)
def test_slices_grow_over_any_ranks(
    saving: int, loading: int, shape: tuple[int, int], more: tuple[int, int], data: st.DataObject
) -> None:
    """A fresh optimizer, or a warm one with masters, cut along any dim: what is stored, and around
    it what was there.
    """
    warm, dims = (
        data.draw(st.booleans()),
        data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1))),
    )
    larger = (shape[0] + more[0], shape[1] + more[1])

    def draw_tensors(seed: int, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {
            kind: torch.rand(shape, generator=draw).to(
                torch.bfloat16 if warm and not kind else torch.float32
            )
            for kind in KINDS
        }

    saved, target_tensors = draw_tensors(1, shape), draw_tensors(2, larger)
    expected = {
        kind: tensor.clone() if warm or not kind else torch.zeros(larger)
        for kind, tensor in target_tensors.items()
    }
    for kind in KINDS if warm else KINDS[:3]:
        expected[kind][: shape[0], : shape[1]] = saved[kind]
    if not warm:
        del (
            target_tensors["exp_avg"],
            target_tensors["exp_avg_sq"],
            target_tensors["master_param"],
            saved["master_param"],
            expected["master_param"],
        )

    def act(comm: Comm) -> None:
        targets, optimizer = sliced(target_tensors, dims[1], comm)
        with make_checkpointer(comm) as checkpointer:
            options = uc.LoadOptions(source=SourceOptions(rename=[{"match": "w", "pad": [0, 1]}]))
            checkpointer.load(f"{root}/c", **targets, options=options)
        actual = {"": targets["model"]["w"].detach(), **optimizer.state[targets["model"]["w"]]}
        assert actual.pop("step") == 2
        check_same(
            actual,
            {
                kind: slice_of(tensor, dims[1], comm.rank, comm.world)
                for kind, tensor in expected.items()
            },
        )

    with TemporaryDirectory() as root:
        run_ranks(
            saving,
            lambda comm: make_checkpointer(comm).save(
                f"{root}/c", **sliced(saved, dims[0], comm)[0], options=QUICK
            ),
        )
        run_ranks(loading, act)


@pytest.mark.parametrize("parts", [None, ("master_weights", "ema")], ids=["all", "no model"])
def test_masters_and_averages_keep_existing_rows(
    tmp_path: Path, parts: tuple[str, ...] | None
) -> None:
    """A bfloat16 model, stored or made from its masters, masters in a dict, and an average of the
    weights.
    """
    saved = {"emb.weight": torch.randn(7, 4)}
    half = {name: tensor.bfloat16() for name, tensor in saved.items()}
    path, ema = tmp_path / "c", {"emb.weight": saved["emb.weight"] * 2}
    uc.save(
        path,
        model=half,
        master_weights=saved,
        parts={"ema": ema},
        options=uc.SaveOptions(fsync=False, parts=parts),
    )
    targets = {part: {"emb.weight": torch.randn(9, 5)} for part in ("master_weights", "ema")}
    model = {"emb.weight": targets["master_weights"]["emb.weight"].bfloat16()}
    before = {
        part: copy.deepcopy(of["emb.weight"]) for part, of in (*targets.items(), ("model", model))
    }
    rules = [{"match": "emb.*", "pad": [0, -1]}]
    padded_load(
        path,
        rules,
        model=model,
        master_weights=targets["master_weights"],
        parts={"ema": targets["ema"]},
    )
    stored = {
        "model": half["emb.weight"],
        "master_weights": saved["emb.weight"],
        "ema": ema["emb.weight"],
    }
    for part, tensor in before.items():
        tensor[:7, :4] = stored[part]
        assert torch.equal({"model": model, **targets}[part]["emb.weight"], tensor)
    larger = {"emb.weight": torch.zeros(9, 5)}
    padded_load(path, rules, model=larger)
    assert torch.equal(larger["emb.weight"][:7, :4], saved["emb.weight"])


@pytest.mark.parametrize(
    ("rules", "shape", "text"),
    [
        (
            [{"match": "w", "pad": 0}],
            (7, 4),
            r"model:w: checkpoint has shape \(8, 4\), target has \(7, 4\)$",
        ),
        (
            [{"match": "w", "pad": 1}],
            (9, 4),
            r"model:w: checkpoint has shape \(8, 4\), target has \(9, 4\); .*Source.*'pad': 0",
        ),
        (
            [{"match": "w", "pad": 0}],
            (8, 4, 1),
            r"model:w: checkpoint has shape \(8, 4\), target has \(8, 4, 1\)$",
        ),
        (
            None,
            (9, 5),
            r"model:w: .*target has \(9, 5\); .*SourceOptions\(rename=\[\{'match': 'w', 'pad': "
            r"\[0, 1\]\}\]\)",
        ),
    ],
    ids=["smaller", "another dim", "more dims", "no rule"],
)
def test_growth_without_pad_rule_is_refused(
    tmp_path: Path, rules: Any, shape: tuple[int, ...], text: str
) -> None:
    path, target = save(tmp_path / "c", model={"w": torch.ones(8, 4)}), {"w": torch.zeros(shape)}
    with pytest.raises(uc.MismatchError) as caught:
        padded_load(path, rules, model=target)
    assert re.search(text, caught.value.wrong[0])
    assert not target["w"].any()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            torch.optim.Adafactor,
            r"0.weight/col_var: has shape \(1, 4\), but its parameter is padded.*'match': "
            r"'0.weight/\*'",
        ),
        (
            torch.optim.Rprop,
            r"0.weight/step_size: grows with its parameter, and the initial value of new "
            r"elements is unknown",
        ),
    ],
)
def test_growth_of_unknown_state_is_refused(tmp_path: Path, make: Any, text: str) -> None:
    """Adafactor's rows and columns; a fresh optimizer whose state begins at no zero, which one that
    has been stepped has.
    """
    old, new = (nn.Sequential(nn.Linear(4, rows, bias=False)) for rows in (3, 5))
    optimizer, new_optimizer = make(old.parameters()), make(new.parameters())
    for model, opt in ((old, optimizer), (new, new_optimizer)):
        model(torch.randn(2, 4)).square().sum().backward()
        opt.step()
    path, first = tmp_path / "c", new[0].weight.detach().clone()
    uc.save(path, model=old, optimizer=optimizer, options=QUICK)
    rule = {"match": "*.weight", "pad": [0, 1]}
    with pytest.raises(uc.MismatchError, match=text):
        padded_load(path, [rule], model=new, optimizer=make(new.parameters()))
    assert torch.equal(new[0].weight, first)
    if make is torch.optim.Rprop:
        padded_load(path, [rule], model=new, optimizer=new_optimizer)
        assert torch.equal(
            new_optimizer.state[new[0].weight]["step_size"][:3],
            optimizer.state[old[0].weight]["step_size"],
        )
    else:
        fresh = make(new.parameters())
        padded_load(
            path,
            [{"match": "0.weight/*", "parts": "optimizer", "drop": True}, rule],
            model=new,
            optimizer=fresh,
        )
        assert not fresh.state


def test_rules_in_python_are_those_of_a_file(tmp_path: Path) -> None:
    """Both use one parser; a conversion has no target that a rule could pad."""
    path = save(tmp_path / "c", model={"a.w": torch.ones(2)})
    rules = [{"match": "{x}.w", "to": "{x}.v", "pad": 0}]
    (tmp_path / "r.json").write_text(json.dumps({"rules": rules}))
    for form in (rules, tmp_path / "r.json", SourceOptions(rename=rules).rename):
        target = {"a.v": torch.zeros(3)}
        report = padded_load(path, form, model=target)
        assert target["a.v"].tolist() == [1, 1, 0]
        assert report.notes == (
            "padded; the target keeps its values beyond the stored shape: model:a.v (2,) -> (3,)",
        )
        with pytest.raises(FormatError, match="`pad` has no effect in a conversion"):
            uc.convert(path, tmp_path / "d", source=SourceOptions(rename=form), fsync=False)
    for pad, text in ((True, "rules.0.pad"), ([0, "x"], r"rules.0.pad.1")):
        with pytest.raises(
            FormatError, match=rf"SourceOptions\(rename=...\): {text}: Input should be"
        ):
            SourceOptions(rename=[{"match": "w", "pad": pad}])


def test_toml_and_json_say_the_same() -> None:
    renames = parse_renames(RULES.encode(), file="r.toml")
    assert (
        parse_renames(renames.model_dump_json(exclude_defaults=True).encode(), file="r.json")
        == renames
    )
    with pytest.raises(FormatError, match=r"r.toml: not valid TOML"):
        parse_renames(b"[[rules", file="r.toml")


def test_a_count_of_one_element_is_not_stacked(tmp_path: Path) -> None:
    """Older optimizers store `step` as a tensor of shape (1,)."""
    model = {f"h.{i}": torch.randn(2) for i in range(2)}
    path = save(
        tmp_path / "c",
        model=model,
        optimizer={f"h.{i}/step": torch.tensor([3.0]) for i in range(2)},
    )
    rules_list = [{"match": "h.{i}", "stack": {"over": "i"}, "to": "h"}]
    check_same(open_renamed(path, rules_list, "optimizer"), {"h/step": torch.tensor([3.0])})


def test_experts_are_not_dropped_silently(tmp_path: Path) -> None:
    """As converters of others have done: an expert that one layer lacks, or that is called
    otherwise, is an error that names it.
    """
    model = {f"layers.{i}.experts.{e}.w1": torch.randn(2, 3) for i in range(2) for e in range(4)}
    rule = {
        "match": "layers.{i}.experts.{e}.w1",
        "stack": {"over": "e"},
        "to": "layers.{i}.experts.w1",
    }
    tensors = open_renamed(save(tmp_path / "c", model=model), [rule])
    check_same(
        tensors,
        {
            f"layers.{i}.experts.w1": torch.stack(
                [model[f"layers.{i}.experts.{e}.w1"] for e in range(4)]
            )
            for i in range(2)
        },
    )
    last = model.pop("layers.1.experts.3.w1")
    with pytest.raises(
        FormatError,
        match=r"layers.1.experts.w1 stacks 3 tensors, layers.0.experts.w1 4; add 3 to both",
    ):
        open_renamed(save(tmp_path / "d", model=model), [rule])
    with pytest.raises(FormatError, match=r"layers.1.local_experts.3.w1: no rule matches"):
        open_renamed(
            save(tmp_path / "e", model=model | {"layers.1.local_experts.3.w1": last}),
            {"unmatched": "error", "rules": [rule]},
        )

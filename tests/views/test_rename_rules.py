"""Rename rules compared with torch: names, splits and joins of tensors, and optimizer state."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from tests.support.equality import check_equal
from tests.support.harness import make_checkpointer, run_ranks
from tests.support.runtime.torch_state.optimizers import FusedAdam
from tests.support.torch_training import next_token_loss, state_of, train, whole_state
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.errors import FormatError
from unified_ckpt.format.renames import parse_renames
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.comm import Comm

QUICK = uc.SaveOptions(fsync=False)


def fused_model() -> nn.Module:
    """A model whose attention is fused and whose weights are [in, out]."""
    model = nn.Module()
    model.emb = nn.Parameter(torch.randn(7, 4))
    shapes = {"qkv": (4, 12), "up": (8, 4), "gate": (8, 4), "norm": (4,)}
    model.h = nn.ModuleList(
        nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
        for _ in range(3)
    )
    return model


def split_model() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(7, 4)
    model.layers = nn.ModuleList()
    for _ in range(3):
        layer = nn.ModuleDict({f"{name}_proj": nn.Linear(4, 4, bias=False) for name in "qkv"})
        layer["gate_up"] = nn.Linear(4, 16, bias=False)
        layer.register_parameter("norm", nn.Parameter(torch.zeros(4)))
        model.layers.append(layer)
    return model


def split_tensors(fused: dict[str, torch.Tensor], state: str) -> dict[str, torch.Tensor]:
    """Tensors of `split_model` from those of `fused_model`, or state of them: "/exp_avg"."""
    tensors = {f"embed.weight{state}": fused[f"emb{state}"]}
    for i in range(3):
        layer = {name: fused[f"h.{i}.{name}{state}"] for name in ("qkv", "gate", "up", "norm")}
        for name, tensor in zip("qkv", layer["qkv"].T.chunk(3), strict=True):
            tensors[f"layers.{i}.{name}_proj.weight{state}"] = tensor
        tensors[f"layers.{i}.gate_up.weight{state}"] = torch.cat([layer["gate"], layer["up"]])
        tensors[f"layers.{i}.norm{state}"] = layer["norm"]
    return tensors


def sine_loss(model: nn.Module, _: torch.Generator) -> torch.Tensor:
    """Elementwise, so that a step does the same in any layout of the tensors."""
    return torch.stack([parameter.sin().sum() for parameter in model.parameters()]).sum()


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
            "match": [f"layers.{{i}}.{letter}_proj.weight" for letter in "qkv"],
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


train_on = partial(train, loss_of=partial(next_token_loss, vocabulary=7))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


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
    """Fused, split and transposed weights and AdamW state, and a step from them, bit for bit."""
    torch.manual_seed(0)
    fused, split, again = fused_model(), split_model(), fused_model()
    optimizer, fresh, back = adamw(fused), torch.optim.AdamW(split.parameters()), adamw(again)
    train(fused, optimizer, sine_loss, 0, 4)
    state = {"model": fused, "optimizer": optimizer, "step": 4, "extra": {"seen": 20}}
    uc.save(tmp_path / "theirs", **state, options=QUICK)
    saved = {name: value.clone() for name, value in whole_state(fused, optimizer).items()}
    options = uc.LoadOptions(source=rules[0])
    report = uc.load(tmp_path / "theirs", model=split, optimizer=fresh, options=options)
    assert (report.step, report.extra) == (4, {"seen": 20})
    assert fresh.param_groups[0]["lr"] == 0.02
    uc.save(tmp_path / "ours", model=split, optimizer=fresh, step=4, options=QUICK)
    for model, opt in ((fused, optimizer), (split, fresh)):
        train(model, opt, sine_loss, 4, 1)
    check_equal(split.state_dict(), split_tensors(fused.state_dict(), ""))
    states, expected = state_of(split, fresh), state_of(fused, optimizer)
    for key in ("/exp_avg", "/exp_avg_sq"):
        actual = {name: tensor for name, tensor in states.items() if name.endswith(key)}
        check_equal(actual, split_tensors(expected, key))
    uc.load(tmp_path / "ours", model=again, optimizer=back, options=uc.LoadOptions(source=rules[1]))
    check_equal(whole_state(again, back), saved)


def save(path: Path, **parts: dict[str, torch.Tensor]) -> Path:
    uc.save(path, **parts, options=QUICK)
    return path


@contextmanager
def renamed(path: Path, rules: Any) -> Iterator[SourceView]:
    """Open a checkpoint under rules from a file."""
    file = path.parent / "told.json"
    file.write_text(json.dumps({"rules": rules} if isinstance(rules, list) else rules))
    with uc.open(path, options=SourceOptions(rename=str(file))) as opened:
        yield opened


def read(source: SourceView) -> dict[str, dict[str, torch.Tensor]]:
    return {part: {name: v[...] for name, v in source[part].items()} for part in source.parts}


Parts = dict[str, dict[str, torch.Tensor]]
GROUPS, QUERIES, HEAD, HIDDEN = 2, 3, 4, 5
FUSED = torch.randn(GROUPS, QUERIES + 2, HEAD, HIDDEN)  # rows of a group: queries, key, value
SHAPED = {"reshape": [-1, HIDDEN]}
W = torch.randn(3, 4)
STATE = {"exp_avg": torch.randn(3, 4), "exp_avg_sq": torch.rand(3, 4), "step": torch.tensor(5.0)}
COUNT = torch.tensor(3.0)
LAYERS = {f"h.{i}.w": torch.randn(2, 3) for i in range(11)}
COUNTS = {f"{name}/step": COUNT for name in LAYERS}
STACKED: Parts = {
    "model": {"h.w": torch.stack(list(LAYERS.values()), 1)},
    "optimizer": {"h.w/step": COUNT},
}
EXPERTS = {f"layers.{i}.experts.{e}.w1": torch.randn(2, 3) for i in range(2) for e in range(4)}
EXPERT_RULE = {
    "match": "layers.{i}.experts.{e}.w1",
    "stack": {"over": "e"},
    "to": "layers.{i}.experts.w1",
}
AB: Parts = {
    "model": {"a": torch.ones(1), "b": torch.ones(2)},
    "optimizer": {"a/mu": torch.ones(1), "b/mu": torch.ones(2)},
}
A, B = ({part: dict([list(AB[part].items())[i]]) for part in AB} for i in (0, 1))
TIED = torch.randn(3, 2)
FACTORED = {"0.weight/row_var": torch.rand(4, 1), "0.weight/col_var": torch.rand(1, 4)}
JOIN = [{"match": ["a", "b"], "concat": 0, "to": "ab"}]
SCALE = [{"match": "w", "steps": [{"scale": 4}], "to": "v"}]
RECIPES: dict[str, tuple[Parts, Any, Parts]] = {
    "fused attention of Megatron": (
        {"model": {"layers.0.linear_qkv.weight": FUSED.reshape(-1, HIDDEN)}},
        [
            {
                "match": "layers.{i}.linear_qkv.weight",
                "steps": [{"reshape": [GROUPS, QUERIES + 2, HEAD, HIDDEN]}],
                "to": [
                    {"name": "layers.{i}.q", "steps": [{"slice": [1, 0, QUERIES]}, SHAPED]},
                    {
                        "name": "layers.{i}.k",
                        "steps": [{"slice": [1, QUERIES, QUERIES + 1]}, SHAPED],
                    },
                    {"name": "layers.{i}.v", "steps": [{"slice": [1, QUERIES + 1]}, SHAPED]},
                ],
            }
        ],
        {
            "model": {
                "layers.0.q": FUSED[:, :QUERIES].reshape(-1, HIDDEN),
                "layers.0.k": FUSED[:, QUERIES].reshape(-1, HIDDEN),
                "layers.0.v": FUSED[:, QUERIES + 1].reshape(-1, HIDDEN),
            }
        },
    ),
    "moments are scaled as gradients": (
        {"model": {"w": W}, "optimizer": {f"w/{key}": value for key, value in STATE.items()}},
        SCALE,
        {
            "model": {"v": W * 4},
            "optimizer": {
                "v/exp_avg": STATE["exp_avg"] / 4,
                "v/exp_avg_sq": STATE["exp_avg_sq"] / 16,
                "v/step": STATE["step"],
            },
        },
    ),
    "equal counts of joined parameters": (
        {"model": {"a": W, "b": W}, "optimizer": {"a/step": COUNT, "b/step": COUNT}},
        JOIN,
        {"model": {"ab": torch.cat([W, W])}, "optimizer": {"ab/step": COUNT}},
    ),
    "stacked": (
        {"model": LAYERS, "optimizer": COUNTS},
        [{"match": "h.{layer}.w", "stack": {"over": "layer", "dim": 1}, "to": "h.w"}],
        STACKED,
    ),
    "unstacked": (
        STACKED,
        [{"match": "h.w", "unstack": {"over": "i", "dim": 1}, "to": "h.{i}.w"}],
        {"model": LAYERS, "optimizer": COUNTS},
    ),
    "a count of one element, as in older optimizers": (
        {
            "model": {"h.0": W[0], "h.1": W[1]},
            "optimizer": {f"h.{i}/step": COUNT[None] for i in (0, 1)},
        },
        [{"match": "h.{i}", "stack": {"over": "i"}, "to": "h"}],
        {"model": {"h": W[:2]}, "optimizer": {"h/step": COUNT[None]}},
    ),
    "experts": (
        {"model": EXPERTS},
        [EXPERT_RULE],
        {
            "model": {
                f"layers.{i}.experts.w1": torch.stack(
                    [EXPERTS[f"layers.{i}.experts.{e}.w1"] for e in range(4)]
                )
                for i in range(2)
            }
        },
    ),
    "no longer tied": (
        {"model": {"emb": TIED, "head": TIED}},
        [{"match": "emb", "steps": [{"permute": [1, 0]}], "to": "embed"}],
        {"model": {"embed": TIED.T, "head": TIED}},
    ),
    "factored state under another name": (
        {"model": {"0.weight": torch.ones(4, 4)}, "optimizer": FACTORED},
        [{"match": "0.weight", "to": "a"}],
        {
            "model": {"a": torch.ones(4, 4)},
            "optimizer": {name.replace("0.weight", "a"): t for name, t in FACTORED.items()},
        },
    ),
    "of a part": (
        AB,
        [{"match": "*/mu", "to": "{1}/nu", "parts": "optimizer"}],
        {**AB, "optimizer": {"a/nu": torch.ones(1), "b/nu": torch.ones(2)}},
    ),
    "unmatched are dropped": (
        AB,
        {"unmatched": "drop", "rules": [{"match": "a", "to": "a"}]},
        A,
    ),
    "dropped": (AB, [{"match": "a", "drop": True}], B),
    "optional": (AB, [{"match": "x", "to": "y", "optional": True}], AB),
}


@pytest.mark.parametrize("case", RECIPES)
def test_rules_give_these_tensors(tmp_path: Path, case: str) -> None:
    stored, rules, expected = RECIPES[case]
    with renamed(save(tmp_path / "c", **stored), rules) as source:
        actual = read(source)
    assert actual.keys() == expected.keys()
    for part, tensors in expected.items():
        check_equal(actual[part], tensors)


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model={"emb": TIED, "head": TIED})
    rules = [{"match": "emb", "to": "embed"}, {"match": "head", "to": "lm_head"}]
    with renamed(path, rules) as opened:
        assert list(opened["model"]) == ["embed"]
        assert torch.equal(opened["model"]["lm_head"][...], TIED)


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
    (
        "no scale",
        {"rules": [{"match": "q", "to": "a", "steps": [{"scale": 0}]}]},
        "got scale 0, expected another number",
    ),
    (
        "a dropped tensor's name",
        {"rules": [{"match": "q", "to": "a", "drop": True}]},
        "got drop together with to or pad",
    ),
    (
        "a change without a name",
        {"rules": [{"match": "q", "pad": 0, "steps": [{"scale": 2}]}]},
        "got pad and another operation, but no to",
    ),
    (
        "a split into one",
        {"rules": [{"match": "q", "to": "a", "split": {"dim": 0}}]},
        "got a split into 1 tensors and 1 names in to",
    ),
    (
        "other sizes than names",
        {"rules": [{"match": "q", "to": ["a", "b"], "split": {"sizes": [1, 1, 2]}}]},
        "got a split into 3 tensors and 2 names in to",
    ),
    (
        "the same elements twice",
        {"rules": [{"match": "q", "to": ["a", "b"]}]},
        "got several names in to without a split",
    ),
    (
        "two inverses",
        {
            "rules": [
                {"match": "q", "to": ["a.{i}", "b.{i}"], "split": {}, "unstack": {"over": "i"}}
            ]
        },
        "got unstack together with split or stack",
    ),
    (
        "a stack over nothing",
        {"rules": [{"match": "h.{i}", "to": "h", "stack": {"over": "j"}}]},
        r"stack over 'j': expected \{j\} in every pattern",
    ),
    (
        "an unstack over a matched number",
        {"rules": [{"match": "h.{i}", "to": "a.{i}", "unstack": {"over": "i"}}]},
        "unstack over 'i': the pattern has it too",
    ),
    (
        "an unstack into one name",
        {"rules": [{"match": "q", "to": "a", "unstack": {"over": "i"}}]},
        r"unstack over 'i': expected \{i\} in 'a'",
    ),
]


MODEL = {
    "q": torch.ones(4, 4),
    "k": torch.ones(5),
    "n": torch.ones(4, 4, dtype=torch.int64),
    "h.0": torch.ones(1),
    "h.2": torch.ones(1),
}


@pytest.mark.parametrize(
    ("rules", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_ambiguous_rules_are_refused_by_name(
    tmp_path: Path, rules: dict[str, Any], text: str
) -> None:
    with (
        pytest.raises(FormatError, match=text),
        renamed(save(tmp_path / "c", model=MODEL), rules) as source,
    ):
        read(source)


LAST = "layers.1.experts.3.w1"
FEWER = {name: tensor for name, tensor in EXPERTS.items() if name != LAST}
UNFIT: dict[str, tuple[Parts, Any, str]] = {
    "one name by a star": (
        {"model": {"q": torch.ones(1), "k": torch.ones(1)}},
        [{"match": "?", "to": "k"}],
        "model:k: k and q get the same name",
    ),
    "a last layer that lacks a tensor": (
        {"model": {name: torch.ones(1) for name in ("h.0", "h.1", "n.0")}},
        [{"regex": r"(h|n)\.(?P<i>\d+)", "to": "{1}", "stack": {"over": "i"}}],
        "model: n stacks 1 tensors, h 2; add 1 to both, or set `partial = true`",
    ),
    "an expert that one layer lacks": (
        {"model": FEWER},
        [EXPERT_RULE],
        r"layers.1.experts.w1 stacks 3 tensors, layers.0.experts.w1 4; add 3 to both",
    ),
    "an expert of another name": (
        {"model": {**FEWER, "layers.1.local_experts.3.w1": W}},
        {"unmatched": "error", "rules": [EXPERT_RULE]},
        r"layers.1.local_experts.3.w1: no rule matches",
    ),
    "unknown state of a scaled parameter": (
        {"model": {"w": W}, "optimizer": {"w/strange": W}},
        SCALE,
        "optimizer:v/strange: the rule scales a parameter, and the effect on 'strange' is unknown",
    ),
    "counts of joined parameters": (
        {"model": {"a": W, "b": W}, "optimizer": {"a/step": COUNT, "b/step": COUNT + 1}},
        JOIN,
        "optimizer:ab/step: tensor 1 of 2 that are merged into one differs",
    ),
    **{
        f"moments overflow at {scale}": (
            {"model": {"w": W}, "optimizer": {"w/exp_avg_sq": W}},
            [{"match": "w", "steps": [{"scale": scale}], "to": "v"}],
            rf"scale {re.escape(str(scale))} to the power -2 is {power}; expected a finite",
        )
        for scale, power in ((1e-200, "inf"), (1e200, "0.0"), (1e-320, "inf"))
    },
}


@pytest.mark.parametrize("case", UNFIT)
def test_rules_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    stored, rules, text = UNFIT[case]
    path = save(tmp_path / "c", **stored)
    with pytest.raises(FormatError, match=text), renamed(path, rules) as source:
        read(source)


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
    with (
        pytest.raises(
            FormatError, match=r"ab.weight: merges parameters whose hyperparameters differ"
        ),
        renamed(tmp_path / "c", rules_list),
    ):
        pass


@pytest.mark.parametrize(
    "rule",
    [
        {"match": "{i}.weight", "steps": [{"transpose": [0, 1]}], "to": "{i}.w"},
        {"match": ["0.weight", "1.weight"], "concat": 0, "to": "w"},
    ],
    ids=["turned", "joined"],
)
def test_factored_state_does_not_follow_its_parameter(tmp_path: Path, rule: dict[str, Any]) -> None:
    """As that of Adafactor; the model can be read."""
    more = {name.replace("0", "1", 1): tensor for name, tensor in FACTORED.items()}
    model = {f"{i}.weight": torch.ones(4, 4) for i in (0, 1)}
    with renamed(save(tmp_path / "c", model=model, optimizer=FACTORED | more), [rule]) as source:
        assert all(view[...].all() for view in source["model"].values())
        text = r"'col_var' has shape \(1, 4\), its parameter \(4, 4\)"
        with pytest.raises(FormatError, match=text):
            read(source)


# larger targets


class Small(nn.Module):
    """A model with any vocabulary size, its output optionally tied to its input."""

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


def grow_manually(
    old: nn.Module,
    old_optimizer: torch.optim.Optimizer,
    new: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Copy parameters and state into the first rows; missing state starts at zero."""
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
def test_larger_vocabulary_resumes_as_if_grown_manually(
    tmp_path: Path, kind: str, tied: bool, warm: bool
) -> None:
    """New rows keep the target's values, in the model and in its optimizer.

    Further steps equal those of the oracle bit for bit.
    """
    torch.manual_seed(0)
    old = Small(7, tied=tied)
    optimizer = OPTIMIZERS[kind](old.parameters())
    train_on(old, optimizer, first=0, count=3)
    uc.save(tmp_path / "c", model=old, optimizer=optimizer, options=QUICK)
    larger = Small(9, tied=tied)
    pairs = [
        (model, OPTIMIZERS[kind](model.parameters())) for model in (larger, copy.deepcopy(larger))
    ]
    for model, opt in pairs if warm else []:
        train_on(model, opt, first=20, count=1)
    grow_manually(old, optimizer, *pairs[1])
    for _ in range(2):  # the second load reads the larger checkpoint, which the rule leaves as is
        report = padded_load(tmp_path / "c", model=larger, optimizer=pairs[0][1])
        check_equal(whole_state(*pairs[0]), whole_state(*pairs[1]))
        (tmp_path / "c").rename(tmp_path / "old") if report.notes else None
        uc.save(
            tmp_path / "c",
            model=larger,
            optimizer=pairs[0][1],
            options=uc.SaveOptions(fsync=False, if_exists="keep"),
        )
    assert not report.notes
    assert train_on(*pairs[0], first=3, count=3) == train_on(*pairs[1], first=3, count=3)
    check_equal(whole_state(*pairs[0]), whole_state(*pairs[1]))


def test_a_manager_restores_into_a_larger_vocabulary(tmp_path: Path) -> None:
    """Also from a torch.save file, whose optimizer state is by position."""
    small, large = Small(7), Small(9)
    optimizer, large_optimizer = adamw(small), adamw(large)
    train_on(small, optimizer, first=0, count=2)
    options = uc.LoadOptions(source=SourceOptions(rename=PADDED))
    with uc.CheckpointManager(
        tmp_path / "run", options=uc.ManagerOptions(interval_steps=1), load_options=options
    ) as manager:
        manager.save(2, model=small, optimizer=optimizer)
        manager.wait()
        report = manager.restore(model=large, optimizer=large_optimizer)
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
            for name, tensor in whole_state(model, opt).items()
        }
        check_equal(states, whole_state(small, optimizer))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize(
    ("dtype", "remainders"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["masters", "remainders", "copies"],
)
def test_masters_in_the_optimizer_grow_with_the_model(
    tmp_path: Path, dtype: torch.dtype, remainders: bool, warm: bool
) -> None:
    """New rows of fresh master weights are those of the model, so the next step keeps them."""
    make = partial(FusedAdam, lr=0.02, master_weights=True, store_param_remainders=remainders)
    old, new = Small(7, dtype=dtype), Small(9, dtype=dtype)
    optimizer, new_optimizer = make(old.parameters()), make(new.parameters())
    train_on(old, optimizer, first=0, count=2)
    uc.save(tmp_path / "c", model=old, optimizer=optimizer, options=QUICK)
    if warm:
        train_on(new, new_optimizer, first=20, count=1)
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
        check_equal({"": param.detach(), **new_optimizer.state[param]}, state)
    train_on(new, new_optimizer, first=2, count=1)


KINDS = ("", "exp_avg", "exp_avg_sq", "master_param")  # the parameter, its state, its master


def slice_of(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """Return a rank's slice of a tensor; it is empty if there are fewer chunks than ranks."""
    pieces = tensor.chunk(world, dim)
    return (pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)).clone()


def sliced(
    tensors: dict[str, torch.Tensor], dim: int, comm: Comm
) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Return a rank's slices as arguments of a save or load, with state if there is any."""
    local = {kind: slice_of(tensor, dim, comm.rank, comm.world) for kind, tensor in tensors.items()}
    model = nn.ParameterDict({"w": nn.Parameter(local.pop(""))})
    optimizer = torch.optim.AdamW(model.parameters())
    if local:
        optimizer.state[model["w"]] = {"step": torch.tensor(2.0), **local}
    layout = uc.Layout(
        mesh={"tp": comm.world}, rules={"w": {"tp": dim}}, shapes={"w": tuple(tensors[""].shape)}
    )
    return {"model": model, "optimizer": optimizer, "layout": layout}, optimizer


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.tuples(*[st.integers(1, 9)] * 2),
    st.tuples(*[st.integers(0, 5)] * 2),
    st.data(),
)
@settings(max_examples=20)
def test_slices_grow_over_any_ranks(
    saving: int, loading: int, shape: tuple[int, int], more: tuple[int, int], data: st.DataObject
) -> None:
    """The stored values are inside, and the target's own values around them.

    The optimizer is fresh, or warm with master weights; slices are along any dim.
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
        check_equal(
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
    """A bfloat16 model, stored or computed from its master weights, and an average of them."""
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
        part: copy.deepcopy(tensors["emb.weight"])
        for part, tensors in (*targets.items(), ("model", model))
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
    """Adafactor's rows and columns, and an optimizer whose fresh state is not zero."""
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
    """Both use one parser; a conversion has no target for a `pad` rule."""
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


def test_toml_and_json_rules_are_equal() -> None:
    renames = parse_renames(RULES.encode(), file="r.toml")
    assert (
        parse_renames(renames.model_dump_json(exclude_defaults=True).encode(), file="r.json")
        == renames
    )
    with pytest.raises(FormatError, match=r"r.toml: not valid TOML"):
        parse_renames(b"[[rules", file="r.toml")


def test_unknown_keys_are_refused_with_the_likely_one() -> None:
    rule = {"match": "a", "concta": 0, "to": "b"}
    with pytest.raises(FormatError, match=r"rules\.0\.concta: unknown key; did you mean 'concat'"):
        uc.SourceOptions(rename=[rule])
    wrong: Any = {"match": "a", "to": "b"}
    with pytest.raises(FormatError, match="rules: Input should be a list"):
        uc.SourceOptions(rename=wrong)

"""Layers of real models stacked and unstacked, along any dim, with optimizer state."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.torch_training import causal_lm_loss, state_of, train
from unified_ckpt.cli.main import main
from unified_ckpt.errors import FormatError, OptionError
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.apply_options import apply_options
from unified_ckpt.views.stack_layers import stack_layers, unstack_layers

QUICK = uc.SaveOptions(fsync=False)


def llama(seed: int = 0, layers: int = 4) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = llama()
    train(model, optimizer, partial(causal_lm_loss, vocabulary=64), 0, 2)
    path = tmp_path_factory.mktemp("layers") / "c"
    uc.save(path, model=model, optimizer=optimizer, step=2, options=QUICK)
    return path


@pytest.mark.parametrize("dim", [0, 1])
def test_stacking_and_unstacking_round_trip(
    folder: Path, tmp_path: Path, dim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        uc.open(folder) as original,
        uc.open(folder, options=SourceOptions(layers="stacked", layer_dim=dim)) as stacked_source,
    ):
        name = "layers.mlp.up_proj.weight"
        expected = torch.stack(
            [original["model"][f"model.layers.{i}.mlp.up_proj.weight"][...] for i in range(4)], dim
        )
        assert torch.equal(stacked_source["model"][f"model.{name}"][...], expected)
        parts = {
            part: {name: view[...] for name, view in stacked_source[part].items()}
            for part in stacked_source.parts
        }
        assert "model.layers.input_layernorm.weight/step" in parts["optimizer"]
        (group,) = stacked_source.source.metadata().groups
        assert {f"{fqn}/exp_avg" for fqn in group["names"]} <= parts["optimizer"].keys()
        assert len(parts["model"]) == 1 + 9 + 1
    uc.save(tmp_path / "stacked", **parts, step=2, options=QUICK)
    back = SourceOptions(layers="unstacked", layer_dim=dim)
    assert (
        main(
            [
                "diff",
                str(tmp_path / "stacked"),
                str(folder),
                "--layers",
                "unstacked",
                "--layer-dim",
                str(dim),
                "--deep",
            ]
        )
        == 0
    )
    assert ", 0 different" in capsys.readouterr().out

    model, optimizer = llama(1)
    uc.load(
        tmp_path / "stacked", model=model, optimizer=optimizer, options=uc.LoadOptions(source=back)
    )
    other_model, other_optimizer = llama(1)
    uc.load(folder, model=other_model, optimizer=other_optimizer)
    check_equal(model.state_dict(), other_model.state_dict())
    check_equal(state_of(model, optimizer), state_of(other_model, other_optimizer))


def test_groups_of_layers_that_differ(tmp_path: Path) -> None:
    """In models with alternating layers, every second layer has equal shapes."""
    model = {f"h.{i}.w": torch.full((2 + i % 2, 3), float(i)) for i in range(6)}
    uc.save(tmp_path / "c", model=model, options=QUICK)
    even = {"over": "i", "step": 2}
    groups = [(even, "[02468]", "h.0.w"), ({**even, "start": 1}, "[13579]", "h.1.w")]
    stacking = [
        {"regex": rf"h\.(?P<i>{digits})\.w", "stack": over, "to": name}
        for over, digits, name in groups
    ]
    unstacking = [{"match": name, "unstack": over, "to": "h.{i}.w"} for over, _, name in groups]
    with uc.open(tmp_path / "c") as opened:
        view = apply_options(opened.source, SourceOptions(rename=stacking))
        assert {
            name: spec.shape for name, spec in view.specs("model", view.names("model")).items()
        } == {
            "h.0.w": (3, 2, 3),
            "h.1.w": (3, 3, 3),
        }
        again = apply_options(view, SourceOptions(rename=unstacking))
        assert sorted(again.names("model")) == sorted(model)
        for name, tensor in model.items():
            assert uc.engine.source.view.SourceView(again)["model"][name][...].equal(tensor)


def test_unstacked_tensors_keep_the_stored_digests(tmp_path: Path) -> None:
    model = {f"h.{i}.w": torch.randn(512, 512) for i in range(2)}
    uc.save(tmp_path / "c", model=model, options=QUICK)
    with uc.open(tmp_path / "c") as opened:
        again = unstack_layers(stack_layers(opened.source))
        keys = [("model", name) for name in model]
        assert again.block_digests(keys) == opened.source.block_digests(keys)


WRONG = [
    ({"h.0.w": (2,), "h.1.w": (2,), "h.1.b": (2,)}, "model:h.b: 0 is missing in a stack of 1"),
    (
        {"h.0.w": (2,), "h.0.b": (2,), "h.1.w": (2,)},
        "model: h.w stacks 2 tensors, h.b 1; add 1 to both",
    ),
    ({"h.0.w": (2,), "h.2.w": (2,)}, "model:h.w: 1 is missing in a stack of 0, 2"),
    ({"h.0.w": (2,), "h.1.w": (3,)}, r"model:h.w: .*got shapes \(2,\), \(3,\), expected equal"),
    (
        {"h.0.w": (2,), "h.1.w": torch.float16},
        r"model:h.w: got operands of dtypes F16, F32, expected one dtype",
    ),
    ({"w": (2,)}, "no tensor name contains a layer number"),
    ({"h.0.w": (2,), "h.w": (2,)}, "model:h.w: is the new name of model:h.w and of model:h.0.w"),
]


@pytest.mark.parametrize(("shapes", "text"), WRONG, ids=[text for _, text in WRONG])
def test_layers_that_differ_are_refused_by_name(
    tmp_path: Path, shapes: dict[str, tuple[int, ...] | torch.dtype], text: str
) -> None:
    model = {
        name: torch.ones(shape) if isinstance(shape, tuple) else torch.ones(2, dtype=shape)
        for name, shape in shapes.items()
    }
    uc.save(tmp_path / "c", model=model, options=QUICK)
    options = SourceOptions(layers="stacked")
    with pytest.raises(FormatError, match=text), uc.open(tmp_path / "c", options=options) as source:
        source["model"]["h.w"]  # before the first byte


def test_stacks_of_different_heights_are_refused_by_name(tmp_path: Path) -> None:
    shapes = {"h.w": (3, 2), "h.v": (3, 2), "h.b": (2, 2), "o": (2,)}
    uc.save(
        tmp_path / "c",
        model={name: torch.ones(shape) for name, shape in shapes.items()},
        options=QUICK,
    )
    with pytest.raises(
        FormatError, match=r"h.b: got 2 layers along dim 0, expected 3 as in the rest of h"
    ):
        uc.open(tmp_path / "c", options=SourceOptions(layers="unstacked"))
    with pytest.raises(FormatError, match=r"expected a dim 2"):
        uc.open(tmp_path / "c", options=SourceOptions(layers="unstacked", layer_dim=2))
    with pytest.raises(OptionError, match=r"\(layer_dim\) has no effect without SourceOptions"):
        uc.open(tmp_path / "c", options=SourceOptions(layer_dim=1))
    uc.save(tmp_path / "d", model={"o": torch.ones(2)}, options=QUICK)
    with pytest.raises(FormatError, match=r"no tensor name contains layers or"):
        uc.open(tmp_path / "d", options=SourceOptions(layers="unstacked"))

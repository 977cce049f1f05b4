"""Tensors between the layouts of Hugging Face and MaxText: round trips, moments, whole models."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import unified_ckpt as uc
from tests.support.foreign.maxtexts import KINDS
from tests.support.foreign.orbaxes import MaxText, as_numpy, leaves, mapped
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.orbax.arrays import chunk_boxes
from unified_ckpt.foreign.orbax.export_maxtext import maxtext_view
from unified_ckpt.foreign.orbax.maxtext_names import Transform, parse_sizes, tensor_links
from unified_ckpt.foreign.orbax.maxtext_transforms import (
    hf_box,
    split_axes,
    to_hf,
    to_maxtext,
    transform_for,
)

TRANSFORMS = [
    Transform((6,), (4, 8)),
    Transform((6,), (4, 8), interleaved=True),
    Transform((6,), (4, 16), interleaved=True, multiplier=4.0),
    Transform((4, 8), (6,)),
    Transform((6,), (5,)),
    Transform((), (6,)),
    Transform((), (2, 8)),
    Transform((10,), (4,), preserves_layout=True, divisor=2.0),
]


@pytest.mark.parametrize("nbytes", [1, 64, 200, 1 << 20])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_round_trip_in_pieces(transform: Transform, nbytes: int) -> None:
    hf = torch.randn(transform.hf_shape)
    maxtext = torch.full(transform.maxtext_shape, torch.nan)
    back = torch.full(transform.hf_shape, torch.nan)
    for piece in chunk_boxes(
        transform.maxtext_shape,
        transform.maxtext_shape,
        4,
        axes=split_axes(transform),
        nbytes=nbytes,
    ):
        box = hf_box(transform, piece)
        transformed = to_maxtext(select(hf, box), transform, piece.shape)
        select(maxtext, piece).copy_(transformed)
        select(back, box).copy_(to_hf(transformed, transform))
    assert torch.equal(back, hf)
    assert torch.equal(to_maxtext(hf, transform, transform.maxtext_shape), maxtext)
    assert torch.equal(to_hf(maxtext, transform), hf)


def select(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[
        tuple(slice(low, low + count) for low, count in zip(box.offsets, box.shape, strict=True))
    ]


@pytest.mark.parametrize(
    "transform",
    [
        *TRANSFORMS,
        Transform((6,), (4, 8), multiplier=sqrt(8)),
        Transform((10,), (5,), preserves_layout=True, divisor=sqrt(5)),
        Transform((), (6,), addend=-1.0),
    ],
)
def test_moments_are_those_of_the_gradient_in_the_other_form(transform: Transform) -> None:
    """Autograd through the transform gives the moments that Adam would hold in the other layout."""
    maxtext = torch.randn(transform.maxtext_shape, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(transform.hf_shape, dtype=torch.float64)
    (maxtext_gradient,) = torch.autograd.grad(to_hf(maxtext, transform), maxtext, gradient)
    torch.testing.assert_close(
        to_hf(0.1 * maxtext_gradient, transform_for(transform, "exp_avg")), 0.1 * gradient
    )
    torch.testing.assert_close(
        to_hf(0.001 * maxtext_gradient**2, transform_for(transform, "exp_avg_sq")),
        0.001 * gradient**2,
    )


@pytest.mark.parametrize("head", [8, 16, 128])
def test_two_byte_queries_are_scaled_in_float32(head: int) -> None:
    """A scale that is not a power of two rounds, so a round trip is not exact."""
    transform = Transform((6,), (2, head), multiplier=sqrt(head))
    hf = torch.randn(transform.hf_shape).to(torch.bfloat16)
    maxtext = as_numpy(to_maxtext(hf, transform, transform.maxtext_shape))
    reshaped = as_numpy(hf).T.reshape(transform.maxtext_shape)
    assert np.array_equal(
        maxtext,
        (reshaped.astype(np.float32) * np.float32(1 / np.sqrt(head))).astype(ml_dtypes.bfloat16),
    )
    back = to_hf(torch.from_numpy(maxtext.view(np.int16)).view(torch.bfloat16), transform)
    assert np.array_equal(
        as_numpy(back.t()).reshape(transform.maxtext_shape),
        (maxtext.astype(np.float32) * np.float32(np.sqrt(head))).astype(ml_dtypes.bfloat16),
    )
    torch.testing.assert_close(back, hf, rtol=2**-7, atol=0)
    assert torch.equal(back, hf) == (head == 16)


def hub_state(kind: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return tensors with the shapes and names of a real model, and a checkpoint with moments."""
    config = KINDS[kind]()
    sizes = parse_sizes(config.to_dict(), label=kind)
    torch.manual_seed(0)
    shapes = {link.hf_name: link.transform.hf_shape for link in tensor_links(sizes, stacked=True)}
    state = {name: torch.randint(-64, 64, shape) / 256 for name, shape in shapes.items()}
    moments = {
        f"{name}/{moment}": torch.rand(shape)
        for name, shape in shapes.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"{name}/step": torch.tensor(7.0) for name in shapes}
    uc.save(folder, model=state, optimizer=moments | steps, step=7)
    return config, state


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_view_equals_a_model_built_head_by_head(tmp_path: Path, kind: str, stacked: bool) -> None:
    config, state = hub_state(kind, tmp_path / "c")
    with SourceView(
        maxtext_view(open_source(str(tmp_path / "c")), config.to_dict(), stacked=stacked)
    ) as view:
        for power, moment in enumerate((None, "exp_avg", "exp_avg_sq")):
            part = "model" if moment is None else "optimizer"
            with uc.open(tmp_path / "c") as source:
                hf_tensors = {
                    name: source[part][f"{name}/{moment}" if moment else name][...]
                    for name in state
                }
            expected = leaves(
                MaxText(config, mapped(hf_tensors, as_numpy), power=power).tree(
                    stacked=stacked, vocab=config.vocab_size
                )
            )
            names = {name for name in view[part] if moment is None or name.endswith(f"/{moment}")}
            assert names == {f"{name}/{moment}" if moment else name for name in expected}
            for name, array in expected.items():
                assert np.array_equal(
                    view[part][f"{name}/{moment}" if moment else name][...].numpy(), array
                ), name
        assert view["optimizer"]["decoder.decoder_norm.scale/step"][...] == 7
        assert view.step == 7


def with_scalars(
    state: dict[str, torch.Tensor], path: Path, *, step: Any, extra_state: dict[str, Any]
) -> Path:
    """Write a torch file of a model and an optimizer whose steps are numbers."""
    entries = [
        {
            "exp_avg": torch.zeros_like(tensor),
            "exp_avg_sq": torch.zeros_like(tensor),
            "step": step(i),
        }
        for i, tensor in enumerate(state.values())
    ]
    entries[0] |= extra_state
    groups = [{"params": list(range(len(state))), "param_names": list(state), "lr": 0.1}]
    torch.save(
        {"model": state, "optimizer": {"state": dict(enumerate(entries)), "param_groups": groups}},
        path,
    )
    return path


def test_steps_that_are_numbers_are_not_left_out(tmp_path: Path) -> None:
    """Once, a conversion succeeded and dropped the steps."""
    config, state = hub_state("llama3", tmp_path / "c")
    path = with_scalars(state, tmp_path / "a.pt", step=lambda _: 7, extra_state={})
    with SourceView(view_of(path, config)) as view:
        steps = {
            name: view["optimizer"][name][...]
            for name in view["optimizer"]
            if name.endswith("/step")
        }
        assert len(steps) == len(list(view["model"]))
        assert all(torch.equal(count, torch.tensor(7.0)) for count in steps.values())
    path = with_scalars(state, tmp_path / "b.pt", step=lambda number: number, extra_state={})
    with pytest.raises(uc.FormatError, match=r"merges parameters with steps \["):
        view_of(path, config)
    path = with_scalars(state, tmp_path / "d.pt", step=lambda _: 7, extra_state={"rounds": 3})
    with pytest.raises(uc.FormatError, match=r"has no name for(.|\n)*/rounds"):
        view_of(path, config)


def view_of(folder: Path, config: Any) -> Any:
    return maxtext_view(open_source(str(folder)), config.to_dict())


NORM = "model.norm.weight"
FIRST_NORM, UP = "model.layers.0.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
State = dict[str, torch.Tensor]
UNFIT: dict[str, tuple[Callable[[State], object], State, type[uc.CheckpointError], str]] = {
    "a tensor less": (
        lambda model: model.pop(UP),
        {},
        uc.IncompleteError,
        rf"the checkpoint lacks(.|\n)*{UP} \(96, 64\)",
    ),
    "a tensor more": (
        lambda model: model.update({"model.extra": torch.ones(2)}),
        {},
        uc.FormatError,
        r"has no name for(.|\n)*model:model.extra",
    ),
    "another shape": (
        lambda model: model.update({NORM: torch.ones(3)}),
        {},
        uc.FormatError,
        rf"{NORM}: got shape \(3,\), expected \(64,\)",
    ),
    "another dtype": (
        lambda model: model.update({FIRST_NORM: torch.ones(64, dtype=torch.bfloat16)}),
        {},
        uc.FormatError,
        r"got stacked tensors of dtypes BF16, F32, expected one",
    ),
    "other state": (
        lambda model: None,
        {f"{NORM}/momentum": torch.ones(64)},
        uc.FormatError,
        rf"has no name for(.|\n)*optimizer:{NORM}/momentum",
    ),
    "state of one layer": (
        lambda model: None,
        {f"{FIRST_NORM}/exp_avg": torch.ones(64)},
        uc.IncompleteError,
        rf"optimizer:{FIRST_NORM}/exp_avg: no shard has box",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_models_that_maxtext_cannot_hold_are_refused(tmp_path: Path, case: str) -> None:
    config, model = hub_state("llama3", tmp_path / "c")
    change, optimizer, error, text = UNFIT[case]
    change(model)
    uc.save(tmp_path / "d", model=model, optimizer=optimizer or None)
    with pytest.raises(error, match=text):
        view_of(tmp_path / "d", config)

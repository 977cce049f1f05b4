"""Names for optimizer state stored by position: every order is checked against shapes."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.engine.source.protocol import Order
from unified_ckpt.foreign.pytorch.optimizer_groups import (
    SavedGroup,
    groups_by_options,
    parse_groups,
)
from unified_ckpt.foreign.pytorch.optimizer_names import (
    ForeignCheckpoint,
    match_order,
    shape_fits,
    with_optimizer_names,
)
from unified_ckpt.foreign.pytorch.state_dict import parse_state_dict
from unified_ckpt.foreign.restricted_pickle.torch_reader import as_archived
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL

SHAPES = [(2,), (3,), (2, 3), ()]


def entry(shape: tuple[int, ...]) -> dict[str, Any]:
    state = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(shape),
        "exp_avg_sq": torch.zeros(shape),
    }
    return cast("dict[str, Any]", as_archived(state))


@given(st.lists(st.sampled_from(SHAPES), max_size=7), st.data())
def test_match_order_with_missing_parameters(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """The oracle tries all ways to omit parameters."""
    saved_shapes = [shape for shape in shapes if data.draw(st.booleans())]
    parameters = [(str(number), shape) for number, shape in enumerate(shapes)]
    candidates = [
        candidate
        for candidate in combinations(parameters, len(saved_shapes))
        if [shape for _, shape in candidate] == saved_shapes
    ]
    order, reason = match_order(
        [SavedGroup({}, tuple(map(entry, saved_shapes)), None)], [parameters]
    )
    if len(candidates) == 1:
        assert order == [list(candidates[0])]
    else:
        assert order is None
        assert "shapes do not identify them" in reason


@pytest.mark.parametrize(
    ("state", "shape", "fit"),
    [
        ({}, (3, 4), True),
        ({"step": torch.tensor(1.0)}, (3, 4), True),
        (
            {
                "step": 3,
                "exp_avg_sq_row": torch.zeros(3),
                "exp_avg_sq_col": torch.zeros(4),
                "RMS": 0.1,
            },
            (3, 4),
            True,
        ),
        ({"exp_avg_sq_row": torch.zeros(3), "exp_avg_sq_col": torch.zeros(4)}, (4, 3), True),
        ({"exp_avg_sq_row": torch.zeros(3), "exp_avg_sq_col": torch.zeros(4)}, (3, 5), False),
        ({"row_var": torch.zeros(3, 1), "col_var": torch.zeros(1, 4)}, (3, 4), True),
        ({"row_var": torch.zeros(2, 3, 1), "col_var": torch.zeros(2, 1, 4)}, (2, 3, 4), True),
        ({"row_var": torch.zeros(3, 1), "col_var": torch.zeros(1, 4)}, (4, 3), False),
        ({"exp_avg": torch.zeros(4, 3)}, (3, 4), False),
        ({"exp_avg": torch.tensor(0.0)}, (3, 4), False),
        ({"exp_avg": torch.tensor(0.0)}, (), True),
    ],
)
def test_shape_fits(state: dict[str, Any], shape: tuple[int, ...], fit: bool) -> None:
    assert shape_fits(as_archived(state), shape) == fit


def source(groups: Any, orders: dict[str, Order], **options: Any) -> Any:
    model = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3)}
    tensors = parse_state_dict("x.pt", as_archived(model)).tensors
    checkpoint = ForeignCheckpoint(
        "x.pt", "torch", tensors, indexed_groups=parse_groups("x.pt", as_archived(groups))
    )
    return with_optimizer_names(
        checkpoint,
        SourceOptions(**options),
        stored_orders={label: (lambda order=order: order) for label, order in orders.items()},
    )


TWO = {"state": {0: entry((2,)), 1: entry((2,))}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def test_orders_must_agree() -> None:
    forward, backward = [[("a", (2,)), ("b", (2,))]], [[("b", (2,)), ("a", (2,))]]
    assert sorted(source(TWO, {"one": forward, "two": forward}).names("optimizer"))[:2] == [
        "a/exp_avg",
        "a/exp_avg_sq",
    ]
    with pytest.raises(uc.FormatError, match="two orders fit: one has a where two has b"):
        source(TWO, {"one": forward, "two": backward}).names("optimizer")
    with pytest.raises(uc.FormatError, match="the target optimizer has b where one has a"):
        source(TWO, {"one": forward}).with_order(backward)
    explicit = source(TWO, {"one": forward}, optimizer_order=(("b", "a"),))
    assert explicit.with_order(forward).metadata().groups == [
        {"names": ["b", "a"], "options": {"lr": 0.1}}
    ], "the caller's counts"


def test_parameters_with_equal_options_are_one_group() -> None:
    params = [("a", {"lr": 1.0}), ("b", {"lr": 2.0}), ("c", {"lr": 1.0})]
    assert groups_by_options(params) == [
        {"names": ["a", "c"], "options": {"lr": 1.0}},
        {"names": ["b"], "options": {"lr": 2.0}},
    ]


def test_names_in_file_and_empty_groups() -> None:
    named = {"state": {"b": entry((2,))}, "param_groups": [{"params": ["b"]}, {"params": []}]}
    assert [group["names"] for group in source(named, {}).metadata().groups] == [["b"], []]
    with pytest.raises(
        uc.FormatError,
        match=r"the given names do not fit its optimizer: param group 0: c has shape \(3,\)",
    ):
        source(
            {"state": {0: entry((2,))}, "param_groups": [{"params": [0], "param_names": ["c"]}]}, {}
        ).names("optimizer")
    with pytest.raises(uc.FormatError, match=r"the model has no tensors for these names(.|\n)*z"):
        source({"state": {"z": entry((2,))}, "param_groups": [{"params": ["z"]}]}, {}).names(
            "optimizer"
        )


def test_order_is_resolved_on_demand() -> None:
    indexed = source(TWO, {"one": [[("x", (9,))]]})
    assert indexed.parts == ["model", "optimizer"]
    assert set(indexed.names(MODEL)) == {"a", "b", "c"}
    assert indexed.metadata().groups == ()
    assert indexed.without_optimizer.parts == ["model"]
    with pytest.raises(
        uc.FormatError, match=r"one: the checkpoint's model has other names or shapes(.|\n)*x"
    ):
        indexed.names("optimizer")


def test_invalid_state_is_refused() -> None:
    with pytest.raises(
        uc.FormatError, match=r"x.pt: state of parameter 0: got int, expected a dict"
    ):
        parse_groups("x.pt", {"state": {0: 5}, "param_groups": [{"params": [0]}]})
    loaded = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(AssertionError, match="got tensors of torch"):
        parse_groups("x.pt", loaded)  # they would become values that are no tensors
    meta = {
        "state": {0: {"exp_avg": torch.zeros(2, device="meta")}},
        "param_groups": [{"params": [0]}],
    }
    with pytest.raises(uc.FormatError, match=r"a: exp_avg: got a tensor on the meta device"):
        source(meta, {"one": [[("a", (2,))]]}).names("optimizer")

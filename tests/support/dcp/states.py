"""State dicts as programs pass them to torch.distributed.checkpoint, and what they are equal to."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)

LARGE = 8192  # elements of float32 that are stored as a tensor, not as a value


class Counter:
    """A Stateful object with values and a tensor."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.seen = count, torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen, "nothing": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.seen = state["count"], state["seen"].clone()


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a tied weight and a buffer, and its optimizer of two groups after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight]}, {"params": model[1].parameters(), "lr": 0.5 + seed}]
    )
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def recipe(*, flat: bool = False, seed: int = 0) -> dict[str, Any]:
    """What PyTorch's functions return for a model and its optimizer."""
    model, optimizer = trained(seed)
    model_state, state = get_state_dict(model, optimizer)
    if flat:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": state}


def anything() -> dict[Any, Any]:
    """Values of all kinds, in nested dicts and lists."""
    return {
        "step": 3,
        "rate": 0.25,
        "bytes": b"\0x",
        "stream": io.BytesIO(b"y" * 2000),
        "tuple": (1, 2.5, "a"),
        "none": None,
        "list": [1, 2],
        "mixed": [1, torch.arange(3), {"inner": torch.ones(LARGE)}],
        "large": torch.arange(LARGE, dtype=torch.float32),
        "deep": {"a": {"b": torch.ones(2, LARGE), "c": "text"}, "d.e": torch.zeros(LARGE)},
        "random": torch.get_rng_state(),
        7: "a number as a key",
    }


STATES: dict[str, Callable[[], dict[Any, Any]]] = {
    "nested": recipe,
    "flat": lambda: recipe(flat=True),
    "app": lambda: {"app": recipe(), "step": 4},
    "no key around the model": lambda: {**recipe()["model"], "optim": recipe()["optimizer"]},
    "two models": lambda: {"generator": recipe(), "critic": recipe(seed=1)},
    "average": lambda: {**recipe(), "ema": {"w": torch.ones(LARGE)}},
    "optimizer alone": lambda: recipe()["optimizer"],
    "flat optimizer alone": lambda: recipe(flat=True)["optimizer"],
    "by position": lambda: {"model": {}, "optimizer": trained()[1].state_dict()},
    "anything": anything,
}


def cleared(value: Any) -> Any:
    """The same tree with other values: zeros, empty text, None."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {
            key: item if key in ("params", "param_names") else cleared(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [cleared(item) for item in value]
    return None if value is None else type(value)()


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Compare two trees: tensors by their bits, streams by their bytes, keys as text."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, path
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        others = {str(key): item for key, item in actual.items()}
        assert sorted(others) == sorted(map(str, expected)), path
        for key, item in expected.items():
            assert_equal(others[str(key)], item, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(one, other, f"{path}[{number}]")
    elif isinstance(expected, io.BytesIO):
        assert actual.getvalue() == expected.getvalue(), path
    else:
        assert (type(actual), actual) == (type(expected), expected), path

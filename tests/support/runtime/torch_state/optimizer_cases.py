"""Optimizers of torch with a model, steps and comparisons."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

Make = Callable[[list[nn.Parameter]], Optimizer]
MAKERS: dict[str, Make] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "AdamW amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "AdamW one by one": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "AdamW tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), foreach=False),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "SGD decayed": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
}


def model() -> nn.Module:
    """Parameters of two dims, of one, of one element and of none."""
    torch.manual_seed(0)
    module = nn.Module()
    for name, shape in {"matrix": (5, 3), "vector": (4,), "one": (1,), "scalar": ()}.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


def step(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    """A step whose gradients depend on the parameters and on `number` only."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([((p + 0.1 * number) ** 2).sum() for p in module.parameters()]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def states(module: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """The state of each parameter, and that of none."""
    by_name = {fqn: dict(optimizer.state.get(p, {})) for fqn, p in module.named_parameters()}
    return by_name | {key: value for key, value in optimizer.state.items() if isinstance(key, str)}

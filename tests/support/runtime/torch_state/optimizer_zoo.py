"""Every optimizer class of other libraries: how it is constructed and stepped on a CPU.

The libraries are optional. Import one with `import_library`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

LIBRARIES = {
    "torchao": "torchao.optim",
    "timm": "timm.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
}


def import_library(name: str) -> Any:
    """Return the module with the optimizers of a library. ImportError without the library.

    timm's models need torchvision, its optimizers do not: they are imported without them.
    """
    if name == "timm" and "timm" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        if spec is None:
            raise ImportError("timm is not installed")
        package = types.ModuleType("timm")
        package.__path__ = list(spec.submodule_search_locations or ())
        models = types.ModuleType("timm.models")
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": package, "timm.models": models})
    return importlib.import_module(LIBRARIES[name])


def model(seed: int) -> nn.Module:
    """A matrix large enough for 8-bit states, a smaller one, and a vector."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8, bias=False))


Make = Callable[[type, nn.Module], Any]
# How the classes are constructed: the first that works and steps is taken.
MAKERS: tuple[Make, ...] = (
    lambda cls, module: cls(module.parameters()),
    lambda cls, module: cls(module.parameters(), lr=1e-3),
    lambda cls, module: cls(module.parameters(), lr=1e-3, momentum=0.9),
    lambda cls, module: cls(torch.optim.AdamW(module.parameters(), lr=1e-3)),
    lambda cls, module: cls(torch.optim.SGD(module.parameters(), lr=1e-3)),
    lambda cls, module: cls(module.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-3),
    lambda cls, module: cls(module.parameters(), torch.optim.AdamW(module.parameters(), lr=1e-3)),
    lambda cls, module: cls(module, module.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-3),
    lambda cls, module: cls(
        module.parameters(),
        torch.optim.AdamW(module.parameters(), lr=1e-3),
        module,
        _proportion_scheduler(),
    ),
    lambda cls, module: cls([p for p in module.parameters() if p.dim() == 2]),
    lambda cls, module: cls(module.parameters(), num_data=8, lr=1e-3),
    lambda cls, module: cls(module.parameters(), num_iterations=8),
    lambda cls, module: cls(module),
    lambda cls, module: cls(module, lr=1e-3),
    lambda cls, module: cls(list(module.named_parameters())),
    lambda cls, module: cls(
        [
            {"params": [p for p in module.parameters() if p.dim() == 2], "use_muon": True},
            {"params": [p for p in module.parameters() if p.dim() != 2], "use_muon": False},
        ]
    ),
)


def _proportion_scheduler() -> Any:
    """Of GSAM: its radius follows a learning rate."""
    schedulers = import_library("pytorch_optimizer").lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    linear = schedulers.LinearScheduler(optimizer, t_max=20, max_lr=1e-3, init_lr=1e-3)
    return schedulers.ProportionScheduler(linear, max_lr=1e-3, min_lr=1e-4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to construct and step one class."""

    cls: type
    maker: int
    stepper: int

    def job(self, seed: int) -> tuple[nn.Module, Any]:
        """Return a model and its optimizer before the first step."""
        module = model(seed)
        with quiet():
            return module, MAKERS[self.maker](self.cls, module)

    def step(self, module: nn.Module, optimizer: Any, number: int) -> None:
        """Make a step that depends on the parameters, the state and `number` only."""
        with quiet(), torch.compiler.set_stance("force_eager"):
            _STEPPERS[self.stepper](module, optimizer, number)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of the libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_WARMUP = 12  # steps in which every class changes parameters


def recipe(cls: type) -> Recipe | None:
    """Return how to construct and step a class; None if that fails on a CPU."""
    for maker in range(len(MAKERS)):
        for stepper in range(len(_STEPPERS)):
            candidate = Recipe(cls, maker, stepper)
            try:
                module, optimizer = candidate.job(0)
            except Exception:
                break
            try:
                before = [param.detach().clone() for param in module.parameters()]
                for number in range(_WARMUP):
                    candidate.step(module, optimizer, number)
                    if not all(map(torch.equal, before, module.parameters())):
                        break
                else:
                    continue
                if not all(bool(param.isfinite().all()) for param in module.parameters()):
                    continue
            except Exception:
                continue
            return candidate
    return None


def classes(name: str) -> list[type]:
    """Return the optimizer classes of a library, wrappers included, sorted by name."""
    library = import_library(name)
    members = {
        kind
        for _, kind in inspect.getmembers(library, inspect.isclass)
        if callable(getattr(kind, "step", None))
        and (issubclass(kind, torch.optim.Optimizer) or hasattr(kind, "zero_grad"))
        and not kind.__module__.startswith("torch.")
        and not inspect.isabstract(kind)
    }
    return sorted(members, key=lambda kind: kind.__name__)


def _closure(
    module: nn.Module, optimizer: Any, number: int, *, graph: bool = False
) -> Callable[[], torch.Tensor]:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    if hasattr(optimizer, "train"):
        optimizer.train()
    inputs = torch.randn(4, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(inputs).square().mean()
        loss.backward(create_graph=graph)
        return loss

    return closure


def _plain(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number)()
    optimizer.step()


def _with_closure(module: nn.Module, optimizer: Any, number: int) -> None:
    closure = _closure(module, optimizer, number)
    closure()
    optimizer.step(closure)


def _loss_closure(module: nn.Module, optimizer: Any, number: int) -> None:
    loss = _closure(module, optimizer, number)().detach()
    optimizer.step(lambda: loss)


def _second_order(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number, graph=True)()
    optimizer.step()


def _two_steps(module: nn.Module, optimizer: Any, number: int) -> None:
    closure = _closure(module, optimizer, number)
    closure()
    optimizer.first_step(zero_grad=True)
    closure()
    optimizer.second_step(zero_grad=True)


def _several_losses(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number)
    outputs = module(torch.randn(4, 64))
    optimizer.pc_backward([outputs.square().mean(), outputs.abs().mean()])
    optimizer.step()


def _own_backward(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number)
    optimizer.zero_grad()
    optimizer.backward(module(torch.randn(4, 64)).square().mean())
    optimizer.step()


def _fused_backward(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number)
    optimizer.fused_backward(module(torch.randn(4, 64)).square().mean(), 1e-3)


def _set_closure(module: nn.Module, optimizer: Any, number: int) -> None:
    _closure(module, optimizer, number)
    inputs, targets = torch.randn(4, 64), torch.randn(4, 8)
    optimizer.set_closure(nn.functional.mse_loss, inputs, targets)
    optimizer.step()


_STEPPERS = (
    _plain,
    _with_closure,
    _loss_closure,
    _second_order,
    _two_steps,
    _several_losses,
    _own_backward,
    _fused_backward,
    _set_closure,
)


def plain_state(module: nn.Module, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Return what a step reads, as nested dicts and lists of plain tensors, to compare it."""
    numbers = {id(param): number for number, param in enumerate(module.parameters())}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not hasattr(value, "__tensor_flatten__"):
                return value.detach()
            return {name: walk(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
        if isinstance(value, Mapping):
            # How the optimizer runs is not loaded.
            return {
                numbers.get(id(key), key): walk(item)
                for key, item in value.items()
                if key not in ("foreach", "fused")
            }
        if isinstance(value, list | tuple | deque):
            return [walk(item) for item in value]
        return walk(vars(value)) if hasattr(value, "__dict__") else value

    return module.state_dict(), walk(optimizer.state_dict())

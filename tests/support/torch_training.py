"""Training loops in plain PyTorch, and comparisons of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

FSDP1_NAME = "_fsdp_wrapped_module."
Loss = Callable[[Any, torch.Generator], Tensor]


def train(model: Any, optimizer: Any, loss_of: Loss, first: int, count: int) -> list[float]:
    """Return the losses. `loss_of` draws the batch of a step from its generator."""
    losses = []
    for step in range(first, first + count):
        loss = loss_of(model, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_step(optimizer: torch.optim.Optimizer) -> None:
    """One step in which every trainable parameter has a gradient, of other values than others'."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params, 1):
        if param.requires_grad:
            values = torch.linspace(number, number + 1, param.numel())
            param.grad = values.reshape(param.shape).to(param)
    optimizer.step()


@contextmanager
def process_group() -> Iterator[None]:
    """Make this process a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def next_token_loss(model: nn.Module, draw: torch.Generator, *, vocabulary: int) -> Tensor:
    ids = torch.randint(0, vocabulary, (2, 5), generator=draw)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def causal_lm_loss(model: Any, draw: torch.Generator, *, vocabulary: int) -> Tensor:
    """The loss of a model of transformers."""
    ids = torch.randint(0, vocabulary, (2, 8), generator=draw)
    return model(input_ids=ids, labels=ids).loss


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered from all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, *optimizers: Any) -> dict[str, Tensor]:
    """Return the whole tensors of the optimizers' state by "fqn/state"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": whole(value)
        for optimizer in optimizers
        for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def whole_state(model: nn.Module, *optimizers: Any) -> dict[str, Tensor]:
    """Return the whole tensors of a model and of its optimizers' state."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            full = {
                f"{prefix}.{key}".replace(FSDP1_NAME, "").lstrip("."): tensor.detach().clone()
                for prefix, inner in model.named_modules()
                for key, tensor in (*inner._parameters.items(), *inner._buffers.items())
                if tensor is not None and key not in inner._non_persistent_buffers_set
            }
        return full | {key: value for each in optimizers for key, value in _fsdp1(model, each)}
    model = getattr(model, "module", model)
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return weights | state_of(model, *optimizers)


def _fsdp1(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors of an optimizer's state, from each rank's range of a parameter."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for prefix, unit in model.named_modules():
        handle: Any = getattr(unit, "_handle", None)
        if not isinstance(unit, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        params = flat._params or [flat] * len(flat._fqns)
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, params, strict=True)
        for fqn, shape, info, param in infos:
            ranges = None
            if info.in_shard:
                first = info.offset_in_shard if param is flat else 0
                ranges = (
                    info.intra_param_start_idx,
                    {
                        key: value[first : first + info.numel_in_shard] if value.dim() else value
                        for key, value in optimizer.state[param].items()
                    },
                )
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, ranges)
            states = [state for _, state in sorted(filter(None, gathered), key=itemgetter(0))]
            name = f"{prefix}.{fqn}".replace(FSDP1_NAME, "").lstrip(".")
            for key, value in states[0].items():
                pieces = [state[key] for state in states]
                yield f"{name}/{key}", torch.cat(pieces).view(shape) if value.dim() else value


def small_net(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    attention = torch.nn.TransformerEncoderLayer(32, 4, 80, dropout=0.0, batch_first=True)
    linear = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.LayerNorm(96))
    body, length = (attention, 32) if kind == "attention" else (linear, 96)
    net = torch.nn.Sequential(body, torch.nn.Linear(length, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=3e-3)


def sine_loss(net: torch.nn.Module, draw: torch.Generator) -> torch.Tensor:
    inputs = torch.randn(4, 8, 32, generator=draw)
    return (net(inputs) - torch.sin(inputs[..., :4])).square().mean()


class Counting(nn.Linear):
    """A module with extra state."""

    count: Any = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

"""Training jobs for round trips: small models with every trait that a checkpoint can lose, and the
optimizers that hold masters.

Gradients are noise that depends on the parameter's name and the step alone, so a job steps alike on
every layout. Nothing here imports the package.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from tests.support.equality import same
from tests.support.runtime.torch_state.optimizers import Averaged, Composite, FusedAdam, Lookahead

WRAPPERS = ("lookahead", "averaged", "composite")  # bf16 in optimizers that step others
PRECISIONS = (
    "fp32",
    "bf16",
    "optimizer_masters",
    "lazy_masters",
    "fused_masters",
    "remainders",
    "local_state",
    "sharded_state",
    "master_dict",
    "model_dtype",
    *WRAPPERS,
)
TRAITS = ("frozen", "buffers", "integers", "mixed", "tied", "shared", "ema")
LOW = (torch.bfloat16, torch.float16)
MASTER = "master_param"  # the state name that Apex and TransformerEngine use


@dataclass(frozen=True)
class JobSpec:
    """What a job is: how it holds its weights, and which traits its model has."""

    precision: str
    traits: frozenset[str]


class Net(nn.Module):
    """Two linear layers between an embedding and a head; `forward` is never called."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        low = spec.precision not in ("fp32", "model_dtype")
        dtype = torch.bfloat16 if low else torch.float32
        self.embed = nn.Embedding(6, 4, dtype=dtype)
        self.first = nn.Linear(4, 4, dtype=dtype)
        self.second = self.first if "shared" in spec.traits else nn.Linear(4, 4, dtype=dtype)
        norm = (
            {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
            if "mixed" in spec.traits
            else dtype
        )
        self.norm = nn.Parameter(torch.ones(4, dtype=norm))
        self.head = nn.Linear(4, 6, bias=False, dtype=dtype)
        if "tied" in spec.traits:
            self.head.weight = self.embed.weight
        if "frozen" in spec.traits:
            self.first.requires_grad_(False)
        if "buffers" in spec.traits:
            self.register_buffer("mean", torch.zeros(4, dtype=dtype))
        if "integers" in spec.traits:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))


class MasterAdam(Optimizer):
    """Adam whose low-precision parameters have fp32 masters in its state, made at construction or
    at the first step.
    """

    def __init__(self, params: Any, *, lr: float = 0.01, lazy: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})
        for group in self.param_groups if not lazy else ():
            for param in group["params"]:
                if param.dtype in LOW:
                    self.state[param][MASTER] = param.detach().float()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of Adam in fp32; the parameter is the rounded master."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, weight = self.state[param], self.placed(param.detach())
                if param.dtype in LOW and MASTER not in state:
                    state[MASTER] = weight.float()
                master = state[MASTER] if param.dtype in LOW else weight
                if "exp_avg" not in state:
                    state |= {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(master),
                        "exp_avg_sq": torch.zeros_like(master),
                    }
                _adam(master, self.placed(param.grad).float(), state, group)
                self.write(param, master)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or its gradient in the layout of the state."""
        return tensor

    def write(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Round the result of a step into the parameter."""
        param.copy_(master)


class LocalAdam(MasterAdam):
    """Keeps plain tensors of the local shards of DTensor parameters, as in a report about
    TransformerEngine's FusedAdam.
    """

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def write(self, param: torch.Tensor, master: torch.Tensor) -> None:
        self.placed(param).copy_(master)


class ShardedAdam(MasterAdam):
    """Keeps DTensors of plain parameters, sharded over all ranks as in ZeRO-1."""

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not dist.is_initialized():
            return tensor
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(tensor, mesh, [Shard(0)])

    def write(self, param: torch.Tensor, master: torch.Tensor) -> None:
        is_whole = isinstance(param, DTensor) or not isinstance(master, DTensor)
        param.copy_(master if is_whole else master.full_tensor())


def _adam(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
) -> None:
    state["step"].add_(1)
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weight.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


class DictAdam:
    """State of a hand-written loop: masters by name, and moments as {"fqn/state": tensor}."""

    def __init__(self, model: nn.Module) -> None:
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.params = params
        self.masters = {
            name: param.detach().float() for name, param in params.items() if param.dtype in LOW
        }
        weights = {name: self.masters.get(name, param.detach()) for name, param in params.items()}
        self.moments = {
            f"{name}/{key}": torch.zeros_like(w)
            for name, w in weights.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
        self.moments |= {f"{name}/step": torch.tensor(0.0) for name in params}

    @torch.no_grad()
    def step(self) -> None:
        """One step of Adam on the masters, rounded into the parameters."""
        group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
        for name, param in self.params.items():
            state = {
                key: self.moments[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }
            assert param.grad is not None
            _adam(self.masters.get(name, param), param.grad.float(), state, group)
            if name in self.masters:
                param.copy_(self.masters[name])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "eager masters": MasterAdam,
    "lazy masters": lambda params: MasterAdam(params, lazy=True),
    "local shards": lambda params: LocalAdam(params, lazy=True),
    "sharded state": lambda params: ShardedAdam(params, lazy=True),
    "FusedAdam": lambda params: FusedAdam(params, master_weights=True),
    "FusedAdam remainders": lambda params: FusedAdam(
        params, master_weights=True, store_param_remainders=True
    ),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=0.01)),
    "averaged": lambda params: Averaged(torch.optim.AdamW(params, lr=0.01)),
    "composite": Composite,
}
USUAL = {
    "optimizer_masters": "eager masters",
    "lazy_masters": "lazy masters",
    "local_state": "local shards",
    "sharded_state": "sharded state",
    "fused_masters": "FusedAdam",
    "remainders": "FusedAdam remainders",
    **{name: name for name in WRAPPERS},
}
# What else may take the checkpoint: classes with the same state and arithmetic; and those that must
# be refused.
SAME_STATE = {"AdamW": "Adam", "eager masters": "lazy masters", "lazy masters": "eager masters"}
OTHER_STATE = {"AdamW": ("SGD", "Adagrad")} | dict.fromkeys(
    (
        "eager masters",
        "lazy masters",
        "local shards",
        "sharded state",
        "FusedAdam",
        "FusedAdam remainders",
    ),
    ("AdamW", "SGD"),
)
OTHER_STATE |= dict.fromkeys(WRAPPERS, ("Adagrad",))


class Job:
    """A training job. `optimizer`: a key of OPTIMIZERS, the usual one of its precision where None.
    `shard`: applied to the model.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        seed: int,
        optimizer: str | None = None,
        shard: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(seed)
        self.spec, self.model = spec, shard(Net(spec))
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.loop = (
            DictAdam(self.model) if spec.precision == "master_dict" and optimizer is None else None
        )
        self.kind = optimizer or USUAL.get(spec.precision, "AdamW")
        self.optimizer = None if self.loop else OPTIMIZERS[self.kind](params)
        self.ema = (
            {name: param.detach().float().clone() for name, param in self.model.named_parameters()}
            if "ema" in spec.traits
            else {}
        )

    @torch.no_grad()
    def train(self, steps: range) -> None:
        """Run these steps, numbered over the life of the run."""
        for step in steps:
            for name, param in self.model.named_parameters():
                param.grad = _noise(name, step, param) if param.requires_grad else None
            (self.loop or self.optimizer).step()
            buffers = dict(self.model.named_buffers())
            if "mean" in buffers:
                buffers["mean"].add_(0.1 * step + 0.37)
            if "count" in buffers:
                buffers["count"].add_(3)
                buffers["mask"][step % 4] ^= True
            for name, param in self.model.named_parameters():
                if name in self.ema:
                    self.ema[name].lerp_(param.float(), 0.1)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set each master to its parameter's value, as a checkpoint without masters restores it."""
        if self.spec.precision == "model_dtype":
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.dtype == torch.float32:
                    tensor.copy_(tensor.bfloat16())
        params = dict(self.model.named_parameters())
        for name, master in self.loop.masters.items() if self.loop else ():
            master.copy_(params[name])
        for param, state in self.optimizer.state.items() if self.optimizer else ():
            if _is_master(param, state):
                placed = getattr(self.optimizer, "placed", lambda tensor: tensor)
                state[MASTER].copy_(placed(param))

    def targets(self) -> dict[str, Any]:
        """The arguments of a save or a load."""
        live: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.loop.moments if self.loop else self.optimizer,
        }
        if self.loop is not None:
            live["master_weights"] = self.loop.masters
        return live | ({"parts": {"ema": self.ema}} if self.ema else {})

    def masters(self) -> set[str]:
        """Names of the parameters that have a master now."""
        if self.loop is not None:
            return set(self.loop.masters)
        state = self.optimizer.state
        return {
            name
            for name, param in self.model.named_parameters()
            if _is_master(param, state.get(param, {}))
        }

    def has_optimizer_state(self) -> bool:
        """Whether there is a moment that a checkpoint could lose."""
        return self.loop is not None or any(
            not {"exp_avg", "momentum_buffer", "slow"}.isdisjoint(_state(self.optimizer, param))
            for param in self.model.parameters()
        )

    def state(self) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
        """Copies of every value that decides how the run continues, by name."""
        values: dict[str, torch.Tensor] = {
            f"model:{name}": tensor for name, tensor in self.model.state_dict().items()
        }
        values |= {f"ema:{name}": tensor for name, tensor in self.ema.items()}
        if self.loop is not None:
            values |= {f"optimizer:{name}": tensor for name, tensor in self.loop.moments.items()}
            values |= {
                f"optimizer:{name}/{MASTER}": tensor for name, tensor in self.loop.masters.items()
            }
        for name, param in self.model.named_parameters() if self.optimizer else ():
            state = _state(self.optimizer, param)
            values |= {
                f"optimizer:{name}/{key}": _like(param, torch.as_tensor(value))
                for key, value in state.items()
            }
        return {name: (tensor.dtype, _full(tensor)) for name, tensor in values.items()}


def _state(optimizer: Any, param: torch.Tensor) -> dict[str, Any]:
    """The state of a parameter in an optimizer and in those that it steps."""
    inner = [getattr(optimizer, "base", None), *getattr(optimizer, "optimizers", {}).values()]
    state = dict(optimizer.state.get(param, {}))
    for each in filter(None, inner):
        state |= _state(each, param)
    return state


def _is_master(param: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether the state holds the master of the parameter. The master's low bits, or a copy of a
    float32 parameter, do not count.
    """
    return param.dtype in LOW and MASTER in state and state[MASTER].dtype == torch.float32


def differences(
    actual: Mapping[str, tuple[torch.dtype, torch.Tensor]],
    expected: Mapping[str, tuple[torch.dtype, torch.Tensor]],
) -> list[str]:
    """Names whose values differ in any bit."""
    names = sorted({*actual, *expected})
    return [
        name
        for name in names
        if name not in actual or name not in expected or not same(actual[name], expected[name])
    ]


def _like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The state of a parameter; a plain local shard as a DTensor."""
    is_shard = isinstance(param, DTensor) and not isinstance(value, DTensor) and value.dim() > 0
    if not is_shard:
        return value
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor as bytes, copied, with its shape in front."""
    if isinstance(tensor, DTensor):
        wide = (
            tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor
        )  # gloo gathers no int16
        tensor = wide.full_tensor().to(tensor.dtype)
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def _noise(name: str, step: int, param: torch.Tensor) -> torch.Tensor:
    """A gradient; the same bits for a whole parameter and for its shards together."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    noise = torch.randn(param.shape, generator=generator).to(param.dtype)
    return (
        distribute_tensor(noise, param.device_mesh, param.placements)
        if isinstance(param, DTensor)
        else noise
    )

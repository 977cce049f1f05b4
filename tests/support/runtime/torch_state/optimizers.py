"""Optimizers that keep state in ways that torch's own do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class FusedAdam(torch.optim.Optimizer):
    """Does on any device what TransformerEngine's FusedAdam does, without FP8, FP16 states, CUDA
    graphs, other modes than AdamW and uncorrected bias.

    Source: NVIDIA/TransformerEngine, transformer_engine/pytorch/optimizers/fused_adam.py at
    d0067d0:

    - `__init__` makes no state. `master_weights`, `name_to_dtype_map` and
      `store_param_remainders` are attributes.
    - `step` counts in each param group (`group["step"]`, an int, absent before the first step).
    - `step` makes state where a parameter has none at all (`len(state) == 0`), also for
      parameters without a gradient:
      `exp_avg`, `exp_avg_sq` in float32 whatever the parameter's dtype, `master_param` from the
      parameter of that moment. A parameter with some state and without `master_param` is a
      KeyError.
    - A low-precision parameter is computed in its master and rounded from it. A float32 parameter
      has a master too, and it is never updated: the parameter itself is.
    - States that are not float32 have an entry in `_scales`, which `step` reads; for bfloat16 it
      stays 1.
    - With `store_param_remainders`, `master_param` of a bfloat16 parameter is int16: the low half
      of the float32 master.
    - `state_dict` gives states in float32 (remainders as they are). `load_state_dict` replaces
      the state through
      `set_scaled_state`, which makes missing states and copies.
    - State of a DTensor is a DTensor with the same placements.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.master_weights = master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": torch.float32,
        }
        self.store_param_remainders = store_param_remainders and master_weights
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _has_remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _initialize_state(
        self,
        param: torch.Tensor,
        name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        dtype = torch.int16 if store_param_remainders else self.name_to_dtype_map[name]
        allocate = torch.zeros_like if zero_buffer or store_param_remainders else torch.empty_like
        state = allocate(_local(param), dtype=dtype, requires_grad=False)
        if isinstance(param, DTensor):
            state = DTensor.from_local(
                state, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        self.state[param][name] = state
        if self.name_to_dtype_map[name] != torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones([1], device=param.device)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        self._initialize_state(param, "exp_avg", zero_buffer=True)
        self._initialize_state(param, "exp_avg_sq", zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", _local(param).detach().clone().float())

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        remainders = state_name == "master_param" and self._has_remainders(param)
        assert unscaled_state.dtype == (torch.int16 if remainders else torch.float32)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, remainders)
        _local(self.state[param][state_name]).copy_(unscaled_state)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        state = _local(self.state[param][state_name])
        remainders = state_name == "master_param" and self._has_remainders(param)
        assert state.dtype == (torch.int16 if remainders else self.name_to_dtype_map[state_name])
        return state if remainders else state.float()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name in state["state"].get(number, ()):
                local = self.get_unscaled_state(param, name)
                if isinstance(param, DTensor):
                    local = DTensor.from_local(
                        local,
                        param.device_mesh,
                        param.placements,
                        shape=param.shape,
                        stride=param.stride(),
                    )
                state["state"][number] = {**state["state"][number], name: local}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number not in state_dict["state"]:
                continue
            self.state[param] = {}
            for name, value in state_dict["state"][number].items():
                remainders = name == "master_param" and self._has_remainders(param)
                self.set_scaled_state(
                    param, name, _local(value) if remainders else _local(value).float()
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for param in group["params"]:
                if len(self.state[param]) == 0:
                    self.initialize_state(param, self._has_remainders(param))
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = {name: _local(value) for name, value in self.state[param].items()}
        for name in state:
            if self.name_to_dtype_map[name] != torch.float32:
                _ = self._scales[param][name]
        weight, low = _local(param), param.dtype in (torch.float16, torch.bfloat16)
        if low and self.master_weights:
            master = state["master_param"]
            if self._has_remainders(param):
                master = joined(weight, master)
        else:
            master = weight.float()
        moment, square = state["exp_avg"].float(), state["exp_avg_sq"].float()
        self._adam(master, _local(param.grad).float(), moment, square, group)  # type: ignore[arg-type]
        state["exp_avg"].copy_(moment)
        state["exp_avg_sq"].copy_(square)
        if self._has_remainders(param):
            high, remainder = split(master)
            weight.copy_(high)
            state["master_param"].copy_(remainder)
        elif not low or self.master_weights:
            weight.copy_(master)
        else:
            weight.copy_(master.to(weight.dtype))

    def _adam(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        moment: torch.Tensor,
        square: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        """One Adam step in float32, in place, as the kernel `multi_tensor_adam` computes it."""
        (first, second), number = group["betas"], group["step"]
        moment.mul_(first).add_(grad, alpha=1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        corrected, scale = moment / (1 - first**number), square / (1 - second**number)
        update = corrected / (scale.sqrt() + group["eps"])
        update = update + group["weight_decay"] * weight
        weight.sub_(update, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights in the state of the optimizer that it steps, and none in its own.

    Like timm's: its `state_dict` is that of the inner optimizer, and no step runs its hooks.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state: Any = {}
        self._optimizer_step_pre_hooks = OrderedDict()
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for param in group["params"] if group["lookahead_step"] % 2 == 0 else ():
                slow = self.base.state[param].setdefault("slow", param.detach().clone())
                slow.lerp_(param.detach(), 0.5)
                param.data.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Averaged(Lookahead):
    """Keeps slow weights in a state of its own, by position in `state_dict()`, and a count."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.count = 0
        params = [param for group in self.param_groups for param in group["params"]]
        self.state = {param: {"slow": param.detach().clone()} for param in params}

    def step(self, closure: Any = None) -> Any:
        loss, self.count = self.base.step(closure), self.count + 1
        for param, state in self.state.items():
            state["slow"].lerp_(param.detach(), 0.5 / self.count)
            param.data.copy_(state["slow"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, number): dict(state) for number, state in enumerate(self.state.values())}
        return {"slow": slow, "base": self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups, self.count = self.base.param_groups, state_dict["count"]
        for state, slow in zip(self.state.values(), state_dict["slow"].values(), strict=True):
            slow_dtype = state["slow"].dtype
            state["slow"] = slow["slow"].to(torch.bfloat16).to(slow_dtype)  # a load may be lossy
            state["slow"].copy_(slow["slow"])


class Grouped(Lookahead):
    """Has groups of its own, as torchtitan's container has."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.param_groups = [dict(group) for group in base.param_groups]

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)


class Composite:
    """Steps matrices with one optimizer and the rest with another; no torch optimizer itself."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        params = list(params)
        self.optimizers = {
            "matrices": torch.optim.SGD([p for p in params if p.dim() == 2], lr=0.1, momentum=0.9),
            "others": torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.1),
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for inner in self.optimizers.values() for group in inner.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {}

    def zero_grad(self) -> None:
        for inner in self.optimizers.values():
            inner.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for inner in self.optimizers.values():
            inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {name: inner.state_dict() for name, inner in self.optimizers.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        for name, inner in self.optimizers.items():
            inner.load_state_dict(state_dict[name])


class Counting(torch.optim.AdamW):
    """Counts steps beside its state, and slows down by the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        loss, self.count = super().step(closure), self.count + 1
        for param in self.param_groups[0]["params"]:
            param.data.mul_(1 - 0.1 / self.count)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})
        self.count = state_dict["count"]


class Halves(torch.Tensor):
    """A float32 tensor as its high and low 16 bits, like quantized states of torchao."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Halves:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, high.shape, dtype=torch.float32, device=high.device)  # type: ignore[no-any-return]

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Halves:
        """Split a tensor."""
        return cls(*split(tensor))

    def whole(self) -> torch.Tensor:
        """Return the tensor that was split."""
        return joined(self.high, self.low)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], ("halves", self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Halves:
        assert context == ("halves", torch.float32)
        return cls(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].high, args[0].low)  # views of the same shape
        if func is torch.ops.aten.clone.default:  # to compare it
            return args[0].whole()
        raise NotImplementedError(func)


class Nested(torch.Tensor):
    """Wraps another tensor subclass."""

    inner: Halves

    @staticmethod
    def __new__(cls, inner: Halves) -> Nested:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[no-any-return]

    def __init__(self, inner: Halves) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Any], context: Any, size: Any, stride: Any
    ) -> Nested:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Halved(torch.optim.Optimizer):
    """Momentum in two halves."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            momentum = state["momentum"].whole() if state else torch.zeros_like(param)
            momentum = momentum.mul(0.9).add(param.grad)
            state["momentum"] = Halves.of(momentum)
            param.data.sub_(momentum, alpha=0.1)
        return loss


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float32 master into a bfloat16 parameter and int16 remainders. The remainder's sign
    decides the rounding.
    """
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    high = ((bits - low.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), low


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join what `split` returned to the float32 master."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)

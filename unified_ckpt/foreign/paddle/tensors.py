"""Converts Paddle's parameters and optimizer state to torch's names, layouts and ties.

How state could be lost: a parameter's state is incomplete, or belongs to no parameter.
Both raise here, before any tensor is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from unified_ckpt.core.recipes import Recipe
from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.paddle.beta_powers import Betas, infer_betas, infer_steps
from unified_ckpt.foreign.paddle.master_check import HALF_DTYPES, with_master_check
from unified_ckpt.foreign.paddle.names import (
    ModelConfig,
    check_shape,
    is_adapter,
    is_head,
    is_transposed,
    layer_kind,
    resolve_head,
    split_axis,
    target_tensors,
    torch_name,
)
from unified_ckpt.foreign.paddle.slices import (
    as_sharded,
    compare_replicas,
    concat_ranks,
    dtype_of,
    files_of,
    load,
)
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.views.shards import ShardedTensor, single_shard

STATE_NAMES = {"moment1_0": "exp_avg", "moment2_0": "exp_avg_sq", "velocity_0": "momentum_buffer"}
BETAS = "betas"  # key in `extra` if one of them is unknown
POWER_STATES = ("beta1_pow_acc_0", "beta2_pow_acc_0")

# By part or Paddle's state name, parameter and tensor-parallel rank; several are replicas.
Slices = dict[str, dict[str, dict[int, list[Recipe]]]]


@dataclass(frozen=True, slots=True)
class PaddleTensors:
    """A folder's tensors in Paddle's names and layouts.

    No recipe has tensors of a Source. `optimizer` is keyed by Paddle's state name, then by
    parameter. `static_names`: of parameters, where known. `is_sharded`:
    each rank's files have the state of some parameters only. `others`: further parts, such as an
    EMA. `transposed`: which parameters torch stores transposed; None if their names decide.
    `tp_degrees`: as in `target_tensors`, by parameter. `equal_steps`: whether all parameters were
    updated equally often. `compare_masters`: with the model's weights when they are read.
    """

    model: Mapping[str, Recipe]
    masters: Mapping[str, Recipe] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Recipe]] = field(default_factory=dict)
    static_names: Mapping[str, str] = field(default_factory=dict)
    is_sharded: bool = False
    others: Mapping[str, Mapping[str, Recipe]] = field(default_factory=dict)
    transposed: Mapping[str, bool] | None = None
    tp_degrees: Mapping[str, int] = field(default_factory=dict)
    equal_steps: bool = False
    compare_masters: bool = True

    def parameters(self) -> dict[str, Recipe]:
        """Return one tensor of each parameter: the model's, else another one of its shape."""
        moments = [by_name for name, by_name in self.optimizer.items() if name in STATE_NAMES]
        parameters: dict[str, Recipe] = {}
        for by_name in (self.model, self.masters, *self.others.values(), *moments):
            parameters = {**by_name, **parameters}
        return parameters


@dataclass(frozen=True, slots=True)
class TorchTensors:
    """A folder's tensors in torch's names and layouts.

    `names` are those of the optimizer's parameters. `betas`: None for another optimizer than Adam.
    """

    tensors: Mapping[Key, ShardedTensor]
    aliases: Mapping[str, Mapping[str, str]]
    names: list[str]
    betas: Betas | None


def empty_slices() -> Slices:
    """Return slices to which any state, parameter and rank can be added."""
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def join_slices(
    root: str,
    slices: Slices,
    full_shapes: Mapping[str, tuple[int | None, ...]],
    model: ModelConfig,
    degree: int,
    static_names: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Recipe]]:
    """Join the slices of tensor-parallel ranks; those of a parameter's full shape are replicas.

    So are the powers of betas. `full_shapes`: None for unknown sizes. `static_names`: as in
    `PaddleTensors`. Raises IncompleteError if some of the `degree` ranks lack a slice.
    """
    joined: dict[str, dict[str, Recipe]] = {}
    for state_name, by_name in slices.items():
        joined[state_name] = {}
        for name, by_rank in by_name.items():
            shape, axis = by_rank[min(by_rank)][0].shape, None
            if shape != full_shapes.get(name) and state_name in (MODEL, MASTER, *STATE_NAMES):
                layer = layer_kind(name, static_name=(static_names or {}).get(name))
                axis = split_axis(name, len(shape), layer, vocab_first=bool(model.vocab_first))
            if axis is not None and len(by_rank) != degree:
                raise IncompleteError(
                    f"{root}: {name}: got {state_name} in files of {len(by_rank)} of {degree} "
                    "tensor-parallel ranks"
                )
            joined[state_name][name] = concat_ranks(name, by_rank, axis)
    return joined


def to_torch(
    root: str, state: PaddleTensors, model: ModelConfig, *, rename: bool, steps: int | None
) -> TorchTensors:
    """Convert all tensors. `rename`: use Hugging Face names. `steps`: the trainer's step count.

    Raises FormatError or IncompleteError naming parameters.
    """
    parameters = state.parameters()
    model = resolve_head(model, {name: tensor.shape for name, tensor in parameters.items()})
    embedding = next((name for name in parameters if name.endswith("embed_tokens.weight")), None)
    heads = filter(is_head, parameters)
    ties = dict.fromkeys(heads, embedding) if embedding and model.tied else {}
    state = _merge_ties(state, ties)
    if state.compare_masters:
        state = replace(state, masters=with_master_check(root, state.model, state.masters))
    parameters = state.parameters()
    _check_complete(root, state, parameters)
    _check_layers(root, parameters, model)
    transposed = state.transposed or {
        name: _is_transposed(root, name, tensor.shape, state.static_names.get(name), model)
        for name, tensor in parameters.items()
    }

    def targets(name: str, tensor: Recipe) -> dict[str, Recipe]:
        with error_prefix(root):
            return target_tensors(
                name,
                tensor,
                model,
                transposed=transposed[name],
                rename=rename,
                tp_degree=state.tp_degrees.get(name, 1),
            )

    target_names = {name: list(targets(name, tensor)) for name, tensor in parameters.items()}
    states = state.optimizer
    tensors: dict[Key, ShardedTensor] = {}
    moments = [
        (OPTIMIZER, f"/{STATE_NAMES[state_name]}", states[state_name])
        for state_name in STATE_NAMES
        if state_name in states
    ]
    parts = [(MODEL, "", state.model), (MASTER, "", state.masters)]
    parts += [(part, "", by_name) for part, by_name in state.others.items()]
    for part, state_name, by_name in (*parts, *moments):
        for name, tensor in by_name.items():
            for target, recipe in targets(name, tensor).items():
                label = f"{root}: {target}{state_name}"
                with error_prefix(label):
                    tensors[part, target + state_name] = as_sharded(label, recipe)
    betas = _infer_betas(root, states, steps)
    if betas is not None:
        count = _StepCounts(root, states, betas, steps, state.equal_steps)
        for name in states[POWER_STATES[0]]:
            step = count.tensor(name)
            tensors |= {(OPTIMIZER, f"{target}/step"): step for target in target_names[name]}
    names = [
        target
        for name, targets_of_name in target_names.items()
        if any(name in by_name for by_name in states.values())
        for target in targets_of_name
    ]
    target_ties = {
        (torch_name(tied, model) if rename else tied): target_names[tied_to][0]
        for tied, tied_to in ties.items()
    }
    return TorchTensors(tensors, _aliases(tensors, target_ties), names, betas)


def _merge_ties(state: PaddleTensors, ties: Mapping[str, str]) -> PaddleTensors:
    """Key tensors by the name that they are tied to; those stored twice must be equal."""
    return replace(
        state,
        model=_merge_tied(state.model, ties),
        masters=_merge_tied(state.masters, ties),
        optimizer={name: _merge_tied(by_name, ties) for name, by_name in state.optimizer.items()},
        others={part: _merge_tied(by_name, ties) for part, by_name in state.others.items()},
    )


def _merge_tied(by_name: Mapping[str, Recipe], ties: Mapping[str, str]) -> dict[str, Recipe]:
    replicas_by_name: dict[str, list[Recipe]] = {}
    for name, tensor in by_name.items():
        replicas_by_name.setdefault(ties.get(name, name), []).append(tensor)
    return {name: compare_replicas(name, replicas) for name, replicas in replicas_by_name.items()}


def _check_complete(root: str, state: PaddleTensors, parameters: Mapping[str, Recipe]) -> None:
    """Check that every state has a parameter of its shape, and that no state is partial.

    Parameters of half precision must have master weights if any has.
    """
    masters, states = state.masters, state.optimizer
    raise_if_any(
        FormatError,
        f"{root}: got unknown optimizer state, expected that of AdamW or Momentum",
        sorted(set(states) - STATE_NAMES.keys() - set(POWER_STATES)),
    )
    known = state.model or parameters  # without a model, only powers have no other tensor
    orphans = [
        name for by_name in (masters, *states.values()) for name in by_name if name not in known
    ]
    raise_if_any(
        FormatError, f"{root}: has state of parameters that the model lacks", sorted(set(orphans))
    )
    trained = (
        list(parameters)  # those of a missing rank file have no state
        if state.is_sharded
        else list(dict.fromkeys(name for by_name in states.values() for name in by_name))
    )
    missing = [
        f"{name}/{state_name}"
        for state_name, by_name in states.items()
        for name in trained
        if name not in by_name
    ]
    missing += [
        f"{name} (master weight)"
        for name in trained
        if masters and name not in masters and dtype_of(parameters[name]) in HALF_DTYPES
    ]
    raise_if_any(IncompleteError, f"{root}: optimizer state is missing", missing)
    for state_name, by_name in ((MASTER, masters), *states.items()):
        for name, tensor in by_name.items():
            actual, expected = tensor.shape, parameters[name].shape
            if actual != expected and state_name not in POWER_STATES:
                files = ", ".join(files_of(tensor))
                raise IncompleteError(
                    f"{root}: {name}: got {state_name} of shape {actual} in {files}, "
                    f"expected the parameter's shape {expected}"
                )
            if state_name in POWER_STATES and actual not in ((), (1,)):
                raise FormatError(
                    f"{root}: {name}: got {state_name} of shape {actual}, expected one element"
                )


def _check_layers(root: str, weights: Mapping[str, Recipe], model: ModelConfig) -> None:
    """Check the config's number of layers.

    A missing file of the last pipeline stage leaves no gap in the layer numbers.
    """
    present = {
        int(match[1]) for name in weights if (match := re.search(r"\.layers\.(\d+)\.", name))
    }
    missing = [f"layer {number}" for number in range(model.layers or 0) if number not in present]
    if missing and model.has_hf_names and not any(is_adapter(name) for name in weights):
        raise IncompleteError(
            format_list(
                f"{root}: layers are missing, expected {model.layers} by config.json", missing
            )
        )


def _is_transposed(
    root: str, name: str, shape: tuple[int, ...], static_name: str | None, model: ModelConfig
) -> bool:
    with error_prefix(root):
        check_shape(name, shape, model)
        layer = layer_kind(name, static_name=static_name)
        return is_transposed(name, shape, layer, vocab_first=model.vocab_first)


def _infer_betas(
    root: str, states: Mapping[str, Mapping[str, Recipe]], steps: int | None
) -> Betas | None:
    """Infer the betas from the powers of one parameter; None if the optimizer has no powers."""
    first_name = next(iter(states.get(POWER_STATES[0], ())), None)
    if first_name is None:
        return None
    if POWER_STATES[1] not in states:
        raise IncompleteError(
            f"{root}: got {POWER_STATES[0]} without {POWER_STATES[1]}, expected both"
        )
    with error_prefix(f"{root}: {first_name}"):
        return infer_betas(
            [_scalar(states[state_name][first_name]) for state_name in POWER_STATES],
            steps,
        )


def _scalar(tensor: Recipe) -> float:
    return float(load(tensor, full_box(tensor.shape)).reshape(-1)[0])


@dataclass(frozen=True, slots=True)
class _StepCounts:
    """The steps of each parameter. `trainer_steps`, `equal_steps`: as for `to_torch`."""

    root: str
    states: Mapping[str, Mapping[str, Recipe]]
    betas: Betas
    trainer_steps: int | None
    equal_steps: bool

    def tensor(self, name: str) -> ShardedTensor:
        """Return the number of steps of a parameter, computed when it is read."""

        def load_step_count() -> torch.Tensor:
            steps, first_name = self._count(name), next(iter(self.states[POWER_STATES[0]]))
            if self.equal_steps and steps != self._count(first_name):
                raise FormatError(
                    f"{self.root}: {name}: got beta powers after {steps} steps, expected "
                    f"{self._count(first_name)} as for {first_name}; files of several saves are "
                    "mixed: restore those of one save, or load without the optimizer"
                )
            return torch.tensor(float(steps), device="cpu")

        file = files_of(self.states[POWER_STATES[0]][name])[0]
        return single_shard("F32", (), load_step_count, file)

    def _count(self, name: str) -> int:
        powers = [_scalar(self.states[state_name][name]) for state_name in POWER_STATES]
        with error_prefix(f"{self.root}: {name}"):
            return infer_steps(powers, self.betas, self.trainer_steps)


def _aliases(
    tensors: Mapping[Key, ShardedTensor], ties: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Map the names of tied tensors to the stored ones, for each part."""
    aliases: dict[str, dict[str, str]] = {}
    for part, name in tensors:
        owner, slash, state_name = name.partition("/") if part == OPTIMIZER else (name, "", "")
        for tied, tied_to in ties.items():
            if owner == tied_to:
                aliases.setdefault(part, {})[tied + slash + state_name] = name
    return aliases

"""Turns the arguments of a save into a `SaveRequest` with named local tensors.

Changes nothing of the caller's and touches no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypedDict

import torch

from unified_ckpt.core.keywords import check_step
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.rank_mesh import RankMesh
from unified_ckpt.engine.values.caller_extra import CallerExtra, encode_extra
from unified_ckpt.errors import CheckpointError, FormatError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import FlatState, flatten_state, stored_without_master
from unified_ckpt.runtime.torch_state.masters import MasterComparison, compare_masters
from unified_ckpt.runtime.torch_state.meshes import describe_meshes, rank_mesh
from unified_ckpt.runtime.torch_state.modules import (
    CapturedModel,
    ModelArgument,
    capture_model,
    flatten_model,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    OptimizerArgument,
    capture_optimizer,
    captured_states,
)
from unified_ckpt.runtime.torch_state.placements import make_resolver
from unified_ckpt.runtime.torch_state.shards.carriers import local_tensors
from unified_ckpt.runtime.torch_state.shards.flat_parameters import FlatSlice
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


class StateArguments(TypedDict, total=False):
    """The keyword arguments of a save without `step` and `metrics`, which a manager adds."""

    model: ModelArgument | None
    optimizer: OptimizerArgument | None
    master_weights: OptimizerArgument | None
    parts: Mapping[str, ModelArgument] | None
    extra: Any
    rank_extra: Any
    layout: Layout | None
    attach: Callable[[str], object] | None
    options: SaveOptions | None


class SaveArguments(StateArguments, total=False):
    """The keyword arguments of every save; `uc.save` documents them."""

    step: int | None
    metrics: Mapping[str, float] | None


def save_request(
    comm: Comm, arguments: SaveArguments, options: SaveOptions, *, reads_values: bool = True
) -> SaveRequest:
    """Flatten the state to save. FormatError or LayoutError for arguments that cannot be saved.

    Without `reads_values`, a tensor of an omitted model is taken to be its rounded master.
    """
    step, layout = arguments.get("step"), arguments.get("layout")
    if step is not None:
        check_step(step)
    parts = arguments.get("parts")
    for part in parts if isinstance(parts, Mapping) else ():
        if isinstance(part, str) and part.endswith(SHARD_SUFFIX):
            # Its tensors would be taken for shards of another part.
            raise FormatError(
                f"parts: got {part!r}, expected a name that does not end in {SHARD_SUFFIX!r}, "
                "the suffix of shards; rename the part"
            )
    resolver = make_resolver(comm, layout)
    state = flatten_state(
        resolver,
        model=arguments.get("model"),
        optimizer=arguments.get("optimizer"),
        master_weights=arguments.get("master_weights"),
        extra_parts=arguments.get("parts"),
        model_dtype=options.model_dtype,
    )
    skipped_ddp_buffers = state.skipped_ddp_buffers()
    state.tensors = [
        tensor for tensor in state.tensors if tensor.decl.key not in skipped_ddp_buffers
    ]
    request = SaveRequest(
        state=state,
        extra=arguments.get("extra"),
        rank_extra=arguments.get("rank_extra"),
        layout=layout,
        matched_rules=resolver.matched_patterns,
        mesh=describe_meshes(resolver),
        rank_mesh=rank_mesh(resolver, ddp_world=state.model.ddp_world),
        step=step,
        metrics=_finite_metrics(arguments.get("metrics")),
        attach=arguments.get("attach"),
        options=options,
    )
    if not request.omitted_model_tensors:
        return request
    if reads_values:
        check = compare_masters(state, rank=comm.rank)
    else:
        masters = {tensor.decl.fqn for tensor in state.tensors if tensor.decl.part == MASTER}
        names = {tensor.decl.fqn for tensor in request.omitted_model_tensors}
        check = MasterComparison(rounded=frozenset(masters & names))
    return replace(request, master_check=check)


def capture(arguments: SaveArguments) -> CapturedState:
    """Return the state as it is now: tensors by reference, the rest by value.

    Resolves no sharding, as most captured states are never saved. Every rank calls, as `state_dict`
    of objects may be collective. FormatError for what cannot be stored.
    """
    captured = arguments.copy()
    model, parts = arguments.get("model"), arguments.get("parts")
    if model is not None:
        captured["model"] = capture_model(model, MODEL)
    if isinstance(parts, Mapping):
        captured["parts"] = {
            part: capture_model(model, f"parts[{part!r}]") for part, model in parts.items()
        }
    captured["optimizer"] = capture_optimizer(arguments.get("optimizer"))
    captured["master_weights"] = capture_optimizer(arguments.get("master_weights"))
    extra, rank_extra = arguments.get("extra"), arguments.get("rank_extra")
    caller_extra = encode_extra(extra, rank_extra, copy=True)
    values = (value for *_, by_name in _captured_values(captured) for value in by_name.values())
    tensors = [pair for value in values for pair in _watched(value)]
    inference = next((tensor for tensor, _ in tensors if tensor.is_inference()), None)
    if inference is not None:
        name = _stored_names(captured).get(id(inference))
        raise FormatError(
            f"{name}: got a tensor of inference mode, whose changes "
            "torch does not count; create it under torch.no_grad"
        )
    return CapturedState(captured, caller_extra, tensors, _versions(tensors))


def _watched(value: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor whose changes torch counts, with its memory; none for other values."""
    if isinstance(value, FlatSlice):  # FSDP1 moves the parameter for a forward pass
        return [(value.param, value.elements)]
    if not isinstance(value, torch.Tensor | Shards):
        return []
    return [(local, local) for local in local_tensors(value)]


def _versions(tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int]]:
    """Return torch's counts of changes in place, and addresses, which change with `data`."""
    return [(tensor._version, memory.data_ptr()) for tensor, memory in tensors]


def _captured_models(arguments: SaveArguments) -> Mapping[str, ModelArgument | None]:
    return {MODEL: arguments.get("model"), **(arguments.get("parts") or {})}


def _captured_values(arguments: SaveArguments) -> Iterator[tuple[str, object, Mapping[Any, Any]]]:
    """Yield (part, parameter or None, values by name): those of a model, or optimizer state."""
    for part, model in _captured_models(arguments).items():
        for _, values in model.states if isinstance(model, CapturedModel) else ():
            yield part, None, values
    for part, optimizer in (
        (OPTIMIZER, arguments.get("optimizer")),
        (MASTER, arguments.get("master_weights")),
    ):
        for parameter, state in captured_states(optimizer):
            yield part, parameter, state


def _stored_names(arguments: SaveArguments) -> dict[int, str]:
    """Return the names of captured tensors that this rank stores, by id of the local tensor."""
    names, fqns = dict[int, str](), dict[int, str]()
    for part, model in _captured_models(arguments).items():
        flat = flatten_model(model)
        tensors = flat.stored
        for fqn in tensors.keys() - flat.skipped_ddp_buffers:
            fqns[id(tensors[fqn])] = fqn
            names |= {id(local): f"{part}:{fqn}" for local in local_tensors(tensors[fqn])}
        for key, (first, *_) in flat.slices.items():
            fqns[key], names[key] = first.name, f"{part}:{first.name}"
    for part, parameter, values in _captured_values(arguments):
        for key, value in values.items() if part in (OPTIMIZER, MASTER) else ():
            name = key if parameter is None else f"{fqns.get(id(parameter))}/{key}"
            names |= {id(tensor): f"{part}:{name}" for tensor, _ in _watched(value)}
    return names


def metric_items(metrics: Any) -> Iterable[tuple[Any, Any]]:
    """Return the names and values of metrics. FormatError for anything but a mapping or None."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise FormatError(f"metrics: got {metrics!r}, expected {{name: number}}")
    return (metrics or {}).items()


def finite_float(value: Any) -> float | None:
    """Return the value as a float, or None if it is not a finite number, as "1.5" is not."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def _finite_metrics(metrics: Any) -> dict[str, float]:
    by_name: dict[str, float] = {}
    for name, value in metric_items(metrics):
        number = finite_float(value)
        if number is None:
            raise FormatError(f"metrics[{name!r}]: got {value!r}, expected a finite number")
        by_name[str(name)] = number
    return by_name


@dataclass(frozen=True, slots=True)
class OmittedParts:
    """What a save leaves out, as all ranks agreed.

    `parts` are the omitted parts, the same on all ranks. `stored_model_names`: where the model is
    one of them, this rank's model tensors that are stored because no stored master replaces them.
    """

    parts: tuple[str, ...] = ()
    stored_model_names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The state of an earlier time: tensors by reference, all else by value; see `capture`.

    `tensors`: see `_watched`; `versions`: see `_versions`.
    """

    arguments: SaveArguments
    caller_extra: CallerExtra
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]
    versions: list[tuple[int, int]]

    def check_unchanged(self) -> None:
        """Raise CheckpointError, naming a tensor, if one has changed since the capture."""
        versions = _versions(self.tensors)
        if versions == self.versions:
            return
        names = _stored_names(self.arguments)
        for (tensor, _), version, captured in zip(
            self.tensors, versions, self.versions, strict=True
        ):
            if version != captured and id(tensor) in names:
                raise CheckpointError(f"{names[id(tensor)]} has changed since the end of the step")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What one rank saves.

    `matched_rules`: the Layout's rules and shapes that applied here. `mesh` describes the meshes
    for people; `rank_mesh`: the mesh of all ranks, if there is one. `master_check` compares an
    omitted model with its master weights. `omitted_parts`: what all ranks agreed to leave out.
    `is_managed_path`, `shares_folder`: see `ManagedPath`. `captured`: the state is that of an
    earlier time, see `capture`.
    """

    state: FlatState
    extra: Any
    rank_extra: Any
    layout: Layout | None
    matched_rules: set[str]
    mesh: Mapping[str, object]
    step: int | None
    metrics: Mapping[str, float]
    attach: Callable[[str], object] | None
    options: SaveOptions
    master_check: MasterComparison = field(default_factory=MasterComparison)
    omitted_parts: OmittedParts = field(default_factory=OmittedParts)
    is_managed_path: bool = False
    shares_folder: bool = False
    captured: CapturedState | None = None
    rank_mesh: RankMesh | None = None

    @property
    def omitted_model_tensors(self) -> list[LocalTensor]:
        """The model's tensors where the options leave the model out, else nothing."""
        if self.options.stores(MODEL):
            return []
        return [tensor for tensor in self.state.tensors if tensor.decl.part == MODEL]

    @property
    def omitted_trained_parts(self) -> list[str]:
        """The extra parts that are left out, and whose optimizer state or masters are stored."""
        state = self.state
        omitted = [part for part in state.extra_parts if not self.options.stores(part)]
        if not omitted:
            return []
        owner_names = {
            decl.fqn if decl.part == MASTER else decl.fqn.rpartition("/")[0]
            for decl in (tensor.decl for tensor in state.tensors)
            if decl.part in (MASTER, OPTIMIZER) and self.options.stores(decl.part)
        }
        if self.options.stores(OPTIMIZER):
            owner_names |= {name for group in state.optimizer.groups for name in group["names"]}
        # a part may be a module of the model
        owner_names -= state.model.stored.keys()
        return sorted(
            part
            for part in omitted
            if not owner_names.isdisjoint(f"{part}.{fqn}" for fqn in state.extra_parts[part].stored)
        )

    @property
    def has_extra(self) -> bool:
        """Whether this rank passes `extra` or `rank_extra`."""
        return self.extra is not None or self.rank_extra is not None

    def stored_tensors(self) -> list[LocalTensor]:
        """Return the tensors to store, sorted by key."""
        stored = [tensor for tensor in self.state.tensors if self.options.stores(tensor.decl.part)]
        stored += [
            stored_without_master(tensor)
            for tensor in self.omitted_model_tensors
            if tensor.decl.fqn in self.omitted_parts.stored_model_names
        ]
        return sorted(stored, key=attrgetter("decl.part", "decl.fqn"))

    def stored_part_names(self) -> list[str]:
        """Return the requested parts that the options select, sorted."""
        return sorted(filter(self.options.stores, self.state.requested_parts))

    def with_omitted_parts(self, omitted_parts: OmittedParts) -> SaveRequest:
        """Return this request with what all ranks agreed to leave out."""
        if omitted_parts.stored_model_names:
            aliases = self.state.aliases
            aliases[WITHOUT_MASTERS] = {
                alias: fqn
                for alias, fqn in aliases[MODEL].items()
                if fqn in omitted_parts.stored_model_names
            }
        return replace(self, omitted_parts=omitted_parts)

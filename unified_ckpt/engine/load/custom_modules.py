"""Load modules that customize their loading by their own `load_state_dict`.

What such a module renames, computes or leaves out is its own to say. Its tensors are read into new
memory, which it receives once all bytes are verified. All other modules are filled in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.load.match import Match, MatchReport
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.format.names import MODEL, WEIGHTS
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES, FlatState
from unified_ckpt.runtime.torch_state.modules import (
    LoadMethod,
    ModelArgument,
    computed_names,
    load_methods,
)
from unified_ckpt.runtime.torch_state.names import is_extra_state
from unified_ckpt.runtime.torch_state.placements import ShardingResolver
from unified_ckpt.runtime.torch_state.shards.carriers import clone_of, shards_of
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, LocalTensor, torch_dtype

_CASTABLE = {DTYPE_NAMES[dtype] for dtype in CASTABLE_DTYPES}


@dataclass(frozen=True, slots=True)
class CustomModules:
    """The modules of a load that customize their loading, by part.

    `tensors`: (part, name) -> what their `load_state_dict` receives, in the layout of the module's
    state, or as saved where the two differ. `as_saved`: the latter.
    """

    methods: dict[str, Sequence[LoadMethod]] = field(default_factory=dict)
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    as_saved: set[Key] = field(default_factory=set)

    def prefixes(self) -> list[str]:
        """Return "part:prefix" of the stored names that these modules may use."""
        return [
            f"{part}:{prefix}"
            for part, methods in self.methods.items()
            for method in methods
            for prefix in method.prefixes
        ]

    def match_as_saved(self, match_report: MatchReport, source: Source) -> list[Match]:
        """Return matches for targets that differ from the stored tensor, as the module may convert
        it; take these, and missing ones, out of the report. Floats are cast on request only.
        """
        matches = []
        for key, (decl, (part, name), _) in list(match_report.differing.items()):
            spec = source.specs(part, (name,))[name]
            is_cast = spec.shape == decl.spec.shape and {spec.dtype, decl.spec.dtype} <= _CASTABLE
            if key in self.tensors and not is_cast:
                del match_report.differing[key]
                matches.append(self._as_saved(key, (part, name), source))
        absent = {":".join(key): key for key in self.tensors}
        for name in match_report.missing:
            if name in absent:
                del self.tensors[absent[name]]
        match_report.missing[:] = [name for name in match_report.missing if name not in absent]
        return matches

    def match_offered(self, offered: Iterable[str], source: Source) -> list[Match]:
        """Return matches for stored tensors that no rank has by name, but these modules may use."""
        matches = []
        for stored_part, _, name in (item.partition(":") for item in offered):
            part = target_part(stored_part, source)
            prefixes = tuple(p for method in self.methods.get(part, ()) for p in method.prefixes)
            if name.startswith(prefixes) and (part, name) not in self.tensors:
                matches.append(self._as_saved((part, name), (stored_part, name), source))
        return matches

    def _as_saved(self, key: Key, stored_key: Key, source: Source) -> Match:
        """Allocate a tensor with the stored dtype and shape, whole on each rank."""
        (part, fqn), (stored_part, name) = key, stored_key
        spec = source.specs(stored_part, (name,))[name]
        state = (value for method in self.methods[part] for value in method.state.values())
        device = next((v.device for v in state if isinstance(v, torch.Tensor)), None)
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        self.tensors[key] = tensor
        self.as_saved.add(key)
        declared_part = part if part == stored_part else f"{part}@{stored_part}"
        decl = TensorDecl(declared_part, fqn, spec, Sharding())
        return Match(key, LocalTensor(decl, tensor), stored_key)

    def owners(self) -> set[int]:
        """Return the ids of the modules whose extra state the methods set."""
        return {
            id(inner)
            for methods in self.methods.values()
            for method in methods
            for inner in method.module.modules()
        }

    def install(
        self, extra_states: Mapping[str, Any], *, strict: bool, is_unified: bool
    ) -> Iterator[str]:
        """Call `load_state_dict` of the modules; yield a note for each, with what it skipped.

        MismatchError if it refuses the state dict. `extra_states`: as saved, by stored name.
        `is_unified`: the modules are taken to be of the same version as at the save. State dicts
        from other formats have no versions, as those that safetensors and DCP load.
        """
        for part, methods in self.methods.items():
            for method in methods:
                state = self._state_dict(part, method, extra_states)
                name = type(method.module).__name__
                versions = getattr(method.state, "_metadata", None)
                if versions is not None and is_unified:
                    state._metadata = versions  # type: ignore[attr-defined]
                try:
                    result = method.module.load_state_dict(state, strict=strict)
                except RuntimeError as error:
                    raise MismatchError(
                        f"{part}: {name}.load_state_dict() refused the checkpoint's tensors: "
                        f"{error}; the module may hold a mix of old and new values; rename stored "
                        "tensors with SourceOptions(rename=...), or mend the method"
                    ) from error
                skipped = [
                    f"; {kind}: {', '.join(names)}"
                    for kind, names in zip(("missing", "unexpected"), result or (), strict=False)
                    if names
                ]
                yield f"{part}: loaded by {name}.load_state_dict(){''.join(skipped)}"

    def _state_dict(
        self, part: str, method: LoadMethod, extra_states: Mapping[str, Any]
    ) -> OrderedDict[str, Any]:
        """Return the state dict of a module: what was read for it, and tensors filled in place."""
        state, prefix = OrderedDict[str, Any](), "" if part == MODEL else f"{part}."
        for key, fqn in method.names.items():
            current = method.state[key]
            if is_extra_state(key):
                state[key] = extra_states.get(prefix + fqn, current)
            elif (part, fqn) in self.tensors:
                state[key] = self._value((part, fqn), _layout_of([current]))
            elif not fqn.startswith(method.prefixes):
                state[key] = current
        # Other modules of a list, such as pipeline chunks, have their tensors by name.
        names = {fqn for each in self.methods[part] for fqn in each.names.values()}
        layout = _layout_of(method.state.values())
        for tensor_part, fqn in self.tensors:
            if tensor_part == part and fqn not in names and fqn.startswith(method.prefixes):
                state[method.key(fqn)] = self._value((part, fqn), layout)
        return state

    def _value(self, key: Key, layout: _Layout) -> torch.Tensor:
        """Return a tensor that was read, one as saved in this layout.

        Torch copies no replicated tensor into uneven shards. So it is sharded like the tensors of
        its shape, if these agree.
        """
        tensor = self.tensors[key]
        if key not in self.as_saved or layout.mesh is None:
            return tensor
        replicated = [Replicate()] * layout.mesh.ndim
        whole = DTensor.from_local(tensor, layout.mesh, replicated, run_check=False)
        placements = [*layout.placements.get(tensor.shape, ())]
        return whole.redistribute(placements=placements[0]) if len(placements) == 1 else whole


@dataclass(frozen=True, slots=True)
class _Layout:
    """The mesh of some DTensors, None if they have none or several. `placements`: by shape."""

    mesh: DeviceMesh | None
    placements: Mapping[torch.Size, set[tuple[Placement, ...]]]


def _layout_of(values: Iterable[object]) -> _Layout:
    placements: dict[torch.Size, set[tuple[Placement, ...]]] = {}
    meshes = set()
    for value in values:
        if isinstance(value, DTensor):
            meshes.add(value.device_mesh)
            placements.setdefault(value.shape, set()).add(tuple(value.placements))
    return _Layout(meshes.pop() if len(meshes) == 1 else None, placements)


def target_part(stored_part: str, source: Source) -> str:
    """Return the part whose targets read a stored part: the model, if its own part is absent."""
    return MODEL if stored_part in WEIGHTS and MODEL not in source.parts else stored_part


def custom_modules(
    models: Mapping[str, ModelArgument | None],
    state: FlatState,
    resolver: ShardingResolver,
) -> CustomModules:
    """Give new memory to the targets of modules that customize their loading, in `state.tensors`.

    `models`: by part, those to load. LayoutError for a target tensor that a module's `state_dict`
    computes if nothing would load it.
    """
    flats = {MODEL: state.model, **state.extra_parts}
    custom = CustomModules()
    for part, model in models.items():
        computed = computed_names(model, flats[part], part)
        methods = load_methods(model, flats[part], computed)
        names = {  # other modules of a list are filled in place
            fqn
            for method in methods
            for fqn in method.names.values()
            if fqn.startswith(method.prefixes)
        }
        if methods:
            custom.methods[part] = methods
        for fqn in computed:
            if fqn not in names:
                raise LayoutError(
                    f"{part}:{fqn}: is computed by the module's state_dict(), so a load cannot "
                    "fill it; give the module a load_state_dict() or _load_from_state_dict() "
                    "that takes it"
                )
        if names:
            _allocate_copies(custom, part, names, state, resolver)
    return custom


def _allocate_copies(
    custom: CustomModules,
    part: str,
    names: Collection[str],
    state: FlatState,
    resolver: ShardingResolver,
) -> None:
    """Replace the targets of these names, which may have several boxes, by those of a copy."""
    flat = state.model if part == MODEL else state.extra_parts[part]
    targets = list[LocalTensor]()
    for target in state.tensors:
        decl = target.decl
        if decl.part != part or decl.fqn not in names or decl.fqn not in flat.tensors:
            targets.append(target)
        elif decl.key not in custom.tensors:
            custom.tensors[decl.key] = copy = clone_of(flat.tensors[decl.fqn])
            resolved = resolver.resolve(decl.fqn, copy)
            assert resolved is not None  # its mesh has this rank, as for the target
            targets += (
                LocalTensor(decl._replace(sharding=sharding), local)
                for sharding, local in resolved.locals()
            )
    for fqn in names:  # without a box here; the method receives them nevertheless
        if (part, fqn) not in custom.tensors and shards_of(flat.tensors.get(fqn)) is not None:
            custom.tensors[part, fqn] = clone_of(flat.tensors[fqn])
    state.tensors = targets

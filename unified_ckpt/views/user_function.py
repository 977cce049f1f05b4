"""Applies a user's function, named by a dotted path, that returns new tensors for a source.

The module is imported only because the user names it. Tensors that the function passes through keep
their place in the files; those that it makes are computed when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from unified_ckpt.core.recipes import External
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import LazyTensor, PartView, TensorView
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.torch_state.tensors import dtype_name
from unified_ckpt.views.derived import DerivedSource, Expr, ExternalTensor, Renamed


def apply_function(source: Source, path: str) -> DerivedSource:
    """Return a source of the tensors that the function at `path` returns.

    The function sees tied tensors under all their names; where it returns them unchanged, they stay
    tied. Everything beside tensors stays unchanged, under the original names.
    """
    function = _import_function(path)
    returned = function({part: _PartWithAliases(source, part) for part in source.parts})
    if not isinstance(returned, Mapping) or not all(
        isinstance(part_tensors, Mapping) for part_tensors in returned.values()
    ):
        raise FormatError(
            f"{path}: returned a {type(returned).__name__}, expected {{part: {{name: tensor}}}}"
        )
    exprs = {
        str(part): {
            str(name): _to_expr(source, value, f"{path}: {part}:{name}")
            for name, value in tensors.items()
        }
        for part, tensors in returned.items()
    }
    aliases = {part: _aliases(source, part, tensors) for part, tensors in exprs.items()}
    exprs = {
        part: {name: expr for name, expr in tensors.items() if name not in aliases[part]}
        for part, tensors in exprs.items()
    }
    return DerivedSource(source, exprs, aliases=aliases)


class _PartWithAliases(PartView):
    """A part that lists tied tensors under all their names."""

    def __iter__(self) -> Iterator[str]:
        names = self._source.names(self.part), self._source.aliases(self.part)
        return iter(sorted(set().union(*names)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _aliases(source: Source, part: str, tensors: Mapping[str, Expr]) -> dict[str, str]:
    """Return which of the tensors of a part are aliases of others, and the names left out."""
    tied: dict[Expr, set[str]] = {}  # stored tensor -> all its names
    for stored_part in source.parts:
        for alias, name in source.aliases(stored_part).items():
            tied.setdefault(Renamed((stored_part, name)), {name}).add(alias)
    targets: dict[Expr, str] = {}
    aliases = {}
    for name in sorted(tensors, key=lambda name: (tensors[name] != Renamed((part, name)), name)):
        if tensors[name] in tied and targets.setdefault(tensors[name], name) != name:
            aliases[name] = targets[tensors[name]]
    unlisted = {
        alias: name
        for alias, name in source.aliases(part).items()
        if targets.get(Renamed((part, name))) == name and alias not in tensors
    }
    return aliases | unlisted


def _import_function(path: str) -> Callable[[Any], Any]:
    """Import the function at "package.module:function" or "package.module.function"."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise FormatError(f"{path}: got no function name, expected package.module:function")
    try:
        attribute: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that it imports is missing
        raise NotFoundError(f"{path}: cannot import module {error.name}; set PYTHONPATH") from error
    for attribute_name in name.split("."):
        attribute = getattr(attribute, attribute_name, None)
    if not callable(attribute):
        raise NotFoundError(f"{path}: {module} has no function {name}")
    return attribute  # type: ignore[no-any-return]


def _to_expr(source: Source, value: Any, description: str) -> Expr:
    if isinstance(value, TensorView) and value._source is source:
        return Renamed((value.part, value.name))
    if isinstance(value, TensorView):
        return _external(value.dtype, value.shape, lambda: value[...], description)
    if isinstance(value, LazyTensor):
        return _external(value.dtype, value.shape, value.load, description)
    if isinstance(value, torch.Tensor):
        return _external(value.dtype, tuple(value.shape), value.detach, description)
    if callable(value):
        sample = value()  # for dtype and shape; called again for each read
        if not isinstance(sample, torch.Tensor):
            raise FormatError(
                f"{description}: returned a {type(sample).__name__}, expected a tensor"
            )
        return _external(sample.dtype, tuple(sample.shape), value, description)
    raise FormatError(
        f"{description}: got a {type(value).__name__}, expected a torch tensor, a tensor of the "
        "source, or a function that returns one"
    )


def _external(
    dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], Any], description: str
) -> Expr:
    def load_box(box: Box) -> torch.Tensor:
        tensor = load()
        if not isinstance(tensor, torch.Tensor):
            raise FormatError(f"got a {type(tensor).__name__}, expected a tensor")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "meta" if tensor.is_meta else tensor.layout
            raise FormatError(f"got a {kind} tensor, expected a dense one with values")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise FormatError(
                f"got shape {tuple(tensor.shape)} and {tensor.dtype}, expected {shape} and "
                f"{dtype} as declared"
            )
        return tensor.detach().cpu()[box.slices].resolve_conj().resolve_neg()

    return ExternalTensor(External(dtype_name(dtype, fqn=description), shape, load_box, whole=True))

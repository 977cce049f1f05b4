"""A function of the user's own that gives the tensors anew: named by a dotted path, and imported
only because it is named.

What it takes over as it is keeps its place in the files; what it makes is called for when it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from unified_ckpt.core.recipes import External, Recipe
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import LazyTensor, PartView, TensorView
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.torch_state.tensors import dtype_name
from unified_ckpt.views.derived import DerivedSource, Expr, Renamed


@dataclass(frozen=True, slots=True)
class _ExternalTensor:
    """A tensor that is not stored."""

    external: External

    @property
    def stored(self) -> tuple[Key, ...]:
        return ()

    # it needs none
    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:  # noqa: ARG002
        return self.external


def apply_function(source: Source, path: str) -> DerivedSource:
    """The tensors that `path`'s function gives. What else the source says is as it was, under the
    names that it had.
    """
    function = _import_function(path)
    returned = function({part: PartView(source, part) for part in source.parts})
    if not isinstance(returned, Mapping) or not all(
        isinstance(part_tensors, Mapping) for part_tensors in returned.values()
    ):
        raise FormatError(
            f"{path}: gives a {type(returned).__name__}; needed {{part: {{name: tensor}}}}"
        )
    exprs = {
        str(part): {
            str(name): _to_expr(source, value, f"{path}: {part}:{name}")
            for name, value in tensors.items()
        }
        for part, tensors in returned.items()
    }
    aliases = {
        part: {
            alias: name_of
            for alias, name_of in source.aliases(part).items()
            if tensors.get(name_of) == Renamed((part, name_of)) and alias not in tensors
        }
        for part, tensors in exprs.items()
    }
    return DerivedSource(source, exprs, aliases=aliases)


def _import_function(path: str) -> Callable[[Any], Any]:
    """The function of "package.module:function", or with a dot there."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise FormatError(f"{path}: names no function; needed package.module:function")
    try:
        attribute: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import in it
        raise NotFoundError(
            f"{path}: there is no module {error.name}; needed one that can be imported: set PYTHONPATH"
        ) from error
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
        sample = value()  # for its shape; it is called again when it is read
        if not isinstance(sample, torch.Tensor):
            raise FormatError(f"{description}: gives a {type(sample).__name__}; needed a tensor")
        return _external(sample.dtype, tuple(sample.shape), value, description)
    raise FormatError(
        f"{description}: is a {type(value).__name__}; needed a tensor, one of those given, or a function that gives one"
    )


def _external(
    dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], Any], description: str
) -> Expr:
    return _ExternalTensor(External(dtype_name(dtype, fqn=description), tuple(shape), load))

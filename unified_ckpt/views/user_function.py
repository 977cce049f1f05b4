"""A function of the user's own that gives the tensors anew: named by a dotted path, and imported only because it is named.

What it takes over as it is keeps its place in the files; what it makes is called for when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from unified_ckpt.core.recipes import Given, Recipe
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import LazyTensor, PartView, TensorView
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.torch_state.tensors import dtype_name
from unified_ckpt.views.derived import Formula, Recut, Renamed


@dataclass(frozen=True, slots=True)
class _Ready:
    """A tensor that is not stored."""

    given: Given

    @property
    def stored(self) -> tuple[Key, ...]:
        return ()

    def recipe(self, shapes: Mapping[Key, tuple[int, ...]]) -> Recipe:  # noqa: ARG002  # it needs none
        return self.given


def converted(source: Source, path: str) -> Recut:
    """The tensors that `path`'s function gives. What else the source says is as it was, under the names that it had."""
    function = _function(path)
    told = function({part: PartView(source, part) for part in source.parts})
    if not isinstance(told, Mapping) or not all(isinstance(one, Mapping) for one in told.values()):
        raise FormatError(
            f"{path}: gives a {type(told).__name__}; needed {{part: {{name: tensor}}}}"
        )
    made = {
        str(part): {
            str(name): _formula(source, value, f"{path}: {part}:{name}")
            for name, value in of.items()
        }
        for part, of in told.items()
    }
    aliases = {
        part: {
            a: b
            for a, b in source.aliases(part).items()
            if of.get(b) == Renamed((part, b)) and a not in of
        }
        for part, of in made.items()
    }
    return Recut(source, made, aliases=aliases)


def _function(path: str) -> Callable[[Any], Any]:
    """The function of "package.module:function", or with a dot there."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise FormatError(f"{path}: names no function; needed package.module:function")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import in it
        raise NotFoundError(
            f"{path}: there is no module {error.name}; needed one that can be imported: set PYTHONPATH"
        ) from error
    for one in name.split("."):
        found = getattr(found, one, None)
    if not callable(found):
        raise NotFoundError(f"{path}: {module} has no function {name}")
    return found  # type: ignore[no-any-return]


def _formula(source: Source, value: Any, where: str) -> Formula:
    if isinstance(value, TensorView) and value._source is source:
        return Renamed((value.part, value.name))
    if isinstance(value, TensorView):
        return _ready(value.dtype, value.shape, lambda: value[...], where)
    if isinstance(value, LazyTensor):
        return _ready(value.dtype, value.shape, value.load, where)
    if isinstance(value, torch.Tensor):
        return _ready(value.dtype, tuple(value.shape), value.detach, where)
    if callable(value):
        first = value()  # for its shape; it is called again when it is read
        if not isinstance(first, torch.Tensor):
            raise FormatError(f"{where}: gives a {type(first).__name__}; needed a tensor")
        return _ready(first.dtype, tuple(first.shape), value, where)
    raise FormatError(
        f"{where}: is a {type(value).__name__}; needed a tensor, one of those given, or a function that gives one"
    )


def _ready(
    dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], Any], where: str
) -> Formula:
    return _Ready(Given(dtype_name(dtype, fqn=where), tuple(shape), load))

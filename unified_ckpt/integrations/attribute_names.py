"""Names of a model that is an attribute of a module, as `model.` before all names of a
LightningModule: in the module, or in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from unified_ckpt.api import open as open_source
from unified_ckpt.core.text import first_items
from unified_ckpt.errors import MismatchError
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.modules import flatten_model
from unified_ckpt.views.model import with_model


@dataclass(frozen=True, slots=True)
class AttributeNames:
    """How the names of a module and of a checkpoint differ.

    `in_module`: the attribute of the module that is the checkpoint's model. `in_checkpoint`: the
    attribute of the saved module that is the model. Both are "" if names agree, one is otherwise.
    """

    in_module: str = ""
    in_checkpoint: str = ""

    def target(
        self, module: torch.nn.Module, *, strict: bool = False, label: str = ""
    ) -> torch.nn.Module:
        """Return a module whose tensors are those of `module`, under the checkpoint's names.

        Raises MismatchError if `strict` and the module has tensors beside the attribute. `label`:
        the checkpoint, for errors.
        """
        if strict and self.in_module:
            self._check_covers(flatten_model(module).tensors, label)
        target = module.get_submodule(self.in_module)
        for name in reversed(self.in_checkpoint.split(".") if self.in_checkpoint else ()):
            parent = torch.nn.Module()
            parent.add_module(name, target)
            target = parent
        return target

    def name_in_module(self, stored_name: str) -> str:
        """Return the module's name of a stored tensor."""
        if self.in_module:
            return f"{self.in_module}.{stored_name}"
        return stored_name.removeprefix(f"{self.in_checkpoint}.")

    def _check_covers(self, module_names: Collection[str], label: str) -> None:
        prefix = f"{self.in_module}."
        missing = [name for name in module_names if not name.startswith(prefix)]
        if missing:
            raise MismatchError(
                f"{label}: its model is the module's attribute {self.in_module!r}, and it lacks "
                f"what is beside that: {first_items(missing, 5)}; load without strict to leave "
                "that unchanged",
                missing=missing,
            )

    def __str__(self) -> str:
        if self.in_module:
            return f"is the attribute {self.in_module!r}"
        if self.in_checkpoint:
            return f"was the attribute {self.in_checkpoint!r} of the saved module"
        return ""


def read_attribute_names(
    collective: Collective, module: torch.nn.Module, path: str, options: SourceOptions
) -> AttributeNames:
    """Return how the names of a module and of the checkpoint at `path` differ. Collective: rank 0
    reads the names. Same errors as `compare_names`.
    """
    names = AttributeNames()
    if collective.rank == 0:
        flat = flatten_model(module)
        with open_source(path, options=options) as view:
            source = with_model(view.source)
            stored_names = source.names(MODEL) if MODEL in source.parts else ()
            names = compare_names({*flat.tensors, *flat.aliases}, stored_names, label=path)
    attributes = [names.in_module, names.in_checkpoint]
    return AttributeNames(*collective.broadcast_json("attribute-names", attributes))


def compare_names(
    module_names: Collection[str], stored_names: Collection[str], *, label: str
) -> AttributeNames:
    """Return which attribute holds all names of the other side, none if the names overlap.

    `module_names`: with those of tied tensors. `label`: the checkpoint, for errors. Raises
    MismatchError if several attributes of the module do.
    """
    module_names, stored_names = {*module_names}, {*stored_names}
    if not module_names.isdisjoint(stored_names) or not module_names or not stored_names:
        return AttributeNames()
    in_module = _attributes(module_names, stored_names)
    if len(in_module) > 1:
        raise MismatchError(
            f"{label}: the attributes {first_items(in_module, 5)} of the module all have the "
            "checkpoint's names, expected one; call uc.load(path, model=module.<attribute>), and "
            "begin without the path"
        )
    in_checkpoint = [] if in_module else _attributes(stored_names, module_names)
    if len(in_checkpoint) > 1:
        raise MismatchError(
            f"{label}: the attributes {first_items(in_checkpoint, 5)} of the saved module all have "
            "the model's names, expected one; rename with SourceOptions(rename=...)"
        )
    return AttributeNames("".join(in_module), "".join(in_checkpoint))


def _attributes(outer: set[str], inner: set[str]) -> list[str]:
    """Return the attributes below which `outer` has all names of `inner`."""
    first = next(iter(sorted(inner, key=len, reverse=True)))
    suffix = f".{first}"
    prefixes = {name.removesuffix(first) for name in outer if name.endswith(suffix)}
    return sorted(
        prefix.removesuffix(".")
        for prefix in prefixes
        if all(prefix + name in outer for name in inner)
    )

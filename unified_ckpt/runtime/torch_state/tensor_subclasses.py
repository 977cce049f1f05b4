"""Takes tensor subclasses in optimizer state apart into plain tensors, and joins them again.

They are those of `__tensor_flatten__`, such as torchao's 8-bit states. State `exp_avg` of such a
class becomes a plain tensor `exp_avg.<inner name>` for each inner tensor, and the value
`exp_avg.__tensor_unflatten__`, which says how to join them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.runtime.torch_state.shards.carriers import named_shards

_SUFFIX = ".__tensor_unflatten__"


def flatten_subclasses(state: Mapping[Any, Any], fqn: str = "") -> dict[Any, Any]:
    """Return a parameter's state without tensor subclasses. LayoutError for one in a DTensor.

    `fqn`: the parameter's name, for errors.
    """
    flat: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and named_shards(f"{fqn}/{key}", value):
            pass
        elif isinstance(value, DTensor):
            if type(value._local_tensor) is not torch.Tensor:
                raise LayoutError(
                    f"{fqn}/{key}: got a DTensor of {type(value._local_tensor).__name__} in "
                    "optimizer state, whose blocks belong to one sharding; use an optimizer with "
                    "plain states (AdamW), or train without sharding (DDP)"
                )
        elif is_traceable_wrapper_subclass(value):
            kind = type(value)
            names, context = value.__tensor_flatten__()
            flat[f"{key}{_SUFFIX}"] = {
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "names": list(names),
                "context": context,
                "size": tuple(value.size()),
                "stride": tuple(value.stride()),
            }
            inner = {f"{key}.{name}": getattr(value, name) for name in names}
            flat |= flatten_subclasses(inner, fqn)
            continue
        flat[key] = value
    return flat


def join_subclasses(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with tensor subclasses: the inverse of `flatten_subclasses`.

    MismatchError for a class that is not imported here: nothing is imported by name.
    """
    joined = dict(state)
    # An inner tensor may be a subclass, too: the longest name is joined first.
    record_keys = [key for key in state if key.endswith(_SUFFIX)]
    for record_key in sorted(record_keys, key=len, reverse=True):
        key, record = record_key.removesuffix(_SUFFIX), joined.pop(record_key)
        inner = {name: joined.pop(f"{key}.{name}") for name in record["names"]}
        joined[key] = _subclass(key, record["class"]).__tensor_unflatten__(
            inner, record["context"], torch.Size(record["size"]), record["stride"]
        )
    return joined


def _subclass(key: str, name: str) -> Any:
    module, _, qualname = name.rpartition(".")
    kind = getattr(sys.modules.get(module), qualname, None)
    if (
        not isinstance(kind, type)
        or not issubclass(kind, torch.Tensor)
        or not hasattr(kind, "__tensor_unflatten__")
    ):
        raise MismatchError(
            f"{key}: the checkpoint has a {name}, which is not imported; import the library of "
            "the optimizer that was saved before the load"
        )
    return kind

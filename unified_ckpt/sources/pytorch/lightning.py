"""Lightning's sharded checkpoints: a folder of torch.distributed.checkpoint with `meta.pt`, in which the rest of the state is.

A checkpoint in one file is a file of `torch.save`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.sources.pytorch.dcp import open_dcp
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.stubs import HOLDERS, plain
from unified_ckpt.views.shards import Assembled, Assembly

META = "meta.pt"
_MODELS = ("state_dict", "model")  # of ModelParallelStrategy, of FSDPStrategy
_OPTIMIZER = re.compile(r"optimizer_\d+")


def open_sharded(root: str, options: SourceOptions) -> Assembled:
    """FormatError, IncompleteError as for `open_dcp`."""
    opened = open_dcp(root, options)
    rest = plain(load_torch(os.path.join(root, META), stubs=HOLDERS))
    if not isinstance(rest, Mapping):
        raise FormatError(f"{root}/{META}: holds a {type(rest).__name__}; needed a dict")
    tree = dict(opened.said().extra or {})
    optimizers = [tree.pop(name) for name in sorted(tree) if _OPTIMIZER.fullmatch(str(name))]
    groups = [group for one in optimizers for group in _groups(one)]
    scalars = {fqn: state for one in optimizers for fqn, state in one.get("state", {}).items()}
    tensors: dict[Key, Assembly] = {}
    for key, made in opened.tensors.items():
        place = _place(*key)
        if place in tensors:
            raise FormatError(
                f"{root}: {key[0]}: {key[1]}: is {place[1]} of {place[0]}, as another tensor is; needed names that differ"
            )
        tensors[place] = made
    step = rest.get("global_step")
    step, extra = step if isinstance(step, int) else None, {**rest, **tree}
    said = Said(
        step=step, extra=extra, modules=opened.said().modules, groups=groups, scalars=scalars
    )
    return Assembled(root, tensors, format="lightning-sharded", said=said)


def _place(part: str, name: str) -> Key:
    """Where a tensor goes, by where DCP has it."""
    if part in _MODELS:
        return MODEL, name
    if _OPTIMIZER.fullmatch(part) and name.startswith("state."):
        fqn, _, key = name.removeprefix("state.").rpartition(".")
        return OPTIMIZER, f"{fqn}/{key}"
    return part, name


def _groups(told: Any) -> list[dict[str, Any]]:
    """Param groups by their number, with the names of their parameters."""
    listed = told.get("param_groups", {}) if isinstance(told, Mapping) else {}
    return [
        {
            "names": list(group["params"]),
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for _, group in sorted(listed.items())
        if "params" in group
    ]

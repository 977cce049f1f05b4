"""Opens Lightning's sharded checkpoints: a DCP folder with the remaining state in `meta.pt`.

A checkpoint in a single file is read as a file of `torch.save`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.sources.pytorch.dcp import open_dcp
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.sources.restricted_pickle.placeholders import NAMESPACE_CLASSES, to_plain
from unified_ckpt.views.shards import ShardedSource, ShardedTensor

META_FILE = "meta.pt"
_MODEL_KEYS = ("state_dict", "model")  # of ModelParallelStrategy, of FSDPStrategy
_OPTIMIZER = re.compile(r"optimizer_\d+")


def open_lightning(root: str, options: SourceOptions) -> ShardedSource:
    """Open a sharded checkpoint. Errors as for `open_dcp`."""
    source = open_dcp(root, options)
    meta = to_plain(load_torch(os.path.join(root, META_FILE), placeholders=NAMESPACE_CLASSES))
    if not isinstance(meta, Mapping):
        raise FormatError(f"{root}/{META_FILE}: got {type(meta).__name__}, expected a dict")
    tree = dict(source.metadata().extra or {})
    optimizers = [tree.pop(name) for name in sorted(tree) if _OPTIMIZER.fullmatch(str(name))]
    groups = [group for optimizer in optimizers for group in _param_groups(optimizer)]
    scalars = {
        fqn: state for optimizer in optimizers for fqn, state in optimizer.get("state", {}).items()
    }
    tensors: dict[Key, ShardedTensor] = {}
    for key, tensor in source.tensors.items():
        tensor_key = _tensor_key(*key)
        if tensor_key in tensors:
            raise FormatError(
                f"{root}: {key[0]}: {key[1]}: maps to {tensor_key[0]}:{tensor_key[1]}, "
                "as another tensor does; expected unique names"
            )
        tensors[tensor_key] = tensor
    step = meta.get("global_step")
    step, extra = step if isinstance(step, int) else None, {**meta, **tree}
    metadata = SourceMetadata(
        step=step, extra=extra, modules=source.metadata().modules, groups=groups, scalars=scalars
    )
    return ShardedSource(root, tensors, format="lightning-sharded", metadata=metadata)


def _tensor_key(part: str, name: str) -> Key:
    """Return the part and name of a tensor from those that DCP gives it."""
    if part in _MODEL_KEYS:
        return MODEL, name
    if _OPTIMIZER.fullmatch(part) and name.startswith("state."):
        fqn, _, key = name.removeprefix("state.").rpartition(".")
        return OPTIMIZER, f"{fqn}/{key}"
    return part, name


def _param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return an optimizer's param groups by index, with parameter names."""
    groups = optimizer.get("param_groups", {}) if isinstance(optimizer, Mapping) else {}
    return [
        {
            "names": list(group["params"]),
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for _, group in sorted(groups.items())
        if "params" in group
    ]

"""Opens DeepSpeed's model file with the state of an optimizer without ZeRO (stage 0)."""

from __future__ import annotations

from collections.abc import Mapping

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.foreign.deepspeed.model import ModelFile
from unified_ckpt.foreign.pytorch.optimizer_groups import is_optimizer_state
from unified_ckpt.foreign.pytorch.optimizer_names import ForeignCheckpoint, with_optimizer_names
from unified_ckpt.foreign.restricted_pickle.torch_reader import as_archived
from unified_ckpt.format.names import MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras
from unified_ckpt.views.shards import ShardedTensor

_REFUSAL = (
    "got the state of DeepSpeed's fp16 optimizer without ZeRO, which is not read; load only the "
    "model"
)


def open_without_zero(
    root: str,
    model: ModelFile,
    tensors: Mapping[Key, ShardedTensor],
    metadata: SourceMetadata,
    options: SourceOptions,
) -> Source:
    """Return the model's tensors with the optimizer's state, which is by position.

    Other state than that of torch's optimizers is refused where it is read.
    """
    aliases = {MODEL: model.aliases}
    if not is_optimizer_state(model.optimizer):
        return ShardedSource(
            root,
            tensors,
            format="deepspeed",
            metadata=metadata,
            aliases=aliases,
            extras=SourceExtras({OPTIMIZER: _REFUSAL}),
        )
    checkpoint = ForeignCheckpoint(root, "deepspeed", dict(tensors), {**aliases}, metadata)
    checkpoint.add_optimizer(model.path, OPTIMIZER, as_archived(model.optimizer))
    parameters = [
        (name, tuple(tensor.shape))
        for name, tensor in model.tensors.items()
        if name not in model.buffer_names and name not in model.aliases
    ]
    label = "the order of the model file"
    return with_optimizer_names(checkpoint, options, stored_orders={label: lambda: [parameters]})

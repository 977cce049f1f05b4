"""The weights of a Trainer, as arguments of a save and of a load: its model, or the adapters on it
with what the run changes in their base.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from unified_ckpt.api import open as open_source
from unified_ckpt.core.text import human_size
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.integrations.checkpoint_folders import is_unified
from unified_ckpt.integrations.transformers.adapters import (
    TRAINABLE_PART,
    adapter_parts,
    has_adapters,
    parameter_names,
)
from unified_ckpt.integrations.transformers.base_state import (
    BaseChanges,
    base_state_names,
    changed_weights,
)
from unified_ckpt.runtime.torch_state.modules import is_parameter_or_dtensor
from unified_ckpt.runtime.torch_state.shards.flat_parameters import has_flat_parameters

_LOG = logging.getLogger("unified_ckpt")


class TrainerWeights:
    """The weights of a Trainer, over all its runs. Raises LayoutError for adapters whose base
    cannot be saved.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._changes = trainer, BaseChanges()
        weights = changed_weights(self.model) if has_adapters(self.model) else {}
        if weights and trainer.is_world_process_zero():
            _LOG.warning(
                "init_lora_weights changed %d weights of the base, which each checkpoint stores: "
                "%s; see docs/guide/hugging-face-trainer.md",
                len(weights),
                human_size(sum(weight.nbytes for weight in weights.values())),
            )
        trainer.add_callback(_BaseFollower(self))

    @property
    def model(self) -> torch.nn.Module:
        """The model without wrappers."""
        model: torch.nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return model

    def follow_base(self, *, start: bool) -> None:
        """Follow what changes in the base of adapters, from the start of a run to its end."""
        if has_adapters(self.model):
            (self._changes.start if start else self._changes.stop)(self.model)

    def saved(self, *, compares_buffers: bool) -> dict[str, Any]:
        """Return the arguments of a save. `compares_buffers`: see `BaseChanges.names`."""
        ddp = self._trainer.model_wrapped
        ddp = ddp if isinstance(ddp, DistributedDataParallel) else None
        if not has_adapters(self.model):  # DDP knows which rank's buffers count
            return {"model": ddp or self._stored_model()}
        names = self._base_names(compares_buffers=compares_buffers)
        parts = adapter_parts(self.model, names)
        if ddp is not None and ddp.broadcast_buffers and ddp.process_group.rank() != 0:
            # Rank 0 stores the buffers, which it sends to the others.
            for tensors in parts.values():
                for name in [n for n, t in tensors.items() if not is_parameter_or_dtensor(t)]:
                    del tensors[name]
        return {"parts": parts}

    def _stored_model(self) -> torch.nn.Module:
        """Return the model; with FSDP1, once that wraps it, the wrapper, which has the elements."""
        wrapped: torch.nn.Module = self._trainer.model_wrapped
        return wrapped if has_flat_parameters(wrapped) else self.model

    def targets(self, path: str) -> LoadArguments:
        """Return the arguments of a load: of adapters' base, what the checkpoint must have, and
        what else it has. Other engines store nothing of the base.
        """
        if not has_adapters(self.model):
            return {"model": self._stored_model()}
        with open_source(path) as source:
            stored = {*source[TRAINABLE_PART]} if TRAINABLE_PART in source.parts else set[str]()
        self._changes.loaded(stored)
        required = base_state_names(self.model) if is_unified(path) else set[str]()
        return {"parts": adapter_parts(self.model, stored | required)}

    def named(self) -> LoadArguments:
        """Return the arguments of a load that only name the parameters of the optimizer."""
        if not has_adapters(self.model):
            return {"model": self._stored_model()}
        return {"parts": adapter_parts(self.model, self._base_names())}

    def parameter_names(self) -> dict[int, str]:
        """Return id of a parameter -> its name for optimizer state in a checkpoint."""
        names = self._base_names() if has_adapters(self.model) else None
        return parameter_names(self._stored_model(), names)

    def _base_names(self, *, compares_buffers: bool = False) -> Collection[str]:
        return self._changes.names(
            self.model, self._trainer.optimizer, compares_buffers=compares_buffers
        )


class _BaseFollower(TrainerCallback):
    """Runs after the model is wrapped, which may write to its parameters."""

    def __init__(self, weights: TrainerWeights) -> None:
        self._weights = weights

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._weights.follow_base(start=True)

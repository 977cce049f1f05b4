"""Unified checkpoints for PyTorch Lightning: `Trainer(callbacks=[UnifiedCheckpointCallback()])`.

Lightning decides when to save, under which name, and what to remove. The strategy's methods for
saving and loading are replaced, so that each `.ckpt` is a unified folder that all ranks write
together.

How state could be lost: ModelCheckpoint removes the older checkpoint before the newer one exists
(here a save returns after its commit); its `last.ckpt` dangles for a moment, or is overwritten in
place (links are replaced atomically, folders exchanged after the commit); a save is killed (an
unfinished folder never has the name of a checkpoint); a hook or a strategy silently omits optimizer
state.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            "unified_ckpt.integrations.lightning: run `pip install unified-ckpt[lightning]`"
        ) from error

from unified_ckpt.api import open as open_source
from unified_ckpt.errors import CheckpointError
from unified_ckpt.integrations.lightning.paths import check_path
from unified_ckpt.integrations.lightning.state_dicts import LazyStateDict
from unified_ckpt.integrations.lightning.strategy import PatchedStrategy
from unified_ckpt.options import LoadOptions, SaveOptions

__all__ = ["UnifiedCheckpointCallback", "load_from_checkpoint"]


class UnifiedCheckpointCallback(Callback):
    """Makes a Trainer save and resume unified checkpoints, with its ModelCheckpoints unchanged.

    Supports one device, DDP, and ModelParallelStrategy (FSDP2, tensor parallel, both), with
    `lightning` and `pytorch_lightning`. Any number of processes and any mesh may resume.
    Checkpoints of stock Lightning are resumed by stock Lightning.

    Raises LayoutError, by name, for other strategies.
    """

    def __init__(
        self, *, save_options: SaveOptions | None = None, load_options: LoadOptions | None = None
    ) -> None:
        self._save_options = save_options or SaveOptions()
        self._load_options = load_options or LoadOptions()
        self._patched: PatchedStrategy | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Patch the strategy of the Trainer, once."""
        if self._patched is None or self._patched.strategy is not trainer.strategy:
            owner = getattr(trainer.strategy.save_checkpoint, "__self__", None)
            if isinstance(owner, PatchedStrategy):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: got two in this Trainer, expected one; remove one"
                )
            self._patched = PatchedStrategy(trainer, self._save_options, self._load_options)
        self._patched.begin(stage)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Release buffers after a run."""
        if self._patched is not None:
            self._patched.close()


def load_from_checkpoint(
    cls: type[Any], path: str | os.PathLike[str], *, strict: bool | None = None, **arguments: Any
) -> Any:
    """Load a module, or a LightningDataModule, from a unified folder, on the CPU and unsharded.

    Replaces `LightningModule.load_from_checkpoint`, which opens only files. `arguments` override or
    extend the saved hyperparameters. Raises NotFoundError or FormatError, saying what is there, if
    the path is not a unified folder.
    """
    path = os.path.abspath(path)
    if check_path(path) != "unified":
        raise CheckpointError(
            f"{path}: got a checkpoint of stock Lightning; use {cls.__name__}.load_from_checkpoint"
        )
    with open_source(path) as source:
        checkpoint: dict[str, Any] = dict(_lightning_extra(source.extra, path))
    checkpoint["state_dict"] = LazyStateDict(path, "model").copy()
    hyperparameters = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hyperparameters.update(arguments)
    saving = importlib.import_module(f"{_package(cls)}.core.saving")
    if hasattr(cls, "load_state_dict") and hasattr(cls, "training_step"):
        return saving._load_state(cls, checkpoint, strict=strict, **arguments)
    return saving._load_state(cls, checkpoint, **arguments)


def _lightning_extra(extra: Any, path: str) -> Mapping[str, Any]:
    lightning_extra = extra.get("lightning") if isinstance(extra, Mapping) else None
    if not isinstance(lightning_extra, Mapping):
        raise CheckpointError(
            f"{path}: got a unified checkpoint without Lightning's state; "
            "use uc.load for its tensors"
        )
    return lightning_extra


def _package(cls: type[Any]) -> str:
    """Return which of the two Lightning packages this class is from."""
    names = [base.__module__ for base in cls.__mro__]
    if any(name.startswith("lightning.pytorch.") for name in names):
        return "lightning.pytorch"
    return "pytorch_lightning"

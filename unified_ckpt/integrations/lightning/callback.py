"""Checkpoints of PyTorch Lightning through the engine:
`Trainer(callbacks=[UnifiedCheckpointCallback()])`, and no more changes.

Lightning decides when to save, under which name and what goes; the strategy's ways to save and load
are replaced, so that each `.ckpt` is a unified folder which all ranks write together.

How state could be lost: ModelCheckpoint removes the older one before the newer is there (here a
save returns after its commit); its
`last.ckpt` points to nothing for a moment, or is overwritten in place (links change in one step,
folders are exchanged after the commit); a save is killed (what is unfinished never has the name of
a checkpoint); a hook or a strategy leaves optimizer state out without a word.
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
            "unified_ckpt.integrations.lightning.callback: needs `pip install unified-ckpt[lightning]`"
        ) from error

from unified_ckpt.api import open as open_source
from unified_ckpt.errors import CheckpointError
from unified_ckpt.integrations.lightning.paths import check_path
from unified_ckpt.integrations.lightning.state_dicts import LazyStateDict
from unified_ckpt.integrations.lightning.strategy import PatchedStrategy
from unified_ckpt.options import LoadOptions, SaveOptions

__all__ = ["UnifiedCheckpointCallback", "load_from_checkpoint"]


class UnifiedCheckpointCallback(Callback):
    """Makes a Trainer save and resume through the engine, with its ModelCheckpoints as they are.

    One device, DDP, and ModelParallelStrategy (FSDP2, tensor parallel, both). Any number of
    processes and any mesh may resume. A checkpoint that stock Lightning wrote is resumed by stock
    Lightning. Works with `lightning` and with `pytorch_lightning`.

    LayoutError for other strategies, by name.
    """

    def __init__(
        self, *, save_options: SaveOptions | None = None, load_options: LoadOptions | None = None
    ) -> None:
        self._save_options, self._load_options = (
            save_options or SaveOptions(),
            load_options or LoadOptions(),
        )
        self._patched: PatchedStrategy | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if self._patched is None or self._patched.strategy is not trainer.strategy:
            owner = getattr(trainer.strategy.save_checkpoint, "__self__", None)
            if isinstance(owner, PatchedStrategy):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: this Trainer has two of them; needed one"
                )
            self._patched = PatchedStrategy(trainer, self._save_options, self._load_options)
        self._patched.begin(stage)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if self._patched is not None:
            self._patched.close()


def load_from_checkpoint(
    cls: type[Any], path: str | os.PathLike[str], *, strict: bool | None = None, **arguments: Any
) -> Any:
    """`LightningModule.load_from_checkpoint` for a unified folder: a module, or a
    LightningDataModule, made from its saved hyperparameters, on the CPU and whole. `arguments`:
    instead of saved hyperparameters, or beside them.

    NotFoundError or FormatError, saying what is there, where it is no unified folder.
    """
    path = os.path.abspath(path)
    if check_path(path) != "unified":
        raise CheckpointError(
            f"{path}: stock Lightning wrote this; needed {cls.__name__}.load_from_checkpoint for it"
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
            f"{path}: a unified checkpoint, but no Trainer of Lightning wrote it; needed uc.load for its tensors"
        )
    return lightning_extra


def _package(cls: type[Any]) -> str:
    """The one of the two packages whose class this is."""
    names = [base.__module__ for base in cls.__mro__]
    return (
        "lightning.pytorch"
        if any(name.startswith("lightning.pytorch.") for name in names)
        else "pytorch_lightning"
    )

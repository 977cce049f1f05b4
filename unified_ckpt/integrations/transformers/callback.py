"""Unified checkpoints for Hugging Face's Trainer: `Trainer(...,
callbacks=[UnifiedCheckpointCallback()])`.

The Trainer runs its own save. Weights, optimizer and random states go to the engine instead, and
its small files (config, tokenizer, trainer_state.json, ...) are attached to the same folder, which
gets its name in one step.

How state could be lost: the Trainer writes next to the folder and dies (nothing has the name of a
checkpoint yet); it rotates before the new checkpoint exists (here after the commit); a resume loads
an incomplete folder (only committed ones count).
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    import accelerate  # noqa: F401  # the Trainer needs it
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "unified_ckpt.integrations.transformers: run `pip install unified-ckpt[transformers]`"
    ) from error

from unified_ckpt.errors import CheckpointError
from unified_ckpt.integrations.transformers.hub_names import open_hub_names, open_model_names
from unified_ckpt.integrations.transformers.trainer import PatchedTrainer
from unified_ckpt.options import LoadOptions, SaveOptions

__all__ = [
    "UnifiedCheckpointCallback",
    "UnifiedCheckpointMixin",
    "open_hub_names",
    "open_model_names",
]


class UnifiedCheckpointCallback(TrainerCallback):
    """Makes a Trainer save and resume unified checkpoints. It finds its Trainer by itself; or call
    `attach(trainer)`.

    Supports one process, DDP, FSDP2 and models sharded at load; each resumes the checkpoints of the
    others. `train(resume_from_checkpoint=True)` loads the latest committed step. A checkpoint of
    the stock Trainer is resumed by the stock Trainer, or read as an old format if that cannot load
    it into this layout. Any number of processes may resume: random states are restored for the same
    number, else derived from the saved seed and the rank, which is logged.

    A model with adapters (PEFT) is stored as `adapter_model.safetensors` and other trained tensors,
    without the base weights.

    `save_only_model` overrides the Trainer's argument; None leaves it to the Trainer. The Trainer
    accepts a model that is sharded at load only with `save_only_model=True`; False here saves the
    optimizer all the same.

    `async_save`: training continues once the bytes are copied; a thread writes and commits. A save
    waits for the one before it, `train` for the last one. Errors are raised by the next save, or at
    the end.

    Raises LayoutError for adapters on a model sharded at load, FSDP1, pipeline stages, DeepSpeed
    and DataParallel.
    """

    def __init__(
        self,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        save_only_model: bool | None = None,
        async_save: bool = False,
    ) -> None:
        self._async_save = async_save
        self._save_options = save_options or SaveOptions()
        self._load_options = load_options or LoadOptions()
        self._save_only_model = save_only_model
        self._patched: PatchedTrainer | None = None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Attach to the Trainer under construction."""
        trainer = _trainer_under_construction()
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check that the callback has a Trainer."""
        if self._patched is None:
            raise CheckpointError(
                "UnifiedCheckpointCallback: got no Trainer; call callback.attach(trainer)"
            )

    def attach(self, trainer: Trainer) -> None:
        """Attach the callback to a Trainer. Calling it again does nothing. Raises CheckpointError
        if another callback is attached.
        """
        if self._patched is None or self._patched.trainer is not trainer:
            if isinstance(getattr(trainer._save_checkpoint, "__self__", None), PatchedTrainer):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: the Trainer already has one, "
                    "or is a UnifiedCheckpointMixin; use one"
                )
            only_model, async_save = self._save_only_model, self._async_save
            self._patched = PatchedTrainer(
                trainer,
                self._save_options,
                self._load_options,
                save_only_model=only_model,
                async_save=async_save,
            )


class UnifiedCheckpointMixin:
    """The callback as a base class: `class MyTrainer(UnifiedCheckpointMixin, Trainer)`, with the
    mixin first.

    The constructor also takes the options of the callback.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(UnifiedCheckpointMixin):
            raise TypeError(
                f"{cls.__name__}: got UnifiedCheckpointMixin after Trainer; "
                f"write class {cls.__name__}(UnifiedCheckpointMixin, …)"
            )

    def __init__(
        self,
        *args: Any,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        save_only_model: bool | None = None,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self, Trainer):
            raise TypeError(
                f"{type(self).__name__}: got UnifiedCheckpointMixin without Trainer; "
                "inherit from Trainer too"
            )
        UnifiedCheckpointCallback(
            save_options=save_options,
            load_options=load_options,
            save_only_model=save_only_model,
            async_save=async_save,
        ).attach(self)


def _trainer_under_construction() -> Trainer | None:
    """Return the Trainer whose `__init__` is on the call stack, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None

"""Checkpoints of Hugging Face's Trainer through the engine: `Trainer(...,
callbacks=[UnifiedCheckpointCallback()])`, and no more changes.

The Trainer keeps its own way of saving; what it would write of weights, optimizer and random states
goes to the engine instead, and its small files (config, tokenizer, trainer_state.json, ...) are
attached to the same folder, so that all of it gets its name at once.

How state could be lost: the Trainer writes beside the folder and dies (nothing has the name of a
checkpoint yet); it rotates before the new one is there (here after the commit); a resume takes a
folder that is not whole (only committed ones count).
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    import accelerate  # noqa: F401  # the Trainer needs it
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "unified_ckpt.integrations.transformers.callback: needs `pip install unified-ckpt[transformers]`"
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
    """Makes a Trainer save and resume through the engine. It finds the Trainer that it is given to;
    or say `attach(trainer)`.

    One process, DDP, FSDP2 and models sharded at load; any of them resumes any other's checkpoints.
    `train(resume_from_checkpoint=True)` takes the newest committed step; a checkpoint that the
    stock Trainer wrote is resumed by the stock Trainer, or read as an old format where that cannot
    load it into the layout at hand. Any number of processes may resume: random states are given
    back where it is the same number, else derived from the saved seed and the rank, which the log
    says.

    A model with adapters (PEFT) is stored as those: `adapter_model.safetensors` and what else is
    trained, and nothing of the base.

    `save_only_model`: in place of the Trainer's argument of that name; None: as that says. The
    Trainer takes a model that is sharded at load only with `save_only_model=True`; False here saves
    its optimizer all the same.

    `async_save`: training goes on once the bytes are copied; a thread writes and commits. A save
    waits for the one before it, `train` for the last; errors come with the next save, or at the
    end.

    LayoutError for what this version does not save: adapters on a model sharded at load, FSDP1,
    pipeline stages, DeepSpeed, DataParallel.
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
        self._save_options, self._load_options = (
            save_options or SaveOptions(),
            load_options or LoadOptions(),
        )
        self._save_only_model = save_only_model
        self._patched: PatchedTrainer | None = None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = _trainer_under_construction()
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._patched is None:
            raise CheckpointError(
                "UnifiedCheckpointCallback: no Trainer was found at its construction; needed callback.attach(trainer)"
            )

    def attach(self, trainer: Trainer) -> None:
        """Binds the callback to a Trainer. Once is enough; again is no matter. CheckpointError
        where another one has done so.
        """
        if self._patched is None or self._patched.trainer is not trainer:
            if isinstance(getattr(trainer._save_checkpoint, "__self__", None), PatchedTrainer):
                raise CheckpointError(
                    "UnifiedCheckpointCallback: the Trainer has one already, or is a UnifiedCheckpointMixin; needed one"
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
    """The same for a class: `class MyTrainer(UnifiedCheckpointMixin, Trainer)`. The mixin stands
    first.

    The callback's options are further arguments of the constructor.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(UnifiedCheckpointMixin):
            raise TypeError(
                f"{cls.__name__}: UnifiedCheckpointMixin comes after Trainer; needed class {cls.__name__}(UnifiedCheckpointMixin, …)"
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
                f"{type(self).__name__}: UnifiedCheckpointMixin is for Trainers; needed a subclass of Trainer, too"
            )
        UnifiedCheckpointCallback(
            save_options=save_options,
            load_options=load_options,
            save_only_model=save_only_model,
            async_save=async_save,
        ).attach(self)


def _trainer_under_construction() -> Trainer | None:
    """The Trainer whose `__init__` is calling."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None

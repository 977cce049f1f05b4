"""Tracks a Trainer's data position in samples, so that a run with another total batch size
continues at the same sample.

The Trainer counts steps. The size of a step changes with the number of processes, the batch size
and gradient accumulation. The same step then lies elsewhere in the epoch, and samples are repeated
or skipped.

What holds under such a change: the order of Accelerate's seeded sampler depends only on seed and
epoch, and its shards distribute batches in turn. The first `n` rounds are therefore the first `n *
batch size * processes` samples. For a sampler whose order may differ, a warning is logged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import IterableDataset, SequentialSampler

from unified_ckpt.integrations.run_state import RunState

_LOG = logging.getLogger("unified_ckpt")
_UNKNOWN_ORDER = "other"
_POSITION_KEYS = {"epoch", "samples", "step", "geometry"}  # of what `state` returns
_REORDERED = (
    "the order of this data loader cannot be reproduced within an epoch: samples may be repeated "
    "or skipped; use accelerator_config={'use_seedable_sampler': True} and its sampler, "
    "or save at the ends of epochs"
)


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """How a run consumes samples.

    `round_samples`: in one batch of every process. `accumulation`: rounds per step. `order`: how
    the samples are ordered, drawn from `seed` over `length` samples.
    """

    round_samples: int
    accumulation: int
    order: str
    seed: int | None
    length: int | None


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Samples of the epoch that were consumed. `rounds`: batches to skip in each process."""

    epoch: int
    samples: int
    rounds: int


def position_at(epoch: float, *, rounds_in_epoch: int, geometry: BatchGeometry) -> DataPosition:
    """Return the position at the Trainer's `epoch`, whose fraction is the rounds done of it."""
    whole_epochs = math.floor(epoch)
    rounds = whole_epochs * rounds_in_epoch + round((epoch - whole_epochs) * rounds_in_epoch)
    samples = rounds * geometry.round_samples
    return position_after(samples, rounds_in_epoch=rounds_in_epoch, geometry=geometry)


def convert_position(
    saved_position: Mapping[str, Any], geometry: BatchGeometry
) -> tuple[DataPosition, list[str]]:
    """Convert a position to another geometry, and return what to warn about. Samples that fill no
    whole step are repeated.
    """
    epoch = saved_position["epoch"]
    samples = saved_position["samples"]
    saved_geometry = BatchGeometry(**saved_position["geometry"])
    if (saved_geometry.round_samples, saved_geometry.accumulation) == (
        geometry.round_samples,
        geometry.accumulation,
    ):
        # The first epoch's order follows from the seed of the run, later ones from what it drew.
        is_reordered = geometry.order == _UNKNOWN_ORDER and epoch > 0 and samples > 0
        notes = [_REORDERED] if is_reordered else []
        return DataPosition(epoch, samples, samples // geometry.round_samples), notes
    notes = []
    step_samples = geometry.round_samples * geometry.accumulation
    repeated = samples % step_samples
    if repeated:
        notes.append(
            f"{repeated} samples of the epoch are repeated: {samples} were seen, "
            f"and a step now has {step_samples}"
        )
    if _UNKNOWN_ORDER in (saved_geometry.order, geometry.order):
        notes.append(
            "the order of this data loader may depend on batch size or processes: "
            "samples may be repeated or skipped"
        )
    elif (saved_geometry.order, saved_geometry.seed, saved_geometry.length) != (
        geometry.order,
        geometry.seed,
        geometry.length,
    ):
        notes.append(
            f"the data is {geometry.order} of {geometry.length} samples, seed {geometry.seed}; "
            f"it was {saved_geometry.order} of {saved_geometry.length}, "
            f"seed {saved_geometry.seed}: "
            "the rest of this epoch differs"
        )
    samples -= repeated
    return DataPosition(epoch, samples, samples // geometry.round_samples), notes


def position_after(samples: int, *, rounds_in_epoch: int, geometry: BatchGeometry) -> DataPosition:
    """Return the position after `samples` of all epochs. Those that fill no round are repeated."""
    epoch, rounds = divmod(samples // geometry.round_samples, rounds_in_epoch)
    return DataPosition(epoch, rounds * geometry.round_samples, rounds)


def read_geometry(trainer: Any, loader: Any) -> BatchGeometry:
    """Return the geometry of a Trainer with this data loader."""
    accumulation = trainer.args.gradient_accumulation_steps
    split = trainer.accelerator.split_batches  # then the batch size counts all processes
    per_round = (
        trainer._train_batch_size
        if split
        else trainer.get_total_train_batch_size(trainer.args) // accumulation
    )
    order, seed, length = _order(loader, trainer.args.world_size)
    return BatchGeometry(per_round, accumulation, order, seed, length)


def _order(loader: Any, world: int) -> tuple[str, int | None, int | None]:
    if isinstance(loader.dataset, IterableDataset):
        # `datasets` gives each process its own shards if there are enough.
        sharded = world > 1 and type(loader.dataset).__module__.startswith("datasets.")
        return (_UNKNOWN_ORDER if sharded else "a stream"), None, None
    sampler = _sampler(loader)
    if type(sampler) is SeedableRandomSampler:
        return "shuffled", int(sampler.initial_seed), len(sampler)
    if type(sampler) is SequentialSampler:
        return "in its own order", None, len(sampler)
    return _UNKNOWN_ORDER, None, None


def _sampler(loader: Any) -> Any:
    """Return the sampler of indices. Batch samplers wrap it, one inside the other."""
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)


def _loader_warnings(args: Any, loader: Any, position: DataPosition) -> list[str]:
    """Return what to warn about in a resume with this data loader."""
    skips = position.rounds > 0 and not args.ignore_data_skip
    is_dispatched = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
    every = getattr(args, "steps_per_generation", None) or 0  # of TRL's GRPO and RLOO
    every *= getattr(args, "num_iterations", 1)
    sampler = _sampler(loader)
    has_generator = isinstance(getattr(sampler, "generator", None), torch.Generator)
    is_seeded = isinstance(sampler, SeedableRandomSampler)
    notes = {
        "with dispatch_batches, Accelerate skips batches of one process, so samples are "
        "repeated; resume with accelerator_config={'dispatch_batches': False}, which reads the "
        "same samples": (
            skips and is_dispatched and loader.batch_sampler is not None and args.world_size > 1
        ),
        "completions are generated again, with the current weights: they are not saved, and this "
        f"checkpoint is between two generations; save after each {every} batches, which are "
        f"{every / args.gradient_accumulation_steps:g} steps, to resume exactly": (
            skips and every and position.rounds % every
        ),
        "the generator of the sampler starts anew, so the next epochs have another order than in "
        "an uninterrupted run; use accelerator_config={'use_seedable_sampler': True} and its "
        "sampler": position.epoch and not position.rounds and has_generator and not is_seeded,
        "persistent workers start anew, so random numbers differ from those of an uninterrupted "
        "run; set dataloader_persistent_workers=False to resume exactly": (
            args.dataloader_num_workers and args.dataloader_persistent_workers
        ),
    }
    return [note for note, applies in notes.items() if applies]


class PositionTracker:
    """Records a Trainer's data position at saves and restores it at a resume, by replacing methods
    of the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved_position: Mapping[str, Any] | None = None
        self._saved_samples: tuple[int, int] | None = None  # samples of all epochs, and the step
        self._geometry: BatchGeometry | None = None
        self._rounds_in_epoch = 0
        self._resume_position: DataPosition | None = None
        self._original_values = trainer.set_initial_training_values
        self._original_state = trainer._init_training_state
        trainer.set_initial_training_values = self._set_values
        trainer._init_training_state = self._init_state

    def resume_from(self, state: RunState | None) -> None:
        """Set what the next training resumes from, None if the stock Trainer loads it."""
        self._saved_position = self._saved_samples = self._resume_position = None
        saved = state.extra.get("data") if state is not None else None
        if isinstance(saved, Mapping) and saved.keys() >= _POSITION_KEYS:
            self._saved_position = saved
        elif state is not None and state.samples is not None and state.step is not None:
            self._saved_samples = state.samples, state.step

    @property
    def outcome(self) -> str:
        """Where in the data the run resumes, for the log."""
        if self._trainer.args.ignore_data_skip:
            return "from the start of the epoch (ignore_data_skip)"
        if self._resume_position is None:
            return "as many steps as the checkpoint's"
        return f"epoch {self._resume_position.epoch} after {self._resume_position.samples} samples"

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint stores of the position."""
        if self._geometry is None:
            return None
        position = position_at(
            self._trainer.state.epoch or 0.0,
            rounds_in_epoch=self._rounds_in_epoch,
            geometry=self._geometry,
        )
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "step": self._trainer.state.global_step,
            "geometry": asdict(self._geometry),
        }

    def _set_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Replace the Trainer's method: training ends after as many samples as before, or steps if
        `max_steps` is set.
        """
        epochs, steps_in_epoch, examples, samples, total_batch, rounds_in_epoch, max_steps = (
            self._original_values(args, dataloader)
        )
        self._geometry = read_geometry(self._trainer, dataloader)
        self._rounds_in_epoch = rounds_in_epoch
        self._resume_position, notes, steps_saved = None, list[str](), 0
        if self._saved_position is not None:
            self._resume_position, notes = convert_position(self._saved_position, self._geometry)
            steps_saved = self._saved_position["step"]
        elif self._saved_samples is not None:
            samples, steps_saved = self._saved_samples
            self._resume_position = position_after(
                samples, rounds_in_epoch=rounds_in_epoch, geometry=self._geometry
            )
        if self._resume_position is not None:
            notes += _loader_warnings(args, dataloader, self._resume_position)
            steps_done = (
                self._resume_position.epoch * steps_in_epoch
                + self._resume_position.rounds // args.gradient_accumulation_steps
            )
            if self._geometry.length is not None and steps_done != steps_saved:
                if args.max_steps > 0:
                    epochs = math.ceil((steps_done + max_steps - steps_saved) / steps_in_epoch)
                else:
                    max_steps += steps_saved - steps_done
            for note in notes if args.process_index == 0 else ():
                _LOG.warning("resuming: %s", note)
        return epochs, steps_in_epoch, examples, samples, total_batch, rounds_in_epoch, max_steps

    def _init_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Replace the Trainer's method: return the epoch, and the batches to skip, of the samples
        consumed.
        """
        initial: tuple[int, int] = self._original_state(*args, **kwargs)
        if self._resume_position is None:
            return initial
        if not self._trainer.state.epoch:  # of another engine's checkpoint
            done = self._resume_position.rounds / self._rounds_in_epoch
            self._trainer.state.epoch = self._resume_position.epoch + done
        return (
            self._resume_position.epoch,
            0 if self._trainer.args.ignore_data_skip else self._resume_position.rounds,
        )

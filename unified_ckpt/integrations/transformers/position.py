"""Where a Trainer's run is in its data, counted in samples, so that a run with another total batch size goes on at the same sample.

The Trainer counts steps. A step is another number of samples after a change of processes, of the batch size or of gradient
accumulation, and the first step that is counted so lies somewhere else in the epoch: samples are seen twice, or never.

What stays true under such a change: Accelerate's seeded sampler gives an order that depends on seed and epoch alone, and its shards deal
batches out in turn, so the first `n` rounds are the first `n * batch size * processes` samples of the order. Where a sampler's order
is not known to be like that, the log says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset, SequentialSampler

from unified_ckpt.api import open as open_source

_LOG = logging.getLogger("unified_ckpt")
_UNSURE = "other"


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run takes samples: `round_samples` in one batch of every process, `accumulation` rounds a step, in an `order` given by a
    seed over so many samples."""

    round_samples: int
    accumulation: int
    order: str
    seed: int | None
    length: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """Samples of the epoch that have been taken. `rounds`: batches to skip in each process."""

    epoch: int
    samples: int
    rounds: int


def place_of(epoch: float, *, rounds_in_epoch: int, pace: Pace) -> Place:
    """`epoch`: the Trainer's, whose fraction is the rounds that are done of it."""
    whole = math.floor(epoch)
    rounds = round((epoch - whole) * rounds_in_epoch)
    whole, rounds = divmod(whole * rounds_in_epoch + rounds, rounds_in_epoch)
    return Place(whole, rounds * pace.round_samples, rounds)


def same_place(saved: Mapping[str, Any], pace: Pace) -> tuple[Place, list[str]]:
    """The place in a run of another pace, and what is to be said of it. Steps are whole: samples that fill none are taken again."""
    epoch, samples, was = saved["epoch"], saved["samples"], Pace(**saved["pace"])
    if (was.round_samples, was.accumulation) == (pace.round_samples, pace.accumulation):
        return Place(epoch, samples, samples // pace.round_samples), []
    notes = []
    step_samples = pace.round_samples * pace.accumulation
    again = samples % step_samples
    if again:
        notes.append(
            f"{again} samples of the epoch are taken again: {samples} have been, a step is {step_samples} now"
        )
    if _UNSURE in (was.order, pace.order):
        notes.append(
            "the order of this data loader may depend on batch size or processes: samples may be taken twice, or never"
        )
    elif (was.order, was.seed, was.length) != (pace.order, pace.seed, pace.length):
        notes.append(
            f"the data is {pace.order} of {pace.length} samples, seed {pace.seed}; it was {was.order} of {was.length}, seed {was.seed}: "
            "the rest of this epoch is not what is left of it"
        )
    samples -= again
    return Place(epoch, samples, samples // pace.round_samples), notes


def pace_of(trainer: Any, loader: Any) -> Pace:
    """The pace of a Trainer with the loader that it has made."""
    accumulation = trainer.args.gradient_accumulation_steps
    split = (
        trainer.accelerator.split_batches
    )  # then the batch size is that of all processes together
    per_round = (
        trainer._train_batch_size
        if split
        else trainer.get_total_train_batch_size(trainer.args) // accumulation
    )
    order, seed, length = _order(loader, trainer.args.world_size)
    return Pace(per_round, accumulation, order, seed, length)


def _order(loader: Any, world: int) -> tuple[str, int | None, int | None]:
    if isinstance(loader.dataset, IterableDataset):
        # `datasets` gives each process shards of its own, where there are enough.
        sharded = world > 1 and type(loader.dataset).__module__.startswith("datasets.")
        return (_UNSURE if sharded else "a stream"), None, None
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    if type(sampler) is SeedableRandomSampler:
        return "shuffled", int(sampler.initial_seed), len(sampler)
    return (
        ("in its own order", None, len(sampler))
        if type(sampler) is SequentialSampler
        else (_UNSURE, None, None)
    )


class Position:
    """A Trainer's place in its data: told at a save, and set at a resume, by ways of the Trainer that this replaces."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: Mapping[str, Any] | None = None
        self._pace: Pace | None = None
        self._rounds_in_epoch = 0
        self._place: Place | None = None
        if hasattr(
            trainer, "_init_training_state"
        ):  # Trainers before have one function for all of it
            self._stock_values, self._stock_state = (
                trainer.set_initial_training_values,
                trainer._init_training_state,
            )
            trainer.set_initial_training_values, trainer._init_training_state = (
                self._set_values,
                self._init_state,
            )

    def resume_from(self, checkpoint: str | None) -> None:
        """The checkpoint of ours that the next training goes on from, or None."""
        self._saved = None
        if checkpoint is not None:
            with open_source(checkpoint) as source:
                self._saved = (source.extra or {}).get("data")

    def now(self) -> dict[str, Any] | None:
        """What a checkpoint stores of it."""
        if self._pace is None:
            return None
        at = place_of(
            self._trainer.state.epoch or 0.0, rounds_in_epoch=self._rounds_in_epoch, pace=self._pace
        )
        return {
            "epoch": at.epoch,
            "samples": at.samples,
            "step": self._trainer.state.global_step,
            "pace": asdict(self._pace),
        }

    def _set_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """The stock one; the end of training lies as many samples, or steps where `max_steps` says so, ahead as it did."""
        epochs, steps_in_epoch, examples, samples, total_batch, rounds_in_epoch, max_steps = (
            self._stock_values(args, dataloader)
        )
        self._pace, self._rounds_in_epoch, self._place = (
            pace_of(self._trainer, dataloader),
            rounds_in_epoch,
            None,
        )
        if self._saved is not None:
            self._place, notes = same_place(self._saved, self._pace)
            done, counted = (
                self._place.epoch * steps_in_epoch
                + self._place.rounds // args.gradient_accumulation_steps,
                self._saved["step"],
            )
            if self._pace.length is not None and done != counted:
                if args.max_steps > 0:
                    epochs = math.ceil((done + max_steps - counted) / steps_in_epoch)
                else:
                    max_steps += counted - done
            self._tell(notes, max_steps)
        return epochs, steps_in_epoch, examples, samples, total_batch, rounds_in_epoch, max_steps

    def _init_state(self, *args: Any, **more: Any) -> tuple[int, int]:
        """The stock one; the epoch and the batches to skip are those of the samples that have been taken."""
        found: tuple[int, int] = self._stock_state(*args, **more)
        if self._place is None:
            return found
        return self._place.epoch, 0 if self._trainer.args.ignore_data_skip else self._place.rounds

    def _tell(self, notes: list[str], max_steps: int) -> None:
        if (
            self._saved is None
            or self._place is None
            or self._pace is None
            or self._trainer.args.process_index != 0
        ):
            return
        for note in notes:
            _LOG.warning("resuming with another total batch size: %s", note)
        if Pace(**self._saved["pace"]) != self._pace:
            at = (self._place.epoch, self._place.samples, self._saved["step"], max_steps)
            _LOG.info("resuming at epoch %d, %d samples in; step %d goes on to %d", *at)

"""Tracks a run's data position and random states, so that it resumes there. Stock Lightning saves
neither and reshuffles.

A rank stores its random states of three moments: before the iterator of its loaders was created,
before the first batch was drawn, and now. All include the generators that loaders and samplers own.
To resume in the middle of an epoch, the iterator is created from the first, which gives the same
worker seeds. The batches already seen are drawn from the second, which gives the same order, and
dropped; then the current states are restored. Hooks may draw numbers between these moments. Loaders
with a `state_dict` (StatefulDataLoader) seek by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from unified_ckpt.runtime.torch_state.rng import RandomStates

_LOG = logging.getLogger("unified_ckpt")
_BATCHES = "epoch_loop.batch_progress"
_GENERATORS = "generators"  # key in random states


@dataclass(frozen=True, slots=True)
class _ResumeTarget:
    """What a resume restores.

    `order_rng`, `first_batch_rng`: before the iterator and before its first batch; None if the
    order cannot be reproduced. `batches`: seen in the epoch; 0 where the next epoch begins.
    `loader_states`: of loaders that seek by themselves; `ended`: they are at the end of an epoch.
    `seeds`: of samplers that draw the order of an epoch from a seed.
    `reload_epoch`: in which the loaders were created, for `reload_dataloaders_every_n_epochs`.
    """

    rng: Mapping[str, Any]
    order_rng: Mapping[str, Any] | None
    first_batch_rng: Mapping[str, Any] | None
    batches: int
    loader_states: list[dict[str, Any]]
    ended: bool
    seeds: list[int | None]
    reload_epoch: float


class PositionTracker:
    """Follows a Trainer's fit loop from before its first iterator."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._order_rng: dict[str, Any] | None = None
        self._first_batch_rng: Mapping[str, Any] | None = None
        self._target: _ResumeTarget | None = None
        # RNG until the next batch, and batches drawn so far
        self._rng_before_next_batch: tuple[Mapping[str, Any], int] | None = None
        self._validation_due = False  # right after the save
        self._is_running = False  # the loop has adapted its progress
        self._is_epoch_over = False  # after the batch of the save
        epoch_loop = self._loop.epoch_loop
        self._loop._load_combined_loader_states = self._before_iterator
        self._loop.setup_data = self._before_epoch
        self._loop.reset = self._on_loop_reset
        epoch_loop.on_run_start = self._on_first_batch
        epoch_loop.val_loop.increment_progress_to_evaluation_end = self._skip_validation

    def reset(self) -> None:
        """Forget an earlier resume, so that a failed one leaves nothing to the next run."""
        self._target, self._rng_before_next_batch = None, None
        self._order_rng, self._first_batch_rng = None, None
        self._is_running = False

    def num_replicas(self) -> int:
        """Return how many ranks share the data."""
        return int(self._sampler_kwargs()["num_replicas"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        fetcher, combined = self._loop._data_fetcher, self._loop._combined_loader
        ended = fetcher is None or fetcher.done
        return {
            **self._random_states(),
            "order": self._order_rng,
            "first_batch": self._first_batch_rng,
            "batches": 0 if ended else int(self._loop.epoch_loop.batch_progress.current.ready),
            "loaders": list(combined._state_dicts()) if combined is not None else [],
            "ended": ended,
            "seeds": [_seed(sampler) for sampler in self._samplers()],
            "reload_epoch": self._loop._last_train_dl_reload_epoch,
        }

    def prepare_resume(
        self,
        checkpoint: MutableMapping[str, Any],
        rank_state: Mapping[str, Any] | None,
        saved: Sequence[Mapping[str, Any]],
        replicas: int,
    ) -> None:
        """Set what the next iterator resumes from. Changes the loops' state if it is of another
        rank, or another number of ranks.

        `rank_state`: saved by this rank, None if by another number of ranks. `saved`: by the ranks
        whose state this node has. `replicas`: how many ranks shared the data.
        """
        sampler_kwargs = self._sampler_kwargs()
        loops = checkpoint["loops"]["fit_loop"]
        if rank_state is not None and replicas == sampler_kwargs["num_replicas"]:
            if rank_state["loaders"]:
                loops["state_dict"].pop("combined_loader", None)
            self._target = _ResumeTarget(
                rank_state,
                rank_state["order"],
                rank_state.get("first_batch"),
                rank_state["batches"],
                rank_state["loaders"],
                rank_state["ended"],
                rank_state["seeds"],
                rank_state["reload_epoch"],
            )
            return
        # by data rank: ranks that share data (tensor parallel) keep sharing random numbers
        RandomStates().load_from_ranks(
            saved, rank=sampler_kwargs["rank"], world=sampler_kwargs["num_replicas"]
        )
        num_replicas = sampler_kwargs["num_replicas"]
        first_rank = saved[0]
        saved_batches = loops[_BATCHES]["current"]["ready"]
        batches = (
            -(-saved_batches * replicas // num_replicas)
            if first_rank["ended"]
            else saved_batches * replicas // num_replicas
        )
        if not first_rank["ended"] and batches * num_replicas != saved_batches * replicas:
            _LOG.warning(
                "data: %d batches of %d ranks do not divide evenly among %d; the last are repeated",
                saved_batches,
                replicas,
                num_replicas,
            )
        current, delta = loops[_BATCHES]["current"], batches - saved_batches
        for name in ("ready", "started", "processed", "completed"):
            current[name] = max(current[name] + delta, 0)
        if loops["state_dict"].pop("combined_loader", None):
            _LOG.warning(
                "data: loader states are of %d ranks; "
                "loaders restart the epoch and drop the batches already seen",
                replicas,
            )
        states = RandomStates().state_dict()
        moments = (first_rank, first_rank["order"] or {}, first_rank.get("first_batch") or {})
        rng, order_rng, first_batch_rng = (
            {**states, _GENERATORS: moment.get(_GENERATORS, [])} for moment in moments
        )
        self._target = _ResumeTarget(
            rng,
            order_rng,
            first_batch_rng,
            0 if first_rank["ended"] else batches,
            [],
            ended=first_rank["ended"],
            seeds=first_rank["seeds"],
            reload_epoch=first_rank["reload_epoch"],
        )

    def resume_at(self, rng: Mapping[str, Any], *, epoch: int, batches: int) -> None:
        """Set that the run resumes after some batches of an epoch, in an order that is not stored.

        The loaders must be set up. `rng`: random states of this rank after the last batch.
        """
        self._target = _ResumeTarget(
            rng, None, None, batches, [], ended=not batches, seeds=[], reload_epoch=epoch
        )
        self._loop._last_train_dl_reload_epoch = epoch
        for sampler in self._samplers():
            sampler.set_epoch(epoch)
        self._restore_random_states(rng)
        iter(self._loop._data_fetcher)

    def _before_iterator(self) -> None:
        """Replace the loop's method that runs right before it creates an iterator."""
        own_method(self._loop, "_load_combined_loader_states")()
        target = self._target
        if target is not None:
            if any(_wrapped_sampler(item) is not None for item in self._loaders_and_samplers()):
                # it draws an order each time that it is iterated, which a loader does to seek
                target = self._target = replace(target, loader_states=[])
            progress = self._loop.epoch_progress.current
            # a save at the last batch comes before the end of its epoch is counted
            epoch = progress.ready if target.ended else progress.processed
            samplers = self._samplers()
            for sampler in samplers:
                sampler.set_epoch(epoch)  # Lightning sets it only after workers started
            for sampler, seed in zip(samplers, target.seeds, strict=False):
                if seed is not None and _seed(sampler) is not None:
                    sampler.seed = seed
            self._loop._combined_loader._load_state_dicts(target.loader_states)
            if not self._is_running:
                order_rng = target.order_rng if target.batches else None
                self._restore_random_states(order_rng or target.rng)
        self._order_rng = self._random_states()

    def _on_loop_reset(self) -> None:
        """Replace the loop's method that adapts its progress to the resume."""
        loop, target = self._loop, self._target
        due = target is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        own_method(loop, "reset")()
        self._is_running, self._is_epoch_over = True, False
        if target is not None:
            loop._last_train_dl_reload_epoch = target.reload_epoch
            after_batch = loop.epoch_loop.restarted_on_train_batch_end
            self._validation_due = due and after_batch  # other saves come after the validation
            seen = loop.epoch_loop.batch_progress.current.completed + after_batch
            counted = after_batch and seen >= self._trainer.num_training_batches
            self._is_epoch_over = target.ended and (counted or not loop.epoch_loop.restarting)
            for callback in self._trainer.checkpoint_callbacks if after_batch else ():
                # else it saves the step again, within the accumulation of the next one
                callback._last_global_step_saved = self._trainer.global_step
        progress = loop.epoch_progress.current
        if loop.restarted_mid_epoch and progress.processed == progress.started:
            # The save was at the last batch, and Lightning has just counted the epoch as ended.
            # The next one begins like any other; else it is not counted as begun.
            loop.reset_restart_stage()

    def _skip_validation(self) -> None:
        """Replace the validation loop's method that skips the validation after a save."""
        if not self._is_epoch_over:
            self._original_skip_validation()

    def _original_skip_validation(self) -> None:
        validation = self._loop.epoch_loop.val_loop
        own_method(validation, "increment_progress_to_evaluation_end")()

    def _before_epoch(self) -> None:
        """Replace the loop's method that runs before the hooks of each epoch, and once before the
        first. Random numbers of a new epoch continue those of the save, as its hooks do.
        """
        target, before = self._target, self._rng_before_next_batch
        if target is not None and self._is_running and self._is_epoch_over:
            self._restore_random_states(target.rng)
            if self._validation_due:  # draws what the uninterrupted run draws for it
                self._original_skip_validation()
                self._loop.epoch_loop.val_loop.batch_progress.total.reset()
        elif target is None and before is not None and before[1] == self._batches_drawn():
            # the previous run only finished an epoch
            self._restore_random_states(before[0])
        own_method(self._loop, "setup_data")()

    def _batches_drawn(self) -> int:
        return int(self._loop.epoch_loop.batch_progress.total.ready)

    def _on_first_batch(self, fetcher: Any) -> None:
        """Replace the epoch loop's method that runs right before the first batch."""
        target, self._target = self._target, None
        if target is not None:
            self._warn_not_reproducible()
        loop, drawn = self._loop, self._batches_drawn()
        self._rng_before_next_batch = (target.rng, drawn) if target is not None else None
        if (
            target is None
            and self._trainer.current_epoch > 0
            and not loop.is_resuming
            and not loop.epoch_loop.restarting
        ):
            self._order_rng = self._random_states()  # the loop creates a new iterator now
        if (
            target is not None
            and target.batches
            and not target.loader_states
            and type(fetcher).__name__ == "_PrefetchDataFetcher"
        ):
            if target.first_batch_rng is not None:
                self._restore_random_states(target.first_batch_rng)
            for _ in range(target.batches):
                next(fetcher)
            fetcher.fetched -= target.batches  # the loop adds the batches seen
        if target is not None and self._is_epoch_over:
            self._order_rng = self._random_states()
            iter(fetcher)
        own_method(loop.epoch_loop, "on_run_start")(fetcher)
        self._first_batch_rng = self._random_states()
        if target is not None and target.batches:
            self._first_batch_rng = target.first_batch_rng
            self._restore_random_states(target.rng)

    def _warn_not_reproducible(self) -> None:
        """Log what the resumed run cannot reproduce.

        Lightning makes some updates after the save, with metrics that it does not save. Workers
        keep their random states to themselves.
        """
        trainer = self._trainer
        automatic = trainer.lightning_module.automatic_optimization
        for config in trainer.lr_scheduler_configs:
            missed = config.interval == "epoch" or self._loop.restarting
            if automatic and config.reduce_on_plateau and missed:
                _LOG.warning(
                    "scheduler %s (monitor %s): Lightning skips its update of the %s at the save; "
                    "learning rates may differ from an uninterrupted run",
                    type(config.scheduler).__name__,
                    config.monitor,
                    config.interval,
                )
        if any(type(item).__name__ == "StochasticWeightAveraging" for item in trainer.callbacks):
            _LOG.warning(
                "StochasticWeightAveraging: Lightning skips an update at a resume; "
                "averages and learning rates may differ from an uninterrupted run"
            )
        loaders = self._loop._combined_loader.flattened
        persistent = any(getattr(item, "persistent_workers", False) for item in loaders)
        if persistent and trainer.current_epoch > 0:
            _LOG.warning(
                "data: persistent workers lose their random states; "
                "random samples may differ from an uninterrupted run"
            )

    def _samplers(self) -> list[Any]:
        items = [item for item in self._loaders_and_samplers() if not isinstance(item, DataLoader)]
        return [item for item in items if callable(getattr(item, "set_epoch", None))]

    def _random_states(self) -> dict[str, Any]:
        generators = [generator.get_state() for generator in self._generators()]
        return {**RandomStates().state_dict(), _GENERATORS: generators}

    def _restore_random_states(self, states: Mapping[str, Any]) -> None:
        RandomStates().load_state_dict(states)
        for generator, state in zip(self._generators(), states.get(_GENERATORS, ()), strict=False):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        generators = [getattr(item, "generator", None) for item in self._loaders_and_samplers()]
        unique = {id(item): item for item in generators if isinstance(item, torch.Generator)}
        return list(unique.values())

    def _loaders_and_samplers(self) -> list[Any]:
        """Return the loaders, their samplers, and the samplers that these wrap."""
        combined = self._loop._combined_loader
        items = list(combined.flattened) if combined is not None else []
        for item in items:  # grows
            inner = [getattr(item, name, None) for name in ("sampler", "batch_sampler")]
            inner.append(_wrapped_sampler(item))
            known = [None, *items]
            items += [each for each in inner if all(each is not other for other in known)]
        return items

    def _sampler_kwargs(self) -> dict[str, int]:
        kwargs: dict[str, int] = getattr(
            self._trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
        )
        return kwargs


def own_method(owner: Any, name: str) -> Any:
    """Return an object's own method of a replaced name. A reference to it could not be pickled."""
    return getattr(type(owner), name).__get__(owner)


def _wrapped_sampler(sampler: Any) -> Any:
    """Return the sampler inside Lightning's DistributedSamplerWrapper, None for other samplers."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def _seed(sampler: Any) -> int | None:
    seed = getattr(sampler, "seed", None)
    return seed if isinstance(seed, int) else None

"""Where a run is in its data and its random numbers, so that it goes on there. Stock Lightning
saves neither; it starts a new shuffle.

A rank keeps its random states of now, and those from before its loaders' iterator was made. To go
on in the middle of an epoch, the iterator is made again from the latter, which gives the same order
and the same seeds of workers; the batches that were seen are drawn and dropped; then the states of
then are put back. Loaders with a `state_dict` (StatefulDataLoader) go to their place by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.runtime.torch_state.rng import RandomStates

_LOG = logging.getLogger("unified_ckpt")
_BATCHES = "epoch_loop.batch_progress"


@dataclass(frozen=True, slots=True)
class _ResumeTarget:
    """What a resume has to restore. `order_rng`: None where the order cannot be made again.
    `batches`: seen of the epoch, 0 where the next one begins. `loader_states`: states of those that
    go to their place by themselves; `ended`: they are at the end of an epoch.
    """

    rng: Mapping[str, Any]
    order_rng: Mapping[str, Any] | None
    batches: int
    loader_states: list[dict[str, Any]]
    ended: bool


class PositionTracker:
    """Follows a Trainer's fit loop, from before its first iterator."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._order_rng: dict[str, Any] | None = None
        self._target: _ResumeTarget | None = None
        self._rng_before_next_batch: tuple[Mapping[str, Any], int] | None = (
            None  # random states until the next batch is drawn, and how many were before
        )
        self._original_load_states, self._original_run_start = (
            self._loop._load_combined_loader_states,
            self._loop.epoch_loop.on_run_start,
        )
        self._loop._load_combined_loader_states = self._before_iterator
        self._loop.epoch_loop.on_run_start = self._on_first_batch

    def reset(self) -> None:
        """Before a run begins: a resume that failed leaves nothing to the next one."""
        self._target, self._rng_before_next_batch, self._order_rng = None, None, None

    def num_replicas(self) -> int:
        """How many ranks the data are dealt to."""
        return int(self._sampler_kwargs()["num_replicas"])

    def state_dict(self) -> dict[str, Any]:
        """Of this rank."""
        fetcher, combined = self._loop._data_fetcher, self._loop._combined_loader
        ended = fetcher is None or fetcher.done
        return {
            **RandomStates().state_dict(),
            "order": self._order_rng,
            "batches": 0 if ended else int(self._loop.epoch_loop.batch_progress.current.ready),
            "loaders": list(combined._state_dicts()) if combined is not None else [],
            "ended": ended,
        }

    def prepare_resume(
        self,
        checkpoint: MutableMapping[str, Any],
        saved: Sequence[Mapping[str, Any]],
        replicas: int,
    ) -> None:
        """What the next iterator is to go on from. Changes the loops' state where it is another
        rank's, or another number of ranks.
        """
        trainer, sampler_kwargs = self._trainer, self._sampler_kwargs()
        loops = checkpoint["loops"]["fit_loop"]
        if len(saved) == trainer.world_size and replicas == sampler_kwargs["num_replicas"]:
            rank_state = saved[trainer.global_rank]
            if rank_state["loaders"]:
                loops["state_dict"].pop("combined_loader", None)
            self._target = _ResumeTarget(
                rank_state,
                rank_state["order"],
                rank_state["batches"],
                rank_state["loaders"],
                rank_state["ended"],
            )
            return
        # by the place in the data: ranks that share theirs, as those of tensor parallelism, go on
        # sharing their random numbers
        RandomStates().load_from_ranks(
            saved, rank=sampler_kwargs["rank"], world=sampler_kwargs["num_replicas"]
        )
        num_replicas, first_rank, batches_seen = (
            sampler_kwargs["num_replicas"],
            saved[0],
            loops[_BATCHES]["current"]["ready"],
        )
        batches = (
            -(-batches_seen * replicas // num_replicas)
            if first_rank["ended"]
            else batches_seen * replicas // num_replicas
        )
        if not first_rank["ended"] and batches * num_replicas != batches_seen * replicas:
            _LOG.warning(
                "data: %d batches of %d ranks are no whole number for %d; some of the last come again",
                batches_seen,
                replicas,
                num_replicas,
            )
        _recount(loops[_BATCHES]["current"], batches - batches_seen)
        if loops["state_dict"].pop("combined_loader", None):
            _LOG.warning(
                "data: states of loaders are those of %d ranks; they begin the epoch again, and what was seen is dropped",
                replicas,
            )
        self._target = _ResumeTarget(
            RandomStates().state_dict(),
            None,
            0 if first_rank["ended"] else batches,
            [],
            ended=first_rank["ended"],
        )

    def _before_iterator(self) -> None:
        """In the place of the loop's own, which is called right before it makes an iterator."""
        self._original_load_states()
        target = self._target
        if target is not None:
            for sampler in self._samplers():
                sampler.set_epoch(
                    self._loop.epoch_progress.current.processed
                )  # Lightning does so after workers have asked for the first
            self._loop._combined_loader._load_state_dicts(target.loader_states)
            RandomStates().load_state_dict(
                target.order_rng if target.batches and target.order_rng is not None else target.rng
            )
        self._order_rng = RandomStates().state_dict()

    def _on_first_batch(self, fetcher: Any) -> None:
        """In the place of the epoch loop's own, right before the first batch."""
        target, self._target = self._target, None
        loop, drawn = self._loop, self._loop.epoch_loop.batch_progress.total.ready
        if (
            target is None
            and self._rng_before_next_batch is not None
            and self._rng_before_next_batch[1] == drawn
        ):  # the run before had only the end of an epoch to do
            RandomStates().load_state_dict(self._rng_before_next_batch[0])
        self._rng_before_next_batch = (target.rng, drawn) if target is not None else None
        if (
            target is None
            and self._trainer.current_epoch > 0
            and not loop.is_resuming
            and not loop.epoch_loop.restarting
        ):
            self._order_rng = RandomStates().state_dict()  # the loop makes a new iterator now
        if (
            target is not None
            and target.batches
            and not target.loader_states
            and type(fetcher).__name__ == "_PrefetchDataFetcher"
        ):
            for _ in range(target.batches):
                next(fetcher)
            fetcher.fetched -= target.batches  # the loop adds what it has seen
        if (
            target is not None
            and target.loader_states
            and target.ended
            and loop.epoch_loop.batch_progress.current.ready == 0
        ):
            RandomStates().load_state_dict(target.rng)
            iter(fetcher)  # the next epoch's
        self._original_run_start(fetcher)
        if target is not None and target.batches:
            RandomStates().load_state_dict(target.rng)

    def _samplers(self) -> list[Any]:
        loaders = self._loop._combined_loader.flattened
        samplers = [
            getattr(item, name, None) for item in loaders for name in ("sampler", "batch_sampler")
        ]
        return [item for item in samplers if callable(getattr(item, "set_epoch", None))]

    def _sampler_kwargs(self) -> dict[str, int]:
        kwargs: dict[str, int] = getattr(
            self._trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
        )
        return kwargs


def _recount(progress: MutableMapping[str, int], delta: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        progress[name] = max(progress[name] + delta, 0)

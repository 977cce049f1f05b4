"""Where a run is in its data and its random numbers, so that it goes on there. Stock Lightning saves neither; it starts a new shuffle.

A rank keeps its random states of now, and those from before its loaders' iterator was made. To go on in the middle of an epoch, the
iterator is made again from the latter, which gives the same order and the same seeds of workers; the batches that were seen are drawn and
dropped; then the states of then are put back. Loaders with a `state_dict` (StatefulDataLoader) go to their place by themselves.
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
class _Goal:
    """What a resume has to restore. `order`: None where the order cannot be made again. `batches`: seen of the epoch, 0 where the next one
    begins. `loaders`: states of those that go to their place by themselves; `ended`: they are at the end of an epoch.
    """

    random: Mapping[str, Any]
    order: Mapping[str, Any] | None
    batches: int
    loaders: list[dict[str, Any]]
    ended: bool


class Place:
    """Follows a Trainer's fit loop, from before its first iterator."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._order: dict[str, Any] | None = None
        self._goal: _Goal | None = None
        self._kept: tuple[Mapping[str, Any], int] | None = (
            None  # random states until the next batch is drawn, and how many were before
        )
        self._before_iterator, self._on_run_start = (
            self._loop._load_combined_loader_states,
            self._loop.epoch_loop.on_run_start,
        )
        self._loop._load_combined_loader_states = self._make_ready
        self._loop.epoch_loop.on_run_start = self._go

    def forget(self) -> None:
        """Before a run begins: a resume that failed leaves nothing to the next one."""
        self._goal, self._kept, self._order = None, None, None

    def replicas(self) -> int:
        """How many ranks the data are dealt to."""
        return int(self._dealt()["num_replicas"])

    def state_dict(self) -> dict[str, Any]:
        """Of this rank."""
        fetcher, combined = self._loop._data_fetcher, self._loop._combined_loader
        ended = fetcher is None or fetcher.done
        return {
            **RandomStates().state_dict(),
            "order": self._order,
            "batches": 0 if ended else int(self._loop.epoch_loop.batch_progress.current.ready),
            "loaders": list(combined._state_dicts()) if combined is not None else [],
            "ended": ended,
        }

    def expect(
        self,
        checkpoint: MutableMapping[str, Any],
        saved: Sequence[Mapping[str, Any]],
        replicas: int,
    ) -> None:
        """What the next iterator is to go on from. Changes the loops' state where it is another rank's, or another number of ranks."""
        trainer, dealt = self._trainer, self._dealt()
        loops = checkpoint["loops"]["fit_loop"]
        if len(saved) == trainer.world_size and replicas == dealt["num_replicas"]:
            own = saved[trainer.global_rank]
            if own["loaders"]:
                loops["state_dict"].pop("combined_loader", None)
            self._goal = _Goal(own, own["order"], own["batches"], own["loaders"], own["ended"])
            return
        # by the place in the data: ranks that share theirs, as those of tensor parallelism, go on sharing their random numbers
        RandomStates().load_from_ranks(saved, rank=dealt["rank"], world=dealt["num_replicas"])
        now, first, seen = dealt["num_replicas"], saved[0], loops[_BATCHES]["current"]["ready"]
        batches = -(-seen * replicas // now) if first["ended"] else seen * replicas // now
        if not first["ended"] and batches * now != seen * replicas:
            _LOG.warning(
                "data: %d batches of %d ranks are no whole number for %d; some of the last come again",
                seen,
                replicas,
                now,
            )
        _recount(loops[_BATCHES]["current"], batches - seen)
        if loops["state_dict"].pop("combined_loader", None):
            _LOG.warning(
                "data: states of loaders are those of %d ranks; they begin the epoch again, and what was seen is dropped",
                replicas,
            )
        self._goal = _Goal(
            RandomStates().state_dict(),
            None,
            0 if first["ended"] else batches,
            [],
            ended=first["ended"],
        )

    def _make_ready(self) -> None:
        """In the place of the loop's own, which is called right before it makes an iterator."""
        self._before_iterator()
        goal = self._goal
        if goal is not None:
            for sampler in self._samplers():
                sampler.set_epoch(
                    self._loop.epoch_progress.current.processed
                )  # Lightning does so after workers have asked for the first
            self._loop._combined_loader._load_state_dicts(goal.loaders)
            RandomStates().load_state_dict(
                goal.order if goal.batches and goal.order is not None else goal.random
            )
        self._order = RandomStates().state_dict()

    def _go(self, fetcher: Any) -> None:
        """In the place of the epoch loop's own, right before the first batch."""
        goal, self._goal = self._goal, None
        loop, drawn = self._loop, self._loop.epoch_loop.batch_progress.total.ready
        if (
            goal is None and self._kept is not None and self._kept[1] == drawn
        ):  # the run before had only the end of an epoch to do
            RandomStates().load_state_dict(self._kept[0])
        self._kept = (goal.random, drawn) if goal is not None else None
        if (
            goal is None
            and self._trainer.current_epoch > 0
            and not loop.is_resuming
            and not loop.epoch_loop.restarting
        ):
            self._order = RandomStates().state_dict()  # the loop makes a new iterator now
        if (
            goal is not None
            and goal.batches
            and not goal.loaders
            and type(fetcher).__name__ == "_PrefetchDataFetcher"
        ):
            for _ in range(goal.batches):
                next(fetcher)
            fetcher.fetched -= goal.batches  # the loop adds what it has seen
        if (
            goal is not None
            and goal.loaders
            and goal.ended
            and loop.epoch_loop.batch_progress.current.ready == 0
        ):
            RandomStates().load_state_dict(goal.random)
            iter(fetcher)  # the next epoch's
        self._on_run_start(fetcher)
        if goal is not None and goal.batches:
            RandomStates().load_state_dict(goal.random)

    def _samplers(self) -> list[Any]:
        loaders = self._loop._combined_loader.flattened
        found = [
            getattr(one, name, None) for one in loaders for name in ("sampler", "batch_sampler")
        ]
        return [one for one in found if callable(getattr(one, "set_epoch", None))]

    def _dealt(self) -> dict[str, int]:
        found: dict[str, int] = getattr(
            self._trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
        )
        return found


def _recount(progress: MutableMapping[str, int], more: int) -> None:
    for name in ("ready", "started", "processed", "completed"):
        progress[name] = max(progress[name] + more, 0)

"""Positions of Accelerate's data loaders: epoch, order, and with `use_stateful_dataloader` the
batch, also for another number of ranks.

How data could be repeated or skipped: the epoch or the seed of the order is not restored;
prefetched batches count as seen; a position is counted in steps of another size. Positions are
therefore stored as samples of all ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_LOG = logging.getLogger("unified_ckpt")
_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_WARNED_ATTR = "_unified_warned"  # attribute of a data loader: what was warned of
_LOADED_STATE_ATTR = "_unified_state"  # attribute of a data loader from a load until it starts


def follow_loops(accelerator: Any) -> None:
    """Correct the positions of dispatched data loaders, in their current and all later loops.

    Accelerate fetches the batches of all ranks for a step, keeps the state from before the last of
    them, and subtracts the others from its counts. With `split_batches` there are no others, so a
    resume would repeat batches. Nothing can be subtracted from the state of a dataset, so it would
    skip batches. A corrected loader keeps the state from before the step.
    """
    gradient_state = accelerator.gradient_state
    if "_add_dataloader" not in vars(gradient_state):  # Accelerate calls it when a loop starts
        gradient_state._add_dataloader = partial(_start_loop, gradient_state)
    for running in gradient_state.dataloader_references:
        _correct(running)


def unfollow_loops(accelerator: Any) -> None:
    """Leave later loops as Accelerate has them, also one that continues an interrupted epoch."""
    vars(accelerator.gradient_state).pop("_add_dataloader", None)


def _start_loop(gradient_state: Any, started: Any) -> None:
    type(gradient_state)._add_dataloader(gradient_state, started)
    _correct(started)


def _correct(loader: Any) -> None:
    if isinstance(loader, DataLoaderDispatcher) and "_fetch_batches" not in vars(loader):
        # Functions of the module: a data loader can be pickled.
        vars(loader)["_fetch_batches"] = partial(_fetch_batches, loader)
        vars(loader)["adjust_state_dict_for_prefetch"] = _do_nothing


def _do_nothing() -> None:
    """Replace a method of a data loader that would change its position."""


def _fetch_batches(loader: Any, iterator: Any) -> Any:
    """Fetch the batches of a step, and keep the state from before the step."""
    if loader.state.process_index == 0:
        loader._update_state_dict()
    loader._update_state_dict = _do_nothing
    try:
        return type(loader)._fetch_batches(loader, iterator)
    finally:
        del loader._update_state_dict


def loader_states(accelerator: Any) -> list[dict[str, Any]]:
    """Return the current state of each prepared data loader on this rank."""
    loaders = enumerate(accelerator._dataloaders)
    states = [_state(accelerator, index, loader) for index, loader in loaders]
    follow_loops(accelerator)  # for later saves: the caller may not have attached the accelerator
    return states


def _state(accelerator: Any, index: int, loader: Any) -> dict[str, Any]:
    if _LOADED_STATE_ATTR in vars(loader):
        loaded: dict[str, Any] = vars(loader)[_LOADED_STATE_ATTR]
        return loaded
    running = _running(accelerator, loader)
    midway = running is not None and not running.end_of_dataloader
    # Accelerate counts an epoch when its loop ends, after a save at the last batch.
    epoch = (
        running.iteration + (not midway) if running is not None else getattr(loader, "iteration", 0)
    )
    sampler = _sampler(loader)
    state: dict[str, Any] = {"epoch": epoch, "midway": midway, "order": _order(sampler)}
    problem = (midway and _correction_problem(running)) or _resume_problem(
        loader, sampler, epoch=epoch, midway=midway
    )
    warned: set[str] = vars(loader).setdefault(_WARNED_ATTR, set())
    if problem and problem not in warned:  # it may be saved after each step
        warned.add(problem)
        _LOG.warning("dataloader %d: %s", index, problem)
    if _is_stateful(loader):
        state["untouched"] = loader.base_dataloader._initial_iter_for_state_dict
    if midway and _is_stateful(loader):
        state["position"] = loader.state_dict()
        state["samples"] = (
            _yielded_batches(state["position"]) * loader.total_batch_size
            if _is_convertible(loader)
            else None
        )
    return state


def _sampler(loader: Any) -> Any:
    """Return the sampler of indices. Batch samplers wrap it, one inside the other."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None):
        sampler = inner
    return sampler


def _resume_problem(loader: Any, sampler: Any, *, epoch: int, midway: bool) -> str:
    """Return what a resume from here cannot reproduce; empty if nothing is known."""
    name, has_seed = type(sampler).__name__, isinstance(sampler, SeedableRandomSampler)
    has_state = _is_stateful(loader) and type(loader.batch_sampler).__module__.startswith(
        "torchdata"
    )
    remedy = (
        "set DataLoaderConfiguration(use_seedable_sampler=True)"
        if isinstance(sampler, RandomSampler)
        else f"save between epochs, or draw the order without {name}"
    )
    problems = {
        f"saved within an epoch whose order cannot be reproduced; {remedy}": (
            midway and isinstance(sampler, _RANDOM_SAMPLERS) and not has_seed
        ),
        f"saved within an epoch; {name} draws the order from a generator, whose state at the start "
        "of the epoch is not saved; save between epochs, or seed the generator in set_epoch": (
            midway and "generator" in _order(sampler) and not has_seed and not has_state
        ),
        "saved within an epoch whose last batch has too few samples for all processes; rank 0 "
        "completes it with the first samples that it dispatches, which are others after a resume; "
        "set drop_last=True to resume exactly": midway and _completes_last_batch(loader),
        "saved in its first epoch, whose order Accelerate draws before it knows the seed; the rest "
        "is reordered unless loader.load_state_dict({}) was called before the loop": (
            midway and not epoch and _is_stateful(loader) and loader.num_workers and has_seed
        ),
        "a resume starts persistent workers anew, without their random states": (
            epoch and loader.num_workers and loader.persistent_workers
        ),
    }
    return next((problem for problem, applies in problems.items() if applies), "")


def _correction_problem(running: Any) -> str:
    """Return what a resume cannot reproduce of a loop that began before `follow_loops`."""
    is_dispatched = isinstance(running, DataLoaderDispatcher) and running.state.num_processes > 1
    if is_dispatched and _is_stateful(running) and "_fetch_batches" not in vars(running):
        return (
            "saved in a loop that began before the first save or load, so a resume may repeat or "
            "skip batches; call attach(accelerator) before the loop"
        )
    return ""


def _completes_last_batch(loader: Any) -> bool:
    """Whether rank 0 dispatches batches, and adds samples to the last one. Unknown for streams."""
    if not isinstance(loader, DataLoaderDispatcher) or loader._drop_last:
        return False
    length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
    return bool(length % loader.state.num_processes)


def _running(accelerator: Any, loader: Any) -> Any:
    """Return the active data loader if it is this one, or a copy of it that skips batches."""
    active = [
        candidate
        for candidate in accelerator.gradient_state.dataloader_references
        if candidate is not None
    ]
    return next(
        (candidate for candidate in reversed(active) if _is_same(accelerator, candidate, loader)),
        None,
    )


def _is_same(accelerator: Any, candidate: Any, loader: Any) -> bool:
    """Whether `candidate` is the data loader, or a copy of it that Accelerate made to skip
    batches.
    """
    return candidate is loader or (
        candidate.dataset is loader.dataset
        and all(candidate is not prepared for prepared in accelerator._dataloaders)
    )


def _order(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, SeedableRandomSampler):
        return {"seed": sampler.initial_seed}
    generator = getattr(sampler, "generator", None)
    return {"generator": generator.get_state()} if isinstance(generator, torch.Generator) else {}


def load_loader_states(
    accelerator: Any,
    saved: Sequence[Mapping[str, Any]],
    *,
    same_ranks: bool,
    restore_rng: Callable[[], None],
) -> None:
    """Restore the states. `same_ranks`: they are this rank's own; otherwise those of rank 0 of
    another number of ranks.

    `restore_rng` is called at once, and again when the interrupted epoch continues, because
    starting it draws random numbers.
    """
    unfollow_loops(accelerator)  # of an earlier load
    follow_loops(accelerator)
    resuming = []
    for index, (loader, state) in enumerate(zip(accelerator._dataloaders, saved, strict=False)):
        loader.set_epoch(state["epoch"])  # its samplers too: a copy that skips batches does not
        _set_order(_sampler(loader), state["order"])
        if _is_stateful(loader):
            state = _set_position(index, loader, state, same_ranks=same_ranks)
        if state["midway"]:
            vars(loader)[_LOADED_STATE_ATTR] = dict(state)
            resuming.append(loader)
    restore_rng()
    if resuming:
        _resume(accelerator, resuming, restore_rng)


def _set_order(sampler: Any, order: Mapping[str, Any]) -> None:
    if "seed" in order and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order["seed"]
    elif "generator" in order and hasattr(sampler, "generator"):
        sampler.generator = sampler.generator or torch.Generator()
        sampler.generator.set_state(order["generator"])


def _set_position(
    index: int, loader: Any, state: Mapping[str, Any], *, same_ranks: bool
) -> Mapping[str, Any]:
    """Restore the position and return the state that the data loader then has."""
    loader.base_dataloader.next_iter_state = None  # of an earlier load
    if not state.get("untouched", True):
        loader.load_state_dict({})  # the first loop then draws as many random numbers as later ones
    if state.get("position") is None:
        return state
    position, samples = state["position"], state["samples"]
    step = loader.total_batch_size if _is_convertible(loader) else 0
    if not same_ranks or (samples is not None and samples != _yielded_batches(position) * step):
        if samples is None or not step:
            _LOG.warning(
                "dataloader %d: its position cannot be converted to another number of ranks; "
                "the epoch starts again",
                index,
            )
            return {**state, "midway": False, "position": None}
        if samples % step:
            _LOG.warning(
                "dataloader %d: %d samples are repeated, because a step now has %d samples",
                index,
                samples % step,
                step,
            )
        position = _shift_position(loader.dl_state_dict, samples // step)
    loader.load_state_dict(position)
    return {**state, "position": position, "samples": samples and samples // step * step}


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _is_convertible(loader: Any) -> bool:
    """Whether the position is only a number of steps through one order that all ranks share."""
    if isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDataset):
        return False
    return (
        not hasattr(loader.dataset, "state_dict")
        and getattr(loader, "batch_sampler", None) is not None
    )


def _yielded_batches(position: Mapping[str, Any]) -> int:
    """Return the batches that a rank has had, from the state of torchdata's StatefulDataLoader,
    with or without workers.
    """
    if "_snapshot" in position:
        return int(position["_snapshot"]["_snapshot_step"]) + int(position["_steps_since_snapshot"])
    return int(position["_num_yielded"])


def _shift_position(position: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return a copy of the position at another step."""
    shifted: dict[str, Any] = copy.deepcopy(dict(position))
    if "_snapshot" in shifted:
        main = shifted["_snapshot"]["_main_snapshot"]
        shifted["_snapshot"] |= {
            "_snapshot_step": steps,
            "_last_yielded_worker_id": (steps - 1) % main["_num_workers"],
        }
        main["_sampler_iter_yielded"] = steps
        shifted["_steps_since_snapshot"] = 0
    else:
        shifted |= {"_sampler_iter_yielded": steps, "_num_yielded": steps}
    shifted["_iterator_finished"] = False
    return shifted


def _resume(accelerator: Any, resuming: list[Any], restore_rng: Callable[[], None]) -> None:
    """Restore random states when the interrupted epochs continue, right before the first new batch.

    An epoch continues through its data loader, or a copy that skips batches. Accelerate registers
    each loop that starts with its gradient state. A loop fetches one batch ahead: the saved run
    had drawn nothing between its save and the fetch of the batch after the next one.
    """
    gradient_state = accelerator.gradient_state
    follow = gradient_state._add_dataloader

    def on_start(started: Any) -> None:
        follow(started)
        loader = next(
            (candidate for candidate in resuming if _is_same(accelerator, started, candidate)), None
        )
        if loader is None:
            return
        resuming.remove(loader)
        if not resuming:
            gradient_state._add_dataloader = follow
        del vars(loader)[_LOADED_STATE_ATTR]
        if started is not loader:
            loader.iteration = started.iteration + 1  # the copy does not update the loader's epoch
        _call_before_second_fetch(started, restore_rng)

    gradient_state._add_dataloader = on_start


def _call_before_second_fetch(started: Any, callback: Callable[[], None]) -> None:
    """Call `callback` before the loop fetches the batch after the first that it yields."""
    skipped = iter(range(getattr(started, "skip_batches", 0)))
    if isinstance(started, DataLoaderDispatcher):
        _call_before_second_dispatch(started, skipped, callback)
        return
    original = type(started)._update_state_dict  # called before each fetch but the first

    def patched() -> None:
        if next(skipped, None) is None:
            del started._update_state_dict
            callback()
        original(started)

    started._update_state_dict = patched


def _call_before_second_dispatch(
    started: Any, skipped: Iterator[int], callback: Callable[[], None]
) -> None:
    original = started._fetch_batches  # on every rank; rank 0 alone asks for the state
    is_first = True

    def patched(iterator: Any) -> Any:
        nonlocal is_first
        if not is_first and next(skipped, None) is None:
            started._fetch_batches = original
            callback()
            return original(iterator)
        is_first = False
        fetched = original(iterator)
        if started._stop_iteration:  # an incomplete batch is the last: no fetch follows
            started._fetch_batches = original
            callback()
        return fetched

    started._fetch_batches = patched

"""Puts the package on a schedule: its clock, threads, sockets, store and changes of folders."""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

from torch.distributed.distributed_c10d import PrefixStore

from tests.support.schedules.network import Network, VirtualSelect, VirtualSocketModule
from tests.support.schedules.primitives import REPLACED_CLASSES, VirtualThreading, VirtualTime
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualPrefixStore
from unified_ckpt.runtime.storage.open_files import READ_CACHE
from unified_ckpt.runtime.storage.storage import LocalStorage

_CHANGING = (
    *("write_at", "make_folder", "resize", "_fsync", "_rename", "_exchange", "_replace"),
    *("remove_file", "remove_folder", "remove_empty"),
)


@contextmanager
def on_schedule(
    scheduler: Scheduler,
    network: Network | None = None,
    *,
    cores: int = 64,
    modules: Sequence[ModuleType] | None = None,
) -> Iterator[None]:
    """Run the package on the schedule in the block; threads that remain are unwound at its end.

    `cores`: those of each node. `modules`: of the package, all by default.
    """
    virtual_threading, virtual_time = VirtualThreading(scheduler), VirtualTime(scheduler)
    replacements: dict[int, Any] = {
        id(time): virtual_time,
        id(time.monotonic): virtual_time.monotonic,
        id(threading): virtual_threading,
        id(PrefixStore): VirtualPrefixStore,
        **{id(real): getattr(virtual_threading, name) for real, name in REPLACED_CLASSES.items()},
    }
    if network is not None:
        replacements |= {id(socket): VirtualSocketModule(network), id(select): VirtualSelect()}
    methods: dict[str, Any] = {name: _scheduled(scheduler, name) for name in _CHANGING}
    gc.disable()  # finalizers run at moments that no seed draws
    with ExitStack() as undo:
        undo.callback(gc.enable)
        if modules is None:
            names = [name for name in sys.modules if name.partition(".")[0] == "unified_ckpt"]
            modules = [sys.modules[name] for name in names]
        for module in modules:
            _replace(module, replacements, undo)
        undo.enter_context(patch.multiple(LocalStorage, **methods))
        undo.enter_context(patch.object(os, "sched_getaffinity", lambda _: set(range(cores))))
        undo.enter_context(patch.object(READ_CACHE, "lock", virtual_threading.Lock()))
        try:
            yield
        finally:
            scheduler.end()


def _replace(module: ModuleType, replacements: Mapping[int, Any], undo: ExitStack) -> None:
    """Replace names in a module, and functions that are default values in it."""
    for name, value in list(vars(module).items()):
        if id(value) in replacements:
            undo.callback(vars(module).__setitem__, name, value)
            vars(module)[name] = replacements[id(value)]
        make = vars(value).get("__init__") if isinstance(value, type) else None
        if isinstance(make, FunctionType) and value.__module__ == module.__name__:
            _replace_defaults(make, replacements, undo)


def _replace_defaults(make: FunctionType, replacements: Mapping[int, Any], undo: ExitStack) -> None:
    for cell in make.__closure__ or ():  # default factories of a dataclass
        if id(cell.cell_contents) in replacements:
            undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = replacements[id(cell.cell_contents)]
    defaults = make.__kwdefaults__ or {}
    for name, value in list(defaults.items()):
        if id(value) in replacements:
            undo.callback(defaults.__setitem__, name, value)
            defaults[name] = replacements[id(value)]


def _scheduled(scheduler: Scheduler, name: str) -> Callable[..., object]:
    """Return a method of a storage that is an operation of the schedule."""
    method = getattr(LocalStorage, name)

    def call(storage: LocalStorage, *arguments: object, **options: object) -> object:
        label = " ".join(str(argument) for argument in arguments[:1])
        scheduler.operation(f"{name.strip('_')} {label}")
        return method(storage, *arguments, **options)

    return call


def labels(trace: Sequence[tuple[int, str]]) -> list[str]:
    """Return the operations of a schedule as text."""
    return [f"{task}: {label}" for task, label in trace]

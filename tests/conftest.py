"""Settings for every test: hypothesis without deadlines (machines are shared), with the same cases
in each run, the same random numbers, one thread for each process's tensors, and the distribution of
tests over several processes.

`--hypothesis-profile random` draws new cases.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "random", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # where only the verdict counts
    "unshrunk",
    settings.get_profile("random"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,  # stops at the first
)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")


gc.disable()  # until the tests are collected: imports make no garbage

# Of torch here and in processes that tests start. Tensors are tiny: with a thread for each core,
# the processes mostly wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

SCOPES = {  # tests that one process runs, and words of their names
    "torchrun": ("processes/", "::test_readme_shows_real_output"),
    "orbax": ("test_conformance.py", "foreign/orbax/", "test_step_names.py"),
}


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which draw weights too
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers in each run, alone or after others.

    `torch.manual_seed` would record a traceback for each device that is not in use yet.
    """
    import torch  # not by the process that distributes the tests

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Nothing waits for a disk. What is synced, and when, is tested by the order of the calls; the
    processes that tests start do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """End the run if a process of pytest-xdist dies: its other tests would never be run.

    Compiled modules are kept: else each process that a test starts compiles the package again.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by a shell's `&`; tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.maxworkerrestart = "0"
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no process runs one alone at the end."""
    longest = ("processes", "machines", "test_conformance.py")
    items.sort(key=lambda item: not {item.path.parent.name, item.path.name}.intersection(longest))


def pytest_collection_finish() -> None:
    """Collect garbage rarely: collections took a twelfth of the suite.

    Torch's loggers pass records on to the root's handler: pytest attaches six handlers a test to
    each logger that does not, and torch has 55 of these.
    """
    gc.set_threshold(50_000)
    gc.enable()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Exclude imported modules from garbage collection, which takes up to a second with them.

    Each run of a trainer collects garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # without `-n` there is nobody who asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs a file's tests, which share costly fixtures. One process runs all tests that
    start torchrun, one at a time: they share servers that fork processes. So do tests that start
    Orbax. Commands of the documentation share nothing.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for scope, places in SCOPES.items():
                if any(place in nodeid for place in places):
                    return scope
            return nodeid if "test_documentation.py" in nodeid else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # keeps the order of the items
    return Scheduler(config, log)

"""Ranks that save to a bucket of a real server, and are killed; so is the server.

Nothing bad is accepted, no reported save is lost, and the next save of the run leaves no upload.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.objects.servers import Swift, make_bucket, swift_server
from tests.support.processes.bucket_worker import REFUSED, SECONDS, serve
from tests.support.processes.killed import Lives, Spawn, spawn
from tests.support.processes.sigkill_worker import WORLD
from unified_ckpt.format import names
from unified_ckpt.runtime.objects.registry import bucket_of, set_storage_options

pytestmark = pytest.mark.slow

__all__ = ["spawn"]  # a fixture

SERVERS = ("proxy", "object", "container", "account")


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with swift_server(tmp_path_factory.mktemp("swift")) as server:
        yield server


class BucketRun(Lives):
    """Launches of one run. `fixed`: its saves replace one checkpoint."""

    def __init__(self, top: Path, spawn: Spawn, swift: Swift, *, fixed: bool) -> None:
        super().__init__(top, spawn, serve, WORLD)
        self.swift, self.fixed = swift, fixed
        bucket = f"run-{time.time_ns()}"
        make_bucket(swift.options, bucket)
        self.root = f"s3://{bucket}/run"

    def launch(self, *, saves: int = 10**9) -> list:
        return self.start(WORLD, self.root, self.swift.options, self.fixed, saves)

    def saved(self) -> int:
        """The newest step that a rank has reported."""
        return max(map(int, re.findall(r"saved \d (\d+)", self.log_text())), default=0)

    def live(self, draw: random.Random, *, kills_server: bool) -> None:
        """Resume, save for a while, and be killed."""
        before, lives = self.saved(), len(self.resumed())
        ranks = self.launch()
        is_late = draw.random() < 0.8

        def has_saved() -> bool:
            return len(self.resumed()) > lives and (not is_late or self.saved() > before)

        self.wait(ranks, has_saved, seconds=SECONDS)
        assert self.resumed()[-1] >= before, self.log_text()
        time.sleep(draw.random() * 3)
        if not kills_server:
            self.kill(ranks)
            return
        self.swift.kill(*draw.sample(SERVERS, draw.choice([1, 4])))
        for rank in ranks:
            rank.join(SECONDS)
            assert rank.exitcode == REFUSED, self.log_text()
        self.swift.kill()  # a proxy shuns servers that were down for a minute
        self.swift.start()

    def end(self) -> None:
        """One more save: nothing is left but checkpoints and the newest step."""
        before = self.saved()
        for rank in self.launch(saves=1):
            rank.join(SECONDS)
            assert rank.exitcode == 0, self.log_text()
        assert self.saved() > before
        set_storage_options(self.root, self.swift.options)
        store, prefix = bucket_of(self.root)
        assert list(store.uploads(f"{prefix}/")) == []
        beside = [key for key in store.list(f"{prefix}/").objects if ".unified_" in key]
        assert beside == [f"{prefix}/{names.NEWEST}"]


PARTS = [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 20))]


@pytest.mark.incident("physicsnemo#1967")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fixed", [True, False], ids=["replaced", "new"])
def test_ranks_killed_at_5_moments(
    tmp_path: Path, spawn: Spawn, swift: Swift, fixed: bool, part: int
) -> None:
    """200 of both kinds in all parts."""
    run = BucketRun(tmp_path, spawn, swift, fixed=fixed)
    for number in range(5):
        run.live(random.Random(1000 * part + number), kills_server=False)
    run.end()


@pytest.mark.parametrize("part", PARTS[:17])
def test_servers_killed_at_3_moments(tmp_path: Path, spawn: Spawn, swift: Swift, part: int) -> None:
    """51 in all parts."""
    run = BucketRun(tmp_path, spawn, swift, fixed=part % 2 == 0)
    for number in range(3):
        run.live(random.Random(1000 * part + number), kills_server=True)
    run.end()

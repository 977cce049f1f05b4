"""The life of a run in a bucket whose listings lag: it saves, is killed at any request, restarts,
goes back and is pruned, while time passes.

A restore gives the newest step whose commit record was stored, bit for bit. Retention removes no
step that a rule keeps. Files of the user survive. `prune --stale` leaves no upload and no record.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.machines.machines import run_machine
from tests.support.manager.buckets import ROOT, Killed, bucket_manager
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.publish.commit import stored_save_id
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.format.commit import CommitRecord, parse_record
from unified_ckpt.runtime.objects.registry import register

NOTES = "run/checkpoint-1/notes.txt"
KILLS = st.one_of(st.none(), st.none(), st.integers(1, 90))


def state(token: int) -> dict[str, dict[str, torch.Tensor]]:
    """A state whose model encodes a save. Its optimizer equals that of every second save."""
    return {
        "model": {"w": torch.full((3,), float(token))},
        "optimizer": {"w/exp_avg": torch.full((3,), float(token % 2))},
    }


class BucketRunMachine(RuleBasedStateMachine):
    """`steps`: the token of each certain step. `kill_at`: the request that kills the process."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e9
        self.bucket = MemoryBucket(list_delay_seconds=5.0, clock=lambda: self.now)
        self.steps: dict[int, int] = {}
        self.step, self.tokens, self.has_notes = 0, 0, False
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(time, "time", lambda: self.now)

    @initialize(keep_latest=st.sampled_from([None, 1, 2]), lags=st.booleans())
    def start(self, keep_latest: int | None, lags: bool) -> None:
        self.keep_latest = keep_latest
        self.bucket.list_delay_seconds = 5.0 if lags else 0.0
        self.begin_life()

    def teardown(self) -> None:
        register("s3://bucket", None)
        self.patch.undo()

    # a life

    def begin_life(self, kill_at: int | None = None) -> None:
        """A new process."""
        self.kill_at, self.requests, self.restored = kill_at, 0, False
        self.store = MemoryStore(self.bucket, before=self.kill, after=self.note)
        register("s3://bucket", self.store)
        self.manager = bucket_manager(interval_steps=1, keep_latest=self.keep_latest)

    def kill(self, verb: str, key: str) -> None:
        """End the process at a request, and each of its threads at the next one."""
        self.requests += 1
        if self.kill_at is not None and self.requests >= self.kill_at:
            raise Killed

    def note(self, verb: str, key: str) -> None:
        """A save is certain once its commit record is stored."""
        if verb == "put" and names.committing_name(key.removeprefix("run/")):
            record = self.record_at(key)
            if record is not None and record.step is not None:
                self.steps[record.step] = self.tokens

    def record_at(self, key: str) -> CommitRecord | None:
        stored = self.bucket.current(key)
        try:
            return stored and parse_record(CommitRecord, stored.body, file=key)
        except FormatError:
            return None

    def resume(self, step: int | None = None) -> None:
        """Restore, and check the values."""
        filled = state(0)
        report = self.manager.restore(step, **filled)
        expected = max(self.steps, default=None) if step is None else step
        assert (None if report is None else report.step) == expected
        if expected is not None:
            for kind, tensors in state(self.steps[expected]).items():
                for name, tensor in tensors.items():
                    assert torch.equal(filled[kind][name], tensor)
        self.step, self.restored = expected or 0, True

    def is_stored(self, step: int) -> bool:
        """Whether a step is whole, or certain to become so."""
        name = f"checkpoint-{step}"
        manifest = self.bucket.current(f"run/{name}/{names.MANIFEST}")
        is_whole = manifest is not None and bool(stored_save_id(manifest.body))
        return is_whole or self.record_at(f"run/{names.commit_name(name)}") is not None

    # rules

    @rule(kill_at=KILLS, seconds=st.sampled_from([0, 1, 20, 100_000]))
    def save(self, kill_at: int | None, seconds: int) -> None:
        if not self.restored:
            self.resume()
        self.now += seconds
        self.step, self.tokens = self.step + 1, self.tokens + 1
        self.requests, self.kill_at = 0, kill_at
        try:
            self.manager.save(self.step, **state(self.tokens))
            self.kill_at = None
            assert self.steps[self.step] == self.tokens
            self.has_notes = True
            self.store.put(NOTES, b"mine")
        except Killed:
            self.begin_life()

    @rule(kill_at=KILLS, seconds=st.sampled_from([0, 20]))
    def restart(self, kill_at: int | None, seconds: int) -> None:
        self.now += seconds
        self.begin_life(kill_at)
        try:
            self.resume()
            self.kill_at = None
        except Killed:
            self.begin_life()

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.now += 20  # a step that listings hide is not found by its number
        self.begin_life()
        self.resume(data.draw(st.sampled_from(sorted(self.steps))))

    @precondition(lambda self: self.steps)
    @rule()
    def prune(self) -> None:
        self.now += 20
        assert main(["prune", ROOT, "--stale", "--older-than-hours", "0"]) == 0
        assert self.bucket.open_uploads() == []
        hidden = {key for key in self.bucket.bodies() if key.startswith("run/.")}
        if self.bucket.list_delay_seconds:  # lists that may be incomplete stay
            hidden = {key for key in hidden if not key.startswith(f"run/{names.UPLOADS_PREFIX}")}
        assert hidden <= {f"run/{names.NEWEST}"}

    # invariants

    @invariant()
    def what_rules_keep_is_stored(self) -> None:
        counted = sorted(step for step in self.steps if step <= self.step)
        kept = counted if self.keep_latest is None else counted[-self.keep_latest :]
        for step in list(self.steps):
            if not self.is_stored(step):
                assert step in counted
                assert step not in kept
                del self.steps[step]

    @invariant()
    def files_of_the_user_stay(self) -> None:
        assert not self.has_notes or self.bucket.bodies()[NOTES] == b"mine"


def test_life_of_a_run_in_a_bucket() -> None:
    run_machine(BucketRunMachine, examples=10, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("case_seed", range(1, 6))
def test_many_lives_of_runs_in_a_bucket(case_seed: int) -> None:
    run_machine(BucketRunMachine, examples=60, steps=40, case_seed=case_seed)

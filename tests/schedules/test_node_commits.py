"""The commit of node groups in every order of its operations, with ranks that die or wake late.

The real steps run: `NodeGroups.publish`, the transaction, the collectives. Only the folder is a
value: "old", "both" once the new checkpoint has the name, or "new" once the old one is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.schedules.choosers import Explorer, Faults
from tests.support.schedules.explore import explore
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualPrefixStore, VirtualStore
from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.engine.cluster.commit_group import CommitGroup
from unified_ckpt.engine.cluster.save_scope import NodeGroupLayout, NodeGroups
from unified_ckpt.engine.folder.if_exists import PublishTarget
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.runtime.comm import collective as collectives
from unified_ckpt.runtime.comm import phases
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.key_store import KeyStore

TIMEOUT = 0.00025  # a few polls
GROUPS = 2


class Folder:
    """Stands in for `RenamePublisher`: what a group's folder holds is a value of the store."""

    def __init__(self, scheduler: Scheduler, store: VirtualStore, group: int) -> None:
        self._scheduler, self._store, self._key = scheduler, store, f"folder/{group}"
        self.is_published = False

    def _become(self, content: bytes) -> None:
        self._scheduler.operation(f"{self._key} {content.decode()}")
        self._store.values[self._key] = content

    def publish(self) -> None:
        self._become(b"both")
        self.is_published = True

    def withdraw(self) -> None:
        if self.is_published:
            self._become(b"old")
            self.is_published = False

    def clean_up(self) -> None:
        self._become(b"new")


def publish(rank: int, scheduler: Scheduler, store: VirtualStore) -> None:
    """Publish the folder of a node group of one rank."""
    all_ranks = Collective(
        KeyStore(store),  # type: ignore[arg-type]
        0,
        rank=rank,
        ranks=range(GROUPS),
        timeout_seconds=TIMEOUT,
    )
    folder_ranks = Collective(
        KeyStore(VirtualPrefixStore(f"group-{rank}", store)),  # type: ignore[arg-type]
        0,
        rank=0,
        ranks=(rank,),
        timeout_seconds=TIMEOUT,
        parent=all_ranks,
    )
    transaction = Transaction(folder_ranks, Any, PublishTarget("checkpoint", "replace"))  # type: ignore[arg-type]
    transaction.publisher = Folder(scheduler, store, rank)  # type: ignore[assignment]
    records: Any = SimpleNamespace(encodings={})
    group = NodeGroup(rank, GROUPS, (rank,), GROUPS)
    layout = NodeGroupLayout(False, {}, None, group, 0, records, {})  # type: ignore[arg-type]
    scope: Any = SimpleNamespace(all_ranks=all_ranks, _group=None)
    with CommitGroup(all_ranks, group, "id").sharing_errors():
        NodeGroups.publish(scope, transaction, SimpleNamespace(localizer=layout))  # type: ignore[arg-type]


def make_store(scheduler: Scheduler) -> VirtualStore:
    store = VirtualStore(scheduler)
    store.values |= {f"folder/{group}": b"old" for group in range(GROUPS)}
    return store


DRAWN = [
    Faults(drift_seconds=0.0),
    Faults(deaths=1, drift_seconds=0.0),
    Faults(pauses=1, pause_seconds=20 * TIMEOUT, drift_seconds=0.0),
    Faults(deaths=1, pauses=1, pause_seconds=20 * TIMEOUT, drift_seconds=0.0),
]


@pytest.mark.parametrize(
    ("deaths", "pauses", "seeds"),
    [
        (1, 1, 300),
        *(pytest.param(*counts, 0, marks=pytest.mark.long) for counts in ((0, 0), (1, 0), (0, 1))),
    ],
)
def test_node_groups_commit_together(
    deaths: int, pauses: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group deletes its old checkpoint unless all have the new one."""
    monkeypatch.setattr(collectives, "_SHORT_WAIT_SECONDS", TIMEOUT / 2)
    outcomes = set[tuple[bytes, ...]]()

    def check(results: Sequence[Any], store: VirtualStore, scheduler: Scheduler) -> None:
        folders = tuple(store.values[f"folder/{group}"] for group in range(GROUPS))
        outcomes.add(folders)
        live = [rank for rank in range(GROUPS) if not scheduler.is_dead(rank)]
        errors = [results[rank] for rank in live if results[rank] is not None]
        assert all(isinstance(error, uc.RankError) for error in errors), errors
        if b"new" in folders or len(errors) < len(live):
            assert b"old" not in folders, folders
        if len(live) == GROUPS:
            assert len(errors) in (0, GROUPS), errors
            assert errors or folders == (b"new",) * GROUPS
            assert b"old" not in folders or folders == (b"old",) * GROUPS

    explorer = Explorer(
        deaths=deaths, mortal=range(GROUPS), pauses=pauses, pause_seconds=20 * TIMEOUT
    )
    ranks = [partial(publish, rank) for rank in range(GROUPS)]
    explore(
        explorer,
        ranks,
        check,
        make_shared=make_store,
        modules=[collectives, phases],
        seeds=[(seed, DRAWN[seed % len(DRAWN)]) for seed in range(seeds)],
    )
    assert (len(outcomes) > 1) == bool(deaths or pauses), outcomes

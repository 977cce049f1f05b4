"""A run whose root is a bucket: it resumes from its newest committed step, or raises."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.harness import run_ranks, set_comm
from tests.support.manager.buckets import (
    ROOT,
    bucket_manager,
    deny,
    leave_unfinished,
    root_storage,
    save_to_bucket,
    store,
)
from tests.support.manager.managers import QUICK, check_state, state, train
from tests.support.objects.memory import MemoryStore
from unified_ckpt.format import names
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.runtime.comm.comm import Comm

__all__ = ["store"]  # a fixture


def targets() -> dict[str, Any]:
    return {
        kind: {name: torch.zeros_like(tensor) for name, tensor in named.items()}
        for kind, named in state(0).items()
    }


def restored_step(root: str = ROOT, step: int | None = None, **options: Any) -> int | None:
    """The step that a new manager resumes from, whose values are checked."""
    filled = targets()
    with bucket_manager(root, **options) as manager:
        report = manager.restore(step, **filled)
    if report is None:
        return None
    check_state(filled, report.step or 0)
    return report.step


def test_run_in_a_bucket_resumes_and_rotates(store: MemoryStore) -> None:
    with bucket_manager(interval_steps=1, keep_latest=2) as manager:
        assert manager.root == ROOT
        assert train(manager, range(1, 6)) == [1, 2, 3, 4, 5]
        latest = manager.latest()
        assert latest is not None
        assert latest.path == f"{ROOT}/checkpoint-5"
        assert [record.step for record in manager.common_steps()] == [4, 5]
    assert restored_step() == 5
    assert restored_step(step=4) == 4
    with pytest.raises(uc.NotFoundError, match="does not exist; complete steps: 4, 5"):
        restored_step(step=3)
    assert {key.split("/")[1] for key in store.bucket.bodies()} == {
        "checkpoint-4",
        "checkpoint-5",
        "unified_events",
        names.NEWEST,
    }


def test_ranks_resume_from_a_bucket(store: MemoryStore) -> None:
    """On two nodes, which see one bucket."""

    def run(comm: Comm) -> list[int | None]:
        steps: list[int | None] = []
        for _ in range(2):
            with uc.CheckpointManager(
                ROOT, uc.ManagerOptions(**QUICK, interval_steps=1), node=f"node-{comm.rank // 2}"
            ) as manager:
                set_comm(manager.run.session, comm)
                filled = targets()
                report = manager.restore(**filled)
                if report is not None:
                    check_state(filled, 3)
                steps.append(report and report.step)
                train(manager, range(1, 4))
        return steps

    assert run_ranks(4, run) == [[None, 3]] * 4


def test_start_finishes_an_unfinished_commit(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    caplog.set_level(logging.INFO)
    assert restored_step() == 2
    assert "checkpoint-2: the unfinished commit of save" in caplog.text
    assert scan(root_storage(store), "checkpoint-").commits == ()


@pytest.mark.parametrize("verb", ["get", "complete"])
def test_unfinished_commit_is_found_before_listings_show_it(store: MemoryStore, verb: str) -> None:
    """Also if the process is killed right after the record."""
    now = [0.0]
    store.bucket.clock = lambda: now[0]
    store.bucket.list_delay_seconds = 5.0
    save_to_bucket(1)
    now[0] = 10.0
    leave_unfinished(store, 2, verb=verb)
    assert restored_step() == 2


def test_without_permission_no_older_step_is_loaded(store: MemoryStore) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    store.before = deny("complete", "delete")
    with pytest.raises(uc.StorageError, match=r"checkpoint-2: the commit of .*AccessDenied"):
        restored_step()
    assert restored_step(step=1) == 1
    with pytest.raises(uc.StorageError, match="AccessDenied"):
        restored_step(step=2)


def test_commit_whose_uploads_are_gone_stops_a_restore(store: MemoryStore) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    for upload in store.bucket.open_uploads():
        store.abort(upload.key, upload.id)
    with pytest.raises(
        uc.StorageError, match=f"this process cannot finish it.*prune {ROOT} --stale"
    ):
        restored_step()


def test_checkpoints_of_other_names_stop_a_fresh_start(store: MemoryStore) -> None:
    assert restored_step() is None
    uc.save(f"{ROOT}/final", step=7, **state(7))
    with pytest.raises(uc.IncompleteError, match="final"):
        restored_step()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("checkpoint-500", "model.safetensors.index.json"),
        ("global_step7", "mp_rank_00_model_states.pt"),
        ("100", "_CHECKPOINT_METADATA"),
    ],
)
def test_steps_of_another_engine_stop_a_fresh_start(
    store: MemoryStore, name: str, file: str
) -> None:
    store.put("run/7/data.bin", b"")  # a number alone is no step
    assert restored_step() is None
    store.put(f"run/{name}/{file}", b"{}")
    with pytest.raises(uc.IncompleteError, match=name):
        restored_step()


def test_trash_folder_of_a_bucket_is_refused(store: MemoryStore) -> None:
    with pytest.raises(uc.OptionError, match="a bucket cannot rename checkpoints; omit it"):
        bucket_manager(trash_directory="trash", keep_latest=1)
    assert store.bucket.bodies() == {}


def test_damaged_step_is_passed_over(store: MemoryStore) -> None:
    save_to_bucket(1, 2)
    key = "run/checkpoint-2/optimizer.safetensors"
    store.put(key, b"x" * len(store.bucket.bodies()[key]))
    assert restored_step() == 1


def test_local_directory_restores_beside_a_bucket(store: MemoryStore, tmp_path: Path) -> None:
    save_to_bucket(1)
    local = {"local_directory": str(tmp_path / "local"), "local_interval_steps": 1}
    with bucket_manager(**local) as manager:
        assert manager.restore(**targets()) is not None
        assert manager.save(2, **state(2)) is not None
        assert [record.step for record in manager.steps()] == [1, 2]
    assert restored_step(**local) == 2

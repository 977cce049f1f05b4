"""The commands on a bucket: what they list, verify, and clean up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.cli.command_line import run_verb
from tests.support.manager.buckets import (
    ROOT,
    bucket_manager,
    deny,
    leave_unfinished,
    root_storage,
    save_to_bucket,
    store,
)
from tests.support.manager.managers import train
from tests.support.objects.memory import MemoryStore
from unified_ckpt.cli import watch
from unified_ckpt.format import names
from unified_ckpt.manager.steps.scan import scan

__all__ = ["store"]  # a fixture

FINISHED_BY = f"a restore of its run or `unified-ckpt prune {ROOT} --stale` finishes it"


def complete_steps(store: MemoryStore) -> list[int | None]:
    return [record.step for record in scan(root_storage(store), "checkpoint-").complete]


def abort_all(store: MemoryStore) -> None:
    for upload in store.bucket.open_uploads():
        store.abort(upload.key, upload.id)


def test_list_shows_runs_in_a_bucket(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1, 2)
    save_to_bucket(7, root="s3://bucket/other/run")
    text = run_verb(capsys, "list", "s3://bucket", "--keep-latest", 1)
    assert text.index("s3://bucket/other/run\n") < text.index(f"{ROOT}\n")
    assert "3 checkpoints" in text
    listed = json.loads(run_verb(capsys, "list", f"{ROOT}/", "--json"))["runs"][0]
    assert listed["path"] == ROOT
    assert [step["compression"] for step in listed["steps"]] == ["none", "none"]
    assert listed["unfinished"] == []


def test_list_and_verify_tell_of_an_unfinished_commit(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    before = store.bucket.bodies()
    assert FINISHED_BY in run_verb(capsys, "list", ROOT, code=3)
    assert FINISHED_BY in run_verb(capsys, "verify", ROOT, code=3)
    text = run_verb(capsys, "verify", f"{ROOT}/checkpoint-2", code=3)
    assert text.startswith(f"{ROOT}/checkpoint-2: the commit of save ")
    result = json.loads(run_verb(capsys, "verify", f"{ROOT}/checkpoint-2", "--json", code=3))
    assert result["unfinished"]["step"] == 2
    result = json.loads(run_verb(capsys, "verify", ROOT, "--json", code=3))
    assert [check["ok"] for check in result["checkpoints"]] == [True]
    run_verb(capsys, "verify", f"{ROOT}/checkpoint-1", "--deep")
    assert store.bucket.bodies() == before


def test_verify_finds_a_replaced_file(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    key = "run/checkpoint-1/model.safetensors"
    store.put(key, b"x" * len(store.bucket.bodies()[key]))
    run_verb(capsys, "verify", ROOT, code=1)


def test_repair_finishes_a_commit_and_refuses_files(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_unfinished(store, 2)
    assert "was unfinished" in run_verb(capsys, "verify", "--repair", f"{ROOT}/checkpoint-2")
    assert complete_steps(store) == [2]
    with pytest.raises(uc.StorageError, match="in a bucket are not repaired in place"):
        uc.repair(f"{ROOT}/checkpoint-2")
    leave_unfinished(store, 3)
    with uc.Checkpointer(ROOT) as checkpointer:
        (report,) = checkpointer.repair("checkpoint-3")
    assert report.ok
    assert complete_steps(store) == [2, 3]


def test_prune_keeps_rules_in_a_bucket(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1, 2, 3)
    before = store.bucket.bodies()
    run_verb(capsys, "prune", ROOT, "--keep-latest", 1, "--dry-run")
    assert store.bucket.bodies() == before
    text = run_verb(capsys, "prune", ROOT, "--keep-latest", 1)
    assert f"{ROOT}: removed 2 folders" in text
    assert complete_steps(store) == [3]


def test_prune_stale_finishes_a_commit(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_unfinished(store, 2)
    store.begin("run/checkpoint-2/of-an-earlier-attempt")
    text = run_verb(capsys, "prune", ROOT, "--stale", "--dry-run")
    assert "would finish checkpoint-2" in text
    assert complete_steps(store) == []
    text = run_verb(capsys, "prune", ROOT, "--stale", "--older-than-hours", 0)
    assert "finished checkpoint-2  0 B  the commit of save " in text
    assert "aborted uploads to checkpoint-2  0 B  1 upload, begun 0.0 h ago" in text
    assert complete_steps(store) == [2]
    assert store.bucket.open_uploads() == []


def test_prune_stale_drops_an_old_commit_without_uploads(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    leave_unfinished(store, 2)
    abort_all(store)
    assert "is dropped after 24 h" in run_verb(capsys, "prune", ROOT, "--stale", code=1)
    text = run_verb(capsys, "prune", ROOT, "--stale", "--older-than-hours", 0)
    assert "dropped checkpoint-2" in text
    assert scan(root_storage(store), "checkpoint-").commits == ()
    assert complete_steps(store) == [1]


def test_prune_stale_keeps_an_invalid_record(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    store.put(f"run/{names.commit_name('checkpoint-1')}", b"{")
    before = store.bucket.bodies()
    text = run_verb(capsys, "prune", ROOT, "--stale", "--older-than-hours", 0)
    assert "kept checkpoint-1:" in text
    assert store.bucket.bodies() == before


def test_prune_stale_aborts_old_uploads_only(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    store.begin("run/checkpoint-2/model.safetensors")
    store.begin("run/nested-run/checkpoint-2/model.safetensors")
    text = run_verb(capsys, "prune", ROOT, "--stale")
    assert (
        "kept uploads to checkpoint-2: a save may be in progress: 1 upload, begun 0.0 h ago" in text
    )
    assert len(store.bucket.open_uploads()) == 2
    text = run_verb(capsys, "prune", ROOT, "--stale", "--older-than-hours", 0)
    assert "aborted uploads to checkpoint-2" in text
    assert [upload.key for upload in store.bucket.open_uploads()] == [
        "run/nested-run/checkpoint-2/model.safetensors"
    ]


def test_prune_stale_tells_what_it_may_not_list(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1)
    store.before = deny("uploads")
    text = run_verb(capsys, "prune", ROOT, "--stale")
    assert "kept uploads: unfinished uploads cannot be listed" in text


def test_prune_removes_an_incomplete_folder(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1, 2)
    store.delete(f"run/checkpoint-2/{names.MANIFEST}")
    text = run_verb(capsys, "prune", ROOT, "--incomplete")
    assert "changed 0.0 h ago" in text
    run_verb(capsys, "prune", ROOT, "--incomplete", "--older-than-hours", 0)
    assert not [key for key in store.bucket.bodies() if "checkpoint-2/" in key]


def test_inspect_and_diff_read_a_bucket(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    save_to_bucket(1, 2)
    assert "step        1\n" in run_verb(capsys, "inspect", f"{ROOT}/checkpoint-1")
    paths = [f"{ROOT}/checkpoint-{step}" for step in (1, 2)]
    assert "0 tensors equal, 3 different" in run_verb(capsys, "diff", *paths, code=1)


def test_report_reads_the_events_of_a_bucket(
    store: MemoryStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with bucket_manager(interval_steps=1, keep_latest=1) as manager:
        train(manager, range(1, 4))
    page = tmp_path / "page.html"
    run_verb(capsys, "report", ROOT, "-o", page)
    assert "checkpoint-3" in page.read_text()
    run_verb(capsys, "report", f"{ROOT}/checkpoint-3", "-o", page)


def test_watch_follows_a_bucket(
    store: MemoryStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([2, 3])

    def sleep(seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        save_to_bucket(step)

    save_to_bucket(1)
    monkeypatch.setattr(watch.time, "sleep", sleep)
    text = run_verb(capsys, "watch", ROOT)
    assert [text.count(f"{count} checkpoint") for count in (1, 2, 3)] == [1, 1, 1]


def test_path_without_a_checkpoint_is_an_error(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no checkpoints named" in run_verb(capsys, "list", ROOT)
    with pytest.raises(uc.NotFoundError):
        uc.verify(ROOT)
    uc.save(f"{ROOT}/checkpoint-1", model={"a": torch.zeros(2)})
    with pytest.raises(uc.NotFoundError, match=f"did you mean {ROOT}/checkpoint-1"):
        uc.verify(ROOT)

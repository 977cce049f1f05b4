"""Every argument of torch.distributed.checkpoint has its effect here, or is refused by name."""

from __future__ import annotations

import inspect
import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import unified_ckpt as uc
from unified_ckpt import dcp

STATE = {"model": {"w": torch.ones(3)}}


class OwnSavePlanner(torch_dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        return super().transform_object(write_item, object)


class NamedSavePlanner(torch_dcp.DefaultSavePlanner):
    """A subclass that changes nothing of what is written."""

    name = "mine"


class OwnLoadPlanner(torch_dcp.DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None: ...


class OwnWriter(torch_dcp.FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None: ...


def loaded(**arguments: Any) -> bool:
    """Whether a load fills a tensor."""
    target = {"model": {"w": torch.zeros(3)}}
    dcp.load(target, **arguments)
    return bool(target["model"]["w"].all())


@pytest.mark.parametrize(
    "name", ["save", "async_save", "load", "save_state_dict", "load_state_dict"]
)
def test_signatures_are_those_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(dcp, name)).parameters
    theirs = inspect.signature(inspect.unwrap(getattr(torch_dcp, name))).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_and_storages_name_one_folder(kind: Any, tmp_path: Path) -> None:
    path = kind(tmp_path / "1")
    writer = torch_dcp.FileSystemWriter(path, thread_count=4, single_file_per_rank=False)
    dcp.save(STATE, storage_writer=writer, planner=NamedSavePlanner(enable_plan_caching=True))
    assert loaded(checkpoint_id=path)
    assert loaded(storage_reader=torch_dcp.FileSystemReader(path))
    other = str(tmp_path / "2")  # the path of the call is that of the writer from then on
    dcp.save(STATE, checkpoint_id=other, storage_writer=writer)
    assert loaded(checkpoint_id=other)
    dcp.save_state_dict(STATE, torch_dcp.FileSystemWriter(tmp_path / "3"))
    target = {"model": {"w": torch.zeros(3)}}
    dcp.load_state_dict(target, torch_dcp.FileSystemReader(tmp_path / "3"))
    assert target["model"]["w"].all()


def test_overwrite_replaces_or_is_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        dcp.save(STATE, checkpoint_id=tmp_path / "1")
    writer = torch_dcp.FileSystemWriter(tmp_path / "1", overwrite=False)
    for save in (dcp.save, lambda *state, **options: dcp.async_save(*state, **options).result()):
        with pytest.raises(torch_dcp.CheckpointException, match="a free name; omit overwrite"):
            save(STATE, storage_writer=writer)


def test_checkpoints_inside_of_a_checkpoint_stay(tmp_path: Path) -> None:
    for _ in range(2):
        dcp.save(STATE, checkpoint_id=tmp_path / "run")
        dcp.save(STATE, checkpoint_id=tmp_path / "run" / "checkpoint-1")
    for folder in ("run", "run/checkpoint-1"):
        assert loaded(checkpoint_id=tmp_path / folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_files_beside_a_checkpoint_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "logs" / "1.txt").write_text("first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group
        torch_dcp.save(STATE, checkpoint_id=folder)  # an older job's
    for _ in range(2):
        dcp.save(STATE, checkpoint_id=folder)
        assert loaded(checkpoint_id=folder)
        assert (folder / "config.json").read_text() == "{}"
        assert (folder / "logs" / "1.txt").read_text() == "first"
        assert not list(folder.glob("*.distcp"))
        assert "unified_ckpt" in (folder / ".metadata").read_text()  # not torch's
    assert loaded(checkpoint_id=tmp_path / "run-before-1")


@pytest.mark.parametrize("syncs", [True, False])
def test_sync_files_syncs(syncs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    dcp.save(STATE, storage_writer=torch_dcp.FileSystemWriter(tmp_path / "1", sync_files=syncs))
    assert bool(synced) == syncs


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"use_collectives": False}, "use_collectives: got False"),
        ({"planner": OwnSavePlanner()}, "planner: got OwnSavePlanner.*transform_object"),
        ({"planner": torch_dcp.DefaultLoadPlanner()}, "planner: got a DefaultLoadPlanner"),
        ({"storage_writer": OwnWriter}, "storage_writer: got OwnWriter.*finish"),
        (
            {
                "storage_writer": lambda p: torch_dcp.FileSystemWriter(
                    p, _extensions=[cast("Any", object())]
                )
            },
            "storage_writer: got _extensions",
        ),
        ({"storage_writer": torch_dcp.HuggingFaceStorageWriter}, "HuggingFaceStorageWriter"),
        ({"storage_writer": FsspecWriter}, "storage_writer: got a FsspecWriter"),
    ],
)
def test_what_only_dcp_can_do_is_refused(
    arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "1"
    arguments = {k: v(str(folder)) if k == "storage_writer" else v for k, v in arguments.items()}
    if "storage_writer" not in arguments:
        arguments["checkpoint_id"] = folder
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(NotImplementedError, match=text):
            save(STATE, **arguments)
    assert not list(tmp_path.glob("1/*"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"planner": OwnLoadPlanner()}, "planner: got OwnLoadPlanner.*commit_tensor"),
        ({"storage_reader": torch_dcp.HuggingFaceStorageReader}, "HuggingFaceStorageReader"),
        ({"storage_reader": FsspecReader}, "storage_reader: got a FsspecReader"),
    ],
)
def test_loads_refuse_what_only_dcp_can_do(
    arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = str(tmp_path)
    arguments = {k: v(path) if k == "storage_reader" else v for k, v in arguments.items()}
    with pytest.raises(NotImplementedError, match=text):
        dcp.load(dict(STATE), checkpoint_id=path, **arguments)


def test_no_path_is_refused() -> None:
    with pytest.raises(uc.OptionError, match="checkpoint_id: got none"):
        dcp.save(STATE)


def test_stager_is_not_used(tmp_path: Path) -> None:
    """A stager that works in the background makes DCP return two futures."""

    class Own:
        should_synchronize_after_execute = False

        def stage(self, _: Any) -> Any:
            raise AssertionError("is not called")

        def synchronize_staging(self) -> None: ...

        def close(self) -> None: ...

    blocking = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    for stager, kind in ((Own(), AsyncSaveResponse), (blocking, Future)):
        with pytest.warns(UserWarning, match="async_stager: is not used"):
            response: Any = dcp.async_save(
                STATE,
                checkpoint_id=tmp_path / "1",
                async_stager=stager,  # type: ignore[arg-type]
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        assert isinstance(response, kind)
        if isinstance(response, AsyncSaveResponse):
            assert response.staging_completion.result() is None  # type: ignore[func-returns-value]
            response = response.upload_completion
        assert response.result().nbytes == 12


def test_other_names_are_those_of_torch() -> None:
    assert dcp.FileSystemWriter is torch_dcp.FileSystemWriter
    assert dcp.state_dict.get_state_dict is torch_dcp.state_dict.get_state_dict
    assert dcp.state_dict_saver.AsyncSaveResponse is AsyncSaveResponse
    assert dcp.state_dict_saver.save is dcp.save
    assert dcp.state_dict_loader.load is dcp.load
    refused = {"format_utils", "load_sharded_optimizer_state_dict"}
    assert {*dir(torch_dcp)} - {*dir(dcp)} <= refused
    for name in (*refused, "no_such_name"):
        with pytest.raises(AttributeError, match=name):
            getattr(dcp, name)
    assert not hasattr(dcp.state_dict_saver, "_save_state_dict")

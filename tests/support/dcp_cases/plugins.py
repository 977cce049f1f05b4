"""What belongs to DCP's plug-ins: ours refuses it by name, before anything is written."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

from tests.support.dcp_cases.table import Run, case, check, clear, fill, raises

DCP_CAN = "DCP's own plug-ins"


class OtherWriter(FileSystemWriter):
    """Writes something else."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(plan, planner)


class OtherReader(FileSystemReader):
    """Reads something else."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        return super().read_metadata(*arguments, **options)


class SavePlanner(DefaultSavePlanner):
    """Saves something else."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Loads something else."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)


class SamePlanner(DefaultSavePlanner):
    """A subclass that changes nothing."""


def abstract(kind: type) -> Any:
    """An instance of an abstract class whose methods do nothing."""
    methods = {name: lambda *_, **__: None for name in kind.__abstractmethods__}
    return type(f"Own{kind.__name__}", (kind,), methods)()


@case("test_checkpoint, test_fsspec, test_hf_storage, _extension", thin=True, not_dcp=DCP_CAN)
def other_storages_are_refused(run: Run) -> None:
    folder, state = run.folder(), {"w": torch.zeros(2)}
    for text, writer in (
        ("storage_writer", HuggingFaceStorageWriter(str(folder))),
        ("storage_writer", FsspecWriter(str(folder))),
        ("_extensions", FileSystemWriter(folder, _extensions=[Rot13Example()])),
        ("OtherWriter", OtherWriter(folder)),
        ("storage_writer", abstract(StorageWriter)),
    ):
        for call in (run.dcp.save, run.dcp.async_save):
            with raises(text, NotImplementedError):
                call(state, storage_writer=writer)
    assert not folder.exists()
    run.dcp.save(state, checkpoint_id=folder)
    for text, reader in (
        ("storage_reader", HuggingFaceStorageReader(str(folder))),
        ("storage_reader", QuantizedHuggingFaceStorageReader(str(folder))),
        ("storage_reader", FsspecReader(str(folder))),
        ("storage_reader", BroadcastingTorchSaveReader(str(folder))),
        ("OtherReader", OtherReader(folder)),
        ("storage_reader", abstract(StorageReader)),
    ):
        with raises(text, NotImplementedError):
            run.dcp.load(state, storage_reader=reader)


@case("test_planner, test_cooperative_planner, test_format_utils", thin=True, not_dcp=DCP_CAN)
def other_planners_are_refused(run: Run) -> None:
    folder, state = run.folder(), {"w": torch.zeros(2)}
    with raises("planner", NotImplementedError):
        run.dcp.save(state, checkpoint_id=folder, planner=SavePlanner())
    assert not folder.exists()
    run.dcp.save(state, checkpoint_id=folder, planner=SamePlanner())
    for planner in (LoadPlanner(), DynamicMetaLoadPlanner()):
        with raises("planner", NotImplementedError):
            run.dcp.load(state, checkpoint_id=folder, planner=planner)


@case("test_save_load_api (use_collectives)", thin=True, not_dcp=DCP_CAN)
def saves_without_collectives_are_refused(run: Run) -> None:
    for call in (run.dcp.save, run.dcp.async_save):
        with raises("use_collectives", NotImplementedError):
            call({"w": torch.zeros(2)}, checkpoint_id=run.folder(), use_collectives=False)


@case("test_format_utils, test_fsdp_optim_state", not_dcp=DCP_CAN)
def names_of_other_folders_are_refused(run: Run) -> None:
    for name in ("format_utils", "load_sharded_optimizer_state_dict"):
        with raises(name, AttributeError):
            getattr(run.dcp, name)


class Unknown:
    """An object that only pickle can store."""


@case("test_file_system_checkpoint_cpu (objects)", thin=True, not_dcp=DCP_CAN)
def objects_that_need_pickle_are_refused(run: Run) -> None:
    """The error names the key; nothing is written, and the next save succeeds."""
    folder = run.folder()
    for unknown in (Unknown(), Unknown, abs):
        with raises("k.inner"):
            run.dcp.save({"k": {"inner": unknown}, "w": torch.zeros(1)}, checkpoint_id=folder)
    state = {"k": 1, "w": torch.zeros(1)}
    run.dcp.save(fill(state), checkpoint_id=folder)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)


@case("test_file_system_checkpoint (serialization_format)", not_dcp="no reader of DCP reads it")
def serialization_formats_change_nothing(run: Run) -> None:
    folder, state = run.folder(), {"w": torch.zeros(5)}
    writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    run.dcp.save(fill(state), storage_writer=writer)
    run.dcp.load(clear(state), checkpoint_id=folder)
    check(state)


@case("test_compatibility, test_torch_save_to_dcp", thin=True, not_dcp="it is about ours")
def folders_of_torch(run: Run) -> None:
    """A running job changes its import: it loads a folder that DCP saved."""
    import torch.distributed.checkpoint as torch_dcp

    from tests.support.dcp_cases.models import fsdp2, job, put, state_of, two_dims

    folder = run.folder()
    state = fill(state_of(*job(fsdp2))) | {"step": 7, "list": [1, {"a": (2, b"x")}]}
    torch_dcp.save(state, checkpoint_id=folder)
    model, optimizer = job(two_dims, lr=0.2)
    state = clear(state_of(model, optimizer)) | {"step": 0, "list": [0, {"a": None}]}
    run.dcp.load(state, checkpoint_id=folder)
    check(state)
    put(state, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (state["step"], state["list"]) == (7, [1, {"a": (2, b"x")}])

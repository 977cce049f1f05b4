"""The other ways to save and load, each at its best settings.

They are functions over folders; nothing here is timed.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from common import (
    State,
    boxes_of,
    check_equal,
    file_count,
    file_of_tensor,
    locals_of,
    sync_path,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_read
from torch.distributed.checkpoint.state_dict_saver import save as dcp_write

PACKAGES = ("torch", "safetensors", "torch_checkpointing")


def installed() -> dict[str, str | None]:
    """Return the version of each package that takes part; None if it is not installed."""
    return {name: version(name) if find_spec(name) else None for name in PACKAGES}


# ---- durability


def sync_shared(files: Sequence[Path]) -> None:
    """Collective. One fsync for each file, spread over the ranks; the folder by rank 0."""
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        sync_path(path)
    if dist.get_rank() == 0:
        sync_path(files[0].parent)


# ---- torch.save and safetensors.save_file: each rank its own files, no merging, no resharding


def shard_path(folder: Path, part: str, suffix: str) -> Path:
    return folder / f"{part}-rank{dist.get_rank():05d}.{suffix}"


def write_shards(folder: Path, state: State, *, suffix: str, fsync: bool) -> None:
    for part, tensors in (("model", state.model), ("optimizer", state.optimizer)):
        path = shard_path(folder, part, suffix)
        if suffix == "pt":
            torch.save(locals_of(tensors), path)
        else:
            save_file(locals_of(tensors), path, metadata={"format": "pt"})
        if fsync:
            sync_path(path)
    if fsync and dist.get_rank() == 0:
        sync_path(folder)


def read_shards(folder: Path, *, suffix: str, mmap: bool = False) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for part in ("model", "optimizer"):
        path = shard_path(folder, part, suffix)
        tensors |= (
            torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            if suffix == "pt"
            else load_file(path)
        )
    return tensors


def load_shards(folder: Path, state: State, *, suffix: str, mmap: bool = False) -> None:
    stored = read_shards(folder, suffix=suffix, mmap=mmap)
    for name, local in locals_of(state.tensors()).items():
        local.copy_(stored.pop(name))


# ---- torch_checkpointing: each rank its own files


def has_torch_checkpointing() -> bool:
    return find_spec("torch_checkpointing") is not None


def torch_checkpointing_manager(*, background: bool) -> Any:
    """Return a manager that writes through the page cache, as its O_DIRECT fails on ext4 (0.1.1).

    In the background it pins and shares memory where it can, by default.
    """
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    classes = CheckpointManager.Config
    config = classes.with_async_save() if background else classes.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()


def torch_checkpointing_save(folder: Path, state: State, manager: Any) -> None:
    """Save, and sync what was written, which the package does not."""
    manager.save(str(folder), shard_payload(state))
    sync_shards(folder)


def sync_shards(folder: Path) -> None:
    """Collective. Sync the files in the folder once every rank has written its own."""
    dist.barrier()
    sync_shared(sorted(path for path in folder.iterdir() if path.is_file()))


def torch_checkpointing_check(folder: Path, state: State, manager: Any) -> None:
    expected = shard_payload(state)
    target = {
        part: {fqn: torch.zeros_like(local) for fqn, local in tensors.items()}
        for part, tensors in expected.items()
    }
    loaded = manager.load(str(folder), into=target)
    for part, tensors in expected.items():
        check_equal(loaded[part], tensors, where=str(folder))


def shard_payload(state: State) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": locals_of(state.model), "optimizer": locals_of(state.optimizer)}


# ---- whole files into new tensors

HAS_PREFETCH = hasattr(safetensors, "PrefetchLoader")  # 0.9.0rc1


def load_file_backends(device: torch.device) -> list[str | None]:
    """Return the backends of `load_file` that read; a CPU tensor of "mmap" reads nothing yet."""
    if not HAS_PREFETCH:
        return [] if device.type == "cpu" else [None]
    return ["pread"] if device.type == "cpu" else ["mmap", "pread"]


def load_files(
    folder: Path, device: torch.device, *, backend: str | None
) -> dict[str, torch.Tensor]:
    how = {} if backend is None else {"backend": backend}
    tensors: dict[str, torch.Tensor] = {}
    for path, _, _ in merged_files(folder):
        tensors |= load_file(path, device=str(device), **how)
    return tensors


def prefetch_files(
    folder: Path, device: torch.device, *, boxes: Mapping[str, tuple[slice, ...]], threads: int
) -> dict[str, torch.Tensor]:
    """Load this rank's rows of all files to the GPU in one call."""
    loaders = []
    for path, _, _ in merged_files(folder):
        file = safe_open(path, framework="pt", device=str(device))
        rows = {name: boxes[name][0] for name in file.keys()}  # noqa: SIM118, not a dict
        plan = rows if dist.get_world_size() > 1 else None
        loaders.append(file.prefetch(plan, threads=threads))
    return {name: tensor for loader in loaders for name, tensor in loader}


# ---- merged folders: the safetensors package alone judges what any engine wrote


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file, of all parts of a Hugging Face folder."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    return {
        name: file
        for index in indexes
        for name, file in json.loads(index.read_text())["weight_map"].items()
    }


def merged_files(folder: Path) -> list[tuple[Path, int, int]]:
    """Return path, first data byte and data bytes of each file that an index names."""
    ranges = []
    for path in sorted({folder / file for file in weight_map(folder).values()}):
        with path.open("rb") as file:
            first = 8 + struct.unpack("<Q", file.read(8))[0]
        ranges.append((path, first, path.stat().st_size - first))
    return ranges


def read_slices(
    folder: Path, boxes: Mapping[str, tuple[slice, ...]], use: Callable[[str, torch.Tensor], object]
) -> None:
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map(folder).items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                use(name, opened.get_slice(name)[boxes[name]])


def check_merged(folder: Path, state: State, kind: str) -> None:
    """Raise unless the folder has whole tensors that match this rank's memory."""
    tensors = state.tensors()
    expected, boxes, where = locals_of(tensors), boxes_of(tensors, kind), str(folder)
    mapped = weight_map(folder)
    if mapped.keys() != tensors.keys():
        raise RuntimeError(
            f"{where}: the indexes name other tensors: {sorted(mapped.keys() ^ tensors.keys())[:4]}"
        )
    for file in set(mapped.values()):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, not a dict
                if opened.get_slice(name).get_shape() != list(tensors[name].shape):
                    raise RuntimeError(
                        f"{where}: {name} has shape {opened.get_slice(name).get_shape()}, "
                        f"needed {tensors[name].shape}"
                    )
    read_slices(
        folder,
        boxes,
        lambda name, tensor: check_equal({name: tensor}, {name: expected[name]}, where=where),
    )


def load_slices(folder: Path, state: State, kind: str) -> None:
    """Each rank copies its slices of the merged files, as a user would by hand with safetensors."""
    target = locals_of(state.tensors())
    read_slices(
        folder, boxes_of(state.tensors(), kind), lambda name, tensor: target[name].copy_(tensor)
    )


def link_merged(folder: Path, view: Path) -> None:
    """Rank 0 links the files that HuggingFaceStorageReader needs, since it opens every file."""
    if dist.get_rank() == 0:
        view.mkdir()
        for path, _, _ in merged_files(folder):
            (view / path.name).symlink_to(path.resolve())
    dist.barrier()


# ---- torch.distributed.checkpoint


def planner(case: str) -> DefaultSavePlanner:
    """Return a planner class per case, because DCP keys its plan cache by the class name."""
    subclass: type[DefaultSavePlanner] = type(f"Planner_{case}", (DefaultSavePlanner,), {})
    return subclass(enable_plan_caching=True)


def dcp_save(folder: Path, state: State, *, fsync: bool, threads: int) -> None:
    writer = FileSystemWriter(folder, sync_files=fsync, thread_count=threads)
    dcp_write(state.tensors(), storage_writer=writer, planner=planner(f"{fsync}_{threads}"))


def dcp_load(folder: Path, state: State) -> None:
    dcp_read(state.tensors(), storage_reader=FileSystemReader(folder))


def hf_mapping(state: State, *, max_file_bytes: int | None) -> dict[str, int]:
    """Return {name: number of its file, from 1}, with as many files as the merged checkpoint."""
    mapping: dict[str, int] = {}
    for part in (state.model, state.optimizer):
        count, before = (
            file_count(part, max_file_bytes=max_file_bytes),
            max(mapping.values(), default=0),
        )
        chosen = file_of_tensor({name: tensor.nbytes for name, tensor in part.items()}, files=count)
        mapping |= {name: before + 1 + index for name, index in chosen.items()}
    return mapping


def hf_save(
    folder: Path,
    state: State,
    *,
    mapping: Mapping[str, int],
    everywhere: bool,
    threads: int,
    fsync: bool,
) -> None:
    """DCP's way to a merged folder: shards, then consolidation.

    Rank 0 consolidates or, as in torchtitan, every rank. Only the merged files are synced (DCP
    syncs the shards by default and never the result); the shards stay in `sharded/`.
    """
    shards = folder / "sharded"
    writer = HuggingFaceStorageWriter(
        str(shards if everywhere else folder),
        fqn_to_index_mapping=dict(mapping),
        save_distributed=True,
        enable_consolidation=not everywhere,
        thread_count_consolidation=threads,
    )
    writer.sync_files = False
    dcp_write(state.tensors(), storage_writer=writer, planner=planner(f"hf_{everywhere}_{threads}"))
    if everywhere:
        consolidate_safetensors_files_on_every_rank(
            str(shards), str(folder), dict(mapping), num_threads=threads
        )
    if fsync:
        sync_shards(folder)


def hf_load(folder: Path, state: State, *, threads: int) -> None:
    dcp_read(
        state.tensors(), storage_reader=HuggingFaceStorageReader(str(folder), thread_count=threads)
    )

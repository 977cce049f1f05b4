"""The other ways to save and load, each at its best settings, and the raw limit.

They are functions over folders; nothing here is timed.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_int64
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from common import CHUNK, State, boxes_of, check_equal, file_count, file_of_tensor, locals_of
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

SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
IOV_MAX = 1024  # buffers that one pwritev takes


# ---- durability


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_shared(files: Sequence[Path]) -> None:
    """Collective. One fsync for each file, spread over the ranks; the folder by rank 0."""
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        sync_path(path)
    if dist.get_rank() == 0:
        sync_path(files[0].parent)


# ---- raw: each rank's bytes at contiguous positions of as many files


@dataclass(frozen=True, slots=True)
class Piece:
    """One system call: the file, the position, and the memory to write from or read into."""

    path: Path
    start: int
    buffers: list[memoryview]
    nbytes: int


def memory_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    return [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]


def cut(memory: Sequence[memoryview], lengths: Sequence[int]) -> list[list[memoryview]]:
    """Cut one stream of buffers into consecutive groups of `lengths` bytes."""
    groups, queue, position = [], list(memory), 0
    index = 0
    for length in lengths:
        group, missing = [], length
        while missing:
            part = queue[index][position : position + missing]
            group.append(part)
            missing -= len(part)
            position += len(part)
            if position == len(queue[index]):
                index, position = index + 1, 0
        groups.append(group)
    if index != len(queue):
        raise ValueError(
            f"files hold {sum(lengths)} bytes of this rank, its tensors {sum(map(len, queue))}"
        )
    return groups


def raw_pieces(
    files: Sequence[tuple[Path, int, int]], tensors: Mapping[str, torch.Tensor]
) -> list[Piece]:
    """Return this rank's even share of each file, in pieces of at most CHUNK bytes.

    A file is (path, first data byte, data bytes).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    spans = []
    for path, first, nbytes in files:
        start, stop = first + nbytes * rank // ranks, first + nbytes * (rank + 1) // ranks
        spans += [(path, lo, min(CHUNK, stop - lo)) for lo in range(start, stop, CHUNK)]
    groups = cut(memory_of(tensors), [length for _, _, length in spans])
    if max(map(len, groups)) > IOV_MAX:
        raise ValueError(
            f"{max(map(len, groups))} tensors in one chunk: more than one system call takes"
        )
    return [
        Piece(path, start, group, length)
        for (path, start, length), group in zip(spans, groups, strict=True)
    ]


def raw_files(folder: Path, state: State, *, max_file_bytes: int) -> list[tuple[Path, int, int]]:
    """Return as many files as the checkpoint has, with the same bytes, without headers."""
    files = []
    for part, tensors in (("model", state.model), ("optimizer", state.optimizer)):
        total = sum(tensor.nbytes for tensor in tensors.values())
        count = file_count(tensors, max_file_bytes=max_file_bytes)
        cuts = [total // 4096 * number // count * 4096 for number in range(count)] + [total]
        files += [
            (folder / f"{part}-{number}", 0, hi - lo)
            for number, (lo, hi) in enumerate(pairwise(cuts))
        ]
    return files


def raw_write(
    pieces: Sequence[Piece], files: Sequence[Path], *, fsync: bool, early: bool = False
) -> None:
    """Write all pieces.

    `early`: tell the kernel to write each piece to disk at once, while the next is copied.
    """
    opened = {path: os.open(path, os.O_WRONLY | os.O_CREAT) for path in files}
    try:
        for piece in pieces:
            moved(os.pwritev(opened[piece.path], piece.buffers, piece.start), piece)
            if early:
                CDLL(None).sync_file_range(
                    opened[piece.path],
                    c_int64(piece.start),
                    c_int64(piece.nbytes),
                    SYNC_FILE_RANGE_WRITE,
                )
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    if fsync:
        dist.barrier()  # one fsync per file, after its last byte
        sync_shared(files)


def raw_read(pieces: Sequence[Piece]) -> None:
    opened = {
        path: os.open(path, os.O_RDONLY) for path in dict.fromkeys(piece.path for piece in pieces)
    }
    try:
        for piece in pieces:
            moved(os.preadv(opened[piece.path], piece.buffers, piece.start), piece)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def moved(nbytes: int, piece: Piece) -> None:
    if nbytes != piece.nbytes:
        raise OSError(f"{piece.path}: {nbytes} bytes moved at {piece.start}, needed {piece.nbytes}")


def raw_check(pieces: Sequence[Piece]) -> None:
    """Raise unless the files hold this rank's bytes at the positions of the pieces."""
    for piece in pieces:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            if file.read(piece.nbytes) != b"".join(piece.buffers):
                raise RuntimeError(
                    f"{piece.path}: bytes at {piece.start} differ from what was written"
                )


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
            torch.load(path, weights_only=True, mmap=mmap) if suffix == "pt" else load_file(path)
        )
    return tensors


def load_shards(folder: Path, state: State, *, suffix: str, mmap: bool = False) -> None:
    stored = read_shards(folder, suffix=suffix, mmap=mmap)
    for name, local in locals_of(state.tensors()).items():
        local.copy_(stored.pop(name))


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


def check_merged(folder: Path, state: State, kind: str, *, files: int) -> None:
    """Raise unless the folder has whole tensors in `files` files that match this rank's memory."""
    tensors = state.tensors()
    expected, boxes, where = locals_of(tensors), boxes_of(tensors, kind), str(folder)
    mapped = weight_map(folder)
    if mapped.keys() != tensors.keys():
        raise RuntimeError(
            f"{where}: the indexes name other tensors: {sorted(mapped.keys() ^ tensors.keys())[:4]}"
        )
    if len(set(mapped.values())) != files:
        raise RuntimeError(
            f"{where}: {len(set(mapped.values()))} files, raw wrote {files}; set "
            f"--max-file-bytes to compare the same work"
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


def hf_mapping(state: State, *, max_file_bytes: int) -> dict[str, int]:
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
        sync_shared([path for path in sorted(folder.iterdir()) if path.is_file()])


def hf_load(folder: Path, state: State, *, threads: int) -> None:
    dcp_read(
        state.tensors(), storage_reader=HuggingFaceStorageReader(str(folder), thread_count=threads)
    )

"""What all benchmarks share: the state that is saved, the start of ranks, the output of rows.

Nothing here depends on an engine. The state is that of AdamW training in bf16 of a Llama: bf16
parameters and two fp32 moments each, as DTensors on a 1-D mesh. Its bytes are a function of name
and position, so that any rank can check them.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

CHUNK = 16 << 20  # bytes of one read that fills the page cache
KINDS = ("dim0", "inner")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYERS = 6
BYTES_PER_PARAMETER = 2 + 4 * len(MOMENTS)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Parts by name, as `save` and `load` take them, and the bytes of the whole state."""

    model: dict[str, DTensor]
    optimizer: dict[str, DTensor]
    nbytes: int

    def tensors(self) -> dict[str, DTensor]:
        return self.model | self.optimizer


# ---- sizes and shapes: pure


def parse_size(text: str) -> int:
    number, unit = text[:-3], text[-3:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(
            f"size {text!r}: needed a number with KiB, MiB or GiB, as in 64MiB"
        )
    return int(float(number) * UNITS[unit])


def llama_shapes(nbytes: int) -> dict[str, Shape]:
    """Shapes of a Llama of LAYERS layers (grouped heads 4:1, MLP 3.5x) whose training state has
    about `nbytes`.
    """
    parameters = nbytes // BYTES_PER_PARAMETER
    # a layer has about 13 hidden^2, the embedding takes the rest
    hidden = 1 << int(math.log2(math.sqrt(parameters / (13.5 * LAYERS))))
    wide, heads = hidden * 7 // 2, hidden // 4
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (heads, hidden),
        "self_attn.v_proj.weight": (heads, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    in_layers = LAYERS * sum(math.prod(shape) for shape in layer.values())
    vocabulary = max(64, (parameters - in_layers) // hidden // 64 * 64)
    layers = {
        f"model.layers.{index}.{name}": shape
        for index in range(LAYERS)
        for name, shape in layer.items()
    }
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **layers,
        "model.norm.weight": (hidden,),
    }


def equal_shapes(nbytes: int, *, tensors: int) -> dict[str, Shape]:
    """Return shapes of parameters with two moments each: about `tensors` tensors in all."""
    parameters = max(1, tensors // (1 + len(MOMENTS)))
    rows = max(1, nbytes // BYTES_PER_PARAMETER // parameters // 64)
    return {f"experts.{number}.weight": (rows, 64) for number in range(parameters)}


def split_dim(kind: str, shape: Shape) -> int | None:
    """Return the dim that ranks divide among them; None if each holds the whole tensor."""
    if kind == "replica":
        return None
    return 1 if kind == "inner" and len(shape) == 2 else 0


def local_box(shape: Shape, dim: int | None, *, rank: int, ranks: int) -> tuple[Shape, Shape]:
    """Return offsets and shape of the part of `rank`.

    Splits are even, so that every engine moves the same bytes on each rank.
    """
    if dim is None:
        return tuple(0 for _ in shape), shape
    if shape[dim] % ranks:
        raise ValueError(
            f"shape {shape}: dim {dim} does not divide by {ranks} ranks; use a power of two"
        )
    part = shape[dim] // ranks
    offsets = tuple(part * rank if axis == dim else 0 for axis in range(len(shape)))
    return offsets, tuple(part if axis == dim else size for axis, size in enumerate(shape))


def file_count(tensors: Mapping[str, DTensor], *, max_file_bytes: int | None) -> int:
    """Return into how many files DCP's consolidation merges a part, about as many as ours.

    None: as the part's bytes decide.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    by_size = total if total <= 10**9 else min(max(-(-total // 64), 512 * 10**6), 5 * 10**9)
    return -(-total // (max_file_bytes or by_size))


def file_of_tensor(sizes: Mapping[str, int], *, files: int) -> dict[str, int]:
    """Return {tensor name: index of its file}, with files of about equal bytes.

    Tensors keep the order of `sizes`; indices start at 0.
    """
    total, before, chosen = sum(sizes.values()), 0, {}
    for name, nbytes in sizes.items():
        chosen[name] = min(files - 1, (before + nbytes // 2) * files // total)
        before += nbytes
    return chosen


# ---- the state: bytes in memory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, so that NaN compares and every bit counts."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def fill(local: torch.Tensor, *, name: str, shape: Shape, offsets: Shape) -> None:
    """Write the pattern of `name` into the part of it at `offsets`.

    The pattern is a multiplicative hash of the element's flat index.
    """
    seed = zlib.crc32(name.encode()) - (1 << 31)
    out = bits(local).view(local.shape[0], -1)  # [rows, columns of this rank], view
    count = partial(torch.arange, dtype=torch.int32, device=local.device)
    columns = count(out.shape[1]) + (offsets[1] if len(shape) == 2 else 0)
    row_length = shape[1] if len(shape) == 2 else 1
    step = max(1, (4 << 20) // out.shape[1])
    for first in range(0, out.shape[0], step):
        rows = count(first, min(first + step, out.shape[0])) + offsets[0]
        indices = rows[:, None] * row_length + columns[None, :]
        hashes = indices * -1640531527 + seed  # int32, wraps
        out[first : first + step] = hashes >> 16 if out.dtype == torch.int16 else hashes


def make_state(
    nbytes: int, kind: str, mesh: DeviceMesh, *, filled: bool = True, tensors: int | None = None
) -> State:
    """Allocate this rank's part. `filled=False`: zeros, so that every page exists.

    `tensors`: that many of equal size, instead of a Llama's.
    """
    shapes = llama_shapes(nbytes) if tensors is None else equal_shapes(nbytes, tensors=tensors)
    model = {
        fqn: make_tensor(fqn, shape, torch.bfloat16, kind, mesh, filled)
        for fqn, shape in shapes.items()
    }
    optimizer = {
        f"{fqn}/{moment}": make_tensor(f"{fqn}/{moment}", shape, torch.float32, kind, mesh, filled)
        for fqn, shape in shapes.items()
        for moment in MOMENTS
    }
    return State(
        model, optimizer, sum(math.prod(shape) for shape in shapes.values()) * BYTES_PER_PARAMETER
    )


def make_tensor(
    name: str, shape: Shape, dtype: torch.dtype, kind: str, mesh: DeviceMesh, filled: bool
) -> DTensor:
    dim = split_dim(kind, shape)
    offsets, local_shape = local_box(shape, dim, rank=mesh.get_rank(), ranks=mesh.size())
    local = torch.zeros(local_shape, dtype=dtype, device=mesh.device_type)
    local.fill_(0)  # zeros alone may leave the pages untouched
    if filled:
        fill(local, name=name, shape=shape, offsets=offsets)
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


def locals_of(tensors: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """Return this rank's memory, without a copy."""
    return {name: tensor.to_local() for name, tensor in tensors.items()}


def device_of(state: State) -> torch.device:
    return next(iter(locals_of(state.model).values())).device


def flat_bytes(state: State) -> torch.Tensor:
    """Return a copy of this rank's bytes in host memory, uint8[bytes]."""
    parts = [local.view(-1).view(torch.uint8) for local in locals_of(state.tensors()).values()]
    return torch.cat([part.cpu() for part in parts])


def boxes_of(tensors: Mapping[str, DTensor], kind: str) -> dict[str, tuple[slice, ...]]:
    """Return the position of this rank's part in each tensor."""
    boxes = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        offsets, lengths = local_box(
            shape, split_dim(kind, shape), rank=dist.get_rank(), ranks=dist.get_world_size()
        )
        boxes[name] = tuple(
            slice(lo, lo + length) for lo, length in zip(offsets, lengths, strict=True)
        )
    return boxes


def bump(state: State, *, by: int = 1) -> None:
    """Change every element, so that no save can reuse what an earlier one wrote or hashed."""
    for local in locals_of(state.tensors()).values():
        bits(local).add_(by)


def clear(state: State) -> None:
    for local in locals_of(state.tensors()).values():
        local.fill_(0)


def check_equal(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, where: str
) -> None:
    """Raise unless both have the same names, shapes, dtypes and bits."""
    if actual.keys() != expected.keys():
        raise RuntimeError(
            f"{where}: names differ: {sorted(actual.keys() ^ expected.keys())[:4]} …"
        )
    for name, tensor in expected.items():
        other = actual[name]
        if (
            other.dtype != tensor.dtype
            or other.shape != tensor.shape
            or not torch.equal(bits(other).to(tensor.device), bits(tensor))
        ):
            raise RuntimeError(f"{where}: {name}: bytes differ from what was saved")


def check_pattern(state: State, kind: str, *, where: str) -> None:
    """Raise unless the state holds exactly what `make_state` fills in."""
    boxes, tensors = boxes_of(state.tensors(), kind), state.tensors()
    for name, local in locals_of(tensors).items():
        expected = torch.empty_like(local)
        fill(
            expected,
            name=name,
            shape=tuple(tensors[name].shape),
            offsets=tuple(piece.start for piece in boxes[name]),
        )
        check_equal({name: local}, {name: expected}, where=where)


# ---- ranks and rows


def start_ranks(device: str = "cpu") -> DeviceMesh:
    """Return the mesh of all ranks. GPUs are divided among them; they may share one."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    # no tensor on a GPU is sent, so gloo suffices; NCCL allows no two ranks on one GPU
    return DeviceMesh.from_group(dist.group.WORLD, device)


def agree(seconds: float) -> float:
    """Collective. Return the maximum over the ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def launch(
    script: str, arguments: Sequence[str], *, ranks: int, seconds: float | None = None
) -> None:
    """Run `script` on `ranks` gloo processes of this machine; raise if one fails.

    Each has one OpenMP thread, torchrun's default. After `seconds`, all are ended.
    """
    root = str(Path(script).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        script,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as torchrun:
        try:
            code = torchrun.wait(seconds)
        except BaseException:
            torchrun.terminate()  # torchrun then ends its ranks
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def empty(folder: Path) -> None:
    """Collective. Empty `folder`, and leave no dirty page or discard for the next case."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.sync()
        os.sync()  # blocks freed by the first are discarded when its journal commits
    dist.barrier()


def read_ahead(files: Sequence[Path]) -> None:
    """Collective. Read every byte of the files into the page cache."""
    rank, ranks, chunk = dist.get_rank(), dist.get_world_size(), bytearray(CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            for start in range(CHUNK * rank, path.stat().st_size, CHUNK * ranks):
                os.preadv(file.fileno(), [chunk], start)
    dist.barrier()


def drop_caches(files: Sequence[Path]) -> None:
    """Collective. Drop the files from the page cache of this machine.

    A cache below it, such as a host's, is out of reach.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if os.geteuid() == 0:
            Path("/proc/sys/vm/drop_caches").write_text("1")
    dist.barrier()


def write_rows(rows: Sequence[Mapping[str, object]], out: str | None) -> None:
    sys.stdout.write(lines_of(rows))
    sys.stdout.flush()
    if out:
        append_rows(rows, out)


def append_rows(rows: Sequence[Mapping[str, object]], out: str) -> None:
    with Path(out).open("a") as file:
        file.write(lines_of(rows))


def lines_of(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def environment(scratch: Path) -> dict[str, object]:
    """The row that describes the machine and the versions."""
    return {
        "bench": "environment",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "filesystem": filesystem(scratch, Path("/proc/mounts").read_text()),
        "load_average": os.getloadavg()[0],
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def filesystem(path: Path, mounts: str) -> str:
    """Return device, mount point and type of the deepest mount that contains `path`."""
    mounted = [tuple(line.split()[:3]) for line in mounts.splitlines()]
    holding = {
        mount: (device, kind)
        for device, mount, kind in mounted
        if path.resolve().is_relative_to(mount)
    }
    deepest = max(holding, key=len)
    return " ".join([holding[deepest][0], deepest, holding[deepest][1]])


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--size", default="64MiB", help="bytes of the whole state, all ranks: 64MiB, 1GiB, 4GiB"
    )
    arguments.add_argument(
        "--ranks", default="1,2", help="process counts, comma-separated powers of two"
    )
    arguments.add_argument(
        "--kind",
        default="dim0,inner",
        help="dim0: all Shard(0); inner: Shard(1) for matrices; bench_async also: replica",
    )
    arguments.add_argument(
        "--repeats", type=int, default=7, help="rounds; each runs every case once"
    )
    arguments.add_argument(
        "--only",
        default="",
        help="cases to run, comma-separated (their limit is added); bench_machine: goals, as G1,G4",
    )
    arguments.add_argument(
        "--max-file-bytes",
        type=int,
        help="bound of one merged file (default: the size of its part decides); all make as many",
    )
    arguments.add_argument(
        "--scratch",
        default="/tmp/bench",
        help="folder on the disk to measure; a new one is made inside it and deleted",
    )
    arguments.add_argument(
        "--out", default=None, help="file to append the JSON lines to, besides standard output"
    )
    arguments.add_argument("--stamp", default="", help=argparse.SUPPRESS)
    arguments.add_argument("--stage", default="", help=argparse.SUPPRESS)
    return arguments


def needs_unified(only: str) -> bool:
    """Return whether a case of unified is requested; without one it need not be installed."""
    return not only or "unified" in only

"""Measure sizes and times of compressed checkpoints beside plain ones, with one process.

Run: python benchmarks/bench_compressed_saves.py [--size 512MiB] [--repeats 9] [--out FILE].

The state is a Llama in bfloat16 with two moments, with and without master weights; `--size` is that
with masters. Values are random; sizes depend on them by exceptions alone. Each round saves, loads
and saves in the background in every form with masters, in one order, so that drift of the machine
affects all alike. Saves are durable, loads find all files in the page cache. One JSON line for each
form:

- `bytes_per_param`: of the whole folder, with headers, exceptions, indexes, digests and manifest;
- `save_seconds`, `load_seconds`: minima of the rounds. `…_cpu`: CPU seconds of all threads for each
  GiB of the state in memory, minima too; `verified_cpu` the same of a load that verifies;
- `blocked_seconds`: of the call of `save_async` of a Checkpointer that saved before;
  `background_seconds`: until the save is durable;
- `peak_bytes`: host memory of the first background save, at its peak beyond that before it.

A peer saves and loads in the same rounds, if the package zstandard is installed: byte planes of all
float32 tensors with zstd level 1, one thread, a file for each part.

With `--repeats 0`, the state is only saved, loaded and compared: for sizes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import MOMENTS, environment, llama_shapes, parse_size, write_rows
from measure import resident_bytes

import unified_ckpt as uc

BYTES_PER_PARAMETER = 14  # with masters; 10 without
FORMS = ("none", "lossless", "O1", "O2")
WITHOUT_MASTERS = ("none", "O1", "O2")  # lossless is none there

State = dict[str, dict[str, torch.Tensor]]  # arguments of save and load


@dataclass(slots=True)
class Case:
    """The measurements of one form, by round."""

    form: str
    state: State
    target: State
    checkpointer: uc.Checkpointer = field(default_factory=uc.Checkpointer)
    columns: dict[str, object] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the state in memory."""
        return sum(tensor.nbytes for part in self.state.values() for tensor in part.values())

    @property
    def options(self) -> uc.SaveOptions:
        return uc.SaveOptions(compression=self.form)

    def save(self, folder: Path) -> None:
        uc.save(folder, **self.state, options=self.options)

    def load(self, folder: Path) -> None:
        uc.load(folder, **self.target, options=uc.LoadOptions(verify="off"))

    def timed(self, name: str, call: Callable[[], object]) -> None:
        """Call, and note its seconds and its CPU seconds per GiB."""
        gc.collect()
        cpu, started = time.process_time(), time.perf_counter()
        call()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        self.rounds.setdefault(f"{name}_seconds", []).append(seconds)
        self.rounds.setdefault(f"{name}_cpu", []).append(cpu * (1 << 30) / self.nbytes)


class BytePlanes(Case):
    """A save of float32 tensors as byte planes in zstd level 1; other tensors are unchanged."""

    def save(self, folder: Path) -> None:
        compress = importlib.import_module("zstandard").ZstdCompressor(level=1).compress
        folder.mkdir()
        for part, tensors in self.state.items():
            with open(folder / part, "wb") as file:
                for tensor in tensors.values():
                    values = tensor.view(torch.uint8).numpy().reshape(-1, tensor.itemsize)
                    planes = [values]
                    if tensor.dtype == torch.float32:
                        planes = [compress(np.ascontiguousarray(plane)) for plane in values.T]
                    for plane in planes:
                        file.write(memoryview(plane).nbytes.to_bytes(8, "little"))
                        file.write(plane)
                file.flush()
                os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        decompress = importlib.import_module("zstandard").ZstdDecompressor().decompress
        for part, tensors in self.target.items():
            with open(folder / part, "rb") as file:
                for tensor in tensors.values():
                    values = tensor.view(torch.uint8).numpy().reshape(-1, tensor.itemsize)
                    if tensor.dtype == torch.float32:
                        for plane in values.T:
                            body = file.read(int.from_bytes(file.read(8), "little"))
                            plane[:] = np.frombuffer(decompress(body), np.uint8)
                    else:
                        file.seek(8, os.SEEK_CUR)
                        file.readinto(values)


def make_state(nbytes: int) -> State:
    """Return random masters, the model rounded from them, and moments."""
    generator = torch.Generator().manual_seed(0)
    shapes = llama_shapes(nbytes * 10 // BYTES_PER_PARAMETER)  # which counts 10 bytes
    masters, optimizer = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for fqn, shape in shapes.items():
        masters[fqn] = torch.randn(shape, generator=generator)
        first = torch.randn(shape, generator=generator) * 1e-3
        optimizer |= {f"{fqn}/{MOMENTS[0]}": first, f"{fqn}/{MOMENTS[1]}": first.square() + 1e-9}
    model = {fqn: tensor.bfloat16() for fqn, tensor in masters.items()}
    return {"model": model, "master_weights": masters, "optimizer": optimizer}


def make_cases(nbytes: int) -> list[Case]:
    state = make_state(nbytes)
    target = {part: {n: torch.zeros_like(t) for n, t in by.items()} for part, by in state.items()}
    has_zstd = importlib.util.find_spec("zstandard") is not None
    less, less_target = (
        {part: by for part, by in whole.items() if part != "master_weights"}
        for whole in (state, target)
    )
    return [
        *(Case(form, state, target) for form in FORMS),
        *(BytePlanes("byte planes, zstd-1", state, target) for _ in range(has_zstd)),
        *(Case(form, less, less_target) for form in WITHOUT_MASTERS),
    ]


def clear(folder: Path) -> None:
    """Delete a folder, and leave no dirty page or discard for what follows."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    os.sync()


def check(case: Case, folder: Path) -> None:
    """Save, count the folder, load and compare what must come back bit for bit."""
    case.save(folder)
    params = sum(tensor.numel() for tensor in case.state["model"].values())
    folder_nbytes = sum(path.stat().st_size for path in folder.rglob("*"))
    case.columns |= {"params": params, "bytes_per_param": round(folder_nbytes / params, 4)}
    case.load(folder)
    exact = case.state.keys() - ({"optimizer"} if case.form in ("O1", "O2") else set())
    for part in exact:
        for name, tensor in case.state[part].items():
            assert torch.equal(case.target[part][name], tensor), (case.form, part, name)
    clear(folder)


def save_in_background(case: Case, folder: Path) -> None:
    case.timed(
        "blocked",
        lambda: case.checkpointer.save_async(folder, **case.state, options=case.options),
    )
    case.timed("rest", case.checkpointer.wait)
    both = case.rounds["blocked_seconds"][-1] + case.rounds["rest_seconds"][-1]
    case.rounds.setdefault("background_seconds", []).append(both)


def measure_peak(case: Case, folder: Path) -> None:
    """Save in the background for the first time."""
    gc.collect()
    CDLL(None).malloc_trim(0)  # memory that others freed must not hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak, from here on
    before = resident_bytes("VmRSS:")
    save_in_background(case, folder)
    case.columns["peak_bytes"] = resident_bytes("VmHWM:") - before
    case.rounds.clear()
    clear(folder)


def run_round(case: Case, folder: Path) -> None:
    case.timed("save", lambda: case.save(folder))
    case.timed("load", lambda: case.load(folder))
    if isinstance(case, BytePlanes):
        clear(folder)
        return
    case.timed(
        "verified", lambda: uc.load(folder, **case.target, options=uc.LoadOptions(verify="read"))
    )
    clear(folder)
    save_in_background(case, folder)
    clear(folder)


def row(case: Case, size: str) -> dict[str, object]:
    wanted = ("save", "load", "verified", "blocked", "background")
    minima = {
        name: round(min(values), 3)
        for name, values in case.rounds.items()
        if name.split("_")[0] in wanted and name != "blocked_cpu"
    }
    return {
        "bench": "compressed_saves",
        "form": case.form,
        "masters": "master_weights" in case.state,
        "size": size,
        "nbytes": case.nbytes,
        **case.columns,
        "n": len(case.rounds.get("save_seconds", ())),
        **minima,
        "rounds": {name: [round(v, 3) for v in case.rounds[name]] for name in minima},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = make_cases(parse_size(options.size))
    with tempfile.TemporaryDirectory(dir=options.scratch) as root:
        folder = Path(root, "checkpoint")
        write_rows([environment(Path(root))], options.out)
        for case in cases:
            check(case, folder)
        with_masters = [case for case in cases if "master_weights" in case.state]
        timed_cases = with_masters if options.repeats else []
        for case in timed_cases:
            if not isinstance(case, BytePlanes):
                measure_peak(case, folder)
        for _ in range(options.repeats):
            for case in timed_cases:
                run_round(case, folder)
        for case in cases:
            case.checkpointer.close()
    write_rows([row(case, options.size) for case in cases], options.out)


if __name__ == "__main__":
    main()

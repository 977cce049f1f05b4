"""One suite for every Source: each format and each view passes the same checks.

A `Case` is a checkpoint that its own framework wrote, and the tensors that the framework reads from
it. Oracles are torch's own slices, the files' bytes and awscrt's CRC.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stdout
from dataclasses import replace
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from awscrt.checksums import crc64nvme

import unified_ckpt as uc
from tests.support.equality import raw, same
from tests.support.foreign.process_files import (
    mapped_nbytes,
    nbytes_of_calls,
    open_files,
    replaced,
    write_in_pages,
)
from tests.support.foreign.source_cases import (
    Case,
    Key,
    hostile_bodies,
    indices,
    read,
    read_all,
)
from tests.support.foreign.stored_values import bits, leaves, stored_values
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from unified_ckpt.cli.main import main
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.foreign.open import open_source
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES

BLOCK_NBYTES = 1 << 20  # of a digest
PAGES_NBYTES = 64 << 10  # that the kernel maps at a time
VALUE_FIELDS = ("extra", "modules", "groups", "scalars", "metrics")
RENAMED = {"random_state": "python", "numpy_random_seed": "numpy"}  # Accelerate's
# Names and positions, of which the conversion has its own.
NO_STATE = ("*index.json: *", "*/zarr.json: *", "*: params", "*: param_names", "*: names: *")
NAMED_PARTS = ("model", "optimizer", "master_weights")  # arguments of a load


def check_names_and_specs(case: Case) -> None:
    with case.open() as source:
        assert source.format == case.format
        assert {(part, name) for part in source.parts for name in source.names(part)} == set(
            case.tensors
        )
        for (part, name), tensor in case.tensors.items():
            spec = source.specs(part, [name])[name]
            assert spec.shape == tuple(tensor.shape), name
            assert spec.dtype == DTYPE_NAMES[tensor.dtype], name
        view = SourceView(source)
        for part in source.parts:
            assert list(view[part]) == sorted(source.names(part))
            assert source.aliases(part) == case.aliases.get(part, {})
            with pytest.raises(KeyError, match="no such name"):
                view[part]["no such name"]
            for alias, name in source.aliases(part).items():
                assert same(view[part][alias][...], case.tensors[part, name]), alias
        with pytest.raises(uc.NotFoundError, match="no such part"):
            view["no such part"]


def check_tensors_and_slices(case: Case) -> None:
    with case.open() as source:
        view = SourceView(source)
        for (part, name), tensor in case.tensors.items():
            assert same(view[part][name][...], tensor), (part, name)
        draw = random.Random(1)
        for (part, name), tensor in case.sample():
            for index in indices(tuple(tensor.shape), draw):
                assert same(view[part][name][index], tensor[index]), (part, name, index)


def check_byte_ranges(case: Case) -> None:
    """Of any start and length, so that elements and digest blocks are cut."""
    draw = random.Random(2)
    with case.open() as source:
        for key, tensor in case.sample():
            body = raw(tensor)
            edges = [0, len(body), *(draw.randint(0, len(body)) for _ in range(6))]
            for low, high in [sorted(draw.sample(edges, 2)) for _ in range(6)]:
                assert read(source, key, low, high - low) == body[low:high], (key, low, high)


def check_locations(case: Case) -> None:
    with case.open() as source:
        locations = source.locations(list(case.tensors))
        by_key = locations.by_key if locations is not None else {}
        assert not case.located or by_key.keys() == set(case.tensors)
        for key, location in by_key.items():
            buffer = bytearray(case.tensors[key].nbytes)
            locations.storage.read_at(location.file, location.start, memoryview(buffer))
            assert buffer == raw(case.tensors[key]), key


def check_block_digests(case: Case) -> None:
    with case.open() as source:
        for key, crcs in source.block_digests(list(case.tensors)).items():
            body = raw(case.tensors[key])
            if crcs is None:
                assert case.digests != "all", key
            else:
                blocks = range(0, len(body), BLOCK_NBYTES)
                assert list(crcs) == [
                    crc64nvme(body[low : low + BLOCK_NBYTES]) for low in blocks
                ], key


def check_metadata(case: Case) -> None:
    """Its fields are the expected ones, each time."""
    with case.open() as source:
        first, second = source.metadata(), source.metadata()
        assert repr(first) == repr(second)
        for rank in range(first.rank_extras):
            assert repr(source.rank_extra(rank)) == repr(source.rank_extra(rank))
    for name, expected in case.metadata.items():
        actual = first.groups[0][name] if name == "options" else getattr(first, name)
        if name == "extra":
            actual = {key: actual[key] for key in expected}
        assert repr(actual) == repr(expected)


def check_inspect_and_convert(case: Case) -> None:
    """The command line shows it, and a conversion has the same tensors."""
    if case.open_files is not None or case.view is not None:
        return
    with TemporaryDirectory() as folder:
        report = uc.convert(case.path, f"{folder}/c", source=case.options, fsync=False)
        assert report.format == case.format
        assert uc.verify(f"{folder}/c", deep=True).ok
        assert read_all(replace(case, path=Path(folder, "c"), options=uc.SourceOptions())) == {
            key: raw(tensor) for key, tensor in case.tensors.items()
        }
    output = StringIO()
    with redirect_stdout(output):
        assert main(["inspect", str(case.path)]) == 0
    tensor = max(case.tensors.values(), key=lambda tensor: tensor.nbytes)
    shown = f"{DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}"
    assert shown in output.getvalue() or case.options != uc.SourceOptions()


def check_nothing_is_lost(case: Case) -> None:
    """Each value in the files is in a conversion, or its place is named as left out.

    Tensors are accounted for by their elements, which conversions permute, split and join.
    """
    if case.open_files is not None or case.view is not None or case.format == "unified":
        return
    with TemporaryDirectory() as folder:
        target = Path(folder, "c")
        report = uc.convert(case.path, target, source=case.options, fsync=False)
        copied = [path for path in case.files() if (target / path.name).is_file()]
        with closing(open_source(str(target))) as source:
            metadata = source.metadata()
            ranks = [source.rank_extra(rank) for rank in range(metadata.rank_extras)]
        values = [
            *leaves([getattr(metadata, field) for field in VALUE_FIELDS], "", ""),
            *leaves(ranks, "", ""),
            ("", "step", metadata.step),
        ]
    tensors = [value for _, _, value in values if isinstance(value, torch.Tensor)]
    known_bits = {(size, 0) for size in (1, 2, 4, 8)}  # padding
    known_bits |= set[tuple[int, int]]().union(*map(bits, [*case.tensors.values(), *tensors]))
    values += [("", name.rpartition("/")[2], value) for (_, name), value in case.tensors.items()]
    known = set[str]().union(*(traces(name, value) for _, name, value in values))
    lost = [
        label
        for label, name, value in stored_values(case.path, copied)
        if known.isdisjoint(traces(name, value))
        and not (isinstance(value, torch.Tensor) and bits(value) <= known_bits)
        and not any(fnmatch(label, f"*{entry.rstrip('/')}*") for entry in report.left_out)
        and not any(fnmatch(label, pattern) for pattern in (*NO_STATE, *case.no_state))
    ]
    assert not lost, "\n".join(map(str, lost[:40]))


def traces(name: str, value: Any) -> set[str]:
    """Return texts that show a plain value: with its name, and alone if it is unmistakable."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    text = repr(float(value) if isinstance(value, int | float) else value)
    return {f"{RENAMED.get(name, name)} {text}", *([text] if len(text) > 8 else [])}


def check_threads_and_close(case: Case) -> None:
    """Several threads read one Source. Closed, it holds neither files nor mappings of them."""

    def work(source: Source, number: int) -> None:
        draw = random.Random(number)
        for key, tensor in draw.sample(case.sample(), len(case.sample())):
            low, high = sorted(draw.randint(0, tensor.nbytes) for _ in range(2))
            assert read(source, key, low, high - low) == raw(tensor)[low:high], key

    with case.open() as source, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, [source] * 4, range(4)))
    del source
    if open_files(case.path) or mapped_nbytes(case.path):
        gc.collect()
    assert open_files(case.path) == []
    assert mapped_nbytes(case.path) == 0


def check_laziness(case: Case) -> None:
    """Opening, and reading a small slice of the largest tensor, reads little else."""
    for path in case.files():
        write_in_pages(path)
    (part, name), tensor = max(case.tensors.items(), key=lambda entry: entry[1].nbytes)
    index = tuple(slice(size // 2, size // 2 + 2) for size in tensor.shape)
    for _ in range(2):  # the first time imports modules
        before = nbytes_of_calls()
        with case.open() as source:
            for each in source.parts:
                source.specs(each, source.names(each))
            actual = SourceView(source)[part][name][index]
            nbytes = nbytes_of_calls() - before + mapped_nbytes(case.path)
        assert same(actual, tensor[index]), name
    assert nbytes <= case.lazy_nbytes + len(case.files()) * PAGES_NBYTES, (
        f"read {nbytes} bytes; {name} has {tensor.nbytes}"
    )


def check_missing_and_damaged_files(case: Case) -> None:
    """An error of ours names the file, or every byte is as before. A FIFO is not waited for."""
    expected = {key: raw(tensor) for key, tensor in case.tensors.items()}
    for file, path in case.kinds_of_files().items():
        body = path.read_bytes()
        fragments = [path.name, path.parent.name]
        fragments += [word for glob, word in case.words_by_file.items() if fnmatch(file, glob)]
        is_optional = any(fnmatch(file, glob) for glob in case.optional)
        cuts = {0, min(10, len(body)), len(body) // 2, max(len(body) - 1, 0)} - {len(body)}
        zeros = [bytes(len(body))] if body else []
        for content in (None, os.mkfifo, *zeros, *(body[:cut] for cut in sorted(cuts))):
            label = f"{file} is {content!r:.30}"
            actual, message = None, ""
            with replaced(path, content):
                try:
                    actual = read_all(case)
                except uc.CheckpointError as error:
                    message = str(error)
            if actual is None:
                assert any(word in message for word in fragments), f"{label}: {message}"
            elif content in (None, os.mkfifo) and is_optional:
                common = actual.keys() & expected.keys()
                assert all(actual[key] == expected[key] for key in common), label
            else:
                assert actual == expected, label


def check_hostile_files(case: Case) -> None:
    """A pickle that runs a command is refused by name, or never opened. It does not run."""
    expected = {key: raw(tensor) for key, tensor in case.tensors.items()}
    for path in case.kinds_of_files().values():
        trace = case.path.with_name("trace")
        for body in hostile_bodies(path.read_bytes(), trace):
            message = path.name
            with replaced(path, body):
                try:
                    assert read_all(case) == expected, path
                except uc.CheckpointError as error:
                    message = str(error)
            assert path.name in message
            assert not trace.exists()


def check_damaged_bytes(case: Case) -> None:
    """A changed byte of a tensor with digests is an IntegrityError."""
    draw = random.Random(3)
    for path in case.kinds_of_files().values() if case.digests != "none" else ():
        body = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(body[:8], "little")  # of the tensors in a safetensors file
        for position in (start, len(body) - 1) if path.suffix == ".safetensors" else ():
            position = draw.choice([position, draw.randrange(start, len(body))])
            body[position] ^= 1
            with replaced(path, body), pytest.raises(uc.IntegrityError):
                read_all(case)
            body[position] ^= 1


def chunk_of(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """Return a rank's rows or columns, of two ranks."""
    if not tensor.dim():
        return tensor
    dim = min(dim, tensor.dim() - 1)
    chunks = tensor.chunk(2, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def load_shards(case: Case, comm: Comm, dim: int, targets: dict[Key, torch.Tensor]) -> None:
    """Load a rank's rows or columns. `targets`: filled with zeros first, then loaded."""
    shapes = {
        name.rpartition("/")[0] if part == "optimizer" else name: tuple(tensor.shape)
        for (part, name), tensor in case.tensors.items()
        if tensor.dim()
    }
    rules = {name: {"tp": min(dim, len(shape) - 1)} for name, shape in shapes.items()}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for (part, name), tensor in case.tensors.items():
        shape = chunk_of(tensor, dim, comm.rank).shape
        targets[part, name] = torch.zeros(shape, dtype=tensor.dtype)
        parts.setdefault(part, {})[name] = targets[part, name]
    arguments: dict[str, Any] = {part: parts.pop(part) for part in NAMED_PARTS if part in parts}
    arguments |= {
        "parts": parts,
        "layout": uc.Layout(mesh={"tp": 2}, rules=rules, shapes=shapes),
    }
    with make_checkpointer(comm) as checkpointer:
        if case.open_files is None and case.view is None:
            options = uc.LoadOptions(source=case.options, timeout_seconds=60)
            checkpointer.load(case.path, **arguments, options=options)
        else:
            with case.open() as source:
                checkpointer.load(SourceView(source), **arguments)


def check_live_load(case: Case) -> None:
    """Two ranks load rows, then columns."""

    def load(comm: Comm, dim: int) -> None:
        targets: dict[Key, torch.Tensor] = {}
        load_shards(case, comm, dim, targets)
        for key, tensor in case.tensors.items():
            assert same(targets[key], chunk_of(tensor, dim, comm.rank)), (key, comm.rank)

    for dim in (0, 1):
        run_ranks(2, lambda comm, dim=dim: load(comm, dim))


def check_missing_file_on_two_ranks(case: Case) -> None:
    """Both ranks raise the error of one of them, and no target changes."""
    if case.open_files is not None or case.view is not None:
        return
    targets: list[dict[Key, torch.Tensor]] = [{}, {}]
    files = [path for path in case.files() if path.suffix != ".md"]
    with replaced(max(files, key=lambda path: path.stat().st_size), None):
        errors = try_ranks(2, lambda comm: load_shards(case, comm, 0, targets[comm.rank]))
    assert len({type(error) for error in errors}) == 1
    assert isinstance(errors[0], uc.CheckpointError)
    assert not any(tensor.float().any() for local in targets for tensor in local.values())


CHECKS: list[Callable[[Case], None]] = [
    check_names_and_specs,
    check_tensors_and_slices,
    check_byte_ranges,
    check_locations,
    check_block_digests,
    check_metadata,
    check_inspect_and_convert,
    check_nothing_is_lost,
    check_threads_and_close,
    check_laziness,
    check_missing_and_damaged_files,
    check_hostile_files,
    check_damaged_bytes,
    check_live_load,
    check_missing_file_on_two_ranks,
]

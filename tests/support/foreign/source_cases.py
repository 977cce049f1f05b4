"""Checkpoints whose content is known, and how the conformance suite reads them."""

from __future__ import annotations

import os
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch

import unified_ckpt as uc
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.foreign.open import open_source

Key = tuple[str, str]  # (part, name)
LAZY_NBYTES = 256 << 10  # headers and metadata
SAMPLE = 12  # tensors of a case that are sliced


@dataclass(frozen=True)
class Case:
    """A checkpoint and what must be read from it.

    `tensors`: all stored ones, by part and name. `open_files`: opens `path` in place of
    `open_source`; `view`: wraps the opened Source. `digests`: of which tensors there are, those of
    the Source or those "below" a view. `located`: every tensor lies plainly in a file.
    `words_by_file`: what errors say of a missing or damaged file, by its glob, if not its name or
    folder. `optional`: globs of files without which the format has other tensors. `metadata`: some
    fields, some entries of `extra`, and "options" of the first param group. `lazy_nbytes`: what
    opening and reading a small slice may read. `no_state`: globs of values in the files that need
    not be in a conversion: "FILE: KEY: KEY".
    """

    path: Path
    tensors: Mapping[Key, torch.Tensor]
    options: uc.SourceOptions = field(default_factory=uc.SourceOptions)
    format: str = "unified"
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    open_files: Callable[[], AbstractContextManager[Source]] | None = None
    view: Callable[[Source], Source] | None = None
    digests: Literal["all", "below", "none"] = "none"
    located: bool = False
    words_by_file: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    lazy_nbytes: int = LAZY_NBYTES
    no_state: tuple[str, ...] = ()

    @contextmanager
    def open(self) -> Iterator[Source]:
        """Open the files and apply the view."""
        files = (
            closing(open_source(str(self.path), self.options))
            if self.open_files is None
            else self.open_files()
        )
        with files as source, closing(self.view(source) if self.view else source) as opened:
            yield opened

    def files(self) -> list[Path]:
        """Return all files."""
        paths = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return [path for path in paths if path.is_file()]

    def kinds_of_files(self) -> dict[str, Path]:
        """Return a file of each kind, by its name. Names of one kind differ in numbers only."""
        by_kind = {re.sub(r"[0-9a-f]{8,}|\d+", "#", str(path)): path for path in self.files()}
        return {str(path.relative_to(self.path.parent)): path for path in by_kind.values()}

    def sample(self) -> list[tuple[Key, torch.Tensor]]:
        """Return some tensors, the same for each check."""
        entries = sorted(self.tensors.items(), key=lambda entry: entry[0])
        return random.Random(0).sample(entries, min(SAMPLE, len(entries)))


def read(source: Source, key: Key, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    source.read_into(key, start, memoryview(buffer))
    return bytes(buffer)


def read_all(case: Case) -> dict[Key, bytes]:
    """Read every tensor, the metadata and what each rank stored."""
    with case.open() as source:
        for rank in range(source.metadata().rank_extras):
            source.rank_extra(rank)
        specs = {
            (part, name): spec
            for part in source.parts
            for name, spec in source.specs(part, source.names(part)).items()
        }
        return {key: read(source, key, 0, spec.nbytes) for key, spec in specs.items()}


def indices(shape: tuple[int, ...], draw: random.Random) -> Iterator[Any]:
    """Yield ints, ranges that may be empty or reach outside, and an ellipsis."""

    def dim_index(size: int) -> int | slice:
        if size and draw.random() < 0.3:
            return draw.randrange(-size, size)
        low, high = (draw.choice([None, draw.randint(-size - 1, size + 1)]) for _ in range(2))
        return slice(low, high)

    yield from (..., (), tuple(slice(size, None) for size in shape))
    for _ in range(8):
        index = [dim_index(size) for size in shape]
        cut = draw.randint(0, len(shape))
        yield draw.choice([(*index,), (*index[:cut],), (..., *index[cut:]), (*index[:cut], ...)])


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._trace}",)


def hostile_bodies(body: bytes, trace: Path) -> list[bytes]:
    """Return pickles like `body` that run a command; none if it is no pickle."""
    content = {
        "state": {0: Hostile(trace)},
        "param_groups": [],
        "state_dict": {"w": Hostile(trace)},
    }
    archives = []
    for zipped in (True, False):
        buffer = BytesIO()
        torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
        archives.append(buffer.getvalue())
    if body.startswith(b"PK"):
        return archives
    return (
        [pickle.dumps(content, protocol) for protocol in (0, 2, 5)] if body[:1] == b"\x80" else []
    )

"""Readers of pickles and of whole folders, each as a function of bytes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.equality import same
from tests.support.fuzzing import containers
from tests.support.fuzzing.guards import guarded
from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.engine.source.protocol import read_box
from unified_ckpt.errors import CheckpointError
from unified_ckpt.foreign.dcp.metadata import read_entries
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.paddle.lazy_pickles import load_arrays
from unified_ckpt.foreign.restricted_pickle.load import load_pickle, load_tensors, read_torch

_MAX_NBYTES = 1 << 20  # of a tensor that is read: views may repeat elements without storing them
_OPTIONS = "options.json"


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def check_pickle(data: bytes) -> None:
    """A pickle, of which all readers of pickles build plain values only."""
    with _folder() as folder:
        path = folder / "p"
        path.write_bytes(data)
        readers: tuple[Callable[[], Any], ...] = (
            lambda: load_pickle(str(path), {"collections.OrderedDict": dict}),
            lambda: load_arrays(str(path)),
            lambda: read_torch(str(path)),
            lambda: read_entries(str(folder)),
        )
        (folder / ".metadata").write_bytes(data)
        _each(readers, folder)


def check_archived_pickle(data: bytes) -> None:
    """The pickle of an archive of `torch.save` that has two storages."""
    files = {
        "a/data.pkl": data,
        "a/version": b"3\n",
        "a/byteorder": b"little",
        "a/data/0": bytes(48),
        "a/data/1": b"1234",
    }
    check_archive(containers.pack(files, zipfile.ZIP_STORED))


def check_archive(data: bytes) -> None:
    """A file of `torch.save`: we and torch read the same, where both accept it."""
    with _folder() as folder:
        path = folder / "a.pt"
        path.write_bytes(data)
        _each([lambda: _check_as_torch(str(path))], folder)


def _check_as_torch(path: str) -> None:
    value = load_tensors(read_torch(path))
    try:
        expected = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # as for an opcode or an entry that torch.save does not write so
        return
    if not re.search("StorageType|nan|<function", repr(expected)):  # of which none is a value
        assert same(value, expected), f"got {value!r:.300}, expected {expected!r:.300}"


def check_folder(data: bytes) -> None:
    """A checkpoint of any format: all its tensors and values are read, or it is refused."""
    files = containers.unpack(data)
    options = files.pop(_OPTIONS, b"{}")
    if not files:
        return
    with _folder() as folder:
        try:
            path = containers.write(files, folder)
            source_options = uc.SourceOptions(**json.loads(options))
        except (OSError, ValueError, TypeError):  # a name is a file and a folder
            return
        _each([lambda: _read_all(str(path), source_options)], folder)
        if (path / "unified_checkpoint.json").is_file():
            _each([lambda: uc.verify(path, deep=True)], folder)


def _each(readers: Any, folder: Path) -> None:
    for read in readers:
        with guarded(str(folder)):
            try:
                read()
            except CheckpointError:
                continue


def _read_all(path: str, options: uc.SourceOptions) -> None:
    with closing(open_source(path, options)) as source:
        for key, spec in source.all_specs().items():
            if spec.nbytes <= _MAX_NBYTES:
                read_box(source, key, full_box(spec.shape))
        for part in source.parts:
            source.aliases(part)
            source.outliers(part)
        metadata = source.metadata()
        source.block_digests(list(source.all_specs()))
        for rank in range(min(metadata.rank_extras, 3)):
            source.rank_extra(rank)
        assert metadata.step is None or metadata.step >= 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    "pickle": check_pickle,
    "archived-pickle": check_archived_pickle,
    "archive": check_archive,
    "folder": check_folder,
}

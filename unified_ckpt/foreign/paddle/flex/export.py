"""Writes any source as a FlexCheckpoint, a step that PaddleFormers resumes and Paddle loads.

A step has a folder for each group of tensors. Each has the pickled arrays of "ranks", of which
there are as many as files are needed, and the pickled metadata, which says what each file has. One
process writes, in chunks; the step is read back and compared with the source.

How state could be lost: `paddle.distributed.load_state_dict` leaves a tensor unchanged that the
metadata does not list, and reads a wrong one where box and file disagree. So metadata and files
come from one plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from unified_ckpt.core.planning.split_files import file_limit, split_files
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.rewrite.tensors import OnProgress
from unified_ckpt.engine.source.protocol import Source, read_chunks
from unified_ckpt.foreign.files.json import CONFIG, write_json
from unified_ckpt.foreign.paddle.export.paddleformers import as_paddleformers, paddleformers_config
from unified_ckpt.foreign.paddle.export.pickles import StreamedArray, write_pickle
from unified_ckpt.foreign.paddle.export.plan import FLEX, plan_part
from unified_ckpt.foreign.paddle.export.trainer_files import write_pickled_files
from unified_ckpt.foreign.paddle.export.unified import check_written, model_config
from unified_ckpt.foreign.paddle.flex.detect import EMA, PART_FOLDERS
from unified_ckpt.foreign.paddle.flex.source import read_flex
from unified_ckpt.foreign.paddle.lazy_pickles import STATIC_NAMES
from unified_ckpt.foreign.paddle.names import parse_config
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import ConvertOptions, SourceOptions
from unified_ckpt.runtime.torch_state.tensors import torch_dtype
from unified_ckpt.views.derived import DerivedSource

_REQUIRED = (MODEL, OPTIMIZER, MASTER)  # PaddleFormers expects these folders, even empty ones
_SAVED = "saved_signal_0"
_CHUNK_NBYTES = 32 << 20


@dataclass(frozen=True)
class LocalTensorMetadata:
    """What Paddle pickles of a box of a tensor."""

    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalTensorIndex:
    """What Paddle pickles as the key of a box."""

    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool
    flattened_range: tuple[int, int] | None
    replica_id: int | None
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class Metadata:
    """What Paddle pickles of a folder: the boxes of each tensor, and their files."""

    state_dict_metadata: Mapping[str, Sequence[LocalTensorMetadata]]
    storage_metadata: Mapping[LocalTensorIndex, str]
    flat_mapping: Mapping[str, tuple[str, ...]]


_CLASSES: Mapping[type, str] = dict.fromkeys(
    (LocalTensorMetadata, LocalTensorIndex, Metadata),
    "paddle.distributed.flex_checkpoint.dcp.metadata",
)


def write_flex(source: Source, folder: str, options: ConvertOptions, progress: OnProgress) -> None:
    """Write a step with model, optimizer, master weights and averages to a new folder.

    `options.source.config` is the model's config.json, or a folder that has one. A part with more
    than `options.max_file_bytes` has several files. FormatError for what PaddleFormers would not
    resume. IntegrityError if the written tensors differ from the source.
    """
    config = model_config(options)
    model = replace(parse_config(config), vocab_first=True)
    source = as_paddleformers(source, model, parts=(*_REQUIRED, EMA), whole_masters=False)
    exprs = {part: plan_part(source, part, model, FLEX) for part in source.parts}
    view = DerivedSource(source, exprs, aliases={})
    for name, part in PART_FOLDERS.items():
        if part in exprs or part in _REQUIRED:
            group_folder = os.path.join(folder, name)
            os.makedirs(group_folder)
            _write_group(view, part, group_folder, options.max_file_bytes, progress)
    write_pickled_files(folder, source.metadata())
    write_json(os.path.join(folder, CONFIG), paddleformers_config(config, source))
    with open(os.path.join(folder, _SAVED), "x") as file:
        file.write("1")
    with closing(read_flex(folder, SourceOptions(), compare_masters=False)) as written:
        check_written(source, written, exprs, folder)


def _write_group(
    view: Source, part: str, folder: str, max_file_bytes: int | None, progress: OnProgress
) -> None:
    """Write the files of a part, and their metadata."""
    specs = view.specs(part, view.names(part))
    names, sizes = list(specs), [spec.nbytes for spec in specs.values()]
    ranges = split_files(sizes, max_file_bytes=file_limit(sum(sizes), max_file_bytes))
    files = {
        f"{rank}_0.distcp": [names[position] for position in positions]
        for rank, positions in enumerate(ranges or [range(0)])
    }
    metadata = _metadata(specs, files)
    with open(os.path.join(folder, "0.metadata"), "xb") as file:
        write_pickle(file, metadata, classes=_CLASSES)
    for file_name, file_names in files.items():
        arrays: dict[str, object] = {
            name: StreamedArray(
                specs[name], partial(_chunks, view, (part, name), specs[name], progress)
            )
            for name in file_names
        }
        # `paddle.load` makes tensors only of arrays that are named
        static_names = {name: f"generated_tensor_{n}" for n, name in enumerate(file_names)}
        with open(os.path.join(folder, file_name), "xb") as file:
            write_pickle(file, {**arrays, STATIC_NAMES: static_names}, classes={})


def _metadata(specs: Mapping[str, TensorSpec], files: Mapping[str, Sequence[str]]) -> Metadata:
    """Return the metadata of whole tensors in these files."""
    boxes: dict[str, list[LocalTensorMetadata]] = {}
    storage: dict[LocalTensorIndex, str] = {}
    for file, names in files.items():
        for name in names:
            shape, dtype = specs[name].shape, str(torch_dtype(specs[name].dtype))
            offsets = (0,) * len(shape)
            boxes[name] = [LocalTensorMetadata(offsets, shape, dtype.removeprefix("torch."), shape)]
            storage[LocalTensorIndex(name, offsets, False, None, None, shape)] = file
    return Metadata(boxes, storage, {name: (name,) for name in boxes})


def _chunks(view: Source, key: Key, spec: TensorSpec, progress: OnProgress) -> Iterator[memoryview]:
    for chunk in read_chunks(view, key, spec.nbytes, chunk_nbytes=_CHUNK_NBYTES):
        yield chunk
        progress(len(chunk))

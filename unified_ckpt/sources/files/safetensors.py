"""Safetensors files mapped into memory: their tensors as aliases, their headers' metadata. Knows
nothing of what the names mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.format import header, index, names
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.runtime.torch_state.modules import strip_wrappers
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.restricted_pickle.archive import MappedFile
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor


@dataclass(frozen=True, slots=True)
class TensorFile:
    """`entries`: by name, where each tensor lies; together they are the file."""

    path: str
    entries: Mapping[str, header.Entry]
    metadata: Mapping[str, Any]
    mapped: MappedFile

    def dtype(self, name: str) -> torch.dtype:
        dtype = TORCH_DTYPES.get(self.entries[name].dtype)
        if dtype is None:
            raise FormatError(
                f"{self.path}: {name}: has dtype {self.entries[name].dtype}, which this torch lacks"
            )
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """An alias of the file."""
        entry, dtype = self.entries[name], self.dtype(name)
        data = self.mapped.bytes(entry.start, entry.stop - entry.start)
        if not data:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(entry.shape)


def open_tensor_file(path: str) -> TensorFile:
    """FormatError or IntegrityError for a file that is damaged or cut short, IncompleteError where
    there is none.
    """
    if not os.path.isfile(path):
        raise IncompleteError(f"{path}: is missing")
    mapped, size = MappedFile(path), os.path.getsize(path)
    header_bytes = mapped.bytes(
        0, header.header_nbytes(bytes(mapped.bytes(0, min(size, 8))), file_size=size, file=path)
    )
    entries = header.parse_header(header_bytes, file_size=size, file=path)
    return TensorFile(
        path,
        entries,
        parse_json(header_bytes[header.PREFIX_NBYTES :], file=path).get("__metadata__", {}),
        mapped,
    )


def whole_tensors(files: Sequence[TensorFile], *, part: str = MODEL) -> dict[Key, ShardedTensor]:
    """Every tensor of these files, each whole in one, named as in a model that is not compiled.
    FormatError where two are of a name.
    """
    tensors: dict[Key, ShardedTensor] = {}
    for file in files:
        for name, entry in file.entries.items():
            key = part, strip_wrappers(name)
            if key in tensors:
                raise FormatError(f"{file.path}: {name}: is in {tensors[key].shards[0].file} too")
            tensors[key] = sharded_tensor(
                file.dtype(name),
                entry.shape,
                [TensorShard(full_box(entry.shape), partial(file.tensor, name), file.path)],
            )
    return tensors


def open_model_files(root: str, *, part: str = MODEL) -> list[TensorFile]:
    """Hugging Face's safetensors of a part: one file, or those of the index. IncompleteError naming
    what is missing; [] where there are none.
    """
    entries, single, weight_map = (
        set(os.listdir(root)),
        names.file_name(part, number=1, count=1),
        None,
    )
    index_path = os.path.join(root, names.index_name(part))
    if names.index_name(part) in entries:
        with open_binary(index_path) as index_file:
            weight_map = index.parse_index(index_file.read(), file=index_path).weight_map
    if weight_map is None or index.is_stale(
        weight_map, single=single, file_names=entries, folder=root
    ):
        return [open_tensor_file(os.path.join(root, single))] if single in entries else []
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if file not in entries]
    if missing:
        raise IncompleteError(format_list(f"{root}: files are missing", missing))
    opened_files = {file: open_tensor_file(os.path.join(root, file)) for file in files}
    missing_tensors = sorted(
        name for name, file in weight_map.items() if name not in opened_files[file].entries
    )
    if missing_tensors:
        raise IncompleteError(
            format_list(
                f"{root}: tensors that {names.index_name(part)} names are not in their files",
                missing_tensors,
            )
        )
    return list(opened_files.values())

"""Reads foreign safetensors files: tensors that alias mapped files, and header metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.format import header, index, names
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.names import MODEL
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder, open_binary
from unified_ckpt.runtime.torch_state.names import strip_wrappers
from unified_ckpt.views.shards import ShardedTensor, single_shard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file. `entries` are the byte ranges of its tensors, without gaps."""

    path: str
    entries: Mapping[str, header.Entry]
    metadata: Mapping[str, Any]
    mapped: MappedFile

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that aliases the mapped file. FormatError if torch lacks its dtype."""
        from unified_ckpt.runtime.torch_state.tensors import from_bytes, torch_dtype

        entry = self.entries[name]
        data = self.mapped.bytes(entry.start, entry.stop - entry.start)
        with error_prefix(f"{self.path}: {name}"):
            return from_bytes(data, torch_dtype(entry.dtype), entry.shape)


def open_tensor_file(path: str) -> TensorFile:
    """Open one safetensors file and parse its header.

    Raises IncompleteError if it is missing, FormatError or IntegrityError if it is damaged or
    truncated.
    """
    if not is_file(path):
        raise IncompleteError(f"{path}: is missing")
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(header.PREFIX_NBYTES)
        file.seek(0)
        header_bytes = file.read(header.header_nbytes(prefix, file_size=size, file=path))
    entries = header.parse_header(header_bytes, file_size=size, file=path)
    metadata = parse_json(header_bytes[header.PREFIX_NBYTES :], file=path).get("__metadata__", {})
    return TensorFile(path, entries, metadata, MappedFile(path))


def whole_tensors(files: Sequence[TensorFile], *, part: str = MODEL) -> dict[Key, ShardedTensor]:
    """Return every tensor of these files under the name it has in a model that is not compiled.

    Each tensor must be whole in one file. Raises FormatError if two have one name.
    """
    tensors: dict[Key, ShardedTensor] = {}
    for file in files:
        for name, entry in file.entries.items():
            key = part, strip_wrappers(name)
            if key in tensors:
                raise FormatError(f"{file.path}: {name}: is also in {tensors[key].shards[0].file}")
            tensors[key] = single_shard(
                entry.dtype, entry.shape, partial(file.tensor, name), file.path
            )
    return tensors


def weight_files(root: str, single: str, index_name: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the files of a Hugging Face model, and the file of each tensor if there is an index.

    Without an index, or with a stale one, this is the single file, if it exists. IncompleteError
    names missing files.
    """
    entries = set(list_folder(root))
    weight_map: Mapping[str, str] = {}
    if index_name in entries:
        path = os.path.join(root, index_name)
        with open_binary(path) as file:
            weight_map = index.parse_index(file.read(), file=path)
        if index.is_stale(weight_map, single=single, file_names=entries, folder=root):
            weight_map = {}
    files = sorted(set(weight_map.values()))
    raise_if_any(
        IncompleteError,
        f"{root}: files are missing",
        [name for name in files if name not in entries],
    )
    return files or sorted({single} & entries), weight_map


def open_model_files(root: str, *, part: str = MODEL) -> list[TensorFile]:
    """Open the Hugging Face safetensors files of a part: a single file, or those of the index.

    Return [] if there are none. Raises IncompleteError naming missing files or tensors.
    """
    files, weight_map = weight_files(
        root, names.file_name(part, number=1, count=1), names.index_name(part)
    )
    opened_files = {file: open_tensor_file(os.path.join(root, file)) for file in files}
    raise_if_any(
        IncompleteError,
        f"{root}: tensors that {names.index_name(part)} lists are not in their files",
        sorted(name for name, file in weight_map.items() if name not in opened_files[file].entries),
    )
    return list(opened_files.values())

"""Safetensors files mapped into memory: their tensors as aliases, their headers' metadata. Knows nothing of what the names mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.format import header, index, names
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.runtime.torch_state.modules import unwrapped
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.restricted_pickle.archive import Mapped
from unified_ckpt.views.shards import Assembly, Fragment, assembly


@dataclass(frozen=True, slots=True)
class TensorFile:
    """`entries`: by name, where each tensor lies; together they are the file."""

    path: str
    entries: Mapping[str, header.Entry]
    metadata: Mapping[str, Any]
    mapped: Mapped

    def dtype(self, name: str) -> torch.dtype:
        found = TORCH_DTYPES.get(self.entries[name].dtype)
        if found is None:
            raise FormatError(
                f"{self.path}: {name}: has dtype {self.entries[name].dtype}, which this torch lacks"
            )
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """An alias of the file."""
        entry, dtype = self.entries[name], self.dtype(name)
        held = self.mapped.bytes(entry.start, entry.stop - entry.start)
        if not held:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        return torch.frombuffer(held, dtype=torch.uint8).view(dtype).reshape(entry.shape)


def open_tensors(path: str) -> TensorFile:
    """FormatError or IntegrityError for a file that is damaged or cut short, IncompleteError where there is none."""
    if not os.path.isfile(path):
        raise IncompleteError(f"{path}: is missing")
    mapped, size = Mapped(path), os.path.getsize(path)
    head = mapped.bytes(
        0, header.header_nbytes(bytes(mapped.bytes(0, min(size, 8))), file_size=size, file=path)
    )
    entries = header.parse_header(head, file_size=size, file=path)
    return TensorFile(
        path,
        entries,
        parse_json(head[header.PREFIX_NBYTES :], file=path).get("__metadata__", {}),
        mapped,
    )


def whole_tensors(files: Sequence[TensorFile], *, part: str = MODEL) -> dict[Key, Assembly]:
    """Every tensor of these files, each whole in one, named as in a model that is not compiled. FormatError where two are of a name."""
    found: dict[Key, Assembly] = {}
    for file in files:
        for name, entry in file.entries.items():
            key = part, unwrapped(name)
            if key in found:
                raise FormatError(f"{file.path}: {name}: is in {found[key].fragments[0].where} too")
            found[key] = assembly(
                file.dtype(name),
                entry.shape,
                [Fragment(whole(entry.shape), partial(file.tensor, name), file.path)],
            )
    return found


def model_files(root: str, *, part: str = MODEL) -> list[TensorFile]:
    """Hugging Face's safetensors of a part: one file, or those of the index. IncompleteError naming what is missing; [] where there are
    none."""
    there, single, weight_map = (
        set(os.listdir(root)),
        names.file_name(part, number=1, count=1),
        None,
    )
    listing = os.path.join(root, names.index_name(part))
    if names.index_name(part) in there:
        with open_file(listing) as opened:
            weight_map = index.parse_index(opened.read(), file=listing).weight_map
    if weight_map is None or index.is_left_over(weight_map, single=single, there=there, where=root):
        return [open_tensors(os.path.join(root, single))] if single in there else []
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if file not in there]
    if missing:
        raise IncompleteError(listed(f"{root}: files are missing", missing))
    found = {file: open_tensors(os.path.join(root, file)) for file in files}
    lost = sorted(name for name, file in weight_map.items() if name not in found[file].entries)
    if lost:
        raise IncompleteError(
            listed(
                f"{root}: tensors that {names.index_name(part)} names are not in their files", lost
            )
        )
    return list(found.values())

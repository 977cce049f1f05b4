"""Reads Hugging Face's `model.safetensors` from the root that contains DeepSpeed's folder.

The Trainer writes it; under stage 3 it has the only low-precision weights.
"""

from __future__ import annotations

import os
from contextlib import closing

import torch

from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.format import names
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES
from unified_ckpt.sources.restricted_pickle.archive import MappedFile


def read_hf_weights(root: str) -> dict[str, tuple[torch.Tensor, str]]:
    """Return each tensor or alias with the path of its file; {} if there are no weights.

    FormatError or IncompleteError if the files are damaged.
    """
    weight_files = {names.index_name(MODEL), names.file_name(MODEL, number=1, count=1)}
    if not weight_files & set(os.listdir(root)):
        return {}
    with closing(open_path(root, lock=True)) as folder:
        stored_names = folder.names(MODEL)
        specs = folder.specs(MODEL, stored_names)
        locations = folder.catalog({(MODEL, name) for name in stored_names}).locations
    files = {entry.file: MappedFile(os.path.join(root, entry.file)) for entry in locations.values()}
    tensors = {}
    for name, spec in specs.items():
        location = locations[MODEL, name]
        buffer = files[location.file].bytes(location.start, spec.nbytes)
        dtype = TORCH_DTYPES[spec.dtype]
        tensor = (
            torch.frombuffer(buffer, dtype=dtype).view(spec.shape)
            if spec.nbytes
            else torch.empty(spec.shape, dtype=dtype, device="cpu")
        )
        tensors[name] = tensor, files[location.file].path
    return tensors

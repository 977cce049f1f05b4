"""Opens Hugging Face's `pytorch_model*.bin`."""

from __future__ import annotations

import os

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.safetensors import weight_files
from unified_ckpt.foreign.huggingface.detect import BIN, BIN_INDEX
from unified_ckpt.foreign.pytorch.state_dict import ParsedStateDict, parse_state_dict
from unified_ckpt.foreign.restricted_pickle.load import load_tensors, read_torch
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import SourceOptions
from unified_ckpt.views.sharded_source import ShardedSource


def open_bin_folder(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a Hugging Face folder with `pytorch_model.bin`, or with an index of several files.

    IncompleteError names what is missing.
    """
    state_dict = read_bins(root)
    metadata = SourceMetadata(
        extra=load_tensors(state_dict.values) or None,
        modules=load_tensors(state_dict.extra_states),
    )
    return ShardedSource(
        root,
        state_dict.tensors,
        format="huggingface-bin",
        metadata=metadata,
        aliases={MODEL: state_dict.aliases},
    )


def read_bins(root: str) -> ParsedStateDict:
    """Return the merged content of the folder's files. Same errors as `open_bin_folder`."""
    files, weight_map = weight_files(root, BIN, BIN_INDEX)
    merged = ParsedStateDict({}, {}, {}, {})
    for file_name in files or [BIN]:
        path = os.path.join(root, file_name)
        file_state = parse_state_dict(path, read_torch(path))
        raise_if_any(
            FormatError,
            f"{path}: got tensors that belong to another file",
            sorted(
                name
                for part, name in file_state.tensors
                if weight_map.get(name, file_name) != file_name or (part, name) in merged.tensors
            ),
        )
        merged = ParsedStateDict(
            merged.tensors | file_state.tensors,
            merged.aliases | file_state.aliases,
            merged.extra_states | file_state.extra_states,
            merged.values | file_state.values,
        )
    present = (
        {name for _, name in merged.tensors} | merged.aliases.keys() | merged.extra_states.keys()
    )
    raise_if_any(
        IncompleteError,
        f"{root}: tensors in {BIN_INDEX} are in no file",
        sorted(weight_map.keys() - present),
    )
    return merged

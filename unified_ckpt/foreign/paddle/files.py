"""Opens safetensors files of a Paddle folder; their tensors alias mapped files.

A file of format "np" has Paddle's layout. In one of format "pt", PaddleFormers has transposed the
linear layers on a list of the model's class, and no others: fused ones are in Paddle's layout.
Each file has its own format. A step has model weights as "pt" and the rest as "np".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch

from unified_ckpt.core.recipes import External, Recipe, permute
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.foreign.paddle.names import ModelConfig, is_adapter, is_head
from unified_ckpt.foreign.paddle.quantized_moments import MAX_SCALES, MIN_SCALES, SCALES
from unified_ckpt.foreign.paddle.slices import mapped_tensor
from unified_ckpt.foreign.paddle.tensors import STATE_NAMES
from unified_ckpt.format.header import Entry
from unified_ckpt.format.index import parse_index
from unified_ckpt.runtime.storage.regular_files import is_file, open_binary
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

BFLOAT16_AS_UINT16 = "U16"  # numpy lacks bfloat16; Paddle has no uint16 parameters


# `transpose_weight_keys` of PaddleFormers' models
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TRANSPOSED_LAYERS: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "ernie4_5"), _LAYERS),
    "qwen2_moe": (*_LAYERS, "gate", "shared_expert_gate"),
    "qwen3_moe": (*_LAYERS, "gate"),
}


class FlatPiecesError(FormatError):
    """The files have ranges of a sharded optimizer's flat buffers, but not where these belong."""


@dataclass(frozen=True, slots=True)
class PaddleFile:
    """An open safetensors file. `is_pt`: it has format "pt"."""

    tensors: Mapping[str, External]
    is_pt: bool

    def weights(self, model: ModelConfig) -> dict[str, Recipe]:
        """Return the tensors in Paddle's layout. Raises FormatError if the layout is unknown."""
        return {
            name: permute(tensor, (1, 0))
            if self.is_pt and _is_transposed(name, tensor.shape, model)
            else tensor
            for name, tensor in self.tensors.items()
        }

    def states(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, External]:
        """Return optimizer state or master weights, which have Paddle's layout.

        `shapes` are those of the parameters. Raises FormatError for another layout, FlatPiecesError
        for a sharded optimizer's.
        """
        if self.is_pt:
            raise FormatError("got optimizer state of format 'pt', expected 'np'")
        for name, tensor in self.tensors.items():
            owner, _, state_name = name.partition("/")
            is_matrix = len(shapes.get(owner, ())) > 1
            if is_matrix and len(tensor.shape) == 1 and state_name in ("", *STATE_NAMES):
                raise FlatPiecesError(f"{name}: got shape {tensor.shape}, not {shapes[owner]}")
        return dict(self.tensors)


@dataclass(frozen=True, slots=True)
class IndexedFiles:
    """The open files of an index, by name."""

    root: str
    index_file: str
    weight_map: Mapping[str, str]
    files: Mapping[str, PaddleFile]

    def weights(self, model: ModelConfig) -> dict[str, Recipe]:
        """Return the tensors that the index names, in Paddle's layout.

        Raises IncompleteError naming missing tensors, FormatError for those that the index does not
        name, or of unknown layout.
        """
        weights: dict[str, Recipe] = {}
        for name, file in self.files.items():
            with error_prefix(os.path.join(self.root, name)):
                weights |= file.weights(model)
        self._check_names()
        return weights

    def states(
        self, shapes: Mapping[str, tuple[int, ...]], *, absent: Collection[str] = ()
    ) -> dict[str, External]:
        """Return the state that the index names, and the scales of quantized state.

        `absent` are suffixes of names that may be missing. Errors as those of `weights`, and of
        `PaddleFile.states`.
        """
        states: dict[str, External] = {}
        for name, file in self.files.items():
            with error_prefix(os.path.join(self.root, name)):
                states |= file.states(shapes)
        self._check_names(absent)
        return states

    def _check_names(self, absent: Collection[str] = ()) -> None:
        """Compare the tensors of each file with those that the index names in it."""
        for name, file in self.files.items():
            unexpected = [
                tensor_name
                for tensor_name in file.tensors
                if self.weight_map.get(tensor_name) != name
                and not tensor_name.endswith((SCALES, MIN_SCALES, MAX_SCALES))
            ]
            if unexpected:
                path = os.path.join(self.root, name)
                raise FormatError(
                    format_list(
                        f"{path}: {self.index_file} does not have these tensors here", unexpected
                    )
                )
        raise_if_any(
            IncompleteError,
            f"{self.root}: tensors of {self.index_file} are in no file",
            sorted(
                name
                for name, file in self.weight_map.items()
                if name not in self.files[file].tensors and not name.endswith(tuple(absent))
            ),
        )


def open_indexed(root: str, index_file: str) -> IndexedFiles:
    """Open the files that an index names. Raises IncompleteError naming missing ones."""
    path = os.path.join(root, index_file)
    with open_binary(path) as file:
        weight_map = parse_index(file.read(), file=path)
    files = sorted(set(weight_map.values()))
    raise_if_any(
        IncompleteError,
        f"{root}: files of {index_file} are missing",
        [file for file in files if not is_file(os.path.join(root, file))],
    )
    opened = {file: open_tensors(os.path.join(root, file)) for file in files}
    return IndexedFiles(root, index_file, weight_map, opened)


def open_tensors(path: str) -> PaddleFile:
    """Open the tensors of one file.

    Raises FormatError if it is damaged, IntegrityError if it is truncated.
    """
    file = open_tensor_file(path)
    tensors = {name: _stored_tensor(file, name, entry) for name, entry in file.entries.items()}
    return PaddleFile(tensors, file.metadata.get("format") == "pt")


def _is_transposed(name: str, shape: tuple[int, ...], model: ModelConfig) -> bool:
    """Return whether PaddleFormers transposes a weight for a file of format "pt"."""
    is_early_llama = name.startswith("llama.")  # before 1.0: its class had no list
    if len(shape) != 2 or is_adapter(name) or is_head(name) or is_early_llama:
        return False
    layers = _TRANSPOSED_LAYERS.get(model.model_type or "")
    if layers is None:
        raise FormatError(
            f"{name}: got format 'pt' of a model of type {model.model_type!r}, so its layout is "
            f"unknown; expected model_type {', '.join(_TRANSPOSED_LAYERS)}, or format 'np', which "
            "save_to_hf=False writes"
        )
    return name.endswith(tuple(f".{layer}.weight" for layer in layers))


def _stored_tensor(file: TensorFile, name: str, entry: Entry) -> External:
    dtype = torch.bfloat16 if entry.dtype == BFLOAT16_AS_UINT16 else TORCH_DTYPES.get(entry.dtype)
    if dtype is None or prod(entry.shape) * itemsize(entry.dtype) != entry.stop - entry.start:
        raise FormatError(f"{file.path}: {name}: dtype {entry.dtype} is not one that Paddle writes")
    return mapped_tensor(file.mapped, entry.start, dtype, entry.shape)

"""Recognizes formats that are not supported, and says what to do instead; does not import torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import list_folder

_TRANSFORMERS_4 = "load it with transformers 4 ({}) and call save_pretrained"


@dataclass(frozen=True, slots=True)
class UnsupportedFormat:
    """A format that is recognized but not read. `patterns` match names of files."""

    name: str
    title: str
    patterns: tuple[str, ...]
    advice: str

    def matches(self, entries: Collection[str]) -> bool:
        """Return whether an entry belongs to this format."""
        return any(fnmatchcase(entry, pattern) for entry in entries for pattern in self.patterns)


UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        "diffusers",
        "a diffusers pipeline",
        ("model_index.json",),
        "load it with diffusers and save each component with uc.save",
    ),
    UnsupportedFormat(
        "gguf",
        "GGUF (quantized weights of llama.cpp)",
        ("*.gguf",),
        "load it with transformers, from_pretrained(folder, gguf_file=...), "
        "and call save_pretrained",
    ),
    UnsupportedFormat(
        "nemo",
        "NeMo",
        ("*.nemo", "model_weights.ckpt"),
        "export it to Hugging Face with NeMo (nemo.collections.llm.export_ckpt, or "
        "scripts/checkpoint_converters)",
    ),
    UnsupportedFormat(
        "paddle-pickle",
        "a paddle.save pickle",
        ("*.pdparams", "*.pdopt", "*.pdmodel", "*.pdiparams"),
        "pass the folder that holds model_state*.pdparams and config.json, or save it with "
        "PaddleNLP as safetensors",
    ),
    UnsupportedFormat(
        "flax",
        "Flax",
        ("*.msgpack",),
        _TRANSFORMERS_4.format("from_pretrained(folder, from_flax=True)"),
    ),
    UnsupportedFormat(
        "tensorflow",
        "TensorFlow",
        (
            "*.h5",
            "*.keras",
            "saved_model.pb",
            "*.ckpt.index",
            "*.ckpt-*.index",
            "*.data-?????-of-?????",
        ),
        _TRANSFORMERS_4.format("from_pretrained(folder, from_tf=True)"),
    ),
    UnsupportedFormat(
        "onnx",
        "ONNX, a graph for inference",
        ("*.onnx",),
        "pass the folder of the model that it was exported from",
    ),
)


def raise_unsupported(path: str, _options: SourceOptions) -> NoReturn:
    """Raise FormatError naming the format and what to do instead."""
    entries = list_folder(path) or [os.path.split(path)[1]]
    unsupported = next(candidate for candidate in UNSUPPORTED_FORMATS if candidate.matches(entries))
    raise FormatError(f"{path}: {unsupported.title} is not supported; {unsupported.advice}")

"""Formats that are known by their files and not read: each is refused by its name, with what to do
instead. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from unified_ckpt.errors import FormatError
from unified_ckpt.options import SourceOptions

_TRANSFORMERS_4 = "load it with transformers 4 ({}) and call save_pretrained"


@dataclass(frozen=True, slots=True)
class UnsupportedFormat:
    """`patterns`: of a file's name, or of an entry of a folder."""

    name: str
    title: str
    patterns: tuple[str, ...]
    advice: str

    def matches(self, entries: Collection[str]) -> bool:
        """Whether an entry is one of this format's."""
        return any(fnmatchcase(entry, pattern) for entry in entries for pattern in self.patterns)


UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        "diffusers",
        "a pipeline of diffusers",
        ("model_index.json",),
        "load it with diffusers and save each component's module with uc.save",
    ),
    UnsupportedFormat(
        "gguf",
        "GGUF, quantized weights of llama.cpp",
        ("*.gguf",),
        "load it with transformers (from_pretrained(folder, gguf_file=...)) and call save_pretrained",
    ),
    UnsupportedFormat(
        "nemo",
        "NeMo",
        ("*.nemo", "model_weights.ckpt"),
        "export it to Hugging Face with NeMo (nemo.collections.llm.export_ckpt, or its scripts/checkpoint_converters)",
    ),
    UnsupportedFormat(
        "paddle-pickle",
        "a pickle of paddle.save",
        ("*.pdparams", "*.pdopt", "*.pdmodel", "*.pdiparams"),
        "give the folder that has model_state*.pdparams beside config.json, or save it with PaddleNLP as safetensors",
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
        "give the folder of the model that it was exported from",
    ),
)


def refuse(path: str, _options: SourceOptions) -> NoReturn:
    """Raises FormatError with the format's name, and what to do instead."""
    entries = os.listdir(path) if os.path.isdir(path) else [os.path.split(path)[1]]
    unsupported = next(candidate for candidate in UNSUPPORTED_FORMATS if candidate.matches(entries))
    raise FormatError(f"{path}: is {unsupported.title}, which is not read; {unsupported.advice}")

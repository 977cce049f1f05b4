"""Recognizes formats that are not supported, and says what to do instead; does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from unified_ckpt.errors import FormatError

_TRANSFORMERS_4 = "load it with transformers 4 ({}) and call save_pretrained"


@dataclass(frozen=True, slots=True)
class _UnsupportedFormat:
    """A format that is recognized but not read. `patterns` match names of files."""

    title: str
    patterns: tuple[str, ...]
    advice: str

    def matches(self, entries: Collection[str]) -> bool:
        """Return whether an entry belongs to this format."""
        return any(fnmatchcase(entry, pattern) for entry in entries for pattern in self.patterns)


_UNSUPPORTED_FORMATS = (
    _UnsupportedFormat(
        "a diffusers pipeline",
        ("model_index.json",),
        "load it with diffusers and save each component with uc.save",
    ),
    _UnsupportedFormat(
        "GGUF (quantized weights of llama.cpp)",
        ("*.gguf",),
        "load it with transformers, from_pretrained(folder, gguf_file=...), "
        "and call save_pretrained",
    ),
    _UnsupportedFormat(
        "NeMo",
        ("*.nemo", "model_weights.ckpt"),
        "export it to Hugging Face with NeMo (nemo.collections.llm.export_ckpt, or "
        "scripts/checkpoint_converters)",
    ),
    _UnsupportedFormat(
        "a paddle.save pickle",
        ("*.pdparams", "*.pdopt", "*.pdmodel", "*.pdiparams"),
        "pass the folder that holds model_state*.pdparams and config.json, or save it with "
        "PaddleNLP as safetensors",
    ),
    _UnsupportedFormat(
        "Flax",
        ("*.msgpack",),
        _TRANSFORMERS_4.format("from_pretrained(folder, from_flax=True)"),
    ),
    _UnsupportedFormat(
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
    _UnsupportedFormat(
        "ONNX, a graph for inference",
        ("*.onnx",),
        "pass the folder of the model that it was exported from",
    ),
)


def check_supported(path: str, entries: Collection[str]) -> None:
    """Raise FormatError if a file is of a recognized format: which, and what to do instead."""
    for unsupported in _UNSUPPORTED_FORMATS:
        if unsupported.matches(entries):
            raise FormatError(f"{path}: {unsupported.title} is not supported; {unsupported.advice}")

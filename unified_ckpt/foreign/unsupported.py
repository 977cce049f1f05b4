"""Recognizes formats that are not supported, and says what to do instead; does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from unified_ckpt.errors import FormatError

_TRANSFORMERS_4 = "load it with transformers 4 ({}) and call save_pretrained"


# title, patterns of names of files, advice
_UNSUPPORTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "a diffusers pipeline",
        ("model_index.json",),
        "load it with diffusers and save each component with uc.save",
    ),
    (
        "GGUF (quantized weights of llama.cpp)",
        ("*.gguf",),
        "load it with transformers, from_pretrained(folder, gguf_file=...), "
        "and call save_pretrained",
    ),
    (
        "NeMo",
        ("*.nemo", "model_weights.ckpt"),
        "export it to Hugging Face with NeMo (nemo.collections.llm.export_ckpt, or "
        "scripts/checkpoint_converters)",
    ),
    (
        "a paddle.save pickle",
        ("*.pdparams", "*.pdopt", "*.pdmodel", "*.pdiparams"),
        "pass the folder that holds model_state*.pdparams and config.json, or save it with "
        "PaddleNLP as safetensors",
    ),
    (
        "Flax",
        ("*.msgpack",),
        _TRANSFORMERS_4.format("from_pretrained(folder, from_flax=True)"),
    ),
    (
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
    (
        "ONNX, a graph for inference",
        ("*.onnx",),
        "pass the folder of the model that it was exported from",
    ),
)


def check_supported(path: str, entries: Collection[str]) -> None:
    """Raise FormatError if a file is of a recognized format: which, and what to do instead."""
    for title, patterns, advice in _UNSUPPORTED:
        if any(fnmatchcase(entry, pattern) for entry in entries for pattern in patterns):
            raise FormatError(f"{path}: {title} is not supported; {advice}")

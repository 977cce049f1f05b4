"""JSON that others wrote beside their tensors: any value, an object, a model's `config.json`. No torch."""

from __future__ import annotations

import json
import os
from typing import Any

from unified_ckpt.errors import FormatError, NotFoundError

CONFIG = "config.json"


def read_json(path: str) -> Any:
    """FormatError where the file is no JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is damaged, or no JSON: {error}") from error


def read_object(path: str) -> dict[str, Any]:
    """FormatError where the file is no JSON object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds a {type(found).__name__}; needed an object")
    return found


def config_file(path: str) -> str:
    """Where the model's config is that a path names: a file, or a folder that has it."""
    return os.path.join(path, CONFIG) if os.path.isdir(path) else path


def read_config(path: str) -> dict[str, Any]:
    """A Hugging Face `config.json`, or that of a folder. NotFoundError, or FormatError where it is none."""
    file = config_file(path)
    if not os.path.isfile(file):
        raise NotFoundError(f"{file}: there is no such file; needed a Hugging Face config.json")
    return read_object(file)

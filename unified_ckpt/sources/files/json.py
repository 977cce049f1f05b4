"""JSON that others wrote beside their tensors: any value, an object, a model's `config.json`. No
torch.
"""

from __future__ import annotations

import os
from typing import Any

from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.runtime.storage.regular_files import open_binary

CONFIG = "config.json"


def read_json(path: str) -> Any:
    """FormatError where the file is no JSON, or an object in it has a key twice. NaN is a value:
    the Trainer writes it for a loss.
    """
    with open_binary(path) as file:
        return parse_json(file.read(), file=path, constants=True)


def read_json_object(path: str) -> dict[str, Any]:
    """FormatError where the file is no JSON object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a {type(value).__name__}; needed an object")
    return value


def config_path(path: str) -> str:
    """Where the model's config is that a path names: a file, or a folder that has it."""
    return os.path.join(path, CONFIG) if os.path.isdir(path) else path


def read_config(path: str) -> dict[str, Any]:
    """A Hugging Face `config.json`, or that of a folder. NotFoundError, or FormatError where it is
    none.
    """
    config = config_path(path)
    if not os.path.isfile(config):
        raise NotFoundError(f"{config}: there is no such file; needed a Hugging Face config.json")
    return read_json_object(config)

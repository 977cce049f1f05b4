"""Reads and writes JSON files of other frameworks, such as `config.json`; does not import torch."""

from __future__ import annotations

import json
import os
from typing import Any

from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.runtime.storage.regular_files import is_file, is_folder, open_binary

CONFIG = "config.json"


def read_json(path: str) -> Any:
    """Parse a JSON file. NaN is allowed: the Trainer writes it for a loss.

    Raises FormatError if it is not JSON, or an object has a key twice.
    """
    with open_binary(path) as file:
        return parse_json(file.read(), file=path, constants=True)


def read_json_object(path: str) -> dict[str, Any]:
    """Parse a JSON file that holds an object. Raises FormatError otherwise."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value


def write_json(path: str, value: object) -> None:
    """Write a JSON file as Hugging Face does."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")


def config_path(path: str) -> str:
    """Return a model's config file: `path` itself, or `config.json` in it if it is a folder."""
    return os.path.join(path, CONFIG) if is_folder(path) else path


def read_config(path: str) -> dict[str, Any]:
    """Parse a Hugging Face `config.json`, given as a file or its folder.

    Raises NotFoundError if it is missing, and FormatError if it is not a JSON object.
    """
    config = config_path(path)
    if not is_file(config):
        raise NotFoundError(f"{config}: no such file, expected a Hugging Face config.json")
    return read_json_object(config)

"""The formats of other frameworks, and which of them a path holds.

A format is recognized by its file names, without opening a file, except for PaddleNLP's. To add
one, add a folder with `detect.py` and an open function, and an entry to `FORMATS`.
Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.dcp.detect import DCP_METADATA, LIGHTNING_META
from unified_ckpt.foreign.deepspeed.detect import is_deepspeed
from unified_ckpt.foreign.files.listing import PathListing, list_path
from unified_ckpt.foreign.huggingface.detect import (
    HF_SHARD,
    has_safetensors,
    is_accelerate,
    is_bin_folder,
    is_peft,
    is_trainer,
)
from unified_ckpt.foreign.megatron.detect import is_megatron
from unified_ckpt.foreign.nanotron.detect import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.foreign.orbax.detect import is_orbax
from unified_ckpt.foreign.paddle.detect import is_paddle
from unified_ckpt.foreign.paddle.flex.detect import is_flex
from unified_ckpt.foreign.unsupported import check_supported
from unified_ckpt.format import names

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another framework.

    `opener` is "module:function" below `unified_ckpt.foreign`; it is called with the path and
    SourceOptions. `writer` has the same form, and is empty if the format is only read. It is called
    with a source, the path, ConvertOptions, and a function that takes the number of bytes written.
    """

    name: str
    title: str
    matches: Callable[[PathListing], bool]
    opener: str
    writer: str = ""


# The first match wins, so special formats come before general ones.
FORMATS = (
    Format("deepspeed", "DeepSpeed", is_deepspeed, "deepspeed.source:open_deepspeed"),
    Format("megatron", "Megatron-LM", is_megatron, "megatron.source:open_megatron"),
    Format(
        "orbax",
        "Orbax or MaxText",
        is_orbax,
        "orbax.source:open_orbax",
        "orbax.export:write_orbax",
    ),
    Format(
        "paddle-flex",
        "Paddle FlexCheckpoint",
        is_flex,
        "paddle.flex.source:open_flex",
        "paddle.flex.export:write_flex",
    ),
    Format(
        "paddleformers",
        "PaddleFormers",
        lambda _: False,  # "paddle" detects and reads it
        "paddle.source:open_paddle",
        "paddle.export.unified:write_paddleformers",
    ),
    Format(
        "paddle",
        "PaddleNLP",
        is_paddle,
        "paddle.source:open_paddle",
        "paddle.export.unified:write_paddle",
    ),
    Format("trainer", "Hugging Face Trainer", is_trainer, "huggingface.training:open_trainer"),
    Format(
        "nanotron",
        "nanotron",
        lambda listing: not listing.entries.isdisjoint((NANOTRON_LATEST, NANOTRON_META)),
        "nanotron.source:open_nanotron",
    ),
    Format("accelerate", "Accelerate", is_accelerate, "huggingface.training:open_accelerate"),
    Format("peft", "PEFT adapters", is_peft, "huggingface.adapters:open_adapters"),
    Format(
        "huggingface-shards",
        "torch.distributed.checkpoint as safetensors",
        lambda listing: any(map(HF_SHARD.fullmatch, listing.entries)),
        "huggingface.shards:open_hf_shards",
    ),
    Format(
        "lightning-sharded",
        "sharded Lightning",
        lambda listing: {DCP_METADATA, LIGHTNING_META} <= listing.entries,
        "dcp.lightning:open_lightning",
    ),
    Format(
        "dcp",
        "torch.distributed.checkpoint",
        lambda listing: DCP_METADATA in listing.entries,
        "dcp.source:open_dcp",
        "dcp.export:write_dcp",
    ),
    Format(
        "lightning",
        "Lightning",
        lambda listing: listing.is_file and listing.path.endswith(".ckpt"),
        "pytorch.state_dict:open_torch_file",
    ),
    Format(
        "torch",
        "torch.save",
        lambda listing: listing.is_file and listing.path.endswith(_TORCH_SUFFIXES),
        "pytorch.state_dict:open_torch_file",
        "pytorch.export:write_torch",
    ),
    Format(
        "huggingface-bin",
        "Hugging Face (pickled)",
        is_bin_folder,
        "huggingface.bins:open_bin_folder",
    ),
)
_BY_NAME = {known_format.name: known_format for known_format in FORMATS}


def import_function(reference: str) -> Any:
    """Import an opener or a writer. They are imported late, as most import torch."""
    module, function = reference.split(":")
    return getattr(import_module(f"unified_ckpt.foreign.{module}"), function)


def format_title(name: str) -> str:
    """Return a format's title for messages, or the name itself if it is unknown."""
    return _BY_NAME[name].title if name in _BY_NAME else name


def detect_format(path: str, *, format_name: str | None) -> Format | None:
    """Return the foreign format of a local path; None for unified, safetensors and unknown
    files.

    `format_name` skips detection. Raises FormatError if it names no format.
    """
    if format_name is None:
        return match_format(list_path(path))
    if format_name in ("unified", "huggingface"):
        return None
    if format_name not in _BY_NAME:
        valid_names = ["unified", "huggingface", *_BY_NAME]
        raise FormatError(
            format_list(f"format: got {format_name!r}, expected one of these", valid_names)
        )
    return _BY_NAME[format_name]


def match_format(listing: PathListing) -> Format | None:
    """Return the first format that matches a listing, or None as `detect_format` does."""
    folder_name = os.path.split(os.path.abspath(listing.path))[1]
    if listing.entries & names.UNIFIED_FILES or names.is_staging(folder_name):
        return None
    return next((known_format for known_format in FORMATS if known_format.matches(listing)), None)


def check_format_supported(listing: PathListing) -> None:
    """Raise FormatError for a recognized but unsupported format, if nothing readable is there."""
    if not has_safetensors(listing) and not listing.entries & names.UNIFIED_FILES:
        file_names = {os.path.split(listing.path)[1]} if listing.is_file else listing.entries
        check_supported(listing.path, file_names)

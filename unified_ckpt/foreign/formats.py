"""Detects the format of a path from its file names, without opening a file; does not import torch.

To add a format, add an entry to `FORMATS` and a module with its open function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.detect import is_paddle
from unified_ckpt.foreign.unsupported import check_supported
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.regular_files import (
    exists,
    is_file,
    is_folder,
    list_folder,
    probe,
)

DCP_METADATA = ".metadata"
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DEEPSPEED_LATEST = ("latest", "latest_universal")
DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
ORBAX_TREE, ORBAX_STEP = "_METADATA", "_CHECKPOINT_METADATA"  # in an item, and in a step
ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
TRAINER_STATE, ADAPTER_CONFIG = "trainer_state.json", "adapter_config.json"
HF_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_RANK_FILE = re.compile(r"pytorch_model_fsdp_\d+_rank0\.bin")
NANOTRON_LATEST, NANOTRON_META = "latest.txt", "checkpoint_metadata.json"
_ACCELERATE_FILES = {
    "optimizer.bin",
    "random_states_0.pkl",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
    "optimizer_0",
}
_DEEPSPEED_FILES = {"zero_to_fp32.py", "latest"}  # the Trainer keeps these next to its own files
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pdparams")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class PathListing:
    """What a path shows from outside. `entries` are a folder's file names; a file has none."""

    path: str
    is_file: bool
    entries: frozenset[str]


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign format.

    `open_function` is "module:function" below `unified_ckpt.foreign`; it is called with the path
    and SourceOptions.
    """

    name: str
    title: str
    open_function: str
    matches: Callable[[PathListing], bool]


def has_safetensors(listing: PathListing) -> bool:
    """Return whether a folder holds Hugging Face safetensors."""
    return bool(
        listing.entries & {names.index_name("model"), names.file_name("model", number=1, count=1)}
    )


def _is_deepspeed(listing: PathListing) -> bool:
    """Return whether this is a step folder, or a root with `latest` and a step folder.

    A root copied without its step folders, as on model hubs, may still be a model folder.
    """
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in listing.entries):
        return True
    if listing.entries.isdisjoint(DEEPSPEED_LATEST):
        return False
    if DEEPSPEED_LATEST[1] in listing.entries and any(
        probe(is_folder, os.path.join(listing.path, name, "zero")) for name in listing.entries
    ):
        return True
    if "checkpoint" in listing.entries or any(
        name.startswith("global_step") for name in listing.entries
    ):
        return True
    has_weights = has_safetensors(listing) or bool(listing.entries & {BIN, BIN_INDEX})
    return "zero_to_fp32.py" in listing.entries and not has_weights


def list_orbax_items(path: str, entries: Collection[str]) -> list[str]:
    """Return the folders of an Orbax step that hold a tree of arrays."""
    return sorted(name for name in entries if probe(is_file, os.path.join(path, name, ORBAX_TREE)))


def is_orbax(listing: PathListing) -> bool:
    """Return whether this is an Orbax item, a step, or a root of steps."""
    if listing.entries & {ORBAX_TREE, ORBAX_STEP} or list_orbax_items(
        listing.path, [name for name in listing.entries if "." not in name]
    ):
        return True
    return any(
        _is_orbax_step(os.path.join(listing.path, name))
        for name in listing.entries
        if name[-1:].isdigit() or ORBAX_UNFINISHED in name
    )


def _is_orbax_step(path: str) -> bool:
    if is_file(os.path.join(path, ORBAX_STEP)):
        return True
    return bool(list_orbax_items(path, list_folder(path)))


def _is_megatron(listing: PathListing) -> bool:
    """Return whether this is a root with a tracker, or a step of rank folders or torch_dist."""
    has_rank_folders = any(
        name.startswith("mp_rank_") and not name.endswith(".pt") for name in listing.entries
    )
    return (
        MEGATRON_TRACKER in listing.entries
        or has_rank_folders
        or {DCP_METADATA, "metadata.json"} <= listing.entries
    )


def _is_trainer(listing: PathListing) -> bool:
    has_state = not listing.entries.isdisjoint((TRAINER_STATE, "optimizer.pt"))
    return has_state and listing.entries.isdisjoint(_DEEPSPEED_FILES)


def _holds_adapters(listing: PathListing) -> bool:
    """Return whether this has no weights of its own and a folder for each adapter.

    Steps of a training run, whose folders may hold adapters too, do not count.
    """
    if listing.is_file or any(entry.endswith(_WEIGHT_SUFFIXES) for entry in listing.entries):
        return False
    folders = [
        os.path.join(listing.path, entry)
        for entry in listing.entries
        if probe(is_file, os.path.join(listing.path, entry, ADAPTER_CONFIG))
    ]
    training_files = (TRAINER_STATE, names.MANIFEST)
    return bool(folders) and not any(
        exists(os.path.join(folder, file)) for folder in folders for file in training_files
    )


def _is_accelerate(listing: PathListing) -> bool:
    return bool(listing.entries & _ACCELERATE_FILES) or any(
        map(_RANK_FILE.fullmatch, listing.entries)
    )


# The first match wins, so special formats come before general ones.
FORMATS = (
    Format("deepspeed", "DeepSpeed", "deepspeed.source:open_deepspeed", _is_deepspeed),
    Format("megatron", "Megatron-LM", "megatron.source:open_megatron", _is_megatron),
    Format("orbax", "Orbax or MaxText", "orbax.source:open_orbax", is_orbax),
    Format(
        "paddle",
        "PaddleNLP",
        "paddle.source:open_paddle",
        lambda listing: is_paddle(listing.path, listing.entries),
    ),
    Format("trainer", "Hugging Face Trainer", "huggingface.training:open_trainer", _is_trainer),
    Format(
        "nanotron",
        "nanotron",
        "nanotron.source:open_nanotron",
        lambda listing: bool(listing.entries & {NANOTRON_LATEST, NANOTRON_META}),
    ),
    Format("accelerate", "Accelerate", "huggingface.training:open_accelerate", _is_accelerate),
    Format(
        "peft",
        "PEFT adapters",
        "huggingface.adapters:open_adapters",
        lambda listing: ADAPTER_CONFIG in listing.entries or _holds_adapters(listing),
    ),
    Format(
        "huggingface-shards",
        "torch.distributed.checkpoint as safetensors",
        "huggingface.shards:open_hf_shards",
        lambda listing: any(map(HF_SHARD.fullmatch, listing.entries)),
    ),
    Format(
        "lightning-sharded",
        "sharded Lightning",
        "dcp.lightning:open_lightning",
        lambda listing: {DCP_METADATA, "meta.pt"} <= listing.entries,
    ),
    Format(
        "dcp",
        "torch.distributed.checkpoint",
        "dcp.source:open_dcp",
        lambda listing: DCP_METADATA in listing.entries,
    ),
    Format(
        "lightning",
        "Lightning",
        "pytorch.state_dict:open_torch_file",
        lambda listing: listing.is_file and listing.path.endswith(".ckpt"),
    ),
    Format(
        "torch",
        "torch.save",
        "pytorch.state_dict:open_torch_file",
        lambda listing: listing.is_file and listing.path.endswith(_TORCH_SUFFIXES),
    ),
    Format(
        "huggingface-bin",
        "Hugging Face (pickled)",
        "pytorch.state_dict:open_bin_folder",
        lambda listing: bool(listing.entries & {BIN, BIN_INDEX}) and not has_safetensors(listing),
    ),
)


def format_title(name: str) -> str:
    """Return a format's title for messages, or the name itself if it is unknown."""
    return next((known_format.title for known_format in FORMATS if known_format.name == name), name)


def list_path(path: str) -> PathListing:
    """List a path without opening any file in it."""
    return PathListing(path, is_file(path), frozenset(list_folder(path)))


def detect_format(path: str, *, format_name: str | None) -> Format | None:
    """Return the foreign format of a local path; None for unified, safetensors and unknown
    files.

    `format_name` skips detection. Raises FormatError if it names no format.
    """
    if format_name is not None:
        if format_name in ("unified", "huggingface"):
            return None
        by_name = {known_format.name: known_format for known_format in FORMATS}
        if format_name not in by_name:
            valid_names = ["unified", "huggingface", *by_name]
            raise FormatError(
                format_list(f"format: got {format_name!r}, expected one of these", valid_names)
            )
        return by_name[format_name]
    return match_format(list_path(path))


def match_format(listing: PathListing) -> Format | None:
    """Return the first format that matches a listing, or None as `detect_format` does."""
    folder_name = os.path.split(os.path.abspath(listing.path))[1]
    if listing.entries & names.UNIFIED_FILES or names.is_staging(folder_name):
        return None
    return next((known_format for known_format in FORMATS if known_format.matches(listing)), None)


def check_format_supported(path: str) -> None:
    """Raise FormatError for a recognized but unsupported format, if nothing readable is there."""
    listing = list_path(path)
    if not has_safetensors(listing) and not listing.entries & names.UNIFIED_FILES:
        check_supported(path, {os.path.split(path)[1]} if listing.is_file else listing.entries)

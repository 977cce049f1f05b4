"""Recognizes folders of transformers, Accelerate and PEFT by file names; does not import torch."""

from __future__ import annotations

import os
import re

from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.regular_files import exists, is_file, probe

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TRAINER_STATE, ADAPTER_CONFIG = "trainer_state.json", "adapter_config.json"
HF_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_RANK_FILE = re.compile(r"pytorch_model_fsdp_\d+_rank0\.bin")
_ACCELERATE_FILES = {
    "optimizer.bin",
    "random_states_0.pkl",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
    "optimizer_0",
}
_DEEPSPEED_FILES = {"zero_to_fp32.py", "latest"}  # the Trainer keeps these next to its own files
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pdparams")


def has_safetensors(listing: PathListing) -> bool:
    """Return whether a folder holds Hugging Face safetensors."""
    return bool(
        listing.entries & {names.index_name("model"), names.file_name("model", number=1, count=1)}
    )


def is_bin_folder(listing: PathListing) -> bool:
    """Return whether a folder holds pickled weights, and no safetensors."""
    return bool(listing.entries & {BIN, BIN_INDEX}) and not has_safetensors(listing)


def is_trainer(listing: PathListing) -> bool:
    """Return whether this is a step of a Trainer without DeepSpeed."""
    has_state = not listing.entries.isdisjoint((TRAINER_STATE, "optimizer.pt"))
    return has_state and listing.entries.isdisjoint(_DEEPSPEED_FILES)


def is_accelerate(listing: PathListing) -> bool:
    """Return whether this is a folder of `Accelerator.save_state`."""
    return bool(listing.entries & _ACCELERATE_FILES) or any(
        map(_RANK_FILE.fullmatch, listing.entries)
    )


def is_peft(listing: PathListing) -> bool:
    """Return whether this is an adapter, or has no weights and a folder for each adapter.

    Steps of a training run, whose folders may hold adapters too, do not count.
    """
    if ADAPTER_CONFIG in listing.entries:
        return True
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

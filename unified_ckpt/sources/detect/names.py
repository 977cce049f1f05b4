"""How a path is known to hold each of the formats of others: by names of files, without reading
any. No torch.

A new format is a line in `FORMATS` and a module with its opener.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.commit import MARKER
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.sources.detect.paddle import is_paddle
from unified_ckpt.sources.detect.refused import UNSUPPORTED_FORMATS, UnsupportedFormat

DCP_METADATA = ".metadata"
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DEEPSPEED_LATEST = ("latest", "latest_universal")
DEEPSPEED_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
ORBAX_TREE, ORBAX_STEP = "_METADATA", "_CHECKPOINT_METADATA"  # of an item: its tree; of a step
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
_DEEPSPEED_FILES = {"zero_to_fp32.py", "latest"}  # in a Trainer's folder, beside its own files
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class PathListing:
    """What is seen of a path from outside: `entries` of a folder, none of a file."""

    path: str
    is_file: bool
    entries: frozenset[str]


@dataclass(frozen=True, slots=True)
class Format:
    """`open_function`: "module:function" of `sources`, called with the path and SourceOptions."""

    name: str
    title: str
    open_function: str
    matches: Callable[[PathListing], bool]


def has_safetensors(listing: PathListing) -> bool:
    """Whether it is a folder with Hugging Face's safetensors."""
    return bool(
        listing.entries & {names.index_name("model"), names.file_name("model", number=1, count=1)}
    )


def _is_deepspeed(listing: PathListing) -> bool:
    """The folder of a step; or one with `latest` and a step's folder. A copy without the latter, as
    on hubs, may still be a model's.
    """
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in listing.entries):
        return True
    if DEEPSPEED_LATEST[1] in listing.entries and any(
        os.path.isdir(os.path.join(listing.path, name, "zero")) for name in listing.entries
    ):
        return True
    has_step_folder = "checkpoint" in listing.entries or any(
        name.startswith("global_step") for name in listing.entries
    )
    has_only_optimizer = (
        "zero_to_fp32.py" in listing.entries
        and not has_safetensors(listing)
        and not listing.entries & {BIN, BIN_INDEX}
    )
    return (has_step_folder or has_only_optimizer) and not listing.entries.isdisjoint(
        DEEPSPEED_LATEST
    )


def list_orbax_items(path: str, entries: Collection[str]) -> list[str]:
    """The folders in a step of Orbax that hold a tree of arrays."""
    return sorted(name for name in entries if os.path.isfile(os.path.join(path, name, ORBAX_TREE)))


def is_orbax(listing: PathListing) -> bool:
    """Whether it is an item, a step, or a root of steps."""
    if listing.entries & {ORBAX_TREE, ORBAX_STEP} or list_orbax_items(
        listing.path, [name for name in listing.entries if "." not in name]
    ):
        return True
    step_names = [
        name for name in listing.entries if name[-1:].isdigit() or ORBAX_UNFINISHED in name
    ]
    return any(
        os.path.isfile(os.path.join(listing.path, name, ORBAX_STEP))
        or _has_orbax_items(os.path.join(listing.path, name))
        for name in step_names
    )


def _has_orbax_items(path: str) -> bool:
    return os.path.isdir(path) and bool(list_orbax_items(path, os.listdir(path)))


def _is_megatron(listing: PathListing) -> bool:
    """A root with its tracker, a step's folder of ranks, or of torch_dist."""
    has_rank_folders = any(
        name.startswith("mp_rank_") and not name.endswith(".pt") for name in listing.entries
    )
    return (
        MEGATRON_TRACKER in listing.entries
        or has_rank_folders
        or {DCP_METADATA, "metadata.json"} <= listing.entries
    )


def _is_trainer(listing: PathListing) -> bool:
    return (
        bool(listing.entries & {TRAINER_STATE, "optimizer.pt"})
        and not listing.entries & _DEEPSPEED_FILES
    )


def _is_accelerate(listing: PathListing) -> bool:
    return bool(listing.entries & _ACCELERATE_FILES) or any(
        map(_RANK_FILE.fullmatch, listing.entries)
    )


# The first that knows a path has it: what is special stands before what is general.
FORMATS = (
    Format("deepspeed", "DeepSpeed", "deepspeed.source:open_deepspeed", _is_deepspeed),
    Format("megatron", "Megatron-LM", "megatron.source:open_megatron", _is_megatron),
    Format("orbax", "Orbax, MaxText's too", "orbax.source:open_orbax", is_orbax),
    Format(
        "paddle",
        "PaddleNLP",
        "paddle.source:open_paddle",
        lambda at: is_paddle(at.path, at.entries),
    ),
    Format("trainer", "Hugging Face Trainer", "huggingface.training:open_trainer", _is_trainer),
    Format(
        "nanotron",
        "nanotron",
        "nanotron.source:open_nanotron",
        lambda at: bool(at.entries & {NANOTRON_LATEST, NANOTRON_META}),
    ),
    Format("accelerate", "Accelerate", "huggingface.training:open_accelerate", _is_accelerate),
    Format(
        "peft",
        "adapters (PEFT)",
        "huggingface.adapters:open_adapters",
        lambda at: ADAPTER_CONFIG in at.entries,
    ),
    Format(
        "huggingface-shards",
        "safetensors of torch.distributed.checkpoint",
        "huggingface.shards:open_hf_shards",
        lambda at: any(map(HF_SHARD.fullmatch, at.entries)),
    ),
    Format(
        "lightning-sharded",
        "Lightning, sharded",
        "pytorch.lightning:open_lightning",
        lambda at: {DCP_METADATA, "meta.pt"} <= at.entries,
    ),
    Format(
        "dcp",
        "torch.distributed.checkpoint",
        "pytorch.dcp:open_dcp",
        lambda at: DCP_METADATA in at.entries,
    ),
    Format(
        "lightning",
        "Lightning",
        "pytorch.state_dict:open_torch_file",
        lambda at: at.is_file and at.path.endswith(".ckpt"),
    ),
    Format(
        "torch",
        "a file of torch.save",
        "pytorch.state_dict:open_torch_file",
        lambda at: at.is_file and at.path.endswith(_TORCH_SUFFIXES),
    ),
    Format(
        "huggingface-bin",
        "Hugging Face, pickled",
        "pytorch.state_dict:open_bin_folder",
        lambda at: bool(at.entries & {BIN, BIN_INDEX}) and not has_safetensors(at),
    ),
)


def _unsupported_format(unsupported: UnsupportedFormat) -> Format:
    """As a format whose opener raises."""
    return Format(
        unsupported.name,
        unsupported.title,
        "detect.refused:refuse",
        lambda listing: unsupported.matches(
            {os.path.split(listing.path)[1]} if listing.is_file else listing.entries
        ),
    )


_UNSUPPORTED = tuple(map(_unsupported_format, UNSUPPORTED_FORMATS))


def format_title(name: str) -> str:
    """For people; of a name that is none, itself."""
    return next((known_format.title for known_format in FORMATS if known_format.name == name), name)


def list_path(path: str) -> PathListing:
    return PathListing(
        path,
        os.path.isfile(path),
        frozenset(os.listdir(path)) if os.path.isdir(path) else frozenset(),
    )


def detect_format(path: str, *, format_name: str | None) -> Format | None:
    """The format of a local path that somebody else wrote, `format_name` where it is; None for
    ours, for Hugging Face's safetensors, and for what is not known. FormatError where `format_name`
    is no format.
    """
    if format_name is not None:
        if format_name in ("unified", "huggingface"):
            return None
        requested = next(
            (known_format for known_format in FORMATS if known_format.name == format_name), None
        )
        if requested is None:
            valid_names = [
                "unified",
                "huggingface",
                *(known_format.name for known_format in FORMATS),
            ]
            raise FormatError(
                format_list(f"{format_name}: is no format that is read; known are", valid_names)
            )
        return requested
    return match_format(list_path(path))


def match_format(listing: PathListing) -> Format | None:
    """The format of what was looked at; None as of `detect_format`."""
    unified_files = {names.MANIFEST, names.DIGESTS, MARKER}
    if listing.entries & unified_files or names.is_staging(
        os.path.split(os.path.abspath(listing.path))[1]
    ):  # or what is left of one of ours
        return None
    return next((known_format for known_format in FORMATS if known_format.matches(listing)), None)


def detect_unsupported(path: str) -> Format | None:
    """The format of a path that holds nothing that is read, and is known: opening it says why. None
    for ours and for safetensors.
    """
    listing = list_path(path)
    is_readable = has_safetensors(listing) or listing.entries & {
        names.MANIFEST,
        names.DIGESTS,
        MARKER,
    }
    return (
        None
        if is_readable
        else next(
            (unsupported for unsupported in _UNSUPPORTED if unsupported.matches(listing)), None
        )
    )

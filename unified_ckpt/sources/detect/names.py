"""How a path is known to hold each of the formats of others: by names of files, without reading any. No torch.

A new format is a line in `FORMATS` and a module with its opener.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from unified_ckpt.core.text import listed
from unified_ckpt.engine.folder.commit import PROBE
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.sources.detect.paddle import is_paddle
from unified_ckpt.sources.detect.refused import REFUSED, Refused

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
_ACCELERATE = {
    "optimizer.bin",
    "random_states_0.pkl",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
    "optimizer_0",
}
_DEEPSPEED = {"zero_to_fp32.py", "latest"}  # in a Trainer's folder, beside its own files
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Looked:
    """What is seen of a path from outside: `entries` of a folder, none of a file."""

    path: str
    is_file: bool
    entries: frozenset[str]


@dataclass(frozen=True, slots=True)
class Format:
    """`opener`: "module:function" of `sources`, called with the path and SourceOptions."""

    name: str
    title: str
    opener: str
    known: Callable[[Looked], bool]


def has_safetensors(at: Looked) -> bool:
    """Whether it is a folder with Hugging Face's safetensors."""
    return bool(
        at.entries & {names.index_name("model"), names.file_name("model", number=1, count=1)}
    )


def _is_deepspeed(at: Looked) -> bool:
    """The folder of a step; or one with `latest` and a step's folder. A copy without the latter, as on hubs, may still be a model's."""
    if any(DEEPSPEED_MODEL.fullmatch(name) for name in at.entries):
        return True
    if DEEPSPEED_LATEST[1] in at.entries and any(
        os.path.isdir(os.path.join(at.path, name, "zero")) for name in at.entries
    ):
        return True
    steps = "checkpoint" in at.entries or any(name.startswith("global_step") for name in at.entries)
    alone = (
        "zero_to_fp32.py" in at.entries
        and not has_safetensors(at)
        and not at.entries & {BIN, BIN_INDEX}
    )
    return (steps or alone) and not at.entries.isdisjoint(DEEPSPEED_LATEST)


def orbax_items(path: str, entries: Collection[str]) -> list[str]:
    """The folders in a step of Orbax that hold a tree of arrays."""
    return sorted(name for name in entries if os.path.isfile(os.path.join(path, name, ORBAX_TREE)))


def has_orbax(at: Looked) -> bool:
    """Whether it is an item, a step, or a root of steps."""
    if at.entries & {ORBAX_TREE, ORBAX_STEP} or orbax_items(
        at.path, [name for name in at.entries if "." not in name]
    ):
        return True
    steps = [name for name in at.entries if name[-1:].isdigit() or ORBAX_UNFINISHED in name]
    return any(
        os.path.isfile(os.path.join(at.path, name, ORBAX_STEP))
        or _has_items(os.path.join(at.path, name))
        for name in steps
    )


def _has_items(path: str) -> bool:
    return os.path.isdir(path) and bool(orbax_items(path, os.listdir(path)))


def _is_megatron(at: Looked) -> bool:
    """A root with its tracker, a step's folder of ranks, or of torch_dist."""
    ranks = any(name.startswith("mp_rank_") and not name.endswith(".pt") for name in at.entries)
    return MEGATRON_TRACKER in at.entries or ranks or {DCP_METADATA, "metadata.json"} <= at.entries


def _of_trainer(at: Looked) -> bool:
    return bool(at.entries & {TRAINER_STATE, "optimizer.pt"}) and not at.entries & _DEEPSPEED


def _of_accelerate(at: Looked) -> bool:
    return bool(at.entries & _ACCELERATE) or any(map(_RANK_FILE.fullmatch, at.entries))


# The first that knows a path has it: what is special stands before what is general.
FORMATS = (
    Format("deepspeed", "DeepSpeed", "deepspeed.source:open_deepspeed", _is_deepspeed),
    Format("megatron", "Megatron-LM", "megatron.source:open_megatron", _is_megatron),
    Format("orbax", "Orbax, MaxText's too", "orbax.source:open_orbax", has_orbax),
    Format(
        "paddle",
        "PaddleNLP",
        "paddle.source:open_paddle",
        lambda at: is_paddle(at.path, at.entries),
    ),
    Format("trainer", "Hugging Face Trainer", "huggingface.training:open_trainer", _of_trainer),
    Format(
        "nanotron",
        "nanotron",
        "nanotron.source:open_nanotron",
        lambda at: bool(at.entries & {NANOTRON_LATEST, NANOTRON_META}),
    ),
    Format("accelerate", "Accelerate", "huggingface.training:open_accelerate", _of_accelerate),
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
        "pytorch.lightning:open_sharded",
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


def _refused(one: Refused) -> Format:
    """As a format whose opener raises."""
    return Format(
        one.name,
        one.title,
        "detect.refused:refuse",
        lambda at: one.matches({os.path.split(at.path)[1]} if at.is_file else at.entries),
    )


_REFUSED = tuple(map(_refused, REFUSED))


def title_of(name: str) -> str:
    """For people; of a name that is none, itself."""
    return next((one.title for one in FORMATS if one.name == name), name)


def look(path: str) -> Looked:
    return Looked(
        path,
        os.path.isfile(path),
        frozenset(os.listdir(path)) if os.path.isdir(path) else frozenset(),
    )


def find_format(path: str, *, told: str | None) -> Format | None:
    """The format of a local path that somebody else wrote, `told` where it is; None for ours, for Hugging Face's safetensors, and for what
    is not known. FormatError where `told` is no format."""
    if told is not None:
        if told in ("unified", "huggingface"):
            return None
        found = next((one for one in FORMATS if one.name == told), None)
        if found is None:
            known = ["unified", "huggingface", *(one.name for one in FORMATS)]
            raise FormatError(listed(f"{told}: is no format that is read; known are", known))
        return found
    return format_at(look(path))


def format_at(at: Looked) -> Format | None:
    """The format of what was looked at; None as of `find_format`."""
    ours = {names.MANIFEST, names.DIGESTS, PROBE}
    if at.entries & ours or names.is_staging(
        os.path.split(os.path.abspath(at.path))[1]
    ):  # or what is left of one of ours
        return None
    return next((one for one in FORMATS if one.known(at)), None)


def find_refused(path: str) -> Format | None:
    """The format of a path that holds nothing that is read, and is known: opening it says why. None for ours and for safetensors."""
    at = look(path)
    readable = has_safetensors(at) or at.entries & {names.MANIFEST, names.DIGESTS, PROBE}
    return None if readable else next((one for one in _REFUSED if one.known(at)), None)

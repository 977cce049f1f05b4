"""Opens PEFT folders: adapter weights under PEFT's names, as the parts that our saves use."""

from __future__ import annotations

import os
import re

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.files.safetensors import open_tensor_file, whole_tensors
from unified_ckpt.foreign.huggingface.detect import ADAPTER_CONFIG
from unified_ckpt.foreign.pytorch.state_dict import parse_state_dict
from unified_ckpt.foreign.restricted_pickle.load import read_torch
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.views.sharded_source import ShardedSource
from unified_ckpt.views.shards import ShardedTensor

ADAPTER_PART = "adapter_model"  # the part's file then has the name that PEFT expects
_BASE_WEIGHTS = re.compile(r"(pytorch_)?model\b.*\.(safetensors|bin)$")  # beside an adapter
DEFAULT_ADAPTER = "default"  # PEFT saves it in the folder itself, others in subfolders
# Initializations of LoRA that take a part of the base, or its rounding, out of the base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def changes_base(init_lora_weights: object) -> bool:
    """Whether PEFT changes weights of the base when it creates an adapter with this setting."""
    return str(init_lora_weights).lower().startswith(_CHANGES_BASE)


def adapter_part(adapter: str) -> str:
    """Return the part of an adapter: `adapter_model` for the default one."""
    if adapter == DEFAULT_ADAPTER:
        return ADAPTER_PART
    return f"{ADAPTER_PART}_{re.sub('[^A-Za-z0-9]', '_', adapter)}"


def open_adapters(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a folder of `PeftModel.save_pretrained`; further adapters are in subfolders."""
    tensors = adapter_tensors(root)
    if not tensors:
        raise IncompleteError(
            f"{root}: {ADAPTER_CONFIG} without weights; "
            f"expected {ADAPTER_PART}.safetensors or {ADAPTER_PART}.bin"
        )
    configs = {
        part: read_json_object(os.path.join(folder, ADAPTER_CONFIG))
        for part, folder in adapter_folders(root).items()
    }
    metadata = SourceMetadata(
        extra={"adapters": configs}, left_out=sorted(filter(_BASE_WEIGHTS.match, list_folder(root)))
    )
    return ShardedSource(root, tensors, format="peft", metadata=metadata)


def adapter_tensors(root: str) -> dict[Key, ShardedTensor]:
    """Return the weights of every adapter in a folder; {} if it has no adapter.

    IncompleteError if an adapter's weights are missing.
    """
    tensors: dict[Key, ShardedTensor] = {}
    for part, folder in adapter_folders(root).items():
        safetensors_path, bin_path = (
            os.path.join(folder, f"{ADAPTER_PART}.{suffix}") for suffix in ("safetensors", "bin")
        )
        if is_file(safetensors_path):
            tensors |= whole_tensors([open_tensor_file(safetensors_path)], part=part)
        elif is_file(bin_path):
            tensors |= parse_state_dict(
                bin_path, read_torch(bin_path), part=part, without_aliases=True
            ).tensors
        else:
            raise IncompleteError(
                f"{folder}: {ADAPTER_CONFIG} without weights; "
                f"expected {ADAPTER_PART}.safetensors or {ADAPTER_PART}.bin"
            )
    return tensors


def adapter_folders(root: str) -> dict[str, str]:
    """Return {part: folder} for the adapters that have a configuration."""
    subfolders = sorted(
        name
        for name in list_folder(root)
        if os.path.lexists(os.path.join(root, name, ADAPTER_CONFIG))
    )
    folders = {ADAPTER_PART: root} if os.path.lexists(os.path.join(root, ADAPTER_CONFIG)) else {}
    for name in subfolders:
        part = adapter_part(name)
        if part in folders:
            raise FormatError(
                f"{root}: adapters {name} and {folders[part]} both map to the part {part}; "
                "rename one of them"
            )
        folders[part] = os.path.join(root, name)
    return folders

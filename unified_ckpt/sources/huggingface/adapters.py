"""Folders of PEFT: an adapter's weights in PEFT's own names, as parts of the names that a checkpoint of ours has for them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.options import SourceOptions
from unified_ckpt.sources.detect.names import ADAPTER_CONFIG
from unified_ckpt.sources.files.json import read_object
from unified_ckpt.sources.files.safetensors import open_tensors, whole_tensors
from unified_ckpt.sources.pytorch.state_dict import read_state
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import Assembled, Assembly

ADAPTER = "adapter_model"  # a part of this name is the file that PEFT looks for
DEFAULT = "default"  # PEFT's files of this adapter lie in the folder itself, those of others in a folder of their name


def adapter_part(adapter: str) -> str:
    """The part of an adapter: `adapter_model` of the default one."""
    return ADAPTER if adapter == DEFAULT else f"{ADAPTER}_{re.sub('[^A-Za-z0-9]', '_', adapter)}"


def open_adapters(root: str, _options: SourceOptions) -> Assembled:
    """A folder of `PeftModel.save_pretrained`: `adapter_config.json` and its weights, of other adapters in folders of their names."""
    tensors = adapter_tensors(root)
    if not tensors:
        raise IncompleteError(
            f"{root}: has no adapter's weights beside {ADAPTER_CONFIG}; needed {ADAPTER}.safetensors or {ADAPTER}.bin"
        )
    configs = {part: _config(folder) for part, folder in _folders(root).items()}
    return Assembled(root, tensors, format="peft", said=Said(extra={"adapters": configs}))


def adapter_tensors(root: str) -> dict[Key, Assembly]:
    """The weights of every adapter in a folder, none where it has no adapter. IncompleteError for an adapter without its weights."""
    found: dict[Key, Assembly] = {}
    for part, folder in _folders(root).items():
        safe, pickled = (
            os.path.join(folder, f"{ADAPTER}.{suffix}") for suffix in ("safetensors", "bin")
        )
        if os.path.isfile(safe):
            found |= whole_tensors([open_tensors(safe)], part=part)
        elif os.path.isfile(pickled):
            found |= read_state(pickled, load_torch(pickled), part=part, apart=True).tensors
        else:
            raise IncompleteError(
                f"{folder}: has {ADAPTER_CONFIG} and no weights; needed {ADAPTER}.safetensors or {ADAPTER}.bin"
            )
    return found


def _folders(root: str) -> dict[str, str]:
    """Part -> the folder of each adapter."""
    inner = sorted(
        name
        for name in os.listdir(root)
        if os.path.isfile(os.path.join(root, name, ADAPTER_CONFIG))
    )
    found = {ADAPTER: root} if os.path.isfile(os.path.join(root, ADAPTER_CONFIG)) else {}
    for name in inner:
        part = adapter_part(name)
        if part in found:
            raise FormatError(
                f"{root}: its adapters {name} and {found[part]} are both called {part}"
            )
        found[part] = os.path.join(root, name)
    return found


def _config(folder: str) -> Mapping[str, Any]:
    return read_object(os.path.join(folder, ADAPTER_CONFIG))

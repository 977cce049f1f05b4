"""What goes along with a checkpoint that is written anew: config, tokenizer, and what else lies
beside the weights and is not weights.

What could be lost: a file that is neither read nor copied. Each such entry of the source folder is
listed, for the report.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.backup import engine_files
from unified_ckpt.engine.folder.commit import committed_at
from unified_ckpt.errors import FormatError
from unified_ckpt.format import index, names
from unified_ckpt.runtime.storage.regular_files import check_regular_files, open_binary
from unified_ckpt.sources.detect.names import ADAPTER_CONFIG, BIN_INDEX, TRAINER_STATE
from unified_ckpt.sources.files.json import CONFIG, config_path, read_json

# Of any folder.
_HF_FILES = (
    *(
        CONFIG,
        "generation_config.json",
        ADAPTER_CONFIG,
        "preprocessor_config.json",
        "processor_config.json",
    ),
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "*.model",
        "chat_template*",
    ),
    *(TRAINER_STATE, "README.md", "LICENSE*"),
)
# Of Hugging Face's own folders: quantize_config.json, modules.json, a model's own code.
_HF_MODEL_FILES = ("*.json", "*.py", "*.jinja", "*.tiktoken", "additional_chat_templates")
_TRAINING_ONLY = (TRAINER_STATE,)
_MODULES = (
    "modules.json"  # of sentence-transformers: folders of further modules, which may have weights
)
_TRAINING_FILES = (
    *(
        "model*.safetensors",
        "model*.safetensors.index.json",
        "pytorch_model*",
        "adapter_model*",
        "optimizer*",
        "scheduler*",
        "scaler*",
    ),
    *("dl_state_dict*", "rng_state*.pth", "random_states_*.pkl", TRAINER_STATE),
)
# By format, the entries that its reader takes; of formats that are not here, all.
_READ_BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "huggingface-bin": ("pytorch_model*.bin", BIN_INDEX),
    "huggingface-shards": ("shard-*.safetensors",),
    "peft": ("adapter_model*",),
    "trainer": _TRAINING_FILES,
    "accelerate": _TRAINING_FILES,
    "deepspeed": (
        "latest*",
        "global_step*",
        "checkpoint",
        "zero",
        "*_states.pt",
        "zero_to_fp32.py",
        "model*.safetensors*",
    ),
    "dcp": (".metadata", "*.distcp"),
    "lightning-sharded": (".metadata", "*.distcp", "meta.pt"),
    "nanotron": (
        "latest.txt",
        "[0-9]*",
        "model",
        "optimizer",
        "lr_scheduler",
        "checkpoint_metadata.json",
    ),
    "paddle": (
        "*.safetensors",
        "*.index.json",
        "scheduler.pdparams",
        "scaler.pdparams",
        TRAINER_STATE,
    ),
    "paddle-legacy": (
        "model_state*",
        "optimizer*",
        "scheduler.pdparams",
        "scaler.pdparams",
        "model_meta.json",
        TRAINER_STATE,
    ),
}
_MODEL_FOLDERS = (
    "huggingface",
    "huggingface-bin",
    "huggingface-shards",
    "peft",
    "trainer",
    "accelerate",
)
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Entries of a source folder beside its weights and state: those that are copied, and those
    that are neither read nor copied.
    """

    copied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def side_files(source: str, source_format: str, *, weights_only: bool) -> SideFiles:
    """`weights_only`: nothing of a training is copied. Of a unified folder all that is not the
    engine's is copied.
    """
    if not os.path.isdir(source):
        return SideFiles()
    entries = sorted(os.listdir(source))
    manifest = committed_at(source)
    if manifest is not None:
        own_files = engine_files(manifest)
        return SideFiles(
            tuple(
                name
                for name in entries
                if name not in own_files and not (weights_only and name in _TRAINING_ONLY)
            )
        )
    copied_patterns = (*_HF_FILES, *(_HF_MODEL_FILES if source_format in _MODEL_FOLDERS else ()))
    module_folders = _module_folders(source)
    read_patterns = (
        _weight_files(source)
        if source_format == "huggingface"
        else _READ_BY_FORMAT.get(source_format, ("*",))
    )
    copied, left_out = [], []
    for name in entries:
        is_folder = os.path.isdir(os.path.join(source, name))
        if name in module_folders or (
            _matches(name, copied_patterns)
            and not name.endswith(".index.json")
            and is_folder == (name in _HF_MODEL_FILES)
        ):
            copied += [name] if not (weights_only and name in _TRAINING_ONLY) else []
        elif os.path.isfile(os.path.join(source, name, ADAPTER_CONFIG)) and source_format in (
            "peft",
            "trainer",
            "accelerate",
        ):
            continue  # an adapter, whose weights are a part
        elif not _matches(name, read_patterns) and (
            not name.startswith(".") or name in read_patterns
        ):
            left_out.append(f"{name}/" if is_folder else name)
    return SideFiles(tuple(copied), tuple(left_out))


def check_modules(source: str, target_format: str) -> None:
    """Refuses modules with weights of their own for a format that has no place for them.
    FormatError.
    """
    modules = _module_folders(source)
    if modules:
        raise FormatError(
            f"{source}: {_MODULES} names modules in folders of their own ({', '.join(modules)}), which {target_format} has no place for; "
            "convert to unified or huggingface, or remove that file to convert the first module alone"
        )


def copy_side_files(
    folder: str, *, source: str, copied: Sequence[str], config: str | None, dtype: str | None
) -> None:
    """Copies to `folder`. `config`: where a Hugging Face config is, if not in the source. `dtype`:
    of the weights, for config.json.
    """
    for name in copied:
        path = os.path.join(source, name)
        if os.path.isdir(path):
            check_regular_files(path)
            shutil.copytree(path, os.path.join(folder, name))
        else:
            with (
                open_binary(path) as source_file,
                open(os.path.join(folder, name), "wb") as target_file,
            ):
                shutil.copyfileobj(source_file, target_file)
    target_path = os.path.join(folder, CONFIG)
    if config is not None and not os.path.exists(target_path):
        shutil.copyfile(config_path(config), target_path)
    if dtype is not None and os.path.isfile(target_path):
        declare_dtype(target_path, dtype)


def main_dtype(specs: Mapping[str, TensorSpec]) -> str | None:
    """torch's name of the floating-point dtype that most elements of a model have; None where it
    has none.
    """
    numel = Counter[str]()
    for spec in specs.values():
        if spec.dtype in _DTYPES:
            numel[_DTYPES[spec.dtype]] += prod(spec.shape)
    return max(numel, key=lambda name: (numel[name], name)) if numel else None


def declare_dtype(path: str, dtype: str) -> None:
    """Corrects the dtype that a transformers config.json says, and its nested configurations:
    `from_pretrained` makes the model in it.

    A quantized model's is left: its dtype is that of its computation.
    """
    config = read_json(path)
    if not isinstance(config, dict) or "quantization_config" in config:
        return
    original = json.dumps(config)
    _set_dtype(config, dtype)
    if json.dumps(config) != original:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str | None):
            config[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            _set_dtype(value, dtype)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _weight_files(source: str) -> tuple[str, ...]:
    """The files that hold a Hugging Face model's safetensors, and their index."""
    index_path = os.path.join(source, names.index_name("model"))
    if not os.path.isfile(index_path):
        return (names.file_name("model", number=1, count=1),)
    with open_binary(index_path) as file:
        files = set(index.parse_index(file.read(), file=index_path).weight_map.values())
    return (names.index_name("model"), names.file_name("model", number=1, count=1), *sorted(files))


def _module_folders(source: str) -> list[str]:
    """Folders of the modules that sentence-transformers' modules.json names, but for the model's
    own.
    """
    path = os.path.join(source, _MODULES)
    modules = read_json(path) if os.path.isfile(path) else []
    paths = (
        [module.get("path") for module in modules if isinstance(module, dict)]
        if isinstance(modules, list)
        else []
    )
    top_folders = {path.strip("/").partition("/")[0] for path in paths if isinstance(path, str)}
    return sorted(
        name
        for name in top_folders
        if name not in ("", ".", "..") and os.path.isdir(os.path.join(source, name))
    )

"""Files beside the weights that go along with a conversion: config, tokenizer, and the like.

What could be lost: a file that is neither read nor copied. The report lists each such entry of the
source folder.
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
from unified_ckpt.engine.folder.copy import ExtraFiles
from unified_ckpt.engine.folder.verified_file import read_whole
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.files.json import CONFIG, config_path, read_json, write_json
from unified_ckpt.foreign.huggingface.detect import ADAPTER_CONFIG, BIN_INDEX, TRAINER_STATE
from unified_ckpt.foreign.megatron.detect import MEGATRON_TRACKER
from unified_ckpt.foreign.nanotron.detect import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.foreign.paddle.detect import PICKLED_TRAINER_STATE
from unified_ckpt.foreign.paddle.flex.detect import PART_FOLDERS
from unified_ckpt.format import index, names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.regular_files import (
    check_regular_files,
    exists,
    is_file,
    is_folder,
    list_folder,
    open_binary,
    probe,
)
from unified_ckpt.runtime.storage.roots import open_reader

# Copied from any folder.
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
# Copied from Hugging Face folders: quantize_config.json, modules.json, model code.
_HF_MODEL_FILES = ("*.json", "*.py", "*.jinja", "*.tiktoken", "additional_chat_templates")
_ARGUMENTS = "training_args.bin"  # of the Trainer: a pickle
_TRAINING_ONLY = (TRAINER_STATE, _ARGUMENTS)
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
_PADDLE_SMALL_FILES = (
    *("scheduler.pdparams", "scaler.pdparams"),
    *(TRAINER_STATE, PICKLED_TRAINER_STATE),
)
# Entries that the reader of a format consumes; all entries for formats not listed.
_READ_BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "huggingface-bin": ("pytorch_model*.bin", BIN_INDEX),
    "huggingface-shards": ("shard-*.safetensors",),
    "peft": ("adapter_model*",),
    "trainer": _TRAINING_FILES,
    "accelerate": _TRAINING_FILES,
    "deepspeed": (
        "latest*",
        "global_step*",
        *("checkpoint", "pytorch_model"),  # of Lightning and Accelerate
        "zero",
        "*_states.pt",
        "zero_to_fp32.py",
        "model*.safetensors*",
    ),
    "dcp": (".metadata", "*.distcp"),
    "lightning-sharded": (".metadata", "*.distcp", "meta.pt"),
    "nanotron": (NANOTRON_LATEST, "[0-9]*", "model", "optimizer", "lr_scheduler", NANOTRON_META),
    "megatron": (MEGATRON_TRACKER, "iter_*", "release", "mp_rank_*"),
    "megatron-core": (
        *(MEGATRON_TRACKER, "iter_*", "release"),
        *(DCP_METADATA, "*.distcp", "common.pt", "metadata.json"),
    ),
    "paddle": ("*.safetensors", "*.index.json", *_PADDLE_SMALL_FILES),
    "paddle-flex": (
        *PART_FOLDERS,
        *("[0-9]*.metadata", "[0-9]*.distcp", "[0-9]*.safetensors"),
        *("saved_signal_*", "model_meta.json", *_PADDLE_SMALL_FILES),
    ),
    "paddle-legacy": ("model_state*", "optimizer*", "model_meta.json", *_PADDLE_SMALL_FILES),
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
    """Entries of a source folder beside its weights: to copy, or neither read nor copied."""

    copied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def side_files(
    source: str, source_format: str, manifest: Manifest | None, *, weights_only: bool
) -> SideFiles:
    """Return the side files of a source folder. `manifest`: that of a unified one.

    With `weights_only`, nothing of the training is copied. Of a unified folder, everything is
    copied that is not the engine's own.
    """
    if not is_folder(source):
        return SideFiles()
    entries = sorted(list_folder(source))
    if manifest is not None:
        listed_files = engine_files(manifest)
        names = [name for name in entries if name not in listed_files]
        if not weights_only:
            return SideFiles(tuple(names))
        return SideFiles(
            tuple(name for name in names if name not in _TRAINING_ONLY),
            tuple(name for name in names if name == _ARGUMENTS),
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
        is_subfolder = is_folder(os.path.join(source, name))
        if name in module_folders or (
            _matches(name, copied_patterns)
            and not name.endswith(".index.json")
            and is_subfolder == (name in _HF_MODEL_FILES)
        ):
            copied += [name] if not (weights_only and name in _TRAINING_ONLY) else []
        elif probe(is_file, os.path.join(source, name, ADAPTER_CONFIG)) and source_format in (
            "peft",
            "trainer",
            "accelerate",
        ):
            continue  # an adapter: its weights are a part
        elif not _matches(name, read_patterns) and (
            not name.startswith(".") or name in read_patterns
        ):
            left_out.append(f"{name}/" if is_subfolder else name)
    return SideFiles(tuple(copied), tuple(left_out))


def copy_names(path: str, manifest: Manifest | None, folder: str, *, whole: bool) -> None:
    """Copy the names of a folder in a bucket to an empty local one, and JSON files directly in it.

    `whole`: copy all files that a conversion may copy. Other files are empty.
    """
    storage = open_reader(path)
    listed = ExtraFiles(storage, engine_files(manifest) if manifest is not None else ())
    for subfolder in listed.folders:
        os.makedirs(os.path.join(folder, subfolder))

    def download(file: str) -> None:
        with open(os.path.join(folder, file), "wb") as target_file:
            target_file.writelines(
                body for _, body in read_whole(storage, file, listed.files[file])
            )

    top_files = [file for file in listed.files if "/" not in file]
    needed = [
        file
        for file in top_files
        if file.endswith(".json") or (whole and _matches(file, (*_HF_FILES, *_HF_MODEL_FILES)))
    ]
    for file in needed:
        download(file)
    copied_folders = {*_module_folders(folder), *_HF_MODEL_FILES}
    for file in listed.files.keys() - set(needed):
        if whole and (manifest is not None or file.partition("/")[0] in copied_folders):
            download(file)
        else:
            open(os.path.join(folder, file), "wb").close()


def check_modules(source: str, target_format: str) -> None:
    """FormatError if the source has further modules, for which the target format has no place."""
    modules = _module_folders(source)
    if modules:
        raise FormatError(
            f"{source}: {_MODULES} lists modules in other folders ({', '.join(modules)}), which "
            f"{target_format} cannot hold; "
            "convert to unified or huggingface, or remove that file to convert only the first "
            "module"
        )


def copy_side_files(
    folder: str, *, source: str, copied: Sequence[str], config: str | None, dtype: str | None
) -> None:
    """Copy the files to `folder`.

    `config` is the path of a Hugging Face config, if the source has none. `dtype` is the dtype of
    the weights, to record in config.json.
    """
    for name in copied:
        path = os.path.join(source, name)
        if is_folder(path):
            check_regular_files(path)
            shutil.copytree(path, os.path.join(folder, name))
        else:
            with (
                open_binary(path) as source_file,
                open(os.path.join(folder, name), "wb") as target_file,
            ):
                shutil.copyfileobj(source_file, target_file)
    target_path = os.path.join(folder, CONFIG)
    if config is not None and not exists(target_path):
        shutil.copyfile(config_path(config), target_path)
    if dtype is not None and is_file(target_path):
        declare_dtype(target_path, dtype)


def main_dtype(specs: Mapping[str, TensorSpec]) -> str | None:
    """Return torch's name of the dtype of most floating-point elements; None without any."""
    numel = Counter[str]()
    for spec in specs.values():
        if spec.dtype in _DTYPES:
            numel[_DTYPES[spec.dtype]] += prod(spec.shape)
    return max(numel, key=lambda name: (numel[name], name)) if numel else None


def declare_dtype(path: str, dtype: str) -> None:
    """Correct the dtype in a transformers config.json and its nested configs.

    `from_pretrained` creates the model in this dtype. A quantized model's is left unchanged: its
    dtype is that of the computation.
    """
    config = read_json(path)
    if not isinstance(config, dict) or "quantization_config" in config:
        return
    original = json.dumps(config)
    _set_dtype(config, dtype)
    if json.dumps(config) != original:
        write_json(path, config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str | None):
            config[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            _set_dtype(value, dtype)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _weight_files(source: str) -> tuple[str, ...]:
    """The files of a Hugging Face model's weights, and their index."""
    index_path = os.path.join(source, names.index_name("model"))
    if not is_file(index_path):
        return (names.file_name("model", number=1, count=1),)
    with open_binary(index_path) as file:
        files = set(index.parse_index(file.read(), file=index_path).values())
    return (names.index_name("model"), names.file_name("model", number=1, count=1), *sorted(files))


def _module_folders(source: str) -> list[str]:
    """Folders that sentence-transformers' modules.json names, except the model's own."""
    path = os.path.join(source, _MODULES)
    modules = read_json(path) if is_file(path) else []
    paths = (
        [module.get("path") for module in modules if isinstance(module, dict)]
        if isinstance(modules, list)
        else []
    )
    top_folders = {path.strip("/").partition("/")[0] for path in paths if isinstance(path, str)}
    return sorted(
        name
        for name in top_folders
        if name not in ("", ".", "..") and is_folder(os.path.join(source, name))
    )
